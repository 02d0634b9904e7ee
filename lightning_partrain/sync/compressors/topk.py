"""The largest entries: their positions and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import AllGather, Compressor, Reduced, Reduction, Task, number
from lightning_partrain.sync.feedback import MomentumCorrection

#: The density at which a ramp begins.
RAMP_FROM = 0.25
#: Of the tables in which large entries are sought; what was fastest at densities of 0.1 to 10 %.
ROWS = 6


def entries(density: float, numel: int) -> int:
    """How many of ``numel`` entries are sent: at least one."""
    return min(max(1, math.ceil(density * numel)), numel)


def largest(vector: Tensor, count: int) -> Tensor:
    """Positions, (count,), of the entries of ``vector``, (n,), with the largest magnitudes.

    Exact. The vector is laid out as a table: what is sought lies in those ``count`` of its columns that have the largest maxima, since each
    of these has an entry at least as large as whatever lies in another. Which columns, is the same question about a shorter vector, and
    sorting only what they hold costs a fraction of sorting everything.
    """
    numel = vector.numel()
    if count >= numel:
        return torch.arange(numel, device=vector.device)
    if numel < 2 * ROWS * count:
        return vector.abs().topk(count, sorted=False).indices
    width = numel // ROWS
    table = vector[: ROWS * width].view(ROWS, width)
    columns = largest(torch.maximum(table.amax(0), table.amin(0).neg_()), count)  # no copy of all magnitudes is needed
    inside = torch.arange(0, ROWS * width, width, device=vector.device)[:, None] + columns
    outside = torch.arange(ROWS * width, numel, device=vector.device)  # what was left over by the table
    candidates = torch.cat([inside.view(-1), outside])
    best = vector.index_select(0, candidates).abs_().topk(count, sorted=False).indices
    return candidates.index_select(0, best)


def gather_entries(vector: Tensor, positions: Tensor, values: Tensor, task: Task) -> Reduction:
    """Everyone's entries, (k,) positions and values, go to everyone, who add them up in the order of ranks.

    Positions may occur again with the value zero. A rank sends (ranks - 1) times its positions, of 4 bytes, and values.
    """
    size = values.nbytes
    message = torch.cat([values.view(torch.uint8), positions.int().view(torch.uint8)])
    gathered = yield AllGather(message)
    mean = torch.zeros_like(vector)
    for told in gathered:  # clones, as what follows an odd number of bytes cannot be viewed as wider numbers
        places, theirs = told[size:].clone().view(torch.int32), told[:size].clone().view(values.dtype)
        mean.index_add_(0, places, theirs, alpha=1 / task.ranks)
    sent = torch.zeros_like(vector).index_add_(0, positions, values) if task.feedback else None
    return Reduced(mean, sent)


class TopK(Compressor):
    """The entries with the largest magnitudes of all parameters that travel together, as 32-bit positions and values.

    Deep Gradient Compression (Lin et al., arXiv 1712.01887). Every rank sends its own entries to all others, so that the bytes grow with
    the ranks; from ``1 / density`` ranks on, a plain average sends fewer.

    Args:
        density: the share of entries that is sent; 1 is lossless.
        ramp_steps: over so many steps the density falls exponentially from 25 % to ``density``.
        momentum: the factor of DGC's momentum correction, at most 0.999: momentum is computed before sending, in place of the
            optimizer's, which must have none. ``None``: plain error feedback, for any optimizer.

    Raises:
        ValueError: for an option out of range.
    """

    def __init__(self, density: float = 0.01, ramp_steps: int = 0, momentum: float | None = None) -> None:
        self.density: float = number("density", density, 0, 1, low_open=True)
        self.ramp_steps: int = number("ramp_steps", ramp_steps, 0, float("inf"), whole=True)
        if ramp_steps and density > RAMP_FROM:
            raise ValueError(f"ramp_steps={ramp_steps} needs a density below {RAMP_FROM:g}, not {density:g}.")
        self.momentum: float | None = None if momentum is None else number("momentum", momentum, 0, 0.999)

    def own_feedback(self) -> MomentumCorrection | None:
        return None if self.momentum is None else MomentumCorrection(self.momentum)

    def density_at(self, step: int) -> float | None:
        if step >= self.ramp_steps:
            return None
        return float(RAMP_FROM * (self.density / RAMP_FROM) ** (step / self.ramp_steps))

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        density = self.density if task.density is None else task.density
        positions = largest(vector, entries(density, vector.numel()))
        return (yield from gather_entries(vector, positions, vector.index_select(0, positions), task))

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """(ranks - 1) times 8 bytes an entry, after the ramp."""
        return (ranks - 1) * 8 * entries(self.density, sum(shape.numel() for shape in shapes))
