"""FairScale's ``OSS`` and ``ShardedDataParallel``: each parameter belongs, whole, to one rank, which alone keeps its optimizer state.

The optimizer that the user built stays the one that schedulers and Lightning hold. While it steps, it sees the gradients of this rank's
parameters only; then ``OSS``, which has dealt the parameters out and laid those of each rank side by side, broadcasts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.parallel.fairscale_reduce import GradientsToOwners, Shard
from lightning_partrain.parallel.optimizer import around_step
from lightning_partrain.parallel.replicate import ReplicatedModel


@contextmanager
def _requiring_grad(params: Iterable[Tensor]) -> Iterator[None]:
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


class FairScaleModel(ReplicatedModel):
    """``zero_stage=1`` with OSS (gradients are averaged as in stage 0), ``zero_stage=2`` with ShardedDataParallel in addition.

    Args:
        module, mesh, training: see :class:`ReplicatedModel`; all ranks are data-parallel.
        zero_stage: 1 or 2.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, zero_stage: int, training: bool = True) -> None:
        self.zero_stage = zero_stage
        self.owners: dict[Tensor, int] = {}
        self._shards: list[Shard] = []
        self._hidden: dict[Tensor, Tensor | None] = {}
        self._rank = mesh.data_parallel_rank
        self.sharded: GradientsToOwners | None = None
        super().__init__(module, mesh, "window", training and zero_stage == 1)
        self.training = training
        if training and zero_stage == 2:
            self._watch_zero_grad()

    # -- who owns what -------------------------------------------------------------------------------------------------

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
        if self.zero_stage == 2:
            self._watch_zero_grad(optimizer, wrapper)
        self._deal_out(param for group in optimizer.param_groups for param in group["params"])
        for param in [p for p in optimizer.state if self.owners.get(p) != self._rank]:  # some make it at once
            del optimizer.state[param]
        self._handles += around_step(
            optimizer, lambda: self._hide_gradients(optimizer), lambda: self._broadcast(optimizer)
        )

    def attached(self) -> None:
        """After all optimizers: what none of them holds has an owner, too, should one take it up or a norm count it."""
        self._deal_out(self.module.parameters())
        if self.zero_stage == 2 and self._shards:
            self.sharded = GradientsToOwners(self.module, self._shards)
            self._refresh(self._shards)

    def _deal_out(self, params: Iterable[nn.Parameter]) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for param in dict.fromkeys(params):
            if param not in self.owners:
                alike.setdefault((param.dtype, param.device), []).append(param)
        for each in alike.values():
            shard = Shard(each)
            self._shards.append(shard)
            self.owners.update(shard.owners)

    def _follow(self) -> None:
        """Parameters may have been unfrozen, or given other memory."""
        stale = [shard for shard in self._shards if shard.is_stale()]
        if stale:
            self._refresh(stale)

    def _refresh(self, shards: list[Shard]) -> None:
        placed = (param for shard in self._shards for param in shard.broadcast_params())
        with _requiring_grad(placed), torch.enable_grad():  # or FairScale finds no place for its hooks
            if self.sharded is not None:
                shards = self._shards
                self.sharded.refresh_trainable()  # and all its OSS
            else:
                for shard in shards:
                    shard.oss.refresh_trainable()
        for shard in shards:
            shard.note()

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin_backward(self, last_of_window: bool) -> None:
        self._follow()
        super().begin_backward(last_of_window)
        if self.sharded is not None:
            self.sharded.begin(last_of_window)

    def end_backward(self, last_of_window: bool, automatic: bool) -> None:
        super().end_backward(last_of_window, automatic)
        if self.sharded is not None:
            self.sharded.finish()

    def guard(self, inside_step: bool) -> None:
        super().guard(inside_step)
        if self.sharded is not None:
            self.sharded.guard = inside_step

    def _forget(self, params: Iterable[Tensor]) -> None:
        if self.sharded is not None:
            self.sharded.forget(params)

    def _hide_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Optimizers pass over parameters without gradients: those of other ranks."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                if self.owners.get(param) != self._rank:
                    self._hidden[param], param.grad = param.grad, None

    def _broadcast(self, optimizer: torch.optim.Optimizer) -> None:
        for param, grad in self._hidden.items():
            param.grad = grad
        self._hidden = {}
        self._follow()
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        for shard in self._shards:
            if not stepped.isdisjoint(shard.params):
                shard.oss.step()

    # -- whole again ---------------------------------------------------------------------------------------------------

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """See :class:`ReplicatedModel`; with ``keep``, parameters are copied to the host: a file would have FairScale's buffers in it."""
        state = self.module.state_dict()
        if not keep:
            return {}
        copies: dict[tuple[Any, ...], Tensor] = {}  # what is tied stays so
        for name, value in state.items():
            if isinstance(value, Tensor):
                key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
                if key not in copies:
                    copies[key] = value.detach().to("cpu", copy=True)
                state[name] = copies[key]
        return state

    def release(self, whole: bool = True) -> None:
        if self.sharded is not None:
            self.sharded.remove_hooks()
            self.sharded = None
        for shard in self._shards:
            for param in shard.params:
                param.data = param.data.clone()
            shard.oss.buckets.clear()  # which are in reference cycles
        self._shards.clear()
        super().release(whole)

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """See :class:`ReplicatedModel`. The buffers of OSS are the parameters' own memory, and not counted again."""
        states = super().state_tensors()
        if self.sharded is not None:
            states["gradients"] += self.sharded.kept.values()
        return states
