"""Weights that others have written, block by block: Hugging Face's folders, safetensors, torch's files, and our own checkpoints.

``open_weights`` says what a file has, and ``match`` which of it is for which parameter of a module. Nothing is unpickled freely.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_partrain.checkpoint.stored import Reader, is_sharded
from lightning_partrain.checkpoint.torch_file import is_archive, refused_class
from lightning_partrain.parallel.placement import Stored

#: Where torch's files have a state dict, if they are not one.
KEYS = ("state_dict", "model", "module")

DTYPES = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


class _Part:
    """What can be sliced like a tensor, and of which only what is sliced is read."""

    def __init__(self, source: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._source = source
        self.shape = tuple(shape)
        self.dtype = dtype

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
        if len(ends) != len(self.shape) or any(
            not 0 <= at <= end <= length for at, end, length in zip(offsets, ends, self.shape, strict=True)
        ):
            raise ValueError(f"A tensor of shape {self.shape} has no block of {tuple(sizes)} at {tuple(offsets)}.")
        # A slice is a view of the mapped file.
        return self._source[tuple(map(slice, offsets, ends))].clone(memory_format=torch.contiguous_format)


def open_weights(path: str | os.PathLike[str]) -> Mapping[str, Stored]:
    """The tensors in a file or folder, by name. Files are mapped to memory, once each; blocks are read when they are asked for.

    Only a file that torch wrote before its version 1.6 is read as a whole.

    Args:
        path: a ``.safetensors`` file; a ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file with a state dict, by itself or under one of
            ``KEYS``; a folder of Hugging Face's, or with ``.safetensors`` files; a sharded checkpoint, of which the model is given.

    Raises:
        ValueError: for what is none of these, is missing, cut or damaged, or would have to be unpickled freely. Names the file.
    """
    where = Path(path).expanduser()
    weights: Mapping[str, Stored] | None = None
    if where.is_dir():
        weights = _in_folder(where)
    elif where.is_file():
        weights = _in_file(where)
    elif re.match(r"(hf|https?)://", str(path)):
        raise ValueError(_nothing(str(path), where))
    if weights is None and is_sharded(path):
        reader = Reader(path)
        weights = {name: reader.stored(f"model.{name}") for name in reader.names("model.")}
    if weights is None:
        raise ValueError(_nothing(str(path), where))
    if not weights:
        raise ValueError(f"{where} has no tensors.")
    return weights


def _nothing(path: str, where: Path) -> str:
    if where.is_dir():
        return (
            f"The folder {where} has no weights: neither model.safetensors, pytorch_model.bin nor an index of several of them "
            "(model.safetensors.index.json, pytorch_model.bin.index.json), no other .safetensors files, and no manifest.json of a sharded "
            "checkpoint."
        )
    message = f"There is no file or folder {path}."
    if "://" in path or (where.suffix not in OPENERS and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path)):
        name = path.partition("://")[2] or path
        message += f" Nothing is downloaded: run `hf download {name} --local-dir FOLDER` first, and give that folder."
    return message


def _in_file(file: Path) -> dict[str, _Part]:
    if file.suffix not in OPENERS:
        raise ValueError(f"{file} is not read: weights are in {', '.join(OPENERS)} files, or in a folder of them.")
    return OPENERS[file.suffix](file)


def _in_folder(folder: Path) -> dict[str, _Part] | None:
    """What transformers would load, or else all ``.safetensors`` files."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        file, index = folder / name, folder / f"{name}.index.json"
        if file.is_file():
            return _in_file(file)
        if index.is_file():
            return _indexed(index, OPENERS[file.suffix])
        several: dict[str, _Part] = {}
        for each in sorted(folder.glob("*.safetensors")):
            found = _in_file(each)
            if twice := several.keys() & found.keys():
                raise ValueError(
                    f"{each} has {min(twice)}, as another .safetensors file in its folder has. Name the file that is meant."
                )
            several.update(found)
        if several:
            return several
    return None


