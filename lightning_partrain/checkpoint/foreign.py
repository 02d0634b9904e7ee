"""Checkpoints of others: the folders that Lightning's FSDP and ModelParallel strategies write, and safetensors files.

Such a folder holds ``meta.pt``, all that is no tensor of the model or of an optimizer, and a distributed checkpoint (DCP) of torch:
``.metadata``, a pickle that says where everything is, and files of blocks, each as ``torch.save`` writes it. Optimizer state goes by
the names of parameters there, and by numbers in the order of the groups here.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.checkpoint import full
from lightning_partrain.checkpoint.pretrained import DTYPES
from lightning_partrain.checkpoint.torch_file import Unread, as_bytes, check_sums, load_plain

META = "meta.pt"

# ---------------------------------------------------------------------------------------------------------------------
# DCP
# ---------------------------------------------------------------------------------------------------------------------


class Record:
    """Stands for an object of a class that is not run, such as torch's in ``.metadata``: nothing but what the file says of it."""

    def __new__(cls, *values: Any) -> Record:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.values = state


def _path(*parts: str) -> str:
    return "/".join(parts)


#: What else is in such a file, and what stands for it.
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    **{(f"pathlib{part}", f"{kind}Path"): _path for part in ("", "._local") for kind in ("Posix", "Windows")},
    **{each: type(each[1], (Record,), {}) for each in compat.DCP_CLASSES},
}


