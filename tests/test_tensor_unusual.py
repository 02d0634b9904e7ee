"""Modules that use cut layers in ways that no plan can see: right, or refused, never other numbers."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import RankFailure, run_ranks, trainer
from tests.models import CASES, Base, Case
from tests.parity import Run, assert_same_as_one_process, hybrid, shares
from tests.tensor_models import TENSOR_CASES


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


class LeaksALittle(Pair):
    """The same in a small part of the loss."""

    def loss(self, batch: Any) -> Tensor:
        kept: list[Tensor] = []
        handle = self.net[1].register_forward_hook(lambda *a: kept.append(a[2]))
        loss = super().loss(batch)
        handle.remove()
        return loss + 1e-3 * kept[-1].abs().mean()


class Gated(Base):
    """What the module takes is used between its cut layers, too. Upstream, every parameter is cut."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)) * x.sum(-1, keepdim=True).sigmoid())

    def __init__(self) -> None:
        super().__init__()
        self.lead = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16, bias=False))
        self.block, self.head = self.Block(), nn.Linear(16, 5)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.lead(batch[0]))), batch[1])


class Twice(Gated):
    """The block is right in its first call, and not in its second."""

    class Block(Gated.Block):
        def forward(self, x: Tensor, normal: bool = False) -> Tensor:
            y = self.act(self.up(x))
            return self.down(y.softmax(-1) if normal else y)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.block(self.lead(batch[0])), normal=True)), batch[1])


class Norm(Gated):
    """A norm before the cut layers: its gradient is whole already."""

    class Block(Gated.Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(self.norm(x))))


class Residual(Gated):
    """The residual is much larger than what is wrong; in 16 bits as large as its rounding."""

    class Block(Gated.Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * self.down(self.act(self.up(x)).softmax(-1))


class Regularised(Pair):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * self.net[0].weight.pow(2).sum()


class RegularisedWhole(Pair):
    """As the message to :class:`Regularised` says; and the norm of a cut weight is logged."""

    def loss(self, batch: Any) -> Tensor:
        term = self.net[0].weight.pow(2).sum()
        self.log("norm", self.net[0].weight.norm(), on_step=False, on_epoch=True)
        return super().loss(batch) + 0.01 * (term.full_tensor() if hasattr(term, "full_tensor") else term)


class MaskOfData(Base):
    """Attention scores have a term that is computed from the data, and has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lead = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16, bias=False))
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.lead(batch[0].unflatten(1, (2, 6)))
        mask = -(x[:, :, None] - x[:, None]).pow(2).sum(-1).repeat_interleave(4, 0)
        y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return F.cross_entropy(self.head(y.mean(1)), batch[1])


class WeightNorm(Pair):
    """The weight is computed before each call: such a layer stays whole."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.normed = nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 12))

    def hidden(self, x: Tensor) -> Tensor:
        return self.normed(super().hidden(x))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Slices, "is not called by that module's forward"),
        (Leaks, "The loss differs between the tensor-parallel ranks"),
        (LeaksALittle, "The loss differs between the tensor-parallel ranks"),
        (BeginsAtZero, "gives other numbers than the whole module does"),
        (Gated, "the gradient of argument 1 is not"),
        (Twice, "gives other numbers than the whole module does"),
        (Regularised, "add `term.full_tensor()`"),
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


def test_a_gradient_that_is_summed_twice_is_found_out() -> None:
    def fit(rank: int) -> str:
        plan = {"*": "auto", "up": "colwise", "down": "rowwise", "norm": "replicated_with_grad_allreduce"}
        with pytest.raises(ValueError) as caught:
            run = trainer(Hybrid3DStrategy(tensor_parallel_size=2, tensor_parallel_plan=plan, timeout=15), 2)
            run.fit(Norm(), shares(Case(Norm).data(torch.float32), 0, 1))
        return str(caught.value)

    assert all("the gradient of norm." in message for message in run_ranks(2, fit))


def test_a_small_error_in_16_bits_is_found_out() -> None:
    def fit(rank: int) -> str:
        torch.manual_seed(0)
        with pytest.raises(ValueError) as caught:
            run = trainer(Hybrid3DStrategy(tensor_parallel_size=2, timeout=15), 2, precision="bf16-mixed")
            run.fit(Residual(), shares(Case(Residual).data(torch.float32), 0, 1))
        return str(caught.value)

    assert all("gives other numbers" in message for message in run_ranks(2, fit))


def test_tokens_that_no_rank_has_are_an_error_at_every_step() -> None:
    def fit(rank: int) -> int:
        case = TENSOR_CASES["gpt8"]
        (tokens,) = case.data(torch.float32)
        tokens[17, 3] = 256  # the vocabulary has 256 tokens
        run = trainer(Hybrid3DStrategy(tensor_parallel_size=2, timeout=15), 2)
        with pytest.raises(IndexError, match=r"an embedding of 256 rows got indices from .* to 256"):
            run.fit(case.build(), DataLoader(TensorDataset(tokens), batch_size=6))
        return run.global_step

    assert run_ranks(2, fit) == [2, 2]


def test_ranks_whose_random_numbers_part_still_load_the_same() -> None:
    def fit(rank: int, when: str) -> list[float]:
        torch.manual_seed(0)
        module, losses = Pair(), []

        def draws(*_: Any) -> None:
            if rank == 0:
                torch.rand(3)  # as an example that only rank 0 makes does

        setattr(module, when, draws)
        module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
        data = TensorDataset(*Case(Pair).data(torch.float32))
        run = trainer(Hybrid3DStrategy(tensor_parallel_size=2, timeout=15), 2, max_epochs=4)
        run.fit(module, DataLoader(data, batch_size=4, shuffle=True))
        return losses

    first, second = run_ranks(2, lambda rank: fit(rank, "on_train_epoch_end"))
    assert first == second and len(first) > 16
    with pytest.raises(RankFailure, match="got different batches for training_step"):
        run_ranks(2, lambda rank: fit(rank, "on_train_epoch_start"))


def test_every_group_has_the_timeout() -> None:
    def fit(rank: int) -> None:
        strategy = Hybrid3DStrategy(tensor_parallel_size=2, timeout=3)
        stopped = []

        def stop(batch: Any, index: int) -> None:
            if index == 2:
                stopped.append(time.monotonic())
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)

        module = Pair()
        module.on_train_batch_start = stop
        try:
            trainer(strategy, 4).fit(module, shares(Case(Pair).data(torch.float32), rank // 2, 2))
        finally:
            print("waited", time.monotonic() - stopped[0])

    with pytest.raises(RankFailure) as failure:
        run_ranks(4, fit, timeout=10)
    assert failure.value.codes == [1, None, 1, 1]
    waited = [float(r.split("waited ")[1].split()[0]) for i, r in enumerate(failure.value.reports) if i != 1]
    assert max(waited) < 9


@pytest.mark.parametrize("build", [OnTheModule, GradientPenalty, RegularisedWhole, MaskOfData, WeightNorm])
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
