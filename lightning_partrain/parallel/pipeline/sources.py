"""Where every tensor of a step comes from, followed through every operation."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.parallel.pipeline import batch as batches

#: ("unit", name, index of the output tensor), ("parameter", name), ("buffer", name) or ("inside", name of the unit that left it behind).
Source = tuple[Any, ...]

#: Operations whose result has the shape of an argument, but nothing of its values.
SHAPE_ONLY = {f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")} | {
    f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "empty_strided")
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in lists, tuples, sets, dictionaries and queues, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from tensors_in(item)
    elif batches.is_container(value):
        for _, item in batches.children(value):
            yield from tensors_in(item)


class Tracker(compat.TorchDispatchMode):
    """While it is active, gives every storage the sources it was computed from.

    Attributes:
        inside: the unit that runs now; what it computes carries the source ("inside", unit) too.
        touched: what the operations since :attr:`inside` was set have read.
        everything_since: sources of values that the program has read, on which all that follows may rest.
        written: keys of the storages that were changed in place.
        own_generator: whether an operation drew from a generator that it was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: str | None = None
        self.touched: set[Source] = set()
        self.everything_since: set[Source] = set()  # read by the program: all that follows may rest on it
        self.written: set[int] = set()
        self.own_generator = False
        self._sources: dict[int, frozenset[Source]] = {}
        self._alive: list[Any] = []

    @staticmethod
    def _storage(tensor: Tensor) -> Any:
        return tensor.untyped_storage() if tensor.layout is torch.strided else None

    def key(self, tensor: Tensor) -> int:
        storage = self._storage(tensor)
        return storage._cdata if storage is not None else id(tensor)

    def sources(self, tensor: Tensor) -> frozenset[Source]:
        return self._sources.get(self.key(tensor), frozenset())

    def assign(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        self._alive.append(self._storage(tensor) or tensor)  # or the address would be used again
        self._sources[self.key(tensor)] = frozenset(sources)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.own_generator = True
        out = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        given = [*tensors_in(args), *tensors_in(kwargs)]
        sources: set[Source] = set(self.everything_since)
        if name not in SHAPE_ONLY:
            for tensor in given:
                sources |= self.sources(tensor)
        if self.inside is not None:
            self.touched |= sources
            sources.add(("inside", self.inside))
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            self.everything_since |= sources - {("inside", self.inside)}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._write(value, sources)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._write(kwargs[argument.name], sources)
        known = {self.key(tensor) for tensor in given}
        for tensor in tensors_in(out):
            if self.key(tensor) not in known:
                self.assign(tensor, sources)
        return out

    def _write(self, value: Any, sources: set[Source]) -> None:
        for tensor in tensors_in(value):
            self.assign(tensor, self.sources(tensor) | sources)
            self.written.add(self.key(tensor))


def digest(value: Any) -> str:
    """A print of the numbers in all tensors of ``value``, equal where they are equal bit for bit."""
    found = hashlib.sha256()
    for tensor in tensors_in(value):
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
