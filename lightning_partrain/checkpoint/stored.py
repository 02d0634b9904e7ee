"""Reading what :mod:`sharded` writes: its manifest, and blocks of tensors when they are asked for."""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_partrain.checkpoint.folder import Folder
from lightning_partrain.checkpoint.torch_file import as_bytes
from lightning_partrain.parallel.placement import whole_of

MANIFEST, VERSION = "manifest.json", 1

Everyone = Callable[[Any], list[Any]]


def is_sharded(path: Any) -> bool:
    return bool(Folder(path).has(MANIFEST))


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """The file :data:`MANIFEST`, with a digest of what is in it."""
    return json.dumps({"manifest": manifest, "sha256": _digest(manifest)}).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class StoredTensor:
    """A tensor of a checkpoint, of which blocks are read when they are asked for; see :class:`placement.Stored`."""

    def __init__(self, reader: Reader, name: str) -> None:
        described = reader.manifest["tensors"][name]
        dtype = getattr(torch, described["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise reader.damaged(f"{MANIFEST} has no type of numbers for {name!r}")
        self._reader, self._name, self._blocks = reader, name, described["blocks"]
        self.shape, self.dtype = tuple(int(size) for size in described["shape"]), dtype

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Shape ``sizes``; only the rows that it is part of are read."""
        result = None
        missing = torch.Size(sizes).numel()
        for block in self._blocks:
            low = [max(a, b) for a, b in zip(offsets, block["offsets"], strict=True)]
            high = [
                min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, block["offsets"], block["sizes"], strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            rows = self._rows(block, low, high)
            for dim in range(1, len(low)):
                rows = rows.narrow(dim, low[dim] - block["offsets"][dim], high[dim] - low[dim])
            if list(rows.shape) == list(sizes):
                return rows.contiguous()
            if result is None:
                result = torch.empty(tuple(sizes), dtype=self.dtype)
            place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            result[place] = rows
            missing -= rows.numel()
        if missing:
            raise self._reader.damaged(f"{MANIFEST} has not all blocks of {self._name!r}")
        return torch.empty(tuple(sizes), dtype=self.dtype) if result is None else result

    def _rows(self, block: Mapping[str, Any], low: Sequence[int], high: Sequence[int]) -> Tensor:
        sizes = [int(size) for size in block["sizes"]]
        width = torch.Size(sizes[1:]).numel()
        count, skip = (high[0] - low[0], low[0] - block["offsets"][0]) if sizes else (1, 0)
        numbers = torch.empty(count * width, dtype=self.dtype)
        with self._reader.folder.reader(self._reader.simple(block["file"])) as file:
            file.seek(block["numbers"] + skip * width * numbers.element_size())
            view = as_bytes(numbers)
            while len(view):
                got = file.readinto(view)  # type: ignore[attr-defined]
                if not got:
                    raise self._reader.damaged(f"{block['file']} is cut")
                view = view[got:]
        return numbers.view([count, *sizes[1:]] if sizes else [])


class Reader:
    """A checkpoint, read block by block. Nothing in it is unpickled freely.

    Raises:
        ValueError: for a folder without manifest, of another version, or a file that is missing, cut, or changed; names it.
    """

    def __init__(self, path: Any) -> None:
        self.folder = Folder(path)
        if not self.folder.has(MANIFEST):
            raise ValueError(f"{path} is no complete checkpoint: it has no {MANIFEST}, which is written last.")
        try:
            whole = json.loads(self.folder.read(MANIFEST))
            self.manifest, digest = whole["manifest"], whole["sha256"]
            good = _digest(self.manifest) == digest
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise self.damaged(f"{MANIFEST} has changed since it was written")
        found = self.manifest["version"]
        if found != VERSION:
            raise ValueError(f"{path} is a sharded checkpoint of version {found}, and this package reads {VERSION}.")

    def damaged(self, what: str) -> ValueError:
        return ValueError(f"The checkpoint {self.folder} is damaged: {what}.")

    def simple(self, name: str) -> str:
        """``name``, which is that of a file in the folder."""
        if name not in self.manifest["files"] or posixpath.basename(name) != name:
            raise self.damaged(f"{MANIFEST} names {name!r}, which is no file of it")
        return name

    def problem(self, name: str) -> str | None:
        """What is wrong with a file; reads all of it."""
        expected = self.manifest["files"][self.simple(name)]
        if not self.folder.has(name):
            return f"{name} is missing"
        digest, size = hashlib.sha256(), 0
        with self.folder.reader(name) as data:
            while part := data.read(1 << 20):
                digest.update(part)
                size += len(part)
        if size != expected["bytes"]:
            return f"{name} has {size} bytes of {expected['bytes']}"
        return None if digest.hexdigest() == expected["sha256"] else f"{name} has changed since it was written"

    def check(self, rank: int = 0, everyone: Everyone = lambda value: [value]) -> None:
        """Look at every file, each on one of the ranks. Collective.

        Raises:
            ValueError: on all ranks, with the first files that are not as they were written.
        """
        ranks = len(everyone(None))
        names = sorted(self.manifest["files"])
        own = [found for name in names[rank::ranks] if (found := self.problem(name))]
        wrong = [each for problems in everyone(own) for each in problems]
        if wrong:
            raise self.damaged(", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else ""))

    def rest(self, weights_only: bool = True) -> dict[str, Any]:
        data = self.folder.read(self.simple(self.manifest["rest"]))
        return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only))

    def names(self, prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in self.manifest["tensors"] if name.startswith(prefix)]

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(self, name)

    def whole(self, name: str) -> Tensor:
        """A tensor, put together from its blocks, on the host."""
        return whole_of(self.stored(name))
