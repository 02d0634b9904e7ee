"""What DeepSpeed's engine holds: its formulas, and the tensors that the layout does not name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_partrain.parallel.deepspeed import internals
from lightning_partrain.parallel.deepspeed.model import DeepSpeedModel
from lightning_partrain.parallel.memory import BUCKETS, GRADIENTS, MASTERS, PARAMETERS, STATE, Formula, Moment, Term
from lightning_partrain.parallel.memory_sizes import Sizes, states_per_element

#: DeepSpeed's own optimizers, which its configuration can ask for.
STATES = {"DeepSpeedCPUAdam": 2, "FusedAdam": 2, "DeepSpeedCPUAdagrad": 1, "FusedLamb": 2, "FusedLion": 1} | {
    "DeepSpeedCPULion": 1
}
#: Parameters of at most so many elements stay whole between steps of stage 3, unless the configuration says otherwise.
PERSISTENT = 100_000
#: Flat tensors of stages 1 and 2 have a multiple of this many elements for each rank.
ALIGNED = 2


def formula(stage: int, moment: Moment, by_window: bool) -> Formula:
    """Master copies are there also where the model is float32: DeepSpeed steps on a flat copy of what a rank owns."""
    held: Formula = {PARAMETERS: [Term("parameters", cut=stage == 3)], MASTERS: [Term("masters", cut=True)]}
    if stage == 3:  # has both from the beginning to the end
        held[GRADIENTS], held[BUCKETS] = [Term("gradients", cut=True)], [Term("bucket")]
    if moment == "setup":
        return held
    held[STATE] = [Term("state", cut=True)]
    if moment == "step":
        held[GRADIENTS] = [Term("gradients", cut=True)]
    elif moment == "window" and by_window:
        held[GRADIENTS] = [Term("trained"), *held.get(GRADIENTS, [])]
    elif moment == "window" and stage == 1:  # reduced after every pass, into whole gradients
        held[GRADIENTS], held[BUCKETS] = [Term("trained")], [Term("bucket")]
    elif moment == "window" and stage == 2:
        held[GRADIENTS] = [Term("gradients", cut=True)]
    if stage == 3:
        held[PARAMETERS].append(Term("small"))
    return held


def gradients(engine: Any) -> list[Tensor]:
    """Memory for gradients besides what the layout names: what stage 3 keeps from beginning to end, what stages 1 and 2 add up in between the
    passes of a window, and the gradients of the flat copies during the step."""
    if internals.is_stage_3(engine):
        kept = [engine.optimizer.grad_partitions_flat_buffer]
    else:
        kept = [grad for grads in engine.optimizer.all_grad_tensors.values() for grad in grads or ()]
    return kept + [flat.grad for flat in internals.flat_parameters(engine) if flat.grad is not None]


def _touched(numels: list[int], own: int, rank: int) -> int:
    """Elements of the parameters, laid one after the other, of which some are among the ``own`` of this rank: DeepSpeed keeps
    their gradients whole."""
    begin, found = 0, 0
    for numel in numels:
        if begin < (rank + 1) * own and begin + numel > rank * own:
            found += numel
        begin += numel
    return found


def expectation(layout: DeepSpeedModel) -> tuple[int, Sizes, Callable[[Moment], Formula]]:
    """The stage, the sizes, and the formula of a moment."""
    zero = layout.config["zero_optimization"]
    stage, rank, ranks = int(zero["stage"]), layout.mesh.data_parallel_rank, layout.mesh.size("data_parallel")
    limit = zero.get("stage3_param_persistence_threshold", PERSISTENT)
    _, accumulated = layout.engine.get_data_types()
    params = dict(layout.module.named_parameters())
    shapes = {n: internals.weight_part(p).shape if stage == 3 else tuple(p.shape) for n, p in params.items()}
    numels = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    size = {name: param.element_size() for name, param in params.items()}
    frozen = [name for name in params if name not in layout.trained]
    pairs: list[tuple[int, int]] = []  # elements that this rank owns, states for each
    kept = padding = unknown = 0
    for group, options in zip(layout.groups, layout.optimizer.param_groups, strict=False):
        names = [name for name in group if name in layout.trained]
        states = states_per_element(layout.optimizer, options, STATES)
        unknown += states is None
        if stage == 3:
            own = kept_here = sum(-(-numels[name] // ranks) for name in names)
        else:
            total = sum(numels[name] for name in names)
            own = -(-total // (ALIGNED * ranks)) * ALIGNED
            same = accumulated == params[names[0]].dtype if names else True
            kept_here = _touched([numels[name] for name in names], own, rank) if same else own
            padding += (own * ranks - total) * (size[names[0]] if names else 0)
        kept += kept_here
        pairs.append((own, states or 0))
    trained = sum(numels[name] for name in layout.trained)
    own = sum(own for own, _ in pairs)
    master, gradient = 4, torch.empty(0, dtype=accumulated).element_size()
    whole_parameters = sum(numels[name] * size[name] for name in params)
    sharded = sum(-(-numels[name] // ranks) * size[name] for name in params)
    small = [name for name in params if numels[name] <= limit]
    whole: dict[str, int | None] = {
        "parameters": whole_parameters + padding,
        "trained": sum(numels[name] * size[name] for name in layout.trained),
        "gradients": trained * gradient,
        "state": None if unknown else sum(o * s * master for o, s in pairs) * trained // max(1, own),
        "masters": trained * master,
        "small": sum(numels[name] * size[name] for name in small),
        "bucket": zero["reduce_bucket_size"] * max((size[name] for name in params), default=0),
    }
    owned: dict[str, int | None] = {
        "parameters": sharded if stage == 3 else whole_parameters + padding,
        "gradients": kept * gradient,
        "state": None if unknown else sum(o * s * master for o, s in pairs),
        "masters": own * master,
    }
    elements = {"P": trained + sum(numels[name] for name in frozen), "T": trained}
    elements |= {"S": sum(numels[name] for name in small), "B": zero["reduce_bucket_size"]}
    letters = {"parameters": "P", "small": "S", "bucket": "B"}
    letters |= dict.fromkeys(("trained", "gradients", "state", "masters"), "T")
    found = Sizes(whole, owned, elements, ranks, letters)
    return stage, found, lambda moment: formula(stage, moment, layout.reduce == "window")
