"""The directories that DeepSpeed's engine writes, by itself or under Lightning's DeepSpeedStrategy.

``latest`` names one of the folders in the directory. In that, ``mp_rank_00_model_states.pt`` has the module, buffers and all that is not
sharded, with the caller's state beside it, which is Lightning's checkpoint; under stage 3 there is such a file for each rank, and in place
of parameters there is nothing. ``zero_pp_rank_<n>_mp_rank_00_optim_states.pt`` (``bf16_zero_...``) has rank n's part of the float32
parameters and of the optimizer's state, flat (:mod:`deepspeed_flat`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_partrain.checkpoint import full
from lightning_partrain.checkpoint.deepspeed_flat import File, joined, lay_in_parts
from lightning_partrain.checkpoint.deepspeed_sharded import FROZEN, WEIGHTS_ALONE, Sharded, sharded
from lightning_partrain.checkpoint.torch_file import Unread

LATEST = "latest"
VERSION = "pytorch-lightning_version"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<tensor>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tensor>\d+)_optim_states\.pt")
_LAYERS = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_EXPERTS = re.compile(
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_FILES = (_MODEL, _OPTIMIZER, _LAYERS, _EXPERTS)
#: What is in such a folder and is not converted.
_OTHERS = (
    (_LAYERS, "of a PipelineModule"),
    (_EXPERTS, "of a mixture of experts"),
    (re.compile(r"offloaded_tensors"), "whose optimizer state is offloaded to NVMe"),
    (re.compile(r"zero"), "universal (made by ds_to_universal)"),
)
#: What the engine puts beside the caller's state.
_ENGINE = re.compile(
    "module|buffer_names|optimizer|param_shapes|frozen_param_shapes|shared_params|frozen_param_fragments|lr_scheduler|data_sampler|random_ltd|"
    "skipped_steps|global_steps|global_samples|dp_world_size|mp_world_size|checkpoint_parallel_dimensions|ds_config|ds_version|num_experts|"
    "universal_checkpoint_info|csr_tensor_module_names|sparse_tensor_module_names|ds_autoep_layers|autoep_layers|folding"
)
_WRAPPER = "_forward_module."  # of Lightning before 2.1


def _is_tag(path: Path) -> bool:
    return path.is_dir() and any(_is_file(each.name) for each in path.iterdir())


def _is_file(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _FILES)


def _tags(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if _is_tag(each))


def is_folder(path: Path) -> bool:
    """Whether a directory is one of DeepSpeed's, or one of the folders in it."""
    return path.is_dir() and (_is_tag(path) or (path / LATEST).is_file() or bool(_tags(path)))


def folder_of(file: Path) -> Path | None:
    """The directory of DeepSpeed's that ``file`` belongs to."""
    if _is_file(file.name):
        above = file.parent.parent
        return above if (above / LATEST).is_file() else file.parent
    return file.parent if file.name == LATEST and _tags(file.parent) else None


def _tag(path: Path) -> Path:
    """The folder with the files."""
    if _is_tag(path):
        return path
    there = ", ".join(_tags(path)) or "no folder with a checkpoint"
    if not (path / LATEST).is_file():
        raise ValueError(
            f"{path} has no file {LATEST!r} that says which folder in it is meant. There is: {there}. Give one."
        )
    tag = (path / LATEST).read_text(errors="replace").strip()
    if not tag or not (path / tag).resolve().is_relative_to(path.resolve()) or not (path / tag).is_dir():
        raise ValueError(f"{path / LATEST} names {tag[:100]!r}, which is no folder in {path}. There is: {there}.")
    return path / tag


