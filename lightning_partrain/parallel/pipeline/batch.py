"""Cutting a batch into micro-batches along dimension 0, and joining what a step returned for each of them."""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: Leaves that every micro-batch gets as they are.
PLAIN = (str, bytes, numbers.Number, type(None), enum.Enum, torch.dtype, torch.device)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_samples(value: Any) -> bool:
    """A list with one entry a sample: strings, numbers, or dictionaries. Lists of tensors are containers."""
    return (
        isinstance(value, (list, tuple))
        and not hasattr(value, "_fields")
        and len(value) > 0
        and (all(isinstance(v, PLAIN) and v is not None for v in value) or all(isinstance(v, Mapping) for v in value))
    )


def children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", value[key]) for key in value)
    elif _is_record(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    elif hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    else:
        yield from ((f"[{index}]", item) for index, item in enumerate(value))


def _rebuild(value: Any, items: list[Any]) -> Any:
    if isinstance(value, Mapping):
        new = dict(zip(value, items, strict=True))
        if type(value) is dict:
            return new
        built = copy.copy(value)
        for key, item in new.items():
            built[key] = item  # type: ignore[index]
        return built
    if _is_record(value):
        return dataclasses.replace(value, **dict(zip((f.name for f in dataclasses.fields(value)), items, strict=True)))
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or _is_record(value)


def _refuse(value: Any, path: str) -> None:
    raise ValueError(
        f"batch{path} is a {type(value).__name__}, which cannot be cut into micro-batches. Give the step tensors, plain values, "
        "and lists, tuples, dictionaries or dataclasses of them (collate_fn can do it)."
    )


def batch_size(batch: Any) -> int:
    """The number of samples of ``batch``: the first dimension that its tensors have in common.

    Raises:
        ValueError: when they have none in common, or when a part of the batch cannot be cut.
    """
    tensors: dict[str, int] = {}
    samples: dict[str, int] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            if value.ndim:
                tensors[path] = value.shape[0]
        elif _is_samples(value):
            samples[path] = len(value)
        elif is_container(value):
            for name, child in children(value):
                visit(child, path + name)
        elif not isinstance(value, PLAIN):
            _refuse(value, path)

    visit(batch, "")
    sizes = set(tensors.values()) or set(samples.values())
    if len(sizes) != 1:
        found = ", ".join(f"batch{path}: {size}" for path, size in (tensors or samples).items()) or "no tensor at all"
        raise ValueError(
            f"The batch cannot be cut into micro-batches, because its parts have no common first dimension ({found}). Let every "
            "tensor of the batch start with the sample dimension."
        )
    return sizes.pop()


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut ``batch`` into micro-batches of ``sizes`` samples, which sum to its :func:`batch_size`."""
    total = sum(sizes)

    def cut(value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            if value.ndim == 0:
                return [value] * len(sizes)
            return [piece.data for piece in value.split(list(sizes))]  # may be changed in place each
        if _is_samples(value) and len(value) == total:
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            return [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        if is_container(value):
            pieces = [cut(child) for _, child in children(value)]
            return [_rebuild(value, [piece[i] for piece in pieces]) for i in range(len(sizes))]
        return [value] * len(sizes)

    return cut(batch)


def micro_batch_sizes(samples: int, number: int) -> list[int]:
    """``number`` sizes that sum to ``samples`` and differ by one at most, the larger first."""
    small, extra = divmod(samples, number)
    return [small + 1] * extra + [small] * (number - extra)


def signature(value: Any) -> Hashable:
    """Equal for batches that a step treats alike: structure, shapes, dtypes; of plain values only the type."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if is_container(value):
        return (type(value), *((name, signature(child)) for name, child in children(value)))
    return repr(value) if isinstance(value, (bool, type(None))) else type(value).__name__


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if is_container(value):
        return _rebuild(value, [mapped(child, change) for _, child in children(value)])
    return value


def weighted_mean(values: Sequence[Any], weights: Sequence[int]) -> Any:
    """Of numbers or tensors of one shape; numbers of the host stay there, so that no device has to wait for them."""
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))


def join(outputs: Sequence[Any], sizes: Sequence[int], path: str = "") -> Any:
    """What a step would have returned for the whole batch, from what it returned for micro-batches of ``sizes`` samples.

    Tensors with one row a sample and lists with one entry a sample are concatenated; other floating-point values are averaged,
    weighted by samples; whole numbers that are the number of samples are added; anything else has to be equal.

    Raises:
        ValueError: when the outputs do not fit together.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if any(type(other) is not type(first) for other in outputs):
        kinds = ", ".join(sorted({type(o).__name__ for o in outputs}))
        raise ValueError(
            f"The step returned different things for the micro-batches of one batch: {kinds} (output{path})."
        )
    pairs = list(zip(outputs, sizes, strict=True))
    if isinstance(first, Tensor):
        return _join_tensors(outputs, sizes, path)
    if isinstance(first, list) and all(len(o) == size for o, size in pairs):
        return [item for o in outputs for item in o]
    if is_container(first):
        parts = [list(children(o)) for o in outputs]
        names = [name for name, _ in parts[0]]
        if any([name for name, _ in part] != names for part in parts):
            raise ValueError(f"The step returned different entries for the micro-batches of one batch (output{path}).")
        return _rebuild(
            first, [join([part[i][1] for part in parts], sizes, path + name) for i, name in enumerate(names)]
        )
    if isinstance(first, float):
        return weighted_mean(outputs, sizes)
    if isinstance(first, int) and not isinstance(first, bool) and all(o == size for o, size in pairs):
        return sum(outputs)
    if all(o == first for o in outputs):
        return first
    raise ValueError(
        f"output{path} differs between the micro-batches of one batch: {outputs!r}. Return a tensor with one row a sample, or a list "
        "with one entry a sample."
    )


def _join_tensors(outputs: Sequence[Tensor], sizes: Sequence[int], path: str) -> Tensor:
    first, pairs = outputs[0], list(zip(outputs, sizes, strict=True))
    if first.ndim and all(o.ndim and o.shape[0] == size for o, size in pairs):
        return torch.cat(list(outputs))
    if all(o.shape == first.shape for o in outputs):
        floating = first.is_floating_point() or first.is_complex()
        if floating and not any(size in o.shape for o, size in pairs):
            mean: Tensor = weighted_mean(outputs, sizes)
            return mean
        if first.ndim == 0 and not floating and all(int(o) == size for o, size in pairs):
            return torch.stack(list(outputs)).sum(0)
        if first.ndim == 0 and not floating and all(int(o) == int(first) for o in outputs):
            return first
    shapes = [tuple(o.shape) for o in outputs]
    raise ValueError(
        f"output{path} has the shapes {shapes} and {first.dtype} for micro-batches of {list(sizes)} samples, which cannot be joined. "
        "Return tensors with one row a sample, or floating-point means."
    )
