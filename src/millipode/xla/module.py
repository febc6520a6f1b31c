"""The base of all parts."""

from typing import Any

import equinox as eqx


class Module(eqx.Module):
    """An ``equinox.Module`` whose methods are ordinary bound methods.

    Those of equinox are pytrees, so that they can be passed through ``jit``. Nobody does that with methods of
    parts, and making such a pytree at every look-up took half of the time before a small solve started.
    """

    def __getattribute__(self, name: str, /) -> Any:
        return object.__getattribute__(self, name)
