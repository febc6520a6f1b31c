"""Gauss–Markov random fields: Γ̆ is dense, its inverse Q is sparse (Lindgren, Rue, Lindström 2011)."""

import importlib
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jaxtyping import Array, ArrayLike, Float

from millipode.linalg.arguments import as_positive, check_positive, positive_integer
from millipode.pde.grids import Grid
from millipode.spatial.matern import Stationary, check_grid
from millipode.spatial.protocol import Spatial
from millipode.xla.ordering import stored

# Up to this many points, variances are computed exactly.
EXACT = 4096


def GMRF(precision: Any, **options: Any) -> Spatial:
    """A Gauss–Markov random field, given by its precision: Γ̆ = Q⁻¹.

    ``mp.GMRF(grid, kappa=..., alpha=...)`` is ``mp.spatial.GridField``, with Q = (κ² − Δ_h)^α of a grid;
    ``mp.GMRF(Q)`` is ``mp.spatial.SparseField``, with any sparse matrix.

    Args:
        precision: an ``mp.Grid``, or the matrix Q.
        options: the other arguments of the class.

    >>> GMRF(Grid(8), kappa=3.0).shape
    (8,)
    """
    return (
        GridField(precision, **options) if isinstance(precision, Grid) else SparseField(precision, **options)
    )


