"""FairScale's engine: the numbers of one process in both stages, also where FairScale by itself would hang or go wrong."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_partrain.strategies import Hybrid3DStrategy
from lightning_partrain.strategies import fairscale as strategies
from lightning_partrain.strategies.fairscale import FairScaleZeroStrategy
from tests import parity, test_precision
from tests.harness import RankFailure, run_ranks, trainer
from tests.models import CASES, Base, FrozenAndUnused, OddSizes
from tests.parity import Recorder, Run, shares
from tests.test_trainer import GAN, Alternating, ManualAccumulation, OwnBackward, PrebuiltOptimizer, states

pytest.importorskip("fairscale", reason='FairScale is not installed: pip install "lightning-partrain[fairscale]"')

STAGES = [1, 2]


def fairscale(stage: int, **arguments: Any) -> FairScaleZeroStrategy:
    return FairScaleZeroStrategy(stage, timeout=40, **arguments)  # type: ignore[arg-type]


# -- the numbers of one process ------------------------------------------------------------------------------------------

ROWS = [
    (Run("odd", "64-true", "sgd", 3, ("norm", 0.1)), 2),
    (Run("odd", "32-true", "adamw", 1, ("norm", 0.1)), 4),
    (Run("frozen", "64-true", "adamw", 3, ("value", 0.01)), 4),
    (Run("tied", "64-true", "adamw", 1, ("norm", 0.1)), 2),
    (Run("batch_norm", "32-true", "sgd", 3), 2),
    (Run("gpt", "32-true", "adamw", 3, ("norm", 0.1)), 2),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("run", "ranks"), ROWS, ids=lambda value: getattr(value, "case", None))
def test_same_as_one_process(run: Run, ranks: int, stage: int) -> None:
    expected = parity.one_process(run)
    records = run_ranks(ranks, lambda rank: parity.fit(run, rank, ranks, fairscale(stage)))
    parity.complete(records, ranks)  # each rank has the gradients of its parameters in stage 2
    bad = [
        f"rank {n}: {line}" for n, record in enumerate(records) for line in parity.differences(record, expected, run)
    ]
    assert not bad, "\n".join(bad)


# -- what users of Lightning do ------------------------------------------------------------------------------------------

Data = Callable[[], Any]


def fit(module: pl.LightningModule, loader: Any, strategy: Any, ranks: int, **options: Any) -> dict[str, Tensor]:
    run = trainer(strategy, ranks, **{"precision": "64-true", **options})
    run.fit(module, loader)
    if isinstance(strategy, FairScaleZeroStrategy):
        assert strategy._owners is not None
        for optimizer in run.optimizers:
            assert {strategy._owners[p] for p, state in optimizer.state.items() if state} <= {strategy.global_rank}
    return states(module)


class Backbone(Base):
    """A callback unfreezes layers, and adds a group of parameters, after the strategy has dealt them out."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
        self.head = nn.Linear(7, 5)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class InTurns(Backbone):
    """A layer is trained, frozen while another is unfrozen, and trained again."""

    def on_train_epoch_start(self) -> None:
        self.backbone[2].requires_grad_(self.current_epoch > 0)
        self.head.requires_grad_(self.current_epoch != 1)

    def configure_optimizers(self) -> Any:
        self.backbone[2].requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Mixed(OddSizes):
    """Parameters of two types, one of which no optimizer holds; new memory for one in the middle; an optimizer that sees whole matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.loose = nn.Parameter(torch.ones(12))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0] * self.loose, batch[1]]) + self.shift.square().sum() + self.shift.sum()

    def on_train_start(self) -> None:
        self.head.weight.data = self.head.weight.data.clone()

    def configure_optimizers(self) -> Any:
        rest = [p for p in self.parameters() if p is not self.loose and p.numel()]
        return torch.optim.Adafactor(rest, lr=0.02)


class Shared(GAN):
    """One parameter with two optimizers; what is frozen has gradients of a pass that was not reduced."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        loss = F.mse_loss(self.generator(batch[0][:, :4]), batch[0])
        with one.toggle_model(sync_grad=False):
            self.manual_backward(loss / 2)
        self.generator[0].requires_grad_(False)
        loss = F.mse_loss(self.generator(batch[0][:, 4:8]), batch[0])
        self.manual_backward(loss / 2)
        self.manual_backward(self.discriminator(batch[0]).square().mean())
        one.step()
        two.step()
        self.generator[0].requires_grad_(True)
        one.zero_grad()
        two.zero_grad()

    def configure_optimizers(self) -> Any:
        both = self.generator[2].weight
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.Adam([both, *self.discriminator.parameters()], lr=1e-2),
        ], []


