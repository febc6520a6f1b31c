"""The compiled programs of a solve, and the loops on the host around them.

``at_once`` is the whole solve as one program. The other drivers run it in segments, for what cannot be known
beforehand: how many steps there will be to save, and when to draw the progress bar.
"""

import time
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from millipode import checks, loop
from millipode.compiling import FOR_MEMORY, ONE_KERNEL, ONE_SMALL_KERNEL, QUICKLY, Way, compiled
from millipode.control import Replay
from millipode.covariance import Covariance
from millipode.diffusion import DynamicDiffusion
from millipode.fields import Field, size
from millipode.loop import Carry, Outcome, Setup
from millipode.posterior import Marginals
from millipode.progress import Interruption, Progress, ProgressBar, Show
from millipode.saving import MAX_STRIDE, CountSteps, Record, SaveSteps
from millipode.smoothing import Gaussian
from millipode.solution import RUNNING, Status


def split(setup: Setup) -> tuple[list[Array], tuple]:
    """Arrays, which are traced, and everything else, which is hashed to find compiled code."""
    leaves, tree = jax.tree.flatten(setup)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
    constants = tuple(None if a else leaf for leaf, a in zip(leaves, is_array, strict=True))
    static = (tree, constants, tuple(is_array))
    try:
        hash(static)
    except TypeError as error:
        raise TypeError(
            "f, jacobian_diagonal and all of args but its arrays must be hashable, so that compiled code "
            f"can be found again ({error}). Use a function, a frozen dataclass or an equinox.Module."
        ) from error
    return arrays, static


def join(static: tuple, arrays: list[Array]) -> Setup:
    """What ``split`` has taken apart."""
    tree, constants, is_array = static
    moving = iter(arrays)
    merged = [next(moving) if a else c for c, a in zip(constants, is_array, strict=True)]
    return jax.tree.unflatten(tree, merged)


def _start(static: tuple, arrays: list[Array], y0: Field) -> Carry:
    setup = join(static, arrays)
    field = setup.model.vector_field
    checks.vector_field(field.f, setup.t0, y0, field.args)
    checks.jacobian_diagonal(setup.model.linearisation, setup.t0, y0, field.args)
    return loop.begin(setup, y0)


def _run(static: tuple, arrays: list[Array], carry: Carry, limit: Array) -> Carry:
    return loop.advance(join(static, arrays), carry, limit)


# Up to this many unknowns, starting kernels takes longer than running them; blocks do more for each.
SMALL, SMALL_WITH_BLOCKS = 2**10, 2**8
# From this many on, a Kronecker filter is bound by the memory.
LARGE = 2**16


def is_small(y: Field, structure: str) -> bool:
    """Whether a solve is best done in kernels of its own."""
    return size(y) <= (SMALL if structure == "kronecker" else SMALL_WITH_BLOCKS)


def _way(static: tuple, arrays: list[Array], start: Any) -> Way:
    """How to compile a solve from y₀ or from a loop's carry."""
    d = size(start.state.mean[0] if isinstance(start, Carry) else start)
    is_bound_by_memory = d >= LARGE and join(static, arrays).structure == "kronecker"
    return FOR_MEMORY if is_bound_by_memory else QUICKLY


def _way_of_loops(static: tuple, arrays: list[Array], carry: Carry, *_: Any) -> Way:
    """The same for programs that are one loop over what they are given."""
    structure = join(static, arrays).structure
    if not is_small(carry.state.mean[0], structure):
        return _way(static, arrays, carry)
    return ONE_SMALL_KERNEL if structure == "kronecker" else ONE_KERNEL


@compiled(static_argnums=0, way=_way)
def at_once(static: tuple, arrays: list[Array], y0: Field) -> Outcome:
    """The whole solve as one program."""
    setup = join(static, arrays)
    carry = _run(static, arrays, _start(static, arrays, y0), jnp.int32(setup.max_steps))
    return loop.finish(setup, carry)


