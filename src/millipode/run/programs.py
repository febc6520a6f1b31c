"""The compiled programs of a solve.

``at_once`` is the whole solve as one program. The others are its parts, for hosts that run it in
segments: when the number of steps to save is not known beforehand, or a progress bar is drawn.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from millipode.covariance import STRUCTURES, Covariance
from millipode.linalg.fields import Coefficient, Field, size
from millipode.run import loop, outcome
from millipode.run.loop import Carry
from millipode.run.outcome import Outcome
from millipode.run.packing import Packed, Recent
from millipode.save.plans import SaveSteps
from millipode.save.protocol import Record
from millipode.smooth.bridge import Gaussian
from millipode.status import RUNNING
from millipode.xla.compiling import (
    FOR_MEMORY,
    ONE_KERNEL,
    ONE_SMALL_KERNEL,
    QUICKLY,
    Way,
    compiled,
    disguised,
)

# Up to this many unknowns, starting kernels takes longer than running them; blocks do more for each.
SMALL, SMALL_WITH_BLOCKS = 2**10, 2**8
# Small problems that were found to be stiff.
_KNOWN_STIFF = Recent(256)
# From this many on, a filter with one block for all unknowns is bound by the memory.
LARGE = 2**16


def is_small(y: Field, structure: str) -> bool:
    """Whether a solve is best done in kernels of its own."""
    return size(y) <= (SMALL if STRUCTURES[structure].is_shared else SMALL_WITH_BLOCKS)


def _way_from(y: Field, packed: Packed) -> Way:
    is_bound_by_memory = size(y) >= LARGE and STRUCTURES[packed.setup.structure].is_shared
    return FOR_MEMORY if is_bound_by_memory else QUICKLY


def _way(packed: Packed, y0: Field) -> Way:
    """How to compile a program without a loop, or for a large problem."""
    return _way_from(y0, packed)


def _way_of_solve(packed: Packed, y: Field) -> Way:
    """How to compile programs that are one loop with little around it."""
    structure = packed.setup.structure
    if not is_small(y, structure):
        return _way_from(y, packed)
    return ONE_SMALL_KERNEL if STRUCTURES[structure].is_shared else ONE_KERNEL


def _way_of_loops(packed: Packed, carry: Carry, *_: Any) -> Way:
    """The same for loops that go on from a carry."""
    return _way_of_solve(packed, carry.state.mean[0])


def _begin(packed: Packed, y0: Field) -> Carry:
    setup = packed.setup
    setup.model.information.check(setup.t0, y0)
    return loop.begin(setup, y0)


def _advance(packed: Packed, carry: Carry, limit: Array) -> Carry:
    return loop.advance(packed.setup, carry, limit)


begin = compiled(_begin, way=_way)
advance_in_place = compiled(_advance, donate_argnums=1, way=_way_of_loops)


def go_on(packed: Packed, carry: Carry, limit: np.int32) -> Carry:
    """Steps up to a number of attempts; the carry is overwritten.

    What implicit steps of an automatic choice need is compiled once it is needed.
    """
    if packed.setup.alone:
        if not _is_stiff(carry):
            carry = advance_in_place(packed, carry, limit)
        if not _is_stiff(carry):
            return carry
        packed = packed.together
    return advance_in_place(packed, carry, limit)


def _is_stiff(carry: Carry) -> bool:
    """Whether implicit steps were called for, now or earlier."""
    return carry.switch is not None and bool(carry.switch.times)


def whole(packed: Packed, y0: Field) -> Outcome:
    """The whole solve, in as few programs as possible."""
    if not packed.setup.alone:
        return at_once(packed, y0)
    if not is_small(y0, packed.setup.structure):
        carry = go_on(packed, begin(packed, y0), np.int32(packed.setup.max_steps))
        return finish(packed, carry)
    if packed not in _KNOWN_STIFF:
        result = at_once(packed, y0)
        if int(result.status) != RUNNING:
            return result
        # To return the state as well would make all small solves slower. So this one is made again from the
        # start, and at once by the right program from now on.
        _KNOWN_STIFF.add(packed)
    return at_once(packed.together, y0)


@compiled(way=_way_of_solve)
def at_once(packed: Packed, y0: Field) -> Outcome:
    """The whole solve as one program."""
    setup = packed.setup
    carry, limit = _begin(packed, y0), jnp.int32(setup.max_steps)
    if is_small(y0, setup.structure):
        carry, limit = disguised((carry, limit), setup.t0)
    return outcome.finish(setup, _advance(packed, carry, limit))


@compiled
def empty_record(packed: Packed, carry: Carry) -> Record:
    """A record to go on with."""
    return packed.setup.plan.empty(packed.setup.model, carry.state)


@compiled
def finish(packed: Packed, carry: Carry) -> Outcome:
    """The outcome of a loop that has ended."""
    return outcome.finish(packed.setup, carry)


@compiled(way=_way_of_loops)
def collect_steps(packed: Packed, carry: Carry, record: Record, last: Gaussian) -> tuple[Outcome, Gaussian]:
    """The outcome of one segment, given the posterior at its end; and the posterior at its start."""
    setup = packed.setup
    assert isinstance(setup.plan, SaveSteps)
    gamma: Coefficient = outcome.output_gamma(setup, carry)
    saved, first = setup.plan.smoothed(setup.model, record, gamma, last)
    return outcome.conclude(setup, carry, saved), first


@compiled
def square(covariance: Covariance) -> Covariance:
    """The same covariance, as the smoother needs it."""
    return covariance.square()
