"""The proof that a plan is right for a model: cut regions against whole ones."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.parallel.placement import Fused, tensor_axis, whole, without_shards
from lightning_partrain.parallel.tensor.attributes import is_replaced, restore
from lightning_partrain.parallel.tensor.plan import Layer

#: How far a cut region may be from the whole one, as a part of its largest value.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
TOLERANCE_16_BIT = 0.1

#: Gradients of this size are those of a run that diverges.
DIVERGED = 1e30

#: A gradient that is wrong is so for every made-up gradient of the output; one that cancels out is so for one.
ATTEMPTS = 2


def _tolerance(tensor: Tensor, narrow: bool) -> float:
    if narrow:
        return TOLERANCE_16_BIT
    if tensor.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return TOLERANCE.get(tensor.dtype, TOLERANCE_16_BIT)


@dataclass
class _Call:
    """One call of a region: its floating-point outputs, and what their gradient is wanted of, by name."""

    outputs: list[Tensor]
    inputs: dict[str, Tensor]

    def gradients(self, of: list[int], attempt: int) -> dict[str, Tensor]:
        """Of ``inputs``, for made-up gradients of the outputs with the numbers ``of``; zeros where they do not come in."""
        outputs = [self.outputs[i] for i in of]
        given = [
            torch.arange(y.numel(), device=y.device).mul(0.7 + 0.4 * attempt).cos().view(y.shape).to(y.dtype)
            for y in outputs
        ]
        found = torch.autograd.grad(outputs, list(self.inputs.values()), given, retain_graph=True, allow_unused=True)
        named = zip(self.inputs.items(), found, strict=True)
        return {name: torch.zeros_like(x) if grad is None else grad for (name, x), grad in named}


class RegionCheck:
    """Compares a region's calls with what its whole layers give for the same arguments: the output, and the gradients of what it
    takes and of parameters that are not cut. In evaluation mode, and in at least 32 bits where its code can.

    Collective over the tensor-parallel ranks.

    Args:
        name: of the region.
        region: the module.
        layers: what is cut in it.
        fused: (module, name) of parameters of which ranks hold another order.
    """

    def __init__(
        self,
        name: str,
        region: nn.Module,
        layers: list[Layer],
        fused: Mapping[tuple[nn.Module, str], Fused],
        group: dist.ProcessGroup,
    ) -> None:
        self.name, self.region, self.layers, self.fused, self.group = name, region, layers, fused, group
        self.seen = False
        self._kinds: set[Hashable] = set()
        self._handle: Any = None
        self.arm()

    def arm(self) -> None:
        """From now on, compare one call of each kind."""
        self._kinds.clear()
        if self._handle is None:
            self._handle = self.region.register_forward_pre_hook(self._compare, with_kwargs=True)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionCheck:
        return self  # a copy of a module is not checked again

    def _compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_replaced(self.layers[0].module):  # a pipeline looks at the step, with whole layers
            return
        kind = _kind(args, kwargs)
        if module is not self.region or kind in self._kinds:
            return
        self._kinds.add(kind)
        self.seen = True
        as_it_is = torch.autograd.graph.saved_tensors_hooks(
            Tensor.detach, Tensor.detach
        )  # not for a checkpoint around it
        with isolate_rng(), _in_eval_mode(module), self._outside_of_stages(), as_it_is:
            narrow = False
            try:
                expected, got = self._both(args, kwargs, wide=True)
            except _Narrow:
                narrow = True
                expected, got = self._both(args, kwargs, wide=False)
            if not self._worst(self._output_distance(got, expected, narrow)) <= 1.0:
                raise ValueError(
                    f"{self._blame()} It gives other numbers than the whole module does. {self._way_out()}"
                )
            for attempt in range(ATTEMPTS):
                off, where = self._gradient_distance(got, expected, narrow, attempt)
                if self._worst(off) <= 1.0:
                    return
        raise ValueError(
            f"{self._blame()} Its output is right, but the gradient of {where or 'what it takes'} is not: it is used where tensors are cut, "
            "so that each rank has a part of it, or its gradient is summed although each rank has all of it. A module with parameters "
            f"between cut layers gets the style 'replicated_with_grad_allreduce', one before them none. {self._way_out()}"
        )

    def _worst(self, distance: float) -> float:
        """Over the ranks."""
        worst = torch.tensor(distance, dtype=torch.float64, device=next(self._parameters()).device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        return worst.item()

    def _both(self, args: Any, kwargs: Any, wide: bool) -> tuple[_Call, _Call]:
        """The region with whole and with cut layers.

        Raises:
            _Narrow: when the whole one cannot compute in 32 bits (``wide``).
        """
        try:
            with self._parameters_for(True, wide) as params:
                expected = self._call(partial(type(self.region).forward, self.region), args, kwargs, params, wide)
        except RuntimeError as error:
            if wide and self._is_narrow():
                raise _Narrow from error
            raise
        try:
            with self._parameters_for(False, wide) as params:
                return expected, self._call(self._forward(), args, kwargs, params, wide)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"{self._blame()} It fails with {type(error).__name__}: {error}. {self._way_out()}"
            ) from error

    def _is_narrow(self) -> bool:
        autocast = torch.is_autocast_enabled(next(self._parameters()).device.type)
        return autocast or any(_narrow(p) for p in self._parameters())

    @contextmanager
    def _arithmetic(self, wide: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if wide and self._is_narrow():
                stack.enter_context(torch.autocast(next(self._parameters()).device.type, enabled=False))
                stack.enter_context(_default_dtype(torch.float32))
            yield

    def _call(self, forward: Any, args: Any, kwargs: Any, params: dict[str, Tensor], wide: bool) -> _Call:
        leaves: list[Tensor] = []
        with self._arithmetic(wide):
            out = forward(*_copied(args, leaves, wide), **_copied(kwargs, leaves, wide))
        outputs = [t for t in compat.tree_flatten(out)[0] if isinstance(t, Tensor) and t.is_floating_point()]
        return _Call(outputs, {**{f"argument {i + 1}": leaf for i, leaf in enumerate(leaves)}, **params})

    def _parameters(self) -> Iterator[Tensor]:
        for module in self.region.modules():
            yield from (p for p in module._parameters.values() if p is not None)

    def _forward(self) -> Any:
        style = next((layer.style for layer in self.layers if layer.module is self.region), None)
        if style is None:
            return partial(type(self.region).forward, self.region)
        assert style.forward is not None
        return partial(style.forward, self.region, self.group)

    @contextmanager
    def _outside_of_stages(self) -> Iterator[None]:
        """Modules of the region that a pipeline stage counts the calls of, without that."""
        forwards = {m: vars(m)["forward"] for m in self.region.modules() if "forward" in vars(m)}
        for module, forward in forwards.items():
            vars(module)["forward"] = getattr(forward, "without_stage", forward)
        try:
            yield
        finally:
            for module, forward in forwards.items():
                vars(module)["forward"] = forward

    @contextmanager
    def _parameters_for(self, uncut: bool, wide: bool) -> Iterator[dict[str, Tensor]]:
        """The region with whole layers, or with cut ones, and copies of its parameters; those that no layer cuts are given by name."""
        kept: list[dict[Any, Any]] = [
            d
            for m in self.region.modules()
            for d in (vars(m), m._parameters, m._buffers, m._forward_pre_hooks, m._forward_hooks)
        ]
        before = [dict(d) for d in kept]
        copies: dict[Tensor, Tensor] = {}
        named: dict[str, Tensor] = {}
        try:
            for name, module in self.region.named_modules():
                if uncut:
                    restore(module)
                compat.drop_collective_hooks(module)
                for key, param in module._parameters.items():
                    if param is None:
                        continue
                    if param not in copies:
                        copies[param] = self._copy(param, self.fused.get((module, key)), uncut, wide)
                        if copies[param].requires_grad:
                            named[f"{name}.{key}" if name else key] = copies[param]
                    module._parameters[key] = copies[param]
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = buffer.float() if wide and _narrow(buffer) else buffer.clone()
            yield named
        finally:
            for each, own in zip(kept, before, strict=True):
                each.clear()
                each.update(own)

    @staticmethod
    def _copy(param: Tensor, fused: Fused | None, uncut: bool, wide: bool) -> Tensor:
        """Without shards; and whole, where it is not cut or has to be so. What is not cut may require a gradient."""
        if tensor_axis(param) is None:
            return _leaf(whole(param) if isinstance(param, DTensor) else param, wide, param.requires_grad)
        assert isinstance(param, DTensor)
        value = whole(param, fused) if uncut else without_shards(param)
        return value.float() if wide and _narrow(value) else value

    def _output_distance(self, got: _Call, expected: _Call, narrow: bool) -> float:
        """The largest difference of outputs, as a multiple of what is allowed."""
        if len(got.outputs) != len(expected.outputs):
            return float("inf")
        pairs = zip(got.outputs, expected.outputs, strict=True)
        return max((_distance(a, self._slice_like(a, b), 1e-6, narrow) for a, b in pairs), default=0.0)

    def _gradient_distance(self, got: _Call, expected: _Call, narrow: bool, attempt: int) -> tuple[float, str]:
        """The same of gradients, and where it is. Those of a run that diverges are not judged."""
        of = [
            i
            for i, (a, b) in enumerate(zip(got.outputs, expected.outputs, strict=True))
            if a.requires_grad and b.requires_grad and a.shape == b.shape
        ]
        if not of or not expected.inputs or got.inputs.keys() != expected.inputs.keys():
            return 0.0, ""
        try:
            with self._arithmetic(not narrow):
                right, found = expected.gradients(of, attempt), got.gradients(of, attempt)
        except RuntimeError:  # reentrant checkpoints inside
            return 0.0, ""
        if not all(bool((grad.abs() < DIVERGED).all()) for grad in right.values()):
            return 0.0, ""
        floor = 1e-3 * max((float(g.abs().max()) for g in right.values() if g.numel()), default=0.0)
        off = {name: _distance(found[name], grad, max(floor, 1e-12), narrow) for name, grad in right.items()}
        where = max(off, key=lambda name: off[name])
        return off[where], where

    def _slice_like(self, got: Tensor, expected: Tensor) -> Tensor:
        """Of an output that stays cut, such as the weights of some heads, this rank's slice."""
        if got.ndim != expected.ndim:
            return expected
        dims = [d for d in range(got.ndim) if got.shape[d] != expected.shape[d]]
        if len(dims) == 1 and got.shape[dims[0]] * self.group.size() == expected.shape[dims[0]]:
            return expected.chunk(self.group.size(), dims[0])[self.group.rank()]
        return expected

    def _blame(self) -> str:
        cut = ", ".join(f"{layer.name!r} {layer.style.name!r}" for layer in self.layers[:4])
        more = ", ..." if len(self.layers) > 4 else ""
        return (
            f"The module {self.name or type(self.region).__name__!r} ({type(self.region).__name__}) cannot be cut as tensor_parallel_plan "
            f"does ({cut}{more})."
        )

    def _way_out(self) -> str:
        parent = self.layers[0].name.rpartition(".")[0]
        names = [f"{parent}.*"] if parent else [layer.name for layer in self.layers]
        whole = ", ".join(f"'{name}': 'replicate'" for name in names)
        return (
            "Its code may expect all heads or features, or its layers may not be what their names say. Keep it whole: "
            f"tensor_parallel_plan={{'*': 'auto', {whole}}}, or map its layers to other styles."
        )


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    for each, _ in modes:
        each.training = False
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


