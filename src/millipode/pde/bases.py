"""Orthonormal bases in which Laplacians on regular grids are diagonal: cosine, sine, Fourier.

The paper's Proposition 2 holds in any orthonormal basis V: a filter for ŷ = Vᵀy has the same model as one for
y. Along each axis the basis vectors are sampled waves, and each transform is one real FFT of permuted data
(Makhoul 1980), whose half spectrum of complex numbers is stored as real ones: cos_k at position k, sin_k at
n − k.

Axes are transformed one after the other: always the last one, with a rotation of the axes in between. The
axes of the modes keep the order that results from this. Only this module needs to know that order.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.linalg.fields import Field, safe_sqrt

Kind = Literal["cosine", "sine", "fourier"]


class Basis(eqx.Module):
    """An orthonormal basis V of fields: ``to_modes`` is Vᵀ, ``from_modes`` is V.

    To write your own, derive from this class (an ``equinox.Module``) and write the three abstract methods, in
    JAX operations. They are called with fields like y and with their coefficients ("modes"), without any
    further axes; batches are handled outside, by ``jax.vmap``.

    Attributes:
        is_trivial: whether V = I, so that the modes are the unknowns and transforms can be left out.
    """

    is_trivial: ClassVar[bool] = False

    @abc.abstractmethod
    def to_modes(self, y: Field) -> Field:
        """The coefficients Vᵀy of a field; their structure and shapes may differ from those of y."""

    @abc.abstractmethod
    def from_modes(self, modes: Field) -> Field:
        """The field with these coefficients."""

    @abc.abstractmethod
    def variance(self, variances: Field) -> Field:
        """The diagonal of V diag(s) Vᵀ, like y: the variances that independent modes give to each point.

        Args:
            variances: s, like the modes.
        """

    def std(self, stds: Field) -> Field:
        """The standard deviations of all points, from those of independent modes."""
        return jax.tree.map(safe_sqrt, self.variance(jax.tree.map(jnp.square, stds)))

    def leading(self, leaf: Array) -> int:
        """The number of axes of a leaf of the modes in front of the transformed ones, for its components."""
        return 0

    def check(self, y: Field) -> None:
        """Raise ``ValueError`` if fields like y cannot be expressed in this basis."""


class Identity(Basis):
    """V = I: every unknown is its own mode."""

    is_trivial: ClassVar[bool] = True

    def to_modes(self, y: Field) -> Field:
        return y

    def from_modes(self, modes: Field) -> Field:
        return modes

    def variance(self, variances: Field) -> Field:
        return variances

    def std(self, stds: Field) -> Field:
        """The same standard deviations; here they may also be one number for all unknowns."""
        return stds


class Waves(Basis):
    """Products of cosines, sines or both (Fourier), one kind per axis, on the last axes of every leaf.

    For N cells along an axis, with centres at (i + ½)/N of its length, up to normalisation:

    - cosine: cos(πk(i+½)/N), k = 0 … N−1: no flux through the ends;
    - sine: sin(πk(i+½)/N), k = N … 1, in that order: zero at the ends;
    - Fourier: cos(2πki/N), k = 0 … ⌊N/2⌋, then sin(2πki/N), k = ⌈N/2⌉−1 … 1: periodic.

    Args:
        shape: the number of cells along each axis.
        kinds: the kind of each axis.

    >>> waves = Waves((4,), ("cosine",))
    >>> bool(jnp.allclose(waves.to_modes(jnp.ones(4)), jnp.array([2.0, 0.0, 0.0, 0.0]), atol=1e-6))
    True
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    kinds: tuple[Kind, ...] = eqx.field(static=True, converter=tuple)

    def __check_init__(self) -> None:
        if not self.shape or len(self.shape) != len(self.kinds) or any(n < 1 for n in self.shape):
            raise ValueError(f"Waves: one kind per axis, got shape {self.shape} and kinds {self.kinds}.")
        if not set(self.kinds) <= {"cosine", "sine", "fourier"}:
            raise ValueError(f"Waves: kinds are 'cosine', 'sine' and 'fourier', got {self.kinds}.")

    def to_modes(self, y: Field) -> Field:
        """Vᵀy, by one FFT per axis."""
        return jax.tree.map(self._analyse, y)

    def from_modes(self, modes: Field) -> Field:
        """The field with these coefficients, by one FFT per axis."""
        return jax.tree.map(lambda x: self._synthesise(x, _synthesise), modes)

    def variance(self, variances: Field) -> Field:
        """One FFT per axis gives the variances: squares of waves are waves of twice the frequency."""
        return jax.tree.map(lambda x: self._synthesise(x, _spread), variances)

    def leading(self, leaf: Array) -> int:
        """The number of axes in front of the grid's."""
        return leaf.ndim - len(self.shape)

    def check(self, y: Field) -> None:
        """Raise ``ValueError`` unless every leaf ends with the axes of the grid."""
        for leaf in jax.tree.leaves(y):
            if leaf.shape[leaf.ndim - len(self.shape) :] != self.shape or leaf.ndim < len(self.shape):
                raise ValueError(
                    f"linear lives on a grid of shape {self.shape}, but y has an array of shape "
                    f"{leaf.shape}, which does not end with these axes."
                )

    def along_axes(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """For every mode, the sum over the axes of the values of its waves, as an array like the modes.

        Args:
            values: one array per axis, with one value per wave along that axis.
        """
        return self.arranged(np.asarray(sum(np.ix_(*values))))

    def arranged(self, values: Any) -> Any:
        """The same array with its axes in the order of those of the modes.

        Args:
            values: an array with one axis per axis of the grid, in the grid's order.
        """
        for _ in self.shape[1:]:
            values = (
                np.moveaxis(values, -1, 0) if isinstance(values, np.ndarray) else jnp.moveaxis(values, -1, 0)
            )
        return values

    def frequencies(self) -> tuple[np.ndarray, ...]:
        """The phase from one cell to the next, per axis and wave: πk/N, or 2πk/N around a periodic axis."""
        return tuple(_frequencies(n, kind) for n, kind in zip(self.shape, self.kinds, strict=True))

    def _analyse(self, x: Array) -> Array:
        axes = len(self.shape)
        for i, kind in enumerate(reversed(self.kinds)):
            x = jnp.moveaxis(x, -1, -axes) if i else x
            x = _analyse(x, kind)
        return x

    def _synthesise(self, x: Array, along_last: Callable[[Array, Kind], Array]) -> Array:
        axes = len(self.shape)
        for i, kind in enumerate(self.kinds):
            x = jnp.moveaxis(x, -axes, -1) if i else x
            x = along_last(x, kind)
        return x


class Stacked(Basis):
    """The modes of another basis, with all c components stacked along one leading axis: (c, *modes).

    Attributes:
        each: the basis of each component.
        tree: the structure of the modes.
        components: the shape of each of their leaves in front of the transformed axes.
    """

    each: Basis
    tree: Any = eqx.field(static=True)
    components: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def of(cls, basis: Basis, y: Field) -> Self:
        """The basis that stacks the modes of another one, for fields like y."""
        leaves, tree = jax.tree.flatten(jax.eval_shape(basis.to_modes, y))
        return cls(basis, tree, tuple(leaf.shape[: basis.leading(leaf)] for leaf in leaves))

    def to_modes(self, y: Field) -> Array:
        """Vᵀy, with all components in one array (c, *modes)."""
        return self.stack(self.each.to_modes(y))

    def stack(self, modes: Field) -> Array:
        """One array (c, *modes), from modes in the structure of the other basis."""
        leaves = jax.tree.leaves(modes)
        return jnp.concatenate([x.reshape(-1, *x.shape[self.each.leading(x) :]) for x in leaves])

    def from_modes(self, modes: Array) -> Field:
        """Split the array (c, *modes) into components, and transform each of them back."""
        return self.each.from_modes(self._apart(modes))

    def variance(self, variances: Array) -> Field:
        """The variances of all points, component by component, from an array (c, *modes)."""
        return self.each.variance(self._apart(variances))

    def leading(self, leaf: Array) -> int:
        """The number 1, for the axis of the components."""
        return 1

    def _apart(self, modes: Array) -> Field:
        counts = np.cumsum([math.prod(shape) for shape in self.components])[:-1]
        parts = jnp.split(modes, counts)
        leaves = [x.reshape(*shape, *x.shape[1:]) for x, shape in zip(parts, self.components, strict=True)]
        return jax.tree.unflatten(self.tree, leaves)


def _frequencies(n: int, kind: Kind) -> np.ndarray:
    k = np.arange(n)
    if kind == "fourier":
        return 2 * np.pi * np.minimum(k, n - k) / n
    return np.pi * (k if kind == "cosine" else n - k) / n


def _twiddles(n: int, kind: Kind, dtype: jnp.dtype) -> np.ndarray:
    """The factors, phases and norms, that turn the half spectrum of the permuted data into coefficients."""
    k = np.arange(n // 2 + 1)
    norms = np.full(k.shape, np.sqrt(2 / n))
    norms[0] = np.sqrt(1 / n)
    if kind == "fourier":
        norms[2 * k == n] = np.sqrt(1 / n)
        return norms.astype(dtype)
    return (norms * np.exp(-0.5j * np.pi * k / n)).astype(np.result_type(dtype, np.complex64))


def _analyse(x: Float[Array, "*batch n"], kind: Kind) -> Float[Array, "*batch n"]:
    """The coefficients of the waves along the last axis."""
    n = x.shape[-1]
    spectrum = jnp.fft.rfft(_permuted(x, kind)) * _twiddles(n, kind, x.dtype)
    return _joined(spectrum.real, -spectrum.imag[..., _paired(n)][..., ::-1])


def _synthesise(x: Float[Array, "*batch n"], kind: Kind) -> Float[Array, "*batch n"]:
    """The inverse of ``_analyse``, which is also its transpose."""
    n = x.shape[-1]
    real, imaginary = x[..., : n // 2 + 1], -jnp.flip(x[..., n // 2 + 1 :], -1)
    twiddles = _twiddles(n, kind, x.dtype)
    if kind != "fourier" and n % 2 == 0:
        # One real number stores both parts of the entry in the middle of the spectrum.
        imaginary = _joined(imaginary, -real[..., -1:])
    ends = [(0, 0)] * (x.ndim - 1) + [(1, n // 2 - imaginary.shape[-1])]
    spectrum = jax.lax.complex(real, jnp.pad(imaginary, ends)) / twiddles
    return _restored(jnp.fft.irfft(spectrum, n), kind)


def _joined(first: Array, second: Array) -> Array:
    """Concatenate along the last axis. XLA:CPU fuses a concatenation unless its axis is the very last."""
    return jnp.concatenate([first[..., None], second[..., None]], axis=-2)[..., 0]


def _paired(n: int) -> slice:
    """The indices at which the half spectrum has an imaginary part of its own."""
    return slice(1, (n + 1) // 2)


def _permuted(x: Array, kind: Kind) -> Array:
    """The even cells, then the odd ones in reverse order; for sines, odd cells change their sign."""
    if kind == "fourier":
        return x
    odd = x[..., 1::2][..., ::-1]
    return _joined(x[..., ::2], -odd if kind == "sine" else odd)


def _restored(x: Array, kind: Kind) -> Array:
    """The inverse of ``_permuted``."""
    if kind == "fourier":
        return x
    half = (x.shape[-1] + 1) // 2
    odd = x[..., half:][..., ::-1]
    return _interleaved(x[..., :half], -odd if kind == "sine" else odd, x.shape[-1])


def _interleaved(even: Array, odd: Array, n: int) -> Array:
    missing = even.shape[-1] - odd.shape[-1]
    odd = jnp.pad(odd, [(0, 0)] * (odd.ndim - 1) + [(0, missing)]) if missing else odd
    pairs = jnp.stack([even, odd], axis=-1)
    return pairs.reshape(*even.shape[:-1], 2 * even.shape[-1])[..., :n]


def _spread(s: Float[Array, "*batch n"], kind: Kind) -> Float[Array, "*batch n"]:
    """Σ_k V_ik² s_k, from cos² = (1 + cos 2·)/2 and sin² = (1 − cos 2·)/2.

    The squares of wave k and of its partner n − k contain the same doubled frequency, with opposite signs.
    The square of a sine is that of the cosine in the same place.
    """
    n = s.shape[-1]
    first = s[..., _paired(n)]
    difference = (first - jnp.flip(s[..., n - first.shape[-1] :], -1)) / math.sqrt(2 * n)
    doubled = _joined(jnp.zeros_like(s[..., :1]), difference)
    waves = _interleaved(doubled, jnp.zeros_like(doubled), n)
    if kind == "fourier":
        # Frequencies beyond the middle are aliases of lower ones; at the middle, the norm differs.
        low, high = waves[..., : n // 2 + 1], waves[..., n // 2 + 1 :]
        folded = jnp.flip(high, -1)
        low = low.at[..., 1 : 1 + folded.shape[-1]].add(folded)
        if n % 2 == 0:
            low = low.at[..., -1].multiply(math.sqrt(2))
        waves = _joined(low, jnp.zeros_like(high))
    mean = jnp.mean(s, axis=-1, keepdims=True)
    return mean + _synthesise(waves, "fourier" if kind == "fourier" else "cosine")
