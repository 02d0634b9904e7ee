"""What a strategy keeps beside the model and its optimizers: error feedback, an outer optimizer, random states.

A strategy gives it in ``extra_state()``, a dictionary of

- tensors that are equal on all ranks, DTensors, and :class:`~lightning_partrain.parallel.placement.Entry` for whatever else ranks hold
  pieces of: written once, whole or in blocks, and read by every layout;
- :class:`PerRank`: what belongs to one rank;
- what JSON can hold: rank 0's counts;

and gets it back in ``load_extra_state(extra)``, as an :class:`Extra`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain.checkpoint.sharded import owned
from lightning_partrain.checkpoint.stored import Everyone
from lightning_partrain.parallel.placement import Entry, Stored, whole_of

PREFIX = "extra."


@dataclass(frozen=True)
class PerRank:
    """A value of this rank alone.

    Attributes:
        value: tensors and what JSON can hold, in dictionaries and lists.
        at: the number of this rank ``among`` those that each have one.
        among: whoever loads it has to describe its ranks in the same words.
    """

    value: Any
    at: int
    among: Mapping[str, Any]


def take_apart(extra: Mapping[str, Any]) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Tensors by name, and the rest."""
    entries, plain = {}, {}
    for name, value in extra.items():
        if isinstance(value, PerRank):
            buffer = io.BytesIO()
            torch.save(value.value, buffer)
            data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
            entries[f"{name}@{value.at}"] = Entry.of(data)
            plain[name] = {"among": dict(value.among)}
        elif isinstance(value, Entry):
            entries[name] = value
        elif isinstance(value, Tensor):
            entries[name] = Entry.of(value)
        else:
            plain[name] = {"value": value}
    return entries, plain


class Extra(Mapping[str, Any]):
    """What :func:`take_apart` was given, as far as it is to be had. Tensors are whole; those of a file may be :class:`Stored`."""

    def __init__(self, plain: Mapping[str, Any], tensors: Mapping[str, Callable[[], Tensor | Stored]]) -> None:
        self.plain, self._tensors = plain, tensors

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]() if name in self._tensors else self.plain[name]["value"]

    def __iter__(self) -> Iterator[str]:
        yield from self.plain
        yield from (name for name in self._tensors if "@" not in name)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def of_rank(self, name: str, at: int, among: Mapping[str, Any]) -> Any:
        """The value of the same rank; ``None`` when none was saved, or among others."""
        if (
            name not in self.plain
            or self.plain[name].get("among") != dict(among)
            or f"{name}@{at}" not in self._tensors
        ):
            return None
        data = whole_of(self._tensors[f"{name}@{at}"]())
        return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)


def gather(
    entries: Mapping[str, Entry], rank: int, everyone: Everyone, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """The whole tensors, on rank 0; others get an empty dictionary. Collective over ``group``, of tensors on the host."""
    if not any(everyone(bool(entries))):
        return {}
    mine, _ = owned(entries, rank, everyone)
    heads = [
        [name, list(e.shape), str(e.dtype).removeprefix("torch."), list(p.offsets), list(p.tensor.shape)]
        for name, e, p in mine
    ]
    whole: dict[str, Tensor] = {}
    for source, blocks in enumerate(everyone(heads)):
        for number, (name, shape, dtype, offsets, sizes) in enumerate(blocks):
            block = mine[number][2].tensor.detach().cpu().contiguous() if source == rank else torch.empty(0)
            if source == rank != 0:
                dist.send(block.view(-1).view(torch.uint8), group=group, group_dst=0)
            if rank != 0:
                continue
            if source != 0:
                block = torch.empty(sizes, dtype=getattr(torch, dtype))
                dist.recv(block.view(-1).view(torch.uint8), group=group, group_src=source)
            place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            whole.setdefault(name, torch.empty(shape, dtype=getattr(torch, dtype)))[place] = block
    return whole
