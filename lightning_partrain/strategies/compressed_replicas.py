"""What a strategy does about compressed gradients between its replicas: groups, optimizers, checkpoints, logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_partrain import compat
from lightning_partrain.checkpoint.extra import Extra, PerRank
from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.optim import onebit_adam
from lightning_partrain.parallel.optimizer import around_step
from lightning_partrain.precision.mesh_mixed import MeshMixedPrecision
from lightning_partrain.sync.auto import AutoCompression
from lightning_partrain.sync.compression import Compression
from lightning_partrain.sync.compressors.onebit import MomentumFeedback, OneBit
from lightning_partrain.sync.exchange import CompressedExchange
from lightning_partrain.sync.feedback import MOMENTUM, MomentumCorrection
from lightning_partrain.sync.memory import Named

if TYPE_CHECKING:
    from lightning_partrain.strategies.hybrid import Hybrid3DStrategy

#: With fewer replicas nothing travels between them.
LEAST_REPLICAS = 2
#: What a checkpoint calls it.
KEY = "compression"


class CompressedReplicas:
    """
    Args:
        strategy: whose replicas these are.
        compression: the options; ``None`` for exact averages.

    Attributes:
        exchange: of the run, and of the last one when it is over; ``None`` where nothing is compressed.
    """

    def __init__(self, strategy: Hybrid3DStrategy, compression: Compression | None) -> None:
        self.strategy, self.compression = strategy, compression
        self.exchange: CompressedExchange | None = None
        self._auto: AutoCompression | None = None
        self._kept: dict[str, Any] | None = None  # what was loaded
        self._groups: tuple[ParallelMesh, dist.ProcessGroup, dist.ProcessGroup | None] | None = None

    @property
    def _mesh(self) -> ParallelMesh:
        assert self.strategy.mesh is not None
        return self.strategy.mesh

    @property
    def _onebit(self) -> bool:
        return self.compression is not None and isinstance(self.compression.compressor, OneBit)

    @property
    def _gives_momentum(self) -> bool:
        return self.compression is not None and self.compression.feedback().gives_momentum

    # -- set-up ----------------------------------------------------------------------------------------------------------

    def audit(self, trainer: Any) -> None:
        """
        Raises:
            ValueError: for what cannot be compressed, or what a compressor cannot work with.
        """
        if self.compression is None or self.strategy.world_size == 1:
            return
        compressor = self.compression.compressor
        if self._mesh.size("dp_replicate") == 1:
            raise ValueError(
                f"replica_sync={compressor!r} compresses what travels between replicas, but there is one. Set data_parallel_replicate_size, "
                "such as to the number of nodes."
            )
        if self.strategy.zero_stage == 3:
            raise ValueError(
                f"replica_sync={compressor!r} does not work with zero_stage=3, whose gradients FSDP2 reduces by itself. Use zero_stage=2, or "
                "replica_sync=None."
            )
        if self._gives_momentum and (self.strategy.zero_stage > 0 or self.strategy.reduce_when == "micro_batch"):
            raise ValueError(
                f"{compressor!r} computes momenta, of whole gradients and once a step, but zero_stage={self.strategy.zero_stage} with "
                f"reduce={self.strategy.reduce_when!r} averages rows or parts of a window. Use zero_stage=0 and reduce='window', or another compressor."
            )
        if self._gives_momentum and trainer.gradient_clip_val:
            raise ValueError(self._not_clipped(f"gradient_clip_val={trainer.gradient_clip_val}"))

    def _not_clipped(self, what: str) -> str:
        assert self.compression is not None
        return (
            f"{self.compression.compressor!r} puts momenta in the place of gradients, which {what} would clip instead. Leave that out, or take "
            "another compressor."
        )

    def check_clipping(self) -> None:
        """
        Raises:
            ValueError: when what would be clipped is no gradient.
        """
        if self.exchange is not None and self.exchange.feedback.gives_momentum:
            raise ValueError(self._not_clipped("clipping"))

    def make_exchange(self, module: nn.Module) -> CompressedExchange | None:
        """For a run that trains. Collective over all ranks."""
        self.exchange = self._kept = None
        if self.compression is None or self._mesh.size("dp_replicate") < LEAST_REPLICAS:
            return None
        if self._groups is None or self._groups[0] is not self._mesh:
            timeout = self.strategy.timeout
            outer = self._mesh.new_groups("dp_replicate", range(self._mesh.size("dp_replicate")), timeout=timeout)
            shards, inner = self._mesh.size("dp_shard"), None
            if shards > 1:
                inner = self._mesh.new_groups("dp_shard", range(shards), timeout=timeout)
            assert outer is not None
            self._groups = (self._mesh, outer, inner)
        _, outer, inner = self._groups
        options, device = self.compression, self.strategy.root_device
        self.exchange = CompressedExchange(
            options, lambda chosen: chosen.dense_names(module), outer, inner, device, self.strategy.seed
        )
        plugin = self.strategy.precision_plugin
        if isinstance(plugin, MeshMixedPrecision):
            self.exchange.loss_scale = lambda: plugin.loss_scale(self.strategy.root_device)
        return self.exchange

    def attach_optimizers(self) -> None:
        """
        Raises:
            ValueError: for an optimizer that the compressor's rule does not suit.
        """
        if self.exchange is None or self.compression is None:
            return
        for wrapped in self.strategy.optimizers:
            optimizer = compat.unwrap_optimizer(wrapped)
            if self._onebit:
                self._attach_onebit(optimizer)
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    f"LBFGS computes the loss several times a step and compares the results, which {self.compression.compressor!r} would disturb. "
                    "Use strategy='hybrid_3d' with zero_stage=0, or another optimizer."
                )
            rule = self.exchange.feedback
            if isinstance(rule, MomentumCorrection) and any(g.get("momentum", 1.0) for g in optimizer.param_groups):
                raise ValueError(
                    f"{self.compression.compressor!r} computes the momentum itself, before sending, so that {type(optimizer).__name__} would "
                    "compute it twice. Use torch.optim.SGD with momentum=0, or TopK(momentum=None), which works with every optimizer."
                )
        layout, self._auto = self.strategy.model_parallel, None
        assert layout is not None and layout.reducer is not None
        if self.compression.compressor is None:
            device = self.strategy.root_device
            self._auto = AutoCompression(self.exchange, layout.reducer, self.compression, device, rank_zero_info)
        elif not any(bucket.compressed for bucket in layout.reducer.buckets):
            rank_zero_warn(
                f"Nothing is compressed by {self.compression.compressor!r}: every parameter has fewer than min_compression_numel="
                f"{self.compression.min_compression_numel} elements, is one-dimensional, an embedding, among dense_parameters, or too small for "
                "the compressor to gain anything."
            )

    def _attach_onebit(self, optimizer: torch.optim.Optimizer) -> None:
        """Once compression has begun, gradients arrive as Adam's momentum, and the step is 1-bit Adam's."""
        exchange, layout = self.exchange, self.strategy.model_parallel
        assert exchange is not None and layout is not None and layout.reducer is not None
        reducer = layout.reducer
        onebit_adam.check(optimizer)
        options, optimizers = exchange.compression, [compat.unwrap_optimizer(each) for each in self.strategy.optimizers]
        rule = MomentumFeedback(self._beta1())
        exchange.feedback = rule

        def look() -> None:
            rule.beta1 = self._beta1()
            if exchange.step >= options.start_step and not any(map(onebit_adam.is_trained, optimizers)):
                raise ValueError(
                    f"1-bit Adam needs Adam's variance, but with start_step={options.start_step} compression begins before Adam's first step. Set "
                    "start_step to 15 to 25 % of the steps, at least to 1."
                )

        exchange.before_pass = look
        named = layout.named_parameters()
        exchange.sources[MOMENTUM] = lambda name: _momentum(self.strategy.optimizers, named[name])
        held: dict[Tensor, Tensor | None] = {}

        def before() -> None:
            if not exchange.compressing:
                onebit_adam.thaw(optimizer)
                return
            for bucket in reducer.buckets:
                for slot in bucket.slots if not bucket.compressed else []:
                    if slot.param.grad is not None and slot.param in optimizer.state:
                        slot.param.grad.lerp_(optimizer.state[slot.param]["exp_avg"], rule.beta1)
            onebit_adam.step(optimizer)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    held[param], param.grad = param.grad, None  # nothing is left for Adam's own step

        def after() -> None:
            for param, grad in held.items():
                param.grad = grad
            held.clear()

        self.strategy._step_hooks += around_step(optimizer, before, after)

    def _beta1(self) -> float:
        """Of all optimizers; a scheduler may change it.

        Raises:
            ValueError: when they differ.
        """
        groups = [g for wrapped in self.strategy.optimizers for g in compat.unwrap_optimizer(wrapped).param_groups]
        betas = {float(group["betas"][0]) for group in groups}
        if len(betas) > 1:
            raise ValueError(
                f"OneBit exchanges one momentum for the whole model, but the groups have beta1 of {sorted(betas)}. Give all the same."
            )
        return betas.pop()

    # -- the run ---------------------------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        if self._auto is not None:
            self._auto.begin_window()

    def after_step(self, optimizer: Any) -> None:
        """After an optimizer's step, or when it was skipped."""
        if self.exchange is None:
            return
        plugin = self.strategy.precision_plugin
        names = {name for group in self.strategy.parameter_groups(compat.unwrap_optimizer(optimizer)) for name in group}
        self.exchange.stepped(names, isinstance(plugin, MeshMixedPrecision) and plugin.skipped)
        if self._auto is not None:
            self._auto.after_step()
        assert self.strategy.lightning_module is not None
        trainer = self.strategy.lightning_module.trainer
        step = compat.step_to_log(trainer)
        if step is not None and trainer.loggers:
            figures = self.figures()
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def figures(self) -> dict[str, float]:
        """Of the last backward pass, of this rank: to be logged."""
        exchange = self.exchange
        assert exchange is not None
        return {
            "compression/ratio": exchange.dense_sent / exchange.sent if exchange.sent else 1.0,
            "compression/sent_bytes": exchange.sent,
            "compression/residual_norm": exchange.residual_norm(),
            "compression/exposed_seconds": exchange.exposed_seconds(),
        }

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        if self.exchange is None:
            return {} if self._kept is None else {KEY: PerRank(self._kept, self.strategy.global_rank, self._among())}
        chosen = None if self._auto is None else self._auto.choice
        value = {"step": self.exchange.step, "seed": self.exchange.seed, "chosen": chosen}
        value |= self.exchange.named().to_save()
        return {KEY: PerRank(value, self.strategy.global_rank, self._among())}

    def _among(self) -> dict[str, Any]:
        """Whose memory it is: of ranks laid out like this, of gradients or of momenta."""
        sizes = {axis: self._mesh.size(axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp")}
        return {**sizes, "zero_stage": self.strategy.zero_stage, "momenta": self._gives_momentum}

    def load_extra_state(self, saved: Extra) -> None:
        """Go on from what was remembered; with another number of replicas each begins with the mean of what was owed."""
        before = saved.plain.get(KEY, {}).get("among")
        if before is None:
            if self._onebit:  # and what another optimizer did since is not known
                for each in self.strategy.optimizers:
                    onebit_adam.thaw(compat.unwrap_optimizer(each))
            return
        now = self._among()
        differ = {name for name in now if before.get(name) != now[name]}
        if not differ:
            own = saved.of_rank(KEY, self.strategy.global_rank, before)
            self._load(own, Named.of_saved(own))
            return
        everyone = [saved.of_rank(KEY, rank, before) for rank in range(before["dp_replicate"])]
        named = [Named.of_saved(each) for each in everyone if each is not None]
        whole = before["dp_shard"] == before["tp"] == before["pp"] == 1
        if differ == {"dp_replicate"} and whole and self.compression is not None:
            self._load(everyone[0], Named.mean(named))
            return
        if any(each.owes for each in named):
            changes = ", ".join(f"{name} from {before.get(name)} to {now[name]}" for name in sorted(differ))
            rank_zero_warn(
                "The checkpoint has what gradient compression had not sent yet, which does not fit any more"
                f"{f' ({changes})' if self.compression is not None else ', as nothing is compressed'}. It is dropped: the first steps lack it."
            )
        if self.compression is not None:
            self._load({**everyone[0], "chosen": None}, Named())

    def _load(self, saved: dict[str, Any], named: Named) -> None:
        self._kept = {**saved, **named.to_save()}
        if self.exchange is None:  # one rank has nobody to send it to, and keeps it for those that come after
            return
        self.exchange.seed = int(saved["seed"])
        self.exchange.load(named, int(saved["step"]))
        if self._auto is not None:
            self._auto.take(saved["chosen"])


def _momentum(optimizers: list[Any], param: Tensor) -> Tensor:
    for wrapped in optimizers:
        state = compat.unwrap_optimizer(wrapped).state.get(param)
        if state:
            return state["exp_avg"]
    return torch.zeros_like(param)
