"""The one place that says no: what a strategy cannot honour is refused on every rank before the first step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_partrain.precision.mesh_mixed import MeshMixedPrecision

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # Lightning before 2.6
    WeightAveraging = None  # type: ignore[assignment,misc]


#: Plugins that change layers into ones that cannot be cut, or that drive another strategy.
OTHER_PRECISION = (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)

#: torch's optimizers that get wrong numbers or an error from DTensors, and why.
NOT_OVER_SHARDS = {
    "LBFGS": "works on one vector of all gradients, which no rank has under sharding",
    "Adafactor": "updates norms of whole rows and columns in place, which torch cannot do over shards",
    "Muon": "multiplies whole matrices in bfloat16, which gives other numbers over shards",
}


def audit_module(module: nn.Module) -> None:
    """Raise for parameters whose gradients cannot be averaged.

    Raises:
        ValueError: sparse embedding gradients, complex parameters.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise ValueError(
                f"{name!r} has sparse gradients, which cannot be averaged in buckets. Build it with sparse=False."
            )
    for name, param in module.named_parameters():
        if param.is_complex():
            raise ValueError(
                f"{name!r} is complex. Hold it as a real parameter with a last dimension of 2 (torch.view_as_real)."
            )


def audit_precision(plugin: Any, ranks: int) -> None:
    """Raise for precision plugins that other strategies or whole layers are needed for.

    Raises:
        ValueError: names the plugin and what to use.
    """
    if isinstance(plugin, OTHER_PRECISION):
        raise ValueError(
            f"{type(plugin).__name__} does not work with this strategy. Use precision '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', "
            "'16-true' or '64-true'."
        )
    if ranks > 1 and getattr(plugin, "scaler", None) is not None and not isinstance(plugin, MeshMixedPrecision):
        raise ValueError(
            f"{type(plugin).__name__} has a loss scale of its own, which would differ between ranks. Derive it from "
            "lightning_partrain.precision.MeshMixedPrecision, whose ranks agree on one."
        )


def audit_callbacks(callbacks: list[Any], zero_stage: int, stages: int, tensor: int) -> None:
    """Raise for callbacks that copy or average the module's parameters as if they were whole.

    Raises:
        ValueError: weight averaging under sharding or over pipeline stages.
    """
    averaging = _averaging()
    for callback in callbacks:
        if isinstance(callback, averaging) and stages > 1:
            raise ValueError(
                f"{type(callback).__name__} keeps its own copy of the whole parameters, but a pipeline stage holds some of them only. Use "
                "pipeline_parallel_size=1, or remove the callback."
            )
        if isinstance(callback, averaging) and tensor > 1:
            raise ValueError(
                f"{type(callback).__name__} keeps its own copy of the whole parameters, but tensor-parallel ranks hold parts of them. Use "
                "tensor_parallel_size=1, or remove the callback."
            )
        if isinstance(callback, averaging) and zero_stage > 0:
            raise ValueError(
                f"{type(callback).__name__} keeps its own copy of the whole parameters and cannot see that zero_stage={zero_stage} "
                "shards them. Use strategy='hybrid_3d' with zero_stage=0, or remove the callback."
            )


def audit_checkpoints(checkpoint_format: str, plugin: Any) -> None:
    """
    Raises:
        ValueError: for a plugin that would not be asked.
    """
    if checkpoint_format == "sharded" and type(plugin) is not TorchCheckpointIO:
        raise ValueError(
            f"checkpoint_format='sharded' writes what each rank holds by itself, and would pass by the plugin {type(plugin).__name__}. Use "
            "async_save=True to write in the background, or checkpoint_format='full'."
        )


def audit_extra_state(module: nn.Module, stages: int) -> None:
    """
    Raises:
        ValueError: for modules with state that is no tensor, over stages.
    """
    for name, each in module.named_modules():
        if stages > 1 and type(each).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{name!r} ({type(each).__name__}) has get_extra_state, which every pipeline stage would keep for itself, so that a checkpoint "
                "had the first stage's. Keep that state in buffers, or use pipeline_parallel_size=1."
            )


def audit_born(born: list[str], callbacks: list[Any]) -> None:
    """Raise for callbacks that copy a model before it has numbers.

    Raises:
        ValueError: weight averaging of a model that is born in pieces.
    """
    averaging = next((c for c in callbacks if isinstance(c, _averaging())), None)
    if born and averaging is not None:
        raise ValueError(
            f"{type(averaging).__name__} keeps a copy of the whole model, which has been built without its numbers "
            "(trainer.init_module(empty_init=True), or on the meta device). Build it as usual, or remove the callback."
        )


def _averaging() -> tuple[Any, ...]:
    return tuple(c for c in (StochasticWeightAveraging, WeightAveraging) if c is not None)


def audit_pipeline(trainer: Any) -> None:
    """Raise for what only a whole model on every rank can do.

    Raises:
        ValueError: manual optimization, an overridden backward.
    """
    module = trainer.lightning_module
    way_out = "Use pipeline_parallel_size=1 and no num_microbatches."
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if not module.automatic_optimization:
        raise ValueError(
            "Manual optimization calls backward inside training_step, but a pipeline runs the forward and backward passes of many "
            f"micro-batches in an order of its own. {way_out}"
        )
    if is_overridden("configure_gradient_clipping", module):
        rank_zero_warn(
            "configure_gradient_clipping is overridden: only self.clip_gradients(...) in it clips by the norm of all stages; "
            "self.trainer.strategy.grad_norm() gives that norm."
        )
    if is_overridden("backward", module):
        raise ValueError(f"The LightningModule overrides backward(), which a pipeline never calls. {way_out}")


