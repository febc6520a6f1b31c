"""Initial value problems, ready to solve: the paper's, some classics, and PDEs on grids.

>>> import millipode as mp
>>> problem = mp.problems.van_der_pol(mu=10.0)
>>> sol = mp.solve(problem.f, problem.y0, problem.t_span, solver=mp.EK1(order=4))
>>> sol.success
True
"""

from millipode.problems.diffusion import burgers, heat, kuramoto_sivashinsky, swift_hohenberg
from millipode.problems.fitzhugh_nagumo import fitzhugh_nagumo
from millipode.problems.lorenz96 import lorenz96
from millipode.problems.network import reaction_network
from millipode.problems.pleiades import pleiades
from millipode.problems.populations import logistic, lotka_volterra
from millipode.problems.problem import Problem
from millipode.problems.reaction_diffusion import allen_cahn, brusselator, fisher_kpp, gray_scott
from millipode.problems.stiff_reactions import (
    brusselator_line,
    robertson_cells,
    schnakenberg,
    variable_diffusion,
)
from millipode.problems.van_der_pol import van_der_pol

__all__ = [
    "Problem",
    "allen_cahn",
    "brusselator",
    "brusselator_line",
    "burgers",
    "fisher_kpp",
    "fitzhugh_nagumo",
    "gray_scott",
    "heat",
    "kuramoto_sivashinsky",
    "logistic",
    "lorenz96",
    "lotka_volterra",
    "pleiades",
    "reaction_network",
    "robertson_cells",
    "schnakenberg",
    "swift_hohenberg",
    "van_der_pol",
    "variable_diffusion",
]
