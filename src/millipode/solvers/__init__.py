"""Recipes: a solver names its parts, and says which covariance structure they preserve."""

from millipode.parts import Solver
from millipode.solvers.auto import Auto
from millipode.solvers.diagonal import DiagonalEK1
from millipode.solvers.ek0 import EK0
from millipode.solvers.ek1 import EK1
from millipode.solvers.spectral import SpectralEK1

__all__ = ["EK0", "EK1", "Auto", "DiagonalEK1", "Solver", "SpectralEK1"]
