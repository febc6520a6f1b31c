"""Ensemble members of the filter's error: what users ask for, and what is carried from step to step.

``members`` has the mathematics.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.linalg.arguments import as_integer
from millipode.linalg.fields import Field, dtype, size
from millipode.linalg.randomness import as_key
from millipode.xla.module import Module

# From this many unknowns on, members are single precision: they are noisy by themselves, and more digits
# would cost time and memory. Those of small problems have the precision of y, and as many powers of ten.
LARGE = 2**14
# Up to this many unknowns, copies of members cost less than what prevents them.
SMALL = 2**10
# This many numbers are moved at once: members of small problems together, those of large ones one by one.
TOGETHER = 2**19
# There are at most this many chunks, because each is a program of its own to compile.
CHUNKS = 32


def kind_of(y: Field) -> Any:
    """The dtype of members of a problem like y."""
    return np.dtype(np.float32) if size(y) >= LARGE else dtype(y)


class Transported(Module):
    """Uncertainty that knows how the ODE amplifies errors, for ``mp.solve(..., uncertainty=...)``.

    An ensemble of errors of the filter is carried along beside the mean, with the true Jacobian (one JVP of f
    per ensemble member and step). ``sol.std`` is the spread of the members, ``sol.members`` has the members
    themselves, and ``sol.filter_std`` is the filter's own standard deviation. The mean and the steps do not
    change.

    Args:
        members: how many, at least 2. The relative error of their spread is about 1/√(2·members).
        key: for the random numbers; ``jax.random.key(0)`` by default. The same key gives the same members.
        noise: ``"defect"`` (the steps' own defects, which persist as far as residuals do), or ``"white"``
            (the prior's noise, independent in every step: with it, and a dense EK1, members have the
            filter's own covariance).
        chunk: how many members are moved at once; automatic by default, and one if they are large.
        sharding: of an array with the members' axis in front, to spread members over devices.

    >>> import jax.numpy as jnp, millipode as mp
    >>> sol = mp.solve(lambda t, y: -y, jnp.ones(2), (0.0, 1.0), uncertainty=mp.Transported(members=8))
    >>> sol.members.shape == (8, *sol.mean.shape), sol.std.shape == sol.mean.shape
    (True, True)
    """

    is_ensemble: ClassVar[bool] = True

    members: int = eqx.field(static=True)
    key: Any
    noise: Literal["defect", "white"] = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    sharding: Any = eqx.field(static=True)

    def __init__(
        self,
        members: int = 16,
        key: Array | None = None,
        noise: Literal["defect", "white"] = "defect",
        chunk: int | None = None,
        sharding: Any = None,
    ):
        self.members = as_integer(members, "Transported: members", 2)
        # As plain numbers, which can be traced, hashed and saved like all others.
        key = as_key(jax.random.key(0) if key is None else key, "Transported: key")
        self.key = jax.random.key_data(key)
        if noise not in ("defect", "white"):
            raise ValueError(f"Transported: noise must be 'defect' or 'white', got {noise!r}.")
        self.noise = noise
        self.chunk = None if chunk is None else as_integer(chunk, "Transported: chunk", 1)
        if self.chunk is not None and self.members % self.chunk:
            raise ValueError(f"Transported: chunk must divide members = {members}, got {chunk}.")
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise TypeError(f"Transported: sharding must be a jax.sharding.Sharding, got {sharding!r}.")
        self.sharding = sharding

    def at_once(self, y: Field) -> int:
        """How many members to move at once: all of them, if they are spread over devices."""
        if self.chunk is not None:
            return self.chunk
        if self.sharding is not None:
            return self.members
        divisors = [k for k in range(1, self.members + 1) if self.members % k == 0]
        least = next(k for k in divisors if self.members <= k * CHUNKS)
        return max((k for k in divisors if k * size(y) <= TOGETHER), default=least)


class TransportedError(Module):
    """One estimate of the filter's error, without random numbers, which says how large ``sol.std`` is.

    It is an ensemble member that starts at zero and is driven by the steps' defects as they are. Like any
    member it is moved by the true Jacobian, for as many JVPs of f per step as there are corrections.
    """

    members: ClassVar[int] = 1
    noise: ClassVar[str] = "defect"
    sharding: ClassVar[None] = None
    is_ensemble: ClassVar[bool] = False

    def at_once(self, y: Field) -> int:
        """The only one."""
        return 1


# The size of an error before the first step has ended.
UNKNOWN = -1.0


class Errors(NamedTuple):
    """What is kept of errors of y at a saved time: one of the two.

    Attributes:
        members: the ensemble, with the members' axis in front.
        size: the root mean square of a single estimate, one number; or ``UNKNOWN``.
    """

    members: Field | None
    size: Array | None


class Defect(NamedTuple):
    """What the prediction of a step has missed, as it is carried from one step to the next.

    Attributes:
        latest: c v₁ of the last step alone, in the units of a residual.
        mean: that of the last two steps, weighted by their lengths. A single error needs neither of the two
            from the step before.
        square: the sum of its squares.
        unit: v₁ of the last step; 0 before the first one.
        h: the last step; 0 before the first one.
        usual: the geometric mean of recent steps; 0 before the first one.
        persistent: the part of the multipliers m that persists.
        residual: the size of recent residuals.
    """

    latest: Field | None
    mean: Field | None
    square: Array
    unit: Array
    h: Array
    usual: Array
    persistent: Float[Array, " s"]
    residual: Array


class Members(NamedTuple):
    """The ensemble, as it is carried from step to step.

    Attributes:
        chunks: e, some members at a time: one field per field of the prior's state, members in front. Field q
            is in units of time^−q, so that it has a size that single precision can hold.
        time: the unit of time, the last step.
        defect: of the last step, unless the noise is white.
        contradiction: how many times as large as the filter's residuals allow those of the members were in
            the last step; at least 1.
    """

    chunks: tuple[tuple[Field, ...], ...]
    time: Array
    defect: Defect | None
    contradiction: Array

    @property
    def of_y(self) -> Field:
        """The errors of y of all members, with their axis in front."""
        return jax.tree.map(lambda *x: jnp.concatenate(x), *(chunk[0] for chunk in self.chunks))


class Drive(NamedTuple):
    """What moves the members in one step.

    Attributes:
        key: for random numbers, if there are any.
        defect: what the step has missed; None if the noise is white.
        multiplier: m, one number per member; None if the noise is white.
    """

    key: Array | None
    defect: Defect | None = None
    multiplier: Float[Array, " s"] | None = None

    def number(self, s: Array) -> Array:
        """The random key of member s."""
        assert self.key is not None
        return jax.random.fold_in(self.key, s)
