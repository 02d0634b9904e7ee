"""The state of an optimizer over DeepSpeed's flat tensors, as one process over the parameters themselves would have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_partrain.parallel.deepspeed.flat import Part
from lightning_partrain.parallel.placement import Entry, Stored, whole_of


class FlatState:
    """
    Args:
        optimizer: what updates the flat tensors.
        groups: the names of the parameters in its groups.
        parts: name -> what this rank holds of a trained parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[list[str]], parts: Mapping[str, Part]) -> None:
        self.optimizer, self.groups, self.parts = optimizer, groups, parts
        self._names = [name for group in groups for name in group]

    @staticmethod
    def _held(part: Part, value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == part.flat.shape:
            return part.entry(value)
        return value.clone() if isinstance(value, Tensor) else value  # a count of steps each: optimizers count in place

    def held(self) -> dict[str, Any]:
        """As ``optimizer.state_dict()`` of one process, with what this rank holds of each tensor. No communication."""
        state: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(self._names):
            if name in self.parts:
                part = self.parts[name]
                values = self.optimizer.state.get(part.flat, {})
                if any(value is not None for value in values.values()):
                    state[index] = {key: self._held(part, value) for key, value in values.items()}
        groups, first = [], 0
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            numbers = list(range(first, first + len(names)))
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
            first += len(names)
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any], get: Callable[[Mapping[Any, Any], Any], Any]) -> None:
        """Take this rank's parts of what one process, or any layout, has saved.

        Args:
            saved: an optimizer's state dict.
            get: a value of a mapping, not read yet where that is possible.

        Raises:
            ValueError: for other groups than those of this run, or parameters at different steps.
        """
        known = self._known(saved)
        for group, of_saved in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in of_saved.items() if key != "params"})
        shared: dict[Tensor, dict[str, Any]] = {}
        for name in self.parts.keys() & known.keys():
            part, values = self.parts[name], known[name]
            state = self.optimizer.state.setdefault(part.flat, {})
            for key in values:
                value = get(values, key)
                if isinstance(value, (Tensor, Stored)) and tuple(value.shape) == part.shape:
                    if key not in state:
                        state[key] = torch.zeros_like(part.flat)
                    part.fill(state[key], value)
                    continue
                if isinstance(value, (Tensor, Stored)):
                    value = whole_of(value).clone()
                first = shared.setdefault(part.flat, {}).setdefault(key, value)
                if first is not value and bool(first != value):
                    raise ValueError(
                        f"The checkpoint's optimizer has {key}={float(value):g} for {name!r} and {float(first):g} for another parameter, but "
                        "DeepSpeed keeps one for all. Continue with strategy='zero_1', or begin with a new optimizer."
                    )
                state[key] = first

    def _known(self, saved: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Name -> its values in ``saved``."""
        sizes, own = [len(group["params"]) for group in saved["param_groups"]], [len(group) for group in self.groups]
        if sizes != own:
            raise ValueError(
                f"The checkpoint's optimizer has groups of {sizes} parameters, the optimizer of this run has {own}. Load it with the model and "
                "configure_optimizers it was saved with."
            )
        known = {self._names[int(index)]: saved["state"][index] for index in saved["state"]}
        missing = sorted(self.parts.keys() - known.keys())
        if known and missing:
            raise ValueError(
                f"The checkpoint has no optimizer state of {missing[0]!r}, which was not trained before, but DeepSpeed keeps one number of steps "
                "for all. Continue with strategy='zero_1', or begin with a new optimizer."
            )
        return known

    def masters(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Entry]:
        """Name -> the copy that the optimizer updates, where it is of another type than the module's parameter."""
        return {name: part.entry(part.flat) for name, part in self.parts.items() if part.flat.dtype != dtypes[name]}

    def load_masters(self, saved: Mapping[str, Any]) -> None:
        for name in self.parts.keys() & saved.keys():
            self.parts[name].fill(self.parts[name].flat, saved[name])
