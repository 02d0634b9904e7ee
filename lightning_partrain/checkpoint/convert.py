"""``lightning-partrain convert``: a checkpoint in another format, in one process, tensor by tensor.

Whatever is read becomes what Lightning has on one device, a dictionary with ``state_dict`` and ``optimizer_states``, in which tensors are
:class:`~lightning_partrain.checkpoint.torch_file.Unread`; whatever is written reads them one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.checkpoint import deepspeed_folder, extra, foreign, full, sharded, state, stored, torch_file
from lightning_partrain.checkpoint.pretrained import open_weights
from lightning_partrain.checkpoint.torch_file import Unread, refusing, replaced
from lightning_partrain.cli import PROGRAM, fail
from lightning_partrain.parallel.placement import Entry

#: Seconds between two lines of progress.
EVERY = 5.0
INDEX = "model.safetensors.index.json"
#: What ``--like`` takes over of a Hugging Face folder.
LIKE = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.*"),
)


# ---------------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------------


def read(path: Path, weights_alone: bool = False, frozen: bool = False) -> dict[str, Any]:
    """A checkpoint of any kind; only what is no tensor is in memory.

    Args:
        weights_alone: of a folder of ours or DeepSpeed's, the model's tensors, whatever else there is.
        frozen: see :func:`deepspeed_folder.read`.

    Raises:
        ValueError: for what is none, is damaged, or holds other things than tensors and plain data; names the file.
    """
    if path.is_dir():
        if stored.is_sharded(path):
            try:
                checkpoint = _ours(path, weights_alone)
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{path / stored.MANIFEST} is damaged, or not what was written ({error!r}).") from None
        elif foreign.is_folder(path):
            checkpoint = foreign.read(path)
        elif deepspeed_folder.is_folder(path):
            checkpoint = deepspeed_folder.read(path, weights_alone, frozen)
        else:
            raise ValueError(
                f"{path} is a folder, but no checkpoint: it has neither {stored.MANIFEST} (ours) nor {compat.DCP_METADATA} and "
                f"{foreign.META} (Lightning's) nor {deepspeed_folder.LATEST} and a folder with *_model_states.pt (DeepSpeed's)."
            )
    elif not path.exists():
        raise ValueError(f"{path} does not exist.")
    elif folder := deepspeed_folder.folder_of(path):
        raise ValueError(f"{path} is one file of a checkpoint of DeepSpeed's. Give the folder: {folder}.")
    else:
        found = foreign.read_safetensors(path) if foreign.is_safetensors(path) else torch_file.load(path)
        checkpoint = _as_lightning_has_it(found, path)
    return replaced(checkpoint, lambda each: each if isinstance(each, Unread) else Unread.of(each))


def _as_lightning_has_it(found: Any, path: Path) -> dict[str, Any]:
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        return found
    if isinstance(found, dict) and any(isinstance(each, Tensor | Unread) for each in found.values()):  # a state dict
        return {"pytorch-lightning_version": version("lightning"), "state_dict": found}
    raise ValueError(f"{path} is no checkpoint: it holds neither a 'state_dict' nor tensors by name.")


def _ours(path: Path, weights_alone: bool) -> dict[str, Any]:
    reader = stored.Reader(path)
    reader.check()
    with refusing(str(path / str(reader.manifest.get("rest")))):
        checkpoint: dict[str, Any] = {"state_dict": {}} if weights_alone else reader.rest()

    def unread(name: str) -> Unread:
        stored = reader.stored(name)
        return Unread(tuple(stored.shape), stored.dtype, partial(reader.whole, name))

    checkpoint["state_dict"].update({name: unread(f"model.{name}") for name in reader.names("model.")})
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        for name in reader.names(f"optimizer.{number}."):
            index, _, key = name.partition(".")
            optimizer["state"].setdefault(int(index), {})[key] = unread(f"optimizer.{number}.{name}")
        optimizer["state"] = dict(sorted(optimizer["state"].items()))
    if "extra" in checkpoint.get(full.KEY, {}):
        more = {name: unread(f"{extra.PREFIX}{name}") for name in reader.names(extra.PREFIX)}
        checkpoint[full.KEY] = {**checkpoint[full.KEY], "tensors": more}
    return checkpoint


# ---------------------------------------------------------------------------------------------------------------------
# Targets
# ---------------------------------------------------------------------------------------------------------------------


class _Block:
    """A whole tensor as a piece of itself, read when it is written; see :class:`placement.Piece`."""

    def __init__(self, unread: Unread) -> None:
        self.offsets, self._unread = (0,) * len(unread.shape), unread
        self.nbytes = torch.Size(unread.shape).numel() * unread.dtype.itemsize

    @property
    def tensor(self) -> Tensor:
        return self._unread.read()


def write_sharded(checkpoint: dict[str, Any], path: Path) -> None:
    """Our folder, with a block for each tensor."""

    def entry(value: Any) -> Any:
        return Entry(value.shape, value.dtype, [_Block(value)]) if isinstance(value, Unread) else value  # type: ignore[list-item]

    split = {**checkpoint, "state_dict": {name: entry(each) for name, each in checkpoint["state_dict"].items()}}
    if "optimizer_states" in checkpoint:
        split["optimizer_states"] = [
            {**each, "state": {i: {k: entry(v) for k, v in values.items()} for i, values in each["state"].items()}}
            for each in checkpoint["optimizer_states"]
        ]
    own = dict(checkpoint.get(full.KEY) or {})
    more = own.pop("tensors", {})
    if full.KEY in checkpoint:
        split[full.KEY] = own
    entries, rest = state.take_apart(split)
    entries.update({f"{extra.PREFIX}{name}": entry(each) for name, each in more.items()})
    rest = replaced(rest, lambda each: each.read())
    write = sharded.begin(
        path, entries, rest, own.get("layout", {}), rank=0, everyone=lambda value: [value], copy=False
    )
    write(lambda value: [value])


def weights(checkpoint: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Unread]:
    """The tensors of the model by name, with floating-point numbers as ``dtype``.

    Raises:
        ValueError: when there are none.
    """
    found = {name: each for name, each in checkpoint["state_dict"].items() if isinstance(each, Unread)}
    if not found:
        raise ValueError("The checkpoint holds no weights of a model.")
    return {name: _cast(each, dtype) for name, each in found.items()}


def _cast(unread: Unread, dtype: torch.dtype | None) -> Unread:
    if dtype is None or not unread.dtype.is_floating_point:
        return unread
    return dataclasses.replace(unread, dtype=dtype, read=lambda: unread.read().to(dtype))


def in_submodule(tensors: dict[str, Unread], submodule: str | None, like: Mapping[str, Any]) -> dict[str, Unread]:
    """The tensors of ``submodule``, by their names in it. ``None``: of the one that has all tensors, unless ``like`` has their names as
    they are; ``""``: of the module itself.

    Raises:
        ValueError: when it has none.
    """
    if submodule is None:
        first = {name.partition(".")[0] for name in tensors}
        alone = len(first) == 1 and all("." in name for name in tensors) and not tensors.keys() <= like.keys()
        submodule = first.pop() if alone else ""
        if alone:
            print(f"All weights lie in {submodule!r}: it is taken for the model. --submodule '' keeps their names.")
    prefix = f"{submodule}." if submodule else ""
    found = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    if not found:
        there = sorted({name.partition(".")[0] for name in tensors})
        raise ValueError(f"--submodule {submodule}: no weight lies in it. There are: {', '.join(there)}.")
    if len(found) < len(tensors):
        print(f"{len(tensors) - len(found)} weights outside {submodule!r} are left out.")
    return found


def once(tensors: dict[str, Unread], like: Mapping[str, Any], tied: bool) -> dict[str, Unread]:
    """Without second names for the same tensor that whoever loads it can do without: those ``like`` does not have or, where the
    configuration says that it ties weights, all. Others stay, lest they be initialized anew."""
    kept: dict[str, Unread] = {}
    names: dict[Any, list[str]] = {}
    for name, each in tensors.items():
        names.setdefault(name if each.same is None else each.same, []).append(name)
    for several in names.values():
        chosen = [name for name in several if name in like] or (several[:1] if tied else several)
        kept.update({name: tensors[name] for name in chosen})
    return {name: each for name, each in tensors.items() if name in kept}


def write_pretrained(
    checkpoint: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype | None = None,
    submodule: str | None = None,
    like: Path | None = None,
    shard_size: int = 5_000_000_000,
) -> None:
    """A folder that ``from_pretrained`` of Hugging Face's libraries loads.

    Args:
        dtype: of floating-point numbers; ``None``: as they are.
        submodule: of the LightningModule, that is the model; ``None``: found.
        like: a folder whose configuration and tokenizer are taken over, and whose weights have the same names and shapes, if it has any.
        shard_size: bytes in one file at most.

    Raises:
        ValueError: when ``like`` has other names or shapes.
    """
    theirs: Mapping[str, Any] = {}
    if like is not None:
        if not (like / "config.json").is_file():
            raise ValueError(f"--like {like}: that is no folder of Hugging Face's, as it has no config.json.")
        if any(like.glob("*.safetensors")) or any(like.glob("pytorch_model*.bin")):
            theirs = open_weights(like)
    found = in_submodule(weights(checkpoint, dtype), submodule, theirs)
    tied = like is not None and json.loads((like / "config.json").read_text()).get("tie_word_embeddings") is True
    found = once(found, theirs, tied)
    if theirs:
        _check_like(found, theirs, str(like))
    path.mkdir()
    for pattern in LIKE if like is not None else ():
        for file in like.glob(pattern):  # type: ignore[union-attr]
            shutil.copyfile(file, path / file.name)
    files: list[dict[str, Unread]] = [{}]
    size = 0
    for name, each in found.items():
        if files[-1] and size + each.nbytes > shard_size:
            files.append({})
            size = 0
        files[-1][name] = each
        size += each.nbytes
    if len(files) == 1:
        foreign.write_safetensors(path / "model.safetensors", files[0])
        return
    places = {}
    for number, part in enumerate(files, 1):
        file_name = f"model-{number:05}-of-{len(files):05}.safetensors"
        foreign.write_safetensors(path / file_name, part)
        places.update(dict.fromkeys(part, file_name))
    total = sum(each.nbytes for each in found.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))


def _check_like(found: Mapping[str, Unread], theirs: Mapping[str, Any], like: str) -> None:
    wrong = [f"{name} is missing" for name in theirs if name not in found]
    wrong += [f"{name} is one too many" for name in found if name not in theirs]
    wrong += [
        f"{name} is {tuple(each.shape)} and not {tuple(theirs[name].shape)}"
        for name, each in found.items()
        if name in theirs and tuple(theirs[name].shape) != tuple(each.shape)
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"The weights are not those of the model in {like}: {', '.join(wrong[:3])}{more}. --submodule says which module of the "
            "LightningModule is that model."
        )


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


class Progress:
    """Counts the tensors of a checkpoint as they are read, and tells of it every few seconds."""

    def __init__(self) -> None:
        self.tensors = self.bytes = 0
        self._all = self._all_bytes = 0
        self._told = self.start = time.monotonic()

    def watch(self, unread: Unread) -> Unread:
        self._all += 1
        self._all_bytes += unread.nbytes
        return dataclasses.replace(unread, read=partial(self._read, unread))

    def _read(self, unread: Unread) -> Tensor:
        tensor = unread.read()
        self.tensors += 1
        self.bytes += tensor.nbytes
        if time.monotonic() - self._told > EVERY:
            self._told = time.monotonic()
            print(
                f"{self.tensors}/{self._all} tensors, {self.bytes / 1e9:.2f} of {self._all_bytes / 1e9:.2f} GB",
                file=sys.stderr,
            )
        return tensor


@contextmanager
def _complete_or_absent(target: Path) -> Iterator[Path]:
    """``with`` it, write to another place beside ``target``, which takes its place at the end."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside.mkdir()
    try:
        yield aside / target.name
        if target.is_dir() or (target.exists() and (aside / target.name).is_dir()):  # no rename replaces that
            os.replace(target, aside / "before")
        os.replace(aside / target.name, target)
        number = os.open(target.parent, os.O_RDONLY)
        os.fsync(number)
        os.close(number)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_target(target: Path, force: bool, sources: Mapping[str, Path]) -> None:
    for what, source in sources.items():
        a, b = target.resolve(), source.resolve()
        if a == b or a.is_relative_to(b) or b.is_relative_to(a):
            raise ValueError(f"DST {target} is, lies in, or holds {what} {source}. Choose a place outside it.")
    if target.exists() and not force:
        raise ValueError(f"DST {target} exists. --force replaces it.")
    others = [each.name for each in target.iterdir() if not _is_of_a_checkpoint(each)] if target.is_dir() else []
    if others:
        raise ValueError(
            f"DST {target} is a folder with other things in it than a checkpoint has ({', '.join(sorted(others)[:3])}): --force does not replace "
            "it. Remove it, if need be."
        )


