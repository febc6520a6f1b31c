"""The save plans: the end, every step, the times of steps only, or given times."""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from millipode.filter import members
from millipode.filter.ensemble import Errors
from millipode.filter.state import Attempt, Filter, State, Taken
from millipode.linalg.fields import Coefficient, Field, combine, map_leaves
from millipode.posterior.posterior import Marginals, Path, calibrate, marginal_std, std_of
from millipode.save import buffers
from millipode.save.protocol import Record, Saved, SavePlan
from millipode.smooth.bridge import Gaussian, negligible, pick
from millipode.smooth.interval import Nodes, fixed_interval
from millipode.xla.autodiff import while_loop
from millipode.xla.ordering import Token, after

# The longest stretch of steps that smoothing by recomputation takes at once.
MAX_STRIDE = 4096


class SaveEnd(SavePlan):
    """Only the last state."""

    def empty(self, model: Filter, state: State) -> Record:
        """No buffers, and one entry."""
        return Record(None, jnp.ones((), jnp.int32))

    def collect(
        self, model: Filter, state: State, record: Record, arrived: Array, output_gamma: Coefficient
    ) -> Saved:
        """Mean and standard deviation of y, as series of length one."""
        std = marginal_std(model.prior, state.covariance, state.mean[0], 0, output_gamma)
        errors = calibrated(model, members.saved(model, state), output_gamma)
        posterior = Marginals((state.mean[0],), std, errors)
        saved = Saved(state.t, posterior, model.dynamic(state.calibration), record.filled)
        return jax.tree.map(lambda x: x[None], saved)._replace(valid=record.filled)


class SaveSteps(SavePlan):
    """The initial state and every accepted step.

    Attributes:
        capacity: the length of the buffers.
        smooth: whether ``collect`` gives the smoother's states or the filter's.
    """

    in_segments: ClassVar[bool] = True

    capacity: int = eqx.field(static=True)
    smooth: bool = eqx.field(static=True)

    def empty(self, model: Filter, state: State) -> Record:
        """The first state in slot 0."""
        node = _node(model, state)
        return Record(buffers.put(buffers.allocate(node, self.capacity), node, 0), jnp.ones((), jnp.int32))

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """The new state in the next slot, if the step was accepted."""
        nodes = buffers.put(record.buffers, _node(model, taken.state), record.filled, accept)
        return Record(nodes, record.filled + accept.astype(jnp.int32))

    def has_room(self, record: Record) -> Array:
        """Whether a slot is free."""
        return record.filled < self.capacity

    def collect(
        self, model: Filter, state: State, record: Record, arrived: Array, output_gamma: Coefficient
    ) -> Saved:
        """The steps. Free slots repeat the last entry; t₀ shares the first step's diffusion."""
        last = Gaussian(state.mean, state.covariance.square())
        return self.smoothed(model, record, output_gamma, last)[0]

    def smoothed(
        self, model: Filter, record: Record, output_gamma: Coefficient, last: Gaussian
    ) -> tuple[Saved, Gaussian]:
        """The steps of one record, given the posterior at its end; and the posterior at its start."""
        nodes, filled = record.buffers, record.filled
        nodes = buffers.fill(nodes, pick(nodes, filled - 1), filled)
        gamma = jax.tree.map(lambda x: x.at[0].set(x[1]), nodes.gamma)
        if not self.smooth:
            path = Path(
                mean=nodes.mean,
                std=std_of(model.prior, nodes, output_gamma),
                errors=calibrated(model, nodes.errors, output_gamma),
                covariance=nodes.covariance,
                filtered=None,
                gamma=gamma,
                output_gamma=output_gamma,
                prior=model.prior,
            )
            return Saved(nodes.t, path, gamma, filled), last
        states = buffers.fill(fixed_interval(model.prior, nodes, filled, last), last, filled)
        path = Path(
            mean=states.mean,
            std=std_of(model.prior, states, output_gamma),
            errors=calibrated(model, nodes.errors, output_gamma),
            covariance=states.covariance,
            filtered=nodes.covariance,
            gamma=gamma,
            output_gamma=output_gamma,
            prior=model.prior,
        )
        return Saved(nodes.t, path, gamma, filled), pick(states, 0)


