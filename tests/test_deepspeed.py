"""DeepSpeed's engine through the Trainer: the numbers of one process, checkpoints of all strategies, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn

from lightning_partrain.parallel.deepspeed import config, internals, ops
from lightning_partrain.parallel.deepspeed.flat import Part, blocks
from lightning_partrain.strategies import DeepSpeedZeroStrategy, ZeroStrategy
from tests import parity
from tests.harness import RankFailure, run_ranks, trainer
from tests.models import Case, FrozenAndUnused, OddSizes
from tests.parity import Recorder, Run, assert_same_as_one_process, shares
from tests.traffic import Traffic

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
ready = pytest.mark.skipif(
    not ops.ready(ops.needed_ops("cpu")),
    reason="DeepSpeed's ops are not built: lightning-partrain doctor --build-deepspeed",
)


class Odd(OddSizes):
    """Without what DeepSpeed refuses: parameters without dimensions or elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        del self.empty
        self.empty = torch.zeros(0, 4)


class Frozen(FrozenAndUnused):
    """Without what is not used."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused, self.never_here, self.sometimes

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.relu(self.frozen(batch[0]))), batch[1])


OWN = {"odd": Case(Odd), "frozen": Case(Frozen)}


class EngineRecorder(Recorder):
    """Gradients and parameters as they are in DeepSpeed's flat tensors."""

    @staticmethod
    def _parameters(trainer: pl.Trainer) -> dict[str, Any]:
        layout = getattr(trainer.strategy, "model_parallel", None)
        if getattr(layout, "engine", None) is None:
            return Recorder._parameters(trainer)
        from deepspeed.utils import safe_get_full_grad

        group, found = trainer.strategy.mesh.data_parallel_group, {}
        for name, param in trainer.lightning_module.named_parameters():
            part = layout.parts.get(name) or internals.weight_part(param) if layout._cut else layout.parts.get(name)
            found[name] = param.detach() if part is None else part.whole(part.flat, torch.device("cpu"), group)
            if name in layout.parts and layout._pending:
                found[name].grad = safe_get_full_grad(param).clone()
        return found


@pytest.fixture(autouse=True)
def _cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in OWN.items():
        monkeypatch.setitem(parity.CASES, name, case)
    monkeypatch.setattr(parity, "Recorder", EngineRecorder)


ROWS = [
    (stage, case, accumulate, clip, ranks)
    for stage in (1, 2, 3)
    for case in ("gpt", "odd", "frozen", "tied", "batch_norm", "encoder")
    for accumulate, clip, ranks in ((3, ("norm", 0.1), 2), (1, None, 4))
]
FAST = {
    (stage, case, accumulate) for stage in (1, 2, 3) for case, accumulate in (("odd", 3), ("tied", 1), ("frozen", 3))
}


@ready
@pytest.mark.parametrize(
    ("stage", "case", "accumulate", "clip", "ranks"),
    [pytest.param(*row, marks=() if row[:3] in FAST else pytest.mark.slow) for row in ROWS],
)
def test_same_as_one_process(stage: int, case: str, accumulate: int, clip: Any, ranks: int) -> None:
    run = Run(case, "32-true", "sgd" if case == "batch_norm" else "adamw", accumulate, clip)
    assert_same_as_one_process(run, ranks, lambda: DeepSpeedZeroStrategy(zero_stage=stage))


# -- checkpoints ------------------------------------------------------------------------------------------------------------

ENGINES: dict[str, tuple[int, Any]] = {
    "plain": (1, lambda _: "auto"),
    **{
        f"deepspeed{stage}": (
            2,
            lambda form, stage=stage: DeepSpeedZeroStrategy(zero_stage=stage, checkpoint_format=form),
        )
        for stage in (1, 2, 3)
    },
    "native1": (2, lambda form: ZeroStrategy(zero_stage=1, checkpoint_format=form)),
    "native3": (2, lambda form: ZeroStrategy(zero_stage=3, checkpoint_format=form)),
}


