"""Values at random places, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import (
    Compressor,
    Reduced,
    Reduction,
    Sum,
    Task,
    all_reduce_bytes,
    number,
)


class RandomK(Compressor):
    """A random share of the entries, anew in every step (Stich et al., arXiv 1809.07599).

    All ranks draw the same places from a shared seed, so that only values travel, and can be added up: what is sent does not grow with the
    ranks. The vector is cut into as many stretches as entries are sent, and one is drawn in each. Without error feedback they are multiplied
    by the length of their stretch, which makes the expected result the mean.

    Args:
        density: the share of entries that are sent, in (0, 1]; at least one is. 1 is lossless.

    Raises:
        ValueError: for a density out of range.
    """

    def __init__(self, density: float = 0.01) -> None:
        self.density: float = number("density", density, 0, 1, low_open=True)

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        density = self.density if task.density is None else task.density
        draw = task.draw(vector.device, "randomk", task.parts[0].name)
        places, lengths = _places(vector, _count(vector.numel(), density), draw)
        values = vector[places]
        sent = torch.zeros_like(vector).index_copy_(0, places, values) if task.feedback else None
        total = yield Sum(values)
        total.div_(task.ranks)
        if not task.feedback:
            total.mul_(lengths)
        return Reduced(torch.zeros_like(vector).index_copy_(0, places, total), sent)

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """An all-reduce of 4 bytes for each of ``density * numel`` entries, rounded."""
        return all_reduce_bytes(4 * _count(sum(shape.numel() for shape in shapes), self.density), ranks)


def _count(numel: int, density: float) -> int:
    return max(1, round(numel * density))


def _places(vector: Tensor, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """One place in each of ``count`` stretches of ``vector``, and the stretches' lengths."""
    edges = torch.arange(count + 1, device=vector.device).mul_(vector.numel()).div_(count, rounding_mode="floor")
    lengths = edges.diff()
    # Of float64, whose product with a length is always less than the length.
    chance = torch.rand(count, generator=draw, dtype=torch.float64, device=vector.device)
    return edges[:-1] + (chance * lengths).long(), lengths
