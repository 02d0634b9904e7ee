"""What is in a checkpoint, who writes it, and how it comes back: one file keyed by the names of parameters."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_partrain import compat
from lightning_partrain.checkpoint import full, sharded
from lightning_partrain.parallel.buffers import SharedBuffers
from lightning_partrain.parallel.placement import Entry, Fused
from lightning_partrain.parallel.replicate import ReplicatedModel
from lightning_partrain.precision.mesh_mixed import STATE_KEY, MeshMixedPrecision
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
        self.model_parallel: ReplicatedModel | None = None
        self._stepped: Callable[[Tensor], Tensor] = lambda param: param

    def layout(self) -> dict[str, Any]:
        """What a checkpoint records of the layout that wrote it."""
        assert self.mesh is not None
        sizes = self.mesh.sizes
        return {"strategy": type(self).__name__, "dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard}

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
            return self.lightning_module.state_dict()
        self.buffers.share(with_batch_norm=True)
        return self._whole_state() if self.checkpoint_format == "full" else self._held_state()

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

    @staticmethod
    def _parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
        """In the order of the optimizer's groups."""
        return [_NAMES.get(p, "") for group in optimizer.param_groups for p in group["params"]]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = self.broadcast(filepath)  # rank 0's: others may have formatted it from their own numbers
        if not self.is_global_zero and self.checkpoint_format == "full":
            return
        groups = [
            [[_NAMES.get(p, "") for p in g["params"]] for g in compat.unwrap_optimizer(o).param_groups]
            for o in self.optimizers
        ]
        if type(self.precision_plugin) is MeshMixedPrecision and MeshMixedPrecision.__qualname__ in checkpoint:
            checkpoint[STATE_KEY] = checkpoint.pop(MeshMixedPrecision.__qualname__)
        layout = self.layout() if self.mesh else {}
        checkpoint[full.KEY] = full.describe(layout, groups)
        if self.checkpoint_format == "sharded":
            if "://" in str(path):
                raise ValueError(
                    f"checkpoint_format='sharded' writes into a folder of this machine, not to {path}. Use 'full'."
                )
            entries, rest = sharded.take_apart(checkpoint)
            self._save_sharded(Path(path), entries, rest, layout)
            return
        if type(self.checkpoint_io) is TorchCheckpointIO and "://" not in str(path) and storage_options is None:
            with full.replace_when_complete(path) as aside:
                self.checkpoint_io.save_checkpoint(checkpoint, aside)
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _save_sharded(
        self, path: Path, entries: dict[str, Entry], rest: dict[str, Any], layout: dict[str, Any]
    ) -> None:
        assert self.lightning_module is not None
        later = self.async_save and self.lightning_module.trainer.state.status == TrainerStatus.RUNNING
        self.wait_for_checkpoint()
        write = sharded.begin(path, entries, rest, layout, self.global_rank, self.all_ranks, copy=later)
        if not later:
            write(self.all_ranks)
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._writer.submit(
            write, partial(gather_json, device=torch.device("cpu"), group=self._own_group)
        )

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

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if sharded.is_sharded(checkpoint_path):
            checkpoint = sharded.put_together(sharded.Reader(checkpoint_path))
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if type(self.precision_plugin) is MeshMixedPrecision and STATE_KEY in checkpoint:
            checkpoint[MeshMixedPrecision.__qualname__] = checkpoint.pop(STATE_KEY)
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.wait_for_checkpoint()
        if self.is_global_zero and sharded.is_sharded(filepath):
            shutil.rmtree(filepath)
        elif self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.model_parallel is None:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            self.model_parallel.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            full.load_full_optimizer_state(compat.unwrap_optimizer(optimizer), saved, self._stepped, self.fused)
