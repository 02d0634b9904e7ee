"""FairScale's ``OSS``, and its ``ShardedDataParallel`` for steps that are not the same on all ranks.

``ShardedDataParallel`` reduces a gradient to its owner as soon as it arrives. Ranks that do not use the same parameters would reduce
different ones at the same time, and the gradients of a second backward pass in a step would not be reduced at all. Here all ranks reduce
in one order, whatever they use, in every pass that is to be reduced.

Source: FairScale 0.4.13, the last one. All that is private to it and used here has its test in ``tests/test_fairscale.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import Tensor, nn

from lightning_partrain.sync.reducer import NOT_AVERAGED


class _Stepped:
    """In the place of the optimizer that OSS would build: the user's own has stepped when OSS's turn comes."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def step(self) -> None:
        pass


class Shard:
    """Parameters of one dtype (OSS's buffers have one) with the OSS that deals them out."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.oss = OSS(params, optim=_Stepped)
        by_rank = enumerate(self.oss.partition_parameters())
        self.owners = {p: rank for rank, groups in by_rank for group in groups for p in group["params"]}
        self._places: dict[Tensor, int] = {}
        self.note()

    def broadcast_params(self) -> list[nn.Parameter]:
        """Those that have, or need, a place in OSS's buffers. Once there they stay: optimizers may freeze them for one of their steps."""
        return [param for param in self.params if param in self._places or param.requires_grad]

    def note(self) -> None:
        self._places = {param: param.data_ptr() for param in self.broadcast_params()}

    def is_stale(self) -> bool:
        """Whether a parameter was unfrozen, or given other memory, since the buffers were made."""
        return any(param.data_ptr() != self._places.get(param) for param in self.broadcast_params())


class GradientsToOwners(ShardedDataParallel):
    """Reduces gradients to their owners in an order that all ranks know, while the backward pass runs.

    Args:
        module: the LightningModule; it is not called through this one.
        shards: each with its OSS.
    """

    def __init__(self, module: nn.Module, shards: list[Shard]) -> None:
        super().__init__(
            module,
            [shard.oss for shard in shards],
            broadcast_buffers=False,  # SharedBuffers does it
            sync_models_at_startup=False,  # they are equal
            reduce_buffer_size=0,  # gradients in buckets are never freed, and lost when zero_grad sets them to None
            auto_refresh_trainable=False,  # compares with the first state only
        )
        self.owners = {param: rank for shard in shards for param, rank in shard.owners.items()}
        self.running = self.guard = False
        self._names = {param: name for name, param in module.named_parameters()}
        # as their gradients tend to come
        self._place_of = {param: place for place, param in enumerate(reversed(self._names))}
        self._launches: list[Callable[[], None]] = []
        self._arrived: set[int] = set()
        self._pending: deque[int] = deque()
        self._unreduced: set[Tensor] = set()  # with gradients of passes that were not to be reduced
        self._means: dict[Tensor, Tensor] = {}  # gradients that are reduced
        self.kept: dict[Tensor, Tensor] = {}  # the same, put aside: what is added to them must not be reduced with them

    def refresh_trainable(self) -> None:
        self._grad_to_be_reduced: list[bool] = []  # or FairScale warns of those that were frozen meanwhile
        self._launches = []
        super().refresh_trainable()
        params = self._trainable_params
        self._order = sorted(range(len(params)), key=lambda index: self._place_of[params[index]])

    def _get_reduce_fn(self, index: int, param: Tensor, dst_rank: int) -> Callable[..., None]:
        self._launches.append(super()._get_reduce_fn(index, param, dst_rank))
        return lambda *_: self._arrive(index)

    def remove_hooks(self) -> None:
        for handle in self._grad_hooks:
            handle.remove()

    def forget(self, params: Iterable[Tensor]) -> None:
        for param in params:
            self.kept.pop(param, None)

    def begin(self, sync: bool) -> None:
        """Before a backward pass; with ``sync`` its gradients, and those since the last one, are reduced."""
        for param, mean in self._means.items():
            if param.grad is mean:
                self.kept[param], param.grad = mean, None
        self._means = {}
        self.running, self._should_accumulate_grads = True, not sync
        self._clear_counters()
        self._bucket_flush_callback_set = True  # or FairScale waits for all of them before the pass is over
        self._arrived.clear()
        params = self._trainable_params
        active = [i for i in self._order if params[i].requires_grad or params[i] in self._unreduced]
        self._unreduced = set() if sync else {params[i] for i in active}
        self._pending = deque(active if sync else ())
        self._active = [params[i] for i in active]

    def _arrive(self, index: int) -> None:
        if not self.running:
            if self.guard:
                raise RuntimeError(NOT_AVERAGED)
            return
        param = self._trainable_params[index]
        if param.grad is None:
            return
        if param.grad.requires_grad:  # create_graph
            param.grad = param.grad.detach().clone()
        if self._should_accumulate_grads:
            return
        if index in self._arrived and index not in self._pending:
            raise RuntimeError(
                f"The gradient of {self._names[param]!r} arrived twice in one backward pass, the second time after its reduction had begun. "
                "Reentrant activation checkpointing of a shared parameter does this: use use_reentrant=False."
            )
        self._arrived.add(index)
        while self._pending and self._pending[0] in self._arrived:
            self._launches[self._pending.popleft()]()

    @torch.no_grad()
    def finish(self) -> None:
        """After a backward pass: reduce what is left, wait, and leave the means with their owners."""
        self.running = False
        if self._should_accumulate_grads or not self._active:
            return
        params = self._trainable_params
        used = torch.ones(len(params), device=self._active[0].device)
        missing = [index for index in self._pending if params[index].grad is None]
        for index in missing:
            params[index].grad = torch.zeros_like(params[index])
        if missing:
            used[missing] = 0.0
        while self._pending:
            self._launches[self._pending.popleft()]()
        self._consume_work_handles()
        dist.all_reduce(used, dist.ReduceOp.MAX)
        own = [index for index in missing if self.owners[params[index]] == self._rank]
        for index, any_rank in zip(own, used[own].tolist() if own else (), strict=True):
            if not any_rank:
                params[index].grad = None
        for param, kept in self.kept.items():
            param.grad = kept if param.grad is None else param.grad.add_(kept)
        self.kept = {}
        self._means = {param: param.grad for param in self.owners if param.grad is not None}
