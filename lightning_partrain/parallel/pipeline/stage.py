"""One rank's part of a step: the user's own step function, with the modules of other stages stood in for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_partrain import compat
from lightning_partrain.parallel.hollow import empty_of_numbers
from lightning_partrain.parallel.pipeline.cut import Crossing, Cut, Flow
from lightning_partrain.parallel.pipeline.record import Leaf, Recording
from lightning_partrain.parallel.pipeline.units import Unit
from lightning_partrain.parallel.random_states import seeded, torch_seeded


class StageDone(BaseException):
    """Leaves the step where the next stage takes over. No ``Exception``, so that no step catches it."""


class _Boundary(torch.autograd.Function):
    """The same tensor, contiguous in the order of its memory; so is its gradient, which is what is sent back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.inverse = sorted(range(len(order)), key=order.__getitem__)
        return tensor.permute(order).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.permute(ctx.inverse), None


class _Arrival(torch.autograd.Function):
    """A received tensor in the order of dimensions that the model knows; its gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.order = order
        return tensor.permute(sorted(range(len(order)), key=order.__getitem__))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.permute(ctx.order).contiguous(), None


class StandIns:
    """Tensors of any shape that hold no numbers: NaN, so that a result that rests on one shows. All share one memory.

    In-place operations on one change the others, which nothing rests on either.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def like(self, leaf: Leaf) -> Tensor:
        numel = 1
        for size in leaf.shape:
            numel *= size
        memory = self._memory.get(leaf.dtype)
        if memory is None or memory.numel() < numel:
            memory = self._memory[leaf.dtype] = empty_of_numbers(
                torch.empty(numel, dtype=leaf.dtype, device=self._device)
            )
        shape = [leaf.shape[dim] for dim in leaf.order]
        tensor = torch.empty(0, dtype=leaf.dtype, device=self._device).set_(
            memory.untyped_storage(), 0, shape, torch.empty(shape, device="meta").stride()
        )
        return tensor.permute(sorted(range(len(shape)), key=leaf.order.__getitem__))


