"""Random states: those that stages have in common, and seeds for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain.sync.messages import broadcast_json

try:
    import numpy
except ImportError:  # a step that uses it has it
    numpy = None  # type: ignore[assignment]


def _plain_states() -> dict[str, Any]:
    """Python's and numpy's, in what JSON can hold."""
    state: dict[str, Any] = {"python": list(random.getstate())}
    if numpy is not None:
        own: Any = numpy.random.get_state()
        state["numpy"] = [own[0], own[1].tolist(), *own[2:]]
    return state


def _set_plain_states(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if numpy is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def state_to_save(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """All random states of this rank and those of ``generators``, as tensors and what JSON can hold."""
    host, device = torch_states()
    torchs = {"host": host} if device is None else {"host": host, "device": device}
    own = {name: generator.get_state() for name, generator in generators.items()}
    return {**_plain_states(), "torch": torchs, "generators": own}


def set_saved_state(states: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    _set_plain_states(states)
    set_torch_states((states["torch"]["host"], states["torch"].get("device")))
    for name, generator in generators.items():
        if name in states["generators"]:
            generator.set_state(states["generators"][name])


def share_random_states(group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` (tensors on the host) Python's, numpy's and torch's random states of its first rank."""
    shared = broadcast_json(_plain_states(), dist.get_global_rank(group, 0), torch.device("cpu"), group)
    _set_plain_states(shared)
    generators = torch.get_rng_state()
    dist.broadcast(generators, dist.get_global_rank(group, 0), group=group)
    torch.set_rng_state(generators)
    if torch.cuda.is_initialized():
        device = torch.cuda.get_rng_state()
        dist.broadcast(device, dist.get_global_rank(group, 0), group=group)
        torch.cuda.set_rng_state(device)


def torch_states() -> tuple[Tensor, Tensor | None]:
    """Of torch's random numbers on the host and on this device."""
    return torch.default_generator.get_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_torch_states(states: tuple[Tensor, Tensor | None]) -> None:
    host, device = states
    torch.default_generator.set_state(host)
    if device is not None:
        torch.cuda.set_rng_state(device)


def seed_torch(seed: int) -> None:
    """Not ``torch.manual_seed``: it formats a stack trace for devices that are not there, 2 ms a call (torch 2.13)."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


@contextmanager
def torch_seeded(seed: int | None) -> Iterator[None]:
    """torch's random numbers of this device from ``seed`` (or from where they are) on, and as they were afterwards."""
    states = torch_states()
    if seed is not None:
        seed_torch(seed)
    try:
        yield
    finally:
        set_torch_states(states)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's random numbers from ``seed`` on, and as they were afterwards."""
    with Stream(seed).drawing():
        yield


class Stream:
    """Python's, numpy's and torch's random numbers from ``seed`` on, for whoever is :meth:`drawing`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any, Any] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """From where the stream is; the random states are as they were afterwards."""
        before = _states()
        if self._states is not None:
            _set_states(self._states)
        else:
            random.seed(self._seed)
            if numpy is not None:
                numpy.random.seed(self._seed % (1 << 32))
            seed_torch(self._seed)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(before)


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), numpy.random.get_state() if numpy is not None else None, torch_states()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    python, array, tensors = states
    random.setstate(python)
    if numpy is not None:
        numpy.random.set_state(array)
    set_torch_states(tensors)