class _Narrow(Exception):  # noqa: N818
    """A module that cannot compute in 32 bits what it does in 16."""


def _narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _leaf(tensor: Tensor, wide: bool, trained: bool) -> Tensor:
    value = tensor.detach().float() if wide and _narrow(tensor) else tensor.detach().clone()
    return value.requires_grad_(trained and torch.is_grad_enabled())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Equal for calls of which one stands for the others."""
    leaves, structure = compat.tree_flatten((args, kwargs))
    described: list[Any] = [torch.is_grad_enabled(), str(structure)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        else:
            described.append(leaf if isinstance(leaf, batches.PLAIN) else type(leaf))
    return tuple(described)


def _distance(got: Tensor, expected: Tensor, floor: float, narrow: bool) -> float:
    """The largest difference as a multiple of what is allowed."""
    if got.shape != expected.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    a, b = got.detach().nan_to_num().double(), expected.detach().nan_to_num()
    allowed = _tolerance(b, narrow) * max(float(b.abs().max()), floor)
    return float((a - b.double()).abs().max()) / allowed


def _copied(value: Any, leaves: list[Tensor], wide: bool) -> Any:
    """Arguments that a call may change: tensors with no history but ``leaves``, and objects such as a cache of keys and values."""
    if isinstance(value, Tensor):
        leaf = _leaf(value, wide, value.requires_grad)
        if leaf.requires_grad:
            leaves.append(leaf)
            return leaf.clone()
        return leaf
    if isinstance(value, batches.PLAIN):
        return value
    if type(value) in (list, tuple, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        copies = {key: _copied(item, leaves, wide) for key, item in items}
        return copies if isinstance(value, dict) else type(value)(copies.values())
    own = Tensor.__deepcopy__
    Tensor.__deepcopy__ = lambda self, memo: self.detach().clone()  # type: ignore[method-assign]
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
    finally:
        Tensor.__deepcopy__ = own  # type: ignore[method-assign]
