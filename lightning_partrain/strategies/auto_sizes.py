"""Sizes ``"auto"``: as much data parallelism as the memory allows.

An estimate of the model's state (parameters, gradients, two numbers of optimizer state for each, as AdamW keeps) for every layout
that can run; activations are left a part of the memory. Layouts are tried in the order of what they cost: data parallelism alone,
tensor parallelism inside a node, then pipeline stages as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain.mesh import ParallelSizes
from lightning_partrain.parallel.fully_shard import find_blocks
from lightning_partrain.parallel.pipeline.cut import choose_cut
from lightning_partrain.parallel.pipeline.units import CannotCutError, find_units
from lightning_partrain.parallel.tensor.plan import Plan, cut_parameters, regions, resolve, together

#: The part of the memory that the model's state may fill; the rest is for activations and the libraries.
FOR_STATE = 0.8

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_memory(limit: int | float | str) -> int:
    """Bytes from a number of bytes, or from text such as ``"24GiB"`` or ``"80 GB"``.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(limit, (int, float)) and not isinstance(limit, bool) and 1 <= limit < float("inf"):
        return int(limit)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", str(limit))
    if not match or isinstance(limit, bool) or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise ValueError(f"memory_limit must be a number of bytes or a text such as '24GiB' or '80GB', not {limit!r}.")
    return int(float(match[1]) * _UNITS[match[2]])


def device_memory(device: torch.device, ranks: int) -> int:
    """Bytes that a rank has on its device; ranks of one machine share the host's memory on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, ranks)


def choose_sizes(
    module: nn.Module,
    sizes: ParallelSizes,
    free: set[str],
    per_node: int,
    zero_stage: int,
    plan: Plan,
    limit: int,
    stated: bool,
) -> tuple[ParallelSizes, str]:
    """The first layout whose state fits, and the reason in words.

    Args:
        sizes: what was asked for, with 1 where ``free`` says that the axis (``tp``, ``pp``) may grow.
        per_node: ranks of a node.
        limit: bytes of memory a rank has; ``stated`` when the user has said so.

    Raises:
        ValueError: when the user has stated a limit and nothing fits.
    """
    if any(p.is_meta or isinstance(p, DTensor) for p in module.parameters()) or not list(module.parameters()):
        return sizes, "the model is built later, so its size is not known"
    room = int(FOR_STATE * limit)
    tried: list[tuple[int, ParallelSizes]] = []
    for candidate in _candidates(sizes, free, per_node):
        needed = state_bytes(module, candidate, zero_stage, plan)
        if needed is None:
            continue
        tried.append((needed, candidate))
        if needed <= room:
            first = "" if len(tried) == 1 else f", where {_words(tried[0][1])} alone needs {_amount(tried[0][0])}"
            return candidate, (
                f"{_words(candidate)}: {_amount(needed)} of model state a rank{first}; of {_amount(limit)} "
                f"{'(memory_limit)' if stated else 'on the device'}, {FOR_STATE:.0%} are for it"
            )
    least, smallest = min(tried, key=lambda pair: pair[0], default=(0, sizes))
    problem = f"the smallest layout, {_words(smallest)}, needs {_amount(least)} of model state a rank, more than {FOR_STATE:.0%} of {_amount(limit)}"
    if stated:
        raise ValueError(
            f"memory_limit: {problem}. Use more processes, a higher zero_stage (now {zero_stage}), or a larger limit."
        )
    return smallest, problem


def _candidates(sizes: ParallelSizes, free: set[str], per_node: int) -> Iterator[ParallelSizes]:
    data = sizes.dp_shard
    inside = [n for n in range(1, min(data, per_node) + 1) if data % n == 0 and (n == 1 or "tp" in free)]
    for tensor in inside:
        yield replace(sizes, tp=sizes.tp * tensor, dp_shard=data // tensor)
    if "pp" in free:
        for tensor in reversed(inside):
            for stages in range(2, data // tensor + 1):
                if data // tensor % stages == 0:
                    yield replace(sizes, tp=sizes.tp * tensor, pp=sizes.pp * stages, dp_shard=data // tensor // stages)


def state_bytes(module: nn.Module, sizes: ParallelSizes, zero_stage: int, plan: Plan) -> int | None:
    """Bytes of parameters, gradients and optimizer state on the rank that has most, at the peak of a step.

    ``None`` when the model cannot be cut so.
    """
    cut: set[Tensor] = set()
    groups: list[list[str]] = []
    if sizes.tp > 1:
        try:
            layers = resolve(module, plan, sizes.tp)
            groups = together(module, regions(module, layers))
        except ValueError:
            return None
        cut = cut_parameters(layers)
    stages: list[set[Tensor]] = [set(module.parameters())]
    if sizes.pp > 1:
        units = find_units(module)
        try:
            parts = choose_cut([unit.name for unit in units], units, sizes.pp, together=groups)
        except CannotCutError:
            return None
        by_name = {unit.name: set(unit.module.parameters()) for unit in units}
        outside = set(module.parameters()).difference(*by_name.values())
        stages = [outside.union(*(by_name[name] for name in names)) for names in parts.stages]
    blocks: list[set[Tensor]] = [set(block.parameters()) for block in find_blocks(module)]
    return max(_of_rank(params, cut, blocks, sizes, zero_stage) for params in stages)


def _of_rank(
    params: set[Tensor], cut: set[Tensor], blocks: list[set[Tensor]], sizes: ParallelSizes, zero_stage: int
) -> int:
    def held(some: set[Tensor], trained: bool = False) -> float:
        return sum(p.nbytes / (sizes.tp if p in cut else 1) for p in some if p.requires_grad or not trained)

    whole, trained, shards = held(params), held(params, trained=True), sizes.dp_shard
    if zero_stage == 0:
        return int(whole + 3 * trained)
    if zero_stage in (1, 2):
        return int(whole + trained + 3 * trained / shards)
    gathered = max((held(block & params) for block in blocks), default=0.0)
    rest = held(params.difference(*blocks))
    return int((whole + 3 * trained) / shards + 2 * gathered + 2 * rest)


def _words(sizes: ParallelSizes) -> str:
    axes = {"data": sizes.data_parallel_size, "tensor": sizes.tp, "pipeline": sizes.pp}
    return " x ".join(f"{name}_parallel_size {size}" for name, size in axes.items() if size > 1 or name == "data")


def _amount(size: int) -> str:
    for unit in ("TiB", "GiB", "MiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
