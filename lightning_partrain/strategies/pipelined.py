"""Strategies whose ranks may be stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.checkpoint import full
from lightning_partrain.numerics import StageNorm
from lightning_partrain.parallel.buffers import SharedBuffers
from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.parallel.pipeline import state
from lightning_partrain.parallel.pipeline.cut import Split
from lightning_partrain.parallel.pipeline.pipeline import Pipeline
from lightning_partrain.parallel.pipeline.schedule import Schedule
from lightning_partrain.parallel.pipeline.tied import TiedGradients
from lightning_partrain.parallel.placement import Entry
from lightning_partrain.precision.mesh_mixed import MeshMixedPrecision
from lightning_partrain.strategies import audit
from lightning_partrain.strategies.base import MeshStrategy
from lightning_partrain.strategies.checkpoints import Format
from lightning_partrain.strategies.first_batch import first_steps
from lightning_partrain.strategies.initial_values import Pretrained


class PipelinedStrategy(MeshStrategy):
    """Cuts the model before the layout is made, runs the steps through a schedule, and puts the parts together again.

    With one stage and ``num_microbatches="auto"`` it is a :class:`MeshStrategy`.

    Args:
        num_microbatches, schedule, pipeline_split: see :class:`Hybrid3DStrategy`.
        process_group_backend, timeout: see :class:`RankStrategy`.
        checkpoint_format, async_save: see :class:`CheckpointStrategy`.
        load_pretrained: see :class:`Hybrid3DStrategy`.
    """

    def __init__(
        self,
        num_microbatches: int | Literal["auto"],
        schedule: Schedule,
        pipeline_split: Literal["auto"] | dict[str, Any],
        process_group_backend: str | None,
        timeout: timedelta | float,
        checkpoint_format: Format,
        async_save: bool,
        load_pretrained: Pretrained,
    ) -> None:
        super().__init__(process_group_backend, timeout, checkpoint_format, async_save, load_pretrained)
        if num_microbatches != "auto" and (
            not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1
        ):
            raise ValueError(
                f"num_microbatches must be 'auto' or a whole number of at least 1, not {num_microbatches!r}."
            )
        if schedule not in ("gpipe", "1f1b"):
            raise ValueError(f"schedule={schedule!r} does not exist. Choose 'gpipe' or '1f1b'.")
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.split = Split.parse(pipeline_split)
        self.pipeline: Pipeline | None = None
        self._optimizer_homes: dict[str, int] | None = None  # also after the run: optimizers keep their stage's state

    def check_micro_batches(self, stages: int) -> None:
        """Raise for a schedule that ``num_microbatches`` cannot fill.

        Raises:
            ValueError: for 1F1B with fewer micro-batches than ``stages``.
        """
        if self.schedule == "1f1b" and self.num_microbatches != "auto" and self.num_microbatches < stages:
            raise ValueError(
                f"schedule='1f1b' needs at least as many micro-batches as stages, but num_microbatches={self.num_microbatches} and "
                f"there are {stages} stages. Use num_microbatches={stages} or more, or schedule='gpipe'."
            )

    @property
    def pipelined(self) -> bool:
        assert self.mesh is not None
        return self.mesh.sizes.pp > 1 or self.num_microbatches not in ("auto", 1)

    @property
    def _stage_host_group(self) -> dist.ProcessGroup | None:
        """The stages of this data-parallel rank, for tensors on the host."""
        return self.host_group("pp")

    def cut(self, trainer: Any) -> SharedBuffers:
        if not self.pipelined:
            return super().cut(trainer)
        assert self.mesh is not None and self.lightning_module is not None
        audit.audit_pipeline(trainer)
        audit.audit_extra_state(self.lightning_module, self.mesh.sizes.pp)
        pipeline = Pipeline(
            self.lightning_module,
            self.mesh,
            self.num_microbatches,
            self.schedule,
            self.split,
            self._contexts(),
            self._stage_host_group,
            self.root_device,
            self.seed,
            self.layers_together(),
        )
        steps = first_steps(trainer)
        if not steps:
            return super().cut(trainer)
        pipeline.make_cut(steps)
        if self.world_size > 1:
            audit.audit_fingerprints(self.all_ranks((*pipeline.fingerprint(steps), self.mesh.data_parallel_rank)))
        pipeline.empty()
        self.pipeline = pipeline
        self.generators["micro-batches"] = pipeline.generator
        return SharedBuffers(
            self.lightning_module,
            self.mesh.data_parallel_group,
            {name for name, home in pipeline.buffer_lives.items() if home == pipeline.index},
        )

    def layers_together(self) -> list[list[str]]:
        """Names of modules that no stage may separate."""
        return []

    def at_epoch_end(self) -> None:
        super().at_epoch_end()
        if self.pipeline is not None:
            self.pipeline.share_metrics()

    def _attach_optimizers(self) -> None:
        super()._attach_optimizers()
        self._optimizer_homes = None
        if self.pipeline is None:
            return
        if self.pipeline.stages > 1:
            self._optimizer_homes = {name: self.pipeline.home(name) for name in self.pipeline.lives}
        assert self.pipeline.stage is not None and self.model_parallel is not None and self.mesh is not None
        for optimizer in self.optimizers:  # some make their state at once
            for param in self.pipeline.absent:
                compat.unwrap_optimizer(optimizer).state.pop(param, None)
        present = self.model_parallel.named_parameters()
        elsewhere = {param for name, param in present.items() if self.pipeline.home(name) != self.pipeline.index}
        dtype = torch.float32
        for param in self.pipeline.module.parameters():
            dtype = torch.promote_types(dtype, param.dtype)
        self._stage_norm = StageNorm(
            self.mesh.group("pp"), lambda param: param not in elsewhere, dtype, self.root_device
        )
        self._tied = TiedGradients(self.pipeline.lives, self.mesh)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.pipeline is not None and self.pipeline.stage is not None:
            assert self.model_parallel is not None
            self.pipeline.stage.install(
                self.model_parallel.around_stage
            )  # last, around whatever else wraps the modules

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline is None:
            return super()._train(*args, **kwargs)
        assert self.model_parallel is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self.model_parallel.begin_schedule()
        scale: float | Tensor = 1.0 / trainer.accumulate_grad_batches
        if isinstance(self.precision_plugin, MeshMixedPrecision):
            loss_scale = self.precision_plugin.loss_scale(self.root_device)
            scale = scale if loss_scale is None else loss_scale * scale
        assert self.tokens is not None
        of_sums = None if self.tokens.counting is False else self.tokens.weight(batches.batch_size(args[0])) * scale
        output = self.pipeline.run("training_step", args, training=True, scale=scale, scale_of_sums=of_sums)
        self.model_parallel.end_schedule()
        return output

    def _compute_gradients(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.pipeline is None:
            super()._compute_gradients(closure_loss, optimizer, *args, **kwargs)
            return
        assert self.model_parallel is not None
        self.model_parallel.add_gradients()

    def _complete_gradients(self, last_of_window: bool) -> None:
        super()._complete_gradients(last_of_window)
        if self.pipeline is not None and last_of_window:
            assert self.model_parallel is not None
            self._tied.add_up(self.model_parallel.named_parameters())

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline is None:
            return super()._evaluate(step, *args, **kwargs)
        with torch.no_grad():
            return self.pipeline.run(step, args, training=False)

    @property
    def _first_replica(self) -> bool:
        """Whether this rank is of those whose stages make a checkpoint together."""
        assert self.mesh is not None
        return self.mesh.data_parallel_rank == 0 and self.mesh.rank("tp") == 0

    def _whole_state(self) -> dict[str, Any]:
        if self.pipeline is None or self._stage_host_group is None:
            return super()._whole_state()
        assert self.model_parallel is not None
        own = self.model_parallel.state_dict(keep=self._first_replica)
        if not self._first_replica:
            return {}
        return state.collect(state.state_homes(self.pipeline), own, self._stage_host_group)

    def _held_state(self) -> dict[str, Any]:
        held = super()._held_state()
        if self.pipeline is None or self.pipeline.stages == 1:
            return held
        # in the order and with the names of all, but without what lives elsewhere
        absent = {
            name
            for name, param in self.pipeline.module.named_parameters(remove_duplicate=False)
            if param in self.pipeline.absent
        }
        absent |= {name for name, home in self.pipeline.buffer_lives.items() if home != self.pipeline.index}
        return {name: Entry(value.shape, value.dtype, []) if name in absent else value for name, value in held.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self.checkpoint_format == "sharded" or self._optimizer_homes is None or self._stage_host_group is None:
            return super().optimizer_state(optimizer)
        optimizer = compat.unwrap_optimizer(optimizer)
        own = full.full_optimizer_state(optimizer, self._stepped, self._first_replica, self.fused)
        if not self._first_replica:
            return {}
        names = [name for group in self.parameter_groups(optimizer) for name in group]
        homes = {index: self._optimizer_homes.get(name, 0) for index, name in enumerate(names)}
        return {**own, "state": state.collect(homes, own["state"], self._stage_host_group)}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        if self.pipeline is not None and "state" in saved:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            here = [index for index in saved["state"] if params[int(index)] not in self.pipeline.absent]
            saved = {**saved, "state": {index: saved["state"][index] for index in here}}
        super().load_optimizer_state(optimizer, saved)

    def join(self, whole: bool) -> None:
        if self.pipeline is not None and self.pipeline.stages > 1:
            state.make_whole(self.pipeline, whole)

    def teardown(self) -> None:
        if self.pipeline is not None and self.pipeline.stage is not None:
            self.pipeline.stage.remove()
        super().teardown()
        self.pipeline, self._stage_norm = None, None
