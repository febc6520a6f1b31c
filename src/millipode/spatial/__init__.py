"""Spatial covariances Γ̆, for ``mp.EK0(spatial=...)`` and ``mp.SpectralEK1(spatial=...)``."""

from millipode.spatial.gmrf import GMRF, GridField, SparseField
from millipode.spatial.matern import Matern
from millipode.spatial.protocol import Diagonal, Spatial
from millipode.spatial.simple import Dense, Identity

__all__ = [
    "GMRF",
    "Dense",
    "Diagonal",
    "GridField",
    "Identity",
    "Matern",
    "SparseField",
    "Spatial",
]
