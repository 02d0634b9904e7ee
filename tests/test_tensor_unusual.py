"""Modules that use cut layers in ways that no plan can see: right, or refused, never other numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import CASES, Base, Case
from tests.parity import Run, assert_same_as_one_process, hybrid, shares


class Pair(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))
        self.head = nn.Linear(12, 5)

    def hidden(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(batch[0])), batch[1])


class Slices(Pair):
    """Calls the layers in another way than the module around them does."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.net[-1](F.normalize(self.net[:-1](x), dim=-1))


class Leaks(Pair):
    """What is between the layers gets into the loss."""

    def loss(self, batch: Any) -> Tensor:
        kept: list[Tensor] = []
        handle = self.net[1].register_forward_hook(lambda *a: kept.append(a[2]))
        loss = super().loss(batch)
        handle.remove()
        return loss + 0.1 * kept[-1].abs().mean()


class BeginsAtZero(Base):
    """A module that cannot be cut, of whose result nothing shows until the last layer has learned."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b = nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(self.act(self.a(x)).softmax(-1))

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = self.Block(), nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.block(batch[0])), batch[1])


class HeldParameters(Pair):
    """A list of parameters from before the layers were cut."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.net[0].weight]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * sum(p.pow(2).sum() for p in self.held)


class OnTheModule(Base):
    """Layers of the LightningModule itself, between which a step may do anything: they stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))
        self.encoder, self.act, self.decoder = nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)

    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self.act(self.encoder(self.net(batch[0]))), dim=-1)
        return F.cross_entropy(self.decoder(z), batch[1])


class GradientPenalty(Pair):
    """A second derivative through the cut layers."""

    def loss(self, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().loss(batch)
        x = batch[0].clone().requires_grad_()
        y = self.net(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return F.cross_entropy(self.head(y), batch[1]) + 0.1 * grad.pow(2).sum(1).mean()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Slices, "is not called by that module's forward"),
        (Leaks, "The loss differs between the tensor-parallel ranks"),
        (BeginsAtZero, "gives other numbers than the whole module does"),
    ],
)
def test_what_is_found_out(build: Any, words: str) -> None:
    def fit(rank: int) -> str:
        torch.manual_seed(0)
        with pytest.raises(ValueError) as caught:
            run = trainer(Hybrid3DStrategy(tensor_parallel_size=2, timeout=15), 2)
            run.fit(build(), shares(Case(build).data(torch.float32), 0, 1))
        return str(caught.value)

    first, second = run_ranks(2, fit)
    assert first == second and words in first


@pytest.mark.parametrize("build", [OnTheModule, GradientPenalty])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_gives_the_same_numbers(build: Any, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, build.__name__, Case(build))  # a name of its own: the oracle is kept by name
    assert_same_as_one_process(Run(build.__name__), 2, hybrid(tensor_parallel_size=2, zero_stage=stage), tensor=2)


def test_parameters_held_from_before_have_no_numbers() -> None:
    def fit(rank: int) -> bool:
        torch.manual_seed(0)
        module, losses = HeldParameters(), []
        module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
        run = trainer(Hybrid3DStrategy(tensor_parallel_size=2), 2, max_steps=1)
        run.fit(module, shares(Case(Pair).data(torch.float32), 0, 1))
        return losses[0] != losses[0] and bool(module.net[0].weight.isfinite().any()) is False

    run_ranks(2, fit)


def test_a_copy_of_a_cut_module_has_its_own_weights() -> None:
    def fit(rank: int) -> bool:
        torch.manual_seed(0)
        module, same = Pair(), []

        def copy_it(batch: Any, index: int) -> None:
            if index == 2:
                module.__dict__["old"] = copy.deepcopy(module.net)
            if index == 4:
                same.append(torch.equal(module.__dict__["old"](batch[0]), module.net(batch[0])))

        module.on_train_batch_start = copy_it
        trainer(Hybrid3DStrategy(tensor_parallel_size=2), 2).fit(module, shares(Case(Pair).data(torch.float32), 0, 1))
        return same[0]

    assert run_ranks(2, fit) == [False, False]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_that_makes_its_state_at_once(stage: int) -> None:
    def fit(rank: int, tensor: int) -> list[float]:
        torch.manual_seed(0)
        module, losses = Pair(), []
        module.configure_optimizers = lambda: torch.optim.Adagrad(module.parameters(), lr=0.05)
        module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
        run = trainer(Hybrid3DStrategy(tensor_parallel_size=tensor, zero_stage=stage), tensor, precision="64-true")
        run.fit(module, shares(Case(Pair).data(torch.float64), 0, 1))
        return losses

    (alone,) = run_ranks(1, lambda rank: fit(rank, 1))
    for losses in run_ranks(2, lambda rank: fit(rank, 2)):
        assert losses == pytest.approx(alone, rel=1e-10)


def test_sixteen_bits_beside_a_residual_are_no_other_numbers() -> None:
    def fit(rank: int) -> bool:
        torch.manual_seed(0)
        module = CASES["encoder"].build()
        layer = nn.TransformerEncoderLayer(16, 2, 256, 0.0, batch_first=True, norm_first=True)
        module.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        run = trainer(Hybrid3DStrategy(tensor_parallel_size=2), 2, precision="bf16-mixed", max_steps=2)
        run.fit(module, shares(CASES["encoder"].data(torch.float32), 0, 1))
        return True

    assert all(run_ranks(2, fit))
