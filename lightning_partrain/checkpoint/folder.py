"""A folder of files: on this machine, or wherever ``fsspec`` reaches (``memory://``, ``s3://``)."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

#: Beside checkpoints: the name of the one that was completed last.
LATEST = "latest"


def is_remote(path: Any) -> bool:
    return "://" in str(path)


class Folder:
    """The files in ``path``, by name. Nothing is made before something is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self._files, self._root = url_to_fs(self.path)
        self._local = isinstance(self._files, LocalFileSystem)

    def __str__(self) -> str:
        return self.path

    def _at(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def has(self, name: str) -> bool:
        return bool(self._files.isfile(self._at(name)))

    def is_folder(self, name: str) -> bool:
        return bool(self._files.isdir(self._at(name)))

    def size(self, name: str) -> int:
        return int(self._files.size(self._at(name)))

    def names(self) -> list[str]:
        """Of the files in it; none when it does not exist."""
        if not self._files.isdir(self._root):
            return []
        self._files.invalidate_cache(self._root)
        return [
            posixpath.basename(each["name"])
            for each in self._files.ls(self._root, detail=True)
            if each["type"] == "file"
        ]

    def make(self) -> None:
        self._files.makedirs(self._root, exist_ok=True)

    def reader(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._files.open(self._at(name), "rb"))

    def read(self, name: str) -> bytes:
        return bytes(self._files.cat_file(self._at(name)))

    def writer(self, name: str) -> BinaryIO:
        """To be given to :meth:`keep` before it is closed."""
        return cast(BinaryIO, open(self._at(name), "wb") if self._local else self._files.open(self._at(name), "wb"))

    def keep(self, file: BinaryIO) -> None:
        """What was written is on the disk when this returns; elsewhere, when the file is closed."""
        if self._local:
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, data: bytes) -> None:
        with self.writer(name) as file:
            file.write(data)
            self.keep(file)

    def replace(self, name: str, data: bytes) -> None:
        """The file has all of ``data`` or what it had; what was written before is on the disk before it."""
        aside = f".{name}.part" if self._local else name  # to put an object is one step
        self.write(aside, data)
        if self._local:
            self._settle()
            os.replace(self._at(aside), self._at(name))
            self._settle()

    def move(self, name: str, to: str) -> None:
        if self._local:
            os.replace(self._at(name), self._at(to))
        else:
            self._files.mv(self._at(name), self._at(to))

    def _settle(self) -> None:
        """The names of files are on the disk, too, when this returns."""
        for path in (Path(self._root), Path(self._root).parent):
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)

    def below(self, depth: int) -> dict[str, float]:
        """Path -> when it was changed, in seconds, of all files in it and in the folders below, so many levels of them."""
        if not self._files.isdir(self._root):
            return {}
        self._files.invalidate_cache()
        found = self._files.find(self._root, maxdepth=depth)
        return {self._files.unstrip_protocol(each) if is_remote(self) else each: self._changed(each) for each in found}

    def _changed(self, place: str) -> float:
        return float(self._files.modified(place).timestamp())

    def remove(self, name: str) -> None:
        self._files.rm(self._at(name))

    def delete(self) -> None:
        """The folder and all in it."""
        self._files.rm(self._root, recursive=True)


def note_latest(path: Any) -> None:
    """The checkpoint ``path`` is complete, and the newest. Nothing else that has the name is touched."""
    parent, name = posixpath.split(str(path).rstrip("/"))
    if name == LATEST or parent.endswith((":", ":/")):
        return
    folder = Folder(parent or ".")
    if folder.is_folder(LATEST) or (folder.has(LATEST) and folder.size(LATEST) > 1024):
        return
    folder.write(f".{LATEST}.part", f"{name}\n".encode())
    folder.move(f".{LATEST}.part", LATEST)
