"""What a step leaves in modules that are not cut: on one stage it would be right, on the others not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.parallel.pipeline.sources import Source, Tracker, tensors_in
from lightning_partrain.parallel.pipeline.units import CannotCutError


class LeftBehind:
    """What a step leaves in the modules outside of units: only the last stage would have it right.

    Buffers and metrics are brought to the other stages; the rest is refused.
    """

    def __init__(self, outside: list[tuple[str, nn.Module]], root: nn.Module, tracker: Tracker) -> None:
        self._outside, self._root, self._tracker = outside, root, tracker
        self._tensors = {id(t) for _, module in outside for t in tensors_in(own_attributes(module))}
        self._buffers = {id(b) for _, module in outside for b in module._buffers.values()}
        self._numbers = {name: self._numbers_of(module) for name, module in outside}

    @staticmethod
    def _numbers_of(module: nn.Module) -> dict[str, Any]:
        return {
            key: summary for key, value in own_attributes(module).items() if (summary := _numbers_in(value)) is not None
        }

    def check(self, step: str, sources: set[Source]) -> list[str]:
        """Add to ``sources`` what state rests on; names of the buffers that changed.

        Raises:
            CannotCutError: for other state.
        """
        tracker, written_buffers = self._tracker, []
        for name, module in self._outside:
            prefix = f"{name}." if name else ""
            for key, buffer in module._buffers.items():
                if buffer is not None and (id(buffer) not in self._buffers or tracker.key(buffer) in tracker.written):
                    written_buffers.append(prefix + key)
                    sources |= tracker.sources(buffer)
            if any(isinstance(m, Metric) for m in (module, *_owners(self._root, name))):
                for tensor in tensors_in(own_attributes(module)):
                    sources |= tracker.sources(tensor)
                continue
            for key, value in own_attributes(module).items():
                for tensor in tensors_in(value):
                    new = id(tensor) not in self._tensors or tracker.key(tensor) in tracker.written
                    if new and tracker.sources(tensor):
                        self._refuse(step, prefix + key, "leaves a tensor behind in")
            numbers = self._numbers_of(module)
            changed = [key for key in numbers if numbers[key] != self._numbers[name].get(key)]
            if changed:
                self._refuse(step, prefix + changed[0], "counts or collects in")
        return written_buffers

    @staticmethod
    def _refuse(step: str, name: str, does: str) -> None:
        raise CannotCutError(
            f"{step} {does} {name!r}. Under a pipeline only the last stage would have it right, once a micro-batch. Log it with self.log or "
            "a torchmetrics metric, return it from the step and read it in the on_..._batch_end hook, or register it as a buffer."
        )


def _numbers_in(value: Any) -> Any:
    """A number, or what a container of plain values holds; ``None`` for everything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, (list, dict, set, deque)):
        items = value.items() if isinstance(value, dict) else value
        return len(value), repr([item for item in items if isinstance(item, batches.PLAIN)][:1000])
    return None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return repr(bits.state) if bits is not None else None


@contextmanager
def generators_kept(root: nn.Module, step: str) -> Iterator[None]:
    """Refuse generators of random numbers that a module keeps and the step draws from."""
    kept = [
        (f"{name}.{key}" if name else key, value, _state_of(value))
        for name, module in root.named_modules()
        for key, value in own_attributes(module).items()
        if isinstance(value, (torch.Generator, random.Random)) or hasattr(value, "bit_generator")
    ]
    yield
    for name, generator, before in kept:
        if _state_of(generator) != before:
            refuse_generator(step, name)


def refuse_generator(step: str, name: str) -> None:
    raise CannotCutError(
        f"{step} draws from a random number generator of its own ({name!r}), which would go its own way on every stage. Use torch's, "
        "numpy's or Python's default one: a pipeline seeds them for every micro-batch."
    )


def _owners(root: nn.Module, name: str) -> Iterator[nn.Module]:
    parts = name.split(".")
    for end in range(1, len(parts)):
        yield root.get_submodule(".".join(parts[:end]))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps apart from parameters, buffers, sub-modules and torch's own book-keeping."""
    internal = {"_parameters", "_buffers", "_modules", "forward"}
    return {k: v for k, v in vars(module).items() if k not in internal and not k.endswith("_hooks")}
