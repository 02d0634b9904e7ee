"""What DeepSpeed's engine keeps flat: parameters and optimizer state in one tensor a group and rank, taken apart by name.

Stages 1 and 2 lay the parameters of a group one behind the other and cut the whole into equal partitions, one a rank. Stage 3 cuts every
parameter into equal parts, and a rank's tensor has its parts one behind the other. What is missing to equal sizes is padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.checkpoint import torch_file
from lightning_partrain.checkpoint.foreign import Record
from lightning_partrain.checkpoint.torch_file import Unread, load_plain, refusing

#: Enumerations whose values are all that is wanted.
_NUMBERS = {"deepspeed.runtime.zero.config.ZeroStageEnum"}


class File:
    """One file of the engine. Only its pickle is read, without DeepSpeed, and nothing in it is run: a :class:`foreign.Record` stands for
    every object that is neither tensor nor plain data.

    Attributes:
        value: what lies in it, with tensors that have no numbers.

    Raises:
        ValueError: for what is no such file or is damaged; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with refusing(str(path)):
            others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(int if name in _NUMBERS else type(name, (Record,), {}), name) for name in others]
        with torch.serialization.safe_globals(stand_ins), compat.FakeTensorMode():  # type: ignore[arg-type]
            value = load_plain(path, str(path))
        self._records = torch_file.Records(path)
        if not isinstance(value, dict):
            raise self.wrong("it holds no dictionary")
        self.value: dict[str, Any] = value

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is damaged, or not what DeepSpeed writes: {what}.")

    def unread(self, tensor: Tensor) -> Unread:
        return self._records.unread(tensor.detach())

    def plain(self, value: Any, where: str) -> Any:
        """``value`` with tensors that can be read.

        Raises:
            ValueError: when an object is in it; says where and which.
        """
        if isinstance(value, Tensor):
            return self.unread(value)
        if isinstance(value, Record) or (isinstance(value, type) and issubclass(value, Record)):
            kind = value.__name__ if isinstance(value, type) else type(value).__name__
            raise ValueError(
                f"{self.path} holds a {kind} in {where}, which is neither tensor nor plain data. To load it could run code, so nothing of it "
                "was run. Write the checkpoint without it, such as with save_hyperparameters(ignore=[...])."
            )
        if isinstance(value, dict):
            return {
                self.plain(key, where): self.plain(each, f"{where}/{key}".lstrip("/")) for key, each in value.items()
            }
        if type(value) in (list, tuple, set):
            return type(value)(self.plain(each, where) for each in value)
        return value


@dataclass(frozen=True)
class Place:
    """Where the numbers of a parameter lie.

    Attributes:
        shape: of the parameter.
        flat: number of the flat tensor that it is in, on every rank.
        parts: (rank, begin, count) in order.
    """

    shape: tuple[int, ...]
    flat: int
    parts: list[tuple[int, int, int]]


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def lay_in_a_row(
    flat: int, shapes: Mapping[str, Sequence[int]], paddings: Sequence[int], size: int, ranks: int
) -> dict[str, Place]:
    """Places by name in the group ``flat`` of stages 1 and 2.

    Args:
        shapes: in the order in which they lie.
        paddings: numbers behind each parameter that are of none.
        size: of a rank's partition.

    Raises:
        ValueError: when they do not fill the partitions.
    """
    places, at = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        end, parts = at + _count(shape), []
        while at < end:
            rank, begin = divmod(at, size) if size else (ranks, 0)
            count = min(end - at, size - begin) if size else end - at
            parts.append((rank, begin, count))
            at += count
        places[name] = Place(tuple(shape), flat, parts)
        at += padding
    if not 0 <= ranks * size - at < 2 * ranks:  # it aligns the whole to this
        raise ValueError(f"group {flat} has {at} numbers, and {ranks} partitions of {size}")
    return places


