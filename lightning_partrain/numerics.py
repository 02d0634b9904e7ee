"""Norms and clipping over parameters of any placement: the one place where numbers cross meshes.

A gradient may be a plain tensor (the same on all ranks of the data-parallel group) or a :class:`DTensor` whose shards lie
on other ranks. ``tensor.norm()`` of a DTensor gives a partial value, and torch's own clipping raises on a mix of both; the
functions here sum what is sharded over the axes where it is sharded, once per mesh axis, and never wait for the host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_partrain import compat


@dataclass(frozen=True)
class StageNorm:
    """How the parts of a norm on pipeline stages make one.

    Attributes:
        group: the stages.
        counts: whether this stage counts a parameter; of those on several stages exactly one does.
        dtype, device: of the norm, also on a stage without gradients.
    """

    group: dist.ProcessGroup
    counts: Callable[[Tensor], bool]
    dtype: torch.dtype
    device: torch.device


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds, sharing its storage, outside of autograd."""
    return compat.local_part(tensor)


def as_dtensor(local: Tensor, like: Tensor) -> DTensor:
    """``local``, this rank's part of a tensor, as a DTensor of the shape and placement of ``like``."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def sharded_axes(tensor: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """The (mesh, mesh axis) pairs over which ``tensor`` is cut; empty for plain and replicated tensors.

    Raises:
        ValueError: when the tensor is a pending sum, which has no value yet.
    """
    if not isinstance(tensor, DTensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"A pending sum has no norm yet: placements {tensor.placements}. Redistribute it first.")
    return tuple(
        (tensor.device_mesh, axis) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0, stages: StageNorm | None = None) -> Tensor:
    """The norm of all ``tensors`` taken as one vector, equal on every rank.

    Collective over the axes on which any of them is sharded; each rank passes the same tensors in the same order.

    Args:
        tensors: plain tensors and DTensors, of one device.
        norm_type: order p of the norm, ``math.inf`` for the largest absolute value.
        stages: pipeline stages, each with tensors of its own.

    Returns:
        A scalar tensor, float64 if any tensor is, float32 otherwise.
    """
    groups: dict[tuple[tuple[DeviceMesh, int], ...], list[Tensor]] = defaultdict(list)
    device, dtype = (stages.device, stages.dtype) if stages is not None else (torch.device("cpu"), torch.float32)
    for tensor in tensors:
        groups[sharded_axes(tensor)].append(local_tensor(tensor))
        device = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device
        dtype = torch.promote_types(dtype, tensor.dtype)
    infinite = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    parts = []
    for axes, local in groups.items():
        filled = [t.to(dtype) for t in local if t.numel()]
        if filled:
            norms = torch.stack(torch._foreach_norm(filled, norm_type))
            part = norms.max() if infinite else norms.pow(norm_type).sum()
        else:
            part = torch.zeros((), dtype=dtype, device=device)
        part = part.to(device)  # offloaded gradients lie on the host
        for mesh, axis in axes:
            dist.all_reduce(part, op, group=mesh.get_group(axis))
        parts.append(part)
    stacked = torch.stack(parts) if parts else torch.zeros(1, dtype=dtype, device=device)
    total = stacked.max() if infinite else stacked.sum()
    if stages is not None:
        dist.all_reduce(total, op, group=stages.group)
    return total if infinite else total.pow(1.0 / norm_type)


def grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0, stages: StageNorm | None = None) -> Tensor:
    """The norm of the gradients of ``parameters``; those without a gradient count as zero. See :func:`total_norm`."""
    if stages is None:
        return total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    counted = [p for p in parameters if stages.counts(p)]
    return total_norm([p.grad for p in counted if p.grad is not None], norm_type, stages)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, stages: StageNorm | None = None
) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before.

    The rule is that of ``torch.nn.utils.clip_grad_norm_``: the factor is ``max_norm / (norm + 1e-6)``, at most 1.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, norm_type, stages)
    scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by ``factor``, a scalar on their device. No communication."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in parameters:
        if param.grad is not None:
            local = local_tensor(param.grad)
            alike[local.device, local.dtype].append(local)
    for (device, dtype), grads in alike.items():
        torch._foreach_mul_(grads, factor.to(device, dtype))


@torch.no_grad()
def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient element to ``[-clip_value, clip_value]``. No communication."""
    grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)
