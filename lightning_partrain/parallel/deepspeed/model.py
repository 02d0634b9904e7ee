"""The layout that DeepSpeed's engine makes of a module: ZeRO stages 1 to 3, its optimizer, its backward pass and its step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_partrain import compat, numerics
from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.parallel.deepspeed import internals
from lightning_partrain.parallel.deepspeed.flat import Part
from lightning_partrain.parallel.deepspeed.state import FlatState
from lightning_partrain.parallel.placement import Entry
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel


class _Root(nn.Module):
    """What the engine calls once a pass. The LightningModule itself may be called several times: its steps call ``self(...)``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.step: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.step is not None
        return self.step(*args, **kwargs)


class DeepSpeedModel(ReplicatedModel):
    """``zero_stage`` 1, 2 or 3 by DeepSpeed. The engine is made when the optimizer is known, in :meth:`attach_optimizer`.

    Args:
        module, mesh, reduce: see :class:`ReplicatedModel`.
        config: complete, as ``deepspeed.initialize`` takes it.
        device: of this rank.

    Attributes:
        engine: DeepSpeed's, from :meth:`attach_optimizer` to :meth:`release`.
        groups: the names of the optimizer's parameters by groups, as they were before DeepSpeed put flat ones in their place.
        optimizer: what updates those flat ones: the user's, or the one that DeepSpeed has built after its configuration.
        scheduler: what DeepSpeed has built after its configuration, if anything.
        parts: name -> what this rank holds of a trained parameter; also after :meth:`release`.
        state: of the optimizer, for checkpoints; also after :meth:`release`.
    """

    def __init__(
        self, module: nn.Module, mesh: ParallelMesh, reduce: Reduce, config: dict[str, Any], device: torch.device
    ) -> None:
        super().__init__(module, mesh, reduce, training=False)  # gradients are DeepSpeed's
        self.config, self.device = config, device
        self.engine: Any = None
        self._root: Any = None
        self.groups: list[list[str]] = []
        self.parts: dict[str, Part] = {}
        self._params: dict[str, nn.Parameter] = {}  # as they were before the last forward pass
        self._pending = False  # whether there are gradients that no step has used
        self._window = ExitStack()

    # -- set-up --------------------------------------------------------------------------------------------------------

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
        import deepspeed

        self._params = dict(self.module.named_parameters())
        names = {param: name for name, param in self._params.items()}
        trained = [param for param in names if param.requires_grad]
        self.groups = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        self.groups = self.groups or [[names[param] for param in trained]]
        self.trained = {names[param] for param in trained}
        self._marks = internals.Marks(self.module)
        self._root = _Root(self.module)
        self.engine, *_ = deepspeed.initialize(
            args=Namespace(device_rank=self.device.index or 0),
            model=self._root,
            optimizer=optimizer if optimizer.param_groups else None,
            model_parameters=trained,
            config=self.config,
            dist_init_required=False,
        )
        self.parts = internals.updated_parts(self.engine, names)
        self.optimizer = internals.base_optimizer(self.engine)
        self.state = FlatState(self.optimizer, self.groups, self.parts)
        self.scheduler, self.engine.lr_scheduler = self.engine.lr_scheduler, None  # the Trainer steps it
        self._note_versions()
        self._optimizers.append(optimizer)
        optimizer.zero_grad = wrapper.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """DeepSpeed clears gradients in its step, and before it keeps them where no other can."""
        if self._pending:
            raise RuntimeError(
                "zero_grad was called between a backward pass and the step, but DeepSpeed cannot drop gradients once they are reduced. Leave "
                "zero_grad to the Trainer, or use strategy='zero_1'."
            )

    # -- the step ------------------------------------------------------------------------------------------------------

    def call(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``step(*args)`` as the forward pass of the engine, which so knows when it begins and ends."""
        self._root.step, self._root.training = step, self.module.training
        try:
            return self.engine(*args, **kwargs)
        finally:
            self._root.step = None

    def before_forward(self) -> None:
        """
        Raises:
            RuntimeError: when something has changed since the last step that the engine cannot follow.
        """
        if self.engine is None:
            return
        self._params = dict(self.module.named_parameters())
        self._follow_writes()
        if len(self.optimizer.param_groups) != len(self.groups):
            raise RuntimeError(
                "A group was added to the optimizer during the run, but DeepSpeed's flat tensors hold what was trained in the beginning. Add it in "
                "configure_optimizers, or use strategy='zero_1'."
            )
        trained = {name for name, param in self._params.items() if param.requires_grad}
        if trained != self.trained:
            changed = sorted(trained ^ self.trained)
            raise RuntimeError(
                f"requires_grad of {changed[0]!r}{f' and {len(changed) - 1} others' if len(changed) > 1 else ''} has changed since the "
                "run began, but DeepSpeed's flat tensors hold what was trained then. Freeze and unfreeze before the run, or use strategy='zero_1'."
            )

    @torch.no_grad()
    def _follow_writes(self) -> None:
        """Hooks may have written to weights, of which the optimizer has a copy. DeepSpeed itself writes to their data only, which does not count."""
        params = self._params
        written = [name for name, param in params.items() if param._version != self._versions.get(name)]
        if not written:
            return
        copies = [name for name in written if name in self.parts]
        if self._cut or any(self.parts[name].flat.dtype != params[name].dtype for name in copies):
            why = (
                "with stage 3 its numbers are elsewhere then" if self._cut else "the optimizer has a float32 copy of it"
            )
            raise RuntimeError(
                f"{written[0]!r} was written to outside of the optimizer's step, but {why}, so that the change would be lost. "
                "Do it in configure_model or before the run, or use strategy='zero_1'."
            )
        for name in copies:
            self.parts[name].fill(self.parts[name].flat, params[name].detach())
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {name: param._version for name, param in self._params.items()}

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What torch says of a parameter that is not there, with what to do.

        Raises:
            RuntimeError: in place of torch's.
        """
        try:
            yield
        except RuntimeError as error:
            if not self._cut or ("[0]" not in str(error) and "1-D" not in str(error)):
                raise
            raise RuntimeError(
                "With zero_3_deepspeed a parameter has its numbers only while the forward pass of its module runs. One that is used elsewhere, as in a "
                f"penalty on weights, needs deepspeed.zero.GatheredParameters, or strategy='zero_3'. torch says: {error}"
            ) from error

    def begin_backward(self, last_of_window: bool) -> None:
        self._pending = True
        if not last_of_window and self.reduce == "window" and not self.engine.inside_no_sync_ctxt:
            self._window.enter_context(self.engine.coalesce_grad_reduction())
        if not self.engine.inside_no_sync_ctxt:
            self.engine.set_gradient_accumulation_boundary(last_of_window)

    def _all_used(self, root: Any) -> None:
        """In the beginning of a backward pass, before anything is sent.

        Raises:
            RuntimeError: for trained parameters that the pass does not reach. DeepSpeed would wait for their gradients on some ranks only, or update
                them as if the gradients were zero.
        """
        trained = [(name, param) for name, param in self._params.items() if name in self.trained]
        unused = [name for name, param in trained if not compat.is_in_backward(param)]
        if unused and not self._recomputes(root):
            more = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
            raise RuntimeError(
                f"The loss of this batch does not depend on {unused[0]!r}{more}, but DeepSpeed's engine needs a gradient of everything that is trained "
                "from every rank and every backward pass. Freeze what is not used (requires_grad_(False)), or use strategy='zero_1', which "
                "leaves it alone."
            )

    def backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            root = loss.grad_fn
            loss.register_hook(lambda _: self._all_used(root))
        self.engine.backward(loss, scale_wrt_gas=False)  # the Trainer has divided by the passes of the window

    @staticmethod
    def _recomputes(root: Any) -> bool:
        """Whether parts of the graph are made in the backward pass only (``checkpoint(use_reentrant=True)``)."""
        seen, waiting = set(), [root]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            if "CheckpointFunction" in node.name():
                return True
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
        return False

    def end_backward(self, last_of_window: bool, automatic: bool) -> None:
        if last_of_window and self.engine.inside_no_sync_ctxt:
            self._window.close()  # reduces what all passes have added up
            self.engine.set_gradient_accumulation_boundary(True)

    def step(self) -> bool:
        """Whether the optimizer has stepped; it does not where gradients are not finite."""
        self.engine.step()
        self._note_versions()
        internals.set_clip_norm(self.engine, float(self.config.get("gradient_clipping", 0.0)))
        self._pending = False
        return bool(self.engine.was_step_applied())

    def clip_norm(self, max_norm: float) -> None:
        """Of the next step."""
        internals.set_clip_norm(self.engine, max_norm)

    def grad_norm(self, norm_type: float, stages: numerics.StageNorm | None) -> Tensor:
        gradients = internals.averaged_gradients(self.engine)
        ranks = numerics.StageNorm(self.mesh.data_parallel_group, lambda _: True, torch.float32, self.device)
        return numerics.total_norm(gradients, norm_type, ranks).to(self.device) / internals.loss_scale(self.engine)

    def scale_gradients(self, factor: Tensor) -> None:
        for gradient in internals.averaged_gradients(self.engine):
            gradient.mul_(factor.to(gradient.device, gradient.dtype))

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def _cut(self) -> bool:
        """Whether the module's parameters are in pieces."""
        return self.engine is not None and internals.is_stage_3(self.engine)

    def held_state(self) -> dict[str, Entry | Any]:
        if not self._cut:
            return super().held_state()
        params = dict(self.module.named_parameters(remove_duplicate=False))
        held: dict[str, Entry | Any] = {}
        for name, value in self.module.state_dict().items():
            if name in params:
                part = internals.weight_part(params[name])
                held[name] = part.entry(part.flat)
            else:
                held[name] = Entry.of(value) if isinstance(value, Tensor) else value
        return held

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        assert not self._cut  # the strategy gathers what is held
        return super().state_dict(keep)

    def load_state_dict(
        self, names: Collection[str], get: Callable[[str], Any], strict: bool = True, plainly: bool = False
    ) -> None:
        if self.engine is not None:
            raise RuntimeError(
                "DeepSpeed's engine has taken the weights over: load them before, as with trainer.fit(ckpt_path=...)."
            )
        super().load_state_dict(names, get, strict, plainly)

    # -- the end -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self, whole: bool = True) -> None:
        """The module is plain and whole again on every rank."""
        super().release(whole)
        if self.engine is None:
            return
        group = self.mesh.data_parallel_group if self.mesh.size("data_parallel") > 1 else None
        for param in self.module.parameters():
            if self._cut:
                part = internals.weight_part(param)
                param.data = part.whole(part.flat, self.device, group)
            else:
                param.data = param.data.clone()  # out of the flat tensor of all
        self._window.close()
        self.engine.destroy()
        internals.forget_hooks(self.engine)
        self._marks.restore()
        self.engine = self._root = None
        self._params = {}

    def state_tensors(self) -> dict[str, list[Tensor]]:
        if self.engine is None:
            return super().state_tensors()
        params = list(self.module.parameters())
        held = [internals.weight_part(p).flat for p in params] if self._cut else [p.data for p in params]
        flats = internals.flat_parameters(self.engine)
        return {
            "parameters": held,
            "gradients": internals.averaged_gradients(self.engine) + [p.grad for p in params if p.grad is not None],
            "masters": flats,
            "optimizer": [
                v for flat in flats for v in self.optimizer.state.get(flat, {}).values() if isinstance(v, Tensor)
            ],
            "buckets": internals.gathered_bytes(self.engine),
        }
