"""The information operator (the paper's Section 2.2): what the ODE says of a state.

An information operator maps a state Y to a residual that is zero if Y satisfies the ODE. Filters condition on
that residual being zero, by way of its linearisation H. The one operator that exists is y' − f(t, y).
"""

import abc
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


class Residual(NamedTuple):
    """The value of an information operator at a predicted mean, and its linearisation there.

    Attributes:
        z: the residual, a field like the modes, in units of y'.
        observation: H, as far as the filter knows it.
        memory: of the linearisation, to be kept if the step is accepted.
    """

    z: Field
    observation: Observation
    memory: PyTree[Array]


class InformationOperator(eqx.Module):
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

    @abc.abstractmethod
    def memory(self) -> PyTree[Array]:
        """What it carries from step to step, as it is at the beginning."""

    def check(self, t: Array, y: Field) -> None:
        """Raise if this operator does not suit a problem with a state like y."""

    def closed(self, t: Array, y: Field) -> Self:
        """The same, with tracers that users' functions close over in the open; see ``VectorField.closed``."""
        return self

    @abc.abstractmethod
    def residual(
        self, t: Array, y: Field, slope: Field, drift: Coefficient | None, memory: PyTree[Array]
    ) -> Residual:
        """The residual at a state, and its linearisation, as the filter knows it.

        Args:
            t: the user's time.
            y: field 0 of the state, E₀ Y.
            slope: field 1 of the state, E₁ Y.
            drift: the rate r of a prior whose field 1 is y' − r y; None if it is y'.
            memory: what the last accepted step left.
        """

    @abc.abstractmethod
    def exactly(self, t: Array, y: Field, drift: Coefficient | None) -> Observation:
        """The true linearisation H at (t, y), whatever the filter itself knows of it."""

    @abc.abstractmethod
    def in_units_of_y(self, h: Array) -> Array:
        """The factor that turns a residual into a change of y over a step h."""


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

    def residual(
        self, t: Array, y: Field, slope: Field, drift: Coefficient | None, memory: PyTree[Array]
    ) -> Residual:
        """One evaluation of f, and as much of its Jacobian as the linearisation asks for."""
        memory = self.linearisation.refreshed(self.field, t, y, memory)
        value, jacobian = self.linearisation(self.field, t, y, memory)
        if drift is None:
            return Residual(jax.tree.map(jnp.subtract, slope, value), Observation(jacobian), memory)
        # Field 1 is y' − ry, so that only the difference between f and ry is left.
        z = map_leaves(lambda w, f, y, r: w - (f - r * y), slope, value, y, drift)
        return Residual(z, Observation(jacobian.minus(drift)), memory)

    def exactly(self, t: Array, y: Field, drift: Coefficient | None) -> Observation:
        """With all of the Jacobian, by JVPs of f."""
        basis = self.basis
        _, jvp = jax.linearize(lambda x: basis.to_modes(self.field(t, basis.from_modes(x))), y)
        jacobian = ProductJacobian(jvp)
        return Observation(jacobian if drift is None else jacobian.minus(drift))

    def in_units_of_y(self, h: Array) -> Array:
        """The residual is in units of y / time."""
        return h
