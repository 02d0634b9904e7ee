"""Stage 3: parameters, gradients and optimizer state are cut by rows; torch's FSDP2 gathers one block at a time.

Blocks are found, not named: the repeated layers of each ``ModuleList`` or ``Sequential``. What lies outside of
them is gathered for the whole step. Under manual optimization several forward and backward passes share one call of
``training_step``, so there each direct child of the LightningModule is gathered for its own passes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from lightning_partrain import compat
from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.hollow import give_room, is_hollow, make_hollow
from lightning_partrain.parallel.optimizer import around_step, shard_state
from lightning_partrain.parallel.placement import Fused, hollow_without_shards, without_shards
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel
from lightning_partrain.sync.reducer import GradientReducer

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of ``module``: members of lists of at least two modules of one type that hold parameters.

    A list inside a block is part of the block.
    """
    blocks: list[nn.Module] = []

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
            repeated = [
                m for m in members if sum(type(o) is type(m) for o in members) > 1 and any(True for _ in m.parameters())
            ]
            blocks.extend(m for m in repeated if m not in blocks)
            for member in members or [child]:
                if member not in repeated:
                    visit(member)

    visit(module)
    return blocks


class AllToAllReduceScatter(compat.ReduceScatter):
    """Reduce-scatter as an exchange of shards and a local sum: gloo's own sends twice the bytes."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _with_room(param: Tensor) -> Tensor | None:
    """Give a hollow parameter the memory that ``fully_shard`` asks for, while it cuts it."""
    if not is_hollow(param):
        return None
    give_room([param])
    return param


def _without_room(param: Tensor | None) -> None:
    if param is not None:
        make_hollow(param)


class FullyShardedModel(ReplicatedModel):
    """``zero_stage=3``; see :class:`ReplicatedModel` for the arguments.

    Args:
        automatic: whether Lightning drives the optimizer (one forward and backward pass a step).
        blocks: modules that are gathered one at a time; ``None`` finds them.
        of_stage: whether a pipeline stage calls its part of a step itself; its parameters stay gathered for a whole schedule.
        offload: keep shards of parameters, gradients and optimizer state in the memory of the host, and bring parameters to the device
            to gather them.

    Raises:
        ValueError: under manual optimization, when two children of the LightningModule share a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        reduce: Reduce,
        training: bool = True,
        absent: Collection[Tensor] = frozenset(),
        fused: Mapping[str, Fused] | None = None,
        *,
        automatic: bool = True,
        blocks: list[nn.Module] | None = None,
        of_stage: bool = False,
        offload: bool = False,
    ) -> None:
        self._automatic = automatic
        roots = [module] if automatic else self._children(module)
        covered = {p for root in roots for p in root.parameters()}
        self._whole = [
            (n, p)
            for n, p in module.named_parameters()
            if p not in absent and (p.numel() == 0 or p.ndim == 0 or p not in covered)
        ]
        ignored = {*(p for _, p in self._whole), *absent}
        give_room(param for _, param in self._whole)
        with compat.fsdp_sharding_one_by_one(_with_room, _without_room):
            options = {"mesh": mesh.shard_mesh, "ignored_params": ignored}
            if offload:
                options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            self._shard(module, roots, mesh, find_blocks(module) if blocks is None else blocks, not of_stage, options)
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]
        steps = [name for name in STEPS if automatic and not of_stage and is_overridden(name, module)]
        self._own_steps = {name: module.__dict__.get(name) for name in steps}  # a user may have set one on the instance
        if isinstance(module, FSDPModule) and not of_stage:
            compat.fsdp_gather_for_methods(module, steps)
        elif isinstance(module, FSDPModule):
            enter, leave = compat.fsdp_outermost(module)
            self.around_stage = (lambda args: enter(args, {}, True)[0], lambda output: leave(output, True))
        self._used: set[Any] = set()
        self._versions: dict[str, int] = {}
        self._check_dtypes(module)
        self._device = torch.device(mesh.device_mesh.device_type)
        super().__init__(module, mesh, reduce, training, absent, fused)
        if training:
            self._watch_zero_grad()
            compat.fsdp_before_backward(module, self._passed_by)
        if training and not automatic:  # optimizers are toggled within a step
            self._handles += [compat.fsdp_follow_requires_grad(root) for root in self._roots]

    def _make_reducer(self) -> GradientReducer:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                compat.fill_unused_gradients(module, self._used)
        return GradientReducer(self._whole, self.mesh.data_parallel_group)

    @staticmethod
    def _children(module: nn.Module) -> list[nn.Module]:
        children: list[nn.Module] = []
        for child in module.children():
            container = type(child).forward is nn.Module.forward
            children += FullyShardedModel._children(child) if container else [child]
        seen: dict[nn.Parameter, str] = {}
        for child in children:
            for name, param in child.named_parameters():
                if param in seen:
                    raise ValueError(
                        f"Two modules share a parameter ({seen[param]!r} and {name!r}), which zero_stage=3 cannot gather for one "
                        "of them alone under manual optimization. Use zero_stage=2."
                    )
            seen.update({param: name for name, param in child.named_parameters()})
        return [child for child in children if any(True for _ in child.parameters())]

    @staticmethod
    def _shard(
        module: nn.Module,
        roots: list[nn.Module],
        mesh: ParallelMesh,
        blocks: list[nn.Module],
        reshard: bool,
        options: dict[str, Any],
    ) -> None:
        before = {m for m in module.modules() if isinstance(m, FSDPModule)}  # configure_model has sharded them
        for block in blocks:
            if before.intersection(block.modules()):
                continue
            outside = {p for m in module.modules() if m not in set(block.modules()) for p in m._parameters.values()}
            if not outside.intersection(block.parameters()):
                fully_shard(block, reshard_after_forward=reshard, **options)
        for root in roots:
            if not isinstance(root, FSDPModule):
                fully_shard(root, reshard_after_forward=False, **options)
        if dist.get_backend(mesh.group("dp_shard")) == "gloo":
            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.set_custom_reduce_scatter(AllToAllReduceScatter())
                    each.set_modules_to_backward_prefetch(
                        [each]
                    )  # gathering ahead gains nothing where gathering blocks

    @staticmethod
    def _check_dtypes(root: nn.Module) -> None:
        for name, module in root.named_modules():
            if isinstance(module, FSDPModule):
                params = [p.sharded_param for group in compat.fsdp_param_groups(module) for p in group.fsdp_params]
                dtypes = {str(param.dtype).removeprefix("torch.") for param in params if param.requires_grad}
                if len(dtypes) > 1:
                    raise ValueError(
                        f"{name or 'The model outside of its blocks'} has parameters of {' and '.join(sorted(dtypes))}, which zero_stage=3 cannot gather "
                        "together. Give them one type, or use zero_stage=2."
                    )

    # -- the step ------------------------------------------------------------------------------------------------------

    def _passed_by(self) -> None:
        """
        Raises:
            RuntimeError: in training_step, for ``torch.autograd.grad``, after which FSDP2 takes the module's backward pass for done.
        """
        if self.reducer is not None and self.reducer.guard and not self.reducer.running:
            raise RuntimeError(
                "torch.autograd.grad runs through sharded modules inside training_step, as for a gradient penalty, after which gradients of their "
                "parameters would be lost. Use zero_stage=2, where modules are whole."
            )

    def _look_for_writes(self, params: list[Any]) -> None:
        """
        Raises:
            RuntimeError: for a gathered parameter that was written to: what is gathered is thrown away.
        """
        versions = compat.fsdp_versions(params)
        written = [name for name, version in versions.items() if self._versions.get(name, version) != version]
        self._versions = versions
        if written:
            raise RuntimeError(
                f"{written[0]!r} was written to inside training_step or on_before_zero_grad, where zero_stage=3 has a gathered copy of it, so that the "
                "change would be lost. Do it in on_train_batch_end, or use zero_stage=2."
            )

    def guard(self, inside_step: bool) -> None:
        if not inside_step and not self._automatic:
            self._look_for_writes(compat.fsdp_params(self.module))
        super().guard(inside_step)

    def begin_backward(self, last_of_window: bool) -> None:
        params = compat.fsdp_params(self.module)
        self._look_for_writes(params)
        super().begin_backward(last_of_window)
        assert self.reducer is not None
        for root in self._roots:
            root.set_requires_gradient_sync(self.reducer.sync)
        self._fresh = {p for p in params if p.sharded_param.grad is None}

    def end_backward(self, last_of_window: bool, automatic: bool) -> None:
        super().end_backward(last_of_window, automatic)
        assert self.reducer is not None
        if not self.reducer.sync:
            return
        params = compat.fsdp_params(self.module)
        unused = [index for index, param in enumerate(params) if param not in self._used]
        flags = torch.ones(len(params), device=self._device)
        for index in unused:
            flags[index] = 0.0
        dist.all_reduce(flags, group=self.mesh.data_parallel_group)
        if unused:  # only then does the host have to look
            anywhere = flags.tolist()
            for index in unused:
                if not anywhere[index] and params[index] in self._fresh:
                    params[index].sharded_param.grad = None
        self._used.clear()

    # -- a pipeline's step -----------------------------------------------------------------------------------------------

    def begin_schedule(self) -> None:
        super().begin_schedule()
        self._before_sharded = compat.fsdp_take_gradients(self.module)
        for root in self._roots:
            compat.fsdp_defer_gradients(root, defer=True)

    def end_schedule(self) -> None:
        super().end_schedule()
        self._computed_sharded = compat.fsdp_take_gradients(self.module)
        compat.fsdp_add_gradients(self._before_sharded)
        self._before_sharded = {}

    def add_gradients(self) -> None:
        super().add_gradients()
        assert self.reducer is not None
        compat.fsdp_add_gradients(self._computed_sharded)
        self._used.update(self._computed_sharded)
        self._computed_sharded = {}
        if self.reducer.sync:
            for root in self._roots:
                compat.fsdp_defer_gradients(root, defer=False)
                compat.fsdp_reduce_gradients(root)

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _reshard(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def after_evaluation(self) -> None:
        self._reshard()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        self._reshard()
        return super().named_parameters()

    def held_parameters(self) -> dict[str, nn.Parameter]:
        self._reshard()
        return super().held_parameters()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
        self._watch_zero_grad(optimizer, wrapper)
        shard_state(optimizer, {p: p for p in self.held_parameters().values()})
        rows = self._local_rows(optimizer)
        if rows is not None:
            self._handles += around_step(optimizer, rows.enter, rows.leave)

    def _forget(self, params: Iterable[Tensor]) -> None:
        compat.fsdp_forget_gradients(self.module, set(params))

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        self._reshard()
        return super().state_dict(keep)

    def held_state(self) -> dict[str, Any]:
        self._reshard()
        return super().held_state()

    def load_state_dict(
        self, names: Collection[str], get: Callable[[str], Any], strict: bool = True, plainly: bool = False
    ) -> None:
        self._reshard()
        super().load_state_dict(names, get, strict, plainly)

    def release(self, whole: bool = True) -> None:
        super().release(whole)
        for name, own in self._own_steps.items():
            self.module.__dict__.pop(name, None)
            if own is not None:
                self.module.__dict__[name] = own
        compat.remove_fully_shard(self.module, without_shards if whole else hollow_without_shards)

    def state_tensors(self) -> dict[str, list[Tensor]]:
        params = [p.sharded_param for p in compat.fsdp_params(self.module)] + [p for _, p in self._whole]
        gathered, gradients = compat.fsdp_gathered(self.module)
        return {
            "parameters": [local_tensor(p) for p in params] + gathered,
            "gradients": [local_tensor(p.grad) for p in params if p.grad is not None] + gradients,
            "buckets": [],
            "masters": [copy for rows in self._host_rows for copy in rows.copies()],
        }
