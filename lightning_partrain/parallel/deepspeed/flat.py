"""Parts of parameters in the flat tensors that DeepSpeed's ranks hold, as blocks of the parameters' own shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain.parallel.placement import Entry, Piece, Stored, part_of

Block = tuple[tuple[int, ...], tuple[int, ...]]


def blocks(shape: Sequence[int], begin: int, end: int) -> Iterator[Block]:
    """(offsets, sizes) of blocks that together, in their order, are the elements ``begin`` to ``end`` of a flattened tensor."""
    if begin >= end:
        return
    if len(shape) < 2:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    inner = math.prod(shape[1:])
    row, first = divmod(begin, inner)
    last, rest = divmod(end, inner)
    if first or row == last:  # a row that is not whole
        for offsets, sizes in blocks(shape[1:], first, min(inner, end - row * inner)):
            yield (row, *offsets), (1, *sizes)
        row += 1
    if row < last:
        yield (row, *(0,) * (len(shape) - 1)), (last - row, *shape[1:])
    if rest and row <= last:
        for offsets, sizes in blocks(shape[1:], 0, rest):
            yield (last, *offsets), (1, *sizes)


@dataclass(frozen=True)
class Part:
    """What a rank holds of one parameter.

    Attributes:
        shape: of the parameter.
        flat: a tensor of one dimension, of many parameters; its optimizer's state has its shape.
        at: where in ``flat`` the part begins.
        begin: where in the flattened parameter.
        numel: how many elements; may be 0.
    """

    shape: tuple[int, ...]
    flat: Tensor
    at: int
    begin: int
    numel: int

    def pieces(self, flat: Tensor) -> list[Piece]:
        """Of ``flat``, which is :attr:`flat` or has its shape: views in blocks of the parameter's shape."""
        found, at = [], self.at
        for offsets, sizes in blocks(self.shape, self.begin, self.begin + self.numel):
            count = math.prod(sizes)
            found.append(Piece(offsets, flat.detach().narrow(0, at, count).view(sizes)))
            at += count
        return found

    def entry(self, flat: Tensor) -> Entry:
        return Entry(self.shape, flat.dtype, self.pieces(flat))

    @torch.no_grad()
    def fill(self, flat: Tensor, value: Tensor | Stored) -> None:
        """Give ``flat`` its part of the whole ``value``."""
        for piece in self.pieces(flat):
            piece.tensor.copy_(part_of(value, piece.offsets, piece.tensor.shape))

    def whole(self, flat: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
        """On every rank of ``group``. Collective."""
        full = torch.zeros(math.prod(self.shape), dtype=flat.dtype, device=device)
        full.narrow(0, self.begin, self.numel).copy_(flat.detach().narrow(0, self.at, self.numel))
        if group is not None:
            dist.all_reduce(full, group=group)
        return full.view(self.shape)
