"""Modules whose layers divide by 4 (most by 8), and the plan that cuts each."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt import GPT
from tests.models import Base, Case
from tests.pipeline_models import Transformers, causal, lm, masked

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class EightHeads(Base):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(layers=4, width=16, heads=8, context=12)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Encoder(Base):
    """With a padding mask (nested tensors would zero what is masked in evaluation), a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, nhead=8, dim_feedforward=24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.encoder.layers[1].linear1.requires_grad_(False)
        self.head = nn.Linear(16, 5)
        self.register_buffer("scale", Tensor([0.5]))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].unflatten(1, (2, 6))
        padding = x[:, :, 0] > 2.0
        padding[:, 0] = False
        y = self.encoder(self.embed(x), src_key_padding_mask=padding).mean(1) * self.scale.to(x.dtype)
        return F.cross_entropy(self.head(y), batch[1])


class MLP(Base):
    """Pairs in a row, and a block with a gate."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(12, 16, bias=False)
            self.up = nn.Linear(12, 16)
            self.act = nn.SiLU()
            self.down = nn.Linear(16, 12)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.gate(x)) * self.up(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.0), nn.Linear(24, 12)),
            self.Gated(),
            nn.Sequential(
                nn.Linear(12, 8),
                nn.Tanh(),
                nn.Linear(8, 16),
                nn.Tanh(),
                nn.Linear(16, 32),
                nn.Tanh(),
                nn.Linear(32, 12),
            ),
            self.Gated(),
        )
        self.head = nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(batch[0])), batch[1])


class FusedAttention(nn.Module):
    """As in GPT-2: one layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.split_size, self.head_dim = 16, 4
        self.c_attn, self.c_proj = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.c_attn(x).split(self.split_size, -1)
        )
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FusedAndTied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16, padding_idx=3)
        self.blocks = nn.ModuleList(FusedAttention() for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0] % 64
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Translator(Base):
    """``nn.Transformer``: encoder, decoder with cross-attention and masks, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.model = nn.Transformer(
            16, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=24, dropout=0.0
        )
        self.head = nn.Linear(16, 64)

    def loss(self, batch: Any) -> Tensor:
        tokens = (batch[0] % 64).T
        x = self.embed(tokens)
        source, target = x[:6], x[6:-1]
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[0], dtype=x.dtype)
        y = self.model(source, target, tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(y).flatten(0, 1), tokens[7:].flatten())


BERT = {
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "intermediate.dense": "colwise",
    "output.dense": "rowwise",
    "word_embeddings": "vocabulary",
    "transform.dense": "colwise_gather_output",
    "decoder": "colwise_gather_output",
}

PLANS: dict[str, dict[str, str]] = {"bert4": BERT}


def _transformers(build: Any, loss: Any) -> Case:
    return Case(partial(Transformers, build, loss), tokens=True, float32_inside=True)


TENSOR_CASES: dict[str, Case] = {
    "gpt8": Case(EightHeads, tokens=True),
    "llama8": _transformers(lm("LlamaConfig", **SMALL, num_attention_heads=8, num_key_value_heads=4), causal),
    "gpt2h4": _transformers(
        lm(
            "GPT2Config",
            vocab_size=96,
            n_positions=16,
            n_embd=16,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        causal,
    ),
    "qwen2": _transformers(
        lm("Qwen2Config", **SMALL, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True), causal
    ),
    "qwen3": _transformers(
        lm("Qwen3Config", **SMALL, num_attention_heads=4, num_key_value_heads=4, head_dim=4), causal
    ),
    "bert4": _transformers(
        lm("BertConfig", "AutoModelForMaskedLM", **SMALL, num_attention_heads=4, **NO_DROPOUT), masked
    ),
    "encoder8": Case(Encoder),
    "mlp": Case(MLP),
    "fused": Case(FusedAndTied, tokens=True),
    "translator": Case(Translator, tokens=True),
    # attention that returns its weights, of which each rank has some heads
    "llama_eager": _transformers(
        lm("LlamaConfig", **SMALL, num_attention_heads=4, num_key_value_heads=4, attn_implementation="eager"), causal
    ),
}
