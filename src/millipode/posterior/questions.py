"""Checks of what a solution is asked for: every refusal says what to pass to ``solve``."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from millipode.linalg.arguments import as_integer
from millipode.posterior.posterior import Posterior
from millipode.xla.tracing import is_traced


def derivative(posterior: Posterior, t: Array, q: Any) -> int:
    """The order of a derivative that the posterior knows."""
    if t.ndim != 1:
        raise ValueError(
            "This is a batch of solutions. Ask each of them under jax.vmap, for example "
            "jax.vmap(lambda s: s(0.5).mean)(sol)."
        )
    q = as_integer(q, "derivative")
    known = len(posterior.mean) - 1
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
    return q


def times(posterior: Posterior, saved: Array, t: Any) -> tuple[Array, tuple[int, ...]]:
    """Times as a flat array inside of the span, and the shape that they came in."""
    xp = jnp if is_traced(t) else np  # on the host where possible: nothing to compile
    try:
        t = xp.asarray(t, saved.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"t must be a time or an array of times, got {t!r}.") from error
    if t.size == 0:
        raise ValueError("t is empty; pass at least one time.")
    flat = t.reshape(-1)
    if not is_traced(t, saved) and posterior.is_continuous:
        ends = np.asarray(saved)[[0, -1]]
        inside = (flat >= ends.min()) & (flat <= ends.max())
        if not inside.all():
            raise ValueError(
                f"t = {flat[~inside][0]} is outside of the solved span, {ends[0]} to {ends[1]}. Solve over a "
                "longer span."
            )
    return flat, t.shape


def saved_index(saved: Array, t: Array) -> np.ndarray:
    """Where in the saved times these times are."""
    hint = (
        "pass save='steps' with smooth=True (or False) to solve for any time of the span, or save=times "
        "with the times that matter"
    )
    if is_traced(t, saved):
        raise ValueError(f"This solution knows only the times that it saved; under jit, {hint}.")
    known, wanted = np.asarray(saved), np.asarray(t)
    order = np.argsort(known)
    index = order[np.clip(np.searchsorted(known[order], wanted), 0, known.size - 1)]
    missing = wanted[known[index] != wanted]
    if missing.size:
        raise ValueError(f"t = {missing[0]} was not saved, and this solution knows only saved times; {hint}.")
    return index


def joint(posterior: Posterior) -> None:
    """Refuse samples of a posterior that does not know how its times depend on each other."""
    if not posterior.is_joint:
        raise ValueError(
            "Joint samples need the smoothing posterior at more than one time: pass smooth=True (the "
            "default) with save='steps' or save=times to solve."
        )


def how_many(num: Any, most: int | None = None) -> int:
    """The number of samples; ``most`` is the number of ensemble members, if samples are those."""
    num = as_integer(num, "num")
    if most is not None and not 1 <= num <= most:
        raise ValueError(
            f"This solution has {most} ensemble members, each of which is one sample: num must be from 1 to "
            f"{most}, got {num}. For more, solve with mp.Transported(members={max(num, 2)})."
        )
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}.")
    return num
