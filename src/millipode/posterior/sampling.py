"""Joint samples of a posterior: the last state is drawn first, then each one given the one after it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from millipode.covariance.protocol import Covariance, Kernel
from millipode.linalg.batches import FEW
from millipode.linalg.fields import Coefficient, Field, map_leaves, size
from millipode.model.noise import noise_of
from millipode.model.priors.protocol import Prior
from millipode.posterior.dense_output import BATCH_BYTES, bytes_per_state, evaluate, round_up
from millipode.posterior.posterior import Chain, Path, Posterior, direction, in_user_time
from millipode.posterior.questions import saved_index
from millipode.smooth.bridge import Gaussian, backward, move, near, negligible, pick, predict
from millipode.spatial.space import Space
from millipode.xla.compiling import FOR_MEMORY, QUICKLY, Way, compiled
from millipode.xla.tracing import is_traced


def sample(
    posterior: Posterior, space: Space | None, saved: Array, at: Array | None, keys: Array, q: int
) -> Field:
    """One sample of y^(q) (of its modes) per key, at the saved times or at a flat array of others."""
    batch = int(np.clip(BATCH_BYTES // bytes_per_state(posterior), 1, keys.shape[0]))
    if isinstance(posterior, Path):
        return _draw_path(posterior, space, saved, at, (keys, batch), q)
    index = None if at is None else saved_index(saved, at)
    return draw_chain(posterior, space, (saved, index), keys, q, batch)


class Walk(NamedTuple):
    """A walk back over states, each of which is drawn given the one after it.

    Attributes:
        prior: of the states.
        output_gamma: calibrates all covariances.
        last: the last state.
        link: gives for every state its kernel, its lead, and γ.
    """

    prior: Prior
    output_gamma: Coefficient
    last: Gaussian
    link: Callable[[Array], tuple[Kernel, Array, Coefficient]]

    def draw(self, key: Array, slots: Int[Array, " m"], length: int, q: Array) -> Field:
        """One sample of the deviation of y^(q) from its mean.

        Args:
            key: for the random numbers.
            slots: where in the result each of the m states goes; beyond its end for nowhere.
            length: of the result.
            q: the derivative.
        """
        y, count = self.last.mean[0], slots.shape[0]

        def put(samples: Field, i: Array | int, deviation: tuple[Field, ...], link: tuple) -> Field:
            _, lead, gamma = link
            noise_key = jax.random.fold_in(key, i + count)
            value = lax.cond(
                lead > 0,
                lambda: self.prior.derivative(self._led(noise_key, deviation, lead, gamma), q),
                lambda: self.prior.derivative(deviation, q),
            )
            return jax.tree.map(lambda s, x: s.at[slots[i]].set(x, mode="drop"), samples, value)

        def step(carry: tuple, i: Array) -> tuple[tuple, None]:
            deviation, samples = carry
            link = self.link(i)
            fresh = self._calibrated(link[0].noise.draw(jax.random.fold_in(key, i), y))
            deviation = jax.tree.map(jnp.add, link[0].apply(deviation), fresh)
            return (deviation, put(samples, i, deviation, link)), None

        deviation = self._calibrated(self.last.covariance.draw(jax.random.fold_in(key, count - 1), y))
        samples = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), y)
        samples = put(samples, count - 1, deviation, self.link(jnp.asarray(count - 1)))
        (_, samples), _ = lax.scan(step, (deviation, samples), jnp.arange(count - 1)[::-1])
        return samples

    def _calibrated(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        return tuple(map_leaves(jnp.multiply, x, self.output_gamma) for x in fields)

    def _led(
        self, key: Array, deviation: tuple[Field, ...], lead: Array, gamma: Coefficient
    ) -> tuple[Field, ...]:
        """Φ times the state plus fresh noise, for a time that follows its state with a lead."""
        y = self.last.mean[0]
        fresh = noise_of(self.prior, lead, self.last.covariance, y).draw(key, y)
        noise = self._calibrated(tuple(map_leaves(jnp.multiply, x, gamma) for x in fresh))
        return jax.tree.map(jnp.add, move(self.prior, deviation, lead), noise)


def _walk_of_chain(chain: Chain) -> Walk:
    last = Gaussian(pick(chain.mean, -1), pick(chain.covariance, -1))
    return Walk(chain.prior, chain.output_gamma, last, lambda i: pick(tuple(chain.links[:3]), i))


def _walk_of_path(path: Path, t: Array, nodes: Array) -> Walk:
    """A walk over times in order of integration, all steps t among them."""
    prior, sign = path.prior, direction(t)
    index = jnp.clip(jnp.searchsorted(sign * t, sign * nodes, side="right") - 1, 0, t.size - 1)

    def state(i: Array) -> tuple[Array, Array]:
        """When the state of node i starts, and by how much the node leads it."""
        since = jnp.abs(nodes[i] - t[index[i]])
        h = jnp.abs(t[jnp.minimum(index[i] + 1, t.size - 1)] - t[index[i]])
        lead = jnp.where(since <= near(prior.order, h), since, 0)
        return nodes[i] - sign * lead, lead

    def link(i: Array) -> tuple[Kernel, Array, Coefficient]:
        k = index[i]
        following = jnp.minimum(k + 1, t.size - 1)
        gamma = jnp.ones_like(t[0]) if path.gamma is None else pick(path.gamma, following)
        y = pick(path.mean[0], 0)
        none = negligible(jnp.abs(t[following] - t[k]))
        (start, lead), (end, _) = state(i), state(jnp.minimum(i + 1, nodes.size - 1))
        since, until = jnp.abs(start - t[k]), jnp.abs(end - start)
        covariance: Covariance = pick(path.filtered, k)
        if nodes.size != t.size:
            covariance = predict(prior, covariance, since, gamma, y, since <= none)
        return backward(prior, covariance, until, gamma, y, until <= none), lead, gamma

    last = Gaussian(pick(path.mean, -1), pick(path.covariance, -1))
    return Walk(prior, path.output_gamma, last, link)


def _way_of_draws(posterior: Posterior, *_: Any) -> Way:
    """XLA's older emitters take half a minute for some hundred blocks, which they unroll and repeat."""
    first = pick(posterior.mean[0], 0)
    return QUICKLY if size(first) <= FEW else FOR_MEMORY


