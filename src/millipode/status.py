"""How a solve ended, and what it took."""

import enum
from typing import NamedTuple

from jaxtyping import Array

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
        "The maximum number of steps was reached before the end of the time span. Raise max_steps, or "
        "loosen rtol and atol."
    ),
    Status.STEP_TOO_SMALL: (
        "The step size fell below what the floating-point format can resolve. The solution may be "
        "singular here, f may jump (a lower order copes better), or the tolerance is too tight: loosen rtol "
        "and atol, or enable float64."
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
        "The solver reached the end of the time span, and its mean is valid; but ensemble members (or the "
        "error estimate that sol.std comes from) became infinite or NaN on the way, so that nothing is known "
        "of its uncertainty: the linearised ODE amplifies errors beyond all bounds. Tighten rtol and atol, "
        "or look at filter_std."
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
        f_evals: evaluations of f, including those of the initialisation.
        diverged: attempts whose corrections did not contract; a step size controller rejects these.
        stiff: whether stability, rather than accuracy, chose most steps.
        doubtful: whether the errors behind ``sol.std`` have outgrown their linear model, by more than a
            factor of 100 in the residuals of the last step; so they do once a chaotic solution has no digits.
        iterations: of the linear solver of an EK1, each one JVP of f; 0 if systems are solved directly.
        unsolved: attempts in which that solver did not converge; they were rejected.
        implicit: accepted steps that solved linear systems: all of those of an EK1, some of ``mp.Auto``'s.
    """

    steps: Array
    rejected: Array
    f_evals: Array
    diverged: Array
    stiff: Array
    doubtful: Array
    iterations: Array
    unsolved: Array
    implicit: Array
