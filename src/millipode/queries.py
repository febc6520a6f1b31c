"""Questions to a solution: checks of what is asked, and the compiled code that answers.

What a solution can answer depends on what was saved; every refusal says what to pass to ``solve``.
"""

import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from millipode.basis import Basis
from millipode.compiling import FOR_MEMORY, QUICKLY, Way, compiled
from millipode.fields import Field, Scale, dtype, safe_divide, size
from millipode.posterior import (
    Chain,
    Moments,
    Node,
    Path,
    Posterior,
    between,
    chain_std,
    derivatives,
    direction,
    in_user_time,
    std_of,
)
from millipode.priors import Prior
from millipode.qr import FEW
from millipode.smoothing import Gaussian, pick
from millipode.spatial.protocol import Space

if TYPE_CHECKING:
    from millipode.solution import Solution

# Queries and samples are processed in batches whose states take about this much memory.
BATCH_BYTES = 2**25


def is_traced(*x: Any) -> bool:
    """Whether any value cannot be looked at."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def derivative(sol: "Solution", q: Any) -> int:
    """The order of a derivative that the solution knows."""
    if sol.t.ndim != 1:
        raise ValueError(
            "This is a batch of solutions. Ask each of them under jax.vmap, for example "
            "jax.vmap(lambda s: s(0.5).mean)(sol)."
        )
    q = _integer(q, "derivative")
    known = len(sol.posterior.mean) - 1
    if q < 0:
        raise ValueError(f"derivative must be an integer from 0 to {known}, got {q}.")
    if q > known and known:
        raise ValueError(
            f"derivative = {q}, but in this model y has {known} derivatives; solve with a solver of order "
            f"{q} or higher."
        )
    if q > known:
        raise ValueError(
            "This solution kept y but not its derivatives. Pass save='steps', or save=times with "
            "smooth=True, to solve."
        )
    if q and sol.posterior.members is not None:
        raise ValueError(
            "Transported members are of y, not of its derivatives; solve without uncertainty=... for these."
        )
    return q


def _integer(x: Any, name: str) -> int:
    try:
        if isinstance(x, bool):
            raise TypeError
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {x!r}.") from None


def times(sol: "Solution", t: Any) -> tuple[Array, tuple[int, ...]]:
    """Times as a flat array inside the span, and the shape they came in."""
    xp = jnp if is_traced(t) else np  # on the host where possible: nothing to compile
    try:
        t = xp.asarray(t, sol.t.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"t must be a time or an array of times, got {t!r}.") from error
    if t.size == 0:
        raise ValueError("t is empty; pass at least one time.")
    flat = t.reshape(-1)
    if not is_traced(t, sol.t) and isinstance(sol.posterior, Path):
        saved = np.asarray(sol.t)
        first, last = saved[0], saved[-1]
        inside = (flat >= min(first, last)) & (flat <= max(first, last))
        if not inside.all():
            raise ValueError(
                f"t = {flat[~inside][0]} is outside of the solved span, {first} to {last}. Solve over a "
                "longer span."
            )
    return flat, t.shape


def look_up(sol: "Solution", t: Array, q: int) -> Moments:
    """The posterior at times that were saved."""
    return _pick(saved_moments(sol, q), _saved_index(sol, t))


_pick = compiled(pick)


def _saved_index(sol: "Solution", t: Array) -> np.ndarray:
    hint = (
        "pass save='steps' with smooth=True (or False) to solve for any time of the span, or save=times "
        "with the times that matter"
    )
    if is_traced(t, sol.t):
        raise ValueError(f"This solution knows only the times that it saved; under jit, {hint}.")
    saved, wanted = np.asarray(sol.t), np.asarray(t)
    order = np.argsort(saved)
    index = order[np.clip(np.searchsorted(saved[order], wanted), 0, saved.size - 1)]
    missing = wanted[saved[index] != wanted]
    if missing.size:
        raise ValueError(f"t = {missing[0]} was not saved, and this solution knows only saved times; {hint}.")
    return index


def saved_moments(sol: "Solution", q: int) -> Moments:
    """The posterior of the q-th derivative at the saved times."""
    posterior = sol.posterior
    if q == 0:
        return Moments(posterior.mean[0], posterior.std)
    assert isinstance(posterior, Path | Chain)
    return _saved_derivative(posterior, sol.t, q)


@compiled
def _saved_derivative(posterior: Path | Chain, t: Array, q: Array) -> Moments:
    states = Gaussian(posterior.mean, posterior.covariance)
    if isinstance(posterior, Chain):
        std = chain_std(posterior.prior, states, posterior.links, posterior.scale, q)
    else:
        std = std_of(posterior.prior, states, posterior.scale, q)
    return Moments(in_user_time(derivatives(posterior, q), direction(t), q), std)


def evaluate(path: Path, t: Array, at: Array, q: int) -> Moments:
    """Dense output at a flat array of times: a binary search and two states for each."""
    batch = max(1, BATCH_BYTES // _bytes_per_state(path))
    parts = [_evaluate(path, t, at[i : i + batch], q) for i in range(0, at.size, batch)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _evaluate(path: Path, t: Array, at: Array, q: int) -> Moments:
    # The costly program depends on the number of times: a power of two, so that few numbers occur. It does
    # not depend on the number of steps, because states are picked in another.
    xp = jnp if is_traced(at) else np
    count = at.size
    padded = xp.concatenate([at, xp.broadcast_to(at[-1], (_round_up(count) - count,))])
    left, right = _around(path, t, padded)
    moments = _between(path.prior, path.scale, left, right, padded, t[0], t[-1], q, path.filtered is not None)
    return moments if padded.size == count else _cut(moments, count)


@compiled
def _around(path: Path, t: Array, at: Array) -> tuple[Node, Node]:
    return path.around(t, at)


@compiled(static_argnames="smoothed")
def _between(
    prior: Prior,
    scale: Scale,
    left: Node,
    right: Node,
    t: Array,
    first: Array,
    last: Array,
    q: Array,
    smoothed: bool,
) -> Moments:
    sign = direction(jnp.stack([first, last]))

    def one(left: Node, right: Node, t: Array) -> Moments:
        moments = between(prior, scale, left, right, t, sign, q, smoothed)
        inside = (sign * (t - first) >= 0) & (sign * (last - t) >= 0)  # traced times cannot be checked
        return jax.tree.map(lambda x: jnp.where(inside, x, jnp.nan), moments)

    return jax.vmap(one)(left, right, t)


@compiled(static_argnums=1)
def _cut(moments: Moments, count: int) -> Moments:
    return jax.tree.map(lambda x: x[:count], moments)


def _bytes_per_state(posterior: Posterior) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(posterior)) // jax.tree.leaves(posterior.mean)[0].shape[0]


def sample(sol: "Solution", key: Array, num: Any, at: Any, q: int) -> PyTree[Array]:
    """Joint samples at the saved times, or anywhere."""
    posterior = sol.posterior
    if not isinstance(posterior, Chain) and (not isinstance(posterior, Path) or posterior.filtered is None):
        raise ValueError(
            "Joint samples need the smoothing posterior at more than one time: pass smooth=True (the "
            "default) with save='steps' or save=times to solve."
        )
    num = _integer(num, "num")
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}.")
    key = _key(key)
    flat, shape = (None, sol.t.shape) if at is None else times(sol, at)
    keys, batch = jax.random.split(key, num), int(np.clip(BATCH_BYTES // _bytes_per_state(posterior), 1, num))
    if isinstance(posterior, Chain):
        index = None if flat is None else _saved_index(sol, flat)
        samples = _draw_chain(posterior, sol.space, sol.t, index, keys, batch, q)
    else:
        samples = _draw_path(posterior, sol.space, sol.t, flat, keys, batch, q)
    return jax.tree.map(lambda x: x.reshape(num, *shape, *x.shape[2:]), samples)


def as_precise(members: Field, sol: "Solution") -> Field:
    """In the floating-point type of y; members are kept with as few digits as they need."""
    return jax.tree.map(lambda x: x.astype(dtype(sol.posterior.mean[0])), members)


def members_at(sol: "Solution", t: Array) -> Field:
    """The members of y (of its modes) at times of the span, or at saved ones if nothing else is known."""
    if isinstance(sol.posterior, Path):
        return _interpolated(sol.posterior.members, sol.t, t)
    return _pick(sol.posterior.members, _saved_index(sol, t))


@compiled
def _interpolated(members: Field, t: Array, at: Array) -> Field:
    sign = direction(t)
    left = jnp.clip(jnp.searchsorted(sign * t, sign * at, side="right") - 1, 0, t.size - 1)
    right = jnp.minimum(left + 1, t.size - 1)
    share = safe_divide(at - t[left], t[right] - t[left])

    def leafwise(x: Array) -> Array:
        s = share.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(s == 0, x[left], (1 - s) * x[left] + s * x[right])

    return jax.tree.map(leafwise, members)


def sample_members(sol: "Solution", key: Array, num: Any, at: Any) -> PyTree[Array]:
    """The mean plus some members, each of them at most once."""
    num, count = _integer(num, "num"), jax.tree.leaves(sol.posterior.members)[0].shape[1]
    if not 1 <= num <= count:
        raise ValueError(
            f"This solution has {count} members, each of which is one sample: num must be from 1 to {count}, "
            f"got {num}. For more, solve with mp.Transported(members={max(num, 2)})."
        )
    chosen = jax.random.permutation(_key(key), count)[:num]
    if at is None:
        mean, members = sol.mean, sol.members
    else:
        flat, shape = times(sol, at)
        members = as_precise(members_at(sol, flat), sol)
        mean, members = sol(at).mean, _members_in_space(sol.basis, members, shape)
    return jax.tree.map(lambda m, e: m + e[chosen], mean, members)


@compiled(static_argnums=2)
def _members_in_space(basis: Basis, members: Field, shape: tuple[int, ...]) -> Field:
    """Member first, then the axes of time."""

    def leafwise(x: Array) -> Array:
        return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], *shape, *x.shape[2:])

    return jax.tree.map(leafwise, basis.from_modes(members))


def _key(key: Any) -> Array:
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
        return key
    legacy = getattr(key, "dtype", None) == jnp.uint32 and getattr(key, "ndim", None) == 1
    if not legacy:
        raise TypeError(f"key must be a key such as jax.random.key(0), got {key!r}.")
    return jax.random.wrap_key_data(jnp.asarray(key))


def _way_of_draws(posterior: Posterior, *_: Any) -> Way:
    """XLA's older emitters take half a minute for some hundred blocks, which they unroll and repeat."""
    first = pick(posterior.mean[0], 0)
    return QUICKLY if size(first) <= FEW else FOR_MEMORY


