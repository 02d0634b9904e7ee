"""One run of a step that shows which unit's output, and which parameter, every unit and the result rest on.

The run happens on fake tensors (shapes without numbers); a step that asks for numbers runs once for real. Every tensor carries
the set of *sources* it was computed from, through views, in-place writes, ``detach`` and integer operations, so that nothing is
missed that autograd does not see. A unit's output is a new source, which is what makes the model cuttable there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_partrain import compat
from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.parallel.pipeline.left_behind import (
    LeftBehind,
    generators_kept,
    own_attributes,
    refuse_generator,
)
from lightning_partrain.parallel.pipeline.sources import Source, Tracker, tensors_in
from lightning_partrain.parallel.pipeline.units import CannotCutError, Unit
from lightning_partrain.parallel.tensor.attributes import restore


@dataclass(frozen=True)
class Leaf:
    """A tensor in a unit's output.

    Attributes:
        order: its dimensions from the outermost to the innermost in memory.
        written: something outside of the unit changes it in place.
        hooked: the step has registered a hook on its gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    differentiable: bool
    written: bool = False
    hooked: bool = False


@dataclass
class Call:
    """What one unit did: the structure of its output, and what it was computed from."""

    name: str
    spec: Any
    leaves: list[Any]  # a Leaf for every tensor, and the other values as they are
    sources: frozenset[Source] = frozenset()
    gradients_from: frozenset[Source] = frozenset()


@dataclass
class Recording:
    """A step on one micro-batch.

    Attributes:
        calls: the units in the order in which they were called.
        sources: what the loss, the logged values, the outputs and the state that the step leaves behind rest on.
        gradients_from: the unit outputs that the loss reaches first, walking back through autograd.
        written_buffers: names of buffers outside of units that the step changes.
        real: whether the step had to run on numbers.
    """

    calls: dict[str, Call]
    sources: frozenset[Source]
    gradients_from: frozenset[Source]
    written_buffers: list[str]
    real: bool = False


class _Mark(torch.autograd.Function):
    """A copy that can be found again in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@contextmanager
def _state_kept(root: nn.Module) -> Iterator[None]:
    """Put back what a step changes in the modules: attributes, and what lists, dictionaries and the like in them hold."""
    saved = []
    seen: set[int] = set()

    def keep(value: Any) -> None:
        if isinstance(value, (list, dict, set, deque)) and id(value) not in seen:
            seen.add(id(value))
            saved.append((value, copy.copy(value)))
            for item in list(value.values() if isinstance(value, dict) else value):
                keep(item)

    for module in root.modules():
        keep(vars(module))
    try:
        yield
    finally:
        for value, before in reversed(saved):
            value.clear()
            value.extend(before) if isinstance(value, (list, deque)) else value.update(before)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory; as they are where memory overlaps."""
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride()[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))


