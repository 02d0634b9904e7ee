"""Carries out what compressors ask for, over one process group, and counts the bytes that this rank sends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.sync.compressors.base import (
    AllGather,
    AllToAll,
    Max,
    Reduced,
    Reduction,
    Request,
    Sum,
    all_reduce_bytes,
)


class Links:
    """
    Args:
        group: the ranks; used by nothing else, so that messages cannot mix.

    Attributes:
        sent: bytes since the beginning.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent = 0.0

    def perform(self, request: Request) -> Tensor:
        tensor = request.tensor.contiguous()
        size = tensor.numel() * tensor.element_size()
        if not size:
            return tensor
        if isinstance(request, (Sum, Max)):
            op = dist.ReduceOp.SUM if isinstance(request, Sum) else dist.ReduceOp.MAX
            dist.all_reduce(tensor, op, group=self.group)
            self.sent += all_reduce_bytes(size, self.ranks)
            return tensor if tensor is request.tensor else request.tensor.copy_(tensor)
        if isinstance(request, AllToAll):
            received = torch.empty_like(tensor)
            dist.all_to_all_single(received, tensor, group=self.group)
            self.sent += size * (self.ranks - 1) / self.ranks
            return received
        assert isinstance(request, AllGather)
        gathered = tensor.new_empty((self.ranks, tensor.numel()))
        compat.all_gather_single(gathered.view(-1), tensor, group=self.group)
        self.sent += size * (self.ranks - 1)
        return gathered

    def run(self, reduction: Reduction) -> Reduced:
        """From the first request to the result."""
        try:
            request = next(reduction)
            while True:
                request = reduction.send(self.perform(request))
        except StopIteration as stop:
            return stop.value
