"""1-bit Adam: ranks exchange Adam's momentum, as signs; its step is in :mod:`lightning_partrain.optim.onebit_adam`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import Compressor, Reduction, Task
from lightning_partrain.sync.compressors.signsgd import average_signs, sign_block, sign_bytes
from lightning_partrain.sync.feedback import MOMENTUM, RESIDUAL, ErrorFeedback, NoFeedback


class MomentumFeedback(ErrorFeedback):
    """What is sent is the next momentum, ``beta1 * m + (1 - beta1) * g``, and what could not be sent of the last one.

    The momentum m, equal on all ranks, is the optimizer's: the caller puts it into the memory, as ``"momentum"``, before each step. What is
    not there is zero.

    Args:
        beta1: Adam's, in [0, 1).
    """

    gives_momentum = True

    def __init__(self, beta1: float) -> None:
        self.beta1 = beta1

    def before(self, gradient: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        vector = gradient * (1 - self.beta1)
        if MOMENTUM in memory:
            vector.add_(memory[MOMENTUM], alpha=self.beta1)
        return vector.add_(memory[RESIDUAL]) if RESIDUAL in memory else vector


class OneBit(Compressor):
    """The exchange of 1-bit Adam (Tang et al., arXiv 2102.02888): signs with the mean magnitude of every ``block`` numbers.

    In two shots, with feedback on both sides, of the momentum instead of the gradient. Adam's variance has to be good by then and is frozen:
    average exactly for 15 to 25 % of the steps. A block that is zero on all ranks stays zero. In others a sign stands for the block's mean
    magnitude, also of numbers that are zero. The step keeps this noise from weights that never had a gradient before; it remains where
    gradients were far smaller than their block's.

    Args:
        block: so many neighbours share a scale; a multiple of 8.

    Raises:
        ValueError: for an option out of its range.
    """

    def __init__(self, block: int = 256) -> None:
        self.block: int = sign_block(block)

    def served_block(self) -> int | None:
        return self.block

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        return average_signs(vector, self.block, task)

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """2 (ranks - 1) chunks of a vector / ranks, of blocks of ``block / 8 + 4`` bytes."""
        return sign_bytes(shapes, ranks, self.block)

    def own_feedback(self) -> NoFeedback:
        """Of plain gradients: an optimizer's beta1 is not known here. Whoever attaches one gives that."""
        return MomentumFeedback(0.0)
