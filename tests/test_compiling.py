"""Programs: one kernel for a small loop, and another way where that is impossible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from millipode import compiling
from millipode.compiling import ONE_KERNEL, QUICKLY, Program, as_one_kernel, calls_libraries
from millipode.driver import at_once, split
from millipode.solve import prepare

Y0 = jnp.arange(1.0, 6.0)
A = jnp.diag(-jnp.ones(5)) + 0.1


def compiled_loop(f):
    setup, y0, _ = prepare(f, Y0, (0.0, 1.0), save="end")
    arrays, static = split(setup)
    return at_once.lower(static, arrays, y0).compile().as_text()


def test_a_small_loop_is_one_kernel():
    text = compiled_loop(lambda t, y: -y)
    assert "call(" in text and 'xla_cpu_small_call="true"' in text
    # The loop is inside it: what runs thunk by thunk has no loop left but those of the initialisation.
    entry = text[text.index("ENTRY") :]
    assert " while(" not in entry


@pytest.mark.parametrize(
    "f",
    [
        lambda t, y: A @ y,
        lambda t, y: jnp.linalg.solve(A, y),
        lambda t, y: -jnp.sort(y),
        lambda t, y: -jnp.fft.irfft(jnp.fft.rfft(y), 5),
        lambda t, y: jax.pure_callback(
            np.negative, jax.ShapeDtypeStruct((5,), y.dtype), y, vmap_method="sequential"
        ),
    ],
    ids=["matmul", "solve", "sort", "fft", "callback"],
)
def test_library_calls_are_recognised(f):
    assert calls_libraries(
        jax.make_jaxpr(lambda y: jax.lax.fori_loop(0, 2, lambda i, y: f(0.0, y), y))(Y0).jaxpr
    )


def test_solves_whose_f_calls_libraries():
    through_matmul = mp.solve(lambda t, y: A @ y, Y0, (0.0, 1.0), save="end")
    unrolled = mp.solve(lambda t, y: jnp.sum(A * y, axis=1), Y0, (0.0, 1.0), save="end")
    np.testing.assert_allclose(through_matmul.mean, unrolled.mean, rtol=1e-9)
    assert "xla_cpu_small_call" not in compiled_loop(lambda t, y: A @ y)


def test_what_cannot_be_one_kernel_is_compiled_without(monkeypatch):
    """As if a primitive had escaped our list: the compiler refuses, and the program runs all the same."""
    monkeypatch.setattr(compiling, "LIBRARY_CALLS", set())

    def turns(y):
        return as_one_kernel(lambda y: jax.lax.fori_loop(0, 3, lambda i, y: -jnp.sort(y), y), y)

    program = Program(turns, lambda y: ONE_KERNEL)
    expected = turns(Y0)
    np.testing.assert_array_equal(program(Y0), expected)
    assert len(program._refused) == 1
    np.testing.assert_array_equal(program(Y0), expected)
    assert len(program._refused) == 1 and list(program._ways) == [ONE_KERNEL, QUICKLY]


def test_errors_of_a_running_program_are_not_hidden():
    def fail(y):
        raise ValueError("no")

    def call(y):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    with pytest.raises(jax.errors.JaxRuntimeError, match="no"):
        Program(call, lambda y: ONE_KERNEL)(Y0)


def test_inside_other_transformations_nothing_is_special():
    def final(y0):
        return mp.solve(lambda t, y: -y, y0, (0.0, 1.0), save="end").mean[-1]

    text = jax.jit(final).lower(Y0).compile().as_text()
    assert "xla_cpu_small_call" not in text
    alone = final(Y0)
    np.testing.assert_allclose(jax.vmap(final)(jnp.stack([Y0, Y0]))[1], alone, rtol=1e-10)
