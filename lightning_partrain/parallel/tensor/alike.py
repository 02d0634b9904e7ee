"""The proof that tensor-parallel ranks agree: on the loss, and on the gradients of parameters that are not cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.placement import tensor_axis

#: How far what all ranks have computed alike may be apart, as a part of it: their devices may be of different kinds.
ALIKE = {torch.float64: 1e-10, torch.float32: 2e-6}
ALIKE_GRADIENTS = {torch.float64: 1e-8, torch.float32: 1e-4}


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
    if largest - smallest > ALIKE.get(loss.dtype, 1e-3) * max(abs(largest), abs(smallest), 1e-30):
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
    names, prints, allowed = [], [], []
    for name, param in parameters.items():
        if param.grad is None or _is_cut(param):
            continue
        grad = local_tensor(param.grad)
        double = grad.double()
        names.append(name)
        allowed.append(ALIKE_GRADIENTS.get(grad.dtype, 1e-2))
        prints.append(torch.stack([double.sum(), double.abs().sum()]))
    if not prints:
        return
    largest, smallest = _extremes(torch.stack(prints), group)
    spread = (largest - smallest).abs().amax(-1)
    size = largest[:, 1].clamp(min=1e-30)
    # gradients that are not finite are a matter of the loss scale, or of the loss
    parts = zip(names, (spread / size).tolist(), allowed, strict=True)
    off = [name for name, part, most in parts if part > most]
    if off:
        raise ValueError(
            f"The gradient of {off[0]!r} differs between the tensor-parallel ranks{f', and of {len(off) - 1} more' if off[1:] else ''}: it is "
            "used between layers that are cut, where each rank sees its part only. Give its module the style "
            "'replicated_with_grad_allreduce' in tensor_parallel_plan, or keep the layers around it whole with 'replicate'."
        )


def _is_cut(param: Tensor) -> bool:
    axis = tensor_axis(param)
    return axis is not None and not param.placements[axis].is_replicate()  # type: ignore[attr-defined]
