"""Random numbers: alike where tensors are whole, different where ranks have slices or samples of their own, the same twice."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import CASES

#: (ranks, tensor, stages, other arguments)
LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "dp2": (2, 1, 1, {"zero_stage": 0}),
    "dp2-zero3": (2, 1, 1, {"zero_stage": 3}),
    "tp2": (2, 2, 1, {}),
    "pp2": (2, 1, 2, {"num_microbatches": 2}),
    "dp2-tp2": (4, 2, 1, {}),
    "dp2-pp2": (4, 1, 2, {"num_microbatches": 2}),
    "tp2-pp2": (4, 2, 2, {"num_microbatches": 2}),
}


class Drop(nn.Module):
    """Dropout that keeps its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        if self.training and not isinstance(mask, torch._subclasses.FakeTensor):
            self.masks.append((mask != 0).detach())
        return x * mask


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))
        self.on_weights, self.on_sum = Drop(), Drop()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = self.on_weights((q @ k.transpose(-1, -2)).softmax(-1))
        return x + self.on_sum(self.o_proj((weights @ v).transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inside, self.down = nn.Linear(16, 32), Drop(), nn.Linear(32, 16)
        self.outside = Drop()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outside(self.down(F.relu(self.inside(self.up(x)))))


PLAN = {"*": "auto", "up": "colwise", "down": "rowwise"}


class Drops(pl.LightningModule):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), FeedForward()) for _ in range(2))
        self.recompute = recompute

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def masks(layout: tuple[int, int, int, dict[str, Any]], recompute: bool = False) -> list[dict[str, list[Tensor]]]:
    """Of each rank, by the name of the dropout: its masks in the order of the calls of three steps."""
    ranks, tensor, stages, arguments = layout

    def fit(rank: int) -> dict[str, list[Tensor]]:
        pl.seed_everything(3, verbose=False)
        module = Drops(recompute)
        plan = {"tensor_parallel_plan": PLAN} if tensor > 1 else {}
        strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, pipeline_parallel_size=stages, **arguments, **plan)
        loader = DataLoader(TensorDataset(torch.randn(4 * 3, 5, 16)), batch_size=4)
        trainer(strategy, ranks).fit(module, loader)
        return {name: m.masks for name, m in module.named_modules() if isinstance(m, Drop) and m.masks}

    return run_ranks(ranks, fit)


def cut(name: str) -> bool:
    return name.endswith(("on_weights", "inside"))


