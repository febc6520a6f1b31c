"""What a solve keeps: its end, every step, or given times.

Each plan writes into buffers of fixed length inside the compiled loop. Saving never steers the steps: a
save time inside a step gets the model's own prediction from the step's start. Standard deviations are kept
in the covariance's own shape (one number per time if all unknowns share it) and expanded at the end.
"""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.autodiff import while_loop
from millipode.diffusion import DynamicDiffusion
from millipode.fields import Scale
from millipode.step import Attempt, Filter, Marginal, State, predict


class Entry(NamedTuple):
    """One saved time, or with a leading axis all of them."""

    t: Array
    marginal: Marginal
    diffusion: Scale | None  # γ̂² of the step that the time lies in, if dynamic


class Record(NamedTuple):
    """Buffers for entries, and how many of them hold one."""

    buffers: Any
    filled: Array


class SavePlan(eqx.Module):
    """When to save, and where."""

    @abc.abstractmethod
    def empty(self, model: Filter, state: State) -> Record:
        """The record of a loop that starts at this state."""

    @abc.abstractmethod
    def before_step(
        self, model: Filter, state: State, a: Attempt, accept: Array, record: Record, reverse: bool
    ) -> Record:
        """Save what the step passes over, as seen from its start."""

    @abc.abstractmethod
    def after_step(self, model: Filter, state: State, accept: Array, record: Record) -> Record:
        """Save the state that the step has led to."""

    @abc.abstractmethod
    def has_room(self, record: Record) -> Array | bool:
        """Whether another step can be saved."""

    @abc.abstractmethod
    def entries(self, model: Filter, state: State, record: Record, arrived: Array) -> tuple[Entry, Array]:
        """All entries, time first, and how many are valid; ``arrived`` says whether t = t₁."""


class SaveEnd(SavePlan):
    """Only the last state."""

    def empty(self, model: Filter, state: State) -> Record:
        """Nothing."""
        return Record(None, jnp.ones((), jnp.int32))

    def before_step(
        self, model: Filter, state: State, a: Attempt, accept: Array, record: Record, reverse: bool
    ) -> Record:
        """Nothing."""
        return record

    def after_step(self, model: Filter, state: State, accept: Array, record: Record) -> Record:
        """Nothing."""
        return record

    def has_room(self, record: Record) -> bool:
        """Always."""
        return True

    def entries(self, model: Filter, state: State, record: Record, arrived: Array) -> tuple[Entry, Array]:
        """The state itself, as a series of length one."""
        return jax.tree.map(lambda x: x[None], _entry(model, state)), record.filled


class SaveSteps(SavePlan):
    """The initial state and every accepted step.

    Attributes:
        capacity: the length of the buffers.
    """

    capacity: int = eqx.field(static=True)

    def empty(self, model: Filter, state: State) -> Record:
        """The state itself in slot 0."""
        buffers = _allocate(_entry(model, state), self.capacity)
        return Record(_put(buffers, _entry(model, state), 0), jnp.ones((), jnp.int32))

    def before_step(
        self, model: Filter, state: State, a: Attempt, accept: Array, record: Record, reverse: bool
    ) -> Record:
        """Nothing."""
        return record

    def after_step(self, model: Filter, state: State, accept: Array, record: Record) -> Record:
        """The new state in the next slot, if the step was accepted."""
        buffers = _put(record.buffers, _entry(model, state), record.filled, accept)
        return Record(buffers, record.filled + accept.astype(jnp.int32))

    def has_room(self, record: Record) -> Array:
        """Whether a slot is free."""
        return record.filled < self.capacity

    def entries(self, model: Filter, state: State, record: Record, arrived: Array) -> tuple[Entry, Array]:
        """The buffers. Free slots repeat the last entry; t₀ shares the first step's diffusion."""
        entries = _fill(record.buffers, _entry(model, state), record.filled)
        diffusion = jax.tree.map(lambda x: x.at[0].set(x[1]), entries.diffusion)
        return entries._replace(diffusion=diffusion), record.filled