class CountSteps(SavePlan):
    """Only the times of the next steps, for a host that will take them again.

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

    def collect(
        self, model: Filter, state: State, record: Record, arrived: Array, output_gamma: Coefficient
    ) -> Saved:
        """The last state."""
        return SaveEnd().collect(model, state, record._replace(filled=jnp.int32(1)), arrived, output_gamma)


class SaveTimes(SavePlan):
    """The filter's marginals at given times, in the direction of integration.

    Attributes:
        times: where to save.
    """

    trims: ClassVar[bool] = True

    times: Float[Array, " k"]

    def empty(self, model: Filter, state: State) -> Record:
        """Free buffers, NaN until a time is reached."""
        return Record(buffers.unknown(_entry(model, state), self.times.shape[0]), jnp.zeros((), jnp.int32))

    def ahead(self, filled: Array) -> Array:
        """The next time to be saved."""
        return self.times[jnp.minimum(filled, self.times.shape[0] - 1)]

    def passed(self, model: Filter, a: Attempt, filled: Array) -> Array:
        """Whether an accepted step leads beyond the next time.

        A time at which the step ends but for rounding errors waits for the state after its correction, unless
        another time follows it even there.
        """
        beyond = model.sign * (a.prediction.t - self.ahead(filled))
        others = model.sign * (a.prediction.t - self.ahead(filled + 1)) >= 0
        last = filled >= self.times.shape[0] - 1
        leaves = jnp.where(others & ~last, beyond >= 0, beyond > _rounding(a))
        return a.accept & (filled < self.times.shape[0]) & leaves

    def before_step(
        self, model: Filter, state: State, a: Attempt, record: Record, reverse: bool
    ) -> tuple[Record, Token]:
        """All times in [t, t + h) of an accepted step, predicted from t."""

        def save(r: Record) -> Record:
            h = since(model, state, a, self.ahead(r.filled))
            row, noise = model.prior.marginal(h)
            std = state.covariance.std(state.mean[0], row, noise, a.calibration.gamma)
            errors = members.saved_between(model, state, a, h)
            entry = Entry(combine(row, state.mean), std, model.dynamic(a.calibration.local), errors)
            return Record(buffers.put(r.buffers, entry, r.filled), r.filled + 1)

        record = while_loop(
            lambda r: self.passed(model, a, r.filled),
            save,
            record,
            reverse=reverse,
            max_steps=self.times.shape[0],
            buffers=lambda r: r.buffers,
        )
        # The loop has read the state before it knows how many times it has passed.
        return record, after(record.filled)

    def collect(
        self, model: Filter, state: State, record: Record, arrived: Array, output_gamma: Coefficient
    ) -> Saved:
        """The buffers, with the last state for a time at t₁ itself."""
        finished = self.at_end(model, state, record, arrived)
        entries = jax.tree.map(
            lambda x, new: x.at[-1].set(jnp.where(finished, new, x[-1])), record.buffers, _entry(model, state)
        )
        std = jax.vmap(lambda s: calibrate(s, output_gamma, state.mean[0]))(entries.std)
        errors = calibrated(model, entries.errors, output_gamma)
        filled = record.filled + finished.astype(jnp.int32)
        return Saved(self.times, Marginals((entries.mean,), std, errors), entries.gamma, filled)

    def at_end(self, model: Filter, state: State, record: Record, arrived: Array) -> Array:
        """Whether the last time is t₁ and not yet saved; traced times beyond t₁ are never saved."""
        reached = model.sign * (self.times[-1] - state.t) <= 0
        return arrived & reached & (record.filled == self.times.shape[0] - 1)


def _rounding(a: Attempt) -> Array:
    """The time by which the end of a step may be off in another program, which rounds otherwise."""
    return negligible(a.prediction.h) + 4 * jnp.finfo(a.prediction.h.dtype).eps * jnp.abs(a.prediction.t)


def since(model: Filter, state: State, a: Attempt, t: Array) -> Array:
    """The time from the state to t, which lies in an attempted step.

    It is 0 for times that have waited for this state, though t precedes it by rounding errors of the step
    before, and NaN for earlier ones: traced times cannot be checked beforehand.
    """
    h = model.sign * (t - state.t)
    return jnp.where(h >= -1000 * _rounding(a), jnp.maximum(h, 0), jnp.nan)


class Entry(NamedTuple):
    """What ``SaveTimes`` keeps of y at one time, before calibration."""

    mean: Field
    std: Coefficient
    gamma: Coefficient | None
    errors: Errors | None


def _entry(model: Filter, state: State) -> Entry:
    one = jnp.ones_like(state.t)
    std = marginal_std(model.prior, state.covariance, state.mean[0], 0, one)
    return Entry(state.mean[0], std, model.dynamic(state.calibration), members.saved(model, state))


def _node(model: Filter, state: State) -> Nodes:
    gamma = model.dynamic(state.calibration)
    # Where steps of both kinds occur, all states say which kind led to them.
    firm = None if state.past is None else jnp.full((), model.information.is_implicit)
    return Nodes(state.t, state.mean, state.covariance, gamma, members.saved(model, state), firm)


def calibrated(model: Filter, errors: Errors | None, output_gamma: Coefficient) -> Errors | None:
    """White noise has the γ of the filter; a defect needs none."""
    if errors is None or model.uncertainty is None or model.uncertainty.noise == "defect":
        return errors
    return errors._replace(members=map_leaves(jnp.multiply, errors.members, output_gamma))
