"""What a solver is, and its parts: defaults, and refusals of those that do not go together."""

import abc
import math
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
from jaxtyping import PyTree

from millipode.filter.calibration import Diffusion, DynamicDiffusion
from millipode.linalg.fields import Field, size
from millipode.model.linearisation import Linearisation
from millipode.model.priors import IWP, Prior
from millipode.model.priors.iwp import check_order
from millipode.spatial.protocol import Spatial
from millipode.spatial.space import Space
from millipode.xla.module import Module

Structure = Literal["kronecker", "blockdiagonal", "dense"]
Initialise = Literal["taylor", "runge-kutta"]


class Solver(Module):
    """An ODE filter: a prior, a linearisation, a diffusion, and a covariance structure.

    To write your own, derive from this class (an ``equinox.Module``), declare the attributes, and return your
    linearisation from the method of that name; CONTRIBUTING.md has an example.

    Attributes:
        prior: of y and its derivatives.
        diffusion: how γ is calibrated.
        structure: of the covariance: ``"kronecker"``, ``"blockdiagonal"``, ``"coupled"`` or ``"dense"``.
        initialise: ``"taylor"``, ``"runge-kutta"`` or None for automatic.
        corrections: how often f is evaluated in a step, at most.
        orders: which ν to use if the prior leaves it open: pairs of a number of digits, −log₁₀ rtol, and the
            order up to there.
    """

    prior: eqx.AbstractVar[Prior]
    diffusion: eqx.AbstractVar[Diffusion]
    structure: eqx.AbstractVar[str]
    initialise: eqx.AbstractVar[str | None]
    corrections: int = eqx.field(static=True, default=1, kw_only=True)
    orders: ClassVar[tuple[tuple[float, int], ...]] = ((3.5, 4), (6.5, 5), (9.5, 6), (11.5, 7), (math.inf, 8))

    @property
    def order(self) -> int | None:
        """ν, the number of derivatives in the state; None if it will be chosen from the tolerance."""
        return self.prior.order or None

    def order_for(self, rtol: float) -> int:
        """ν for a relative tolerance: the order that was given, or else what measured best."""
        digits = -math.log10(rtol) if rtol > 0 else math.inf
        return self.prior.order or next(order for most, order in self.orders if digits <= most)

    @property
    def components(self) -> int:
        """How many components of y share a block of the covariance."""
        return 1

    def check_span(self, span: float | None, kind: Any) -> None:
        """Warn if a solve over this time asks too much of the solver.

        Args:
            span: t1 − t0, None if traced.
            kind: the dtype of y.
        """

    def space(self, y: Field) -> Space | None:
        """Γ̆ for a problem like y, in the basis of the linearisation; None for the identity."""
        return None

    def remedy(self, y: Field) -> str:
        """What to use instead for a problem like y whose stability limits the steps: a sentence, or ""."""
        return stiff_solver(y)

    @abc.abstractmethod
    def linearisation(self, y: Field) -> Linearisation:
        """How f is linearised for a state like y."""

    def when_stiff(self, y: Field) -> Linearisation | None:
        """How f is linearised instead where stability limits the steps; None to go on as before."""
        return None


# Up to this many unknowns, a solver with the whole Jacobian is the remedy for stiffness.
WHOLE = 300


def stiff_solver(y: Field) -> str:
    """Which solver suits a stiff problem with a state like y, as a sentence."""
    if size(y) <= WHOLE:
        return "Use solver=mp.EK1(), which knows the whole Jacobian."
    shape = max((leaf.shape for leaf in jax.tree.leaves(y)), key=math.prod)
    axes = shape[-2:] if len(shape) > 2 else shape
    return (
        f"If f contains diffusion, use solver=mp.SpectralEK1(linear=mp.Grid({tuple(axes)}, lengths=...)"
        ".diffusion(...)) with its lengths and coefficients, which treats it implicitly. If its coefficients "
        "vary, or if anything else in f is stiff, use solver=mp.EK1(linear_solver=mp.GMRES(linear)) with the "
        "same linear part, or solver=mp.EK1(), which know the whole Jacobian."
    )


def prior(order: int | None, prior: Prior | None, linear: bool = False) -> Prior:
    """The prior, with the order if one is given; ``linear``: the solver knows the rates of a linear part."""
    if order is not None:
        check_order(order)
    if prior is None:
        return IWP(order or 0)
    if not isinstance(prior, Prior):
        raise TypeError(f"prior must be a prior such as mp.IWP(4), got {type(prior).__name__}.")
    if prior.needs_rates and not linear:
        raise ValueError(
            f"{type(prior).__name__} without a rate takes it from the linear part of an equation, which only "
            "mp.SpectralEK1(linear=...) knows: pass rate=..., or use that."
        )
    if linear and not prior.is_shared and not prior.needs_rates:
        raise ValueError(
            "SpectralEK1 works on modes, whose rates are those of linear: use mp.IOUP() without a rate, or "
            "with a single one."
        )
    if prior.order and order not in (None, prior.order):
        raise ValueError(f"order={order} contradicts the prior, which has order {prior.order}.")
    return prior if order is None else prior.with_order(order)


def diffusion(diffusion: Diffusion | None, default: Diffusion | None = None) -> Diffusion:
    """The diffusion that was given, or the default."""
    if diffusion is None:
        return DynamicDiffusion() if default is None else default
    if not isinstance(diffusion, Diffusion):
        raise TypeError(
            f"diffusion must be mp.ConstantDiffusion(...) or mp.DynamicDiffusion(...), got {diffusion!r}."
        )
    return diffusion


def spatial(spatial: PyTree[Spatial] | None, diffusion: Diffusion) -> PyTree[Spatial] | None:
    """The spatial covariances that were given, if they go with this diffusion."""
    if spatial is not None and diffusion.vector:
        raise ValueError(
            "A spatial covariance needs a scalar diffusion, Γ = γ² Γ̆: with one γ per unknown, Γ̆ would not be "
            "the covariance between them. Use vector=False, or drop spatial."
        )
    return spatial


def no_spatial(spatial: Any, solver: str, why: str) -> None:
    """Refuse a spatial covariance, and say why."""
    if spatial is not None:
        raise ValueError(
            f"{solver} has no spatial covariance: {why}, so the covariance is not Γ̆ ⊗ C̆. Use "
            "mp.EK0(spatial=...), or mp.SpectralEK1(linear=..., spatial=...) for stiff problems on a grid."
        )


def structure(structure: str | None, default: str, not_kronecker: str | None = None) -> str:
    """The structure that was asked for, or the default; ``not_kronecker`` says why that one is refused."""
    allowed = ("kronecker", "blockdiagonal", "dense")
    if structure == "kronecker" and not_kronecker is not None:
        raise ValueError(f"{not_kronecker} Use structure='blockdiagonal' (the default), or mp.EK0.")
    if structure is not None and structure not in allowed:
        raise ValueError(f"structure must be one of {allowed}, got {structure!r}.")
    return structure or default


def initialise(method: str | None) -> str | None:
    """The initialisation that was asked for; None for automatic."""
    if method not in (None, "taylor", "runge-kutta"):
        raise ValueError(f"initialise must be 'taylor' or 'runge-kutta', got {method!r}.")
    return method
