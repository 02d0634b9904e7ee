"""Parameters without numbers: they live on other stages, or get theirs later.

A hollow tensor has shape, type, device and identity, and the memory of two numbers, of which all of its elements are the second: NaN
where there is one. That is how it is known again, and seen to be untouched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.numerics import local_tensor


def empty_of_numbers(tensor: Tensor) -> Tensor:
    """Fill with NaN where the dtype has it, with zero elsewhere."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


def hollow(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    storage = empty_of_numbers(torch.empty(2, dtype=dtype, device=device)).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 1, tuple(shape), (0,) * len(shape))


def is_hollow(tensor: Tensor) -> bool:
    local = local_tensor(tensor)
    if local.layout is not torch.strided or any(local.stride()) or local.storage_offset() != 1 or local.is_meta:
        return False
    return local.untyped_storage().nbytes() == 2 * local.element_size()


def is_touched(tensor: Tensor) -> bool:
    """Whether somebody has written to a hollow tensor, which holds no numbers."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return not bool(local_tensor(tensor)[(0,) * tensor.ndim].isnan())


@torch.no_grad()
def make_hollow(tensor: Tensor) -> None:
    """Its memory is given back, unless someone else has it."""
    local = local_tensor(tensor)
    _set(tensor, hollow(local.shape, local.dtype, local.device))


@torch.no_grad()
def give_room(tensors: Iterable[Tensor]) -> None:
    """Memory for those that are hollow; what is in it is up to chance."""
    for tensor in tensors:
        if is_hollow(tensor):
            local = local_tensor(tensor)
            _set(tensor, torch.empty(local.shape, dtype=local.dtype, device=local.device))


@contextmanager
def weightless(module: nn.Module) -> Iterator[None]:
    """Hollow parameters are empty meanwhile: a change of type or device would give them memory."""
    shapes = {param: param.shape for param in module.parameters() if is_hollow(param)}
    for param in shapes:
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    try:
        yield
    finally:
        for param, shape in shapes.items():
            param.data = hollow(shape, param.dtype, param.device)


def replace_meta(module: nn.Module) -> None:
    """Let ``module`` have hollow parameters and buffers on the host instead of those on the meta device, shared as they were."""
    new: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for kind in (owner._parameters, owner._buffers):
            for key, tensor in kind.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in new:
                    empty = hollow(tensor.shape, tensor.dtype, torch.device("cpu"))
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    new[tensor].__dict__.update(tensor.__dict__)
                kind[key] = new[tensor]  # type: ignore[assignment]


def _set(tensor: Tensor, local: Tensor) -> None:
    if isinstance(tensor, DTensor):
        compat.set_local_part(tensor, local)
    else:
        tensor.data = local
