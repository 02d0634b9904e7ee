"""Carries out what compressors ask for, over one process group, and counts the bytes that this rank sends."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Message:
    """One that may be on its way.

    Attributes:
        answer: what comes of it.
        work: ``None`` when it is there.
        into: where the answer belongs, when it cannot be there at once.
        sent: what must live so long.
    """

    answer: Tensor
    work: Any = None
    into: Tensor | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """Until it is there; on a GPU the stream waits."""
        if self.work is not None:
            self.work.wait()
        return self.answer if self.into is None else self.into.copy_(self.answer)


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

    def start(self, request: Request) -> Message:
        tensor = request.tensor.contiguous()
        size = tensor.numel() * tensor.element_size()
        if not size:
            return Message(tensor)
        if isinstance(request, (Sum, Max)):
            op = dist.ReduceOp.SUM if isinstance(request, Sum) else dist.ReduceOp.MAX
            work = dist.all_reduce(tensor, op, group=self.group, async_op=True)
            self.sent += all_reduce_bytes(size, self.ranks)
            return Message(tensor, work, None if tensor is request.tensor else request.tensor)
        if isinstance(request, AllToAll):
            received = torch.empty_like(tensor)
            work = dist.all_to_all_single(received, tensor, group=self.group, async_op=True)
            self.sent += size * (self.ranks - 1) / self.ranks
            return Message(received, work, sent=tensor)
        assert isinstance(request, AllGather)
        gathered = tensor.new_empty((self.ranks, tensor.numel()))
        work = compat.all_gather_single(gathered.view(-1), tensor, group=self.group, async_op=True)
        self.sent += size * (self.ranks - 1)
        return Message(gathered, work, sent=tensor)

    def perform(self, request: Request) -> Tensor:
        return self.start(request).wait()

    def travel(self, reduction: Reduction) -> Generator[Message, Tensor, Reduced]:
        """From the first request to the result; yields each message when it is on its way, and is sent its answer."""
        answer: Any = None
        try:
            while True:
                answer = yield self.start(reduction.send(answer))
        except StopIteration as stop:
            return stop.value