begin = compiled(_start, static_argnums=0, way=_way)
advance_in_place = compiled(_run, static_argnums=0, donate_argnums=2, way=_way_of_loops)


@compiled(static_argnums=0, way=_way_of_loops)
def _complete(static: tuple, arrays: list[Array], carry: Carry, limit: Array) -> Outcome:
    return loop.finish(join(static, arrays), _run(static, arrays, carry, limit))


def in_two(static: tuple, arrays: list[Array], y0: Field) -> Outcome:
    """The start and the rest, for small problems: the loop sees nothing that XLA could know beforehand."""
    carry = begin(static, arrays, y0)
    return _complete(static, arrays, carry, np.int32(join(static, arrays).max_steps))


@compiled(static_argnums=0)
def _empty_record(static: tuple, arrays: list[Array], carry: Carry) -> Any:
    setup = join(static, arrays)
    return setup.plan.empty(setup.model, carry.state)


@compiled(static_argnums=0)
def _finish(static: tuple, arrays: list[Array], carry: Carry) -> Outcome:
    return loop.finish(join(static, arrays), carry)


@compiled(static_argnums=0, way=_way_of_loops)
def _collect_steps(
    static: tuple, arrays: list[Array], carry: Carry, record: Record, last: Gaussian
) -> tuple[Outcome, Gaussian]:
    """The outcome of one segment, given the posterior at its end; and the posterior at its start."""
    setup = join(static, arrays)
    assert isinstance(setup.plan, SaveSteps)
    saved, first = setup.plan.smoothed(setup.model, record, loop.output_scale(setup, carry), last)
    return loop.conclude(setup, carry, saved), first


def in_segments(static: tuple, arrays: list[Array], y0: Field, budget: int, progress: bool | Show) -> Outcome:
    """Advance in as many compiled segments as saving and the progress bar ask for."""
    setup = join(static, arrays)
    keeps_steps = isinstance(setup.plan, SaveSteps)
    full_records = []
    carry = begin(static, arrays, y0)
    with Pace(setup, progress) as pace:
        while True:
            carry = advance_in_place(static, arrays, carry, np.int32(pace.limit(carry)))
            carry = pace.judged(carry)
            if pace.is_over(carry):
                break
            if keeps_steps and not setup.plan.has_room(carry.record):
                full_records.append(carry.record)
                if sum(x.nbytes for x in jax.tree.leaves(full_records)) > budget:
                    carry = ended(carry, Status.OUT_OF_MEMORY)
                    break
                carry = carry._replace(record=_empty_record(static, arrays, carry))
        pace.limit(carry)
    if not keeps_steps:
        return _finish(static, arrays, carry)
    # Backwards, because what is known at the end of a segment comes from the one after it.
    outcomes, last = [], Gaussian(carry.state.mean, _square(carry.state.covariance))
    full_records.append(carry.record)
    carry = carry._replace(record=None)
    while full_records:
        outcome, last = _collect_steps(static, arrays, carry, full_records.pop(), last)
        outcomes.append(outcome)
    return trimmed(outcomes[::-1], isinstance(setup.model.diffusion, DynamicDiffusion))


@compiled
def _square(covariance: Covariance) -> Covariance:
    return covariance.square()


# Smoothing by recomputation starts with segments of this many steps, and doubles it as they become many.
FIRST_STRIDE = 16


class Trail(NamedTuple):
    """What a first pass leaves behind for a second one: a state now and then, and the times between.

    Attributes:
        starts: the states at the start of each segment.
        times: the ends of the steps of each segment.
        stride: how many steps a segment has; the last one may have fewer.
    """

    starts: list[Carry]
    times: list[np.ndarray]
    stride: int

    def coarser(self) -> "Trail":
        """Two segments become one."""
        times = [np.concatenate(pair) for pair in zip(self.times[::2], self.times[1::2], strict=True)]
        return Trail(self.starts[::2], times, 2 * self.stride)


