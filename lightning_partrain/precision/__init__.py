"""Precision plugins that know the mesh."""

from lightning_partrain.precision.mesh_mixed import MeshMixedPrecision

__all__ = ["MeshMixedPrecision"]
