"""Compressors: one file each. A new one is a new file, and a line here."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from lightning_partrain.sync.compressors.base import Compressor

#: Name -> module and class in it, with the options that the name stands for.
COMPRESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16": ("cast", "Cast", {"dtype": "bf16"}),
    "fp16": ("cast", "Cast", {"dtype": "fp16"}),
    "int8": ("quantize", "Quantize", {"bits": 8}),
    "int4": ("quantize", "Quantize", {"bits": 4}),
    "powersgd": ("powersgd", "PowerSGD", {}),
    "topk": ("topk", "TopK", {}),
    "randomk": ("randomk", "RandomK", {}),
    "threshold": ("threshold", "Threshold", {}),
    "sketch": ("sketch", "Sketch", {}),
    "signsgd": ("signsgd", "SignSGD", {}),
    "onebit": ("onebit", "OneBit", {}),
    "adasum": ("adasum", "Adasum", {}),
}

#: Measures and chooses; see :mod:`lightning_partrain.sync.auto`.
AUTO = "auto"


def find(name: str) -> type[Compressor]:
    """The class that ``name`` stands for, without its options."""
    module, cls, _ = COMPRESSORS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)


def make(compressor: str | Compressor) -> Compressor:
    """A compressor by name, or as it is.

    Raises:
        ValueError: for a name that does not exist; says which is meant.
        TypeError: for anything else.
    """
    if isinstance(compressor, Compressor):
        return compressor
    if not isinstance(compressor, str):
        raise TypeError(f"compressor must be a name or a Compressor, not {compressor!r}.")
    if compressor.lower() not in COMPRESSORS:
        near = difflib.get_close_matches(compressor.lower(), (*COMPRESSORS, AUTO), 1, 0.4)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"compressor={compressor!r} does not exist.{meant} There are {', '.join(COMPRESSORS)}, and auto."
        )
    return find(compressor.lower())(**COMPRESSORS[compressor.lower()][2])
