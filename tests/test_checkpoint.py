"""The `full` format: one file that plain Lightning and every layout load, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_partrain.checkpoint.full import KEY
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import CASES
from tests.parity import Recorder, shares
from tests.tensor_models import TENSOR_CASES

ALL_CASES = {**CASES, **TENSOR_CASES}

LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain": (1, None),
    "dp2-zero0": (2, {"zero_stage": 0}),
    "dp2-zero1": (2, {"zero_stage": 1}),
    "dp4-zero2": (4, {"zero_stage": 2}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "dp4-hsdp3": (4, {"zero_stage": 3, "data_parallel_replicate_size": 2}),
    "dp1-zero1": (1, {"zero_stage": 1}),
    "pp2-zero0": (2, {"zero_stage": 0, "pipeline_parallel_size": 2}),
    "pp3-zero1": (3, {"zero_stage": 1, "pipeline_parallel_size": 3}),
    "dp2-pp2-zero2": (4, {"zero_stage": 2, "pipeline_parallel_size": 2}),
    "dp2-pp2-zero3": (4, {"zero_stage": 3, "pipeline_parallel_size": 2}),
    "tp2-zero0": (2, {"zero_stage": 0, "tensor_parallel_size": 2}),
    "dp2-tp2-zero1": (4, {"zero_stage": 1, "tensor_parallel_size": 2}),
    "dp2-tp2-zero3": (4, {"zero_stage": 3, "tensor_parallel_size": 2}),
    "dp2-tp2-pp2-zero2": (8, {"zero_stage": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp4-pp2-zero1": (8, {"zero_stage": 1, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
}


def run(
    layout: str,
    epochs: int,
    case: str = "frozen",
    optimizer: str = "adamw",
    save: Path | None = None,
    load: Path | None = None,
) -> list[Any]:
    """Train to the end of epoch ``epochs``; per rank (losses, state dict, learning rates, file read back)."""
    ranks, arguments = LAYOUTS[layout]

    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        module = ALL_CASES[case].build().double()  # Lightning loads before the precision plugin converts
        module.optimizer = optimizer
        recorder = Recorder()
        strategy = "auto" if arguments is None else Hybrid3DStrategy(**arguments)
        run = trainer(strategy, ranks, precision="64-true", max_epochs=epochs, callbacks=[recorder])
        tensor, stages = ((arguments or {}).get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline"))
        replicas = ranks // stages // tensor
        loader = shares(ALL_CASES[case].data(torch.float64), rank // tensor % replicas, replicas)
        run.fit(module, loader, ckpt_path=str(load) if load else None)
        if save is not None:
            run.save_checkpoint(save)
        rates = [group["lr"] for group in run.optimizers[0].param_groups]
        return recorder.record.losses, {k: v.clone() for k, v in module.state_dict().items()}, rates, run.global_step

    return run_ranks(ranks, fit)


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


PAIRS = [("plain", to) for to in LAYOUTS if to != "plain"] + [
    ("pp2-zero0", "plain"),
    ("tp2-zero0", "dp2-tp2-pp2-zero2"),
    ("dp2-tp2-zero1", "plain"),
    ("dp2-tp2-zero3", "tp4-pp2-zero1"),
    ("dp2-tp2-pp2-zero2", "dp2-zero3"),
    ("tp4-pp2-zero1", "dp2-tp2-zero3"),
    ("pp2-zero0", "dp2-tp2-zero1"),
    ("pp3-zero1", "dp2-pp2-zero2"),
    ("dp2-pp2-zero3", "pp2-zero0"),
    ("dp2-zero1", "pp3-zero1"),
    ("dp2-pp2-zero2", "dp4-zero2"),
    ("dp2-zero0", "plain"),
    ("dp2-zero1", "plain"),
    ("dp4-zero2", "dp2-zero3"),
    ("dp2-zero3", "dp4-zero2"),
    ("dp4-hsdp3", "plain"),
    ("dp2-zero1", "dp4-hsdp3"),
    ("dp1-zero1", "dp2-zero0"),
]


#: By default every other pair, of those that take at most four ranks, with one of the optimizers, in turn.
RESUMED = [
    pytest.param(
        *pair,
        optimizer,
        marks=() if number % 4 == 2 * turn and max(LAYOUTS[each][0] for each in pair) <= 4 else pytest.mark.slow,
        id="-".join((*pair, optimizer)),
    )
    for number, pair in enumerate(PAIRS)
    for turn, optimizer in enumerate(("adamw", "sgd"))
]


@pytest.mark.parametrize(("source", "target", "optimizer"), RESUMED)
def test_resume_in_another_layout_equals_the_uninterrupted_run(
    source: str, target: str, optimizer: str, tmp_path: Path
) -> None:
    case = "frozen" if optimizer == "adamw" else "odd"
    if "pp" in source + target:  # the frozen one has no list of layers
        case = "tied" if optimizer == "adamw" else "odd"
    if "tp" in source + target:  # with fused and tied parameters, and with frozen ones and buffers
        case = "fused" if optimizer == "adamw" else "encoder8"
    expected = run("plain", 2, case, optimizer)[0]
    run(source, 1, case, optimizer, save=tmp_path / "one.ckpt")
    for losses, state, rates, step in run(target, 2, case, optimizer, load=tmp_path / "one.ckpt"):
        assert losses == pytest.approx(expected[0][-len(losses) :], rel=1e-10)
        assert len(losses) == 7
        assert_close(state, expected[1])
        assert rates == expected[2]
        assert step == expected[3]


def test_stateless_sgd_resumes(tmp_path: Path) -> None:
    def plain_sgd(rank: int, load: bool) -> float:
        torch.manual_seed(0)
        module = CASES["odd"].build()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
        fit = trainer(Hybrid3DStrategy(zero_stage=3), 2, precision="64-true", max_epochs=2 if load else 1)
        fit.fit(
            module,
            shares(CASES["odd"].data(torch.float64), rank, 2),
            ckpt_path=str(tmp_path / "s.ckpt") if load else None,
        )
        if not load:
            fit.save_checkpoint(tmp_path / "s.ckpt")
        return fit.global_step

    run_ranks(2, lambda rank: plain_sgd(rank, False))
    assert run_ranks(2, lambda rank: plain_sgd(rank, True)) == [14, 14]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_file_loads_without_lightning(stage: int, tmp_path: Path) -> None:
    """Whole names, whole tensors, safe to load, and a record of the layout."""
    path = tmp_path / "deep" / "file.ckpt"
    ranks, layout = 2, {"zero_stage": stage}

    def fit(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = CASES["gpt"].build()
        run = trainer(Hybrid3DStrategy(**layout), ranks, max_steps=2)
        run.fit(module, shares(CASES["gpt"].data(torch.float32), rank, ranks))
        run.save_checkpoint(path)
        return {k: v.clone() for k, v in module.state_dict().items()}

    states = run_ranks(ranks, fit)
    saved = torch.load(path, weights_only=True)
    module = CASES["gpt"].build()
    module.load_state_dict(saved["state_dict"])
    assert all(
        torch.equal(saved["state_dict"][k], states[0][k]) and torch.equal(states[0][k], states[1][k]) for k in states[0]
    )
    assert saved[KEY]["layout"]["zero_stage"] == stage
    names = saved[KEY]["optimizer_parameters"][0][0]
    assert names == [name for name, _ in module.named_parameters()]
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer_states"][0])
    for param in module.parameters():
        assert optimizer.state[param]["exp_avg"].shape == param.shape
    assert [file.name for file in path.parent.iterdir()] == ["file.ckpt"], "nothing is left beside the file"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_model_checkpoint_picks_the_same_best_everywhere(stage: int, tmp_path: Path) -> None:
    """Each rank validates on other samples, but all decide by the mean; `last` and `best` can be resumed from."""

    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        module = CASES["odd"].build()
        checkpoint = ModelCheckpoint(
            tmp_path, "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, save_last=True
        )
        run = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=Hybrid3DStrategy(zero_stage=stage),
            max_epochs=3,
            callbacks=[checkpoint],
            logger=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )
        data = CASES["odd"].data(torch.float32)
        run.fit(module, shares(data, rank, 2), shares(data, rank, 2))
        best = run.validate(module, shares(data, rank, 2), ckpt_path="best", verbose=False)[0]["val_loss"]
        return checkpoint.best_model_path, checkpoint.best_model_score.item(), checkpoint.last_model_path, best

    first, second = run_ranks(2, fit)
    assert first == second
    assert first[3] == pytest.approx(first[1], rel=1e-5)
    assert Path(first[0]).exists()
    assert Path(first[2]).exists()


def test_weights_only_false_is_honoured(tmp_path: Path) -> None:
    """Lightning drops the argument for strategies that restore after set-up; ours restore before."""

    class Odd(CASES["odd"].build().__class__):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["path"] = tmp_path  # not loadable with weights_only=True

    def fit(rank: int, load: bool) -> int:
        module = Odd()
        run = trainer(Hybrid3DStrategy(zero_stage=1), 2, max_epochs=2 if load else 1)
        loader = shares(CASES["odd"].data(torch.float32), rank, 2)
        run.fit(module, loader, **({"ckpt_path": str(tmp_path / "w.ckpt"), "weights_only": False} if load else {}))
        if not load:
            run.save_checkpoint(tmp_path / "w.ckpt")
        return run.global_step

    run_ranks(2, lambda rank: fit(rank, False))
    assert run_ranks(2, lambda rank: fit(rank, True)) == [14, 14]


def test_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    from lightning_partrain.checkpoint.full import replace_when_complete

    path = tmp_path / "file.ckpt"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replace_when_complete(path) as aside:
        aside.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    run("dp2-zero1", 1, "odd", "adamw", save=tmp_path / "a.ckpt")

    def fit(rank: int) -> str:
        module = CASES["odd"].build()
        module.configure_optimizers = lambda: torch.optim.AdamW(module.head.parameters())
        loader = shares(CASES["odd"].data(torch.float64), rank, 2)
        with pytest.raises(ValueError, match="configure_optimizers it was saved with"):
            trainer(Hybrid3DStrategy(), 2, precision="64-true", max_epochs=2).fit(
                module, loader, ckpt_path=str(tmp_path / "a.ckpt")
            )
        return "refused"

    assert run_ranks(2, fit) == ["refused"] * 2