def _indexed(index: Path, opener: Callable[[Path], dict[str, _Part]]) -> dict[str, _Part]:
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = {Path(name) for name in places.values()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{index} is no index of weights (a JSON object with a weight_map from names to files): {error!r}."
        ) from error
    for name in sorted(names):
        # By the words alone: in Hugging Face's cache every file is a link to elsewhere.
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"{index} names {str(name)!r}, which is not in its folder. It is not read.")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent / name} is missing: {index.name} names it. Complete the folder.")
    files = {name: opener(index.parent / name) for name in sorted(names)}
    for tensor, place in places.items():
        if tensor not in files[Path(place)]:
            raise ValueError(f"{index.parent / place} does not have {tensor}, which {index.name} says it has.")
    return {tensor: files[Path(place)][tensor] for tensor, place in places.items()}


def _unreadable(file: Path, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0][:200] or type(error).__name__
    return ValueError(
        f"{file} cannot be read ({reason}). It has {file.stat().st_size} bytes: a download that broke off, or a pointer of Git LFS, would "
        "look like this. Get it anew."
    )


def _safetensors(file: Path) -> dict[str, _Part]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(f"{file} needs safetensors: pip install 'lightning-partrain[pretrained]'.") from None
    try:
        opened = safe_open(file, framework="pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise _unreadable(file, error) from error
    for name, each in slices.items():
        if each.get_dtype() not in DTYPES:
            raise ValueError(f"{file} has {name} as {each.get_dtype()}, which is none of {', '.join(DTYPES)}.")
    return {name: _Part(each, each.get_shape(), DTYPES[each.get_dtype()]) for name, each in slices.items()}


def _torch(file: Path) -> dict[str, _Part]:
    try:
        found = torch.load(file, map_location="cpu", mmap=is_archive(file), weights_only=True)
    except pickle.UnpicklingError as error:
        # Not torch's own words: they advise to unpickle it.
        raise ValueError(
            f"{file} is refused: it has {refused_class(error) or 'something'} besides tensors, and only tensors and plain values can be read "
            "without running code from the file. If you trust who wrote it, convert it: give its state dict to safetensors.torch.save_file."
        ) from None
    except Exception as error:
        raise _unreadable(file, error) from error
    for state in (*(found.get(key) for key in KEYS), found) if isinstance(found, Mapping) else ():
        if isinstance(state, Mapping):
            tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
            if any(value.layout is not torch.strided for value in tensors.values()):
                raise ValueError(f"{file} has sparse tensors, of which no parts can be read. Save it with dense ones.")
            if tensors:
                return {name: _Part(value.detach(), value.shape, value.dtype) for name, value in tensors.items()}
    raise ValueError(f"{file} has no state dict: neither by itself nor under {', '.join(KEYS)}.")


OPENERS = {".safetensors": _safetensors, **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _torch)}


@dataclass(frozen=True)
class Match:
    """Which tensors of a file are for a module.

    Attributes:
        names: in the file, by name in the module's state dict. A tied parameter has all of its names, and they have the same value.
        module_prefix: of the names in the module that have a counterpart, with the dot at its end.
        file_prefix: what stands in its place in the file.
        untouched: names in the module that keep what they have: outside the prefix, or buffers that the file lacks.
        unused: names in the file of which the module has nothing.
    """

    names: dict[str, str]
    module_prefix: str
    file_prefix: str
    untouched: list[str]
    unused: list[str]

    def describe(self) -> str:
        """For people, in one line."""
        text = f"{len(self.names)} tensors of {_said(self.module_prefix, 'the module')} from {_said(self.file_prefix, 'the file')}"
        if self.untouched:
            text += f"; as they were: {_some(self.untouched)}"
        if self.unused:
            text += f"; not used of the file: {_some(self.unused)}"
        return text


def _said(prefix: str, whole: str) -> str:
    return f"{whole}'s {prefix.removesuffix('.')}" if prefix else whole


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''} ({len(names)})"


