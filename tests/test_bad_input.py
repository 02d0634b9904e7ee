"""What cannot be honoured is refused: one clear error on every rank, with the way out, before the first step, never a hang."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain.strategies import Hybrid3DStrategy, failure
from tests.harness import RankFailure, run_ranks, trainer
from tests.models import CASES
from tests.parity import shares

LIMIT = 30.0
WAIT = 12.0  # the strategies' timeout: a rank that is left waiting says so instead of "Stopped because ..."


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 leaves the others three of these to read what happened to it."""
    monkeypatch.setattr(failure, "_POLL_SECONDS", 0.1)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(24.0).view(6, 4) / 24), batch_size=2)


def messages(module: Callable[[], pl.LightningModule] = Plain, ranks: int = 2, **options: Any) -> list[tuple[str, int]]:
    """Each rank's error in a fit, with its type, and how many training steps it had made."""
    arguments = options.pop("strategy", {})
    callbacks = options.pop("callbacks", list)

    def each(rank: int) -> tuple[str, int]:
        built = module()
        try:
            run = trainer(Hybrid3DStrategy(**{"timeout": WAIT, **arguments}), ranks, callbacks=callbacks(), **options)
            run.fit(built, data(), data())
        except Exception as error:
            return f"{type(error).__name__}: {error}", getattr(built, "steps", 0)
        return "no error", getattr(built, "steps", 0)

    return run_ranks(ranks, each, LIMIT)


def assert_refused(results: list[tuple[str, int]], *words: str, steps: int = 0) -> None:
    """Every rank raised an error with all ``words``, after ``steps`` training steps."""
    for rank, (message, made) in enumerate(results):
        missing = [word for word in words if word not in message]
        assert not missing, f"rank {rank} does not say {missing}: {message}"
        assert made == steps, f"rank {rank} made {made} steps before: {message}"


