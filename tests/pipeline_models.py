"""Modules that are hard to cut into stages, written as a Lightning user writes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.models import Base, Case


class Transformers(Base):
    """A model of the transformers library from a small random configuration, and how its loss is computed."""

    def __init__(self, build: Callable[[Any], nn.Module], loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        import transformers

        self.model = build(transformers)
        self._loss = loss

    def loss(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def causal(model: nn.Module, batch: Any) -> Tensor:
    tokens = batch[0] % 96
    return model(input_ids=tokens, labels=tokens).loss


def masked(model: nn.Module, batch: Any) -> Tensor:
    """Three masked tokens a sample, so that micro-batches weigh alike."""
    tokens = batch[0] % 96
    labels = torch.full_like(tokens, -100)
    labels[:, 2:5] = tokens[:, 2:5]
    mask = torch.ones_like(tokens)
    mask[:, -2:] = 0
    return model(input_ids=tokens, attention_mask=mask, labels=labels).loss


def image(batch: Any, channels: int, size: int) -> Tensor:
    """An image from the twelve numbers of a sample."""
    x = batch[0]
    return x.repeat(1, -(-channels * size * size // 12))[:, : channels * size * size].view(-1, channels, size, size)


def classified(model: nn.Module, batch: Any, channels: int = 3, size: int = 16) -> Tensor:
    return model(pixel_values=image(batch, channels, size), labels=batch[1]).loss


def sequence(model: nn.Module, batch: Any) -> Tensor:
    tokens = batch[0] % 96
    return model(input_ids=tokens[:, :8], labels=tokens[:, 5:].contiguous()).loss


def spoken(model: nn.Module, batch: Any) -> Tensor:
    tokens = batch[0] % 96
    sound = torch.sin(tokens[:, :8, None].to(model.dtype) * torch.arange(1, 21, device=tokens.device)).transpose(1, 2)
    return model(input_features=sound.repeat(1, 1, 2), labels=tokens[:, :6].contiguous()).loss


SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "intermediate_size": 24}


def lm(config: str, model: str = "AutoModelForCausalLM", **options: Any) -> Callable[[Any], nn.Module]:
    def build(t: Any) -> nn.Module:
        return getattr(t, model).from_config(getattr(t, config)(**options))

    return build


HUGGING_FACE: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any, Any], Tensor], bool]] = {
    "llama4": (lm("LlamaConfig", **SMALL, **HEADS, max_position_embeddings=16), causal, True),
    "gpt2x4": (
        lm("GPT2Config", vocab_size=96, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        causal,
        True,
    ),
    "bert": (
        lm("BertConfig", "AutoModelForMaskedLM", **SMALL, **HEADS, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        masked,
        True,
    ),
    "vit": (
        lm("ViTConfig", "AutoModelForImageClassification", hidden_size=16, num_hidden_layers=4, **HEADS, image_size=16, patch_size=8, num_labels=5),
        classified,
        True,
    ),
    "opt": (
        lm("OPTConfig", vocab_size=96, hidden_size=16, num_hidden_layers=4, ffn_dim=24, num_attention_heads=2, max_position_embeddings=16, word_embed_proj_dim=12, dropout=0.0),
        causal,
        True,
    ),
    "gemma2": (
        lm("Gemma2Config", **SMALL, **HEADS, num_key_value_heads=1, head_dim=8, max_position_embeddings=16, sliding_window=4, attn_implementation="eager"),
        causal,
        True,
    ),
    "mamba": (lm("MambaConfig", **SMALL, state_size=4, use_mambapy=False), causal, True),
    "mixtral": (
        lm("MixtralConfig", **SMALL, **HEADS, num_key_value_heads=1, num_local_experts=3, max_position_embeddings=16, experts_implementation="eager"),
        causal,
        True,
    ),
    "t5": (
        lm("T5Config", "AutoModelForSeq2SeqLM", vocab_size=96, d_model=16, d_kv=8, d_ff=24, num_layers=4, num_decoder_layers=4, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0),
        sequence,
        True,
    ),
    "whisper": (
        lm(
            "WhisperConfig", "AutoModelForSpeechSeq2Seq", vocab_size=96, d_model=16, encoder_layers=4, decoder_layers=4, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=20, max_source_positions=8, max_target_positions=16,
            dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        ),
        spoken,
        True,
    ),
    "convnext": (
        lm("ConvNextConfig", "AutoModelForImageClassification", hidden_sizes=[4, 6, 8, 8], depths=[1, 2, 2, 1], patch_size=2, num_labels=5, image_size=32),
        lambda model, batch: classified(model, batch, 3, 32),
        True,
    ),
}  # fmt: skip


def heard(model: nn.Module, batch: Any) -> Tensor:
    """Five labels a sample; the sum over samples that the model gives, as a mean."""
    sound = image(batch, 1, 20).flatten(1)
    labels = (batch[1][:, None] + torch.arange(3, device=sound.device)) % 7 + 1
    return model(input_values=sound, labels=labels).loss / len(sound)


def contrasted(model: nn.Module, batch: Any) -> Tensor:
    tokens = (batch[1][:, None] + torch.arange(6, device=batch[1].device)) % 96
    return model(input_ids=tokens, pixel_values=image(batch, 3, 16), return_loss=True).loss


#: Tried at the end, without looking at their code before.
TRIED_LATER: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any, Any], Tensor], bool]] = {
    "bart": (
        lm("BartConfig", "AutoModelForSeq2SeqLM", vocab_size=96, d_model=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0),
        sequence,
        True,
    ),
    "falcon": (lm("FalconConfig", **SMALL, num_attention_heads=2, new_decoder_architecture=True, num_kv_heads=1, alibi=False), causal, True),
    "swin": (
        lm("SwinConfig", "AutoModelForImageClassification", image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5, drop_path_rate=0.0),
        classified,
        True,
    ),
    "wav2vec2": (
        lm("Wav2Vec2Config", "AutoModelForCTC", vocab_size=12, hidden_size=16, num_hidden_layers=4, **HEADS, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
            final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False, pad_token_id=0),
        heard,
        True,
    ),
    "clip": (
        lambda t: t.CLIPModel(t.CLIPConfig(
            text_config={"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 3, **HEADS, "max_position_embeddings": 16, "eos_token_id": 95, "projection_dim": 8},
            vision_config={"hidden_size": 16, "num_hidden_layers": 3, **HEADS, "image_size": 16, "patch_size": 8, "projection_dim": 8},
            projection_dim=8,
        )),
        contrasted,
        True,
    ),
}  # fmt: skip


class ConvolutionNet(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(32, 5),
        )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(image(batch, 3, 8)), batch[1])


class UNet(Base):
    """Skips from each level down to the same level up, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 6), (6, 8)))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((16, 6), (12, 4), (8, 3)))

    def loss(self, batch: Any) -> Tensor:
        x = target = image(batch, 3, 8)
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1))
        return F.mse_loss(x, target.roll(1, 0) * 0 + target.flip(-1))


