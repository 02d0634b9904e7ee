"""``zero_1_deepspeed``, ``zero_2_deepspeed``, ``zero_3_deepspeed``: DeepSpeed's engine, on CPUs too."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn

from lightning_partrain import compat
from lightning_partrain.checkpoint import extra
from lightning_partrain.checkpoint.state import stored_in
from lightning_partrain.parallel.deepspeed import config as settings
from lightning_partrain.parallel.deepspeed import ops
from lightning_partrain.parallel.deepspeed.model import DeepSpeedModel
from lightning_partrain.parallel.hollow import give_room
from lightning_partrain.parallel.placement import Entry
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel
from lightning_partrain.strategies import audit_zero
from lightning_partrain.strategies.batch_size import samples_of_a_batch
from lightning_partrain.strategies.checkpoints import Format
from lightning_partrain.strategies.initial_values import Pretrained
from lightning_partrain.strategies.zero import ZeroStrategy

INSTALL = "DeepSpeedZeroStrategy needs DeepSpeed, which is not installed: pip install 'lightning-partrain[deepspeed]'. Without it: zero_1, zero_2, zero_3."
MASTERS = "master_weights"


class DeepSpeedZeroStrategy(ZeroStrategy):
    """ZeRO by DeepSpeed's engine, for what its configuration offers; without it, ``zero_1``, ``zero_2``, ``zero_3`` do the same.

    Checkpoints are those of all strategies here. ``validate``, ``test`` and ``predict`` without a fit use the native layout of the stage.

    Args:
        zero_stage: what is sharded: 1 the optimizer state, 2 gradients as well, 3 parameters as well.
        offload_optimizer: keep the optimizer's state in the memory of the host (GPU ranks).
        offload_parameters: keep parameters there as well, with ``zero_stage=3`` (GPU ranks).
        config: more of DeepSpeed's settings, as a mapping or the path of its JSON file. What the Trainer owns (accumulation,
            clipping, precision, batch sizes, the schedule if ``configure_optimizers`` gives one) has to be the same there, or left out.
        reduce: average gradients once per accumulation ``"window"``, or after every ``"micro_batch"`` (DeepSpeed's own way from stage 2 on; least
            memory).
        process_group_backend, timeout, checkpoint_format, async_save, load_pretrained: see :class:`Hybrid3DStrategy`.

    Raises:
        ValueError: for a stage or a setting that cannot be.
        ModuleNotFoundError: when DeepSpeed is not installed.
    """

    def __init__(
        self,
        zero_stage: Literal[1, 2, 3] = 1,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: dict[str, Any] | str | None = None,
        reduce: Reduce = "window",
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800.0,
        checkpoint_format: Format = "full",
        async_save: bool = False,
        load_pretrained: Pretrained = None,
    ) -> None:
        super().__init__(
            zero_stage=zero_stage,
            reduce=reduce,
            process_group_backend=process_group_backend,
            timeout=timeout,
            checkpoint_format=checkpoint_format,
            async_save=async_save,
            load_pretrained=load_pretrained,
        )
        if importlib.util.find_spec("deepspeed") is None:
            raise ModuleNotFoundError(INSTALL)
        for name, value in (("offload_optimizer", offload_optimizer), ("offload_parameters", offload_parameters)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}.")
        if offload_parameters and zero_stage < 3:
            raise ValueError(
                f"offload_parameters=True needs zero_stage=3: with zero_stage={zero_stage} every rank uses all parameters all the time."
            )
        self.config = config
        self._settings = settings.read(config)
        self.offload_optimizer, self.offload_parameters = offload_optimizer, offload_parameters
        self._engine: DeepSpeedModel | None = None  # also after the run: it knows whose the optimizer's state is
        self.skipped = False

    # -- set-up --------------------------------------------------------------------------------------------------------

    def audit(self, trainer: Any) -> None:
        super().audit(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.lightning_module is not None
        audit_zero.audit_engine("DeepSpeed", self.lightning_module, trainer, f"zero_{self.zero_stage}")
        if self.zero_stage == 3:
            audit_zero.audit_compiled("DeepSpeed", self.lightning_module, "zero_3")
        self._config = settings.merged(
            self._settings,
            settings.Owned(
                zero_stage=self.zero_stage,
                offload_optimizer=self.offload_optimizer,
                offload_parameters=self.offload_parameters,
                precision=str(trainer.precision),
                accumulate=trainer.accumulate_grad_batches,
                clip=trainer.gradient_clip_val,
                on_gpu=self.root_device.type != "cpu",
                parameters=sum(p.numel() for p in self.lightning_module.parameters() if p.requires_grad),
            ),
        )
        self._start_deepspeed()

    def _start_deepspeed(self) -> None:
        """Collective over all ranks."""
        os.environ.setdefault("DS_ACCELERATOR", self.root_device.type)
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        deepspeed.utils.logging.logger.setLevel(logging.WARNING)
        chosen = get_accelerator().device_name()
        if chosen != self.root_device.type:
            raise RuntimeError(
                f"DeepSpeed has chosen {chosen!r} ranks in this process, but the Trainer has {self.root_device.type!r}. Set the environment variable "
                f"DS_ACCELERATOR={self.root_device.type} before the script starts."
            )
        for section, has in (
            ("fp16", get_accelerator().is_fp16_supported),
            ("bf16", get_accelerator().is_bf16_supported),
        ):
            if section in self._config and not has():
                raise ValueError(
                    f"DeepSpeed has no {section} on this device ({self.root_device.type}). Use precision='32-true', 'bf16-mixed'"
                    + (" or 'bf16-true'." if section == "fp16" else ".")
                )
        own = self._config.get("optimizer", {})
        adam = str(own.get("type", "")).lower() in ("adam", "adamw") and not own.get("params", {}).get("torch_adam")
        offloads = "offload_optimizer" in self._config["zero_optimization"]
        needed = ops.needed_ops(self.root_device.type, cpu_adam=offloads, fused_adam=adam and not offloads)
        if self.local_rank == 0:
            ops.remove_locks_of_loads(needed)
        self.barrier()
        ops.refuse_stale_locks(needed)
        if self.local_rank == 0 and not ops.ready(needed):
            self._build(needed)
        self.barrier()
        self._build(needed)  # by now that only loads them
        with self._environment():
            deepspeed.init_distributed(self.process_group_backend, timeout=self.timeout, dist_init_required=False)

    @staticmethod
    def _build(needed: list[str]) -> None:
        for op in needed:
            ops.build(op, rank_zero_info)

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """What DeepSpeed reads where launchers of its own would have written it."""
        had = os.environ.get("LOCAL_RANK")
        os.environ["LOCAL_RANK"] = str(self.local_rank)
        try:
            yield
        finally:
            if had is None:
                del os.environ["LOCAL_RANK"]

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        if not training:
            return super().parallelize(module, training)
        assert self.mesh is not None
        give_room(module.parameters())
        return DeepSpeedModel(module, self.mesh, self.reduce_when, self._config, self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if "scheduler" in self._config and self.lr_scheduler_configs:
            raise ValueError(
                "The config of DeepSpeed has a scheduler, and configure_optimizers gave one as well. Leave one of them out."
            )

    def _attach_optimizers(self) -> None:
        layout = self.model_parallel
        assert isinstance(layout, DeepSpeedModel) and self.lightning_module is not None
        wrapper = self._lightning_optimizers[0]
        optimizer = compat.unwrap_optimizer(wrapper)
        if bool(optimizer.param_groups) == ("optimizer" in self._config):
            both = "has an optimizer, and configure_optimizers gave one as well. Leave one of them out."
            none = "has no optimizer, and configure_optimizers gave none. Give one there."
            raise ValueError(f"The config of DeepSpeed {both if optimizer.param_groups else none}")
        audit_zero.audit_flat_optimizer("DeepSpeed", optimizer, f"zero_{self.zero_stage}")
        now = layout.held_parameters()
        self._use_current_parameters(optimizer, now, set(now.values()))
        with self._environment():
            layout.attach_optimizer(optimizer, wrapper)
        self._engine = layout
        if not optimizer.param_groups:  # DeepSpeed has built its own
            self.optimizers = [layout.optimizer]
        if layout.scheduler is not None:
            self.lr_scheduler_configs = [LRSchedulerConfig(layout.scheduler, interval="step")]

    def _attach_precision(self, trainer: Any) -> None:
        self._let_go = compat.hold_schedulers(trainer, lambda: self.skipped)

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        micro = samples_of_a_batch(trainer.train_dataloader)
        batch = None if micro is None else micro * trainer.accumulate_grad_batches * self.world_size
        for key, owner in (("train_micro_batch_size_per_gpu", micro), ("train_batch_size", batch)):
            given = self._settings.get(key, "auto")
            if given != "auto" and owner is not None and given != owner:
                raise ValueError(
                    f"config has {key}={given}, but the training loader makes it {owner}. Leave {key!r} out of the config."
                )

    # -- the step ------------------------------------------------------------------------------------------------------

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        layout = self.model_parallel
        assert isinstance(layout, DeepSpeedModel)
        with layout.explained():
            return layout.call(super()._train, *args, **kwargs)

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        layout = self.model_parallel
        if not isinstance(layout, DeepSpeedModel):
            return super()._evaluate(step, *args, **kwargs)
        return layout.call(lambda *a, **k: super(DeepSpeedZeroStrategy, self)._evaluate(step, *a, **k), *args, **kwargs)

    def _compute_gradients(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        layout = self.model_parallel
        assert isinstance(layout, DeepSpeedModel)
        with layout.explained():
            layout.backward(closure_loss)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        layout, module = self.model_parallel, self.lightning_module
        assert isinstance(layout, DeepSpeedModel) and module is not None
        self.check_attached(optimizer)
        result = closure()
        if result is None:  # training_step gave no loss
            return result
        compat.after_closure(self.precision_plugin, module, optimizer)
        self.skipped = not layout.step()
        if self.skipped:
            rank_zero_warn("DeepSpeed has skipped a step, whose gradients were not finite.")
            compat.uncount_step(module.trainer)
        return result

    def clip_norm(self, params: Iterable[Tensor], max_norm: float) -> None:
        layout = self.model_parallel
        assert isinstance(layout, DeepSpeedModel)
        layout.clip_norm(max_norm)

    def clip_value(self, params: Iterable[Tensor], limit: float) -> None:
        raise ValueError(
            "DeepSpeed's engine clips by the norm only. Use gradient_clip_algorithm='norm', or strategy="
            f"'zero_{self.zero_stage}', which also clips by value."
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def _whole_state(self) -> dict[str, Any]:
        layout = self.model_parallel
        if not isinstance(layout, DeepSpeedModel) or self.zero_stage < 3:
            return super()._whole_state()
        held = layout.held_state()
        entries = {name: value for name, value in held.items() if isinstance(value, Entry)}
        return {**held, **extra.gather(entries, self.global_rank, self.everyone, self._gather_group)}

    def parameter_groups(self, optimizer: Any) -> list[list[str]]:
        return super().parameter_groups(optimizer) if self._engine is None else self._engine.groups

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._engine is None:
            return super().optimizer_state(optimizer)
        held = self._engine.state.held()
        if self.checkpoint_format == "sharded":
            return held
        entries = {
            f"{index}.{key}": value
            for index, values in held["state"].items()
            for key, value in values.items()
            if isinstance(value, Entry)
        }
        whole = extra.gather(entries, self.global_rank, self.everyone, self._gather_group)
        if not self.is_global_zero:
            return {}
        state = {
            index: {key: whole.get(f"{index}.{key}", value) for key, value in values.items()}
            for index, values in held["state"].items()
        }
        return {**held, "state": state}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        if self._engine is None:
            super().load_optimizer_state(optimizer, saved)
        else:
            self._engine.state.load(saved, stored_in)

    def extra_state(self) -> dict[str, Any]:
        masters: dict[str, Entry] = {}
        if self._engine is not None:
            dtypes = {name: param.dtype for name, param in self._engine.module.named_parameters()}
            masters = self._engine.state.masters(dtypes)
        return {**super().extra_state(), **{f"{MASTERS}.{name}": entry for name, entry in masters.items()}}

    def load_extra_state(self, saved: extra.Extra) -> None:
        super().load_extra_state(saved)
        if self._engine is not None:
            first = len(MASTERS) + 1
            self._engine.state.load_masters(
                {name[first:]: saved[name] for name in saved if name.startswith(f"{MASTERS}.")}
            )
