"""What every problem offers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, PyTree

from millipode.model.stencil import Stencil
from millipode.pde.grids import Grid
from millipode.pde.linear import Linear


class Problem(NamedTuple):
    """An initial value problem y' = f(t, y), y(t0) = y0.

    The functions carry their parameters and compare by them, so that making the same problem twice
    does not compile anything twice.

    Attributes:
        f: the right-hand side ``f(t, y)``.
        y0: the initial value.
        t_span: ``(t0, t1)``.
        jacobian_diagonal: the diagonal of ∂f/∂y as a function of ``(t, y)``.
        stencil: how far f reaches on its grid, where there is one.
        grid: the grid of a discretised PDE.
        linear: its stiff linear part, for ``mp.SpectralEK1``.
        solution: y(t), where it is known.
        components: names along the first axis of y.
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
    """``f.jacobian_diagonal`` that compares by f's parameters, which a bound method does not."""

    f: Any

    def __call__(self, t: Array, y: PyTree) -> PyTree:
        """The diagonal of ∂f/∂y."""
        return self.f.jacobian_diagonal(t, y)
