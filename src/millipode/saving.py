"""What a solve keeps: its end, every step, or given times.

Each plan writes into buffers of fixed length inside the compiled loop. Saving never steers the steps: a
save time inside a step gets the model's own prediction from the step's start. Standard deviations are kept
in the covariance's own shape (one number per time if all unknowns share it).
"""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from millipode import buffers, transport
from millipode.autodiff import while_loop
from millipode.diffusion import DynamicDiffusion
from millipode.fields import Field, Scale, combine, map_leaves
from millipode.posterior import (
    Marginals,
    Path,
    Posterior,
    calibrate,
    marginal_std,
    std_of,
)
from millipode.smoothing import (
    Anchor,
    Gaussian,
    Nodes,
    fixed_interval,
    pick,
)
from millipode.step import Attempt, Filter, State, Taken

# The longest stretch of steps that smoothing by recomputation takes at once.
MAX_STRIDE = 4096


class Record(NamedTuple):
    """Buffers for entries, how many of them hold one, and what fixed-point smoothing remembers."""

    buffers: Any
    filled: Array
    anchor: Anchor | None = None


class Saved(NamedTuple):
    """What a plan has kept, time first.

    Attributes:
        t: the times.
        posterior: at these times.
        gamma: γ̂ of the steps that they lie in, if dynamic.
        valid: how many of the entries mean something.
    """

    t: Array
    posterior: Posterior
    gamma: Scale | None
    valid: Array


class SavePlan(eqx.Module):
    """When to save, and where."""

    @abc.abstractmethod
    def empty(self, model: Filter, state: State) -> Record:
        """The record of a loop that starts at this state."""

    def before_step(
        self, model: Filter, state: State, a: Attempt, accept: Array, record: Record, reverse: bool
    ) -> Record:
        """Save what the step passes over, as seen from its start."""
        return record

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """Save the state that the step has led to."""
        return record

    def has_room(self, record: Record) -> Array | bool:
        """Whether another step can be saved."""
        return True

    @abc.abstractmethod
    def collect(self, model: Filter, state: State, record: Record, arrived: Array, scale: Scale) -> Saved:
        """All that was kept, once the state is the last one; ``arrived`` says whether t = t₁.

        ``scale`` calibrates all covariances.
        """


class SaveEnd(SavePlan):
    """Only the last state."""

    def empty(self, model: Filter, state: State) -> Record:
        """Nothing."""
        return Record(None, jnp.ones((), jnp.int32))

    def collect(self, model: Filter, state: State, record: Record, arrived: Array, scale: Scale) -> Saved:
        """Mean and standard deviation of y, as series of length one."""
        std = marginal_std(model.prior, state.covariance, state.mean[0], 0, scale)
        posterior = Marginals((state.mean[0],), std, _members(model, state, scale))
        saved = Saved(state.t, posterior, dynamic(model, state.calibration), record.filled)
        return jax.tree.map(lambda x: x[None], saved)._replace(valid=record.filled)


class SaveSteps(SavePlan):
    """The initial state and every accepted step.

    Attributes:
        capacity: the length of the buffers.
        smooth: whether ``collect`` gives the smoother's states or the filter's.
    """

    capacity: int = eqx.field(static=True)
    smooth: bool = eqx.field(static=True)

    def empty(self, model: Filter, state: State) -> Record:
        """The state itself in slot 0."""
        node = _node(model, state)
        return Record(buffers.put(buffers.allocate(node, self.capacity), node, 0), jnp.ones((), jnp.int32))

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """The new state in the next slot, if the step was accepted."""
        nodes = buffers.put(record.buffers, _node(model, taken.state), record.filled, accept)
        return Record(nodes, record.filled + accept.astype(jnp.int32))

    def has_room(self, record: Record) -> Array:
        """Whether a slot is free."""
        return record.filled < self.capacity

    def collect(self, model: Filter, state: State, record: Record, arrived: Array, scale: Scale) -> Saved:
        """The steps. Free slots repeat the last entry; t₀ shares the first step's diffusion."""
        last = Gaussian(state.mean, state.covariance.square())
        return self.smoothed(model, record, scale, last)[0]

    def smoothed(self, model: Filter, record: Record, scale: Scale, last: Gaussian) -> tuple[Saved, Gaussian]:
        """The steps of one record, given the posterior at its end; and the posterior at its start."""
        nodes, filled = record.buffers, record.filled
        nodes = buffers.fill(nodes, pick(nodes, filled - 1), filled)
        gamma = jax.tree.map(lambda x: x.at[0].set(x[1]), nodes.gamma)
        if not self.smooth:
            std = std_of(model.prior, nodes, scale)
            members = _calibrated(model, nodes.members, scale)
            path = Path(nodes.mean, std, members, nodes.covariance, None, gamma, scale, model.prior)
            return Saved(nodes.t, path, gamma, filled), last
        states = buffers.fill(fixed_interval(model.prior, nodes, filled, last), last, filled)
        path = Path(
            states.mean,
            std_of(model.prior, states, scale),
            None,
            states.covariance,
            nodes.covariance,
            gamma,
            scale,
            model.prior,
        )
        return Saved(nodes.t, path, gamma, filled), pick(states, 0)


