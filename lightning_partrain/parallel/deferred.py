"""A model that is born without its numbers: what makes a tensor is written down, and run when its value is asked for.

A deferred tensor is a hollow one (see ``hollow``), whose storage bears what makes it. It stays the same
object until ``param.data = value`` fills it, so that ties, hooks and references survive, and what reads it unasked sees NaN. Random
numbers are drawn while the model is built too, and dropped: code that draws later draws the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_partrain import compat
from lightning_partrain.parallel import recorded
from lightning_partrain.parallel.hollow import hollow, is_hollow
from lightning_partrain.parallel.recorded import (
    ATEN,
    WAY_OUT,
    Call,
    Memory,
    Record,
    as_meta,
    chain,
    is_small,
    record_of,
    value_of,
)


class DeferredInit(compat.TorchDispatchMode):
    """Within it, tensors of ``recorded.THRESHOLD`` elements or more are given a shape now, and numbers by ``initial_value``.

    Models are built, copied, cast and moved as ever; what Python asks a number for (``item()``, ``tolist()``, ``if``) is computed.
    Outside, ``copy.deepcopy`` copies deferred tensors too. All else that is to be done to a model before it has its numbers, such as
    ``module.to(dtype)``, belongs into ``with DeferredInit():`` again: operators outside see NaN.
    """

    def __enter__(self) -> DeferredInit:
        compat.deepcopy_with(_copied)
        self._questions = [*getattr(self, "_questions", []), _Questions()]
        self._questions[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._questions.pop().__exit__(*error)
        recorded.SCRATCH.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with compat.disable_current_modes():
            return _dispatched(func, args, kwargs or {})


def is_deferred(tensor: Tensor) -> bool:
    """Whether its numbers are yet to be made; no longer so when ``tensor.data`` has been replaced by a real tensor."""
    return record_of(tensor) is not None


def initial_value(tensor: Tensor) -> Tensor:
    """What a deferred tensor would hold had it been built without ``DeferredInit``, bit for bit.

    Returns:
        a fresh tensor of its shape, dtype and device, without gradient. torch's random states stay as they are.

    Raises:
        ValueError: if the tensor is not deferred, or a view that was taken outside of ``DeferredInit``.
        RuntimeError: if an operator fails that had been put off.
    """
    record = record_of(tensor)
    if record is None:
        raise ValueError(f"A tensor of shape {tuple(tensor.shape)} is not deferred: it has its numbers.")
    if tensor.shape != record.twin.shape or tensor.dtype != record.twin.dtype:
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} is a view, taken outside of DeferredInit, of a deferred tensor of shape "
            f"{tuple(record.twin.shape)}. Take views inside of it, or give the tensor its numbers first."
        )
    return value_of(record)


def _draws(module: nn.Module) -> list[Call]:
    tensors = [*module.parameters(), *module.buffers()]
    records = [record for record in map(record_of, tensors) if record is not None]
    calls = {call for record in records for call in chain(record) if call.generator is not None}
    return sorted(calls, key=lambda call: call.number)


def random_states(module: nn.Module) -> list[Tensor]:
    """The generators' states, uint8, that random numbers of the deferred tensors of ``module`` are drawn from, in order."""
    return [call.state.clone() for call in _draws(module)]


def set_random_states(module: nn.Module, states: list[Tensor]) -> None:
    """Draw from ``states``, which ``random_states`` of the same model gave in another process.

    Numbers that were not deferred (of small tensors, and those that the module's code used itself) are still those of this process.

    Raises:
        ValueError: if they do not fit, or if numbers drawn from others have decided what the module is.
    """
    calls = _draws(module)
    if len(calls) != len(states) or any(
        call.state.shape != state.shape for call, state in zip(calls, states, strict=True)
    ):
        raise ValueError(
            f"{type(module).__name__} draws random numbers {len(calls)} times, where {len(states)} random states were given, or from "
            f"other generators. Build the same model in all processes, with the same seed (seed_everything) if what is drawn decides."
        )
    changed = [(call, state) for call, state in zip(calls, states, strict=True) if not torch.equal(call.state, state)]
    for call, _ in changed:
        if call.decided:
            raise ValueError(
                f"{type(module).__name__} was built by a number that {call.func} drew (such as item(), or a branch), so that it cannot be "
                f"drawn from another random state. Build it with the same seed in all processes (seed_everything)."
            )
    for call, state in changed:
        call.state = state.clone()


def _copied(tensor: Tensor) -> Tensor | None:
    if not is_deferred(tensor):
        return hollow(tensor.shape, tensor.dtype, tensor.device) if is_hollow(tensor) else None
    with DeferredInit():
        return tensor.detach().clone()


