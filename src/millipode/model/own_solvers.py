"""Linear solvers that users bring along: functions, and those of lineax."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.linalg.fields import Field, rms
from millipode.linalg.jacobians import ProductJacobian, Solved, System
from millipode.model.linear_solvers import ENOUGH, Linearly, LinearSolver
from millipode.model.preconditioners import Given
from millipode.model.vector_field import VectorField


class OfFunction(LinearSolver):
    """A function of the user's that solves the systems.

    Attributes:
        function: (c, t, y, args, r) → (I − c ∂f/∂y)⁻¹ r.
    """

    function: Callable = eqx.field(static=True)

    def check(self, field: VectorField, t: Array, y: Field) -> None:
        """It must return something like y."""
        Given(self.function).check(field, t, y)

    def linearised(self, field: VectorField, t: Array, y: Field) -> tuple[Field, "OwnJacobian"]:
        """One evaluation of f, with what its JVPs need stored."""
        value, product = jax.linearize(lambda x: field(t, x), y)
        inverse = Given(self.function).at(field, t, y)
        return value, OwnJacobian(product, lambda c, _, r: inverse(c)(r))


class OfLineax(LinearSolver):
    """A linear solver from the library lineax.

    Attributes:
        solver: a ``lineax.AbstractLinearSolver``; one that needs a matrix makes it by one JVP per unknown.
    """

    solver: Any

    def linearised(self, field: VectorField, t: Array, y: Field) -> tuple[Field, "OwnJacobian"]:
        """One evaluation of f, with what its JVPs need stored."""
        import lineax

        value, product = jax.linearize(lambda x: field(t, x), y)

        def solve(c: Array, system: Linearly, r: Field) -> Field:
            operator = lineax.FunctionLinearOperator(system, jax.eval_shape(lambda: r))
            return lineax.linear_solve(operator, r, self.solver, throw=False).value

        return value, OwnJacobian(product, solve)


class OwnJacobian(ProductJacobian):
    """F, known by its products, and a function of the user's that solves systems.

    Attributes:
        product: maps a field x to F x.
        inverse: maps c, the product with I − cF, and r to (I − cF)⁻¹ r.
    """

    inverse: Callable[[Array, Linearly, Field], Field]

    def system(self, c: Array, unit: Field, share: Array | float = 1.0) -> System:
        """As the function does it; one product checks its result."""

        def product(x: Field) -> Field:
            return jax.tree.map(lambda a, b: a - c * b, x, self.product(x))

        def solve(product: Linearly, b: Field) -> Field:
            return self.inverse(c, product, b)

        def transposed(_: Linearly, b: Field) -> Field:
            return jax.linear_transpose(lambda r: self.inverse(c, product, r), b)(b)[0]

        def solved(r: Field) -> Solved:
            x = lax.custom_linear_solve(product, r, solve, transposed)
            left = jax.tree.map(jnp.subtract, r, product(x))
            enough = _length(left, unit) <= ENOUGH * _length(r, unit)
            return Solved(x, jnp.ones((), jnp.int32), enough)

        return solved


def as_linear_solver(given: Any) -> LinearSolver | None:
    """A linear solver from all that users may pass."""
    if given is None or isinstance(given, LinearSolver):
        return given
    if any(kind.__module__.startswith("lineax") for kind in type(given).__mro__):
        return OfLineax(given)
    if callable(given) and not isinstance(given, type):
        return OfFunction(given)
    raise TypeError(
        "linear_solver must be mp.Direct(), mp.GMRES(...), a solver of lineax, or a function "
        f"(c, t, y, args, r) -> x; got {given.__name__ if isinstance(given, type) else type(given).__name__}."
    )


def _length(x: Field, unit: Field) -> Array:
    return rms(jax.tree.map(jnp.divide, x, unit))
