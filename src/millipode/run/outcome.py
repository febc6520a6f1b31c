"""What a finished loop leaves: everything that was saved, calibrated, with evidence, status and counts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.filter import defects
from millipode.filter.calibration import Evidence
from millipode.linalg.fields import Coefficient, all_finite, safe_sqrt, size
from millipode.posterior.posterior import Posterior
from millipode.run.loop import Carry, Setup
from millipode.save.protocol import Saved
from millipode.status import RUNNING, Stats, Status


class Outcome(NamedTuple):
    """A finished solve.

    Attributes:
        t: the saved times.
        posterior: at these times.
        gamma: γ̂, time first if dynamic.
        log_evidence: of all steps.
        status: a ``Status``.
        valid: how many of the saved times were reached.
        stats: counts.
        reached: the last time, and the last step size.
    """

    t: Array
    posterior: Posterior
    gamma: Coefficient
    log_evidence: Array
    status: Array
    valid: Array
    stats: Stats
    reached: tuple[Array, Array]


def finish(setup: Setup, carry: Carry) -> Outcome:
    """Calibrate everything that leaves the solver."""
    assert carry.record is not None
    arrived, gamma = carry.status == Status.SUCCESS, output_gamma(setup, carry)
    saved = setup.plan.collect(setup.model, carry.state, carry.record, arrived, gamma)
    return conclude(setup, carry, saved)


def output_gamma(setup: Setup, carry: Carry) -> Coefficient:
    """The factor that calibrates the filter's standard deviations after the fact."""
    return setup.model.diffusion.output_gamma(_diffusion(setup, carry))


def _diffusion(setup: Setup, carry: Carry) -> Coefficient:
    """γ̂²."""
    state = carry.state
    return setup.model.diffusion.calibrated(state.calibration, carry.steps, state.mean[0])


def conclude(setup: Setup, carry: Carry, saved: Saved) -> Outcome:
    """Evidence, status and counts, beside what was saved."""
    model, state = setup.model, carry.state
    y, diffusion = state.mean[0], _diffusion(setup, carry)
    evidence = Evidence(diffusion, carry.steps, state.quadratic, state.log_det, state.rank, size(y))
    over = (carry.status == RUNNING) & (carry.steps + carry.rejected >= setup.max_steps)
    status = jnp.where(over, Status.MAX_STEPS, carry.status)
    arrived = carry.status == Status.SUCCESS
    finite = all_finite((y, state.covariance))
    status = jnp.where(finite | ~arrived, status, Status.NON_FINITE)
    if state.members is not None:
        lost = (status == Status.SUCCESS) & ~all_finite(state.members.chunks)
        status = jnp.where(lost, Status.MEMBERS_NON_FINITE, status)
    return Outcome(
        t=saved.t,
        posterior=saved.posterior,
        gamma=jax.tree.map(safe_sqrt, diffusion) if saved.gamma is None else saved.gamma,
        log_evidence=model.diffusion.log_evidence(evidence),
        status=status.astype(jnp.int32),
        valid=saved.valid,
        stats=_stats(carry),
        reached=(state.t, carry.h),
    )


def _stats(carry: Carry) -> Stats:
    attempts = carry.steps + carry.rejected
    # Where corrections limit the steps, nearly every accepted step is followed by a rejected one.
    stiff, members = 3 * carry.limited > attempts, carry.state.members
    doubtful = jnp.zeros((), bool) if members is None else members.contradiction > defects.DOUBTFUL
    return Stats(
        steps=carry.steps,
        rejected=carry.rejected,
        f_evals=carry.f_evals,
        diverged=carry.diverged,
        stiff=stiff,
        doubtful=doubtful,
        iterations=carry.iterations,
        unsolved=carry.unsolved,
        implicit=carry.implicit,
    )
