"""The spatial covariance Γ̆ of all of y, as a filter uses it.

The paper's Section 3.3: the prior covariance of y is γ² Γ̆ for any Γ̆, and EK0 keeps C = Γ̆ ⊗ C̆. The gain
does not depend on Γ̆, so the filter computes with I ⊗ C̆. Γ̆ enters in four places: the calibration
(zᵀ Γ̆⁻¹ z), the evidence (log det Γ̆), standard deviations (its diagonal) and samples (a root of it).
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.linalg.fields import Field, dtype, safe_sqrt, size, total
from millipode.pde.linear import Linear
from millipode.spatial.protocol import Diagonal, Spatial
from millipode.xla.module import Module

# Up to this many components are processed one by one rather than by ``vmap``, which is faster to run and
# slower to compile.
FEW = 4


class Space(Module):
    """Γ̆ of all of y: its components are independent of each other.

    Attributes:
        models: for every leaf of y, one covariance for all of its components, or one for each.
        std: the square roots of the diagonal of Γ̆, one array per leaf that can be broadcast to the leaf.
        log_determinant: the number log det Γ̆.
        shapes: the shape of the covariances' points, for every leaf of y.
    """

    models: tuple[tuple[Spatial, ...], ...]
    std: Field
    log_determinant: Array
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def of(cls, spatial: Any, y: Field) -> Self:
        """Γ̆ of a state like y.

        Args:
            spatial: the user's covariances: one for all, one per leaf of y, or a list with one per component.
            y: a field, for its structure, shapes and dtype.
        """
        return cls._made(_grouped(spatial, y), y)

    @classmethod
    def in_modes(cls, spatial: Any, y: Field, linear: Linear, modes: Field) -> Self:
        """Γ̆ of the modes of a state like y, if the basis of a linear part diagonalises all covariances.

        Args:
            spatial: the user's covariances, as for ``of``.
            y: a field, for its structure, shapes and dtype.
            linear: the linear part.
            modes: the modes of y; one array for all components if a reaction couples them.
        """
        groups = _grouped(spatial, y)
        for group, leaf in zip(groups, jax.tree.leaves(y), strict=True):
            _components(group[0], leaf.shape)
        is_one = all(len(group) == 1 and group[0] is groups[0][0] for group in groups)
        if linear.reaction is not None:
            if not is_one:
                raise ValueError(
                    "A reaction between components makes them share one spatial covariance: pass a single "
                    "one, or drop the reaction."
                )
            groups = _grouped(spatial, modes)
        count = len(jax.tree.leaves(modes))
        if len(groups) != count and not is_one:
            raise ValueError(
                f"linear has {count} arrays of modes for {len(groups)} leaves of y, which do not correspond "
                "to each other: pass a single spatial covariance."
            )
        groups = groups if len(groups) == count else groups[:1] * count
        return cls._made([tuple(Diagonal(m.spectrum(linear)) for m in group) for group in groups], modes)

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
                    f"spatial has {len(group)} covariances for {components[0]} components of y (its shape is "
                    f"{leaf.shape}, that of each covariance {group[0].shape}): give one for each, or one for "
                    "all."
                )
            found = [_summary(model) for model in group]
            logs.append(sum(log for _, log in found) * (components[0] if len(group) == 1 else 1))
            stds.append(_spread(group[0], [std for std, _ in found], leaf.shape).astype(kind))
        shapes = tuple(group[0].shape for group in models)
        return cls(tuple(models), jax.tree.unflatten(tree, stds), jnp.asarray(sum(logs), kind), shapes)

    def quadratic(self, z: Field) -> Array:
        """The number zᵀ Γ̆⁻¹ z."""
        return total(self._each("quadratic", z))

    def correlate(self, white: Field) -> Field:
        """L x with L Lᵀ = Γ̆, like y."""
        leaves, tree = jax.tree.flatten(white)
        found = self._each("correlate", white)
        shaped = [x.reshape(leaf.shape) for x, leaf in zip(found, leaves, strict=True)]
        return jax.tree.unflatten(tree, shaped)

    def _each(self, method: str, x: Field) -> list[Array]:
        """The results of a method of the covariances, leaf by leaf, with components along the first axis."""
        leaves = zip(self.models, self.shapes, jax.tree.leaves(x), strict=True)
        return [_each(models, method, leaf.reshape(-1, *shape)) for models, shape, leaf in leaves]

    def rms(self, x: Field) -> Array:
        """The number √(xᵀ Γ̆⁻¹ x / d)."""
        return safe_sqrt(self.quadratic(x) / size(x))


def _is_model(x: Any) -> bool:
    return isinstance(x, Spatial)


def _grouped(spatial: Any, y: Field) -> list[tuple[Spatial, ...]]:
    """The covariances of each leaf of y."""
    leaves, tree = jax.tree.flatten(y)
    if _is_model(spatial):
        return [(spatial,)] * len(leaves)
    given, structure = jax.tree.flatten(spatial, is_leaf=_is_model)
    if not given or not all(map(_is_model, given)):
        raise TypeError(
            "spatial must be a spatial covariance: mp.Matern(grid, ...), mp.GMRF(...), "
            "mp.spatial.Dense(matrix), mp.spatial.Diagonal(variances), or your own that derives "
            f"from mp.spatial.Spatial; got {type(spatial).__name__}."
        )
    parts: list[Any] = []
    try:
        jax.tree.map(lambda _, part: parts.append(part), y, spatial)
    except ValueError:  # another structure
        parts = []
    if parts and all(_is_model(part) or isinstance(part, Sequence) for part in parts):
        return [(part,) if _is_model(part) else tuple(part) for part in parts]
    raise ValueError(
        f"spatial has the structure {structure}, but y has {tree}: give one covariance for all, or one "
        "per leaf of y; for an array, also a list with one per component."
    )


def _cast(model: Spatial, kind: Any) -> Spatial:
    return jax.tree.map(lambda x: x.astype(kind) if eqx.is_inexact_array(x) else x, model)


def _components(model: Spatial, shape: tuple[int, ...]) -> int:
    """The number of components of an array of this shape; raise ``ValueError`` if it does not fit."""
    points, axes = tuple(model.shape), _axes(model, shape)
    if axes is None:
        raise ValueError(
            f"spatial has a covariance of {math.prod(points)} points with the shape {points}, but y has an "
            f"array of shape {shape}, which does not end with these axes. Make the covariance for the grid "
            "of y."
        )
    return math.prod(shape[: len(shape) - axes])


def _axes(model: Spatial, shape: tuple[int, ...]) -> int | None:
    """The number of last axes that hold the points of the covariance; None if the shape does not fit."""
    for k in range(len(shape) + 1):
        last = shape[len(shape) - k :]
        if last == tuple(model.shape) or (model.is_flat and math.prod(last) == math.prod(model.shape)):
            return k
    return None


@eqx.filter_jit
def _summary(model: Spatial) -> tuple[Array, Array]:
    return safe_sqrt(model.diagonal()), model.logdet()


def _spread(model: Spatial, stds: list[Array], shape: tuple[int, ...]) -> Array:
    """Standard deviations that broadcast to this shape, from those of each component or of all alike."""
    if len(stds) == 1 and jnp.ndim(stds[0]) == 0:
        return jnp.reshape(stds[0], (1,) * len(shape))
    wide = jnp.stack([jnp.broadcast_to(std, model.shape) for std in stds])
    if len(stds) > 1:
        return wide.reshape(shape)
    axes = _axes(model, shape)
    assert axes is not None
    return wide.reshape(*(1,) * (len(shape) - axes), *shape[len(shape) - axes :])


def _each(models: tuple[Spatial, ...], method: str, x: Array) -> Array:
    """The results of a method for each component along the first axis of x, by one covariance or one each."""
    if len(models) == 1 and x.shape[0] > FEW:
        return jax.vmap(getattr(models[0], method))(x)
    models = models * x.shape[0] if len(models) == 1 else models
    return jnp.stack([getattr(model, method)(part) for model, part in zip(models, x, strict=True)])
