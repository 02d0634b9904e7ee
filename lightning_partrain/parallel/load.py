"""``module.load_state_dict`` for a module of which this rank holds parts: tensor by tensor, each rank what it holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.numerics import as_dtensor
from lightning_partrain.parallel.placement import Fused, Stored, fill, local_part_of, whole_of


def load_state(
    module: nn.Module,
    names: Collection[str],
    get: Callable[[str], Any],
    strict: bool,
    fused: Mapping[str, Fused],
    absent: Collection[Tensor],
    plainly: bool = False,
) -> None:
    """Give ``module`` the values of ``names``, which ``get`` gives one after the other. No communication.

    Args:
        get: tensors, whole or as :class:`Stored`; other values for modules that keep such.
        strict: whether names that the module or the state lacks are errors.
        fused: name -> the order in which ranks hold a parameter together.
        absent: parameters that live on other pipeline stages.
        plainly: pass by what modules do in ``load_state_dict`` with the state of older versions of themselves.

    Raises:
        RuntimeError: as torch's own, with the names, when something is missing, left over, or of another shape; on all ranks alike.
    """
    elsewhere = {name for name, param in module.named_parameters(remove_duplicate=False) if param in absent}
    own = module.state_dict()
    if not plainly and compat.loads_in_its_own_way(module):
        with _without(module, absent):
            module.load_state_dict(
                {name: _cut(get(name), own.get(name), fused.get(name)) for name in names if name not in elsewhere},
                strict=strict,
            )
        return
    problems = []
    missing, surplus = [n for n in own if n not in names], [n for n in names if n not in own]
    if strict and surplus:
        problems.append(f"Unexpected key(s) in state_dict: {_listed(surplus)}. ")
    if strict and missing:
        problems.append(f"Missing key(s) in state_dict: {_listed(missing)}. ")
    for name, tensor in own.items():
        if name not in names:
            continue
        value = get(name)
        if not isinstance(value, (Tensor, Stored)):
            problems.append(f"{name} is no tensor in the checkpoint but {type(value).__name__}.")
        elif tuple(value.shape) != tuple(tensor.shape):
            problems.append(
                f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from checkpoint, the shape in current model is "
                f"{tuple(tensor.shape)}."
            )
        elif name not in elsewhere:
            fill(tensor, value, fused.get(name))
    if problems:
        text = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{text}")


def _cut(value: Any, now: Any, fused: Fused | None) -> Any:
    """``value`` as a module takes it that holds ``now`` in its place."""
    if isinstance(value, Stored):
        value = whole_of(value)
    if isinstance(now, DTensor) and isinstance(value, Tensor) and value.shape == now.shape:
        return as_dtensor(local_part_of(value, now, fused), now)
    return value


@contextmanager
def _without(module: nn.Module, absent: Collection[Tensor]) -> Iterator[None]:
    """The module without the parameters that live on other stages."""
    hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for owner in module.modules():
        before = dict(owner._parameters)
        if any(p in absent for p in before.values() if p is not None):
            hidden.append((owner._parameters, before))
            for key, param in before.items():
                if param is not None and param in absent:
                    del owner._parameters[key]
    try:
        yield
    finally:
        for parameters, before in hidden:
            parameters.clear()
            parameters.update(before)


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:20])
    return f"{shown}, ... ({len(names)} of them)" if len(names) > 20 else shown
