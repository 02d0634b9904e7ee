"""What a rank's part of the model is made of, for counting its bytes: parameters, their gradients, optimizer state, whole and this rank's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.fully_shard import FullyShardedModel
from lightning_partrain.parallel.placement import tensor_axis
from lightning_partrain.parallel.replicate import ReplicatedModel
from lightning_partrain.parallel.shard import ShardedOptimizerModel

#: Optimizers -> how many tensors of a parameter's shape and type they keep for it. Others may keep anything.
STATES: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "SGD": lambda group: bool(group["momentum"]),
    **dict.fromkeys(("Adam", "AdamW"), lambda group: 2 + bool(group.get("amsgrad"))),
    **dict.fromkeys(("NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "SparseAdam"), lambda _: 2),
    **dict.fromkeys(("Adagrad", "ASGD", "Muon"), lambda _: 1),
    "RMSprop": lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
}


def states_per_element(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], others: Mapping[str, int] | None = None
) -> int | None:
    """How many numbers ``optimizer`` keeps for each that it updates; ``None`` where its type does not say.

    Args:
        group: the parameter group, with its options.
        others: further optimizers, by the names of their classes.
    """
    kind = type(optimizer)
    if f"{kind.__module__}.".startswith("torch.optim."):
        rule = STATES.get(kind.__name__)
        return None if rule is None else int(rule(group))
    return (others or {}).get(kind.__name__)


@dataclass(frozen=True)
class Weight:
    """A parameter on this rank. Pipeline and tensor-parallel ranks hold a part of the model before anything else is sharded.

    Attributes:
        numel: elements of that part.
        own: of those, the elements that this rank updates.
        padded: the elements that memory is taken for in their place: ranks whose share is smaller have as much as the others.
        size: bytes of an element.
        trained: whether it gets gradients.
        states: see :func:`states_per_element`; 0 if no optimizer has it.
        root: whether it stays whole for the whole step, where parameters are sharded.
    """

    numel: int
    own: int
    padded: int
    size: int
    trained: bool
    states: int | None
    root: bool = False


def share(shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> int:
    """Elements of a tensor that are left after ``cuts``, each (dim, parts, which part), one after the other, as ``torch.chunk`` cuts."""
    sizes = list(shape)
    for dim, parts, index in cuts:
        chunk = -(-sizes[dim] // parts)
        sizes[dim] = max(0, min(chunk, sizes[dim] - index * chunk))
    return torch.Size(sizes).numel()


def _cuts(param: Tensor, tensor_parallel_only: bool = False, first: bool = False) -> list[tuple[int, int, int]]:
    """For :func:`share`, of this rank, or of the ``first``, whose part is the largest."""
    if not isinstance(param, DTensor):
        return []
    axes = range(len(param.placements)) if not tensor_parallel_only else [tensor_axis(param)]
    mesh, cuts = param.device_mesh, []
    for axis in reversed([axis for axis in axes if axis is not None]):  # tensor-parallel first
        placement = param.placements[axis]
        if placement.is_shard() or hasattr(placement, "split_factor"):
            cuts.append((placement.dim, mesh.size(axis), 0 if first else mesh.get_local_rank(axis)))  # type: ignore[attr-defined]
    return cuts


def _roots(module: nn.Module) -> set[Tensor]:
    """Parameters that FSDP2 gathers once for a step: those of its outermost modules that are in none further inside."""
    found: set[Tensor] = set()
    for child in [module] if isinstance(module, FSDPModule) else module.children():
        if isinstance(child, FSDPModule):
            found.update(p.sharded_param for group in compat.fsdp_param_groups(child) for p in group.fsdp_params)
        else:
            found |= _roots(child)
    return found


def weights(layout: ReplicatedModel, optimizers: Iterable[torch.optim.Optimizer]) -> list[Weight]:
    """What ``layout`` has of the model on this rank. For after the set-up: optimizers hold :meth:`held_parameters` then."""
    states = {p: states_per_element(o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
    stage, owners, mesh = stage_of(layout), getattr(layout, "owners", None), layout.mesh
    roots = _roots(layout.module) if stage == 3 else set()
    rank, ranks = mesh.rank("dp_shard"), mesh.size("dp_shard")
    found = []
    for param in layout.held_parameters().values():
        if param in layout.absent:
            continue
        numel = (
            share(param.shape, _cuts(param, tensor_parallel_only=True)) if stage == 3 else local_tensor(param).numel()
        )
        if owners is not None:
            own = padded = numel * (owners.get(param) == mesh.data_parallel_rank)
        elif stage == 3:
            own, padded = share(param.shape, _cuts(param)), share(param.shape, _cuts(param, first=True))
        else:
            local, cut = local_tensor(param).shape, bool(stage and param.ndim)
            own, padded = (share(local, [(0, ranks, index)] if cut else []) for index in (rank, 0))
        size, trained = param.element_size(), param.requires_grad
        found.append(Weight(numel, own, padded, size, trained, states.get(param, 0), param in roots))
    return found


def stage_of(layout: ReplicatedModel) -> int:
    """The ZeRO stage, 0 to 3."""
    if isinstance(layout, FullyShardedModel):
        return 3
    if isinstance(layout, ShardedOptimizerModel):
        return 1 if layout.reducer is None or layout.reducer.keep_buffers else 2
    return int(getattr(layout, "zero_stage", 0))


@dataclass(frozen=True)
class Sizes:
    """Bytes of this rank's part of the model, by what they are for, whole and this rank's own.

    Attributes:
        whole, own: ``"parameters"``, ``"trained"`` (their gradients), ``"state"`` of optimizers (``None`` if unknown), ``"root"``,
            ``"feedback"``, and more for some engines.
        elements: the letters of formulas -> elements: ``P`` of parameters, ``T`` of those that are trained, and more.
        ranks: over how many all is sharded.
    """

    whole: dict[str, int | None]
    own: dict[str, int | None]
    elements: dict[str, int]
    ranks: int
    letters: dict[str, str] = field(
        default_factory=lambda: {"parameters": "P", "trained": "T", "state": "T", "root": "R", "feedback": "F"}
    )

    def with_feedback(self, numel: int, size: int) -> Sizes:
        """And so many numbers, of ``size`` bytes, that compression has not sent."""
        whole, elements = {**self.whole, "feedback": size}, {**self.elements, "F": numel}
        return replace(self, whole=whole, elements=elements)


def sizes(each: Sequence[Weight], ranks: int) -> Sizes:
    def total(of: Callable[[Weight], int], only: Callable[[Weight], bool] = lambda _: True) -> int:
        return sum(of(w) * w.size for w in each if only(w))

    def state(of: Callable[[Weight], int]) -> int | None:
        trained = [w for w in each if w.trained]
        return (
            None
            if any(w.states is None for w in trained)
            else total(lambda w: of(w) * (w.states or 0), lambda w: w.trained)
        )

    def parts(of: Callable[[Weight], int], updated: Callable[[Weight], int]) -> dict[str, int | None]:
        return {
            "parameters": total(of),
            "trained": total(of, lambda w: w.trained),
            "state": state(updated),
            "root": total(of, lambda w: w.root),
            "feedback": 0,
        }

    whole, own = parts(lambda w: w.numel, lambda w: w.numel), parts(lambda w: w.padded, lambda w: w.own)
    elements = {
        "P": sum(w.numel for w in each),
        "T": sum(w.numel for w in each if w.trained),
        "R": sum(w.numel for w in each if w.root),
        "F": 0,
    }
    return Sizes(whole, own, elements, ranks)
