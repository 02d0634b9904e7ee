"""``zero_1``, ``zero_2``, ``zero_3``, ``zero_3_offload``: names, what is gathered, what lies on the host, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_partrain import compat, preset_list, strategies
from lightning_partrain.registry import STRATEGIES
from lightning_partrain.strategies import Hybrid3DStrategy, ZeroStrategy
from tests.harness import RankFailure, run_ranks, trainer
from tests.models import CASES, EncoderClassifier
from tests.parity import Recorder, Run, assert_same_as_one_process, fit, shares


@pytest.mark.parametrize("name", ["zero_1", "zero_2", "zero_3"])
def test_a_name_is_the_data_parallel_part_of_hybrid_3d(name: str) -> None:
    stage, run = int(name[-1]), Run("odd", accumulate=3, clip=("norm", 0.1))
    records = assert_same_as_one_process(run, 2, lambda: name)
    hybrid = run_ranks(2, lambda rank: fit(run, rank, 2, Hybrid3DStrategy(zero_stage=stage)))
    assert records[0].losses == hybrid[0].losses


def test_replicas_shard_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("tied", clip=("norm", 0.1))
    assert_same_as_one_process(run, 4, lambda: ZeroStrategy(zero_stage=3, replicate_size=2))


def wrapped(**arguments: Any) -> list[str]:
    """Names of the modules that are gathered for themselves."""

    def run(rank: int) -> list[str]:
        torch.manual_seed(0)
        module, found = CASES["gpt"].build(), []

        class Look(Recorder):
            def on_train_start(self, trainer: Any, module: Any) -> None:
                found.extend(name for name, each in module.named_modules() if isinstance(each, FSDPModule))

        training = trainer(ZeroStrategy(zero_stage=3, **arguments), 2, max_steps=1, callbacks=[Look()])
        training.fit(module, shares(CASES["gpt"].data(torch.float32), rank, 2))
        return found

    return run_ranks(2, run)[0]


def test_what_is_gathered_for_itself_is_named_by_patterns() -> None:
    blocks = [f"model.blocks.{number}" for number in range(3)]
    assert wrapped() == ["", *blocks]
    assert wrapped(wrap=["blocks.1", "model.head"]) == ["", "model.blocks.1", "model.head"]
    nested = wrapped(wrap=["model.blocks.0", "model.blocks.0.attention"])
    assert nested == ["", "model.blocks.0", "model.blocks.0.attention"]


def test_wrapped_by_pattern_gives_the_same_numbers() -> None:
    run = Run("gpt", accumulate=3, clip=("norm", 0.1))
    assert_same_as_one_process(run, 2, lambda: ZeroStrategy(zero_stage=3, wrap=["model.blocks.*", "model.head"]))


class OnHost(ZeroStrategy):
    """Offload of a rank whose device is the host: copies instead of transfers, and the same numbers."""

    def _configure_launcher(self) -> None:
        offload, self.offload = self.offload, "none"
        super()._configure_launcher()
        self.offload = offload


@pytest.mark.parametrize(
    ("stage", "offload", "optimizer"), [(1, "optimizer", "adamw"), (3, "optimizer", "sgd"), (3, "all", "adamw")]
)
def test_steps_on_the_host_give_the_same_numbers(stage: int, offload: Any, optimizer: str) -> None:
    run = Run("odd", optimizer=optimizer, accumulate=3, clip=("norm", 0.1))
    assert_same_as_one_process(run, 2, lambda: OnHost(zero_stage=stage, offload=offload))


def test_rows_and_state_on_the_host_are_copies() -> None:
    """The state follows, also one that a checkpoint has brought to the device."""

    def run(rank: int) -> bool:
        torch.manual_seed(0)
        module, recorder = CASES["gpt"].build(), Recorder()
        module.optimizer = "sgd"
        training = trainer(OnHost(zero_stage=1, offload="optimizer"), 2, max_steps=2, callbacks=[recorder])
        training.fit(module, shares(CASES["gpt"].data(torch.float32), rank, 2))
        optimizer = compat.unwrap_optimizer(training.strategy.optimizers[0])
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        states = [v["momentum_buffer"] for v in optimizer.state.values()]
        assert states and all(s.untyped_storage().data_ptr() not in storages for s in states)
        return True

    assert run_ranks(2, run) == [True, True]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"zero_stage": 4}, "zero_stage=4 does not exist"),
        ({"zero_stage": 0}, "strategy='ddp'"),
        ({"zero_stage": True}, "zero_stage=True does not exist"),
        ({"offload": "cpu"}, "Choose 'none', 'optimizer' or 'all'"),
        ({"zero_stage": 2, "offload": "all"}, "Use zero_stage=3, or offload='optimizer'"),
        ({"wrap": ["model.*"]}, "with zero_stage=1 none is"),
        ({"zero_stage": 3, "wrap": "model.*"}, "a list of names of modules"),
        ({"zero_stage": 3, "wrap": []}, "a list of names of modules"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace("*", r"\*")):
        ZeroStrategy(**arguments)


@pytest.mark.parametrize("strategy", ["zero_3_offload", ZeroStrategy(offload="optimizer")])
def test_there_is_nothing_to_offload_to_on_cpus(strategy: Any) -> None:
    with pytest.raises(ValueError, match="there is nothing to offload to"):
        trainer(strategy, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"wrap": ["model.layers.*"]},
            "'model.layers.*' matches no module of ByteGPT. The nearest names: model.blocks",
        ),
        ({"wrap": ["model.blocks"]}, "which has no forward that could gather it. Name its members: 'model.blocks.*'"),
        ({"offload": "optimizer"}, "which LAMB may not allow"),
    ],
)
def test_refused_on_all_ranks_before_the_first_step(arguments: dict[str, Any], says: str) -> None:
    class LAMB(torch.optim.Adam):
        """Not element by element."""

    def run(rank: int) -> None:
        module = CASES["gpt"].build()
        module.configure_optimizers = lambda: LAMB(module.parameters())
        training = trainer(OnHost(zero_stage=3, **arguments), 2, max_steps=1)
        training.fit(module, shares(CASES["gpt"].data(torch.float32), rank, 2))

    with pytest.raises(RankFailure) as refused:
        run_ranks(2, run)
    assert all(says in report and "ValueError" in report for report in refused.value.reports)


def test_a_wrapped_module_that_shares_a_parameter_is_refused() -> None:
    def run(rank: int) -> None:
        module = CASES["tied"].build()
        training = trainer(ZeroStrategy(zero_stage=3, wrap=["blocks.0"]), 2, max_steps=1)
        training.fit(module, shares(CASES["tied"].data(torch.float32), rank, 2))

    with pytest.raises(RankFailure) as refused:
        run_ranks(2, run)
    assert all("'blocks.0' shares a parameter with 'blocks.2'" in report for report in refused.value.reports)


def test_names_are_registered() -> None:
    names = {"zero_1", "zero_2", "zero_3", "zero_3_offload"}
    names |= {f"zero_{stage}_deepspeed" for stage in (1, 2, 3)} | {f"zero_{stage}_fairscale" for stage in (1, 2)}
    assert names <= set(STRATEGIES)


@pytest.mark.parametrize("name", sorted(name for name in STRATEGIES if name.startswith("zero_")))
def test_the_preset_of_a_name_has_all_its_arguments(name: str) -> None:
    preset = yaml.safe_load(preset_list.presets()[f"strategies/{name}"].read_text())["trainer"]["strategy"]
    kind = getattr(strategies, preset["class_path"].rpartition(".")[2])
    defaults = {key: each.default for key, each in inspect.signature(kind).parameters.items()}
    assert preset["class_path"] == STRATEGIES[name].class_path
    assert preset["init_args"] == {**defaults, **STRATEGIES[name].arguments}


class Encoder(EncoderClassifier):
    """With a copy that follows slowly, and a gradient with respect to inputs, each where ``change`` says."""

    change = ""

    def follow(self) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.embed.parameters(), self.head.parameters(), strict=False):
                slow.lerp_(fast.mean(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.change == "step":
            self.follow()
        if self.change == "penalty":
            x = batch[0].requires_grad_()
            with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                return self(x).pow(2).mean() + torch.autograd.grad(self(x).sum(), x, create_graph=True)[0].pow(2).mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.change == "end":
            self.follow()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.change == "memory":
            self.head.weight.data = self.head.weight.data.clone()
        if self.change == "optimizer":
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


def changed(change: str, stage: int, ranks: int = 2, **arguments: Any) -> list[list[float]]:
    def run(rank: int) -> list[float]:
        torch.manual_seed(0)
        module, recorder = Encoder(), Recorder()
        module.change = change
        if change == "dtypes":
            module.encoder.layers[0].norm1.double()
        strategy = "auto" if ranks == 1 else ZeroStrategy(zero_stage=stage, **arguments)
        precision: Any = "32-true" if change == "dtypes" else "64-true"
        training = trainer(strategy, ranks, callbacks=[recorder], precision=precision)
        training.fit(module, shares(CASES["encoder"].data(torch.float64), rank, ranks))
        return recorder.record.losses

    return run_ranks(ranks, run)


@pytest.mark.parametrize(("change", "stage"), [("end", 3), ("step", 2), ("penalty", 2)])
def test_what_users_write_into_weights_counts(change: str, stage: int) -> None:
    expected = changed(change, 0, ranks=1)[0]
    assert all(losses == pytest.approx(expected, rel=1e-10) for losses in changed(change, stage))


@pytest.mark.parametrize(
    ("change", "stage", "says"),
    [
        ("step", 3, "was written to inside training_step or on_before_zero_grad"),
        ("penalty", 3, "torch.autograd.grad runs through sharded modules inside training_step"),
        ("memory", 1, "'head.weight' was given other memory during the run"),
        ("optimizer", 1, "SGD was made during the run"),
        ("optimizer", 3, "SGD was made during the run"),
        ("dtypes", 3, "has parameters of float32 and float64, which zero_stage=3 cannot gather together"),
    ],
)
def test_what_would_be_lost_is_an_error(change: str, stage: int, says: str) -> None:
    with pytest.raises(RankFailure) as failure:
        changed(change, stage)
    assert says in "".join(failure.value.reports)


def test_a_pattern_names_layers_and_not_what_is_in_them() -> None:
    expected = changed("", 0, ranks=1)[0]
    assert all(losses == pytest.approx(expected, rel=1e-10) for losses in changed("", 3, wrap=["encoder.layers.*"]))
