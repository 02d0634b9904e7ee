"""torch's pipeline schedules over one stage a rank, one for each kind of micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_partrain.parallel.pipeline.cut import Crossing
from lightning_partrain.parallel.pipeline.stage import Stage

Schedule = Literal["gpipe", "1f1b"]


def _example(crossing: Crossing, training: bool) -> Tensor:
    """What torch derives buffers from: in the order of memory, without memory."""
    shape = [crossing.leaf.shape[dim] for dim in crossing.leaf.order]
    return torch.empty(shape, dtype=crossing.leaf.dtype, device="meta", requires_grad=training and crossing.gradient)


def build_schedule(
    stage: Stage,
    group: dist.ProcessGroup,
    crossing: Sequence[Sequence[Crossing]],
    micro_batches: int,
    kind: Schedule,
    loss_dtype: torch.dtype,
    training: bool,
    device: torch.device,
) -> Any:
    """A schedule of torch that calls ``stage`` for each of ``micro_batches`` micro-batches of one shape.

    1F1B needs as many micro-batches as stages; with fewer, GPipe does the same.
    """
    index, count = stage.stage, len(crossing)
    outgoing = (
        tuple(_example(c, training) for c in crossing[index + 1])
        if index + 1 < count
        else torch.empty((), dtype=loss_dtype, device="meta", requires_grad=training)
    )
    runner = PipelineStage(
        stage,
        index,
        count,
        device,
        input_args=tuple(_example(c, training) for c in crossing[index]),
        output_args=outgoing,
        group=group,
    )
    schedule = Schedule1F1B if kind == "1f1b" and micro_batches >= count else ScheduleGPipe
    return schedule(runner, micro_batches, loss_fn=_as_it_is if training else None, scale_grads=False)


def _as_it_is(loss: Tensor, target: Any) -> Tensor:
    return loss


def run_one_stage(stage: Stage, micro_batches: int, training: bool) -> None:
    """A pipeline of one stage: one micro-batch after the other."""
    for index in range(micro_batches):
        loss = stage(mb=torch.tensor(index))
        if training:
            loss.backward()
