"""The two measurements: loss curves by seed, and step times in interleaved rounds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.comm.hosts import Hosts, Loopback, Skip
from benchmarks.comm.rows import ALONE, Row
from benchmarks.comm.store import Store
from benchmarks.comm.train import Work, curve, speed
from examples.gpt import StdlibText
from tests.harness import RankFailure


@dataclass(frozen=True)
class Link:
    """So many hosts, the megabits a second that each sends (``None``: loopback), and how often it is measured."""

    hosts: int
    rate: int | None
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.hosts} hosts, {'loopback' if self.rate is None else f'{self.rate} Mbit/s'}"

    def make(self) -> Loopback:
        return Loopback(self.hosts) if self.rate is None else Hosts(self.hosts, self.rate)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def curves(
    store: Store,
    rows: Sequence[Row],
    seeds: int,
    work: Work,
    text: StdlibText,
    steps: int,
    every: int,
    final_step: int,
    again: bool,
) -> None:
    """Seed by seed, so that what there is can be compared at any time."""
    for seed in range(seeds):
        for row in [row for row in rows if row.choice is None]:
            name = f"{row.name} / seed {seed}"
            if name not in store.measured or again:
                result = _tried(partial(curve, row, work, text, seed, steps, every, final_step))
                store.put(name, result)
                say(f"{name}: " + (result.get("error") or "loss {final}, {minutes} min".format(**result)))


def speeds(
    store: Store, rows: Sequence[Row], links: Sequence[Link], work: Work, text: StdlibText, steps: int, again: bool
) -> list[str]:
    """Round by round, all rows in each, so that what else the machine does hits them alike. Gives the reasons of what was skipped."""
    skipped = []
    todo: list[Row | None] = [None, *rows]
    for link in links:
        names = {
            (n, row): f"{link.name} / {row.name if row else ALONE} / {n}" for n in range(link.rounds) for row in todo
        }
        if not again and all(name in store.measured for name in names.values()):
            continue
        try:
            with link.make() as hosts:
                for (_, row), name in names.items():
                    if name not in store.measured or again:
                        result = _tried(partial(speed, row, work, text, hosts, steps))
                        store.put(name, result)
                        say(
                            f"{name}: " + (result.get("error") or "{seconds} s, {payload_bytes} bytes".format(**result))
                        )
        except Skip as reason:
            skipped.append(f"{link.name} skipped: {reason}")
            say(skipped[-1])
    return skipped


def _tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row that fails is a result."""
    try:
        return measure()
    except RankFailure as failure:
        print(failure, flush=True)
        lines = [line for report in failure.reports for line in report.splitlines() if "Error" in line]
        return {"error": lines[-1][:300] if lines else f"ranks ended with {failure.codes}"}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the range of the middle half."""
    if len(values) == 1:
        return values[0], math.nan
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), high - low
