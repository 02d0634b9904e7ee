"""Which rank is which: the sizes of the parallel axes and the process groups along them.

This is the one place that knows the topology. A :class:`ParallelMesh` is built once, is frozen, and is passed to whoever
needs it; nothing here is global.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_partrain import compat

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
        cls,
        world_size: int,
        data_parallel_size: Size = "auto",
        data_parallel_replicate_size: int = 1,
        pipeline_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
    ) -> ParallelSizes:
        """Sizes for ``world_size`` processes.

        Args:
            world_size: number of processes.
            data_parallel_size: data-parallel ranks in all, replicas included; ``"auto"`` takes the ranks that are left.
            data_parallel_replicate_size: how many replicas they form; each replica is sharded over the rest (HSDP).
            pipeline_parallel_size: stages of the pipeline; ``"auto"`` is 1.
            tensor_parallel_size: ranks that hold each layer together; ``"auto"`` is 1.

        Raises:
            ValueError: when the sizes do not multiply to ``world_size``.
        """
        replicas = data_parallel_replicate_size
        for name, value, auto in (
            ("data_parallel_replicate_size", replicas, ""),
            ("data_parallel_size", data_parallel_size, "'auto' or "),
            ("pipeline_parallel_size", pipeline_parallel_size, "'auto' or "),
            ("tensor_parallel_size", tensor_parallel_size, "'auto' or "),
        ):
            if (value != "auto" or not auto) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be {auto}a whole number of at least 1, not {value!r}.")
        stages = 1 if pipeline_parallel_size == "auto" else pipeline_parallel_size
        tensor = 1 if tensor_parallel_size == "auto" else tensor_parallel_size
        others = stages * tensor
        named = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
        given = [f"{name}={size}" for name, size in named.items() if size > 1]
        if data_parallel_size == "auto" and world_size % others:
            raise ValueError(
                f"{' times '.join(given)}{f' = {others}' if len(given) > 1 else ''} does not divide the {world_size} processes that "
                "devices x num_nodes gives."
            )
        size = world_size // others if data_parallel_size == "auto" else data_parallel_size
        if size * others != world_size:
            both = f"data_parallel_size={size}" + (f" with {' and '.join(given)}" if given else "")
            fitting = f"{world_size // others} or 'auto'" if world_size % others == 0 else "'auto'"
            other = ""
            if world_size % size == 0 and world_size // size % tensor == 0:
                other = f" and pipeline_parallel_size={world_size // size // tensor}"
            raise ValueError(
                f"{both} needs {size * others} processes, but devices x num_nodes gives {world_size}. "
                f"Set data_parallel_size={fitting}{f', or keep it{other}' if other else ''}, or start {size * others} processes."
            )
        if size % replicas:
            fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"data_parallel_replicate_size={replicas} does not divide the {size} data-parallel ranks. "
                f"Sizes that do: {fitting}."
            )
        return cls(pp=stages, dp_replicate=replicas, dp_shard=size // replicas, tp=tensor)


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The sizes, the :class:`DeviceMesh` over all ranks, and this rank's place in it.

    Build it with :meth:`create` on every rank, after the default process group exists.
    """

    sizes: ParallelSizes
    device_mesh: DeviceMesh
    _flat: dict[str, DeviceMesh] = field(repr=False)

    @classmethod
    def create(cls, sizes: ParallelSizes, device_type: str, timeout: timedelta | None = None) -> ParallelMesh:
        """Collective over all ranks: creates the process groups, with ``timeout`` in place of torch's.

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
        if timeout is not None:  # groups of a mesh are made with torch's own
            for each in (*(mesh[axis] for axis in AXES), *flat.values()):
                compat.set_group_timeout(timeout, each.get_group())
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

    def new_groups(self, axis: str, indices: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """A further group of the ranks with ``indices`` along ``axis``, for every place on the other axes.

        Collective over all ranks, whether they are in one of the groups or not.

        Args:
            options: for ``torch.distributed.new_group``.

        Returns:
            This rank's group, or ``None`` when its index is not among ``indices``.
        """
        place = AXES.index(axis)
        lines = self.device_mesh.mesh.movedim(place, -1).reshape(-1, self.size(axis))
        mine = None
        for line in lines.tolist():
            group = dist.new_group([line[index] for index in indices], **options)
            if dist.get_rank() in line and self.rank(axis) in indices:
                mine = group
        return mine

    def new_peer_group(self, **options: Any) -> dist.ProcessGroup:
        """A further group of the ranks that work on the same samples as this one. Collective over all ranks.

        Args:
            options: for ``torch.distributed.new_group``.
        """
        replicas = [AXES.index(axis) for axis in ("dp_replicate", "dp_shard")]
        lines = self.device_mesh.mesh.movedim(replicas, (0, 1)).reshape(self.size("data_parallel"), -1).tolist()
        groups = [dist.new_group(sorted(line), **options) for line in lines]
        return groups[self.data_parallel_rank]

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh that parameters are sharded over: 1-D, or (replicate, shard) when there are several replicas."""
        return (
            self.device_mesh["dp_replicate", "dp_shard"]
            if self.sizes.dp_replicate > 1
            else self.device_mesh["dp_shard"]
        )

    @cached_property
    def shard_and_tensor_mesh(self) -> DeviceMesh:
        """The mesh of parameters that are cut by a tensor-parallel plan and sharded as well."""
        axes = ("dp_shard", "tp")
        return self.device_mesh[("dp_replicate", *axes) if self.sizes.dp_replicate > 1 else axes]

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
