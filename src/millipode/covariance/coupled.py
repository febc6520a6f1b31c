"""C = blockdiag over modes, each block with all derivatives of all components of that mode.

This is the structure for Jacobians that couple the components of a field mode by mode. Fields are arrays
(c, *modes) here. The transition acts on every component alike, Φ ⊗ I, so everything that does not involve the
residual is the algebra of single blocks of size n c; their columns are ordered by derivative, then by
component.
"""

import functools
from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.covariance import blocks
from millipode.covariance.innovation import CoupledInnovation
from millipode.covariance.observation import CoupledObservation, Observation, units, y_per_residual
from millipode.covariance.protocol import Corrected, Covariance, Kernel, Storage
from millipode.covariance.tiles import in_tiles
from millipode.covariance.transition import BlockTransition, Transition
from millipode.linalg.batches import Block, product
from millipode.linalg.fields import Coefficient, Field, Row, safe_divide, safe_sqrt
from millipode.linalg.qr import root_of
from millipode.linalg.randomness import Numbers, normal


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


class Gain(NamedTuple):
    """K = columns · R⁻ᵀ, where S = RᵀR.

    Attributes:
        columns: the change of the state for each component of the whitened residual, (c, n c, *modes).
        innovation: N(0, S), which whitens the residual.
    """

    columns: Float[Array, "c m *modes"]
    innovation: CoupledInnovation


