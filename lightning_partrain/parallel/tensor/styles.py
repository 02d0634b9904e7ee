"""The ways in which a layer can be cut, by the names under which plans speak of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_partrain.parallel.tensor import layers
from lightning_partrain.parallel.tensor.layers import is_conv1d, is_linear


@dataclass(frozen=True)
class CutParameter:
    """One parameter of a layer, cut along ``dim``, in ``parts`` pieces side by side."""

    owner: nn.Module
    key: str
    dim: int
    parts: int = 1


@dataclass(frozen=True)
class Style:
    """How a layer is cut.

    Attributes:
        fits: the layers that it is for, in words, and the test.
        forward: what the layer computes then.
        cut: its parameters that are cut.
        opens: whether its output is cut, so that another layer has to follow.
        closes: whether its input is cut.
        draws: whether it may draw random numbers for what is cut inside of it.
    """

    name: str
    fits: tuple[str, Callable[[nn.Module], bool]]
    forward: Callable[..., Any] | None
    cut: Callable[[nn.Module], Iterator[CutParameter]]
    opens: bool = False
    closes: bool = False
    draws: bool = False


def _outputs(module: nn.Module, parts: int = 1) -> Iterator[CutParameter]:
    yield CutParameter(module, "weight", 1 if is_conv1d(module) else 0, parts)
    if module.bias is not None:
        yield CutParameter(module, "bias", 0, parts)


def _inputs(module: nn.Module) -> Iterator[CutParameter]:
    yield CutParameter(module, "weight", 0 if is_conv1d(module) else 1)


def _rows(module: nn.Module) -> Iterator[CutParameter]:
    yield CutParameter(module, "weight", 0)


def _heads(module: nn.Module) -> Iterator[CutParameter]:
    if module.in_proj_weight is not None:
        yield CutParameter(module, "in_proj_weight", 0, 3)
    else:
        for key in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            yield CutParameter(module, key, 0)
    if module.in_proj_bias is not None:
        yield CutParameter(module, "in_proj_bias", 0, 3)
    yield CutParameter(module.out_proj, "weight", 1)  # type: ignore[arg-type]


def _is_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and not (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    )


def _is_attention(module: nn.Module) -> bool:
    return type(module) is nn.MultiheadAttention and module.bias_k is None and not module.add_zero_attn


_LINEAR = ("nn.Linear and Conv1D", lambda module: is_linear(module) or is_conv1d(module))
_NOTHING: Callable[[nn.Module], Iterator[CutParameter]] = lambda module: iter(())  # noqa: E731

STYLES = {
    style.name: style
    for style in (
        Style("colwise", _LINEAR, layers.column, _outputs, opens=True),
        Style("colwise_gather_output", _LINEAR, layers.column_gathered, _outputs),
        Style("packed_colwise", _LINEAR, layers.column, lambda module: _outputs(module, 2), opens=True),
        Style("fused_qkv", _LINEAR, layers.column, lambda module: _outputs(module, 3), opens=True),
        Style("rowwise", _LINEAR, layers.row, _inputs, closes=True),
        Style("rowwise_split_input", _LINEAR, layers.row_of_whole, _inputs),
        Style(
            "vocabulary",
            ("nn.Embedding without max_norm, sparse and scale_grad_by_freq", _is_embedding),
            layers.vocabulary,
            _rows,
        ),
        Style(
            "heads",
            ("nn.MultiheadAttention without add_bias_kv and add_zero_attn", _is_attention),
            layers.attention,
            _heads,
            draws=True,
        ),
        Style(
            "replicated_with_grad_allreduce",
            (
                "modules with parameters of their own",
                lambda module: any(p is not None for p in module._parameters.values()),
            ),
            layers.summed_gradients,
            _NOTHING,
        ),
        Style("replicate", ("all modules", lambda module: True), None, _NOTHING),
    )
}

#: Other names of the same: Hugging Face's, and older ones of theirs.
ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "vocabulary",
}
