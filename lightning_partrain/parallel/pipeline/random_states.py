"""Random states that the stages of one data-parallel rank have in common."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from lightning_partrain.sync.messages import broadcast_json

try:
    import numpy
except ImportError:  # a step that uses it has it
    numpy = None  # type: ignore[assignment]


def share_random_states(group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` (tensors on the host) Python's, numpy's and torch's random states of its first rank."""
    state: dict[str, Any] = {"python": list(random.getstate())}
    if numpy is not None:
        own: Any = numpy.random.get_state()
        state["numpy"] = [own[0], own[1].tolist(), *own[2:]]
    shared = broadcast_json(state, dist.get_global_rank(group, 0), torch.device("cpu"), group)
    version, numbers, gauss = shared["python"]
    random.setstate((version, tuple(numbers), gauss))
    if numpy is not None and "numpy" in shared:
        name, keys, *rest = shared["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    generators = torch.get_rng_state()
    dist.broadcast(generators, dist.get_global_rank(group, 0), group=group)
    torch.set_rng_state(generators)
    if torch.cuda.is_initialized():
        device = torch.cuda.get_rng_state()
        dist.broadcast(device, dist.get_global_rank(group, 0), group=group)
        torch.cuda.set_rng_state(device)
