"""The information operator (the paper's Section 2.2): what the ODE says of a state.

An information operator maps a state Y to a residual that is zero if Y satisfies the ODE. Filters condition on
that residual being zero, by way of its linearisation H. The one operator that exists is y' − f(t, y).
"""

import abc
from collections.abc import Callable
from typing import NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from millipode.covariance.observation import Observation
from millipode.linalg.fields import Coefficient, Field, map_leaves
from millipode.linalg.jacobians import ProductJacobian
from millipode.model.linearisation import Linearisation
from millipode.model.vector_field import VectorField
from millipode.pde.bases import Basis
from millipode.xla.module import Module


class Residual(NamedTuple):
    """The value of a linearised information operator at a predicted mean.

    Attributes:
        z: the residual, a field like the modes, in units of y'.
        observation: H, as far as the filter knows it.
    """

    z: Field
    observation: Observation


class Predicted(NamedTuple):
    """Fields 0 and 1 of a predicted state, E₀ m⁻ and E₁ m⁻: all that a residual depends on."""

    y: Field
    slope: Field


class InformationOperator(Module):
    """What an ODE says of a state, as a residual that should be zero.

    Attributes:
        field: y' as a function of t and y, in space: for the start of a solve.
    """

    field: eqx.AbstractVar[VectorField]

    @property
    @abc.abstractmethod
    def basis(self) -> Basis:
        """The basis in which states and residuals are expressed."""

    @property
    @abc.abstractmethod
    def sign(self) -> Array:
        """+1, or −1 where the user integrates backwards."""

    @property
    def is_constant(self) -> bool:
        """Whether the filter's linearisation is the same at all states of a step."""
        return False

    @property
    def is_explicit(self) -> bool:
        """Whether the filter knows nothing of the Jacobian."""
        return False

    @property
    def is_exact(self) -> bool:
        """Whether the filter knows the whole linearisation."""
        return False

    @property
    def is_implicit(self) -> bool:
        """Whether the gain solves linear systems with F, of which the covariance knows nothing."""
        return False

    @property
    def mixes(self) -> bool:
        """Whether that gain is a mixture of two, for three more systems; see ``filter.implicit``."""
        return False

    @property
    def derivatives(self) -> int | None:
        """How many derivatives that gain moves at most; None if all."""
        return None

    def cost(self, t: Array, y: Field) -> float:
        """What linear systems cost in a step, in steps of an EK0: a guess."""
        return 0.0

    @property
    def is_partial(self) -> bool:
        """Whether the filter knows some of the linearisation, but not all of it."""
        return not (self.is_explicit or self.is_exact)

    @abc.abstractmethod
    def memory(self) -> PyTree[Array]:
        """What it carries from step to step, as it is at the beginning."""

    def check(self, t: Array, y: Field) -> None:
        """Raise if this operator does not suit a problem with a state like y."""

    def closed(self, t: Array, y: Field) -> Self:
        """The same, with tracers that users' functions close over in the open; see ``VectorField.closed``."""
        return self

    @abc.abstractmethod
    def refreshed(self, t: Array, y: Field, memory: PyTree[Array]) -> PyTree[Array]:
        """The memory for a step to (t, y), from that of the last accepted step."""

    @abc.abstractmethod
    def residual(
        self, t: Array, point: Field, predicted: Predicted, drift: Coefficient | None, memory: PyTree[Array]
    ) -> Residual:
        """The residual of a predicted state, linearised at a point as far as the filter knows how.

        Args:
            t: the user's time.
            point: ξ, the value of y at which to linearise; field 0 of the prediction itself, or better.
            predicted: fields 0 and 1 of the prediction.
            drift: the rate r of a prior whose field 1 is y' − r y; None if it is y'.
            memory: what ``refreshed`` returned for this step.
        """

    @abc.abstractmethod
    def discrepancy(self, t: Array, at: Predicted, drift: Coefficient | None) -> Field:
        """The residual of a state, without a linearisation: one evaluation of f."""

    @abc.abstractmethod
    def exactly(self, t: Array, y: Field, drift: Coefficient | None, often: bool) -> Observation:
        """The true linearisation H at (t, y), whatever the filter itself knows of it.

        ``often`` says whether it is worth storing what all products with it have in common.
        """


