"""What a covariance structure must be able to do.

Everywhere below, ``y`` and ``z`` are fields (pytrees of arrays like the modes of y); a state has n = ν+1 of
them. γ is a number, or a field where every unknown has its own.
"""

import abc
from typing import Any, NamedTuple, Self

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from millipode.covariance.innovation import Innovation
from millipode.covariance.observation import Observation
from millipode.covariance.transition import Transition
from millipode.linalg.fields import Coefficient, Field, Row
from millipode.linalg.randomness import Numbers


class Storage(NamedTuple):
    """How many numbers a structure stores for d unknowns.

    Attributes:
        root: those of the filter's covariance.
        smoothed: those of the smoother's covariance.
        std: those of the standard deviation of y.
        working: all that a step holds at the same time, where that is much more than the state; else 0.
    """

    root: int
    smoothed: int
    std: int
    working: int = 0


class Corrected(NamedTuple):
    """The result of a correction: K, S and the posterior covariance.

    Attributes:
        gain: K, in the form that ``apply_gain`` of the same structure takes.
        innovation: N(0, S).
        covariance: of the corrected state.
    """

    gain: PyTree[Array]
    innovation: Innovation
    covariance: "Covariance"


class Covariance(eqx.Module):
    """A covariance C of the prior's state, known by a square root."""

    @classmethod
    @abc.abstractmethod
    def storage(cls, d: int, n: int, components: int) -> Storage:
        """How much is stored for d unknowns with n fields each, of which ``components`` share a block."""

    @classmethod
    @abc.abstractmethod
    def initial(cls, root: PyTree[Array], gamma: Coefficient, y: Field) -> Self:
        """C₀ = diag(γ²) ⊗ rootᵀroot, with one root (k, n) for all unknowns or a field of (k, n, *shape)."""

    @abc.abstractmethod
    def process_innovation(self, transition: Transition, observation: Observation, z: Field) -> Innovation:
        """N(0, H Σ Hᵀ): how much of z the step's own noise explains, for γ = 1."""

    @abc.abstractmethod
    def process_correction(self, transition: Transition, observation: Observation, z: Field) -> Field:
        """E₀ Σ Hᵀ (H Σ Hᵀ)⁻¹ z: how much z moves y if the step's noise is the only uncertainty."""

    @abc.abstractmethod
    def correct(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> Corrected:
        """Extrapolate to C⁻ = Φ C Φᵀ + γ² Σ, then condition on a zero residual."""

    @abc.abstractmethod
    def rejected(self, z: Field) -> Corrected:
        """The result of a step that was not taken: a gain of zero, and this covariance."""

    @abc.abstractmethod
    def apply_gain(self, gain: PyTree[Array], z: Field) -> tuple[Field, ...]:
        """K z, one field per derivative."""

    @abc.abstractmethod
    def std(self, y: Field, row: Row, noise: Coefficient, gamma: Coefficient) -> Coefficient:
        """√(φ C φᵀ + γ² noise) per unknown, for one row φ of a transition."""

    @abc.abstractmethod
    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """C itself, derivative by derivative. For tests: nothing else may call it."""

    @abc.abstractmethod
    def predict(self, transition: Transition, gamma: Coefficient, y: Field) -> Self:
        """C⁻ = Φ C Φᵀ + γ² Σ."""

    @abc.abstractmethod
    def backward(self, transition: Transition, gamma: Coefficient, y: Field) -> "Kernel":
        """The kernel of Y(t) | Y(t+h), where C is the covariance of Y(t)."""

    def extend(self, kernel: "Kernel", transition: Transition, gamma: Coefficient, y: Field) -> "Kernel":
        """The kernel of X | Y(t+h), from a kernel of X | Y(t)."""
        return kernel.compose(self.backward(transition, gamma, y))

    @abc.abstractmethod
    def identity(self) -> "Kernel":
        """The kernel of X | Y(t) for X = Y(t)."""

    @abc.abstractmethod
    def square(self) -> Self:
        """The same covariance, with as many rows in its root as ``predict`` gives it."""

    @abc.abstractmethod
    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """A sample of N(0, C), one field per derivative; or of other ``numbers`` with this covariance."""


class Kernel(eqx.Module):
    """X | Y ~ N(E[X] + G (Y − E[Y]), P): the distribution of an earlier state, given a later one.

    Kernels know nothing of means, which are fields and live elsewhere.
    """

    gain: eqx.AbstractVar[PyTree[Array]]
    noise: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def push(self, covariance: Any) -> Any:
        """Cov(X) = G C Gᵀ + P, if C = Cov(Y)."""

    @abc.abstractmethod
    def compose(self, other: Self) -> Self:
        """The kernel of X | Z, if ``other`` is that of Y | Z: the gain is G G', the noise G P' Gᵀ + P."""

    @abc.abstractmethod
    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """G Y, one field per derivative."""

    @abc.abstractmethod
    def through(self, gain: PyTree[Array]) -> PyTree[Array]:
        """G K, for a gain K of the filter."""

    @abc.abstractmethod
    def after(self, transition: Transition) -> Self:
        """The same kernel with the gain G Φ."""
