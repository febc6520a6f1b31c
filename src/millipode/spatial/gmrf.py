"""Gauss–Markov random fields: Γ̆ is dense, its inverse Q is sparse (Lindgren, Rue, Lindström 2011)."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jaxtyping import Array, ArrayLike, Float

from millipode.grids import Grid
from millipode.spatial.matern import Stationary, check_grid
from millipode.spatial.protocol import Spatial, as_positive

# Up to this many points, variances are computed one by one.
EXACT = 4096


def GMRF(precision: Any, **options: Any) -> Spatial:
    """A Gauss–Markov random field, given by its precision: Γ̆ = Q⁻¹.

    ``mp.GMRF(grid, kappa=..., alpha=...)`` is ``mp.spatial.GridField``, with Q = (κ² − Δ_h)^α of a grid;
    ``mp.GMRF(Q)`` is ``mp.spatial.SparseField``, with any sparse matrix.

    >>> GMRF(Grid(8), kappa=3.0).shape
    (8,)
    """
    return (
        GridField(precision, **options) if isinstance(precision, Grid) else SparseField(precision, **options)
    )


class GridField(Stationary):
    """Γ̆ = v (κ² − Δ_h)^(−α), with the stencil of a grid.

    In D dimensions this tends to a Matérn covariance of smoothness ν = α − D/2 and length √(2ν)/κ on fine
    grids. zᵀ Γ̆⁻¹ z takes α/2 stencils, and no transform, where α is an integer.

    Args:
        grid: the ``mp.Grid`` that y lives on.
        kappa: κ > 0, one over the length.
        alpha: the power, positive.
        variance: v, a factor. Only ratios between components matter, as γ calibrates the rest.
    """

    grid: Grid
    precision: Float[Array, "*modes"]
    kappa: Array
    variance: Array
    shape: tuple[int, ...] = eqx.field(static=True)
    alpha: float = eqx.field(static=True)

    def __init__(self, grid: Grid, kappa: ArrayLike, alpha: float = 2, variance: ArrayLike = 1.0):
        check_grid(grid, "GMRF")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            raise ValueError(f"GMRF: alpha must be a positive number, got {alpha!r}.")
        self.grid, self.shape, self.alpha = grid, grid.shape, alpha
        self.kappa = jnp.asarray(as_positive(kappa, "GMRF: kappa"))
        self.variance = jnp.asarray(as_positive(variance, "GMRF: variance"))
        self.precision = (self.kappa**2 - grid.eigenvalues()) ** alpha / self.variance

    def quadratic(self, z: Array) -> Array:
        """By stencils: ‖A^(α/2) z‖² with A = κ² − Δ_h."""
        if self.alpha != int(self.alpha):
            return super().quadratic(z)
        for _ in range(int(self.alpha) // 2):
            z = self._operator(z)
        other = self._operator(z) if int(self.alpha) % 2 else z
        return jnp.sum(z * other) / self.variance

    def _operator(self, z: Array) -> Array:
        return self.kappa**2 * z - self.grid.laplacian(z)


class SparseField(Spatial):
    """Γ̆ = Q⁻¹ for a sparse symmetric positive definite matrix Q, on any set of points.

    zᵀ Q z is one sparse product. All else needs solves with Q: by a sparse Cholesky factorisation (SciPy's
    SuperLU, on the host), or matrix-free, by Krylov methods (``matfree``): exact to rounding where Q is well
    conditioned, and no factor to be stored. Both need ``pip install 'millipode[sparse]'``.

    Args:
        precision: Q, any of SciPy's sparse matrices, or an array.
        method: ``"cholesky"`` or ``"matrix-free"``.
        probes: the number of random vectors with which the diagonal of Q⁻¹ (beyond 4096 points, or
            matrix-free) and the determinant (matrix-free) are estimated; errors go with 1/√probes.
        iterations: of the Krylov methods.
        key: of these random vectors.
    """

    precision: sparse.BCOO
    variances: Array
    log_determinant: Array
    shape: tuple[int, ...] = eqx.field(static=True)
    factor: Any = eqx.field(static=True)
    iterations: int = eqx.field(static=True)

    def __init__(
        self,
        precision: Any,
        method: str = "cholesky",
        probes: int = 256,
        iterations: int = 64,
        key: Array | None = None,
    ):
        scipy_sparse = _needed("scipy.sparse")
        matrix = scipy_sparse.csc_array(precision, dtype=float)
        n = matrix.shape[0]
        if matrix.ndim != 2 or matrix.shape != (n, n) or n == 0:
            raise ValueError(f"GMRF: the precision must be a square matrix, its shape is {matrix.shape}.")
        if not np.isfinite(matrix.data).all():
            raise ValueError("GMRF: the precision has infinite or NaN entries.")
        gap = abs(matrix - matrix.T)
        if gap.nnz and gap.max() > 1e-6 * abs(matrix).max():
            raise ValueError(
                f"GMRF: the precision is not symmetric, Q − Qᵀ has entries up to {gap.max():.3g}. Pass "
                "(Q + Q.T) / 2 if that is what you mean."
            )
        if method not in ("cholesky", "matrix-free"):
            raise ValueError(f"GMRF: method must be 'cholesky' or 'matrix-free', got {method!r}.")
        if not (isinstance(probes, int) and probes > 0 and isinstance(iterations, int) and iterations > 0):
            raise ValueError("GMRF: probes and iterations must be positive integers.")
        self.precision = sparse.BCOO.from_scipy_sparse(matrix).sum_duplicates()
        self.shape, self.iterations = (n,), min(iterations, n)
        key = jax.random.key(0) if key is None else key
        if method == "cholesky":
            self.factor = Factor(matrix)
            self.log_determinant = jnp.asarray(-self.factor.logdet)
            self.variances = jnp.asarray(self.factor.variances(probes, key))
        else:
            self.factor = None
            self.log_determinant, self.variances = _estimates(self.precision, self.iterations, probes, key)
            if not (jnp.isfinite(self.log_determinant) & (self.variances > 0).all()):
                raise ValueError(_INDEFINITE)

    def quadratic(self, z: Array) -> Array:
        """One sparse product."""
        return jnp.sum(z * (self.precision @ z))

    def correlate(self, white: Array) -> Array:
        """Q⁻¹ times a root of Q, or Q^(−½) x by Lanczos' method."""
        if self.factor is None:
            return _inverse_root(self.precision, white, self.iterations)
        return self.factor.correlate(white)

    def diagonal(self) -> Array:
        """As it was found."""
        return self.variances

    def logdet(self) -> Array:
        """As it was found."""
        return self.log_determinant


