"""What every prior offers: the coordinates of its state, and their transition over a step."""

import abc
import dataclasses
from typing import Self

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from millipode.covariance.transition import Transition
from millipode.linalg.fields import Coefficient, Field, Row
from millipode.xla.module import Module


class Prior(Module):
    """A Gauss–Markov prior for y and its first ν derivatives.

    Its state has n = ν+1 fields, y first; the others may be any combination of y and its derivatives such
    that field q involves none beyond the q-th. To write your own, derive from this class (an
    ``equinox.Module``) and write the abstract methods.

    Attributes:
        order: ν; 0 if it is still open, and that of the solver is to be used.
    """

    order: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def is_shared(self) -> bool:
        """Whether the transition is the same for all unknowns, as a Kronecker covariance needs it."""

    @property
    def needs_rates(self) -> bool:
        """Whether ``fitted`` needs the rates of a linear part, which only ``mp.SpectralEK1`` knows."""
        return False

    @property
    def drift(self) -> Coefficient | None:
        """The rate r in field 1 = y' − r y, by the filter's time: a number or a field; None for r = 0."""
        return None

    def with_order(self, order: int) -> Self:
        """The same process with ν derivatives, if it has no order of its own."""
        return self if self.order else dataclasses.replace(self, order=order)

    @abc.abstractmethod
    def fitted(self, rates: Field | None, sign: Array, y: Field) -> Self:
        """The prior of a certain problem.

        Args:
            rates: the diagonal of the Jacobian in user time, where the linearisation has a constant one.
            sign: +1, or −1 where the user integrates backwards.
            y: the initial value, for its shapes and its dtype.
        """

    @abc.abstractmethod
    def transition(self, h: Array) -> Transition:
        """The transition over a step h > 0, a number."""

    @abc.abstractmethod
    def marginal(self, h: Array) -> tuple[Row, Coefficient]:
        """Row 0 of Φ(h) and Σ(h)₀₀, valid and differentiable for h ≥ 0."""

    @abc.abstractmethod
    def remainder(self, h: Array) -> tuple[Coefficient, ...]:
        """What a constant 1 in place of the white noise (y^(ν+1) = 1) adds to the n fields over a step h."""

    @abc.abstractmethod
    def state(self, derivatives: tuple[Field, ...]) -> tuple[Field, ...]:
        """The n fields of the state, from y, y', …, y^(ν)."""

    @abc.abstractmethod
    def root(self, root: Float[Array, "k n"]) -> PyTree[Array]:
        """A root of the state's covariance, from one of y, y', …: (k, n), or a field of (k, n, *shape)."""

    @abc.abstractmethod
    def row(self, q: Array | int, y: Field) -> Row:
        """The coefficients of the state's fields in y^(q), for a q that may be traced; y gives the dtype."""

    @abc.abstractmethod
    def derivative(self, state: tuple[Field, ...], q: Array) -> Field:
        """y^(q), for a traced q, so that all derivatives share one program."""
