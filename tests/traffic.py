"""Counts collectives and the bytes a rank sends in them, by axis of the mesh."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_partrain.mesh import AXES, ParallelMesh


@dataclass
class Count:
    """Calls and bytes sent by this rank; a ring's bytes, which gloo's and NCCL's implementations meet for these."""

    calls: int = 0
    sent: float = 0.0


@dataclass
class Traffic(TorchDispatchMode):
    """``with Traffic(mesh) as traffic:`` counts into ``traffic.by_axis[axis][operation]``.

    Only collectives of this thread are seen: on CPU, autograd runs in the thread that calls backward.
    """

    mesh: ParallelMesh
    by_axis: dict[str, dict[str, Count]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Count)))

    def __post_init__(self) -> None:
        super().__init__()
        names = ["data_parallel", *AXES]
        self._axes = {self.mesh.group(axis).group_name: axis for axis in reversed(names) if self.mesh.size(axis) > 1}
        self._axes.setdefault(dist.group.WORLD.group_name, "world")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        group = dist.ProcessGroup.unbox(group)
        share = (group.size() - 1) / group.size()
        tensors = [t for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
        numbers = sum(t.nbytes for t in tensors)
        factor = {"allreduce": 2 * share, "broadcast": 1.0, "send": 1.0, "recv": 0.0}.get(name.rstrip("_"), share)
        if name.startswith("reduce_scatter"):
            numbers *= group.size()  # the first argument is the output
        count = self.by_axis[self._axes.get(group.group_name, "world")][name]
        count.calls += 1
        count.sent += factor * numbers

    def sent(self, axis: str) -> float:
        return sum(count.sent for count in self.by_axis[axis].values())

    def calls(self, axis: str) -> dict[str, int]:
        return {name: count.calls for name, count in self.by_axis[axis].items()}