class CountSteps(SavePlan):
    """Nothing but the times of the next steps, for a driver that will take them again.

    Attributes:
        stride: after how many steps to stop.
    """

    stride: ArrayLike

    def empty(self, model: Filter, state: State) -> Record:
        """Room for as many times as a stride may ever have."""
        return Record(jnp.zeros(MAX_STRIDE, state.t.dtype), jnp.zeros((), jnp.int32))

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """The time, if the step was accepted."""
        times = buffers.put(record.buffers, taken.state.t, record.filled, accept)
        return Record(times, record.filled + accept.astype(jnp.int32))

    def has_room(self, record: Record) -> Array:
        """Whether the stride goes on."""
        return record.filled < self.stride

    def collect(self, model: Filter, state: State, record: Record, arrived: Array, scale: Scale) -> Saved:
        """The last state."""
        return SaveEnd().collect(model, state, record._replace(filled=jnp.int32(1)), arrived, scale)


class SaveTimes(SavePlan):
    """The filter's marginals at given times, in the direction of integration.

    Attributes:
        times: where to save.
    """

    times: Float[Array, " k"]

    def empty(self, model: Filter, state: State) -> Record:
        """Free buffers, NaN until a time is reached."""
        return Record(buffers.unknown(_entry(model, state), self.times.shape[0]), jnp.zeros((), jnp.int32))

    def ahead(self, filled: Array) -> Array:
        """The next time to be saved."""
        return self.times[jnp.minimum(filled, self.times.shape[0] - 1)]

    def passed(self, model: Filter, a: Attempt, accept: Array, filled: Array) -> Array:
        """Whether an attempt leads beyond the next time."""
        beyond = model.vector_field.sign * (a.t - self.ahead(filled)) > 0
        return accept & (filled < self.times.shape[0]) & beyond

    def before_step(
        self, model: Filter, state: State, a: Attempt, accept: Array, record: Record, reverse: bool
    ) -> Record:
        """All times in [t, t + h) of an accepted step, predicted from t."""

        def save(r: Record) -> Record:
            h = since(model, state, self.ahead(r.filled))
            row, noise = model.prior.marginal(h)
            std = state.covariance.std(state.mean[0], row, noise, a.filter_scale)
            members = None if state.members is None else transport.between(model, state, a, h)
            entry = Entry(combine(row, state.mean), std, dynamic(model, a.local_scale), members)
            return Record(buffers.put(r.buffers, entry, r.filled), r.filled + 1)

        return while_loop(
            lambda r: self.passed(model, a, accept, r.filled),
            save,
            record,
            reverse=reverse,
            max_steps=self.times.shape[0],
            buffers=lambda r: r.buffers,
        )

    def collect(self, model: Filter, state: State, record: Record, arrived: Array, scale: Scale) -> Saved:
        """The buffers, with the last state for a time at t₁ itself."""
        finished = self.at_end(model, state, record, arrived)
        entries = jax.tree.map(
            lambda x, new: x.at[-1].set(jnp.where(finished, new, x[-1])), record.buffers, _entry(model, state)
        )
        std = jax.vmap(lambda s: calibrate(s, scale, state.mean[0]))(entries.std)
        members = _calibrated(model, entries.members, scale)
        filled = record.filled + finished.astype(jnp.int32)
        return Saved(self.times, Marginals((entries.mean,), std, members), entries.gamma, filled)

    def at_end(self, model: Filter, state: State, record: Record, arrived: Array) -> Array:
        """Whether the last time is still open and is t₁; traced times may lie beyond, out of reach."""
        reached = model.vector_field.sign * (self.times[-1] - state.t) <= 0
        return arrived & reached & (record.filled == self.times.shape[0] - 1)


def since(model: Filter, state: State, t: Array) -> Array:
    """The time from the state to t; NaN if negative, as traced times cannot be checked beforehand."""
    h = model.vector_field.sign * (t - state.t)
    return jnp.where(h >= 0, h, jnp.nan)


class Entry(NamedTuple):
    """What ``SaveTimes`` keeps of one time: of y, and before calibration."""

    mean: Field
    std: Scale
    gamma: Scale | None
    members: Field | None


def _entry(model: Filter, state: State) -> Entry:
    members = None if state.members is None else state.members.of_y
    return Entry(state.mean[0], _std(model, state), dynamic(model, state.calibration), members)


def _node(model: Filter, state: State) -> Nodes:
    members = None if state.members is None else state.members.of_y
    return Nodes(state.t, state.mean, state.covariance, dynamic(model, state.calibration), members)


def _calibrated(model: Filter, members: Field | None, scale: Scale) -> Field | None:
    """White noise has the filter's own scale; a defect has its own."""
    if members is None or model.uncertainty is None or model.uncertainty.noise == "defect":
        return members
    return map_leaves(jnp.multiply, members, scale)


def _members(model: Filter, state: State, scale: Scale) -> Field | None:
    return None if state.members is None else _calibrated(model, state.members.of_y, scale)


def _std(model: Filter, state: State) -> Scale:
    """Of y, before calibration."""
    one = jnp.ones_like(state.t)
    return marginal_std(model.prior, state.covariance, state.mean[0], 0, one)


def dynamic(model: Filter, scale: Scale) -> Scale | None:
    """A scale that is saved with the steps, or None if there is one for all of them."""
    return scale if isinstance(model.diffusion, DynamicDiffusion) else None
