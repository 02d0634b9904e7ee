"""What is shipped, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from lightning_partrain import preset_list
from lightning_partrain.lightning_cli import ParallelCLI

ROOT = Path(__file__).parent.parent
PRESETS = [path for kind in preset_list.KINDS for path in sorted((ROOT / kind).glob("*.yaml"))]
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".csv", ""}


def source_files() -> list[Path]:
    """The files of the project, without what .gitignore names."""
    ignored = {".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())}
    patterns = [name for name in ignored if "*" in name]
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and ignored.isdisjoint(path.relative_to(ROOT).parts)
        and not any(parent.match(p) for p in patterns for parent in (path, *path.relative_to(ROOT).parents))
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    (file,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(file)


def test_the_wheel_holds_the_package_and_the_presets_only(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {f"lightning_partrain/presets/{path.relative_to(ROOT)}" for path in PRESETS}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_partrain").rglob("*.py")}
    expected |= {"lightning_partrain/py.typed"}
    assert len(PRESETS) >= 2
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "lightning-partrain = lightning_partrain.cli:main" in wheel.read(entry_points).decode()


def test_presets_are_found_in_an_installed_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "from lightning_partrain.cli import main; import sys; sys.exit(main(['presets', 'hybrid_3d']))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    expected = tmp_path / "lightning_partrain" / "presets" / "strategies" / "hybrid_3d.yaml"
    assert Path(ended.stdout.strip()).resolve() == expected.resolve()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_parses_alone_and_after_the_example(path: Path) -> None:
    from examples.gpt import GPTModule, StdlibText

    example = ["--config", str(ROOT / "examples" / "gpt.yaml")]
    for before in ([], example):
        options = [
            f"--trainer.devices={2 if path.stem == 'hybrid_3d' else 4}",
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
        ]
        if path.stem.endswith("_offload"):  # is refused on CPUs
            options.append("--trainer.strategy.init_args.offload=none")
        cli = ParallelCLI(
            GPTModule,
            StdlibText,
            args=[*before, "--config", str(path), *options],
            run=False,
            seed_everything_default=False,
        )
        given = yaml.safe_load(path.read_text())["trainer"]
        assert all(cli.config.trainer[key] for key in given)
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert names.count("ModelCheckpoint") == 1 and "LearningRateMonitor" in names
    assert re.fullmatch(r"# [A-Z].{20,120}\.", path.read_text().splitlines()[0]), "the first line says what it is"


def test_strategy_presets_need_no_import_and_say_everything() -> None:
    for path in (ROOT / "strategies").glob("*.yaml"):
        strategy = yaml.safe_load(path.read_text())["trainer"]["strategy"]
        assert strategy["class_path"].startswith("lightning_partrain.strategies.")
        comments = [line for line in path.read_text().splitlines() if line.strip().startswith("#")]
        assert len(comments) > len(strategy["init_args"])


def test_no_text_names_a_machine_or_a_registry() -> None:
    home = re.compile(r"(?<![\w.])/(home|root|Users|opt|work|mnt|srv)/\w")
    host = re.compile(
        r"(index-url|find-links|files\.pythonhosted|pypi\.org|://localhost|artifactory|nexus)", re.IGNORECASE
    )
    found = []
    for path in source_files():
        if path.suffix in TEXT and path != Path(__file__) and path.name != "LICENSE":
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if home.search(line) or host.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_import_registers_the_names_and_loads_no_strategy() -> None:
    code = """
import sys
import lightning.pytorch
before = set(sys.modules)
import lightning_partrain
after = set(sys.modules) - before
heavy = [m for m in after if m.startswith(("lightning_partrain.", "torch.distributed.", "transformers", "jsonargparse"))]
assert set(heavy) <= {"lightning_partrain.registry", "lightning_partrain.native_threads"}, sorted(heavy)
from lightning.pytorch.strategies import StrategyRegistry
assert set(lightning_partrain.STRATEGIES) <= set(StrategyRegistry.available_strategies())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