def train(
    engine: str, epochs: int, save: Path | None = None, load: Path | None = None, form: str = "full", **options: Any
) -> list[Any]:
    """Per rank: (losses, state dict, learning rates, global step)."""
    ranks, strategy = ENGINES[engine]

    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        module = OWN[options.get("case", "frozen")].build()
        module.optimizer = "adamw"
        recorder = EngineRecorder()
        run = trainer(
            strategy(form),
            ranks,
            max_epochs=epochs,
            callbacks=[recorder],
            precision=options.get("precision", "32-true"),
        )
        loader = shares(OWN[options.get("case", "frozen")].data(torch.float32), rank, ranks)
        run.fit(module, loader, loader, ckpt_path=str(load) if load else None)
        if save is not None:
            run.save_checkpoint(save)
        state = {name: value.clone() for name, value in module.state_dict().items()}
        assert all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in module.parameters())
        return recorder.record.losses, state, [group["lr"] for group in run.optimizers[0].param_groups], run.global_step

    return run_ranks(ranks, fit)


@ready
@pytest.mark.parametrize(
    ("source", "target", "form"),
    [
        ("deepspeed1", "deepspeed3", "full"),
        ("deepspeed3", "deepspeed2", "sharded"),
        ("deepspeed2", "plain", "full"),
        ("deepspeed3", "native1", "sharded"),
        ("native3", "deepspeed3", "sharded"),
        ("plain", "deepspeed2", "full"),
        *(
            pytest.param(a, b, form, marks=pytest.mark.slow)
            for a in ENGINES
            for b in ENGINES
            for form in ("full", "sharded")
            if "deepspeed" in a + b and not (form == "sharded" and "plain" in (a, b))
        ),
    ],
)
def test_resume_in_another_engine_equals_the_uninterrupted_run(
    source: str, target: str, form: str, tmp_path: Path
) -> None:
    case = "odd" if "3" in source else "frozen"
    expected = train("plain", 2, case=case)[0]
    train(source, 1, save=tmp_path / "one.ckpt", form=form, case=case)
    for losses, state, rates, step in train(target, 2, load=tmp_path / "one.ckpt", form=form, case=case):
        assert losses == pytest.approx(expected[0][-len(losses) :], rel=1e-5) and len(losses) == 7
        for name, value in expected[1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
        assert rates == expected[2] and step == expected[3]


@ready
def test_half_precision_keeps_master_copies_also_in_checkpoints(tmp_path: Path) -> None:
    whole = train("deepspeed2", 2, precision="bf16-true")
    train("deepspeed2", 1, save=tmp_path / "half.ckpt", precision="bf16-true")
    resumed = train("deepspeed2", 2, load=tmp_path / "half.ckpt", precision="bf16-true")
    assert resumed[0][0] == whole[0][0][7:]
    assert all(torch.equal(resumed[0][1][name], value) for name, value in whole[0][1].items())
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert saved["state_dict"]["head.weight"].dtype == torch.bfloat16
    master = saved["lightning_partrain"]["tensors"]["master_weights.head.weight"]
    assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), saved["state_dict"]["head.weight"])
    assert not torch.equal(master, saved["state_dict"]["head.weight"].float())


# -- one owner --------------------------------------------------------------------------------------------------------------


def owned(**changes: Any) -> config.Owned:
    defaults: dict[str, Any] = {
        "zero_stage": 2,
        "offload_optimizer": False,
        "offload_parameters": False,
        "precision": "32-true",
        "accumulate": 4,
        "clip": 1.0,
        "on_gpu": False,
        "parameters": 100,
    }
    return config.Owned(**{**defaults, **changes})