@compiled(static_argnums=5, way=_way_of_draws)
def _draw_chain(
    chain: Chain,
    space: Space | None,
    t: Array,
    index: Int[Array, " k"] | None,
    keys: Array,
    batch: int,
    q: Array,
) -> Field:
    sign = direction(t)
    mean = in_user_time(derivatives(chain, q), sign, q)

    def draw(key: Array) -> Field:
        deviation = _in_space(space, in_user_time(chain.draw(key, q), sign, q))
        sample = jax.tree.map(jnp.add, mean, deviation)
        return sample if index is None else pick(sample, index)

    return lax.map(draw, keys, batch_size=batch)


def _in_space(space: Space | None, deviation: Field) -> Field:
    """With the correlations of a model of space, time by time."""
    return deviation if space is None else lax.map(space.correlate, deviation)


def _draw_path(
    path: Path, space: Space | None, t: Array, at: Array | None, keys: Array, batch: int, q: int
) -> Field:
    traced = is_traced(t, at)
    xp, steps = jnp if traced else np, t.size
    mean = None if at is None else evaluate(path, t, at, q).mean
    # Compiled code depends on the numbers of steps and of times: powers of two, so that few of them occur.
    most = steps if at is None else max(steps, at.size)
    rounded = not traced and _bytes_per_state(path) * most < BATCH_BYTES
    if rounded:
        path = path.joined([], lambda x: _lengthened(x, _round_up(steps)))
        t = _lengthened(t, _round_up(steps))
    nodes, slots, count = t, np.arange(t.size), steps
    if at is not None:
        count = at.size
        if rounded:
            at = _lengthened(at, _round_up(count))
            mean = jax.tree.map(lambda x: _lengthened(x, at.size), mean)
        nodes = xp.concatenate([t, at])
        order = xp.argsort(nodes * xp.where(t[-1] >= t[0], 1, -1), stable=True)
        slots = xp.concatenate([np.full(t.size, at.size), np.arange(at.size)])[order]
        nodes = nodes[order]
    length = t.size if at is None else at.size
    samples = _draw_nodes(path, space, t, nodes, slots, mean, keys, length, batch, q)
    return samples if count == length else jax.tree.map(lambda x: x[:, :count], samples)


def _round_up(count: int) -> int:
    """To a power of two."""
    return 2 ** (count - 1).bit_length()


def _lengthened(x: Any, length: int) -> Any:
    x = np.asarray(x)
    if x.shape[0] == length:
        return x
    return np.concatenate([x, np.broadcast_to(x[-1], (length - x.shape[0], *x.shape[1:]))])


@compiled(static_argnums=(7, 8), way=_way_of_draws)
def _draw_nodes(
    path: Path,
    space: Space | None,
    t: Array,
    nodes: Array,
    slots: Int[Array, " m"],
    mean: Field | None,
    keys: Array,
    length: int,
    batch: int,
    q: Array,
) -> Field:
    sign = direction(t)
    mean = in_user_time(derivatives(path, q), sign, q) if mean is None else mean

    def draw(key: Array) -> Field:
        deviation = in_user_time(path.draw(key, t, nodes, slots, length, q), sign, q)
        return jax.tree.map(jnp.add, mean, _in_space(space, deviation))

    return lax.map(draw, keys, batch_size=batch)