class SaveTimes(SavePlan):
    """Given times, in the direction of integration.

    Attributes:
        times: where to save.
    """

    times: Float[Array, " k"]

    def empty(self, model: Filter, state: State) -> Record:
        """Free buffers, NaN until a time is reached."""
        buffers = _allocate(_entry(model, state), self.times.shape[0])
        buffers = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), buffers)
        return Record(buffers._replace(t=self.times), jnp.zeros((), jnp.int32))

    def before_step(
        self, model: Filter, state: State, a: Attempt, accept: Array, record: Record, reverse: bool
    ) -> Record:
        """All times in [t, t + h) of an accepted step, predicted from t."""
        size, sign = self.times.shape[0], model.vector_field.sign

        def ahead(count: Array) -> Array:
            return self.times[jnp.minimum(count, size - 1)]

        def passes(r: Record) -> Array:
            return accept & (r.filled < size) & (sign * (a.t - ahead(r.filled)) > 0)

        def save(r: Record) -> Record:
            t = ahead(r.filled)
            h = sign * (t - state.t)
            h = jnp.where(h >= 0, h, jnp.nan)  # traced times cannot be checked beforehand
            marginal = predict(model, state, h, a.filter_scale)
            entry = Entry(t, marginal, _dynamic(model, a.local_scale))
            return Record(_put(r.buffers, entry, r.filled), r.filled + 1)

        return while_loop(passes, save, record, reverse=reverse, max_steps=size, buffers=lambda r: r.buffers)

    def after_step(self, model: Filter, state: State, accept: Array, record: Record) -> Record:
        """Nothing: a time at the end of a step is passed by the next step."""
        return record

    def has_room(self, record: Record) -> bool:
        """Always."""
        return True

    def entries(self, model: Filter, state: State, record: Record, arrived: Array) -> tuple[Entry, Array]:
        """The buffers, with the last state for a time at t₁ itself."""
        size = self.times.shape[0]
        start = jnp.where(arrived, record.filled, size)
        last = _entry(model, state)
        # Times beyond t₁, which only traced ones can be, are never reached.
        beyond = jnp.any(model.vector_field.sign * (self.times - state.t) > 0)
        last = jax.tree.map(lambda x: jnp.where(beyond, jnp.nan, x), last)
        entries = _fill(record.buffers, last, start)
        return entries._replace(t=self.times), jnp.where(arrived, size, record.filled)


def _entry(model: Filter, state: State) -> Entry:
    """The state's own marginal."""
    zero = jnp.zeros_like(state.t)
    row = (zero + 1, *(None,) * (len(state.mean) - 1))
    std = state.covariance.std(state.mean[0], row, zero, zero)
    return Entry(state.t, Marginal(state.mean[0], std), _dynamic(model, state.calibration))


def _dynamic(model: Filter, scale: Scale) -> Scale | None:
    dynamic = isinstance(model.diffusion, DynamicDiffusion)
    return jax.tree.map(jnp.square, scale) if dynamic else None


def _allocate(entry: Entry, length: int) -> Entry:
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), entry)


def _put(buffers: Entry, entry: Entry, slot: Array | int, accept: Any = True) -> Entry:
    # The loop wraps its buffers, so the entry leads the traversal.
    return jax.tree.map(lambda x, buffer: eqxi.buffer_at_set(buffer, slot, x, pred=accept), entry, buffers)


def _fill(buffers: Entry, entry: Entry, count: Array) -> Entry:
    """Put ``entry`` into every slot from ``count`` on."""

    def leafwise(buffer: Array, x: Array) -> Array:
        used = jnp.arange(buffer.shape[0]) < count
        return jnp.where(used.reshape(-1, *(1,) * x.ndim), buffer, x)

    return jax.tree.map(leafwise, buffers, entry)
