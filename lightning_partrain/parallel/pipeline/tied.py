"""Parameters that live on several stages: each stage has a part of the gradient, and all of them step alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.numerics import local_tensor


class TiedGradients:
    """Adds up the gradients of tied parameters over the stages that hold them.

    Collective over all ranks when it is built (it makes a group for each set of stages).

    Args:
        lives: name of every parameter -> the stages that hold it; see :func:`parameter_stages`.
        mesh: the mesh of the run.
    """

    def __init__(self, lives: Mapping[str, tuple[int, ...]], mesh: ParallelMesh) -> None:
        self._groups: list[tuple[dist.ProcessGroup, list[str]]] = []
        index = mesh.rank("pp")
        for stages in sorted({s for s in lives.values() if len(s) > 1}):
            group = mesh.new_groups("pp", stages)
            if index in stages:
                assert group is not None
                self._groups.append((group, [name for name, where in lives.items() if where == stages]))

    @torch.no_grad()
    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Collective over the stages of each set. A parameter that no stage has a gradient for is left without one.

        Args:
            parameters: name -> parameter as the optimizer's step sees it, with this stage's part of the gradient.
        """
        for group, names in self._groups:
            params = [parameters[name] for name in names]
            used = torch.tensor([float(p.grad is not None) for p in params], device=local_tensor(params[0]).device)
            missing = [p for p in params if p.grad is None]
            for param in missing:
                param.grad = torch.zeros_like(param)
            grads = [local_tensor(p.grad) for p in params if p.grad is not None]
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for grad in grads:
                by_dtype.setdefault(grad.dtype, []).append(grad)
            for same in by_dtype.values():
                flat = torch.cat([g.reshape(-1) for g in same])
                dist.all_reduce(flat, group=group)
                for grad, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
                    grad.copy_(part.view(grad.shape))
            dist.all_reduce(used, group=group)
            if missing:
                anywhere = used.tolist()
                for param, count in zip(params, anywhere, strict=True):
                    if not count:
                        param.grad = None
