"""Compiled programs, with the compiler options that suit them.

Options can be given to outermost programs only; inside another ``jit``, the options of that one apply. All of
this is about XLA:CPU, and ``benchmarks/compiler.py`` measures it.

- XLA has an older and a newer way to emit fused loops. For the small, unrolled algebra of this library the
  older one compiles in about half the time, and the block-diagonal correction runs twice as fast. The newer
  one makes better use of the memory, which matters for EK0 beyond a few thousand unknowns.
- XLA starts one kernel per fused loop, which takes some 50 ns. A step of a small filter has a hundred of
  them, which take longer than its arithmetic. ``as_one_kernel`` makes a single kernel of a whole loop over
  small arrays.
"""

import contextvars
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array

from millipode.xla.tracing import constants_inside, programs_inside


class Way(NamedTuple):
    """How to compile a program.

    Attributes:
        options: options of XLA, as pairs of a name and a value.
        kernels: whether loops may become single kernels.
    """

    options: tuple[tuple[str, Any], ...] = ()
    kernels: bool = False


OLDER_EMITTERS = ("xla_cpu_use_fusion_emitters", False)
LESS_OPTIMISED = ("xla_backend_optimization_level", 1)

QUICKLY = Way((OLDER_EMITTERS,))
ONE_KERNEL = Way((OLDER_EMITTERS,), kernels=True)
ONE_SMALL_KERNEL = Way((OLDER_EMITTERS, LESS_OPTIMISED), kernels=True)
FOR_MEMORY = Way()

# Primitives that call libraries or Python, and so cannot be part of a single kernel.
LIBRARY_CALLS = {
    *("debug_callback", "debug_print", "io_callback", "pure_callback", "ffi_call", "infeed", "outfeed"),
    *("ragged_dot_general", "conv_general_dilated", "fft", "sort", "top_k", "approx_top_k"),
    *(
        "cholesky",
        "cholesky_update",
        "triangular_solve",
        "tridiagonal_solve",
        "lu",
        "lu_pivots_to_permutation",
    ),
    *("qr", "geqrf", "geqp3", "ormqr", "householder_product", "svd", "eig", "eigh", "schur"),
    *(
        "hessenberg",
        "tridiagonal",
        "linear_solve",
    ),  # the last one is that of lineax, which hides what it does
}

# The marks that ``as_one_kernel`` sets are not part of XLA's public interface, and XLA aborts the process if
# it does not accept them: add a version of JAX only if ``tests/test_compiling.py`` passes with it.
TESTED = {(0, 10)}

# Products of matrices with more entries than this are left to a library.
MATRIX = 2**10

# XLA keeps constants of more than 10 kB outside of kernels, and aborts the process if a kernel needs one.
# Several may be folded into one, so this is a bound, in bytes, for all of them together.
CONSTANTS = 2**12

# Arithmetic on larger arrays than this is left to XLA, which uses several cores.
PARALLEL = 2**17
ARITHMETIC = {"add", "sub", "mul", "div", "exp", "log", "sin", "cos", "tanh", "sqrt", "pow", "integer_pow"}

# Whether loops in the program that is being traced may become single kernels.
_kernels = contextvars.ContextVar("kernels", default=False)


class Program:
    """``jax.jit`` with options that suit the arguments, if it is outermost and the compiler has them.

    Args:
        function: the function to compile.
        way: returns the way to compile for certain arguments, given these; ``QUICKLY`` if it is None.
        how: keyword arguments of ``jax.jit``.
    """

    def __init__(self, function: Callable, way: Callable[..., Way] | None, **how: Any):
        self._function, self._way, self._how = function, way, how
        self._inside = jax.jit(function, **how)
        self._ways: dict[Way, Any] = {}
        self._refused: set = set()

    def __call__(self, *args: Any) -> Any:
        """Run the program; compile it first if needed."""
        best = self._best(args)
        try:
            return best(*args)
        except jax.errors.JaxRuntimeError:
            plain = self.outermost(QUICKLY)
            if best in (plain, self._inside) or _are_consumed(args):
                raise
            self._refused.add(_signature(args))
            return plain(*args)

    def lower(self, *args: Any) -> Any:
        """Like ``jax.jit(...).lower``, to inspect the compiled code."""
        return self._best(args).lower(*args)

    def _best(self, args: tuple) -> Any:
        if not (outside_transformations() and _options_are_known()):
            return self._inside
        if self._way is None or (self._refused and _signature(args) in self._refused):
            return self.outermost(QUICKLY)
        return self.outermost(self._way(*args))

    def outermost(self, way: Way) -> Any:
        """The program as ``jax.jit`` compiles it in a certain way."""
        if way not in self._ways:
            # Each way needs a function of its own, because JAX caches how a function was traced.
            function = functools.wraps(self._function)(_traced(self._function, way.kernels))
            self._ways[way] = jax.jit(function, **self._how, compiler_options=dict(way.options))
        return self._ways[way]


def compiled(function: Callable | None = None, *, way: Callable[..., Way] | None = None, **how: Any) -> Any:
    """A decorator in place of ``jax.jit``, for functions that users may call outside of ``jit``.

    Args:
        function: the function to compile; None if the decorator is called with options.
        way: as for ``Program``.
        how: keyword arguments of ``jax.jit``.
    """
    if function is None:
        return functools.partial(compiled, way=way, **how)
    return functools.wraps(function, updated=())(Program(function, way, **how))