class GridField(Stationary):
    """Γ̆ = v (κ² − Δ_h)^(−α), with the stencil of a grid.

    In D dimensions this tends to a Matérn covariance of smoothness ν = α − D/2 and length √(2ν)/κ on fine
    grids. If α is an integer, zᵀ Γ̆⁻¹ z takes α/2 applications of the stencil and no transform.

    Args:
        grid: the ``mp.Grid`` that y lives on.
        kappa: κ > 0, in units of one over the grid's lengths.
        alpha: α > 0, the power.
        variance: v > 0, a factor. Only its ratios between components matter, because γ is calibrated.
    """

    grid: Grid
    precision: Float[Array, "*modes"]
    kappa: Array
    variance: Array
    shape: tuple[int, ...] = eqx.field(static=True)
    alpha: float = eqx.field(static=True)

    def __init__(self, grid: Grid, kappa: ArrayLike, alpha: float = 2, variance: ArrayLike = 1.0):
        check_grid(grid, "GMRF")
        check_positive(alpha, "GMRF: alpha")
        self.grid, self.shape, self.alpha = grid, grid.shape, alpha
        self.kappa = jnp.asarray(as_positive(kappa, "GMRF: kappa", scalar=True))
        self.variance = jnp.asarray(as_positive(variance, "GMRF: variance", scalar=True))
        self.precision = (self.kappa**2 - grid.eigenvalues()) ** alpha / self.variance

    def quadratic(self, z: Array) -> Array:
        """zᵀ Γ̆⁻¹ z = ‖A^(α/2) z‖²/v with A = κ² − Δ_h, by stencils if α is an integer."""
        if self.alpha != int(self.alpha):
            return super().quadratic(z)
        for _ in range(int(self.alpha) // 2):
            z = self._operator(z)
        other = self._operator(z) if int(self.alpha) % 2 else z
        return stored(lambda x, y: jnp.sum(x * y), z, other) / self.variance

    def _operator(self, z: Array) -> Array:
        return self.kappa**2 * z - self.grid.laplacian(z)


class SparseField(Spatial):
    """Γ̆ = Q⁻¹ for a sparse symmetric positive definite matrix Q, on any set of points.

    zᵀ Q z is one sparse product. Samples and log det Q come from a sparse Cholesky factorisation (SciPy's
    SuperLU, on the host) or, if its fill-in would be too large, from Lanczos' method (``matfree``), by which
    log det Q is an estimate. Both need ``pip install 'millipode[sparse]'``. The variances of more than 4096
    points, or of any number by Lanczos' method, are estimated from samples of E[x_i | all others] (Sidén,
    Lindgren, Bolin, Villani 2018), usually to a few per cent.

    Args:
        precision: Q, (d, d), any of SciPy's sparse matrices or an array. It is not differentiable.
        method: ``"cholesky"`` or ``"matrix-free"`` (Lanczos' method).
        probes: the number of random vectors of each estimate; errors decrease like 1/√probes.
        iterations: the number of iterations of Lanczos' method; choose some multiple of the square root of
            Q's condition number.
        key: the random key of these vectors, ``jax.random.key(0)`` by default.
    """

    is_flat = True

    precision: sparse.BCOO
    variances: Array
    log_determinant: Array
    shape: tuple[int, ...] = eqx.field(static=True)
    factor: Any = eqx.field(static=True)
    iterations: int = eqx.field(static=True)

    def __init__(
        self,
        precision: Any,
        method: Literal["cholesky", "matrix-free"] = "cholesky",
        probes: int = 128,
        iterations: int = 64,
        key: Array | None = None,
    ):
        matrix = _checked(precision)
        n = matrix.shape[0]
        if method not in ("cholesky", "matrix-free"):
            raise ValueError(f"GMRF: method must be 'cholesky' or 'matrix-free', got {method!r}.")
        probes, iterations = (
            positive_integer(probes, "GMRF: probes"),
            positive_integer(iterations, "GMRF: iterations"),
        )
        key = jax.random.key(0) if key is None else key
        self.precision = sparse.BCOO.from_scipy_sparse(matrix).sum_duplicates()
        self.shape, self.iterations = (n,), min(iterations, n)
        if method == "cholesky":
            self.factor = Factor(matrix)
            self.log_determinant = jnp.asarray(-self.factor.logdet)
        else:
            self.factor = None
            self.log_determinant = -self._estimated_logdet(key, probes)
            self._check_iterations(key)
        if method == "cholesky" and n <= EXACT:
            self.variances = jnp.asarray(self.factor.variances())
        else:
            self.variances = self._estimated_variances(matrix.diagonal(), key, probes)

    def quadratic(self, z: Array) -> Array:
        """zᵀ Q z, by one sparse product."""
        return jnp.sum(z * (self.precision @ z))

    def correlate(self, white: Array) -> Array:
        """L x with L = Q⁻¹ times a root of Q, or L = Q^(−½) by Lanczos' method."""
        return self._inverse_root(white) if self.factor is None else self.factor.correlate(white)

    def diagonal(self) -> Array:
        return self.variances

    def logdet(self) -> Array:
        return self.log_determinant

    def to_dense(self) -> Float[Array, "d d"]:
        """The inverse of Q."""
        return jnp.linalg.inv(self.precision.todense())

    def _inverse_root(self, white: Array) -> Array:
        funm, decomp = _needed("matfree.funm"), _needed("matfree.decomp")
        root = funm.dense_funm_sym_eigh(lambda x: 1 / jnp.sqrt(x))
        return funm.funm_lanczos_sym(root, decomp.tridiag_sym(self.iterations))(self._product, white)

    def _product(self, x: Array) -> Array:
        return self.precision @ x

    def _estimated_logdet(self, key: Array, probes: int) -> Array:
        funm, decomp, stochtrace = (_needed(f"matfree.{name}") for name in ("funm", "decomp", "stochtrace"))
        sampler = stochtrace.sampler_signs(jnp.zeros(self.shape), num=probes)
        integrand = funm.monte_carlo_funm_sym_logdet(decomp.tridiag_sym(self.iterations))
        return stochtrace.estimator_monte_carlo(integrand, sampler)(self._product, key)

    def _check_iterations(self, key: Array) -> None:
        """Raise ``ValueError`` unless Q Q^(−½) Q^(−½) x = x up to one per cent, for a random x."""
        white = jax.random.normal(key, self.shape)
        back = self._product(self._inverse_root(self._inverse_root(white)))
        gap = float(jnp.linalg.norm(back - white) / jnp.linalg.norm(white))
        if not (gap < 0.01 and jnp.isfinite(self.log_determinant)):
            raise ValueError(
                f"GMRF: {self.iterations} iterations of Lanczos' method do not suit this precision matrix. "
                "Either its condition number needs more, or it has few distinct eigenvalues and needs fewer, "
                "or it is not positive definite. Change iterations, or use method='cholesky'."
            )

    def _estimated_variances(self, diagonal: np.ndarray, key: Array, probes: int) -> Array:
        """Var(x_i) = 1/Q_ii + Var(E[x_i | all others]), the latter from samples."""

        def one(key: Array) -> Array:
            x = self.correlate(jax.random.normal(key, self.shape))
            return (x - self._product(x) / diagonal) ** 2

        squares = jax.lax.map(one, jax.random.split(key, probes), batch_size=min(probes, 16))
        return jnp.asarray(1 / diagonal) + jnp.mean(squares, axis=0)


_INDEFINITE = (
    "GMRF: the precision is not positive definite. If it is that of an intrinsic field, whose constants have "
    "no finite variance, add a small multiple of the identity."
)


def _checked(precision: Any) -> Any:
    """Q as a SciPy sparse matrix; raise ``ValueError`` unless it is square, finite and symmetric."""
    matrix = _needed("scipy.sparse").csc_matrix(precision, dtype=float)
    if matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
        raise ValueError(f"GMRF: the precision must be a square matrix, its shape is {matrix.shape}.")
    if not np.isfinite(matrix.data).all():
        raise ValueError("GMRF: the precision has infinite or NaN entries.")
    gap = abs(matrix - matrix.T).max()
    if gap > 1e-6 * abs(matrix).max():
        raise ValueError(
            f"GMRF: the precision is not symmetric, Q − Qᵀ has entries up to {gap:.3g}. Pass (Q + Q.T) / 2 "
            "if that is what you mean."
        )
    return matrix


class Factor:
    """Q = Pᵀ L D Lᵀ P on the host, by SuperLU without pivoting."""

    def __init__(self, matrix: Any):
        linalg = _needed("scipy.sparse.linalg")
        try:
            self.lu = linalg.splu(
                matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
            )
        except RuntimeError as error:  # exactly singular
            raise ValueError(_INDEFINITE) from error
        pivots = self.lu.U.diagonal()
        if not np.array_equal(self.lu.perm_r, self.lu.perm_c) or not (pivots > 0).all():
            raise ValueError(_INDEFINITE)
        self.root = (self.lu.L @ _needed("scipy.sparse").diags(np.sqrt(pivots))).tocsr()
        self.logdet = float(np.log(pivots).sum())

    def correlate(self, white: Array) -> Array:
        """Q⁻¹ Pᵀ L √D x, whose covariance is Q⁻¹ Q Q⁻¹."""
        shape = jax.ShapeDtypeStruct(white.shape, white.dtype)
        return jax.pure_callback(self._correlate, shape, white, vmap_method="expand_dims")

    def _correlate(self, white: Any) -> np.ndarray:
        white = np.asarray(white)
        flat = white.reshape(-1, white.shape[-1]).astype(float)
        rough = (self.root @ flat.T)[self.lu.perm_r]
        return self.lu.solve(rough).T.reshape(white.shape).astype(white.dtype)

    def variances(self) -> np.ndarray:
        """The diagonal of Q⁻¹, (d,), computed column by column."""
        n = self.root.shape[0]
        batches = [np.arange(i, min(i + 256, n)) for i in range(0, n, 256)]
        return np.concatenate(
            [self.lu.solve(np.eye(n, batch.size, -batch[0]))[batch, batch - batch[0]] for batch in batches]
        )


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"A random field with a general precision matrix needs {name.split('.')[0]}: pip install "
            "'millipode[sparse]'. On a grid, mp.GMRF(grid, kappa=...) works without it."
        ) from error
