"""Stage 0: every rank holds the whole model; gradients are averaged while the backward pass runs.

Also the interface that the sharding stages share. A strategy holds one of these and asks no further.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_partrain import numerics
from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.load import load_state
from lightning_partrain.parallel.optimizer import HostRows, LocalRows, around_step, is_elementwise, shard_state
from lightning_partrain.parallel.placement import Entry, Fused, whole
from lightning_partrain.sync.exchange import CompressedExchange
from lightning_partrain.sync.reducer import GradientReducer

Reduce = Literal["window", "micro_batch"]


class ReplicatedModel:
    """``zero_stage=0``.

    Args:
        module: the LightningModule, whole and with equal weights on every rank.
        mesh: the mesh of the run.
        reduce: ``"window"`` averages gradients once per accumulation window, ``"micro_batch"`` after every backward pass.
        training: whether gradients will be computed; without, nothing is installed.
        absent: parameters that live on other pipeline stages.
        fused: name -> the order in which tensor-parallel ranks hold a parameter, where it is not the model's.
        exchange: what averages gradients over replicas, where that is not a plain all-reduce.
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
    ) -> None:
        self.module, self.mesh, self.reduce, self.training, self.absent = module, mesh, reduce, training, absent
        self.exchange = exchange
        self.fused = fused or {}
        self._handles: list[RemovableHandle] = []
        self._host_rows: list[HostRows] = []
        self.host_step = False  # whether element-wise optimizers step on copies in the memory of the host
        self._optimizers: list[torch.optim.Optimizer] = []
        self.reducer = self._make_reducer() if training else None

    def _make_reducer(self) -> GradientReducer:
        if self.exchange is not None:
            return GradientReducer(self._present(), self.mesh.group("dp_shard"), exchange=self.exchange)
        return GradientReducer(self._present(), self.mesh.data_parallel_group)

    def _present(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, param) for name, param in self.module.named_parameters() if param not in self.absent)

    # -- the step ------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """The module is about to be called: its parameters have to be whole."""

    def begin_backward(self, last_of_window: bool) -> None:
        if self.reducer is not None:
            self.reducer.begin(sync=last_of_window or self.reduce == "micro_batch")

    def end_backward(self, last_of_window: bool, automatic: bool) -> None:
        """With ``automatic`` optimization, nothing but the optimizer's step follows the last pass of a window."""
        if self.reducer is not None:
            self.reducer.finish()

    def after_evaluation(self) -> None:
        """Evaluation is over; parameters that were gathered for it may go."""

    def guard(self, inside_step: bool) -> None:
        """Inside a training step, a gradient outside `begin_backward` ... `end_backward` is an error."""
        if self.reducer is not None:
            self.reducer.guard = inside_step

    # -- a pipeline's step: its gradients exist before Lightning clears those of the window before -------------------------

    #: What a stage gives what it received to, and takes what it sends from, when its parameters have to be gathered for it.
    around_stage: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None

    def begin_schedule(self) -> None:
        """The passes of a pipeline schedule follow. Gradients that are there are put aside."""
        assert self.reducer is not None
        self._before: dict[Tensor, Tensor | None] = {param: param.grad for _, param in self.reducer.named_parameters}
        for param in self._before:
            param.grad = None

    def end_schedule(self) -> None:
        """Take the gradients of the schedule away, to :meth:`add_gradients` later, and put the others back."""
        self._computed = {param: param.grad for param in self._before if param.grad is not None}
        for param, grad in self._before.items():
            param.grad = grad
        self._before = {}

    def add_gradients(self) -> None:
        """Between begin_backward and end_backward, in place of a backward pass."""
        assert self.reducer is not None
        self.reducer.feed(self._computed)
        self._computed = {}

    # -- parameters ----------------------------------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> the parameter as the optimizer's step and the hooks right before it see it, with its gradient.

        Only those that live on this pipeline stage.
        """
        return dict(self._present())

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> the parameter as optimizers hold it between steps, those of other pipeline stages included."""
        return dict(self.module.named_parameters())

    def stepped(self, param: Tensor) -> Tensor:
        """What an optimizer that holds ``param`` updates in its step. Also right after :meth:`release`."""
        return param

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
        """Make ``optimizer``, which holds :meth:`held_parameters`, step as the layout needs it.

        Args:
            wrapper: Lightning's wrapper of it.
        """
        params = self.held_parameters().values()
        if any(isinstance(p, DTensor) for p in params):  # tensor-parallel ones, beside plain ones
            shard_state(optimizer, {p: p for p in params})
            rows = self._local_rows(optimizer)
            if rows is not None:
                self._handles += around_step(optimizer, rows.enter, rows.leave)

    def _local_rows(self, optimizer: torch.optim.Optimizer) -> LocalRows | None:
        """What lets ``optimizer`` step on plain tensors, where its rule allows it."""
        if not is_elementwise(optimizer):
            return None
        if not self.host_step:
            return LocalRows(optimizer)
        self._host_rows.append(HostRows(optimizer))
        return self._host_rows[-1]

    def _watch_zero_grad(self, optimizer: torch.optim.Optimizer | None = None, wrapper: Any = None) -> None:
        """Let :meth:`_forget` follow ``zero_grad`` of every module, or of an optimizer and its wrapper.

        Gradients that wait elsewhere than in ``param.grad`` have to go as well.
        """
        if optimizer is None:
            for owner in self.module.modules():
                owner.zero_grad = types.MethodType(self._zero_module, owner)  # type: ignore[method-assign]
            return

        def zero_grad(set_to_none: bool = True) -> None:
            type(optimizer).zero_grad(optimizer, set_to_none)
            self._forget(p for group in optimizer.param_groups for p in group["params"])

        self._optimizers.append(optimizer)
        optimizer.zero_grad = wrapper.zero_grad = zero_grad  # type: ignore[method-assign]

    def _zero_module(self, owner: nn.Module, set_to_none: bool = True) -> None:
        type(owner).zero_grad(owner, set_to_none)
        self._forget(owner.parameters())

    def _forget(self, params: Iterable[Tensor]) -> None:
        """Drop what was accumulated for ``params``, which may be those the module or those the optimizer shows."""

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """The whole model's state by name. Collective when sharded; ranks with ``keep=False`` get an empty dict."""
        state = self.module.state_dict()
        if not any(isinstance(value, DTensor) for value in state.values()):
            return state
        complete = {}
        for name, value in state.items():
            full = whole(value, self.fused.get(name)).cpu() if isinstance(value, DTensor) else value
            if keep:
                complete[name] = full
        return complete

    def held_state(self) -> dict[str, Entry | Any]:
        """What this rank holds of the module's state, by name; what is no tensor is as it is. No communication."""
        return {
            name: Entry.of(value, self.fused.get(name)) if isinstance(value, Tensor) else value
            for name, value in self.module.state_dict().items()
        }

    def load_state_dict(
        self, names: Collection[str], get: Callable[[str], Any], strict: bool = True, plainly: bool = False
    ) -> None:
        """See :func:`load_state`."""
        load_state(self.module, names, get, strict, self.fused, self.absent, plainly)

    def release(self, whole: bool = True) -> None:
        """Make the module plain again, and whole (or hollow, where it is not), and leave its optimizers alone."""
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("zero_grad", None)
        for owner in self.module.modules():
            owner.__dict__.pop("zero_grad", None)
        if self.reducer is not None:
            self.reducer.remove_hooks()
            self.reducer.buckets.clear()
        if self.exchange is not None:
            self.exchange.close()

    # -- gradients, between the last pass of a window and the step -----------------------------------------------------

    def grad_norm(self, norm_type: float, stages: numerics.StageNorm | None) -> Tensor:
        """Of the whole model; see :func:`numerics.grad_norm`. Collective."""
        return numerics.grad_norm(self.named_parameters().values(), norm_type, stages)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor``, a scalar."""
        numerics.scale_gradients(self.named_parameters().values(), factor)

    # -- accounting ----------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """What this rank holds, by kind, as plain local tensors: ``parameters``, ``gradients``, ``buckets``, ``masters``,
        ``compression``."""
        parameters = [param for _, param in self._present()]
        buffers = [b for bucket in (self.reducer.buckets if self.reducer else []) if (b := bucket.buffer) is not None]
        return {
            "parameters": [local_tensor(p) for p in parameters],
            "gradients": [local_tensor(p.grad) for p in parameters if p.grad is not None],
            "buckets": buffers,
            "masters": [copy for rows in self._host_rows for copy in rows.copies()],
            "compression": [] if self.exchange is None else self.exchange.state_tensors(),
        }
