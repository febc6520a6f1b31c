"""The four calibrations of the diffusion Γ: constant or dynamic, scalar or vector."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.covariance import Innovation, RootInnovation
from millipode.fields import Field, Scale, safe_sqrt, size, total


class Diffusion(eqx.Module):
    """How Γ is modelled and estimated.

    ``vector`` says whether each unknown has its own γ_i, or all share one γ.
    """

    vector: eqx.AbstractVar[bool]

    def local_scale(self, process: Innovation, z: Field) -> Scale:
        """The local quasi-MLE γ̂ given an error-free previous state, from H Σ Hᵀ and z."""
        return jax.tree.map(jnp.abs, _whitened(process, z)) if self.vector else process.rms(z)

    def zero(self, y: Field) -> Scale:
        """An empty accumulator."""
        leaf = jax.tree.leaves(y)[0]
        return jax.tree.map(jnp.zeros_like, y) if self.vector else jnp.zeros((), leaf.dtype)

    @abc.abstractmethod
    def filter_scale(self, local: Scale) -> Scale:
        """The γ that the filter runs with in this step."""

    @abc.abstractmethod
    def accumulate(self, calibration: Scale, local: Scale, innovation: Innovation, z: Field) -> Scale:
        """What is kept of an accepted step."""

    @abc.abstractmethod
    def calibrated(self, calibration: Scale, steps: Array, y: Field) -> Scale:
        """γ̂² after ``steps`` accepted steps."""

    @abc.abstractmethod
    def output_scale(self, diffusion: Scale) -> Scale:
        """What every standard deviation of the filter is multiplied by when it leaves."""

    @abc.abstractmethod
    def log_evidence(
        self,
        diffusion: Scale,
        steps: Array,
        quadratic: Array,
        log_det: Array,
        rank: Array,
        y: Field,
    ) -> Array:
        """Σ_n log N(z_n; 0, S_n) with the calibrated scale.

        Args:
            diffusion: γ̂².
            steps: the number N of accepted steps.
            quadratic: Σ_n z_nᵀ S_n⁻¹ z_n.
            log_det: Σ_n log det S_n over non-degenerate directions.
            rank: the number of those directions.
            y: any field, for the number of unknowns.
        """


def _whitened(innovation: Innovation, z: Field) -> Field:
    assert isinstance(innovation, RootInnovation)  # models of space come with scalar diffusions
    return innovation.whiten(z)


class ConstantDiffusion(Diffusion):
    """One Γ for the whole time span, calibrated after the fact.

    The filter runs with Γ = I; γ̂² = 1/N Σ_n z_n² / S_n (averaged over the unknowns if scalar)
    then rescales every covariance. A component whose residual was exactly zero at every step has
    nothing to calibrate: its γ̂ is 0, and it enters the evidence with γ = 1.

    Args:
        vector: whether each unknown has its own γ_i.
    """

    vector: bool = eqx.field(static=True, default=False)

    def filter_scale(self, local: Scale) -> Scale:
        """1."""
        return jnp.ones((), jax.tree.leaves(local)[0].dtype)

    def accumulate(self, calibration: Scale, local: Scale, innovation: Innovation, z: Field) -> Scale:
        """The running sum of squares."""
        if self.vector:
            return jax.tree.map(lambda c, x: c + x**2, calibration, _whitened(innovation, z))
        return calibration + innovation.quadratic(z)

    def calibrated(self, calibration: Scale, steps: Array, y: Field) -> Scale:
        """Divide by N, and by d if scalar."""
        count = jnp.maximum(steps, 1) * (1 if self.vector else size(y))
        return jax.tree.map(lambda c: c / count.astype(c.dtype), calibration)

    def output_scale(self, diffusion: Scale) -> Scale:
        """γ̂."""
        return jax.tree.map(safe_sqrt, diffusion)

    def log_evidence(
        self,
        diffusion: Scale,
        steps: Array,
        quadratic: Array,
        log_det: Array,
        rank: Array,
        y: Field,
    ) -> Array:
        """With the quasi-MLE plugged in, the quadratic form is N per calibrated unknown."""
        terms = jax.tree.map(lambda g: jnp.log(jnp.where(g > 0, g, 1)) + (g > 0), diffusion)
        calibration = total(terms) * (1 if self.vector else size(y))
        return -(rank * jnp.log(2 * jnp.pi) + log_det + steps * calibration) / 2


class DynamicDiffusion(Diffusion):
    """A new Γ_n in every step, calibrated on the spot: γ̂_n² = z_n² / (H Σ Hᵀ).

    Args:
        vector: whether each unknown has its own γ_i.
    """

    vector: bool = eqx.field(static=True, default=False)

    def filter_scale(self, local: Scale) -> Scale:
        """The local estimate."""
        return local

    def accumulate(self, calibration: Scale, local: Scale, innovation: Innovation, z: Field) -> Scale:
        """The last estimate."""
        return local

    def calibrated(self, calibration: Scale, steps: Array, y: Field) -> Scale:
        """The square of the last estimate."""
        return jax.tree.map(jnp.square, calibration)

    def output_scale(self, diffusion: Scale) -> Scale:
        """1: the covariances carry their scale already."""
        return jnp.ones((), jax.tree.leaves(diffusion)[0].dtype)

    def log_evidence(
        self,
        diffusion: Scale,
        steps: Array,
        quadratic: Array,
        log_det: Array,
        rank: Array,
        y: Field,
    ) -> Array:
        """The sum as it was accumulated."""
        return -(rank * jnp.log(2 * jnp.pi) + log_det + quadratic) / 2
