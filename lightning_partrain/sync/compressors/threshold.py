"""Gradient pruning: the entries that reach a threshold, in messages of a fixed size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import Compressor, Reduction, Task, number
from lightning_partrain.sync.compressors.topk import entries, gather_entries

THRESHOLD = "threshold"
#: So many entries are looked at for an estimate.
SAMPLE = 2**16
#: About how a threshold changes with the share of entries beyond it; between those of normal and of exponential tails at 1 %.
EXPONENT = 0.2
#: Of the table in which entries are sought.
ROWS = 8


def pick(mask: Tensor, room: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Positions of the true entries of ``mask``, (n,), going round from ``first`` on: as many as there is room for.

    Returns:
        (room,) positions, and (room,) which of them are meant: where fewer are true than there is room for, positions come again.
    """
    counts = mask.cumsum(0, dtype=torch.int32)
    total = counts[-1:]
    place = torch.arange(room, dtype=torch.int32, device=mask.device)
    wanted = place + counts[first - 1] if first else place
    positions = torch.searchsorted(counts, wanted % total.clamp_min(1) + 1)
    return positions.clamp_max_(mask.numel() - 1), place < total


class Threshold(Compressor):
    """The entries of at least a threshold's magnitude, as 32-bit positions and values; cheaper than exactly the largest.

    Messages have room for ``density`` of the entries and are of that size always. When there are more, the room goes to those that follow
    a place which moves on step by step: each has its turn within ``1 / density`` steps, or at most twice as many. Thresholds are estimated from a sample and
    reused, as by SIDCo (Abdelmoniem et al., arXiv 2101.10761) and Ok-Topk (Li & Hoefler, arXiv 2201.07598).

    Args:
        threshold: a magnitude. ``None``: such that about ``density`` of the entries reach it, for each rank by itself.
        density: the share of entries that messages have room for; 1, with the threshold 0, is lossless.
        reuse: an estimate serves for so many steps, corrected a little by how many entries reached it.

    Raises:
        ValueError: for an option out of range.
    """

    def __init__(self, threshold: float | None = None, density: float = 0.01, reuse: int = 16) -> None:
        self.threshold: float | None = None if threshold is None else number("threshold", threshold, 0, 1e38)
        self.density: float = number("density", density, 0, 1, low_open=True)
        self.reuse: int = number("reuse", reuse, 1, float("inf"), whole=True)

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        room = entries(self.density, vector.numel())
        threshold = self._threshold(vector, task)
        candidates, reach, hits = self._candidates(vector, threshold, room, task.step)
        where, filled = pick(reach, room)
        positions = candidates.index_select(0, where)
        values = vector.index_select(0, positions).mul_(filled)
        reduced = yield from gather_entries(vector, positions, values, task)
        if self.threshold is None:
            reached = torch.maximum(reach.sum(), hits)  # not all columns are looked into where too many are hit
            change = (reached / (self.density * vector.numel())).clamp(0.1, 10) ** EXPONENT
            corrected = threshold * change.to(vector)
            reduced.state[THRESHOLD] = {part.name: corrected for part in task.parts}
        return reduced

    @staticmethod
    def _candidates(vector: Tensor, threshold: Tensor, room: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where to look: into those columns of a table that have any entry which reaches the threshold.

        That is cheaper than counting through the vector. The columns that come first are others in every step, with no more entries than
        there is room for.

        Returns:
            Positions, which of the entries there reach the threshold, and how many columns have any that does.
        """
        numel = vector.numel()
        rows = max(1, min(ROWS, room, numel // room))
        width = math.ceil(numel / rows)
        whole = numel // width * width
        table, rest = vector[:whole].view(-1, width), vector[whole:]
        hit = (table.amax(0) >= threshold).logical_or_(table.amin(0) <= -threshold)
        hit[: rest.numel()].logical_or_(rest.abs() >= threshold)
        columns, filled = pick(hit, room, step * (room // rows) % width)
        candidates = columns[:, None] + torch.arange(0, rows * width, width, device=vector.device)
        inside = (candidates < numel).logical_and_(filled[:, None]).view(-1)
        candidates = candidates.view(-1).clamp_max_(numel - 1)
        reach = (vector.index_select(0, candidates).abs_() >= threshold).logical_and_(inside)
        return candidates, reach, hit.sum()

    def _threshold(self, vector: Tensor, task: Task) -> Tensor:
        """A scalar above zero: what is zero needs no room."""
        tiny = torch.finfo(vector.dtype).tiny
        if self.threshold is not None:
            return vector.new_full((), max(self.threshold, tiny))
        known = task.state.get(THRESHOLD, {})
        before = [known[part.name] for part in task.parts if part.name in known]
        if before and task.step % self.reuse:  # may differ where parameters went unused, or travelled apart
            return torch.stack(before).median().clamp_min_(tiny)
        sample = vector
        if vector.numel() > SAMPLE:
            draw = task.draw(vector.device, THRESHOLD, task.parts[0].name)
            sample = vector[torch.randint(vector.numel(), (SAMPLE,), generator=draw, device=vector.device)]
        largest = sample.abs().topk(entries(self.density, sample.numel()), sorted=False).values
        return largest.amin().clamp_min_(tiny)

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """(ranks - 1) times 8 bytes for each entry that there is room for."""
        return (ranks - 1) * 8 * entries(self.density, sum(shape.numel() for shape in shapes))
