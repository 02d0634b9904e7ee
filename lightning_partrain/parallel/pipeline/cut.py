"""Which unit runs on which stage, what crosses each boundary, and which parameters live where.

All of it follows from what each unit rests on (:mod:`record`), and from nothing else:

- What crosses the boundary to stage r: unit outputs of earlier stages that a unit of stage r or later, or the result, rests on.
- What lives on stage r: the parameters that its units rest on, wherever they are registered, and on the last stage those of the
  result. A parameter on several stages is *tied*: its gradients are added up before the norm and the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_partrain.parallel.pipeline.record import Leaf, Recording
from lightning_partrain.parallel.pipeline.sources import Source
from lightning_partrain.parallel.pipeline.units import CannotCutError, Unit


@dataclass(frozen=True)
class Split:
    """``pipeline_split``: the list of blocks to cut, and the numbers of the blocks that begin a stage."""

    blocks: str | None = None
    at: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, value: Any) -> Split:
        """From ``"auto"`` or ``{"blocks": "model.layers", "at": [3, 7]}``, both keys optional.

        Raises:
            ValueError: for anything else.
        """
        if value == "auto":
            return cls()
        if not isinstance(value, Mapping) or not value or not value.keys() <= {"blocks", "at"}:
            raise ValueError(
                f"pipeline_split must be 'auto' or a mapping with 'blocks' and 'at', such as {{'blocks': 'model.layers', 'at': [3, 7]}}, "
                f"not {value!r}."
            )
        at = value.get("at")
        if at is not None and (
            isinstance(at, str) or not all(isinstance(n, int) and not isinstance(n, bool) for n in at)
        ):
            raise ValueError(f"pipeline_split 'at' must be a list of block numbers, not {at!r}.")
        if at is not None and len(set(at)) != len(at):
            raise ValueError(f"pipeline_split at={list(at)} names a block twice; each number begins one stage.")
        return cls(value.get("blocks"), None if at is None else tuple(at))


@dataclass(frozen=True)
class Crossing:
    """Tensor ``index`` of what ``unit`` returns, on its way to a later stage."""

    unit: str
    index: int
    leaf: Leaf
    gradient: bool


@dataclass(frozen=True)
class Cut:
    """The units of each stage, in the order in which they are called; data that can be printed and compared."""

    stages: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.stages)


def choose_cut(
    calls: Sequence[str],
    units: Sequence[Unit],
    stages: int,
    at: Sequence[int] | None = None,
    together: Sequence[Collection[str]] = (),
) -> Cut:
    """Cut the sequence of unit calls into ``stages`` parts.

    Args:
        calls: names of units in the order in which the step calls them.
        at: numbers of blocks, counted in the order of calls, with which the stages after the first begin; by default the cut whose
            largest stage has the fewest parameters.
        together: modules that have to be on one stage, with all between them.

    Raises:
        CannotCutError: when there are not enough blocks, or ``at`` does not fit.
    """
    by_name = {unit.name: unit for unit in units}
    starts = [place for place, name in enumerate(calls) if by_name[name].block is not None]
    inseparable: dict[int, Collection[str]] = {}
    for group in together:
        inside = [n for n, call in enumerate(calls) if any(m == call or m.startswith(f"{call}.") for m in group)]
        inseparable.update(dict.fromkeys(range(min(inside, default=0) + 1, max(inside, default=0) + 1), group))
    if at is not None:
        if len(at) != stages - 1 or list(at) != sorted(set(at)) or any(not 0 < n < len(starts) for n in at):
            raise CannotCutError(
                f"pipeline_split at={list(at)} does not make {stages} stages of {len(starts)} blocks. Give {stages - 1} increasing block "
                f"numbers from 1 to {len(starts) - 1}; each is the first block of a stage."
            )
        places = [starts[n] for n in at]
        for place in places:
            if place in inseparable:
                raise CannotCutError(
                    f"pipeline_split at={list(at)} begins a stage at {calls[place]!r}, inside of layers that the tensor-parallel plan cuts "
                    f"together: {', '.join(sorted(inseparable[place]))}. Begin it before or after them."
                )
    else:
        starts = [place for place in starts if place not in inseparable]
        if len(starts) < stages:
            raise CannotCutError(
                f"pipeline_parallel_size={stages} needs {stages} blocks, but the step calls {len(starts)}: {', '.join(calls[s] for s in starts) or 'none'}. "
                "Use fewer stages."
            )
        places = _even([by_name[name].numel for name in calls], starts[1:], stages)
    ends = [0, *places, len(calls)]
    return Cut(tuple(tuple(calls[a:b]) for a, b in itertools.pairwise(ends)))


def extend_cut(cut: Cut, calls: Sequence[str]) -> Cut:
    """``cut`` with units that only another step calls: each on the stage of the unit called before it."""
    stages = [list(units) for units in cut.stages]
    stage = 0
    for name in calls:
        if any(name in units for units in stages):
            stage = next(s for s, units in enumerate(stages) if name in units)
        else:
            stages[stage].append(name)
    return Cut(tuple(map(tuple, stages)))


def _even(sizes: Sequence[int], starts: Sequence[int], stages: int) -> list[int]:
    """Places among ``starts`` that make the largest of ``stages`` sums of consecutive ``sizes`` smallest, then the next."""
    total = [0, *itertools.accumulate(sizes)]
    ends = (*starts, len(sizes))
    # for the first stages that hold everything before an end: (their sums, the largest first; places)
    best: dict[int, tuple[list[int], list[int]]] = {end: ([total[end]], []) for end in ends}
    for _ in range(stages - 1):
        further: dict[int, tuple[list[int], list[int]]] = {}
        for end in ends:
            options = [
                (sorted([*best[place][0], total[end] - total[place]], reverse=True), [*best[place][1], place])
                for place in starts
                if place < end and place in best
            ]
            if options:
                further[end] = min(options)
        best = further
    return best[len(sizes)][1]


class Flow:
    """What a recorded step sends and needs under a cut.

    Attributes:
        crossing: for each stage, what it receives from the one before; nothing for the first.
        parameters: for each stage, names of the parameters that its part of the step rests on.

    Raises:
        CannotCutError: when a stage would need something that another stage's unit leaves behind other than by its output.
    """

    def __init__(self, recording: Recording, cut: Cut) -> None:
        last = len(cut) - 1
        stage_of = {unit: stage for stage, units in enumerate(cut.stages) for unit in units}
        for before, name in itertools.pairwise(recording.calls):
            if name not in stage_of or stage_of[before] > stage_of[name]:
                raise CannotCutError(
                    f"This step calls {name!r} after {before!r}, but the training step calls them in another order, or not both. All "
                    "steps have to go through the model in one direction."
                )
        rests_on = [(stage_of[name], call.sources) for name, call in recording.calls.items()]
        rests_on.append((last, recording.sources))
        self.parameters: list[set[str]] = [set() for _ in cut.stages]
        needed_until: dict[Source, int] = {}
        for stage, sources in rests_on:
            for source in sources:
                if source[0] == "parameter":
                    self.parameters[stage].add(source[1])
                elif source[0] == "unit":
                    needed_until[source] = max(stage, needed_until.get(source, 0))
                elif source[0] == "buffer":
                    if source[1] in recording.written_buffers and stage != last:
                        raise CannotCutError(
                            f"The buffer {source[1]!r} is changed by the step and used on stage {stage} of {last + 1}: the next micro-batch would "
                            "begin there before the last stage has changed it. Change it in on_train_batch_end, or inside of one module."
                        )
                elif stage_of[source[1]] != stage:
                    raise CannotCutError(
                        f"{source[1]!r} changes a tensor in place, or leaves one behind in an attribute, that a later stage reads. Only "
                        "what a module returns can be sent to another stage: let it return the tensor, work on a copy, or cut "
                        "elsewhere with pipeline_split."
                    )
        gradient_until = self._gradients(recording, stage_of, last)
        self.crossing: list[list[Crossing]] = [[] for _ in cut.stages]
        for name, call in recording.calls.items():
            tensors = [leaf for leaf in call.leaves if isinstance(leaf, Leaf)]
            for index, leaf in enumerate(tensors):
                source = ("unit", name, index)
                for stage in range(stage_of[name] + 1, needed_until.get(source, -1) + 1):
                    if leaf.hooked:
                        raise CannotCutError(
                            f"The step registers a hook on the gradient of what {name!r} returns, which is sent to another stage: the hook "
                            "would run on both. Put it inside of the module."
                        )
                    gradient = stage <= gradient_until.get(source, -1)
                    self.crossing[stage].append(Crossing(name, index, leaf, gradient))

    @staticmethod
    def _gradients(recording: Recording, stage_of: Mapping[str, int], last: int) -> dict[Source, int]:
        """Source -> the last stage from which a gradient comes back to it."""
        until: dict[Source, int] = {}
        waiting = [(source, last) for source in recording.gradients_from]
        done = set()
        while waiting:
            source, stage = waiting.pop()
            until[source] = max(stage, until.get(source, 0))
            if source[1] not in done:
                done.add(source[1])
                waiting += [(other, stage_of[source[1]]) for other in recording.calls[source[1]].gradients_from]
        return until


def parameter_stages(
    module: nn.Module, cut: Cut, units: Sequence[Unit], flows: Sequence[Flow]
) -> dict[str, tuple[int, ...]]:
    """Name of every parameter -> the stages on which it lives, at least one."""
    home = {f"{unit.name}." + key: unit.name for unit in units for key, _ in unit.module.named_parameters()}
    called = {name: stage for stage, names in enumerate(cut.stages) for name in names}
    lives = {}
    for name, _ in module.named_parameters():
        stages = sorted({stage for flow in flows for stage, names in enumerate(flow.parameters) if name in names})
        lives[name] = tuple(stages) or (called.get(home.get(name, ""), 0),)
    return lives


def buffer_stages(module: nn.Module, cut: Cut, units: Sequence[Unit]) -> dict[str, int]:
    """Name of every buffer -> the stage that has its present value: its unit's, or the last for those outside of units."""
    called = {name: stage for stage, names in enumerate(cut.stages) for name in names}
    home = {f"{unit.name}." + key: unit.name for unit in units for key, _ in unit.module.named_buffers()}
    return {name: called.get(home.get(name, ""), len(cut) - 1) for name, _ in module.named_buffers()}