def test_settings_are_merged_with_what_the_trainer_owns() -> None:
    given = {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 64},
        "train_batch_size": 32,
        "wall_clock_breakdown": False,
    }
    merged = config.merged(config.read(given), owned())
    assert merged["gradient_accumulation_steps"] == 1 and merged["gradient_clipping"] == 0.0  # the Trainer does both
    assert merged["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 64,
        "allgather_bucket_size": 128,
        "overlap_comm": False,
    }
    assert merged["wall_clock_breakdown"] is False and "bf16" not in merged and "train_batch_size" not in merged
    assert config.merged(config.read({"gradient_clipping": 0.5}), owned(clip=None))["gradient_clipping"] == 0.5
    half = config.merged({"fp16": {"initial_scale_power": 4}}, owned(precision="16-true"))
    assert half["fp16"] == {"initial_scale_power": 4, "enabled": True}
    offloaded = config.merged({}, owned(on_gpu=True, offload_optimizer=True))
    assert offloaded["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        (
            {"gradient_accumulation_steps": 2},
            {},
            "gradient_accumulation_steps=2, but the Trainer has accumulate_grad_batches=4",
        ),
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping=0.5, but the Trainer has gradient_clip_val=1.0"),
        ({"zero_optimization": {"stage": 3}}, {}, "stage=3, but the Trainer has zero_stage of the strategy=2"),
        ({"bf16": {"enabled": True}}, {}, "Use precision='bf16-true'"),
        ({"fp16": {"enabled": True}}, {"precision": "bf16-true"}, "Use precision='16-true'"),
        ({"bf16": {"enabled": False}}, {"precision": "bf16-true"}, "Use bf16.enabled='auto'"),
        ({"zero_optimization": {"round_robin_gradients": True}}, {}, "round_robin_gradients puts parameters"),
        ({"zero_optimization": True}, {}, "zero_optimization must be a mapping"),
        ({"zero_optimization": {"cpu_offload": True}}, {}, "former way to offload"),
        ({"optimizer": {"type": "Muon"}}, {}, "optimizer.type='Muon' is none that"),
        ({}, {"precision": "64-true"}, "does not train with precision='64-true'"),
        ({}, {"precision": "16-mixed"}, "Use '16-true', whose master copies"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {}, "there is nothing to offload to"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, {"on_gpu": True}, "Use 'cpu'"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            {"on_gpu": True, "offload_optimizer": True},
            "but the strategy has offload_optimizer=True",
        ),
    ],
)
def test_settings_that_contradict_the_trainer(given: Any, changes: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        config.merged(config.read(given), owned(**changes))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"zero_stage": 4}, "zero_stage=4 does not exist"),
        ({"offload_parameters": True}, "offload_parameters=True needs zero_stage=3"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer must be True or False"),
        ({"config": "nowhere.json"}, "'nowhere.json' cannot be read"),
        ({"config": 3}, "config must be a mapping"),
        ({"config": {"tensor_parallel": {"autotp_size": 2}}}, "strategy='hybrid_3d' with tensor_parallel_size"),
        ({"config": {"zero_optimisation": {}}}, "Did you mean 'zero_optimization'?"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        DeepSpeedZeroStrategy(**arguments)
    assert says in str(refused.value)


def test_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"steps_per_print": 5}))
    assert config.read(str(tmp_path / "ds.json")) == {"steps_per_print": 5}
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        config.read(str(tmp_path / "bad.json"))


def test_without_deepspeed_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-partrain\[deepspeed\]'"):
        DeepSpeedZeroStrategy()


class LAMB(torch.optim.Adam):
    """Not element by element."""


def refused(change: Any, strategy: Any = None, **options: Any) -> list[str]:
    """The reports of two ranks whose fit is refused; ``change`` gets the module."""

    def run(rank: int) -> None:
        module = OWN["frozen"].build()
        change(module)
        training = trainer(strategy or DeepSpeedZeroStrategy(zero_stage=2), 2, max_steps=1, **options)
        training.fit(module, shares(OWN["frozen"].data(torch.float32), rank, 2))

    with pytest.raises(RankFailure) as failure:
        run_ranks(2, run)
    assert all("step 0 was made" not in report for report in failure.value.reports)
    return failure.value.reports


def optimizer(kind: Any) -> Any:
    def change(module: Any) -> None:
        module.configure_optimizers = lambda: kind(module.head.parameters(), lr=0.1)

    return change


def manual(module: Any) -> None:
    module.automatic_optimization = False


def scalar(module: Any) -> None:
    module.scale = nn.Parameter(torch.tensor(1.0))


def unused(module: Any) -> None:
    module.more = nn.Linear(2, 2)


def compiled(module: Any) -> None:
    module.head = torch.compile(module.head, backend="eager")


