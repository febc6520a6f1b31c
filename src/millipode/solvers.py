"""Recipes: a solver names its parts, and says which covariance structure they preserve."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from millipode import parts
from millipode.filter.calibration import Diffusion, DynamicDiffusion
from millipode.linalg.arguments import as_integer, positive_integer
from millipode.linalg.fields import Field, size
from millipode.model.linearisation import (
    FirstOrder,
    GivenDiagonal,
    Linearisation,
    StencilDiagonal,
    WholeDiagonal,
    ZerothOrder,
)
from millipode.model.priors import Prior
from millipode.model.spectral import SpectralFirstOrder
from millipode.model.stencil import Stencil
from millipode.parts import Solver
from millipode.pde.bases import Basis
from millipode.pde.linear import Linear
from millipode.spatial.protocol import Spatial
from millipode.spatial.space import Space

ZEROTH_ORDER, WHOLE_DIAGONAL, FIRST_ORDER = ZerothOrder(), WholeDiagonal(), FirstOrder()

Structure = Literal["kronecker", "blockdiagonal", "dense"]
Initialise = Literal["taylor", "runge-kutta"]


class EK0(Solver):
    """F_y = 0: explicit, the cheapest, and the choice for large non-stiff problems.

    The covariance is Kronecker, one small matrix for all unknowns (the paper's Proposition 3), with
    every diffusion but the dynamic vector-valued one, which makes it block-diagonal (Proposition 2).

    Args:
        order: ν, from 1 to 11; chosen from ``rtol`` by default.
        diffusion: ``mp.DynamicDiffusion(vector=...)`` or ``mp.ConstantDiffusion(vector=...)``.
        structure: ``"kronecker"``, ``"blockdiagonal"`` or ``"dense"``; automatic by default.
        spatial: how unknowns are correlated in space a priori, such as ``mp.Matern(grid, ...)``; for scalar
            diffusions. One covariance, or one per leaf of y, or a list with one per component of an array.
            Independent unknowns by default.
        prior: in place of ``mp.IWP(order)``: ``mp.IOUP(rate=...)`` or ``mp.MaternProcess(...)``.
        initialise: ``"taylor"`` or ``"runge-kutta"``; automatic by default.
        corrections: how often f is evaluated and the state corrected in a step, at most; 1 is the paper's
            filter.

    >>> import millipode as mp
    >>> mp.EK0(order=3).structure, mp.EK0(diffusion=mp.DynamicDiffusion(vector=True)).structure
    ('kronecker', 'blockdiagonal')
    """

    prior: Prior
    diffusion: Diffusion
    structure: str = eqx.field(static=True)
    spatial: PyTree[Spatial] | None
    initialise: str | None = eqx.field(static=True)
    corrections: int = eqx.field(static=True)

    def __init__(
        self,
        order: int | None = None,
        *,
        diffusion: Diffusion | None = None,
        structure: Structure | None = None,
        spatial: PyTree[Spatial] | None = None,
        prior: Prior | None = None,
        initialise: Initialise | None = None,
        corrections: int = 2,
    ):
        self.prior = parts.prior(order, prior)
        self.diffusion = parts.diffusion(diffusion)
        self.spatial = parts.spatial(spatial, self.diffusion)
        per_unknown = self.diffusion.vector and self.diffusion.is_dynamic
        why = "EK0 with a dynamic vector-valued diffusion" if per_unknown else "EK0 with one rate per unknown"
        per_unknown = per_unknown or not self.prior.is_shared
        if per_unknown and structure == "kronecker":
            raise ValueError(
                f"{why} is not Kronecker: every unknown has its own history of covariances. Use "
                "structure='blockdiagonal', a scalar diffusion (or mp.ConstantDiffusion(vector=True)), and a "
                "single rate."
            )
        if spatial is not None and not self.prior.is_shared:
            raise ValueError(
                "A spatial covariance needs the same prior in time for all unknowns, Γ̆ ⊗ C̆: use a single "
                "rate, or drop spatial."
            )
        self.structure = parts.structure(structure, "blockdiagonal" if per_unknown else "kronecker")
        self.initialise = parts.initialise(initialise)
        self.corrections = as_integer(corrections, "corrections", 1)

    def space(self, y: Field) -> Space | None:
        """The spatial covariance that was given."""
        return None if self.spatial is None else Space.of(self.spatial, y)

    def linearisation(self, y: Field) -> Linearisation:
        """F = 0."""
        return ZEROTH_ORDER


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
    jacobian_diagonal: Callable | Stencil | None
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
        known = jacobian_diagonal is None or isinstance(jacobian_diagonal, Stencil)
        if not known and not callable(jacobian_diagonal):
            raise TypeError(
                "jacobian_diagonal must be a function with the signature of f, or an mp.Stencil; "
                f"got {type(jacobian_diagonal).__name__}."
            )
        self.jacobian_diagonal = jacobian_diagonal
        self.diffusion = parts.diffusion(diffusion)
        why = "DiagonalEK1 is not Kronecker: the gain differs between unknowns as their Jacobians do."
        self.structure = parts.structure(structure, "blockdiagonal", not_kronecker=why)
        self.initialise = parts.initialise(initialise)
        self.corrections = as_integer(corrections, "corrections", 1)

    def linearisation(self, y: Field) -> Linearisation:
        """The exact diagonal, from what is known of it."""
        if self.jacobian_diagonal is None:
            return WHOLE_DIAGONAL
        if isinstance(self.jacobian_diagonal, Stencil):
            return StencilDiagonal(self.jacobian_diagonal)
        return GivenDiagonal(self.jacobian_diagonal)


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
        """What ``linear`` leaves out is stiff, too: measure it, couple it, or use the whole Jacobian."""
        if size(y) <= parts.WHOLE:
            return parts.stiff_solver(y)
        if self.refresh is None:
            return (
                "f is stiff beyond its linear part: pass refresh=10 to mp.SpectralEK1, which measures how "
                "fast the components react, and treats that implicitly as well."
            )
        return (
            "f is stiff beyond its linear part and beyond what refresh measures of each component: pass "
            "grid.diffusion(..., reaction=matrix) as linear, with the stiff reaction between components."
        )

    def linearisation(self, y: Field) -> Linearisation:
        """The linear part."""
        return SpectralFirstOrder.of(self.linear, y, self.refresh)


class EK1(Solver):
    """F_y = ∇f: A-stable, for stiff problems of moderate size.

    The covariance is dense, so a step costs O(d³) and memory is O(d²).

    Args:
        order: ν, from 1 to 11; chosen from ``rtol`` by default.
        diffusion: ``mp.DynamicDiffusion(vector=True)`` (the default), ``mp.DynamicDiffusion()`` or
            ``mp.ConstantDiffusion()``. With one γ for all unknowns of very different sizes, the filter blames
            the residuals of large ones on small ones, and takes many more steps.
        structure: ``"dense"``, the only one that a full Jacobian preserves.
        spatial: refused, with the reason.
        prior: in place of ``mp.IWP(order)``.
        initialise: ``"taylor"`` or ``"runge-kutta"``; automatic by default.
        corrections: how often f is evaluated and the state corrected in a step, at most; 1 is the paper's
            filter.
    """

    orders: ClassVar[tuple[tuple[float, int], ...]] = ((4.5, 4), (math.inf, 5))

    prior: Prior
    diffusion: Diffusion
    structure: str = eqx.field(static=True)
    initialise: str | None = eqx.field(static=True)
    corrections: int = eqx.field(static=True)

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
    ):
        parts.no_spatial(spatial, "EK1", "the Jacobian mixes unknowns")
        self.prior = parts.prior(order, prior)
        self.diffusion = parts.diffusion(diffusion, DynamicDiffusion(vector=corrections != 1))
        if self.diffusion.vector and not self.diffusion.is_dynamic:
            raise ValueError(
                "EK1 has no constant vector-valued diffusion: a full Jacobian couples the unknowns, so the "
                "covariance cannot be calibrated unknown by unknown after the fact (the paper's "
                "Proposition 1 needs a diagonal one). Use mp.DynamicDiffusion(vector=True), vector=False, or "
                "mp.DiagonalEK1."
            )
        if structure not in (None, "dense"):
            raise ValueError(
                f"EK1 with structure={structure!r} is impossible: a full Jacobian couples all "
                "unknowns, so the covariance is dense. Use mp.DiagonalEK1 or mp.EK0."
            )
        self.structure = "dense"
        self.initialise = parts.initialise(initialise)
        self.corrections = as_integer(corrections, "corrections", 1)

    def remedy(self, y: Field) -> str:
        """None: the whole Jacobian is known."""
        return ""

    def linearisation(self, y: Field) -> Linearisation:
        """The whole Jacobian."""
        return FIRST_ORDER