def _is_of_a_checkpoint(path: Path) -> bool:
    known = (
        stored.MANIFEST,
        compat.DCP_METADATA,
        foreign.META,
        "*.distcp",
        "rest_*.pt",
        "model*.safetensors",
        INDEX,
        *LIKE,
    )
    return path.is_file() and any(fnmatch(path.name, each) for each in known)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ") if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write it as 5GB, 500MB, or 2GiB.")
    return int(size)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"{PROGRAM} convert",
        description="Write a checkpoint in another format: in one process, tensor by tensor, with one of them in memory at a time.",
        epilog="SRC may be a file of Lightning's or of this package, a folder of this package ('sharded'), a folder of Lightning's FSDP or "
        "ModelParallel strategy or of DeepSpeed, or a file with a state dict (.pt, .bin, .safetensors). Nothing in it is run: what holds more than "
        "tensors and plain data is refused.",
    )
    made.add_argument("source", metavar="SRC", type=Path, help="the checkpoint, a file or a folder")
    made.add_argument("target", metavar="DST", type=Path, help="what is written: complete, or not at all")
    made.add_argument(
        "--to",
        required=True,
        choices=("full", "sharded", "safetensors", "hf"),
        help="full: one file that plain Lightning resumes from, too. sharded: a folder that ranks read in parallel. safetensors: one file "
        "with the weights alone. hf: a folder with the weights, for from_pretrained",
    )
    made.add_argument("--force", action="store_true", help="replace DST if it exists")
    made.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights' numbers (safetensors and hf; default: as they are)",
    )
    made.add_argument(
        deepspeed_folder.FROZEN,
        action="store_true",
        default=None,
        help="of a folder of DeepSpeed, whose optimizer has no frozen parameters: the run that goes on gives its optimizer all parameters, "
        "such as AdamW(self.parameters()) does",
    )
    only = made.add_argument_group("for --to hf")
    only.add_argument(
        "--submodule",
        metavar="NAME",
        help="the module of the LightningModule that is the model, such as model (default: the one that has all weights); '' for itself",
    )
    only.add_argument(
        "--like",
        metavar="DIR",
        type=Path,
        help="a Hugging Face folder: its config.json, generation_config.json and tokenizer are copied, and if it has weights, the "
        "names and shapes are compared",
    )
    only.add_argument("--max-shard-size", metavar="SIZE", type=_bytes, help="of one file (default: 5GB)")
    return made


