"""Every private name of Lightning and torch that the project touches, and every work-around for their defects.

Nothing else imports a name with a leading underscore from them. `tests/test_compat.py` fails when one disappears or
changes its form.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_process_group_backend,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

__all__ = [
    "DCP_CLASSES",
    "DCP_METADATA",
    "FakeTensorMode",
    "LocalGradScaler",
    "PrefetchDataFetcher",
    "ReduceScatter",
    "StridedShard",
    "SubprocessScriptLauncher",
    "TorchDispatchMode",
    "agree_on_checkpoint_path",
    "agree_on_epoch_metrics",
    "all_gather_single",
    "at_epoch_ends",
    "check_indices",
    "checkpoint_offset",
    "compute_epoch_metrics",
    "dcp_metadata",
    "decides_within_epochs",
    "deepcopy_with",
    "default_process_group_backend",
    "default_store",
    "disable_current_modes",
    "extension_compilers",
    "extension_files",
    "fill_unused_gradients",
    "forget_epoch_ends",
    "fsdp_follow_requires_grad",
    "fsdp_forget_gradients",
    "fsdp_gather_for_methods",
    "fsdp_gathered",
    "fsdp_params",
    "fsdp_sharding_one_by_one",
    "hold_schedulers",
    "init_dist_connection",
    "keep_float16_on_cpu",
    "link_only_what_is_there",
    "loads_in_its_own_way",
    "local_part",
    "logged_names",
    "pl_worker_init_function",
    "reduce_scatter_single",
    "remove_fully_shard",
    "saved_tensor",
    "set_group_timeout",
    "set_local_part",
    "set_step_values",
    "step_to_log",
    "step_values",
    "takes_device",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "uncount_step",
    "unwrap_optimizer",
    "written_arguments",
]


# torch 2.13 renamed these
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside a ``LightningOptimizer``."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


# ---------------------------------------------------------------------------------------------------------------------
# Lightning: metrics
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _synced(metric: _ResultMetric) -> Iterator[None]:
    sync = metric.meta.sync
    before, sync.should = sync.should, True
    try:
        yield
    finally:
        sync.should = before


def agree_on_epoch_metrics(agreeing: Callable[[Any], bool | None]) -> None:
    """Make Lightning reduce what decisions rest on, over the group of the strategy that logs it.

    Lightning 2.6 leaves an epoch's mean on each rank unless ``sync_dist=True``, so that callbacks compare different
    numbers on different ranks. After this call, epoch values of a strategy of ours are reduced while all its ranks are
    agreeing on them. Values of every other strategy are left alone.

    Args:
        agreeing: given the bound ``reduce`` method that Lightning stored with a metric: whether all ranks of its strategy are
            agreeing now; ``None`` for other strategies.
    """
    if getattr(_ResultCollection, "_agrees", False):
        return
    get_cache = _ResultCollection._get_cache

    def agreed_get_cache(metric: _ResultMetric, on_step: bool) -> Tensor | None:
        sync = metric.meta.sync
        computed = on_step or not metric.meta.on_epoch or metric._computed is not None
        alone = not metric.is_tensor or sync.should or sync.rank_zero_only or sync.fn is None
        now = None if computed or alone else agreeing(sync.fn)
        if now is None:
            return get_cache(metric, on_step)
        if now:
            with _synced(metric):
                return get_cache(metric, on_step)
        value = get_cache(metric, on_step)  # one rank looks: it sees its own value, and all of them agree later
        metric._computed = None
        return value

    _ResultCollection._get_cache = staticmethod(agreed_get_cache)  # type: ignore[method-assign,assignment]
    _ResultCollection._agrees = True  # type: ignore[attr-defined]


def step_to_log(trainer: Any) -> int | None:
    """The step that loggers count, when values are to be logged now, after an optimizer's step; otherwise ``None``."""
    if not trainer._logger_connector.should_update_logs:
        return None
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


class _HookThen:
    """A module's hook followed by ``then()``; in copies and pickles of the module it is the plain hook."""

    def __init__(self, hook: Any, then: Callable[[], None]) -> None:
        self.__wrapped__, self.then = hook, then

    def __call__(self) -> None:
        self.__wrapped__()
        self.then()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__wrapped__.__self__, self.__wrapped__.__name__)


