"""How an EK1 solves its linear systems (I − cF) x = r, in which F is the whole Jacobian of f."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from millipode.linalg.arguments import as_integer
from millipode.linalg.fields import Coefficient, Field, rms, safe_divide, size
from millipode.linalg.jacobians import DenseJacobian, Jacobian, ProductJacobian, Solved, System
from millipode.linalg.krylov import Krylov, gmres
from millipode.model.linearisation import Linearisation, whole_jacobian
from millipode.model.preconditioners import Inverse, Preconditioner, as_preconditioner
from millipode.model.vector_field import VectorField
from millipode.xla.module import Module

# A system whose residual is at most this share of its right-hand side is good enough for one more correction.
ENOUGH = 0.5
# What a system may leave of the correction of y, in units of the tolerance; bounds of its residual over its
# right-hand side. With looser ones, what is left in stiff directions makes steps unstable.
SHARE, TIGHTEST, LOOSEST = 0.01, 0.01, 0.03

# How many vectors GMRES keeps, up to so many unknowns and beyond.
MANY, FEW, LARGE = 20, 10, 10**5
# Bounds from here on need no more than single precision where vectors are stored.
PRECISE = 1e-5

Linearly = Callable[[Field], Field]


class LinearSolver(Module):
    """How linear systems with the Jacobian of f are solved.

    To write your own, derive from this class (an ``equinox.Module``) and return a
    ``millipode.linalg.jacobians.Jacobian`` that solves them in its method ``system``.

    Attributes:
        is_cheap: whether another system with the same Jacobian costs little beside the first one.
    """

    is_cheap: ClassVar[bool] = False

    @property
    def remedy(self) -> str:
        """What helps if it takes many iterations, as a sentence; "" if there are none."""
        return ""

    def cost(self, field: VectorField, t: Array, y: Field) -> float:
        """What its systems cost in a step, in steps of an EK0: a guess, for ``mp.Auto``."""
        return 7.5

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """Raise if this does not suit a problem with a state like y."""

    def closed(self, field: VectorField, t: Array, y: Field) -> "LinearSolver":
        """The same, with tracers that its functions close over in the open; see ``VectorField.closed``."""
        return self

    @abc.abstractmethod
    def linearised(self, field: VectorField, t: Array, y: Field) -> tuple[Field, Jacobian]:
        """f(t, y), and its Jacobian there."""


class Direct(LinearSolver):
    """LU decompositions of the whole matrix: for up to a few thousand unknowns.

    The Jacobian takes one JVP per unknown, and its decomposition O(d³).
    """

    is_cheap: ClassVar[bool] = True

    def cost(self, field: VectorField, t: Array, y: Field) -> float:
        """The JVPs, and three decompositions.

        Measured on one core, in microseconds: implicit steps above the line, and below it explicit ones,
        which depend on how much f has to do.
        """
        d = size(y)
        return (8 + d / 2 + (d / 23) ** 3) / (0.4 + field.operations(t, y) / 2000)

    def linearised(self, field: VectorField, t: Array, y: Field) -> tuple[Field, DenseJacobian]:
        """One evaluation of f, and one JVP per unknown."""
        return field(t, y), DenseJacobian(whole_jacobian(field, t, y))


class GMRES(LinearSolver):
    """Krylov iterations by JVPs of f: for any number of unknowns, and any f.

    Systems are solved as accurately as a step needs it, mostly by a handful of iterations. Where that many
    are not enough, a preconditioner is needed.

    Args:
        preconditioner: what approximates (I − cJ)⁻¹: a linear part of f, from ``mp.Grid(...).diffusion(...)``
            or ``.operator(...)``; ``mp.LocalBlocks(axes)``; ``mp.Diagonal(...)``; a list, whose products are
            taken; or a function (c, t, y, args, r) → x. None by default.
        vectors: how many vectors like y are kept, in single precision. A system that takes more iterations
            starts again from what they have reached, for as long as that helps. By default 20, and 10 for
            more than 10⁵ unknowns.
        rtol: how small the residual of a system has to be, over its right-hand side; by default, between 0.01
            and 0.03, so that what it leaves is a small part of the step's tolerance.
    """

    preconditioner: Preconditioner | None
    vectors: int | None = eqx.field(static=True)
    rtol: float | None = eqx.field(static=True)

    def __init__(self, preconditioner: Any = None, vectors: int | None = None, rtol: float | None = None):
        self.preconditioner = None if preconditioner is None else as_preconditioner(preconditioner)
        self.vectors = None if vectors is None else as_integer(vectors, "GMRES: vectors", 1)
        if rtol is not None and not 0 < rtol < 1:
            raise ValueError(f"GMRES: rtol must lie between 0 and 1, got {rtol}.")
        self.rtol = None if rtol is None else float(rtol)

    @property
    def is_rough(self) -> bool:
        """Whether what vectors and preconditioners know in single precision is enough."""
        return self.rtol is None or self.rtol >= PRECISE

    @property
    def remedy(self) -> str:
        """A preconditioner, or a better one."""
        if self.preconditioner is None:
            return (
                "Pass solver=mp.EK1(linear_solver=mp.GMRES(preconditioner=...)): the diffusion in f, from "
                "mp.Grid(...).diffusion(...), mp.LocalBlocks() for reactions that are stiff in every cell, "
                "or a list of both."
            )
        return (
            "The preconditioner of mp.GMRES leaves much of what is stiff in f: a list of a linear part and "
            "mp.LocalBlocks() takes diffusion and reactions into account, and vectors=... allows for more "
            "iterations."
        )

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """The preconditioner must fit y."""
        if self.preconditioner is not None:
            self.preconditioner.check(field, t, y)

    def linearised(self, field: VectorField, t: Array, y: Field) -> tuple[Field, "KrylovJacobian"]:
        """One evaluation of f, with what its JVPs need stored."""
        value, product = jax.linearize(lambda x: field(t, x), y)
        known = None if self.preconditioner is None else self.preconditioner.at(field, t, y, self.is_rough)
        vectors = self.vectors or (MANY if size(y) <= LARGE else FEW)
        return value, KrylovJacobian(product, known, vectors, self.rtol, self.is_rough)


class KrylovJacobian(ProductJacobian):
    """F, known by its products, and by what approximates its inverses.

    Attributes:
        product: maps a field x to F x.
        inverse: maps c to a function r ↦ about (I − cF)⁻¹ r; None for r itself.
        vectors: how many vectors are kept.
        rtol: how small its residual has to be, over its right-hand side; None for what a step needs.
        is_rough: whether single precision is enough for vectors.
    """

    inverse: Inverse | None
    vectors: int = eqx.field(static=True)
    rtol: float | None = eqx.field(static=True)
    is_rough: bool = eqx.field(static=True)

    def system(self, c: Array, unit: Field, share: Array | float = 1.0) -> System:
        """By GMRES in units of what is tolerated.

        It is preconditioned from the left, so that residuals are about errors, also in stiff directions: the
        correction of y is c x, and what remains of it may be ``SHARE`` of the tolerance.
        """
        precondition = self._inverse(c, unit)
        vectors = min(self.vectors, size(unit))
        stored = jnp.float32 if self.is_rough else None

        def product(x: Field) -> Field:
            return jax.tree.map(lambda a, b: a - c * b, x, self.product(x))

        def preconditioned(
            product: Linearly, b: Field, inverse: Linearly, unit: Field, tolerance: Array | float
        ) -> tuple[Field, Krylov]:
            right = _divided(inverse(b), unit)
            if self.rtol is None:
                usual = SHARE * safe_divide(jnp.ones_like(c), jnp.abs(c) * rms(right))
                tolerance = share * jnp.clip(usual, tolerance, LOOSEST)
            found = gmres(
                lambda v: _divided(inverse(product(_times(v, unit))), unit), right, tolerance, vectors, stored
            )
            return _times(found.x, unit), found._replace(x=None)

        def solve(product: Linearly, b: Field) -> tuple[Field, Krylov]:
            return preconditioned(product, b, precondition, unit, self.rtol or TIGHTEST)

        def solve_transposed(product: Linearly, b: Field) -> tuple[Field, Krylov]:
            transposed, dual = jax.linear_transpose(precondition, b), jax.tree.map(jnp.reciprocal, unit)
            return preconditioned(product, b, lambda r: transposed(r)[0], dual, self.rtol or TIGHTEST)

        def solved(r: Field) -> Solved:
            x, found = lax.custom_linear_solve(product, r, solve, solve_transposed, has_aux=True)
            return Solved(x, found.iterations, found.left <= ENOUGH)

        return solved

    def _inverse(self, c: Array, unit: Field) -> Linearly:
        """What approximates (I − cF)⁻¹, applied to numbers of a size that fits into single precision."""
        if self.inverse is None:
            return lambda r: r
        approximate = self.inverse(c)
        largest = jnp.max(jnp.stack([jnp.max(x) for x in jax.tree.leaves(unit)]))
        # It cancels, so nothing depends on it; and c is zero in the empty turns of loops in reverse mode.
        scale = lax.stop_gradient(safe_divide(largest, jnp.abs(c)))
        scale = jnp.where(scale > 0, scale, 1)

        def inverse(r: Field) -> Field:
            x = approximate(jax.tree.map(lambda x: x / scale, r))
            return jax.tree.map(lambda x: x * scale, x)

        return inverse

    def minus(self, rate: Coefficient) -> "KrylovJacobian":
        """With one rate ρ for all unknowns, I − c(F − ρ) = (1 + cρ) (I − c/(1 + cρ) F)."""
        product, inverse = self.product, self.inverse

        def shifted(c: Array) -> Any:
            assert inverse is not None
            factor = 1 + c * rate
            approximate = inverse(c / factor)
            return lambda r: approximate(jax.tree.map(lambda x: x / factor, r))

        return KrylovJacobian(
            lambda x: jax.tree.map(lambda a, b: a - rate * b, product(x), x),
            None if inverse is None else shifted,
            self.vectors,
            self.rtol,
            self.is_rough,
        )


class Implicit(Linearisation):
    """F = ∇f, in a filter whose covariance does not know it: its gain solves linear systems.

    Attributes:
        solver: of these.
        mixture: whether the gain is a mixture of two; see ``filter.implicit``.
        derivatives: how many derivatives the gain moves at most; None if all.
    """

    solver: LinearSolver
    mixture: bool = eqx.field(static=True)
    derivatives: int | None = eqx.field(static=True, default=None)

    @property
    def mixes(self) -> bool:
        """As asked for."""
        return self.mixture

    @property
    def is_exact(self) -> bool:
        """Always."""
        return True

    @property
    def is_implicit(self) -> bool:
        """Always."""
        return True

    def cost(self, field: VectorField, t: Array, y: Field) -> float:
        """As the linear solver says."""
        return self.solver.cost(field, t, y)

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """As the linear solver says."""
        self.solver.check(field, t, y)

    def closed(self, field: VectorField, t: Array, y: Field) -> "Implicit":
        """As for f."""
        return Implicit(self.solver.closed(field, t, y), self.mixture, self.derivatives)

    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: PyTree[Array] = ()
    ) -> tuple[Field, Jacobian]:
        """One evaluation of f, and its Jacobian as the linear solver knows it."""
        return self.solver.linearised(field, t, y)


def _times(x: Field, unit: Field) -> Field:
    return jax.tree.map(jnp.multiply, x, unit)


def _divided(x: Field, unit: Field) -> Field:
    return jax.tree.map(jnp.divide, x, unit)