_INDEFINITE = (
    "GMRF: the precision is not positive definite. Intrinsic fields are not, as their constants have no "
    "variance: add a small multiple of the identity."
)


class Factor:
    """Q = Pᵀ L D Lᵀ P on the host, by SuperLU without pivoting."""

    def __init__(self, matrix: Any):
        linalg = _needed("scipy.sparse.linalg")
        options = {"SymmetricMode": True}
        try:
            self.lu = linalg.splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
        except RuntimeError as error:
            raise ValueError(_INDEFINITE) from error
        pivots = self.lu.U.diagonal()
        if not np.array_equal(self.lu.perm_r, self.lu.perm_c) or not (pivots > 0).all():
            raise ValueError(_INDEFINITE)
        self.root = (self.lu.L * np.sqrt(pivots)).tocsr()  # L √D, of the permuted matrix
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

    def variances(self, probes: int, key: Array) -> np.ndarray:
        """The diagonal of Q⁻¹: column by column, or from samples if these are too many."""
        n = self.root.shape[0]
        if n > EXACT:
            # TODO
            white = np.random.default_rng(np.asarray(jax.random.key_data(key))).standard_normal((probes, n))
            return np.mean(self._correlate(white) ** 2, axis=0)
        batches = [np.arange(i, min(i + 512, n)) for i in range(0, n, 512)]
        return np.concatenate(
            [self.lu.solve(np.eye(n)[:, batch])[batch, np.arange(batch.size)] for batch in batches]
        )


def _needed(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"A random field with a general precision matrix needs {name.split('.')[0]}: pip install "
            "'millipode[sparse]'. On a grid, mp.GMRF(grid, kappa=...) does not."
        ) from error


def _inverse_root(matrix: sparse.BCOO, x: Array, iterations: int) -> Array:
    raise NotImplementedError


def _estimates(matrix: sparse.BCOO, iterations: int, probes: int, key: Array) -> tuple[Array, Array]:
    raise NotImplementedError
