"""The ``sharded`` format: a folder that all ranks write at once, each what it holds.

``__<rank>_<save>.distcp`` and ``.metadata``
    Blocks of tensors, one after the other, each as ``torch.save`` writes it, and what torch's distributed checkpoint (DCP) has to know of
    them: for its tools. It is a pickle, and nothing here reads it.
``rest_<save>.pt``
    All else, written by one rank: what is no tensor of the model or of an optimizer.
``manifest.json``
    Which block is where, and size and SHA-256 of every file. It is replaced last, in one step: until then the folder is the
    checkpoint that it was, or none. Files of the one before go afterwards.

A block has its place in the whole tensor, in the model's own order, so that every layout reads what any other wrote.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.checkpoint.folder import Folder, is_remote, note_latest
from lightning_partrain.checkpoint.stored import MANIFEST, VERSION, Everyone, sealed
from lightning_partrain.checkpoint.torch_file import as_bytes, record_begin
from lightning_partrain.parallel.placement import Entry, Piece


class NotWrittenError(RuntimeError):
    """A checkpoint could not be written, as all ranks know; the one before is as it was."""


class DiskFullError(NotWrittenError):
    """There was no room for it."""


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def begin(
    path: Any,
    entries: Mapping[str, Entry],
    rest: Mapping[str, Any],
    layout: Mapping[str, Any],
    rank: int,
    everyone: Everyone,
    copy: bool,
) -> Callable[[Everyone], None]:
    """Take down what is to be written. Collective over all ranks.

    Args:
        path: of the folder; ``fsspec``'s addresses, too, where all ranks see the same files.
        entries: by name; ranks that hold the same block agree on one to write it.
        rest: rank 0's.
        everyone: gives what all ranks gave it, JSON values in the order of the ranks.
        copy: to the memory of the host, so that training may go on before it is written.

    Returns:
        What writes it, from another thread if need be. It is collective over all ranks again, and leaves ``path`` complete or as it was.
        It raises a NotWrittenError on all ranks, with what failed on which.
    """
    blocks, save = owned(entries, rank, everyone)
    if copy:
        blocks = [(name, entry, Piece(p.offsets, p.tensor.detach().to("cpu", copy=True))) for name, entry, p in blocks]
    buffer = io.BytesIO()
    if rank == 0:
        torch.save(dict(rest), buffer)
    folder, own = Folder(path), f"__{rank}_{save}.distcp"
    facts = {
        "version": VERSION,
        "step": rest.get("global_step"),
        "epoch": rest.get("epoch"),
        "time": time.time(),
        "packages": _packages(),
        "layout": dict(layout),
        "resumable": "optimizer_states" in rest,
    }

    def write(everyone: Everyone) -> None:
        try:
            _attempt(lambda: _make_room(folder) if rank == 0 else None, everyone)
            parts = _attempt(lambda: _write(folder, own, blocks), everyone)
            _attempt(
                lambda: _commit(folder, f"rest_{save}.pt", buffer.getvalue(), parts, facts) if rank == 0 else None,
                everyone,
            )
        except NotWrittenError:
            if folder.has(own):
                folder.remove(own)
            everyone(None)  # all have removed theirs
            if rank == 0:
                _put_back(folder)
            raise

    return write


@cache
def _packages() -> dict[str, str]:
    return {name: version(name) for name in ("lightning-partrain", "lightning", "torch")}


def _attempt(do: Callable[[], Any], everyone: Everyone) -> list[Any]:
    """What each rank's ``do`` gave. Collective.

    Raises:
        NotWrittenError: on all ranks.
    """
    try:
        result, error, full = do(), None, False
    except Exception as failure:
        result, error, full = None, f"{type(failure).__name__}: {failure}", is_full_disk(failure)
    everything = everyone([result, error, full])
    failed = [(f"rank {rank}: {each}", full) for rank, (_, each, full) in enumerate(everything) if each]
    if failed:
        kind = DiskFullError if all(full for _, full in failed) else NotWrittenError
        raise kind(
            f"The checkpoint could not be written ({'; '.join(each for each, _ in failed[:4])}). The one before it is as it was."
        )
    return [each for each, *_ in everything]


def owned(entries: Mapping[str, Entry], rank: int, everyone: Everyone) -> tuple[list[tuple[str, Entry, Piece]], str]:
    """The blocks that this rank writes (of the ranks that hold one, that with the least to write so far), and a name for this save."""
    held = {name: [[*map(int, p.offsets), p.nbytes] for p in entry.pieces] for name, entry in entries.items()}
    answers = everyone([held, secrets.token_hex(4)])
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    size: dict[tuple[str, tuple[int, ...]], int] = {}
    for other, (names, _) in enumerate(answers):
        for name, blocks in names.items():
            for *offsets, count in blocks:
                holders.setdefault((name, tuple(offsets)), []).append(other)
                size[name, tuple(offsets)] = count
    load: dict[int, int] = {}
    mine = set()
    for block in sorted(holders, key=lambda block: (-size[block], block)):
        owner = min(holders[block], key=lambda other: (load.get(other, 0), other))
        load[owner] = load.get(owner, 0) + size[block]
        if owner == rank:
            mine.add(block)
    return (
        [(n, entry, p) for n, entry in entries.items() for p in entry.pieces if (n, tuple(p.offsets)) in mine],
        answers[0][1],
    )


#: Names of files that a save makes and a later one removes.
_OURS = re.compile(r"__\d+_[0-9a-f]{8}\.distcp|rest_[0-9a-f]{8}\.pt")


def _before(folder: Folder) -> str:
    """Where a file of the same name, a checkpoint in the other format, is meanwhile."""
    path = Path(str(folder))
    return str(path.with_name(f"{path.stem}.before{path.suffix}"))


def _make_room(folder: Folder) -> None:
    """
    Raises:
        FileExistsError: for a folder that has other things in it, and is no checkpoint.
    """
    if not is_remote(folder):
        path = Path(str(folder))
        if path.is_symlink():  # to another checkpoint, which stays
            path.unlink()
        if path.is_file():
            os.replace(path, _before(folder))
        others = [each.name for each in path.iterdir() if not _OURS.fullmatch(each.name)] if path.is_dir() else []
        if others and MANIFEST not in others:
            raise FileExistsError(
                f"{path} is a folder with other things in it ({', '.join(sorted(others)[:3])}, ...). Save to a new name"
            )
    folder.make()


def _put_back(folder: Folder) -> None:
    """After a failure: nothing, or the file that was there before."""
    path = Path(str(folder))
    if is_remote(folder) or folder.has(MANIFEST) or not path.is_dir():
        return
    if not any(path.iterdir()):
        path.rmdir()
        if os.path.isfile(_before(folder)):
            os.replace(_before(folder), path)


def _alone(tensor: Tensor) -> Tensor:
    """On the host, and with no memory around it, all of which ``torch.save`` would write."""
    host = tensor.detach().cpu()
    return (
        host
        if host.untyped_storage().nbytes() == host.nbytes and host.is_contiguous()
        else host.clone(memory_format=torch.contiguous_format)
    )


class _Out:
    """Where ``torch.save`` writes: to a file and, in another thread meanwhile, into a digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "digest")
        self._hashing: Future[None] | None = None
        self._numbers: memoryview | None = None
        self.size, self.place = 0, 0

    def expect(self, tensor: Tensor) -> None:
        """What comes next has the numbers of ``tensor`` in it, longer than all else: :attr:`place` will be where they begin."""
        if self._hashing is not None:
            self._hashing.result()  # of two tensors, no more, are numbers in memory
        self._numbers = as_bytes(tensor)

    def write(self, data: Any) -> int:
        length = len(data)
        if self._numbers is not None and length == len(self._numbers):
            self.place, kept, self._numbers = self.size, self._numbers, None
        else:
            kept = memoryview(bytes(data))
        self._hashing = self._hasher.submit(self._digest.update, kept)
        self._file.write(data)
        self.size += length
        return length

    def flush(self) -> None:
        pass

    def close(self) -> str:
        self._hasher.shutdown()
        return self._digest.hexdigest()


