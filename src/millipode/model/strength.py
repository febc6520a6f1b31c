"""How strong the linear part of f is from point to point: diffusion whose coefficient varies.

A linear part A is diagonal in a basis with fast transforms, which the operator in f need not be: its
coefficient may vary in space, or depend on y. Where it varies slowly beside the waves that are stiff,
(I − cJ)⁻¹ r at a point x is about (I − cκA)⁻¹ r there, with the strength κ(x) of J beside that of A. We
evaluate that for a few values of κ and interpolate between them.

κ is what J makes of the shortest wave of the grid, s = ±1 in turn, over what A makes of it. What J makes of a
constant is subtracted, which leaves out all that acts at every point by itself, such as reactions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.linalg.fields import Field, safe_divide, same_structure
from millipode.model.vector_field import VectorField
from millipode.pde.linear import Spectrum

# So many values of κ; if they differ by no more than this factor, their mean stands for all. If that is about
# one, then one does: cells at walls have less to do with others.
LEVELS, EVEN, ONE = 3, 3.0, 0.2
# κ is at least this part of its largest value.
WEAKEST = 1e-4


class Strength(NamedTuple):
    """The strengths κ of J beside A.

    Attributes:
        eigenvalues: of A.
        low: the smallest κ of every component, with as many axes as the eigenvalues.
        high: the largest one.
        middle: what stands for all κ of a component if they hardly differ.
        varies: whether they do differ.
        place: where κ lies between both, from 0 to 1 in proportion to its logarithm; a field.
    """

    eigenvalues: Field
    low: Field
    high: Field
    middle: Field
    varies: Array
    place: Field

    def solve(self, at: Callable[[Field], Field]) -> Field:
        """Interpolate between results for several κA.

        Args:
            at: maps the eigenvalues of κA to a field.
        """

        def even() -> Field:
            return at(jax.tree.map(jnp.multiply, self.middle, self.eigenvalues))

        def varied() -> Field:
            # A loop, so that transforms are compiled once; and one that can be transposed.
            shape = jax.eval_shape(even)
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
            return lax.scan(add, zero, jnp.arange(LEVELS))[0]

        def add(x: Field, j: Array) -> tuple[Field, None]:
            def scaled(values: Array, low: Array, high: Array) -> Array:
                return low * (high / low) ** (j / (LEVELS - 1)).astype(low.dtype) * values

            def weighted(x: Array, new: Array, place: Array) -> Array:
                return x + jnp.maximum(1 - jnp.abs((LEVELS - 1) * place - j), 0).astype(x.dtype) * new

            new = at(jax.tree.map(scaled, self.eigenvalues, self.low, self.high))
            return jax.tree.map(weighted, x, new, self.place), None

        return lax.cond(self.varies, varied, even)


class _Range(NamedTuple):
    """The values of κ for one leaf of y."""

    low: Array
    high: Array
    middle: Array


def strength(field: VectorField, t: Array, y: Field, spectrum: Spectrum) -> Strength | None:
    """Measure κ by two JVPs; None if modes and y differ in more than the order of their axes.

    Args:
        field: f.
        t: the time.
        y: the state.
        spectrum: A, in the time of the user, for fields like y.
    """
    basis, eigenvalues = spectrum.basis, spectrum.eigenvalues
    leaves, tree = jax.tree.flatten(y)
    modes = jax.tree.leaves(eigenvalues)
    if not same_structure(eigenvalues, y):
        return None
    if any(sorted(a.shape) != sorted(b.shape) for a, b in zip(leaves, modes, strict=True)):
        return None
    _, product = jax.linearize(lambda x: field(t, x), y)
    waves = [_wave(x, basis.leading(m)) for x, m in zip(leaves, modes, strict=True)]
    short = jax.tree.leaves(product(jax.tree.unflatten(tree, waves)))
    constant = jax.tree.leaves(product(jax.tree.map(jnp.ones_like, y)))

    def measured(wave: Array, short: Array, constant: Array, modes: Array) -> Array:
        axes = tuple(range(basis.leading(modes), modes.ndim))
        modes = field.sign.astype(modes.dtype) * modes
        of_linear = jnp.min(modes, axes, keepdims=True) - jnp.max(modes, axes, keepdims=True)
        kappa = (wave * short - constant).astype(of_linear.dtype)
        return lax.stop_gradient(safe_divide(kappa, of_linear))

    kappas = [measured(*x) for x in zip(waves, short, constant, modes, strict=True)]
    ranges = [_range(k, basis.leading(m)) for k, m in zip(kappas, modes, strict=True)]
    varies = jnp.max(jnp.stack([jnp.max(r.high / r.low) for r in ranges])) > EVEN
    places = lax.cond(varies, lambda: [_place(*x) for x in zip(kappas, ranges, strict=True)], lambda: kappas)
    low, high, middle = (jax.tree.unflatten(tree, x) for x in zip(*ranges, strict=True))
    return Strength(eigenvalues, low, high, middle, varies, jax.tree.unflatten(tree, places))


def _wave(like: Array, leading: int) -> Array:
    """s: +1 and −1 in turn along all axes behind the leading ones."""
    places = [lax.broadcasted_iota(jnp.int32, like.shape, axis) for axis in range(leading, like.ndim)]
    return (1 - 2 * (sum(places, jnp.zeros(like.shape, jnp.int32)) % 2)).astype(like.dtype)


def _range(kappa: Array, leading: int) -> _Range:
    axes = tuple(range(leading, kappa.ndim))
    low, high, mean = (of(kappa, axes, keepdims=True) for of in (jnp.min, jnp.max, jnp.mean))
    middle = jnp.where(jnp.abs(mean - 1) < ONE, 1, mean)
    # A component that A leaves alone, or that J does not damp, has no strength to speak of.
    known = high > 0
    return _Range(*(jnp.where(known, x, 1) for x in (jnp.maximum(low, WEAKEST * high), high, middle)))


def _place(kappa: Array, known: _Range) -> Array:
    return safe_divide(jnp.log(jnp.maximum(kappa, known.low) / known.low), jnp.log(known.high / known.low))