class _Questions(TorchFunctionMode):
    """What no operator answers: strides, which the twin knows, and numbers for Python."""

    strides = {Tensor.stride, Tensor.is_contiguous}
    numbers = {Tensor.numpy, Tensor.tolist, Tensor.__array__}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.fill_diagonal_:  # as one operator: what it is made of asks for strides
            return (
                ATEN.fill_diagonal_.default(*args, **kwargs)
                if record_of(args[0]) is None
                else _dispatched(ATEN.fill_diagonal_.default, args, kwargs)
            )
        asked = func in self.strides or func in self.numbers or func is Tensor.contiguous
        record = record_of(args[0]) if asked else None
        if record is None:
            return func(*args, **kwargs)
        if func is Tensor.contiguous:
            return args[0] if record.twin.is_contiguous(*args[1:], **kwargs) else func(*args, **kwargs)
        if func in self.strides:
            return func(record.twin, *args[1:], **kwargs)
        result = func(value_of(record, decides=True), *args[1:], **kwargs)
        if func is Tensor.numpy:
            result.flags.writeable = False  # what is written there would be lost
        return result


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, form = compat.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    written = compat.written_arguments(func, args, kwargs)
    device = _device(tensors, kwargs)
    if not any(map(is_deferred, tensors)):
        if written or func.is_view or device.type == "meta" or not all(map(is_small, tensors)):
            return func(*args, **kwargs)
        return _from_small(Call(func, leaves, form, device), args, kwargs, bool(tensors))
    if torch.Tag.data_dependent_output in func.tags:
        return _on_values(func, leaves, form)
    if torch.Tag.inplace_view in func.tags:
        return _reshaped(func, leaves, form)
    call = Call(func, leaves, form, device)
    if device.type == "meta":
        return call.run_on_meta()[0]
    if not all(map(is_deferred, written)):  # a real one stays real
        result = _on_values(func, leaves, form)
        _note_writes(call, written)
        return result
    try:
        returned, given = call.run_on_meta()
    except NotImplementedError as error:  # the shape rests on the numbers, or torch does not tell it
        if written:
            raise RuntimeError(
                f"{func} writes into a deferred tensor and has no kernel for the meta device. {WAY_OUT}"
            ) from error
        result = _on_values(func, leaves, form)
        return _recorded(call, _shapes(result), [], leaves) if _is_large(result) else result
    except RuntimeError:
        if func is not ATEN.view.default:
            raise
        return _dispatched(
            ATEN.reshape.default, args, kwargs
        )  # torch's reshape takes strides of 0 for what can be viewed
    if call.generator is not None:  # drawn, and dropped
        call.run(lambda record: record.scratch() if record is call.overwrites else value_of(record))
    _note_writes(call, written)
    return _recorded(call, returned, given, leaves)


def _from_small(call: Call, args: Any, kwargs: Any, from_tensors: bool) -> Any:
    """What no deferred tensor went into. It is made at once if it is small."""
    if from_tensors or not compat.takes_device(call.func):
        result = call.func(*args, **kwargs)
        return _recorded(call, _shapes(result), [], []) if _is_large(result) else result
    shapes, _ = call.run_on_meta()
    if not _is_large(shapes):
        return call.func(*args, **kwargs)
    if call.generator is not None:
        call.func(*args, **kwargs)  # drawn, and dropped
    return _recorded(call, shapes, [], [])


def _on_values(func: Any, leaves: list[Any], form: Any) -> Any:
    """At once, on numbers, which decide what is built from here on."""
    records = [record_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
    real = [leaf if r is None else value_of(r, decides=True) for leaf, r in zip(leaves, records, strict=True)]
    args, kwargs = compat.tree_unflatten(real, form)
    return func(*args, **kwargs)


def _reshaped(func: Any, leaves: list[Any], form: Any) -> Tensor:
    """``unsqueeze_`` and the like: the tensor becomes a view of what it was, or of another."""
    if func is ATEN.set_.source_Tensor:
        leaves[0].data = _dispatched(ATEN.alias.default, (leaves[1],), {})
        return leaves[0]
    if func.overloadpacket in (ATEN.resize_, ATEN.set_, ATEN.resize_as_):
        raise RuntimeError(f"{func} cannot be put off until a deferred tensor has its numbers. {WAY_OUT}")

    def view(tensor: Tensor, *rest: Any, **options: Any) -> Tensor:
        return func(ATEN.alias.default(tensor), *rest, **options)

    call = Call(view, leaves, form, leaves[0].device)
    leaves[0].data = _recorded(call, *call.run_on_meta(), leaves)
    return leaves[0]


def _note_writes(call: Call, written: list[Tensor]) -> None:
    for memory in {record.memory for record in map(record_of, written) if record is not None}:
        memory.writes.append(call)


def _recorded(call: Call, returned: Any, given: list[Any], leaves: list[Any]) -> Any:
    """``returned`` from the meta device, with deferred tensors, or with those of ``leaves`` that were ``given`` there."""

    def tensor(twin: Any) -> Any:
        if not isinstance(twin, Tensor):
            return twin
        place = next((place for place, leaf in enumerate(given) if leaf is twin), None)
        if place is not None:
            call.made.append(None)
            return leaves[place]
        record = _record(call, twin)
        call.made.append(record)
        return _deferred(record)

    return compat.tree_map(tensor, returned)


def _record(call: Call, twin: Tensor) -> Record:
    near = (other for other in [*call.inputs, *call.made] if other is not None and other.shares_with(twin))
    first = next(near, None)
    return Record(twin, call.device, first.memory if first is not None else Memory(), call)


def _deferred(record: Record) -> Tensor:
    """Each has a storage of its own, views too: what they have in common is said by their twins."""
    dtype, shape = record.twin.dtype, record.twin.shape
    tensor = hollow(shape, dtype, record.device)
    storage: Any = tensor.untyped_storage()
    storage.deferred = record
    return tensor


def _is_large(result: Any) -> bool:
    tensors = [leaf for leaf in compat.tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    return all(t.layout is torch.strided for t in tensors) and any(t.numel() >= recorded.THRESHOLD for t in tensors)


def _shapes(result: Any) -> Any:
    return compat.tree_map(lambda leaf: as_meta(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _device(tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
    """Of what an operator makes: a tensor without dimensions follows the others."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return min(tensors, key=lambda tensor: tensor.ndim == 0).device if tensors else torch.device("cpu")
