"""One of the ranks that work on the same samples loads and decodes them; the others receive."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_partrain.parallel.random_states import Stream
from lightning_partrain.strategies.loaders import LoaderWrapper
from lightning_partrain.sync.values import Kind, Values


class SharedLoader(LoaderWrapper):
    """On the source of ``values`` the loader's batches, which are sent; on the other ranks what is received, and the loader is never
    iterated. What loading draws at random does not move the random states that the ranks have in common.
    """

    _OWN = frozenset((*LoaderWrapper._OWN, "_values"))

    def __init__(self, loader: Any, length: int | None, values: Values) -> None:
        super().__init__(loader, length)
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        seed = int(torch.randint(1 << 62, ()))  # on all ranks
        if not self._values.sending:
            while (received := self._values.share()) is not None:
                yield received[0]
            return
        stream = Stream(seed)
        with stream.drawing():
            batches = iter(self._loader)
        missing = object()
        while True:
            with stream.drawing():
                batch = next(batches, missing)
            if batch is missing:
                self._values.share(None)
                return
            self._values.share([batch])
            yield batch


def _class_of(label: str) -> Any:
    module, _, name = label.partition(":")
    found: Any = sys.modules.get(module)  # never imported because a message says so
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise TypeError(f"A batch is a {name} of {module}, which this rank does not know. Import it in the script.")
    return found


def _label(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _build_mapping(label: str, parts: list[Any]) -> Any:
    kind = _class_of(label)
    if not issubclass(kind, Mapping):
        raise TypeError(f"{kind.__name__} is no mapping.")
    half = len(parts) // 2
    items = dict(zip(parts[:half], parts[half:], strict=True))
    if issubclass(kind, defaultdict):
        return kind(None, items)
    build: Any = kind
    return build(items)


def _build_tuple(label: str, parts: list[Any]) -> Any:
    kind = _class_of(label)
    if not (issubclass(kind, tuple) and hasattr(kind, "_make")):
        raise TypeError(f"{kind.__name__} is no named tuple.")
    return kind._make(parts)


def _build_dataclass(label: str, parts: list[Any]) -> Any:
    kind = _class_of(label)
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is no dataclass.")
    build: Any = kind
    return build(**dict(zip((f.name for f in dataclasses.fields(kind)), parts, strict=True)))


#: What batches are made of, beside what all messages are.
KINDS = {
    "bytes": Kind(
        lambda v: type(v) is bytes and len(v) > 0,
        lambda v: (None, [torch.frombuffer(bytearray(v), dtype=torch.uint8)]),
        lambda _, parts: parts[0].numpy().tobytes(),
    ),
    "array": Kind(  # of numpy, by its name, so that it need not be there
        lambda v: type(v).__module__ == "numpy" and getattr(getattr(v, "dtype", None), "kind", "") in tuple("biuf"),
        lambda v: (v.ndim == 0, [torch.as_tensor(v)]),
        lambda scalar, parts: parts[0].numpy()[()] if scalar else parts[0].numpy(),
    ),
    "mapping": Kind(
        lambda v: isinstance(v, Mapping),
        lambda v: (_label(v), [*v.keys(), *(v[key] for key in v)]),
        _build_mapping,
    ),
    "named tuple": Kind(
        lambda v: isinstance(v, tuple) and hasattr(v, "_make"), lambda v: (_label(v), list(v)), _build_tuple
    ),
    "dataclass": Kind(
        lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type),
        lambda v: (_label(v), [getattr(v, f.name) for f in dataclasses.fields(v)]),
        _build_dataclass,
    ),
}