def by_recomputation(
    static: tuple, arrays: list[Array], y0: Field, budget: int, progress: bool | Show
) -> Outcome:
    """Smooth every step in the memory of √N states: keep a state now and then, and take the steps again."""
    setup = join(static, arrays)
    carry = begin(static, arrays, y0)
    with Pace(setup, progress) as pace:
        trail, final = _there(setup, carry, budget, pace)
    return _and_back(setup, trail, final)


def _there(setup: Setup, carry: Carry, budget: int, pace: "Pace") -> tuple[Trail, Carry]:
    """Forwards, with as many states kept as there are steps between two; if more, every other is dropped."""
    trail = Trail([], [], FIRST_STRIDE)
    while True:
        if not trail.starts or trail.times[-1].size == trail.stride:
            trail.starts.append(jax.tree.map(jnp.copy, carry._replace(record=None)))
            trail.times.append(np.zeros(0, carry.h.dtype))
        room = trail.stride - trail.times[-1].size
        arrays, static = split(setup._replace(plan=CountSteps(np.asarray(room, np.int32))))
        carry = carry._replace(record=_empty_record(static, arrays, carry))
        carry = advance_in_place(static, arrays, carry, np.int32(pace.limit(carry)))
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
    outcomes = []
    last = Gaussian(final.state.mean, _square(final.state.covariance))
    while trail.starts:
        start, times = trail.starts.pop(), trail.times.pop()
        replay = Replay(np.resize(times, trail.stride), np.array(start.steps))
        again = setup._replace(plan=SaveSteps(trail.stride + 1, smooth=True), controller=replay)
        arrays, static = split(again)
        start = start._replace(
            h=jnp.zeros_like(start.h),
            status=jnp.full_like(start.status, RUNNING),
            record=_empty_record(static, arrays, start),
        )
        limit = int(start.steps) + int(start.rejected) + times.size
        segment = advance_in_place(static, arrays, start, np.int32(limit))
        outcome, last = _collect_steps(static, arrays, final, segment.record, last)
        marginals = Marginals(outcome.posterior.mean[:1], outcome.posterior.std, None)
        outcomes.append(outcome._replace(posterior=jax.tree.map(np.asarray, marginals)))
    return trimmed(outcomes[::-1], isinstance(setup.model.diffusion, DynamicDiffusion))


def ended(carry: Carry, status: Status) -> Carry:
    """A loop that the host ends."""
    return carry._replace(status=jnp.asarray(status, jnp.int32))


class Pace:
    """Says how long a segment may be, and when there shall be no more of them.

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
        """Show how far it has come, and say up to how many attempts to go on."""
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
        """Ended, if somebody has asked for that while it was running."""
        is_running = int(carry.status) == RUNNING
        return ended(carry, Status.INTERRUPTED) if is_running and self.interruption.requested else carry

    def is_over(self, carry: Carry) -> bool:
        """Whether there is nothing more to do."""
        attempts = int(carry.steps) + int(carry.rejected)
        return int(carry.status) != RUNNING or attempts >= self.max_steps


def trimmed(outcomes: list[Outcome], dynamic: bool) -> Outcome:
    """Valid entries only; each record but the first starts with the last entry of the one before.

    On the host, because the number of steps differs from solve to solve and nothing should compile.
    """
    final = outcomes[-1]
    spans = [slice(0 if i == 0 else 1, int(o.valid)) for i, o in enumerate(outcomes)]

    def concatenate(*parts: Array) -> Array:
        return jnp.asarray(np.concatenate([np.asarray(p)[s] for p, s in zip(parts, spans, strict=True)]))

    return final._replace(
        t=concatenate(*(o.t for o in outcomes)),
        posterior=final.posterior.joined([o.posterior for o in outcomes[:-1]], concatenate),
        gamma=jax.tree.map(concatenate, *(o.gamma for o in outcomes)) if dynamic else final.gamma,
    )
