"""Ranks that work on the same samples: they load the same, and draw the same random numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lightning_partrain.parallel.pipeline.sources import digest
from lightning_partrain.parallel.random_states import seeded, share_random_states
from lightning_partrain.strategies import audit
from lightning_partrain.sync.messages import gather_json


class Peers:
    """This rank and its peers, for one run.

    Args:
        groups: tensor-parallel ranks, and stages, for tensors on the host.

    Attributes:
        due: the steps of whose next batch peers compare theirs.
        seeds: of the training steps.
    """

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.due: set[str] = set()
        self.seeds: torch.Generator | None = None

    def share_random_states(self) -> None:
        """Load and draw alike from here on, also when a hook has drawn on one of them. Collective over the peers."""
        for group in self.groups:
            share_random_states(group)

    def seed_steps(self, seed: int) -> None:
        """``seed`` is the same on peers, and another on every data-parallel rank."""
        self.seeds = torch.Generator().manual_seed(seed)

    def seed_of_step(self) -> AbstractContextManager[None]:
        if self.seeds is None:
            return nullcontext()
        return seeded(int(torch.randint(1 << 62, (), generator=self.seeds)))

    def compare_batches(self, step: str, args: tuple[Any, ...]) -> None:
        """Collective over the peers, where the step is :attr:`due`.

        Raises:
            ValueError: on all of them, when they got different batches.
        """
        if step not in self.due:
            return
        self.due.discard(step)
        for group in self.groups:
            audit.audit_batches(gather_json([digest(args[:1])], torch.device("cpu"), group), step)
