"""Calls of operators that are written down, and run when the numbers of a tensor are asked for: see ``deferred``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_partrain import compat

#: Elements from which on a tensor is deferred; smaller ones are made at once.
THRESHOLD = 1024

WAY_OUT = "Build that part outside of DeferredInit, or the model without it."

ATEN = torch.ops.aten
# those that leave nothing of the numbers that were there
_OVERWRITING = {
    *(ATEN.normal_, ATEN.uniform_, ATEN.bernoulli_, ATEN.random_, ATEN.exponential_, ATEN.geometric_, ATEN.cauchy_),
    *(ATEN.log_normal_, ATEN.zero_, ATEN.fill_, ATEN.copy_),
}
_COUNT = itertools.count()

SCRATCH: dict[torch.device, Tensor] = {}


@dataclass(eq=False)
class Memory:
    """What one process would have allocated, and the calls that write into it, in order."""

    writes: list[Call] = field(default_factory=list)

    def writes_before(self, number: float) -> Iterator[Call]:
        """Latest first, as far back as they matter."""
        for call in reversed(self.writes):
            if call.number < number:
                yield call
                if call.covers is self:
                    return


@dataclass(eq=False)
class Record:
    """A deferred tensor.

    Attributes:
        twin: on the meta device, with the strides, and the storage in common with others, that it would have.
        maker: the call that returned it.
    """

    twin: Tensor
    device: torch.device
    memory: Memory
    maker: Call

    def shares_with(self, twin: Tensor) -> bool:
        return self.twin.untyped_storage() is twin.untyped_storage()

    def scratch(self) -> Tensor:
        """Room to draw its numbers, the same for all: what is allocated and dropped, in between what stays, leaves holes in a heap."""
        like = as_meta(self.twin)
        size = like.untyped_storage().nbytes()
        if self.device not in SCRATCH or SCRATCH[self.device].nbytes < size:
            SCRATCH.pop(self.device, None)
            SCRATCH[self.device] = torch.empty(size, dtype=torch.uint8, device=self.device)
        room = torch.empty(0, dtype=like.dtype, device=self.device)
        return room.set_(SCRATCH[self.device].untyped_storage(), 0, like.shape, like.stride())


@dataclass(frozen=True)
class _Given:
    """A real tensor that is too large to be copied."""

    tensor: Tensor
    version: int


class Call:
    """Of an operator, with all that its numbers rest on.

    Attributes:
        number: calls are numbered in the order in which they were made.
        made: records of the tensors that it returned, in order; ``None`` for those that it was given.
        overwrites: the argument whose numbers it replaces without a look, if any.
        covers: the memory of which it leaves nothing as it was, if any.
        state: of the generator, where it draws random numbers.
        decided: what was built further on rests on its numbers.
    """

    def __init__(self, func: Callable[..., Any], leaves: list[Any], form: Any, device: torch.device) -> None:
        self.func, self.form, self.device = func, form, device
        self.number, self.default_dtype = next(_COUNT), torch.get_default_dtype()
        self.leaves = [_kept(leaf) for leaf in leaves]
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, Record)]
        self.made: list[Record | None] = []
        self.decided = False
        self.overwrites: Record | None = None
        self.covers: Memory | None = None
        if getattr(func, "overloadpacket", None) in _OVERWRITING and isinstance(self.leaves[0], Record):
            self._overwrite(self.leaves[0])
        self.generator: torch.Generator | None = None
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
            self.generator = given[0] if given else _default_generator(device)
            self.state = self.generator.get_state()

    def _overwrite(self, target: Record) -> None:
        if any(other.memory is target.memory for other in self.inputs[1:]):
            return
        self.overwrites, twin = target, target.twin
        if twin.is_contiguous() and twin.nbytes == twin.untyped_storage().nbytes():
            self.covers = target.memory

    def run(self, value: Callable[[Record], Tensor]) -> Any:
        """Now, with these values of deferred arguments."""
        args, kwargs = compat.tree_unflatten([_real(leaf, value) for leaf in self.leaves], self.form)
        return self.func(*args, **kwargs)

    def run_again(self, value: Callable[[Record], Tensor]) -> Any:
        """With the random numbers and the default dtype of then; those of now stay as they are."""
        with self._as_then():
            try:
                return self.run(value)
            except Exception as error:
                raise RuntimeError(
                    f"{self.func} was put off when the model was built, and fails now: {error} {WAY_OUT}"
                ) from error

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        dtype, generator = torch.get_default_dtype(), self.generator
        state = generator.get_state() if generator is not None else None
        try:
            torch.set_default_dtype(self.default_dtype)
            if generator is not None:
                generator.set_state(self.state)
            yield
        finally:
            torch.set_default_dtype(dtype)
            if generator is not None and state is not None:
                generator.set_state(state)

    def run_on_meta(self) -> tuple[Any, list[Any]]:
        """What it returns on the meta device, and the arguments that it was given there, in the order of ``leaves``."""
        leaves = [_on_meta(leaf) for leaf in self.leaves]
        args, kwargs = compat.tree_unflatten(leaves, self.form)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": None}
        elif kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return self.func(*args, **kwargs), leaves


def _kept(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return record_of(leaf) or (_copied(leaf) if is_small(leaf) else _Given(leaf, _version(leaf)))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _real(leaf: Any, value: Callable[[Record], Tensor]) -> Any:
    if isinstance(leaf, Record):
        return value(leaf)
    if isinstance(leaf, _Given):
        if _version(leaf.tensor) != leaf.version:
            raise RuntimeError(
                f"A tensor of shape {tuple(leaf.tensor.shape)} that it was given has been written to since. Give it a clone()."
            )
        return leaf.tensor
    return _copied(leaf) if isinstance(leaf, Tensor) else leaf  # a copy: it may be written to


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Record):
        return leaf.twin
    tensor = leaf.tensor if isinstance(leaf, _Given) else leaf
    if isinstance(tensor, Tensor):
        return as_meta(tensor)
    return None if isinstance(leaf, torch.Generator) else leaf


def as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _copied(tensor: Tensor) -> Tensor:
    """With the strides that it has."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_small(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.untyped_storage().nbytes() < THRESHOLD * tensor.element_size()


