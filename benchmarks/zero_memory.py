"""Bytes of model state that a rank holds, by engine, stage and moment, against the documented formulas.

`TORCH_EXTENSIONS_DIR=... python -m benchmarks.zero_memory [--only deepspeed]`: the benchmark GPT with AdamW on 2 and 4 CPU ranks, in float32 and
in bf16-mixed, after the set-up, before the second optimizer step and after it. Every floating-point tensor of the process is counted that Python
can reach, each storage once, and the buckets of `ddp`, which only its communication hook shows. Numbers are bytes a parameter; the rank that is
furthest off its formula
decides `off`. P/G/O/M/B: parameters, gradients, optimizer state, master copies, buckets before the step.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.common import benchmark_gpt, random_bytes, report
from benchmarks.overhead import FSDP2GPT
from examples.gpt import GPTModule
from lightning_partrain import compat
from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel import memory
from lightning_partrain.strategies import (
    DeepSpeedZeroStrategy,
    FairScaleZeroStrategy,
    Hybrid3DStrategy,
    ZeroStrategy,
)
from tests.harness import run_ranks, trainer

MOMENTS: tuple[memory.Moment, ...] = ("setup", "step", "between")
LAYERS, WIDTH = 6, 240
NOTED = 0.1  # percent


def gpt(kind: type[GPTModule] = GPTModule) -> GPTModule:
    module = benchmark_gpt(LAYERS, WIDTH)
    module.__class__ = kind
    return module


def theirs(share: Callable[[int], float], buckets: float) -> Callable[[int], dict[memory.Moment, float]]:
    """The formula of Lightning's own: all of a rank's 16 bytes a parameter times ``share``, and buckets."""
    return lambda ranks: {
        "setup": 4 * share(ranks) + buckets,
        "step": 16 * share(ranks) + buckets,
        "between": 16 * share(ranks) + buckets,
    }


@dataclass(frozen=True)
class Engine:
    """How to build a strategy for a number of ranks; ``formula`` (bytes a parameter) where the layout has none itself."""

    strategy: Callable[[int], Any]
    module: type[GPTModule] = GPTModule
    formula: Callable[[int], dict[memory.Moment, float]] | None = None
    needs: str = "torch"


ENGINES: dict[str, Engine] = {
    "lightning ddp": Engine(lambda _: DDPStrategy(), formula=theirs(lambda _: 1.0, 4.0)),
    "lightning ModelParallel": Engine(
        lambda ranks: ModelParallelStrategy(ranks, 1), FSDP2GPT, theirs(lambda ranks: 1 / ranks, 0.0)
    ),
    "hybrid_3d zero_stage=0": Engine(lambda _: Hybrid3DStrategy(zero_stage=0)),
    **{f"zero_{s}": Engine(lambda _, s=s: ZeroStrategy(s)) for s in (1, 2, 3)},  # type: ignore[misc]
    **{f"zero_{s}_deepspeed": Engine(lambda _, s=s: DeepSpeedZeroStrategy(s), needs="deepspeed") for s in (1, 2, 3)},  # type: ignore[misc]
    **{f"zero_{s}_fairscale": Engine(lambda _, s=s: FairScaleZeroStrategy(s), needs="fairscale") for s in (1, 2)},  # type: ignore[misc]
}


def live(more: list[Tensor]) -> int:
    """Bytes of the storages of all floating-point tensors that Python can reach, and of ``more``."""
    gc.collect()
    tensors = list(more)
    for each in gc.get_objects():
        if isinstance(each, Tensor):
            tensors += [each] if each.grad_fn is not None or each.grad is None else [each, each.grad]
    floating = [local_tensor(t) for t in tensors if t.is_floating_point()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in floating}.values())


def seen(buckets: dict[int, Tensor], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over all ranks, as ``ddp`` has it without a hook, and ``buckets`` knows the memory of each bucket."""
    if bucket.index() == 0:
        buckets.clear()
    buffer = bucket.buffer()
    buckets[buffer.untyped_storage().data_ptr()] = buffer
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


