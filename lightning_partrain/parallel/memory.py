"""Bytes of model state that a rank holds: what a formula says for its layout, and what is in memory.

Kinds: parameters; gradients; optimizer state; master copies (what an optimizer updates in the place of the parameters); buckets (where gradients
are collected to be sent); error feedback (what compression has not sent). Not counted: activations, buffers of the module, and what exists during one collective or inside the optimizer's
step only. Under autocast (``bf16-mixed``) weights stay as they are, and its casts of them are activations.

Moments of a run: ``"setup"``, before the first batch; ``"window"``, between the passes of an accumulation window; ``"step"``, right before the
optimizer's step; ``"between"``, after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.memory_sizes import Sizes, sizes, stage_of, weights
from lightning_partrain.parallel.replicate import Reduce, ReplicatedModel

Moment = Literal["setup", "window", "step", "between"]
PARAMETERS, GRADIENTS, STATE, MASTERS, BUCKETS, FEEDBACK = KINDS = (
    *("parameters", "gradients", "optimizer state", "master copies", "buckets", "error feedback"),
)

# -- formulas ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """Of a formula: ``what`` of :class:`Sizes`, whole or, with ``cut``, what this rank owns of it."""

    what: str
    cut: bool = False

    def bytes(self, sizes: Sizes) -> int | None:
        return (sizes.own if self.cut else sizes.whole)[self.what]

    def text(self, sizes: Sizes) -> str:
        letter, whole = sizes.letters[self.what], sizes.whole[self.what]
        elements = sizes.elements[letter]
        if letter == "T" and elements == sizes.elements["P"]:
            letter = "P"
        each = "?" if whole is None else f"{whole / elements:.3g}" if elements else "0"
        return f"{each}{letter}{'/N' if self.cut else ''}"


Formula = dict[str, list[Term]]


def native(stage: int, moment: Moment, reduce: Reduce, host_step: bool = False, feedback: bool = False) -> Formula:
    """Of :class:`ReplicatedModel`, :class:`ShardedOptimizerModel` and :class:`FullyShardedModel`.

    Args:
        host_step: whether the optimizer steps on copies of rows and gradients in the memory of the host.
        feedback: whether compression remembers what it has not sent.
    """
    held: Formula = {PARAMETERS: [Term("parameters", cut=stage == 3)]}
    if moment == "setup":
        return held
    held[GRADIENTS] = [Term("trained", cut=stage > 0)]
    held[STATE] = [Term("state", cut=stage > 0)]
    if feedback:
        held[FEEDBACK] = [Term("feedback")]
    if host_step:  # made in the first step
        held[MASTERS] = [Term("trained", cut=True), Term("trained", cut=True)]
    collects = moment == "window" and reduce == "window"
    if stage == 1 or (stage == 2 and collects):
        held[BUCKETS] = [Term("trained")]
    if stage == 3 and collects:
        held[GRADIENTS] = [Term("trained")]
    if stage == 3 and moment == "window":
        held[PARAMETERS].append(Term("root"))
    return held


def by_owners(stage: int, moment: Moment) -> Formula:
    """Of :class:`FairScaleModel`: whole parameters belong to ranks."""
    if moment == "setup":
        return {PARAMETERS: [Term("parameters")]}
    return {
        PARAMETERS: [Term("parameters")],
        GRADIENTS: [Term("trained", cut=stage == 2 and moment != "window")],
        STATE: [Term("state", cut=True)],
    }


def expected(formula: Formula, sizes: Sizes) -> dict[str, int | None]:
    """Kind -> bytes; ``None`` where the formula does not know."""
    found: dict[str, int | None] = dict.fromkeys(KINDS, 0)
    for kind, terms in formula.items():
        each = [term.bytes(sizes) for term in terms]
        found[kind] = None if None in each else sum(b or 0 for b in each)
    return found


@dataclass(frozen=True)
class Expectation:
    """What a layout should hold, for after its set-up.

    Attributes:
        engine: ``"native"``, ``"DeepSpeed"`` or ``"FairScale"``.
        formula: of a moment.
    """

    engine: str
    stage: int
    sizes: Sizes
    formula: Callable[[Moment], Formula]

    def at(self, moment: Moment) -> dict[str, int | None]:
        return expected(self.formula(moment), self.sizes)


def expectation(layout: ReplicatedModel, optimizers: Sequence[torch.optim.Optimizer]) -> Expectation:
    """Of ``layout`` with ``optimizers``, which are unwrapped and attached to it."""
    from lightning_partrain.parallel.deepspeed import memory as deepspeed
    from lightning_partrain.parallel.deepspeed.model import DeepSpeedModel

    if isinstance(layout, DeepSpeedModel) and layout.engine is not None:
        return Expectation("DeepSpeed", *deepspeed.expectation(layout))
    stage = stage_of(layout)
    if getattr(layout, "owners", None) is not None:
        of_all = sizes(weights(layout, optimizers), layout.mesh.size("data_parallel"))
        return Expectation("FairScale", stage, of_all, lambda moment: by_owners(stage, moment))
    of_all = sizes(weights(layout, optimizers), layout.mesh.size("dp_shard"))
    feedback = layout.exchange is not None
    if layout.exchange is not None:
        of_all = of_all.with_feedback(*layout.exchange.feedback_size())
    return Expectation(
        "native", stage, of_all, lambda moment: native(stage, moment, layout.reduce, layout.host_step, feedback)
    )


# -- what there is -------------------------------------------------------------------------------------------------------


def measured(layout: ReplicatedModel, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Kind -> bytes of the storages that this rank holds, each counted once, for the first kind that has it. Nothing is waited for."""
    from lightning_partrain.parallel.deepspeed import memory as deepspeed

    by_kind = layout.state_tensors()
    present = [p for p in layout.module.parameters() if p not in layout.absent]
    state = [v for o in optimizers for values in o.state.values() for v in values.values() if isinstance(v, Tensor)]
    engine = getattr(layout, "engine", None)
    return by_storage(
        {
            PARAMETERS: [*by_kind["parameters"], *present],  # DeepSpeed leaves some whole
            MASTERS: by_kind.get("masters", []),
            GRADIENTS: [*by_kind["gradients"], *(deepspeed.gradients(engine) if engine is not None else [])],
            STATE: [*by_kind.get("optimizer", []), *state],
            BUCKETS: by_kind["buckets"],
            FEEDBACK: by_kind.get("compression", []),
        }
    )


def by_storage(tensors: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Kind -> bytes of the storages of ``tensors``, each for the first kind that has it."""
    seen: set[int] = set()
    found = dict.fromkeys((*KINDS, *tensors), 0)
    for kind, of_kind in tensors.items():
        for tensor in of_kind:
            storage = local_tensor(tensor).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[kind] += storage.nbytes()
    return found