def grows(module: Any) -> None:
    module.on_train_start = lambda: module.optimizers().add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def keep(module: Any) -> None:
    pass


class Writes(pl.Callback):
    """Keeps weights small after each step, as users do by hand."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for param in module.parameters():
                param.clamp_(-0.15, 0.15)


@ready
@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (optimizer(LAMB), {}, "for which LAMB may not be made"),
        (optimizer(torch.optim.Adagrad), {}, "DeepSpeed builds Adagrad anew"),
        (manual, {}, "cannot follow manual optimization. Use strategy='zero_2'"),
        (scalar, {}, "'scale' has no dimensions"),
        (unused, {}, "does not depend on 'more.weight' and 1 others"),
        (keep, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips by the norm only"),
        (compiled, {"strategy": DeepSpeedZeroStrategy(zero_stage=3)}, "'head' is compiled"),
        (grows, {}, "A group was added to the optimizer"),
        (keep, {"callbacks": [LearningRateFinder()]}, "LearningRateFinder puts the weights back"),
        (keep, {"precision": "64-true"}, "does not train with precision='64-true'"),
        (
            keep,
            {"strategy": DeepSpeedZeroStrategy(config={"optimizer": {"type": "Adam", "params": {"torch_adam": True}}})},
            "has an optimizer, and configure_optimizers gave one as well",
        ),
        (keep, {"strategy": DeepSpeedZeroStrategy(config={"train_batch_size": 5})}, "the training loader makes it 16"),
    ],
)
def test_refused_on_all_ranks_before_the_first_step(change: Any, options: dict[str, Any], says: str) -> None:
    assert all(says in report for report in refused(change, **options))


@ready
def test_weights_that_hooks_change_are_trained_on_or_refused() -> None:
    def run(rank: int, ranks: int, strategy: Any) -> list[float]:
        torch.manual_seed(0)
        recorder = Recorder()
        recorder.on_before_zero_grad = recorder.on_before_optimizer_step = lambda *_: None
        training = trainer(strategy, ranks, callbacks=[recorder, Writes()])
        training.fit(OWN["frozen"].build(), shares(OWN["frozen"].data(torch.float32), rank, ranks))
        return recorder.record.losses

    one = run_ranks(1, lambda rank: run(rank, 1, "auto"))[0]
    assert run_ranks(2, lambda rank: run(rank, 2, DeepSpeedZeroStrategy(zero_stage=2)))[0] == pytest.approx(
        one, rel=1e-5
    )
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, lambda rank: run(rank, 2, DeepSpeedZeroStrategy(zero_stage=3)))
    assert all("was written to outside of the optimizer's step" in report for report in failure.value.reports)


@ready
def test_an_optimizer_and_a_schedule_of_the_config() -> None:
    """As in one process with the same from configure_optimizers."""
    settings: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01, "warmup_type": "linear"},
        },
    }

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        module, recorder = OWN["frozen"].build(), EngineRecorder()
        module.configure_optimizers = lambda: None
        training = trainer(DeepSpeedZeroStrategy(config=settings), 2, callbacks=[recorder])
        training.fit(module, shares(OWN["frozen"].data(torch.float32), rank, 2))
        return recorder.record.losses, training.optimizers[0].param_groups[0]["lr"], training.callback_metrics

    def one(rank: int) -> Any:
        torch.manual_seed(0)
        module, recorder = OWN["frozen"].build(), EngineRecorder()

        def configure() -> Any:
            optimizer = torch.optim.AdamW(module.head.parameters(), lr=0.01, weight_decay=0.1)
            # WarmupLR stays at its minimum for a step more
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 4))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        module.configure_optimizers = configure
        trainer(callbacks=[recorder]).fit(module, shares(OWN["frozen"].data(torch.float32), 0, 1))
        return recorder.record.losses

    for losses, rate, _ in run_ranks(2, run):
        assert losses == pytest.approx(run_ranks(1, one)[0], rel=1e-5)
        assert rate == pytest.approx(0.01)


# -- numbers that are no numbers, traffic, and what comes after ---------------------------------------------------------------


class Watch(EngineRecorder):
    """An infinite gradient on one rank at the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        super().on_train_batch_end(trainer, *rest)
        self.steps.append(trainer.global_step)


