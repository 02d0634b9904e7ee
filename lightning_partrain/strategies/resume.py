"""What a run resumes from, and what is each rank's own in it: random states, positions in data loaders."""

from __future__ import annotations

import io
import pickle
import posixpath
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_partrain import compat
from lightning_partrain.checkpoint import deepspeed_folder, full, state, stored
from lightning_partrain.checkpoint.extra import PREFIX, Extra, PerRank
from lightning_partrain.checkpoint.folder import is_remote
from lightning_partrain.checkpoint.newest import newest_good, problem_of
from lightning_partrain.checkpoint.torch_file import is_archive, refused_class
from lightning_partrain.parallel import random_states as numbers

if TYPE_CHECKING:
    from lightning_partrain.strategies.checkpoints import CheckpointStrategy

LAST_GOOD = "last_good"
RANDOM, LOADERS = "random_states", "loaders"


# -- where from --------------------------------------------------------------------------------------------------------


def agreed_path(strategy: CheckpointStrategy, path: Any) -> Any:
    """Rank 0's path, on all ranks: others may have looked in folders of their own. ``"last_good"`` is looked for. Collective."""
    found: Any = str(path) if path is not None else None
    if strategy.global_rank == 0 and found == LAST_GOOD:
        found = _last_good(strategy)
    found = strategy.broadcast(found)
    if isinstance(found, str) and found.startswith(NONE_FOUND):
        raise ValueError(f"ckpt_path='last_good' found {found}.")
    return found


#: What rank 0 says instead of a path.
NONE_FOUND = "no checkpoint (in "