# -- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"zero_stage": 4}, ["zero_stage=4", "0", "1", "2", "3"]),
        ({"zero_stage": "1"}, ["zero_stage='1'"]),
        ({"reduce": "epoch"}, ["reduce='epoch'", "'window'", "'micro_batch'"]),
        ({"timeout": 0}, ["timeout", "positive"]),
        ({"timeout": -3.0}, ["timeout", "positive", "-3"]),
        ({"timeout": timedelta(0)}, ["timeout", "positive"]),
    ],
    ids=str,
)
def test_arguments_that_do_not_exist(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Hybrid3DStrategy(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("ranks", "arguments", "words"),
    [
        (2, {"data_parallel_size": 3}, ["data_parallel_size=3", "3 processes", "gives 2", "data_parallel_size=2"]),
        (2, {"data_parallel_size": 1}, ["data_parallel_size=1", "gives 2", "'auto'"]),
        (2, {"data_parallel_size": 0}, ["data_parallel_size", "at least 1", "0"]),
        (4, {"data_parallel_replicate_size": 3}, ["data_parallel_replicate_size=3", "4", "1, 2, 4"]),
        (2, {"data_parallel_replicate_size": 0}, ["data_parallel_replicate_size", "at least 1", "0"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_multiply_to_the_number_of_processes(
    ranks: int, arguments: dict[str, Any], words: list[str]
) -> None:
    assert_refused(messages(ranks=ranks, strategy=arguments), "ValueError", *words)


# -- callbacks, modules and optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(
    "callback", [lambda: StochasticWeightAveraging(swa_lrs=0.01), WeightAveraging], ids=["swa", "ema"]
)
def test_weight_averaging_of_shards(zero_stage: int, callback: Callable[[], Callback]) -> None:
    results = messages(strategy={"zero_stage": zero_stage}, callbacks=lambda: [callback()])
    assert_refused(results, "WeightAveraging", f"zero_stage={zero_stage}", "with zero_stage=0")


@pytest.mark.parametrize(
    "callback", [lambda: StochasticWeightAveraging(swa_lrs=0.01), WeightAveraging], ids=["swa", "ema"]
)
def test_weight_averaging_of_whole_parameters_is_welcome(callback: Callable[[], Callback]) -> None:
    results = messages(strategy={"zero_stage": 0}, callbacks=lambda: [callback()], max_epochs=2)
    assert results == [("no error", 6)] * 2


class SparseEmbedding(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)


class SparseBag(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList([nn.EmbeddingBag(4, 2, sparse=True)])


class ComplexParameter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class ForeignOptimizer(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(7))], lr=0.01)


class OptimizerOfACopy(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.01)


class SecondOrder(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (SparseEmbedding, ["'words'", "sparse=False"]),
        (SparseBag, ["'words.0'", "sparse=False"]),
        (ComplexParameter, ["'phase'", "complex", "view_as_real"]),
        (ForeignOptimizer, ["SGD", "1 parameters", "(7,)", "self.parameters()"]),
        (OptimizerOfACopy, ["SGD", "2 parameters", "(2, 4)", "self.parameters()"]),
    ],
)
def test_modules_and_optimizers_that_would_not_train(module: type[Plain], words: list[str], zero_stage: int) -> None:
    assert_refused(messages(module, strategy={"zero_stage": zero_stage}), "ValueError", *words)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_lbfgs_over_shards(zero_stage: int) -> None:
    results = messages(SecondOrder, strategy={"zero_stage": zero_stage})
    assert_refused(results, "ValueError", "LBFGS", "with zero_stage=0")


OTHER_PACKAGE = """
import sys
import time
import pytorch_lightning
import lightning_partrain
from lightning_partrain.strategies import Hybrid3DStrategy, failure

for strategy in ("hybrid_3d", Hybrid3DStrategy()):
    try:
        pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", end="<end>")
"""


def test_the_trainer_of_the_other_package() -> None:
    """`lightning` and `pytorch_lightning` may both be installed, and their Trainers do not take each other's strategies."""
    done = subprocess.run([sys.executable, "-c", OTHER_PACKAGE], capture_output=True, text=True, timeout=90)
    assert done.stdout.count("<end>") == 2, done.stdout + done.stderr
    by_name, by_instance, _ = done.stdout.split("<end>")
    for message in (by_name, by_instance):
        assert "lightning.pytorch" in message and "pytorch_lightning" in message, done.stdout + done.stderr
    assert "import lightning" in by_name and "hybrid_3d" in by_name


# -- what ranks log --------------------------------------------------------------------------------------------------------


class LogsItsRank(Plain):
    where = "training_step"

    def _log(self, where: str) -> None:
        if where == self.where:
            self.log(f"value_of_{self.global_rank}", 1.0, on_step=False, on_epoch=True, batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._log("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("validation_step")

    def on_train_epoch_end(self) -> None:
        self._log("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self._log("on_validation_epoch_end")


HOOKS = {"training_step": 3, "validation_step": 3, "on_train_epoch_end": 3, "on_validation_epoch_end": 3}


def at(base: type[LogsItsRank], hook: str) -> type[LogsItsRank]:
    return type(base.__name__, (base,), {"where": hook})


@pytest.mark.parametrize("hook", HOOKS)
def test_logged_names_that_depend_on_the_rank(hook: str) -> None:
    results = messages(at(LogsItsRank, hook))
    assert_refused(
        results, "RuntimeError", "value_of_0", "value_of_1", "rank 0", "rank 1", "Every rank must log", steps=3
    )


class LogsOnRankZero(LogsItsRank):
    def _log(self, where: str) -> None:
        if where == self.where and self.global_rank == 0:
            self.log("score", 1.0, batch_size=2)


class LogsForRankZero(LogsItsRank):
    def _log(self, where: str) -> None:
        if where == self.where:
            self.log("score", 1.0, batch_size=2, rank_zero_only=True)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("callback", [EarlyStopping, ModelCheckpoint])
def test_a_monitored_value_that_only_rank_zero_logs(hook: str, callback: Any, tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        if callback is EarlyStopping:
            return [EarlyStopping("score", check_on_train_epoch_end="train" in hook)]
        return [ModelCheckpoint(tmp_path, monitor="score", save_on_train_epoch_end="train" in hook)]

    options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": callback is ModelCheckpoint}
    results = messages(at(LogsOnRankZero, hook), **options)
    assert_refused(results, "RuntimeError", "score", "rank 0", "Every rank must log", steps=3)
    results = messages(at(LogsForRankZero, hook), **options)
    assert_refused(results, "RuntimeError", "'score'", "monitor", "rank_zero_only", steps=3)


class LogsUnevenly(Plain):
    """What is allowed: values for rank 0 alone that nobody monitors, and looking at the metrics on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 10.0 * batch_idx + self.global_rank)
        self.log("sum", 1.0, reduce_fx="sum")
        self.log("both", float(self.global_rank), on_step=True, on_epoch=True, batch_size=2)
        if self.global_rank == 0:
            self.log("for rank 0", 1.0, rank_zero_only=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.global_rank), batch_size=2)

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.global_rank))
        if self.global_rank == 0:
            self.looked = dict(self.trainer.callback_metrics)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.looked = dict(self.trainer.callback_metrics)


MONITORS: dict[str, Callable[[Path], Callback]] = {
    "early stopping": lambda _: EarlyStopping("loss", check_on_train_epoch_end=True),
    "early stopping after validation": lambda _: EarlyStopping("loss"),
    "checkpoint": lambda path: ModelCheckpoint(path, monitor="loss", save_on_train_epoch_end=True),
    "checkpoint of an epoch hook": lambda path: ModelCheckpoint(path, monitor="end", save_on_train_epoch_end=True),
    "checkpoint of a validation": lambda path: ModelCheckpoint(path, monitor="score"),
    "checkpoint in steps": lambda path: ModelCheckpoint(path, monitor="loss", every_n_train_steps=1, mode="max"),
    "sum in steps": lambda path: ModelCheckpoint(path, monitor="sum", every_n_train_steps=2),
    "mean of an epoch": lambda path: ModelCheckpoint(path, monitor="both_epoch", save_on_train_epoch_end=True),
    "last of an epoch": lambda path: ModelCheckpoint(path, monitor="both_step", save_on_train_epoch_end=True),
}
AGREED = {"loss": 20.5, "sum": 2.0, "end": 0.5, "score": 0.5, "both_epoch": 0.5, "both_step": 0.5}


@pytest.mark.parametrize("kind", MONITORS)
def test_a_monitored_value_is_one_value(kind: str, tmp_path: Path) -> None:
    def each(rank: int) -> float:
        callback = MONITORS[kind](tmp_path)
        checkpoints = isinstance(callback, ModelCheckpoint)
        module = LogsUnevenly()
        run = trainer(Hybrid3DStrategy(timeout=WAIT), 2, callbacks=[callback], enable_checkpointing=checkpoints)
        run.fit(module, data(), data())
        assert "on_train_epoch_end" not in vars(module), "the module keeps something of the run"
        return float(callback.best_model_score if isinstance(callback, ModelCheckpoint) else callback.best_score)

    expected = AGREED[getattr(MONITORS[kind](tmp_path), "monitor")]  # noqa: B009
    assert run_ranks(2, each, LIMIT) == [pytest.approx(expected)] * 2


# -- what only some ranks do -----------------------------------------------------------------------------------------------


class SavesOnOneRank(Plain):
    def __init__(self, rank: int, path: Path) -> None:
        super().__init__()
        self.saving_rank, self.path = rank, path

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == self.saving_rank:
            self.trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("saving_rank", [0, 1])
def test_a_checkpoint_that_one_rank_saves_during_training(saving_rank: int, tmp_path: Path) -> None:
    def each(rank: int) -> None:
        module = SavesOnOneRank(saving_rank, tmp_path / "one.ckpt")
        trainer(Hybrid3DStrategy(timeout=6), 2).fit(module, data())

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, each, LIMIT)
    assert all(code not in (0, None) for code in caught.value.codes), caught.value
    for report in caught.value.reports:
        assert f"being saved on rank {saving_rank}, but not on every rank" in report and "on all ranks" in report, (
            report
        )
    assert caught.value.seconds < 20
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_one_rank_saves_after_training(tmp_path: Path) -> None:
    def each(rank: int) -> str:
        run = trainer(Hybrid3DStrategy(timeout=6), 2)
        run.fit(Plain(), data())
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError) as caught:
            run.save_checkpoint(tmp_path / "one.ckpt")
        return str(caught.value)

    start = time.monotonic()
    assert "being saved on rank 0, but not on every rank" in run_ranks(2, each, LIMIT)[0]
    assert time.monotonic() - start < 15


class FailsOn(Plain):
    def __init__(self, ranks: set[int]) -> None:
        super().__init__()
        self.failing = ranks

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank in self.failing:
            raise LookupError("broken on purpose")


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=str)
def test_a_checkpoint_because_of_an_exception(failing: set[int], tmp_path: Path) -> None:
    """It must neither hide the exception nor wait for ranks that go on; when all ranks have failed, they save together."""

    def each(rank: int) -> None:
        callbacks = [OnExceptionCheckpoint(tmp_path)]
        run = trainer(Hybrid3DStrategy(timeout=6), 2, callbacks=callbacks, enable_checkpointing=True)
        run.fit(FailsOn(failing), data())

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, each, LIMIT)
    assert caught.value.codes == [1, 1] and caught.value.seconds < 15
    assert sum("failed first:" in report for report in caught.value.reports) == 1
    for rank, report in enumerate(caught.value.reports):
        last = report.strip().splitlines()[-1]
        assert "LookupError: broken on purpose" in last, report
        assert (last.startswith("LookupError") or "Stopped because" in last) and (
            rank not in failing or "Stopped" not in last
        )
    assert [path.name for path in tmp_path.iterdir()] == (["on_exception.ckpt"] if len(failing) == 2 else [])


class BackwardByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.layer(batch[0]).square().mean().backward()


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_backward_pass_behind_the_strategys_back(zero_stage: int) -> None:
    results = messages(BackwardByHand, strategy={"zero_stage": zero_stage})
    assert_refused(results, "RuntimeError", "manual_backward(loss)", "loss.backward()", steps=1)


class StepsByHand(BackwardByHand):
    """`own` takes `loss.backward()`, otherwise `self.manual_backward(loss)`."""

    own = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.layer(batch[0] + self.global_rank).square().mean()
        optimizer.zero_grad()
        loss.backward() if self.own else self.manual_backward(loss)
        optimizer.step()


def test_stage_three_averages_the_gradients_of_any_backward_pass() -> None:
    """FSDP2 reduces in hooks of its own, so there is nothing to refuse."""

    def each(rank: int) -> list[Tensor]:
        weights = []
        for own in (False, True):
            torch.manual_seed(0)
            module = StepsByHand()
            module.own = own
            trainer(Hybrid3DStrategy(zero_stage=3, timeout=WAIT), 2).fit(module, data())
            weights.append(module.layer.weight.detach().clone())
        return weights

    results = run_ranks(2, each, LIMIT)
    first = results[0][0]
    assert all(torch.equal(weight, first) for weights in results for weight in weights)
    torch.manual_seed(0)
    assert not torch.equal(first, Plain().layer.weight)


class BroadcastsAnObject(Plain):
    def on_fit_start(self) -> None:
        self.trainer.strategy.broadcast({"what": [object()]})

    def on_train_start(self) -> None:
        raise AssertionError("the broadcast went through")


def test_a_broadcast_of_what_is_not_json() -> None:
    assert_refused(messages(BroadcastsAnObject), "TypeError", "not object", "Only JSON values", "strategy.all_gather")


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_optimizers_that_need_whole_tensors(kind: str) -> None:
    """Refused over shards before the first step; without sharding they work."""

    def each(rank: int) -> str:
        module = CASES["encoder"].build()
        matrices = [p for p in module.parameters() if p.ndim == 2]
        module.configure_optimizers = lambda: getattr(torch.optim, kind)(matrices, lr=1e-3)
        loader = shares(CASES["encoder"].data(torch.float32), rank, 2)
        trainer(Hybrid3DStrategy(zero_stage=0), 2, max_steps=1).fit(module, loader)
        with pytest.raises(ValueError, match=f"{kind} .*with zero_stage=0"):
            trainer(Hybrid3DStrategy(zero_stage=1), 2, max_steps=1).fit(module, loader)
        return "refused"

    assert run_ranks(2, each) == ["refused"] * 2


def test_options_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        Hybrid3DStrategy(timeout="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero_stage=True does not exist"):
        Hybrid3DStrategy(zero_stage=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="process_group_backend='foo' is not one of"):
        Hybrid3DStrategy(process_group_backend="foo")


def test_a_run_after_a_failure_of_another_rank() -> None:
    """The connections are gone; the next run says so, and why."""

    def each(rank: int) -> str:
        module = CASES["encoder"].build()
        loader = shares(CASES["encoder"].data(torch.float32), rank, 2)

        class Fails(pl.Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                if rank == 1:
                    raise ValueError("broken on purpose")

        with pytest.raises((ValueError, RuntimeError), match="broken on purpose"):
            trainer(Hybrid3DStrategy(timeout=10), 2, max_steps=2, callbacks=[Fails()]).fit(module, loader)
        with pytest.raises(RuntimeError, match=r"earlier run .* rank 1 .* failed with ValueError: broken on purpose"):
            trainer(Hybrid3DStrategy(timeout=10), 2, max_steps=2).fit(module, loader)
        return "said"

    assert run_ranks(2, each) == ["said"] * 2
