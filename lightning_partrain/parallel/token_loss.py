"""Losses that are sums over tokens: a step has the gradient of their mean over all tokens of the global batch.

The plain mean of a batch, averaged over micro-batches, accumulation windows and data-parallel ranks, is a mean of means: where batches
have unequal numbers of tokens, each token of a short one counts more than in one large batch (Hugging Face, "Fixing Gradient
Accumulation", 2024). How many tokens there are is known only at the end of a window, and in a pipeline not before the first backward
pass either. So losses are divided by the number that the window before had, and its end puts the gradients right.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

#: The key beside ``"loss"`` under which ``training_step`` returns over how many tokens the loss is a sum.
COUNT = "num_tokens"


def is_counted(output: Any) -> bool:
    return isinstance(output, Mapping) and COUNT in output


def loss_and_count(output: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The sum and the number of tokens, float64.

    Raises:
        ValueError: when the sum is missing, or the count is no single number.
    """
    loss, count = output.get("loss"), output[COUNT]
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step returned {COUNT!r} without a 'loss', which has to be the sum of the losses of so many tokens."
        )
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex() and count.dtype != torch.bool:
        return loss, count.detach().reshape(()).to(loss.device, torch.float64)
    if isinstance(count, numbers.Integral) and not isinstance(count, bool):
        return loss, torch.full((), int(count), dtype=torch.float64, device=loss.device)
    raise ValueError(f"training_step returned {COUNT}={count!r}; it has to be a whole number or a tensor of one.")


def mean(output: Any) -> dict[str, Any]:
    """``output`` with the mean in place of the sum; without tokens, the sum itself, which is zero then."""
    loss, count = loss_and_count(output)
    return {**output, "loss": (loss.double() / count.clamp(min=1.0)).to(loss.dtype)}  # counts are large for 16 bits


def joined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean and the count of all micro-batches.

    Raises:
        ValueError: when only some of them have a count.
    """
    if not all(map(is_counted, outputs)):
        raise ValueError(f"training_step returned {COUNT!r} for some micro-batches only. Return it for every one.")
    parts = [loss_and_count(output) for output in outputs]
    return mean({"loss": torch.stack([loss for loss, _ in parts]).sum(), COUNT: sum(count for _, count in parts)})


class TokenLoss:
    """What the windows of one run have counted.

    Args:
        group: the data-parallel ranks, ``None`` for one.
        everyone: gives what all ranks gave it, ``None`` for one.

    Attributes:
        counting: whether the steps return a number of tokens, once one has.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, everyone: Callable[[bool], list[bool]] | None
    ) -> None:
        self._group, self._device, self._everyone = group, device, everyone
        self.counting: bool | None = None
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._reference: Tensor | None = None  # tokens of a pass on all ranks, about
        self._window = torch.zeros(2, dtype=torch.float64, device=device)  # tokens, and how many counts were negative
        self._pass = self._window[0]
        self._passes = 0
        self._factor: Tensor | None = None
        self._last: tuple[Tensor, Any] | None = None  # of a GPU, looked at a step later

    def weight(self, samples: int) -> Tensor:
        """In a pipeline: what a sum is multiplied with before its backward pass, so that the mean over ranks is about the mean over tokens.

        Collective over ``group`` the first time.

        Args:
            samples: of this pass on this rank.
        """
        if self._reference is None:
            self._reference = torch.full((), samples, dtype=torch.float64, device=self._device)
            self._reduce(self._reference)
        return self._ranks / self._reference

    def after_pass(self, output: Any, counted: bool) -> None:
        """Count the tokens of a pass, if its ``output`` has their number. Collective over all ranks the first time.

        Raises:
            ValueError: on all ranks, when only some of them count; here, when only some steps do.
        """
        if self.counting is None:
            self.counting = self._agree(counted)
        if counted != self.counting:
            now, before = ("now", "not in the first step") if counted else ("in the first step", "not now")
            raise ValueError(f"training_step returned {COUNT!r} {now}, but {before}. Return it in all steps, or never.")
        if counted:
            self._count(output)

    def _agree(self, counted: bool) -> bool:
        counting = [rank for rank, each in enumerate(self._everyone(counted)) if each] if self._everyone else []
        if self._everyone and counting and len(counting) < dist.get_world_size():
            raise ValueError(
                f"training_step returned {COUNT!r} on rank {', '.join(map(str, counting))} only. Return it on all ranks and in all steps, "
                "or never."
            )
        if counted:
            rank_zero_info(
                f"training_step returns {COUNT!r}: its loss is taken as a sum over so many tokens, and a step has the gradient of the mean "
                "over all tokens of its global batch."
            )
        return counted

    def _count(self, output: Mapping[str, Any]) -> None:
        _, count = loss_and_count(output)
        self._pass = count.clamp(min=1.0)
        self._window += torch.stack([count, (count < 0).double()])
        self._passes += 1
        if self._reference is None:
            self._reference = self._pass.clone()
            self._reduce(self._reference)

    def weighted(self, loss: Tensor) -> Tensor:
        """The mean of the pass that was counted last, as the part of the global mean that it is, about."""
        assert self._reference is not None
        return loss * (self._pass * self._ranks / self._reference).to(loss.dtype)

    def factor(self, accumulate: int) -> Tensor:
        """What the gradients of a window are to be multiplied with, a scalar, once its last pass was counted. Collective over ``group``.

        Args:
            accumulate: by how much the loss of each pass was divided.
        """
        if self._factor is None:
            assert self._reference is not None
            self._reduce(self._window)
            tokens = self._window[0]
            self._factor = torch.where((tokens > 0) & tokens.isfinite(), self._reference * accumulate / tokens, 0.0)
        return self._factor

    def finish(self, scale_gradients: Callable[[Tensor], None], accumulate: int) -> None:
        """At the end of a window: put the gradients right. Collective over ``group``.

        Args:
            scale_gradients: multiplies all gradients by a scalar.
            accumulate: see :meth:`factor`.

        Raises:
            ValueError: on all ranks, when there was no token or a count was negative; on a GPU after the next window.
        """
        scale_gradients(self.factor(accumulate))
        self._look_at(self._window)
        self._reference = (self._window[0] / self._passes).clamp(min=1.0)
        self._window, self._passes, self._factor = torch.zeros_like(self._window), 0, None

    def _reduce(self, values: Tensor) -> None:
        if self._group is not None:
            dist.all_reduce(values, group=self._group)

    def _look_at(self, window: Tensor) -> None:
        before, self._last = self._last, None
        if window.device.type == "cpu":
            self._check(window)
            return
        event = torch.cuda.Event()
        copy = torch.empty(2, dtype=window.dtype, pin_memory=True).copy_(window, non_blocking=True)
        event.record()
        self._last = (copy, event)
        if before is not None:
            before[1].synchronize()
            self._check(before[0])

    @staticmethod
    def _check(window: Tensor) -> None:
        tokens, negative = window.tolist()
        if negative or not 0 < tokens < math.inf:
            raise ValueError(
                f"The {COUNT} of a global batch must be positive and finite, but the micro-batches of all data-parallel ranks had {tokens:.0f} together"
                + (f", and {negative:.0f} of them a negative number." if negative else ".")
                + " Leave batches without labels out of the data."
            )
