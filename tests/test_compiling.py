"""Programs: one kernel for a small loop, and another way where that is impossible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import compiled_loop
from millipode.xla import compiling
from millipode.xla.compiling import ONE_KERNEL, QUICKLY, Program, as_one_kernel, calls_libraries

Y0 = jnp.arange(1.0, 6.0)
A = jnp.diag(-jnp.ones(5)) + 0.1
LARGE = jnp.zeros((300, 300)).at[:5, :5].set(A)


def code_of_loop(f):
    return compiled_loop(f, Y0, (0.0, 1.0), save="end")[0].as_text()


def test_a_small_loop_is_one_kernel():
    text = code_of_loop(lambda t, y: -y)
    assert "call(" in text and 'xla_cpu_small_call="true"' in text
    # The loop is inside it: what runs thunk by thunk has no loop left but those of the initialisation.
    entry = text[text.index("ENTRY") :]
    assert " while(" not in entry


@pytest.mark.parametrize(
    "f",
    [
        lambda t, y: (LARGE @ LARGE)[:5, :5] @ y,
        lambda t, y: jnp.linalg.solve(A, y),
        lambda t, y: y * jnp.sum(jnp.sin(y[0] * jnp.arange(1e6))),
        lambda t, y: -jnp.sort(y),
        lambda t, y: -jnp.fft.irfft(jnp.fft.rfft(y), 5),
        lambda t, y: jax.pure_callback(
            np.negative, jax.ShapeDtypeStruct((5,), y.dtype), y, vmap_method="sequential"
        ),
    ],
    ids=["matmul", "solve", "large", "sort", "fft", "callback"],
)
def test_library_calls_are_recognised(f):
    assert calls_libraries(
        jax.make_jaxpr(lambda y: jax.lax.fori_loop(0, 2, lambda i, y: f(0.0, y), y))(Y0).jaxpr
    )


@pytest.mark.parametrize(
    ("f", "kernel"),
    [(lambda t, y: A @ y, True), (lambda t, y: (LARGE @ LARGE @ jnp.zeros(300))[:5] + A @ y, False)],
)
@pytest.mark.wide(quick=1)
def test_products_of_matrices(f, kernel):
    product = mp.solve(f, Y0, (0.0, 1.0), save="end")
    unrolled = mp.solve(lambda t, y: jnp.sum(A * y, axis=1), Y0, (0.0, 1.0), save="end")
    np.testing.assert_allclose(product.mean, unrolled.mean, rtol=1e-9)
    assert ("xla_cpu_small_call" in code_of_loop(f)) == kernel


@pytest.mark.parametrize("save", ["end", "steps", jnp.array([0.5, 1.0])], ids=["end", "steps", "times"])
@pytest.mark.wide(quick=1)
def test_arguments_of_no_consequence(save):
    """XLA aborts the process if it finds one, so they are given a consequence."""

    def f(t, y, args):
        return (
            jnp.where(True, -y, args["unused"])
            + 0 * args["integer"]
            + jnp.where(False, args["complex"].imag, 0)
        )

    args = {"unused": jnp.full(5, jnp.nan), "integer": jnp.arange(5), "complex": 1j * jnp.ones(5)}
    sol = mp.solve(f, Y0, (0.0, 1.0), args=args, save=save, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(sol.mean[-1], Y0 * np.exp(-1), rtol=1e-5)


TABLE, PLACES = np.linspace(0.5, 1.5, 1500), np.arange(4000) % 5


@pytest.mark.parametrize("inside", [False, True], ids=["open", "jitted"])
@pytest.mark.parametrize(
    "f",
    [
        lambda t, y: -y * jnp.mean(jnp.sin(t) * 0 + TABLE),
        lambda t, y: -jnp.zeros_like(y).at[PLACES].add(y[PLACES] / 800),
        lambda t, y: -y * jnp.mean(jnp.concatenate([TABLE[:750], TABLE[750:]]) + 0 * y[0]),
    ],
    ids=["table", "indices", "parts"],
)
def test_constants_of_any_size(f, inside):
    """XLA aborts the process if a kernel has a large one, so large ones become arguments."""
    sol = mp.solve(jax.jit(f) if inside else f, Y0, (0.0, 1.0), save="end", rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(sol.mean[-1], Y0 * np.exp(-1), rtol=1e-5)


def test_large_constants_leave_one_kernel():
    assert "xla_cpu_small_call" in code_of_loop(lambda t, y: -y * jnp.mean(jnp.sin(t) * 0 + TABLE))


def test_arguments_without_numbers():
    def f(t, y, args):
        return -y + jnp.sum(args["empty"]) + 0 * jax.random.normal(args["key"], y.shape)

    args = {"empty": jnp.zeros(0), "key": jax.random.key(1)}
    sol = mp.solve(f, Y0, (0.0, 1.0), args=args, save="end", rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(sol.mean[-1], Y0 * np.exp(-1), rtol=1e-5)


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
        return mp.solve(lambda t, y: -y, y0, (0.0, 1.0), solver=mp.EK0(), save="end").mean[-1]

    text = jax.jit(final).lower(Y0).compile().as_text()
    assert "xla_cpu_small_call" not in text
    alone = final(Y0)
    np.testing.assert_allclose(jax.vmap(final)(jnp.stack([Y0, Y0]))[1], alone, rtol=1e-10)
