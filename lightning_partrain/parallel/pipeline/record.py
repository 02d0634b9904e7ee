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
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_partrain import compat
from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.parallel.pipeline.sources import Source, Tracker, tensors_in
from lightning_partrain.parallel.pipeline.units import Unit


class CannotCutError(ValueError):
    """The step does something that stages on several ranks cannot do; the message says what and the way out."""


@dataclass(frozen=True)
class Leaf:
    """A tensor in a unit's output.

    Attributes:
        order: its dimensions from the outermost to the innermost in memory.
        written: something outside of the unit changes it in place.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    differentiable: bool
    written: bool = False


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
    """

    calls: dict[str, Call]
    sources: frozenset[Source]
    gradients_from: frozenset[Source]
    written_buffers: list[str]


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
        """Mark outputs that were changed in place after their unit, by anyone."""
        for source, tensor in self.outputs.items():
            if self.tracker.key(tensor) in self.tracker.written:
                call = self.calls[source[1]]
                places = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Leaf)]
                place = places[source[2]]
                call.leaves[place] = replace(call.leaves[place], written=True)


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
                f"{step} asks tensors for their numbers ({type(error).__name__}: {first_line}), so a batch of another form cannot be "
                "looked at any more. Give it batches of one shape (drop_last=True), or change the step."
            ) from error
        recording = _record(root, units, step, args, context, logged, fake=False)
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
        if mode is not None:
            known: dict[Tensor, Any] = {}
            for module in root.modules():
                _make_fake(module, mode, known)
                compat.drop_collective_hooks(module)
            args = tuple(_as_fake(a, mode) for a in args)
        else:
            args = tuple(_copied(a) for a in args)
            buffers = [(b, b.clone()) for b in root.buffers()]
            stack.callback(lambda: [b.copy_(before) for b, before in buffers])
        for name, param in root.named_parameters():
            tracker.assign(param, [("parameter", name)])
        before = {id(t) for m in root.modules() for t in tensors_in(_own_attributes(m))}
        for unit in units:
            vars(unit.module)["forward"] = run.wrap(unit)
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(tracker)
        with context():
            output = getattr(root, step)(*args)
        run.note_writes()
        results = [*tensors_in(output), *tensors_in(list(logged()))]
        sources: set[Source] = set(tracker.everything_since)
        for tensor in results:
            sources |= tracker.sources(tensor)
        written_buffers = []
        for module_name, module in root.named_modules():
            if module in inside:
                continue
            for key, buffer in module._buffers.items():
                if buffer is not None and (tracker.key(buffer) in tracker.written or tracker.sources(buffer)):
                    written_buffers.append(f"{module_name}.{key}" if module_name else key)
                    sources |= tracker.sources(buffer)
            metric = any(isinstance(m, Metric) for m in (module, *_owners(root, module_name)))
            for key, value in _own_attributes(module).items():
                for tensor in tensors_in(value):
                    left = tracker.sources(tensor)
                    if (id(tensor) in before and tracker.key(tensor) not in tracker.written) or not left:
                        continue
                    if not metric:
                        raise CannotCutError(
                            f"{step} leaves a tensor behind in {f'{module_name}.{key}' if module_name else key!r}. Under a pipeline only the last "
                            "stage would have it. Log it with self.log or a torchmetrics metric, return it from the step and read it in "
                            "the on_..._batch_end hook, or register it as a buffer."
                        )
                    sources |= left
        loss = [] if output is None else list(tensors_in(output))
        gradients = run.reached([t for t in loss if t.requires_grad]) if torch.is_grad_enabled() else frozenset()
        stack.callback(run.marks.clear)
        return Recording(run.calls, frozenset(sources), gradients, written_buffers)


def _owners(root: nn.Module, name: str) -> Iterator[nn.Module]:
    parts = name.split(".")
    for end in range(1, len(parts)):
        yield root.get_submodule(".".join(parts[:end]))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps apart from parameters, buffers, sub-modules and torch's own book-keeping."""
    internal = {"_parameters", "_buffers", "_modules", "forward"}
    return {k: v for k, v in vars(module).items() if k not in internal and not k.endswith("_hooks")}


def _make_fake(module: nn.Module, mode: Any, known: dict[Tensor, Any]) -> None:
    """Replace parameters and buffers; sharded ones by whole ones."""
    for kind in (module._parameters, module._buffers):
        key: str
        for key, tensor in list(kind.items()):
            if tensor is None:
                continue
            if tensor not in known:
                whole = (
                    torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    if isinstance(tensor, DTensor)
                    else None
                )
                fake = mode.from_tensor(tensor if whole is None else whole)
                known[tensor] = fake if whole is None else nn.Parameter(fake, tensor.requires_grad)
            kind[key] = known[tensor]
    if isinstance(module, Metric):
        for key, value in _own_attributes(module).items():
            if isinstance(value, Tensor):
                vars(module)[key] = mode.from_tensor(value)


def _as_fake(value: Any, mode: Any) -> Any:
    return _mapped(value, lambda tensor: mode.from_tensor(tensor.detach()))


def _copied(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.detach().clone())


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if batches._is_container(value):
        return batches._rebuild(value, [_mapped(child, change) for _, child in batches._children(value)])
    return value
