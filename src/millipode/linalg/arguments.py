"""Checks of numbers that users pass: every refusal says what is wrong."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millipode.xla.tracing import is_traced


def as_integer(x: Any, name: str, least: int | None = None) -> int:
    """An integer; raise ``TypeError`` for what only looks like one, ``ValueError`` if it is too small."""
    try:
        number = None if x is True or x is False else operator.index(x)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {x!r}.")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {x}.")
    return number


def positive_integer(x: Any, name: str) -> int:
    """A positive integer; raise ``ValueError`` for anything else."""
    try:
        return as_integer(x, name, 1)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a positive integer, got {x!r}.") from None


def is_number(x: Any) -> bool:
    """Whether x is a plain number that is known, and not a flag."""
    return isinstance(x, int | float | np.number) and x is not True and x is not False


def check_positive(x: Any, name: str, infinite: bool = False) -> None:
    """Raise ``ValueError`` unless x is a positive number."""
    if not is_number(x) or not x > 0 or (x == math.inf and not infinite):
        raise ValueError(f"{name} must be a positive number, got {x!r}.")


def check_fraction(x: Any, name: str) -> None:
    """Raise ``ValueError`` unless x is traced, or a finite number that is not negative."""
    if not is_traced(x) and not 0 <= float(x) < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {x}.")


def as_positive(x: Any, name: str, scalar: bool = False) -> Any:
    """A parameter as an array that is traced, not hashed; positive and finite where that can be seen."""
    if scalar and np.ndim(x):
        raise ValueError(f"{name} must be a single number, got an array of shape {np.shape(x)}.")
    if is_traced(x):
        return x
    value = x if isinstance(x, jax.Array) else np.asarray(x, float)
    if not np.all(np.isfinite(value)) or not np.all(np.asarray(value) > 0):
        raise ValueError(f"{name} must be positive and finite, got {x}.")
    return value


def check_numeric(leaf: Any, name: str) -> None:
    """Raise ``TypeError`` unless this is an array of real numbers that the solver can compute with."""
    if type(leaf) in (int, float):
        return
    try:
        kind = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    except TypeError as error:
        raise TypeError(f"{name} holds a {type(leaf).__name__}, which is not an array of numbers.") from error
    if kind in (jnp.float64, jnp.float32):
        return
    if jnp.issubdtype(kind, jnp.complexfloating):
        raise TypeError(
            f"{name} is complex ({kind}), which the Gaussian model does not cover. Split it into "
            "real and imaginary parts, for example as a dict of two arrays."
        )
    if kind == jnp.bool_ or not jnp.issubdtype(kind, jnp.number):
        raise TypeError(f"{name} has dtype {kind}; pass floating-point numbers.")
    if kind in (jnp.float16, jnp.bfloat16):
        raise TypeError(f"{name} has dtype {kind}; the solver needs float32 or float64.")
