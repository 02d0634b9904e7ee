"""Optimizers over parameters that are not the ones they were built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_partrain.numerics import local_tensor

#: Optimizers whose step treats every element alone. They may step on this rank's rows as plain tensors, which spares the
#: dispatch of one DTensor operation after the other. All others are given DTensors and see whole tensors.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is exactly one of :data:`ELEMENTWISE`; a subclass may do anything."""
    return type(optimizer) in ELEMENTWISE


def local_rows(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``full`` (the shape of ``like``), cut as ``like`` is. No communication."""
    cut = distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return cut.to_local().clone()


def as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """``local``, this rank's part of a tensor, as a DTensor of the shape and placement of ``like``."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def replace_parameters(optimizer: torch.optim.Optimizer, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put ``new[p]`` in the place of every ``p`` of the optimizer, in place, with state that was made at construction."""
    for group in optimizer.param_groups:
        params = group["params"]
        for index, old in enumerate(params):
            param = new.get(old)
            if param is None or param is old:
                continue
            params[index] = param
            if old in optimizer.state:
                optimizer.state[param] = {
                    key: local_rows(value, param)
                    if isinstance(param, DTensor)
                    and isinstance(value, Tensor)
                    and value.shape == old.shape
                    and value.ndim
                    else value
                    for key, value in optimizer.state.pop(old).items()
                }


def step_on_local_rows(optimizer: torch.optim.Optimizer) -> None:
    """Make an element-wise optimizer step on the plain local parts of its DTensors.

    The exchange happens after the closure (which runs the hooks that look at the optimizer) and is undone after the step,
    so that everyone else sees DTensors.
    """
    swapped: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = []

    def swap_in() -> None:
        for group in optimizer.param_groups:
            params = group["params"]
            swapped.append((params, list(params)))
            for index, param in enumerate(params):
                if not isinstance(param, DTensor):
                    continue
                local = local_tensor(param)
                local.grad = None if param.grad is None else local_tensor(param.grad)
                params[index] = local
                if param in optimizer.state:
                    optimizer.state[local] = optimizer.state.pop(param)

    def swap_out() -> None:
        for params, before in swapped:
            for local, param in zip(params, before, strict=True):
                if local is not param and local in optimizer.state:
                    optimizer.state[param] = optimizer.state.pop(local)
            params[:] = before
        swapped.clear()

    def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Optimizer.step's arguments as torch passes them on: (self, closure) or closure by keyword
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            swap_in()
            return args, kwargs

        def closure_then_swap() -> Any:
            result = closure()
            swap_in()
            return result

        return args[:1], {**kwargs, "closure": closure_then_swap}

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(lambda *_: swap_out())


def after_step(optimizer: torch.optim.Optimizer, function: Callable[[], None]) -> None:
    """Call ``function`` after each step, also one that the user makes without the Trainer."""
    optimizer.register_step_post_hook(lambda *_: function())