class _Run:
    """The hooks of one recording run."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.training = tracker, torch.is_grad_enabled()
        self.calls: dict[str, Call] = {}
        self.outputs: dict[Source, Tensor] = {}
        self.marks: dict[Any, Source] = {}
        self.without_grad: list[str] = []

    def wrap(self, unit: Unit) -> Callable[..., Any]:
        original, tracker = unit.module.forward, self.tracker

        def forward(*args: Any, **kwargs: Any) -> Any:
            if unit.name in self.calls or tracker.inside == unit.name:
                raise CannotCutError(
                    f"{unit.name!r} is called twice in one step, but a stage runs it once a micro-batch. Modules that are used several "
                    "times, or steps that call the model several times, need pipeline_parallel_size=1."
                )
            if tracker.inside is not None:
                raise CannotCutError(
                    f"{unit.name!r} is called from inside {tracker.inside!r}, so the two cannot be separated. Register it as a part of "
                    "that module, or use pipeline_parallel_size=1."
                )
            if self.training and not torch.is_grad_enabled():
                self.without_grad.append(unit.name)
            tracker.inside, tracker.touched = unit.name, set()
            try:
                out = original(*args, **kwargs)
            finally:
                tracker.inside = None
            leaves, spec = compat.tree_flatten(out)
            sources = set(tracker.touched)
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    sources |= tracker.sources(leaf)
                elif not isinstance(leaf, batches.PLAIN):
                    raise CannotCutError(
                        f"{unit.name!r} returns a {type(leaf).__name__}, which cannot be sent to another stage. Return tensors, plain values, and "
                        "lists, tuples or dictionaries of them."
                    )
            call = Call(unit.name, spec, [], frozenset(sources - {("inside", unit.name)}), self.reached(leaves))
            self.calls[unit.name] = call
            marked = [self._mark(call, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            call.leaves += [self._describe(m) if isinstance(m, Tensor) else m for m in marked]
            return compat.tree_unflatten(marked, spec)

        return forward

    def reached(self, tensors: Iterable[Any]) -> frozenset[Source]:
        """The unit outputs that ``tensors`` reach first in the autograd graph.

        Raises:
            CannotCutError: for units inside of reentrant activation checkpointing, which hides them from autograd.
        """
        waiting = [t.grad_fn for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None]
        seen = set(waiting)
        found = set()
        while waiting:
            node = waiting.pop()
            if node in self.marks:
                found.add(self.marks[node])
                continue
            if self.without_grad and node.name() == "CheckpointFunctionBackward":
                raise CannotCutError(
                    f"{self.without_grad[0]!r} is called inside of reentrant activation checkpointing, from which no gradient can be sent to "
                    "another stage. Use use_reentrant=False."
                )
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return frozenset(found)

    def _mark(self, call: Call, tensor: Tensor) -> Tensor:
        index = sum(source[1] == call.name for source in self.outputs)
        source = ("unit", call.name, index)
        marked = _Mark.apply(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach().clone()
        if marked.grad_fn is not None:
            self.marks[marked.grad_fn] = source
        self.tracker.assign(marked, [source])
        self.outputs[source] = marked
        return marked

    def _describe(self, tensor: Tensor) -> Leaf:
        return Leaf(tuple(tensor.shape), tensor.dtype, _memory_order(tensor), tensor.requires_grad)

    def note_writes(self) -> None:
        """Mark outputs that were changed in place after their unit, by anyone, or that got a hook."""
        for source, tensor in self.outputs.items():
            call = self.calls[source[1]]
            place = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Leaf)][source[2]]
            written, hooked = self.tracker.key(tensor) in self.tracker.written, bool(tensor._backward_hooks)
            call.leaves[place] = replace(call.leaves[place], written=written, hooked=hooked)


def record(
    root: nn.Module,
    units: list[Unit],
    step: str,
    args: tuple[Any, ...],
    context: Callable[[], Any] = nullcontext,
    logged: Callable[[], Iterable[Any]] = tuple,
    whole: bool = True,
) -> Recording:
    """Run ``root.<step>(*args)`` once and leave no trace of it.

    Args:
        root: the LightningModule.
        units: see :func:`find_units`.
        args: the step's arguments, with a micro-batch in the place of the batch.
        context: a context for the step, such as autocast.
        logged: gives the values that the step has logged; ``root.log`` has been replaced by the caller.
        whole: whether the model still has all its numbers, so that the step may run for real.

    Raises:
        CannotCutError: for what no cut can do.
    """
    try:
        return _record(root, units, step, args, context, logged, fake=True)
    except CannotCutError:
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        if not whole:
            raise CannotCutError(
                f"{step} cannot be looked at on tensors without numbers ({type(error).__name__}: {first_line}), and the model has none: it was "
                "born without them, or is cut already and a batch of another form came. If the step asks tensors for their numbers, change it, "
                "or build the model as usual and give it batches of one shape (drop_last=True)."
            ) from error
        try:
            recording = _record(root, units, step, args, context, logged, fake=False)
        except CannotCutError:
            raise
        except Exception as own_error:
            raise CannotCutError(
                f"{step} failed when it was looked at to find out where the model can be cut, with {type(own_error).__name__}: {own_error}. This is "
                "before on_fit_start, on_train_start, on_train_batch_start and the like: create what the step needs in __init__ or setup."
            ) from own_error
        rank_zero_info(
            f"{step} needs numbers ({type(error).__name__}: {first_line}), so it ran once on a real micro-batch to find out where the "
            "model can be cut."
        )
        return recording


def _record(
    root: nn.Module,
    units: list[Unit],
    step: str,
    args: tuple[Any, ...],
    context: Callable[[], Any],
    logged: Callable[[], Iterable[Any]],
    fake: bool,
) -> Recording:
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    tracker = Tracker()
    run = _Run(tracker)
    inside = {m for unit in units for m in unit.module.modules()}
    with ExitStack() as stack:
        stack.enter_context(isolate_rng())
        stack.enter_context(_state_kept(root))
        stack.enter_context(generators_kept(root, step))
        trainer = getattr(root, "_trainer", None)
        if trainer is not None:
            stack.callback(setattr, trainer, "should_stop", trainer.should_stop)
        if mode is not None:
            known: dict[Tensor, Any] = {}
            for module in root.modules():
                _make_fake(module, mode, known)
                compat.drop_collective_hooks(module)
                restore(module)
            args = tuple(_as_fake(a, mode) for a in args)
        else:
            args = tuple(_copied(a) for a in args)
            buffers = [(b, b.clone()) for b in root.buffers()]
            stack.callback(lambda: [b.copy_(before) for b, before in buffers])
            for module in root.modules():
                if isinstance(module, Metric):
                    vars(module).update({k: _copied(v) for k, v in own_attributes(module).items()})
        vars(root)["all_gather"] = partial(_refuse_call, "self.all_gather")
        stack.enter_context(_replaced(torch.autograd, "grad", partial(_refuse_autograd, tracker, torch.autograd.grad)))
        stack.enter_context(
            _replaced(torch.autograd, "backward", partial(_refuse_autograd, tracker, torch.autograd.backward))
        )
        for name, param in root.named_parameters():
            tracker.assign(param, [("parameter", name)])
        outside = [(name, module) for name, module in root.named_modules() if module not in inside]
        for name, module in outside:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    tracker.assign(buffer, [("buffer", f"{name}.{key}" if name else key)])
        state = LeftBehind(outside, root, tracker)
        for unit in units:
            vars(unit.module)["forward"] = run.wrap(unit)
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(tracker)
        with context():
            output = getattr(root, step)(*args)
        if output is None and run.training:
            raise CannotCutError(
                f"{step} returned None for the first batch. Under a pipeline every step has to return a loss."
            )
        if tracker.own_generator:
            refuse_generator(step, "generator=...")
        run.note_writes()
        sources: set[Source] = set(tracker.everything_since)
        for tensor in (*tensors_in(output), *tensors_in(list(logged()))):
            sources |= tracker.sources(tensor)
        written_buffers = state.check(step, sources)
        loss = [t for t in tensors_in(output) if t.requires_grad] if run.training else []
        gradients = run.reached(loss)
        stack.callback(run.marks.clear)
        return Recording(run.calls, frozenset(sources), gradients, written_buffers, real=not fake)


def _refuse_call(what: str, *args: Any, **kwargs: Any) -> Any:
    raise CannotCutError(
        f"A step calls {what}, which a pipeline cannot do for micro-batches on one stage. Call it in a hook."
    )


def _refuse_autograd(tracker: Tracker, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if tracker.inside is not None:
        return original(*args, **kwargs)
    raise CannotCutError(
        "A step computes gradients itself (torch.autograd.grad or backward), which would only see its own stage. Move that into one "
        "module, or use pipeline_parallel_size=1."
    )


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _make_fake(module: nn.Module, mode: Any, known: dict[Tensor, Any]) -> None:
    """Replace parameters and buffers; sharded ones by whole ones."""
    for kind in (module._parameters, module._buffers):
        key: str
        for key, tensor in list(kind.items()):
            if tensor is None:
                continue
            if tensor not in known and isinstance(tensor, DTensor):
                with mode:
                    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                known[tensor] = nn.Parameter(whole, tensor.requires_grad)
            elif tensor not in known:
                known[tensor] = mode.from_tensor(tensor)
            kind[key] = known[tensor]
    if isinstance(module, Metric):
        for key, value in own_attributes(module).items():
            if isinstance(value, Tensor):
                vars(module)[key] = mode.from_tensor(value)


def _as_fake(value: Any, mode: Any) -> Any:
    return batches.mapped(value, lambda tensor: mode.from_tensor(tensor.detach()))


def _copied(value: Any) -> Any:
    return batches.mapped(value, lambda tensor: tensor.detach().clone())
