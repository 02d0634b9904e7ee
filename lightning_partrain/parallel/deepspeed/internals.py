"""What of DeepSpeed's ZeRO optimizers has no public name, and is touched here alone; `tests/test_deepspeed.py` fails when it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_partrain.parallel.deepspeed.flat import Part


def is_stage_3(engine: Any) -> bool:
    return bool(engine.zero_optimization_partition_weights())


def flat_parameters(engine: Any) -> list[Tensor]:
    """What the optimizer updates: this rank's part of each group, or of each sub-group, in one dimension and mostly float32."""
    optimizer = engine.optimizer
    return list(
        optimizer.fp32_partitioned_groups_flat if is_stage_3(engine) else optimizer.single_partition_of_fp32_groups
    )


def updated_parts(engine: Any, names: Mapping[nn.Parameter, str]) -> dict[str, Part]:
    """Name -> what this rank holds of it in :func:`flat_parameters`, for all parameters that are trained."""
    return dict(_parts_3(engine, names) if is_stage_3(engine) else _parts_12(engine, names))


def _parts_12(engine: Any, names: Mapping[nn.Parameter, str]) -> Iterator[tuple[str, Part]]:
    optimizer = engine.optimizer
    for flat, group in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        for param in group:
            held = param._hp_mapping
            at = begin = numel = 0
            if held is not None:
                own = held.hp_fragment_address
                at, begin, numel = own.start, held.lp_fragment_address.start, own.numel
            yield names[param], Part(tuple(param.shape), flat, at, begin, numel)


def _parts_3(engine: Any, names: Mapping[nn.Parameter, str]) -> Iterator[tuple[str, Part]]:
    optimizer = engine.optimizer
    for number, group in enumerate(optimizer.fp16_groups):
        for param in group:
            flat_number, at, _ = optimizer.grad_position[optimizer.get_param_id(param)]
            assert flat_number == number
            begin, numel = _rows_3(param)
            yield (
                names[param],
                Part(tuple(param.ds_shape), optimizer.fp32_partitioned_groups_flat[number], at, begin, numel),
            )


def _rows_3(param: Any) -> tuple[int, int]:
    """Where this rank's elements of a flattened parameter begin, and how many there are without padding."""
    size = param.ds_tensor.ds_numel
    begin = min(size * torch.distributed.get_rank(param.ds_process_group), param.ds_numel)
    return begin, min(size, param.ds_numel - begin)


def weight_part(param: Any) -> Part:
    """Stage 3: what this rank holds of the parameter that the model computes with."""
    begin, numel = _rows_3(param)
    return Part(tuple(param.ds_shape), param.ds_tensor, 0, begin, numel)


def averaged_gradients(engine: Any) -> list[Tensor]:
    """This rank's parts of the averaged gradients, times the loss scale, between the last pass of a window and the step."""
    optimizer = engine.optimizer
    if engine.zero_cpu_offload():
        return [flat.grad for flat in flat_parameters(engine) if flat.grad is not None]
    return [grad for grads in optimizer.averaged_gradients.values() if grads is not None for grad in grads]


def loss_scale(engine: Any) -> float:
    return float(engine.optimizer.loss_scale)


def set_clip_norm(engine: Any, max_norm: float) -> None:
    """The norm to which the next steps clip; 0 for none."""
    engine.optimizer.clip_grad = max_norm


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The one that was given to the engine, which updates :func:`flat_parameters`."""
    return engine.optimizer.optimizer


def gathered_bytes(engine: Any) -> list[Tensor]:
    """Buffers that collect gradients for a reduction."""
    optimizer = engine.optimizer
    buckets = getattr(optimizer, "ipg_buckets", {})
    found: list[Tensor] = []
    for bucket in buckets.values():
        buffer = bucket.buffer
        found += [b for b in (buffer if isinstance(buffer, list) else [buffer]) if isinstance(b, Tensor)]
    return found


def forget_hooks(engine: Any) -> None:
    """What ``engine.destroy()`` leaves on the module."""
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()


class Marks:
    """What a module and its parameters had of their own before DeepSpeed added to them."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = {each: set(each.__dict__) for each in module.modules()}
        self._params = {param: set(param.__dict__) for param in module.parameters()}

    def restore(self) -> None:
        """Take away what was added since; parameters keep their data."""
        for each, had in self._modules.items():
            each._parameters = dict(each._parameters)  # DeepSpeed's own kind of dictionary gathers what is read from it
            for key in set(each.__dict__) - had - {"_parameters"}:
                del each.__dict__[key]
        for param, had in self._params.items():
            for key in set(param.__dict__) - had:
                del param.__dict__[key]
