"""The two pictures: validation loss against seconds on a slow link, and against megabytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.comm.measure import Link
from benchmarks.comm.product import Curves, cumulated, speed_of
from benchmarks.comm.rows import BASE, Row

#: What exists without this package is grey; every other row has a colour and a dash of its own.
GREYS = ("#000000", "#666666", "#999999")
COLORS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#19b5c9")
DASHES = ("-", "--", ":")


def plot(rows: Sequence[Row], curves: Curves, measured: dict[str, Any], link: Link, folder: Path) -> list[Path]:
    """``comm_loss_seconds.png`` and ``comm_loss_megabytes.png`` in ``folder``, of the rows that were measured. The legend is in the order in
    which the loss of ``ddp`` is reached."""
    speeds = {row: speed_of(measured, link, row.name) for row in rows}
    base = next(row for row in rows if row.name == BASE)
    target, dense = curves.target(base), speeds[base]
    if target is None or dense is None:
        return []
    files = []
    for file_name, label, log, kind in (
        ("comm_loss_seconds.png", f"seconds ({link.name})", False, lambda speed: speed.seconds),
        ("comm_loss_megabytes.png", "megabytes that a rank has sent", True, lambda speed: speed.payload / 1e6),
    ):
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        order: list[tuple[float, Any, str]] = []
        for row, speed in speeds.items():
            losses = curves.validation(row)
            if speed is None or not losses:
                continue
            points = [
                (cumulated(row, curves.every * (index + 1), kind(speed), kind(dense)), loss)
                for index, loss in enumerate(losses)
                if loss is not None
            ]
            steps = curves.steps_to(row, target)
            at = float("inf") if steps is None else cumulated(row, steps, kind(speed), kind(dense))
            (line,) = axes.plot(*zip(*points, strict=True), **style(row, rows), linewidth=1.6)
            words = "not reached" if steps is None else f"{at:.3g}"
            order.append((at, line, f"{row.name}: {words}"))
        order.sort(key=lambda each: each[0])
        axes.axhline(target, color="#666666", linewidth=0.8, linestyle=(0, (1, 2)))
        highest = max((loss for loss in curves.validation(base)[:1] if loss is not None), default=target)
        axes.set(xlabel=label, ylabel="validation loss, nats a byte", ylim=(None, highest * 1.02))
        if log:
            axes.set_xscale("log")
        else:
            axes.set_xlim(0, cumulated(base, curves.target_step, dense.seconds, dense.seconds))
        unit = "MB" if log else "s"
        axes.legend(
            [line for _, line, _ in order],
            [words for *_, words in order],
            title=f"{unit} to ddp's loss\nafter {curves.target_step} steps",
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            frameon=False,
            fontsize=9,
        )
        axes.grid(alpha=0.25)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / file_name, dpi=130)
        plt.close(figure)
        files.append(folder / file_name)
    return files


def style(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    theirs = [each for each in rows if not each.name.startswith("ddp_")]
    if row in theirs:
        place = theirs.index(row)
        return {"color": GREYS[place % 3], "linestyle": DASHES[place % 3]}
    place = [each for each in rows if each not in theirs].index(row)
    return {"color": COLORS[place % 7], "linestyle": DASHES[place // 7 % 3]}
