"""Logged values that decisions rest on are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_partrain import compat
from lightning_partrain.strategies import audit
from lightning_partrain.sync.messages import gather_json


class MetricAgreement:
    """For one run of a Trainer: checks that ranks log the same names, and reduces what callbacks and schedulers look at.

    Epoch values and monitored step values become those of the data-parallel ranks together; other step values stay the
    rank's own.

    Args:
        trainer: the Trainer.
        group: all ranks, for messages on the host.
        replicas: data-parallel ranks among them.
        before_epoch_values: called on all ranks before epoch values are computed.
    """

    def __init__(
        self, trainer: Any, group: dist.ProcessGroup, replicas: int, before_epoch_values: Callable[[], None]
    ) -> None:
        self.trainer, self.group, self.replicas = trainer, group, replicas
        self._before_epoch_values = before_epoch_values
        self.agreeing = False
        self._monitored: set[str] = set()
        self._within_epochs = self._on_next_step = False
        compat.at_epoch_ends(trainer, self._at_epoch_end)

    def watch(self) -> None:
        """Once callbacks and schedulers are known."""
        self._monitored = audit.monitored_names(self.trainer)
        self._within_epochs = self._on_next_step = compat.decides_within_epochs(self.trainer)

    def after_step(self) -> None:
        """After a training step; collective where something decides within epochs and the last step had a value for it."""
        if self._on_next_step:
            self._on_next_step = self._agree([])

    def close(self) -> None:
        compat.forget_epoch_ends(self.trainer.lightning_module)

    def _agree(self, logged: list[Any]) -> bool:
        """Check that all ranks have ``logged`` the same, and give monitored step values their mean (or sum, ...).

        Collective over all ranks. Returns whether there were such values.
        """
        steps = compat.step_values(self.trainer, lambda name: audit.is_monitored(name, self._monitored))
        names = [(key, key, False) for key in steps]
        everyone = gather_json((logged + names, steps), torch.device("cpu"), self.group)
        audit.audit_logged_names([names for names, _ in everyone], self._monitored)
        values = {key: [each[key] for _, each in everyone] for key in steps}
        compat.set_step_values(self.trainer, {key: _reduced(each, self.replicas) for key, each in values.items()})
        return bool(steps)

    def _at_epoch_end(self) -> None:
        self._agree(compat.logged_names(self.trainer))
        self._before_epoch_values()
        self.agreeing = True
        compat.compute_epoch_metrics(self.trainer)
        self.agreeing = False
        self._on_next_step = self._within_epochs


def _reduced(values: list[tuple[float, str]], replicas: int) -> float:
    """(value, reduction) of all ranks as one value of the data-parallel ranks; ranks that see the same samples agree."""
    numbers = [value for value, _ in values]
    mean = sum(numbers) / len(numbers)
    how = next((each for _, each in values if each != "mean"), "mean")
    return {"min": min(numbers), "max": max(numbers), "sum": mean * replicas}.get(how, mean)
