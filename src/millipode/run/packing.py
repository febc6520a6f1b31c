"""A setup as an argument of compiled programs: its arrays are traced, everything else is hashed."""

from collections import OrderedDict
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Array

from millipode.run.loop import Setup


class Recent:
    """The latest of the setups that were added; it keeps nothing of them alive.

    Args:
        most: how many.
    """

    def __init__(self, most: int):
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._most = most

    def add(self, packed: "Packed") -> None:
        """Add a setup, and forget the oldest one if there are too many."""
        self._keys[packed.key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def __contains__(self, packed: "Packed") -> bool:
        return packed.key in self._keys


class Static:
    """All of a setup but its arrays; equal ones share compiled programs.

    Attributes:
        tree: the structure.
        constants: the leaves, with None in place of arrays.
        is_array: which leaves are arrays.
    """

    def __init__(self, tree: Any, constants: tuple, is_array: tuple[bool, ...]):
        self.tree, self.constants, self.is_array = tree, constants, is_array
        # Types as well, because 1, 1.0 and True are equal, and may steer f in different ways.
        self._key = (tree, constants, is_array, tuple(map(type, constants)))
        try:
            self._hash = hash(self._key)
        except TypeError as error:
            raise TypeError(
                "f, jacobian_diagonal and all of args but its arrays must be hashable, so that compiled code "
                f"can be found again ({error}). Use a function, a frozen dataclass or an equinox.Module."
            ) from error

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Static) and self._key == other._key)


@jax.tree_util.register_pytree_node_class
class Packed:
    """A ``Setup`` that can be passed to compiled programs.

    Attributes:
        setup: the setup, with tracers in place of its arrays inside of a program.
    """

    def __init__(self, setup: Setup):
        leaves, tree = jax.tree.flatten(setup)
        is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
        self._arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
        constants = tuple(None if a else leaf for leaf, a in zip(leaves, is_array, strict=True))
        self._static = Static(tree, constants, is_array)
        self.setup = setup

    @property
    def together(self) -> Self:
        """The same with stiff phases."""
        return type(self)(self.setup._replace(alone=False))

    @property
    def key(self) -> int:
        """A number that is the same for all that share compiled programs, but for shapes."""
        return hash(self._static)

    def tree_flatten(self) -> tuple[list[Array], Static]:
        """The arrays, and the rest."""
        return self._arrays, self._static

    @classmethod
    def tree_unflatten(cls, static: Static, arrays: list[Array]) -> Self:
        """Put both together again."""
        moving = iter(arrays)
        leaves = [
            next(moving) if a else constant
            for constant, a in zip(static.constants, static.is_array, strict=True)
        ]
        packed = object.__new__(cls)
        packed._arrays, packed._static = list(arrays), static
        packed.setup = jax.tree.unflatten(static.tree, leaves)
        return packed