class DenseNet(Base):
    """Every layer reads the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12 + 4 * i, 4) for i in range(5))
        self.head = nn.Linear(12 + 20, 5)

    def loss(self, batch: Any) -> Tensor:
        features = [batch[0]]
        for layer in self.layers:
            features.append(torch.tanh(layer(torch.cat(features, 1))))
        return F.cross_entropy(self.head(torch.cat(features, 1)), batch[1])


class Denoiser(Base):
    """Draws noise and time steps in its step, and mixes samples with numpy's and Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 16), nn.SiLU(), nn.Linear(16, 12)) for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        x = x + 0.1 * numpy.random.beta(0.4, 0.4) * x[torch.randperm(len(x))] + 0.01 * random.random()
        t = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        h = x + noise * (t / 10).to(x)[:, None] + self.time(t)
        for block in self.blocks:
            h = h + block(h)
        return F.mse_loss(h, noise) + 0.01 * torch.rand((), dtype=x.dtype) * h.square().mean()


class ClassToken(Base):
    """Bare parameters: a class token and positions on the way, and a scale that every block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(8, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0].unflatten(1, (4, 3)))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = x + self.scale * block(x)
        return F.cross_entropy(self.head(x[:, 0]), batch[1]) + 1e-3 * self.positions.square().sum()


class InPlace(Base):
    """In-place operations on what modules return, between and inside of them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 12))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).mul_(1.1)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))
        self.head = nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.stem(batch[0])
        first = x.clone()
        for index, block in enumerate(self.blocks):
            y = block(x)
            y += x
            if index == 2:
                y.mul_(0.5).add_(first)
            x = y
        return F.cross_entropy(self.head(x), batch[1])


