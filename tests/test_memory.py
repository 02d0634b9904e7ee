"""Bytes of model state that a rank holds, by storage, at three moments, against the documented formula."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from examples.gpt import GPTModule
from lightning_partrain import compat
from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.fully_shard import find_blocks
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer


def held(strategy: Any) -> int:
    """Bytes of the distinct storages of parameters, gradients, buckets and optimizer state."""
    tensors: list[Tensor] = [t for kind in strategy.model_parallel.state_tensors().values() for t in kind]
    for optimizer in strategy.optimizers:
        for state in optimizer.state.values():
            tensors += [local_tensor(v) for v in state.values() if isinstance(v, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Moments(pl.Callback):
    """After the forward pass, before the optimizer's step, and the most at any time in between and in the step."""

    def __init__(self) -> None:
        self.after_forward = self.before_step = self.peak = 0

    def sample(self, trainer: Any) -> int:
        now = held(trainer.strategy)
        self.peak = max(self.peak, now)
        return now

    def look(self, trainer: Any) -> None:
        self.sample(trainer)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(lambda _: self.look(trainer))
        for block in find_blocks(module):
            block.register_forward_hook(lambda *_: self.look(trainer))
        for fsdp in (m for m in module.modules() if isinstance(m, compat.FSDPModule)):
            for group in compat.fsdp_param_groups(fsdp):
                reduce = group.post_backward

                def post_backward(*args: Any, reduce: Any = reduce) -> None:
                    self.sample(trainer)
                    reduce(*args)

                group.post_backward = post_backward

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        self.after_forward = self.sample(trainer)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.before_step = self.sample(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.sample(trainer)


def module() -> GPTModule:
    torch.manual_seed(0)
    return GPTModule(layers=6, width=64, heads=2, context=32)


def measure(ranks: int, stage: int, reduce: str = "micro_batch", accumulate: int = 3) -> tuple[int, int, int]:
    """Of the third optimizer step."""

    def fit(rank: int) -> Any:
        moments = Moments()
        strategy = Hybrid3DStrategy(zero_stage=stage, reduce=reduce)
        tokens = torch.randint(0, 256, (3 * accumulate, 9))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]))
        trainer(strategy, ranks, callbacks=[moments], max_steps=3, accumulate_grad_batches=accumulate).fit(
            module(), loader
        )
        return moments.after_forward, moments.before_step, moments.peak

    return run_ranks(ranks, fit)[0]


P = sum(p.numel() for p in module().parameters())
BLOCK = sum(p.numel() for p in find_blocks(module())[0].parameters())
REST = P - 6 * BLOCK
HEAD = sum(p.numel() for part in (module().model.norm, module().model.head) for p in part.parameters())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_by_stage(ranks: int) -> None:
    """AdamW in float32: 4 bytes a parameter, 4 a gradient, 8 of optimizer state; shards kept between micro-batches.

    Stage 3 at its peak holds one block and what lies outside of the blocks whole, with the gradients of that block and of
    the layers after the blocks.
    """
    n = ranks
    formula = {
        0: (16 * P, 16 * P, 16 * P),
        1: (8 * P + 12 * P / n, 8 * P + 12 * P / n, 8 * P + 12 * P / n),
        2: (4 * P + 12 * P / n, 4 * P + 12 * P / n, 8 * P + 12 * P / n),
        3: (16 * P / n + 4 * REST, 16 * P / n, 16 * P / n + 8 * BLOCK + 4 * (REST + HEAD)),
    }
    for stage, expected in formula.items():
        measured = measure(ranks, stage)
        print(stage, [round(m / P, 3) for m in measured], [round(f / P, 3) for f in expected])
        assert measured == pytest.approx(expected, rel=0.01), f"stage {stage}: {measured} instead of {expected}"


def test_a_window_keeps_whole_gradients() -> None:
    """With reduce="window", stages 2 and 3 hold whole gradients until the window's reduction, and shards after it."""
    for stage, after_forward in ((2, 8 * P + 12 * P / 2), (3, 12 * P / 2 + 4 * REST + 4 * P)):
        measured = measure(2, stage, reduce="window")
        assert measured[0] == pytest.approx(after_forward, rel=0.01), (stage, measured, after_forward)
        assert measured[1] == pytest.approx(4 * P + 12 * P / 2 if stage == 2 else 16 * P / 2, rel=0.01)
