"""What approximates (I − cJ)⁻¹, so that GMRES takes few iterations."""

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.linalg.fields import Field, dtype
from millipode.linalg.jacobians import CoupledJacobian
from millipode.linalg.triangular import eliminate
from millipode.model.linearisation import Linearisation, diagonal
from millipode.model.stencil import Stencil
from millipode.model.strength import strength
from millipode.model.vector_field import VectorField
from millipode.pde.bases import Stacked
from millipode.pde.linear import Linear
from millipode.xla.module import Module

Kind = TypeVar("Kind", bound="Preconditioner")

# c ↦ (r ↦ about (I − cF)⁻¹ r)
Inverse = Callable[[Array], Callable[[Field], Field]]


class Preconditioner(Module):
    """An approximation of (I − cJ)⁻¹ that is cheap to apply."""

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Raise if it does not fit a problem with a state like y."""

    @abc.abstractmethod
    def at(self, field: VectorField, t: Array, y: Field, rough: bool = False) -> Inverse:
        """The approximation at a point.

        Args:
            field: f, by whose sign J is in the filter's own time.
            t: the time.
            y: the state.
            rough: whether single precision is enough, for numbers of a size near one.
        """


class OfLinear(Preconditioner):
    """The exact inverse of a linear part, by fast transforms.

    Attributes:
        linear: the linear part, in user time.
    """

    linear: Linear

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Its eigenvalues must fit y."""
        self.linear.fitted(y)

    def at(self, field: VectorField, t: Array, y: Field, rough: bool = False) -> Inverse:
        """As strong at every point as f is there."""
        like = _in_precision(y, rough)
        spectrum, sign = self.linear.fitted(like), field.sign
        known = None if spectrum.reaction is not None else strength(field, t, y, spectrum)

        def at_shift(c: Array) -> Callable[[Field], Field]:
            shift = (sign * c).astype(dtype(like))

            def solve(r: Field) -> Field:
                modes = spectrum.basis.to_modes(_like(r, like))

                def at(eigenvalues: Field) -> Field:
                    jacobian = spectrum._replace(eigenvalues=eigenvalues).jacobian()
                    return spectrum.basis.from_modes(jacobian.solve(shift, modes))

                return _like(at(spectrum.eigenvalues) if known is None else known.solve(at), r)

            return solve

        return at_shift


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

    def at(self, field: VectorField, t: Array, y: Field, rough: bool = False) -> Inverse:
        """The blocks there."""
        blocks = self.blocks(field, t, y)

        def at_shift(shift: Array) -> Callable[[Field], Field]:
            inverse = _inverse(_identity(blocks) - shift * blocks)
            return lambda r: self.unstack(_times(inverse, self.stack(r)), r)

        return at_shift

    def blocks(self, field: VectorField, t: Array, y: Field) -> Float[Array, "c c *cells"]:
        """One matrix per cell, by one JVP per component."""
        _, product = jax.linearize(lambda x: field(t, x), y)
        like = self.stack(y)

        def column(k: int) -> Array:
            ones = jnp.zeros_like(like).at[k].set(1)
            return self.stack(product(self.unstack(ones, y)))

        return jnp.stack([column(k) for k in range(like.shape[0])], axis=1)

    def stack(self, x: Field) -> Array:
        """One array, components first."""
        leaves = jax.tree.leaves(x)
        return jnp.moveaxis(leaves[0], self.axes, 0) if len(leaves) == 1 else jnp.stack(leaves)

    def unstack(self, x: Array, like: Field) -> Field:
        """The reverse."""
        leaves, tree = jax.tree.flatten(like)
        if len(leaves) == 1:
            return jax.tree.unflatten(tree, [jnp.moveaxis(x, 0, self.axes)])
        return jax.tree.unflatten(tree, list(x))