@dataclass(frozen=True)
class _Pair:
    """What is below a prefix in the module beside what is below one in the file: names there by names here, and what stands alone."""

    ours: str
    theirs: str
    names: dict[str, str]
    missing: list[str]
    surplus: list[str]
    different: list[str]

    def __str__(self) -> str:
        here, there = _said(self.ours, "the module"), _said(self.theirs, "the file")
        lines = [f"Tensors alike in {here} and {there}: {len(self.names)}."]
        for what, names in (
            ("Missing in the file", self.missing),
            ("Not in the module", self.surplus),
            ("Of another shape", self.different),
        ):
            if names:
                lines.append(f"  {what} ({len(names)}): {'; '.join(names[:5])}{'; ...' if len(names) > 5 else ''}")
        return "\n".join(lines)


def match(module: nn.Module, weights: Mapping[str, Stored], submodule: str | None = None) -> Match:
    """Find for which part of a module the weights are.

    Of all pairs of a prefix in the module and one in the file, that below which most elements have the same names and shapes is taken,
    narrowed as far as the file has all of it. It has to be the better half of the module or of the file, or else be asked for. The file
    may have one name too many for each five that are used: buffers that are no more.

    Args:
        submodule: the prefix in the module; what the file has besides is then left alone, however much it is.

    Raises:
        ValueError: where a parameter is missing, has another shape, the file has many more names, or several places fit alike.
    """
    search = _Search(module, weights, submodule)
    fits: dict[Any, _Pair] = {}
    failed: _Pair | None = None
    for widest in search.best():
        pairs = [search.pair(*each) for each in search.narrowed(*widest)]
        complete = [pair for pair in pairs if search.complete(pair)]
        if complete and search.weighty(complete[0]):
            pair = min(complete, key=lambda pair: len(pair.surplus))  # the first, and widest, of those alike
            fits.setdefault(frozenset((id(search.state[name]), other) for name, other in pair.names.items()), pair)
        else:
            failed = failed or pairs[0 if complete else -1]
        if len(fits) == 3:
            break
    if len(fits) == 1:
        return search.match(next(iter(fits.values())))
    if fits:
        ways = (f"{_said(pair.theirs, 'the file')} for {_said(pair.ours, 'the module')}" for pair in fits.values())
        raise ValueError(
            f"The weights fit in several ways: {', or '.join(ways)}. Name the submodule that is meant, or a larger one that fits in one way: "
            'load_pretrained={"model.backbone": "path"}.'
        )
    raise ValueError(
        f"The weights do not fit the module. {failed or 'No name with the same shape is in both.'}\n"
        'Name a submodule that the file has in full: load_pretrained={"model.backbone": "path"}.'
    )


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """(prefix, the rest) at each dot."""
    at = 0
    while True:
        yield name[:at], name[at:]
        at = name.find(".", at) + 1
        if not at:
            return