def as_one_kernel(function: Callable, *args: Any) -> Any:
    """``function(*args)`` as a single kernel, if that is possible.

    This is meant for a ``lax.while_loop`` over small arrays. XLA itself makes single kernels of tiny loops,
    and the attributes below are its marks for them. It is done in outermost programs only: ``vmap`` may turn
    the loop into one for which it is impossible, and an outermost program can be compiled again without it.

    XLA aborts the process if a parameter of such a call turns out to be unused. So the arguments should be
    unknown to it: from outside of the program, or ``disguised``. The first floating-point result must be
    used, because all parameters are tied to it. Large constants become such arguments.
    """
    if not _kernels.get() or jax.__version_info__[:2] not in TESTED:
        return function(*args)
    leaves, tree = jax.tree.flatten(args)
    jaxpr, shape = jax.make_jaxpr(lambda *x: function(*jax.tree.unflatten(tree, x)), return_shape=True)(
        *leaves
    )
    results, constants = jax.tree.structure(shape), jaxpr.consts
    hidden = constants_inside(jaxpr.jaxpr) > CONSTANTS
    if hidden or calls_libraries(jaxpr.jaxpr) or not all(map(_is_plain, [*constants, *leaves])):
        return jax.tree.unflatten(results, jaxpr_as_fun(jaxpr)(*leaves))
    if sum(x.nbytes for x in constants) > CONSTANTS:
        constants = disguised(
            constants, next(x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)).ravel()[0]
        )

    def inside(constants: list, leaves: list) -> list:
        results = jaxpr_as_fun(ClosedJaxpr(jaxpr.jaxpr, constants))(*leaves)
        # Every parameter is used in this sum; XLA cannot know that its multiple ``zero`` is zero.
        firsts = [jnp.real(jnp.ravel(x)[0]).astype(jnp.float32) for x in [*constants, *leaves]]
        zero = _zero(functools.reduce(jnp.add, firsts))
        first = next(i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.floating))
        results[first] = results[first] + zero.astype(results[first].dtype)
        return results

    once = jax.jit(_with_metadata(inside, inlineable="true", xla_cpu_small_call="false"))
    call = _with_metadata(once, inlineable="false", xla_cpu_small_call="true")
    return jax.tree.unflatten(results, call(constants, leaves))


def disguised(tree: Any, unknown: Array) -> Any:
    """The same numbers, which XLA cannot know beforehand because they depend on something ``unknown``."""
    if not _kernels.get():
        return tree
    zero = _zero(unknown)

    def disguise(x: Array) -> Array:
        return x ^ (zero != 0) if x.dtype == bool else x + zero.astype(x.dtype)

    return jax.tree.map(disguise, tree)


def _zero(unknown: Array) -> Array:
    """Zero, but XLA does not know that."""
    return 0 * jnp.where(jnp.isfinite(unknown), unknown, 0)


def calls_libraries(jaxpr: Jaxpr) -> bool:
    """Whether a program has operations that cannot be part of a kernel, or are faster outside of it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in LIBRARY_CALLS:
            return True
        if equation.primitive.name == "dot_general" and max(_sizes(equation.invars)) > MATRIX:
            return True
        if equation.primitive.name in ARITHMETIC and max(_sizes(equation.outvars)) > PARALLEL:
            return True
        if any(map(calls_libraries, programs_inside(equation))):
            return True
    return False


def _is_plain(x: Any) -> bool:
    """Whether an array is not empty, and holds numbers or booleans."""
    return x.size > 0 and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number))


def _sizes(variables: list[Any]) -> list[int]:
    return [math.prod(x.aval.shape) for x in variables]


def outside_transformations() -> bool:
    """Whether no JAX transformation is under way, so that all values are concrete."""
    try:
        from jax._src.core import trace_state_clean
    except ImportError:  # the function is private, and only used to save work
        return False
    return trace_state_clean()


def _traced(function: Callable, kernels: bool) -> Callable:
    def traced(*args: Any) -> Any:
        token = _kernels.set(kernels)
        try:
            return function(*args)
        finally:
            _kernels.reset(token)

    return traced


def _with_metadata(function: Callable, **metadata: str) -> Callable:
    def call(*args: Any) -> Any:
        with set_xla_metadata(**metadata):
            return function(*args)

    return call


def _are_consumed(args: tuple) -> bool:
    """Whether some of the arguments have been donated to a program and are gone."""
    return any(x.is_deleted() for x in jax.tree.leaves(args) if isinstance(x, jax.Array))


def _signature(args: tuple) -> tuple:
    """The structure, shapes and dtypes of the arguments, for which a program is compiled."""
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x for x in leaves)


@functools.cache
def _options_are_known() -> bool:
    """Whether this backend and this version of XLA have the options, which may change between versions."""
    if jax.default_backend() != "cpu":
        return False
    try:
        jax.jit(lambda: 0, compiler_options=dict(ONE_SMALL_KERNEL.options))()
    except Exception:
        return False
    return True
