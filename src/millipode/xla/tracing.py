"""What is known of a value while JAX traces a program."""

from typing import Any

import jax


def is_traced(*x: Any) -> bool:
    """Whether any value in some pytrees stands for a number that is not known yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
