"""The step of 1-bit Adam (Tang et al., arXiv 2102.02888) on the state of torch's Adam, once ranks exchange the momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_partrain.numerics import local_tensor

#: In a parameter's state: so many steps the frozen variance has seen. A plain number: optimizers move and cast tensors when they load.
FROZEN = "frozen_step"
_REFUSED = ("amsgrad", "maximize", "fused", "capturable", "differentiable")


def check(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: unless it is torch's Adam or AdamW, with options for which the step of 1-bit Adam is defined.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"OneBit takes the place of the step of torch.optim.Adam or AdamW, and cannot of {type(optimizer).__name__}'s. Use one of those, "
            "or with this optimizer the compressor 'signsgd'."
        )
    wrong = []
    for index, group in enumerate(optimizer.param_groups):
        wrong += [f"{name}={group[name]} in group {index}" for name in _REFUSED if group.get(name)]
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            wrong.append(
                f"Adam's weight_decay={group['weight_decay']} in group {index}, which is part of the gradient but not of the momentum that is "
                "exchanged (use AdamW)"
            )
    if wrong:
        raise ValueError(f"OneBit has a step of its own, without {'; '.join(wrong)}. Leave that out.")


def is_trained(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Adam has made a step."""
    return any(float(state["step"]) for state in optimizer.state.values() if "step" in state)


def thaw(optimizer: torch.optim.Optimizer) -> None:
    """Adam goes on with its variance, which is frozen anew when the next compressed step comes."""
    for state in optimizer.state.values():
        state.pop(FROZEN, None)


@torch.no_grad()
def step(optimizer: torch.optim.Optimizer) -> None:
    """One step in place of ``optimizer.step()``. Every ``grad`` holds the new momentum.

    The variance is frozen, and its bias correction with it; the momentum's goes on, so that the step is Adam's at the beginning. The weight
    decay is decoupled. Where the variance is zero a weight never had a gradient: what arrives as momentum is noise of the compression, which
    1 / eps would blow up, and is dropped.

    Raises:
        ValueError: for a parameter that Adam never trained, before anything is changed.
    """
    chosen = [[param for param in group["params"] if param.grad is not None] for group in optimizer.param_groups]
    for index, params in enumerate(chosen):
        for param in params:
            if not optimizer.state.get(param) or not float(optimizer.state[param]["step"]):
                raise ValueError(
                    f"1-bit Adam needs Adam's variance, but a parameter of shape {tuple(param.shape)} in group {index} has none: Adam made no "
                    "step with it before compression began. Give a larger start_step, or keep the parameter frozen."
                )
    for group, params in zip(optimizer.param_groups, chosen, strict=True):
        if params:
            _step(group, params, [optimizer.state[param] for param in params])


def _step(group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]]) -> None:
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    for state in states:
        state.setdefault(FROZEN, float(state["step"]))
        state["step"] += 1
    weights = [local_tensor(param) for param in params]
    grads = [local_tensor(param.grad) for param in params if param.grad is not None]
    momenta, variances = ([local_tensor(state[kind]) for state in states] for kind in ("exp_avg", "exp_avg_sq"))
    torch._foreach_copy_(momenta, grads)
    torch._foreach_mul_(momenta, torch._foreach_sign(variances))
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    scale = torch._foreach_sqrt(variances)
    torch._foreach_div_(scale, [(1 - beta2 ** state[FROZEN]) ** 0.5 for state in states])
    torch._foreach_add_(scale, group["eps"])
    torch._foreach_addcdiv_(weights, momenta, scale, [-lr / (1 - beta1 ** float(state["step"])) for state in states])