def at_epoch_ends(trainer: Any, agree: Callable[[], None]) -> None:
    """Call ``agree()`` on all ranks when a loop has reached the end of an epoch, before hooks see its values, and again
    after the hooks that may log more, before callbacks decide. Undone by :func:`forget_epoch_ends`."""
    connector, module = trainer._logger_connector, trainer.lightning_module

    def epoch_end_reached() -> None:
        type(connector).epoch_end_reached(connector)
        agree()

    def on_epoch_end() -> None:
        agree()
        type(connector).on_epoch_end(connector)

    connector.epoch_end_reached, connector.on_epoch_end = epoch_end_reached, on_epoch_end
    # Lightning calls the callbacks that monitor right after this hook, before the connector's
    module.on_train_epoch_end = _HookThen(module.on_train_epoch_end, agree)


def forget_epoch_ends(module: Any) -> None:
    connector = module._trainer._logger_connector if module._trainer is not None else None
    for owner, name in ((connector, "epoch_end_reached"), (connector, "on_epoch_end"), (module, "on_train_epoch_end")):
        if owner is not None:
            vars(owner).pop(name, None)


def default_store() -> dist.Store:
    """The rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def logged_names(trainer: Any) -> list[tuple[str, str, bool]]:
    """(key, name, rank_zero_only) of what the running loop has logged since its last reset, in order of first logging."""
    results = trainer._results or {}
    return [(key, m.meta.name, m.meta.sync.rank_zero_only) for key, m in results.items() if not m.has_reset]


def compute_epoch_metrics(trainer: Any) -> None:
    """Compute every epoch value that has been logged, so that reading one later needs no other rank."""
    if trainer._results is not None:
        trainer._results.metrics(on_step=False)


def step_values(trainer: Any, wanted: Callable[[str], bool]) -> dict[str, tuple[float, str]]:
    """Key -> (value, reduction) of the last step value of each ``wanted`` name that training has logged in this epoch."""
    values = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        sync, cache = metric.meta.sync, metric._forward_cache
        ours = metric.meta.on_step and not (metric.has_reset or sync.should or sync.rank_zero_only)
        if ours and isinstance(cache, Tensor) and wanted(metric.meta.name):
            again = getattr(metric, "_agreed", None) is cache  # a sum must not be summed twice
            values[key] = (float(cache), "mean" if again else sync.op or "mean")
    return values


def set_step_values(trainer: Any, values: dict[str, float]) -> None:
    """Put agreed values in the place of those of :func:`step_values`, also where callbacks look."""
    for key, value in values.items():
        metric = trainer.fit_loop.epoch_loop._results[key]
        metric._forward_cache = metric._agreed = torch.full_like(metric._forward_cache, value)
        seen = trainer._logger_connector._callback_metrics
        seen.update(
            {name: metric._agreed for name in (metric.meta.name, metric.meta.forked_name(True)) if name in seen}
        )


def decides_within_epochs(trainer: Any) -> bool:
    """Whether a callback or scheduler looks at a monitored value after training steps, not only when an epoch ends."""
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            timed = callback._train_time_interval is not None
            if callback.monitor is not None and (timed or callback._every_n_train_steps > 0):
                return True
        elif isinstance(getattr(callback, "monitor", None), str) and not isinstance(callback, EarlyStopping):
            return True
    return any(c.reduce_on_plateau and c.interval == "step" for c in trainer.strategy.lr_scheduler_configs)


# ---------------------------------------------------------------------------------------------------------------------
# torch: DTensor
# ---------------------------------------------------------------------------------------------------------------------


def set_local_part(tensor: DTensor, local: Tensor) -> None:
    """Let ``tensor`` have ``local``, of the same shape, for this rank's part."""
    tensor._local_tensor = local


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself, without the dispatch of ``to_local`` (tens of microseconds)."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.requires_grad else local


# ---------------------------------------------------------------------------------------------------------------------
# torch: FSDP2
# ---------------------------------------------------------------------------------------------------------------------


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of ``module`` itself (torch 2.11 has one, 2.13 a list)."""
    return fsdp_groups(module._get_fsdp_state())


def fsdp_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def fsdp_params(root: nn.Module) -> list[Any]:
    """FSDP2's record of each sharded parameter in ``root``, in the order of the modules."""
    return [
        param
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for group in fsdp_param_groups(module)
        for param in group.fsdp_params
    ]


