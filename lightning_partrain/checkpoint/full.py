"""The ``full`` format: one file in Lightning's own layout, keyed by the whole model's parameter names.

Plain Lightning loads and resumes it on one device; every layout of every strategy here loads it, and loads what plain
Lightning wrote. Optimizer state is stored whole, in the order of the optimizer's groups, with the parameters' names beside
it under :data:`KEY`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_partrain.checkpoint.state import stored_in
from lightning_partrain.checkpoint.stored import is_sharded
from lightning_partrain.numerics import as_dtensor, local_tensor
from lightning_partrain.parallel.optimizer import is_elementwise
from lightning_partrain.parallel.placement import Entry, Fused, Stored, fill, whole, whole_of

#: What this package adds to a checkpoint.
KEY = "lightning_partrain"
VERSION = 1


def _is_rows(value: Any, param: DTensor) -> bool:
    """Whether ``value`` is what an element-wise optimizer keeps for this rank's rows of ``param``."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return plain and value.ndim > 0 and value.shape == local_tensor(param).shape


def _placed(value: Any, param: Tensor) -> Any:
    """A state value with its place: rows of a sharded parameter as a DTensor."""
    return as_dtensor(value, param) if isinstance(param, DTensor) and _is_rows(value, param) else value


def _not_fused(param: Tensor) -> Fused | None:
    return None


def _whole(value: Any, param: Tensor, fused: Fused | None, keep: bool) -> Any:
    """A state value as one process would hold it, on the host; ``None`` where it is not kept."""
    value = _placed(value, param)
    if isinstance(value, DTensor):
        value = whole(value, fused if value.shape == param.shape else None)
    if not keep:
        return None
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _with_groups(state: dict[int, dict[str, Any]], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``state`` as ``optimizer.state_dict()`` has it; what Lightning has in the place of an optimizer has no groups."""
    whole = optimizer.state_dict()
    return {"state": state, "param_groups": whole["param_groups"]} if optimizer.param_groups else whole


def full_optimizer_state(
    optimizer: torch.optim.Optimizer,
    stepped: Callable[[Tensor], Tensor] = lambda param: param,
    keep: bool = True,
    fused: Callable[[Tensor], Fused | None] = _not_fused,
) -> dict[str, Any]:
    """``optimizer.state_dict()`` as one process would give it.

    Collective when the optimizer is sharded: one tensor after the other is gathered. Ranks with ``keep=False`` take part and
    get an empty dict. ``stepped`` maps the parameters that the optimizer holds to those it updates, which may be shards, ``fused``
    to the order in which their ranks hold them.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(params):
        if param in optimizer.state:
            values = optimizer.state[param].items()
            state[index] = {key: _whole(value, stepped(param), fused(param), keep) for key, value in values}
    if not keep:
        return {}
    return _with_groups(state, optimizer)


def held_optimizer_state(
    optimizer: torch.optim.Optimizer,
    stepped: Callable[[Tensor], Tensor] = lambda param: param,
    fused: Callable[[Tensor], Fused | None] = _not_fused,
) -> dict[str, Any]:
    """The same with what this rank holds of each tensor. No communication."""

    def held(value: Any, param: Tensor, of: Tensor) -> Any:
        value = _placed(value, param)
        if not isinstance(value, Tensor):
            return value
        return Entry.of(value, fused(of) if value.shape == param.shape else None)

    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        index: {key: held(value, stepped(param), param) for key, value in optimizer.state[param].items()}
        for index, param in enumerate(params)
        if param in optimizer.state
    }
    return _with_groups(state, optimizer)


def load_full_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    stepped: Callable[[Tensor], Tensor] = lambda param: param,
    fused: Callable[[Tensor], Fused | None] = _not_fused,
) -> None:
    """Load what :func:`full_optimizer_state` or a plain optimizer gave; each rank keeps its rows. No communication.

    Raises:
        ValueError: when the file has other parameter groups than the optimizer.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params and "param_groups" not in saved:  # what Lightning has in the place of one
        return
    count = sum(len(group["params"]) for group in saved["param_groups"])
    if count != len(params):
        raise ValueError(
            f"The checkpoint's optimizer has {count} parameters in {len(saved['param_groups'])} groups, the optimizer of this run "
            f"has {len(params)} in {len(optimizer.param_groups)}. Load it with the model and configure_optimizers it was saved with."
        )
    local = is_elementwise(optimizer)
    state = {}
    for index in saved["state"]:
        held = params[int(index)]
        param, values = stepped(held), saved["state"][index]
        cut = {}
        for key in values:
            value = stored_in(values, key)
            if isinstance(param, DTensor) and isinstance(value, (Tensor, Stored)) and tuple(value.shape) == param.shape:
                rows = as_dtensor(torch.empty_like(local_tensor(param), dtype=value.dtype), param)
                fill(rows, value, fused(held))
                value = local_tensor(rows) if local else rows
            elif isinstance(value, Stored):
                value = whole_of(value)
            cut[key] = value
        state[index] = cut
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def describe(layout: Mapping[str, Any], parameter_names: list[list[list[str]]]) -> dict[str, Any]:
    """What is stored under :data:`KEY`: the layout that wrote the file and the names of each optimizer's parameters."""
    return {"version": VERSION, "layout": dict(layout), "optimizer_parameters": parameter_names}


def replace_when_complete(path: str | os.PathLike[str]) -> _Aside:
    """``with replace_when_complete(path) as aside:`` write to ``aside``; ``path`` appears, synced, at the end or not at all."""
    return _Aside(Path(path))


class _Aside:
    def __init__(self, path: Path) -> None:
        self.path, self.aside = path, path.with_name(f".{path.name}.{os.getpid()}.part")

    def __enter__(self) -> Path:
        if self.path.is_dir() and not self.path.is_symlink() and not is_sharded(self.path):
            raise FileExistsError(f"{self.path} is a folder. Give the checkpoint another name.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.aside

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None or not self.aside.exists():
            self.aside.unlink(missing_ok=True)
            return
        with open(self.aside, "rb") as file:
            os.fsync(file.fileno())
        before = self.path.with_name(f".{self.aside.name}.before")
        if self.path.is_dir() and not self.path.is_symlink():  # a checkpoint in the other format
            os.replace(self.path, before)
        os.replace(self.aside, self.path)
        shutil.rmtree(before, ignore_errors=True)
