"""What the user holds after a solve."""

import dataclasses
import enum
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from millipode import queries
from millipode.basis import Basis, Identity
from millipode.compiling import compiled
from millipode.fields import Field, Scale, safe_sqrt, same_structure
from millipode.posterior import Moments, Path, Posterior
from millipode.spatial.protocol import Space

RUNNING = -1


class Status(enum.IntEnum):
    """How a solve ended."""

    SUCCESS = 0
    MAX_STEPS = 1
    STEP_TOO_SMALL = 2
    NON_FINITE = 3
    OUT_OF_MEMORY = 4
    INTERRUPTED = 5
    MEMBERS_NON_FINITE = 6

    @property
    def explanation(self) -> str:
        """What happened, and what to do about it."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    Status.SUCCESS: "The solver reached the end of the time span.",
    Status.MAX_STEPS: (
        "The maximum number of steps was reached before the end of the time span. Raise max_steps, "
        "loosen rtol and atol, or use a solver that suits stiff problems: mp.DiagonalEK1 or mp.EK1."
    ),
    Status.STEP_TOO_SMALL: (
        "The step size fell below what the floating-point format can resolve. The solution may be "
        "singular here, or the tolerance too tight: loosen rtol and atol, enable float64, or use a "
        "solver that suits stiff problems."
    ),
    Status.NON_FINITE: (
        "f or the state became infinite or NaN, and smaller steps did not help. The solution may "
        "blow up here, the solver may be unstable (use adaptive or smaller steps), or f may be "
        "undefined: check f at the time and state reported."
    ),
    Status.OUT_OF_MEMORY: (
        "Saving every step filled the memory that is available for it. Use save=times with the times that "
        "matter, save='end', or smooth='recompute', which keeps less per step."
    ),
    Status.MEMBERS_NON_FINITE: (
        "The solver reached the end of the time span, and its mean stands; but members of the error became "
        "infinite or NaN on the way, so nothing can be said of its uncertainty: the linearised ODE amplifies "
        "errors beyond all bounds. Tighten rtol and atol, or look at filter_std."
    ),
    Status.INTERRUPTED: (
        "The solve was interrupted. What it had saved until then is in the solution that comes with this."
    ),
}


class Stats(NamedTuple):
    """Counts of a solve.

    Attributes:
        steps: accepted steps.
        rejected: rejected attempts.
        f_evals: evaluations of f, those of the initialisation included.
    """

    steps: Array
    rejected: Array
    f_evals: Array


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Solution:
    """A Gaussian posterior over the solution of an ODE.

    A pytree, so it can leave ``jit`` and ``vmap``. All of ``mean``, ``std`` and a dynamic ``diffusion`` have
    the time as their leading axis; with ``save="end"`` its length is one.

    Attributes:
        t: the saved times.
        posterior: all that was saved, as ``mean``, ``std`` and the methods read it.
        gamma: the root of ``diffusion``.
        log_evidence: Σ log N(z_n; 0, S_n), the prediction-error decomposition.
        stats: counts of steps and evaluations.
        status_code: see ``status``.
        reached: the last time that the solver reached, and its last step size.
        basis: in which ``posterior`` and a vector-valued ``diffusion`` are; all else is in space.
        space: Γ̆, of which ``posterior`` knows nothing; None for the identity.

    >>> import jax, jax.numpy as jnp, millipode as mp
    >>> sol = mp.solve(lambda t, y: -y, jnp.ones(2), (0.0, 1.0))
    >>> sol(0.5).mean.shape, sol(jnp.linspace(0.0, 1.0, 7)).std.shape, sol.derivative(1).mean.shape[1:]
    ((2,), (7, 2), (2,))
    >>> sol.sample(jax.random.key(0), num=3, at=jnp.array([0.1, 0.2])).shape
    (3, 2, 2)
    """

    t: Array
    posterior: Posterior
    gamma: PyTree
    log_evidence: Array
    stats: Stats
    status_code: Array
    reached: tuple[Array, Array]
    basis: Basis = dataclasses.field(default=Identity())
    space: Space | None = None

    @property
    def mean(self) -> PyTree:
        """The posterior mean of y, in the structure of y0."""
        return self._in_space.mean

    @functools.cached_property
    def std(self) -> PyTree:
        """The standard deviation of y, in the structure of y0: the spread of ``members`` if there are any."""
        members = self.posterior.members
        return self.filter_std if members is None else self._spread(members, self.t.ndim)

    def _spread(self, members: PyTree, axes: int) -> PyTree:
        return _spread(self.basis, queries.as_precise(members, self), axes)

    @property
    def filter_std(self) -> PyTree:
        """What the filter (or the smoother) says of itself: the posterior standard deviation of y."""
        return _expand(self._in_space.std, self.mean)

    @property
    def members(self) -> PyTree:
        """The members of the error of y, with ``uncertainty=mp.Transported(...)``.

        Like y0, with two more axes in front: member and time. Each is a deviation from the mean.
        """
        if self.posterior.members is None:
            raise ValueError("This solution has no members: pass uncertainty=mp.Transported(...) to solve.")
        return _members(self.basis, queries.as_precise(self.posterior.members, self), self.t.ndim)

    @functools.cached_property
    def _in_space(self) -> Moments:
        return self._of_y(Moments(self.posterior.mean[0], self.posterior.std))

    def _of_y(self, moments: Moments) -> Moments:
        """Mean and standard deviation of y, from those of its modes without a model of space."""
        if isinstance(self.basis, Identity) and self.space is None:
            return moments
        return _of_y(self.basis, None if self.space is None else self.space.std, moments, self.t.ndim)

    @property
    def diffusion(self) -> PyTree:
        """γ̂², the calibrated diffusion.

        One value or field for a constant diffusion; for a dynamic one, that of the step in which (or
        at whose end) each saved time lies.
        """
        return jax.tree.map(jnp.square, self.gamma)

    def __call__(self, t: ArrayLike, derivative: int = 0) -> Marginal:
        """The posterior at any time of the span: given all data, or given the past if ``smooth=False``.

        Between two steps, transported members are interpolated linearly.

        Args:
            t: a time or an array of times.
            derivative: q ≤ ν, for the posterior of the q-th derivative of y.
        """
        q = queries.derivative(self, derivative)
        times, shape = queries.times(self, t)
        if isinstance(self.posterior, Path):
            moments = queries.evaluate(self.posterior, self.t, times, q)
        else:
            moments = queries.look_up(self, times, q)
        moments = self._of_y(moments)
        if self.posterior.members is not None:
            members = queries.members_at(self, times)
            moments = Moments(moments.mean, self._spread(members, 1))
        return Marginal(jnp.asarray(times.reshape(shape)), *_in_shape(moments, shape))

    def derivative(self, q: int = 1) -> Marginal:
        """The posterior of the q-th derivative of y, q ≤ ν, at the saved times."""
        moments = self._of_y(queries.saved_moments(self, queries.derivative(self, q)))
        return Marginal(self.t, moments.mean, _expand(moments.std, moments.mean))

    def sample(
        self, key: Array, num: int = 1, *, at: ArrayLike | None = None, derivative: int = 0
    ) -> PyTree[Array]:
        """Joint samples of the posterior, which needs ``smooth=True`` or ``uncertainty=mp.Transported(...)``.

        Each is one draw of the whole trajectory: correlated in time as the model says. With a structured
        covariance, unknowns (modes with ``mp.SpectralEK1``) are independent of each other, unless a spatial
        model relates them.

        Transported members are samples already, as many as there are: the mean plus ``num`` of them, picked
        without repetition.

        Args:
            key: a key of ``jax.random``.
            num: how many.
            at: times, in any order; the saved ones by default.
            derivative: q ≤ ν, for samples of the q-th derivative of y.

        Returns:
            A pytree like y0, every leaf with two more axes in front: sample and time.
        """
        q = queries.derivative(self, derivative)
        if self.posterior.members is not None:
            return queries.sample_members(self, key, num, at)
        samples = queries.sample(self, key, num, at, q)
        return samples if isinstance(self.basis, Identity) else _from_modes(self.basis, samples)

    def plot(self, **options: Any) -> Any:
        """Draw the posterior with matplotlib: bands for a few unknowns, images for fields.

        Options are those of ``millipode.plotting.plot``: ``components``, ``samples``, ``key``, ``times``,
        ``points``, ``names``. Returns the figure.
        """
        from millipode.plotting import plot

        return plot(self, **options)

    def to_xarray(self, **options: Any) -> Any:
        """Mean, standard deviation and diffusion as an ``xarray.Dataset`` with named axes.

        Options are those of ``millipode.datasets.to_dataset``: ``grid``, ``components``, ``samples``,
        ``attributes``.
        """
        from millipode.datasets import to_dataset

        return to_dataset(self, **options)

    @property
    def status(self) -> Any:
        """A ``Status``; an array of codes under a transformation or for a batch of solutions."""
        code = self.status_code
        if isinstance(code, jax.core.Tracer) or np.ndim(code) > 0:
            return code
        return Status(int(code))

    @property
    def success(self) -> Any:
        """Whether the solver reached the end of the time span."""
        code = self.status_code
        if isinstance(code, jax.core.Tracer) or np.ndim(code) > 0:
            return code == Status.SUCCESS
        return int(code) == Status.SUCCESS

    @property
    def message(self) -> str:
        """How the solve ended, in words."""
        if isinstance(self.status_code, jax.core.Tracer):
            return "The status is not known while JAX traces the solve."
        if np.ndim(self.status_code) > 0:
            codes, counts = np.unique(np.asarray(self.status_code), return_counts=True)
            return "; ".join(
                f"{n} × {Status(int(c)).name}: {Status(int(c)).explanation}"
                for c, n in zip(codes, counts, strict=True)
            )
        if self.success:
            return Status.SUCCESS.explanation
        t, h = (float(x) for x in self.reached)
        status = Status(int(self.status_code))
        return f"{status.name} at t = {t:.6g} with step size {h:.3g}: {status.explanation}"

    def __repr__(self) -> str:
        if isinstance(self.status_code, jax.core.Tracer) or np.ndim(self.status_code) > 0:
            return f"Solution(t={self.t}, status_code={self.status_code})"
        d = sum(int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(self.mean))
        return (
            f"Solution({self.status.name}, d={d}, {len(self.t)} saved times, "
            f"{int(self.stats.steps)} steps, {int(self.stats.rejected)} rejected)"
        )


@compiled(static_argnums=3)
def _of_y(basis: Basis, variation: Field | None, moments: Moments, axes: int) -> Moments:
    """The last of ``axes`` is time; what comes before it are batches, of which each has its own variation."""

    def varied(std: Scale, mean: Field, variation: Field) -> Field:
        return jax.tree.map(jnp.multiply, _expand(std, mean), variation)

    std = moments.std
    if variation is not None:
        for _ in range(axes - 1):
            varied = jax.vmap(varied)
        std = varied(std, moments.mean, variation)
    return Moments(basis.from_modes(moments.mean), basis.std(std))


@compiled(static_argnums=2)
def _spread(basis: Basis, members: PyTree, axes: int) -> PyTree:
    """In space, with the members' axis after the first ``axes``; their mean is known to be zero."""

    def leafwise(x: Array) -> Array:
        return safe_sqrt(jnp.mean(x**2, axis=axes))

    return jax.tree.map(leafwise, basis.from_modes(members))