def fsdp_follow_requires_grad(module: nn.Module) -> RemovableHandle:
    """Let gathered parameters of ``module`` require a gradient when the optimizer's do, in every call.

    FSDP2 (torch 2.13) looks when it gathers, but those of a module that was frozen in a backward pass stay gathered after it.
    """

    def follow(*_: Any) -> None:
        for param in fsdp_params(module):
            gathered = getattr(param, "_unsharded_param", None)
            if gathered is not None and gathered.requires_grad != param.sharded_param.requires_grad:
                gathered.requires_grad_(param.sharded_param.requires_grad)

    return module.register_forward_pre_hook(follow, prepend=True)


def fsdp_before_backward(root: nn.Module, passes_by: Callable[[], None]) -> None:
    """Call ``passes_by`` when a backward pass comes to a sharded module in ``root`` that computes gradients of none of its parameters."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()

            def checked(grad: Tensor, state: Any = state, gather: Any = state._pre_backward) -> Tensor:
                params = [param for group in fsdp_groups(state) for param in group.fsdp_params]
                gathered = [getattr(param, "_unsharded_param", None) for param in params]
                trained = [param for param in gathered if param is not None and param.requires_grad]
                if trained and not any(map(is_in_backward, trained)):
                    passes_by()
                return gather(grad)

            state._pre_backward = checked  # type: ignore[method-assign]


def fsdp_versions(params: list[Any]) -> dict[str, int]:
    """Name -> a number that changes when a gathered parameter is written to. FSDP2 itself gathers without changing it."""
    gathered = {param._param_fqn: getattr(param, "_unsharded_param", None) for param in params}
    return {str(name): tensor._version for name, tensor in gathered.items() if tensor is not None}


def fsdp_outermost(module: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Gather the parameters of ``module`` between the first of nested calls and its end.

    torch's ``register_fsdp_forward_method`` gathers for a method too, but a call of ``forward`` inside such a method ends the
    gathering at the inner call, and the parameters are gathered once more (torch 2.11 to 2.13). Here only the outermost call
    counts.

    Returns:
        ``enter(args, kwargs, outermost)`` and ``leave(output, outermost)``, which give what to go on with. ``outermost`` says that
        no other call is open, whatever an exception has left behind.
    """
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    depth = 0

    def enter(args: tuple[Any, ...], kwargs: dict[str, Any], outermost: bool = False) -> Any:
        nonlocal depth
        depth = 1 if outermost else depth + 1
        return state._pre_forward(module, args, kwargs) if depth == 1 else (args, kwargs)

    def leave(output: Any, outermost: bool = False) -> Any:
        nonlocal depth
        depth = 0 if outermost else max(0, depth - 1)
        return state._post_forward(module, (), output) if depth == 0 else output

    state._pre_forward_hook_handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: enter(args, kwargs), prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = module.register_forward_hook(lambda _, args, output: leave(output))
    return enter, leave


