"""Norms and clipping over plain tensors, shards, replicas and mixes of them, against torch on whole tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_partrain import numerics
from tests.harness import run_ranks


def in_group(ranks: int, function: Any) -> list[Any]:
    """Run ``function(rank)`` inside a gloo group."""

    def run(rank: int) -> Any:
        import os

        dist.init_process_group(
            "gloo", rank=rank, world_size=ranks, init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        )
        result = function(rank)
        dist.barrier()  # rank 0 keeps the store until all are done
        dist.destroy_process_group()
        return result

    return run_ranks(ranks, run)


def whole_of(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 3), (5,), (1, 4), (7, 2), ())
    ]


def mixed(mesh: Any) -> list[torch.nn.Parameter]:
    """The tensors of `whole` as gradients: sharded by rows, by columns and rows over two axes, replicated, plain."""
    placements: list[Any] = [
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
        None,
    ]
    params = []
    for grad, placement in zip(whole(), placements, strict=True):
        value = grad if placement is None else distribute_tensor(grad, mesh, placement)
        param = torch.nn.Parameter(torch.zeros_like(value))
        param.grad = value
        params.append(param)
    return [*params, torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_norm_of_a_mix(norm_type: float) -> None:
    expected = torch.linalg.vector_norm(torch.cat([t.reshape(-1) for t in whole()]), norm_type).item()

    def norm(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return numerics.grad_norm(mixed(mesh), norm_type).item()

    assert in_group(4, norm) == pytest.approx([expected] * 4, rel=1e-14)


def test_clipping_a_mix() -> None:
    reference = [torch.nn.Parameter(torch.zeros_like(t)) for t in whole()]
    for param, grad in zip(reference, whole(), strict=True):
        param.grad = grad
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.5).item()

    def clip(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        params = mixed(mesh)
        norm = numerics.clip_grad_norm(params, 0.5).item()
        clipped = [whole_of(p.grad) for p in params if p.grad is not None]
        numerics.clip_grad_value(params, 0.01)
        after = [whole_of(p.grad) for p in params if p.grad is not None]
        return norm, clipped, max(float(g.abs().max()) for g in after)

    for norm, clipped, largest in in_group(4, clip):
        assert norm == pytest.approx(expected, rel=1e-14)
        for got, param in zip(clipped, reference, strict=True):
            torch.testing.assert_close(got, param.grad, rtol=1e-13, atol=0)
        assert largest == pytest.approx(0.01)


def test_ranks_without_elements_take_part() -> None:
    """Fewer rows than ranks: two of four ranks hold nothing of it."""

    def norm(rank: int) -> float:
        mesh = init_device_mesh("cpu", (4,))
        return numerics.total_norm([distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])]).item()

    assert in_group(4, norm) == [5.0] * 4


def test_no_gradients_and_pending_sums() -> None:
    assert numerics.grad_norm([torch.nn.Parameter(torch.ones(2))]).item() == 0.0

    def norm(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        pending = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match="pending sum"):
            numerics.total_norm([pending])
        return "refused"

    assert in_group(2, norm) == ["refused"] * 2


def test_an_infinite_gradient_is_seen_by_all() -> None:
    def norm(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.tensor([math.inf if rank else 1.0])
        return numerics.total_norm([DTensor.from_local(local, mesh, [Shard(0)], run_check=False)]).item()

    assert in_group(2, norm) == [math.inf] * 2