@ready
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(0)
        module, watch = OWN["frozen"].build(), Watch()
        if rank == 1:
            module.head.weight.register_hook(
                lambda grad: torch.full_like(grad, torch.inf) if len(watch.steps) == 2 else grad
            )
        training = trainer(DeepSpeedZeroStrategy(zero_stage=1), 2, callbacks=[watch])
        training.fit(module, shares(OWN["frozen"].data(torch.float32), rank, 2))
        return watch.steps, {name: value.clone() for name, value in module.state_dict().items()}

    first, second = run_ranks(2, run)
    assert first[0] == second[0] == [1, 2, 2, 3, 4, 5, 6]
    assert all(torch.equal(first[1][name], value) and value.isfinite().all() for name, value in second[1].items())


@ready
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_reduced_once_a_window(stage: int) -> None:
    """And with reduce="micro_batch" after every pass, from stage 2 on; the numbers are the same."""

    def reductions(reduce: Any, rank: int) -> Any:
        torch.manual_seed(0)
        counted: list[float] = []
        losses: list[float] = []

        class Count(pl.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                self.traffic = Traffic(trainer.strategy.mesh)
                self.traffic.__enter__()

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
                self.traffic.__exit__(None, None, None)
                by_axis = self.traffic.by_axis.values()
                counted.append(sum(c.sent for each in by_axis for n, c in each.items() if "reduce" in n))
                losses.append(float(outputs["loss"]))

        training = trainer(
            DeepSpeedZeroStrategy(zero_stage=stage, reduce=reduce), 2, accumulate_grad_batches=3, callbacks=[Count()]
        )
        training.fit(OWN["odd"].build(), shares(OWN["odd"].data(torch.float32), rank, 2))
        return [sent > 256 for sent in counted], losses  # bytes: of more than a flag

    window, losses = run_ranks(2, lambda rank: reductions("window", rank))[0]
    each, same = run_ranks(2, lambda rank: reductions("micro_batch", rank))[0]
    assert losses == pytest.approx(same, rel=1e-5)
    assert window == [False, False, True, False, False, True, True]
    assert each == ([True] * 7 if stage > 1 else [False, False, True, False, False, True, True])


@ready
def test_the_module_is_plain_after_a_run_and_goes_on_with_other_strategies() -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(0)
        module = OWN["odd"].build()
        keys = {name: set(each.__dict__) for name, each in module.named_modules()}
        loader = shares(OWN["odd"].data(torch.float32), rank, 2)
        for strategy in (
            DeepSpeedZeroStrategy(zero_stage=3),
            ZeroStrategy(zero_stage=2),
            DeepSpeedZeroStrategy(zero_stage=1),
        ):
            training = trainer(strategy, 2, max_steps=2)
            training.fit(module, loader)
            training.validate(module, loader, verbose=False)
            assert all(type(each._parameters) is dict for each in module.modules())
            assert all(p.numel() == p.ds_numel if hasattr(p, "ds_numel") else True for p in module.parameters())
        left = {key for name, each in module.named_modules() for key in set(each.__dict__) - keys[name]}
        hooks = [each for each in module.modules() if each._forward_hooks or each._forward_pre_hooks]
        return sorted(left), len(hooks), {name: value.clone() for name, value in module.state_dict().items()}

    first, second = run_ranks(2, run)
    assert first[:2] == (["_hparams"], 0)  # which Lightning adds
    assert all(torch.equal(first[2][name], value) for name, value in second[2].items())


def test_parts_are_blocks() -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    for begin in range(60):
        for end in range(begin, 61):
            part = Part((3, 4, 5), torch.cat([torch.zeros(7), whole.flatten()[begin:end]]), 7, begin, end - begin)
            pieces = part.pieces(part.flat)
            assert sum(piece.tensor.numel() for piece in pieces) == end - begin and len(pieces) <= 5
            for piece in pieces:
                place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))
                assert torch.equal(whole[place], piece.tensor)
    assert list(blocks((), 0, 1)) == [((), ())] and list(blocks((5,), 2, 2)) == []