def _ranks(tag: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for each in sorted(tag.iterdir()):
        if match := pattern.fullmatch(each.name):
            other = found.setdefault(int(match["rank"] or 0), each)
            if other != each:
                raise ValueError(f"{tag} has files of two runs: {other.name} and {each.name}.")
    return dict(sorted(found.items()))


def _refuse_other_kinds(tag: Path) -> None:
    for each in sorted(tag.iterdir()):
        for pattern, what in _OTHERS:
            if pattern.fullmatch(each.name):
                raise ValueError(f"{tag} is a checkpoint of DeepSpeed {what}, as {each.name} says: not supported.")
        match = _MODEL.fullmatch(each.name) or _OPTIMIZER.fullmatch(each.name)
        if match and int(match["tensor"]):
            raise ValueError(
                f"{tag} is a checkpoint of DeepSpeed's tensor parallelism, as {each.name} says: not supported."
            )


def _complete(tag: Path, found: Mapping[int, Path], ranks: int, example: str) -> list[Path]:
    """The files of all ranks; ``example`` is the name of one, with ``{}`` for the rank."""
    missing = [example.format(rank) for rank in range(ranks) if rank not in found]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{tag} is incomplete: it was written by {ranks} ranks, and {', '.join(missing[:3])}{more} is missing."
        )
    if len(found) > ranks:
        extra = ", ".join(path.name for rank, path in found.items() if rank >= ranks)
        raise ValueError(
            f"{tag} was written by {ranks} ranks, and there are files of more, perhaps of an earlier run: {extra}."
        )
    return [found[rank] for rank in range(ranks)]


def _partitions(file: File) -> int:
    count = file.value["optimizer_state_dict"]["partition_count"]
    counts = set(count) if isinstance(count, list) else {count}
    if len(counts) != 1 or not isinstance(ranks := counts.pop(), int) or ranks < 1:
        raise ValueError(f"{file.path} has groups that are sharded over different ranks ({count}): not supported.")
    return ranks


def _optimizer_files(tag: Path, model: File) -> list[File]:
    found = _ranks(tag, _OPTIMIZER)
    if not found:
        raise ValueError(f"{tag} is incomplete: *_optim_states.pt, which the ranks' parameters are in, are missing.")
    one, path = next(iter(found.items()))
    first = File(path)
    ranks = _partitions(first)
    paths = _complete(tag, found, ranks, path.name.replace(f"_rank_{one}_mp", "_rank_{}_mp"))
    across = model.value.get("dp_world_size")
    if isinstance(across, int) and across != ranks:
        raise ValueError(f"{tag} is sharded within groups of {ranks} of {across} ranks (MiCS): not supported.")
    return [first if each == path else File(each) for each in paths]


def _parameters(model: File, ranks: Sharded | None, models: list[File]) -> tuple[dict[str, Any], list[str]]:
    """The module's state by name, and the names of its parameters in its order, once for each.

    Args:
        models: every rank's file where they hold parts of what is frozen, and nothing in place of parameters: stage 3.
    """
    value, module = model.value, model.value["module"]
    buffers, frozen = set(value.get("buffer_names") or ()), value.get("frozen_param_shapes") or {}
    places = ranks.places if ranks else {}
    shared = {name: of for name, of in (value.get("shared_params") or {}).items() if name not in {*places, *frozen}}
    weights, names = {}, []
    for name in [*module, *(each for each in places if each not in module)]:
        of = shared.get(name, name)
        if ranks is not None and of in places:
            weights[name] = ranks.weight(of)
        elif models and of in frozen:
            weights[name] = _frozen(models, of, frozen[of])
        elif models and isinstance(module[name], Tensor) and not module[name].numel() and name not in buffers:
            raise ValueError(
                f"{model.path.parent} has no numbers of {name}, which was neither in the optimizer nor frozen: stage 3 does not keep those."
            )
        else:
            weights[name] = model.plain(module[name], f"module/{name}")
        if (
            name == of
            and name not in buffers
            and isinstance(weights[name], Unread)
            and not name.endswith("_extra_state")
        ):
            names.append(name)
    return weights, names


def _frozen(models: list[File], name: str, shape: Any) -> Unread:
    flats = [each.value["frozen_param_fragments"][name] for each in models]
    place = lay_in_parts(0, {name: shape}, len(models))[0][name]
    return joined(models, flats, place, (str(models[0].path), "frozen", name))


