"""Stages 1 and 2: every rank holds the whole parameters, but only its rows of the optimizer state (and gradients).

For each parameter there is a DTensor that is cut by rows, ``Shard(0)``, and whose local part is a view of this rank's rows
of the whole parameter. The optimizer is given the DTensors. The backward pass leaves the mean of this rank's rows in their
``grad``; the optimizer updates the rows in place; one all-gather brings the rows of the others. Together that is the
traffic of one all-reduce, for 1/N of the optimizer's work and memory.

Between the last backward pass of a window and the end of the optimizer's step the module shows the DTensors in place of its
parameters, as FSDP2 does, so that hooks, clipping and norms see the averaged gradients.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_partrain import compat
from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.optimizer import (
    after_step,
    as_dtensor,
    is_elementwise,
    step_on_local_rows,
)
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel
from lightning_partrain.sync.reducer import Bucket, GradientReducer

TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


class ShardedOptimizerModel(ReplicatedModel):
    """``zero_stage=1`` and ``zero_stage=2``; see :class:`ReplicatedModel` for the arguments.

    Stage 1 keeps the buckets in which gradients are collected, stage 2 gives their memory back as soon as they are reduced.
    Parameters without dimensions cannot be cut and stay as in stage 0.
    """

    def __init__(
        self, module: nn.Module, mesh: ParallelMesh, reduce: Reduce, training: bool = True, *, keep_buffers: bool
    ) -> None:
        self._keep_buffers = keep_buffers
        self._shard_rank, self._shards = mesh.rank("dp_shard"), mesh.size("dp_shard")
        self._owners = [
            (owner, key, param)
            for owner in module.modules()
            for key, param in owner._parameters.items()
            if param is not None
        ]
        self._shard_of = {p: self._row_shard(p, mesh) for p in module.parameters() if p.ndim} if training else {}
        self._by_name = dict(module.named_parameters())
        self._showing_shards = False
        super().__init__(module, mesh, reduce, training)
        if training:
            for owner in module.modules():
                owner.zero_grad = types.MethodType(self._module_zero_grad, owner)  # type: ignore[method-assign]
            for name in TOGGLES:
                setattr(module, name, self._toggle(getattr(module, name)))

    def _make_reducer(self) -> GradientReducer:
        replicas = self.mesh.group("dp_replicate") if self.mesh.size("dp_replicate") > 1 else None
        return GradientReducer(
            self.module.named_parameters(),
            self.mesh.group("dp_shard"),
            replicas,
            cut=True,
            keep_buffers=self._keep_buffers,
            deliver=self._deliver,
        )

    def _row_shard(self, param: nn.Parameter, mesh: ParallelMesh) -> nn.Parameter:
        placements = [Shard(0)] if mesh.shard_mesh.ndim == 1 else [Replicate(), Shard(0)]
        shard = DTensor.from_local(
            self._rows(param.detach(), self._shard_rank),
            mesh.shard_mesh,
            placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        return nn.Parameter(shard, requires_grad=param.requires_grad)

    def _rows(self, full: Tensor, rank: int) -> Tensor:
        chunk = -(-full.shape[0] // self._shards)
        return full[min(rank * chunk, full.shape[0]) : (rank + 1) * chunk]

    @torch.no_grad()
    def _deliver(self, name: str, mean: Tensor) -> None:
        shard = self._shard_of[self._by_name[name]]
        local = local_tensor(shard)
        rows = mean[: local.numel()].view(local.shape)
        if shard.grad is None:
            shard.grad = as_dtensor(rows, shard)
        else:
            local_tensor(shard.grad).add_(rows)

    # -- which parameters the module shows ------------------------------------------------------------------------------

    def _show(self, shards: bool) -> None:
        if shards != self._showing_shards:
            for owner, key, param in self._owners:
                if param in self._shard_of:
                    shard = self._shard_of[param]
                    if shards:
                        shard.requires_grad_(param.requires_grad)
                    else:
                        param.requires_grad_(shard.requires_grad)
                    owner._parameters[key] = shard if shards else param
            self._showing_shards = shards

    def before_forward(self) -> None:
        self._show(shards=False)

    def begin_backward(self, last_of_window: bool) -> None:
        self._show(shards=False)
        super().begin_backward(last_of_window)

    def end_backward(self, last_of_window: bool, automatic: bool) -> None:
        super().end_backward(last_of_window, automatic)
        if last_of_window and automatic:
            self._show(shards=True)

    def _toggle(self, method: Callable[..., None]) -> Callable[..., None]:
        """Lightning toggles the optimizers' parameters, which are the shards; the forward pass uses the whole ones."""

        def toggle(optimizer: Any) -> None:
            method(optimizer)
            for param, shard in self._shard_of.items():
                param.requires_grad_(shard.requires_grad)

        return toggle

    # -- optimizers ------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: self._shard_of.get(param, param) for name, param in self._by_name.items()}

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
        if is_elementwise(optimizer):
            step_on_local_rows(optimizer)
        after_step(optimizer, lambda: self._gather(optimizer))
        for each in (optimizer, wrapper):
            each.zero_grad = self._zero_grad_of(optimizer)

    def _zero_grad_of(self, optimizer: torch.optim.Optimizer) -> Any:
        def zero_grad(set_to_none: bool = True) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            type(optimizer).zero_grad(optimizer, set_to_none)
            plain = {shard: param for param, shard in self._shard_of.items()}
            self._discard(plain[p] for p in params if p in plain)

        return zero_grad

    def _module_zero_grad(self, owner: nn.Module, set_to_none: bool = True) -> None:
        type(owner).zero_grad(owner, set_to_none)
        params = [param for module in owner.modules() for param in module._parameters.values() if param is not None]
        plain = {shard: param for param, shard in self._shard_of.items()}
        mine = [plain.get(p, p) for p in params]
        for param in mine:
            if param in self._shard_of:
                self._shard_of[param].grad = None
        self._discard(mine)

    def _discard(self, params: Iterable[nn.Parameter]) -> None:
        assert self.reducer is not None
        self.reducer.discard(p for p in params if p in self._shard_of)

    @torch.no_grad()
    def _gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the rows that other ranks updated, bucket by bucket."""
        assert self.reducer is not None
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        pending = []
        for bucket in self.reducer.buckets:
            if bucket.cut and any(self._shard_of[slot.param] in stepped for slot in bucket.slots):
                mine = torch.cat([self._padded(self._rows(s.param, self._shard_rank), s.columns) for s in bucket.slots])
                everyone = mine.new_empty(self._shards * mine.numel())
                work = compat.all_gather_single(everyone, mine, group=self.mesh.group("dp_shard"), async_op=True)
                pending.append((bucket, everyone.view(self._shards, -1), work))
        for bucket, everyone, work in pending:
            work.wait()
            self._unpack(bucket, everyone)
        self._show(shards=False)

    @staticmethod
    def _padded(rows: Tensor, numel: int) -> Tensor:
        flat = rows.reshape(-1)
        return flat if flat.numel() == numel else torch.cat([flat, flat.new_zeros(numel - flat.numel())])

    def _unpack(self, bucket: Bucket, everyone: Tensor) -> None:
        targets, sources = [], []
        for slot in bucket.slots:
            for rank in range(self._shards):
                if rank != self._shard_rank:
                    rows = self._rows(slot.param.detach(), rank)
                    targets.append(rows)
                    sources.append(everyone[rank, slot.offset : slot.offset + rows.numel()].view(rows.shape))
        torch._foreach_copy_(targets, sources)

    # -- whole again -----------------------------------------------------------------------------------------------------

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        self._show(shards=False)
        return super().state_dict(keep)

    def release(self) -> None:
        self._show(shards=False)
        for owner in self.module.modules():
            owner.__dict__.pop("zero_grad", None)
        for name in TOGGLES:
            self.module.__dict__.pop(name, None)
        super().release()

    def state_tensors(self) -> dict[str, list[Tensor]]:
        states = super().state_tensors()
        states["parameters"] = [p.detach() for p in self._by_name.values()]
        shards = [s for s in self._shard_of.values() if s.grad is not None]
        whole = [p for p in self._by_name.values() if p.grad is not None]
        states["gradients"] = [local_tensor(p.grad) for p in (*whole, *shards) if p.grad is not None]
        return states