class _Unpickler(pickle.Unpickler):
    """Makes records and plain data; calls nothing else, whatever the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which has no place in it; nothing of it was run"
            )
        return _PLAIN[module, name]


def is_folder(path: Path) -> bool:
    return (path / META).is_file() and (path / compat.DCP_METADATA).is_file()


def read(path: Path) -> dict[str, Any]:
    """A checkpoint as Lightning has it on one device, of a folder of its FSDP or ModelParallel strategy. Tensors are unread.

    Raises:
        ValueError: for a file that is damaged or holds other things than tensors and plain data; names it.
    """
    checkpoint = dict(load_plain(path / META, str(path / META)))
    items = _Folder(path).items()
    state = items.get("state_dict", items.get("model"))  # ModelParallel's, FSDP's
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no model: there is no 'state_dict' or 'model' in {compat.DCP_METADATA}.")
    checkpoint["state_dict"] = state
    optimizers: list[dict[str, Any]] = []
    names: list[list[list[str]]] = []
    while (key := f"optimizer_{len(optimizers)}") in items:
        try:
            optimizer, of_groups = _by_number(items[key])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {key} has no groups of parameters ({error!r}).") from None
        optimizers.append(optimizer)
        names.append(of_groups)
    if optimizers:
        checkpoint["optimizer_states"] = optimizers
        checkpoint.setdefault(full.KEY, full.describe({}, names))
    return checkpoint


def _by_number(optimizer: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]]]:
    """The state by numbers, and the parameters' names in each group."""
    names = [list(group["params"]) for group in optimizer["param_groups"]]
    number = {name: place for place, name in enumerate(name for group in names for name in group)}
    state = {number[name]: values for name, values in (optimizer.get("state") or {}).items()}
    groups = [
        {**group, "params": [number[name] for name in of_group]}
        for group, of_group in zip(optimizer["param_groups"], names, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}, names


class _Folder:
    """A distributed checkpoint of torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / compat.DCP_METADATA
        try:
            with open(file, "rb") as data:
                metadata = _Unpickler(data).load()
            self._described: dict[str, Any] = metadata.state_dict_metadata
            self._paths: dict[str, tuple[Any, ...]] = metadata.planner_data
            self._blocks: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
            for index, where in metadata.storage_data.items():
                self._blocks.setdefault(index.fqn, []).append((tuple(getattr(index, "offset", None) or ()), where))
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{file} is damaged, or not what torch writes: {error}.") from None

    def items(self) -> dict[Any, Any]:
        """All that is in it, nested as it was saved. Tensors are unread."""
        root: dict[Any, Any] = {}
        for name, path in self._paths.items():
            try:
                value = self._item(name)
            except (AttributeError, KeyError, TypeError) as error:
                raise self._damaged(f"{compat.DCP_METADATA} does not say where {name} is ({error!r})") from None
            at = root
            for step in path[:-1]:
                at = at.setdefault(step, {})
            at[path[-1]] = value
        return _with_lists(root)

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"The checkpoint {self.path} is damaged: {what}.")

    def _item(self, name: str) -> Any:
        described, blocks = self._described[name], self._blocks[name]
        if not hasattr(described, "chunks"):
            ((_, where),) = blocks
            return self._load(where)
        shape, dtype = tuple(described.size), described.properties.values[0]
        return Unread(shape, dtype, lambda: self._whole(name, shape, dtype))

    def _whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        missing = whole.numel()
        for offsets, where in self._blocks[name]:
            part = self._load(where)
            place = tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=False))
            if part.dtype != dtype or part.ndim != whole.ndim or whole[place].shape != part.shape:
                raise self._damaged(f"a block of {name} in {where.relative_path} is not what is said of it")
            whole[place] = part
            missing -= part.numel()
        if missing:
            raise self._damaged(f"{whole.numel() - missing} of {whole.numel()} numbers of {name} are there")
        return whole

    def _load(self, where: Any) -> Any:
        """What lies in a part of a file."""
        name, begin, length = where.relative_path, where.offset, where.length
        file = (self.path / name).resolve()
        if not file.is_relative_to(self.path.resolve()):
            raise self._damaged(f"{compat.DCP_METADATA} names {name!r}, which is not in the folder")
        if getattr(where, "transform_descriptors", None):
            raise ValueError(f"{file} is written with an extension of torch ({where.transform_descriptors}): unknown.")
        if not file.is_file():
            raise self._damaged(f"{name} is missing")
        if begin < 0 or length < 0 or begin + length > file.stat().st_size:
            raise self._damaged(f"{name} has {file.stat().st_size} bytes, and {begin + length} are said to be there")
        with open(file, "rb") as data:
            data.seek(begin)
            block = io.BytesIO(data.read(length))
        check_sums(block, str(self.path / name))
        return load_plain(block, str(self.path / name))


def _with_lists(value: Any) -> Any:
    """With lists in place of dicts whose keys are 0, 1, ..., which is how lists are stored."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_with_lists(value[key]) for key in sorted(value)]
    return {key: _with_lists(each) for key, each in value.items()}


# ---------------------------------------------------------------------------------------------------------------------
# safetensors: the length of a header, the header in JSON, and the bytes of the tensors
# ---------------------------------------------------------------------------------------------------------------------

_LONGEST_HEADER = 100_000_000


def is_safetensors(path: Path) -> bool:
    with open(path, "rb") as file:
        length, first = int.from_bytes(file.read(8), "little"), file.read(1)
    return first == b"{" and length <= min(_LONGEST_HEADER, path.stat().st_size - 8)


def read_safetensors(path: Path) -> dict[str, Unread]:
    """The tensors of a safetensors file by name, unread.

    Raises:
        ValueError: for a damaged file.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _of_file(path, 8 + length, described) for name, described in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file, or it is damaged ({error}).") from None


def _of_file(path: Path, start: int, described: Mapping[str, Any]) -> Unread:
    shape, dtype = tuple(described["shape"]), DTYPES[described["dtype"]]
    begin, end = described["data_offsets"]
    if min(begin, *shape, 0) < 0 or start + end > path.stat().st_size:
        raise ValueError(f"a tensor of shape {shape} ends at byte {start + end} of {path.stat().st_size}")

    def read() -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        with open(path, "rb") as file:
            file.seek(start + begin)
            if tensor.numel() and file.readinto(as_bytes(tensor)) != tensor.nbytes:
                raise ValueError(f"{path} has become shorter.")
        return tensor

    unread = Unread(shape, dtype, read)
    if unread.nbytes != end - begin:
        raise ValueError(f"a tensor of shape {shape} has {end - begin} bytes")
    return unread


def write_safetensors(path: Path, tensors: Mapping[str, Unread]) -> None:
    """Write a new file that the safetensors library reads. One tensor is in memory at a time.

    Raises:
        ValueError: for a dtype that the format does not have.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # each begins at a multiple of its size
    begin = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in names:
            raise ValueError(f"safetensors files have no {tensor.dtype}, which {name} is.")
        end = begin + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(as_bytes(tensors[name].read()))
        file.flush()
        os.fsync(file.fileno())
