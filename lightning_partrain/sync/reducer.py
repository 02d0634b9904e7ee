"""Averages gradients over the data-parallel ranks while the backward pass is still running.

Gradients are copied into flat buckets, in the order in which the backward pass tends to produce them. As soon as a bucket
and all before it are full, its collective starts; all ranks start them in the same order. A bucket is either averaged whole
(one all-reduce) or cut by rows, each rank receiving the mean of its own rows (one reduce-scatter).

Unlike torch's DDP, parameters that this rank did not use, on a data-dependent branch or because they are toggled off, need
no search through the graph: every parameter carries a flag in the tail of its bucket, and the sum of the flags says whether
any rank used it. Only a rank that missed a parameter has to look at them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.numerics import as_dtensor, local_tensor
from lightning_partrain.sync.compressors.base import Part
from lightning_partrain.sync.lane import Job

#: The first bucket is small, so that communication starts early; the others are as large as those of torch's DDP.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
#: So many reductions run at a time; this bounds the memory for what they receive.
IN_FLIGHT = 2
NOT_AVERAGED = (
    "A gradient was computed inside training_step without manual_backward, so it would not be averaged over "
    "the data-parallel ranks. Call self.manual_backward(loss) in place of loss.backward()."
)


@dataclass
class Slot:
    """One parameter's place in a bucket: `columns` numbers in each of the bucket's rows, from `offset` on.

    With N shards, row r holds the rows `r * chunk` to `(r + 1) * chunk` of the parameter, chunk = ceil(rows / N), as torch
    cuts a DTensor with ``Shard(0)``; what is missing at the end is padding.
    """

    name: str
    param: nn.Parameter
    offset: int
    columns: int
    filled: bool = False
    arrived: bool = False
    view: Tensor | None = None
    gradient: Tensor | None = None  # the view as the parameter's gradient

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.columns)


class Bucket:
    """Gradients of several parameters of one dtype and device in one buffer of shape (shards, width).

    Args:
        params: names and parameters, in the order in which their gradients are expected.
        shards: into how many rows the parameters are cut.
        cut: whether each rank receives its row only; a whole bucket's slots become the parameters' gradients.
        compressed: whether an :class:`Exchange` may compress it.

    Attributes:
        parts: what the parameters are in a row.
    """

    def __init__(
        self, params: list[tuple[str, nn.Parameter]], shards: int, cut: bool, compressed: bool = False
    ) -> None:
        self.shards, self.cut, self.compressed, self.slots = shards, cut, compressed, []
        self.parts: list[Part] = []
        offset = 0
        for name, param in params:
            local = local_tensor(param)
            rows = local.shape[0] if param.ndim else 1
            columns = -(-rows // shards) * (local.numel() // rows if rows else 0)
            self.slots.append(Slot(name, param, offset, columns))
            self.parts.append(Part(name, shape_in_row(param, shards), offset))
            offset += columns
        self.flags_at = offset
        self.width = offset + len(params)
        self.dtype, self.device = params[0][1].dtype, params[0][1].device
        self.buffer: Tensor | None = None
        self.received: Tensor | None = None
        self.work: Job | None = None
        self.launched = self.scale_on_copy = False
        self.averaged = False  # whether what the slots hold is an average, of a pass whose step is still to come
        self.waiting = 0

    @property
    def trainable(self) -> bool:
        return any(slot.param.requires_grad for slot in self.slots)

    def allocate(self) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.zeros((self.shards, self.width), dtype=self.dtype, device=self.device)
            for slot in self.slots:
                if self.cut:
                    slot.view = self.buffer[:, slot.span]
                else:
                    slot.view = self.buffer[0, slot.span].view(local_tensor(slot.param).shape)
                    is_plain = not isinstance(slot.param, DTensor)
                    slot.gradient = slot.view if is_plain else as_dtensor(slot.view, slot.param)
        return self.buffer

    def free(self) -> None:
        self.buffer = None
        for slot in self.slots:
            slot.view = slot.gradient = None

    def put(self, slot: Slot, grad: Tensor, scale: float) -> None:
        """Copy ``scale * grad`` into the slot, or add it when the slot already holds something."""
        if slot.view is None:
            self.allocate()
        target = slot.view
        assert target is not None
        if not self.cut:
            self._put(target, grad, scale, slot.filled)
        elif grad.numel() == target.numel():
            self._put(target, grad.reshape(target.shape), scale, slot.filled)
        elif slot.columns:
            flat = grad.reshape(-1)
            whole = flat.numel() // slot.columns
            head, tail = flat[: whole * slot.columns].view(whole, slot.columns), flat[whole * slot.columns :]
            self._put(target[:whole], head, scale, slot.filled)
            if tail.numel():
                self._put(target[whole, : tail.numel()], tail, scale, slot.filled)
        slot.filled = True

    @staticmethod
    def _put(target: Tensor, source: Tensor, scale: float, add: bool) -> None:
        if add:
            target.add_(source, alpha=scale)
        elif scale == 1.0:
            target.copy_(source)
        else:
            torch.mul(source, scale, out=target)

    def seal(self) -> Tensor:
        """Zero what no gradient came for and write the flags."""
        buffer = self.allocate()
        flags = buffer[:, self.flags_at :]
        flags.fill_(1.0)
        for index, slot in enumerate(self.slots):
            if not slot.filled:
                buffer[:, slot.span].zero_()
                flags[:, index] = 0.0
        return buffer


def shape_in_row(param: Tensor, shards: int) -> torch.Size:
    """Of ``param``, as one of so many shards has it in its row of a bucket; the last ones with padding."""
    local = local_tensor(param)
    return torch.Size((-(-local.shape[0] // shards), *local.shape[1:])) if local.ndim else local.shape


class Exchange(Protocol):
    """What averages a reducer's buckets in its place, over the replicas too."""

    @property
    def bucket_bytes(self) -> int:
        """As large are the buckets."""
        ...

    def takes(self, name: str, shape: torch.Size) -> bool:
        """Whether a parameter, with this shape in a row, may be compressed."""
        ...

    def rebuilt(self, buckets: list[Bucket]) -> None: ...

    def begin(self, buckets: list[Bucket]) -> None: ...

    def launch(self, bucket: Bucket) -> Job: ...

    def wait(self, finish: Callable[[], None]) -> None: ...