class Discards(ManualAccumulation):
    """Throws away gradients of which some are reduced and some are not."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(batch))
        (optimizer if batch_idx % 2 else self).zero_grad()
        self.manual_backward(self.loss(batch) * 2)
        with torch.no_grad():
            self.head.weight.data = self.head.weight.data.clone()
            optimizer.step()
        optimizer.zero_grad()


class Branches(FrozenAndUnused):
    """Some ranks pass by a layer in the middle of those that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)


class CreateGraph(OddSizes):
    def on_train_batch_start(self, *_: Any) -> None:
        self.head.weight.data = self.head.weight.data.clone()

    def backward(self, loss: Tensor) -> None:
        loss.backward(create_graph=True)


class KeepsZeros(OddSizes):
    """Gradients that are set to zero, and not thrown away."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def prebuilt(loader: Any, strategy: Callable[[], Any], ranks: int) -> dict[str, Tensor]:
    module = PrebuiltOptimizer("adagrad")  # has its state from the beginning, and its scheduler
    fit(module, loader, strategy(), ranks)
    return fit(module, loader, strategy(), ranks)


def unfrozen(loader: Any, strategy: Callable[[], Any], ranks: int) -> dict[str, Tensor]:
    finetune = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, verbose=False)
    return fit(Backbone(), loader, strategy(), ranks, max_epochs=3, callbacks=[finetune])


def averaged(loader: Any, strategy: Callable[[], Any], ranks: int) -> dict[str, Tensor]:
    return fit(OddSizes(), loader, strategy(), ranks, callbacks=[EMAWeightAveraging(decay=0.5)])


def simply(kind: type[pl.LightningModule], **options: Any) -> Callable[..., dict[str, Tensor]]:
    return lambda loader, strategy, ranks: fit(kind(), loader, strategy(), ranks, **options)


USES: dict[str, Callable[..., dict[str, Tensor]]] = {
    "GAN": simply(GAN, max_epochs=2),
    "frozen in turn": simply(Alternating, max_epochs=2),
    "manual accumulation": simply(ManualAccumulation),
    "discards": simply(Discards),
    "branches": simply(Branches),
    "shared by optimizers": simply(Shared),
    "own backward": simply(OwnBackward, accumulate_grad_batches=2),
    "create_graph": simply(CreateGraph, accumulate_grad_batches=2),
    "zeros": simply(KeepsZeros, accumulate_grad_batches=2),
    "mixed": simply(Mixed, precision="32-true"),
    "prebuilt": prebuilt,
    "unfrozen": unfrozen,
    "in turns": simply(InTurns, max_epochs=3),
    "averaged": averaged,
}


def all_uses(rank: int, ranks: int, strategy: Callable[[], Any]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, use in USES.items():
        torch.manual_seed(0)
        dtype = torch.float32 if name == "mixed" else torch.float64
        batch = 15 if ranks in (1, 3) else 16
        data = tuple(t[:105] for t in CASES["odd"].data(dtype))
        found[name] = use(shares(data, rank, ranks, batch=batch), strategy, ranks)
    return found


_one_process: list[dict[str, dict[str, Tensor]]] = []


@pytest.mark.parametrize("stage", STAGES)
def test_what_users_do(stage: int) -> None:
    """On three ranks."""
    if not _one_process:
        _one_process.extend(run_ranks(1, lambda _: all_uses(0, 1, lambda: "auto")))
    expected = _one_process[0]
    for got in run_ranks(3, lambda rank: all_uses(rank, 3, lambda: fairscale(stage))):
        for use, tensors in expected.items():
            tolerance = (1e-5, 1e-6) if use == "mixed" else (1e-10, 1e-12)
            for name, value in tensors.items():
                torch.testing.assert_close(
                    got[use][name],
                    value,
                    rtol=tolerance[0],
                    atol=tolerance[1],
                    msg=lambda m, n=f"{use}, {name}": f"{n}: {m}",
                )


@pytest.mark.parametrize("stage", STAGES)
def test_an_infinite_gradient_on_one_rank_is_skipped_by_all(stage: int) -> None:
    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        watch = test_precision.Watch(rank=1)
        loader = shares(test_precision.tokens(8), rank, 2, batch=8)
        run = trainer(fairscale(stage), 2, precision="16-mixed", callbacks=[watch], gradient_clip_val=1.0)
        run.fit(test_precision.Small(), loader)
        return watch.seen()

    expected = test_precision.on_ranks(test_precision.ONE, "16-mixed", 8, rank=0)[0]
    assert [step for step, *_ in expected.states] == [1, 2, 3, 3, 4, 5, 6, 7]
    for watch in run_ranks(2, fit):
        assert watch.states == expected.states
        assert watch.losses == pytest.approx(expected.losses, abs=2e-2)
        assert watch.norms[4:] == pytest.approx(expected.norms[4:], rel=2e-2)


# -- checkpoints -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, Callable[..., Any]]] = {
    "plain": (1, lambda **_: "auto"),
    "fairscale1-2": (2, lambda **kind: fairscale(1, **kind)),
    "fairscale2-4": (4, lambda **kind: fairscale(2, **kind)),
    "fairscale2-1": (1, lambda **kind: fairscale(2, **kind)),
    "zero3-2": (2, lambda **kind: Hybrid3DStrategy(zero_stage=3, timeout=40, **kind)),
    "one": (1, lambda **kind: Hybrid3DStrategy(timeout=40, **kind)),
}


def train(layout: str, epochs: int, kind: str, folder: Path, resume: Path | None, case: str) -> list[list[float]]:
    """Losses of each rank; the last state is in ``folder / layout``."""
    ranks, strategy = LAYOUTS[layout]

    def fit(rank: int) -> list[float]:
        torch.manual_seed(0)
        module = CASES[case].build().double()
        module.optimizer = "sgd" if case == "odd" else "adamw"
        recorder = Recorder()
        chosen = strategy(checkpoint_format=kind)
        run = trainer(chosen, ranks, precision="64-true", max_epochs=epochs, callbacks=[recorder])
        run.fit(module, shares(CASES[case].data(torch.float64), rank, ranks), ckpt_path=resume and str(resume))
        run.save_checkpoint(folder / layout)
        if isinstance(chosen, FairScaleZeroStrategy):  # resumed, each rank has its own
            assert {chosen._owners[p] for p, s in run.optimizers[0].state.items() if s} <= {rank}
        return recorder.record.losses

    return run_ranks(ranks, fit)


@pytest.mark.parametrize(
    ("case", "kind", "chain"),
    [
        ("frozen", "full", ["fairscale1-2", "zero3-2", "fairscale2-4", "plain", "fairscale2-1"]),
        ("odd", "sharded", ["fairscale2-4", "fairscale1-2", "one", "fairscale2-1"]),
    ],
)
def test_a_chain_of_engines_is_the_run_that_was_never_stopped(
    tmp_path: Path, case: str, kind: str, chain: list[str]
) -> None:
    (expected,) = train("plain", len(chain), "full", tmp_path / "whole", None, case)
    steps, before = len(expected) // len(chain), None
    for number, layout in enumerate(chain):
        for losses in train(layout, number + 1, kind, tmp_path, before, case):
            assert losses == pytest.approx(expected[number * steps : (number + 1) * steps], rel=1e-9)
        before = tmp_path / layout
    if kind == "full":
        theirs = torch.load(tmp_path / "whole" / "plain", weights_only=True)
        ours = torch.load(before, weights_only=True)
        (a,), (b,) = ours["optimizer_states"], theirs["optimizer_states"]
        assert list(ours["state_dict"]) == list(theirs["state_dict"]) and list(a["state"]) == list(b["state"])
        assert a["param_groups"] == b["param_groups"]


# -- memory, and the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_what_each_rank_holds(stage: int, tmp_path: Path) -> None:
    """Before a step; the optimizer's state after it. Then the module is plain, and another strategy goes on with it."""

    class Measure(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
            layout = trainer.strategy.model_parallel  # type: ignore[attr-defined]
            self.held = {kind: sum(t.nbytes for t in each) for kind, each in layout.state_tensors().items()}
            self.reference = weakref.ref(layout._shards[0].oss)

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.graph = sum(p.sum() for p in module.parameters())  # that nodes of autograd stay
            trainer.save_checkpoint(tmp_path / "file")

    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        module, measure = CASES["tied"].build(), Measure()
        loader = shares(CASES["tied"].data(torch.float32), rank, 2)
        run = trainer(fairscale(stage), 2, max_steps=2, callbacks=[measure])
        run.fit(module, loader)
        held = {**measure.held, "state": sum(s["exp_avg"].nbytes for s in run.optimizers[0].state.values() if s)}
        assert all(type(p) is nn.Parameter and p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
        gc.collect()
        assert measure.reference() is None  # no parameter knows FairScale any more
        again = trainer(Hybrid3DStrategy(zero_stage=3), 2, max_steps=2)
        before = states(module)
        again.fit(module, loader)
        return held, again.global_step, sum(p.nbytes for p in module.parameters()), before

    found = run_ranks(2, fit)
    whole = found[0][2]
    for held, steps, *_ in found:
        assert steps == 2
        assert held["parameters"] == whole
        assert held["state"] < 0.66 * whole  # the embedding is one parameter
        if stage == 1:
            assert held["gradients"] == whole
        else:
            assert held["gradients"] == held["state"] and held["buckets"] == 0
    assert sum(held["state"] for held, *_ in found) == whole
    saved = torch.load(tmp_path / "file", weights_only=True)["state_dict"]
    for name, value in found[1][3].items():
        assert torch.equal(saved[name], value) and saved[name].untyped_storage().nbytes() == value.nbytes
    assert saved["blocks.0.weight"].data_ptr() == saved["blocks.2.weight"].data_ptr()


def test_names_of_fairscale_that_are_relied_on() -> None:
    """FairScale's own words for what ``GradientsToOwners`` changes."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    from lightning_partrain.parallel.fairscale_reduce import GradientsToOwners

    for name in ("refresh_trainable", "_get_reduce_fn", "_clear_counters", "_consume_work_handles"):
        assert callable(getattr(ShardedDataParallel, name))
    for name in ("refresh_trainable", "partition_parameters", "step"):
        assert callable(getattr(OSS, name))
    assert "_get_reduce_fn" in vars(GradientsToOwners)
    set_up = inspect.getsource(ShardedDataParallel.__init__)
    for name in ("_trainable_params", "_grad_hooks", "_grad_to_be_reduced", "_rank"):
        assert f"self.{name}" in set_up
    assert "self._get_reduce_fn(index, param, dst_rank)" in inspect.getsource(ShardedDataParallel._setup_backward_hooks)
    reduce = inspect.getsource(ShardedDataParallel._get_reduce_fn)
    assert "if not self._should_accumulate_grads and self._grad_to_be_reduced[index]" in reduce
    assert "if not self._bucket_flush_callback_set" in reduce
    assert "self.optim = self._optim_constructor(self.partition_parameters()[self.rank], **" in inspect.getsource(OSS)


# -- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_stage": 3}, "FairScale ends at stage 2.*zero_3"),
        ({"zero_stage": True}, "does not exist"),
        ({"checkpoint_format": "torn"}, "Choose 'full' or 'sharded'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FairScaleZeroStrategy(**arguments)


def test_without_fairscale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*lightning-partrain\[fairscale\]"):
        FairScaleZeroStrategy()


class Sparse(OddSizes):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)


class NoManualBackward(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.generator(batch[0][:, :4]).sum().backward()


class Reentrant(OddSizes):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.eye(12))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda y: y @ self.turn, x, use_reentrant=True)
        return super().loss([x, batch[1]])


class WithLBFGS(OddSizes):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "stage", "message"),
    [
        (WithLBFGS, 1, "LBFGS works on one vector"),
        (Sparse, 2, "sparse=False"),
        (NoManualBackward, 2, "self.manual_backward"),
        (Reentrant, 2, "'turn' arrived twice"),
    ],
)
def test_all_ranks_refuse(module: type[pl.LightningModule], stage: int, message: str) -> None:
    def refuse(rank: int) -> None:
        trainer(fairscale(stage), 2).fit(module(), shares(CASES["odd"].data(torch.float32), rank, 2))

    with pytest.raises(RankFailure) as failure:
        run_ranks(2, refuse)
    assert all(message in report for report in failure.value.reports)