def convert(options: argparse.Namespace) -> Progress:
    """Do what the command line says.

    Raises:
        OSError, ValueError, RuntimeError: when it cannot be done; there is no DST then, or it is as it was.
    """
    to, source, target = options.to, options.source, options.target
    for name, ends in (
        ("dtype", ("safetensors", "hf")),
        ("frozen_in_optimizer", ("full", "sharded")),
        *((n, ("hf",)) for n in ("submodule", "like", "max_shard_size")),
    ):
        if getattr(options, name) is not None and to not in ends:
            raise ValueError(f"--{name.replace('_', '-')} goes with --to {' or '.join(ends)}, not with --to {to}.")
    if not source.exists():
        raise ValueError(f"SRC {source} does not exist.")
    if options.frozen_in_optimizer and not deepspeed_folder.is_folder(source):
        raise ValueError(f"{deepspeed_folder.FROZEN} goes with a folder of DeepSpeed's, which SRC {source} is not.")
    sources = {"SRC": source, **({"--like": options.like} if options.like is not None else {})}
    _check_target(target, options.force, sources)
    progress = Progress()
    checkpoint = read(source, weights_alone=to in ("safetensors", "hf"), frozen=bool(options.frozen_in_optimizer))
    if to in ("safetensors", "hf"):
        checkpoint = {"state_dict": checkpoint["state_dict"]}
    checkpoint = replaced(checkpoint, progress.watch)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    writers: dict[str, Callable[[Path], None]] = {
        "full": partial(torch_file.save, checkpoint),
        "sharded": partial(write_sharded, checkpoint),
        "safetensors": lambda path: foreign.write_safetensors(path, weights(checkpoint, dtype)),
        "hf": lambda path: write_pretrained(
            checkpoint, path, dtype, options.submodule, options.like, options.max_shard_size or 5_000_000_000
        ),
    }
    with _complete_or_absent(target) as aside:
        writers[to](aside)
    return progress


def run(arguments: list[str]) -> int:
    """``convert SRC DST --to FORMAT``."""
    options = parser().parse_args(arguments[1:])
    try:
        done = convert(options)
    except (OSError, ValueError, RuntimeError) as error:
        return fail(f"nothing was converted. {error}", 1)
    except KeyboardInterrupt:
        return fail("interrupted; nothing was converted.", 130)
    seconds = time.monotonic() - done.start
    print(f"{options.target}: {done.tensors} tensors, {done.bytes / 1e9:.2f} GB, in {seconds:.1f} s")
    return 0
