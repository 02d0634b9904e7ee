"""Attributes that a module has while its layers are cut, and those that it had before."""

from __future__ import annotations

from typing import Any

from torch import nn

#: Under this name a module keeps what the attributes that were replaced had been, ``None`` where it had none of its own.
_BEFORE = "_attributes_before_the_cut"


def replace(module: nn.Module, key: str, value: Any) -> None:
    """Set an attribute of the instance, until :func:`restore`. A second time does nothing."""
    before = vars(module).setdefault(_BEFORE, {})
    if key not in before:
        before[key] = vars(module).get(key)
        vars(module)[key] = value


def is_replaced(module: nn.Module) -> bool:
    return _BEFORE in vars(module)


def restore(module: nn.Module) -> None:
    """Give ``module`` the attributes that it had before."""
    for key, value in vars(module).pop(_BEFORE, {}).items():
        vars(module).pop(key, None)
        if value is not None:
            vars(module)[key] = value
