"""A byte-level GPT on the text every Python brings along: the sources of its standard library.

``python examples/gpt.py fit --config examples/gpt.yaml``
"""

import hashlib
import math
import random
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_partrain  # noqa: F401  # registers the strategy names

VOCABULARY = 256  # one token per byte value

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (batch, time) int64


class Attention(nn.Module):
    """Causal multi-head self-attention, (batch, time, width) to (batch, time, width)."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """(batch, time, heads * head_dim) to (batch, heads, time, head_dim), for as many heads as ``x`` holds."""
        b, t, _ = x.shape
        return x.view(b, t, -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Position-wise feed-forward network with a hidden layer of ``4 * width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gelu(self.up_proj(x)))


class Block(nn.Module):
    """Pre-norm transformer block, (batch, time, width) to (batch, time, width)."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Decoder-only transformer over bytes: tokens (batch, time) int64 to next-byte logits (batch, time, 256)."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}")
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2 initialisation: N(0, 0.02), the projections that write to the residual stream by 1/sqrt(2 layers)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(self.blocks)) if residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTModule(LightningModule):
    """Next-byte prediction with AdamW, linear warm-up and cosine decay.

    Args:
        layers: transformer blocks.
        width: size of the residual stream.
        heads: attention heads per block, a divisor of ``width``.
        context: longest sequence in bytes.
        dropout: probability of dropping an activation.
        learning_rate: peak, reached after the warm-up.
        weight_decay: of matrices and tables; biases and norms are not decayed.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: optimizer step at which the cosine ends, at a tenth of the peak.
        betas: AdamW's averaging coefficients.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 64,
        dropout: float = 0.0,
        learning_rate: float = 6e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        decay_steps: int = 800,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.betas = betas
        self.model = GPT(layers, width, heads, context, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log_loss("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log_loss("test", batch)

    def log_loss(self, split: str, batch: Batch) -> None:
        loss = self.loss(batch)
        self.log(f"{split}_loss", loss, prog_bar=True)
        self.log(f"{split}_bits_per_byte", loss / math.log(2), prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The likeliest next byte after each position, (batch, time) int64."""
        inputs, _ = batch
        return self(inputs).argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
            betas=self.betas,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        """Fraction of the peak learning rate at an optimizer step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


class Windows(Dataset[Batch]):
    """Windows of ``context + 1`` bytes of a text, as ``context`` inputs and the targets one byte further on.

    Args:
        text: (bytes,) uint8.
        context: inputs per window.
        count: windows in the set.
        seed: item ``i`` starts at an offset drawn from ``(seed, i)``; with None, items tile the text evenly.
    """

    def __init__(self, text: Tensor, context: int, count: int, seed: int | None = None) -> None:
        self.text = text
        self.context = context
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        start = self.offset(index)
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]

    def offset(self, index: int) -> int:
        last = len(self.text) - self.context - 1
        if self.seed is None:
            return index * last // max(1, self.count - 1)
        return random.Random(self.seed << 32 | index).randrange(last + 1)


class StdlibText(LightningDataModule):
    """The ``.py`` files of the running Python's standard library, split by file.

    Tests and generated tables are left out. A hash of its path sends a file to training or, one in twenty, to validation, and orders the files, so every
    process reads the same windows. Validation samples the held-out text; testing covers all of it.

    Args:
        context: bytes per window.
        batch_size: windows per batch.
        max_bytes: cap on the training text; the held-out text is cut at a twentieth of it.
        train_windows_per_epoch: windows at random offsets in an epoch.
        val_windows: windows of a validation, evenly spread over the held-out text.
        num_workers: loader processes.
        seed: of the training windows' offsets.
    """

    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    held_out = 0.05

    def __init__(
        self,
        context: int = 64,
        batch_size: int = 16,
        max_bytes: int = 16_000_000,
        train_windows_per_epoch: int = 100_000,
        val_windows: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.train_windows_per_epoch = train_windows_per_epoch
        self.val_windows = val_windows
        self.num_workers = num_workers
        self.seed = seed
        self.train_text = self.val_text = torch.empty(0, dtype=torch.uint8)

    def setup(self, stage: str | None = None) -> None:
        """Reads ``train_text`` and ``val_text``, (bytes,) uint8 each."""
        if len(self.train_text):
            return
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path.relative_to(root) for path in root.rglob("*.py")]
        ranked = sorted((path_hash(path), path) for path in paths if self.skipped.isdisjoint(path.parts))
        val_paths = [path for rank, path in ranked if rank < self.held_out]
        train_paths = [path for rank, path in ranked if rank >= self.held_out]
        self.train_text = read_bytes(root, train_paths, self.max_bytes)
        self.val_text = read_bytes(root, val_paths, int(self.max_bytes * self.held_out))

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.loader(Windows(self.train_text, self.context, self.train_windows_per_epoch, self.seed))

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.loader(Windows(self.val_text, self.context, self.val_windows))

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.loader(Windows(self.val_text, self.context, len(self.val_text) // self.context))

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()

    def loader(self, windows: Windows) -> DataLoader[Batch]:
        """Batches in order: offsets are random already where they should be."""
        return DataLoader(windows, self.batch_size, num_workers=self.num_workers)


def path_hash(path: Path) -> float:
    """Uniform in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:8], "big") / 2**64


def read_bytes(root: Path, paths: list[Path], limit: int) -> Tensor:
    """The first ``limit`` bytes of the files under ``root``, joined, (bytes,) uint8."""
    text = bytearray()
    for path in paths:
        if len(text) >= limit:
            break
        text += (root / path).read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


if __name__ == "__main__":
    LightningCLI(GPTModule, StdlibText)
