"""What a pipeline sends between stages, and how many micro-batches' activations a stage holds."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import BATCH, CASES, Base
from tests.parity import shares
from tests.test_traffic import OneWindow


@pytest.mark.parametrize(
    ("stages", "micro_batches", "schedule"), [(2, 4, "1f1b"), (3, 8, "1f1b"), (3, 8, "gpipe"), (2, 16, "gpipe")]
)
def test_bytes_between_stages_are_micro_batches_times_payload(stages: int, micro_batches: int, schedule: Any) -> None:
    window, tokens, width = 3, 12, 16

    def fit(rank: int) -> dict[str, tuple[int, float]]:
        counter = OneWindow()
        strategy = Hybrid3DStrategy(
            pipeline_parallel_size=stages, num_microbatches=micro_batches, schedule=schedule, zero_stage=0
        )
        torch.manual_seed(0)
        run = trainer(strategy, stages, callbacks=[counter], accumulate_grad_batches=window, max_steps=2)
        run.fit(CASES["gpt"].build(), shares(CASES["gpt"].data(torch.float32), 0, 1))
        return {name: (c.calls, c.sent) for name, c in counter.traffic.by_axis["pp"].items()}

    payload = BATCH // micro_batches * tokens * width * 4
    for stage, counted in enumerate(run_ranks(stages, fit)):
        neighbours = (stage > 0) + (stage + 1 < stages)  # activations go on, gradients go back
        calls = window * micro_batches * neighbours
        assert counted["send"] == (calls, calls * payload)
        assert sum(number for name, (number, _) in counted.items() if name.startswith("recv")) == calls


class Watched(Base):
    """Counts how many results of its blocks are alive whenever one is called."""

    class Block(nn.Module):
        alive: list[Any] = []
        most = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            kind = type(self)
            y = torch.tanh(self.layer(x))
            if torch.is_grad_enabled() and not isinstance(y, torch._subclasses.FakeTensor):
                kind.alive = [ref for ref in kind.alive if ref() is not None] + [weakref.ref(y)]
                kind.most = max(kind.most, len(kind.alive))
            return torch.sin(y)  # keeps y for its gradient

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), batch[1])


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", [3, 2, 1]), ("gpipe", [8, 8, 8])])
def test_a_stage_holds_the_activations_that_its_schedule_promises(schedule: Any, expected: list[int]) -> None:
    def fit(rank: int) -> int:
        torch.manual_seed(0)
        strategy = Hybrid3DStrategy(pipeline_parallel_size=3, num_microbatches=8, schedule=schedule)
        trainer(strategy, 3).fit(Watched(), shares(CASES["odd"].data(torch.float32), 0, 1))
        return Watched.Block.most

    assert run_ranks(3, fit) == expected


@pytest.mark.parametrize("stages", [2, 3])
def test_parameters_that_live_elsewhere_take_no_memory(stages: int) -> None:
    def fit(rank: int) -> Any:
        held: list[int] = []

        torch.manual_seed(0)
        module = CASES["gpt"].build()

        def hook(*_: Any) -> None:
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
            held.append(sum(storages.values()))

        module.on_train_start = hook
        run = trainer(Hybrid3DStrategy(pipeline_parallel_size=stages, zero_stage=0), stages, max_steps=1)
        run.fit(module, shares(CASES["gpt"].data(torch.float32), 0, 1))
        return held[0], sum(p.numel() * 4 for p in module.parameters()), len(list(module.parameters()))

    results = run_ranks(stages, fit)
    whole, tensors = results[0][1:]
    assert sum(held for held, *_ in results) <= whole + stages * tensors * 8, "two numbers for each that is elsewhere"
