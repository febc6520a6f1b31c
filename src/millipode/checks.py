"""Input checks: every refusal says what is wrong and what to do, before any work is done."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from millipode.filter.control import Controller, positive_step
from millipode.filter.ensemble import Transported, TransportedError
from millipode.linalg.arguments import check_numeric, positive_integer
from millipode.linalg.fields import Field, dtype, same_structure
from millipode.model.linearisation import Linearisation
from millipode.solvers import Solver
from millipode.xla.tracing import is_traced

# With a tolerance that is not known while JAX traces a solve, the order is that of this one.
TYPICAL_RTOL = 1e-6
# The largest orders in single precision: by default, and at all.
USUAL_SINGLE, MAX_SINGLE = 4, 8
ONE_ERROR = TransportedError()


def as_array(x: Any, kind: Any) -> Any:
    """An array of dtype ``kind``: one of NumPy, which is cheaper, unless x is one of JAX already."""
    if isinstance(x, jax.Array):
        return x if x.dtype == kind else x.astype(kind)
    return np.asarray(x, kind)


def asks_for(argument: Any, word: str) -> bool:
    """Whether an argument that may also be an array is this word."""
    return isinstance(argument, str) and argument == word


def initial_value(y0: PyTree) -> Field:
    """The initial value as arrays of one floating-point type."""
    leaves = jax.tree.leaves(y0)
    if not leaves:
        raise ValueError("y0 is empty: pass an array, or a pytree with at least one array.")
    for leaf in leaves:
        check_numeric(leaf, "y0")
    if any(np.size(leaf) == 0 for leaf in leaves):
        raise ValueError("y0 has an array without entries; remove it.")
    # Weakly typed arrays count with the dtype they have: jnp.full(3, 1.0) is float64 under x64.
    kinds = [np.dtype(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(float)) for leaf in leaves]
    if np.dtype(np.float64) in kinds and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        warnings.warn(
            "y0 is float64, but JAX computes in float32 here. Call "
            "jax.config.update('jax_enable_x64', True) at startup for double precision, or pass "
            "float32 to silence this.",
            stacklevel=4,
        )
    floating = {kind for kind in kinds if kind.kind == "f"}
    target = jax.dtypes.canonicalize_dtype(np.result_type(*(floating or [jnp.result_type(float)])))
    y0 = jax.tree.map(lambda leaf: as_array(leaf, target), y0)
    if not is_traced(y0) and not all(_all_finite(x) for x in jax.tree.leaves(y0)):
        raise ValueError("y0 has infinite or NaN entries; the solver needs a finite initial value.")
    return y0


def _all_finite(x: Any) -> bool:
    # Large arrays stay where they are; for small ones, NumPy has the shorter way.
    return bool((jnp if x.size > 100_000 else np).isfinite(x).all())


def time_span(t_span: Any, kind: Any) -> tuple[Array, Array]:
    """The time span (t0, t1) as two scalars."""
    try:
        t0, t1 = t_span
    except (TypeError, ValueError) as error:
        raise ValueError(f"t_span must be a pair (t0, t1), got {t_span!r}.") from error
    for t in (t0, t1):
        check_numeric(t, "t_span")
    if np.ndim(t0) or np.ndim(t1):
        raise ValueError("t_span must hold two scalars.")
    t0, t1 = as_array(t0, kind), as_array(t1, kind)
    if not is_traced((t0, t1)) and not (np.isfinite(t0) and np.isfinite(t1)):
        raise ValueError(f"t_span must be finite, got ({t0}, {t1}).")
    return t0, t1


def tolerances(rtol: Any, atol: Any, y0: Field) -> tuple[PyTree, PyTree]:
    """Both tolerances, each a scalar or a field, raised to what the precision can deliver."""
    floor = 100 * float(np.finfo(dtype(y0)).eps)
    if type(rtol) is float and type(atol) is float and floor <= rtol < np.inf and 0 <= atol < np.inf:
        return np.asarray(rtol, dtype(y0)), np.asarray(atol, dtype(y0))  # nearly always, and fast
    rtol, atol = _tolerance(rtol, "rtol", y0), _tolerance(atol, "atol", y0)
    if is_traced((rtol, atol)):
        return rtol, atol
    relative = [np.asarray(leaf) for leaf in jax.tree.leaves(rtol)]
    absolute = [np.asarray(leaf) for leaf in jax.tree.leaves(atol)]
    if not any(x.any() for x in relative) and not any(x.any() for x in absolute):
        raise ValueError("rtol and atol are both zero; at least one of them must be positive.")
    if any(((x > 0) & (x < floor)).any() for x in relative):
        _warn_raised("rtol", floor, dtype(y0))
        rtol = jax.tree.map(lambda x: jnp.where(x > 0, jnp.maximum(x, floor), x), rtol)
    if not any(x.any() for x in relative) and not is_traced(y0):
        magnitude = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(y0))
        if any(((x > 0) & (x < floor * magnitude)).any() for x in absolute):
            _warn_raised("atol", floor * magnitude, dtype(y0))
            atol = jax.tree.map(lambda x: jnp.where(x > 0, jnp.maximum(x, floor * magnitude), x), atol)
    return rtol, atol


def _warn_raised(name: str, floor: float, kind: Any) -> None:
    warnings.warn(f"{name} is below what {kind} can deliver; {floor:.2g} is used instead.", stacklevel=4)


def _tolerance(tolerance: Any, name: str, y0: Field) -> PyTree:
    for leaf in jax.tree.leaves(tolerance):
        check_numeric(leaf, name)
    kind = dtype(y0)
    tolerance = jax.tree.map(lambda x: as_array(x, kind), tolerance)
    if not is_traced(tolerance):
        for leaf in jax.tree.leaves(tolerance):
            if not np.all(np.isfinite(leaf)):
                raise ValueError(f"{name} must be finite, got {leaf}.")
            if np.any(np.asarray(leaf) < 0):
                raise ValueError(f"{name} must not be negative, got {leaf}.")
    if same_structure(tolerance, 0) and jnp.ndim(tolerance) == 0:
        return tolerance
    try:
        if not same_structure(tolerance, y0):
            raise ValueError(f"its structure is {jax.tree.structure(tolerance)}")
        return jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), tolerance, y0)
    except ValueError as error:
        raise ValueError(f"{name} must be a scalar or shaped like y0 ({describe(y0)}): {error}.") from error


def save_times(save: Any, t0: Array, t1: Array) -> Array:
    """Save times as an array, inside the span and monotone in the direction of integration."""
    if save is None or isinstance(save, str):
        raise ValueError(f"save must be 'steps', 'end' or an array of times, got {save!r}.")
    for leaf in jax.tree.leaves(save):
        check_numeric(leaf, "save")
    times = as_array(save, t0.dtype)
    if times.ndim != 1 or times.size == 0:
        raise ValueError(
            f"save must be a one-dimensional, non-empty array of times; its shape is {times.shape}."
        )
    if not is_traced((times, t0, t1)):
        ts, a, b = (np.asarray(x) for x in (times, t0, t1))
        if not np.all(np.isfinite(ts)):
            raise ValueError("save times must be finite.")
        low, high = min(a, b), max(a, b)
        outside = ts[(ts < low) | (ts > high)]
        if outside.size:
            raise ValueError(f"save times must lie inside t_span = ({a}, {b}); {outside[0]} does not.")
        direction = 1 if b >= a else -1
        if np.any(direction * np.diff(ts) <= 0):
            order = "increasing" if direction == 1 else "decreasing, as t_span runs backwards"
            raise ValueError(f"save times must be strictly {order}.")
    return times


def smoothing(smooth: Any, save: Any, chooses: bool) -> None:
    """Refuse a ``smooth`` that is neither a flag nor "recompute".

    Args:
        smooth: what to check.
        save: what to save.
        chooses: whether the solver chooses between explicit and implicit steps.
    """
    if asks_for(smooth, "recompute"):
        if chooses:
            raise ValueError(
                "smooth='recompute' takes all steps a second time, and mp.Auto does not remember which of "
                "them were implicit. Use mp.EK0(...) or mp.EK1(...)."
            )
        if not asks_for(save, "steps"):
            raise ValueError(
                "smooth='recompute' saves memory with save='steps'; any other save needs little with "
                "smooth=True."
            )
    elif not isinstance(smooth, bool | np.bool_):
        raise ValueError(f"smooth must be True, False or 'recompute', got {smooth!r}.")


def uncertainty(
    given: Any, solver: Solver, linearisation: Linearisation, smooth: Any
) -> Transported | TransportedError | None:
    """What is carried along beside the filter: an ensemble, by default one error estimate, or nothing."""
    if given is None:
        # The paper's filter is left as it is, and one whose covariance knows the whole Jacobian transports
        # errors by itself.
        transports = linearisation.is_exact and not linearisation.is_implicit
        return ONE_ERROR if solver.corrections > 1 and not transports else None
    if asks_for(given, "filter"):
        return None
    if not isinstance(given, Transported):
        raise TypeError(f"uncertainty must be mp.Transported(members=...), 'filter' or None, got {given!r}.")
    if asks_for(smooth, "recompute"):
        raise ValueError(
            "smooth='recompute' is for little memory, and mp.Transported(...) keeps all members at all "
            "steps. Pass smooth=True, or save=times."
        )
    return given


def order(solver: Solver, tolerances: tuple[PyTree, PyTree], kind: Any) -> int:
    """The order ν for these tolerances; refuses one for which the precision of y has too few digits."""
    is_single = np.finfo(kind).bits < 64
    if solver.order is not None:
        if is_single and solver.order > MAX_SINGLE:
            raise ValueError(
                f"order={solver.order} needs float64: in float32, the highest derivatives have no digits "
                f"left. Use order {MAX_SINGLE} or less, or call jax.config.update('jax_enable_x64', True) at "
                "startup and pass float64."
            )
        return solver.order
    rtol, atol = tolerances
    leaves = jax.tree.leaves(rtol)
    if is_traced(leaves):
        chosen = solver.order_for(TYPICAL_RTOL)
    else:
        positive = [float(x[x > 0].min()) for x in map(np.asarray, leaves) if (x > 0).any()]
        chosen = solver.order_for(min(positive, default=0.0) or _smallest(atol))
    return min(chosen, USUAL_SINGLE) if is_single else chosen


def _smallest(atol: PyTree) -> float:
    """The smallest positive absolute tolerance, which says how accurate a solve without rtol is to be."""
    leaves = jax.tree.leaves(atol)
    if is_traced(leaves):
        return TYPICAL_RTOL
    return min(float(x[x > 0].min()) for x in map(np.asarray, leaves) if (x > 0).any())


def solver(given: Any, default: Solver) -> Solver:
    """A solver, or the default for None."""
    given = default if given is None else given
    if not isinstance(given, Solver):
        raise TypeError(f"solver must be a solver such as mp.EK0(order=4), got {given!r}.")
    return given


def controller(given: Any, default: Controller, kind: Any) -> Controller:
    """A controller in the precision of y, or the default for None."""
    if given is None:
        return default
    if not isinstance(given, Controller):
        raise TypeError(f"controller must be mp.PIController or mp.FixedStep, got {given!r}.")
    return given.fitted(kind)


def max_steps(number: Any) -> int:
    """The bound on attempts."""
    return positive_integer(number, "max_steps")


def first_step(dt0: Any, controller: Controller, kind: Any) -> Array | None:
    """The first step as a positive scalar, or None."""
    if dt0 is None:
        return None
    if controller.knows_first_step:
        raise ValueError(
            f"dt0 has no meaning with mp.{type(controller).__name__}, which already says every step."
        )
    return positive_step(dt0, "dt0", kind)


def describe(y: Field) -> str:
    """The shapes and dtypes of y, for messages."""
    leaves = jax.tree_util.tree_leaves_with_path(y)
    return ", ".join(f"y{jax.tree_util.keystr(p)}: {x.dtype}{list(x.shape)}" for p, x in leaves)
