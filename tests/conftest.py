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