def audit_fingerprints(by_rank: list[list[Any]]) -> None:
    """Raise when ranks would not run the same pipeline.

    Args:
        by_rank: for each rank, its (cut, crossings and first batch, data-parallel rank).

    Raises:
        ValueError: with the ranks that differ.
    """
    for rank, (cut, column, replica) in enumerate(by_rank):
        same = next(other for other, (*_, theirs) in enumerate(by_rank) if theirs == replica)
        if column != by_rank[same][1]:
            raise ValueError(
                f"The stages on rank {same} and rank {rank} belong to one data-parallel rank, but their first batches differ. Build the "
                "same loaders on all ranks, without randomness of their own: Lightning's sampler and worker seeds take care of the rest."
            )
        if cut != by_rank[0][0]:
            raise ValueError(
                f"Rank 0 and rank {rank} would cut the model at different places. Build the same model on all ranks, and let the step go "
                "the same way on them."
            )


def audit_batches(by_rank: list[list[str]], step: str) -> None:
    """Raise, on all of them, when ranks that work on the same samples have different ones.

    Raises:
        ValueError: names the step.
    """
    if any(print_ != by_rank[0] for print_ in by_rank):
        raise ValueError(
            f"Tensor-parallel ranks or stages of one data-parallel rank got different batches for {step}, but they work on the same samples. Give "
            "random data sets and samplers a seed of their own (not the rank), or call seed_everything(..., workers=True)."
        )


def audit_optimizer(optimizer: torch.optim.Optimizer, sharded: bool, pipelined: bool) -> None:
    """Raise for optimizers whose rule needs what this rank does not have.

    Args:
        optimizer: as the user built it.
        sharded: whether each rank holds a part of the parameters or gradients only.
        pipelined: whether each rank holds some of the layers only.

    Raises:
        ValueError: torch's optimizers that do not look at one element after the other, over shards; one that decides by all
            gradients together, over pipeline stages.
    """
    if pipelined and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"LBFGS {NOT_OVER_SHARDS['LBFGS']} or a pipeline. Use zero_stage=0, and pipeline_parallel_size and tensor_parallel_size of 1."
        )
    for name, reason in NOT_OVER_SHARDS.items():
        kind = getattr(torch.optim, name, None)
        if sharded and kind is not None and isinstance(optimizer, kind):
            raise ValueError(f"{name} {reason}. Use strategy='hybrid_3d' with zero_stage=0 and tensor_parallel_size=1.")


def audit_optimizer_parameters(optimizer: torch.optim.Optimizer, known: set[Tensor]) -> None:
    """Raise for optimizers that would not train this module.

    Args:
        optimizer: after its parameters were replaced by those of the run.
        known: the parameters of the run.

    Raises:
        ValueError: parameters that are not the module's.
    """
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3]) + (", ..." if len(strangers) > 3 else "")
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(strangers)} parameters that are not the LightningModule's (shapes {shapes}), "
            "so the model would not train. Build it in configure_optimizers from self.parameters()."
        )


def monitored_names(trainer: Any) -> set[str]:
    """The metrics that callbacks and schedulers decide by."""
    names = {getattr(callback, "monitor", None) for callback in trainer.callbacks}
    names |= {config.monitor for config in trainer.strategy.lr_scheduler_configs}
    return {name for name in names if isinstance(name, str)}


def is_monitored(name: str, monitored: set[str]) -> bool:
    """Whether ``monitored`` has ``name`` in one of the forms that Lightning gives it."""
    forms = (name, f"{name}_step", f"{name}_epoch")
    return any(each.split("/dataloader_idx_")[0] in forms for each in monitored)


def audit_logged_names(by_rank: list[list[tuple[str, str, bool]]], monitored: set[str]) -> None:
    """Raise when ranks logged different names, or a monitored name on rank 0 only.

    Args:
        by_rank: for each rank, its (key, name, rank_zero_only) in order.
        monitored: see :func:`monitored_names`.

    Raises:
        RuntimeError: with the names that differ and the ranks that have them.
    """
    for name in {name for logged in by_rank for _, name, rank_zero_only in logged if rank_zero_only}:
        if is_monitored(name, monitored):
            raise RuntimeError(
                f"{name!r} is monitored by a callback or scheduler but logged with rank_zero_only=True, so that the other ranks "
                "cannot decide by it. Log it without rank_zero_only, on every rank."
            )
    keys = [[key for key, _, rank_zero_only in logged if not rank_zero_only] for logged in by_rank]
    if any(other != keys[0] for other in keys[1:]):
        having = {key: [rank for rank, each in enumerate(keys) if key in each] for each in keys for key in each}
        some = [f"{key!r} on rank {_few(ranks)} only" for key, ranks in having.items() if len(ranks) < len(keys)]
        raise RuntimeError(
            "self.log was called with different names on different ranks: "
            f"{_few(some, '; ') or 'the same names in another order'}. Every rank must log the same names in the same order: "
            "take ranks and data out of names and conditions, and log a neutral value where there is none."
        )


def _few(items: list[Any], separator: str = ", ", most: int = 8) -> str:
    return separator.join(map(str, items[:most])) + (f"{separator}..." if len(items) > most else "")
