"""The rows: ways to train the same model on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_partrain.strategies import CompressedDDPStrategy
from lightning_partrain.sync.compressors import COMPRESSORS, make
from lightning_partrain.sync.compressors.base import all_reduce_bytes

Shapes = Sequence[torch.Size]
#: The row that the others are compared with, and the one that only computes.
BASE, ALONE = "ddp", "compute"


@dataclass(frozen=True)
class Row:
    """
    Args:
        name: in tables and plots.
        strategy: for Trainer; given the optimizer steps at the beginning that are to be exact.
        theory: bytes that a rank sends in a step: given the strategy while it trains, the shapes of the parameters, and the ranks.
        exact_steps: so many of the loss curve's first steps cost what those of ``ddp`` do.
        clip: the norm to which gradients are cut; ``None`` for strategies that refuse it.
        choice: of a row that takes another one, by the link: its name, given the strategy while it trains. It has no loss curve of its own.
    """

    name: str
    strategy: Callable[[int], Any]
    theory: Callable[[Any, Shapes, int], float | None] = lambda *_: None
    exact_steps: int = 0
    clip: float | None = 1.0
    choice: Callable[[Any], str] | None = None


class HookedDDP(DDPStrategy):
    """Lightning's ``ddp`` with a communication hook on CPUs as well, where Lightning leaves it out without a word."""

    def __init__(self, hook: Callable[..., Any], state: Callable[[], Any] = lambda: None, **options: Any) -> None:
        super().__init__(**options)
        self._hook, self._state = hook, state

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(self._state(), self._hook)  # type: ignore[union-attr,operator]


def torch_powersgd(exact_steps: int, rank: int = 4) -> HookedDDP:
    """In one bucket, as it hangs on gloo with more; with an epsilon, without which a gradient of zeros makes NaN."""

    def state() -> PowerSGDState:
        return PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=max(2, exact_steps),
            orthogonalization_epsilon=1e-8,
        )

    return HookedDDP(powerSGD_hook, state, bucket_cap_mb=1000)


def torch_powersgd_bytes(_: Any, shapes: Shapes, ranks: int, rank: int = 4) -> float:
    numel = 0
    for shape in shapes:
        rows = shape[0] if shape else 1
        columns = shape.numel() // rows
        thin = rank * (rows + columns)
        numel += thin if len(shape) > 1 and 2 * thin < shape.numel() else shape.numel()
    return all_reduce_bytes(4 * numel, ranks)


def dense_bytes(width: int) -> Callable[[Any, Shapes, int], float]:
    """An all-reduce of gradients of ``width`` bytes an entry."""
    return lambda _, shapes, ranks: all_reduce_bytes(width * sum(shape.numel() for shape in shapes), ranks)


def our_bytes(strategy: Any, _: Shapes, ranks: int) -> float:
    """By the compressor's formula for what its buckets hold; what is exact, and a number a parameter and bucket, come on top."""
    compressor, total = strategy.compressed.exchange.compression.compressor, 0.0
    for bucket in strategy.model_parallel.reducer.buckets:
        if bucket.compressed:
            total += compressor.sent_bytes([part.shape for part in bucket.parts], ranks)
        small = len(bucket.parts) + 1 if bucket.compressed else bucket.width
        total += all_reduce_bytes(4 * small, ranks)
    return total


def auto_choice(strategy: Any) -> str:
    """By the compressor that is used in this step: it may be another one later."""
    compressor = strategy.compressed.exchange.compression.compressor
    if compressor is None:
        return BASE
    return next(f"ddp_{name}" for name in COMPRESSORS if repr(make(name)) == repr(compressor))


def ours(compressor: str, exact_steps: int = 0, clip: float | None = 1.0) -> Row:
    def strategy(exact: int) -> CompressedDDPStrategy:
        return CompressedDDPStrategy(compressor, start_step=exact)

    return Row(
        f"ddp_{compressor}", strategy, our_bytes, exact_steps, clip, auto_choice if compressor == "auto" else None
    )


#: 1-bit Adam is to be exact for 15 to 25 % of the steps, and refuses clipping.
ONEBIT_EXACT_STEPS = 100

ROWS = [
    Row(BASE, lambda _: DDPStrategy(), dense_bytes(4)),
    Row("ddp + fp16 hook", lambda _: HookedDDP(fp16_compress_hook), dense_bytes(2)),
    Row("torch PowerSGD", torch_powersgd, torch_powersgd_bytes),
    *(ours(name) for name in COMPRESSORS if name != "onebit"),
    ours("onebit", ONEBIT_EXACT_STEPS, clip=None),
    ours("auto"),
]


def select(names: Sequence[str]) -> list[Row]:
    """The rows of these names, and always ``ddp``; all without any.

    Raises:
        SystemExit: for a name that no row has.
    """
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        raise SystemExit(f"--rows: {sorted(unknown)} do not exist. There are {[row.name for row in ROWS]}.")
    return [row for row in ROWS if not names or row.name in names or row.name == BASE]
