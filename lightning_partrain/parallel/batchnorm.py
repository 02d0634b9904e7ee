"""Batch normalisation with the statistics of the whole data-parallel batch, on any device.

torch's ``SyncBatchNorm`` refuses CPU tensors. Here each layer keeps its identity, parameters and buffers, and is given a
``forward`` of its own while it trains.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over a group; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _forward(self: Any, x: Tensor) -> Tensor:
    """Of one layer; ``x`` has shape (batch, channels, ...)."""
    if not self.training:
        return type(self).forward(self, x)
    self._check_input_dim(x)
    group = self._batch_group
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    wide = x if x.dtype == torch.float64 else x.float()
    count = wide.new_tensor([x.numel() / x.shape[1]])
    sums = _SumOverRanks.apply(torch.cat([wide.sum(dims), count]), group)
    total, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
    centered = wide - mean.view(shape)
    var = _SumOverRanks.apply(centered.square().sum(dims), group) / total
    if self.track_running_stats and self.running_mean is not None:
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_((var * total / (total - 1)).to(self.running_var.dtype), momentum)
    y = (centered * torch.rsqrt(var + self.eps).view(shape)).to(x.dtype)
    return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


def batch_norm_layers(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """All batch-normalisation layers of ``module``."""
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def synchronize_batch_norm(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Compute batch statistics over ``group`` from now on; see :func:`restore_batch_norm`. Returns the module to use."""
    if any(p.is_cuda for p in module.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
    for layer in batch_norm_layers(module):
        layer._batch_group = group  # type: ignore[assignment]
        layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
    return module


def restore_batch_norm(module: nn.Module) -> None:
    """Undo :func:`synchronize_batch_norm` on CPU layers."""
    for layer in batch_norm_layers(module):
        if "forward" in layer.__dict__:
            del layer.__dict__["forward"], layer.__dict__["_batch_group"]
