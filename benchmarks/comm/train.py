"""One fit of the demo's GPT, on hosts: its loss curve, or the time and the bytes of its steps."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.comm.hosts import Loopback, Sent, sent
from benchmarks.comm.rows import Row
from examples.gpt import Batch, GPTModule, StdlibText, Windows
from tests.harness import trainer

#: Steps before those that are timed: connections, warm starts, what "auto" measures.
WARM_UP = 8
#: Exact steps at the beginning of a fit that is timed, for rows that have some: theirs are those of ``ddp``.
WARM_UP_EXACT = 3
#: Of the held-out text, the same for all rows, for the one loss and for each point of the curve.
FINAL_WINDOWS, CURVE_WINDOWS = 512, 64
#: Of the loss curves.
RANKS = 2


@dataclass(frozen=True)
class Work:
    """The model, and what each rank computes in a step: ``batch`` windows of ``context`` bytes.

    The demo's GPT, wider and with less to compute in a step, so that exact averages take five times as long at 100 Mbit/s. The learning rate is
    the best for ``ddp`` of 6, 3, 1.5 and 0.75e-3, about.
    """

    layers: int = 4
    width: int = 192
    heads: int = 6
    context: int = 64
    batch: int = 2
    learning_rate: float = 1e-3

    def module(self, seed: int) -> GPTModule:
        pl.seed_everything(seed, verbose=False)
        sizes = {name: value for name, value in asdict(self).items() if name != "batch"}
        return GPTModule(**sizes)

    def parameters(self) -> int:
        return sum(param.numel() for param in self.module(0).parameters())


def read_text(context: int) -> StdlibText:
    """Once, before ranks are forked."""
    text = StdlibText(context)
    text.setup()
    return text


def shares(windows: Dataset[Batch], count: int, batch: int, rank: int, ranks: int) -> DataLoader[Batch]:
    """Every ``ranks``-th window: together the ranks see the same ones in each row."""
    return DataLoader(Subset(windows, range(rank, count, ranks)), batch)


class Curve(pl.Callback):
    """This rank's training loss, a mean over each ``every`` steps, and its share's validation loss at their end.

    Attributes:
        train, validation: nats per byte, one an interval.
        final: validation loss on many windows after ``final_step`` steps.
    """

    def __init__(self, held_out: DataLoader[Batch], many: DataLoader[Batch], every: int, final_step: int) -> None:
        self.held_out, self.many, self.every, self.final_step = held_out, many, every, final_step
        self.train: list[float] = []
        self.validation: list[float] = []
        self.final = math.nan
        self._losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(float(outputs["loss"]))
        if len(self._losses) == self.every:
            self.train.append(statistics.fmean(self._losses))
            self.validation.append(self._loss(pl_module, self.held_out))
            self._losses.clear()
        if batch_idx + 1 == self.final_step:
            self.final = self._loss(pl_module, self.many)

    @torch.no_grad()
    def _loss(self, module: Any, loader: DataLoader[Batch]) -> float:
        return statistics.fmean(float(module.loss(batch)) for batch in loader)


def curve(
    row: Row, work: Work, text: StdlibText, seed: int, steps: int, every: int, final_step: int, ranks: int = RANKS
) -> dict[str, Any]:
    """On the fastest link. Losses are means over the ranks, which have as many windows each."""

    def fit(rank: int) -> tuple[list[float], list[float], float]:
        held_out, many = (
            shares(Windows(text.val_text, work.context, count), count, 32, rank, ranks)
            for count in (CURVE_WINDOWS, FINAL_WINDOWS)
        )
        record = Curve(held_out, many, every, final_step)
        _fit(row, row.exact_steps, work, text, rank, ranks, seed, steps, record)
        return record.train, record.validation, record.final

    begin = time.perf_counter()
    train, validation, final = zip(*Loopback(ranks).run(fit, timeout=3600), strict=True)

    def mean(values: Sequence[float]) -> float | None:
        value = statistics.fmean(values)
        return round(value, 5) if math.isfinite(value) else None

    return {
        "train": [mean(each) for each in zip(*train, strict=True)],
        "validation": [mean(each) for each in zip(*validation, strict=True)],
        "final": mean(final),
        "minutes": round((time.perf_counter() - begin) / 60, 2),
    }


class Stopwatch(pl.Callback):
    """Seconds and sent bytes of the steps after the warm-up, from the end of one to the end of the last."""

    def __init__(self, steps: int, row: Row | None, ranks: int) -> None:
        self.steps, self.row, self.ranks = steps, row, ranks
        self.seconds, self.sent = 0.0, Sent()
        self.theory: float | None = None
        self.choice = ""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == WARM_UP:
            self.seconds, self.sent = time.perf_counter(), sent()
        if batch_idx + 1 == WARM_UP + self.steps:
            self.seconds, self.sent = time.perf_counter() - self.seconds, sent().since(self.sent)
            if self.row is not None:
                shapes = [param.shape for param in pl_module.parameters()]
                self.theory = self.row.theory(trainer.strategy, shapes, self.ranks)
                self.choice = self.row.choice(trainer.strategy) if self.row.choice else ""


def speed(row: Row | None, work: Work, text: StdlibText, hosts: Loopback, steps: int) -> dict[str, Any]:
    """Of one fit: seconds of a mean step of the slowest rank, and bytes of the one that sends most.

    Args:
        row: ``None`` for the same ranks at the same time, each for itself, without any communication.
    """
    ranks = hosts.count

    def fit(rank: int) -> dict[str, Any]:
        watch = Stopwatch(steps, row, ranks)
        exact = 0 if row is None else min(row.exact_steps, WARM_UP_EXACT)
        _fit(row, exact, work, text, rank, ranks, 0, WARM_UP + steps, watch)
        return {
            "seconds": round(watch.seconds / steps, 5),
            "frame_bytes": round(watch.sent.frames / steps),
            "payload_bytes": round(watch.sent.payload / steps),
            "theory_bytes": round(watch.theory or 0),
            "choice": watch.choice,
            "load": round(os.getloadavg()[0], 2),
        }

    by_rank = hosts.run(fit)
    return {
        name: value if name == "choice" else max(each[name] for each in by_rank) for name, value in by_rank[0].items()
    }


def _fit(
    row: Row | None,
    exact_steps: int,
    work: Work,
    text: StdlibText,
    rank: int,
    ranks: int,
    seed: int,
    steps: int,
    callback: pl.Callback,
) -> None:
    windows = Windows(text.train_text, work.context, text.train_windows_per_epoch, seed)
    data = shares(windows, steps * work.batch * ranks, work.batch, rank, ranks)
    options: dict[str, Any] = {"max_steps": steps, "callbacks": [callback], "gradient_clip_val": 1.0}
    if row is None:
        os.environ["WORLD_SIZE"] = "1"
        os.environ["NODE_RANK"] = "0"
        run = trainer(**options)
    else:
        run = trainer(row.strategy(exact_steps), num_nodes=ranks, **{**options, "gradient_clip_val": row.clip})
    run.fit(work.module(seed), data)
