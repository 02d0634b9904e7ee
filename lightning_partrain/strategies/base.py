"""What every strategy of ours shares: processes, groups, and Lightning's contracts between ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary
from torchmetrics import Metric

from lightning_partrain import compat, numerics
from lightning_partrain.checkpoint import full
from lightning_partrain.mesh import ParallelMesh, ParallelSizes
from lightning_partrain.parallel.batchnorm import batch_norm_layers, restore_batch_norm, synchronize_batch_norm
from lightning_partrain.parallel.optimizer import swap_parameters
from lightning_partrain.parallel.replicate import ReplicatedModel
from lightning_partrain.strategies import audit
from lightning_partrain.strategies.failure import FailureNotice, lost_a_peer
from lightning_partrain.strategies.launcher import RankLauncher
from lightning_partrain.strategies.loaders import agree_on_length, seed_workers
from lightning_partrain.sync.messages import broadcast_json, gather_json, meet

#: Name of every parameter object that a module has had, so that optimizers can be given its present ones.
_NAMES: WeakIdKeyDictionary = WeakIdKeyDictionary()

#: Initial weights travel in pieces of about this size.
BROADCAST_BYTES = 64 << 20

#: How long a checkpoint waits for ranks that have not called save.
SAVE_WAIT = timedelta(minutes=5)


class MeshStrategy(ParallelStrategy):
    """Base of the strategies: ranks on a mesh, one meaning of "rank".

    The data-parallel group is what Lightning's metrics, samplers, workers and ``reduce`` mean; all ranks together
    decide, save and wait. Subclasses say how the model is laid out.

    Args:
        process_group_backend: ``"gloo"``, ``"nccl"`` or ``None`` for the device's default.
        timeout: seconds (or a ``timedelta``) that a rank waits in a collective for the others.
    """

    is_distributed = True  # without this, Lightning gives no distributed sampler and keeps metrics local, silently

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta | float = 1800.0) -> None:
        super().__init__()
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, not {timeout}.")
        self.mesh: ParallelMesh | None = None
        self.model_parallel: ReplicatedModel | None = None
        self._blocked = self._failed = False
        self._failure: FailureNotice | None = None
        self._monitored: set[str] = set()
        self._step_hooks: list[RemovableHandle] = []
        self._stepped: Callable[[Tensor], Tensor] = lambda param: param
        self.agreeing = self._decides_within_epochs = self._agree_on_next_step = False
        compat.agree_on_epoch_metrics(_owner)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: a strategy for lightning.pytorch.Trainer, not for pytorch_lightning.Trainer>"

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def sizes(self, world_size: int) -> ParallelSizes:
        """The sizes of the axes for so many processes.

        Raises:
            ValueError: when they do not fit; called before any process starts.
        """
        raise NotImplementedError

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        """Lay ``module`` (whole, equal on all ranks, on the device) out over ``self.mesh``."""
        raise NotImplementedError

    def layout(self) -> dict[str, Any]:
        """What a checkpoint records of the layout that wrote it."""
        assert self.mesh is not None
        sizes = self.mesh.sizes
        return {"strategy": type(self).__name__, "dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard}

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
        sizes = self.sizes(self.world_size)
        device_id = None if self.root_device.type == "cpu" else self.root_device
        compat.init_dist_connection(
            self.cluster_environment, self.process_group_backend, timeout=self.timeout, device_id=device_id
        )
        if self.mesh is None or self.mesh.sizes != sizes:
            self.mesh = ParallelMesh.create(sizes, self.root_device.type)
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

    # -- set-up ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None and self.mesh is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        audit.audit_module(self.model)
        self.audit(trainer)
        compat.at_epoch_ends(trainer, self._agree_at_epoch_end)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting and self._layer_sync is not None:
            self.model = synchronize_batch_norm(self.model, self.mesh.data_parallel_group)
        self._use_data_parallel_metrics()
        self._broadcast_state([t.detach() for t in (*self.model.parameters(), *self.model.buffers())])
        self._list_buffers()
        self._share_buffers(with_batch_norm=True)
        self._remember_names(self.model.named_parameters())
        self.model_parallel = self.parallelize(self.model, training=fitting)
        self._remember_names(self.model_parallel.named_parameters().items())
        self._stepped = self.model_parallel.stepped
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._attach_optimizers()
            self._monitored = audit.monitored_names(trainer)
            self._decides_within_epochs = self._agree_on_next_step = compat.decides_within_epochs(trainer)

    def audit(self, trainer: Any) -> None:
        """Refuse what this strategy cannot honour. Subclasses add to it."""

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _remember_names(self, named: Any) -> None:
        for name, param in named:
            _NAMES[param] = name

    def _attach_optimizers(self) -> None:
        assert self.model_parallel is not None
        now = self.model_parallel.held_parameters()
        for wrapper in self._lightning_optimizers:
            optimizer = compat.unwrap_optimizer(wrapper)
            audit.audit_optimizer(optimizer, self.sharded)
            self._use_current_parameters(optimizer, now)
            hook = optimizer.register_step_pre_hook(lambda opt, *_: self._use_current_parameters(opt, now))
            self._step_hooks.append(hook)
            self.model_parallel.attach_optimizer(optimizer, wrapper)

    def _use_current_parameters(self, optimizer: torch.optim.Optimizer, now: dict[str, nn.Parameter]) -> None:
        """Optimizers built before the layout, or given new groups since, hold parameters that are no longer the model's."""
        assert self.model_parallel is not None
        current = {*now.values(), *map(self._stepped, now.values())}
        params = {p for group in optimizer.param_groups for p in group["params"]}
        stale = {p: now[_NAMES[p]] for p in params if p not in current and _NAMES.get(p) in now}
        if stale:
            swap_parameters(optimizer, stale)
        if stale or not params <= current:
            audit.audit_optimizer_parameters(optimizer, current)

    @property
    def sharded(self) -> bool:
        return False

    @torch.no_grad()
    def _broadcast_state(self, tensors: list[Tensor]) -> None:
        """Give every rank the ``tensors`` of rank 0, many small ones at a time."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if not tensor.is_meta and tensor.numel() and not isinstance(tensor, DTensor):
                kinds.setdefault(tensor.dtype, []).append(tensor)
        for kind in kinds.values():
            while kind:
                group = [kind.pop()]
                while kind and sum(t.nbytes for t in group) + kind[-1].nbytes <= BROADCAST_BYTES:
                    group.append(kind.pop())
                flat = torch.cat([t.reshape(-1) for t in group])
                dist.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, 0)
                for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _list_buffers(self) -> None:
        """Where the buffers are: (module, key, whether batch norm's), for looking them up quickly in every step."""
        assert self.model is not None
        norms = set(batch_norm_layers(self.model))
        self._buffers = [(m, key, m in norms) for m in self.model.modules() for key in m._buffers]
        self._shared: dict[int, tuple[int, int]] = {}

    def _share_buffers(self, with_batch_norm: bool) -> None:
        """Bring changed buffers from rank 0: before each training step all but the running statistics of batch norm, which
        the step does not read; before evaluation and saving those too."""
        changed: dict[int, Tensor] = {}
        for index, (module, key, batch_norm) in enumerate(self._buffers):
            buffer = module._buffers[key]
            if buffer is None or (batch_norm and not with_batch_norm):
                continue
            state = (id(buffer), buffer._version)
            # batch norm's kernel does not count versions
            if batch_norm or self._shared.setdefault(index, state) != state:
                changed[index] = buffer
        if changed:
            if self.world_size > 1:
                self._broadcast_state(list(changed.values()))
            self._shared.update({index: (id(buffer), buffer._version) for index, buffer in changed.items()})

    def _use_data_parallel_metrics(self) -> None:
        """TorchMetrics reduce over all ranks by default, counting every tensor- or pipeline-parallel peer."""
        assert self.model is not None and self.mesh is not None
        for module in self.model.modules():
            if isinstance(module, Metric) and module.process_group is None:
                module.process_group = self.mesh.data_parallel_group

    # -- the step --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self.model_parallel is not None
        self.model_parallel.before_forward()
        self._share_buffers(with_batch_norm=False)
        self.model_parallel.guard(True)
        try:
            with self.precision_plugin.train_step_context():
                output = self.lightning_module.training_step(*args, **kwargs)
        finally:
            self.model_parallel.guard(False)
        if self._agree_on_next_step:  # every step of an epoch whose first one had something to agree on
            self._agree_on_next_step = self._agree([])
        return output

    def _evaluate(self, step: str, context: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self.model_parallel is not None
        self.model_parallel.before_forward()
        with context:
            return getattr(self.lightning_module, step)(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    def on_validation_start(self) -> None:
        self._share_buffers(with_batch_norm=True)

    def on_test_start(self) -> None:
        self._share_buffers(with_batch_norm=True)

    def on_predict_start(self) -> None:
        self._share_buffers(with_batch_norm=True)

    def on_validation_end(self) -> None:
        assert self.model_parallel is not None
        self.model_parallel.after_evaluation()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None and self.model_parallel is not None
        last_of_window = not self._blocked
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.model_parallel.begin_backward(last_of_window)
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        self.model_parallel.end_backward(last_of_window, self.lightning_module.automatic_optimization)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning wraps all passes of an accumulation window but the last in this."""
        before, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = before

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = plugin
        if plugin is not None and type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = (  # type: ignore[method-assign,assignment]
                lambda optimizer, clip_val: numerics.clip_grad_norm(
                    map(self._stepped, plugin.main_params(optimizer)), float(clip_val)
                )
            )
        if plugin is not None and type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
            plugin.clip_grad_by_value = (  # type: ignore[method-assign]
                lambda optimizer, clip_val: numerics.clip_grad_value(
                    map(self._stepped, plugin.main_params(optimizer)), float(clip_val)
                )
            )

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, equal on every rank; for ``on_before_optimizer_step`` and the like.

        Collective over all ranks. Under sharding ``p.grad.norm()`` is a partial value; this is not.
        """
        assert self.model_parallel is not None
        return numerics.grad_norm(self.model_parallel.named_parameters().values(), norm_type)

    # -- between ranks ---------------------------------------------------------------------------------------------------

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
        group = self._group(group)
        name = str(getattr(reduce_op, "name", reduce_op) if not isinstance(reduce_op, str) else reduce_op).split(".")[
            -1
        ]
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

    def process_dataloader(self, dataloader: Any) -> Any:
        assert self.mesh is not None
        if int(os.environ.get("PL_SEED_WORKERS", 0)):
            seed_workers(dataloader, self.mesh.data_parallel_rank)
        return agree_on_length(dataloader, self.control_group) if self.world_size > 1 else dataloader

    def _agree(self, logged: list[Any]) -> bool:
        """Check that all ranks have ``logged`` the same, and give monitored step values their mean (or sum, ...).

        Collective over all ranks. Returns whether there were such values.
        """
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        steps = compat.step_values(trainer, lambda name: audit.is_monitored(name, self._monitored))
        names = [(key, key, False) for key in steps]
        everyone = gather_json((logged + names, steps), torch.device("cpu"), self.control_group)
        audit.audit_logged_names([names for names, _ in everyone], self._monitored)
        values = {key: [each[key] for _, each in everyone] for key in steps}
        assert self.mesh is not None
        compat.set_step_values(trainer, {k: _reduced(v, self.mesh.size("data_parallel")) for k, v in values.items()})
        return bool(steps)

    def _agree_at_epoch_end(self) -> None:
        if self.world_size > 1:
            trainer = self.lightning_module.trainer  # type: ignore[union-attr]
            self._agree(compat.logged_names(trainer))
            self.agreeing = True
            compat.compute_epoch_metrics(trainer)
            self.agreeing = False
        self._agree_on_next_step = self._decides_within_epochs

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _meet_to_save(self) -> None:
        """Saving is collective. Wait for all ranks, but not for ever.

        Raises:
            RuntimeError: when some ranks did not call it.
        """
        if self.world_size == 1 or not dist.is_initialized():
            return
        wait = min(self.timeout / 2, SAVE_WAIT)  # before the others give up waiting for this rank
        missing = meet(compat.default_store(), wait)
        if missing:
            raise RuntimeError(
                f"A checkpoint is being saved on rank {self.global_rank}, but not on every rank: {missing} did not come within "
                f"{wait.total_seconds():.0f} s. Call trainer.save_checkpoint on all ranks, without `if trainer.is_global_zero`; "
                "one of them writes the file."
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._meet_to_save()
        if self.model_parallel is None:
            return self.lightning_module.state_dict()
        self._share_buffers(with_batch_norm=True)
        return self.model_parallel.state_dict(keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return full.full_optimizer_state(compat.unwrap_optimizer(optimizer), self._stepped, keep=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = self.broadcast(filepath)  # rank 0's: others may have formatted it from their own numbers
        if not self.is_global_zero:
            return
        groups = [
            [[_NAMES.get(p, "") for p in g["params"]] for g in compat.unwrap_optimizer(o).param_groups]
            for o in self.optimizers
        ]
        checkpoint[full.KEY] = full.describe(self.layout() if self.mesh else {}, groups)
        if type(self.checkpoint_io) is TorchCheckpointIO and "://" not in str(path) and storage_options is None:
            with full.replace_when_complete(path) as aside:
                self.checkpoint_io.save_checkpoint(checkpoint, aside)
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.model_parallel is None:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            self.model_parallel.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            full.load_full_optimizer_state(compat.unwrap_optimizer(optimizer), saved, self._stepped)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._failure is None or isinstance(exception, (KeyboardInterrupt, SystemExit)):
            return
        first = self._failure.publish(exception)
        if first["rank"] != self.global_rank and lost_a_peer(exception):
            raise RuntimeError(f"Stopped because {FailureNotice.describe(first)}.") from exception

    def teardown(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        if self._failure is not None:
            self._failure.close()
            self._failure = None
        if self.model_parallel is not None:
            assert self.lightning_module is not None
            if not self._failed:
                self._share_buffers(with_batch_norm=True)
                self.model_parallel.release()
                self._remember_names(self.lightning_module.named_parameters())
            self.model_parallel = None
            while self._step_hooks:
                self._step_hooks.pop().remove()
            if self._layer_sync is not None:
                restore_batch_norm(self.lightning_module)
            if self.root_device.type != "cpu":
                self.lightning_module.cpu()
        if self.lightning_module is not None:
            compat.forget_epoch_ends(self.lightning_module)
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _owner(reduce: Any) -> MeshStrategy | None:
    owner = getattr(reduce, "__self__", None)
    return owner if isinstance(owner, MeshStrategy) else None


def _reduced(values: list[tuple[float, str]], replicas: int) -> float:
    """(value, reduction) of all ranks as one value of the data-parallel ranks; ranks that see the same samples agree."""
    numbers = [value for value, _ in values]
    mean = sum(numbers) / len(numbers)
    how = next((each for _, each in values if each != "mean"), "mean")
    return {"min": min(numbers), "max": max(numbers), "sum": mean * replicas}.get(how, mean)
