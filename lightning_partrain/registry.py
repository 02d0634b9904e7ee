"""The strategy names, registered without importing what they stand for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A registered name: the class it builds, the arguments it fixes, and one line for people."""

    class_path: str
    description: str
    arguments: dict[str, Any] = field(default_factory=dict)


_HYBRID = "lightning_partrain.strategies.Hybrid3DStrategy"
_COMPRESSED = "lightning_partrain.strategies.CompressedDDPStrategy"
_ZERO = "lightning_partrain.strategies.ZeroStrategy"
_DEEPSPEED = "lightning_partrain.strategies.DeepSpeedZeroStrategy"
_FAIRSCALE = "lightning_partrain.strategies.FairScaleZeroStrategy"

STRATEGIES: dict[str, Entry] = {
    "hybrid_3d": Entry(_HYBRID, "data parallel with sharded optimizer state; the numbers of one process"),
    "hybrid_3d_tp2": Entry(_HYBRID, "hybrid_3d over two tensor-parallel ranks", {"tensor_parallel_size": 2}),
    "hybrid_3d_pp2": Entry(_HYBRID, "hybrid_3d over two pipeline stages", {"pipeline_parallel_size": 2}),
    "hybrid_3d_tp2_pp2": Entry(
        _HYBRID,
        "hybrid_3d over two pipeline stages of two tensor-parallel ranks",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ),
    **{
        f"ddp_{name}": Entry(_COMPRESSED, f"data parallel, gradients {text}", {"compressor": name, **more})
        for name, (text, more) in {
            "bf16": ("sent in bfloat16", {}),
            "fp16": ("sent in float16, with a scale that all ranks share", {}),
            "int8": ("quantised to 8 bits", {}),
            "int4": ("quantised to 4 bits, with error feedback", {}),
            "powersgd": ("of matrices sent as low-rank factors", {}),
            "topk": ("sent as their largest entries", {}),
            "randomk": ("sent as entries that chance picks", {}),
            "threshold": ("sent as the entries above a threshold", {}),
            "sketch": ("sent as a count-sketch and its largest entries", {}),
            "signsgd": ("sent as signs", {}),
            "onebit": ("replaced by Adam's momentum, sent as signs (1-bit Adam)", {"start_step": 1000}),
            "adasum": ("added up by Adasum's rule", {"min_compression_numel": 0}),
        }.items()
    },
    "zero_1": Entry(_ZERO, "optimizer state sharded; the numbers of one process", {"zero_stage": 1}),
    "zero_2": Entry(_ZERO, "gradients sharded as well", {"zero_stage": 2}),
    "zero_3": Entry(_ZERO, "parameters sharded as well", {"zero_stage": 3}),
    "zero_3_offload": Entry(
        _ZERO, "everything sharded and kept on the host between its uses, for GPUs", {"zero_stage": 3, "offload": "all"}
    ),
    "zero_1_deepspeed": Entry(_DEEPSPEED, "DeepSpeed's engine, optimizer state sharded", {"zero_stage": 1}),
    "zero_2_deepspeed": Entry(_DEEPSPEED, "DeepSpeed's engine, gradients sharded as well", {"zero_stage": 2}),
    "zero_3_deepspeed": Entry(_DEEPSPEED, "DeepSpeed's engine, parameters sharded as well", {"zero_stage": 3}),
    "zero_1_fairscale": Entry(_FAIRSCALE, "FairScale's OSS, optimizer state by owners", {"zero_stage": 1}),
    "zero_2_fairscale": Entry(
        _FAIRSCALE, "FairScale's ShardedDataParallel, gradients by owners as well", {"zero_stage": 2}
    ),
}


def _factory(entry: Entry) -> Callable[..., Any]:
    def build(**arguments: Any) -> Any:
        module, _, name = entry.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)(**{**entry.arguments, **arguments})

    return build


def _refuse(name: str) -> Callable[..., Any]:
    def build(**_: Any) -> Any:
        raise TypeError(
            f"{name!r} is a strategy for lightning.pytorch, not for the separate package pytorch_lightning. "
            "Build the Trainer and the modules with `import lightning`."
        )

    return build


def register() -> None:
    """Make ``Trainer(strategy=name)`` find every name of :data:`STRATEGIES`. May be called again."""
    from lightning.pytorch.strategies import StrategyRegistry

    for name, entry in STRATEGIES.items():
        StrategyRegistry.register(name, _factory(entry), description=entry.description, override=True)
    if "pytorch_lightning" in sys.modules:
        other = sys.modules["pytorch_lightning"].strategies.StrategyRegistry
        for name, entry in STRATEGIES.items():
            other.register(name, _refuse(name), description=entry.description, override=True)
