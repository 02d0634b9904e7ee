"""The newest checkpoint that is whole, among those in a folder."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterable

from lightning_partrain.checkpoint.folder import Folder
from lightning_partrain.checkpoint.sharded import MANIFEST, Reader

SUFFIX = ".ckpt"


def newest_good(folders: Iterable[str], depth: int = 2) -> tuple[str | None, list[str]]:
    """The newest checkpoint in ``folders`` and so many levels below that is as it was written.

    Returns:
        its path, if there is one, and what is wrong with newer ones. A file ``*.ckpt`` is good when the checksums of its parts are
        right, a folder when those of its manifest are.
    """
    found: dict[str, float] = {}
    for folder in folders:
        for path, changed in Folder(folder).below(depth).items():
            if posixpath.basename(path) == MANIFEST:
                found[posixpath.dirname(path)] = changed
            elif path.endswith(SUFFIX):
                found[path] = changed
    wrong: list[str] = []
    for path in sorted(found, key=lambda path: (-found[path], path)):
        problem = _problem(path)
        if problem is None:
            return path, wrong
        wrong.append(problem)
    return None, wrong


def _problem(path: str) -> str | None:
    try:
        if Folder(path).has(MANIFEST):
            Reader(path).check()
            return None
        parent, name = posixpath.split(path)
        with Folder(parent).reader(name) as file, zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
        return None if broken is None else f"{path} is damaged: {broken} has changed."
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return f"{path}: {error}" if path not in str(error) else str(error)
