"""Questions to a solution: checks of what is asked, and the compiled code that answers.

What a solution can answer depends on what was saved; every refusal says what to pass to ``solve``.
"""

import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from millipode.fields import Field, Scale
from millipode.posterior import (
    Chain,
    Moments,
    Node,
    Path,
    Posterior,
    between,
    in_user_time,
    marginal_std,
)
from millipode.priors import Prior
from millipode.smoothing import pick

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
    try:
        q = operator.index(q)
    except TypeError as error:
        raise TypeError(f"derivative must be an integer, got {q!r}.") from error
    known = len(sol.posterior.mean) - 1
    if q < 0 or isinstance(q, bool):
        raise ValueError(f"derivative must be an integer from 0 to {known}, got {q}.")
    if q > known and known:
        raise ValueError(
            f"The {q}th derivative is not part of the model, which has y and {known} derivatives; solve with "
            f"a solver of order {q} or higher."
        )
    if q > known:
        raise ValueError(
            "This solution kept y but not its derivatives. Pass save='steps', or save=times with smooth=True, "
            "to solve."
        )
    return q


def times(sol: "Solution", t: Any) -> tuple[Array, tuple[int, ...]]:
    """Times as a flat array inside the span, and the shape they came in."""
    try:
        t = jnp.asarray(t, sol.t.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"t must be a time or an array of times, got {t!r}.") from error
    if t.size == 0:
        raise ValueError("t is empty; pass at least one time.")
    flat = t.reshape(-1)
    if not is_traced(t, sol.t) and isinstance(sol.posterior, Path):
        first, last = float(sol.t[0]), float(sol.t[-1])
        values = np.asarray(flat)
        inside = (values >= min(first, last)) & (values <= max(first, last))
        if not inside.all():
            outside = values[~inside][0]
            raise ValueError(
                f"t = {outside} is outside of the solved span, {first} to {last}. Solve over a longer span."
            )
    return flat, t.shape


def look_up(sol: "Solution", t: Array, q: int) -> Moments:
    """The posterior at times that were saved."""
    return pick(saved_moments(sol, q), jnp.asarray(_saved_index(sol, t)))


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
    return _saved_derivative(posterior, _sign(sol.t), q)


def _sign(t: Array) -> Array:
    return jnp.where(t[-1] >= t[0], 1, -1)


@partial(jax.jit, static_argnames="q")
def _saved_derivative(posterior: Path | Chain, sign: Array, q: int) -> Moments:
    n, scale = len(posterior.mean), posterior.scale
    std = jax.vmap(lambda c, y: marginal_std(c, y, q, n, scale))(posterior.covariance, posterior.mean[0])
    return Moments(in_user_time(posterior.mean[q], sign, q), std)