class Stage(nn.Module):
    """Called by a schedule with what the stage before sent, and the number of the micro-batch.

    Args:
        root: the LightningModule; its units get a ``forward`` of ours while a step runs.
        stage: the number of this stage.
        finish: called on the last stage with the number of the micro-batch and what the step returned; gives the loss.
    """

    def __init__(
        self,
        root: nn.Module,
        units: list[Unit],
        cut: Cut,
        stage: int,
        device: torch.device,
        finish: Callable[[int, Any], Tensor],
    ) -> None:
        super().__init__()
        self._hidden = (root,)  # not a sub-module: torch looks at the parameters of what a schedule calls
        self.units, self.cut, self.stage, self.finish = units, cut, stage, finish
        self._stage_of = {name: index for index, names in enumerate(cut.stages) for name in names}
        self._stand_ins = StandIns(device)
        self._installed: list[tuple[dict[str, Any], Any]] = []
        self._hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    # -- the forward methods of units -----------------------------------------------------------------------------------

    def install(self, around: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None) -> None:
        """Replace the units' ``forward``, after anything else that wraps or hooks them.

        Args:
            around: called with what was received before a micro-batch, and with what is sent after it; each gives what to use.
        """
        self._around = around
        for number, unit in enumerate(self.units):
            if unit.name in self._stage_of:
                attributes = vars(unit.module)
                self._installed.append((attributes, attributes.get("forward")))
                attributes["forward"] = self._wrap(unit, number)
                if self._stage_of[unit.name] != self.stage:  # their gradients are not here
                    for hooks in (unit.module._backward_hooks, unit.module._backward_pre_hooks):
                        self._hooks.append((hooks, dict(hooks)))
                        hooks.clear()

    def remove(self) -> None:
        for attributes, before in self._installed:
            attributes.pop("forward", None)
            if before is not None:
                attributes["forward"] = before
        for hooks, kept in self._hooks:
            hooks.update(kept)
        self._installed.clear()
        self._hooks.clear()

    def _wrap(self, unit: Unit, number: int) -> Callable[..., Any]:
        original, stage, name = unit.module.forward, self._stage_of[unit.name], unit.name

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                if not self._stepping:
                    return original(*args, **kwargs)
                if stage != self.stage:  # activation checkpointing, in a backward pass
                    raise RuntimeError(
                        f"Activation checkpointing computes {name!r} again, which is on another stage. Checkpoint each module alone, with "
                        "use_reentrant=False."
                    )
                return self._draw_apart(number, original, args, kwargs)
            if stage > self.stage:
                raise StageDone
            if name in self._called:
                raise RuntimeError(
                    f"{name!r} was called twice in one step, which a pipeline cannot do, but only once when the model was cut."
                )
            self._called.add(name)
            if stage < self.stage:
                return self._stand_in(name)
            return self._run(name, number, original, args, kwargs)

        forward.without_stage = original  # type: ignore[attr-defined]
        return forward

    def _stand_in(self, name: str) -> Any:
        call = self._recording.calls.get(name)
        if call is None:
            raise RuntimeError(f"{name!r} was not called when the model was cut, but is called now.")
        values, index = [], 0
        for leaf in call.leaves:
            if isinstance(leaf, Leaf):
                received = self._received.get((name, index))
                values.append(self._stand_ins.like(leaf) if received is None else received)
                index += 1
            else:
                values.append(leaf)
        return compat.tree_unflatten(values, call.spec)

    def _run(self, name: str, number: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = self._draw_apart(number, original, args, kwargs)
        if name in self._wanted:
            leaves, spec = compat.tree_flatten(out)
            index = 0
            for place, value in enumerate(leaves):
                if not isinstance(value, Tensor):
                    continue
                crossing = self._sent.get((name, index))
                if crossing is not None:
                    self._check(crossing, value)
                    self._own[(name, index)] = value
                    if crossing.leaf.written:
                        leaves[place] = value.clone()
                index += 1
            out = compat.tree_unflatten(leaves, spec)
        return out

    @staticmethod
    def _draw_apart(number: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit's own draws do not depend on where it runs, and do not move those of the step around it.

        They follow from the random state, so that they are the same when the unit is computed again from a kept state.
        """
        with torch_seeded(None):
            seed = int(torch.empty((), dtype=torch.int64).random_()) + number
        with torch_seeded(seed):
            return original(*args, **kwargs)

    @staticmethod
    def _check(crossing: Crossing, value: Tensor) -> None:
        if tuple(value.shape) != crossing.leaf.shape or value.dtype != crossing.leaf.dtype:
            raise RuntimeError(
                f"{crossing.unit!r} gave a tensor of shape {tuple(value.shape)} and {value.dtype}, but {crossing.leaf.shape} and "
                f"{crossing.leaf.dtype} for the same kind of batch before. Shapes that depend on values cannot be sent between stages."
            )

    # -- one micro-batch ------------------------------------------------------------------------------------------------

    _running = _stepping = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The length of a schedule, backward passes included."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def prepare(self, recording: Recording, flow: Flow, calls: list[Callable[[], Any]], seeds: list[int]) -> None:
        """What the next run of the schedule works on: the user's step for each micro-batch, and a seed for each."""
        self._recording, self._calls, self._seeds = recording, calls, seeds
        self._incoming = flow.crossing[self.stage]
        self._outgoing = flow.crossing[self.stage + 1] if self.stage + 1 < len(self.cut) else []
        self._sent = {(c.unit, c.index): c for c in self._outgoing if self._stage_of[c.unit] == self.stage}
        self._wanted = {unit for unit, _ in self._sent}

    def forward(self, *received: Tensor, mb: Tensor) -> Any:
        index = int(mb)
        if self._around is not None:
            received = self._around[0](received)
        sent = self._run_step(index, received)
        return sent if self._around is None else self._around[1](sent)

    def _run_step(self, index: int, received: tuple[Tensor, ...]) -> Any:
        arrived = {(c.unit, c.index): t for c, t in zip(self._incoming, received, strict=True)}
        self._received = {(c.unit, c.index): _arrive(c, arrived[(c.unit, c.index)]) for c in self._incoming}
        self._own: dict[tuple[str, int], Tensor] = {}
        self._called: set[str] = set()
        self._running = True
        try:
            with seeded(self._seeds[index]):
                output = self._calls[index]()
        except StageDone:
            output = None
        finally:
            self._running = False
        try:
            if self.stage + 1 == len(self.cut):
                return self.finish(index, output)
            return tuple(self._send(crossing, arrived) for crossing in self._outgoing)
        finally:
            self._received, self._own = {}, {}

    def _send(self, crossing: Crossing, arrived: Mapping[tuple[str, int], Tensor]) -> Tensor:
        key = (crossing.unit, crossing.index)
        if self._stage_of[crossing.unit] < self.stage:
            passed = arrived[key]
            return passed.view_as(passed) if crossing.gradient else passed.detach()
        value = self._own.get(key)
        if value is None:
            raise RuntimeError(
                f"{crossing.unit!r} was not called in this step, but the next stage needs its output. A pipeline needs steps that go "
                "through the same modules every time."
            )
        if not crossing.gradient:
            if value.requires_grad and not crossing.leaf.differentiable and torch.is_grad_enabled():
                raise _other_way(crossing)
            return value.detach().permute(crossing.leaf.order).contiguous()
        return _Boundary.apply(value, crossing.leaf.order)


def _other_way(crossing: Crossing) -> RuntimeError:
    return RuntimeError(
        f"The step needs a gradient of what {crossing.unit!r} returns, but needed none when the model was cut. A pipeline needs steps "
        "that go the same way every time; freeze and unfreeze with requires_grad, which it follows."
    )


def _arrive(crossing: Crossing, tensor: Tensor) -> Tensor:
    if crossing.leaf.differentiable and not crossing.gradient and torch.is_grad_enabled():
        tensor = tensor.detach().requires_grad_()

        def refuse(_: Tensor) -> None:
            raise _other_way(crossing)

        tensor.register_hook(refuse)
    value = _Arrival.apply(tensor, crossing.leaf.order)
    return value.clone() if crossing.leaf.written else value
