"""The numbers that a model without any begins with, one tensor after the other."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from lightning_partrain import compat
from lightning_partrain.parallel.deferred import initial_value, is_deferred
from lightning_partrain.parallel.random_states import set_torch_states, torch_states

# a model's own way to initialise one of its modules, in several libraries
_PROTOCOL = ("_initialize_weights", "_init_weights")


def initial_values(module: nn.Module, device: torch.device | None = None) -> dict[str, Callable[[], Tensor]]:
    """What makes the value of each parameter and buffer that has no numbers yet.

    Deferred ones (``DeferredInit``) get what the model would have been built with. Those on the meta device get what their module's
    ``reset_parameters()`` gives them, and then the ``_init_weights(module)`` of the nearest module around that has one. It is as if
    all modules were initialised in the order of ``module.modules()``, from torch's random state now, which is moved on accordingly.

    Args:
        device: of the values of those on the meta device: the CPU by default.

    Returns:
        by name, as in ``named_parameters`` and ``named_buffers``, tied ones under each of their names. Every call returns a whole
        tensor of its own, the same numbers each time, and leaves torch's random states as they are.

    Raises:
        ValueError: if there is no way to initialise a tensor on the meta device.
    """
    makers = _meta_makers(module, device or torch.device("cpu"))
    found: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in _named_tensors(module):
        if tensor.is_meta:
            found[name] = makers[id(tensor)]
        elif is_deferred(tensor):
            found[name] = partial(initial_value, tensor.detach())  # it may get other data meanwhile
    return found


def fill_attributes(module: nn.Module) -> None:
    """Give deferred tensors that are plain attributes of modules, also in lists and dictionaries, their numbers."""
    for owner in module.modules():
        waiting = [value for key, value in vars(owner).items() if key not in ("_parameters", "_buffers", "_modules")]
        while waiting:
            value = waiting.pop()
            if isinstance(value, Tensor):
                if not isinstance(value, nn.Parameter) and is_deferred(value):
                    value.data = initial_value(value)
            elif type(value) in (list, tuple, dict):
                waiting.extend(value.values() if isinstance(value, dict) else value)


def _named_tensors(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _meta_makers(module: nn.Module, device: torch.device) -> dict[int, Callable[[], Tensor]]:
    """By the tensor's ``id``. One that several modules have is what the last of them makes of it."""
    makers: dict[int, Callable[[], Tensor]] = {}
    for path, owner in module.named_modules():
        own = {name: tensor for name, tensor in _named_tensors(owner, recurse=False) if tensor.is_meta}
        if not own:
            continue
        steps, blank, states = _steps(module, path, owner), _blank(owner, owner, {}), torch_states()
        unset = sorted(own.keys() - _initialised(blank, steps, device).keys())
        if unset:
            raise ValueError(
                f"{type(owner).__name__} at {path!r}: {', '.join(unset)} on the meta device got no numbers by "
                f"{' and '.join(name for name, _ in steps)}. {_WAY_OUT}"
            )
        for name, tensor in own.items():
            makers[id(tensor)] = partial(_value, blank, name, steps, device, states)
    return makers


def _value(blank: nn.Module, name: str, steps: list[_Step], device: torch.device, states: Any) -> Tensor:
    now = torch_states()
    set_torch_states(states)
    try:
        return _initialised(blank, steps, device)[name]
    finally:
        set_torch_states(now)


_WAY_OUT = (
    "Give the class a reset_parameters() that sets all of its own parameters and buffers, or build the model in configure_model or "
    "under trainer.init_module(empty_init=True), without torch.device('meta')."
)

_Step = tuple[str, Callable[[nn.Module], Any]]


def _steps(module: nn.Module, path: str, owner: nn.Module) -> list[_Step]:
    """Names, and functions of a module, that initialise ``owner`` one after the other."""
    steps: list[_Step] = []
    if callable(getattr(owner, "reset_parameters", None)):
        steps.append(("reset_parameters()", methodcaller("reset_parameters")))
    names = path.split(".") if path else []
    for depth in range(len(names), -1, -1):
        around = module.get_submodule(".".join(names[:depth]))
        for name in _PROTOCOL:
            method = getattr(around, name, None)
            if callable(method) and _takes_one(method):
                return [*steps, (f"{type(around).__name__}.{name}", method)]
    if not steps:
        raise ValueError(
            f"{type(owner).__name__} at {path!r} has parameters or buffers on the meta device and no reset_parameters(). {_WAY_OUT}"
        )
    return steps


def _takes_one(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    return True


def _blank(module: nn.Module, owner: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
    """A stand-in for ``module`` as it is now, all of it on the meta device but what ``owner`` itself has elsewhere.

    What a module does to those inside it is lost on them: they are initialised after it.
    """
    if id(module) in seen:
        return seen[id(module)]
    blank = seen[id(module)] = copy.copy(module)
    to = None if module is owner else torch.device("meta")
    _replace_tensors(blank, lambda tensor: _like(tensor, to or tensor.device))
    children = module._modules.items()
    blank.__dict__["_modules"] = {name: child and _blank(child, owner, seen) for name, child in children}
    return blank


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    like = (
        torch.empty_like(tensor, device=device) if tensor.is_meta or device.type == "meta" else tensor.detach().clone()
    )
    if isinstance(tensor, nn.Parameter):
        like = nn.Parameter(like, tensor.requires_grad)
    like.__dict__.update(tensor.__dict__)
    return like


def _replace_tensors(module: nn.Module, like: Callable[[Tensor], Tensor]) -> None:
    """A module's own, in dictionaries of its own."""
    new: dict[int, Tensor] = {}
    for kind in ("_parameters", "_buffers"):
        tensors = dict(module.__dict__[kind])
        for name, tensor in tensors.items():
            if tensor is not None:
                if id(tensor) not in new:
                    new[id(tensor)] = like(tensor)
                tensors[name] = new[id(tensor)]
        module.__dict__[kind] = tensors


def _initialised(blank: nn.Module, steps: list[_Step], device: torch.device) -> dict[str, Tensor]:
    """The tensors that ``steps`` write to or replace in a copy of ``blank``."""
    module = copy.copy(blank)
    _replace_tensors(module, lambda tensor: _like(tensor, device if tensor.is_meta else tensor.device))
    before = dict(_named_tensors(module, recurse=False))
    with torch.no_grad(), _Writes() as writes:
        for _, initialise in steps:
            initialise(module)
    after = dict(_named_tensors(module, recurse=False))
    return {
        name: tensor.detach()
        for name, tensor in after.items()
        if tensor is not before.get(name) or id(tensor.untyped_storage()) in writes.storages
    }


class _Writes(compat.TorchDispatchMode):
    """Takes down what is written to; versions of tensors do not tell of writes to their ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in compat.written_arguments(func, args, kwargs or {}):
            storage = tensor.untyped_storage()
            self.storages[id(storage)] = storage
        return func(*args, **(kwargs or {}))
