"""What is done with what a compressor could not send. The memory is one vector a kind, as long as the gradient's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

RESIDUAL, MOMENTUM = "residual", "momentum"


class NoFeedback:
    """It is lost."""

    #: So many vectors are remembered.
    vectors = 0
    #: Whether momenta come in the place of gradients.
    gives_momentum = False

    @property
    def remembers(self) -> bool:
        return self.vectors > 0

    def before(self, gradient: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """What is to be sent for ``gradient``, (n,); neither is changed."""
        return gradient

    def after(self, vector: Tensor, sent: Tensor | None, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The new memory, once ``sent`` of ``vector``, which :meth:`before` gave and may be used up, is on its way."""
        return {}


class ErrorFeedback(NoFeedback):
    """It is added to the next gradient (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847)."""

    vectors = 1

    def before(self, gradient: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        return gradient + memory[RESIDUAL] if RESIDUAL in memory else gradient.clone()

    def after(self, vector: Tensor, sent: Tensor | None, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {RESIDUAL: torch.zeros_like(vector) if sent is None else vector.sub_(sent)}


class MomentumCorrection(NoFeedback):
    """Momentum is computed before sending, so that late gradients arrive with theirs (DGC: Lin et al., arXiv 1712.01887).

    ``u = momentum * u + g``, ``v = v + u``; entries of v are sent, and where they are, u and v are cleared (momentum factor masking).
    Takes the place of the optimizer's momentum.

    Args:
        momentum: the factor, in [0, 1).
    """

    vectors = 2
    gives_momentum = True

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def before(self, gradient: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        velocity = gradient.clone() if MOMENTUM not in memory else gradient + self.momentum * memory[MOMENTUM]
        self._velocity = velocity
        return velocity + memory[RESIDUAL] if RESIDUAL in memory else velocity.clone()

    def after(self, vector: Tensor, sent: Tensor | None, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        velocity = self._velocity
        if sent is None:
            return {RESIDUAL: torch.zeros_like(vector), MOMENTUM: torch.zeros_like(velocity)}
        kept = sent == 0
        return {RESIDUAL: vector.sub_(sent), MOMENTUM: velocity.mul_(kept)}