def _local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of the gradient; a tensor-parallel one may be a sum that is pending, or placed otherwise."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        if grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        return local_tensor(grad)
    return grad


class GradientReducer:
    """Averages the gradients of ``named_parameters`` over the data-parallel ranks.

    Args:
        named_parameters: all parameters, in the same order on every rank.
        group: the ranks that share the work: all of them for whole buckets, the sharding ranks for cut ones.
        replicate_group: with cut buckets, the replicas over which each rank's rows are averaged as well (HSDP).
        cut: cut the buckets by rows (parameters without dimensions stay whole).
        keep_buffers: keep the buckets' memory between steps (faster) or return it after each reduction (smaller).
        target: for cut buckets, where this rank's means may be written, or ``None``.
        deliver: for cut buckets, called with the bucket, the means of this rank's row of it, and for each slot whether
            any rank had a gradient.
        exchange: averages buckets in the place of this object, over ``group`` and over replicas, by whose number it divides.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        replicate_group: dist.ProcessGroup | None = None,
        *,
        cut: bool = False,
        keep_buffers: bool = True,
        target: Callable[[Bucket], Tensor | None] = lambda _: None,
        deliver: Callable[[Bucket, Tensor, list[bool]], None] = lambda *_: None,
        exchange: Exchange | None = None,
    ) -> None:
        self.named_parameters = list(named_parameters)
        self.group, self.replicate_group = group, replicate_group
        self.cut, self.keep_buffers, self._deliver = cut, keep_buffers, deliver
        self._target, self.exchange = target, exchange
        self.ranks = dist.get_world_size(group)
        self.scale = 1.0 / (self.ranks * (dist.get_world_size(replicate_group) if replicate_group is not None else 1))
        self.all_to_all = dist.get_backend(group) == "gloo"  # its reduce-scatter sends as much as an all-reduce
        self.running = self.sync = self.guard = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._flying: deque[Bucket] = deque()
        self.buckets: list[Bucket] = []
        self.build()

    # -- buckets -------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Between passes: buckets for what has to be averaged by now."""
        self.remove_hooks()
        self.buckets = []
        self._slot_of: dict[Tensor, Slot] = {}
        open_buckets: dict[
            tuple[torch.dtype, torch.device, bool, bool], tuple[list[tuple[str, nn.Parameter]], int]
        ] = {}
        most = BUCKET_BYTES if self.exchange is None else self.exchange.bucket_bytes
        for name, param in reversed(self.named_parameters):
            if not param.requires_grad:
                continue
            cut = self.cut and param.ndim > 0
            shape = shape_in_row(param, self.ranks if cut else 1)
            key = (param.dtype, param.device, cut, self.exchange is not None and self.exchange.takes(name, shape))
            params, size = open_buckets.get(key, ([], 0))
            limit = most if self.buckets else min(most, FIRST_BUCKET_BYTES)
            if params and size + local_tensor(param).nbytes > limit:
                self.buckets.append(self._bucket(params, *key[2:]))
                params, size = [], 0
            params.append((name, param))
            open_buckets[key] = (params, size + local_tensor(param).nbytes)
        self.buckets += [self._bucket(params, *key[2:]) for key, (params, _) in open_buckets.items()]
        if self.exchange is not None:
            self.exchange.rebuilt(self.buckets)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._slot_of[slot.param] = slot
                hook = partial(self._arrive, bucket, slot)
                self._handles.append(slot.param.register_post_accumulate_grad_hook(hook))

    def _bucket(self, params: list[tuple[str, nn.Parameter]], cut: bool, compressed: bool) -> Bucket:
        return Bucket(params, self.ranks if cut else 1, cut, compressed)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def discard(self, params: Iterable[Tensor]) -> None:
        """Forget what was accumulated for ``params`` and not reduced yet."""
        for param in params:
            if param in self._slot_of:
                self._slot_of[param].filled = False

    # -- one backward pass ---------------------------------------------------------------------------------------------

    def begin(self, sync: bool) -> None:
        """Before a backward pass; with ``sync`` its gradients, and those kept since the last one, are averaged."""
        if any(param.requires_grad and param not in self._slot_of for _, param in self.named_parameters):
            self.build()  # a parameter was unfrozen
        self.running, self.sync = True, sync
        self._next = 0
        self._flying.clear()
        self._active = [bucket for bucket in self.buckets if bucket.trainable]
        for bucket in self.buckets:
            bucket.launched = False
            bucket.waiting = 0
            for slot in bucket.slots:
                slot.arrived = False
                bucket.waiting += slot.param.requires_grad
                if not bucket.cut:
                    self._adopt(bucket, slot)
            bucket.scale_on_copy = sync and not any(slot.filled for slot in bucket.slots)
            bucket.averaged = bucket.averaged and any(slot.filled for slot in bucket.slots)
        if sync and self.exchange is not None:
            self.exchange.begin(self.buckets)

    @staticmethod
    def _adopt(bucket: Bucket, slot: Slot) -> None:
        """In a whole bucket the slot IS the parameter's gradient, so the gradient decides whether the slot is filled."""
        grad = _local_gradient(slot.param)
        slot.filled = grad is not None and slot.view is not None and grad.data_ptr() == slot.view.data_ptr()
        if grad is not None and not slot.filled:
            bucket.put(slot, grad, 1.0)
            slot.param.grad = slot.gradient

    def _arrive(self, bucket: Bucket, slot: Slot, param: nn.Parameter) -> None:
        if not self.running:
            if self.guard:
                raise RuntimeError(NOT_AVERAGED)
            return
        grad = _local_gradient(param)
        if grad is None:
            return
        if slot.arrived and (bucket.launched or (bucket.scale_on_copy and not bucket.cut)):
            raise RuntimeError(
                f"The gradient of {slot.name!r} arrived twice in one backward pass, the second time after its reduction was "
                "prepared. Reentrant activation checkpointing of a shared parameter does this: use use_reentrant=False."
            )
        with_graph = torch.is_grad_enabled()  # create_graph: such a pass adds up out of place
        value = grad.detach() if with_graph else grad
        if bucket.cut:
            bucket.put(slot, value, self.scale)
            param.grad = None
        elif not slot.filled or with_graph:
            slot.filled = False
            bucket.put(slot, value, self.scale if bucket.scale_on_copy else 1.0)
            param.grad = slot.gradient
        if not slot.arrived:
            slot.arrived = True
            bucket.waiting -= 1
            while self.sync and self._next < len(self._active) and not self._active[self._next].waiting:
                self._launch(self._active[self._next])
                self._next += 1

    @torch.no_grad()
    def feed(self, grads: Mapping[Tensor, Tensor]) -> None:
        """In place of a backward pass: gradients that were computed before."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                grad = grads.get(slot.param)
                if grad is not None:
                    slot.param.grad = grad if slot.param.grad is None else slot.param.grad.add_(grad)
                    self._arrive(bucket, slot, slot.param)

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        if len(self._flying) == IN_FLIGHT and (bucket.cut or self.exchange is None):
            self._complete(self._flying.popleft())
        self._flying.append(bucket)
        buffer = bucket.seal()
        bucket.launched = True
        if not bucket.cut and not bucket.scale_on_copy and self.scale != 1.0:
            buffer.mul_(self.scale)
        if self.exchange is not None:
            target = self._target(bucket) if bucket.cut else None
            bucket.received = buffer.new_empty(bucket.width) if bucket.cut and target is None else target
            bucket.work = self.exchange.launch(bucket)
        elif not bucket.cut:
            bucket.work = dist.all_reduce(buffer, group=self.group, async_op=True)
        elif self.all_to_all:
            bucket.received = torch.empty_like(buffer)
            bucket.work = dist.all_to_all_single(bucket.received, buffer, group=self.group, async_op=True)
        else:
            bucket.received = buffer.new_empty(bucket.width)
            bucket.work = compat.reduce_scatter_single(
                bucket.received, buffer.view(-1), group=self.group, async_op=True
            )

    @torch.no_grad()
    def finish(self) -> None:
        """After a backward pass: start what is left, wait for all of it, and hand the means out."""
        self.running = False
        if not self.sync:
            return
        for bucket in self._active[self._next :]:
            self._launch(bucket)
        if self.exchange is not None:
            self.exchange.wait(self._complete_all)
        else:
            self._complete_all()

    def _complete_all(self) -> None:
        while self._flying:
            self._complete(self._flying.popleft())

    def _complete(self, bucket: Bucket) -> None:
        assert bucket.work is not None
        bucket.work.wait()
        bucket.work = None
        if bucket.cut:
            mean, bucket.received = bucket.received, None
            assert mean is not None
            if self.all_to_all and self.exchange is None:
                mean = torch.sum(mean, 0, out=self._target(bucket))
        else:
            assert bucket.buffer is not None
            mean = bucket.buffer[0]
        if self.replicate_group is not None:
            dist.all_reduce(mean, group=self.replicate_group)
        missing = not all(slot.filled for slot in bucket.slots)
        used = mean[bucket.flags_at :].gt(0).tolist() if missing else [True] * len(bucket.slots)
        if bucket.cut:
            self._deliver(bucket, mean, used)
        bucket.averaged = True
        for slot, any_rank in zip(bucket.slots, used, strict=True):
            if not bucket.cut:
                slot.param.grad = slot.gradient if any_rank else None
            slot.filled = False
        if not self.keep_buffers and bucket.cut:
            bucket.free()
