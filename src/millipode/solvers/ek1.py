"""The EK1 that knows all of the Jacobian."""

import math
from typing import Any, ClassVar

import equinox as eqx

from millipode import parts
from millipode.filter.calibration import Diffusion, DynamicDiffusion
from millipode.linalg.arguments import as_integer
from millipode.linalg.fields import Field, size
from millipode.model.linear_solvers import GMRES, Direct, Implicit, LinearSolver
from millipode.model.linearisation import FirstOrder, Linearisation
from millipode.model.own_solvers import as_linear_solver
from millipode.model.priors import Prior
from millipode.parts import Initialise, Solver, Structure

FIRST_ORDER = FirstOrder()
# The highest order of a Kronecker EK1; from 6 on, next to nothing of its region of stability is left.
MOST = 5


class EK1(Solver):
    """F_y = ∇f: for stiff problems of any size.

    The covariance is that of an EK0, and the gain solves linear systems with the whole Jacobian, of which the
    covariance knows nothing. A step takes O(d) beside these systems. With ``structure="dense"`` it is the
    paper's EK1: a step costs O(d³) with a large constant, and memory is O(d²).

    Args:
        order: ν, from 1 to 11 (to 5 if Kronecker); chosen from ``rtol`` by default.
        diffusion: for a dense covariance, ``mp.DynamicDiffusion(vector=True)`` (the default),
            ``mp.DynamicDiffusion()`` or ``mp.ConstantDiffusion()``. With one γ for all unknowns of very
            different sizes, that filter blames the residuals of large ones on small ones, and takes many more
            steps. For a Kronecker covariance, ``mp.DynamicDiffusion()`` (the default) or
            ``mp.ConstantDiffusion(vector=...)``.
        structure: ``"kronecker"`` (the default, because it takes fewer and much cheaper steps; up to order
            5, as for BDF methods) or ``"dense"`` (the default for ``corrections=1``, which is the paper's
            filter, and wherever another argument needs it).
        linear_solver: how a Kronecker EK1 solves its linear systems: ``mp.Direct()`` up to some hundred
            unknowns and ``mp.GMRES(preconditioner=...)`` beyond by default; a solver of lineax; or
            a function (c, t, y, args, r) → (I − c ∂f/∂y)⁻¹ r.
        mixture: whether its gain is the mixture of two that has the smallest errors, for the price of four
            systems per step instead of one; by default, if systems are solved directly.
        spatial: refused, with the reason.
        prior: in place of ``mp.IWP(order)``.
        initialise: ``"taylor"`` or ``"runge-kutta"``; automatic by default.
        corrections: how often f is evaluated and the state corrected in a step, at most; 1 is the paper's
            filter.
    """

    orders: ClassVar[tuple[tuple[float, int], ...]] = ((8.5, 4), (math.inf, 5))

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
        structure: Structure | None = None,
        spatial: None = None,
        prior: Prior | None = None,
        initialise: Initialise | None = None,
        corrections: int = 4,
        linear_solver: Any = None,
        mixture: bool | None = None,
    ):
        parts.no_spatial(spatial, "EK1", "the Jacobian mixes unknowns")
        self.prior = parts.prior(order, prior)
        if structure not in (None, "dense", "kronecker"):
            raise ValueError(
                f"EK1 with structure={structure!r} is impossible: a full Jacobian couples all unknowns. Use "
                "structure='kronecker', where only the gain knows it, structure='dense', mp.DiagonalEK1 or "
                "mp.EK0."
            )
        dynamic = isinstance(diffusion, Diffusion) and diffusion.vector and diffusion.is_dynamic
        dense = corrections == 1 or dynamic or not self.prior.is_shared or self.prior.order > MOST
        self.structure = structure or ("dense" if dense else "kronecker")
        self.initialise = parts.initialise(initialise)
        self.corrections = as_integer(corrections, "corrections", 1)
        self.linear_solver, self.mixture = as_linear_solver(linear_solver), mixture
        if self.structure == "kronecker":
            self._check_kronecker(dynamic)
            self.diffusion = parts.diffusion(diffusion)
            return
        if linear_solver is not None or mixture is not None:
            raise ValueError(
                "linear_solver and mixture belong to structure='kronecker': a dense covariance has a gain of "
                "its own."
            )
        self.diffusion = parts.diffusion(diffusion, DynamicDiffusion(vector=corrections != 1))
        if self.diffusion.vector and not self.diffusion.is_dynamic:
            raise ValueError(
                "EK1 has no constant vector-valued diffusion: a full Jacobian couples the unknowns, so the "
                "covariance cannot be calibrated unknown by unknown after the fact (the paper's "
                "Proposition 1 needs a diagonal one). Use mp.DynamicDiffusion(vector=True), vector=False, or "
                "mp.DiagonalEK1."
            )

    def _check_kronecker(self, per_unknown: bool) -> None:
        """Refuse what does not go with a Kronecker covariance; ``per_unknown``: a γ per unknown."""
        if per_unknown:
            raise ValueError(
                "EK1 with a dynamic vector-valued diffusion is not Kronecker: every unknown has its own "
                "history of covariances. Use mp.DynamicDiffusion(), mp.ConstantDiffusion(vector=True), or "
                "structure='dense'."
            )
        if self.prior.order > MOST:
            raise ValueError(
                f"EK1 with a Kronecker covariance has orders up to {MOST}, because no gain of a higher order "
                f"is stable where problems are stiff; got {self.prior.order}. Use a lower order, or "
                "structure='dense'."
            )
        if not self.prior.is_shared:
            raise ValueError(
                "EK1 with one rate per unknown is not Kronecker: use a single rate, or structure='dense'."
            )
        if self.mixture not in (None, True, False):
            raise TypeError(f"mixture must be True, False or None, got {self.mixture!r}.")

    def remedy(self, y: Field) -> str:
        """A preconditioner, if there are linear systems to be solved by iterations."""
        return (
            "" if self.structure == "dense" else implicit(self.linear_solver, self.mixture, y).solver.remedy
        )

    def linearisation(self, y: Field) -> Linearisation:
        """The whole Jacobian."""
        if self.structure == "dense":
            return FIRST_ORDER
        return implicit(self.linear_solver, self.mixture, y)


def implicit(
    solver: LinearSolver | None, mixture: bool | None, y: Field, derivatives: int | None = None
) -> Implicit:
    """The whole Jacobian of a Kronecker EK1, with its defaults for a state like y."""
    if solver is None:
        solver = Direct() if size(y) <= parts.WHOLE else GMRES()
    return Implicit(solver, solver.is_cheap if mixture is None else mixture, derivatives)
