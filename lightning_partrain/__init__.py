"""Parallel training strategies for PyTorch Lightning, chosen with a string.

>>> import lightning_partrain                                    # registers the names below
>>> lightning.Trainer(strategy="hybrid_3d", devices=8)           # doctest: +SKIP
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from lightning_partrain.registry import STRATEGIES, register

try:
    __version__ = version("lightning-partrain")
except PackageNotFoundError:  # run from a checkout
    __version__ = "0"

__all__ = ["STRATEGIES", "__version__"]

register()

from lightning_partrain import native_threads  # noqa: E402, F401  # counts after the imports of register()
