"""The strategies, and the names under which a Trainer finds them."""

from __future__ import annotations

from lightning_partrain.strategies.base import MeshStrategy
from lightning_partrain.strategies.compressed_ddp import CompressedDDPStrategy
from lightning_partrain.strategies.deepspeed import DeepSpeedZeroStrategy
from lightning_partrain.strategies.fairscale import FairScaleZeroStrategy
from lightning_partrain.strategies.hybrid import Hybrid3DStrategy
from lightning_partrain.strategies.zero import ZeroStrategy

__all__ = [
    "CompressedDDPStrategy",
    "DeepSpeedZeroStrategy",
    "FairScaleZeroStrategy",
    "Hybrid3DStrategy",
    "MeshStrategy",
    "ZeroStrategy",
]
