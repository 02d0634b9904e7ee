"""What the benchmarks share: the benchmark GPT, timed fits on forked ranks, pairs, tables, JSON."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPTModule
from tests.harness import run_ranks, trainer

RESULTS = Path(__file__).parent / "results"
WARM_UP = 8


def benchmark_gpt(layers: int = 6, width: int = 192) -> GPTModule:
    """About 2.8 M parameters at the default sizes."""
    torch.manual_seed(0)
    return GPTModule(layers=layers, width=width, heads=6, context=64)


def random_bytes(batches: int, batch_size: int, context: int = 64) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (batches * batch_size, context + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch_size)


class StepTimer(pl.Callback):
    """Seconds from the start of one training batch to the start of the next, after a warm-up."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def median(self) -> float:
        starts = self.starts[WARM_UP:]
        return statistics.median(after - before for before, after in itertools.pairwise(starts))


@dataclass(frozen=True)
class Contestant:
    """A module, the strategy that trains it and its data (batches, samples of each), all built anew for each fit."""

    module: Callable[[], pl.LightningModule]
    strategy: Callable[[], Any]
    data: Callable[[int, int], DataLoader] = random_bytes

    def median_step(self, ranks: int, steps: int, batch_size: int) -> float:
        """Seconds of the median step of one fit, on this rank."""
        timer = StepTimer()
        run = trainer(self.strategy(), ranks, max_steps=steps, callbacks=[timer])
        run.fit(self.module(), self.data(steps, batch_size))
        return timer.median()


def paired(
    ours: Contestant, theirs: Contestant, pairs: int, steps: int, batch_size: int, ranks: int = 2
) -> dict[str, Any]:
    """Fit the two in turn, seconds apart, on the same forked ranks of one thread each.

    The slowest rank counts. Gives the median of each, and the median, lowest and highest ratio of the pairs.
    """

    def fits(rank: int) -> list[tuple[float, float]]:
        results = []
        for pair in range(pairs + 1):
            order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
            seconds = {each: each.median_step(ranks, steps, batch_size) for each in order}
            results.append((seconds[ours], seconds[theirs]))
        return results[1:]  # the first pair warms up

    by_rank = run_ranks(ranks, fits, timeout=1200)
    seconds = [(max(a for a, _ in pair), max(b for _, b in pair)) for pair in zip(*by_rank, strict=True)]
    ratios = [a / b for a, b in seconds]
    return {
        "ours_ms": round(statistics.median(a for a, _ in seconds) * 1e3, 2),
        "theirs_ms": round(statistics.median(b for _, b in seconds) * 1e3, 2),
        "extra_ms": round(statistics.median(a - b for a, b in seconds) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "pairs": pairs,
    }


def machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print ``rows`` as a table and write them, with the machine, to ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
    columns = list(rows[0])
    cells = [columns, *[[str(row.get(c, "")) for c in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for number, line in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
