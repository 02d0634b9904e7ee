"""The ``sharded`` format: a directory that all ranks write at once, each what it holds.

``__<rank>_0.distcp`` and ``.metadata``
    Blocks of tensors, one after the other, each as ``torch.save`` writes it, and what torch's distributed checkpoint (DCP) has to know of
    them: for its tools. It is a pickle, and nothing here reads it.
``rest.pt``
    All else, written by one rank: what is no tensor of the model or of an optimizer.
``manifest.json``
    Which block is where, and size and SHA-256 of every file. Written last: a directory without it is no checkpoint.

A block has its place in the whole tensor, in the model's own order, so that every layout reads what any other wrote.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.parallel.placement import Entry, Piece

MANIFEST, REST, VERSION = "manifest.json", "rest.pt", 1

Everyone = Callable[[Any], list[Any]]


def is_sharded(path: Any) -> bool:
    return "://" not in str(path) and _complete(Path(path)) is not None


def _before(path: Path) -> Path:
    """Where what ``path`` was is for a moment, while it is replaced."""
    return path.with_name(f".{path.name}.before")


def _complete(path: Path) -> Path | None:
    return next((each for each in (path, _before(path)) if (each / MANIFEST).is_file()), None)


def begin(
    path: Path,
    entries: Mapping[str, Entry],
    rest: Mapping[str, Any],
    layout: Mapping[str, Any],
    rank: int,
    everyone: Everyone,
    copy: bool,
) -> Callable[[Everyone], None]:
    """Take down what is to be written. Collective over all ranks.

    Args:
        entries: by name; ranks that hold the same block agree on one to write it.
        rest: rank 0's.
        everyone: gives what all ranks gave it, JSON values in the order of the ranks.
        copy: to the memory of the host, so that training may go on before it is written.

    Returns:
        What writes it, from another thread if need be. It is collective over all ranks again, raises a RuntimeError on all of them
        with what failed on which, and leaves ``path`` complete or as it was.
    """
    aside = path.with_name(f".{path.name}.part")
    blocks = _owned(entries, rank, everyone)
    if copy:
        blocks = [(name, entry, Piece(p.offsets, p.tensor.detach().to("cpu", copy=True))) for name, entry, p in blocks]
    buffer = io.BytesIO()
    if rank == 0:
        torch.save(dict(rest), buffer)

    def make_room() -> None:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)

    def write(everyone: Everyone) -> None:
        _attempt(make_room, everyone)
        written = _attempt(lambda: _write(aside / f"__{rank}_0.distcp", blocks), everyone)
        _attempt(lambda: _commit(aside, path, buffer.getvalue(), written, layout) if rank == 0 else None, everyone)

    return write


def _attempt(do: Callable[[], Any], everyone: Everyone) -> list[Any]:
    """What each rank's ``do`` gave. Collective.

    Raises:
        RuntimeError: on all ranks.
    """
    try:
        result, error = do(), None
    except Exception as failure:
        result, error = None, f"{type(failure).__name__}: {failure}"
    everything = everyone([result, error])
    failed = [f"rank {rank}: {each}" for rank, (_, each) in enumerate(everything) if each]
    if failed:
        raise RuntimeError(
            f"The checkpoint could not be written ({'; '.join(failed[:4])}). The one before it is as it was."
        )
    return [each for each, _ in everything]


def _owned(entries: Mapping[str, Entry], rank: int, everyone: Everyone) -> list[tuple[str, Entry, Piece]]:
    """The blocks that this rank writes: of the ranks that hold one, that with the least to write so far."""
    held = {name: [list(piece.offsets) for piece in entry.pieces] for name, entry in entries.items()}
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for other, names in enumerate(everyone(held)):
        for name, blocks in names.items():
            for offsets in blocks:
                holders.setdefault((name, tuple(offsets)), []).append(other)
    load: dict[int, int] = {}
    mine = []
    for (name, offsets), ranks in sorted(holders.items()):
        owner = min(ranks, key=lambda other: (load.get(other, 0), other))
        load[owner] = load.get(owner, 0) + 1
        if owner == rank:
            piece = next(p for p in entries[name].pieces if p.offsets == offsets)
            mine.append((name, entries[name], piece))
    return mine


def _alone(tensor: Tensor) -> Tensor:
    """On the host, and with no memory around it, all of which ``torch.save`` would write."""
    host = tensor.detach().cpu()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def _write(file: Path, blocks: list[tuple[str, Entry, Piece]]) -> dict[str, Any]:
    """What the manifest has of this rank."""
    digest, begin, tensors = hashlib.sha256(), 0, []
    with open(file, "wb") as out:
        for name, entry, piece in blocks:
            buffer = io.BytesIO()
            torch.save(_alone(piece.tensor), buffer)
            data = buffer.getbuffer()
            out.write(data)
            digest.update(data)
            tensors.append(
                {
                    "name": name,
                    "shape": list(entry.shape),
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "offsets": list(piece.offsets),
                    "sizes": list(piece.tensor.shape),
                    "begin": begin,
                    "length": len(data),
                }
            )
            begin += len(data)
        out.flush()
        os.fsync(out.fileno())
    return {"file": file.name, "bytes": begin, "sha256": digest.hexdigest(), "blocks": tensors}


def _commit(aside: Path, path: Path, rest: bytes, written: list[dict[str, Any]], layout: Mapping[str, Any]) -> None:
    tensors: dict[str, Any] = {}
    for part in written:
        for block in part["blocks"]:
            whole = tensors.setdefault(block["name"], {"shape": block["shape"], "dtype": block["dtype"], "blocks": []})
            place = {key: block[key] for key in ("offsets", "sizes", "begin", "length")}
            whole["blocks"].append({"file": part["file"], **place})
    compat.write_dcp_metadata(aside, tensors)
    _sync(aside / compat.DCP_METADATA)
    (aside / REST).write_bytes(rest)
    _sync(aside / REST)
    files = {part["file"]: {"bytes": part["bytes"], "sha256": part["sha256"]} for part in written}
    files[REST] = {"bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()}
    manifest = {"version": VERSION, "layout": dict(layout), "files": files, "tensors": tensors}
    (aside / MANIFEST).write_text(json.dumps(manifest))
    _sync(aside / MANIFEST)
    before = _before(path)
    if path.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.replace(path, before)
    os.replace(aside, path)
    _sync(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Reader:
    """A checkpoint, read tensor by tensor. Nothing in it is unpickled freely.

    Raises:
        ValueError: for a directory of another version, or a file that is missing, cut, or changed; names it.
    """

    def __init__(self, path: Any) -> None:
        self.path = _complete(Path(path)) or Path(path)
        self.manifest = json.loads((self.path / MANIFEST).read_text())
        if self.manifest.get("version") != VERSION:
            raise ValueError(
                f"{self.path} is a sharded checkpoint of version {self.manifest.get('version')}, and this package reads {VERSION}."
            )
        self._good: set[str] = set()

    def _checked(self, name: str) -> Path:
        file, expected = self.path / name, self.manifest["files"][name]
        if name in self._good:
            return file
        if not file.is_file():
            raise ValueError(f"The checkpoint {self.path} is damaged: {name} is missing.")
        digest = hashlib.sha256()
        with open(file, "rb") as data:
            while part := data.read(1 << 24):
                digest.update(part)
        if file.stat().st_size != expected["bytes"] or digest.hexdigest() != expected["sha256"]:
            raise ValueError(
                f"The checkpoint {self.path} is damaged: {name} has {file.stat().st_size} bytes of {expected['bytes']}, or others than were "
                "written."
            )
        self._good.add(name)
        return file

    def rest(self) -> dict[str, Any]:
        return dict(torch.load(self._checked(REST), map_location="cpu", weights_only=True))

    def names(self, prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in self.manifest["tensors"] if name.startswith(prefix)]

    def whole(self, name: str) -> Tensor:
        """A tensor, put together from its blocks, on the host."""
        entry = self.manifest["tensors"][name]
        tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for block in entry["blocks"]:
            with open(self._checked(block["file"]), "rb") as data:
                data.seek(block["begin"])
                part = torch.load(io.BytesIO(data.read(block["length"])), map_location="cpu", weights_only=True)
            place = tuple(slice(at, at + size) for at, size in zip(block["offsets"], block["sizes"], strict=True))
            tensor[place] = part
        return tensor


class Lazy(Mapping[Any, Any]):
    """A mapping whose values are made when they are asked for."""

    def __init__(self, makers: Mapping[Any, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, key: Any) -> Any:
        return self._makers[key]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def take_apart(checkpoint: dict[str, Any]) -> tuple[dict[str, Entry], dict[str, Any]]:
    """What Lightning has collected, as tensors of which ranks hold pieces, by name, and the rest."""
    entries: dict[str, Entry] = {}
    rest = dict(checkpoint)
    state = rest.pop("state_dict", {})
    for name, value in state.items():
        if isinstance(value, Entry):
            entries[f"model.{name}"] = value
    rest["state_dict"] = {name: None if isinstance(value, Entry) else value for name, value in state.items()}
    optimizers = []
    for number, optimizer in enumerate(rest.pop("optimizer_states", [])):
        plain: dict[int, dict[str, Any]] = {}
        for index, values in optimizer["state"].items():
            plain[index] = {key: value for key, value in values.items() if not isinstance(value, Entry)}
            entries.update(
                {
                    f"optimizer.{number}.{index}.{key}": value
                    for key, value in values.items()
                    if isinstance(value, Entry)
                }
            )
        optimizers.append({"state": plain, "param_groups": optimizer["param_groups"]})
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = optimizers
    return entries, rest


def put_together(reader: Reader) -> dict[str, Any]:
    """A checkpoint as Lightning has it, whose tensors are read when they are asked for."""
    checkpoint = reader.rest()
    stored = checkpoint["state_dict"]
    makers = {name: partial(reader.whole, f"model.{name}") for name in reader.names("model.")}
    checkpoint["state_dict"] = Lazy({name: makers.get(name, partial(stored.get, name)) for name in stored})
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        keys: dict[int, list[str]] = {index: [] for index in optimizer["state"]}
        for name in reader.names(f"optimizer.{number}."):
            index, _, key = name.partition(".")
            keys.setdefault(int(index), []).append(key)

        def values(
            index: int, number: int = number, keys: Any = keys, plain: Any = optimizer["state"]
        ) -> dict[str, Any]:
            tensors = {key: reader.whole(f"optimizer.{number}.{index}.{key}") for key in keys[index]}
            return {**plain.get(index, {}), **tensors}

        optimizer["state"] = Lazy({index: partial(values, index) for index in sorted(keys)})
    return checkpoint
