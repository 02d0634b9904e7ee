"""DeepSpeed's configuration: the user's, merged with what the Trainer owns, and checked against it.

Accumulation, clipping, precision, batch sizes and the schedule have one owner, the Trainer with its module. A setting of theirs in the
configuration has to say the same, or ``"auto"``.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_partrain.parallel.optimizer import ELEMENTWISE

#: Sections that change what the ranks are for, or that stop and restart the run, and what to do instead.
REFUSED = {
    "tensor_parallel": "Use strategy='hybrid_3d' with tensor_parallel_size.",
    "sequence_parallel_size": "This strategy's ranks are all data-parallel.",
    "pipeline": "Use strategy='hybrid_3d' with pipeline_parallel_size.",
    "elasticity": "Give the Trainer devices and num_nodes.",
    "autotuning": "It runs the script many times by itself: use DeepSpeed's launcher for that.",
    "hybrid_engine": "It is for a loop of one's own.",
    "curriculum_learning": "Do it in the data loader.",
    "data_efficiency": "Do it in the data loader.",
    "sparse_gradients": "ZeRO has dense gradients only.",
    "amp": "Use Trainer(precision=...).",
    "torch_autocast": "Use Trainer(precision='bf16-mixed'), which is autocast over float32 weights.",
}

#: What DeepSpeed knows at the top, as far as a misspelt word could be meant for it.
KNOWN = (
    *REFUSED,
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "activation_checkpointing", "flops_profiler"),
    *("comms_logger", "tensorboard", "wandb", "csv_monitor", "aio", "checkpoint", "data_types", "memory_breakdown"),
)

#: Optimizers of the config that look at each element alone: DeepSpeed's Adam, and torch's by name.
OPTIMIZERS = (
    "Adam",
    "AdamW",
    *(kind.__name__ for kind in ELEMENTWISE if kind.__name__ not in ("Adam", "AdamW", "Adagrad")),
)

OLD_OFFLOAD = {"cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory"}

#: Trainer(precision=...) -> the section of DeepSpeed that it stands for.
PRECISIONS = {"32-true": None, "bf16-mixed": None, "bf16-true": "bf16", "16-true": "fp16"}


#: DeepSpeed wants buckets of a multiple of this many elements.
ALIGNED = 32


@dataclass(frozen=True)
class Owned:
    """What the Trainer says.

    Attributes:
        zero_stage: of the strategy, as are ``offload_optimizer`` and ``offload_parameters``.
        precision: the Trainer's.
        accumulate: passes in a window.
        clip: ``gradient_clip_val``.
        on_gpu: whether ranks have GPUs.
        parameters: how many elements are trained.
    """

    zero_stage: int
    offload_optimizer: bool
    offload_parameters: bool
    precision: str
    accumulate: int
    clip: float | None
    on_gpu: bool
    parameters: int


def read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """The user's configuration, from a file if need be.

    Raises:
        ValueError: for a file that is not there or holds no JSON object, and for settings that no run of this strategy can have.
    """
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text())
        except OSError as error:
            raise ValueError(
                f"config={str(config)!r} cannot be read: {error.strerror}. Give DeepSpeed's JSON file, or a mapping."
            ) from None
        except ValueError as error:
            raise ValueError(f"config={str(config)!r} is not JSON: {error}.") from None
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a mapping as DeepSpeed has it, or the path of its JSON file, not {config!r}.")
    for key, value in config.items():
        if key in REFUSED and value not in (False, None, {}, 0, 1) and not _off(value):
            raise ValueError(f"config: {key!r} cannot be honoured by this strategy. {REFUSED[key]}")
        near = difflib.get_close_matches(str(key), KNOWN, 1, cutoff=0.85)
        if key not in KNOWN and near:
            raise ValueError(f"config: DeepSpeed knows no {key!r}, and would pass over it. Did you mean {near[0]!r}?")
        if key not in KNOWN:
            rank_zero_warn(f"config: {key!r} is given to DeepSpeed as it is, which passes over what it does not know.")
    return copy.deepcopy(dict(config))


def _off(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("enabled") is False


def merged(config: Mapping[str, Any], owned: Owned) -> dict[str, Any]:
    """``config`` complete with what ``owned`` says.

    Raises:
        ValueError: where the two contradict each other; names both values.
    """
    done = copy.deepcopy(dict(config))
    _same(
        done.pop("gradient_accumulation_steps", None),
        owned.accumulate,
        "gradient_accumulation_steps",
        "accumulate_grad_batches",
    )
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        done.pop(key, None)  # compared with the loader's when that is there
    done["train_micro_batch_size_per_gpu"] = 1  # only DeepSpeed's own log of samples a second asks
    done["gradient_accumulation_steps"] = 1
    clip = done.get("gradient_clipping")
    if owned.clip is not None:
        _same(clip, owned.clip, "gradient_clipping", "gradient_clip_val")
    done["gradient_clipping"] = float(clip) if owned.clip is None and clip not in (None, "auto") else 0.0
    _precision(done, owned.precision)
    _zero(done, owned)
    own = done.get("optimizer")
    if own is not None and str(dict(own).get("type", "")).lower() not in map(str.lower, OPTIMIZERS):
        raise ValueError(
            f"config: optimizer.type={dict(own).get('type')!r} is none that DeepSpeed's flat tensors allow. Use one of {', '.join(OPTIMIZERS)}, or "
            "configure_optimizers."
        )
    done.setdefault("zero_allow_untested_optimizer", True)  # what cannot be sharded has been refused
    done.setdefault("zero_force_ds_cpu_optimizer", False)
    done.setdefault("steps_per_print", 1 << 60)
    for key in REFUSED:
        done.pop(key, None)
    return done


def _same(given: Any, owner: Any, key: str, option: str) -> None:
    if given not in (None, "auto") and float(given) != float(owner):
        raise ValueError(
            f"config has {key}={given}, but the Trainer has {option}={owner}. Give it to one of them: leave {key!r} out of the config."
        )


def _precision(done: dict[str, Any], precision: str) -> None:
    if precision not in PRECISIONS:
        ways = (
            "'16-true', whose master copies DeepSpeed keeps in float32, or 'bf16-mixed'"
            if precision == "16-mixed"
            else "'32-true'"
        )
        raise ValueError(
            f"DeepSpeed's engine does not train with precision={precision!r}. Use {ways}; there are {', '.join(map(repr, PRECISIONS))}."
        )
    own = PRECISIONS[precision]
    for section in ("fp16", "bf16"):
        settings = dict(done.get(section) or {})
        enabled = settings.get("enabled", "auto" if section == own or not settings else True)
        if enabled not in ("auto", section == own):
            raise ValueError(
                f"config has {section}.enabled={enabled}, but the Trainer has precision={precision!r}. Use "
                + (
                    f"precision={'16-true' if section == 'fp16' else 'bf16-true'!r}"
                    if enabled
                    else f"{section}.enabled='auto'"
                )
                + f", or leave {section!r} out of the config."
            )
        done.pop(section, None)
        if section == own:
            done[section] = {**settings, "enabled": True}


def _zero(done: dict[str, Any], owned: Owned) -> None:
    given = done.get("zero_optimization") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config: zero_optimization must be a mapping, not {given!r}.")
    zero = {key: value for key, value in given.items() if value != "auto"}
    for key in OLD_OFFLOAD & zero.keys():
        raise ValueError(
            f"config: zero_optimization.{key} is DeepSpeed's former way to offload. Use offload_optimizer=True or offload_parameters=True of the strategy."
        )
    _same(zero.get("stage"), owned.zero_stage, "zero_optimization.stage", "zero_stage of the strategy")
    zero["stage"] = owned.zero_stage
    if zero.get("round_robin_gradients"):
        raise ValueError(
            "config: zero_optimization.round_robin_gradients puts parameters into an order in which DeepSpeed itself does not find them again "
            "(0.19), so that checkpoints would be wrong. Leave it out."
        )
    for key, wanted in (("offload_optimizer", owned.offload_optimizer), ("offload_param", owned.offload_parameters)):
        settings = dict(zero.get(key) or {})
        device = settings.get("device", "cpu" if settings else None)
        if wanted and device == "none":
            option = "offload_optimizer" if key == "offload_optimizer" else "offload_parameters"
            raise ValueError(f"config has zero_optimization.{key}.device='none', but the strategy has {option}=True.")
        if device == "nvme":
            raise ValueError(
                f"config has zero_optimization.{key}.device='nvme': checkpoints of it could not be read back. Use 'cpu'."
            )
        offloaded = wanted or device == "cpu"
        if offloaded and not owned.on_gpu:
            raise ValueError(
                f"zero_optimization.{key} moves what a GPU has no room for to the memory of the host, where ranks on CPUs have everything "
                "already: there is nothing to offload to."
            )
        zero.pop(key, None)
        if offloaded:
            zero[key] = {"device": "cpu", "pin_memory": True, **settings}
    zero.setdefault("overlap_comm", owned.on_gpu)
    # not a buffer of DeepSpeed's 500 million elements for a small model
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        zero.setdefault(key, min(200_000_000, -(-max(owned.parameters, 1) // ALIGNED) * ALIGNED))
    done["zero_optimization"] = zero
