"""Whether a checkpoint is whole, and which of several is the newest that is."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable

import torch

from lightning_partrain.checkpoint.folder import Folder
from lightning_partrain.checkpoint.stored import MANIFEST, Reader
from lightning_partrain.checkpoint.torch_file import check_sums

SUFFIX = ".ckpt"


def newest_good(folders: Iterable[str], depth: int = 2, resumable: bool = False) -> tuple[str | None, list[str]]:
    """The newest checkpoint in ``folders`` and so many levels below that is as it was written.

    Args:
        resumable: not one of weights alone.

    Returns:
        its path, if there is one, and what is wrong with newer ones.
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
        problem = problem_of(path) or (f"{path} has weights alone." if resumable and not _resumable(path) else None)
        if problem is None:
            return path, wrong
        wrong.append(problem)
    return None, wrong


def problem_of(path: str) -> str | None:
    """What is wrong with a checkpoint of either format; reads all of it. A file is good when the checksums of its parts are right."""
    try:
        if Folder(path).has(MANIFEST):
            Reader(path).check()
            return None
        parent, name = posixpath.split(path)
        with Folder(parent or ".").reader(name) as file:
            check_sums(file, path)
        return None
    except Exception as error:  # whatever a damaged one makes of our code
        text = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        return text if path in text else f"{path} is damaged: {text}"


def _resumable(path: str) -> bool:
    if Folder(path).has(MANIFEST):
        return bool(Reader(path).manifest.get("resumable"))
    try:
        return "optimizer_states" in torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # what it is refused for is said when it is loaded
        return True
