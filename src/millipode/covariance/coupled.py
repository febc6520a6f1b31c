"""C = blockdiag over modes, each block with all derivatives of all components of that mode.

For Jacobians that couple the components of a field mode by mode. Fields are arrays (c, *modes) here. The
transition acts on every component alike, Φ ⊗ I, so all that does not involve the residual is the algebra of
single blocks of size n c; their columns are ordered by derivative, then by component.
"""

import functools
from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.covariance import blocks
from millipode.covariance.blockdiagonal import in_tiles
from millipode.covariance.protocol import Corrected, Covariance, Kernel, Numbers, RootInnovation, normal
from millipode.fields import Field, Scale, safe_divide, safe_sqrt
from millipode.jacobians import CoupledJacobian
from millipode.priors import BlockTransition, Row, Transition
from millipode.qr import Block, root_of


def lifted(transition: Transition, c: int) -> BlockTransition:
    """The same transition for c components at once, Φ ⊗ I."""
    transition = transition.at(None)
    n = len(transition.phi)
    phi = tuple(
        tuple(transition.phi[i // c][j // c] if i % c == j % c else None for j in range(n * c))
        for i in range(n * c)
    )
    one = jnp.eye(c, dtype=transition.scaling.dtype)
    return BlockTransition(
        phi,
        jnp.repeat(transition.scaling, c),
        jnp.kron(transition.scaled_phi, one),
        jnp.kron(transition.scaled_root, one),
    )


class CoupledInnovation(RootInnovation):
    """S = RᵀR with R upper triangular, one (c, c) for every mode."""

    root: Float[Array, "c c *modes"]

    def whiten(self, z: Field) -> Field:
        """X with Rᵀx = z, by forward substitution; 0 where S vanishes."""
        found: list[Array] = []
        for a in range(self.root.shape[0]):
            known = sum(self.root[b, a] * x for b, x in enumerate(found))
            found.append(safe_divide(z[a] - known, self.root[a, a]))
        return jnp.stack(found)

    def std(self) -> Scale:
        """Column norms of R."""
        return safe_sqrt(jnp.sum(self.root**2, axis=0))

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """2 Σ log R_aa."""
        pivots = jnp.stack([self.root[a, a] for a in range(self.root.shape[0])])
        return 2 * jnp.sum(jnp.log(jnp.where(pivots > 0, pivots, 1))), jnp.sum(jnp.where(pivots > 0, 1, 0))


class Gain(NamedTuple):
    """K = columns · R⁻ᵀ: what each component of the whitened residual moves."""

    columns: Float[Array, "c m *modes"]
    innovation: CoupledInnovation


class Coupled(Covariance):
    """C = blockdiag(RᵀR) over modes; the factor is (k, n c, *modes)."""

    root: Float[Array, "k m *modes"]

    @classmethod
    def initial(cls, root: Float[Array, "k n"], scale: Scale, y: Field) -> Self:
        """The same block everywhere."""
        c, batch = y.shape[0], (1,) * (y.ndim - 1)
        block = jnp.kron(root, jnp.eye(c, dtype=root.dtype)) * scale
        return cls(jnp.broadcast_to(block.reshape(*block.shape, *batch), (*block.shape, *y.shape[1:])))

    def process_innovation(
        self, transition: Transition, jacobian: CoupledJacobian, z: Field
    ) -> CoupledInnovation:
        """H Σ Hᵀ from the rows of R_Σ Hᵀ."""
        rows = process_rows(transition, jacobian.matrix())
        return CoupledInnovation(transition.scaling[1] * root_of(rows))

    def process_correction(self, transition: Transition, jacobian: CoupledJacobian, z: Field) -> Field:
        """E₀ Σ Hᵀ S⁻¹ z, mode by mode."""
        rows = process_rows(transition, jacobian.matrix())
        innovation = CoupledInnovation(root_of(rows))
        weights = _solve_transposed(innovation.root, innovation.whiten(z))  # S⁻¹ z
        # E₀ Σ Hᵀ = r₀₀ (r₀₁ I − r₀₀ jᵀ), the first c rows of R_Σ Hᵀ times r₀₀.
        c = z.shape[0]
        moved = sum(rows[:c, a] * weights[a] for a in range(c))
        return transition.step_ratio * transition.at(None).scaled_root[0, 0] * moved

    def correct(self, transition: Transition, scale: Scale, jacobian: CoupledJacobian, z: Field) -> Corrected:
        """Every mode on its own; its c residuals one after the other."""
        c = z.shape[0]
        whole = lifted(transition, c)

        def one(root: Array, j: Array) -> tuple[Array, Array, Array]:
            innovation, columns, posterior = condition(
                blocks.extrapolate(root, whole, scale), j * transition.step_ratio
            )
            scales = whole.scaling.reshape(-1, *(1,) * (root.ndim - 2))
            return innovation * transition.scaling[1], columns * scales, posterior * scales

        innovation, columns, posterior = in_tiles(
            one, z.shape[1:], [self.root, jacobian.matrix()], reuse={2: 0}
        )
        innovation = CoupledInnovation(innovation)
        return Corrected(Gain(columns, innovation), innovation, Coupled(posterior))

    def rejected(self, z: Field) -> Corrected:
        """A zero gain."""
        c, modes = z.shape[0], z.shape[1:]
        innovation = CoupledInnovation(jnp.zeros((c, c, *modes), z.dtype))
        columns = jnp.zeros((c, self.root.shape[1], *modes), z.dtype)
        return Corrected(Gain(columns, innovation), innovation, self)

    def apply_gain(self, gain: Gain, z: Field) -> tuple[Field, ...]:
        """The columns times the whitened residual."""
        whitened = gain.innovation.whiten(z)
        return _by_derivative(sum(k * w for k, w in zip(gain.columns, whitened, strict=True)), z.shape[0])

    def std(self, y: Field, row: Row, noise: Scale, scale: Scale) -> Scale:
        """One number per component and mode."""
        c = y.shape[0]
        parts = [self.root[:, q * c : (q + 1) * c] * p for q, p in enumerate(row) if p is not None]
        projected = functools.reduce(jnp.add, parts)
        return safe_sqrt(jnp.sum(projected**2, axis=0) + scale**2 * noise)

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """Derivative-major, then component, then mode."""
        root = self.root.reshape(*self.root.shape[:2], -1)
        d = root.shape[-1]
        covariance = jnp.einsum("kid,kjd,de->idje", root, root, jnp.eye(d, dtype=root.dtype))
        return covariance.reshape(root.shape[1] * d, root.shape[1] * d)

    def predict(self, transition: Transition, scale: Scale, y: Field) -> Self:
        """Every mode on its own."""
        whole = lifted(transition, y.shape[0])
        (root,) = in_tiles(lambda r: (blocks.predict(r, whole, scale),), y.shape[1:], [self.root])
        return type(self)(root)

    def backward(self, transition: Transition, scale: Scale, y: Field) -> "CoupledKernel":
        """Every mode on its own."""
        whole = lifted(transition, y.shape[0])
        gain, noise = in_tiles(lambda r: blocks.backward(r, whole, scale), y.shape[1:], [self.root])
        return CoupledKernel(gain, Coupled(noise))

    def identity(self) -> "CoupledKernel":
        """G = I."""
        m, modes = self.root.shape[1], self.root.shape[2:]
        one = jnp.eye(m, dtype=self.root.dtype).reshape(m, m, *(1,) * len(modes))
        gain = jnp.broadcast_to(one, (m, m, *modes))
        return CoupledKernel(gain, Coupled(jnp.zeros_like(gain)))

    def square(self) -> Self:
        """Zero rows added."""
        return type(self)(blocks.square(self.root))

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε, mode by mode."""
        noise = (numbers or normal)(key, y[0], self.root.shape[0])
        return _by_derivative(jnp.sum(self.root * noise[:, None], axis=0), y.shape[0])


class CoupledKernel(Kernel):
    """One gain and one covariance per mode; the gain is (n c, n c, *modes)."""

    gain: Float[Array, "m m *modes"]
    noise: Coupled

    def push(self, covariance: Coupled) -> Coupled:
        """Every mode on its own."""
        (root,) = in_tiles(
            lambda g, n, r: (blocks.push(g, n, r),),
            self.gain.shape[2:],
            [self.gain, self.noise.root, covariance.root],
        )
        return Coupled(root)

    def compose(self, other: "CoupledKernel") -> "CoupledKernel":
        """Every mode on its own."""
        return CoupledKernel(blocks.product(self.gain, other.gain), self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """G Y, mode by mode."""
        c, whole = fields[0].shape[0], jnp.concatenate(fields)
        moved = functools.reduce(jnp.add, (self.gain[:, j] * x for j, x in enumerate(whole)))
        return _by_derivative(moved, c)

    def through(self, gain: Gain) -> Gain:
        """G K."""
        columns = [sum(self.gain[:, j] * k[j] for j in range(k.shape[0])) for k in gain.columns]
        return Gain(jnp.stack(columns), gain.innovation)

    def after(self, transition: Transition) -> "CoupledKernel":
        """G Φ."""
        m = self.gain.shape[0]
        matrix = lifted(transition, m // len(transition.phi)).matrix
        return CoupledKernel(
            blocks.product(self.gain, matrix.reshape(m, m, *(1,) * (self.gain.ndim - 2))), self.noise
        )


def process_rows(transition: Transition, jacobian: Float[Array, "c c *modes"]) -> Block:
    """R_Σ Hᵀ in scaled coordinates, (2c, c, *modes); all other rows are zero."""
    root, c = transition.at(None).scaled_root, jacobian.shape[0]
    one = jnp.eye(c, dtype=jacobian.dtype).reshape(c, c, *(1,) * (jacobian.ndim - 2))
    first = root[0, 1] * one - root[0, 0] * transition.step_ratio * jnp.swapaxes(jacobian, 0, 1)
    return jnp.concatenate([first, jnp.broadcast_to(root[1, 1] * one, first.shape)])


def condition(root: Block, j: Float[Array, "c c *modes"]) -> tuple[Block, Block, Block]:
    """Condition on c zero residuals one after the other: (√S, √S Kᵀ, posterior root), in scaled coordinates.

    Residual a is y'_a − Σ_b j_ab y_b, so R h_a has entries in the first 2c rows only. A reflection gathers
    them in one row, which becomes √S Kᵀ and leaves the root; the next residual sees the rows that are left.
    """
    c = j.shape[0]
    top, rest = root[: 2 * c], root[2 * c :]
    columns, innovation = [], []
    for a in range(c):
        seen = top[:, c + a] - sum(j[a, b] * top[:, b] for b in range(c))
        norm = safe_sqrt(jnp.sum(seen**2, axis=0))
        inverse = safe_divide(jnp.ones_like(norm), norm)
        # (I − w wᵀ/(norm·head)) with w = seen + sign·norm e₀ sends ``seen`` to −sign·norm e₀.
        sign = jnp.where(seen[0] < 0, -1.0, 1.0)
        head = jnp.abs(seen[0]) + norm
        column = jnp.sum(seen[:, None] * top, axis=0) * inverse
        weights = (sign * top[0] + column) * safe_divide(jnp.ones_like(norm), head)
        columns.append(column)
        innovation.append([*(_residual(k, j, a) for k in columns[:-1]), norm])
        top = top[1:] - seen[1:, None] * weights
    zero = jnp.zeros_like(innovation[0][0])
    rows = [jnp.stack([innovation[a][b] if b <= a else zero for a in range(c)]) for b in range(c)]
    return jnp.stack(rows), jnp.stack(columns), jnp.concatenate([top, rest])


def _residual(x: Array, j: Array, a: int) -> Array:
    """Row a of H times x."""
    c = j.shape[0]
    return x[c + a] - sum(j[a, b] * x[b] for b in range(c))


def _by_derivative(whole: Array, c: int) -> tuple[Field, ...]:
    """(n c, *modes) as one field (c, *modes) per derivative."""
    return tuple(whole[q : q + c] for q in range(0, whole.shape[0], c))


def _solve_transposed(root: Array, right: Array) -> list[Array]:
    """X with R x = right, by back substitution."""
    c = root.shape[0]
    found: list[Array] = [right[a] for a in range(c)]
    for a in reversed(range(c)):
        known = sum(root[a, b] * found[b] for b in range(a + 1, c))
        found[a] = safe_divide(right[a] - known, root[a, a])
    return found
