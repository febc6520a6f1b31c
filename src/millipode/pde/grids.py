"""Regular grids: stencils, and the bases in which they are diagonal.

All stencils shift by rolling, never by padding: a rolled array fuses with the arithmetic around it and
needs the fewest exchanges when it is sharded. Beyond an edge there is a ghost cell. It equals the cell at the
edge if there is no flux through the wall (Neumann), and is its negative if the field vanishes there
(Dirichlet).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from millipode.linalg.fields import same_structure
from millipode.pde.bases import Kind, Waves
from millipode.pde.linear import Linear

Boundary = Literal["neumann", "dirichlet", "periodic"]
KINDS: dict[str, Kind] = {"neumann": "cosine", "dirichlet": "sine", "periodic": "fourier"}


def _per_axis(shape: tuple[int, ...], value: Any) -> tuple:
    """A tuple with one entry per axis."""
    return tuple(value) if isinstance(value, tuple | list) else (value,) * len(shape)


class Grid(eqx.Module):
    """Cell centres of a regular grid on a box, in any number of dimensions.

    The grid's axes are the last axes of a field; any axes before them number its components.

    Args:
        shape: the number of cells along each axis.
        lengths: the side lengths of the box; 1 by default.
        boundary: ``"neumann"`` (no flux), ``"dirichlet"`` (zero at the walls) or ``"periodic"``, for all axes
            or one per axis.

    >>> grid = Grid((4, 2), lengths=(2.0, 1.0), boundary=("periodic", "neumann"))
    >>> grid.spacing
    (0.5, 0.5)
    >>> grid.laplacian(jnp.ones((3, 4, 2))).shape
    (3, 4, 2)
    """

    shape: tuple[int, ...] = eqx.field(static=True)
    lengths: tuple[float, ...] = eqx.field(static=True)
    boundary: tuple[Boundary, ...] = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        lengths: float | Sequence[float] = 1.0,
        boundary: Boundary | Sequence[Boundary] = "neumann",
    ):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        if not shape or not all(isinstance(n, int | np.integer) and n >= 1 for n in shape):
            raise ValueError(
                f"Grid: shape must hold positive numbers of cells, got {shape!r}. Grids are regular; for "
                "others, write f with your own stencils and use mp.DiagonalEK1."
            )
        self.shape = tuple(int(n) for n in shape)
        self.lengths = tuple(float(x) for x in _per_axis(self.shape, lengths))
        self.boundary = _per_axis(self.shape, boundary)
        if len(self.lengths) != len(shape) or any(not 0 < x < float("inf") for x in self.lengths):
            raise ValueError(
                f"Grid: lengths must hold one positive length per axis, got {lengths!r} for shape {shape}."
            )
        if len(self.boundary) != len(shape) or not set(self.boundary) <= set(KINDS):
            raise ValueError(
                f"Grid: boundary must be 'neumann', 'dirichlet' or 'periodic', for all axes or one per "
                f"axis; got {boundary!r} for shape {shape}. For other conditions, add their contribution to "
                "f, and use mp.DiagonalEK1, or mp.SpectralEK1 with the nearest of these as its linear part."
            )

    @property
    def spacing(self) -> tuple[float, ...]:
        """The distance between cell centres along each axis."""
        return tuple(x / n for x, n in zip(self.lengths, self.shape, strict=True))

    @property
    def coordinates(self) -> tuple[Array, ...]:
        """The coordinates of the cell centres: one array of the grid's shape per axis."""
        axes = [(np.arange(n) + 0.5) * dx for n, dx in zip(self.shape, self.spacing, strict=True)]
        return tuple(jnp.asarray(x) for x in np.meshgrid(*axes, indexing="ij"))

    @property
    def basis(self) -> Waves:
        """The orthonormal basis in which the Laplacian is diagonal."""
        return Waves(self.shape, tuple(KINDS[b] for b in self.boundary))

    def laplacian(self, u: Float[Array, "*field"]) -> Float[Array, "*field"]:
        """Δu by second-order central differences."""
        self._check(u)
        total: Any = 0
        for i, dx in enumerate(self.spacing):
            left, right = self._neighbours(u, i)
            total = total + (left + right - 2 * u) / dx**2
        return total

    def diffuse(
        self,
        k: ArrayLike | tuple[ArrayLike, ...],
        u: Float[Array, "*field"],
        mean: Literal["arithmetic", "harmonic"] = "arithmetic",
    ) -> Float[Array, "*field"]:
        """∇·(k∇u) for a coefficient that varies in space: what leaves a cell enters its neighbour.

        The stencil is compact and of second order where k is smooth. With the same k everywhere it is that of
        k ``laplacian(u)``.

        Args:
            k: the coefficient at cell centres: a number, or an array that broadcasts against u; or a tuple
                with one of them per axis.
            u: the field.
            mean: what k is between two cells. The harmonic mean is right for layers in a row, whose k jumps;
                it needs k > 0.

        >>> grid = Grid((2, 2))
        >>> k = 1 + grid.coordinates[0]
        >>> float(jnp.sum(grid.diffuse(k, jnp.array([[1.0, 2.0], [3.0, 5.0]]))))  # nothing is lost
        0.0
        """
        self._check(u)
        if mean not in ("arithmetic", "harmonic"):
            raise ValueError(f"Grid: mean must be 'arithmetic' or 'harmonic', got {mean!r}.")
        per_axis = k if isinstance(k, tuple) else (k,) * len(self.shape)
        if len(per_axis) != len(self.shape):
            raise ValueError(f"Grid: one coefficient per axis, got {len(per_axis)} for shape {self.shape}.")
        total: Any = 0
        for i, (k, dx) in enumerate(zip(per_axis, self.spacing, strict=True)):
            try:
                own = jnp.broadcast_to(jnp.asarray(k, u.dtype), u.shape)
            except ValueError as error:
                message = f"Grid: k has the shape {np.shape(k)} and the field {u.shape}; they must broadcast."
                raise ValueError(message) from error
            # Beyond a wall, k is what it is at the wall.
            fluxes = (
                (2 * own * other / (own + other) if mean == "harmonic" else (own + other) / 2) * (beyond - u)
                for other, beyond in zip(self._around(own, i, own), self._neighbours(u, i), strict=True)
            )
            total = total + sum(fluxes) / dx**2
        return total

    def laplacian_diagonal(self, u: Float[Array, "*field"]) -> Float[Array, "*field"]:
        """The diagonal of the Laplacian's matrix, as a field like u."""
        self._check(u)
        total = jnp.zeros_like(u)
        for i, dx in enumerate(self.spacing):
            own = {"neumann": 1, "dirichlet": -1, "periodic": 0}[self.boundary[i]]
            at_edges = sum(self._at_edge(u, i, by).astype(u.dtype) for by in (1, -1))
            alone = 2 if self.boundary[i] == "periodic" and self.shape[i] == 1 else 0
            total = total + (own * at_edges + alone - 2) / dx**2
        return total

    def gradient(self, u: Float[Array, "*field"]) -> tuple[Float[Array, "*field"], ...]:
        """(∂u/∂x, …) by second-order central differences, one field per axis."""
        return tuple(self.difference(u, i) for i in range(len(self.shape)))

    def divergence(self, flux: Sequence[Float[Array, "*field"]]) -> Float[Array, "*field"]:
        """∂F_x/∂x + … by central differences: the negative transpose of ``gradient``.

        There is no flux through Neumann walls, so mass is conserved.

        Args:
            flux: one field per axis.
        """
        if len(flux) != len(self.shape):
            raise ValueError(f"Grid: divergence takes {len(self.shape)} fields, got {len(flux)}.")
        total: Any = 0
        for i, (component, dx) in enumerate(zip(flux, self.spacing, strict=True)):
            self._check(component)
            left, right = self._neighbours(component, i, flipped=True)
            total = total + (right - left) / (2 * dx)
        return total

    def difference(
        self, u: Float[Array, "*field"], axis: int, side: Literal["central", "left", "right"] = "central"
    ) -> Float[Array, "*field"]:
        """∂u/∂x along one of the grid's axes: central (second order), or one-sided (first order)."""
        self._check(u)
        dx, (left, right) = self.spacing[axis], self._neighbours(u, axis)
        if side == "central":
            return (right - left) / (2 * dx)
        if side not in ("left", "right"):
            raise ValueError(f"Grid: side must be 'central', 'left' or 'right', got {side!r}.")
        return (u - left) / dx if side == "left" else (right - u) / dx

    def advection(
        self,
        velocity: Sequence[ArrayLike],
        u: Float[Array, "*field"],
        scheme: Literal["upwind", "central"] = "upwind",
    ) -> Float[Array, "*field"]:
        """v·∇u by upwind differences (first order, without oscillations) or central ones (second order).

        Args:
            velocity: v, one number or field per axis.
            u: the field that is carried along; its equation has −v·∇u on the right-hand side.
            scheme: ``"upwind"`` or ``"central"``.
        """
        if len(velocity) != len(self.shape):
            raise ValueError(f"Grid: one velocity per axis, got {len(velocity)} for shape {self.shape}.")
        if scheme not in ("upwind", "central"):
            raise ValueError(f"Grid: scheme must be 'upwind' or 'central', got {scheme!r}.")
        total: Any = 0
        for i, v in enumerate(velocity):
            if scheme == "central":
                total = total + v * self.difference(u, i)
                continue
            v = jnp.asarray(v, u.dtype)
            downwind = jnp.minimum(v, 0) * self.difference(u, i, "right")
            total = total + jnp.maximum(v, 0) * self.difference(u, i, "left") + downwind
        return total

    def eigenvalues(self, continuous: bool = False) -> Float[np.ndarray, "*modes"]:
        """The eigenvalues of the Laplacian, one per mode of ``basis``.

        Args:
            continuous: whether to return those of the differential operator rather than of its stencil.
        """
        phases = self.basis.frequencies()
        if continuous:
            values = [-((p / dx) ** 2) for p, dx in zip(phases, self.spacing, strict=True)]
        else:
            values = [-((2 / dx * np.sin(p / 2)) ** 2) for p, dx in zip(phases, self.spacing, strict=True)]
        return self.basis.along_axes(values)

    def diffusion(
        self,
        coefficients: PyTree[ArrayLike],
        shift: PyTree[ArrayLike] = 0.0,
        reaction: ArrayLike | None = None,
    ) -> Linear:
        """The linear part aΔu + s u + R u of an equation, for ``mp.SpectralEK1(linear=...)``.

        Args:
            coefficients: a, one number; or one per component, in an array with the shape of the axes before
                the grid's, or in a pytree like y.
            shift: s, a constant reaction rate, in the same form as a.
            reaction: R, a matrix with one row and one column per component of y, to be given if a linear
                reaction between them is stiff. It makes a step several times more expensive.

        >>> grid = Grid((8, 8))
        >>> grid.diffusion({"u": 1e-3, "v": 1e-2}).eigenvalues["u"].shape
        (8, 8)
        """
        laplacian = self.eigenvalues()

        def leaf(a: ArrayLike, s: ArrayLike) -> np.ndarray:
            a, s = (np.reshape(x, (*np.shape(x), *(1,) * laplacian.ndim)) for x in (a, s))
            return a * laplacian + s

        shifts = shift
        if not same_structure(shift, coefficients):
            shifts = jax.tree.map(lambda _: shift, coefficients)
        matrix = None if reaction is None else np.asarray(reaction, float)
        return Linear(self.basis, jax.tree.map(leaf, coefficients, shifts), matrix, self.lengths)

    def operator(self, function: Callable[[np.ndarray], Any], continuous: bool = False) -> Linear:
        """Any function of the Laplacian as a linear part, for ``mp.SpectralEK1(linear=...)``.

        Growth is not stiff, so leave growing modes out. The example does so for long waves.

        Args:
            function: takes the array of the Laplacian's eigenvalues, and returns those of the linear part, or
                a pytree of them.
            continuous: whether f contains the differential operator itself rather than its stencil.

        >>> grid = Grid(64, lengths=32.0, boundary="periodic")
        >>> linear = grid.operator(lambda lap: np.minimum(-lap - lap**2, 0))  # −∂²/∂x² − ∂⁴/∂x⁴
        """
        return Linear(self.basis, function(self.eigenvalues(continuous)), lengths=self.lengths)

    def _check(self, u: Array) -> None:
        if u.shape[u.ndim - len(self.shape) :] != self.shape or u.ndim < len(self.shape):
            raise ValueError(
                f"Grid: a field of shape {u.shape} does not end with the grid's axes {self.shape}."
            )

    def _neighbours(self, u: Array, i: int, flipped: bool = False) -> tuple[Array, Array]:
        """The values on the left and right along axis i; ``flipped`` negates ghost cells, as for fluxes."""
        return self._around(u, i, u if (self.boundary[i] == "neumann") != flipped else -u)

    def _around(self, u: Array, i: int, ghost: Array) -> tuple[Array, Array]:
        """The values on the left and right along axis i, and those of ``ghost`` beyond walls."""
        axis = i - len(self.shape)
        left, right = _rolled(u, 1, axis), _rolled(u, -1, axis)
        if self.boundary[i] == "periodic":
            return left, right
        return (
            jnp.where(self._at_edge(u, i, 1), ghost, left),
            jnp.where(self._at_edge(u, i, -1), ghost, right),
        )

    def _at_edge(self, u: Array, i: int, by: int) -> Array:
        axis = u.ndim - len(self.shape) + i
        place = lax.broadcasted_iota(jnp.int32, u.shape, axis)
        return place == (0 if by == 1 else u.shape[axis] - 1)


def _rolled(u: Array, by: int, axis: int) -> Array:
    """``jnp.roll``. XLA:CPU fuses it with the operations that follow unless its axis is the very last."""
    return jnp.roll(u[..., None], by, axis - 1)[..., 0]