class FirstOrderODE(InformationOperator):
    """y' − f(t, y), with H = E₁ − F E₀.

    Attributes:
        field: f.
        linearisation: how F comes from f.
    """

    field: VectorField
    linearisation: Linearisation

    @property
    def basis(self) -> Basis:
        """That of the linearisation."""
        return self.linearisation.basis

    @property
    def sign(self) -> Array:
        """That of the vector field."""
        return self.field.sign

    @property
    def is_constant(self) -> bool:
        """As the linearisation says."""
        return self.linearisation.is_constant

    @property
    def is_explicit(self) -> bool:
        """As the linearisation says."""
        return self.linearisation.is_explicit

    @property
    def is_exact(self) -> bool:
        """As the linearisation says."""
        return self.linearisation.is_exact

    @property
    def is_implicit(self) -> bool:
        """As the linearisation says."""
        return self.linearisation.is_implicit

    @property
    def mixes(self) -> bool:
        """As the linearisation says."""
        return self.linearisation.mixes

    @property
    def derivatives(self) -> int | None:
        """As the linearisation says."""
        return self.linearisation.derivatives

    def cost(self, t: Array, y: Field) -> float:
        """As the linearisation says."""
        return self.linearisation.cost(self.field, t, y)

    def memory(self) -> PyTree[Array]:
        """That of the linearisation."""
        return self.linearisation.memory()

    def check(self, t: Array, y: Field) -> None:
        """f must return something like y, and the linearisation must suit it."""
        self.field.check(self.field.f, "f", t, y)
        self.linearisation.check(self.field, t, y)

    def closed(self, t: Array, y: Field) -> "FirstOrderODE":
        """For f, and for the functions of the linearisation."""
        field = self.field._replace(f=self.field.closed(self.field.f, t, y))
        return FirstOrderODE(field, self.linearisation.closed(self.field, t, y))

    def refreshed(self, t: Array, y: Field, memory: PyTree[Array]) -> PyTree[Array]:
        """As the linearisation does."""
        return self.linearisation.refreshed(self.field, t, y, memory)

    def residual(
        self, t: Array, point: Field, predicted: Predicted, drift: Coefficient | None, memory: PyTree[Array]
    ) -> Residual:
        """One evaluation of f, and as much of its Jacobian as the linearisation asks for.

        The residual is m⁻₁ − f(ξ) − F (m⁻₀ − ξ), with the F of the linearisation at ξ.
        """
        value, jacobian = self.linearisation(self.field, t, point, memory)
        y, slope = predicted
        if point is not y:
            moved = jacobian.multiply(jax.tree.map(jnp.subtract, y, point))
            value = jax.tree.map(jnp.add, value, moved)
        z = _discrepancy(slope, value, y, drift)
        return Residual(z, Observation(jacobian if drift is None else jacobian.minus(drift)))

    def discrepancy(self, t: Array, at: Predicted, drift: Coefficient | None) -> Field:
        """The difference y' − f(t, y)."""
        return _discrepancy(at.slope, self._in_modes(t)(at.y), at.y, drift)

    def exactly(self, t: Array, y: Field, drift: Coefficient | None, often: bool) -> Observation:
        """With all of the Jacobian, by JVPs of f."""
        f = self._in_modes(t)
        if often:
            jacobian = ProductJacobian(jax.linearize(f, y)[1])
        else:
            jacobian = ProductJacobian(lambda x: jax.jvp(f, (y,), (x,))[1])
        return Observation(jacobian if drift is None else jacobian.minus(drift))

    def _in_modes(self, t: Array) -> Callable[[Field], Field]:
        """The right-hand side as a function of the modes of y."""
        basis = self.basis
        return lambda x: basis.to_modes(self.field(t, basis.from_modes(x)))


def _discrepancy(slope: Field, value: Field, y: Field, drift: Coefficient | None) -> Field:
    """Field 1 of a state, less what the ODE says of it."""
    if drift is None:
        return jax.tree.map(jnp.subtract, slope, value)
    # Field 1 is y' − ry, so that only the difference between f and ry is left.
    return map_leaves(lambda w, f, y, r: w - (f - r * y), slope, value, y, drift)
