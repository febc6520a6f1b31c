"""Probabilistic ODE solutions in millions of dimensions."""

from millipode import problems, spatial
from millipode.api import solve
from millipode.filter.calibration import ConstantDiffusion, DynamicDiffusion
from millipode.filter.control import FixedStep, PIController
from millipode.filter.ensemble import Transported
from millipode.model.linear_solvers import GMRES, Direct
from millipode.model.preconditioners import Diagonal, LocalBlocks
from millipode.model.priors import IOUP, IWP, MaternProcess
from millipode.model.stencil import Stencil
from millipode.pde import bases as basis
from millipode.pde import grids
from millipode.pde.grids import Grid
from millipode.pde.linear import Linear
from millipode.posterior.solution import Solution, SolveError, SolveInterrupted
from millipode.run.progress import Progress
from millipode.solvers import EK0, EK1, Auto, DiagonalEK1, SpectralEK1
from millipode.spatial import GMRF, Matern
from millipode.status import Stats, Status
from millipode.view.viewable import Marginal

__version__ = "0.1.0"

__all__ = [
    "EK0",
    "EK1",
    "GMRES",
    "GMRF",
    "IOUP",
    "IWP",
    "Auto",
    "ConstantDiffusion",
    "Diagonal",
    "DiagonalEK1",
    "Direct",
    "DynamicDiffusion",
    "FixedStep",
    "Grid",
    "Linear",
    "LocalBlocks",
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


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
