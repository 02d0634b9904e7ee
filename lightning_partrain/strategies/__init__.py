"""The strategies, and the names under which a Trainer finds them."""

from __future__ import annotations

from lightning_partrain.strategies.base import MeshStrategy
from lightning_partrain.strategies.hybrid import Hybrid3DStrategy

__all__ = ["Hybrid3DStrategy", "MeshStrategy"]