class Coupled(Covariance):
    """C = blockdiag(RᵀR) over modes.

    Attributes:
        root: R, (k, n c, *modes).
    """

    root: Float[Array, "k m *modes"]

    @classmethod
    def storage(cls, d: int, n: int, components: int) -> Storage:
        """The numbers of one block of n c columns for each of the d/c modes."""
        return Storage(n * (n - 1) * d * components, n * n * d * components, d)

    @classmethod
    def initial(cls, root: Float[Array, "k n"], gamma: Coefficient, y: Field) -> Self:
        """The same block for every mode."""
        c, batch = y.shape[0], (1,) * (y.ndim - 1)
        block = jnp.kron(root, jnp.eye(c, dtype=root.dtype)) * gamma
        return cls(jnp.broadcast_to(block.reshape(*block.shape, *batch), (*block.shape, *y.shape[1:])))

    def process_innovation(
        self, transition: Transition, observation: Observation, z: Field
    ) -> CoupledInnovation:
        """N(0, H Σ Hᵀ), from the rows of R_Σ Hᵀ."""
        return CoupledInnovation(units(transition) * root_of(_process_rows(transition, observation)))

    def process_correction(self, transition: Transition, observation: Observation, z: Field) -> Field:
        """E₀ Σ Hᵀ S⁻¹ z, mode by mode."""
        rows = _process_rows(transition, observation)
        weights = CoupledInnovation(root_of(rows)).weights(z)
        # Only the first c rows of R_Σ have entries for y, and these are r₀₀ I.
        c, block = z.shape[0], transition.at(None)
        moved = sum(rows[:c, a] * weights[a] for a in range(c))
        return y_per_residual(block) * block.scaled_root[0, 0] * moved

    def correct(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> Corrected:
        """Extrapolate and condition every mode by itself, on one of its c residuals after the other."""
        whole = lifted(transition, z.shape[0])

        def one(root: Array, j: Array) -> tuple[Array, Array, Array]:
            seen = CoupledObservation(j).scaled(transition)
            innovation, columns, posterior = condition(blocks.extrapolate(root, whole, gamma), seen)
            scales = whole.scaling.reshape(-1, *(1,) * (root.ndim - 2))
            return innovation * units(transition), columns * scales, posterior * scales

        root, columns, posterior = in_tiles(
            one, z.shape[1:], [self.root, observation.per_mode().j], reuse={2: 0}
        )
        innovation = CoupledInnovation(root)
        return Corrected(Gain(columns, innovation), innovation, Coupled(posterior))

    def rejected(self, z: Field) -> Corrected:
        c, modes = z.shape[0], z.shape[1:]
        innovation = CoupledInnovation(jnp.zeros((c, c, *modes), z.dtype))
        columns = jnp.zeros((c, self.root.shape[1], *modes), z.dtype)
        return Corrected(Gain(columns, innovation), innovation, self)

    def apply_gain(self, gain: Gain, z: Field) -> tuple[Field, ...]:
        """K z: the columns of the gain times the whitened residual."""
        whitened = gain.innovation.whiten(z)
        return _by_derivative(sum(k * w for k, w in zip(gain.columns, whitened, strict=True)), z.shape[0])

    def std(self, y: Field, row: Row, noise: Coefficient, gamma: Coefficient) -> Coefficient:
        """One standard deviation per component and mode, (c, *modes)."""
        c = y.shape[0]
        parts = [self.root[:, q * c : (q + 1) * c] * p for q, p in enumerate(row) if p is not None]
        projected = functools.reduce(jnp.add, parts)
        return safe_sqrt(jnp.sum(projected**2, axis=0) + gamma**2 * noise)

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """C as a matrix, ordered by derivative, then by component, then by mode."""
        root = self.root.reshape(*self.root.shape[:2], -1)
        d = root.shape[-1]
        covariance = jnp.einsum("kid,kjd,de->idje", root, root, jnp.eye(d, dtype=root.dtype))
        return covariance.reshape(root.shape[1] * d, root.shape[1] * d)

    def predict(self, transition: Transition, gamma: Coefficient, y: Field) -> Self:
        """C⁻, by one QR decomposition per mode."""
        whole = lifted(transition, y.shape[0])
        (root,) = in_tiles(lambda r: (blocks.predict(r, whole, gamma),), y.shape[1:], [self.root])
        return type(self)(root)

    def backward(self, transition: Transition, gamma: Coefficient, y: Field) -> "CoupledKernel":
        """The kernel, by one QR decomposition per mode."""
        whole = lifted(transition, y.shape[0])
        gain, noise = in_tiles(lambda r: blocks.backward(r, whole, gamma), y.shape[1:], [self.root])
        return CoupledKernel(gain, Coupled(noise))

    def identity(self) -> "CoupledKernel":
        """The gain I for every mode, without noise."""
        m, modes = self.root.shape[1], self.root.shape[2:]
        one = jnp.eye(m, dtype=self.root.dtype).reshape(m, m, *(1,) * len(modes))
        gain = jnp.broadcast_to(one, (m, m, *modes))
        return CoupledKernel(gain, Coupled(jnp.zeros_like(gain)))

    def square(self) -> Self:
        """The same covariance, with zero rows added to every root until it is (n c, n c)."""
        return type(self)(blocks.square(self.root))

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε, with its own ε for every mode."""
        noise = (numbers or normal)(key, y[0], self.root.shape[0])
        return _by_derivative(jnp.sum(self.root * noise[:, None], axis=0), y.shape[0])


class CoupledKernel(Kernel):
    """One gain and one covariance per mode.

    Attributes:
        gain: G, (n c, n c, *modes).
        noise: P.
    """

    gain: Float[Array, "m m *modes"]
    noise: Coupled

    def push(self, covariance: Coupled) -> Coupled:
        """G C Gᵀ + P, by one QR decomposition per mode."""
        (root,) = in_tiles(
            lambda g, n, r: (blocks.push(g, n, r),),
            self.gain.shape[2:],
            [self.gain, self.noise.root, covariance.root],
        )
        return Coupled(root)

    def compose(self, other: "CoupledKernel") -> "CoupledKernel":
        """The composed kernel, by one QR decomposition per mode."""
        return CoupledKernel(product(self.gain, other.gain), self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """G Y, mode by mode."""
        c, whole = fields[0].shape[0], jnp.concatenate(fields)
        moved = functools.reduce(jnp.add, (self.gain[:, j] * x for j, x in enumerate(whole)))
        return _by_derivative(moved, c)

    def through(self, gain: Gain) -> Gain:
        """The product g k, mode by mode."""
        columns = [sum(self.gain[:, j] * k[j] for j in range(k.shape[0])) for k in gain.columns]
        return Gain(jnp.stack(columns), gain.innovation)

    def after(self, transition: Transition) -> "CoupledKernel":
        """The product g Φ, mode by mode."""
        m = self.gain.shape[0]
        matrix = lifted(transition, m // len(transition.phi)).matrix
        return CoupledKernel(
            product(self.gain, matrix.reshape(m, m, *(1,) * (self.gain.ndim - 2))), self.noise
        )


def _process_rows(transition: Transition, observation: Observation) -> Block:
    """R_Σ Hᵀ in scaled coordinates, (2c, c, *modes)."""
    return observation.per_mode().scaled(transition).of_noise(transition.at(None).scaled_root)


def condition(root: Block, observation: CoupledObservation) -> tuple[Block, Block, Block]:
    """Condition on c zero residuals one after the other: (√S, √S Kᵀ, posterior root), in scaled coordinates.

    R is upper triangular, so only its first 2c rows enter the residuals. For each residual, a reflection
    gathers its entries in one row, which becomes √S Kᵀ and is removed from the root; the next residual uses
    the remaining rows.
    """
    c = observation.j.shape[0]
    top, rest = root[: 2 * c], root[2 * c :]
    columns, innovation = [], []
    for a in range(c):
        seen = observation.of(a, [top[:, b] for b in range(2 * c)])
        norm = safe_sqrt(jnp.sum(seen**2, axis=0))
        inverse = safe_divide(jnp.ones_like(norm), norm)
        # (I − w wᵀ/(norm·head)) with w = seen + sign·norm e₀ sends ``seen`` to −sign·norm e₀.
        sign = jnp.where(seen[0] < 0, -1.0, 1.0)
        head = jnp.abs(seen[0]) + norm
        column = jnp.sum(seen[:, None] * top, axis=0) * inverse
        weights = (sign * top[0] + column) * safe_divide(jnp.ones_like(norm), head)
        columns.append(column)
        innovation.append([*(observation.of(a, list(k)) for k in columns[:-1]), norm])
        top = top[1:] - seen[1:, None] * weights
    zero = jnp.zeros_like(innovation[0][0])
    rows = [jnp.stack([innovation[a][b] if b <= a else zero for a in range(c)]) for b in range(c)]
    return jnp.stack(rows), jnp.stack(columns), jnp.concatenate([top, rest])


def _by_derivative(whole: Array, c: int) -> tuple[Field, ...]:
    """(n c, *modes) as one field (c, *modes) per derivative."""
    return tuple(whole[q : q + c] for q in range(0, whole.shape[0], c))