@compiled(static_argnums=2)
def _members(basis: Basis, members: PyTree, axes: int) -> PyTree:
    """In space, with the members' axis before that of time."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, axes - 1, axes), basis.from_modes(members))


@compiled
def _from_modes(basis: Basis, samples: PyTree) -> PyTree:
    return basis.from_modes(samples)


def _expand(std: Scale, mean: PyTree) -> PyTree:
    """A standard deviation that all unknowns share, or any other, as a field like the mean."""

    def spread(s: Array, m: Array) -> Array:
        return jnp.broadcast_to(s.reshape(*s.shape, *(1,) * (m.ndim - s.ndim)), m.shape)

    if same_structure(std, mean):
        return jax.tree.map(spread, std, mean)
    return jax.tree.map(lambda m: spread(std, m), mean)


@compiled(static_argnums=1)
def _in_shape(moments: Moments, shape: tuple[int, ...]) -> tuple[PyTree, PyTree]:
    both = moments.mean, _expand(moments.std, moments.mean)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), both)


class SolveError(RuntimeError):
    """A solve that did not reach the end of its time span.

    Attributes:
        status: the ``Status``.
        t: the last time that was reached.
        h: the last step size.
        solution: what was computed up to there.
    """

    def __init__(self, solution: Solution):
        super().__init__(solution.message)
        self.solution = solution
        self.status = solution.status
        self.t, self.h = (float(x) for x in solution.reached)


class SolveInterrupted(SolveError, KeyboardInterrupt):
    """A solve that was stopped by Ctrl-C; its ``solution`` holds what was reached until then."""
