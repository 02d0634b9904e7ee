"""Modules that a user names by patterns."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn


def matching(option: str, pattern: str, root: nn.Module, names: Mapping[str, nn.Module]) -> list[str]:
    """The names that ``pattern`` matches, in which ``*`` stands for any part; also ends of names.

    Raises:
        ValueError: when there are none; says for which ``option``, and the nearest names.
    """
    found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
    if not found:
        raise ValueError(
            f"{option}: {pattern!r} matches no module of {type(root).__name__}. {_nearest(pattern, list(names))}"
        )
    return found


def outermost(names: list[str]) -> list[str]:
    """Those of ``names`` that are not inside of another."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _nearest(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern, names, 3, cutoff=0.4)
    if not near:
        last = pattern.split(".")[-1].strip("*")
        near = [n for n in names if last and last in n][:3] or names[:3]
    return f"The nearest names: {', '.join(near)}."