class LinearAndBlocks(Preconditioner):
    """Diffusion and reactions, where both are stiff.

    With the linear part A, the blocks B of all cells and their mean B̄, this is

        (I − c(A + B̄))⁻¹ (I − cB̄) (I − cB)⁻¹,

    exact for the same B in all cells, without A, and up to products of c(B − B̄) and cA else. The plain
    product of both inverses is wrong by c²AB.

    Attributes:
        linear: A, in user time.
        local: B.
    """

    linear: OfLinear
    local: LocalBlocks

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Both must fit."""
        self.linear.check(field, t, y)
        self.local.check(field, t, y)

    def at(self, field: VectorField, t: Array, y: Field, rough: bool = False) -> Inverse:
        """The blocks there, and their mean with the linear part."""
        blocks = self.local.blocks(field, t, y)
        mean = jnp.mean(blocks, axis=tuple(range(2, blocks.ndim)))
        c = mean.shape[0]
        like = _in_precision(y, rough)
        spectrum, sign = self.linear.linear.fitted(like), field.sign.astype(dtype(like))
        basis = Stacked.of(spectrum.basis, like)
        # Else, some of what the basis takes for components are cells.
        if basis.stack(spectrum.eigenvalues).shape[0] != c:
            return Product((self.linear, self.local)).at(field, t, y, rough)
        known = strength(field, t, y, spectrum)

        def at_shift(shift: Array) -> Callable[[Field], Field]:
            inverse = _inverse(_identity(blocks) - shift * blocks)
            local = jnp.tensordot(jnp.eye(c, dtype=mean.dtype) - shift * mean, inverse, 1)
            rounded = shift.astype(dtype(like))

            def solve(r: Field) -> Field:
                weighted = _like(self.local.unstack(_times(local, self.local.stack(r)), r), like)
                modes = basis.to_modes(weighted)

                def at(eigenvalues: Field) -> Field:
                    both = CoupledJacobian(sign * basis.stack(eigenvalues), mean.astype(modes.dtype))
                    return basis.from_modes(both.solve(rounded, modes))

                return _like(at(spectrum.eigenvalues) if known is None else known.solve(at), r)

            return solve

        return at_shift


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

    def at(self, field: VectorField, t: Array, y: Field, rough: bool = False) -> Inverse:
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

    def at(self, field: VectorField, t: Array, y: Field, rough: bool = False) -> Inverse:
        """All of them at this point."""
        parts = [factor.at(field, t, y, rough) for factor in self.factors]

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

    def at(self, field: VectorField, t: Array, y: Field, rough: bool = False) -> Inverse:
        """With the sign of user time."""
        return lambda c: lambda r: self.function(field.sign * c, t, y, field.args, r)


def as_preconditioner(given: Any) -> Preconditioner:
    """A preconditioner from all that users may pass."""
    if isinstance(given, Preconditioner):
        return given
    if isinstance(given, Linear):
        return OfLinear(given)
    if isinstance(given, list | tuple) and given:
        factors = tuple(as_preconditioner(x) for x in given)
        linear, local = _only(OfLinear, factors), _only(LocalBlocks, factors)
        if len(factors) == 2 and linear and local and linear.linear.reaction is None:
            return LinearAndBlocks(linear, local)
        return Product(factors)
    if callable(given):
        return Given(given)
    raise TypeError(
        "preconditioner must be a linear part such as mp.Grid(...).diffusion(...), mp.LocalBlocks(...), "
        "mp.Diagonal(...), a list of these, or a function (c, t, y, args, r) -> x; got "
        f"{type(given).__name__}."
    )


def _in_precision(y: Field, rough: bool) -> Field:
    """A field like y, in single precision if that is enough."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), y) if rough else y


def _like(x: Field, like: Field) -> Field:
    """In the precision of another field."""
    return jax.tree.map(lambda a, b: a.astype(b.dtype), x, like)


def _only(kind: type[Kind], factors: tuple[Preconditioner, ...]) -> Kind | None:
    return next((x for x in factors if isinstance(x, kind)), None)


def _identity(like: Float[Array, "c c *cells"]) -> Array:
    c = like.shape[0]
    return jnp.eye(c, dtype=like.dtype).reshape(c, c, *(1,) * (like.ndim - 2))


def _inverse(blocks: Float[Array, "c c *cells"]) -> Float[Array, "c c *cells"]:
    """Of every block."""
    one = jnp.broadcast_to(_identity(blocks), blocks.shape)
    return jnp.stack([eliminate(blocks, one[:, k]) for k in range(one.shape[0])], axis=1)


def _times(blocks: Float[Array, "c c *cells"], x: Array) -> Array:
    """The product of every block with its part of a field."""
    return jnp.sum(blocks * x, axis=1)
