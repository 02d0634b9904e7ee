"""What crosses the tensor-parallel ranks in a step: four differentiable collectives, each with its transpose.

A *replicated* tensor is the same on all ranks of the group, and so is its gradient. A *partial* one is a summand, a *cut* one a
slice of the last dimension. (Megatron-LM, Shoeybi et al. 2019, calls the first two f and g.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Set on a tensor that has entered cut layers, so that all layers that it enters share one reduction of its gradient.
_ENTERED = "_lightning_partrain_entered"


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _alias(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _joined(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Slice.apply(grad, ctx.group), None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_slice(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, ctx.group), None


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, but no view: a view holds its base, which :func:`enter` lets hold it."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _joined(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, -1)


def _own_slice(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), -1)[group.rank()].contiguous()


def enter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A replicated tensor on its way into cut layers; its gradient is summed over the ranks, once for all these layers."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    if tensor.is_leaf:  # would keep itself alive through what is kept on it
        return _Enter.apply(tensor, group)
    kept = getattr(tensor, _ENTERED, None)
    if kept is None or kept[1] != tensor._version:
        kept = (_Enter.apply(tensor, group), tensor._version)
        setattr(tensor, _ENTERED, kept)
    return kept[0]


def sum_parts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of partial tensors, replicated."""
    return _Sum.apply(tensor, group)


def gather_slices(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Cut to replicated."""
    return _Gather.apply(tensor, group)


def own_slice(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replicated to cut; the last dimension must divide."""
    return _Slice.apply(tensor, group)
