"""The EK1 that knows the diagonal of the Jacobian."""

import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx

from millipode import parts
from millipode.filter.calibration import Diffusion
from millipode.linalg.arguments import as_integer
from millipode.linalg.fields import Field
from millipode.model.linearisation import Linearisation, diagonal
from millipode.model.priors import Prior
from millipode.model.stencil import Stencil
from millipode.parts import Initialise, Solver, Structure


class DiagonalEK1(Solver):
    """F_y = diag(∇f): some of the stability of the EK1 at a cost of O(d).

    The covariance is block-diagonal, one small matrix per unknown (the paper's Proposition 2).

    Args:
        order: ν, from 1 to 11; chosen from ``rtol`` by default.
        jacobian_diagonal: the diagonal of ∂f/∂y, as a function with the signature of f that returns
            something like y, or as a declared ``mp.Stencil``. Only problems with at most a few
            hundred unknowns can do without.
        diffusion: ``mp.DynamicDiffusion(vector=...)`` or ``mp.ConstantDiffusion(vector=...)``.
        structure: ``"blockdiagonal"`` (the default) or ``"dense"``.
        spatial: refused, with the reason.
        prior: in place of ``mp.IWP(order)``.
        initialise: ``"taylor"`` or ``"runge-kutta"``; automatic by default.
        corrections: how often f is evaluated and the state corrected in a step, at most; 1 is the paper's
            filter.
    """

    orders: ClassVar[tuple[tuple[float, int], ...]] = ((4.5, 3), (6.5, 4), (math.inf, 5))

    prior: Prior
    known: Linearisation
    diffusion: Diffusion
    structure: str = eqx.field(static=True)
    initialise: str | None = eqx.field(static=True)
    corrections: int = eqx.field(static=True)

    def __init__(
        self,
        order: int | None = None,
        *,
        jacobian_diagonal: Callable | Stencil | None = None,
        diffusion: Diffusion | None = None,
        structure: Structure | None = None,
        spatial: None = None,
        prior: Prior | None = None,
        initialise: Initialise | None = None,
        corrections: int = 2,
    ):
        parts.no_spatial(spatial, "DiagonalEK1", "the diagonal of the Jacobian differs between unknowns")
        self.prior = parts.prior(order, prior)
        self.known = diagonal(jacobian_diagonal)
        self.diffusion = parts.diffusion(diffusion)
        why = "DiagonalEK1 is not Kronecker: the gain differs between unknowns as their Jacobians do."
        self.structure = parts.structure(structure, "blockdiagonal", not_kronecker=why)
        self.initialise = parts.initialise(initialise)
        self.corrections = as_integer(corrections, "corrections", 1)

    def linearisation(self, y: Field) -> Linearisation:
        """The exact diagonal, from what is known of it."""
        return self.known
