"""The parts of a solver: defaults, and refusals of those that do not go together."""

from typing import Any

from jaxtyping import PyTree

from millipode.filter.calibration import Diffusion, DynamicDiffusion
from millipode.model.priors import IWP, Prior
from millipode.spatial.protocol import Spatial


def prior(order: int | None, prior: Prior | None, default: int, linear: bool = False) -> Prior:
    """The prior with an order; ``linear`` says whether the solver knows the rates of a linear part."""
    if prior is None:
        return IWP(default if order is None else order)
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
    return prior.with_order(default if order is None else order)


def diffusion(diffusion: Diffusion | None) -> Diffusion:
    """The diffusion that was given, or the default."""
    if diffusion is None:
        return DynamicDiffusion()
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
