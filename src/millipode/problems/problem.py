"""The type of all problems."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, PyTree

from millipode.model.stencil import Stencil
from millipode.pde.grids import Grid
from millipode.pde.linear import Linear


class Problem(NamedTuple):
    """An initial value problem y' = f(t, y), y(t0) = y0.

    The functions of the library's problems are equal if their parameters are, so that making the same problem
    twice does not compile anything twice.

    Attributes:
        f: the right-hand side ``f(t, y)``.
        y0: the initial value, an array or a pytree of arrays.
        t_span: ``(t0, t1)``.
        jacobian_diagonal: the diagonal of ∂f/∂y as a function of ``(t, y)``, like y; None if it is not known.
        stencil: the stencil of f on its grid; None if none is declared.
        grid: the grid of a discretised PDE; None for other problems.
        linear: the stiff linear part of f, for ``mp.SpectralEK1``; None if none is declared.
        solution: y as a function of t; None if it is not known.
        components: names along the first axis of y, or None.
    """

    f: Callable
    y0: PyTree
    t_span: tuple[float, float]
    jacobian_diagonal: Callable | None = None
    stencil: Stencil | None = None
    grid: Grid | None = None
    linear: Linear | None = None
    solution: Callable | None = None
    components: tuple[str, ...] | None = None


@dataclass(frozen=True)
class JacobianDiagonal:
    """``f.jacobian_diagonal`` as an object that is equal if f's parameters are, unlike a bound method."""

    f: Any

    def __call__(self, t: Array, y: PyTree) -> PyTree:
        """The diagonal of ∂f/∂y, like y."""
        return self.f.jacobian_diagonal(t, y)
