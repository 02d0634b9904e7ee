"""``hybrid_3d``: one strategy over all axes of the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_partrain.checkpoint.extra import Extra
from lightning_partrain.mesh import ParallelSizes, Size
from lightning_partrain.parallel.fully_shard import FullyShardedModel
from lightning_partrain.parallel.hollow import give_room
from lightning_partrain.parallel.pipeline.schedule import Schedule
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel
from lightning_partrain.parallel.shard import ShardedOptimizerModel
from lightning_partrain.strategies import audit
from lightning_partrain.strategies.auto_sizes import choose_sizes, device_memory, parse_memory
from lightning_partrain.strategies.checkpoints import Format
from lightning_partrain.strategies.compressed_replicas import CompressedReplicas
from lightning_partrain.strategies.initial_values import Pretrained
from lightning_partrain.strategies.loaders import same_length
from lightning_partrain.strategies.shared_batches import KINDS, SharedLoader
from lightning_partrain.strategies.tensor_parallel import TensorParallelStrategy
from lightning_partrain.sync.compression import Compression
from lightning_partrain.sync.compressors.base import Compressor
from lightning_partrain.sync.values import Values


class Hybrid3DStrategy(TensorParallelStrategy):
    """Train an unchanged LightningModule on many ranks, with the numbers of one process on the same global batch.

    Args:
        data_parallel_size: ranks that see different samples; ``"auto"`` takes all there are.
        data_parallel_replicate_size: how many replicas they form. Gradients are averaged over all of them, and everything
            that ``zero_stage`` shards is sharded inside each replica (hybrid sharding, HSDP).
        zero_stage: what is sharded: 0 nothing, 1 the optimizer state, 2 gradients as well, 3 parameters as well (FSDP2, block by
            block).
        reduce: average gradients once per accumulation ``"window"`` (least traffic; whole gradients are kept meanwhile) or
            after every ``"micro_batch"`` (least memory: between backward passes only shards are kept).
        tensor_parallel_size: ranks that hold each layer together and work on the same samples; ``"auto"`` is 1
            where the model fits.
        tensor_parallel_plan: which layers are cut, and how: ``"auto"``, or a mapping from names of modules (``*`` stands for any
            part) to styles, such as ``{"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"}``. Later entries override
            earlier ones, and ``"auto"`` is a style, too.
        pipeline_parallel_size: stages of the pipeline: ranks that hold different layers and work on the same samples;
            ``"auto"`` is 1 where the model fits.
        num_microbatches: into how many parts a data-parallel rank's batch is cut; ``"auto"`` is the largest divisor of the batch
            size up to four times the number of stages. A number also works without a pipeline.
        schedule: ``"1f1b"`` (a stage holds the activations of at most as many micro-batches as stages follow it, itself included) or
            ``"gpipe"`` (of all).
        pipeline_split: ``"auto"`` cuts between blocks so that the largest stage has the fewest parameters;
            ``{"blocks": "model.layers", "at": [3, 7]}`` names the list and the blocks with which stages begin.
        share_batches: let one of the tensor- and pipeline-parallel ranks of a data-parallel rank load and decode, and send the others
            its batches (through the host, without pickle). For data that is expensive to load, or that differs from load to load.
        replica_sync: compress gradients where they are averaged over the replicas of ``data_parallel_replicate_size``: the name of a compressor,
            one with options, or a :class:`~lightning_partrain.sync.compression.Compression`; see :class:`CompressedDDPStrategy`. Inside of a
            replica nothing is compressed. ``None``: exact.
        memory_limit: bytes of memory that a rank may use, or a text such as ``"24GiB"``; by default what its device has. Sizes
            that are ``"auto"`` are chosen so that the model fits; see :mod:`lightning_partrain.strategies.auto_sizes`.
        process_group_backend, timeout: see :class:`MeshStrategy`.
        checkpoint_format: ``"full"``, one file that plain Lightning loads, or ``"sharded"``, a folder that all ranks write at once,
            each what it holds. Every layout loads both.
        async_save: with ``"sharded"``, let training go on once the state is copied to the memory of the host, while it is written. An
            error is raised at the next step; the next checkpoint waits for the one before.
        load_pretrained: weights to begin with, of which each rank reads what it holds: a safetensors or torch file, a folder of them as
            Hugging Face writes it, or a checkpoint of this package. A mapping from submodules to such paths says for which part of the model
            they are. A checkpoint given as ``ckpt_path`` goes before them.

    Raises:
        ValueError: for a size, stage or option that cannot be.
    """

    def __init__(
        self,
        data_parallel_size: Size = "auto",
        data_parallel_replicate_size: int = 1,
        zero_stage: Literal[0, 1, 2, 3] = 1,
        reduce: Reduce = "window",
        tensor_parallel_size: Size = "auto",
        tensor_parallel_plan: Literal["auto"] | dict[str, str] = "auto",
        pipeline_parallel_size: Size = "auto",
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: Schedule = "1f1b",
        pipeline_split: Literal["auto"] | dict[str, Any] = "auto",
        share_batches: bool = False,
        replica_sync: str | Compressor | Compression | None = None,
        memory_limit: int | str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800.0,
        checkpoint_format: Format = "full",
        async_save: bool = False,
        load_pretrained: Pretrained = None,
    ) -> None:
        super().__init__(
            tensor_parallel_plan,
            num_microbatches,
            schedule,
            pipeline_split,
            process_group_backend,
            timeout,
            checkpoint_format,
            async_save,
            load_pretrained,
        )
        if zero_stage not in (0, 1, 2, 3) or isinstance(zero_stage, bool):
            raise ValueError(
                f"zero_stage={zero_stage!r} does not exist. The stages are 0 (nothing sharded), 1 (optimizer state), 2 (and gradients) "
                "and 3 (and parameters)."
            )
        if not isinstance(share_batches, bool):
            raise ValueError(f"share_batches must be True or False, not {share_batches!r}.")
        if reduce not in ("window", "micro_batch"):
            raise ValueError(f"reduce={reduce!r} does not exist. Choose 'window' or 'micro_batch'.")
        self.data_parallel_size = data_parallel_size
        self.data_parallel_replicate_size = data_parallel_replicate_size
        self.zero_stage = zero_stage
        self.reduce_when = reduce
        self.tensor_parallel_size = tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.share_batches = share_batches
        self.replica_sync = replica_sync
        self.compressed = CompressedReplicas(self, Compression.of(replica_sync))
        self.memory_limit = memory_limit
        self._memory = None if memory_limit is None else parse_memory(memory_limit)
        self._gathers = True  # whether prediction may gather parameters, which all ranks have to do together

    def sizes(self, world_size: int) -> ParallelSizes:
        sizes = ParallelSizes.resolve(
            world_size,
            self.data_parallel_size,
            self.data_parallel_replicate_size,
            self.pipeline_parallel_size,
            self.tensor_parallel_size,
        )
        self.check_micro_batches(sizes.pp)
        return sizes

    def fitting_sizes(self, sizes: ParallelSizes) -> ParallelSizes:
        asked = {"tp": self.tensor_parallel_size, "pp": self.pipeline_parallel_size}
        free = {axis for axis, size in asked.items() if size == "auto"}
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            free.discard("pp")
        if self.data_parallel_size != "auto" or sizes.dp_shard == 1:
            free.clear()
        if not free and self._memory is None:
            return sizes
        memory = torch.tensor(
            self._memory or device_memory(self.root_device, self.num_processes), device=self.root_device
        )
        dist.all_reduce(memory, dist.ReduceOp.MIN)
        chosen, reason = choose_sizes(
            module,
            sizes,
            free,
            self.world_size // self.num_nodes,
            self.zero_stage,
            self.tensor_parallel_plan,
            int(memory),
            self._memory is not None,
        )
        if chosen != sizes or self._memory is not None:
            rank_zero_info(f"Sizes chosen: {reason}.")
        self.check_micro_batches(chosen.pp)
        return chosen

    @cached_property
    def _peer_group(self) -> dist.ProcessGroup:
        """The ranks with the same samples. Its first use is collective over all ranks."""
        assert self.mesh is not None
        return self.mesh.new_peer_group(backend="gloo", timeout=self.timeout)

    def shared(self, dataloader: Any) -> Any:
        assert self.mesh is not None
        if not self.share_batches or self.mesh.sizes.tp * self.mesh.sizes.pp == 1:
            return dataloader
        group = self._peer_group
        pin = bool(getattr(dataloader, "pin_memory", False)) and torch.cuda.is_available()
        values = Values(dist.get_global_rank(group, 0), group, group, torch.device("cpu"), KINDS, pin)
        return SharedLoader(dataloader, sized_len(dataloader), values)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Prediction keeps every sample: ranks whose last batch comes earlier end earlier."""
        assert self.mesh is not None and self.lightning_module is not None
        if not self.lightning_module.trainer.predicting or self.world_size == 1:
            return super().process_dataloader(dataloader)
        self.seed_workers(dataloader)
        dataloader = self.shared(dataloader)
        if self.zero_stage == 3 and not same_length(dataloader, self.control_group):
            # gathering block by block would wait for those that have ended
            self._gathers = False
            if self.model_parallel is not None:
                self.model_parallel.release()
                self.model_parallel = self.parallelize(self.lightning_module, training=False)
        return dataloader

    @property
    def sharded(self) -> bool:
        return self.zero_stage > 0 or self._tensor_ranks > 1

    def layout(self) -> dict[str, Any]:
        assert self.mesh is not None
        return {**super().layout(), "pp": self.mesh.sizes.pp, "tp": self.mesh.sizes.tp, "zero_stage": self.zero_stage}

    def audit(self, trainer: Any) -> None:
        super().audit(trainer)
        self.compressed.audit(trainer)
        self._gathers = True
        assert self.mesh is not None
        if self.share_batches and self.mesh.sizes.tp * self.mesh.sizes.pp == 1:
            rank_zero_warn("share_batches=True shares nothing: no two ranks of this layout work on the same samples.")
        audit.audit_callbacks(trainer.callbacks, self.zero_stage, self.mesh.sizes.pp, self.mesh.sizes.tp)
        if self.zero_stage == 3:  # FSDP2 keeps what it gathered for a later backward pass
            for loop in (
                trainer.validate_loop,
                trainer.test_loop,
                trainer.predict_loop,
                trainer.fit_loop.epoch_loop.val_loop,
            ):
                loop.inference_mode = False

    #: Whether what zero_stage=3 shards lies in the memory of the host.
    offloads_parameters = False

    def blocks(self, module: nn.Module) -> list[nn.Module] | None:
        """The modules that zero_stage=3 gathers one at a time; ``None`` to find them."""
        return None if self.pipeline is None else self.pipeline.own_blocks()

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        assert self.mesh is not None and self.lightning_module is not None
        absent = self.pipeline.absent if self.pipeline is not None else frozenset[Tensor]()
        fused = self._fused_names
        exchange = self.compressed.make_exchange(module) if training else None
        if self.zero_stage < 3 or not (training or self._gathers):
            give_room(param for param in module.parameters() if param not in absent)
        if self.zero_stage == 0 or not (training or self._gathers):
            return ReplicatedModel(module, self.mesh, self.reduce_when, training, absent, fused, exchange)
        if self.zero_stage == 3:
            automatic = self.lightning_module.automatic_optimization
            return FullyShardedModel(
                module,
                self.mesh,
                self.reduce_when,
                training,
                absent,
                fused,
                automatic=automatic,
                blocks=self.blocks(module),
                of_stage=self.pipeline is not None,
                offload=self.offloads_parameters,
            )
        return ShardedOptimizerModel(
            module, self.mesh, self.reduce_when, training, absent, fused, exchange, keep_buffers=self.zero_stage == 1
        )

    def _attach_optimizers(self) -> None:
        super()._attach_optimizers()
        self.compressed.attach_optimizers()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.compressed.after_step(optimizer)
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.compressed.begin_window()
        return super().training_step(*args, **kwargs)

    def clip_norm(self, params: Iterable[Tensor], max_norm: float) -> None:
        self.compressed.check_clipping()
        super().clip_norm(params, max_norm)

    def clip_value(self, params: Iterable[Tensor], limit: float) -> None:
        self.compressed.check_clipping()
        super().clip_value(params, limit)

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), **self.compressed.extra_state()}

    def load_extra_state(self, saved: Extra) -> None:
        super().load_extra_state(saved)
        self.compressed.load_extra_state(saved)
