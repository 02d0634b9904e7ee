"""Small modules of many kinds, written as a Lightning user writes them, with a fixed data set each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt import GPT

BATCH, BATCHES = 16, 7  # a global batch, and an odd number of them: windows of 3 end with a partial one


class Base(pl.LightningModule):
    """Loss, logging and a choice of optimizer around ``self.model`` or ``self.logits``."""

    optimizer = "adamw"

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        matrices = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.SGD(
            [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.05, momentum=0.9
        )


class ByteGPT(Base):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(layers=3, width=16, heads=2, context=12)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class HuggingFace(Base):
    """A causal language model of the transformers library from a random configuration."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        if kind == "llama":
            config = transformers.LlamaConfig(
                vocab_size=96,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=16,
            )
        else:
            config = transformers.GPT2Config(
                vocab_size=96,
                n_positions=16,
                n_embd=16,
                n_layer=3,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0] % 96
        return self.model(input_ids=tokens, labels=tokens).loss


class EncoderClassifier(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.unflatten(1, (2, 6)))).mean(1))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class BatchNormMLP(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 5),
        )

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class OddSizes(Base):
    """Rows that do not divide by the ranks, fewer rows than ranks, no rows at all, and no dimensions at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 13), nn.Linear(13, 7), nn.Linear(7, 3)])
        self.head = nn.Linear(3, 5)
        self.gate = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        return F.cross_entropy(logits * self.scale * torch.sigmoid(self.gate(logits)) + self.empty.sum(), batch[1])


class FrozenAndUnused(Base):
    """A frozen layer, one that is never used, and one that only some samples use, so that some ranks have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, 8).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.sometimes = nn.Linear(8, 8)
        self.never_here = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(8, 5)

    def loss(self, batch: Any) -> Tensor:
        x = torch.relu(self.frozen(batch[0]))
        chosen = batch[0][:, 0] > 1.0
        if chosen.any():
            x = torch.where(chosen[:, None], self.sometimes(x), x)
        return F.cross_entropy(self.head(x), batch[1])


class TiedWeights(Base):
    """An embedding that is also the head, by function; and a block list whose blocks share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0] % 64
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A module and the kind of data it takes.

    ``float32_inside`` marks models that compute in float32 whatever they get, ``random`` those whose numbers depend on how the
    batch is cut into micro-batches, ``loader`` makes batches of another form.
    """

    build: Callable[[], Base]
    tokens: bool = False
    float32_inside: bool = False
    synchronize_batch_norm: bool = False
    random: bool = False
    loader: Callable[[tuple[Tensor, ...], int], Any] | None = None

    def data(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        if self.tokens:
            return (torch.randint(0, 256, (BATCH * BATCHES, 13), generator=generator),)
        x = torch.randn(BATCH * BATCHES, 12, generator=generator, dtype=torch.float64)
        return x.to(dtype), torch.randint(0, 5, (BATCH * BATCHES,), generator=generator)


CASES: dict[str, Case] = {
    "gpt": Case(ByteGPT, tokens=True),
    "llama": Case(lambda: HuggingFace("llama"), tokens=True, float32_inside=True),
    "gpt2": Case(lambda: HuggingFace("gpt2"), tokens=True, float32_inside=True),
    "encoder": Case(EncoderClassifier),
    "batch_norm": Case(BatchNormMLP, synchronize_batch_norm=True),
    "odd": Case(OddSizes),
    "frozen": Case(FrozenAndUnused),
    "tied": Case(TiedWeights, tokens=True),
}
