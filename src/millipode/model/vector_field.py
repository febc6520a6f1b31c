"""The right-hand side of the ODE, as the filter sees it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from millipode.linalg.fields import Field, same_structure
from millipode.xla.tracing import is_traced, operations


class VectorField(NamedTuple):
    """The right-hand side in the filter's own time, which always runs forwards.

    Attributes:
        f: the user's ``f(t, y)`` or ``f(t, y, args)``.
        args: what the user passed as ``args``; ``None`` means that f does not take any.
        sign: +1, or −1 where the user integrates backwards.
    """

    f: Callable
    args: PyTree
    sign: Array

    def __call__(self, t: Array, y: Field) -> Field:
        """dy/ds at the user's time t, where s is the filter's time."""
        return self.signed(self.f, t, y)

    def signed(self, function: Callable, t: Array, y: Field) -> Field:
        """Return ``sign * function(t, y[, args])``, for f and for its derivatives alike."""
        return jax.tree.map(lambda leaf: self.sign * leaf, function(*self._inputs(t, y)))

    def check(self, function: Callable, name: str, t: Array, y: Field) -> None:
        """Raise unless a function of (t, y[, args]) returns something like y, by an abstract evaluation."""
        if not callable(function):
            raise TypeError(f"{name} must be callable as {name}(t, y), got {type(function).__name__}.")
        out = eqx.filter_eval_shape(function, *self._inputs(t, y))
        if not same_structure(out, y):
            raise TypeError(
                f"{name} returned the structure {jax.tree.structure(out)}, but y has "
                f"{jax.tree.structure(y)}; they must be the same{_hint(out, y)}."
            )
        for (path, have), want in zip(
            jax.tree_util.tree_leaves_with_path(out), jax.tree.leaves(y), strict=True
        ):
            where = jax.tree_util.keystr(path)
            if have.shape != want.shape:
                raise ValueError(
                    f"{name}(t, y){where} has shape {have.shape}, but y{where} has shape {want.shape}."
                )
            if have.dtype != want.dtype:
                raise TypeError(
                    f"{name}(t, y){where} has dtype {have.dtype}, but y{where} has dtype {want.dtype}; "
                    f"return {want.dtype}, for example with .astype(y.dtype)."
                )

    def closed(self, function: Callable, t: Array, y: Field) -> Callable:
        """The same function of (t, y[, args]), with the tracers that it closes over as arrays in the open.

        Loops have derivative rules of their own, which see inputs but not closures. They find what is hidden
        by themselves (``xla.autodiff``), but for functions with a known signature it is found quicker here.
        """
        # A function is a leaf; a module has its arrays in the open already.
        if jax.tree.leaves(function) != [function]:
            return function
        converted = eqx.filter_closure_convert(function, *self._inputs(t, y))
        return converted if is_traced(converted) else function

    def operations(self, t: Array, y: Field) -> int:
        """How many numbers an evaluation computes on the way."""
        return operations(jax.make_jaxpr(self.__call__)(t, y).jaxpr)

    def _inputs(self, t: Array, y: Field) -> tuple:
        return (t, y) if self.args is None else (t, y, self.args)


def _hint(out: Any, y: Field) -> str:
    if isinstance(y, list | tuple):
        return " (a list or tuple is a pytree of separate unknowns; for a vector, pass an array)"
    if isinstance(out, list | tuple):
        return ": return one array, for example with jnp.stack([...])"
    return ""
