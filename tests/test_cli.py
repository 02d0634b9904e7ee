"""The command, and every form in which a config may name a strategy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_partrain
from lightning_partrain import preset_list
from lightning_partrain.cli import COMMANDS, load, main
from lightning_partrain.lightning_cli import ParallelCLI
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks

HYBRID = "lightning_partrain.strategies.Hybrid3DStrategy"
ARGUMENTS = {
    "data_parallel_size": "auto",
    "data_parallel_replicate_size": 1,
    "zero_stage": 1,
    "reduce": "window",
    "tensor_parallel_size": "auto",
    "tensor_parallel_plan": "auto",
    "pipeline_parallel_size": "auto",
    "num_microbatches": "auto",
    "schedule": "1f1b",
    "pipeline_split": "auto",
    "share_batches": False,
    "replica_sync": None,
    "checkpoint_format": "full",
    "async_save": False,
    "load_pretrained": None,
    "memory_limit": None,
    "process_group_backend": None,
    "timeout": 1800.0,
}
ROWS, BATCH = 48, 8


class Net(LightningModule):
    """A regression without ``configure_optimizers``: the config brings the optimizer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class Rows(LightningDataModule):
    """The same global batches for any number of ranks, each of which takes its rows of them."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
        rows = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
        assert self.trainer is not None
        ranks = self.trainer.world_size
        return DataLoader(rows, BATCH // ranks, sampler=range(self.trainer.global_rank, ROWS, ranks))

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


def parsed(*words: str) -> ParallelCLI:
    cpu = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    return ParallelCLI(BoringModel, args=[*words, *cpu], run=False, seed_everything_default=False)


# -- the table -------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text and command.help in text for name, command in COMMANDS.items())


def test_every_entry_leads_to_a_function() -> None:
    assert all(callable(load(command)) for command in COMMANDS.values())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"lightning-partrain {lightning_partrain.__version__} (")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fti"], "no command 'fti'. Did you mean 'fit'?"),
        (["Predict"], "Did you mean 'predict'?"),
        (["xyz"], f"There are: {', '.join(COMMANDS)}."),
        (["--config", "a.yaml"], "no option '--config'"),
        (["presets", "hybird"], "no preset 'hybird'"),
        (["presets", "a", "b"], "presets takes one name"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: lightning-partrain" in capsys.readouterr().err


def test_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{shown}" for name in preset_list.presets())
    for name in ("hybrid_3d", "hybrid_3d.yaml", "strategies/hybrid_3d"):
        assert main(["presets", name]) == 0
        assert Path(capsys.readouterr().out.strip()) == preset_list.presets()["strategies/hybrid_3d"]


def test_a_missing_extra_is_named() -> None:
    code = """
import importlib.metadata, sys
found = importlib.metadata.distribution
def distribution(name):
    if name == "jsonargparse":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.distribution = distribution
