"""What ZeRO strategies and their engines cannot honour, refused before the first step; see :mod:`lightning_partrain.strategies.audit`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_partrain.parallel.optimizer import ELEMENTWISE, is_elementwise


def audit_offload(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: for an optimizer that cannot step on the rows that a rank has, on the host.
    """
    if not is_elementwise(optimizer):
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ValueError(
            f"offload='optimizer' lets the host update the rows that a rank has, which {type(optimizer).__name__} may not allow. Use one of torch's "
            f"{known}, or offload='none'."
        )


def audit_engine(engine: str, module: Any, trainer: Any, native: str) -> None:
    """Raise for what an engine that owns the backward pass and the step has no place for.

    Args:
        engine: its name, for people.
        native: the strategy here that does it.

    Raises:
        ValueError: manual optimization, an overridden backward, parameters without dimensions or elements, clipping by value, callbacks that
            put weights back in the middle of a run.
    """
    finder = next((c for c in trainer.callbacks if isinstance(c, (LearningRateFinder, BatchSizeFinder))), None)
    if finder is not None:
        raise ValueError(
            f"{type(finder).__name__} puts the weights back after its search, but {engine}'s engine has taken them over. Search with "
            f"strategy={native!r}."
        )
    hooks = ("on_after_backward", "on_before_optimizer_step")
    overridden = [(module, hook, None) for hook in hooks] + [
        (c, hook, Callback) for c in trainer.callbacks for hook in hooks
    ]
    for owner, hook, parent in overridden:
        if is_overridden(hook, owner, parent):
            rank_zero_warn(
                f"{type(owner).__name__}.{hook} sees no gradients: {engine} has them in flat tensors of its own, so that param.grad is None and changes "
                f"to it are lost. self.trainer.strategy.grad_norm() is their norm; strategy={native!r} has the gradients."
            )
    if not module.automatic_optimization:
        raise ValueError(
            f"{engine}'s engine runs one backward pass and one step after the other, and cannot follow manual optimization. Use strategy={native!r}."
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"The LightningModule overrides backward(), which {engine}'s engine never calls. Use strategy={native!r}."
        )
    for name, param in module.named_parameters():
        if not param.ndim or not param.numel():
            raise ValueError(
                f"{name!r} has no {'elements' if param.ndim else 'dimensions'}, which {engine} cannot send. Give it the shape (1,), or use "
                f"strategy={native!r}."
            )
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        raise ValueError(
            f"{engine}'s engine clips by the norm only. Use gradient_clip_algorithm='norm', or strategy={native!r}."
        )


def audit_compiled(engine: str, module: Any, native: str) -> None:
    """
    Raises:
        ValueError: for submodules that are compiled, whose parameters an engine that cuts them loses.
    """
    for name, each in module.named_modules():
        if hasattr(each, "_orig_mod"):
            raise ValueError(
                f"{name!r} is compiled (torch.compile), and {engine}'s stage 3 does not find its parameters. Leave it uncompiled, or use "
                f"strategy={native!r}."
            )


def audit_flat_optimizer(engine: str, optimizer: torch.optim.Optimizer, native: str) -> None:
    """
    Raises:
        ValueError: for an optimizer whose rule is not that of each element alone, over an engine that gives it flat parts of many parameters.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adagrad):
        raise ValueError(f"{engine} builds Adagrad anew, without the settings of its groups. Use strategy={native!r}.")
    if (
        optimizer.param_groups
        and not is_elementwise(optimizer)
        and not type(optimizer).__module__.startswith("deepspeed.")
    ):
        raise ValueError(
            f"{engine} gives the optimizer flat tensors with parts of many parameters in each, for which {name} may not be made: LAMB, LARS and the "
            f"like would take the norm of the wrong thing. Use one of torch's {', '.join(kind.__name__ for kind in ELEMENTWISE)}, or "
            f"strategy={native!r}."
        )


def audit_wrapped(root: nn.Module, name: str) -> None:
    """
    Args:
        root: the LightningModule.
        name: of a module that is to be gathered by itself.

    Raises:
        ValueError: for one that is never called, or whose parameters others use as well.
    """
    module = root.get_submodule(name)
    bare = type(module).forward is nn.Module.forward and "forward" not in module.__dict__
    if bare or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"wrap: {name!r} is a {type(module).__name__}, which has no forward that could gather it. Name its members: '{name}.*'."
        )
    inside = set(module.modules())
    for other, each in root.named_modules():
        shared = [
            key for key, param in each._parameters.items() if each not in inside and param in set(module.parameters())
        ]
        if shared:
            raise ValueError(
                f"wrap: {name!r} shares a parameter with {other!r} ({shared[0]!r}), which would be missing there. Leave it out; what no pattern "
                "names is gathered for the whole step."
            )