def _last_good(strategy: CheckpointStrategy) -> str | None:
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    folders = [str(c.dirpath) for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
    # without a dirpath of one's own: <logger>/version_<n>/checkpoints, and every run has another version
    roots = [posixpath.dirname(posixpath.dirname(f)) for f in folders if re.search(r"/version_\d+/checkpoints$", f)]
    fitting = trainer.state.fn == TrainerFn.FITTING
    good, wrong = newest_good([*folders, *roots], depth=4, resumable=fitting)
    for problem in wrong:
        rank_zero_warn(f"ckpt_path='last_good' passes over a newer checkpoint. {problem}")
    looked = ", ".join(folders) or "no folder: there is no ModelCheckpoint"
    if good is not None:
        rank_zero_info(f"ckpt_path='last_good' is {good}.")
    elif fitting:
        rank_zero_warn(f"ckpt_path='last_good' found no checkpoint (in {looked}). Training starts from the beginning.")
    else:
        return f"{NONE_FOUND}{looked})"
    return good


def read_sharded(strategy: CheckpointStrategy, path: Any, weights_only: bool) -> dict[str, Any]:
    """A checkpoint whose tensors are read later. All files are looked at first, each by one rank. Collective.

    Raises:
        ValueError: on all ranks, for a damaged one; says which is the newest good one beside it.
    """
    try:
        reader = stored.Reader(path)
        reader.check(strategy.global_rank, strategy.everyone)
    except ValueError as error:
        raise ValueError(f"{error} {_way_out(strategy, path)}") from None
    checkpoint = state.put_together(reader, weights_only)
    makers = {name: partial(reader.stored, f"{PREFIX}{name}") for name in reader.names(PREFIX)}
    checkpoint.setdefault(full.KEY, {})["tensors"] = state.Lazy(makers)
    return checkpoint


def _way_out(strategy: CheckpointStrategy, path: Any) -> str:
    parent = posixpath.dirname(str(path).rstrip("/"))
    good = strategy.broadcast(newest_good([parent])[0] if strategy.global_rank == 0 else None)
    found = f"The newest good one beside it is {good}" if good else "There is no good one beside it"
    return f"{found}; ckpt_path='last_good' looks for one."


def refuse_what_is_not_whole(strategy: CheckpointStrategy, path: Any) -> None:
    """Look at what is to be loaded as one file. Collective.

    Raises:
        ValueError: on all ranks, for folders, for a file of a folder that is a checkpoint, and for damaged files.
    """
    if is_remote(path):
        return
    place = Path(path)
    if place.is_file() and stored.is_sharded(place.parent):
        raise ValueError(
            f"{place} is one file of a sharded checkpoint. Give the folder: ckpt_path={str(place.parent)!r}."
        )
    theirs = place if deepspeed_folder.is_folder(place) else deepspeed_folder.folder_of(place)
    if theirs is not None:
        raise ValueError(
            f"{place} was written by DeepSpeed. Make a checkpoint of it first: lightning-partrain convert {theirs} NEW --to sharded."
        )
    if place.is_dir():
        if not (place / compat.DCP_METADATA).is_file():
            raise ValueError(
                f"The folder {place} is no complete checkpoint: it has no {stored.MANIFEST}. {_way_out(strategy, place)}"
            )
        raise ValueError(
            f"The folder {place} was written by another strategy: it has no {stored.MANIFEST}. For folders of Lightning's FSDPStrategy and "
            f"ModelParallelStrategy: lightning-partrain convert {place} NEW --to sharded."
        )
    looks = strategy.global_rank == 0 and place.is_file() and is_archive(place)
    problem = strategy.broadcast(problem_of(str(place)) if looks else None)
    if problem:
        raise ValueError(f"{problem} {_way_out(strategy, place)}")


def warn_of_what_cannot_be_read(rest: Mapping[str, Any]) -> None:
    """Say what a sharded checkpoint has in it that ``weights_only=True`` will refuse."""
    for key, value in rest.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as error:
            rank_zero_warn(
                f"{key!r} of the checkpoint has {refused_class(error) or 'an object'} in it, which is only loaded with weights_only=False: give that to "
                "trainer.fit, or leave it out, as with save_hyperparameters(ignore=[...])."
            )


# -- what is each rank's own ----------------------------------------------------------------------------------------------


def extra_of(checkpoint: Mapping[str, Any]) -> Extra:
    own = checkpoint[full.KEY]
    tensors = own.get("tensors", {})
    return Extra(own.get("extra", {}), {name: partial(state.stored_in, tensors, name) for name in tensors})


def random_states(strategy: CheckpointStrategy) -> dict[str, Any]:
    return {RANDOM: PerRank(numbers.state_to_save(strategy.generators), strategy.global_rank, strategy.layout())}


def set_random_states(strategy: CheckpointStrategy, saved: Extra) -> None:
    """Where the layout is the one that wrote them; in others, ranks do not draw for the same samples."""
    states = saved.of_rank(RANDOM, strategy.global_rank, strategy.layout())
    if states is not None:
        numbers.set_saved_state(states, strategy.generators)


def _position(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {})


def _ranks_with_data(strategy: CheckpointStrategy) -> dict[str, Any]:
    assert strategy.mesh is not None
    return {"data_parallel": strategy.mesh.size("data_parallel")}


def loader_states(strategy: CheckpointStrategy, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Of the stateful loaders that Lightning found, one for each data-parallel rank; of its ranks, the first loads for all."""
    states = _position(checkpoint).get("state_dict", {}).get("combined_loader")
    assert strategy.mesh is not None
    if not states or strategy.mesh.rank("tp") or strategy.mesh.rank("pp"):
        return {}
    return {LOADERS: PerRank(states, strategy.mesh.data_parallel_rank, _ranks_with_data(strategy))}


def set_loader_states(strategy: CheckpointStrategy, checkpoint: dict[str, Any]) -> None:
    """Let Lightning give each rank's loaders what its own had.

    Raises:
        ValueError: for a position in the middle of an epoch that so many ranks had not.
    """
    position = _position(checkpoint).get("state_dict", {})
    if not position.get("combined_loader") or full.KEY not in checkpoint or strategy.mesh is None:
        return
    saved, among = extra_of(checkpoint), _ranks_with_data(strategy)
    own = saved.of_rank(LOADERS, strategy.mesh.data_parallel_rank, among)
    if own is not None:
        position["combined_loader"] = own
        return
    if LOADERS not in saved.plain:
        return
    progress = _position(checkpoint).get("epoch_loop.batch_progress", {})
    if progress.get("current", {}).get("completed", 0) and not progress.get("is_last_batch"):
        before = saved.plain[LOADERS]["among"]["data_parallel"]
        raise ValueError(
            f"The checkpoint was saved in the middle of an epoch, at positions that {before} data-parallel ranks had in their stateful data "
            f"loaders, and this run has {among['data_parallel']}. Resume with data_parallel_size={before}, or from a checkpoint at the end of "
            "an epoch."
        )
    position["combined_loader"] = []
