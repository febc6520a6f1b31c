"""Compiled programs, with the compiler options that suit them.

XLA:CPU has an older and a newer way to emit fused loops. For the small, unrolled algebra of this library the
older one compiles in about half the time, and the block-diagonal correction runs twice as fast; EK0 loses a
quarter of its speed between 10⁴ and 10⁵ unknowns (``benchmarks/compiler.py``). Options can be given to
outermost programs only: inside somebody else's ``jit``, theirs hold.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

OPTIONS = {"xla_cpu_use_fusion_emitters": False}


class Program:
    """``jax.jit``, with ``OPTIONS`` where it is outermost and the compiler knows them."""

    def __init__(self, function: Callable, **how: Any):
        self._inside = jax.jit(function, **how)
        self._outermost = jax.jit(function, **how, compiler_options=OPTIONS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, after compiling if need be."""
        return self._best()(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(...).lower``, for a look at the compiled code."""
        return self._best().lower(*args, **kwargs)

    def _best(self) -> Any:
        return self._outermost if outside_transformations() and _options_are_known() else self._inside


def compiled(function: Callable | None = None, **how: Any) -> Any:
    """The decorator ``jax.jit`` for functions that users reach without a ``jit`` of their own."""
    if function is None:
        return functools.partial(compiled, **how)
    return functools.wraps(function, updated=())(Program(function, **how))


def outside_transformations() -> bool:
    """Whether no JAX transformation is under way, so that all values are concrete."""
    try:
        from jax._src.core import trace_state_clean
    except ImportError:  # private, and only there to save work
        return False
    return trace_state_clean()


@functools.cache
def _options_are_known() -> bool:
    """Whether this backend and this version of XLA have the options; they are not part of any promise."""
    if jax.default_backend() != "cpu":
        return False
    try:
        jax.jit(lambda: 0, compiler_options=OPTIONS)()
    except Exception:
        return False
    return True
