"""What a solution must offer to be drawn or written."""

from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import Array, ArrayLike, PyTree

from millipode.status import Stats


class Marginal(NamedTuple):
    """Mean and standard deviation at one or many times.

    Attributes:
        t: the time or times.
        mean: in the structure of y0, with the axes of ``t`` in front.
        std: likewise.
    """

    t: Array
    mean: PyTree
    std: PyTree


class Viewable(Protocol):
    """The surface of a ``Solution`` that pictures and datasets are made from; see there."""

    @property
    def t(self) -> Array: ...

    @property
    def log_evidence(self) -> Array: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def mean(self) -> PyTree[Array]: ...

    @property
    def std(self) -> PyTree[Array]: ...

    @property
    def diffusion(self) -> PyTree[Array]: ...

    @property
    def status(self) -> Any: ...

    @property
    def message(self) -> str: ...

    @property
    def is_continuous(self) -> bool: ...

    @property
    def is_in_modes(self) -> bool: ...

    def __call__(self, t: ArrayLike, derivative: int = 0) -> Marginal: ...

    def sample(
        self, key: Array, num: int = 1, *, at: ArrayLike | None = None, derivative: int = 0
    ) -> PyTree[Array]: ...


def check_single(sol: Viewable, what: str) -> None:
    """Raise ``ValueError`` unless this is one solution with concrete values."""
    if isinstance(sol.t, jax.core.Tracer) or sol.t.ndim != 1:
        raise ValueError(f"{what} one solution with concrete values; call it outside jit and vmap.")
