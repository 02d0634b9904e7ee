"""``zero_1``, ``zero_2``, ``zero_3``, ``zero_3_offload``: the data-parallel part of ``hybrid_3d`` by its well-known numbers."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from torch import nn

from lightning_partrain import compat
from lightning_partrain.mesh import ParallelSizes
from lightning_partrain.parallel.names import matching, outermost
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel
from lightning_partrain.strategies import audit_zero
from lightning_partrain.strategies.checkpoints import Format
from lightning_partrain.strategies.hybrid import Hybrid3DStrategy
from lightning_partrain.strategies.initial_values import Pretrained

Offload = Literal["none", "optimizer", "all"]


class ZeroStrategy(Hybrid3DStrategy):
    """ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) over all ranks, with the numbers of one process on the same global batch.

    Args:
        zero_stage: what is sharded: 1 the optimizer state, 2 gradients as well, 3 parameters as well.
        offload: what lies in the memory of the host instead of the GPU's: ``"none"``; ``"optimizer"``, the optimizer's state, whose step is
            then done by the host (element-wise optimizers of torch); ``"all"``, with ``zero_stage=3``, shards of parameters and
            gradients, too.
        replicate_size: how many replicas the ranks form; what ``zero_stage`` shards is sharded inside each (HSDP), such as a node.
        wrap: with ``zero_stage=3``, the modules that are gathered one at a time: ``"auto"`` (the repeated layers), or their names, in which
            ``*`` stands for any part, such as ``["model.layers.*"]``; of modules inside each other that one pattern names, the outer one counts.
        reduce: average gradients once per accumulation ``"window"``, or after every ``"micro_batch"`` (least memory).
        process_group_backend, timeout, checkpoint_format, async_save, load_pretrained: see :class:`Hybrid3DStrategy`.

    Raises:
        ValueError: for a stage, offload or pattern that cannot be.
    """

    def __init__(
        self,
        zero_stage: Literal[1, 2, 3] = 1,
        offload: Offload = "none",
        replicate_size: int = 1,
        wrap: Literal["auto"] | list[str] = "auto",
        reduce: Reduce = "window",
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800.0,
        checkpoint_format: Format = "full",
        async_save: bool = False,
        load_pretrained: Pretrained = None,
    ) -> None:
        if zero_stage not in (1, 2, 3) or isinstance(zero_stage, bool):
            raise ValueError(
                f"zero_stage={zero_stage!r} does not exist. The stages are 1 (optimizer state sharded), 2 (and gradients) and 3 (and "
                "parameters); with nothing sharded: strategy='ddp', or hybrid_3d with zero_stage=0."
            )
        if offload not in ("none", "optimizer", "all"):
            raise ValueError(f"offload={offload!r} does not exist. Choose 'none', 'optimizer' or 'all'.")
        if offload == "all" and zero_stage < 3:
            raise ValueError(
                f"offload='all' keeps parameters on the host between their uses, but with zero_stage={zero_stage} every rank uses all of "
                "them all the time. Use zero_stage=3, or offload='optimizer'."
            )
        patterns = isinstance(wrap, list) and bool(wrap) and all(isinstance(each, str) and each for each in wrap)
        if wrap != "auto" and not patterns:
            raise ValueError(
                f"wrap must be 'auto' or a list of names of modules, in which * stands for any part, such as ['model.layers.*'], not {wrap!r}."
            )
        if wrap != "auto" and zero_stage < 3:
            raise ValueError(
                f"wrap says which modules are gathered one at a time, but with zero_stage={zero_stage} none is. Use zero_stage=3."
            )
        super().__init__(
            data_parallel_replicate_size=replicate_size,
            zero_stage=zero_stage,
            reduce=reduce,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            process_group_backend=process_group_backend,
            timeout=timeout,
            checkpoint_format=checkpoint_format,
            async_save=async_save,
            load_pretrained=load_pretrained,
        )
        self.offload, self.wrap = offload, wrap

    def sizes(self, world_size: int) -> ParallelSizes:
        try:
            return super().sizes(world_size)
        except ValueError as error:
            raise ValueError(str(error).replace("data_parallel_replicate_size", "replicate_size")) from None

    def _configure_launcher(self) -> None:
        if self.offload != "none" and self.root_device.type == "cpu":
            raise ValueError(
                f"offload={self.offload!r} moves what a GPU has no room for to the memory of the host, where ranks on CPUs have everything "
                f"already: there is nothing to offload to. Use offload='none' (the name zero_{self.zero_stage}), or accelerator='gpu'."
            )
        super()._configure_launcher()

    @property
    def offloads_parameters(self) -> bool:  # type: ignore[override]
        return self.offload == "all"

    def blocks(self, module: nn.Module) -> list[nn.Module] | None:
        if self.wrap == "auto":
            return None
        names = {name: each for name, each in module.named_modules() if name}
        found = {name for pattern in self.wrap for name in outermost(matching("wrap", pattern, module, names))}
        chosen = [name for name in names if name in found and any(True for _ in names[name].parameters())]
        for name in chosen:
            audit_zero.audit_wrapped(module, name)
        return [names[name] for name in reversed(chosen)]  # inner modules first, as fully_shard wants it

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        layout = super().parallelize(module, training)
        layout.host_step = self.offload == "optimizer"
        return layout

    def _attach_optimizers(self) -> None:
        if self.offload == "optimizer":
            for optimizer in self.optimizers:
                audit_zero.audit_offload(compat.unwrap_optimizer(optimizer))
        super()._attach_optimizers()
