"""Functions inside of pytrees, as part of their structure."""

from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Constant:
    """A function inside of a pytree that is not one of its leaves, so that programs can take the pytree.

    Attributes:
        function: called with whatever the constant is called with; compared and hashed by its own rules.
    """

    def __init__(self, function: Any):
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        """No leaves; the function belongs to the structure."""
        return (), self.function

    @classmethod
    def tree_unflatten(cls, function: Any, leaves: tuple[()]) -> "Constant":
        """Put the function back."""
        return cls(function)


def with_constants(tree: Any) -> Any:
    """The same pytree, with every function in it as a constant."""
    if not any(map(callable, jax.tree.leaves(tree))):
        return tree  # nearly always, and fast
    return jax.tree.map(lambda leaf: Constant(leaf) if callable(leaf) else leaf, tree)
