"""What every covariance structure offers, and the kernels that a smoother needs.

Everywhere below, ``y`` and ``z`` are fields (pytrees of arrays like the modes of y); a state has n = ν+1 of
them. γ is a number, or a field if every unknown has its own.
"""

import abc
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from millipode.covariance.innovation import Innovation
from millipode.covariance.observation import Observation
from millipode.covariance.transition import Transition
from millipode.linalg.fields import Coefficient, Field, Row
from millipode.linalg.jacobians import Jacobian, ProductJacobian
from millipode.linalg.randomness import Numbers
from millipode.xla.module import Module


class Storage(NamedTuple):
    """How many numbers a structure stores for d unknowns.

    Attributes:
        root: those of the filter's covariance.
        smoothed: those of the smoother's covariance.
        std: those of the standard deviation of y.
        working: all that a step holds at the same time, if that is much more than the state; else 0.
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
        covariance: the covariance of the corrected state.
    """

    gain: PyTree[Array]
    innovation: Innovation
    covariance: "Covariance"


class Covariance(Module):
    """A covariance C of the prior's state, given by a square root.

    The arguments of its methods are: ``transition``, the prior's step, with Φ and Σ; ``gamma``, γ ≥ 0;
    ``observation``, H; ``z``, the residual; ``y``, any field like the modes of y, for its structure and
    shapes.

    Attributes:
        is_shared: whether one block serves all unknowns, so that a step is bound by the traffic of the mean.
    """

    is_shared: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def storage(cls, d: int, n: int, components: int) -> Storage:
        """The storage for d unknowns with n fields each; ``components`` unknowns share a block."""

    @classmethod
    @abc.abstractmethod
    def initial(cls, root: PyTree[Array], gamma: Coefficient, y: Field) -> Self:
        """C₀ = diag(γ²) ⊗ rootᵀroot, with one root (k, n) for all unknowns or a field of (k, n, *shape)."""

    @abc.abstractmethod
    def process_innovation(self, transition: Transition, observation: Observation, z: Field) -> Innovation:
        """N(0, H Σ Hᵀ): the residual that the noise of this step alone explains, for γ = 1."""

    @abc.abstractmethod
    def process_correction(self, transition: Transition, observation: Observation, z: Field) -> Field:
        """E₀ Σ Hᵀ (H Σ Hᵀ)⁻¹ z: the correction of y if the noise of this step is the only uncertainty."""

    def gain_of_y(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> Jacobian:
        """E₀ K, which maps a residual to the correction of y; structures may do without the rest."""
        gain = self.correct(transition, gamma, observation, z).gain
        return ProductJacobian(lambda x: self.apply_gain(gain, x)[0])

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
        """C as a matrix, ordered by derivative. Only tests may call it."""

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
        """A sample of N(0, C), one field per derivative.

        Args:
            key: the random key.
            y: a field, for its structure and shapes.
            numbers: draws the numbers ε with mean 0 and variance 1; standard normal ones by default.
        """


class Kernel(Module):
    """X | Y ~ N(E[X] + G (Y − E[Y]), P): the distribution of an earlier state, given a later one.

    A kernel does not contain the means, which are fields and are stored elsewhere.

    Attributes:
        gain: G, in the form of the covariance structure.
        noise: P, a covariance of the same structure.
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
