"""What every strategy of ours shares: processes, groups, and Lightning's contracts between ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_partrain import compat, numerics
from lightning_partrain.parallel import token_loss
from lightning_partrain.parallel.batchnorm import restore_batch_norm, synchronize_batch_norm
from lightning_partrain.parallel.buffers import SharedBuffers, broadcast_tensors
from lightning_partrain.parallel.hollow import weightless
from lightning_partrain.parallel.optimizer import swap_parameters
from lightning_partrain.parallel.replicate import ReplicatedModel
from lightning_partrain.parallel.token_loss import TokenLoss
from lightning_partrain.precision.mesh_mixed import MeshMixedPrecision
from lightning_partrain.strategies import audit, memory_table
from lightning_partrain.strategies.batch_size import meaning
from lightning_partrain.strategies.checkpoints import CheckpointStrategy, Format
from lightning_partrain.strategies.initial_values import InitialValues, Pretrained, check_pretrained, hold
from lightning_partrain.strategies.metrics import MetricAgreement
from lightning_partrain.strategies.peers import Peers


class MeshStrategy(CheckpointStrategy):
    """Base of the strategies: lays a model out on the mesh and drives Lightning's steps and checkpoints over it.

    Subclasses give the sizes of the mesh and say how the model is laid out.

    Args:
        process_group_backend, timeout: see :class:`RankStrategy`.
        checkpoint_format, async_save: see :class:`CheckpointStrategy`.
        load_pretrained: see :class:`Hybrid3DStrategy`.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800.0,
        checkpoint_format: Format = "full",
        async_save: bool = False,
        load_pretrained: Pretrained = None,
    ) -> None:
        super().__init__(process_group_backend, timeout, checkpoint_format, async_save)
        check_pretrained(load_pretrained)
        self.load_pretrained = load_pretrained
        self.metrics: MetricAgreement | None = None
        self._blocked = False
        self._step_hooks: list[RemovableHandle] = []
        self._attached: set[torch.optim.Optimizer] = set()
        self._stage_norm: numerics.StageNorm | None = None
        self.tokens: TokenLoss | None = None
        self.seed = 0  # equal on all ranks
        self.peers = Peers([])
        self._let_go: Callable[[], None] = lambda: None
        compat.agree_on_epoch_metrics(_agrees)
        compat.keep_float16_on_cpu(lambda strategy: isinstance(strategy, MeshStrategy))

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def parallelize(self, module: nn.Module, training: bool) -> ReplicatedModel:
        """Lay ``module`` (whole, equal on all ranks, on the device) out over ``self.mesh``."""
        raise NotImplementedError

    # -- set-up ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None and self.mesh is not None
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        audit.audit_module(self.model)
        audit.audit_precision(self.precision_plugin, self.world_size)
        audit.audit_checkpoints(self.checkpoint_format, self.checkpoint_io)
        self.audit(trainer)
        if self.world_size > 1:
            self.metrics = MetricAgreement(
                trainer, self.control_group, self.mesh.size("data_parallel"), self.at_epoch_end
            )
        self.initial = InitialValues(self.model, self.load_pretrained, self._from_first, self.everyone)
        audit.audit_born(self.initial.born, trainer.callbacks)
        with weightless(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        self._use_data_parallel_metrics()
        equal = (
            p for name, p in self.model.named_parameters() if name not in self.initial.held
        )  # or each has its own pieces
        broadcast_tensors([t.detach() for t in (*equal, *self.model.buffers())])
        self._remember_names(self.model.named_parameters())
        self.peers = Peers(self.peer_groups())
        self.peers.share_random_states()
        if self.world_size > 1 or self.pipelined:
            self.seed = self.broadcast(int(torch.randint(1 << 62, ())))
        if fitting and self.world_size > 1:
            self.peers.seed_steps(self.seed + self.mesh.data_parallel_rank)
        self.generators = {} if self.peers.seeds is None else {"steps": self.peers.seeds}
        self.buffers = self.cut(trainer)
        self.cut_layers()
        self._remember_names(self.model.named_parameters())
        if fitting and self._layer_sync is not None:
            self.model = synchronize_batch_norm(self.model, self.mesh.data_parallel_group)
        self.model_parallel = self.parallelize(self.model, training=fitting)
        self._remember_names(self.model_parallel.named_parameters().items())
        self._stepped = self.model_parallel.stepped
        self.initial.fill(self.model_parallel, self._awaiting[0] if self._awaiting is not None else ())
        self.load_awaiting()
        if fitting:
            self.peers.due.add("training_step")
            group = self.mesh.data_parallel_group if self.mesh.size("data_parallel") > 1 else None
            self.tokens = TokenLoss(group, self.root_device, self.all_ranks if self.world_size > 1 else None)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._attach_optimizers()
            self._attached = {compat.unwrap_optimizer(each) for each in self.optimizers}
            self._attach_precision(trainer)
            if self.metrics is not None:
                self.metrics.watch()
            memory_table.announce(self)

    def _from_first(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.broadcast(tensor, 0, group=self.control_group)
        return tensor

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

    def at_epoch_end(self) -> None:
        """Before the values of an epoch are computed, and after its hooks. Collective over all ranks."""
        self.peers.share_random_states()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

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
        assert self.mesh is not None
        plugin = self.precision_plugin
        if isinstance(plugin, MeshMixedPrecision):
            group = dist.group.WORLD if self.world_size > 1 else None
            plugin.attach(group, self._stepped, self.mesh.size("data_parallel"))
            self._let_go = compat.hold_schedulers(trainer, lambda: plugin.skipped)

    def _use_current_parameters(
        self, optimizer: torch.optim.Optimizer, now: dict[str, nn.Parameter], current: set[Tensor]
    ) -> None:
        """Optimizers built before the layout, or given new groups since, hold parameters that are no longer the model's."""
        params = {p for group in optimizer.param_groups for p in group["params"]}
        stale = {p: now[self.name_of(p)] for p in params if p not in current and self.name_of(p) in now}
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

    def on_train_start(self) -> None:
        assert self.lightning_module is not None and self.mesh is not None
        trainer = self.lightning_module.trainer
        if self.world_size > 1 and self.lightning_module.automatic_optimization:
            rank_zero_info(meaning(self.mesh, trainer.train_dataloader, trainer.accumulate_grad_batches))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.peers.due.add("training_step")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self.model_parallel is not None
        self.wait_for_checkpoint(only_if_done=True)
        self.peers.compare_batches("training_step", args)
        self.model_parallel.before_forward()
        self.buffers.share(with_batch_norm=False)
        output = self._train(*args, **kwargs)
        if self.tokens is not None:
            self.tokens.after_pass(output, self._counts(output))
        if self.metrics is not None:
            self.metrics.after_step()
        return output

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self.model_parallel is not None
        self.model_parallel.guard(True)
        try:
            with self.peers.seed_of_step(), self.precision_plugin.train_step_context():
                output = self.lightning_module.training_step(*args, **kwargs)
                return token_loss.mean(output) if self._counts(output) else output
        finally:
            self.model_parallel.guard(False)

    def _counts(self, output: Any) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization and token_loss.is_counted(output)

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
        self.peers.compare_batches(step, args)
        self.model_parallel.before_forward()
        return self._evaluate(step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", *args, **kwargs)

    def on_validation_start(self) -> None:
        self.peers.due.add("validation_step")
        self.buffers.share(with_batch_norm=True)

    def on_test_start(self) -> None:
        self.peers.due.add("test_step")
        self.buffers.share(with_batch_norm=True)

    def on_predict_start(self) -> None:
        self.peers.due.add("predict_step")
        self.buffers.share(with_batch_norm=True)

    def on_validation_end(self) -> None:
        assert self.model_parallel is not None
        self.model_parallel.after_evaluation()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None and self.model_parallel is not None
        last_of_window = not self._blocked
        if self.tokens is not None and self.tokens.counting:
            closure_loss = self.tokens.weighted(closure_loss)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._announce_factor(last_of_window)
        self.model_parallel.begin_backward(last_of_window)
        self._compute_gradients(closure_loss, optimizer, *args, **kwargs)
        self._complete_gradients(last_of_window)
        if self.tokens is not None and self.tokens.counting and last_of_window:
            passes = self.lightning_module.trainer.accumulate_grad_batches
            self.tokens.finish(self.model_parallel.scale_gradients, passes)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _announce_factor(self, last_of_window: bool) -> None:
        """What compression remembers is in the units of the gradients that the optimizer sees, not of sums over tokens."""
        assert self.lightning_module is not None and self.model_parallel is not None
        exchange = self.model_parallel.exchange
        if exchange is None or self.tokens is None or not self.tokens.counting:
            return
        if last_of_window:
            exchange.factor = self.tokens.factor(self.lightning_module.trainer.accumulate_grad_batches)
        elif self.model_parallel.reduce == "micro_batch":
            raise ValueError(
                f"training_step returns {token_loss.COUNT!r}, whose total is known when a window ends, but reduce='micro_batch' compresses before. Use "
                "reduce='window', or replica_sync=None."
            )

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
                lambda optimizer, clip_val: self.clip_norm(plugin.main_params(optimizer), float(clip_val))
            )
        if plugin is not None and type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
            plugin.clip_grad_by_value = (  # type: ignore[method-assign]
                lambda optimizer, clip_val: self.clip_value(plugin.main_params(optimizer), float(clip_val))
            )

    def clip_norm(self, params: Iterable[Tensor], max_norm: float) -> None:
        """Clip the gradients of parameters that an optimizer holds by the norm of the whole model's. Collective over all ranks."""
        numerics.clip_grad_norm(map(self._stepped, params), max_norm, stages=self._stage_norm)

    def clip_value(self, params: Iterable[Tensor], limit: float) -> None:
        numerics.clip_grad_value(map(self._stepped, params), limit)

    def check_attached(self, optimizer: Any) -> None:
        """
        Raises:
            RuntimeError: for an optimizer that was put in the place of one of the beginning.
        """
        if compat.unwrap_optimizer(optimizer) not in self._attached:
            raise RuntimeError(
                f"The optimizer {type(compat.unwrap_optimizer(optimizer)).__name__} was made during the run, and would not train what ranks hold in parts. Return "
                "it from configure_optimizers; to change it, set options of its param_groups."
            )

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        self.check_attached(optimizer)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(self.precision_plugin, MeshMixedPrecision) and self.precision_plugin.skipped:
            assert self.lightning_module is not None
            compat.uncount_step(self.lightning_module.trainer)
        return output

    def post_training_step(self) -> None:
        if isinstance(self.precision_plugin, MeshMixedPrecision):
            self.precision_plugin.update_scale()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, equal on every rank; for ``on_before_optimizer_step`` and the like.

        Collective over all ranks. Under sharding ``p.grad.norm()`` is a partial value; this is not.
        """
        assert self.model_parallel is not None
        return self.model_parallel.grad_norm(norm_type, self._stage_norm)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def join(self, whole: bool) -> None:
        """Undo :meth:`cut_layers` and :meth:`cut`: the module is whole on every rank again, or hollow where it was cut."""

    def on_train_end(self) -> None:
        self.wait_for_checkpoint()

    def teardown(self) -> None:
        memory_table.withdraw(self)
        if not self._failed:
            self.wait_for_checkpoint()
        if self.model_parallel is not None:
            assert self.lightning_module is not None
            if not self._failed:
                self.buffers.share(with_batch_norm=True)
                whole = not self.initial.born or self.world_size == 1
                if not whole:
                    hold(self.lightning_module, self._held_state())
                    rank_zero_info(
                        "The model was built without numbers and stays in pieces on its ranks: outside of a run its parameters hold none."
                    )
                self.model_parallel.release(whole)
                self.join(whole)
                self._remember_names(self.lightning_module.named_parameters())
            self.model_parallel = None
            self._awaiting = None
            self._let_go()
            while self._step_hooks:
                self._step_hooks.pop().remove()
            if self._layer_sync is not None:
                restore_batch_norm(self.lightning_module)
            if self.root_device.type != "cpu":
                with weightless(self.lightning_module):
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
