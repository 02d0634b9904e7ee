"""Loss curves times step times: how soon, and with how many bytes, a row is where ``ddp`` is after so many steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.comm.measure import Link, spread
from benchmarks.comm.rows import ALONE, BASE, Row

#: A row with a missing seed has no mean; one that diverged has no loss.
Loss = float | None


@dataclass(frozen=True)
class Curves:
    """Of all rows and seeds.

    Args:
        measured: the store's.
        every: steps between two losses.
        target_step: the step of ``ddp`` whose loss is to be reached.
    """

    measured: dict[str, Any]
    seeds: int
    every: int
    target_step: int

    def of(self, row: Row, kind: str) -> list[Any] | None:
        """Of each seed; ``None`` when one is missing or failed."""
        found = [self.measured.get(f"{row.name} / seed {seed}", {}) for seed in range(self.seeds)]
        return [each[kind] for each in found] if all(kind in each for each in found) else None

    def validation(self, row: Row) -> list[Loss]:
        """Means over the seeds, one an interval."""
        seeds = self.of(row, "validation") or []
        return [None if None in each else statistics.fmean(each) for each in zip(*seeds, strict=True)]

    def gaps(self, row: Row, base: Row) -> list[Loss] | None:
        """How much higher the loss after ``target_step`` steps is than that of ``ddp``, by seed, as a fraction."""
        ours, theirs = self.of(row, "final"), self.of(base, "final")
        if ours is None or theirs is None:
            return None
        return [None if a is None or not b else a / b - 1 for a, b in zip(ours, theirs, strict=True)]

    def target(self, base: Row) -> Loss:
        at = self.target_step // self.every - 1
        losses = self.validation(base)
        return losses[at] if at < len(losses) else None

    def steps_to(self, row: Row, target: float) -> float | None:
        """When the mean curve is at ``target``, between two of its points if need be; ``None``: not in these steps."""
        before: Loss = None
        for index, loss in enumerate(self.validation(row)):
            if loss is None:
                return None
            if loss <= target:
                part = 1.0 if before is None else (before - target) / (before - loss)
                return self.every * (index + part)
            before = loss
        return None


@dataclass(frozen=True)
class Speed:
    """A step on a link: medians over the rounds; seconds and their interquartile range, bytes that a rank sends."""

    seconds: float
    iqr: float
    frames: float
    payload: float
    theory: float
    load: float
    choice: str


def speed_of(measured: dict[str, Any], link: Link, name: str) -> Speed | None:
    """``None`` when a round is missing or failed."""
    found = [measured.get(f"{link.name} / {name} / {number}", {}) for number in range(link.rounds)]
    if not all("seconds" in each for each in found):
        return None
    seconds, iqr = spread([each["seconds"] for each in found])
    frames, payload, theory, load = (
        statistics.median(each[kind] for each in found)
        for kind in ("frame_bytes", "payload_bytes", "theory_bytes", "load")
    )
    choice = ", ".join(sorted({each["choice"] for each in found}))
    return Speed(seconds, iqr, frames, payload, theory, load, choice)


def cumulated(row: Row, steps: float, own: float, base: float) -> float:
    """Seconds or bytes of so many steps, of which the first, exact ones cost what those of ``ddp`` do."""
    exact = min(steps, row.exact_steps)
    return exact * base + (steps - exact) * own


def loss_rows(rows: Sequence[Row], curves: Curves) -> list[dict[str, Any]]:
    base = next(row for row in rows if row.name == BASE)
    target, table = curves.target(base), []
    for row in [row for row in rows if row.choice is None]:
        finals, gaps = curves.of(row, "final"), curves.gaps(row, base)
        if finals is None:
            table.append({"row": row.name, "loss": curves.measured.get(f"{row.name} / seed 0", {}).get("error", "-")})
            continue
        reached = None if target is None else curves.steps_to(row, target)
        table.append(
            {
                "row": row.name,
                "loss": "diverged" if None in finals else round(statistics.fmean(finals), 4),
                "above ddp, %": " ".join("diverged" if gap is None else f"{100 * gap:+.2f}" for gap in gaps or []),
                "steps to ddp's loss": "not reached" if reached is None else round(reached),
            }
        )
    return table


def speed_rows(rows: Sequence[Row], curves: Curves, measured: dict[str, Any], link: Link) -> list[dict[str, Any]]:
    """Of a link: a step, beside computing plus its own bytes at the link's rate; and what reaching the loss takes."""
    base = next(row for row in rows if row.name == BASE)
    alone, dense = speed_of(measured, link, ALONE), speed_of(measured, link, BASE)
    target, table = curves.target(base), []
    if alone is None or dense is None:
        return []

    def until(row: Row, own: Speed) -> tuple[float, float] | None:
        """Seconds and bytes; infinite when the loss is not reached, ``None`` where no loss was measured."""
        trained = row if row.choice is None else next((each for each in rows if each.name == own.choice), row)
        if target is None or not curves.validation(trained):
            return None
        steps = curves.steps_to(trained, target)
        if steps is None:
            return math.inf, math.inf
        assert dense is not None
        seconds = cumulated(trained, steps, own.seconds, dense.seconds)
        return seconds, cumulated(trained, steps, own.payload, dense.payload)

    sooner = until(base, dense)
    for name, row in [(ALONE, None), *((row.name, row) for row in rows)]:
        own = speed_of(measured, link, name)
        if own is None:
            failed = measured.get(f"{link.name} / {name} / 0", {}).get("error", "-")
            table.append({"row": name, "s/step": failed})
            continue
        line: dict[str, Any] = {
            "row": name,
            "s/step": round(own.seconds, 4),
            "IQR": shown(own.iqr, 4),
            "load": round(own.load, 1),
        }
        if row is not None:
            seconds, size = until(row, own) or (math.nan, math.nan)
            if link.rate is not None:
                ideal = alone.seconds + own.frames * 8e-6 / link.rate
                line |= {"/ ideal": shown(own.seconds / ideal, 3), "MB/step": shown(own.payload / 1e6, 4)}
                line["of formula"] = shown(own.payload / own.theory if own.theory else math.nan, 3)
                line["frames MB"] = shown(own.frames / 1e6, 4)
                line["MB to ddp's loss"] = shown(size / 1e6, 2)
            line["s to ddp's loss"] = shown(seconds, 1)
            line["sooner"] = shown(math.nan if sooner is None else sooner[0] / seconds, 2)
            line["takes"] = own.choice
        table.append(line)
    return table


def shown(value: float, digits: int) -> float | str:
    """For tables and JSON, which knows no infinity."""
    if math.isnan(value):
        return "-"
    return "not reached" if math.isinf(value) else round(value, digits)


def markdown(table: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for line in table for column in line))
    cells = [columns, *[[str(line.get(column, "")) for column in columns] for line in table]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
