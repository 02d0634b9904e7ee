"""The command ``lightning-partrain``: a table of sub-commands, each of which lives in the room it belongs to.

A new sub-command is one entry of :data:`COMMANDS` and a function that takes the command line from the sub-command's name on
and returns an exit code or ``None``. Nothing of it is imported before it is called.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

PROGRAM = "lightning-partrain"


@dataclass(frozen=True)
class Command:
    """Where a sub-command is, as ``"module:function"``, and one line for people."""

    function: str
    help: str


COMMANDS: dict[str, Command] = {
    "fit": Command("lightning_partrain.lightning_cli:run", "train a LightningModule (a LightningCLI: fit --help)"),
    "validate": Command("lightning_partrain.lightning_cli:run", "one pass over the validation data"),
    "test": Command("lightning_partrain.lightning_cli:run", "one pass over the test data"),
    "predict": Command("lightning_partrain.lightning_cli:run", "one pass over the prediction data"),
    "convert": Command(
        "lightning_partrain.checkpoint.convert:run",
        "write a checkpoint in another format: full, sharded, safetensors, hf",
    ),
    "doctor": Command(
        "lightning_partrain.doctor:run", "say what this machine has and what is broken; build DeepSpeed's ops"
    ),
    "presets": Command(
        "lightning_partrain.preset_list:run", "list the YAML presets that came along, or print one's path"
    ),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} [--help] [--version] COMMAND ...",
            "",
            "Train with PyTorch Lightning on many ranks, the strategy chosen with a string.",
            "",
            "commands:",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help says more.",
        ]
    )


def versions() -> str:
    packages = ("lightning-partrain", "lightning", "torch")
    own, *below = (f"{package} {version(package)}" for package in packages)
    return f"{own} ({', '.join(below)}, Python {sys.version.split()[0]})"


def fail(message: str, code: int = 2) -> int:
    print(f"{PROGRAM}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def load(command: Command) -> Callable[[list[str]], int | None]:
    module, _, function = command.function.partition(":")
    return getattr(importlib.import_module(module), function)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default that of this process) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(versions())
        return 0
    if not name:
        print(usage(), file=sys.stderr)
        return 2
    if name not in COMMANDS:
        near = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(COMMANDS)}."
        what = "option" if name.startswith("-") else "command"
        return fail(f"no {what} {name!r}. {hint}")
    return load(COMMANDS[name])(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
