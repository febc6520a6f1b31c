"""Smoothing by recomputation: every step in the memory of √N states, for the price of a second pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millipode.filter.control import Replay
from millipode.linalg.fields import Field
from millipode.posterior.posterior import Marginals
from millipode.run import programs
from millipode.run.loop import Carry, Setup
from millipode.run.outcome import Outcome
from millipode.run.packing import Packed
from millipode.run.progress import Show
from millipode.run.segments import Pace, ended, last_state, trimmed
from millipode.save.plans import MAX_STRIDE, CountSteps, SaveSteps
from millipode.status import RUNNING, Status

# Segments have this many steps at first, and twice as many whenever there are too many segments.
FIRST_STRIDE = 16


class Trail(NamedTuple):
    """What a first pass leaves behind for a second one.

    Attributes:
        starts: the states at the start of each segment.
        times: the ends of the steps of each segment.
        stride: how many steps a segment has; the last one may have fewer.
    """

    starts: list[Carry]
    times: list[np.ndarray]
    stride: int

    def coarser(self) -> "Trail":
        """The same with two segments made one."""
        times = [np.concatenate(pair) for pair in zip(self.times[::2], self.times[1::2], strict=True)]
        return Trail(self.starts[::2], times, 2 * self.stride)


def by_recomputation(packed: Packed, y0: Field, budget: int, progress: bool | Show) -> Outcome:
    """Solve once and keep a state now and then; then take all steps again, backwards by segments."""
    carry = programs.begin(packed, y0)
    with Pace(packed.setup, progress) as pace:
        trail, final = _there(packed.setup, carry, budget, pace)
    return _and_back(packed.setup, trail, final)


def _there(setup: Setup, carry: Carry, budget: int, pace: Pace) -> tuple[Trail, Carry]:
    """Forwards, with as many states kept as there are steps between two; if more, every other is dropped."""
    trail = Trail([], [], FIRST_STRIDE)
    while True:
        if not trail.starts or trail.times[-1].size == trail.stride:
            trail.starts.append(jax.tree.map(jnp.copy, carry._replace(record=None)))
            trail.times.append(np.zeros(0, carry.h.dtype))
        room = trail.stride - trail.times[-1].size
        packed = Packed(setup._replace(plan=CountSteps(np.asarray(room, np.int32))))
        carry = carry._replace(record=programs.empty_record(packed, carry))
        carry = programs.go_on(packed, carry, np.int32(pace.limit(carry)))
        assert carry.record is not None
        times = np.asarray(carry.record.buffers)[: int(carry.record.filled)]
        trail.times[-1] = np.concatenate([trail.times[-1], times])
        carry = pace.judged(carry)
        if pace.is_over(carry):
            break
        if len(trail.starts) == trail.stride < MAX_STRIDE and trail.times[-1].size == trail.stride:
            trail = trail.coarser()
        if sum(x.nbytes for x in jax.tree.leaves(trail.starts)) > budget:
            carry = ended(carry, Status.OUT_OF_MEMORY)
            break
    pace.limit(carry)
    return trail, carry._replace(record=None)


def _and_back(setup: Setup, trail: Trail, final: Carry) -> Outcome:
    """Backwards: each segment is solved once more from its state, smoothed, and reduced to y alone."""
    outcomes, last = [], last_state(final)
    while trail.starts:
        start, times = trail.starts.pop(), trail.times.pop()
        replay = Replay(np.resize(times, trail.stride), np.array(start.steps))
        packed = Packed(setup._replace(plan=SaveSteps(trail.stride + 1, smooth=True), controller=replay))
        start = start._replace(
            h=jnp.zeros_like(start.h),
            status=jnp.full_like(start.status, RUNNING),
            record=programs.empty_record(packed, start),
        )
        limit = int(start.steps) + int(start.rejected) + times.size
        segment = programs.go_on(packed, start, np.int32(limit))
        outcome, last = programs.collect_steps(packed, final, segment.record, last)
        marginals = Marginals(outcome.posterior.mean[:1], outcome.posterior.std, outcome.posterior.errors)
        outcomes.append(outcome._replace(posterior=jax.tree.map(np.asarray, marginals)))
    return trimmed(outcomes[::-1], setup)