def lay_in_parts(flat: int, shapes: Mapping[str, Sequence[int]], ranks: int) -> tuple[dict[str, Place], int]:
    """Places by name in the flat tensor ``flat`` of stage 3, and how many numbers it has."""
    places, at = {}, 0
    for name, shape in shapes.items():
        count = _count(shape)
        part = -(-count // ranks)
        counts = [max(0, min(part, count - rank * part)) for rank in range(ranks)]
        places[name] = Place(tuple(shape), flat, [(rank, at, each) for rank, each in enumerate(counts) if each])
        at += part
    return places, at


def joined(files: Sequence[File], flats: Sequence[Tensor], place: Place, same: Any) -> Unread:
    """A parameter, put together when it is read; one part is in memory beside it.

    Args:
        files: one a rank.
        flats: each rank's tensor, without numbers.

    Raises:
        ValueError: when a part lies outside of its tensor.
    """
    for rank, begin, count in place.parts:
        if flats[rank].ndim != 1 or begin + count > flats[rank].numel():
            raise files[rank].wrong(
                f"{same[-1]} ends at {begin + count} of a tensor of shape {tuple(flats[rank].shape)}"
            )
    return Unread(place.shape, flats[0].dtype, partial(_read, files, flats, place), same)


def _read(files: Sequence[File], flats: Sequence[Tensor], place: Place) -> Tensor:
    whole = torch.empty(_count(place.shape), dtype=flats[0].dtype)
    at = 0
    for rank, begin, count in place.parts:
        whole[at : at + count] = files[rank].unread(flats[rank].detach().narrow(0, begin, count)).read()
        at += count
    return whole.view(place.shape)


def as_given(names: Sequence[str], ranks: int, round_robin: bool | None, module: Sequence[str]) -> list[str]:
    """The names of a group in the order in which its optimizer got them.

    ``round_robin_gradients`` deals parameters to the ranks as cards, before they are laid in a row.

    Args:
        round_robin: whether it was on; ``None`` if that is not known.
        module: all names in the module's order.

    Raises:
        ValueError: when it is not known, and only one of the orders being that of the module would tell.
    """
    order = [index for rank in range(ranks) for index in range(rank, len(names), ranks)]
    dealt = [name for _, name in sorted(zip(order, names, strict=True))]
    if round_robin is None and dealt != list(names):
        number = {name: index for index, name in enumerate(module)}
        in_order = [sorted(each, key=lambda name: number[name]) == list(each) for each in (names, dealt)]
        if sum(in_order) != 1:
            raise ValueError(
                "its configuration (ds_config) is not in the files, and so it is not known whether round_robin_gradients has changed the "
                "order of the optimizer's parameters. Only the weights can be converted: --to safetensors or hf"
            )
        round_robin = in_order[1]
    return dealt if round_robin else list(names)


def state_of(
    files: Sequence[File], states: Sequence[Mapping[str, Any]], place: Place, name: str, sizes: set[int]
) -> dict[str, Any]:
    """The optimizer's state of a parameter.

    Args:
        states: of each rank's flat tensor that it is in.
        sizes: that a flat tensor may have.

    Raises:
        ValueError: for state that does not go by elements, and when ranks are not at the same step.
    """
    found: dict[str, Any] = {}
    for key, first in states[0].items():
        values = [state.get(key) for state in states]
        if isinstance(first, Tensor) and first.ndim > 0:
            wrong = [
                rank for rank, each in enumerate(values) if not isinstance(each, Tensor) or each.numel() not in sizes
            ]
            if wrong:
                shape = tuple(getattr(values[wrong[0]], "shape", ()))
                raise ValueError(
                    f"{files[wrong[0]].path}: the optimizer's {key!r} has shape {shape} for a flat tensor of {max(sizes)} numbers. Only state with a "
                    "number for each of the parameters' can be converted."
                )
            found[key] = joined(files, values, place, (str(files[0].path), key, name))  # type: ignore[arg-type]
            continue
        numbers = [
            file.unread(each).read() if isinstance(each, Tensor) else file.plain(each, key)
            for file, each in zip(files, values, strict=True)
        ]
        if any(bool(each != numbers[0]) for each in numbers):
            raise ValueError(
                f"{files[0].path.parent} is damaged: the ranks' files are of different steps (the optimizer's {key!r} is {numbers})."
            )
        number = numbers[0]
        if isinstance(
            number, Tensor
        ):  # one of its own for each parameter: torch would add to a shared one once for each
            found[key] = number.clone()
        else:  # DeepSpeed's own optimizers count steps in plain numbers
            found[key] = torch.tensor(float(number)) if key == "step" else number
    return found