def fsdp_gather_for_methods(module: Any, names: list[str]) -> None:
    """Gather the parameters of ``module`` for the length of each of its methods ``names``, as for ``forward``."""
    enter, leave = fsdp_outermost(module)

    def gathered(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def step(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = enter(args, kwargs, True)
            return leave(method(*args, **kwargs), True)

        return step

    for name in names:
        setattr(module, name, gathered(getattr(module, name)))


def drop_collective_hooks(module: nn.Module) -> None:
    """Take away hooks and methods that communicate when ``module`` is called. The caller puts its attributes back."""
    if isinstance(module, FSDPModule):
        state = module._get_fsdp_state()
        for hooks, handle in (
            (module._forward_pre_hooks, state._pre_forward_hook_handle),
            (module._forward_hooks, state._post_forward_hook_handle),
        ):
            hooks.pop(handle.id, None)
    if "_batch_group" in vars(module):  # synchronised batch norm
        vars(module).pop("forward", None)


def fsdp_defer_gradients(root: Any, defer: bool) -> None:
    """Let backward passes keep whole gradients, and whole parameters, on this rank; or no more."""
    root.set_is_last_backward(not defer)
    root.set_reshard_after_backward(not defer)
    root.set_requires_gradient_sync(not defer)


def fsdp_take_gradients(root: nn.Module) -> dict[Any, Tensor]:
    """FSDP2's record of a parameter (see :func:`fsdp_params`) -> its whole gradient, which it no longer has then."""
    taken = {}
    for param in fsdp_params(root):
        unsharded = getattr(param, "_unsharded_param", None)
        grads = [g for g in (param.unsharded_accumulated_grad, getattr(unsharded, "grad", None)) if g is not None]
        param.unsharded_accumulated_grad = None
        if unsharded is not None:
            unsharded.grad = None
        if grads:
            taken[param] = grads[0] if len(grads) == 1 else grads[0] + grads[1]
    return taken


def fsdp_add_gradients(grads: Mapping[Any, Tensor]) -> None:
    """Add what :func:`fsdp_take_gradients` took."""
    for param, grad in grads.items():
        there = param.unsharded_accumulated_grad
        param.unsharded_accumulated_grad = grad if there is None else there.add_(grad)


def fsdp_reduce_gradients(root: Any) -> None:
    """Reduce the gradients that earlier passes left whole, as torch's pipeline stages do at the end of a schedule."""
    state = root._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in reversed(fsdp_groups(each)):
            group.post_backward()
    state._root_post_backward_final_callback()


def fill_unused_gradients(module: FSDPModule, used: set[Any]) -> None:
    """Let every rank reduce the same parameters of ``module``, and record which had a gradient.

    FSDP2 (torch 2.11 to 2.13) reduce-scatters the parameters that have a gradient on this rank: where a parameter is unused
    on one rank only, the ranks send different sizes and hang or mix gradients up. Parameters without one get zeros here,
    before the reduction; the records of those with one (see :func:`fsdp_params`) are added to ``used``.
    """
    for group in fsdp_param_groups(module):
        reduce = group.post_backward

        def post_backward(*unused: Any, group: Any = group, reduce: Callable[..., None] = reduce) -> None:
            for param in group.fsdp_params:
                unsharded = getattr(param, "_unsharded_param", None)
                if unsharded is None or not unsharded.requires_grad:
                    continue
                if unsharded.grad is not None or param.unsharded_accumulated_grad is not None:
                    used.add(param)
                elif group.reduce_grads and group.is_unsharded:
                    unsharded.grad = torch.zeros_like(unsharded)
            reduce(*unused)

        group.post_backward = post_backward


def fsdp_forget_gradients(root: nn.Module, params: set[Tensor]) -> None:
    """Drop the whole gradients that FSDP2 keeps for ``params`` (sharded or gathered) between backward passes without sync."""
    for param in fsdp_params(root):
        unsharded = getattr(param, "_unsharded_param", None)
        if param.sharded_param in params or unsharded in params:
            param.sharded_param.grad = param.unsharded_accumulated_grad = None
            if unsharded is not None:
                unsharded.grad = None


def fsdp_gathered(root: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The whole parameters that are in memory now, and the whole gradients."""
    parameters, gradients = [], []
    for param in fsdp_params(root):
        unsharded = getattr(param, "_unsharded_param", None)
        if unsharded is None:
            continue
        if local_part(unsharded).untyped_storage().nbytes():
            parameters.append(local_part(unsharded))
        gradients += [local_part(g) for g in (unsharded.grad, param.unsharded_accumulated_grad) if g is not None]
    return parameters, gradients


@contextlib.contextmanager
def fsdp_sharding_one_by_one(before: Callable[[Tensor], Any], after: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``before`` with every parameter right before ``fully_shard`` cuts it, and ``after``, with what ``before`` gave, when it has."""
    cut = FSDPParam._init_sharded_param

    def around(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        given = before(param)
        cut(self, param, *args, **kwargs)
        after(given)

    FSDPParam._init_sharded_param = around  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParam._init_sharded_param = cut  # type: ignore[method-assign]


@torch.no_grad()
def remove_fully_shard(root: nn.Module, gathered: Callable[[Any], Tensor]) -> None:
    """Undo ``fully_shard`` everywhere in ``root``: the parameters that ``gathered`` gives, the module's own class, no hooks.

    Collective over the mesh. torch (2.11 to 2.13) offers no way back.
    """
    full: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    sharded = {param.sharded_param for param in fsdp_params(root)}
    for module in root.modules():
        for name, param in list(module._parameters.items()):
            if param is None or param not in sharded:
                continue
            if param not in full:
                full[param] = nn.Parameter(gathered(param).detach(), requires_grad=param.requires_grad)
            module._parameters[name] = full[param]
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            module.__class__ = module.__class__.__mro__[2]  # [FSDPOriginal, FSDPModule, Original, ...]
        for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):  # of sub-modules, too
            module.__dict__.pop(key, None)
    _remove_state_dict_hooks(root)
    _forget_composable_state(root)


def _remove_state_dict_hooks(root: nn.Module) -> None:
    for module in root.modules():
        for hooks in (
            module._state_dict_pre_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        ):
            for key, hook in list(hooks.items()):
                function = getattr(hook, "hook", hook)
                if getattr(function, "__module__", "").startswith("torch.distributed.fsdp."):
                    del hooks[key]


def _forget_composable_state(root: nn.Module) -> None:
    """Drop the registry entries that make ``fully_shard`` refuse a module that had it once."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    for module in root.modules():
        module.__dict__.pop(REGISTRY_KEY, None)
        module.__dict__.pop(STATE_KEY, None)
        _module_state_mapping.pop(module, None)


# ---------------------------------------------------------------------------------------------------------------------
# torch: tensors
# ---------------------------------------------------------------------------------------------------------------------


def check_indices(indices: Tensor, size: int) -> None:
    """As an indexing operation of torch does: an error, on a GPU without waiting for it.

    Raises:
        IndexError: on a CPU.
    """
    if isinstance(indices, FakeTensor) or not indices.numel():
        return
    inside = ((indices >= 0) & (indices < size)).all()
    if indices.device.type != "cpu":
        torch._assert_async(inside)
    elif not inside:
        raise IndexError(
            f"Index out of range: an embedding of {size} rows got indices from {int(indices.min())} to {int(indices.max())}."
        )


# ---------------------------------------------------------------------------------------------------------------------
# torch: distributed checkpoints
# ---------------------------------------------------------------------------------------------------------------------

#: torch 2.13's name for the file that says where everything is.
DCP_METADATA = ".metadata"

#: (module, name) of every class that torch 2.13 writes into that file.
DCP_CLASSES = frozenset(
    (each.__module__, each.__qualname__)
    for each in (
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.TensorStorageMetadata,
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.TensorProperties,
        dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
)


def dcp_metadata(tensors: Mapping[str, Any]) -> bytes:
    """The file :data:`DCP_METADATA` of a folder that ``torch.distributed.checkpoint`` reads.

    Args:
        tensors: name -> ``shape``, ``dtype``, and ``blocks`` with ``offsets``, ``sizes``, ``file``, ``begin`` and ``length``.
    """
    described: dict[str, Any] = {}
    stored = {}
    for name, tensor in tensors.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(b["offsets"]), torch.Size(b["sizes"])) for b in tensor["blocks"]]
        properties = dcp.TensorProperties(dtype=getattr(torch, tensor["dtype"]))
        described[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        for chunk, block in zip(chunks, tensor["blocks"], strict=True):
            stored[dcp.MetadataIndex(name, chunk.offsets)] = _StorageInfo(
                block["file"], block["begin"], block["length"]
            )
    return pickle.dumps(dcp.Metadata(described, storage_data=stored))


def agree_on_checkpoint_path(agreed: Callable[[Any, Any], Any]) -> None:
    """Let ranks agree on what they resume from: Lightning 2.6 has each look for itself, and go its own way when it finds nothing.

    Args:
        agreed: given the strategy and the path that this rank would take, or ``None``, the path that all take. Called on all ranks,
            once they are connected.
    """
    if getattr(_CheckpointConnector, "_agrees", False):
        return
    resume_start = _CheckpointConnector.resume_start

    def agreed_resume_start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        resume_start(self, agreed(self.trainer.strategy, checkpoint_path), *args, **kwargs)

    _CheckpointConnector.resume_start = agreed_resume_start  # type: ignore[method-assign]
    _CheckpointConnector._agrees = True  # type: ignore[attr-defined]


def link_only_what_is_there(ours: Callable[[Any], bool]) -> None:
    """Keep ``ModelCheckpoint(save_last="link")`` from linking to a checkpoint that there was no room for.

    Args:
        ours: whether a strategy goes on training without a checkpoint.
    """
    if getattr(ModelCheckpoint, "_links_only_what_is_there", False):
        return
    link = ModelCheckpoint._link_checkpoint

    def checked_link(trainer: Any, filepath: str, linkpath: str) -> None:
        if ours(trainer.strategy):
            trainer.strategy.wait_for_checkpoint()
            if not trainer.strategy.broadcast(os.path.exists(filepath)):
                return
        link(trainer, filepath, linkpath)

    ModelCheckpoint._link_checkpoint = staticmethod(checked_link)  # type: ignore[method-assign]
    ModelCheckpoint._links_only_what_is_there = True  # type: ignore[attr-defined]


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether a module in ``module`` does more in ``load_state_dict`` than to copy what has its names."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    for each in module.modules():
        hooks = [*each._load_state_dict_pre_hooks.values(), *each._load_state_dict_post_hooks.values()]
        if any(
            not getattr(getattr(hook, "hook", hook), "__module__", "").startswith("torch.distributed.")
            for hook in hooks
        ):
            return True
        if type(each).set_extra_state is not nn.Module.set_extra_state:
            return True
        plain = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
        if type(each)._load_from_state_dict not in plain and each.state_dict():
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# torch: the file format of torch.save
# ---------------------------------------------------------------------------------------------------------------------


def checkpoint_offset(fake: Tensor) -> int:
    """Where in a file the storage begins of a tensor that was loaded from it under ``FakeTensorMode``."""
    offset = fake.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def saved_tensor(dtype: torch.dtype, shape: tuple[int, ...], storage: Callable[[type, int], Any]) -> tuple[Any, ...]:
    """What ``torch.save`` pickles of a contiguous tensor: a function, and its arguments.

    Args:
        storage: given the class of the storage and the number of its elements, what stands for it.
    """
    stride = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        stride[dim] = stride[dim + 1] * max(1, shape[dim + 1])
    count, kind = torch.Size(shape).numel(), torch.storage._dtype_to_storage_type_map().get(dtype)
    if kind is None:  # a younger dtype
        untyped = storage(torch.UntypedStorage, count * dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (untyped, 0, shape, tuple(stride), False, OrderedDict(), dtype)
    typed = storage(getattr(torch, kind), count)
    return torch._utils._rebuild_tensor_v2, (typed, 0, shape, tuple(stride), False, OrderedDict())


# ---------------------------------------------------------------------------------------------------------------------
# torch: operators
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among its arguments that an operator writes into."""
    found = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written(func)]
    return [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, Tensor)]


@functools.cache
def takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def deepcopy_with(copied: Callable[[Tensor], Tensor | None]) -> None:
    """Let ``copy.deepcopy`` of a tensor or parameter take its numbers from ``copied``, unless that is ``None``.

    torch 2.13 copies storages and calls ``clone`` where no mode sees it.
    """
    for cls in (Tensor, nn.Parameter):
        if getattr(cls.__deepcopy__, "_asks", False):
            continue

        def deepcopy(self: Tensor, memo: dict[int, Any], own: Any = cls.__deepcopy__) -> Tensor:
            if id(self) in memo or (numbers := copied(self)) is None:
                return own(self, memo)
            if isinstance(self, nn.Parameter):
                numbers = nn.Parameter(numbers, self.requires_grad)
            else:
                numbers.__dict__ = copy.deepcopy(self.__dict__, memo)
            memo[id(self)] = numbers.requires_grad_(self.requires_grad)
            return numbers

        deepcopy._asks = True  # type: ignore[attr-defined]
        cls.__deepcopy__ = deepcopy  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------------
# Mixed precision
# ---------------------------------------------------------------------------------------------------------------------


class LocalGradScaler(torch.amp.GradScaler):
    """torch's scaler over the parts of gradients that ranks hold; what one of them finds, all of them know.

    torch 2.13's own raises on a mix of DTensors and plain tensors, and leaves pipeline stages with different scales.
    """

    _group: dist.ProcessGroup | None = None
    _found: Tensor | None = None
    _replicas = 1

    @classmethod
    def like(cls, other: torch.amp.GradScaler | None, device: str) -> LocalGradScaler:
        """With the settings and the state of ``other``, or torch's defaults."""
        if other is None:
            return cls(device)
        new = cls(device, enabled=other.is_enabled())
        if other.is_enabled():
            new.load_state_dict(other.state_dict())
        return new

    def attach(self, group: dist.ProcessGroup | None, stepped: Callable[[Tensor], Tensor], replicas: int) -> None:
        self._group, self._stepped, self._replicas = group, stepped, replicas

    def scale(self, outputs: Any) -> Any:
        """A sample's gradients are as large as in one process with the global batch: not larger for being in a small batch."""
        return super().scale(outputs) / self._replicas

    def found(self) -> Tensor:
        """Whether gradients unscaled last are not finite on some rank: a scalar, 0 or 1."""
        return self._found if self._found is not None else torch.zeros(())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """torch's, which raises when no optimizer's gradients were looked at since the last one."""
        looked = self.is_enabled() and any(s["found_inf_per_device"] for s in self._per_optimizer_states.values())
        if looked or new_scale is not None:
            super().update(new_scale)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    grad = self._stepped(param).grad
                    if grad is None:
                        continue
                    if grad.dtype == torch.float16 and not allow_fp16:
                        raise ValueError(
                            "precision='16-mixed' keeps parameters and gradients in float32, but a gradient is float16. Leave the parameters in "
                            "float32, or use precision='16-true'."
                        )
                    local = local_part(grad)
                    alike.setdefault((local.device, local.dtype), []).append(local)
            for (device, _), grads in alike.items():  # offloaded ones lie on the host
                found, factor = found_inf.to(device), (inv_scale * self._replicas).to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
            if self._group is not None:
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._group)
        self._found = found_inf
        return {found_inf.device: found_inf}


