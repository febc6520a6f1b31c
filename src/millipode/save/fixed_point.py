"""The save plan of fixed-point smoothing: the posterior at given times, with nothing stored per step.

``smooth.point`` has the anchor that makes it possible.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.covariance.protocol import Covariance, Kernel
from millipode.filter import members
from millipode.filter.ensemble import Errors
from millipode.filter.state import Attempt, Filter, State, Taken
from millipode.linalg.fields import Coefficient, Field
from millipode.model.priors.protocol import Prior
from millipode.posterior.posterior import Chain, chain_std
from millipode.save import buffers
from millipode.save.plans import SaveTimes, calibrated, since
from millipode.save.protocol import Record, Saved
from millipode.smooth.bridge import Gaussian, backward, move, near, negligible, predict
from millipode.smooth.point import Anchor, Links, chain
from millipode.xla.autodiff import while_loop
from millipode.xla.ordering import Token, after


class Slots(NamedTuple):
    """States at save times, each as X_j = b_j + G_j X_{j+1} + noise, time first.

    Attributes:
        offset: b.
        kernel: G, and the noise.
        pull: the G of means, if that is another one.
        lead: how long after its state each saved time lies.
        gamma: γ̂ of the steps that they lie in, if dynamic.
        errors: of y, if they are known.
    """

    offset: tuple[Field, ...]
    kernel: Kernel
    pull: Kernel | None
    lead: Array
    gamma: Coefficient | None
    errors: Errors | None


class Passage(NamedTuple):
    """What changes while a step passes one save time after the other.

    Attributes:
        slots: of the save times.
        filled: how many of them were passed.
        kernel: of the last one, X | Y(t + start).
        pull: the kernel of its mean, if that is another one.
        start: when the last one was passed, counted from the step's start; −1 if in an earlier step.
    """

    slots: Slots
    filled: Array
    kernel: Kernel
    pull: Kernel | None
    start: Array


class Span(NamedTuple):
    """One step from t to t + h, as the filter sees it from t.

    Attributes:
        prior: that of the filter.
        state: at t.
        gamma: of the step.
        h: its length.
        firm: whether it solves linear systems, so that what came before is certain for means.
    """

    prior: Prior
    state: State
    gamma: Coefficient
    h: Array
    firm: bool

    def mean(self, tau: Array) -> tuple[Field, ...]:
        """E[Y(t + τ)]."""
        return move(self.prior, self.state.mean, tau)

    def kernel(self, start: Array, end: Array) -> Kernel:
        """Y(t + start) | Y(t + end)."""
        return self._kernel(self.state.covariance, start, end)

    def pull(self, pull: Kernel | None, start: Array, end: Array) -> Kernel | None:
        """A kernel of means, followed from time ``start`` to ``end`` of the step."""
        if pull is None:
            return None
        covariance = self.state.covariance
        begin = jax.tree.map(jnp.zeros_like, covariance) if self.firm else covariance
        return pull.compose(self._kernel(begin, start, end))

    def _kernel(self, begin: Covariance, start: Array, end: Array) -> Kernel:
        """The kernel for this covariance at t."""
        y, tiny, tau = self.state.mean[0], negligible(self.h), end - start
        covariance = predict(self.prior, begin, start, self.gamma, y, start <= tiny)
        return backward(self.prior, covariance, tau, self.gamma, y, tau <= tiny)


class SmoothTimes(SaveTimes):
    """The smoother's states at given times.

    The anchor is the last save time that was passed. Passing the next one closes its slot: all that later
    data can say of X_j, they say by way of X_{j+1}.
    """

    def empty(self, model: Filter, state: State) -> Record:
        """Free slots, and t₀ as an anchor that will not be kept."""
        kernel = state.covariance.identity()
        length = self.times.shape[0]
        slots = Slots(
            buffers.unknown(state.mean, length),
            buffers.allocate(kernel, length),
            None if state.past is None else buffers.allocate(kernel, length),
            buffers.allocate(state.t, length),
            buffers.unknown(model.dynamic(state.calibration), length),
            buffers.unknown(members.saved(model, state), length),
        )
        pull = None if state.past is None else jax.tree.map(jnp.copy, kernel)
        anchor = Anchor(jax.tree.map(jnp.copy, state.mean), kernel, pull)
        return Record(slots, jnp.zeros((), jnp.int32), anchor)

    def before_step(
        self, model: Filter, state: State, a: Attempt, record: Record, reverse: bool
    ) -> tuple[Record, Token]:
        """Move the anchor to the last time in [t, t + h), then see it from t + h."""
        assert record.anchor is not None
        anchor = record.anchor
        h, firm = since(model, state, a, a.prediction.t), model.information.is_implicit
        span = Span(model.prior, state, a.calibration.gamma, h, firm)
        gamma = model.dynamic(a.calibration.local)

        def pass_next(p: Passage) -> Passage:
            at = since(model, state, a, self.ahead(p.filled))
            known = gamma, members.saved_between(model, state, a, at)
            return self._pass(span, at, known, anchor, p, reverse)

        passage: Passage = while_loop(
            lambda p: self.passed(model, a, p.filled),
            pass_next,
            Passage(record.buffers, record.filled, anchor.kernel, anchor.pull, jnp.full_like(span.h, -1)),
            reverse=reverse,
            max_steps=self.times.shape[0],
            buffers=lambda p: p.slots,
        )
        start = passage.start
        # A loop of at most one turn, because that happens in place and a conditional would copy.
        mean, unmoved = while_loop(
            lambda carry: carry[1],
            lambda carry: (span.mean(jnp.maximum(start, 0)), jnp.zeros_like(carry[1])),
            (anchor.mean, start >= 0),
            reverse=reverse,
            max_steps=1,
        )
        kernel, pull = lax.switch(
            jnp.where(a.accept, jnp.where(start < 0, 1, 2), 0),
            [
                lambda kernel, pull: (kernel, pull),
                lambda kernel, pull: (
                    state.covariance.extend(kernel, a.prediction.transition, span.gamma, state.mean[0]),
                    span.pull(pull, jnp.zeros_like(span.h), span.h),
                ),
                lambda kernel, pull: (
                    kernel.compose(span.kernel(start, span.h)),
                    span.pull(pull, start, span.h),
                ),
            ],
            passage.kernel,
            passage.pull,
        )
        # Both loops have read the state before they know when to end.
        token = after((passage.filled, unmoved))
        return Record(passage.slots, passage.filled, Anchor(mean, kernel, pull)), token

    @staticmethod
    def _pass(span: Span, at: Array, known: tuple, anchor: Anchor, p: Passage, reverse: bool) -> Passage:
        """Pass the save time t + at: close the slot before it, and start a kernel of its own.

        ``known`` is what needs no smoothing: γ̂ and errors.
        """
        tau = jnp.where(at <= near(span.prior.order, span.h), 0, at)
        start = jnp.maximum(p.start, 0)
        kernel, pull = p.kernel.compose(span.kernel(start, tau)), span.pull(p.pull, start, tau)
        # The last anchor's mean is its own, or Φ times the state's if it lies in this step already.
        # All of this is small matrices times the state: no field has to be there twice.
        mean = jax.tree.map(lambda x, y: jnp.where(p.start < 0, x, y), anchor.mean, span.mean(start))
        moving = kernel if pull is None else pull
        seen = moving.after(span.prior.transition(tau)).apply(span.state.mean)
        # Slot 0 may be written in vain, when no time was passed yet; reverse mode must not see that.
        offsets, kernels, pulls = buffers.put(
            (p.slots.offset, p.slots.kernel, p.slots.pull),
            (jax.tree.map(jnp.subtract, mean, seen), kernel, pull),
            jnp.maximum(p.filled - 1, 0),
            p.filled > 0 if reverse else True,
        )
        slots = p.slots
        leads, *others = buffers.put((slots.lead, slots.gamma, slots.errors), (at - tau, *known), p.filled)
        one = kernel.noise.identity()
        again = None if pull is None else one
        return Passage(Slots(offsets, kernels, pulls, leads, *others), p.filled + 1, one, again, tau)

    def after_step(self, model: Filter, taken: Taken, accept: Array, record: Record) -> Record:
        """Correct the anchor by the step's residual."""
        assert record.anchor is not None
        anchor = record.anchor.corrected(taken.state.covariance, taken.moves)
        return record._replace(anchor=anchor)

    def collect(
        self, model: Filter, state: State, record: Record, arrived: Array, output_gamma: Coefficient
    ) -> Saved:
        """The smoother's states at all times that were reached."""
        assert record.anchor is not None
        anchor, slots, filled = record.anchor, record.buffers, record.filled
        finished = self.at_end(model, state, record, arrived)
        # A last time at t₁ closes the slot before it. Nothing is read back here, so all happens in place.
        closed = jnp.where(finished, 1, 0)
        before, last = jnp.maximum(filled - 1, 0), filled - 1 + closed
        offset = jax.tree.map(jnp.subtract, anchor.mean, anchor.moving.apply(state.mean))
        mean, b = (
            jax.tree.map(lambda a, b: jnp.where(last < 0, jnp.nan, jnp.where(finished, a, b)), *pair)
            for pair in ((state.mean, anchor.mean), (offset, anchor.mean))
        )
        offsets = buffers.overwrite(slots.offset, b, before)
        kernels, pulls = buffers.overwrite((slots.kernel, slots.pull), (anchor.kernel, anchor.pull), before)
        pushed = anchor.kernel.push(state.covariance)
        covariance = jax.tree.map(lambda a, b: jnp.where(finished, a, b), state.covariance.square(), pushed)
        gammas, errors = jax.tree.map(
            lambda x, new: x.at[-1].set(jnp.where(finished, new, x[-1])),
            (slots.gamma, slots.errors),
            (model.dynamic(state.calibration), members.saved(model, state)),
        )
        links = Links(kernels, slots.lead, jnp.ones_like(slots.lead) if gammas is None else gammas, pulls)
        states = chain(model.prior, offsets, links, last + 1, Gaussian(mean, covariance))
        posterior = Chain(
            mean=states.mean,
            std=chain_std(model.prior, states, links, output_gamma, 0),
            errors=calibrated(model, errors, output_gamma),
            covariance=states.covariance,
            links=links,
            output_gamma=output_gamma,
            prior=model.prior,
        )
        return Saved(self.times, posterior, gammas, last + 1)
