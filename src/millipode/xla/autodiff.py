"""Loops that can be differentiated in both modes.

``lax.while_loop`` is the fastest loop, and supports forward mode only; checkpointed loops support reverse
mode only. ``both_ways`` gives a function the forward derivative of the one and the transposed derivative of
the other, so that users need not say which mode they are about to use.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from millipode.xla.compiling import as_one_kernel
from millipode.xla.ordering import after
from millipode.xla.tracing import is_traced


def while_loop(
    cond: Callable[[Any], Any],
    body: Callable[[Any], Any],
    init: Any,
    *,
    reverse: bool,
    max_steps: int,
    buffers: Callable[[Any], Any] | None = None,
    small: bool = False,
) -> Any:
    """Run a while loop that supports forward mode or, checkpointed, reverse mode.

    Args:
        cond: tells from the carry whether to go on.
        body: maps a carry to the next one.
        init: the first carry.
        reverse: whether to use the form that reverse mode supports.
        max_steps: the bound on the number of turns, which reverse mode needs.
        buffers: picks those parts of the carry that are written slot by slot.
        small: whether a turn does so little that the loop should be a single kernel.
    """
    if not reverse:

        def loop(init: Any) -> Any:
            return eqxi.while_loop(cond, body, init, buffers=buffers, kind="lax")

        return as_one_kernel(loop, init) if small else loop(init)
    return eqxi.while_loop(cond, body, init, max_steps=max_steps, buffers=buffers, kind="checkpointed")


def backwards(
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    read: Callable[[Array], Any],
    results: Any,
    count: Array,
    *,
    reverse: bool,
) -> Any:
    """For i = count−1 … 0: ``carry, results[i] = body(carry, read(i), results[i])``; return the results.

    With ``reverse``, the loop has a form that reverse mode supports; it then visits all of ``results``.
    """
    if not reverse:

        def visit(k: Array, state: tuple) -> tuple:
            carry, results = state
            i = count - 1 - k
            carry, result = body(carry, read(i), jax.tree.map(lambda x: x[i], results))
            # In place, if everything has been read before anything is written. Not x.at[i].set, which would
            # read the slot that it is about to overwrite.
            slot = after(result).hold(i)
            return carry, jax.tree.map(
                lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), results, result
            )

        return as_one_kernel(lambda *state: lax.fori_loop(0, count, visit, state)[1], carry, results)

    def scanned(carry: Any, inputs: tuple) -> tuple[Any, Any]:
        i, x, result = inputs
        return lax.cond(i < count, lambda: body(carry, x, result), lambda: (carry, result))

    index = jnp.arange(jax.tree.leaves(results)[0].shape[0])
    return lax.scan(scanned, carry, (index, jax.vmap(read)(index), results), reverse=True)[1]


class _Closed:
    """A function of a list of arrays as a jaxpr, with the tracers that it closes over as explicit inputs.

    Attributes:
        hidden: these tracers.
    """

    def __init__(self, function: Callable[[list[Array]], PyTree], leaves: Sequence[Array]):
        jaxpr, shape = jax.make_jaxpr(lambda *x: function(list(x)), return_shape=True)(*leaves)
        is_hidden = [is_traced(x) for x in jaxpr.consts]
        self.hidden = [x for x, hidden in zip(jaxpr.consts, is_hidden, strict=True) if hidden]
        self._known = [None if hidden else x for x, hidden in zip(jaxpr.consts, is_hidden, strict=True)]
        self._jaxpr, self._tree, self._is_hidden = jaxpr.jaxpr, jax.tree.structure(shape), is_hidden

    def __call__(self, hidden: Sequence[Array], leaves: Sequence[Array]) -> PyTree:
        moving = iter(hidden)
        consts = [next(moving) if h else x for x, h in zip(self._known, self._is_hidden, strict=True)]
        return jax.tree.unflatten(self._tree, jaxpr_as_fun(ClosedJaxpr(self._jaxpr, consts))(*leaves))


def both_ways(function: Callable[[PyTree, bool], PyTree], inputs: PyTree) -> PyTree:
    """Return ``function(inputs, reverse=False)``, differentiable in forward and in reverse mode.

    Values under differentiation that the function closes over, such as those inside of users' functions, are
    found by tracing it and differentiated, too.

    Args:
        function: maps a pytree of arrays to a pytree of arrays; with ``reverse=True`` it must be
            the same function in a form that reverse mode supports.
        inputs: a pytree of arrays.
    """
    leaves, tree = jax.tree.flatten(inputs)

    def variant(reverse: bool) -> _Closed:
        return _Closed(lambda x: function(jax.tree.unflatten(tree, x), reverse), leaves)

    forwards = variant(False)
    hidden = forwards.hidden
    # With hidden inputs, the other form is traced here as well, while these inputs are still alive.
    backwards_form = variant(True) if hidden else None
    everything = [*hidden, *leaves]
    smooth = [_is_smooth(leaf) for leaf in everything]

    def merged(xs: list[Array], rest: list[Array]) -> list[Array]:
        sources = (iter(rest), iter(xs))
        return [next(sources[s]) for s in smooth]

    def call(xs: list[Array], rest: list[Array]) -> PyTree:
        values = merged(xs, rest)
        return forwards(values[: len(hidden)], values[len(hidden) :])

    def reversible(xs: list[Array], rest: list[Array]) -> PyTree:
        values = merged(xs, rest)
        if backwards_form is None:
            return function(jax.tree.unflatten(tree, values), True)
        ordered = [values[_position(x, hidden)] for x in backwards_form.hidden]
        return backwards_form(ordered, values[len(hidden) :])

    return _with_both_rules(
        call,
        reversible,
        [leaf for leaf, s in zip(everything, smooth, strict=True) if s],
        [leaf for leaf, s in zip(everything, smooth, strict=True) if not s],
    )


def _position(x: Array, hidden: list[Array]) -> int:
    return next(i for i, other in enumerate(hidden) if other is x)


def _with_both_rules(call: Callable, reversible: Callable, xs: list[Array], rest: list[Array]) -> PyTree:
    """``call(xs, rest)``, with its own forward derivative in xs and the transposed one of ``reversible``."""

    def smooth_outputs(function: Callable, xs: list[Array], rest: list[Array]) -> list[Array]:
        return [leaf for leaf in jax.tree.leaves(function(xs, rest)) if _is_smooth(leaf)]

    @jax.custom_jvp
    def run(xs: list[Array], rest: list[Array]) -> PyTree:
        return call(xs, rest)

    @run.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[PyTree, PyTree]:
        (xs, rest), (dxs, _) = primals, tangents
        out = run(xs, rest)
        xs = _differentiated_once(xs)
        out_leaves, out_tree = jax.tree.flatten(out)
        # A linear map J with its own transpose: (dx, o) ↦ (dx, o + J dx) is the solution operator
        # of a linear system, which JAX lets us supply together with its transpose. JAX wants all of
        # (dx, o) to be linear in what is differentiated, so each gets a zero that is.
        zero = sum(jnp.where(False, jnp.ravel(dx)[0], 0) for dx in dxs if dx.size)
        offsets = [jnp.zeros_like(leaf) for leaf in out_leaves if _is_smooth(leaf)]
        dxs, offsets = jax.tree.map(lambda x: x + jnp.asarray(zero, x.dtype), (dxs, offsets))

        def forward(_: Callable, b: tuple) -> tuple:
            dx, o = b
            _, do = jax.jvp(lambda x: smooth_outputs(call, x, rest), (xs,), (dx,))
            return dx, jax.tree.map(jnp.add, o, do)

        def transposed(_: Callable, b: tuple) -> tuple:
            ct, o = b
            outputs: Callable[..., Any] = functools.partial(smooth_outputs, reversible, rest=rest)
            _, pullback = jax.vjp(outputs, xs)
            return jax.tree.map(jnp.add, ct, pullback(o)[0]), o

        _, tangent = lax.custom_linear_solve(lambda v: v, (dxs, offsets), forward, transposed)
        moving = iter(tangent)
        filled = [
            next(moving) if _is_smooth(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            for leaf in out_leaves
        ]
        return out, jax.tree.unflatten(out_tree, filled)

    return run(xs, rest)


@jax.custom_jvp
def _differentiated_once(xs: list[Array]) -> list[Array]:
    """The point at which a derivative is taken. The linear solve above would ignore that it may vary."""
    return xs


@_differentiated_once.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    raise NotImplementedError(
        "Second derivatives of a solve are not available: the derivative of its loop can be taken once, in "
        "either mode. Use finite differences of first derivatives."
    )


def _is_smooth(x: Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
