"""Which rank is which: the sizes of the parallel axes and the process groups along them.

This is the one place that knows the topology. A :class:`ParallelMesh` is built once, is frozen, and is passed to whoever
needs it; nothing here is global.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Size = int | Literal["auto"]

#: Axes from the outermost (neighbouring indices furthest apart) to the innermost (ranks of one node).
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks each axis has. Their product is the number of processes.

    ``dp_replicate`` x ``dp_shard`` data-parallel ranks see different samples; the others (``pp``, ``cp``, ``tp``) work on
    the same samples.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"The size of the axis {axis.name!r} must be a whole number of at least 1, not {size!r}."
                )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data_parallel_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @classmethod
    def resolve(
        cls, world_size: int, data_parallel_size: Size = "auto", data_parallel_replicate_size: int = 1
    ) -> ParallelSizes:
        """Sizes for ``world_size`` processes; ``"auto"`` takes the ranks that are left.

        Args:
            world_size: number of processes.
            data_parallel_size: data-parallel ranks in all, replicas included.
            data_parallel_replicate_size: how many replicas they form; each replica is sharded over the rest (HSDP).

        Raises:
            ValueError: when the sizes do not multiply to ``world_size``.
        """
        replicas = data_parallel_replicate_size
        if not isinstance(replicas, int) or replicas < 1:
            raise ValueError(f"data_parallel_replicate_size must be a whole number of at least 1, not {replicas!r}.")
        size = world_size if data_parallel_size == "auto" else data_parallel_size
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"data_parallel_size must be 'auto' or a whole number of at least 1, not {size!r}.")
        if size != world_size:
            raise ValueError(
                f"data_parallel_size={size} needs {size} processes, but devices x num_nodes gives {world_size}. "
                f"Set data_parallel_size={world_size} or 'auto', or start {size} processes."
            )
        if size % replicas:
            fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"data_parallel_replicate_size={replicas} does not divide the {size} data-parallel ranks. "
                f"Sizes that do: {fitting}."
            )
        return cls(dp_replicate=replicas, dp_shard=size // replicas)


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The sizes, the :class:`DeviceMesh` over all ranks, and this rank's place in it.

    Build it with :meth:`create` on every rank, after the default process group exists.
    """

    sizes: ParallelSizes
    device_mesh: DeviceMesh
    _flat: dict[str, DeviceMesh] = field(repr=False)

    @classmethod
    def create(cls, sizes: ParallelSizes, device_type: str) -> ParallelMesh:
        """Collective over all ranks: creates the process groups.

        The device mesh also answers to ``data_parallel`` and ``tensor_parallel``, the names of Lightning's
        ``ModelParallelStrategy``, so that a ``configure_model`` written for it runs unchanged.
        """
        if sizes.world_size != dist.get_world_size():
            raise ValueError(f"{sizes} needs {sizes.world_size} processes, but {dist.get_world_size()} are running.")
        shape = tuple(getattr(sizes, axis) for axis in AXES)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        # torch announces that flattened axes will not be found by name one day; users of `self.device_mesh` look them up
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        flat = {
            "data_parallel": mesh["dp_replicate", "dp_shard"]._flatten("data_parallel"),
            "tensor_parallel": mesh["tp"]._flatten("tensor_parallel"),
        }
        return cls(sizes, mesh, flat)

    def rank(self, axis: str) -> int:
        """This process' index along ``axis`` (one of :data:`AXES`, ``data_parallel`` or ``tensor_parallel``)."""
        return self._axis(axis).get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along ``axis`` only."""
        return self._axis(axis).get_group()

    def size(self, axis: str) -> int:
        return self._axis(axis).size()

    def _axis(self, axis: str) -> DeviceMesh:
        return self._flat[axis] if axis in self._flat else self.device_mesh[axis]

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh that parameters are sharded over: 1-D, or (replicate, shard) when there are several replicas."""
        return (
            self.device_mesh["dp_replicate", "dp_shard"]
            if self.sizes.dp_replicate > 1
            else self.device_mesh["dp_shard"]
        )

    @property
    def data_parallel_rank(self) -> int:
        return self.rank("data_parallel")

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return self.group("data_parallel")

    def coordinates(self) -> str:
        """This rank's place in words, for logs and errors: only the axes with more than one rank."""
        named: Iterable[str] = (f"{axis} {self.rank(axis)}" for axis in AXES if getattr(self.sizes, axis) > 1)
        return ", ".join(named) or "alone"
