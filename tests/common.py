"""Shared by the tests: a random nonlinear problem, and a look inside a finished solve."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import millipode as mp
from millipode.prepare import prepare
from millipode.run.packing import Packed
from millipode.run.programs import advance_in_place, begin
from millipode.xla.compiling import QUICKLY

# ``jax.jit`` that compiles as fast as the library's own programs.
jit = partial(jax.jit, compiler_options=dict(QUICKLY.options))

_RNG = np.random.default_rng(7)
D = 3
_A = jnp.asarray(_RNG.normal(size=(D, D)) - 1.5 * np.eye(D))
_B = jnp.asarray(_RNG.normal(size=(D, D)))
Y0 = jnp.asarray(_RNG.normal(size=D))


def nonlinear(t, y):
    """Three coupled unknowns with a full, state- and time-dependent Jacobian."""
    return _A @ y + jnp.sin(_B @ y + t) * y


def final_carry(*args, **kwargs):
    """The loop's last carry, with the covariance in it uncalibrated, and its setup."""
    setup, y0, *_ = prepare(*args, **kwargs)
    packed = Packed(setup)
    carry = begin(packed, y0)
    return setup, advance_in_place(packed, carry, np.int32(setup.max_steps))


def compiled_loop(*args, **kwargs):
    """The program that advances a solve, compiled and not run; and y0."""
    setup, y0, *_ = prepare(*args, **kwargs)
    packed = Packed(setup)
    return advance_in_place.lower(packed, jax.eval_shape(begin, packed, y0), np.int32(1)).compile(), y0


def rmse(a, b):
    return float(jnp.sqrt(jnp.mean((jnp.asarray(a) - jnp.asarray(b)) ** 2)))


CONSTANT, CONSTANT_VECTOR = mp.ConstantDiffusion(), mp.ConstantDiffusion(vector=True)
DYNAMIC, DYNAMIC_VECTOR = mp.DynamicDiffusion(), mp.DynamicDiffusion(vector=True)
SCALAR = [CONSTANT, DYNAMIC]
ALL = [CONSTANT, DYNAMIC, CONSTANT_VECTOR, DYNAMIC_VECTOR]

# Every filter × structure × diffusion that exists.
FILTERS = (
    [(mp.EK0, "kronecker", d) for d in (CONSTANT, DYNAMIC, CONSTANT_VECTOR)]
    + [(mp.EK0, s, d) for s in ("blockdiagonal", "dense") for d in ALL]
    + [(mp.DiagonalEK1, s, d) for s in ("blockdiagonal", "dense") for d in ALL]
    + [(mp.EK1, "dense", d) for d in (*SCALAR, DYNAMIC_VECTOR)]
)


def name(value):
    """Readable test ids."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, mp.ConstantDiffusion | mp.DynamicDiffusion):
        kind = type(value).__name__.removesuffix("Diffusion").lower()
        return f"{kind}-{'vector' if value.vector else 'scalar'}"
    return str(value)


def jacobian(f):
    return jit(jax.jacfwd(f, argnums=1))


def robertson(t, y):
    """Robertson's reactions, for y of shape (3, ...)."""
    slow, fast = -0.04 * y[0] + 1e4 * y[1] * y[2], 3e7 * y[1] ** 2
    return jnp.stack([slow, -slow - fast, fast])
