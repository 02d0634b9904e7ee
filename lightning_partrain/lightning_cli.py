"""A LightningCLI that takes our strategies in every form a user may write them.

Lightning's own accepts a name without arguments or a class path with at least one. Here a name, a class name or a class
path, alone or followed by ``--trainer.strategy.argument=value``, from the command line or from a config file, becomes the
class path with all its arguments, so that the saved ``config.yaml`` says everything and can be run again.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.imports import RequirementCache

from lightning_partrain.cli import PROGRAM, fail
from lightning_partrain.registry import STRATEGIES, Entry

STRATEGY = "--trainer.strategy"


def find_strategy(name: str) -> Entry | None:
    """What ``name`` stands for: a name or class name of ours, or the path of any strategy class; ``None`` for Lightning's names.

    Raises:
        ValueError: for a path that does not lead to a strategy class.
    """
    if name.lower() in STRATEGIES:
        return STRATEGIES[name.lower()]
    module, _, class_name = name.rpartition(".")
    if not module:
        paths = {entry.class_path for entry in STRATEGIES.values() if entry.class_path.endswith(f".{name}")}
        return Entry(paths.pop(), "") if paths else None
    try:
        found = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The strategy {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ValueError(f"{name!r} is not a class derived from lightning.pytorch.strategies.Strategy.")
    return Entry(name, "")


def _is_argument(word: str) -> bool:
    return word.startswith(f"{STRATEGY}.") and not word.startswith(f"{STRATEGY}.help")


def _without_arguments(words: list[str]) -> list[str]:
    """``words`` without what would need the strategy's class, and without what would print and exit."""
    kept, skip = [], False
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else "--"
        if skip:
            skip = False
        elif _is_argument(word):
            skip = "=" not in word and not following.startswith("--")
        elif not word.startswith("--print_config"):
            kept.append(word)
    return kept


class ParallelCLI(LightningCLI):
    """A drop-in for LightningCLI in scripts of one's own; see the module."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if args is not None and not isinstance(args, list):
            super().parse_arguments(parser, args)
            return
        words = list(sys.argv[1:] if args is None else args)
        self.config = parser.parse_args(self._with_strategy_class(parser, words))
        strategy = self._strategy(self.config)
        if isinstance(strategy, str) and any(map(_is_argument, words)):
            parser.error(f"{STRATEGY}.* must come after the strategy {strategy!r} that it belongs to.")

    @staticmethod
    def _strategy(config: Any) -> Any:
        return config.get(str(config.get("subcommand")), config).get("trainer", {}).get("strategy")

    def _with_strategy_class(self, parser: LightningArgumentParser, words: list[str]) -> list[str]:
        """Name the class, as the last word on it but for its arguments."""
        if any(word in ("-h", "--help") or word.startswith(f"{STRATEGY}.help") for word in words):
            return words
        strategy = self._strategy(parser.parse_args(_without_arguments(words)))
        try:
            entry = find_strategy(strategy) if isinstance(strategy, str) else None
        except ValueError as error:
            parser.error(str(error))
        if entry is None:
            return words
        value = json.dumps({"class_path": entry.class_path, "init_args": entry.arguments})
        place = next((i for i, word in enumerate(words) if _is_argument(word)), len(words))
        return [*words[:place], f"{STRATEGY}={value}", *words[place:]]


def run(arguments: list[str]) -> int | None:
    """``fit``, ``validate``, ``test`` or ``predict`` any LightningModule by its class path; the current folder is importable."""
    installed = RequirementCache("jsonargparse[signatures]>=4.39")
    if not installed:
        return fail(
            f"{arguments[0]} needs the extra 'cli': pip install 'lightning-partrain[cli]' ({str(installed).strip()})", 1
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    ParallelCLI(args=arguments, parser_kwargs={"prog": PROGRAM})
    return None