class TwoOutputs(Base):
    """Blocks that return dictionaries, an auxiliary loss from an early one, and a step that returns a dictionary."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 12)
            self.gate = nn.Linear(12, 1)

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
            return {"x": x + torch.tanh(self.layer(x)) * scale, "gate": self.gate(x), "name": "block", "nothing": None}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.heads = nn.ModuleDict({"a": nn.Linear(12, 5), "b": nn.Linear(12, 1)})

    def both(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, gates = batch[0], []
        for block in self.blocks:
            out = block(x, scale=0.5)
            assert out["name"] == "block" and out["nothing"] is None
            x = out["x"]
            gates.append(out["gate"])
        auxiliary = torch.cat(gates, 1).square().mean()
        return F.cross_entropy(self.heads["a"](x), batch[1]), auxiliary + self.heads["b"](x).square().mean()

    def loss(self, batch: Any) -> Tensor:
        return sum(self.both(batch))  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        main, auxiliary = self.both(batch)
        self.log_dict({"main": main, "auxiliary": auxiliary}, on_step=True, on_epoch=True)
        return {"loss": main + auxiliary, "count": torch.tensor(len(batch[0])), "note": "fine"}


class FrozenOutside(Base):
    """A frozen teacher whose output is detached, a frozen first block, and a frozen weight used outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(12, 5).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.basis = nn.Linear(12, 5, bias=False).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0]).softmax(-1)
        x = batch[0]
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        best = x.argmax(-1)
        return F.cross_entropy(F.linear(x, self.basis.weight), wanted) + 0.1 * x[torch.arange(len(x)), best].mean()


class Dropout(Base):
    """Dropout between, before and inside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.2)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(8, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.encoder(self.drop(self.embed(batch[0].unflatten(1, (2, 6)))))
        return F.cross_entropy(self.head(F.dropout(x.mean(1), 0.3, self.training)), batch[1])


class Checkpointed(Dropout):
    """Computes its layers again in the backward pass, with the same dropout."""

    again = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.encoder.layers

    def loss(self, batch: Any) -> Tensor:
        x = self.drop(self.embed(batch[0].unflatten(1, (2, 6))))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return F.cross_entropy(self.head(x.mean(1)), batch[1])


class Records(Dataset):
    """Samples as dictionaries with a mask, a string and a None."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "y": self.y[index], "name": f"sample {index}", "mask": self.x[index] > -1.0}


def collate_records(samples: list[Any]) -> dict[str, Any]:
    return {
        "inputs": {"x": torch.stack([s["x"] for s in samples]), "mask": torch.stack([s["mask"] for s in samples])},
        "labels": torch.stack([s["y"] for s in samples]),
        "names": [s["name"] for s in samples],
        "scale": 0.5,
        "kind": "training",
        "weights": None,
    }


class DictionaryBatch(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        assert batch["weights"] is None and batch["kind"] == "training"
        assert len(batch["names"]) == len(batch["labels"])
        x = torch.where(batch["inputs"]["mask"], batch["inputs"]["x"], 0.0)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * batch["scale"]
        return F.cross_entropy(self.head(x), batch["labels"])


def records(data: tuple[Tensor, ...], batch_size: int) -> DataLoader:
    return DataLoader(Records(*data), batch_size=batch_size, collate_fn=collate_records)


class BatchNormNet(Base):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(12, 5))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class TiedByModule(Base):
    """One embedding module in two places, and blocks that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0] % 64
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


#: What takes numbers in place of tokens.
NUMBERS = ("vit", "convnext", "swin", "wav2vec2", "clip")

PIPELINE_CASES: dict[str, Case] = {
    **{
        name: Case(
            partial(Transformers, build, loss), tokens=name not in NUMBERS, float32_inside=inside, random=name == "clip"
        )
        for name, (build, loss, inside) in {**HUGGING_FACE, **TRIED_LATER}.items()
    },
    "cnn": Case(ConvolutionNet),
    "unet": Case(UNet),
    "densenet": Case(DenseNet),
    "denoiser": Case(Denoiser, random=True),
    "class_token": Case(ClassToken),
    "in_place": Case(InPlace),
    "two_outputs": Case(TwoOutputs),
    "frozen_outside": Case(FrozenOutside),
    "dropout": Case(Dropout, random=True),
    "checkpointed": Case(Checkpointed, random=True),
    "dictionary": Case(DictionaryBatch, loader=records),
    "batch_norm_net": Case(BatchNormNet, random=True),
    "tied_by_module": Case(TiedByModule, tokens=True),
}
