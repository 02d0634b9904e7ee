"""What one optimizer step puts on the wire, counted, against the documented formula (docs/strategies/hybrid_3d.md)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_partrain.parallel.fully_shard import find_blocks
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import CASES
from tests.parity import shares
from tests.traffic import Traffic

WINDOW = 3


class OneWindow(pl.Callback):
    """Counts the second accumulation window."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WINDOW:
            self.traffic = Traffic(trainer.strategy.mesh)
            self.traffic.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * WINDOW - 1:
            self.traffic.__exit__(None, None, None)


def count(ranks: int, **arguments: Any) -> dict[str, dict[str, tuple[int, float]]]:
    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        counter = OneWindow()
        run = trainer(
            Hybrid3DStrategy(**arguments), ranks, callbacks=[counter], accumulate_grad_batches=WINDOW, max_steps=2
        )
        run.fit(CASES["gpt"].build(), shares(CASES["gpt"].data(torch.float32), rank, ranks))
        by_axis = counter.traffic.by_axis
        return {
            axis: {name: (c.calls, c.sent) for name, c in ops.items() if name != "broadcast"}
            for axis, ops in by_axis.items()
        }

    first, *others = run_ranks(ranks, fit)
    assert all(other == first for other in others)
    return first


def sizes() -> tuple[int, int]:
    """Bytes of the float32 model, and its number of parameters, each of which adds one flag of 4 bytes."""
    params = list(CASES["gpt"].build().parameters())
    return 4 * sum(p.numel() for p in params), len(params)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("reduce", "times"), [("window", 1), ("micro_batch", WINDOW)])
def test_stage_0_reduces_once_a_window(ranks: int, reduce: str, times: int) -> None:
    model, tensors = sizes()
    traffic = count(ranks, zero_stage=0, reduce=reduce)["data_parallel"]
    assert traffic == {"allreduce": (times, times * 2 * (ranks - 1) / ranks * (model + 4 * tensors))}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("reduce", "times"), [("window", 1), ("micro_batch", WINDOW)])
def test_stages_1_and_2_send_what_one_all_reduce_sends(ranks: int, stage: int, reduce: str, times: int) -> None:
    model, tensors = sizes()
    traffic = count(ranks, zero_stage=stage, reduce=reduce)["data_parallel"]
    each = (ranks - 1) / ranks * (model + 4 * tensors * ranks)
    gather = {"send": (ranks - 1, each), "recv": (ranks - 1, 0)}
    assert traffic == {"alltoall_base": (times, times * each), **gather}


def test_stage_3_gathers_each_block_for_each_pass() -> None:
    ranks = 2
    model, tensors = sizes()
    module = CASES["gpt"].build()
    blocks = find_blocks(module)
    assert len(blocks) == 3
    inside = 4 * sum(p.numel() for block in blocks for p in block.parameters())
    traffic = count(ranks, zero_stage=3)["data_parallel"]
    gathered = WINDOW * (2 * inside + (model - inside))  # blocks for both passes, the rest once a micro-batch
    assert traffic["allgather_base"] == (WINDOW * (2 * len(blocks) + 1), (ranks - 1) / ranks * gathered)
    assert traffic["alltoall_base"] == (len(blocks) + 1, (ranks - 1) / ranks * model), "one reduction a window"
    assert traffic["allreduce"] == (1, 2 * (ranks - 1) / ranks * 4 * tensors), "flags of unused parameters"


def test_hybrid_sharding_reduces_shards_over_replicas() -> None:
    model, tensors = sizes()
    traffic = count(4, zero_stage=1, data_parallel_replicate_size=2)
    each = model / 2 + 4 * tensors * 2 / 2
    assert traffic["dp_shard"] == {"alltoall_base": (1, each), "send": (1, each), "recv": (1, 0)}
    assert traffic["dp_replicate"] == {"allreduce": (1, model / 2 + 4 * tensors)}
