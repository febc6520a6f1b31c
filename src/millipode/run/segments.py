"""A solve in segments, between which the host collects steps, shows progress, and listens to Ctrl-C."""

import time
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from millipode.linalg.fields import Field
from millipode.run import programs
from millipode.run.loop import Carry, Setup
from millipode.run.outcome import Outcome
from millipode.run.packing import Packed
from millipode.run.progress import Interruption, Progress, ProgressBar, Show
from millipode.save.protocol import Record
from millipode.smooth.bridge import Gaussian
from millipode.status import RUNNING, Status


def in_segments(packed: Packed, y0: Field, budget: int, progress: bool | Show) -> Outcome:
    """Advance in as many compiled segments as saving and the progress bar ask for."""
    plan = packed.setup.plan
    full_records: list[Record] = []
    carry = programs.begin(packed, y0)
    with Pace(packed.setup, progress) as pace:
        while True:
            carry = programs.go_on(packed, carry, np.int32(pace.limit(carry)))
            carry = pace.judged(carry)
            if pace.is_over(carry):
                break
            record = carry.record
            assert record is not None
            if plan.in_segments and not plan.has_room(record):
                if sum(x.nbytes for x in jax.tree.leaves((full_records, record))) > budget:
                    carry = ended(carry, Status.OUT_OF_MEMORY)
                    break
                full_records.append(record)
                carry = carry._replace(record=programs.empty_record(packed, carry))
        pace.limit(carry)
    if not plan.in_segments:
        return programs.finish(packed, carry)
    # Backwards, because what is known at the end of a segment comes from the one after it.
    outcomes, last = [], last_state(carry)
    assert carry.record is not None
    full_records.append(carry.record)
    carry = carry._replace(record=None)
    while full_records:
        outcome, last = programs.collect_steps(packed, carry, full_records.pop(), last)
        outcomes.append(outcome)
    return trimmed(outcomes[::-1], packed.setup)


def last_state(carry: Carry) -> Gaussian:
    """The posterior at the end, from which smoothing starts."""
    return Gaussian(carry.state.mean, programs.square(carry.state.covariance))


def ended(carry: Carry, status: Status) -> Carry:
    """A loop that the host has ended."""
    return carry._replace(status=jnp.asarray(status, jnp.int32))


class Pace:
    """Says how long a segment may be, and when there are no more of them.

    With progress to show, a segment lasts about a fifth of a second.
    """

    def __init__(self, setup: Setup, progress: bool | Show):
        self.bar = ProgressBar(float(setup.t0), float(setup.t1)) if progress is True else None
        self.show = progress if callable(progress) else self.bar
        self.interruption = Interruption()
        self.max_steps, self.chunk, self.done = setup.max_steps, 8, 0
        self.clock = time.perf_counter()

    def __enter__(self) -> Self:
        self.interruption.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.interruption.__exit__(*error)
        if self.bar is not None:
            self.bar.close()

    def limit(self, carry: Carry) -> int:
        """Show how far the solve has come, and say up to how many attempts to go on."""
        if self.show is None:
            return self.max_steps
        accepted, rejected = int(carry.steps), int(carry.rejected)
        now = time.perf_counter()
        elapsed, attempts = now - self.clock, accepted + rejected
        rate = (attempts - self.done) / elapsed if elapsed > 0 else 0.0
        if attempts:
            self.show(Progress(float(carry.state.t), float(carry.h), accepted, rejected, rate))
            self.chunk = max(1, min(4 * self.chunk, int(0.2 * rate)))
        self.clock, self.done = now, attempts
        return min(self.max_steps, attempts + self.chunk)

    def judged(self, carry: Carry) -> Carry:
        """The carry; ended, if somebody has asked for that while it was running."""
        is_running = int(carry.status) == RUNNING
        return ended(carry, Status.INTERRUPTED) if is_running and self.interruption.requested else carry

    def is_over(self, carry: Carry) -> bool:
        """Whether there is nothing more to do."""
        attempts = int(carry.steps) + int(carry.rejected)
        return int(carry.status) != RUNNING or attempts >= self.max_steps


def trimmed(outcomes: list[Outcome], setup: Setup) -> Outcome:
    """Valid entries only; each record but the first starts with the last entry of the one before.

    On the host, because the number of steps differs from solve to solve and nothing should compile.
    """
    final = outcomes[-1]
    spans = [slice(0 if i == 0 else 1, int(o.valid)) for i, o in enumerate(outcomes)]

    def concatenate(*parts: Array) -> Array:
        return jnp.asarray(np.concatenate([np.asarray(p)[s] for p, s in zip(parts, spans, strict=True)]))

    is_dynamic = setup.model.diffusion.is_dynamic
    return final._replace(
        t=concatenate(*(o.t for o in outcomes)),
        posterior=final.posterior.joined([o.posterior for o in outcomes[:-1]], concatenate),
        gamma=jax.tree.map(concatenate, *(o.gamma for o in outcomes)) if is_dynamic else final.gamma,
    )