def same(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    assert len(a) == len(b) > 0
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("layout", ["dp2", "dp2-zero3", "tp2", "pp2", "dp2-tp2", "dp2-pp2", "tp2-pp2"])
def test_masks_of_every_region(layout: str) -> None:
    ranks, tensor, stages, _ = LAYOUTS[layout]
    found = masks(LAYOUTS[layout])
    replicas = ranks // tensor // stages
    for stage in range(stages):
        for replica in range(replicas):
            first, *others = (found[(stage * replicas + replica) * tensor + t] for t in range(tensor))
            assert len(first) == 8 // stages
            everything = [mask for each in first.values() for mask in each if mask.shape[-1] == 16]
            assert len({tuple(mask.flatten().tolist()) for mask in everything}) == len(everything)  # no mask twice
            for name, calls in first.items():
                assert 0.35 < torch.cat([mask.flatten() for mask in calls]).float().mean() < 0.65
                for other in others:
                    assert (not any(same(calls, other[name]))) if cut(name) else all(same(calls, other[name]))
                if replica:
                    before = found[stage * replicas * tensor][name]
                    assert not any(same(before, calls))


@pytest.mark.parametrize("layout", ["dp2", "tp2", "tp2-pp2"])
def test_masks_are_the_same_when_a_block_is_computed_again(layout: str) -> None:
    once = masks(LAYOUTS[layout])
    for alone, twice in zip(once, masks(LAYOUTS[layout], recompute=True), strict=True):
        for name, calls in alone.items():
            counts: dict[tuple[bool, ...], int] = defaultdict(int)
            for mask in twice[name]:
                counts[tuple(mask.flatten().tolist())] += 1
            assert set(counts) == {tuple(mask.flatten().tolist()) for mask in calls}  # as without recomputation
            assert set(counts.values()) <= {1, 2}
            if name.endswith(("on_weights", "on_sum", "inside")):  # the last one need not be computed again
                assert set(counts.values()) == {2}, name


def test_attention_of_torch_drops_other_weights_on_each_rank() -> None:
    def fit(rank: int) -> list[Tensor]:
        pl.seed_everything(3, verbose=False)

        class Attends(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
                self.shown: list[Tensor] = []

            def training_step(self, batch: Any, _: int) -> Tensor:
                x = batch[0]
                y, weights = self.attention(x, x, x, average_attn_weights=False)
                self.shown.append(weights.detach() != 0)
                return (y + torch.rand_like(y)).pow(2).mean()  # drawn alike

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        module = Attends()
        loader = DataLoader(TensorDataset(torch.randn(12, 5, 16)), batch_size=4)
        trainer(Hybrid3DStrategy(tensor_parallel_size=2), 2).fit(module, loader)
        return module.shown

    for mask, other in zip(*run_ranks(2, fit), strict=True):
        assert torch.equal(mask, other)  # all heads, gathered
        assert not torch.equal(mask[:, :2], mask[:, 2:])  # of which each rank has dropped two by itself


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_two_runs_are_equal_bit_for_bit(layout: str) -> None:
    ranks, tensor, stages, arguments = LAYOUTS[layout]

    def fit(rank: int) -> list[Any]:
        pl.seed_everything(7, workers=True, verbose=False)
        module = CASES["encoder"].build()
        for each in module.modules():
            if isinstance(each, (nn.Dropout, nn.MultiheadAttention)):
                setattr(each, "p" if isinstance(each, nn.Dropout) else "dropout", 0.2)
        losses: list[float] = []
        module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
        strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, pipeline_parallel_size=stages, **arguments)
        data = DataLoader(TensorDataset(*CASES["encoder"].data(torch.float32)), batch_size=4, shuffle=True)
        run = trainer(strategy, ranks, max_epochs=2, limit_train_batches=6, use_distributed_sampler=True)
        run.fit(module, data)
        return [losses, [p.detach().clone() for p in module.parameters()]]

    for (losses, params), (again, params_again) in zip(run_ranks(ranks, fit), run_ranks(ranks, fit), strict=True):
        assert losses == again and len(set(losses)) == 12
        assert all(torch.equal(a, b) for a, b in zip(params, params_again, strict=True))


@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_attention_of_torch_is_the_same_when_it_is_computed_again(layout: str) -> None:
    """Also as the last of a block, where a checkpoint leaves it by an exception once it has computed enough."""
    ranks, tensor, stages, arguments = LAYOUTS[layout]

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.attention = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=False)[0]

    def fit(rank: int, recompute: bool) -> list[float]:
        pl.seed_everything(3, verbose=False)
        module, seen = Drops(recompute), []
        module.blocks = nn.ModuleList(Attends() for _ in range(2))
        module.on_before_optimizer_step = lambda _: seen.append(float(module.trainer.strategy.grad_norm()))
        module.on_train_batch_end = lambda outputs, *_: seen.append(float(outputs["loss"]))
        strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, pipeline_parallel_size=stages, **arguments)
        loader = DataLoader(TensorDataset(torch.randn(4 * 3, 5, 16)), batch_size=4)
        trainer(strategy, ranks, precision="64-true").fit(module, loader)
        return seen

    once = run_ranks(ranks, lambda rank: fit(rank, False))
    for alone, again in zip(once, run_ranks(ranks, lambda rank: fit(rank, True)), strict=True):
        assert again == pytest.approx(alone, rel=1e-12)
