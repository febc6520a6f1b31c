"""What a solve keeps: its end, every step, or given times.

Each plan writes into buffers of fixed length inside the compiled loop. Saving never steers the steps: a
save time inside a step gets the model's own prediction from the step's start. Standard deviations are kept
in the covariance's own shape (one number per time if all unknowns share it).
"""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from millipode.autodiff import while_loop
from millipode.covariance import Kernel
from millipode.diffusion import DynamicDiffusion
from millipode.fields import Field, Scale, combine
from millipode.posterior import (
    Chain,
    Marginals,
    Moments,
    Path,
    Posterior,
    calibrate,
    chain_std,
    filtered_path,
    marginal_std,
    std_of,
)
from millipode.smoothing import (
    Anchor,
    Gaussian,
    Links,
    Nodes,
    backward,
    chain,
    fixed_interval,
    move,
    near,
    negligible,
    pick,
    predict,
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
        std = marginal_std(state.covariance, state.mean[0], 0, len(state.mean), scale)
        posterior = Marginals((state.mean[0],), std)
        saved = Saved(state.t, posterior, _dynamic(model, state.calibration), record.filled)
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
        buffers = _allocate(_node(model, state), self.capacity)
        return Record(_put(buffers, _node(model, state), 0), jnp.ones((), jnp.int32))

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """The new state in the next slot, if the step was accepted."""
        buffers = _put(record.buffers, _node(model, taken.state), record.filled, accept)
        return Record(buffers, record.filled + accept.astype(jnp.int32))

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
        nodes = _fill(nodes, pick(nodes, filled - 1), filled)
        gamma = jax.tree.map(lambda x: x.at[0].set(x[1]), nodes.gamma)
        if not self.smooth:
            path = filtered_path(model.prior, nodes._replace(gamma=gamma), scale)
            return Saved(nodes.t, path, gamma, filled), last
        states = _fill(fixed_interval(model.prior, nodes, filled, last), last, filled)
        path = Path(
            states.mean,
            std_of(states, scale),
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
        times = _put(record.buffers, taken.state.t, record.filled, accept)
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
        entry = Moments(state.mean[0], _std(state)), _dynamic(model, state.calibration)
        return Record(_unknown(entry, self.times.shape[0]), jnp.zeros((), jnp.int32))

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
            h = _since(model, state, self.ahead(r.filled))
            row, noise = model.prior.marginal(h)
            std = state.covariance.std(state.mean[0], row, noise, a.filter_scale)
            entry = Moments(combine(row, state.mean), std), _dynamic(model, a.local_scale)
            return Record(_put(r.buffers, entry, r.filled), r.filled + 1)

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
        last = Moments(state.mean[0], _std(state)), _dynamic(model, state.calibration)
        finished = self._at_end(model, state, record, arrived)
        entries = jax.tree.map(
            lambda x, new: x.at[-1].set(jnp.where(finished, new, x[-1])), record.buffers, last
        )
        moments, gamma = entries
        std = jax.vmap(lambda s: calibrate(s, scale, state.mean[0]))(moments.std)
        filled = record.filled + finished.astype(jnp.int32)
        return Saved(self.times, Marginals((moments.mean,), std), gamma, filled)

    def _at_end(self, model: Filter, state: State, record: Record, arrived: Array) -> Array:
        """Whether the last time is still open and is t₁; traced times may lie beyond, out of reach."""
        reached = model.vector_field.sign * (self.times[-1] - state.t) <= 0
        return arrived & reached & (record.filled == self.times.shape[0] - 1)


class Slots(NamedTuple):
    """States at save times, each as X_j = b_j + G_j X_{j+1} + noise."""

    offset: tuple[Field, ...]
    kernel: Kernel
    lead: Array
    gamma: Scale | None


class SmoothTimes(SaveTimes):
    """The smoother's states at given times, by fixed-point smoothing.

    The anchor is the last save time that was passed. Passing the next one closes its slot: all that later
    data can say of X_j, they say by way of X_{j+1}.
    """

    def empty(self, model: Filter, state: State) -> Record:
        """Free slots, and t₀ as an anchor that will not be kept."""
        kernel = state.covariance.identity()
        length = self.times.shape[0]
        slots = Slots(
            _unknown(state.mean, length),
            _allocate(kernel, length),
            _allocate(state.t, length),
            _unknown(_dynamic(model, state.calibration), length),
        )
        anchor = Anchor(jax.tree.map(jnp.copy, state.mean), kernel)
        return Record(slots, jnp.zeros((), jnp.int32), anchor)

    def before_step(
        self, model: Filter, state: State, a: Attempt, accept: Array, record: Record, reverse: bool
    ) -> Record:
        """Move the anchor to the last time in [t, t + h), then see it from t + h."""
        assert record.anchor is not None
        prior, scale, y, anchor = model.prior, a.filter_scale, state.mean[0], record.anchor
        h = _since(model, state, a.t)
        tiny, nowhere = negligible(h), jnp.full_like(h, -1)

        def seen_from(end: Array, start: Array, kernel: Kernel) -> Kernel:
            """A kernel of something given Y(t + start), extended to Y(t + end)."""
            covariance = predict(prior, state.covariance, start, scale, y, start <= tiny)
            return kernel.compose(backward(prior, covariance, end - start, scale, y, end - start <= tiny))

        def close(carry: tuple[Slots, Array, Kernel, Array]) -> tuple[Slots, Array, Kernel, Array]:
            slots, filled, kernel, start = carry
            since = _since(model, state, self.ahead(filled))
            tau = jnp.where(since <= near(prior.order, h), 0, since)
            transition, first = prior.transition(tau), start < 0
            kernel = seen_from(tau, jnp.maximum(start, 0), kernel)
            # The anchor's mean is its own, or Φ times the state's if the anchor lies in this step already.
            # All of this is small matrices times the state: no field has to be there twice.
            inside = move(prior, state.mean, jnp.maximum(start, 0))
            mean = jax.tree.map(lambda x, y: jnp.where(first, x, y), anchor.mean, inside)
            offset = jax.tree.map(jnp.subtract, mean, kernel.after(transition).apply(state.mean))
            # Slot 0 may be written in vain, when no time was passed yet; reverse mode must not see that.
            offsets, kernels = _put(
                (slots.offset, slots.kernel),
                (offset, kernel),
                jnp.maximum(filled - 1, 0),
                filled > 0 if reverse else True,
            )
            leads, gammas = _put(
                (slots.lead, slots.gamma), (since - tau, _dynamic(model, a.local_scale)), filled
            )
            return Slots(offsets, kernels, leads, gammas), filled + 1, kernel.noise.identity(), tau

        slots, filled, kernel, start = while_loop(
            lambda carry: self.passed(model, a, accept, carry[1]),
            close,
            (record.buffers, record.filled, anchor.kernel, nowhere),
            reverse=reverse,
            max_steps=self.times.shape[0],
            buffers=lambda carry: carry[0],
        )
        # A loop of at most one turn, because that happens in place and a conditional would copy.
        mean, _ = while_loop(
            lambda carry: carry[1],
            lambda carry: (move(prior, state.mean, jnp.maximum(start, 0)), jnp.zeros_like(carry[1])),
            (anchor.mean, start >= 0),
            reverse=reverse,
            max_steps=1,
        )
        kernel = lax.switch(
            jnp.where(accept, jnp.where(start < 0, 1, 2), 0),
            [
                lambda kernel: kernel,
                lambda kernel: state.covariance.extend(kernel, a.transition, scale, y),
                lambda kernel: seen_from(h, start, kernel),
            ],
            kernel,
        )
        return Record(slots, filled, Anchor(mean, kernel))

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """What the step's residual says of the anchor."""
        assert record.anchor is not None
        anchor = record.anchor.corrected(taken.state.covariance, taken.gain, taken.z)
        return record._replace(anchor=anchor)

    def collect(self, model: Filter, state: State, record: Record, arrived: Array, scale: Scale) -> Saved:
        """The smoother's states at all times that were reached."""
        assert record.anchor is not None
        anchor, slots, filled = record.anchor, record.buffers, record.filled
        finished = self._at_end(model, state, record, arrived)
        # A last time at t₁ closes the slot before it. Nothing is read back here, so all happens in place.
        closed = jnp.where(finished, 1, 0)
        before, last = jnp.maximum(filled - 1, 0), filled - 1 + closed
        offset = jax.tree.map(jnp.subtract, anchor.mean, anchor.kernel.apply(state.mean))
        mean, b = (
            jax.tree.map(lambda a, b: jnp.where(last < 0, jnp.nan, jnp.where(finished, a, b)), *pair)
            for pair in ((state.mean, anchor.mean), (offset, anchor.mean))
        )
        offsets = _overwrite(slots.offset, b, before)
        kernels = _overwrite(slots.kernel, anchor.kernel, before)
        pushed = anchor.kernel.push(state.covariance)
        covariance = jax.tree.map(lambda a, b: jnp.where(finished, a, b), state.covariance.square(), pushed)
        gamma = _dynamic(model, state.calibration)
        gammas = jax.tree.map(
            lambda x, new: x.at[-1].set(jnp.where(finished, new, x[-1])), slots.gamma, gamma
        )
        scales = jnp.ones_like(slots.lead) if gammas is None else gammas
        links = Links(kernels, slots.lead, scales)
        states = chain(model.prior, offsets, links, last + 1, Gaussian(mean, covariance))
        posterior = Chain(
            states.mean,
            chain_std(model.prior, states, links, scale, 0),
            states.covariance,
            links,
            scale,
            model.prior,
        )
        return Saved(self.times, posterior, gammas, last + 1)


def _since(model: Filter, state: State, t: Array) -> Array:
    """The time from the state to t; NaN if negative, as traced times cannot be checked beforehand."""
    h = model.vector_field.sign * (t - state.t)
    return jnp.where(h >= 0, h, jnp.nan)


def _node(model: Filter, state: State) -> Nodes:
    return Nodes(state.t, state.mean, state.covariance, _dynamic(model, state.calibration))


def _std(state: State) -> Scale:
    """Of y, before calibration."""
    one = jnp.ones_like(state.t)
    return marginal_std(state.covariance, state.mean[0], 0, len(state.mean), one)


def _dynamic(model: Filter, scale: Scale) -> Scale | None:
    return scale if isinstance(model.diffusion, DynamicDiffusion) else None


def _allocate(entry: Any, length: int) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), entry)


def _unknown(entry: Any, length: int) -> Any:
    return jax.tree.map(lambda x: jnp.full((length, *x.shape), jnp.nan, x.dtype), entry)


def _put(buffers: Any, entry: Any, slot: Array | int, accept: Any = True) -> Any:
    # The loop wraps its buffers, so the entry leads the traversal.
    return jax.tree.map(lambda x, buffer: eqxi.buffer_at_set(buffer, slot, x, pred=accept), entry, buffers)


def _overwrite(buffers: Any, entry: Any, slot: Array) -> Any:
    return jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x, slot, 0), buffers, entry)


def _fill(buffers: Any, entry: Any, count: Array) -> Any:
    """Put ``entry`` into every slot from ``count`` on."""

    def leafwise(buffer: Array, x: Array) -> Array:
        used = jnp.arange(buffer.shape[0]) < count
        return jnp.where(used.reshape(-1, *(1,) * x.ndim), buffer, x)

    return jax.tree.map(leafwise, buffers, entry)
