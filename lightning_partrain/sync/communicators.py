"""How an encoded vector reaches all ranks: in two shots, or gathered. Generators; see :mod:`compressors.base`. Codes that add up need
neither: compressors ask for their :class:`Sum`.

The fourth way, ``hierarchical``, is not one of messages but of groups: whatever a compressor asks for is asked between nodes only, after
a plain average inside of each; see :mod:`lightning_partrain.sync.exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import AllGather, AllToAll, Reduced, Reduction, Task


class Codec(Protocol):
    """Rows of numbers to rows of codes and back, each row by itself."""

    #: The width of rows is a multiple of it.
    block: int

    def encode(self, rows: Tensor, draw: torch.Generator | None) -> Sequence[Tensor]:
        """Of (rows, n): tensors of shape (rows, ...), contiguous."""
        ...

    def decode(self, code: Sequence[Tensor], width: int) -> Tensor:
        """(rows, width), of the type that was encoded."""
        ...


def pack(code: Sequence[Tensor]) -> Tensor:
    """One message a row: (rows, bytes)."""
    return torch.cat([part.reshape(part.shape[0], -1).view(torch.uint8) for part in code], 1)


def unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The codes of (rows, bytes), with the types and row shapes of ``like``."""
    parts, at = [], 0
    for each in like:
        size = each[0].numel() * each.element_size()
        rows = message[:, at : at + size].clone(memory_format=torch.contiguous_format).view(each.dtype)
        parts.append(rows.view(message.shape[0], *each.shape[1:]))
        at += size
    return parts


def chunk_size(numel: int, ranks: int, block: int) -> int:
    """How much of a vector one rank averages for all in :func:`two_shot`: whole blocks."""
    return -(-numel // (ranks * block)) * block


def two_shot(vector: Tensor, codec: Codec, task: Task, draw: torch.Generator | None = None) -> Reduction:
    """Each rank averages a chunk for all: codes go to the chunk's rank, and the mean's codes to everyone.

    A rank sends 2 (ranks - 1) / ranks times the codes of the vector, however many ranks there are.
    """
    ranks, numel = task.ranks, vector.numel()
    width = chunk_size(numel, ranks, codec.block)
    missing = ranks * width - numel
    rows = (torch.cat([vector, vector.new_zeros(missing)]) if missing else vector).view(ranks, width)
    code = codec.encode(rows, draw)
    sent = codec.decode(code, width).view(-1)[:numel] if task.feedback else None
    received = yield AllToAll(pack(code))
    mean, *others = codec.decode(unpack(received, code), width)
    for other in others:
        mean.add_(other)
    mean.div_(ranks)
    if task.server is not None and task.feedback:
        mean.add_(task.server)
    told = codec.encode(mean[None], draw)
    server = (
        mean - codec.decode(told, width)[0] if task.feedback else None
    )  # not in its place: that is a part of all rows
    if server is not None:  # nobody is owed what fills the last chunk up
        server[max(numel - task.rank * width, 0) :] = 0.0
    gathered = yield AllGather(pack(told)[0])
    result = codec.decode(unpack(gathered, told), width).view(-1)[:numel]
    return Reduced(result, sent, server)


def gather(vector: Tensor, codec: Codec, task: Task, draw: torch.Generator | None = None) -> Reduction:
    """Everyone's codes go to everyone, who add up in the order of ranks. A rank sends (ranks - 1) times its codes."""
    code = codec.encode(vector[None], draw)
    gathered = yield AllGather(pack(code)[0])
    everyone = unpack(gathered, code)
    mean = torch.zeros_like(vector)
    for rank in range(task.ranks):
        mean += codec.decode([part[rank : rank + 1] for part in everyone], vector.numel())[0]
    sent = codec.decode(code, vector.numel())[0] if task.feedback else None
    return Reduced(mean.div_(task.ranks), sent)
