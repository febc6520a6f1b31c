"""Priors that know a rate r at which y grows or decays: field 1 of their state is y' − ry.

Field q of the state is Σ_j F_qj r^(q−j) y^(j), and y^(q) is Σ_j B_qj r^(q−j) times field j, with integers F
and B that are 1 on the diagonal.
"""

import abc
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from millipode.linalg.fields import Coefficient, Field, Row, combine, dtype, map_leaves
from millipode.model.priors.iwp import powers, unit_row
from millipode.model.priors.protocol import Prior

Integers = list[list[int]]


class Reverting(Prior):
    """A prior whose coordinates follow from a rate r and two tables of integers."""

    @property
    @abc.abstractmethod
    def drift(self) -> Coefficient:
        """The rate r in the filter's own time, one for all unknowns or a field."""

    @property
    @abc.abstractmethod
    def forwards(self) -> Integers:
        """The integers F that lead from derivatives to the state."""

    @property
    @abc.abstractmethod
    def backwards(self) -> Integers:
        """The integers B that lead back."""

    def state(self, derivatives: tuple[Field, ...]) -> tuple[Field, ...]:
        """F times the derivatives."""
        y = derivatives[0]
        return tuple(
            map_leaves(lambda _, r, *parts, row=row: _sum(row, r, parts), y, self.drift, *derivatives)
            for row in self.forwards
        )

    def root(self, root: Float[Array, "k n"]) -> PyTree:
        """F times the root, column by column."""

        def one(r: Array) -> Array:
            columns = tuple(c.reshape(-1, *(1,) * r.ndim) for c in root.T)
            shape = (root.shape[0], *r.shape)
            return jnp.stack(
                [jnp.broadcast_to(_sum(row, r, columns), shape) for row in self.forwards], axis=1
            )

        return jax.tree.map(one, self.drift)

    def row(self, q: Array | int, y: Field) -> Row:
        """A row of B, with the powers of the rate."""
        n = self.order + 1
        if isinstance(q, int) and q == 0:
            return unit_row(0, n, dtype(y))
        integers = jnp.asarray(np.array(self.backwards), dtype(y))[q]

        def coefficient(j: int) -> Coefficient:
            power = jnp.maximum(jnp.asarray(q) - j, 0)
            return jax.tree.map(lambda r: integers[j] * r**power, self.drift)

        return tuple(coefficient(j) for j in range(n))

    def derivative(self, state: tuple[Field, ...], q: Array) -> Field:
        """B times the state."""
        return combine(self.row(q, state[0]), state)


def _sum(row: list[int], r: Array, parts: tuple[Array, ...]) -> Array:
    """Σ_j row_j r^(q−j) x_j, where q is the last j that is not 0."""
    q = max(j for j, c in enumerate(row) if c)
    power = powers(r, q + 1)
    return reduce(jnp.add, (c * power[q - j] * parts[j] for j, c in enumerate(row) if c))
