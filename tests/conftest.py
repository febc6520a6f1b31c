from collections import Counter

import jax
import numpy as np
import pytest

from millipode import checks

jax.config.update("jax_enable_x64", True)

# What computes for long rather than compiles for long, or asks what the compiler does.
OPTIMISED = {"test_accuracy", "test_calibration", "test_compiling", "test_scale", "test_traffic"}


# Pages that solve for long; README, CONTRIBUTING and the command's page are quick.
LONG_PAGES = {"guide", "pdes", "priors", "uncertainty"}


def pytest_collection_modifyitems(items):
    """Documents and some modules are marked, see the Makefile."""
    seen = Counter()
    for item in items:
        if item.path.suffix == ".md" or item.path.stem in OPTIMISED:
            item.add_marker("optimised")
        if item.path.suffix == ".md" and item.path.stem in LONG_PAGES:
            item.add_marker("thorough")
        # Of a wide parametrisation, the first few cases are quick, and all others thorough.
        if wide := item.get_closest_marker("wide"):
            name = item.nodeid.split("[")[0]
            if seen[name] >= wide.kwargs["quick"]:
                item.add_marker("thorough")
            seen[name] += 1


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs pile up, each with its own mappings of memory, until the process has too many."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.fixture
def single_precision():
    """Run one test in JAX's default precision."""
    with jax.enable_x64(False):
        yield


@pytest.fixture(scope="module")
def own_std():
    """For modules about the filter's own standard deviation: nobody rescales it unless asked to."""
    ask = checks.uncertainty

    def own(given, *others):
        return ask("filter" if given is None else given, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "uncertainty", own)
        yield
