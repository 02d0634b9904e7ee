"""The whole model's state from its stages: for checkpoints, and for the module after training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain.parallel.buffers import broadcast_tensors
from lightning_partrain.parallel.hollow import give_room
from lightning_partrain.parallel.pipeline.pipeline import Pipeline

#: One entry of a state dict, or what an optimizer keeps for one parameter.
Entry = Tensor | dict[str, Any] | None


def collect(homes: Mapping[Any, int], own: Mapping[Any, Entry], group: dist.ProcessGroup) -> dict[Any, Entry]:
    """The entries of all stages on the first one; other stages get an empty dict.

    Args:
        homes: key -> the stage whose entry counts, the same on every stage and in the order of the result.
        own: this stage's entries; where one is missing, the result has none.
        group: the stages, for tensors on the host.
    """
    index = dist.get_rank(group)
    whole: dict[Any, Entry] = {}
    for key, home in homes.items():
        if home == index == 0:
            entry = own.get(key)
        elif home == index:
            _send(own.get(key), group)
            continue
        elif index == 0:
            entry = _receive(dist.get_global_rank(group, home), group)
        else:
            continue
        if entry is not None:
            whole[key] = entry
    return whole


def _send(entry: Entry, group: dist.ProcessGroup) -> None:
    values = entry if isinstance(entry, dict) else {} if entry is None else {"": entry}
    tensors = {key: value.detach().cpu().contiguous() for key, value in values.items() if isinstance(value, Tensor)}
    head = {
        "none": entry is None,
        "values": {key: value for key, value in values.items() if key not in tensors},
        "tensors": {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in tensors.items()},
    }
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([text.numel()]), group=group, group_dst=0)
    dist.send(text, group=group, group_dst=0)
    for tensor in tensors.values():
        dist.send(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, group=group, group_dst=0)


def _receive(source: int, group: dist.ProcessGroup) -> Entry:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=group)
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(text, source, group=group)
    head = json.loads(text.numpy().tobytes())
    values = dict(head["values"])
    for key, (shape, dtype) in head["tensors"].items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.recv(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, source, group=group)
        values[key] = tensor
    return None if head["none"] else values[""] if list(values) == [""] else values


def state_homes(pipeline: Pipeline) -> dict[str, int]:
    """Name in the module's state dict -> the stage whose value counts. What is no parameter or buffer counts on the first."""
    return {name: pipeline.home(name) for name in pipeline.module.state_dict()}


@torch.no_grad()
def make_whole(pipeline: Pipeline, parameters: bool) -> None:
    """Give every stage all buffers and (or else they stay hollow) parameters. Collective over the stages."""
    group = pipeline.mesh.group("pp")
    module = pipeline.module
    by_home: dict[int, list[Tensor]] = {stage: [] for stage in range(pipeline.stages)}
    for name, param in module.named_parameters() if parameters else ():
        give_room([param])
        by_home[pipeline.home(name)].append(param.detach())
    for name, buffer in module.named_buffers():
        by_home[pipeline.home(name)].append(buffer)
    for home, tensors in by_home.items():
        broadcast_tensors(tensors, dist.get_global_rank(group, home), group)
    pipeline.absent.clear()