@compiled(static_argnums=5, way=_way_of_draws)
def draw_chain(
    chain: Chain,
    space: Space | None,
    wanted: tuple[Array, Int[Array, " k"] | None],
    keys: Array,
    q: Array,
    batch: int,
) -> Field:
    """Samples of a chain: ``wanted`` are its times, and which of them to keep."""
    t, index = wanted
    sign, walk = direction(t), _walk_of_chain(chain)
    mean = in_user_time(chain.derivatives(q), sign, q)

    def draw(key: Array) -> Field:
        deviation = in_user_time(walk.draw(key, jnp.arange(t.size), t.size, q), sign, q)
        sample = jax.tree.map(jnp.add, mean, _correlated(space, deviation))
        return sample if index is None else pick(sample, index)

    return lax.map(draw, keys, batch_size=batch)


def _correlated(space: Space | None, deviation: Field) -> Field:
    """Deviations with the spatial covariance, time by time."""
    return deviation if space is None else lax.map(space.correlate, deviation)


class Wanted(NamedTuple):
    """Where a path is to be sampled.

    Attributes:
        t: the times of its steps.
        nodes: all times in order of integration, steps included.
        slots: where in the result each node goes; beyond its end for nowhere.
        mean: of y^(q) at the times of the result; None for that of the steps.
    """

    t: Array
    nodes: Array
    slots: Int[Array, " m"]
    mean: Field | None


@compiled(static_argnums=5, way=_way_of_draws)
def draw_nodes(
    path: Path, space: Space | None, wanted: Wanted, keys: Array, q: Array, sizes: tuple[int, int]
) -> Field:
    """Samples of a path; ``sizes`` are the number of times in the result, and of samples at once."""
    (length, batch), sign = sizes, direction(wanted.t)
    walk = _walk_of_path(path, wanted.t, wanted.nodes)
    mean = in_user_time(path.derivatives(q), sign, q) if wanted.mean is None else wanted.mean

    def draw(key: Array) -> Field:
        deviation = in_user_time(walk.draw(key, wanted.slots, length, q), sign, q)
        return jax.tree.map(jnp.add, mean, _correlated(space, deviation))

    return lax.map(draw, keys, batch_size=batch)


def _draw_path(
    path: Path, space: Space | None, t: Array, at: Array | None, draws: tuple[Array, int], q: int
) -> Field:
    """Samples at the steps t, or at other times; ``draws`` are the keys, and how many to use at once."""
    keys, batch = draws
    traced = is_traced(t, at)
    xp: Any = jnp if traced else np
    steps = t.size
    mean = None if at is None else evaluate(path, t, at, q).mean
    # Compiled code depends on the numbers of steps and of times: powers of two, so that few of them occur.
    most = steps if at is None else max(steps, at.size)
    rounded = not traced and bytes_per_state(path) * most < BATCH_BYTES
    if rounded:
        path = path.joined([], lambda x: _lengthened(x, round_up(steps)))
        t = _lengthened(t, round_up(steps))
    if at is None:
        wanted, count = Wanted(t, t, xp.arange(t.size), None), steps
    else:
        count = at.size
        if rounded:
            at = _lengthened(at, round_up(count))
            mean = jax.tree.map(lambda x: _lengthened(x, round_up(count)), mean)
        nodes = xp.concatenate([t, at])
        order = xp.argsort(nodes * xp.where(t[-1] >= t[0], 1, -1), stable=True)
        slots = xp.concatenate([np.full(t.size, at.size), np.arange(at.size)])[order]
        wanted = Wanted(t, nodes[order], slots, mean)
    length = t.size if at is None else at.size
    samples = draw_nodes(path, space, wanted, keys, q, (length, batch))
    return samples if count == length else jax.tree.map(lambda x: x[:, :count], samples)


def _lengthened(x: Any, length: int) -> Any:
    """The same array, whose last entry is repeated until it has this length."""
    x = np.asarray(x)
    if x.shape[0] == length:
        return x
    return np.concatenate([x, np.broadcast_to(x[-1], (length - x.shape[0], *x.shape[1:]))])
