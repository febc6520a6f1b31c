"""The EK0, which knows nothing of the Jacobian."""

import equinox as eqx
from jaxtyping import PyTree

from millipode import parts
from millipode.filter.calibration import Diffusion
from millipode.linalg.arguments import as_integer
from millipode.linalg.fields import Field
from millipode.model.linearisation import (
    Linearisation,
    ZerothOrder,
)
from millipode.model.priors import Prior
from millipode.parts import Initialise, Solver, Structure
from millipode.spatial.protocol import Spatial
from millipode.spatial.space import Space

ZEROTH_ORDER = ZerothOrder()


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
