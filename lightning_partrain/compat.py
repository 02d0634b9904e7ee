"""Every private name of Lightning and torch that the project touches, and every work-around for their defects.

Nothing else imports a name with a leading underscore from them. `tests/test_compat.py` fails when one disappears or
changes its form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_process_group_backend,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

__all__ = [
    "Launcher",
    "ReduceScatter",
    "SubprocessScriptLauncher",
    "agree_on_epoch_metrics",
    "all_gather_single",
    "before_epoch_end",
    "default_pg_timeout",
    "default_process_group_backend",
    "default_store",
    "fill_unused_gradients",
    "fsdp_gathered",
    "fsdp_params",
    "init_dist_connection",
    "local_part",
    "logged_names",
    "pl_worker_init_function",
    "reduce_scatter_single",
    "remove_fully_shard",
    "unwrap_optimizer",
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


def agree_on_epoch_metrics(owner: Callable[[Any], Any], is_monitored: Callable[[Any, str], bool]) -> None:
    """Make Lightning reduce what decisions rest on, over the group of the strategy that logs it.

    Lightning 2.6 leaves an epoch's mean on each rank unless ``sync_dist=True``, so that callbacks compare different
    numbers on different ranks. After this call, epoch values and the monitored step values of a strategy of ours are
    reduced; values of every other strategy are left alone.

    Args:
        owner: maps the bound ``reduce`` method that Lightning stored with a metric to our strategy, or to ``None``.
        is_monitored: whether that strategy's run has a callback or scheduler that monitors the name.
    """
    if getattr(_ResultCollection, "_agrees", False):
        return
    get_cache, update = _ResultCollection._get_cache, _ResultMetric.update

    def ours(metric: _ResultMetric) -> Any:
        sync = metric.meta.sync
        if not metric.is_tensor or sync.should or sync.rank_zero_only or sync.fn is None:
            return None
        return owner(sync.fn)

    def agreed_get_cache(metric: _ResultMetric, on_step: bool) -> Tensor | None:
        if on_step or not metric.meta.on_epoch or metric._computed is not None or ours(metric) is None:
            return get_cache(metric, on_step)
        with _synced(metric):
            return get_cache(metric, on_step)

    def agreed_update(self: _ResultMetric, value: Any, batch_size: int) -> None:
        strategy = ours(self) if self.meta.on_step else None
        if strategy is None or not is_monitored(strategy, self.meta.name):
            return update(self, value, batch_size)
        with _synced(self):
            return update(self, value, batch_size)

    _ResultCollection._get_cache = staticmethod(agreed_get_cache)
    _ResultMetric.update = agreed_update
    _ResultCollection._agrees = True


def before_epoch_end(trainer: Any, check: Callable[[Any], None]) -> None:
    """Call ``check(trainer)`` whenever a loop reaches the end of an epoch, before values are reduced."""
    connector = trainer._logger_connector
    reached = type(connector).epoch_end_reached

    def epoch_end_reached() -> None:
        check(trainer)
        reached(connector)

    connector.epoch_end_reached = epoch_end_reached


def default_store() -> dist.Store:
    """The rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def logged_names(trainer: Any) -> list[tuple[str, bool]]:
    """(name, rank_zero_only) of what the running loop has logged since its last reset, in order of first logging."""
    results = trainer._results
    if results is None:
        return []
    return [(key, metric.meta.sync.rank_zero_only) for key, metric in results.items() if not metric.has_reset]


# ---------------------------------------------------------------------------------------------------------------------
# torch: DTensor
# ---------------------------------------------------------------------------------------------------------------------


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself, without the dispatch of ``to_local`` (tens of microseconds)."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.requires_grad else local


# ---------------------------------------------------------------------------------------------------------------------
# torch: FSDP2
# ---------------------------------------------------------------------------------------------------------------------


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of ``module`` itself (torch 2.11 has one, 2.13 a list)."""
    state = module._get_fsdp_state()
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


def fsdp_gathered(root: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The whole parameters that are in memory now, and the whole gradients."""
    parameters, gradients = [], []
    for param in fsdp_params(root):
        unsharded = getattr(param, "_unsharded_param", None)
        if unsharded is not None and unsharded.untyped_storage().nbytes():
            parameters.append(unsharded.detach())
            gradients += [g for g in (unsharded.grad, param.unsharded_accumulated_grad) if g is not None]
    return parameters, gradients


@torch.no_grad()
def remove_fully_shard(root: nn.Module) -> None:
    """Undo ``fully_shard`` everywhere in ``root``: plain full parameters, the module's own class, no hooks.

    Collective over the mesh. torch (2.11 to 2.13) offers no way back.
    """
    full: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in root.modules():
        for name, param in list(module._parameters.items()):
            if param is None or not hasattr(param, "full_tensor"):
                continue
            if param not in full:
                full[param] = nn.Parameter(param.full_tensor().detach().clone(), requires_grad=param.requires_grad)
            module._parameters[name] = full[param]
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            module.__class__ = module.__class__.__mro__[2]  # [FSDPOriginal, FSDPModule, Original, ...]
            for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                module.__dict__.pop(key, None)
    _forget_composable_state(root)


def _forget_composable_state(root: nn.Module) -> None:
    """Drop the registry entries that make ``fully_shard`` refuse a module that had it once."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    for module in root.modules():
        module.__dict__.pop(REGISTRY_KEY, None)
        module.__dict__.pop(STATE_KEY, None)
        _module_state_mapping.pop(module, None)
