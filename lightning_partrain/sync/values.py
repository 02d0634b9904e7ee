"""Nested values with tensors in them, from one rank to the others of a group: JSON and tensors, never pickle."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: So many texts are remembered on both sides.
KEPT = 256

#: Whole numbers up to this size are exact as floating-point ones.
EXACT = 2**53


#: Types that gloo and NCCL send.
SENT = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
SENT |= {torch.complex64, torch.complex128}


@dataclass(frozen=True)
class Kind:
    """A type of values beside tensors, numbers, text, lists, tuples and dictionaries.

    Attributes:
        fits: whether a value is one.
        take_apart: into a JSON value and further values.
        build: from both, on the receiving rank.
    """

    fits: Callable[[Any], bool]
    take_apart: Callable[[Any], tuple[Any, list[Any]]]
    build: Callable[[Any, list[Any]], Any]


class Values:
    """From ``source`` to the other ranks of ``group``.

    What is plain text goes over the host once and is remembered; afterwards a message has one number for it, and the tensors.

    Args:
        source: global rank.
        group: for tensors on ``device``.
        host_group: the same ranks, for tensors on the host.
        kinds: further types by name.
        pin: receive tensors into pinned memory.
    """

    def __init__(
        self,
        source: int,
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        device: torch.device,
        kinds: Mapping[str, Kind] | None = None,
        pin: bool = False,
    ) -> None:
        self.source, self._group, self._host_group, self._device = source, group, host_group, device
        self._kinds, self._pin = kinds or {}, pin
        self._texts: list[str] = []

    @property
    def sending(self) -> bool:
        return dist.get_rank() == self.source

    def share(self, value: Any = None) -> Any:
        """``value`` of the source on every rank; there, as it came back from the message.

        Raises:
            TypeError: on every rank, for what cannot be sent.
        """
        tensors: list[Tensor] = []
        numbers: list[float] = []
        packed = json.loads(self._share_text(json.dumps(self._pack(value, tensors, numbers)) if self.sending else ""))
        if not self.sending:
            tensors = [self._empty(shape, dtype) for shape, dtype in _shapes(packed)]
            numbers = [0.0] * _count_numbers(packed)
        if numbers:
            sent = torch.tensor(numbers, dtype=torch.float64)
            dist.broadcast(sent, self.source, group=self._host_group)
            numbers = sent.tolist()
        tensors = [tensor.to(self._device) for tensor in tensors]
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(_as_sent(tensor), self.source, group=self._group)
        return self._unpack(packed, iter(tensors), iter(numbers))

    def _empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device, pin_memory=self._pin)

    def _share_text(self, text: str) -> str:
        known = self.sending and text in self._texts
        if self.sending and not known and len(self._texts) == KEPT:
            self._texts.clear()
        number = self._texts.index(text) if known else len(self._texts)
        size = 0 if known else len(text.encode())
        head = torch.tensor([number, size])
        dist.broadcast(head, self.source, group=self._host_group)
        number, size = head.tolist()
        if size:
            body = (
                torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
                if self.sending
                else torch.empty(size, dtype=torch.uint8)
            )
            dist.broadcast(body, self.source, group=self._host_group)
            if number == 0:
                self._texts.clear()
            self._texts.append(body.numpy().tobytes().decode())
        return self._texts[number]

    def _pack(self, value: Any, tensors: list[Tensor], numbers: list[float]) -> Any:
        def pack(values: Any) -> list[Any]:
            return [self._pack(each, tensors, numbers) for each in values]

        if isinstance(value, Tensor) and not (value.layout is torch.strided and not value.is_nested):
            return {"refused": f"tensor that is {'nested' if value.is_nested else str(value.layout)}"}
        if isinstance(value, Tensor):
            value = value.detach()
            tensors.append(value.contiguous())
            return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        number = isinstance(value, (int, float)) and not isinstance(value, enum.Enum)
        if number and isinstance(value, int) and abs(value) > EXACT:
            return {"int": str(int(value))}
        if number:  # one that changes is no part of the text
            numbers.append(value)
            return {"number": "int" if isinstance(value, int) else "float"}
        if type(value) is dict:
            return {"keys": pack(value), "values": pack(value.values())}
        if type(value) in (list, tuple):
            return {type(value).__name__: pack(value)}
        for name, kind in self._kinds.items():
            if kind.fits(value):
                label, parts = kind.take_apart(value)
                return {"kind": name, "label": json.dumps(label), "parts": pack(parts)}
        return {"refused": type(value).__name__}

    def _unpack(self, packed: Any, tensors: Iterator[Tensor], numbers: Iterator[float]) -> Any:
        def unpack(values: Any) -> list[Any]:
            return [self._unpack(each, tensors, numbers) for each in values]

        if not isinstance(packed, dict):
            return packed
        (kind, content), *_ = packed.items()
        if kind == "tensor":
            return next(tensors)
        if kind == "int":
            return int(content)
        if kind == "number":
            return next(numbers) if content == "float" else int(next(numbers))
        if kind == "keys":
            return dict(zip(unpack(content), unpack(packed["values"]), strict=True))
        if kind == "kind":
            return self._kinds[content].build(json.loads(packed["label"]), unpack(packed["parts"]))
        if kind == "refused":
            raise TypeError(
                f"Rank {self.source} has a {content}, which cannot be sent to the others. Use tensors, plain values, and lists, tuples or "
                "dictionaries of them."
            )
        items = unpack(content)
        return tuple(items) if kind == "tuple" else items


def _as_sent(tensor: Tensor) -> Tensor:
    """As a type that backends know."""
    return tensor if tensor.dtype in SENT else tensor.view(-1).view(torch.uint8)


def _shapes(packed: Any) -> list[tuple[list[int], torch.dtype]]:
    if isinstance(packed, list):
        return [shape for item in packed for shape in _shapes(item)]
    if not isinstance(packed, dict):
        return []
    if "tensor" in packed:
        return [(packed["tensor"], getattr(torch, packed["dtype"]))]
    return [shape for item in packed.values() for shape in _shapes(item)]


def _count_numbers(packed: Any) -> int:
    if isinstance(packed, dict):
        return 1 if "number" in packed else sum(map(_count_numbers, packed.values()))
    return sum(map(_count_numbers, packed)) if isinstance(packed, list) else 0