seen.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # torch compares them


class Count(pl.Callback):
    """Bytes at each moment: live, by the layout's own account, and by its formula."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self.engine, self.ranks = engine, ranks
        self.rows: dict[str, dict[str, float]] = {}
        self.buckets: dict[int, Tensor] = {}
        self.there: memory.Expectation | None = None

    def look(self, trainer: pl.Trainer, moment: memory.Moment) -> None:
        parameters = sum(p.numel() for p in gpt().parameters())
        layout: Any = getattr(trainer.strategy, "model_parallel", None)
        if layout is None:
            formula = self.engine.formula
            assert formula is not None
            bytes_live = live(list(self.buckets.values()))
            self.rows[moment] = {"live": bytes_live / parameters, "formula": formula(self.ranks)[moment]}
            return
        optimizers = [compat.unwrap_optimizer(optimizer) for optimizer in trainer.strategy.optimizers]
        self.there = self.there or memory.expectation(layout, optimizers)
        own = memory.measured(layout, optimizers)
        formula_bytes = self.there.at(moment)
        self.rows[moment] = {
            "live": live([t for kind in layout.state_tensors().values() for t in kind]) / parameters,
            "formula": sum(amount or 0 for amount in formula_bytes.values()) / parameters,
            **{kind: amount / parameters for kind, amount in own.items() if amount},
        }

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, DDPStrategy):
            model: Any = trainer.strategy.model
            model.register_comm_hook(self.buckets, seen)
        self.look(trainer, "setup")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.look(trainer, "step")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.look(trainer, "between")


def count(name: str, ranks: int, precision: str) -> dict[str, Any]:
    engine = ENGINES[name]

    def fit(rank: int) -> dict[str, dict[str, float]]:
        counter = Count(engine, ranks)
        run = trainer(engine.strategy(ranks), ranks, max_steps=2, callbacks=[counter], precision=precision)
        run.fit(gpt(engine.module), random_bytes(2, 1))
        if counter.buckets:  # made with the module's wrapper, but seen in the first backward pass only
            held = sum(bucket.untyped_storage().nbytes() for bucket in counter.buckets.values())
            counter.rows["setup"]["live"] += held / sum(p.numel() for p in gpt().parameters())
        return counter.rows

    by_rank = run_ranks(ranks, fit, timeout=600)
    row: dict[str, Any] = {"engine": name, "ranks": ranks, "precision": precision}
    worst = 0.0
    for moment in MOMENTS:
        of_first = by_rank[0][moment]
        row[f"{moment}: formula"], row[moment] = round(of_first["formula"], 3), round(of_first["live"], 3)
        if moment == "step" and "parameters" in of_first:
            row["of these (P/G/O/M/B)"] = " / ".join(f"{of_first.get(kind, 0.0):.2f}" for kind in memory.KINDS[:5])
        elif moment == "step":
            row["of these (P/G/O/M/B)"] = ""
        for rows in by_rank:
            off = 100 * (rows[moment]["live"] / rows[moment]["formula"] - 1)
            worst = off if abs(off) > abs(worst) else worst
    row["step: most of a rank"] = round(max(rows["step"]["live"] for rows in by_rank), 3)
    row["off %"], row["off because"] = round(worst, 2), ""
    if abs(worst) > NOTED:
        row["off because"] = "not known"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="engines whose name has this in it")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--precision", nargs="*", default=["32-true", "bf16-mixed"])
    arguments = parser.parse_args()
    rows = []
    for name, engine in ENGINES.items():
        if arguments.only not in name or importlib.util.find_spec(engine.needs) is None:
            continue
        for precision in arguments.precision:
            for ranks in arguments.ranks:
                rows.append(count(name, ranks, precision))
                print(rows[-1], flush=True)
    report("zero_memory" if not arguments.only else f"zero_memory_{arguments.only}", rows)


if __name__ == "__main__":
    main()
