"""The proof that a plan is right for a model: regions against whole ones, and gradients between ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.parallel.placement import Fused, tensor_axis, whole
from lightning_partrain.parallel.tensor.attributes import is_replaced, restore
from lightning_partrain.parallel.tensor.plan import Layer

#: How far a cut region may be from the whole one, as a part of its largest value.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
TOLERANCE_16_BIT = 0.1


def _tolerance(tensor: Tensor) -> float:
    if torch.is_autocast_enabled(tensor.device.type):
        return TOLERANCE_16_BIT
    if tensor.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return TOLERANCE.get(tensor.dtype, TOLERANCE_16_BIT)


class RegionCheck:
    """Compares a region's first output with what its whole layers give, on this call's own arguments, and goes away.

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
        self.arm()

    def arm(self) -> None:
        """Compare the next call, too."""
        self.handle = self.region.register_forward_pre_hook(self._compare, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionCheck:
        return self  # a copy of a module is not checked again

    @torch.no_grad()
    def _compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_replaced(self.layers[0].module):  # a pipeline looks at the step, with whole layers
            return
        if module is not self.region:
            return
        self.handle.remove()
        self.seen = True
        with isolate_rng(), _in_eval_mode(module), self._outside_of_stages():
            with self._whole_layers():
                expected = type(module).forward(module, *_copied(args), **_copied(kwargs))
            try:
                got = self._forward()(*_copied(args), **_copied(kwargs))
            except (RuntimeError, ValueError, AssertionError) as error:
                raise ValueError(
                    f"{self._blame()} It fails with {type(error).__name__}: {error}. {self._way_out()}"
                ) from error
        worst = torch.tensor([self._distance(got, expected)], dtype=torch.float64)
        worst = worst.to(next(iter(self._parameters())).device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        if not worst.item() <= 1.0:
            raise ValueError(f"{self._blame()} It gives other numbers than the whole module does. {self._way_out()}")

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
    def _whole_layers(self) -> Iterator[None]:
        kept: list[dict[Any, Any]] = [
            d for m in self.region.modules() for d in (vars(m), m._parameters, m._forward_pre_hooks, m._forward_hooks)
        ]
        before = [dict(d) for d in kept]
        try:
            for module in self.region.modules():
                restore(module)
                compat.drop_collective_hooks(module)
                for key, param in module._parameters.items():
                    if isinstance(param, DTensor):
                        module._parameters[key] = whole(param, self.fused.get((module, key)))
            yield
        finally:
            for each, own in zip(kept, before, strict=True):
                each.clear()
                each.update(own)

    @staticmethod
    def _distance(got: Any, expected: Any) -> float:
        """The largest difference as a multiple of what is allowed."""
        ours, theirs = (
            [t for t in compat.tree_flatten(x)[0] if isinstance(t, Tensor) and t.is_floating_point()]
            for x in (got, expected)
        )
        worst = 0.0 if len(ours) == len(theirs) else float("inf")
        for a, b in zip(ours, theirs, strict=False):
            if a.shape != b.shape:
                return float("inf")
            if not a.numel():
                continue
            a, b = a.nan_to_num().double(), b.nan_to_num()
            allowed = _tolerance(b) * max(float(b.abs().max()), 1e-6)
            worst = max(worst, float((a - b.double()).abs().max()) / allowed)
        return worst

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


def _copied(value: Any) -> Any:
    """Arguments that a call may change: tensors without their history, and objects such as a cache of keys and values."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, batches.PLAIN):
        return value
    if type(value) in (list, tuple, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        copies = {key: _copied(item) for key, item in items}
        return copies if isinstance(value, dict) else type(value)(copies.values())
    own = Tensor.__deepcopy__
    Tensor.__deepcopy__ = lambda self, memo: self.detach().clone()  # type: ignore[method-assign]
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
    finally:
        Tensor.__deepcopy__ = own  # type: ignore[method-assign]


def _extremes(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest and the smallest of each value over the ranks, in one reduction."""
    both = torch.stack([values, -values])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return torch.stack([both[0], -both[1]])


@torch.no_grad()
def check_loss(loss: Tensor, group: dist.ProcessGroup) -> None:
    """Raise, on all ranks, when the loss differs between the ranks of ``group``. Collective over ``group``.

    Raises:
        ValueError: says what may have happened.
    """
    largest, smallest = (x.item() for x in _extremes(loss.detach().double().reshape(-1).sum(), group))
    if largest - smallest > 1e-3 * max(abs(largest), abs(smallest), 1e-30):
        raise ValueError(
            f"The loss differs between the tensor-parallel ranks ({smallest:.6g} to {largest:.6g}): it rests on something inside of layers that "
            "are cut, where each rank sees its part only, or on random numbers or samples that are the rank's own. Keep the layers whole "
            "with 'replicate' in tensor_parallel_plan, and draw and load alike on all ranks."
        )


@torch.no_grad()
def check_gradients(parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Raise, on all ranks, when the gradient of a replicated parameter differs between the ranks of ``group``.

    Collective over ``group``.

    Raises:
        ValueError: names the parameter and the way out.
    """
    names, prints = [], []
    for name, param in parameters.items():
        if param.grad is None or _is_cut(param):
            continue
        grad = local_tensor(param.grad)
        double = grad.double()
        names.append(name)
        prints.append(torch.stack([double.sum(), double.abs().sum()]))
    if not prints:
        return
    largest, smallest = _extremes(torch.stack(prints), group)
    spread = (largest - smallest).abs().amax(-1)
    size = largest[:, 1].clamp(min=1e-30)
    # gradients that are not finite are a matter of the loss scale, or of the loss
    off = [name for name, part in zip(names, (spread / size).tolist(), strict=True) if part > 1e-3]
    if off:
        raise ValueError(
            f"The gradient of {off[0]!r} differs between the tensor-parallel ranks{f', and of {len(off) - 1} more' if off[1:] else ''}: it is "
            "used between layers that are cut, where each rank sees its part only. Give its module the style "
            "'replicated_with_grad_allreduce' in tensor_parallel_plan, or keep the layers around it whole with 'replicate'."
        )


def _is_cut(param: Tensor) -> bool:
    axis = tensor_axis(param)
    return axis is not None and not param.placements[axis].is_replicate()  # type: ignore[attr-defined]
