"""What every strategy of ours shares: processes, groups, and Lightning's contracts between ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary
from torchmetrics import Metric

from lightning_partrain import compat, numerics
from lightning_partrain.checkpoint import full
from lightning_partrain.parallel import token_loss
from lightning_partrain.parallel.batchnorm import restore_batch_norm, synchronize_batch_norm
from lightning_partrain.parallel.buffers import SharedBuffers, broadcast_tensors
from lightning_partrain.parallel.optimizer import swap_parameters
from lightning_partrain.parallel.pipeline.sources import digest
from lightning_partrain.parallel.placement import Fused
from lightning_partrain.parallel.random_states import seeded, share_random_states
from lightning_partrain.parallel.replicate import ReplicatedModel
from lightning_partrain.parallel.token_loss import TokenLoss
from lightning_partrain.precision.mesh_mixed import STATE_KEY, MeshMixedPrecision
from lightning_partrain.strategies import audit
from lightning_partrain.strategies.batch_size import meaning
from lightning_partrain.strategies.metrics import MetricAgreement
from lightning_partrain.strategies.ranks import RankStrategy
from lightning_partrain.sync.messages import gather_json, meet

#: Name of every parameter object that a module has had, so that optimizers can be given its present ones.
_NAMES: WeakIdKeyDictionary = WeakIdKeyDictionary()

#: How long a checkpoint waits for ranks that have not called save.
SAVE_WAIT = timedelta(minutes=5)
SAVE_WAIT_AFTER_ERROR = timedelta(seconds=5)


class MeshStrategy(RankStrategy):
    """Base of the strategies: lays a model out on the mesh and drives Lightning's steps and checkpoints over it.

    Subclasses give the sizes of the mesh and say how the model is laid out.

    Args:
        process_group_backend, timeout: see :class:`RankStrategy`.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta | float = 1800.0) -> None:
        super().__init__(process_group_backend, timeout)
        self.model_parallel: ReplicatedModel | None = None
        self.metrics: MetricAgreement | None = None
        self._blocked = False
        self._step_hooks: list[RemovableHandle] = []
        self._stepped: Callable[[Tensor], Tensor] = lambda param: param
        self._stage_norm: numerics.StageNorm | None = None
        self.tokens: TokenLoss | None = None
        self._counting: bool | None = None  # whether training_step returns a number of tokens, once it has run
        self.seed = 0  # equal on all ranks
        self._seeds: torch.Generator | None = None
        self._batches_due: set[str] = set()  # steps of whose next batch peers compare theirs
        self._let_go: Callable[[], None] = lambda: None
        compat.agree_on_epoch_metrics(_agrees)
        compat.keep_float16_on_cpu(lambda strategy: isinstance(strategy, MeshStrategy))

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        """Lay ``module`` (whole, equal on all ranks, on the device) out over ``self.mesh``."""
        raise NotImplementedError

    def layout(self) -> dict[str, Any]:
        """What a checkpoint records of the layout that wrote it."""
        assert self.mesh is not None
        sizes = self.mesh.sizes
        return {"strategy": type(self).__name__, "dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard}

    # -- set-up ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None and self.mesh is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        audit.audit_module(self.model)
        audit.audit_precision(self.precision_plugin, self.world_size)
        self.audit(trainer)
        if self.world_size > 1:
            self.metrics = MetricAgreement(
                trainer, self.control_group, self.mesh.size("data_parallel"), self.at_epoch_end
            )
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._use_data_parallel_metrics()
        broadcast_tensors([t.detach() for t in (*self.model.parameters(), *self.model.buffers())])
        self._remember_names(self.model.named_parameters())
        self._share_random_states()
        if self.world_size > 1 or self.pipelined:
            self.seed = self.broadcast(int(torch.randint(1 << 62, ())))
        if fitting and self.world_size > 1:
            self._seeds = torch.Generator().manual_seed(self.seed + self.mesh.data_parallel_rank)
        self.buffers = self.cut(trainer)
        self.cut_layers()
        self._remember_names(self.model.named_parameters())
        if fitting and self._layer_sync is not None:
            self.model = synchronize_batch_norm(self.model, self.mesh.data_parallel_group)
        self.model_parallel = self.parallelize(self.model, training=fitting)
        self._remember_names(self.model_parallel.named_parameters().items())
        self._stepped = self.model_parallel.stepped
        if fitting:
            self._batches_due.add("training_step")
            group = self.mesh.data_parallel_group if self.mesh.size("data_parallel") > 1 else None
            self.tokens, self._counting = TokenLoss(group, self.root_device), None
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._attach_optimizers()
            self._attach_precision(trainer)
            if self.metrics is not None:
                self.metrics.watch()

    def audit(self, trainer: Any) -> None:
        """Refuse what this strategy cannot honour. Subclasses add to it."""

    def cut(self, trainer: Any) -> SharedBuffers:
        """Before optimizers exist and the layout is made. A strategy that spreads the model itself does it here.

        Returns the buffers that this rank shares with others.
        """
        assert self.model is not None
        return SharedBuffers(self.model)

    def cut_layers(self) -> None:
        """After :meth:`cut`: a strategy whose ranks hold layers together cuts them here."""

    def fused(self, param: Tensor) -> Fused | None:
        """The order in which ranks hold a parameter of an optimizer together, where it is not the model's."""
        return None

    def at_epoch_end(self) -> None:
        """Before the values of an epoch are computed, and after its hooks. Collective over all ranks."""
        self._share_random_states()

    def _share_random_states(self) -> None:
        """Ranks that work on the same samples load and draw alike, also after a hook has drawn on one of them."""
        for group in self.peer_groups():
            share_random_states(group)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _remember_names(self, named: Any) -> None:
        for name, param in named:
            _NAMES[param] = name

    def _attach_optimizers(self) -> None:
        assert self.model_parallel is not None
        now = self.model_parallel.held_parameters()
        current = {*now.values(), *map(self._stepped, now.values())}
        for wrapper in self._lightning_optimizers:
            optimizer = compat.unwrap_optimizer(wrapper)
            audit.audit_optimizer(optimizer, self.sharded, self.pipelined)
            self._use_current_parameters(optimizer, now, current)
            hook = optimizer.register_step_pre_hook(lambda opt, *_: self._use_current_parameters(opt, now, current))
            self._step_hooks.append(hook)
            self.model_parallel.attach_optimizer(optimizer, wrapper)

    def _attach_precision(self, trainer: Any) -> None:
        plugin = self.precision_plugin
        if isinstance(plugin, MeshMixedPrecision):
            plugin.attach(dist.group.WORLD if self.world_size > 1 else None, self._stepped)
            self._let_go = compat.hold_schedulers(trainer, lambda: plugin.skipped)

    def _use_current_parameters(
        self, optimizer: torch.optim.Optimizer, now: dict[str, nn.Parameter], current: set[Tensor]
    ) -> None:
        """Optimizers built before the layout, or given new groups since, hold parameters that are no longer the model's."""
        params = {p for group in optimizer.param_groups for p in group["params"]}
        stale = {p: now[_NAMES[p]] for p in params if p not in current and _NAMES.get(p) in now}
        if stale:
            swap_parameters(optimizer, stale)
        if stale or not params <= current:
            audit.audit_optimizer_parameters(optimizer, current)

    @property
    def sharded(self) -> bool:
        return False

    @property
    def pipelined(self) -> bool:
        return False

    def _use_data_parallel_metrics(self) -> None:
        """TorchMetrics reduce over all ranks by default, counting every tensor- or pipeline-parallel peer."""
        assert self.model is not None and self.mesh is not None
        for module in self.model.modules():
            if isinstance(module, Metric) and module.process_group is None:
                module.process_group = self.mesh.data_parallel_group

    # -- the step --------------------------------------------------------------------------------------------------------

    def _compare_batches(self, step: str, args: tuple[Any, ...]) -> None:
        """Ranks that work on the same samples must have got the same ones; looked at now and then."""
        if step not in self._batches_due:
            return
        self._batches_due.discard(step)
        for group in self.peer_groups():
            audit.audit_batches(gather_json([digest(args[:1])], torch.device("cpu"), group), step)

    def on_train_start(self) -> None:
        assert self.lightning_module is not None and self.mesh is not None
        trainer = self.lightning_module.trainer
        if self.world_size > 1 and self.lightning_module.automatic_optimization:
            rank_zero_info(meaning(self.mesh, trainer.train_dataloader, trainer.accumulate_grad_batches))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._batches_due.add("training_step")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self.model_parallel is not None
        self._compare_batches("training_step", args)
        self.model_parallel.before_forward()
        self.buffers.share(with_batch_norm=False)
        output = self._train(*args, **kwargs)
        self._count_tokens(output)
        if self.metrics is not None:
            self.metrics.after_step()
        return output

    def _seed_of_step(self) -> AbstractContextManager[None]:
        """The same on ranks that work on the same samples, another on every data-parallel rank."""
        if self._seeds is None:
            return nullcontext()
        return seeded(int(torch.randint(1 << 62, (), generator=self._seeds)))

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self.model_parallel is not None
        self.model_parallel.guard(True)
        try:
            with self._seed_of_step(), self.precision_plugin.train_step_context():
                output = self.lightning_module.training_step(*args, **kwargs)
                return token_loss.mean(output) if self._counts(output) else output
        finally:
            self.model_parallel.guard(False)

    def _counts(self, output: Any) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization and token_loss.is_counted(output)

    def _count_tokens(self, output: Any) -> None:
        """After a training step. Collective over all ranks after the first one.

        Raises:
            ValueError: when some steps or ranks return a number of tokens and others do not.
        """
        counted = self._counts(output)
        if self._counting is None:
            self._counting = audit.audit_counts(self.all_ranks(counted)) if self.world_size > 1 else counted
            if counted:
                rank_zero_info(
                    f"training_step returns {token_loss.COUNT!r}: its loss is taken as a sum over so many tokens, and a step has the gradient of "
                    "the mean over all tokens of its global batch."
                )
        if counted != self._counting:
            raise ValueError(audit.counted_at_times(counted))
        if counted:
            assert self.tokens is not None
            self.tokens.count(output)

    def _contexts(self) -> dict[str, Callable[[], Any]]:
        """Name of a step -> what the precision plugin wraps it in."""
        plugin = self.precision_plugin
        return {
            "training_step": plugin.train_step_context,
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self._contexts()[step]():
            return getattr(self.lightning_module, step)(*args, **kwargs)

    def _evaluation_step(self, step: str, *args: Any, **kwargs: Any) -> Any:
        assert self.model_parallel is not None
        self._compare_batches(step, args)
        self.model_parallel.before_forward()
        return self._evaluate(step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", *args, **kwargs)

    def on_validation_start(self) -> None:
        self._batches_due.add("validation_step")
        self.buffers.share(with_batch_norm=True)

    def on_test_start(self) -> None:
        self._batches_due.add("test_step")
        self.buffers.share(with_batch_norm=True)

    def on_predict_start(self) -> None:
        self._batches_due.add("predict_step")
        self.buffers.share(with_batch_norm=True)

    def on_validation_end(self) -> None:
        assert self.model_parallel is not None
        self.model_parallel.after_evaluation()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None and self.model_parallel is not None
        last_of_window = not self._blocked
        if self._counting and self.tokens is not None:
            closure_loss = self.tokens.weighted(closure_loss)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.model_parallel.begin_backward(last_of_window)
        self._compute_gradients(closure_loss, optimizer, *args, **kwargs)
        self._complete_gradients(last_of_window)
        if self._counting and self.tokens is not None and last_of_window:
            passes = self.lightning_module.trainer.accumulate_grad_batches
            self.tokens.finish(self.model_parallel.named_parameters().values(), passes)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _compute_gradients(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert self.lightning_module is not None
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)

    def _complete_gradients(self, last_of_window: bool) -> None:
        assert self.lightning_module is not None and self.model_parallel is not None
        self.model_parallel.end_backward(last_of_window, self.lightning_module.automatic_optimization)

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
        if type(plugin) is MixedPrecision:
            plugin = MeshMixedPrecision(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
        self._precision_plugin = plugin
        if plugin is not None and type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = (  # type: ignore[method-assign]
                lambda optimizer, clip_val: numerics.clip_grad_norm(  # type: ignore[assignment]
                    map(self._stepped, plugin.main_params(optimizer)), float(clip_val), stages=self._stage_norm
                )
            )
        if plugin is not None and type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
            plugin.clip_grad_by_value = (  # type: ignore[method-assign]
                lambda optimizer, clip_val: numerics.clip_grad_value(
                    map(self._stepped, plugin.main_params(optimizer)), float(clip_val)
                )
            )

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(self.precision_plugin, MeshMixedPrecision) and self.precision_plugin.skipped:
            assert self.lightning_module is not None
            compat.uncount_step(self.lightning_module.trainer)
        return output

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, equal on every rank; for ``on_before_optimizer_step`` and the like.

        Collective over all ranks. Under sharding ``p.grad.norm()`` is a partial value; this is not.
        """
        assert self.model_parallel is not None
        return numerics.grad_norm(self.model_parallel.named_parameters().values(), norm_type, self._stage_norm)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _meet_to_save(self) -> None:
        """Saving is collective. Wait for all ranks, but not for ever.

        Raises:
            RuntimeError: when some ranks did not call it.
        """
        if self.world_size == 1 or not dist.is_initialized():
            return
        assert self.lightning_module is not None
        error = sys.exc_info()[1] if self.lightning_module.trainer.interrupted else None
        if error is not None:  # a callback saves because of it: tell the others first, who may not have failed
            self.on_exception(error)
        wait = min(self.timeout / 2, SAVE_WAIT if error is None else SAVE_WAIT_AFTER_ERROR)  # before others give up
        missing = meet(compat.default_store(), wait)
        if missing and error is not None:
            raise error
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
        self.buffers.share(with_batch_norm=True)
        return self._whole_state()

    def _whole_state(self) -> dict[str, Any]:
        assert self.model_parallel is not None
        return self.model_parallel.state_dict(keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        optimizer = compat.unwrap_optimizer(optimizer)
        return full.full_optimizer_state(optimizer, self._stepped, self.is_global_zero, self.fused)

    @staticmethod
    def name_of(param: Tensor) -> str:
        """The name that a parameter has, or had, in its module."""
        return str(_NAMES.get(param, ""))

    @staticmethod
    def _parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
        """In the order of the optimizer's groups."""
        return [_NAMES.get(p, "") for group in optimizer.param_groups for p in group["params"]]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = self.broadcast(filepath)  # rank 0's: others may have formatted it from their own numbers
        if not self.is_global_zero:
            return
        groups = [
            [[_NAMES.get(p, "") for p in g["params"]] for g in compat.unwrap_optimizer(o).param_groups]
            for o in self.optimizers
        ]
        if type(self.precision_plugin) is MeshMixedPrecision and MeshMixedPrecision.__qualname__ in checkpoint:
            checkpoint[STATE_KEY] = checkpoint.pop(MeshMixedPrecision.__qualname__)
        checkpoint[full.KEY] = full.describe(self.layout() if self.mesh else {}, groups)
        if type(self.checkpoint_io) is TorchCheckpointIO and "://" not in str(path) and storage_options is None:
            with full.replace_when_complete(path) as aside:
                self.checkpoint_io.save_checkpoint(checkpoint, aside)
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if type(self.precision_plugin) is MeshMixedPrecision and STATE_KEY in checkpoint:
            checkpoint[MeshMixedPrecision.__qualname__] = checkpoint.pop(STATE_KEY)
        return checkpoint

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
            full.load_full_optimizer_state(compat.unwrap_optimizer(optimizer), saved, self._stepped, self.fused)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Undo :meth:`cut_layers` and :meth:`cut`: the module is whole on every rank again."""

    def teardown(self) -> None:
        if self.model_parallel is not None:
            assert self.lightning_module is not None
            if not self._failed:
                self.buffers.share(with_batch_norm=True)
                self.model_parallel.release()
                self.join()
                self._remember_names(self.lightning_module.named_parameters())
            self.model_parallel = None
            self._let_go()
            while self._step_hooks:
                self._step_hooks.pop().remove()
            if self._layer_sync is not None:
                restore_batch_norm(self.lightning_module)
            if self.root_device.type != "cpu":
                self.lightning_module.cpu()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
        super().teardown()


def _agrees(reduce: Any) -> bool | None:
    """Whether epoch values reduced with ``reduce`` are being agreed on now; ``None`` when it is not a strategy's of ours."""
    owner = getattr(reduce, "__self__", None)
    if not isinstance(owner, MeshStrategy) or owner.metrics is None:
        return None
    return owner.metrics.agreeing
