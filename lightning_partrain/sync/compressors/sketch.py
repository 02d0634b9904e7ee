"""Count sketch: a hash table that can be summed over ranks tells where their mean is large."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from functools import reduce

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import (
    Compressor,
    Reduced,
    Reduction,
    Request,
    Sum,
    Task,
    all_reduce_bytes,
    number,
)
from lightning_partrain.sync.compressors.topk import entries, largest


def agreed(rows: Sequence[Tensor], out: Tensor) -> Tensor:
    """The least magnitude, with its sign, where all rows have the same sign, and else zero; element by element."""
    low, high = reduce(torch.minimum, rows), reduce(torch.maximum, rows)
    return torch.maximum(low, high.clamp_max(0), out=out)


class Sketch(Compressor):
    """The largest entries of the mean, which a count sketch finds without anyone's having seen the mean.

    Sketched SGD (Ivkin et al., arXiv 1903.04488) and FetchSGD (Rothchild et al., arXiv 2007.07682): sketches (Charikar et al. 2002) of all
    ranks are summed; each entry is estimated from its places in the rows of the table; the exact values of the largest are summed in a
    second round. Both are plain sums: what a rank sends does not grow with the ranks, unlike with top-k.

    Where the usual estimate is the median over the rows, which is unbiased, this one is the least magnitude on which all rows agree: only
    the order of magnitudes matters here, and small entries that share a place with a large one are many, but rarely do so in every row.

    The hash: the vector is cut into slices as long as a row of the table, and each is added to the row cyclically shifted, and with a sign,
    both random and new in every step. Entries of two slices meet with the probability 1 / columns and independent signs, and those of one
    never do: a row's estimate has the mean and (at most) the variance of the usual hash, at the cost of one addition an entry. As places
    are new in every step, what one step misses, error feedback hands to the next.

    Args:
        rows: of the table; more find fewer wrong entries, and make the columns fewer.
        compression: the table is so many times smaller than the vector.
        density: the share of entries that is sent, of which only the largest are sure to be among the largest of the mean; 1 is lossless.

    Raises:
        ValueError: for an option out of range.
    """

    def __init__(self, rows: int = 3, compression: float = 20.0, density: float = 0.01) -> None:
        self.rows: int = number("rows", rows, 1, 16, whole=True)
        self.compression: float = number("compression", compression, 1, 1e6)
        self.density: float = number("density", density, 0, 1, low_open=True)

    def columns(self, numel: int) -> int:
        """Of the table for ``numel`` entries."""
        return math.ceil(numel / (self.compression * self.rows))

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        count = entries(self.density, vector.numel())
        if count == vector.numel():  # nothing to be looked for
            total = yield Sum(vector.clone())
            return Reduced(total.div_(task.ranks))
        positions = largest((yield from self._estimates(vector, task)), count)
        values = vector.index_select(0, positions)
        total = yield Sum(values.clone())
        mean = torch.zeros_like(vector).index_copy_(0, positions, total.div_(task.ranks))
        sent = torch.zeros_like(vector).index_copy_(0, positions, values) if task.feedback else None
        return Reduced(mean, sent)

    def _estimates(self, vector: Tensor, task: Task) -> Generator[Request, Tensor, Tensor]:
        """Of the sum of all ranks' vectors, (n,)."""
        columns = self.columns(vector.numel())
        slices = vector.split(columns)
        draw = task.draw(torch.device("cpu"), "sketch", task.parts[0].name)  # numbers that the host needs
        shifts = torch.randint(columns, (len(slices), self.rows), generator=draw).tolist()
        signs = torch.randint(2, (len(slices), self.rows), generator=draw).mul_(2).sub_(1).tolist()
        table = vector.new_zeros(self.rows, 2 * columns)  # twice as wide: shifted slices need not be cut
        for piece, shift, sign in zip(slices, shifts, signs, strict=True):
            for row in range(self.rows):
                table[row, shift[row] : shift[row] + len(piece)].add_(piece, alpha=sign[row])
        table = yield Sum(table[:, :columns] + table[:, columns:])
        signed = {1: torch.cat([table, table], 1)}
        signed[-1] = -signed[1]
        estimates = torch.empty_like(vector)
        for piece, shift, sign in zip(estimates.split(columns), shifts, signs, strict=True):
            of_rows = [signed[sign[row]][row, shift[row] : shift[row] + len(piece)] for row in range(self.rows)]
            agreed(of_rows, out=piece)
        return estimates

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """An all-reduce of the table and one of the values, 4 bytes each."""
        numel = sum(shape.numel() for shape in shapes)
        count = entries(self.density, numel)
        table = 0 if count == numel else self.rows * self.columns(numel)
        return all_reduce_bytes(4 * (table + count), ranks)
