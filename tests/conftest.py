import os

# Nearly all the time of these tests goes into compiling programs that then run for milliseconds, so compile
# them quickly: what they compute, and the memory that they take, is the same. Must come before JAX starts.
FULL_SPEED = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{FULL_SPEED} --xla_backend_optimization_level=0"

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.fixture
def single_precision():
    """Run one test in JAX's default precision."""
    with jax.enable_x64(False):
        yield
