"""Stage 0: every rank holds the whole model; gradients are averaged while the backward pass runs.

Also the interface that the sharding stages share. A strategy holds one of these and asks no further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.numerics import local_tensor
from lightning_partrain.sync.reducer import GradientReducer

Reduce = Literal["window", "micro_batch"]


class ReplicatedModel:
    """``zero_stage=0``.

    Args:
        module: the LightningModule, whole and with equal weights on every rank.
        mesh: the mesh of the run.
        reduce: ``"window"`` averages gradients once per accumulation window, ``"micro_batch"`` after every backward pass.
        training: whether gradients will be computed; without, nothing is installed.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, reduce: Reduce, training: bool = True) -> None:
        self.module, self.mesh, self.reduce, self.training = module, mesh, reduce, training
        self.reducer = self._make_reducer() if training else None

    def _make_reducer(self) -> GradientReducer | None:
        return GradientReducer(self.module.named_parameters(), self.mesh.data_parallel_group)

    # -- the step ------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """The module is about to be called: its parameters have to be whole."""

    def begin_backward(self, last_of_window: bool) -> None:
        if self.reducer is not None:
            self.reducer.begin(sync=last_of_window or self.reduce == "micro_batch")

    def end_backward(self, last_of_window: bool, automatic: bool) -> None:
        """With ``automatic`` optimization, nothing but the optimizer's step follows the last pass of a window."""
        if self.reducer is not None:
            self.reducer.finish()

    def after_evaluation(self) -> None:
        """Evaluation is over; parameters that were gathered for it may go."""

    def guard(self, inside_step: bool) -> None:
        """Inside a training step, a gradient outside `begin_backward` ... `end_backward` is an error."""
        if self.reducer is not None:
            self.reducer.guard = inside_step

    # -- parameters ----------------------------------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> the parameter as optimizers hold it."""
        return dict(self.module.named_parameters())

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
        """Make ``optimizer`` (and Lightning's ``wrapper`` of it) work on :meth:`named_parameters`."""

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """The whole model's state by name. Collective when sharded; ranks with ``keep=False`` get an empty dict."""
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        self.module.load_state_dict(state_dict, strict=strict)

    def release(self) -> None:
        """Make the module whole and plain again."""
        if self.reducer is not None:
            self.reducer.remove_hooks()

    # -- accounting ----------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """What this rank holds, by kind, as plain local tensors: ``parameters``, ``gradients``, ``buckets``."""
        parameters = list(self.module.parameters())
        buffers = [b for bucket in (self.reducer.buckets if self.reducer else []) if (b := bucket.buffer) is not None]
        return {
            "parameters": [local_tensor(p) for p in parameters],
            "gradients": [local_tensor(p.grad) for p in parameters if p.grad is not None],
            "buckets": buffers,
        }