def _rest(model: File) -> dict[str, Any]:
    """What is neither module nor optimizer: the checkpoint that Lightning gave the engine, or what makes it one."""
    value = model.value
    own = model.plain({key: each for key, each in value.items() if not _ENGINE.fullmatch(str(key))}, "")
    if VERSION in own:
        return {"lr_schedulers": [], **own}
    scheduler = value.get("lr_scheduler")
    schedulers = (
        [model.plain(scheduler, "lr_scheduler")] if isinstance(scheduler, dict) and "last_epoch" in scheduler else []
    )
    steps = {"epoch": 0, "global_step": model.plain(value.get("global_steps", 0), "global_steps")}
    return {**steps, VERSION: version("lightning"), "lr_schedulers": schedulers, "client_state": own}


def read(path: Path, weights_alone: bool = False, frozen: bool = False) -> dict[str, Any]:
    """A checkpoint as Lightning has it on one device, of a directory of DeepSpeed's. Tensors are unread.

    Args:
        path: the directory, or one of the folders in it.
        weights_alone: nothing but ``state_dict``.
        frozen: the optimizer of the run that goes on has the frozen parameters, too, which DeepSpeed leaves out.

    Raises:
        ValueError: for what is incomplete, damaged, or of a kind that is not supported; names the file.
    """
    tag = _tag(path)
    _refuse_other_kinds(tag)
    try:
        return _read(tag, weights_alone, frozen)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{tag} is damaged, or not what DeepSpeed writes ({error!r}).") from None


def _read(tag: Path, weights_alone: bool, frozen: bool) -> dict[str, Any]:
    found = _ranks(tag, _MODEL)
    if 0 not in found:
        raise ValueError(f"{tag} is incomplete: the module's file, mp_rank_00_model_states.pt, is missing.")
    model = File(found[0])
    _refuse_other_models(model)
    ranks, models = None, []
    if model.value["param_shapes"] is not None:
        files = _optimizer_files(tag, model)
        if found[0].name.startswith("zero"):
            paths = _complete(tag, found, len(files), "zero_pp_rank_{}_mp_rank_00_model_states.pt")
            models = [model, *map(File, paths[1:])]
        ranks = sharded(files, model)
    weights, names = _parameters(model, ranks, models)
    renamed = {name: name.removeprefix(_WRAPPER) for name in weights}
    state = {renamed[name]: each for name, each in weights.items()}
    if weights_alone:
        return {"state_dict": state}
    checkpoint = {**_rest(model), "state_dict": state}
    if ranks is not None:
        optimizer, of_groups = ranks.optimizer(names if frozen else None)
        left_out = len(names) - len(ranks.places)
        if left_out and not frozen:
            print(f"{left_out} frozen parameters are not in the optimizer's groups. {FROZEN} puts them there.")
        checkpoint["optimizer_states"] = [optimizer]
        known = full.describe({}, [[[renamed[name] for name in group] for group in of_groups]])
        checkpoint[full.KEY] = {**known, **checkpoint.get(full.KEY, {})}
    elif model.value["optimizer"] is not None:
        if "param_groups" not in model.value["optimizer"]:
            raise ValueError(
                f"{tag} is of stage 0 in half precision: DeepSpeed writes float32 parameters without their names. {WEIGHTS_ALONE}"
            )
        checkpoint["optimizer_states"] = [model.plain(model.value["optimizer"], "optimizer")]
    return checkpoint


def _refuse_other_models(model: File) -> None:
    value, where = model.value, model.path.parent
    if not isinstance(value["module"], dict):
        raise model.wrong("it has no module")
    if value.get("mp_world_size") not in (1, None):
        raise ValueError(f"{where} is of {value['mp_world_size']} tensor-parallel ranks: not supported.")
    if any(value.get(key) for key in ("num_experts", "ds_autoep_layers", "autoep_layers")):
        raise ValueError(f"{where} is a checkpoint of DeepSpeed of a mixture of experts: not supported.")
