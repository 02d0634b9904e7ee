"""Matrices of low rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import (
    Compressor,
    Part,
    Reduced,
    Reduction,
    Sum,
    Task,
    all_reduce_bytes,
    number,
)

Q = "q"


class PowerSGD(Compressor):
    """Gradients as products of two thin matrices, by one step of power iteration (Vogels et al., arXiv 1905.13727).

    Of a gradient M, n x m, the first dimension by all others, what travels is P = M Q, n x r, and then, with P made orthonormal, Q = M' P, m x r.
    Both are averaged over the ranks, and P Q' takes the place of the mean. Q is where the next step begins, so that iteration goes on over
    the steps. All P of a vector are one message, and all Q.

    Q is made orthonormal as well before it is used, which changes nothing in what it spans, and keeps P within range and precise. What is zero
    in it, such as everything in the beginning or after gradients of zero, is drawn anew.

    Args:
        rank: r, at least 1; cut to n and m, and lossless there.
        min_compression_rate: parameters stay as they are that would not shrink by more than this factor.

    Raises:
        ValueError: for an option out of range.
    """

    def __init__(self, rank: int = 4, min_compression_rate: float = 2.0) -> None:
        self.rank: int = number("rank", rank, 1, float("inf"), whole=True)
        self.min_compression_rate: float = number("min_compression_rate", min_compression_rate, 0, float("inf"))

    def fits(self, shape: torch.Size) -> bool:
        rows, columns = _matrix(shape)
        return self._thin_numel(shape) * self.min_compression_rate < rows * columns

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        batches = self._batches(task.parts)
        pieces = vector.split([part.numel for part in task.parts])
        matrices = [batch.of(vector, pieces) for batch in batches]
        message, ps = _message(vector, [(len(b.parts), b.rows, b.rank) for b in batches])
        for batch, matrix, p in zip(batches, matrices, ps, strict=True):
            torch.bmm(matrix, _orthonormal(batch.warm(vector, task), task).mT, out=p)
        yield Sum(message)

        message, qs = _message(vector, [(len(b.parts), b.rank, b.columns) for b in batches])
        bases = [_orthonormal(p.mT, task) for p in ps]
        for matrix, basis, q in zip(matrices, bases, qs, strict=True):
            torch.bmm(basis, matrix, out=q)
        yield Sum(message)
        message.div_(task.ranks)

        mean = torch.empty_like(vector)
        pieces = mean.split([part.numel for part in task.parts])
        warm: dict[str, Tensor] = {}
        for batch, basis, q in zip(batches, bases, qs, strict=True):
            batch.fill(mean, pieces, basis, q)
            warm.update(zip((part.name for part in batch.parts), q.unbind(), strict=True))
        # What of a rank is in the mean, nobody knows. Counted as the mean for all, residuals add up to what it lacks.
        return Reduced(mean, mean if task.feedback else None, state={Q: warm})

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """All-reduces of ``4 * (n + m) * min(rank, n, m)`` bytes a matrix."""
        return all_reduce_bytes(4 * sum(map(self._thin_numel, shapes)), ranks)

    def _thin_numel(self, shape: torch.Size) -> int:
        return sum(_matrix(shape)) * min(self.rank, *_matrix(shape))

    def _batches(self, parts: Sequence[Part]) -> list[_Batch]:
        """Parameters by shape: many small ones cost as little time as a large one."""
        places: dict[tuple[int, int], list[int]] = {}
        for place, part in enumerate(parts):
            places.setdefault(_matrix(part.shape), []).append(place)
        return [_Batch([parts[i] for i in same], same, *nm, min(self.rank, *nm)) for nm, same in places.items()]


@dataclass(frozen=True)
class _Batch:
    """b parameters that are matrices of the same shape, and their places among all."""

    parts: list[Part]
    places: list[int]
    rows: int
    columns: int
    rank: int

    def _view(self, vector: Tensor) -> Tensor | None:
        """(b, rows, columns) of ``vector``, where they lie side by side."""
        if self.places[-1] - self.places[0] >= len(self.places):
            return None
        size = len(self.places) * self.rows * self.columns
        return vector[self.parts[0].start :][:size].view(-1, self.rows, self.columns)

    def of(self, vector: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """(b, rows, columns) of ``vector``, of which ``pieces`` are the parameters."""
        view = self._view(vector)
        if view is not None:
            return view
        return torch.stack([pieces[place] for place in self.places]).view(-1, self.rows, self.columns)

    def fill(self, vector: Tensor, pieces: Sequence[Tensor], basis: Tensor, q: Tensor) -> None:
        """The products of (b, rank, rows), transposed, and (b, rank, columns) to where the matrices are in ``vector``."""
        view = self._view(vector)
        if view is not None:
            torch.bmm(basis.mT, q, out=view)
        else:
            products = torch.bmm(basis.mT, q).flatten(1).unbind()
            torch._foreach_copy_([pieces[place] for place in self.places], products)

    def warm(self, like: Tensor, task: Task) -> Tensor:
        """Q of the last step, (b, rank, columns); zeros where there is none."""
        known, zeros = task.state.get(Q, {}), like.new_zeros(self.rank, self.columns)
        found = [known.get(part.name, zeros) for part in self.parts]
        # Another shape comes from a run with another rank.
        return torch.stack([q if q.shape == zeros.shape else zeros for q in found])


def _matrix(shape: torch.Size) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    return rows, shape.numel() // rows


def _message(like: Tensor, shapes: list[tuple[int, int, int]]) -> tuple[Tensor, list[Tensor]]:
    """An empty message, and views of these shapes that fill it."""
    message = like.new_empty(sum(map(prod, shapes)))
    pieces = message.split([prod(shape) for shape in shapes])
    return message, [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _orthonormal(rows: Tensor, task: Task) -> Tensor:
    """An orthonormal basis of what the rows of each matrix in (b, r, n) span; rows of zeros become random ones. r is at most n.

    By Householder's reflections, which are orthonormal to the last digit of whatever they are given, here in units of each row's largest
    magnitude. (Gram and Schmidt's way divides by what is left of a row, which may be nothing.)
    """
    draw = task.draw(rows.device, "powersgd", rows.shape[1:])
    fresh = torch.randn(rows.shape[1:], generator=draw, dtype=rows.dtype, device=rows.device)
    largest = rows.abs().amax(2, keepdim=True)
    return torch.linalg.qr(torch.where(largest > 0, rows / largest, fresh).mT).Q.mT
