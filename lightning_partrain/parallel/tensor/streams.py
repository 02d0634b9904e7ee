"""Random numbers of ranks that hold layers together: alike where a tensor is whole, different where each has a slice of it.

While tensors are cut, torch draws from a stream of this rank, which starts from a number that all ranks draw alike. So the draws after
it are alike again, and a checkpointed layer that is computed a second time, from the random state of the first, draws the same.
(Megatron-LM keeps two states for this, Shoeybi et al. 2019; DTensor's own tracker works on GPUs only.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_partrain.parallel.random_states import seed_torch, set_torch_states, torch_states


class RankStream:
    """The stream of tensor-parallel rank ``rank``."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: tuple[Tensor, Tensor | None] | None = None

    def enter(self) -> None:
        """Tensors are cut from here on. A second time does nothing."""
        if self._common is None:
            seed = int(torch.randint(1 << 62, ()))
            self._common = torch_states()
            seed_torch(seed + self._rank)

    def forget(self) -> None:
        """Whatever a step that failed has left behind."""
        self._common = None

    def leave(self) -> None:
        """Tensors are whole again."""
        if self._common is not None:
            set_torch_states(self._common)
            self._common = None
