"""Processes, groups, and what passes between ranks: the part of Lightning's Strategy that knows no model."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.mesh import ParallelMesh, ParallelSizes
from lightning_partrain.strategies.failure import FailureNotice, lost_a_peer
from lightning_partrain.strategies.launcher import RankLauncher
from lightning_partrain.strategies.loaders import agree_on_length, seed_workers
from lightning_partrain.sync.messages import broadcast_json, gather_json

#: Why the connections between these processes cannot be used any more.
_broken: list[str] = []


def _check_backend(backend: str | None) -> None:
    known = dist.Backend.backend_list
    parts = [part.rpartition(":")[2] for part in (backend or "").split(",")]
    if backend is not None and not set(parts) <= set(known):
        raise ValueError(
            f"process_group_backend={backend!r} is not one of {', '.join(known)}, or None for the device's default."
        )


class RankStrategy(ParallelStrategy):
    """One meaning of a rank: samplers, workers, ``reduce`` and ``all_gather`` mean the data-parallel group; all ranks together
    decide and wait.

    Args:
        process_group_backend: ``"gloo"``, ``"nccl"`` or ``None`` for the device's default.
        timeout: seconds (or a ``timedelta``) that a rank waits in a collective for the others.
    """

    is_distributed = True  # without this, Lightning gives no distributed sampler and keeps metrics local, silently

    def __init__(self, process_group_backend: str | None, timeout: timedelta | float) -> None:
        super().__init__()
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        _check_backend(process_group_backend)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
            raise TypeError(f"timeout must be a number of seconds or a timedelta, not {timeout!r}.")
        self.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, not {timeout}.")
        self.mesh: ParallelMesh | None = None
        self._host_groups: dict[str, dist.ProcessGroup | None] = {}
        self._failed = False
        self._failure: FailureNotice | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: a strategy for lightning.pytorch.Trainer, not for pytorch_lightning.Trainer>"

    def sizes(self, world_size: int) -> ParallelSizes:
        """The sizes of the axes for so many processes.

        Raises:
            ValueError: when they do not fit; called before any process starts.
        """
        raise NotImplementedError

    def fitting_sizes(self, sizes: ParallelSizes) -> ParallelSizes:
        """``sizes``, or others of the same product that suit the model. Collective over all ranks."""
        return sizes

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str:
        return self._process_group_backend or compat.default_process_group_backend(self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        assert self.mesh is not None
        return {"num_replicas": self.mesh.size("data_parallel"), "rank": self.mesh.data_parallel_rank}

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for each in (rank_zero_only, fabric_rank_zero_only):
            setattr(each, "rank", self.global_rank)  # noqa: B010  # an attribute of a function

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.sizes(self.num_nodes * self.num_processes)
        self._launcher = RankLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self.root_device, self.set_world_ranks
        )

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None and self.lightning_module is not None
        if _broken:
            raise RuntimeError(f"An earlier run in these processes ended because {_broken[0]}. Start the script again.")
        sizes = self.sizes(self.world_size)
        device_id = None if self.root_device.type == "cpu" else self.root_device
        compat.init_dist_connection(
            self.cluster_environment, self.process_group_backend, timeout=self.timeout, device_id=device_id
        )
        if dist.get_world_size() != sizes.world_size or (
            self._process_group_backend and dist.get_backend() not in self._process_group_backend
        ):
            raise ValueError(
                f"These are {dist.get_world_size()} processes with {dist.get_backend()!r}, started by an earlier Trainer or by the "
                f"launcher; this Trainer wants {sizes.world_size} with {self.process_group_backend!r}. One script has one of each: "
                "give all its Trainers the same devices, num_nodes and process_group_backend."
            )
        sizes = self.fitting_sizes(sizes)
        if self.mesh is None or self.mesh.sizes != sizes:
            self._host_groups.clear()
            self.mesh = ParallelMesh.create(sizes, self.root_device.type, self.timeout)
        self.lightning_module._device_mesh = self.mesh.device_mesh
        self._failed = False
        if self.world_size > 1:
            self._failure = FailureNotice(compat.default_store(), self.global_rank, self.mesh.coordinates())

    @cached_property
    def control_group(self) -> dist.ProcessGroup:
        """All ranks, for small messages on the host. Its first use is collective."""
        if self.process_group_backend == "gloo":
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return dist.new_group(backend="gloo", timeout=self.timeout)

    def host_group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along ``axis``, for tensors on the host; ``None`` when there is one. Its first use is collective over all ranks."""
        assert self.mesh is not None
        if axis not in self._host_groups:
            size, options = self.mesh.size(axis), {"backend": "gloo", "timeout": self.timeout}
            if size == 1:
                self._host_groups[axis] = None
            elif self.process_group_backend == "gloo":
                self._host_groups[axis] = self.mesh.group(axis)
            else:
                self._host_groups[axis] = self.mesh.new_groups(axis, range(size), **options)
        return self._host_groups[axis]

    def peer_groups(self) -> list[dist.ProcessGroup]:
        """The ranks that work on the same samples as this one, axis by axis, for tensors on the host."""
        return [group for axis in ("tp", "pp") if (group := self.host_group(axis)) is not None]

    # -- between ranks -------------------------------------------------------------------------------------------------

    def all_ranks(self, value: Any) -> list[Any]:
        """``value``, made of JSON values, of every rank."""
        return gather_json(value, torch.device("cpu"), self.control_group)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
            dist.barrier(device_ids=device_ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of global rank ``src``: JSON values, paths, or one-element tensors."""
        if not dist.is_initialized() or self.world_size == 1:
            return obj
        device = torch.device("cpu") if self.process_group_backend == "gloo" else self.root_device
        return broadcast_json(obj, src, device)

    def _group(self, group: Any) -> dist.ProcessGroup:
        """Lightning means the data replicas when it names no group, or all ranks."""
        assert self.mesh is not None
        return self.mesh.data_parallel_group if group is None or group is dist.group.WORLD else group

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks (or ``group``); whole numbers give a fractional mean.

        Args:
            tensor: a tensor of any shape; anything else is returned as it is.
            reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"`` or a ``torch.distributed.ReduceOp``.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # of a parameter that ranks hold together
        group = self._group(group)
        name = str(getattr(reduce_op, "name", reduce_op)).split(".")[-1]
        mean = name.lower() in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper(), None) or reduce_op
        value = tensor.detach().to(self.root_device) if tensor.device != self.root_device else tensor.detach().clone()
        if mean and not value.is_floating_point() and not value.is_complex():
            value = value.to(torch.float64 if value.device.type == "cpu" else torch.get_default_dtype())
        dist.all_reduce(value, op, group=group)
        return value / dist.get_world_size(group) if mean else value

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Shape (data-parallel ranks, ...): ``tensor`` of every data-parallel rank, or of ``group``."""
        return super().all_gather(tensor, group=self._group(group), sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks: every one must agree (``all``), or one is enough."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    def seed_workers(self, dataloader: Any) -> None:
        """As Lightning does after ``seed_everything(workers=True)``, but by data-parallel rank."""
        assert self.mesh is not None
        if int(os.environ.get("PL_SEED_WORKERS", 0)):
            seed_workers(dataloader, self.mesh.data_parallel_rank)

    def shared(self, dataloader: Any) -> Any:
        """``dataloader``, or one that hands out what a single one of the ranks with the same samples loads."""
        return dataloader

    def process_dataloader(self, dataloader: Any) -> Any:
        self.seed_workers(dataloader)
        dataloader = self.shared(dataloader)
        return agree_on_length(dataloader, self.control_group) if self.world_size > 1 else dataloader

    # -- the end -------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._failure is None or isinstance(exception, (KeyboardInterrupt, SystemExit)):
            return
        first = self._failure.publish(exception)
        _broken.append(FailureNotice.describe(first))
        if first["rank"] != self.global_rank and lost_a_peer(exception):
            raise RuntimeError(f"Stopped because {FailureNotice.describe(first)}.") from exception

    def teardown(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        if self._failure is not None:
            self._failure.close()
            self._failure = None
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
