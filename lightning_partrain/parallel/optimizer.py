"""Optimizers over parameters that are not the ones they were built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_partrain.numerics import as_dtensor, local_tensor
from lightning_partrain.parallel.placement import local_part_of, rows_of

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


def swap_parameters(optimizer: torch.optim.Optimizer, new: Mapping[Tensor, Tensor]) -> None:
    """Put ``new[p]`` in the place of every ``p`` of the optimizer, in place and with its state."""
    for group in optimizer.param_groups:
        params = group["params"]
        for index, old in enumerate(params):
            param = new.get(old)
            if param is not None and param is not old:
                params[index] = param
                if old in optimizer.state:
                    optimizer.state[param] = optimizer.state.pop(old)


def shard_state(optimizer: torch.optim.Optimizer, shard_of: Mapping[Tensor, Tensor]) -> None:
    """Cut state that an optimizer made for whole parameters at its construction (Adagrad does)."""
    local = is_elementwise(optimizer)
    for param, state in optimizer.state.items():
        shard = shard_of.get(param)
        if isinstance(shard, DTensor):
            for key, value in state.items():
                if isinstance(value, DTensor) and value.placements != shard.placements:
                    value = rows_of(local_tensor(value), shard)  # made for a tensor-parallel part
                    state[key] = value if local else as_dtensor(value, shard)
                elif isinstance(value, DTensor) and local:
                    state[key] = local_tensor(value)
                elif (
                    isinstance(value, Tensor)
                    and not isinstance(value, DTensor)
                    and value.ndim
                    and value.shape == shard.shape
                ):
                    rows = local_part_of(value, shard)
                    state[key] = rows if local else as_dtensor(rows, shard)


def around_step(
    optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]
) -> list[RemovableHandle]:
    """Call ``before`` when the optimizer is about to update, and ``after`` when it has, also in steps made by hand.

    With a closure, ``before`` waits for it: the closure runs the passes and the hooks that look at the optimizer.
    """

    def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Optimizer.step's arguments as torch passes them on: (self, closure), or closure by keyword
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            before()
            return args, kwargs

        def closure_then_before() -> Any:
            result = closure()
            before()
            return result

        return args[:1], {**kwargs, "closure": closure_then_before}

    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(lambda *_: after()),
    ]


class LocalRows:
    """Lets an element-wise optimizer step on the plain local parts of its DTensors, and nobody else see it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._back: dict[Tensor, Tensor] = {}

    def _rows(self, param: DTensor) -> Tensor:
        """What the optimizer updates in the place of ``param``, with the gradient."""
        local = local_tensor(param)
        local.grad = None if param.grad is None else local_tensor(param.grad)
        return local

    def enter(self) -> None:
        there: dict[Tensor, Tensor] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if isinstance(param, DTensor):
                    local = there[param] = self._rows(param)
                    self._back[local] = param
        swap_parameters(self.optimizer, there)

    def leave(self) -> None:
        swap_parameters(self.optimizer, self._back)
        for local in self._back:
            local.grad = None
        self._back = {}


class HostRows(LocalRows):
    """The same on copies in the memory of the host, where the optimizer's state then lies and its arithmetic is done.

    Source: ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840. Gradients go to the host and updated rows come back, once a step; for that the
    host waits once a step for the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._copies: dict[tuple[Tensor, str], Tensor] = {}

    def copies(self) -> list[Tensor]:
        """What is kept in the memory of the host besides the optimizer's state."""
        return list(self._copies.values())

    def _on_host(self, param: Tensor, what: str, local: Tensor) -> Tensor:
        copy = self._copies.get((param, what))
        if copy is None:
            copy = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._copies[param, what] = copy
        return copy.copy_(local, non_blocking=True)

    @torch.no_grad()
    def _rows(self, param: DTensor) -> Tensor:
        if param.grad is None:  # the optimizer passes it by
            return super()._rows(param)
        host = self._on_host(param, "rows", local_tensor(param))
        host.grad = self._on_host(param, "gradient", local_tensor(param.grad))
        return host

    def enter(self) -> None:
        super().enter()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        for host in (
            each for each in self._back if each.grad is not None
        ):  # what a checkpoint brought lies on the device
            state = self.optimizer.state.get(host, {})
            state.update({key: value.cpu() for key, value in state.items() if isinstance(value, Tensor)})

    @torch.no_grad()
    def leave(self) -> None:
        for host, param in self._back.items():
            if host.grad is not None:
                local_tensor(param).copy_(host, non_blocking=True)
        super().leave()
