"""Each kind of cut layer against the whole one: outputs, and gradients of inputs and parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain.mesh import ParallelMesh, ParallelSizes
from lightning_partrain.parallel.placement import whole
from lightning_partrain.parallel.tensor.tensor import TensorParallel
from tests.test_numerics import in_group

RANKS = 2
T, S, B, E, H = 5, 4, 3, 8, 4  # target and source length, batch, width, heads


def tensors_in(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [v for v in values if isinstance(v, Tensor)]


def assert_same_as_whole(layer: nn.Module, style: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of ``layer``, cut with ``style``, on this rank."""
    alone = copy.deepcopy(layer)
    root = nn.ModuleDict({"layer": layer})
    mesh = ParallelMesh.create(ParallelSizes(tp=RANKS), "cpu")
    parallel = TensorParallel(root, mesh, {"layer": style})
    results = []
    for module in (alone, layer):
        inputs = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
        if len(args) > 1 and all(a is args[0] for a in args):
            inputs = [inputs[0]] * len(args)
        outputs = tensors_in(module(*inputs, **kwargs))
        sum((y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum() for y in outputs).backward()  # type: ignore[union-attr]
        results.append((outputs, [x.grad for x in dict.fromkeys(inputs) if x.grad is not None], module))
    (expected, input_grads, _), (got, own_input_grads, _) = results
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own_input_grads, input_grads, rtol=1e-11, atol=1e-11)
    for name, param in alone.named_parameters():
        grad = layer.get_parameter(name).grad
        assert grad is not None and param.grad is not None
        mine = whole(grad, parallel.fused.get(f"layer.{name}")) if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(mine, param.grad, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def boolean(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.6
    mask[..., 0] = False
    return mask


SELF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no bias": ({"bias": False}, {}),
    "time first": ({"batch_first": False}, {}),
    "without weights": ({}, {"need_weights": False}),
    "weights of heads": ({}, {"average_attn_weights": False}),
    "boolean mask": ({}, {"attn_mask": "bool2"}),
    "added mask": ({}, {"attn_mask": "float2", "need_weights": False}),
    "mask of heads": ({}, {"attn_mask": "bool3"}),
    "added mask of heads": ({}, {"attn_mask": "float3", "need_weights": False}),
    "padding": ({}, {"key_padding_mask": "padding"}),
    "both": ({}, {"attn_mask": "float2", "key_padding_mask": "padding", "need_weights": False}),
}


@pytest.mark.parametrize("variant", SELF)
def test_self_attention(variant: str) -> None:
    options, arguments = SELF[variant]

    def run(rank: int) -> bool:
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(E, H, **{"batch_first": True, **options}).double()
        for param in layer.parameters():
            nn.init.normal_(param, std=0.3)
        masks = {
            "bool2": boolean(T, T),
            "float2": torch.randn(T, T, dtype=torch.float64),
            "bool3": boolean(B * H, T, T),
            "float3": torch.randn(B * H, T, T, dtype=torch.float64),
            "padding": boolean(B, T),
        }
        x = torch.randn(*((T, B) if options.get("batch_first") is False else (B, T)), E, dtype=torch.float64)
        kwargs = {key: masks.get(value, value) if isinstance(value, str) else value for key, value in arguments.items()}
        assert_same_as_whole(layer, "heads", (x, x, x), kwargs)
        return True

    in_group(RANKS, run)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}])
def test_cross_attention(batched: bool, sizes: dict[str, int]) -> None:
    def run(rank: int) -> bool:
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(E, H, batch_first=True, **sizes).double()
        batch = (B,) if batched else ()
        shapes = ((*batch, T, E), (*batch, S, sizes.get("kdim", E)), (*batch, S, sizes.get("vdim", E)))
        query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        mask = torch.randn(H, T, S, dtype=torch.float64) if not batched else torch.randn(T, S, dtype=torch.float64)
        assert_same_as_whole(layer, "heads", (query, key, value), {"attn_mask": mask})
        return True

    in_group(RANKS, run)


@pytest.mark.parametrize("style", ["colwise_gather_output", "rowwise_split_input"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_between_whole_tensors(style: str, bias: bool) -> None:
    def run(rank: int) -> bool:
        torch.manual_seed(0)
        layer = nn.Linear(E, 6, bias=bias).double()
        assert_same_as_whole(layer, style, (torch.randn(B, T, E, dtype=torch.float64),), {})
        return True

    in_group(RANKS, run)


@pytest.mark.parametrize("padding", [None, 0, 7])
def test_rows_of_an_embedding(padding: int | None) -> None:
    def run(rank: int) -> bool:
        torch.manual_seed(0)
        layer = nn.Embedding(10, E, padding_idx=padding).double()
        assert_same_as_whole(layer, "vocabulary", (torch.randint(10, (B, 7)),), {})
        return True

    in_group(RANKS, run)
