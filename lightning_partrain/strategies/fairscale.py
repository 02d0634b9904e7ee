"""``zero_1_fairscale``, ``zero_2_fairscale``: ZeRO by FairScale's engine, which ended in 2022; see ``zero_1`` and ``zero_2``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_partrain import compat
from lightning_partrain.checkpoint import full
from lightning_partrain.mesh import ParallelSizes
from lightning_partrain.numerics import StageNorm
from lightning_partrain.parallel.hollow import give_room
from lightning_partrain.parallel.pipeline.state import collect
from lightning_partrain.parallel.replicate import ReplicatedModel
from lightning_partrain.strategies.base import MeshStrategy
from lightning_partrain.strategies.checkpoints import Format
from lightning_partrain.strategies.initial_values import Pretrained


class FairScaleZeroStrategy(MeshStrategy):
    """ZeRO with FairScale over all ranks, with the numbers of one process on the same global batch.

    Each parameter, whole, belongs to one rank. The stages of :class:`ZeroStrategy` cut every parameter instead, need no further package,
    and are developed on; this one is for those who compare, or who use an optimizer that has to see whole matrices.

    Args:
        zero_stage: 1, the optimizer state is sharded (``OSS``); 2, gradients as well (``ShardedDataParallel``).
        process_group_backend, timeout, checkpoint_format, async_save, load_pretrained: see :class:`Hybrid3DStrategy`.

    Raises:
        ValueError: for a stage that does not exist.
        ModuleNotFoundError: without FairScale.
    """

    def __init__(
        self,
        zero_stage: Literal[1, 2] = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800.0,
        checkpoint_format: Format = "full",
        async_save: bool = False,
        load_pretrained: Pretrained = None,
    ) -> None:
        super().__init__(process_group_backend, timeout, checkpoint_format, async_save, load_pretrained)
        if zero_stage not in (1, 2) or isinstance(zero_stage, bool):
            raise ValueError(
                f"zero_stage={zero_stage!r} does not exist here: FairScale ends at stage 2. Its stages are 1 (optimizer state sharded) and 2 "
                "(and gradients); for sharded parameters there is strategy='zero_3'."
            )
        if find_spec("fairscale") is None:
            raise ModuleNotFoundError(
                "FairScaleZeroStrategy needs FairScale, which is not installed: pip install 'lightning-partrain[fairscale]'. Without it: zero_1, "
                "zero_2."
            )
        self.zero_stage = zero_stage
        self._owners: Mapping[Tensor, int] | None = None  # also after the run: optimizers keep their rank's state

    def sizes(self, world_size: int) -> ParallelSizes:
        return ParallelSizes(dp_replicate=world_size)

    def layout(self) -> dict[str, Any]:
        return {**super().layout(), "zero_stage": self.zero_stage}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Prediction keeps every sample: ranks whose last batch comes earlier end earlier."""
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.predicting:
            return super().process_dataloader(dataloader)
        self.seed_workers(dataloader)
        return dataloader

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        from lightning_partrain.parallel.fairscale import FairScaleModel

        assert self.mesh is not None
        give_room(module.parameters())
        return FairScaleModel(module, self.mesh, self.zero_stage, training)

    def _attach_optimizers(self) -> None:
        from lightning_partrain.parallel.fairscale import FairScaleModel

        for optimizer in self.optimizers:
            if isinstance(compat.unwrap_optimizer(optimizer), torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS works on one vector of all gradients, but FairScale lets each rank step on the parameters that it owns. Use "
                    "strategy='hybrid_3d' with zero_stage=0, or another optimizer."
                )
        super()._attach_optimizers()
        assert isinstance(self.model_parallel, FairScaleModel) and self.mesh is not None
        self.model_parallel.attached()
        self._owners = self.model_parallel.owners
        if self.zero_stage == 2:  # each rank has the gradients of what it owns, and no others
            dtype = torch.float32
            for param in self._owners:
                dtype = torch.promote_types(dtype, param.dtype)
            self._stage_norm = StageNorm(self.mesh.data_parallel_group, lambda param: True, dtype, self.root_device)

    def _homes(self, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """Index of a parameter in ``optimizer`` -> the rank that owns it."""
        assert self._owners is not None
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {index: self._owners.get(param, 0) for index, param in enumerate(params)}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self.checkpoint_format == "sharded" or self._gather_group is None or self._owners is None:
            return super().optimizer_state(optimizer)
        optimizer = compat.unwrap_optimizer(optimizer)
        own = full.full_optimizer_state(optimizer)
        state = collect(self._homes(optimizer), own.get("state", {}), self._gather_group)
        return {**own, "state": state} if "state" in own else own

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Each rank takes what it owns."""
        if "state" in saved:
            homes = self._homes(optimizer)
            here = [index for index in saved["state"] if homes.get(int(index)) == self.global_rank]
            saved = {**saved, "state": {index: saved["state"][index] for index in here}}
        super().load_optimizer_state(optimizer, saved)

    def teardown(self) -> None:
        super().teardown()
        self._stage_norm = None
