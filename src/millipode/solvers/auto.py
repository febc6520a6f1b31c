"""The automatic choice between explicit and implicit steps."""

from typing import Any

import equinox as eqx

from millipode import parts
from millipode.filter.calibration import Diffusion
from millipode.linalg.fields import Field
from millipode.model.linear_solvers import Implicit, LinearSolver
from millipode.model.linearisation import Linearisation
from millipode.model.priors import Prior
from millipode.parts import Initialise, Solver
from millipode.solvers.ek0 import ZEROTH_ORDER
from millipode.solvers.ek1 import EK1, implicit

# The order of implicit steps, whatever that of explicit ones: orders beyond are less stable.
STABLE = 4


class Auto(Solver):
    """An EK0 that goes over to an EK1 where the problem is stiff, and back: for problems of any kind.

    Steps are explicit at first. Where stability limits them, they become implicit, and explicit again where
    that gets further for the same work. ``sol.stats.implicit`` says how many steps were implicit. If you know
    that your problem is stiff or that it is not, ``mp.EK1`` or ``mp.EK0`` compile sooner, and waste no steps
    on finding out.

    Args:
        order: ν of explicit steps, from 1 to 11; chosen from ``rtol`` by default. Implicit steps use at most
            four derivatives.
        diffusion: ``mp.DynamicDiffusion()`` (the default) or ``mp.ConstantDiffusion(vector=...)``.
        linear_solver: as for ``mp.EK1``.
        mixture: as for ``mp.EK1``.
        initialise: ``"taylor"`` or ``"runge-kutta"``; automatic by default.

    >>> import jax.numpy as jnp, millipode as mp
    >>> def f(t, y):
    ...     return 1000 * (jnp.cos(t) - y)
    >>> sol = mp.solve(f, jnp.zeros(1), (0.0, 10.0), solver=mp.Auto(), save="end")
    >>> int(sol.stats.implicit) > 0, int(sol.stats.steps) < 500
    (True, True)
    """

    prior: Prior
    diffusion: Diffusion
    structure: str = eqx.field(static=True)
    initialise: str | None = eqx.field(static=True)
    corrections: int = eqx.field(static=True)
    linear_solver: LinearSolver | None
    mixture: bool | None = eqx.field(static=True)

    def __init__(
        self,
        order: int | None = None,
        *,
        diffusion: Diffusion | None = None,
        linear_solver: Any = None,
        mixture: bool | None = None,
        initialise: Initialise | None = None,
    ):
        self.prior = parts.prior(order, None)
        # Everything else is checked as for an EK1.
        stiff = EK1(
            diffusion=diffusion,
            structure="kronecker",
            initialise=initialise,
            linear_solver=linear_solver,
            mixture=mixture,
        )
        self.diffusion, self.structure, self.initialise = stiff.diffusion, stiff.structure, stiff.initialise
        self.corrections, self.linear_solver, self.mixture = 2, stiff.linear_solver, mixture

    def linearisation(self, y: Field) -> Linearisation:
        """F = 0, at first."""
        return ZEROTH_ORDER

    def when_stiff(self, y: Field) -> Implicit:
        """The whole Jacobian, with this linear solver."""
        return implicit(self.linear_solver, self.mixture, y, STABLE)

    def remedy(self, y: Field) -> str:
        """That of the linear solver."""
        return self.when_stiff(y).solver.remedy
