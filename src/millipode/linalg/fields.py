"""Arithmetic on fields: pytrees with the structure of the ODE's state y.

The filter never flattens y. A *field* is one quantity per unknown (a derivative, a residual, a
standard deviation) in the user's own structure and axes, so stencils and shardings stay intact.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

Field: TypeAlias = Any  # a pytree like y
Coefficient: TypeAlias = Any  # one number that all unknowns share, or a field


def size(y: Field) -> int:
    """The number of unknowns d."""
    return sum(leaf.size for leaf in jax.tree.leaves(y))


def dtype(y: Field) -> Any:
    """The floating-point type of a field; all of its leaves share it."""
    return jax.tree.leaves(y)[0].dtype


def same_structure(x: PyTree, y: PyTree) -> bool:
    """Whether two pytrees have the same nodes, whatever their leaves."""
    trees: list[Any] = [jax.tree.structure(x), jax.tree.structure(y)]
    return trees[0] == trees[1]


Row: TypeAlias = tuple[Coefficient | None, ...]  # coefficients of several fields; None is a structural zero


def combine(coefficients: Sequence[Coefficient | None], fields: Sequence[Field]) -> Field:
    """Σ_j c_j x_j, as one unrolled sum so that XLA makes a single pass; None is a structural zero."""
    terms = [(per_leaf(c, x), x) for c, x in zip(coefficients, fields, strict=True) if c is not None]

    def leafwise(*leaves: Array) -> Array:
        products = [c * x for c, x in zip(leaves[::2], leaves[1::2], strict=True)]
        return functools.reduce(jnp.add, products)

    return jax.tree.map(leafwise, *(part for term in terms for part in term))


def is_shared(c: Coefficient, y: Field) -> bool:
    """Whether a coefficient is one number for all unknowns of y, rather than a field."""
    if not same_structure(c, y):
        return True
    return all(
        jnp.ndim(s) == 0 and jnp.ndim(leaf) > 0
        for s, leaf in zip(jax.tree.leaves(c), jax.tree.leaves(y), strict=True)
    )


def per_leaf(c: Coefficient, y: Field) -> PyTree:
    """A coefficient in the structure of y: a shared number stands at every leaf."""
    return jax.tree.map(lambda _: c, y) if is_shared(c, y) else c


def leaves_of(c: Coefficient | None, y: Field) -> list[Any]:
    """A coefficient as a list with one array per leaf of y; None stands at every leaf, too."""
    return [None] * len(jax.tree.leaves(y)) if c is None else jax.tree.leaves(per_leaf(c, y))


def expand(c: Coefficient, y: Field) -> Field:
    """A coefficient as a full field."""
    return jax.tree.map(lambda s, leaf: jnp.broadcast_to(s, leaf.shape), per_leaf(c, y), y)


def flat(c: Coefficient, y: Field) -> Float[Array, " d"]:
    """A coefficient as one vector over the flattened unknowns."""
    return ravel_pytree(expand(c, y))[0]


def total(x: Field) -> Array:
    """Σ_i x_i over all unknowns."""
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(x))  # type: ignore[return-value]


def rms(x: Field) -> Array:
    """√(Σ_i x_i² / d), with a zero gradient at x = 0."""
    return safe_sqrt(total(jax.tree.map(jnp.square, x)) / size(x))


def scaled_rms(x: Field) -> Array:
    """The same, for numbers whose squares may underflow or overflow; for the price of a second pass."""
    most = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(x)]))
    unit = lax.stop_gradient(jnp.where(most > 0, most, 1))
    return unit * rms(jax.tree.map(lambda leaf: leaf / unit, x))


def all_finite(x: Field) -> Array:
    """Whether every entry is finite."""
    return jnp.isfinite(total(jax.tree.map(lambda leaf: 0 * leaf, x)))


def where(condition: Array, x: Field, y: Any) -> Field:
    """Select leaf by leaf; y is a field or a number."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, per_leaf(y, x))


def safe_sqrt(x: Array) -> Array:
    """√x for x ≥ 0, with derivative 0 instead of ∞ at 0; NaN stays NaN."""
    positive = x != 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def safe_divide(numerator: Array, denominator: Array) -> Array:
    """a/b, and 0 where b = 0, which is the contribution of a quantity that is known exactly."""
    zero = denominator == 0
    return jnp.where(zero, 0, numerator / jnp.where(zero, 1, denominator))


def map_leaves(function: Callable[..., Array], x: Field, *others: Coefficient) -> Field:
    """``jax.tree.map`` in which all arguments but the first may be shared numbers."""
    return jax.tree.map(function, x, *(per_leaf(other, x) for other in others))
