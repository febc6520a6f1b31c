"""One loop, both modes of differentiation.

``lax.while_loop`` is the fastest and knows forward mode only; checkpointed loops know reverse mode
only. ``both_ways`` gives a function the forward derivative of the one and the transposed derivative of
the other, so that users need not say which mode they are about to use.
"""

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from millipode.compiling import as_one_kernel


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
    """A while loop that is differentiable in forward mode or, checkpointed, in reverse mode.

    A ``small`` one does so little per turn that it should be a single kernel.
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
    """For i = count−1 … 0: ``carry, results[i] = body(carry, read(i), results[i])``; returns the results.

    With ``reverse``, in a form that reverse mode understands; it then visits all of ``results``.
    """
    if not reverse:

        def visit(k: Array, state: tuple) -> tuple:
            carry, results = state
            i = count - 1 - k
            carry, result = body(carry, read(i), jax.tree.map(lambda x: x[i], results))
            # In place, which XLA does only if all has been read before anything is written. Not x.at[i].set,
            # which would read what it is about to overwrite.
            slot = i + zero_after(result).astype(i.dtype)
            return carry, jax.tree.map(
                lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), results, result
            )

        return as_one_kernel(lambda *state: lax.fori_loop(0, count, visit, state)[1], carry, results)

    def scanned(carry: Any, inputs: tuple) -> tuple[Any, Any]:
        i, x, result = inputs
        return lax.cond(i < count, lambda: body(carry, x, result), lambda: (carry, result))

    index = jnp.arange(jax.tree.leaves(results)[0].shape[0])
    return lax.scan(scanned, carry, (index, jax.vmap(read)(index), results), reverse=True)[1]


def zero_after(x: PyTree) -> Array:
    """A zero that XLA cannot know before it knows x."""
    first = sum(leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(x))
    return 0 * jnp.where(jnp.isfinite(first), first, 0)


def both_ways(function: Callable[[PyTree, bool], PyTree], inputs: PyTree) -> PyTree:
    """``function(inputs, reverse=False)``, differentiable in forward and in reverse mode.

    Args:
        function: maps a pytree of arrays to a pytree of arrays; with ``reverse=True`` it must be
            the same function in a form that reverse mode understands.
        inputs: a pytree of arrays; all that derivatives are wanted for.
    """
    leaves, tree = jax.tree.flatten(inputs)
    smooth = [_is_smooth(leaf) for leaf in leaves]

    def call(xs: list[Array], rest: list[Array], reverse: bool) -> PyTree:
        sources = (iter(rest), iter(xs))
        merged = [next(sources[s]) for s in smooth]
        return function(jax.tree.unflatten(tree, merged), reverse)

    def smooth_outputs(xs: list[Array], rest: list[Array], reverse: bool) -> list[Array]:
        return [leaf for leaf in jax.tree.leaves(call(xs, rest, reverse)) if _is_smooth(leaf)]

    @jax.custom_jvp
    def run(xs: list[Array], rest: list[Array]) -> PyTree:
        return call(xs, rest, False)

    @run.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[PyTree, PyTree]:
        (xs, rest), (dxs, _) = primals, tangents
        out = run(xs, rest)
        out_leaves, out_tree = jax.tree.flatten(out)
        # A linear map J with its own transpose: (dx, o) ↦ (dx, o + J dx) is the solution operator
        # of a linear system, which JAX lets us supply together with its transpose. JAX wants all of
        # (dx, o) to be linear in what is differentiated, so each gets a zero that is.
        zero = sum(jnp.where(False, jnp.ravel(dx)[0], 0) for dx in dxs if dx.size)
        offsets = [jnp.zeros_like(leaf) for leaf in out_leaves if _is_smooth(leaf)]
        dxs, offsets = jax.tree.map(lambda x: x + jnp.asarray(zero, x.dtype), (dxs, offsets))

        def forward(_: Callable, b: tuple) -> tuple:
            dx, o = b
            _, do = jax.jvp(lambda x: smooth_outputs(x, rest, False), (xs,), (dx,))
            return dx, jax.tree.map(jnp.add, o, do)

        def transposed(_: Callable, b: tuple) -> tuple:
            ct, o = b
            function: Any = lambda x: smooth_outputs(x, rest, True)  # noqa: E731
            _, pullback = jax.vjp(function, xs)
            return jax.tree.map(jnp.add, ct, pullback(o)[0]), o

        _, tangent = lax.custom_linear_solve(lambda v: v, (dxs, offsets), forward, transposed)
        moving = iter(tangent)
        filled = [
            next(moving) if _is_smooth(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            for leaf in out_leaves
        ]
        return out, jax.tree.unflatten(out_tree, filled)

    return run(
        [leaf for leaf, s in zip(leaves, smooth, strict=True) if s],
        [leaf for leaf, s in zip(leaves, smooth, strict=True) if not s],
    )


def _is_smooth(x: Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
