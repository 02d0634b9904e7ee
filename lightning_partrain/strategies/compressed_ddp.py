"""``ddp_int8``, ``ddp_powersgd``, ``ddp_topk`` and the others: data parallelism whose gradients are compressed on their way."""

from __future__ import annotations

from datetime import timedelta

from lightning_partrain.mesh import ParallelSizes
from lightning_partrain.strategies.checkpoints import Format
from lightning_partrain.strategies.hybrid import Hybrid3DStrategy
from lightning_partrain.strategies.initial_values import Pretrained
from lightning_partrain.sync.compression import Compression
from lightning_partrain.sync.compressors.base import Compressor


class CompressedDDPStrategy(Hybrid3DStrategy):
    """Every rank holds the whole model, as with ``ddp``; the gradients that they average are compressed, on CPUs and GPUs.

    Small parameters, and with most compressors those of one dimension and embeddings, are averaged exactly. What was not sent is added to the next gradient (error
    feedback) where the compressor needs it, and is part of checkpoints.

    Args:
        compressor: a name (``bf16``, ``fp16``, ``int8``, ``int4``, ``powersgd``, ``topk``, ``randomk``, ``threshold``, ``sketch``, ``signsgd``,
            ``onebit``, ``adasum``), ``auto``, which measures and chooses, or an object of :mod:`lightning_partrain.sync.compressors` with options of its own, such as
            ``TopK(density=0.001)``.
        start_step: so many backward passes that average gradients are exact before compression begins; skipped steps do not count.
        error_feedback: add what was not sent to the next gradient; ``None``: where the compressor needs it. Costs memory of the size of
            the gradients.
        hierarchical: compress between nodes only; inside of a node, average as it is.
        min_compression_numel: smaller parameters are averaged exactly.
        dense_parameters: names of further ones, in which ``*`` stands for any part, such as ``["lm_head.*"]``.
        bucket_mb: so many MiB of gradients travel together, while the backward pass goes on.
        process_group_backend, timeout, checkpoint_format, async_save, load_pretrained: see :class:`Hybrid3DStrategy`.

    Raises:
        ValueError: for a compressor or an option that cannot be.
    """

    def __init__(
        self,
        compressor: str | Compressor = "bf16",
        start_step: int = 0,
        error_feedback: bool | None = None,
        hierarchical: bool = False,
        min_compression_numel: int = 1024,
        dense_parameters: list[str] | None = None,
        bucket_mb: float = 4.0,
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800.0,
        checkpoint_format: Format = "full",
        async_save: bool = False,
        load_pretrained: Pretrained = None,
    ) -> None:
        if not isinstance(hierarchical, bool):
            raise ValueError(f"hierarchical must be True or False, not {hierarchical!r}.")
        super().__init__(
            zero_stage=0,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            replica_sync=Compression(
                compressor, start_step, error_feedback, min_compression_numel, dense_parameters, bucket_mb
            ),
            process_group_backend=process_group_backend,
            timeout=timeout,
            checkpoint_format=checkpoint_format,
            async_save=async_save,
            load_pretrained=load_pretrained,
        )
        self.compressor, self.start_step, self.error_feedback = compressor, start_step, error_feedback
        self.hierarchical, self.min_compression_numel = hierarchical, min_compression_numel
        self.dense_parameters, self.bucket_mb = dense_parameters, bucket_mb

    def sizes(self, world_size: int) -> ParallelSizes:
        if self.hierarchical and self.num_nodes == 1 and world_size > 1:
            raise ValueError(
                "hierarchical=True compresses between nodes only, but there is one: num_nodes=1. Set num_nodes, or leave hierarchical out."
            )
        inside = world_size // self.num_nodes if self.hierarchical else 1
        return ParallelSizes(dp_replicate=world_size // inside, dp_shard=inside)
