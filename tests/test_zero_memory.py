"""Bytes that a rank holds, by engine, stage and moment, against the formulas, and the table that tells of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain import compat
from lightning_partrain.parallel import memory
from lightning_partrain.parallel.memory_sizes import STATES, Sizes, share, states_per_element
from lightning_partrain.strategies import Hybrid3DStrategy, ZeroStrategy, memory_table
from tests.harness import run_ranks, trainer
from tests.models import Base
from tests.test_zero import OnHost

WIDTH = 97


class Mixed(Base):
    """Rows that do not divide, a frozen layer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.head = nn.Linear(WIDTH, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.frozen(torch.tanh(self.first(batch[0])))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x), batch[1])


class Moments(pl.Callback):
    """Kind -> (expected, measured) at each moment, of the second optimizer step."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, tuple[int, int]]] = {}
        self.passes = 0

    def look(self, trainer: pl.Trainer, moment: memory.Moment) -> None:
        strategy: Any = trainer.strategy
        optimizers = [compat.unwrap_optimizer(optimizer) for optimizer in strategy.optimizers]
        if moment == "setup":
            self.there = memory.expectation(strategy.model_parallel, optimizers)
        now, then = memory.measured(strategy.model_parallel, optimizers), self.there.at(moment)
        self.seen[moment] = {kind: (then[kind] or 0, now[kind]) for kind in memory.KINDS}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.look(trainer, "setup")

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.passes += 1
        if self.passes == 5:  # with windows of 3
            self.look(trainer, "window")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.look(trainer, "step")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.look(trainer, "between")


def fit(rank: int, strategy: Any, precision: Any = "32-true") -> Any:
    """What :class:`Moments` saw, and what the log was told."""
    told: list[str] = []
    memory_table.rank_zero_info = told.append  # type: ignore[assignment]
    torch.manual_seed(0)
    moments = Moments()
    data = TensorDataset(torch.randn(12, 12), torch.randint(0, 5, (12,)))
    run = trainer(strategy, 2, max_steps=2, callbacks=[moments], accumulate_grad_batches=3, precision=precision)
    run.fit(Mixed(), DataLoader(data, batch_size=2))
    assert "optimizer_step" not in strategy.__dict__
    return moments.seen, told


def check(strategies: dict[str, Callable[[], Any]], precision: str = "32-true") -> dict[str, list[str]]:
    """All in the same two ranks. Returns what rank 0 told of each."""
    by_rank = run_ranks(2, lambda rank: {name: fit(rank, make(), precision) for name, make in strategies.items()})
    for (rank, of_rank), name in itertools.product(enumerate(by_rank), strategies):
        seen, told = of_rank[name]
        assert list(seen) == ["setup", "window", "step", "between"]
        for moment, kinds in seen.items():
            total, now = (sum(amounts) for amounts in zip(*kinds.values(), strict=True))
            assert now == pytest.approx(total, rel=0.01), f"{name}, rank {rank}, {moment}: {kinds}"
        of_step = {kind: now for kind, (_, now) in seen["step"].items()}
        assert of_step == pytest.approx({kind: then for kind, (then, _) in seen["step"].items()}, rel=0.05, abs=200)
        assert len(told) == (2 if rank == 0 else 0)
    return {name: by_rank[0][name][1] for name in strategies}


def test_native_stages() -> None:
    told = check(
        {
            "stage 0": lambda: Hybrid3DStrategy(zero_stage=0),
            **{f"stage {s}": lambda s=s: ZeroStrategy(s) for s in (1, 2, 3)},  # type: ignore[misc]
            "stage 1, stepped on the host": lambda: OnHost(zero_stage=1, offload="optimizer"),
            **{f"stage {s}, each pass": lambda s=s: ZeroStrategy(s, reduce="micro_batch") for s in (2, 3)},  # type: ignore[misc]
        }
    )
    table, after = told["stage 2"]
    rows = [line.split("  ") for line in table.splitlines()]
    assert rows[0][0].startswith("Memory of rank 0 (ZeroStrategy, stage 2, 2 ranks; P = 39,872")
    assert "T = 30,366 trained" in rows[0][0] and "N = 2" in rows[0][0]
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line if cell.strip()] for line in rows[2:])}
    assert cells["parameters"][0] == "4P" and cells["parameters"][1] == cells["parameters"][2]
    assert cells["gradients"][0] == "4T/N" and cells["gradients"][2] == "-"
    assert cells["optimizer state"][0] == "8T/N" and cells["master copies"][0] == "none" and "buckets" not in cells
    assert "% from the formula" in after and abs(float(after.split()[-5])) < 1.0


def test_native_under_autocast_keeps_float32() -> None:
    check({f"stage {s}": lambda s=s: ZeroStrategy(s) for s in (1, 3)}, "bf16-mixed")  # type: ignore[misc]


def test_deepspeed_stages() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from lightning_partrain.parallel.deepspeed import ops
    from lightning_partrain.strategies import DeepSpeedZeroStrategy

    if not ops.ready(ops.needed_ops("cpu")):
        pytest.skip("DeepSpeed's ops are not built: lightning-partrain doctor --build-deepspeed")
    # or a model as small as this one stays whole from its first forward pass on
    few = {"stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    told = check(
        {
            f"stage {s}, {reduce}": lambda s=s, reduce=reduce: DeepSpeedZeroStrategy(
                s, config={"zero_optimization": few}, reduce=reduce
            )  # type: ignore[misc]
            for s in (1, 2, 3)
            for reduce in ("window", "micro_batch")
        }
    )
    assert "master copies    4T/N" in told["stage 1, window"][0]


def test_fairscale_stages() -> None:
    pytest.importorskip("fairscale", reason='FairScale is not installed: pip install "lightning-partrain[fairscale]"')
    from lightning_partrain.strategies import FairScaleZeroStrategy

    check({f"stage {s}": lambda s=s: FairScaleZeroStrategy(s) for s in (1, 2)})  # type: ignore[misc]


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}],
}


@pytest.mark.parametrize("name", sorted(STATES))
def test_states_of_optimizers(name: str) -> None:
    for options in OPTIONS.get(name, [{}]):
        param = nn.Parameter(torch.ones(6, 5))
        param.grad = torch.ones(6, 5).to_sparse() if name == "SparseAdam" else torch.ones(6, 5)
        optimizer = getattr(torch.optim, name)([param], lr=0.1, **options)
        optimizer.step()
        kept = [v for v in optimizer.state[param].values() if isinstance(v, Tensor) and v.shape == param.shape]
        assert states_per_element(optimizer, optimizer.param_groups[0]) == len(kept)


def test_an_optimizer_that_nobody_knows_is_not_guessed() -> None:
    class Own(torch.optim.AdamW):
        pass

    optimizer = Own([nn.Parameter(torch.ones(2))])
    assert states_per_element(optimizer, optimizer.param_groups[0]) is None
    unknown = Sizes({"state": None, "parameters": 8, "trained": 8}, {"state": None, "trained": 4}, {"P": 2, "T": 2}, 2)
    there = memory.Expectation("native", 1, unknown, lambda moment: memory.native(1, moment, "window"))
    table = memory_table.lines(there, dict.fromkeys(memory.KINDS, 4), "Own")
    assert any(line.split() == ["optimizer", "state", "?P/N", "unknown", "4", "B"] for line in table.splitlines())
    assert "formula" not in memory_table.after_step(there, dict.fromkeys(memory.KINDS, 4))


def test_shares_are_those_of_chunk() -> None:
    for rows, parts in itertools.product((0, 1, 3, 7, 8), (1, 2, 4)):
        chunks = [chunk.numel() for chunk in torch.ones(rows, 3).chunk(parts)]
        assert [share((rows, 3), [(0, parts, i)]) for i in range(parts)] == chunks + [0] * (parts - len(chunks))
    assert share((8, 6), [(0, 2, 1), (0, 2, 0)]) == 2 * 6 and share((8, 6), [(1, 2, 0), (0, 4, 3)]) == 2 * 3
