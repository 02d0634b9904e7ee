"""``hybrid_3d``: one strategy over all axes of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_partrain import compat
from lightning_partrain.checkpoint import full
from lightning_partrain.mesh import ParallelSizes, Size
from lightning_partrain.numerics import StageNorm
from lightning_partrain.parallel.buffers import SharedBuffers
from lightning_partrain.parallel.fully_shard import FullyShardedModel
from lightning_partrain.parallel.pipeline import state
from lightning_partrain.parallel.pipeline.pipeline import Pipeline, Split
from lightning_partrain.parallel.pipeline.schedule import Schedule
from lightning_partrain.parallel.pipeline.tied import TiedGradients
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel
from lightning_partrain.parallel.shard import ShardedOptimizerModel
from lightning_partrain.strategies import audit
from lightning_partrain.strategies.base import MeshStrategy
from lightning_partrain.strategies.first_batch import first_steps
from lightning_partrain.strategies.loaders import same_length


class Hybrid3DStrategy(MeshStrategy):
    """Train an unchanged LightningModule on many ranks, with the numbers of one process on the same global batch.

    Args:
        data_parallel_size: ranks that see different samples; ``"auto"`` takes all there are.
        data_parallel_replicate_size: how many replicas they form. Gradients are averaged over all of them, and everything
            that ``zero_stage`` shards is sharded inside each replica (hybrid sharding, HSDP).
        zero_stage: what is sharded: 0 nothing, 1 the optimizer state, 2 gradients as well, 3 parameters as well (FSDP2, block by
            block).
        reduce: average gradients once per accumulation ``"window"`` (least traffic; whole gradients are kept meanwhile) or
            after every ``"micro_batch"`` (least memory: between backward passes only shards are kept).
        pipeline_parallel_size: stages of the pipeline: ranks that hold different layers and work on the same samples.
        num_microbatches: into how many parts a data-parallel rank's batch is cut; ``"auto"`` is the largest divisor of the batch
            size up to four times the number of stages. A number also works without a pipeline.
        schedule: ``"1f1b"`` (a stage holds the activations of at most as many micro-batches as stages follow it, itself included) or
            ``"gpipe"`` (of all).
        pipeline_split: ``"auto"`` cuts between blocks so that the largest stage has the fewest parameters;
            ``{"blocks": "model.layers", "at": [3, 7]}`` names the list and the blocks with which stages begin.
        process_group_backend, timeout: see :class:`MeshStrategy`.

    Raises:
        ValueError: for a size, stage or option that cannot be.
    """

    def __init__(
        self,
        data_parallel_size: Size = "auto",
        data_parallel_replicate_size: int = 1,
        zero_stage: Literal[0, 1, 2, 3] = 1,
        reduce: Reduce = "window",
        pipeline_parallel_size: Size = "auto",
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: Schedule = "1f1b",
        pipeline_split: Literal["auto"] | dict[str, Any] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800.0,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        if zero_stage not in (0, 1, 2, 3) or isinstance(zero_stage, bool):
            raise ValueError(
                f"zero_stage={zero_stage!r} does not exist. The stages are 0 (nothing sharded), 1 (optimizer state), 2 (and gradients) "
                "and 3 (and parameters)."
            )
        if reduce not in ("window", "micro_batch"):
            raise ValueError(f"reduce={reduce!r} does not exist. Choose 'window' or 'micro_batch'.")
        self.data_parallel_size = data_parallel_size
        self.data_parallel_replicate_size = data_parallel_replicate_size
        self.zero_stage = zero_stage
        self.reduce_when = reduce
        if num_microbatches != "auto" and (
            not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1
        ):
            raise ValueError(
                f"num_microbatches must be 'auto' or a whole number of at least 1, not {num_microbatches!r}."
            )
        if schedule not in ("gpipe", "1f1b"):
            raise ValueError(f"schedule={schedule!r} does not exist. Choose 'gpipe' or '1f1b'.")
        self.pipeline_parallel_size = pipeline_parallel_size
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.split = Split.parse(pipeline_split)
        self.pipeline: Pipeline | None = None
        self._optimizer_homes: dict[str, int] | None = None  # also after the run: optimizers keep their stage's state

    def sizes(self, world_size: int) -> ParallelSizes:
        sizes = ParallelSizes.resolve(
            world_size, self.data_parallel_size, self.data_parallel_replicate_size, self.pipeline_parallel_size
        )
        if self.schedule == "1f1b" and self.num_microbatches != "auto" and self.num_microbatches < sizes.pp:
            raise ValueError(
                f"schedule='1f1b' needs at least as many micro-batches as stages, but num_microbatches={self.num_microbatches} and there "
                f"are {sizes.pp} stages. Use num_microbatches={sizes.pp} or more, or schedule='gpipe'."
            )
        return sizes

    def process_dataloader(self, dataloader: Any) -> Any:
        """Prediction keeps every sample: ranks whose last batch comes earlier end earlier."""
        assert self.mesh is not None and self.lightning_module is not None
        if not self.lightning_module.trainer.predicting or self.world_size == 1:
            return super().process_dataloader(dataloader)
        self.seed_workers(dataloader)
        if self.zero_stage == 3 and not same_length(dataloader, self.control_group):
            # gathering block by block would wait for those that have ended
            assert self.model_parallel is not None
            self.model_parallel.release()
            self.model_parallel = ReplicatedModel(self.lightning_module, self.mesh, self.reduce_when, training=False)
        return dataloader

    @property
    def sharded(self) -> bool:
        return self.zero_stage > 0

    def layout(self) -> dict[str, Any]:
        return {**super().layout(), "zero_stage": self.zero_stage}

    def audit(self, trainer: Any) -> None:
        super().audit(trainer)
        audit.audit_callbacks(trainer.callbacks, self.zero_stage)
        if self.zero_stage == 3:  # FSDP2 keeps what it gathered for a later backward pass
            for loop in (
                trainer.validate_loop,
                trainer.test_loop,
                trainer.predict_loop,
                trainer.fit_loop.epoch_loop.val_loop,
            ):
                loop.inference_mode = False

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        assert self.mesh is not None and self.lightning_module is not None
        absent = self.pipeline.absent if self.pipeline is not None else frozenset[Tensor]()
        if self.zero_stage == 0:
            return ReplicatedModel(module, self.mesh, self.reduce_when, training, absent)
        if self.zero_stage == 3:
            automatic = self.lightning_module.automatic_optimization
            blocks = None if self.pipeline is None else self.pipeline.own_blocks()
            return FullyShardedModel(
                module, self.mesh, self.reduce_when, training, absent, automatic=automatic, blocks=blocks
            )
        return ShardedOptimizerModel(
            module, self.mesh, self.reduce_when, training, absent, keep_buffers=self.zero_stage == 1
        )

    # -- the pipeline ----------------------------------------------------------------------------------------------------

    @property
    def pipelined(self) -> bool:
        assert self.mesh is not None
        return self.mesh.sizes.pp > 1 or self.num_microbatches not in ("auto", 1)

    @cached_property
    def _stage_host_group(self) -> dist.ProcessGroup | None:
        """The stages of this data-parallel rank, for tensors on the host."""
        assert self.mesh is not None
        if self.mesh.sizes.pp == 1:
            return None
        if self.process_group_backend == "gloo":
            return self.mesh.group("pp")
        return self.mesh.new_groups("pp", range(self.mesh.sizes.pp), backend="gloo", timeout=self.timeout)

    def cut(self, trainer: Any) -> SharedBuffers:
        if not self.pipelined:
            return super().cut(trainer)
        assert self.mesh is not None and self.lightning_module is not None
        audit.audit_pipeline(trainer)
        seed = self.broadcast(int(torch.randint(1 << 62, ())))
        pipeline = Pipeline(
            self.lightning_module,
            self.mesh,
            self.num_microbatches,
            self.schedule,
            self.split,
            self._contexts(),
            self._stage_host_group,
            self.root_device,
            seed,
        )
        steps = first_steps(trainer)
        if not steps:
            return super().cut(trainer)
        pipeline.make_cut(steps)
        pipeline.empty()
        self.pipeline = pipeline
        return SharedBuffers(
            self.lightning_module,
            self.mesh.data_parallel_group,
            {name for name, home in pipeline.buffer_lives.items() if home == pipeline.index},
        )

    def share_metrics(self) -> None:
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
        output = self.pipeline.run("training_step", args, training=True, scale=1.0 / trainer.accumulate_grad_batches)
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
        """Whether this rank is of the first data-parallel replica, whose stages make a checkpoint together."""
        assert self.mesh is not None
        return self.mesh.data_parallel_rank == 0

    def _whole_state(self) -> dict[str, Any]:
        if self.pipeline is None or self._stage_host_group is None:
            return super()._whole_state()
        assert self.model_parallel is not None
        own = self.model_parallel.state_dict(keep=self._first_replica)
        if not self._first_replica:
            return {}
        return state.collect(state.state_homes(self.pipeline), own, self._stage_host_group)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._optimizer_homes is None or self._stage_host_group is None:
            return super().optimizer_state(optimizer)
        optimizer = compat.unwrap_optimizer(optimizer)
        own = full.full_optimizer_state(optimizer, self._stepped, keep=self._first_replica)
        if not self._first_replica:
            return {}
        names = self._parameter_names(optimizer)
        homes = {index: self._optimizer_homes.get(name, 0) for index, name in enumerate(names)}
        return {**own, "state": state.collect(homes, own["state"], self._stage_host_group)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.pipeline is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        with state.without_absent(self.pipeline) as absent:
            here = {name: value for name, value in checkpoint["state_dict"].items() if name not in absent}
            super().load_model_state_dict({"state_dict": here}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.pipeline is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        saved = []
        for optimizer, whole in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            params = [p for group in compat.unwrap_optimizer(optimizer).param_groups for p in group["params"]]
            here = {i: values for i, values in whole["state"].items() if params[int(i)] not in self.pipeline.absent}
            saved.append({**whole, "state": here})
        super().load_optimizer_state_dict({"optimizer_states": saved})

    def join(self) -> None:
        if self.pipeline is not None and self.pipeline.stages > 1:
            state.make_whole(self.pipeline)

    def teardown(self) -> None:
        if self.pipeline is not None and self.pipeline.stage is not None:
            self.pipeline.stage.remove()
        super().teardown()
        self.pipeline, self._stage_norm = None, None