def evaluate(path: Path, t: Array, at: Array, q: int) -> Moments:
    """Dense output at a flat array of times: a binary search and two states for each."""
    batch = max(1, BATCH_BYTES // _bytes_per_state(path))
    parts = [_evaluate(path, t, at[i : i + batch], q) for i in range(0, at.size, batch)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _evaluate(path: Path, t: Array, at: Array, q: int) -> Moments:
    # Compiled code depends on the number of times: a power of two, so that few numbers occur. It does not
    # depend on the number of steps, because states are picked outside.
    count = at.size
    padded = jnp.concatenate([at, jnp.broadcast_to(at[-1], (2 ** (count - 1).bit_length() - count,))])
    left, right, sign = path.around(t, padded)
    moments = _between(path.prior, path.scale, left, right, padded, sign, q, path.filtered is not None)
    inside = (sign * (at - t[0]) >= 0) & (sign * (t[-1] - at) >= 0)

    def known(x: Array) -> Array:
        return jnp.where(inside.reshape(-1, *(1,) * (x.ndim - 1)), x[:count], jnp.nan)

    return jax.tree.map(known, moments)


@partial(jax.jit, static_argnames=("q", "smoothed"))
def _between(
    prior: Prior, scale: Scale, left: Node, right: Node, t: Array, sign: Array, q: int, smoothed: bool
) -> Moments:
    def one(left: Node, right: Node, t: Array) -> Moments:
        return between(prior, scale, left, right, t, sign, q, smoothed)

    return jax.vmap(one)(left, right, t)


def _bytes_per_state(posterior: Posterior) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(posterior)) // jax.tree.leaves(posterior.mean)[0].shape[0]


def sample(sol: "Solution", key: Array, num: Any, at: Any, q: int) -> PyTree[Array]:
    """Joint samples at the saved times, or anywhere."""
    posterior = sol.posterior
    if not isinstance(posterior, Chain) and (not isinstance(posterior, Path) or posterior.filtered is None):
        raise ValueError(
            "Joint samples need the smoothing posterior at more than one time: pass smooth=True (the default) "
            "with save='steps' or save=times to solve."
        )
    try:
        num = operator.index(num)
    except TypeError as error:
        raise TypeError(f"num must be an integer, got {num!r}.") from error
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}.")
    key = _key(key)
    flat, shape = (None, sol.t.shape) if at is None else times(sol, at)
    deviations: Field
    if isinstance(posterior, Chain):
        keep = None if flat is None else jnp.asarray(_saved_index(sol, flat))
        mean = saved_moments(sol, q).mean
        deviations = _draw_chain(posterior, jax.random.split(key, num), _batch(posterior, num), q)
        if keep is not None:
            mean = pick(mean, keep)
            deviations = jax.tree.map(lambda x: x[:, keep], deviations)
    else:
        mean = saved_moments(sol, q).mean if flat is None else evaluate(posterior, sol.t, flat, q).mean
        deviations = _draw_path(posterior, sol.t, flat, jax.random.split(key, num), q)
    sign = _sign(sol.t)

    def shift(m: Array, x: Array) -> Array:
        x = m + (x * (sign**q).astype(x.dtype) if q else x)
        return x.reshape(num, *shape, *x.shape[2:])

    return jax.tree.map(shift, mean, deviations)


def _key(key: Any) -> Array:
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
        return key
    legacy = getattr(key, "dtype", None) == jnp.uint32 and getattr(key, "ndim", None) == 1
    if not legacy:
        raise TypeError(f"key must be a key such as jax.random.key(0), got {key!r}.")
    return jax.random.wrap_key_data(jnp.asarray(key))


def _batch(posterior: Posterior, num: int) -> int:
    return int(np.clip(BATCH_BYTES // _bytes_per_state(posterior), 1, num))


@partial(jax.jit, static_argnames=("batch", "q"))
def _draw_chain(chain: Chain, keys: Array, batch: int, q: int) -> Field:
    return lax.map(lambda key: chain.draw(key, q), keys, batch_size=batch)


def _draw_path(path: Path, t: Array, at: Array | None, keys: Array, q: int) -> Field:
    batch, steps = _batch(path, keys.shape[0]), t.size
    if _bytes_per_state(path) * steps < BATCH_BYTES:
        # Compiled code depends on the number of steps: a power of two, so that few numbers occur.
        length = 2 ** (steps - 1).bit_length()
        t = _lengthened(t, length)
        path = path.joined([], lambda x: _lengthened(x, length))
    if at is None:
        slots, nodes, size = jnp.arange(t.size), t, t.size
    else:
        nodes = jnp.concatenate([t, at])
        order = jnp.argsort(_sign(t) * nodes, stable=True)
        slots = jnp.concatenate([jnp.full(t.size, at.size), jnp.arange(at.size)])[order]
        nodes, size = nodes[order], at.size
    deviations = _draw_nodes(path, t, nodes, slots, keys, size, batch, q)
    return jax.tree.map(lambda x: x[:, : steps if at is None else size], deviations)


def _lengthened(x: Array, length: int) -> Array:
    return jnp.concatenate([x, jnp.broadcast_to(x[-1], (length - x.shape[0], *x.shape[1:]))])


@partial(jax.jit, static_argnames=("size", "batch", "q"))
def _draw_nodes(
    path: Path,
    t: Array,
    nodes: Array,
    slots: Int[Array, " m"],
    keys: Array,
    size: int,
    batch: int,
    q: int,
) -> Field:
    return lax.map(lambda key: path.draw(key, t, nodes, slots, size, q), keys, batch_size=batch)
