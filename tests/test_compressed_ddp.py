"""``ddp_*`` and ``replica_sync``: the numbers, what is owed and remembered, resuming, and what is refused. Compressors by themselves are in
``test_compressors_*.py``."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_partrain import preset_list
from lightning_partrain.optim import onebit_adam
from lightning_partrain.registry import STRATEGIES
from lightning_partrain.strategies import CompressedDDPStrategy, Hybrid3DStrategy, compressed_replicas
from lightning_partrain.sync import auto
from lightning_partrain.sync.auto import Link, Offer, choose
from lightning_partrain.sync.compression import Compression
from lightning_partrain.sync.compressors import COMPRESSORS
from lightning_partrain.sync.compressors.base import Compressor, Reduced, Reduction, Sum, Task
from lightning_partrain.sync.compressors.powersgd import PowerSGD
from lightning_partrain.sync.compressors.quantize import Quantize
from lightning_partrain.sync.compressors.randomk import RandomK
from lightning_partrain.sync.compressors.sketch import Sketch
from lightning_partrain.sync.compressors.threshold import Threshold
from lightning_partrain.sync.compressors.topk import TopK
from tests.harness import RankFailure, run_ranks, trainer
from tests.parity import Run, assert_same_as_one_process

SMALL = {"min_compression_numel": 8, "bucket_mb": 0.001}
#: By name, with options that suit a model of a few hundred parameters.
OPTIONS: dict[str, Callable[[], str | Compressor]] = {
    **{name: lambda name=name: name for name in COMPRESSORS},  # type: ignore[misc]
    "powersgd": lambda: PowerSGD(rank=2, min_compression_rate=0),
    "topk": lambda: TopK(density=0.2),
    "randomk": lambda: RandomK(density=0.2),
    "threshold": lambda: Threshold(density=0.2),
    "sketch": lambda: Sketch(density=0.2, compression=4.0),
}
LOSSLESS: dict[str, Callable[[], Compressor]] = {
    "powersgd": lambda: PowerSGD(rank=1000, min_compression_rate=0),
    "topk": lambda: TopK(density=1.0),
    "randomk": lambda: RandomK(density=1.0),
    "threshold": lambda: Threshold(threshold=0.0, density=1.0),
    "sketch": lambda: Sketch(density=1.0),
    "int32": lambda: Quantize(bits=32),
}
FAST = ("powersgd", "int8", "topk", "signsgd")
EACH = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in OPTIONS]


class Exact(Compressor):
    """Sends everything as it is."""

    least_dim = 0
    takes_embeddings = True

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        total = yield Sum(vector.clone())
        return Reduced(total.div_(task.ranks), vector)


class Net(pl.LightningModule):
    """An embedding, matrices of two shapes, biases, a batch norm, and a convolution."""

    def __init__(self, sgd: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.convolution = nn.Conv1d(4, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.hidden = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(40, 3, bias=False)
        self.sgd = sgd
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.norm(self.convolution(self.embedding(x)))
        return F.cross_entropy(self.head(self.hidden(h.flatten(1))), y)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.sgd:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def samples(number: int = 64) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(0, 16, (number, 4), generator=draw)
    return TensorDataset(x, x.sum(1) % 3)


def loader(ranks: int) -> DataLoader:
    """This rank's share of 16 samples a step, in an order that Lightning does not shuffle."""
    rank = int(os.environ["LOCAL_RANK"])
    return DataLoader(Subset(samples(), range(rank, 64, ranks)), batch_size=16 // ranks)


def fitted(
    strategy: Any,
    ranks: int,
    callback: pl.Callback | None = None,
    module: pl.LightningModule | None = None,
    **options: Any,
) -> tuple[pl.Trainer, Any]:
    """A fit in this process, which is one of ``ranks``."""
    torch.manual_seed(5)
    module = module or Net()
    run = trainer(
        strategy,
        ranks,
        **{
            "max_epochs": 2,
            "precision": "64-true",
            "callbacks": [callback] if callback else [],
            "sync_batchnorm": True,
            **options,
        },
    )
    run.fit(module, loader(ranks))
    return run, module


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gpt", "odd", pytest.param("tied", marks=pytest.mark.slow)])
def test_compression_that_loses_nothing_joins_the_table(case: str) -> None:
    run = Run(case, accumulate=3, clip=("norm", 0.1))
    assert_same_as_one_process(run, 2, lambda: CompressedDDPStrategy(Exact(), min_compression_numel=0, bucket_mb=0.001))


HYBRIDS = {
    "stage 0": ({"zero_stage": 0}, 1),
    "stage 1": ({"zero_stage": 1}, 1),
    "stage 2, micro-batches": ({"zero_stage": 2, "reduce": "micro_batch"}, 1),
    "pipeline": ({"zero_stage": 1, "pipeline_parallel_size": 2}, 2),
}


@pytest.mark.parametrize(
    "layout", [*list(HYBRIDS)[:2], *(pytest.param(k, marks=pytest.mark.slow) for k in list(HYBRIDS)[2:])]
)
def test_replicas_of_hybrid_3d(layout: str) -> None:
    options, stages = HYBRIDS[layout]
    replicas = Compression(Exact(), min_compression_numel=0, bucket_mb=0.001)
    assert_same_as_one_process(
        Run("gpt" if stages > 1 else "odd", accumulate=3, clip=("norm", 0.1)),
        4,
        lambda: Hybrid3DStrategy(data_parallel_replicate_size=2, replica_sync=replicas, **options),
        stages=stages,
    )


@pytest.mark.slow
def test_replicas_of_layers_cut_in_two() -> None:
    replicas = Compression(Exact(), min_compression_numel=0, bucket_mb=0.001)
    assert_same_as_one_process(
        Run("gpt", clip=("norm", 0.1)),
        4,
        lambda: Hybrid3DStrategy(data_parallel_replicate_size=2, tensor_parallel_size=2, replica_sync=replicas),
        tensor=2,
    )


@pytest.mark.parametrize(
    "name", [p if p in ("powersgd", "int32") else pytest.param(p, marks=pytest.mark.slow) for p in LOSSLESS]
)
def test_lossless_settings_equal_one_process(name: str) -> None:
    alone = run_ranks(1, lambda rank: state_of(fitted("auto", 1)[1]))[0]

    def run(rank: int) -> dict[str, Tensor]:
        return state_of(fitted(CompressedDDPStrategy(LOSSLESS[name](), **SMALL), 2)[1])

    for rank in run_ranks(2, run):
        for key, value in alone.items():
            torch.testing.assert_close(rank[key], value, rtol=1e-6, atol=1e-6, msg=f"{key}: {rank[key]} {value}")


class Ledger(pl.Callback):
    """What was applied, plus what is owed, is the gradient plus what was owed before: at each step, for each parameter."""

    def __init__(self) -> None:
        self.owed: dict[str, Tensor] = {}
        self.worst, self.steps, self.compressed = 0.0, 0, 0

    @staticmethod
    def _owed(trainer: pl.Trainer) -> dict[str, Tensor]:
        named = trainer.strategy.compressed.exchange.named()
        owed = {name: value.clone() for name, value in named.vectors.get("residual", {}).items()}
        for value in owed.values():
            dist.all_reduce(value.div_(trainer.world_size))
        for name, value in owed.items():
            servers = torch.zeros_like(value).view(-1)
            if name in named.servers:
                begin, values = named.servers[name]
                servers[begin : begin + len(values)] = values
            dist.all_reduce(servers)
            value.view(-1).add_(servers)
        return owed

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        named = dict(module.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        self.true = dict(zip(named, grads, strict=True))
        for grad in self.true.values():
            dist.all_reduce(grad.div_(trainer.world_size))

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        owed = self._owed(trainer)
        for name, param in module.named_parameters():
            applied, due = param.grad + owed.get(name, 0.0), self.true[name] + self.owed.get(name, 0.0)
            self.worst = max(self.worst, float((applied - due).abs().max()))
        self.owed, self.compressed = owed, len(owed)
        self.steps += 1


@pytest.mark.parametrize(
    "name",
    [*FAST] + [pytest.param(n, marks=pytest.mark.slow) for n in ("int4", "randomk", "threshold", "sketch")],
)
def test_what_is_owed_is_paid(name: str) -> None:
    def run(rank: int) -> tuple[float, int, int, dict[str, Tensor]]:
        ledger = Ledger()
        strategy = CompressedDDPStrategy(OPTIONS[name](), start_step=1, error_feedback=True, **SMALL)
        _, module = fitted(strategy, 2, ledger)
        return ledger.worst, ledger.steps, ledger.compressed, state_of(module)

    ranks = run_ranks(2, run)
    assert same_bits(ranks[0][3], ranks[1][3])
    for worst, steps, compressed, _ in ranks:
        assert worst < 1e-12 and steps == 8 and compressed == 5  # the convolution and four matrices


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return build()


class Velocity(Net):
    """SGD whose momentum is the optimizer's, or 0, where TopK computes it."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)


def test_what_is_exact_has_momentum_too() -> None:
    """Before compression begins, and where it never does, TopK(momentum) is SGD(momentum)."""
    alone = run_ranks(1, lambda rank: state_of(fitted("auto", 1, module=seeded(lambda: Velocity(0.9)))[1]))[0]
    strategy = {**SMALL, "start_step": 100}
    for rank in run_ranks(
        2,
        lambda rank: state_of(
            fitted(CompressedDDPStrategy(TopK(momentum=0.9), **strategy), 2, module=seeded(lambda: Velocity(0.0)))[1]
        ),
    ):
        for name, value in alone.items():
            torch.testing.assert_close(rank[name], value, rtol=1e-9, atol=1e-12)


def test_small_parameters_and_embeddings_are_exact() -> None:
    """One step of SGD from the same weights: what is not compressed is as in one process, what is compressed is not."""

    def one(strategy: Any, ranks: int) -> dict[str, Tensor]:
        torch.manual_seed(5)
        return state_of(fitted(strategy, ranks, module=Net(sgd=True), max_steps=1)[1])

    alone = run_ranks(1, lambda rank: one("auto", 1))[0]
    options = {**SMALL, "dense_parameters": ["hidden.1.*"]}
    for rank in run_ranks(2, lambda rank: one(CompressedDDPStrategy("int4", **options), 2)):
        off = {name for name, value in alone.items() if not torch.allclose(rank[name], value, rtol=1e-10, atol=1e-12)}
        assert off == {"convolution.weight", "hidden.0.0.weight", "hidden.2.0.weight", "head.weight"}


# -- resuming ----------------------------------------------------------------------------------------------------------


class Save(pl.Callback):
    """Half-way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def resumed(strategy: Callable[[], Any], ranks: int, path: Path, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(99)
    module = options.pop("module", Net)()
    run = trainer(strategy(), ranks, max_epochs=2, precision="64-true", sync_batchnorm=True, **options)
    run.fit(module, loader(ranks), ckpt_path=path)
    return state_of(module)


@pytest.mark.parametrize("name", EACH)
def test_resumed_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    """Bit for bit, with what was owed."""

    def strategy() -> Any:
        format_ = "sharded" if name in ("int8", "onebit") else "full"
        return CompressedDDPStrategy(OPTIONS[name](), start_step=1, checkpoint_format=format_, **SMALL)

    def run(rank: int) -> tuple[dict[str, Tensor], int]:
        run, module = fitted(strategy(), 2, Save(tmp_path / "half.ckpt"))
        assert run.global_step == 8
        return state_of(module), rank

    straight = run_ranks(2, run)
    again = run_ranks(2, lambda rank: resumed(strategy, 2, tmp_path / "half.ckpt"))
    for (before, _), after in zip(straight, again, strict=True):
        assert same_bits(before, after)


@pytest.mark.parametrize("name", ["int8", pytest.param("topk", marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on_with_what_is_owed(name: str, tmp_path: Path) -> None:
    class Owed(Ledger):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            self.first = self._owed(trainer)

        def on_before_backward(self, *_: Any) -> None: ...
        def on_after_backward(self, *_: Any) -> None: ...

    class End(Owed):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.last = self._owed(trainer)

    def before(rank: int) -> dict[str, Tensor]:
        end = End()
        run, _ = fitted(CompressedDDPStrategy(OPTIONS[name](), **SMALL), 4, end, max_epochs=1)
        run.save_checkpoint(tmp_path / "four.ckpt")
        return end.last

    def after(rank: int) -> dict[str, Tensor]:
        owed = Owed()
        strategy = CompressedDDPStrategy(OPTIONS[name](), **SMALL)
        run = trainer(strategy, 2, max_epochs=2, precision="64-true", sync_batchnorm=True, callbacks=[owed])
        run.fit(Net(), loader(2), ckpt_path=tmp_path / "four.ckpt")
        return owed.first

    left = run_ranks(4, before)[0]
    assert left and max(float(each.abs().max()) for each in left.values()) > 1e-6
    for taken in run_ranks(2, after):
        for name_, value in left.items():
            torch.testing.assert_close(taken[name_], value, rtol=1e-10, atol=1e-14)


class Start(Ledger):
    """What is owed when training begins, and after each epoch's last step."""

    checks = False

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.first = self.owed = self._owed(trainer) if trainer.world_size > 1 else {}

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        if self.checks:
            super().on_before_backward(trainer, module, loss)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        if self.checks:
            super().on_after_backward(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.last = self._owed(trainer) if trainer.world_size > 1 else {}


class Checks(Start):
    checks = True


def going_on(
    ranks: int, path: Path, to: Path, start: Start, epochs: int, name: str = "int4", **options: Any
) -> tuple[Start, int, Any]:
    strategy = CompressedDDPStrategy(OPTIONS[name](), **{**SMALL, **options})
    torch.manual_seed(5)
    run, module = trainer(strategy, ranks, max_epochs=epochs, precision="64-true", callbacks=[start]), Net()
    run.fit(module, loader(ranks), ckpt_path=path if path.exists() else None)
    run.save_checkpoint(to)
    exchange = strategy.compressed.exchange
    return start, -1 if exchange is None else exchange.step, run.optimizers[0].state_dict()["state"]


def test_what_is_owed_survives_one_rank(tmp_path: Path) -> None:
    """Two ranks, one, and two again: one rank has nobody to send it to, and keeps it."""
    paths = [tmp_path / f"{number}.ckpt" for number in range(4)]

    def on(ranks: int, number: int) -> Any:
        def run(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
            start, step, _ = going_on(ranks, paths[number], paths[number + 1], Start(), number + 1)
            return start.first, start.last, step

        return run_ranks(ranks, run)[0]

    _, left, steps = on(2, 0)
    on(1, 1)
    found, _, later = on(2, 2)
    assert steps == 4 and later == 8 and any(value.abs().max() > 0 for value in left.values())
    for name, value in left.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-14)


def test_what_is_owed_for_what_becomes_exact_is_paid_at_once(tmp_path: Path) -> None:
    def run(
        rank: int, path: Path, start: Start, epochs: int, **options: Any
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        start, *_ = going_on(2, path, tmp_path / f"{epochs}.ckpt", start, epochs, **options)
        return start.worst, start.first, start.last

    run_ranks(2, lambda rank: run(rank, tmp_path / "none", Start(), 1))
    exact = {"dense_parameters": ["*"]}
    for worst, first, last in run_ranks(2, lambda rank: run(rank, tmp_path / "1.ckpt", Checks(), 2, **exact)):
        assert worst < 1e-12 and any(value.abs().max() > 0 for value in first.values()) and not last


def test_a_variance_that_thaws_is_frozen_anew(tmp_path: Path) -> None:
    def run(rank: int, path: Path, epochs: int, start_step: int) -> list[bool]:
        *_, state = going_on(2, path, tmp_path / f"{epochs}.ckpt", Start(), epochs, "onebit", start_step=start_step)
        return [onebit_adam.FROZEN in each for each in state.values()]

    assert all(all(each) for each in run_ranks(2, lambda rank: run(rank, tmp_path / "none", 1, 2)))
    assert not any(any(each) for each in run_ranks(2, lambda rank: run(rank, tmp_path / "1.ckpt", 2, 100)))


# -- steps that are skipped, parameters that are not used ------------------------------------------------------------------


class Overflows(Net):
    """One rank's gradients are infinite in the third step."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        if index == 2 and self.trainer.current_epoch == 0 and self.global_rank == 1:
            loss = loss + self.head.weight.sum() * float("inf")
        return loss


def test_a_skipped_step_leaves_what_is_owed(tmp_path: Path) -> None:
    class Look(Ledger):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[dict[str, Tensor]] = []

        def on_before_backward(self, *_: Any) -> None: ...
        def on_after_backward(self, *_: Any) -> None: ...

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.seen.append(self._owed(trainer))

    def run(rank: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], int]:
        look = Look()
        run, module = fitted(CompressedDDPStrategy("int4", **SMALL), 2, look, Overflows(), precision="16-mixed")
        return look.seen, state_of(module), run.global_step

    exact = CompressedDDPStrategy("int4", start_step=100)  # counts the steps that were made

    def count(rank: int) -> int:
        fitted(exact, 2, None, Overflows(), precision="16-mixed")
        assert exact.compressed.exchange is not None
        return exact.compressed.exchange.step

    assert run_ranks(2, count) == [7, 7]
    for seen, state, steps in run_ranks(2, run):
        assert steps == 7
        assert same_bits(seen[1], seen[2]) and not same_bits(seen[2], seen[3])
        assert all(value.abs().max() < 1 for owed in seen for value in owed.values())  # in units without the loss scale
        assert all(value.isfinite().all() for value in state.values())


class Drops(Overflows):
    """Looks by itself."""

    def on_after_backward(self) -> None:
        if not all(param.grad.isfinite().all() for param in self.parameters() if param.grad is not None):
            self.zero_grad()


@pytest.mark.parametrize("name", ["int4", pytest.param("powersgd", marks=pytest.mark.slow)])
def test_gradients_that_are_not_finite_leave_no_trace(name: str) -> None:
    """As the step waits to see them, and as it may not, on a GPU: the same bits."""

    def run(rank: int, waits: bool) -> dict[str, Tensor]:
        class Look(pl.Callback):
            def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
                trainer.strategy.compressed.exchange.on_host = waits

        _, module = fitted(CompressedDDPStrategy(OPTIONS[name](), **SMALL), 2, Look(), Drops(), precision="32-true")
        return state_of(module)

    waiting = run_ranks(2, lambda rank: run(rank, True))
    for state in [*waiting, *run_ranks(2, lambda rank: run(rank, False))]:
        assert same_bits(state, waiting[0]) and all(value.isfinite().all() for value in state.values())


class Halves(Net):
    """One backward pass, a step of each of two optimizers; in the third, only the second one's gradients are infinite, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.owed: list[list[dict[str, Tensor]]] = []

    def configure_optimizers(self) -> Any:
        ours = {name: name.startswith(("head", "hidden.2")) for name, _ in self.named_parameters()}
        halves = [[p for name, p in self.named_parameters() if ours[name] == second] for second in (False, True)]
        return torch.optim.SGD(halves[0], lr=0.1), torch.optim.SGD(halves[1], lr=0.1)

    def look(self) -> dict[str, Tensor]:
        return dict(self.trainer.strategy.compressed.exchange.named().vectors.get("residual", {}))

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        loss, before = self.loss(batch), self.look()
        if index == 2 and self.global_rank == 1:
            loss = loss + self.head.weight.sum() * float("inf")
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        between = self.look()
        first.step()
        second.step()
        self.owed.append([before, between, self.look()])


def test_only_what_is_skipped_is_taken_back() -> None:
    def run(rank: int) -> list[list[dict[str, Tensor]]]:
        options = {**SMALL, "bucket_mb": 0.0125, "dense_parameters": ["head.*"]}  # the last two matrices share a bucket
        module = Halves()
        fitted(CompressedDDPStrategy("int4", **options), 2, module=module, precision="16-mixed", max_epochs=1)
        return module.owed

    for owed in run_ranks(2, run):
        for step, (_, between, after) in enumerate(owed):
            assert same_bits(between, after) == (step != 2)
        before, between, after = owed[2]
        for name in before:
            stays = before if name == "hidden.2.0.weight" else between
            assert torch.equal(after[name], stays[name]) and not torch.equal(before[name], between[name])


class Tokens(Velocity):
    """Returns sums over tokens, of which some batches have many more than others."""

    def training_step(self, batch: Any, index: int) -> Any:
        weight = 1 + 9 * (index % 2)
        self.sum = self.loss(batch) * len(batch[1]) * weight
        self.count = len(batch[1]) * weight
        return {"loss": self.sum, "num_tokens": self.count}


class TokenLedger(Ledger):
    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        named = dict(module.named_parameters())
        grads = torch.autograd.grad(module.sum, list(named.values()), retain_graph=True)
        self.true = dict(zip(named, grads, strict=True))
        for grad in self.true.values():
            dist.all_reduce(grad)
            grad.div_(module.count * trainer.world_size)

    def on_after_backward(self, *_: Any) -> None: ...

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        super().on_after_backward(trainer, module)


def test_sums_over_tokens() -> None:
    """What is owed, and momenta, are in the units of the mean over all tokens, whose number changes from step to step."""

    def run(rank: int) -> tuple[float, int]:
        ledger = TokenLedger()
        module = seeded(lambda: Tokens(0.0))
        fitted(CompressedDDPStrategy("int4", **SMALL), 2, ledger, module)
        return ledger.worst, ledger.compressed

    for worst, compressed in run_ranks(2, run):
        assert worst < 1e-12 and compressed == 5
    one = run_ranks(1, lambda rank: state_of(fitted("hybrid_3d", 1, module=seeded(lambda: Tokens(0.9)))[1]))[0]
    exact = {**SMALL, "start_step": 100}
    for rank in run_ranks(
        2,
        lambda rank: state_of(
            fitted(CompressedDDPStrategy(TopK(momentum=0.9), **exact), 2, module=seeded(lambda: Tokens(0.0)))[1]
        ),
    ):
        for name, value in one.items():
            torch.testing.assert_close(rank[name], value, rtol=1e-9, atol=1e-12)


class Branches(Net):
    """Rank 0 uses ``one``, nobody ``other`` from the second step on, and the head is unfrozen in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(40, 3), nn.Linear(40, 3)
        self.head.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.hidden(self.norm(self.convolution(self.embedding(x))).flatten(1))
        out = self.head(h)
        if self.global_rank == 0:
            out = out + self.one(h)
        if self.global_step == 0:
            out = out + self.other(h)
        return F.cross_entropy(out, y)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head.requires_grad_(True)


def test_unused_and_late_parameters() -> None:
    class Look(Ledger):
        def on_before_backward(self, *_: Any) -> None: ...

        def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
            owed = self._owed(trainer)
            self.grads = {name: param.grad is not None for name, param in module.named_parameters()}
            if self.steps > 1:
                assert torch.equal(owed["other.weight"], self.owed["other.weight"])
                assert not torch.equal(owed["one.weight"], self.owed["one.weight"])
            self.owed, self.steps = owed, self.steps + 1

    def run(rank: int) -> tuple[dict[str, bool], dict[str, Tensor], dict[str, Tensor]]:
        look = Look()
        _, module = fitted(CompressedDDPStrategy("signsgd", **SMALL), 2, look, Branches())
        return look.grads, look.owed, state_of(module)

    ranks = run_ranks(2, run)
    assert same_bits(ranks[0][2], ranks[1][2])
    for grads, owed, _ in ranks:
        assert grads["one.weight"] and not grads["other.weight"] and grads["head.weight"]
        assert float(owed["other.weight"].abs().max()) > 0 and float(owed["head.weight"].abs().max()) > 0


class Two(Net):
    """Manual optimization with two optimizers, each for a half, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = [*self.embedding.parameters(), *self.convolution.parameters(), *self.norm.parameters()]
        second = [*self.hidden.parameters(), *self.head.parameters()]
        return torch.optim.Adam(first, lr=1e-2), torch.optim.SGD(second, lr=1e-1)

    def training_step(self, batch: Any, _: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def test_several_optimizers_by_hand() -> None:
    alone = run_ranks(1, lambda rank: state_of(fitted("auto", 1, module=Two())[1]))[0]
    for rank in run_ranks(
        2, lambda rank: state_of(fitted(CompressedDDPStrategy(TopK(density=1.0), **SMALL), 2, module=Two())[1])
    ):
        for name, value in alone.items():
            torch.testing.assert_close(rank[name], value, rtol=1e-9, atol=1e-12)


# -- traffic -----------------------------------------------------------------------------------------------------------


class Deep(pl.LightningModule):
    """So many layers, each of which is a bucket."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(layers)))

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def many_steps(compressor: Any, buckets: int, steps: int, ranks: int = 4) -> None:
    def run(rank: int) -> tuple[int, dict[str, Tensor]]:
        torch.manual_seed(0)
        module = Deep(buckets)
        strategy = CompressedDDPStrategy(compressor(), **SMALL)
        found = []

        class Count(pl.Callback):
            def on_train_start(self, trainer: Any, module: Any) -> None:
                found.append(sum(bucket.compressed for bucket in strategy.model_parallel.reducer.buckets))

        training = trainer(strategy, ranks, max_epochs=-1, max_steps=steps, callbacks=[Count()])
        training.fit(module, DataLoader(TensorDataset(torch.randn(4 * ranks, 24)), batch_size=2))
        return found[0], state_of(module)

    results = run_ranks(ranks, run, timeout=180)
    for count, state in results:
        assert count == buckets and same_bits(state, results[0][1])
        assert all(value.isfinite().all() for value in state.values())


def test_many_buckets_do_not_mix() -> None:
    many_steps(OPTIONS["powersgd"], 24, 20)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [2, 8, 24])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_200_steps_of_four_ranks(name: str, buckets: int) -> None:
    many_steps(OPTIONS[name], buckets, 200)


def test_between_nodes_only() -> None:
    """Two nodes of two ranks: each bucket crosses once, sent by one rank of each node in turn; all ranks get the same."""

    def run(rank: int) -> tuple[dict[str, Tensor], float, int]:
        os.environ.update(NODE_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2))
        torch.manual_seed(0)
        strategy, module = CompressedDDPStrategy("int8", hierarchical=True, **SMALL), Deep(6)
        data = DataLoader(TensorDataset(torch.randn(32, 24)), batch_size=4)
        trainer(strategy, 2, num_nodes=2, max_epochs=2, use_distributed_sampler=True).fit(module, data)
        exchange = strategy.compressed.exchange
        assert exchange is not None
        return state_of(module), exchange.sent, len(exchange.named().vectors["residual"])

    ranks = run_ranks(4, run)
    assert all(same_bits(state, ranks[0][0]) for state, _, _ in ranks)
    sent, owing = [sent for _, sent, _ in ranks], [owing for _, _, owing in ranks]
    assert sent[0] == sent[2] and sent[1] == sent[3] and min(sent) > 0
    assert owing == [3, 3, 3, 3]


# -- "auto" ------------------------------------------------------------------------------------------------------------


def offers(**sent: float) -> dict[str | None, Offer]:
    return {(None if name == "exact" else name): Offer(size, 1e-3, 4) for name, size in sent.items()}


def test_auto_takes_what_is_shortest_or_nothing() -> None:
    some = offers(exact=26e6, bf16=13e6, int8=6.6e6, powersgd=1e6, int4=3.4e6)
    assert choose(Link(5e-4, 12.5e6), 0.3, 0.0, some).name == "powersgd"
    assert "off" in choose(Link(1e-4, 4e9), 0.3, 0.0, some).why
    assert choose(Link(1e-4, 4e9), 0.3, 0.0, some).name is None
    hidden = choose(Link(1e-4, 12.5e6), 4.0, 3.0, some)  # all of it travels while the backward pass computes
    assert hidden.name is None and "12.5e" not in hidden.why and "100 Mbit/s" in hidden.why


def test_auto_measures_decides_and_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a link whose speed is told instead of measured: slow, then fast."""
    monkeypatch.setattr(auto, "LOOK_EVERY", 6)

    def run(rank: int) -> tuple[list[str | None], list[str], dict[str, Tensor]]:
        said: list[str] = []
        rates = iter(
            [1e4, 1e4, 1e4, 1e12, 1e12, 1e12]
        )  # a glance and a look, twice, and one glance that shows nothing new
        auto.measure_link = lambda *_, **__: Link(1e-6, next(rates, 1e12))
        compressed_replicas.rank_zero_info = said.append
        seen: list[str | None] = []

        class Look(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                seen.append(trainer.strategy.compressed._auto.choice)

        torch.manual_seed(0)
        data = DataLoader(TensorDataset(torch.randn(52, 24)), batch_size=2)
        module = Deep(6)
        strategy = CompressedDDPStrategy("auto", **SMALL)
        trainer(strategy, 2, callbacks=[Look()], use_distributed_sampler=True).fit(module, data)
        return seen, said, state_of(module)

    ranks = run_ranks(2, run)
    assert same_bits(ranks[0][2], ranks[1][2])
    for seen, said, _ in ranks:
        assert seen[:3] == [None] * 3 and seen[3] in auto.CANDIDATES and seen[-1] is None
        assert "takes" in said[0] and "off" in said[-1] and len(said) == 2


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_one_rank_trains_plainly() -> None:
    plain = run_ranks(1, lambda rank: state_of(fitted("auto", 1)[1]))[0]
    for name in ("onebit", "int4"):
        (alone,) = run_ranks(1, lambda rank, n=name: state_of(fitted(f"ddp_{n}", 1)[1]))  # type: ignore[misc]
        assert all(torch.allclose(alone[key], value, rtol=1e-10, atol=1e-12) for key, value in plain.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compressor": "powerSDG"}, "Did you mean 'powersgd'"),
        ({"compressor": "Auot"}, "Did you mean 'auto'"),
        ({"bucket_mb": float("inf")}, "bucket_mb must be a number of more than 0 and at most"),
        ({"compressor": "zip9000"}, "There are bf16, fp16"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, not -1"),
        ({"bucket_mb": 0}, "bucket_mb must be a number of more than 0"),
        ({"min_compression_numel": 1.5}, "min_compression_numel must be a whole number"),
        ({"error_feedback": "yes"}, "error_feedback must be True, False or None"),
        ({"hierarchical": 1}, "hierarchical must be True or False"),
        ({"dense_parameters": "head"}, "must be a list of names"),
        ({"compressor": "adasum", "error_feedback": True}, "error_feedback=True is not possible"),
        ({"compressor": TopK(momentum=0.9), "error_feedback": False}, "error_feedback=False is not possible"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        CompressedDDPStrategy(**options)


def refused(strategy: Callable[[], Any], words: str, ranks: int = 2, module: Any = Net, **options: Any) -> None:
    """With the same words, on all ranks."""
    with pytest.raises(RankFailure) as failed:
        run_ranks(ranks, lambda rank: fitted(strategy(), ranks, module=module(), **options)[1] and None)
    assert all(words in report for report in failed.value.reports), str(failed.value)[-3000:]
    assert failed.value.seconds < 60


class Momentum(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, sparse=True)


REFUSED: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "momentum twice": (
        lambda: CompressedDDPStrategy(TopK(momentum=0.9), **SMALL),
        "Use torch.optim.SGD with momentum=0",
        {"module": Momentum},
    ),
    "onebit with SGD": (lambda: CompressedDDPStrategy("onebit", **SMALL), "SGD", {"module": Momentum}),
    "onebit and clipping": (
        lambda: CompressedDDPStrategy("onebit", **SMALL),
        "gradient_clip_val",
        {"gradient_clip_val": 1.0},
    ),
    "no such parameter": (
        lambda: CompressedDDPStrategy("int8", dense_parameters=["heads.*"]),
        "matches no parameter",
        {},
    ),
    "one replica": (lambda: Hybrid3DStrategy(replica_sync="int8"), "there is one", {}),
    "zero_stage 3": (
        lambda: Hybrid3DStrategy(replica_sync="int8", zero_stage=3, data_parallel_replicate_size=2),
        "zero_stage=3",
        {},
    ),
    "sparse gradients": (lambda: CompressedDDPStrategy("int8", **SMALL), "sparse", {"module": Sparse}),
}


class Twice(Net):
    """Two backward passes, one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Clips(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


class Cycles(Net):
    """A schedule that changes beta1."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Quasi(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


REFUSED |= {
    "onebit from the first step on": (
        lambda: CompressedDDPStrategy("onebit", **SMALL),
        "compression begins before Adam's first step",
        {},
    ),
    "two passes of a momentum": (
        lambda: CompressedDDPStrategy("onebit", start_step=1, **SMALL),
        "A second backward pass before the optimizer's step",
        {"module": Twice},
    ),
    "clipping by the module": (
        lambda: CompressedDDPStrategy("onebit", start_step=1, **SMALL),
        "clipping",
        {"module": Clips},
    ),
    "momentum of rows": (
        lambda: Hybrid3DStrategy(zero_stage=1, data_parallel_replicate_size=2, replica_sync=TopK(momentum=0.9)),
        "zero_stage=0 and reduce='window'",
        {},
    ),
    "LBFGS": (lambda: CompressedDDPStrategy("int8", **SMALL), "LBFGS", {"module": Quasi}),
}


@pytest.mark.parametrize(
    "what", [w if w in ("momentum twice", "one replica") else pytest.param(w, marks=pytest.mark.slow) for w in REFUSED]
)
def test_refused_on_all_ranks(what: str) -> None:
    strategy, words, options = REFUSED[what]
    refused(strategy, words, **options)


def test_between_nodes_of_which_there_is_one() -> None:
    strategy = CompressedDDPStrategy("int8", hierarchical=True)
    strategy.num_nodes = 1
    with pytest.raises(ValueError, match="num_nodes=1"):
        strategy.sizes(2)


def test_onebit_follows_a_schedule_of_beta1() -> None:
    seen: list[tuple[float, float]] = []

    class Look(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            self.beta1 = optimizer.param_groups[0]["betas"][0]

        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            seen.append((trainer.strategy.compressed.exchange.feedback.beta1, self.beta1))

    def run(rank: int) -> list[tuple[float, float]]:
        fitted(CompressedDDPStrategy("onebit", start_step=2, **SMALL), 2, Look(), Cycles())
        return seen

    for pairs in run_ranks(2, run):
        assert all(used == given for used, given in pairs) and len({used for used, _ in pairs}) > 3


# -- names, presets, logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"ddp_{name}" for name in COMPRESSORS])
def test_the_preset_of_a_name_has_all_its_arguments(name: str) -> None:
    preset = yaml.safe_load(preset_list.presets()[f"strategies/{name}"].read_text())["trainer"]["strategy"]
    parameters = inspect.signature(CompressedDDPStrategy).parameters.values()
    assert preset["class_path"] == STRATEGIES[name].class_path
    assert preset["init_args"] == {**{p.name: p.default for p in parameters}, **STRATEGIES[name].arguments}


class Logger(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.seen.append((step, metrics))


def test_what_is_logged() -> None:
    def run(rank: int) -> list[tuple[int, dict[str, float]]]:
        logger = Logger()
        fitted(CompressedDDPStrategy("int8", **SMALL), 2, logger=logger, log_every_n_steps=2)
        return [(step, metrics) for step, metrics in logger.seen if "compression/ratio" in metrics]

    for seen in run_ranks(2, run):
        assert [step for step, _ in seen] == [1, 3, 5, 7]
        for _, metrics in seen:
            assert 2.0 < metrics["compression/ratio"] < 8.0  # float64 in, one byte and scales out, and what is exact
            assert metrics["compression/residual_norm"] > 0 and metrics["compression/exposed_seconds"] >= 0
            assert metrics["compression/sent_bytes"] > 0
