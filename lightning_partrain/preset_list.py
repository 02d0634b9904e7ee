"""The YAML presets that come with the package: ``lightning-partrain presets``."""

from __future__ import annotations

from pathlib import Path

from lightning_partrain.cli import fail

KINDS = ("strategies", "callbacks")


def folder() -> Path:
    """Where the presets are: beside this file when installed from a wheel, at the top of a checkout otherwise."""
    package = Path(__file__).parent
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent


def presets() -> dict[str, Path]:
    """``"strategies/hybrid_3d"`` -> its file, for every preset."""
    return {f"{kind}/{path.stem}": path for kind in KINDS for path in sorted((folder() / kind).glob("*.yaml"))}


def summary(path: Path) -> str:
    """The first line of a preset's comment."""
    return path.read_text().splitlines()[0].lstrip("# ").rstrip(".")


def run(arguments: list[str]) -> int:
    """``presets`` lists them; ``presets NAME`` prints the path of one, for ``--config``."""
    wanted = arguments[1:]
    found = presets()
    if wanted in (["-h"], ["--help"]):
        print("usage: lightning-partrain presets [NAME]\n\nLists the presets, or prints the path of one, for --config.")
        return 0
    if not wanted:
        width = max(map(len, found), default=0)
        for name, path in found.items():
            print(f"{name:<{width}}  {summary(path)}")
        return 0
    if len(wanted) > 1:
        return fail("presets takes one name.")
    name = wanted[0].removesuffix(".yaml")
    matches = [path for full, path in found.items() if name in (full, full.rpartition("/")[2])]
    if len(matches) != 1:
        return fail(f"no preset {name!r}. There are: {', '.join(found)}.")
    print(matches[0])
    return 0
