"""Probabilistic ODE solutions in millions of dimensions."""

from millipode import basis, grids, problems, spatial
from millipode.control import FixedStep, PIController
from millipode.diffusion import ConstantDiffusion, DynamicDiffusion
from millipode.grids import Grid
from millipode.linearise import Stencil
from millipode.priors import IOUP, IWP, MaternProcess
from millipode.progress import Progress
from millipode.solution import Marginal, Solution, SolveError, SolveInterrupted, Stats, Status
from millipode.solve import solve
from millipode.solvers import EK0, EK1, DiagonalEK1, SpectralEK1
from millipode.spatial import GMRF, Matern
from millipode.spectral import Linear
from millipode.transport import Transported

__version__ = "0.1.0"

__all__ = [
    "EK0",
    "EK1",
    "GMRF",
    "IOUP",
    "IWP",
    "ConstantDiffusion",
    "DiagonalEK1",
    "DynamicDiffusion",
    "FixedStep",
    "Grid",
    "Linear",
    "Marginal",
    "Matern",
    "MaternProcess",
    "PIController",
    "Progress",
    "Solution",
    "SolveError",
    "SolveInterrupted",
    "SpectralEK1",
    "Stats",
    "Status",
    "Stencil",
    "Transported",
    "basis",
    "grids",
    "problems",
    "solve",
    "spatial",
]
