"""Step sizes: the weights of the error norm, the PI controller, fixed steps, and the first step."""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from millipode.linalg.arguments import check_numeric, is_number
from millipode.linalg.fields import Coefficient, Field, map_leaves
from millipode.model.initialisation import Start
from millipode.xla.module import Module
from millipode.xla.tracing import is_traced


def weights(y: Field, rtol: Coefficient, atol: Coefficient, other: Field | None = None) -> Field:
    """atol + rtol·max(|y|, |other|), kept away from zero: one field like y."""
    other = y if other is None else other

    def leafwise(a: Array, b: Array, r: Array, s: Array) -> Array:
        least = jnp.maximum(s, jnp.finfo(a.dtype).tiny)  # of a number, mostly, and not of every unknown
        return least + r * jnp.maximum(jnp.abs(a), jnp.abs(b))

    return map_leaves(leafwise, y, other, rtol, atol)


class Controller(Module):
    """Decides whether a step is accepted, and how long the next one is. All arguments are numbers."""

    @abc.abstractmethod
    def accepts(self, error: Array) -> Array:
        """Whether a step with this error (in units of the tolerance) stands. NaN never does."""

    @abc.abstractmethod
    def next_step(self, h: Array, error: Array, previous: Array, order: int) -> Array:
        """The length of the next step.

        Args:
            h: the length of this step.
            error: its error in units of the tolerance.
            previous: the error of the last accepted step before it.
            order: ν.
        """

    def if_diverged(self, error: Array, diverged: Array, order: int) -> Array:
        """The error of a step, or a larger one if its corrections diverged: one that half the step has."""
        return jnp.where(diverged, jnp.maximum(error, 2.0 ** (order + 1)), error)

    @abc.abstractmethod
    def end_of_step(self, t0: Array, t: Array, sign: Array, h: Array, steps: Array) -> Array:
        """The user's time at which a step of length h ends.

        Args:
            t0: where the solve started.
            t: where the step starts.
            sign: +1 forwards in time, −1 backwards.
            h: its length, positive.
            steps: the number of accepted steps so far.
        """

    @abc.abstractmethod
    def first_step(self, start: Start, order: int) -> Array:
        """The length of the first step."""

    @property
    def knows_first_step(self) -> bool:
        """Whether the first step is fixed already, so that the user cannot choose it."""
        return False

    def fitted(self, kind: Any) -> "Controller":
        """The same controller for a problem whose y has this dtype."""
        return self

    def expected_steps(self, span: float, typical: int) -> int:
        """How many steps to plan for over a time span; ``typical`` where that cannot be known."""
        return typical


class PIController(Controller):
    """h ← h · (s^(ν+1)/E)^(kI/(ν+1)) · (E_previous/E)^(kP/(ν+1)), Gustafsson's PI control.

    The local error behaves like h^(ν+1), so E settles at s^(ν+1). The proportional term damps the
    oscillation of the step size that integral control alone (kI = 1, kP = 0) shows where stability,
    not accuracy, limits the step. A rejected step shrinks by its own error alone.

    Steps at most double by default. Such a step is no longer than the time since the last rejection, so it
    does not leap over a kink that comes back with some period; with longer leaps, that goes unnoticed.

    Args:
        safety: s, how far below the step of the tolerance to aim.
        integral: kI.
        proportional: kP.
        shrink: the smallest factor between two steps.
        grow: the largest factor between two steps.
    """

    safety: float = eqx.field(static=True, default=0.85)
    integral: float = eqx.field(static=True, default=0.3)
    proportional: float = eqx.field(static=True, default=0.4)
    shrink: float = eqx.field(static=True, default=0.2)
    grow: float = eqx.field(static=True, default=2.0)

    def __check_init__(self) -> None:
        if not 0 < self.shrink < 1 < self.grow or not 0 < self.safety <= 1:
            raise ValueError(
                "PIController needs 0 < shrink < 1 < grow and 0 < safety <= 1, got "
                f"shrink={self.shrink}, grow={self.grow}, safety={self.safety}."
            )

    def accepts(self, error: Array) -> Array:
        """An error at or below the tolerance."""
        return error <= 1

    def next_step(self, h: Array, error: Array, previous: Array, order: int) -> Array:
        """The PI formula after success, the I formula after failure, ``shrink`` after NaN."""
        floor = jnp.asarray(1e-10, error.dtype)  # an error of 0 asks for the largest growth
        safe = jnp.where(jnp.isfinite(error), jnp.maximum(error, floor), 1)
        k_i, k_p = self.integral / (order + 1), self.proportional / (order + 1)
        after_success = self.safety**self.integral * safe ** (-k_i - k_p) * previous**k_p
        after_failure = self.safety * safe ** (-1 / (order + 1))
        factor = jnp.where(error <= 1, after_success, after_failure)
        factor = jnp.clip(factor, self.shrink, jnp.where(error <= 1, self.grow, 1.0))
        return h * jnp.where(jnp.isfinite(error), factor, self.shrink)

    def end_of_step(self, t0: Array, t: Array, sign: Array, h: Array, steps: Array) -> Array:
        """At t ± h."""
        return t + sign * h

    def first_step(self, start: Start, order: int) -> Array:
        """Where the leading error term reaches a hundredth of the tolerance.

        In the manner of Hairer, Nørsett and Wanner (II.4), but free of units: with a time scale s,
        derivative ν+1 is about s^(−ν−1) times what y changes by within s. That time scale is the one of y',
        because unknowns that start at zero make the one of y itself far too short.
        """

        def within(s: Array) -> Array:
            change = jnp.maximum(start.d1 * s, start.d2 * s**2)
            h = s * (0.01 / jnp.where(change > 0, change, 1)) ** (1 / (order + 1))
            return jnp.where(change > 0, h, 0.01 * start.span)

        h = jnp.minimum(within(start.time_scale_of_slope), 1000 * within(start.time_scale))
        h = jnp.minimum(h, start.span)
        return jnp.where(jnp.isfinite(h) & (h > 0), h, 1e-6 * start.span)


