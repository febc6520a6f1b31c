"""What approximates (I − cJ)⁻¹, so that GMRES takes few iterations."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.linalg.fields import Field
from millipode.linalg.triangular import eliminate
from millipode.model.linearisation import Linearisation, diagonal
from millipode.model.stencil import Stencil
from millipode.model.vector_field import VectorField
from millipode.pde.linear import Linear
from millipode.xla.module import Module

# c ↦ (r ↦ about (I − cF)⁻¹ r)
Inverse = Callable[[Array], Callable[[Field], Field]]


class Preconditioner(Module):
    """An approximation of (I − cJ)⁻¹ that is cheap to apply."""

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Raise if it does not fit a problem with a state like y."""

    @abc.abstractmethod
    def at(self, field: VectorField, t: Array, y: Field) -> Inverse:
        """The approximation at a point; J is in the filter's own time, ``field.sign`` times the user's."""


class OfLinear(Preconditioner):
    """The exact inverse of a linear part, by fast transforms.

    Attributes:
        linear: the linear part, in user time.
    """

    linear: Linear

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Its eigenvalues must fit y."""
        self.linear.fitted(y)

    def at(self, field: VectorField, t: Array, y: Field) -> Inverse:
        """The same everywhere."""
        jacobian, sign = self.linear.jacobian(y), field.sign
        return lambda c: lambda r: jacobian.solve(sign * c, r)


class LocalBlocks(Preconditioner):
    """The inverse of one small matrix per cell, for stiff reactions between the components of y.

    Where y is an array whose axes are components and cells, or a pytree with one array of cells per
    component, f couples the c components of every cell, and cells with each other by terms that leave
    constants alone, such as diffusion. Then c JVPs find the c × c matrix of every cell.

    Args:
        axes: the axis of the components, if y is an array; 0 by default. Leaves of a pytree are components.
    """

    axes: int = eqx.field(static=True)

    def __init__(self, axes: int = 0):
        if isinstance(axes, bool) or not isinstance(axes, int):
            raise TypeError(
                f"LocalBlocks: axes must be the axis of the components, an integer; got {axes!r}."
            )
        self.axes = axes

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """All components must have the same cells."""
        leaves = jax.tree.leaves(y)
        if len(leaves) == 1:
            if not -leaves[0].ndim <= self.axes < leaves[0].ndim:
                raise ValueError(
                    f"LocalBlocks(axes={self.axes}): y has shape {leaves[0].shape}, without such an axis."
                )
        elif len({leaf.shape for leaf in leaves}) > 1:
            raise ValueError(
                "LocalBlocks needs the same cells for all components, and the leaves of y have the shapes "
                f"{[leaf.shape for leaf in leaves]}."
            )

    def at(self, field: VectorField, t: Array, y: Field) -> Inverse:
        """The blocks there, by one JVP per component."""
        _, product = jax.linearize(lambda x: field(t, x), y)
        like = self._stacked(y)
        c = like.shape[0]

        def column(k: int) -> Array:
            ones = jnp.zeros_like(like).at[k].set(1)
            return self._stacked(product(self._unstacked(ones, y)))

        blocks = jnp.stack([column(k) for k in range(c)], axis=1)  # (c, c, *cells)
        one = jnp.eye(c, dtype=like.dtype).reshape(c, c, *(1,) * (like.ndim - 1))

        def at_shift(shift: Array) -> Callable[[Field], Field]:
            matrix = one - shift * blocks
            return lambda r: self._unstacked(eliminate(matrix, self._stacked(r)), r)

        return at_shift

    def _stacked(self, x: Field) -> Array:
        """One array, components first."""
        leaves = jax.tree.leaves(x)
        return jnp.moveaxis(leaves[0], self.axes, 0) if len(leaves) == 1 else jnp.stack(leaves)

    def _unstacked(self, x: Array, like: Field) -> Field:
        leaves, tree = jax.tree.flatten(like)
        if len(leaves) == 1:
            return jax.tree.unflatten(tree, [jnp.moveaxis(x, 0, self.axes)])
        return jax.tree.unflatten(tree, list(x))


class Diagonal(Preconditioner):
    """The inverse of the diagonal of I − cJ, for stiff decay in single unknowns, as in networks.

    Args:
        jacobian_diagonal: the diagonal of ∂f/∂y, as for ``mp.DiagonalEK1``: a function with the signature of
            f that returns something like y, or a declared ``mp.Stencil``. Problems with some hundred unknowns
            can do without.
    """

    known: Linearisation

    def __init__(self, jacobian_diagonal: Callable | Stencil | None = None):
        self.known = diagonal(jacobian_diagonal)

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """As for ``mp.DiagonalEK1``."""
        self.known.check(field, t, y)

    def at(self, field: VectorField, t: Array, y: Field) -> Inverse:
        """The diagonal there."""
        _, jacobian = self.known(field, t, y)
        return lambda c: lambda r: jacobian.solve(c, r)


class Product(Preconditioner):
    """One approximation after the other, the last one first: (I − cA)⁻¹ (I − cB)⁻¹ for a sum A + B."""

    factors: tuple[Preconditioner, ...]

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """All of them must fit."""
        for factor in self.factors:
            factor.check(field, t, y)

    def at(self, field: VectorField, t: Array, y: Field) -> Inverse:
        """All of them at this point."""
        parts = [factor.at(field, t, y) for factor in self.factors]

        def at_shift(c: Array) -> Callable[[Field], Field]:
            solves = [part(c) for part in parts]

            def solve(r: Field) -> Field:
                for one in reversed(solves):
                    r = one(r)
                return r

            return solve

        return at_shift


class Given(Preconditioner):
    """A function of the user's.

    Attributes:
        function: (c, t, y, args, r) → about (I − c ∂f/∂y)⁻¹ r.
    """

    function: Callable = eqx.field(static=True)

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """It must return something like y."""
        field.check(
            lambda t, y, *args: self.function(jnp.ones_like(t), t, y, *(args or (None,)), y),
            "preconditioner",
            t,
            y,
        )

    def at(self, field: VectorField, t: Array, y: Field) -> Inverse:
        """With the sign of user time."""
        return lambda c: lambda r: self.function(field.sign * c, t, y, field.args, r)


def as_preconditioner(given: Any) -> Preconditioner:
    """A preconditioner from all that users may pass."""
    if isinstance(given, Preconditioner):
        return given
    if isinstance(given, Linear):
        return OfLinear(given)
    if isinstance(given, list | tuple) and given:
        return Product(tuple(as_preconditioner(x) for x in given))
    if callable(given):
        return Given(given)
    raise TypeError(
        "preconditioner must be a linear part such as mp.Grid(...).diffusion(...), mp.LocalBlocks(...), "
        "mp.Diagonal(...), a list of these, or a function (c, t, y, args, r) -> x; got "
        f"{type(given).__name__}."
    )
