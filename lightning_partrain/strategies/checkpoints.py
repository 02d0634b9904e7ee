"""What is in a checkpoint, who writes it, and how it comes back: one file keyed by the names of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_partrain import compat
from lightning_partrain.checkpoint import extra, full, sharded, state, stored
from lightning_partrain.checkpoint.folder import Folder, is_remote
from lightning_partrain.checkpoint.sharded import DiskFullError
from lightning_partrain.parallel.buffers import SharedBuffers
from lightning_partrain.parallel.deferred import DeferredInit
from lightning_partrain.parallel.hollow import is_hollow
from lightning_partrain.parallel.load import load_state
from lightning_partrain.parallel.placement import Entry, Fused
from lightning_partrain.parallel.replicate import ReplicatedModel
from lightning_partrain.precision.mesh_mixed import STATE_KEY, MeshMixedPrecision
from lightning_partrain.strategies import resume
from lightning_partrain.strategies.initial_values import held
from lightning_partrain.strategies.ranks import RankStrategy
from lightning_partrain.sync.messages import gather_json, meet

#: Name of every parameter object that a module has had, so that optimizers can be given its present ones.
_NAMES: WeakIdKeyDictionary = WeakIdKeyDictionary()

#: How long a checkpoint waits for ranks that have not called save.
SAVE_WAIT = timedelta(minutes=5)
SAVE_WAIT_AFTER_ERROR = timedelta(seconds=5)


Format = Literal["full", "sharded"]


class CheckpointStrategy(RankStrategy):
    """Collects the state of a model that is laid out over ranks, and gives it back. Rank 0 writes.

    Args:
        process_group_backend, timeout: see :class:`RankStrategy`.
        checkpoint_format: ``"full"`` or ``"sharded"``; either loads both.
        async_save: write sharded checkpoints while training goes on.
    """

    buffers: SharedBuffers

    def __init__(
        self,
        process_group_backend: str | None,
        timeout: timedelta | float,
        checkpoint_format: Format,
        async_save: bool,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        if checkpoint_format not in ("full", "sharded"):
            raise ValueError(f"checkpoint_format={checkpoint_format!r} does not exist. Choose 'full' or 'sharded'.")
        if not isinstance(async_save, bool):
            raise ValueError(f"async_save must be True or False, not {async_save!r}.")
        if async_save and checkpoint_format != "sharded":
            raise ValueError("async_save=True writes what each rank holds: it needs checkpoint_format='sharded'.")
        self.checkpoint_format, self.async_save = checkpoint_format, async_save
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._has_looked = False  # at what else than tensors there is to be saved
        self._no_room = False  # for the checkpoint that was to be written last
        self.generators: dict[
            str, torch.Generator
        ] = {}  # of which the steps of this rank draw; kept after a run, to be saved
        self._awaiting: tuple[Mapping[str, Any], bool] | None = None
        compat.link_only_what_is_there(lambda strategy: isinstance(strategy, CheckpointStrategy))
        compat.agree_on_checkpoint_path(
            lambda strategy, path: (
                resume.agreed_path(strategy, path) if isinstance(strategy, CheckpointStrategy) else path
            )
        )
        self.model_parallel: ReplicatedModel | None = None
        self._stepped: Callable[[Tensor], Tensor] = lambda param: param

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """With ``empty_init=True``, what is built holds no numbers: each rank gets those of its part in setup, as one process would have had
        them. Otherwise modules are built on the host, and moved in setup."""
        with DeferredInit() if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def layout(self) -> dict[str, Any]:
        """What a checkpoint records of the layout that wrote it."""
        assert self.mesh is not None
        sizes = self.mesh.sizes
        return {"strategy": type(self).__name__, "dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard}

    def extra_state(self) -> dict[str, Any]:
        """What this strategy keeps beside the model and the optimizers, by name; see :mod:`lightning_partrain.checkpoint.extra`.

        Called on all ranks whenever a checkpoint with optimizers is saved, also after a run. Strategies add to what their base gives.
        """
        return resume.random_states(self)

    def load_extra_state(self, saved: extra.Extra) -> None:
        """Take it back, after model and optimizers. It may lack what the strategy that wrote it did not have."""
        resume.set_random_states(self, saved)

    def fused(self, param: Tensor) -> Fused | None:
        """The order in which ranks hold a parameter of an optimizer together, where it is not the model's."""
        return None

    def _remember_names(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, param in named:
            _NAMES[param] = name

    def _meet_to_save(self) -> None:
        """Saving is collective. Wait for all ranks, but not for ever.

        Raises:
            RuntimeError: when some ranks did not call it.
        """
        if self.world_size == 1 or not dist.is_initialized():
            return
        assert self.lightning_module is not None
        error = sys.exc_info()[1] if self.lightning_module.trainer.interrupted else None
        if error is not None:  # a callback saves because of it: tell the others first, who may not have failed
            self.on_exception(error)
        wait = min(self.timeout / 2, SAVE_WAIT if error is None else SAVE_WAIT_AFTER_ERROR)  # before others give up
        missing = meet(compat.default_store(), wait)
        if missing and error is not None:
            raise error
        if missing:
            raise RuntimeError(
                f"A checkpoint is being saved on rank {self.global_rank}, but not on every rank: {missing} did not come within "
                f"{wait.total_seconds():.0f} s. Call trainer.save_checkpoint on all ranks, without `if trainer.is_global_zero`; "
                "one of them writes the file."
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._meet_to_save()
        if self.model_parallel is None:
            return self._state_between_runs()
        self.buffers.share(with_batch_norm=True)
        return self._whole_state() if self.checkpoint_format == "full" else self._held_state()

    def _state_between_runs(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        state, pieces = self.lightning_module.state_dict(), held(self.lightning_module)
        if self.checkpoint_format == "sharded":
            whole = {name: Entry.of(value) for name, value in state.items() if isinstance(value, Tensor)}
            return {**state, **whole, **pieces}
        return {**state, **extra.gather(pieces, self.global_rank, self.everyone, self._gather_group)}

    def _held_state(self) -> dict[str, Any]:
        assert self.model_parallel is not None
        return self.model_parallel.held_state()

    def _whole_state(self) -> dict[str, Any]:
        assert self.model_parallel is not None
        return self.model_parallel.state_dict(keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        optimizer = compat.unwrap_optimizer(optimizer)
        if self.checkpoint_format == "sharded":
            return full.held_optimizer_state(optimizer, self._stepped, self.fused)
        return full.full_optimizer_state(optimizer, self._stepped, self.is_global_zero, self.fused)

    @staticmethod
    def name_of(param: Tensor) -> str:
        """The name that a parameter has, or had, in its module."""
        return str(_NAMES.get(param, ""))

    def parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of the parameters in the optimizer's groups."""
        return [[_NAMES.get(param, "") for param in group["params"]] for group in optimizer.param_groups]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = self.broadcast(filepath)  # rank 0's: others may have formatted it from their own numbers
        groups = [self.parameter_groups(compat.unwrap_optimizer(each)) for each in self.optimizers]
        if type(self.precision_plugin) is MeshMixedPrecision and MeshMixedPrecision.__qualname__ in checkpoint:
            checkpoint[STATE_KEY] = checkpoint.pop(MeshMixedPrecision.__qualname__)
        layout = self.layout() if self.mesh else {}
        checkpoint[full.KEY] = full.describe(layout, groups)
        more, plain = self._extra(checkpoint)
        checkpoint[full.KEY]["extra"] = plain
        if self.checkpoint_format == "sharded":
            if storage_options is not None:
                raise TypeError(
                    "checkpoint_format='sharded' takes no storage_options. Put them into fsspec's own configuration."
                )
            entries, rest = state.take_apart(checkpoint)
            state.merge(rest, self.everyone)
            entries.update({f"{extra.PREFIX}{name}": entry for name, entry in more.items()})
            self._save_sharded(path, entries, rest, layout)
            return
        if more:
            checkpoint[full.KEY]["tensors"] = extra.gather(more, self.global_rank, self.everyone, self._gather_group)
        if self.is_global_zero:
            self._save_full(path, checkpoint, storage_options)

    def _extra(self, checkpoint: Mapping[str, Any]) -> tuple[dict[str, Entry], dict[str, Any]]:
        if "optimizer_states" not in checkpoint or self.mesh is None:
            return {}, {}
        return extra.take_apart({**self.extra_state(), **resume.loader_states(self, checkpoint)})

    def everyone(self, value: Any) -> list[Any]:
        """:meth:`all_ranks`, also before there are several."""
        return self.all_ranks(value) if self.world_size > 1 else [value]

    @property
    def _gather_group(self) -> dist.ProcessGroup | None:
        return self.control_group if self.world_size > 1 else None

    def _save_full(self, path: Any, checkpoint: dict[str, Any], storage_options: Any) -> None:
        try:
            if type(self.checkpoint_io) is TorchCheckpointIO and not is_remote(path) and storage_options is None:
                with full.replace_when_complete(path) as aside, open(aside, "wb", buffering=0) as file:
                    torch.save(checkpoint, file)
            else:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        except OSError as error:
            if not sharded.is_full_disk(error):
                raise
            self._tell_no_room(path, error)
        else:
            self._no_room = False

    def _save_sharded(self, path: Any, entries: dict[str, Entry], rest: dict[str, Any], layout: dict[str, Any]) -> None:
        assert self.lightning_module is not None
        later = self.async_save and self.lightning_module.trainer.state.status == TrainerStatus.RUNNING
        self.wait_for_checkpoint()
        if self.is_global_zero and not self._has_looked:
            self._has_looked = True
            resume.warn_of_what_cannot_be_read(rest)
        begun = sharded.begin(path, entries, rest, layout, self.global_rank, self.everyone, copy=later)

        def write(everyone: stored.Everyone) -> None:
            try:
                begun(everyone)
                self._no_room = False
            except DiskFullError as error:
                self._tell_no_room(path, error)

        if not later:
            write(self.everyone)
        elif self.world_size == 1:
            self._writing = self._thread.submit(write, self.everyone)
        else:
            gather = partial(gather_json, device=torch.device("cpu"), group=self._own_group)
            self._writing = self._thread.submit(write, gather)

    def _tell_no_room(self, path: Any, error: Exception) -> None:
        self._no_room = True
        rank_zero_warn(
            f"There is no room on the disk for the checkpoint {path}: training goes on without it, and older ones are kept. {error}"
        )

    @property
    def _thread(self) -> ThreadPoolExecutor:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "checkpoint")
        return self._writer

    @cached_property
    def _own_group(self) -> dist.ProcessGroup:
        """All ranks, for the thread that writes. Its first use is collective."""
        return dist.new_group(backend="gloo", timeout=self.timeout)

    def wait_for_checkpoint(self, only_if_done: bool = False) -> None:
        """Until the checkpoint in flight is written.

        Raises:
            RuntimeError: on all ranks, when it could not be.
        """
        if self._writing is not None and (self._writing.done() or not only_if_done):
            writing, self._writing = self._writing, None
            writing.result()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Once the one in flight, which takes its place, is written; not when there was no room for it."""

        def remove() -> None:
            if self._no_room:
                return
            if stored.is_sharded(filepath):
                Folder(filepath).delete()
            else:
                self.checkpoint_io.remove_checkpoint(filepath)

        if not self.is_global_zero:
            return
        if self._writing is None:
            remove()
        else:
            self._thread.submit(remove)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        weights_only = weights_only is not False  # Lightning 2.6 takes None for False where the path is an address
        if stored.is_sharded(checkpoint_path):
            checkpoint = resume.read_sharded(self, checkpoint_path, weights_only)
        else:
            resume.refuse_what_is_not_whole(self, checkpoint_path)
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if type(self.precision_plugin) is MeshMixedPrecision and STATE_KEY in checkpoint:
            checkpoint[MeshMixedPrecision.__qualname__] = checkpoint.pop(STATE_KEY)
        resume.set_loader_states(self, checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As soon as the module is laid out: then each rank reads what it holds. At once, where a callback changes it after."""
        assert self.lightning_module is not None
        module, saved = self.lightning_module, checkpoint["state_dict"]
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        looks = any(is_overridden("on_load_checkpoint", each, Callback) for each in callbacks)
        if self.model_parallel is None and looks and not any(p.is_meta or is_hollow(p) for p in module.parameters()):
            load_state(module, saved, partial(state.stored_in, saved), strict, {}, ())
            return
        self._awaiting = saved, strict
        if self.model_parallel is not None:
            self.load_awaiting()

    def load_awaiting(self) -> None:
        if self._awaiting is None:
            return
        assert self.model_parallel is not None
        (saved, strict), self._awaiting = self._awaiting, None
        self.model_parallel.load_state_dict(saved, partial(state.stored_in, saved), strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self.load_optimizer_state(compat.unwrap_optimizer(optimizer), saved)
        if full.KEY in checkpoint:
            self.load_extra_state(resume.extra_of(checkpoint))

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """What :meth:`optimizer_state` or a plain optimizer gave."""
        full.load_full_optimizer_state(optimizer, saved, self._stepped, self.fused)
