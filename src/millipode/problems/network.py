"""Chemical reactions on a random sparse graph: stiff, large, and without a grid."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.problems.problem import JacobianDiagonal, Problem


class _Network(NamedTuple):
    """Reactions a ⇌ b with the rates forth and back, and c + d → e + g with the rate meeting."""

    a: np.ndarray
    b: np.ndarray
    forth: np.ndarray
    back: np.ndarray
    c: np.ndarray
    d: np.ndarray
    e: np.ndarray
    g: np.ndarray
    meeting: np.ndarray


@lru_cache(8)
def _network(n: int, degree: int, decades: float, seed: int) -> _Network:
    rng = np.random.default_rng(seed)
    a, c, d, e, g = (rng.integers(n, size=size) for size in (n * degree // 2, n, n, n, n))
    b = (a + rng.integers(1, n, size=a.size)) % n
    forth, back = 10 ** rng.uniform(2 - decades, 2, size=(2, a.size))
    return _Network(a, b, forth, back, c, d, e, g, 10 ** rng.uniform(-2, 1, size=n))


@dataclass(frozen=True)
class ReactionNetwork:
    """The right-hand side S r(y): every reaction takes from its sources what it gives to its products."""

    n: int
    degree: int
    decades: float
    seed: int

    @property
    def _reactions(self) -> _Network:
        return _network(self.n, self.degree, self.decades, self.seed)

    def __call__(self, t: Array, y: Float[Array, " n"]) -> Float[Array, " n"]:
        """f(t, y)."""
        x = self._reactions
        turning = x.forth.astype(y.dtype) * y[x.a] - x.back.astype(y.dtype) * y[x.b]
        meeting = x.meeting.astype(y.dtype) * y[x.c] * y[x.d]
        change = jnp.zeros_like(y).at[x.a].add(-turning).at[x.b].add(turning)
        return change.at[x.c].add(-meeting).at[x.d].add(-meeting).at[x.e].add(meeting).at[x.g].add(meeting)

    def jacobian_diagonal(self, t: Array, y: Float[Array, " n"]) -> Float[Array, " n"]:
        """The diagonal of ∂f/∂y."""
        x = self._reactions
        rates = jnp.zeros_like(y).at[x.a].add(-x.forth.astype(y.dtype)).at[x.b].add(-x.back.astype(y.dtype))
        rate = x.meeting.astype(y.dtype)
        for product in (x.c, x.d):  # by y_c and by y_d, for what a reaction takes and what it gives
            other = x.d if product is x.c else x.c
            net = sum(np.equal(product, z).astype(int) for z in (x.e, x.g)) - np.equal(product, x.c)
            rates = rates.at[product].add(rate * y[other] * (net - np.equal(product, x.d)))
        return rates


def reaction_network(n: int = 1000, degree: int = 4, decades: float = 6.0, seed: int = 0) -> Problem:
    """Mass-action kinetics of n species on a random sparse graph, with rates over many orders of magnitude.

        A ⇌ B           along n·degree/2 random edges, with rates between 10^(2−decades) and 10²
        C + D → E + G   n times, with rates between 10⁻² and 10

    for t ∈ [0, 100], from random concentrations between 0 and 1, of which the sum stays the same. There is no
    grid and no fast basis, and the graph has no bandwidth: its Jacobian fills in when it is decomposed.

    Source: the law of mass action, as in P. Érdi, J. Tóth, *Mathematical Models of Chemical Reactions*, 1989;
    the graph is our own.

    Args:
        n: the number of species.
        degree: the mean number of reactions A ⇌ B of a species.
        decades: over how many orders of magnitude their rates are spread.
        seed: the seed of the graph, the rates and the initial values.
    """
    f = ReactionNetwork(n, degree, float(decades), seed)
    y0 = jnp.asarray(np.random.default_rng(seed + 1).uniform(size=n), jnp.result_type(float))
    return Problem(f, y0, (0.0, 100.0), JacobianDiagonal(f))