def _indexes(names: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Rests by prefix, and prefixes by rest."""
    rests, prefixes = defaultdict(list), defaultdict(list)
    for name in names:
        for prefix, rest in _cuts(name):
            rests[prefix].append(rest)
            prefixes[rest].append(prefix)
    return rests, prefixes


def _ends_alike(ours: str, theirs: str) -> int:
    """How many words."""
    words = zip(ours.split(".")[-2::-1], theirs.split(".")[-2::-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], words))


class _Search:
    """For the prefixes; that in the module is given if there is a submodule."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Stored], submodule: str | None) -> None:
        state = module.state_dict(keep_vars=True)
        self.state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.weights = weights
        self.ours, self.our_prefixes = _indexes(self.state)
        self.theirs, self.their_prefixes = _indexes(weights)
        self.asked = submodule is not None
        if submodule is not None:
            prefix = f"{submodule}." if submodule else ""
            if prefix not in self.ours:
                first = sorted({name.partition(".")[0] for name in self.state})
                raise ValueError(
                    f"load_pretrained names {submodule!r}, and the module has nothing below that. It has {_some(first)}."
                )
            self.our_prefixes = {rest: [prefix] for rest in self.ours[prefix]}

    def best(self) -> list[tuple[str, str]]:
        """The prefixes, as short as possible, with the most elements behind them of the same names and shapes.

        Of a layer that the file has under many names, that with the names most alike.
        """
        scores: dict[tuple[str, str], int] = defaultdict(int)
        for rest in self.our_prefixes.keys() & self.their_prefixes.keys():
            ours, theirs = self.our_prefixes[rest], self.their_prefixes[rest]
            # What is in each of many layers on both sides tells nothing, and is the most there is.
            if min(len(ours), len(theirs)) > 1 and len(ours) * len(theirs) > 100:
                continue
            for mine, other in product(ours, theirs):
                shape = self.weights[other + rest].shape
                if shape == self.state[mine + rest].shape and (self.asked or not _ends_alike(mine, other)):
                    scores[mine, other] += math.prod(shape)
        ranks = {pair: (score, _ends_alike(*pair)) for pair, score in scores.items()}
        best = max(ranks.values(), default=None)
        return [pair for pair, rank in ranks.items() if rank == best]

    def narrowed(self, ours: str, theirs: str) -> list[tuple[str, str]]:
        """The two prefixes, and with what all names that are behind both begin with, one word more at a time."""
        if self.asked:
            return [(ours, theirs)]
        both = [rest.split(".")[:-1] for rest in self.theirs[theirs] if ours + rest in self.state]
        words = takewhile(lambda pair: pair[0] == pair[1], zip(min(both), max(both), strict=False))
        begins = accumulate((f"{word}." for word, _ in words), initial="")
        return [(ours + begin, theirs + begin) for begin in begins]

    def pair(self, ours: str, theirs: str) -> _Pair:
        state, weights, there = self.state, self.weights, set(self.theirs[theirs])
        both = {ours + rest: theirs + rest for rest in self.ours[ours] if rest in there}
        names = {name: other for name, other in both.items() if state[name].shape == weights[other].shape}
        tied = {id(state[name]) for name in both}
        alone = [name for rest in self.ours[ours] if id(state[name := ours + rest]) not in tied]
        return _Pair(
            ours,
            theirs,
            names,
            missing=[f"{name} {tuple(state[name].shape)}" for name in alone if isinstance(state[name], nn.Parameter)],
            surplus=[
                f"{theirs}{rest} {weights[theirs + rest].shape}"
                for rest in self.theirs[theirs]
                if ours + rest not in both
            ],
            different=[
                f"{name} {tuple(state[name].shape)}, in the file {weights[other].shape}"
                for name, other in both.items()
                if name not in names
            ],
        )

    def complete(self, pair: _Pair) -> bool:
        few = self.asked or 5 * len(pair.surplus) <= len(pair.names)
        return bool(pair.names) and not pair.missing and not pair.different and few

    def weighty(self, pair: _Pair) -> bool:
        """Two models that have little in common but a layer are not meant for each other."""
        matched = {id(self.state[name]): self.state[name].numel() for name in pair.names}
        of_module = {id(value): value.numel() for value in self.state.values()}
        of_file = sum(math.prod(each.shape) for each in self.weights.values())
        return self.asked or 2 * sum(matched.values()) >= min(sum(of_module.values()), of_file)

    def match(self, pair: _Pair) -> Match:
        first: dict[int, str] = {}
        for name, other in pair.names.items():
            first.setdefault(id(self.state[name]), other)
        names = {name: first[id(value)] for name, value in self.state.items() if id(value) in first}
        used = set(pair.names.values())
        return Match(
            names,
            pair.ours,
            pair.theirs,
            untouched=[name for name in self.state if name not in names],
            unused=[name for name in self.weights if name not in used],
        )
