"""Stages 1 and 2: every rank holds the whole parameters, but only its rows of the optimizer state (and gradients).

For each parameter there is a DTensor that is cut by rows, ``Shard(0)``, and whose local part is a view of this rank's rows
of the whole parameter. The optimizer steps on the DTensors. The backward pass leaves the mean of this rank's rows in their
``grad``; the optimizer updates the rows in place; one all-gather brings the rows of the others. Together that is the
traffic of one all-reduce, for 1/N of the optimizer's work and memory.

Between the last backward pass of a window and the end of the optimizer's step the module and its optimizers show the
DTensors in place of the parameters, as FSDP2 does, so that hooks, clipping and norms see the averaged gradients. At all
other times both show the plain parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_partrain import compat
from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.numerics import as_dtensor, local_tensor
from lightning_partrain.parallel.optimizer import around_step, shard_state, swap_parameters
from lightning_partrain.parallel.placement import Fused, tensor_axis
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel
from lightning_partrain.sync.exchange import CompressedExchange
from lightning_partrain.sync.reducer import Bucket, GradientReducer


@dataclass
class _GatherPlan:
    """Views of parameters, and where in ``buffer``, (shards, width), their rows travel."""

    buffer: Tensor
    own: list[Tensor] = field(default_factory=list)
    outgoing: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    incoming: list[Tensor] = field(default_factory=list)


class ShardedOptimizerModel(ReplicatedModel):
    """``zero_stage=1`` and ``zero_stage=2``; see :class:`ReplicatedModel` for the arguments.

    Stage 1 keeps the buckets in which gradients are collected, stage 2 gives their memory back as soon as they are reduced.
    Parameters without dimensions cannot be cut and stay as in stage 0.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        reduce: Reduce,
        training: bool = True,
        absent: Collection[Tensor] = frozenset(),
        fused: Mapping[str, Fused] | None = None,
        exchange: CompressedExchange | None = None,
        *,
        keep_buffers: bool,
    ) -> None:
        self._keep_buffers = keep_buffers
        self._shard_rank, self._shards = mesh.rank("dp_shard"), mesh.size("dp_shard")
        self._owners = [
            (owner, key, param)
            for owner in module.modules()
            for key, param in owner._parameters.items()
            if param is not None
        ]
        self._shard_of: dict[Tensor, nn.Parameter] = {}
        if training:
            self._shard_of = {p: self._row_shard(p, mesh) for p in module.parameters() if p.ndim and p not in absent}
        self._by_name = dict(module.named_parameters())
        self._memory = {param: local_tensor(param).data_ptr() for param in self._shard_of}
        self._whole_of: dict[Tensor, Tensor] = {shard: param for param, shard in self._shard_of.items()}
        self._showing_shards = False
        self._views: dict[Bucket, tuple[Tensor, list[DTensor]]] = {}
        self._plans: dict[Bucket, _GatherPlan] = {}
        super().__init__(module, mesh, reduce, training, absent, fused, exchange)
        if training:
            self._watch_zero_grad()

    def _make_reducer(self) -> GradientReducer:
        replicated = self.mesh.size("dp_replicate") > 1 and self.exchange is None
        replicas = self.mesh.group("dp_replicate") if replicated else None
        return GradientReducer(
            self._present(),
            self.mesh.group("dp_shard"),
            replicas,
            cut=True,
            keep_buffers=self._keep_buffers,
            target=self._target,
            deliver=self._deliver,
            exchange=self.exchange,
        )

    def _row_shard(self, param: nn.Parameter, mesh: ParallelMesh) -> nn.Parameter:
        placements: list[Any] = [Shard(0)]
        device_mesh = mesh.shard_mesh
        axis = tensor_axis(param)
        if axis is not None:
            assert isinstance(param, DTensor)
            device_mesh, along = mesh.shard_and_tensor_mesh, param.placements[axis]
            rows_too = along.is_shard(0)  # the rows of a rank's part are no block of rows of the whole
            placements = [compat.StridedShard(0, split_factor=mesh.size("tp")) if rows_too else Shard(0), along]
        if mesh.size("dp_replicate") > 1:
            placements = [Replicate(), *placements]
        shard = DTensor.from_local(
            self._rows(local_tensor(param), self._shard_rank),
            device_mesh,
            placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        return nn.Parameter(shard, requires_grad=param.requires_grad)

    def _rows(self, full: Tensor, rank: int) -> Tensor:
        chunk = -(-full.shape[0] // self._shards)
        return full[min(rank * chunk, full.shape[0]) : (rank + 1) * chunk]

    def _target(self, bucket: Bucket) -> Tensor | None:
        """The gradients' own memory, unless it holds some already."""
        flat, _ = self._gradient_views(bucket)
        return flat if all(self._shard_of[slot.param].grad is None for slot in bucket.slots) else None

    @torch.no_grad()
    def _deliver(self, bucket: Bucket, mean: Tensor, used: list[bool]) -> None:
        """Make ``mean``, this rank's row of ``bucket``, the gradient of the shards, or add it to what they have."""
        target, grads = self._gradient_views(bucket)
        shards = [self._shard_of[slot.param] for slot in bucket.slots]
        if mean is target:
            for shard, grad, any_rank in zip(shards, grads, used, strict=True):
                shard.grad = grad if any_rank else None
            return
        for slot, shard, grad, any_rank in zip(bucket.slots, shards, grads, used, strict=True):
            if not any_rank:
                continue
            local = local_tensor(grad)
            rows = mean[slot.offset : slot.offset + local.numel()].view(local.shape)
            if shard.grad is None:
                local.copy_(rows)
                shard.grad = grad
            else:
                local_tensor(shard.grad).add_(rows)

    def _gradient_views(self, bucket: Bucket) -> tuple[Tensor, list[DTensor]]:
        """A flat tensor for this rank's row of ``bucket``, and views of it as the shards' gradients.

        They are made once: building a DTensor takes longer than copying a small gradient.
        """
        views = self._views.get(bucket)
        if views is None:
            flat = torch.empty(bucket.width, dtype=bucket.dtype, device=bucket.device)
            grads = []
            for slot in bucket.slots:
                shard = self._shard_of[slot.param]
                local = local_tensor(shard)
                grads.append(as_dtensor(flat[slot.offset : slot.offset + local.numel()].view(local.shape), shard))
            views = self._views[bucket] = (flat, grads)
        return views

    # -- which parameters the module shows ------------------------------------------------------------------------------

    def _show(self, shards: bool) -> None:
        """Let the module and the optimizers show the shards, or the whole parameters."""
        if shards == self._showing_shards:
            return
        self._showing_shards = shards
        new: Mapping[Tensor, Tensor] = self._shard_of if shards else self._whole_of
        for old, param in new.items():
            param.requires_grad_(old.requires_grad)
        for owner, key, param in self._owners:
            if param in self._shard_of:
                owner._parameters[key] = self._shard_of[param] if shards else param
        for optimizer in self._optimizers:
            swap_parameters(optimizer, new)

    def before_forward(self) -> None:
        self._show(shards=False)

    def begin_backward(self, last_of_window: bool) -> None:
        self._show(shards=False)
        self._check_memory()
        super().begin_backward(last_of_window)

    def _check_memory(self) -> None:
        """
        Raises:
            RuntimeError: for a parameter that has other memory than the rows that the optimizer updates.
        """
        for param, pointer in self._memory.items():
            if local_tensor(param).data_ptr() != pointer:
                name = next(name for name, each in self._by_name.items() if each is param)
                raise RuntimeError(
                    f"{name!r} was given other memory during the run (param.data = ...), which the optimizer would not update. Write into it: "
                    "param.data.copy_(...)."
                )

    def end_backward(self, last_of_window: bool, automatic: bool) -> None:
        super().end_backward(last_of_window, automatic)
        if last_of_window and automatic:
            self._show(shards=True)

    # -- optimizers ------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {n: self._shard_of.get(p, p) for n, p in self._by_name.items() if p not in self.absent}

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._by_name)

    def stepped(self, param: Tensor) -> Tensor:
        return self._shard_of.get(param, param)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
        self._watch_zero_grad(optimizer, wrapper)
        shard_state(optimizer, self._shard_of)
        rows = self._local_rows(optimizer)

        def before() -> None:
            self._show(shards=True)
            if rows is not None:
                rows.enter()

        def after() -> None:
            if rows is not None:
                rows.leave()
            self._gather(optimizer)

        self._handles += around_step(optimizer, before, after)

    def _forget(self, params: Iterable[Tensor]) -> None:
        assert self.reducer is not None
        whole = [self._whole_of.get(p, p) for p in params]
        for param in whole:
            if param in self._shard_of:
                self._shard_of[param].grad = None
        self.reducer.discard(whole)

    @torch.no_grad()
    def _gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the rows that other ranks updated, bucket by bucket."""
        assert self.reducer is not None
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        pending = []
        for bucket in self.reducer.buckets:
            if bucket.cut and any(self._shard_of[slot.param] in stepped for slot in bucket.slots):
                plan = self._plan(bucket)
                torch._foreach_copy_(plan.outgoing, plan.own)
                pending.append((plan, self._exchange(plan.buffer)))
        for plan, works in pending:
            for work in works:
                work.wait()
            if plan.incoming:
                torch._foreach_copy_(plan.others, plan.incoming)
        self._show(shards=False)

    def _exchange(self, buffer: Tensor) -> list[Any]:
        """Start to fill ``buffer``, (shards, width), of which this rank has written its own row."""
        group, mine = self.mesh.group("dp_shard"), buffer[self._shard_rank]
        if dist.get_backend(group) != "gloo":
            return [compat.all_gather_single(buffer.view(-1), mine, group=group, async_op=True)]
        works = []  # gloo's all-gather copies everything in and out once more
        for offset in range(1, self._shards):
            to, source = (self._shard_rank + offset) % self._shards, (self._shard_rank - offset) % self._shards
            works.append(dist.isend(mine, group=group, group_dst=to))
            works.append(dist.irecv(buffer[source], group=group, group_src=source))
        return works

    def _plan(self, bucket: Bucket) -> _GatherPlan:
        """Stage 1 gathers in the bucket, which is idle after the reduction, through views that are made once."""
        if not self._keep_buffers or any(slot.filled for slot in bucket.slots):
            buffer = torch.empty((bucket.shards, bucket.width), dtype=bucket.dtype, device=bucket.device)
            return self._make_plan(bucket, buffer)
        if bucket not in self._plans:
            self._plans[bucket] = self._make_plan(bucket, bucket.allocate())
        return self._plans[bucket]

    def _make_plan(self, bucket: Bucket, buffer: Tensor) -> _GatherPlan:
        plan = _GatherPlan(buffer)
        for slot in bucket.slots:
            for rank in range(self._shards):
                rows = self._rows(local_tensor(slot.param), rank)
                place = buffer[rank, slot.offset : slot.offset + rows.numel()].view(rows.shape)
                mine = rank == self._shard_rank
                (plan.own if mine else plan.others).append(rows)
                (plan.outgoing if mine else plan.incoming).append(place)
        return plan

    # -- whole again -----------------------------------------------------------------------------------------------------

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        self._show(shards=False)
        return super().state_dict(keep)

    def load_state_dict(
        self, names: Collection[str], get: Callable[[str], Any], strict: bool = True, plainly: bool = False
    ) -> None:
        self._show(shards=False)
        super().load_state_dict(names, get, strict, plainly)

    def release(self, whole: bool = True) -> None:
        self._show(shards=False)
        self._views.clear()
        self._plans.clear()
        super().release(whole)

    def state_tensors(self) -> dict[str, list[Tensor]]:
        states = super().state_tensors()
        states["parameters"] = [local_tensor(p) for p in self._by_name.values() if p not in self.absent]
        whole = [local_tensor(p.grad) for p in self._by_name.values() if p.grad is not None]
        states["gradients"] = [*whole, *(flat for flat, _ in self._views.values())]  # kept from step to step
        return states
