"""The four calibrations of the diffusion Γ: constant or dynamic, scalar or vector."""

import abc
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.covariance.innovation import Innovation
from millipode.linalg.fields import Coefficient, Field, safe_sqrt, size, total
from millipode.xla.module import Module


class Evidence(NamedTuple):
    """What the steps of a solve say of their model.

    Attributes:
        diffusion: γ̂², a number or a field.
        steps: the number N of accepted steps.
        quadratic: Σ_n z_nᵀ S_n⁻¹ z_n.
        log_det: Σ_n log det S_n over the non-degenerate directions.
        rank: the number of those directions.
        unknowns: d.
    """

    diffusion: Coefficient
    steps: Array
    quadratic: Array
    log_det: Array
    rank: Array
    unknowns: int


class Diffusion(Module):
    """How Γ = γ² (Γ̆ ⊗ …) is modelled and estimated.

    To write your own, derive from this class (an ``equinox.Module``), declare both attributes and write the
    abstract methods. In all of them γ is a number if ``vector`` is false, and a field like the modes of y if
    it is true.

    Attributes:
        vector: whether each unknown has its own γ_i, or all share one γ.
        is_dynamic: whether the filter runs with the γ of each step, which is then saved with every step. If
            not, the filter runs with γ = 1 and all covariances are calibrated at the end.
    """

    vector: eqx.AbstractVar[bool]
    is_dynamic: eqx.AbstractClassVar[bool]

    def local_gamma(self, process: Innovation, z: Field) -> Coefficient:
        """The local quasi-MLE γ̂ of a step, given an error-free previous state.

        Args:
            process: N(0, H Σ Hᵀ).
            z: the residual.
        """
        return jax.tree.map(jnp.abs, process.whiten(z)) if self.vector else process.rms(z)

    def zero(self, y: Field) -> Coefficient:
        """An empty accumulator, for a state like y."""
        leaf = jax.tree.leaves(y)[0]
        return jax.tree.map(jnp.zeros_like, y) if self.vector else jnp.zeros((), leaf.dtype)

    @abc.abstractmethod
    def filter_gamma(self, local: Coefficient) -> Coefficient:
        """The γ that the filter runs with in a step whose local estimate this is."""

    @abc.abstractmethod
    def accumulate(
        self, calibration: Coefficient, local: Coefficient, innovation: Innovation, z: Field
    ) -> Coefficient:
        """The accumulator after an accepted step.

        Args:
            calibration: the accumulator so far.
            local: the step's local estimate γ̂.
            innovation: N(0, S), under the γ that the filter runs with.
            z: the residual.
        """

    @abc.abstractmethod
    def calibrated(self, calibration: Coefficient, steps: Array, y: Field) -> Coefficient:
        """γ̂², from the accumulator after this number of accepted steps."""

    @abc.abstractmethod
    def output_gamma(self, diffusion: Coefficient) -> Coefficient:
        """The factor of every standard deviation that leaves the filter, from γ̂²."""

    @abc.abstractmethod
    def log_evidence(self, evidence: Evidence) -> Array:
        """Σ_n log N(z_n; 0, S_n) under the calibrated model."""


class ConstantDiffusion(Diffusion):
    """One Γ for the whole time span, calibrated after the fact.

    The filter runs with Γ = I; γ̂² = 1/N Σ_n z_n² / S_n (averaged over the unknowns if scalar)
    then rescales every covariance. A component whose residual was exactly zero at every step has
    nothing to calibrate: its γ̂ is 0, and it enters the evidence with γ = 1.

    Args:
        vector: whether each unknown has its own γ_i.
    """

    is_dynamic: ClassVar[bool] = False

    vector: bool = eqx.field(static=True, default=False)

    def filter_gamma(self, local: Coefficient) -> Coefficient:
        """The number 1."""
        return jnp.ones((), jax.tree.leaves(local)[0].dtype)

    def accumulate(
        self, calibration: Coefficient, local: Coefficient, innovation: Innovation, z: Field
    ) -> Coefficient:
        """The running sum of squares."""
        if self.vector:
            return jax.tree.map(lambda c, x: c + x**2, calibration, innovation.whiten(z))
        return calibration + innovation.quadratic(z)

    def calibrated(self, calibration: Coefficient, steps: Array, y: Field) -> Coefficient:
        """The sum of squares divided by N, and by d if scalar."""
        count = jnp.maximum(steps, 1) * (1 if self.vector else size(y))
        return jax.tree.map(lambda c: c / count.astype(c.dtype), calibration)

    def output_gamma(self, diffusion: Coefficient) -> Coefficient:
        """γ̂."""
        return jax.tree.map(safe_sqrt, diffusion)

    def log_evidence(self, evidence: Evidence) -> Array:
        """With the quasi-MLE plugged in, the quadratic form is N per calibrated unknown."""
        terms = jax.tree.map(lambda g: jnp.log(jnp.where(g > 0, g, 1)) + (g > 0), evidence.diffusion)
        calibration = total(terms) * (1 if self.vector else evidence.unknowns)
        return -(evidence.rank * jnp.log(2 * jnp.pi) + evidence.log_det + evidence.steps * calibration) / 2


class DynamicDiffusion(Diffusion):
    """A new Γ_n in every step, calibrated on the spot: γ̂_n² = z_n² / (H Σ Hᵀ).

    Args:
        vector: whether each unknown has its own γ_i.
    """

    is_dynamic: ClassVar[bool] = True

    vector: bool = eqx.field(static=True, default=False)

    def filter_gamma(self, local: Coefficient) -> Coefficient:
        """The local estimate."""
        return local

    def accumulate(
        self, calibration: Coefficient, local: Coefficient, innovation: Innovation, z: Field
    ) -> Coefficient:
        """The last estimate."""
        return local

    def calibrated(self, calibration: Coefficient, steps: Array, y: Field) -> Coefficient:
        """The square of the last estimate."""
        return jax.tree.map(jnp.square, calibration)

    def output_gamma(self, diffusion: Coefficient) -> Coefficient:
        """The number 1: the covariances have their γ already."""
        return jnp.ones((), jax.tree.leaves(diffusion)[0].dtype)

    def log_evidence(self, evidence: Evidence) -> Array:
        """The sum as it was accumulated."""
        return -(evidence.rank * jnp.log(2 * jnp.pi) + evidence.log_det + evidence.quadratic) / 2
