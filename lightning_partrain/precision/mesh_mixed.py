"""Mixed precision in 16 bits with one loss scale over all ranks.

In float16 the loss is multiplied by a scale before the backward pass, and a step whose gradients are not finite is skipped and the
scale lowered. With torch's own scaler each rank would decide by the gradients that it sees: pipeline stages, tensor-parallel ranks and
shards of an optimizer would come to different scales and steps. Here all ranks agree first, then skip together, or none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_partrain import compat

#: The name of the state in checkpoints is that of Lightning's plugin, which can go on with it.
STATE_KEY = MixedPrecision.__qualname__


class MeshMixedPrecision(MixedPrecision):
    """``precision="16-mixed"`` and ``"bf16-mixed"`` on every layout, also on CPUs; our strategies put it in the place of Lightning's.

    Gradients are unscaled before hooks, norms and clipping see them. A skipped step moves neither ``trainer.global_step`` nor learning
    rate schedulers that count steps. In float16 each step waits for one number on the host: whether it is to be skipped.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: type of the device, for ``torch.autocast``.
        scaler: a ``torch.amp.GradScaler`` whose settings are taken over; for ``"16-mixed"`` only.

    Attributes:
        skipped: whether the last optimizer step was skipped.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if precision == "16-mixed" and not isinstance(scaler, compat.LocalGradScaler):
            scaler = compat.LocalGradScaler.like(scaler, device)
        super().__init__(precision, device, scaler)
        self.skipped = False
        # whose gradients are unscaled, and whether some of them are not finite
        self._found: dict[torch.optim.Optimizer, Tensor] = {}
        # which have stepped since the scale was updated, and whether they skipped
        self._stepped: dict[torch.optim.Optimizer, bool] = {}
        self._warned = False

    def attach(self, group: dist.ProcessGroup | None, stepped: Callable[[Tensor], Tensor], replicas: int) -> None:
        """Before the first step of a run.

        Args:
            group: the ranks that skip together; ``None`` for one.
            stepped: a parameter of an optimizer -> what its step updates, with the gradient.
            replicas: data-parallel ranks, over which gradients are averaged.
        """
        if isinstance(self.scaler, compat.LocalGradScaler):
            self.scaler.attach(group, stepped, replicas)

    def loss_scale(self, device: torch.device) -> Tensor | None:
        """What a loss is multiplied with before its backward pass, a scalar on ``device``; ``None`` without scaling."""
        return None if self.scaler is None else self.scaler.scale(torch.ones((), device=device))

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        self.skipped = False
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "LBFGS computes the loss several times a step, which a loss scale cannot follow. Use precision='bf16-mixed'."
            )
        optimizer = compat.unwrap_optimizer(optimizer)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step gave no loss
            return result
        self._unscale(optimizer)
        self._after_closure(model, optimizer)
        self.skipped = bool(self._found[optimizer].item())
        output = None if self.skipped else optimizer.step(**kwargs)
        self._stepped[optimizer] = self.skipped
        if model.automatic_optimization:
            self.update_scale()
        return output

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        self.update_scale()
        return super().pre_backward(tensor, module)

    def update_scale(self) -> None:
        """After the steps of all optimizers whose losses had the same scale: under manual optimization before the next loss is
        scaled, or when ``training_step`` ends."""
        if self.scaler is None or not self._stepped:
            return
        skipped = any(self._stepped.values())
        self.scaler.update()
        for optimizer in self._stepped:
            del self._found[optimizer]
        self._stepped.clear()
        if skipped:
            self._look_at_scale()

    def _look_at_scale(self) -> None:
        assert self.scaler is not None
        scale = self.scaler.get_scale()
        if scale < 1.0 and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"The loss scale of precision='16-mixed' has fallen to {scale:.3g}: the gradients are not finite even without it. Look at the "
                "loss and the learning rate, or use precision='bf16-mixed'."
            )

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Once for each step of ``optimizer``."""
        if isinstance(self.scaler, compat.LocalGradScaler) and optimizer not in self._found:
            self.scaler.unscale_(optimizer)
            self._found[optimizer] = self.scaler.found()

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._unscale(compat.unwrap_optimizer(optimizer))  # under manual optimization the step has not done so yet
        # not Lightning's, which refuses fused optimizers: they unscale nothing here
        Precision.clip_gradients(self, optimizer, *args, **kwargs)
