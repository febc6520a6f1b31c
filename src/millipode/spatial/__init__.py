"""Models of space: Γ̆, for ``mp.EK0(spatial=...)`` and ``mp.SpectralEK1(spatial=...)``."""

from millipode.spatial.gmrf import GMRF, GridField, SparseField
from millipode.spatial.matern import Matern
from millipode.spatial.protocol import Correlated, Diagonal, Space, Spatial, correlated
from millipode.spatial.simple import Dense, Identity

__all__ = [
    "GMRF",
    "Correlated",
    "Dense",
    "Diagonal",
    "GridField",
    "Identity",
    "Matern",
    "Space",
    "SparseField",
    "Spatial",
    "correlated",
]