def record_of(tensor: Tensor) -> Record | None:
    """It is borne by the storage, which an ``nn.Parameter`` has in common with the tensor that it is made of."""
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return None
    return getattr(tensor.untyped_storage(), "deferred", None)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    return module.default_generators[module.current_device() if device.index is None else device.index]


def chain(record: Record) -> list[Call]:
    """The calls that the numbers of ``record`` rest on, in order."""
    found: set[Call] = set()
    todo = [(record.maker, record.memory), *((call, record.memory) for call in record.memory.writes_before(math.inf))]
    while todo:
        call, memory = todo.pop()
        if call in found:
            continue
        found.add(call)
        for given in call.inputs:
            todo.append((given.maker, given.memory))
            if given.memory is not memory:  # whose own writes are found already
                todo += [(write, given.memory) for write in given.memory.writes_before(call.number)]
    return sorted(found, key=lambda call: call.number)


@torch.no_grad()
def value_of(record: Record, decides: bool = False) -> Tensor:
    """The numbers of a deferred tensor, fresh.

    Args:
        decides: on what is built further on.
    """
    with compat.disable_current_modes():
        calls = chain(record)
        values: dict[Record | None, Tensor] = {}
        last: dict[Record | None, int] = {given: call.number for call in calls for given in call.inputs}
        for call in calls:
            call.decided |= decides
            returned, _ = compat.tree_flatten(call.run_again(values.__getitem__))
            tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
            values.update(zip(call.made, tensors, strict=True))
            del returned, tensors
            for seen in [*call.inputs, *call.made]:
                if seen is not record and last.get(seen, -1) <= call.number:
                    values.pop(seen, None)
        value = values[record]
        return value if value.nbytes == value.untyped_storage().nbytes() else value.clone()