class FixedStep(Controller):
    """Steps of length h, the last one cut to end at t₁; every finite step is accepted.

    Args:
        h: the step, positive in either direction of time.
    """

    h: Array | float

    def __check_init__(self) -> None:
        if is_number(self.h) and not 0 < self.h < math.inf:
            raise ValueError(f"FixedStep: h must be positive and finite, got {self.h}.")

    @property
    def knows_first_step(self) -> bool:
        """Always."""
        return True

    def fitted(self, kind: Any) -> "FixedStep":
        """The same step in the precision of y."""
        return FixedStep(positive_step(self.h, "FixedStep: h", kind))

    def accepts(self, error: Array) -> Array:
        """Any finite error."""
        return jnp.isfinite(error)

    def next_step(self, h: Array, error: Array, previous: Array, order: int) -> Array:
        """The same step; 0 after NaN, as there is no smaller one to try."""
        return jnp.where(jnp.isfinite(error), jnp.asarray(self.h, h.dtype), 0)

    def end_of_step(self, t0: Array, t: Array, sign: Array, h: Array, steps: Array) -> Array:
        """t₀ ± (N+1)h: counted, so that rounding does not pile up."""
        return t0 + sign * h * (steps + 1).astype(h.dtype)

    def first_step(self, start: Start, order: int) -> Array:
        """The same as all others."""
        return jnp.asarray(self.h, start.span.dtype)

    def expected_steps(self, span: float, typical: int) -> int:
        """The span divided by h."""
        return math.ceil(span / float(self.h)) if math.isfinite(span) else typical


class Replay(Controller):
    """The steps of an earlier solve, once more.

    Attributes:
        times: where they end.
        start: how many steps came before.
    """

    times: ArrayLike
    start: ArrayLike

    def accepts(self, error: Array) -> Array:
        """Every step, since it was accepted before."""
        return jnp.isfinite(error)

    def next_step(self, h: Array, error: Array, previous: Array, order: int) -> Array:
        """0, because ``end_of_step`` is all that counts."""
        return jnp.zeros_like(h)

    def end_of_step(self, t0: Array, t: Array, sign: Array, h: Array, steps: Array) -> Array:
        """The next of the times."""
        return jnp.asarray(self.times)[steps - self.start]

    def first_step(self, start: Start, order: int) -> Array:
        """0, because ``end_of_step`` is all that counts."""
        return jnp.zeros_like(start.span)


def positive_step(h: Any, name: str, kind: Any) -> Any:
    """A step size of dtype ``kind``; raise ``ValueError`` unless it is a positive number."""
    check_numeric(h, name)
    step = h.astype(kind) if isinstance(h, jax.Array) else np.asarray(h, kind)
    if np.ndim(step) != 0 or (not is_traced(step) and not 0 < step < np.inf):
        raise ValueError(
            f"{name} must be a positive, finite scalar (in either direction of time), got {step}."
        )
    return step
