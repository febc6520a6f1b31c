"""What the user holds after a solve."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from millipode.linalg.fields import (
    dtype,
)
from millipode.linalg.randomness import as_key
from millipode.pde.bases import Basis, Identity
from millipode.posterior import dense_output, in_space, questions, sampling
from millipode.posterior.posterior import Moments, Posterior
from millipode.spatial.space import Space
from millipode.status import Stats, Status
from millipode.view import datasets, plotting
from millipode.view.viewable import Marginal
from millipode.xla.tracing import is_traced

# Iterations of a linear solver per attempted step that ask for a better preconditioner.
MANY_ITERATIONS = 25


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
        basis: in which ``posterior`` and a vector-valued ``diffusion`` are expressed; everything else is in
            space.
        space: Γ̆, the spatial covariance, of which ``posterior`` knows nothing; None for the identity.
        remedy: what to do if stability limited the steps, as a sentence.

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
    remedy: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def mean(self) -> PyTree:
        """The posterior mean of y, in the structure of y0."""
        return self._in_space.mean

    @functools.cached_property
    def std(self) -> PyTree:
        """The standard deviation of y, in the structure of y0.

        By default, it is ``filter_std``, rescaled at every time to the size of an error estimate that is
        transported by the true Jacobian; with ``uncertainty=mp.Transported(...)``, the spread of ``members``.
        """
        errors = self.posterior.errors
        if errors is None:
            return self.filter_std
        if errors.members is not None:
            return self._spread(errors.members, self.t.ndim)
        return in_space.resized(self.filter_std, self.filter_std, errors.size)

    @property
    def filter_std(self) -> PyTree:
        """The standard deviation that the filter (or the smoother) computes for itself."""
        return in_space.expand(self._in_space.std, self.mean)

    @property
    def members(self) -> PyTree:
        """The ensemble of errors of y, with ``uncertainty=mp.Transported(...)``.

        Like y0, with two more axes in front: member and time. Each member is a deviation from the mean.
        """
        if self.posterior.members is None:
            raise ValueError("This solution has no members: pass uncertainty=mp.Transported(...) to solve.")
        return in_space.members(self.basis, self._as_precise(self.posterior.members), self.t.ndim)

    @property
    def is_continuous(self) -> bool:
        """Whether ``sol(t)`` knows all times of the span, rather than the saved ones only."""
        return self.posterior.is_continuous

    @property
    def is_in_modes(self) -> bool:
        """Whether the solver worked in another basis than y; a vector ``diffusion`` is then per mode."""
        return not self.basis.is_trivial

    def _spread(self, members: PyTree, axes: int) -> PyTree:
        return in_space.spread(self.basis, self._as_precise(members), axes)

    def _as_precise(self, members: PyTree) -> PyTree:
        """In the dtype of y; members are kept with as few digits as they need."""
        return jax.tree.map(lambda x: x.astype(dtype(self.posterior.mean[0])), members)

    @functools.cached_property
    def _in_space(self) -> Moments:
        return self._of_y(Moments(self.posterior.mean[0], self.posterior.std))

    def _of_y(self, moments: Moments) -> Moments:
        """The moments of y, from those of its modes without the spatial covariance."""
        if self.basis.is_trivial and self.space is None:
            return moments
        return in_space.of_y(self.basis, None if self.space is None else self.space.std, moments, self.t.ndim)

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
        q = questions.derivative(self.posterior, self.t, derivative)
        times, shape = questions.times(self.posterior, self.t, t)
        moments = self._of_y(dense_output.moments_at(self.posterior, self.t, times, q))
        if q == 0 and self.posterior.errors is not None:
            errors, std = dense_output.errors_at(self.posterior, self.t, times), moments.std
            if errors.members is not None:
                std = self._spread(errors.members, 1)
            else:
                std = in_space.expand(std, moments.mean)
                std = in_space.resized(std, std, errors.size)
            moments = Moments(moments.mean, std)
        return Marginal(jnp.asarray(times.reshape(shape)), *in_space.in_shape(moments, shape))

    def derivative(self, q: int = 1) -> Marginal:
        """The posterior of the q-th derivative of y, q ≤ ν, at the saved times."""
        q = questions.derivative(self.posterior, self.t, q)
        moments = self._of_y(dense_output.saved_moments(self.posterior, self.t, q))
        return Marginal(self.t, moments.mean, in_space.expand(moments.std, moments.mean))

    def sample(
        self, key: Array, num: int = 1, *, at: ArrayLike | None = None, derivative: int = 0
    ) -> PyTree[Array]:
        """Joint samples of the posterior, which needs ``smooth=True`` or ``uncertainty=mp.Transported(...)``.

        Each is one draw of the whole trajectory: correlated in time as the model says. With a structured
        covariance, unknowns (modes with ``mp.SpectralEK1``) are independent of each other, unless a spatial
        model relates them.

        Transported ensemble members are samples already: the result is the mean plus ``num`` of them, picked
        without repetition.

        Args:
            key: a key of ``jax.random``.
            num: how many samples.
            at: times, in any order; the saved ones by default.
            derivative: q ≤ ν, for samples of the q-th derivative of y.

        Returns:
            A pytree like y0, every leaf with two more axes in front: sample and time.
        """
        q = questions.derivative(self.posterior, self.t, derivative)
        if self.posterior.members is not None:
            if q > 0:
                raise ValueError(
                    "Transported members are of y, not of its derivatives; solve without uncertainty=... for "
                    "samples of these."
                )
            return self._some_members(key, num, at)
        questions.joint(self.posterior)
        num = questions.how_many(num)
        keys = jax.random.split(as_key(key), num)
        flat, shape = (None, self.t.shape) if at is None else questions.times(self.posterior, self.t, at)
        samples = sampling.sample(self.posterior, self.space, self.t, flat, keys, q)
        samples = jax.tree.map(lambda x: x.reshape(num, *shape, *x.shape[2:]), samples)
        samples = (
            samples if self.basis.is_trivial else in_space.from_modes(self.basis, samples, 1 + len(shape))
        )
        if q > 0 or self.posterior.errors is None:
            return samples
        return self._resized_samples(samples, at)

    def _resized_samples(self, samples: PyTree[Array], at: ArrayLike | None) -> PyTree[Array]:
        """Samples whose deviations from the mean are rescaled like ``std``."""
        if at is None:
            errors, mean, std, shape = self.posterior.errors, self.mean, self.filter_std, self.t.shape
        else:
            flat, shape = questions.times(self.posterior, self.t, at)
            errors = dense_output.errors_at(self.posterior, self.t, flat)
            moments = self._of_y(dense_output.moments_at(self.posterior, self.t, flat, 0))
            mean, std = in_space.in_shape(moments, shape)
        assert errors is not None
        assert errors.size is not None
        size = errors.size.reshape(shape)
        deviations = jax.tree.map(lambda x, m: x - m, samples, mean)
        return jax.tree.map(jnp.add, jax.vmap(lambda x: in_space.resized(x, std, size))(deviations), mean)

    def _some_members(self, key: Array, num: int, at: ArrayLike | None) -> PyTree[Array]:
        """The mean plus some ensemble members, each of them at most once."""
        count = jax.tree.leaves(self.posterior.members)[0].shape[1]
        chosen = jax.random.permutation(as_key(key), count)[: questions.how_many(num, count)]
        if at is None:
            mean, members = self.mean, self.members
        else:
            flat, shape = questions.times(self.posterior, self.t, at)
            errors = dense_output.errors_at(self.posterior, self.t, flat)
            members = self._as_precise(errors.members)
            members = jax.tree.map(
                lambda x: x.reshape(x.shape[0], *shape, *x.shape[2:]),
                in_space.members(self.basis, members, 1),
            )
            mean = self(at).mean
        return jax.tree.map(lambda m, e: m + e[chosen], mean, members)

    def plot(self, **options: Any) -> Any:
        """Draw the posterior with matplotlib: bands for a few unknowns, images for fields.

        Options are those of ``millipode.view.plotting.plot``: ``components``, ``samples``, ``key``,
        ``times``, ``points``, ``names``. Returns the figure.
        """
        return plotting.plot(self, **options)

    def to_xarray(self, **options: Any) -> Any:
        """Mean, standard deviation and diffusion as an ``xarray.Dataset`` with named axes.

        Options are those of ``millipode.view.datasets.to_dataset``: ``grid``, ``components``, ``samples``,
        ``attributes``.
        """
        return datasets.to_dataset(self, **options)

    @property
    def _has_one_status(self) -> bool:
        """Whether this is one solution with concrete values, rather than traced or a batch."""
        return not is_traced(self.status_code) and np.ndim(self.status_code) == 0

    @property
    def status(self) -> Any:
        """A ``Status``; an array of codes under a transformation or for a batch of solutions."""
        return Status(int(self.status_code)) if self._has_one_status else self.status_code

    @property
    def success(self) -> Any:
        """Whether the solver reached the end of the time span."""
        if self._has_one_status:
            return int(self.status_code) == Status.SUCCESS
        return self.status_code == Status.SUCCESS

    @property
    def message(self) -> str:
        """How the solve ended, in words."""
        if is_traced(self.status_code):
            return "The status is not known while JAX traces the solve."
        if not self._has_one_status:
            codes, counts = np.unique(np.asarray(self.status_code), return_counts=True)
            return "; ".join(
                f"{n} × {Status(int(c)).name}: {Status(int(c)).explanation}"
                for c, n in zip(codes, counts, strict=True)
            )
        if self.success:
            return Status.SUCCESS.explanation
        t, h = (float(x) for x in self.reached)
        what = f"{self.status.name} at t = {t:.6g} with step size {h:.3g}: {self.status.explanation}"
        return f"{what} {self.advice}" if self.advice else what

    @property
    def advice(self) -> str:
        """What to do about steps that stability limited, or linear systems that took too long; else ""."""
        if not self._has_one_status or not self.remedy:
            return ""
        attempts = int(self.stats.steps + self.stats.rejected)
        if 20 * int(self.stats.unsolved) > attempts:
            return (
                f"Linear systems did not converge in {int(self.stats.unsolved)} of {attempts} attempts. "
                f"{self.remedy}"
            )
        if int(self.stats.iterations) > MANY_ITERATIONS * attempts:
            return (
                f"Linear systems took {int(self.stats.iterations) / attempts:.0f} iterations per step. "
                f"{self.remedy}"
            )
        if int(self.stats.iterations) > 0 and not self.success:
            return (
                "If the steps are short because linear systems are solved too roughly, help the solver. "
                f"{self.remedy}"
            )
        if bool(self.stats.stiff):
            return f"Stability rather than accuracy limited the steps: the problem is stiff. {self.remedy}"
        return ""

    def __repr__(self) -> str:
        if not self._has_one_status:
            return f"Solution(t={self.t}, status_code={self.status_code})"
        d = sum(int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(self.mean))
        return (
            f"Solution({self.status.name}, d={d}, {len(self.t)} saved times, "
            f"{int(self.stats.steps)} steps, {int(self.stats.rejected)} rejected)"
        )


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