def keep_float16_on_cpu(is_ours: Callable[[Any], bool]) -> None:
    """Let ``precision="16-mixed"`` be what it says on a CPU; Lightning 2.6 takes bfloat16 there, with a warning.

    Args:
        is_ours: whether a strategy is one that this is for.
    """
    if getattr(_AcceleratorConnector, "_keeps_float16", False):
        return
    choose = _AcceleratorConnector._check_and_init_precision

    def chosen(connector: Any) -> Any:
        asked = connector._precision_flag == "16-mixed" and connector._precision_plugin_flag is None
        if asked and connector._accelerator_flag == "cpu" and is_ours(connector.strategy):
            return MixedPrecision("16-mixed", "cpu")
        return choose(connector)

    _AcceleratorConnector._check_and_init_precision = chosen  # type: ignore[method-assign,assignment]
    _AcceleratorConnector._keeps_float16 = True  # type: ignore[attr-defined]


def is_in_backward(param: Tensor) -> bool:
    """Within a backward pass: whether it reaches ``param``, which requires grad."""
    return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))


def after_closure(plugin: Any, module: Any, optimizer: Any) -> None:
    """What Lightning does between the last backward pass and the optimizer's step: hooks, clipping."""
    plugin._after_closure(module, optimizer)


def uncount_step(trainer: Any) -> None:
    """From within an optimizer step that was skipped: Lightning, which counts it anyway, has counted one less."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    for tracker in (progress.total, progress.current):
        tracker.ready -= 1
        tracker.completed -= 1


def hold_schedulers(trainer: Any, skipped: Callable[[], bool]) -> Callable[[], None]:
    """Let schedulers that count steps wait while ``skipped()``; returns what undoes it."""
    loop = trainer.fit_loop.epoch_loop

    def update(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not skipped():
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)

    loop.update_lr_schedulers = update
    return lambda: loop.__dict__.pop("update_lr_schedulers", None)


# ---------------------------------------------------------------------------------------------------------------------
# torch: C++ extensions
# ---------------------------------------------------------------------------------------------------------------------


def extension_files(name: str) -> tuple[Path, Path]:
    """The library and the lock of the extension ``name`` where torch 2.13 builds it, in a folder that is there then."""
    from torch.utils import cpp_extension  # imports setuptools

    folder = Path(cpp_extension._get_build_directory(name, False))
    return folder / f"{name}{cpp_extension.LIB_EXT}", folder / "lock"


def extension_compilers() -> tuple[str | None, str | None]:
    """The C++ compiler and the CUDA toolkit that torch 2.13 builds extensions with; ``None`` for what is not there."""
    from torch.utils import cpp_extension

    return shutil.which(cpp_extension.get_cxx_compiler()), cpp_extension.CUDA_HOME