def _save(tensor: Tensor, out: _Out) -> int:
    """Write ``tensor`` as ``torch.save`` does, and give the place at which its numbers begin."""
    start = out.size
    if tensor.nbytes >= 1 << 16:  # then nothing else that is written of it is as long
        out.expect(tensor)
        torch.save(tensor, cast(Any, out))
        assert out.place > start
        return out.place
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    out.write(buffer.getbuffer())
    with zipfile.ZipFile(buffer) as archive:
        info = next(each for each in archive.infolist() if each.filename.endswith("data/0"))
    return start + record_begin(buffer, info)


def _write(folder: Folder, name: str, blocks: list[tuple[str, Entry, Any]]) -> dict[str, Any]:
    """What the manifest has of this rank. ``blocks`` is empty afterwards: their memory is given back one by one."""
    tensors = []
    with folder.writer(name) as file:
        out = _Out(file)
        try:
            while blocks:
                tensor_name, entry, piece = blocks.pop(0)
                begin, tensor = out.size, _alone(piece.tensor)
                numbers = _save(tensor, out)
                tensors.append(
                    {
                        "name": tensor_name,
                        "shape": list(entry.shape),
                        "dtype": str(entry.dtype).removeprefix("torch."),
                        "offsets": list(piece.offsets),
                        "sizes": list(tensor.shape),
                        "begin": begin,
                        "length": out.size - begin,
                        "numbers": numbers,
                    }
                )
        finally:
            digest = out.close()
        folder.keep(file)
    return {"file": name, "bytes": out.size, "sha256": digest, "blocks": tensors}


def _commit(
    folder: Folder, rest_file: str, rest: bytes, parts: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    tensors: dict[str, Any] = {}
    for part in parts:
        for block in part["blocks"]:
            whole = tensors.setdefault(block["name"], {"shape": block["shape"], "dtype": block["dtype"], "blocks": []})
            place = {key: block[key] for key in ("offsets", "sizes", "begin", "length", "numbers")}
            whole["blocks"].append({"file": part["file"], **place})
    files = {part["file"]: {"bytes": part["bytes"], "sha256": part["sha256"]} for part in parts}
    files[rest_file] = {"bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()}
    manifest = {**facts, "rest": rest_file, "files": files, "tensors": tensors}
    for_tools = f".{compat.DCP_METADATA}.part"
    try:
        folder.write(rest_file, rest)
        folder.write(for_tools, compat.dcp_metadata(tensors))
        folder.replace(MANIFEST, sealed(manifest))
    except BaseException:
        for name in (rest_file, for_tools):
            if folder.has(name):
                folder.remove(name)
        raise
    with contextlib.suppress(OSError):  # it is complete
        folder.move(for_tools, compat.DCP_METADATA)
        for name in folder.names():
            if name not in files and _OURS.fullmatch(name):
                folder.remove(name)
        note_latest(folder)
        if not is_remote(folder) and os.path.isfile(_before(folder)):
            os.remove(_before(folder))
