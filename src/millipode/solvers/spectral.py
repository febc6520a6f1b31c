"""The EK1 that knows a linear part in a fast basis."""

import math
from typing import Any, ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from millipode import parts
from millipode.filter.calibration import Diffusion
from millipode.linalg.arguments import as_integer, positive_integer
from millipode.linalg.fields import Field, size
from millipode.model.linearisation import (
    Linearisation,
)
from millipode.model.priors import Prior
from millipode.model.spectral import SpectralFirstOrder
from millipode.parts import Initialise, Solver, Structure
from millipode.pde.bases import Basis
from millipode.pde.linear import Linear
from millipode.spatial.protocol import Spatial
from millipode.spatial.space import Space


class SpectralEK1(Solver):
    """F_y = V diag(λ) Vᵀ: A-stable in a stiff linear part that a fast basis diagonalises, at O(d log d).

    For discretised PDEs: diffusion, and other functions of the Laplacian, on regular grids. The residual has
    all of f; only the gain is built on its linear part. The covariance is block-diagonal, one small matrix
    per mode (the paper's Proposition 2, in another basis).

    Args:
        order: ν, from 1 to 11; chosen from ``rtol`` by default.
        linear: the stiff linear part, from ``mp.Grid(...).diffusion(...)`` or ``.operator(...)``; or any
            pair of an orthonormal basis (``mp.basis.Basis``) and eigenvalues.
        refresh: every so many steps, look at the mean over space of ∂f/∂y beyond ``linear``, by one JVP per
            component of y. It replaces the matrix ``reaction`` of a linear part that has one; else its
            diagonal is added to ``linear``, where that is damping. Never by default.
        diffusion: ``mp.DynamicDiffusion(vector=...)`` or ``mp.ConstantDiffusion(vector=...)``; with
            vector=True there is one γ per mode.
        structure: ``"blockdiagonal"`` (the default) or ``"dense"``, both over modes.
        spatial: how points are correlated in space a priori, ``mp.Matern(grid, ...)`` or
            ``mp.GMRF(grid, ...)`` on the grid of ``linear``; for scalar diffusions. It is diagonal in the
            modes, and costs nothing. One covariance, or one per component, as for ``mp.EK0``.
        prior: ``mp.IWP(order)`` by default; or ``mp.IOUP()``, which is exact for the linear part.
        initialise: ``"taylor"`` or ``"runge-kutta"``; automatic by default.
        corrections: how often f is evaluated and the state corrected in a step, at most; 1 is the paper's
            filter.
    """

    orders: ClassVar[tuple[tuple[float, int], ...]] = ((4.5, 3), (6.5, 4), (math.inf, 5))

    prior: Prior
    linear: Linear
    refresh: int | None = eqx.field(static=True)
    diffusion: Diffusion
    structure: str = eqx.field(static=True)
    spatial: PyTree[Spatial] | None
    initialise: str | None = eqx.field(static=True)
    corrections: int = eqx.field(static=True)

    def __init__(
        self,
        order: int | None = None,
        *,
        linear: Linear | tuple[Basis, Any],
        refresh: int | None = None,
        diffusion: Diffusion | None = None,
        structure: Structure | None = None,
        spatial: PyTree[Spatial] | None = None,
        prior: Prior | None = None,
        initialise: Initialise | None = None,
        corrections: int = 2,
    ):
        self.prior = parts.prior(order, prior, linear=True)
        if isinstance(linear, tuple) and len(linear) == 2 and isinstance(linear[0], Basis):
            linear = Linear(*linear)
        if not isinstance(linear, Linear):
            raise TypeError(
                "linear must come from mp.Grid(...).diffusion(...) or .operator(...), or be a pair of an "
                f"orthonormal basis and eigenvalues; got {type(linear).__name__}. Without such a linear "
                "part, use mp.DiagonalEK1."
            )
        self.linear = linear
        self.refresh = None if refresh is None else positive_integer(refresh, "refresh")
        self.diffusion = parts.diffusion(diffusion)
        self.spatial = parts.spatial(spatial, self.diffusion)
        why = "SpectralEK1 is not Kronecker: the gain differs between modes as their eigenvalues do."
        self.structure = parts.structure(structure, "blockdiagonal", not_kronecker=why)
        if linear.reaction is not None:
            if structure is not None or self.diffusion.vector:
                raise ValueError(
                    "SpectralEK1 with a reaction between components has the structure 'coupled' and a scalar "
                    "diffusion; leave structure out and vector=False, or drop the reaction."
                )
            if not self.prior.is_shared:
                raise ValueError(
                    "mp.IOUP with a rate per mode models every component on its own, and cannot be combined "
                    "with a reaction between them: drop the reaction, or leave prior out."
                )
            self.structure = "coupled"
        self.initialise = parts.initialise(initialise)
        self.corrections = as_integer(corrections, "corrections", 1)

    @property
    def components(self) -> int:
        """All components, where a reaction couples them."""
        return 1 if self.linear.reaction is None else np.shape(self.linear.reaction)[0]

    def check_span(self, span: float | None, kind: Any) -> None:
        """Warn of modes that grow."""
        self.linear.check_span(span, kind)

    def space(self, y: Field) -> Space | None:
        """The spatial covariance in modes."""
        if self.spatial is None:
            return None
        return Space.in_modes(self.spatial, y, self.linear, self.linear.fitted(y).eigenvalues)

    def remedy(self, y: Field) -> str:
        """What ``linear`` leaves out is stiff, too: use the whole Jacobian, or measure it."""
        if size(y) <= parts.WHOLE:
            return parts.stiff_solver(y)
        refreshed = (
            ""
            if self.refresh is not None
            else (" Or pass refresh=10 to mp.SpectralEK1, which measures how fast the components react.")
        )
        return (
            "f is stiff beyond its linear part: use "
            "mp.EK1(linear_solver=mp.GMRES([linear, mp.LocalBlocks()])) "
            f"with the same linear part, which knows the whole Jacobian.{refreshed}"
        )

    def linearisation(self, y: Field) -> Linearisation:
        """The linear part."""
        return SpectralFirstOrder.of(self.linear, y, self.refresh)
