"""What every solution offers to the modules that draw or write it."""

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, ArrayLike, PyTree

from millipode.status import Stats
from millipode.xla.tracing import is_traced


class Marginal(NamedTuple):
    """The mean and the standard deviation of y at one or many times.

    Attributes:
        t: the time or times.
        mean: the mean, in the structure of y0, with the axes of ``t`` in front.
        std: the standard deviation, like the mean.
    """

    t: Array
    mean: PyTree
    std: PyTree


class Viewable(Protocol):
    """Those properties and methods of a ``Solution`` that plots, animations and datasets use.

    Attributes:
        t: the saved times, (times,).
        log_evidence: Σ log N(z_n; 0, S_n), a number.
        stats: counts of steps and evaluations.
        mean: the mean of y at the saved times, in the structure of y0 with the time in front.
        std: the standard deviation of y, like the mean.
        diffusion: γ̂², a number or like y, with the time in front if it is dynamic.
        status: how the solve ended.
        message: the same as a sentence.
        is_continuous: whether the solution can be evaluated between the saved times.
        is_in_modes: whether a ``diffusion`` per unknown is one per mode.
    """

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
    if is_traced(sol.t) or sol.t.ndim != 1:
        raise ValueError(f"{what} one solution with concrete values; call it outside jit and vmap.")