sys.modules["jsonargparse"] = None
from lightning_partrain.cli import main
sys.exit(main(["fit", "--help"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "lightning-partrain: error: fit needs the extra 'cli': pip install 'lightning-partrain[cli]'" in ended.stderr
    assert "Traceback" not in ended.stderr


# -- the forms of a strategy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words", "changed"),
    [
        ("hybrid_3d", [], {}),
        ("Hybrid_3D", [], {}),
        ("Hybrid3DStrategy", [], {}),
        (HYBRID, [], {}),
        ({"class_path": HYBRID}, [], {}),
        ({"class_path": "Hybrid3DStrategy", "init_args": {"zero_stage": 3}}, [], {"zero_stage": 3}),
        (
            {"class_path": HYBRID, "init_args": {"data_parallel_size": 2, "zero_stage": 3}},
            [],
            {"data_parallel_size": 2, "zero_stage": 3},
        ),
        (
            {"class_path": HYBRID, "init_args": {"zero_stage": 3}},
            ["--trainer.strategy.zero_stage=0"],
            {"zero_stage": 0},
        ),
        ("hybrid_3d", ["--trainer.strategy.zero_stage=2"], {"zero_stage": 2}),
        (None, ["--trainer.strategy=hybrid_3d"], {}),
        (None, ["--trainer.strategy", "hybrid_3d", "--trainer.strategy.zero_stage", "2"], {"zero_stage": 2}),
        (None, [f"--trainer.strategy={HYBRID}"], {}),
        (
            None,
            [
                f"--trainer.strategy={HYBRID}",
                "--trainer.strategy.zero_stage=2",
                "--trainer.strategy.reduce",
                "micro_batch",
            ],
            {"zero_stage": 2, "reduce": "micro_batch"},
        ),
        (None, ["--trainer.strategy=Hybrid3DStrategy", "--trainer.strategy.zero_stage=2"], {"zero_stage": 2}),
    ],
)
def test_every_form_becomes_the_class_with_all_its_arguments(
    tmp_path: Path, config: Any, words: list[str], changed: dict[str, Any]
) -> None:
    before = ["--config", write(tmp_path / "a.yaml", {"trainer": {"strategy": config}})] if config else []
    cli = parsed(*before, *words)
    assert type(cli.trainer.strategy) is Hybrid3DStrategy
    assert cli.trainer.strategy.zero_stage == {**ARGUMENTS, **changed}["zero_stage"]
    saved = cli.config.trainer.strategy.as_dict()
    assert saved == {"class_path": HYBRID, "init_args": {**ARGUMENTS, **changed}}


def test_the_names_of_lightning_stay_names() -> None:
    assert parsed("--trainer.strategy=ddp").config.trainer.strategy == "ddp"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--trainer.strategy.zero_stage=2", "--trainer.strategy=hybrid_3d"],
            "must come after the strategy 'hybrid_3d'",
        ),
        (["--trainer.strategy=lightning_partrain.strategies.Hybrid"], "no attribute 'Hybrid'"),
        (["--trainer.strategy=torch.optim.AdamW"], "is not a class derived from"),
        (["--trainer.strategy=hybrid_3d", "--trainer.strategy.zero_stage=7"], "Literal[0, 1, 2, 3]"),
        (["--trainer.strategy=hybrid_3d", "--trainer.strategy.zero=1"], "Option 'zero' is not accepted"),
    ],
)
def test_what_cannot_be_parsed_says_why(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_printed_config_has_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--trainer.strategy=hybrid_3d", "--trainer.strategy.zero_stage=2", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["strategy"]["init_args"]["zero_stage"] == 2


# -- runs ----------------------------------------------------------------------------------------------------------------


def fit(ranks: int, config: str, *words: str) -> list[dict[str, Tensor]]:
    """Run ``lightning-partrain fit`` on forked ranks; each rank's parameters at the end."""

    def run(rank: int) -> dict[str, Tensor]:
        cli = ParallelCLI(args=["fit", "--config", config, *words])
        return {name: value.clone() for name, value in cli.model.state_dict().items()}

    return run_ranks(ranks, run)


def config_of(folder: Path, strategy: Any, devices: int) -> dict[str, Any]:
    return {
        "seed_everything": 3,
        "model": {"class_path": "tests.test_cli.Net", "init_args": {"width": 5}},
        "data": {"class_path": "tests.test_cli.Rows"},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.03, "weight_decay": 0.1}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.5}},
        "trainer": {
            "accelerator": "cpu",
            "devices": devices,
            "strategy": strategy,
            "precision": "64-true",
            "max_epochs": 2,
            "gradient_clip_val": 0.5,
            "use_distributed_sampler": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder), "name": "", "version": ""},
            },
        },
    }


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_an_optimizer_of_the_config_trains_as_in_one_process(tmp_path: Path, zero_stage: int) -> None:
    alone = fit(1, write(tmp_path / "alone.yaml", config_of(tmp_path / "alone", "auto", 1)))[0]
    strategy = {"class_path": HYBRID, "init_args": {"zero_stage": zero_stage}}
    ranks = fit(2, write(tmp_path / "two.yaml", config_of(tmp_path / "two", strategy, 2)))
    for each in ranks:
        for name, value in alone.items():
            torch.testing.assert_close(each[name], value, rtol=1e-10, atol=1e-12)


def test_the_saved_config_runs_again(tmp_path: Path) -> None:
    first = fit(
        2, write(tmp_path / "a.yaml", config_of(tmp_path / "first", "hybrid_3d", 2)), "--trainer.strategy.zero_stage=2"
    )
    saved = tmp_path / "first" / "config.yaml"
    config = yaml.safe_load(saved.read_text())
    assert config["trainer"]["strategy"] == {"class_path": HYBRID, "init_args": {**ARGUMENTS, "zero_stage": 2}}
    second = fit(2, str(saved), f"--trainer.logger.init_args.save_dir={tmp_path / 'second'}")
    for name, value in first[0].items():
        assert torch.equal(second[0][name], value)
    again = yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())
    assert json.dumps(again).replace("second", "first") == json.dumps(config)


MINE = """
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Mine(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().validation_step(batch, batch_idx)["x"])

class Data(BoringDataModule):
    pass
"""


def test_the_installed_command_from_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    strategy = preset_list.presets()["strategies/hybrid_3d"]
    checkpoints = preset_list.presets()["callbacks/checkpoint"]
    words = ["--model=mine.Mine", "--data=mine.Data", "--config", str(strategy)]
    words += ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.enable_progress_bar=false"]
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH")}
    command = str(Path(sys.executable).parent / "lightning-partrain")

    def run(*more: str) -> str:
        ended = subprocess.run(
            [command, *more], capture_output=True, text=True, timeout=180, cwd=tmp_path, env=environment
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout + ended.stderr

    run("fit", *words, "--config", str(checkpoints), "--trainer.max_steps=4", "--trainer.val_check_interval=2")
    version = tmp_path / "lightning_logs" / "version_0"
    assert (version / "config.yaml").is_file() and (version / "checkpoints" / "last.ckpt").is_file()
    assert len(list((version / "checkpoints").glob("step=*-val_loss=*.ckpt"))) == 1
    shown = run("validate", *words, f"--ckpt_path={version / 'checkpoints' / 'last.ckpt'}")
    assert "val_loss" in shown
