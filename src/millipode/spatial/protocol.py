"""What a model of space is, and what a filter makes of it.

The paper's Section 3.3: the prior covariance of y is γ² Γ̆ for any Γ̆, and EK0 keeps C = Γ̆ ⊗ C̆. The gain
does not depend on Γ̆, so the filter computes with I ⊗ C̆. Γ̆ enters in four places: the calibration
(zᵀ Γ̆⁻¹ z), the evidence (and log det Γ̆), standard deviations (its diagonal) and samples (a root of it).
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from millipode.basis import Waves
from millipode.covariance.protocol import DiagonalInnovation, Innovation, RootInnovation
from millipode.fields import (
    Field,
    Scale,
    dtype,
    is_shared,
    map_leaves,
    safe_divide,
    safe_sqrt,
    size,
    total,
)
from millipode.spectral import Linear

# Up to this many components, each goes through a model by itself: faster, and slower to compile.
FEW = 4


class Spatial(eqx.Module):
    """Γ̆: a positive definite covariance between points in space, of one component of y.

    To write your own, derive from this class (an ``equinox.Module``), declare ``shape`` and write the four
    methods; everything else follows. They are called inside ``jit``, so they are made of JAX operations.

    Attributes:
        shape: of the points, which are the last axes of y; what comes before them are components, which are
            independent of each other.
        is_flat: whether the points have no order, and may come along any number of axes.
    """

    shape: eqx.AbstractVar[tuple[int, ...]]
    is_flat: ClassVar[bool] = False

    @abc.abstractmethod
    def quadratic(self, z: Float[Array, "*shape"]) -> Array:
        """The number zᵀ Γ̆⁻¹ z."""

    @abc.abstractmethod
    def correlate(self, white: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """L x for any L with L Lᵀ = Γ̆: turns white noise into a sample."""

    @abc.abstractmethod
    def diagonal(self) -> Array:
        """The variance of each point; or one number for all of them."""

    @abc.abstractmethod
    def logdet(self) -> Array:
        """The number log det Γ̆."""

    def sample(self, key: Array) -> Float[Array, "*shape"]:
        """A draw of N(0, Γ̆)."""
        return self.correlate(jax.random.normal(key, self.shape, self._kind))

    def to_dense(self) -> Float[Array, "d d"]:
        """Γ̆ itself. For tests and small problems: O(d²)."""
        d = math.prod(self.shape)
        columns = jax.vmap(self.correlate)(jnp.eye(d, dtype=self._kind).reshape(d, *self.shape))
        root = columns.reshape(d, d)
        return root.T @ root

    def spectrum(self, waves: Waves) -> Array:
        """The variance of each mode, for models that these waves diagonalise."""
        raise ValueError(
            f"SpectralEK1 needs a stationary model on its grid, mp.Matern(grid, ...) or mp.GMRF(grid, ...): "
            f"{type(self).__name__} couples the modes of that grid. Use one of these, or mp.EK0."
        )

    @property
    def _kind(self) -> Any:
        kinds = [x.dtype for x in jax.tree.leaves(self) if eqx.is_inexact_array(x)]
        return jnp.result_type(*kinds) if kinds else jnp.result_type(float)


class Diagonal(Spatial):
    """Γ̆ = diag(v): independent points with known relative variances.

    Args:
        variances: v, positive, of the shape of y or of its last axes.

    >>> float(Diagonal([1.0, 4.0]).quadratic(jnp.array([1.0, 2.0])))
    2.0
    """

    variances: Float[Array, "*shape"]
    shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, variances: ArrayLike):
        self.variances = jnp.asarray(as_positive(variances, "Diagonal: variances"))
        self.shape = self.variances.shape

    def quadratic(self, z: Array) -> Array:
        """Σ z²/v."""
        return jnp.sum(z**2 / self.variances)

    def correlate(self, white: Array) -> Array:
        """√v x."""
        return jnp.sqrt(self.variances) * white

    def diagonal(self) -> Array:
        """V."""
        return self.variances

    def logdet(self) -> Array:
        """Σ log v."""
        return jnp.sum(jnp.log(self.variances))


class Space(eqx.Module):
    """Γ̆ of all of y: its components are independent of each other.

    Attributes:
        models: for every leaf of y one for all of its components, or one for each.
        std: the roots of the diagonal, like y or what can be broadcast to that.
        log_determinant: log det Γ̆.
        shapes: of the models' points, leaf by leaf.
    """

    models: tuple[tuple[Spatial, ...], ...]
    std: Field
    log_determinant: Array
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def of(cls, spatial: Any, y: Field) -> Self:
        """The models that a user gave for a state like y."""
        return cls._made(_grouped(spatial, y), y)

    @classmethod
    def in_modes(cls, spatial: Any, y: Field, linear: Linear, modes: Field) -> Self:
        """The same for the modes of such a state, if the waves of a linear part diagonalise all models.

        Where a reaction couples components, their modes are one array.
        """
        groups, waves = _grouped(spatial, y), linear.basis
        assert isinstance(waves, Waves)
        for group, leaf in zip(groups, jax.tree.leaves(y), strict=True):
            _components(group[0], leaf.shape)
        for model in (model for group in groups for model in group):
            lengths = getattr(getattr(model, "grid", None), "lengths", linear.lengths)
            if linear.lengths is not None and lengths != linear.lengths:
                raise ValueError(
                    f"spatial lives on a grid with sides of length {lengths}, but linear on one with "
                    f"{linear.lengths}. Make both from the same mp.Grid."
                )
        if linear.reaction is not None:
            if not all(len(group) == 1 and group[0] is groups[0][0] for group in groups):
                raise ValueError(
                    "A reaction between components makes them share one model of space: pass a single one, "
                    "or drop the reaction."
                )
            groups = _grouped(spatial, modes)
        return cls._made([tuple(Diagonal(m.spectrum(waves)) for m in group) for group in groups], modes)

    @classmethod
    def _made(cls, groups: list[tuple[Spatial, ...]], y: Field) -> Self:
        leaves, tree = jax.tree.flatten(y)
        kind = dtype(y)
        models = [tuple(_cast(model, kind) for model in group) for group in groups]
        stds, logs = [], []
        for group, leaf in zip(models, leaves, strict=True):
            components = [_components(model, leaf.shape) for model in group]
            if len(group) > 1 and components[0] != len(group):
                raise ValueError(
                    f"spatial has {len(group)} models for {components[0]} components of y (its shape is "
                    f"{leaf.shape}, that of each model {group[0].shape}): give one for each, or one for all."
                )
            found = [_summary(model) for model in group]
            logs.append(sum(log for _, log in found) * (components[0] if len(group) == 1 else 1))
            stds.append(_spread(group[0], [std for std, _ in found], leaf.shape).astype(kind))
        shapes = tuple(group[0].shape for group in models)
        return cls(tuple(models), jax.tree.unflatten(tree, stds), jnp.asarray(sum(logs), kind), shapes)

    def quadratic(self, z: Field) -> Array:
        """zᵀ Γ̆⁻¹ z."""
        return total(self._each("quadratic", z))

    def correlate(self, white: Field) -> Field:
        """L x with L Lᵀ = Γ̆."""
        leaves, tree = jax.tree.flatten(white)
        found = self._each("correlate", white)
        shaped = [x.reshape(leaf.shape) for x, leaf in zip(found, leaves, strict=True)]
        return jax.tree.unflatten(tree, shaped)

    def _each(self, method: str, x: Field) -> list[Array]:
        """Leaf by leaf."""
        leaves = zip(self.models, self.shapes, jax.tree.leaves(x), strict=True)
        return [_each(models, method, leaf.reshape(-1, *shape)) for models, shape, leaf in leaves]

    def rms(self, x: Field) -> Array:
        """√(xᵀ Γ̆⁻¹ x / d)."""
        return safe_sqrt(self.quadratic(x) / size(x))


class Correlated(Innovation):
    """S = Γ̆^½ S̃ Γ̆^½, for an S̃ that commutes with Γ̆: s² I, or diagonal in the basis where Γ̆ is.

    Attributes:
        white: S̃.
        space: Γ̆.
        form: zᵀ Γ̆⁻¹ z for the residual z of the step.
    """

    white: RootInnovation
    space: Space
    form: Array

    def quadratic(self, z: Field) -> Array:
        """A shared scale is left outside: zᵀ Γ̆⁻¹ z is known."""
        if isinstance(self.white, DiagonalInnovation) and is_shared(self.white.scale, z):
            scale = self.white.scale
            return self.form * safe_divide(jnp.ones_like(scale), scale) ** 2
        return self.space.quadratic(self.white.whiten(z))

    def rms(self, z: Field) -> Array:
        """√(zᵀ S⁻¹ z / d)."""
        return safe_sqrt(self.quadratic(z) / size(z))

    def std(self) -> Scale:
        """The product of both."""
        return map_leaves(jnp.multiply, self.space.std, self.white.std())

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """The sum of both; nothing if S vanishes."""
        log, rank = self.white.log_determinant(z)
        return log + jnp.where(rank > 0, self.space.log_determinant, 0), rank


def correlated(space: Space | None, innovation: RootInnovation, form: Array | None) -> Innovation:
    """The innovation of y, from that of y in coordinates where Γ̆ is the identity."""
    return innovation if space is None or form is None else Correlated(innovation, space, form)


def _is_model(x: Any) -> bool:
    return isinstance(x, Spatial)


def _grouped(spatial: Any, y: Field) -> list[tuple[Spatial, ...]]:
    """The models of each leaf."""
    leaves, tree = jax.tree.flatten(y)
    if _is_model(spatial):
        return [(spatial,)] * len(leaves)
    given, structure = jax.tree.flatten(spatial, is_leaf=_is_model)
    if not given or not all(map(_is_model, given)):
        raise TypeError(
            "spatial must be a model of space: mp.Matern(grid, ...), mp.GMRF(...), mp.spatial.Dense(matrix), "
            "mp.spatial.Diagonal(variances), or your own that derives from mp.spatial.Spatial; got "
            f"{type(spatial).__name__}."
        )
    parts: list[Any] = []
    try:
        jax.tree.map(lambda _, part: parts.append(part), y, spatial)
    except ValueError:  # another structure
        parts = []
    if parts and all(_is_model(part) or isinstance(part, Sequence) for part in parts):
        return [(part,) if _is_model(part) else tuple(part) for part in parts]
    raise ValueError(
        f"spatial has the structure {structure}, but y has {tree}: give one model for all, or one per leaf "
        "of y; for an array, also a list with one per component."
    )


def _cast(model: Spatial, kind: Any) -> Spatial:
    return jax.tree.map(lambda x: x.astype(kind) if eqx.is_inexact_array(x) else x, model)


def _components(model: Spatial, shape: tuple[int, ...]) -> int:
    """How many of them an array of this shape has."""
    points, axes = tuple(model.shape), _axes(model, shape)
    if axes is None:
        raise ValueError(
            f"spatial has a model of {math.prod(points)} points with the shape {points}, but y has an array "
            f"of shape {shape}, which does not end with these axes. Make the model for the grid of y."
        )
    return math.prod(shape[: len(shape) - axes])


def _axes(model: Spatial, shape: tuple[int, ...]) -> int | None:
    """Along how many of the last axes its points come; None if they do not."""
    for k in range(len(shape) + 1):
        last = shape[len(shape) - k :]
        if last == tuple(model.shape) or (model.is_flat and math.prod(last) == math.prod(model.shape)):
            return k
    return None


@eqx.filter_jit
def _summary(model: Spatial) -> tuple[Array, Array]:
    return safe_sqrt(model.diagonal()), model.logdet()


def _spread(model: Spatial, stds: list[Array], shape: tuple[int, ...]) -> Array:
    """For an array of this shape, from one per component or one for all."""
    if len(stds) == 1 and jnp.ndim(stds[0]) == 0:
        return jnp.reshape(stds[0], (1,) * len(shape))
    wide = jnp.stack([jnp.broadcast_to(std, model.shape) for std in stds])
    if len(stds) > 1:
        return wide.reshape(shape)
    axes = _axes(model, shape)
    assert axes is not None
    return wide.reshape(*(1,) * (len(shape) - axes), *shape[len(shape) - axes :])


def _each(models: tuple[Spatial, ...], method: str, x: Array) -> Array:
    """One result per component, by one model for all of them or by one for each."""
    if len(models) == 1 and x.shape[0] > FEW:
        return jax.vmap(getattr(models[0], method))(x)
    models = models * x.shape[0] if len(models) == 1 else models
    return jnp.stack([getattr(model, method)(part) for model, part in zip(models, x, strict=True)])


def stored(function: Callable[..., Array], *arrays: Array) -> Array:
    """A number that is a function of arrays; NaN if the first is not finite.

    In a branch, so that they are stored before it begins: XLA:CPU makes slow loops of sums over what a
    stencil or a transform has left.
    """
    first = arrays[0].ravel()[0]
    return lax.cond(jnp.isfinite(first), function, lambda *_: jnp.full_like(first, jnp.nan), *arrays)


def as_positive(x: Any, name: str, scalar: bool = False) -> Any:
    """A parameter as an array that is traced, not hashed; positive and finite where that can be seen."""
    if scalar and np.ndim(x):
        raise ValueError(f"{name} must be a single number, got an array of shape {np.shape(x)}.")
    if isinstance(x, jax.core.Tracer):
        return x
    value = np.asarray(x, float) if not isinstance(x, jax.Array) else x
    if not np.all(np.isfinite(value)) or not np.all(np.asarray(value) > 0):
        raise ValueError(f"{name} must be positive and finite, got {x}.")
    return value
