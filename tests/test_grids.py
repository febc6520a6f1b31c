"""Stencils on regular grids, against dense matrices and waves."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from test_basis import matrix

BOUNDARIES = ["neumann", "dirichlet", "periodic"]


def ghost_matrix(n, boundary, ghost):
    """Rows that pick each cell's left and right neighbours, for a ghost of ±1 times the edge cell."""
    left, right = np.eye(n, k=-1), np.eye(n, k=1)
    if boundary == "periodic":
        left[0, -1] += 1
        right[-1, 0] += 1
    else:
        left[0, 0] += ghost
        right[-1, -1] += ghost
    return left, right


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_stencils_are_their_matrices(boundary):
    n, dx = 5, 2.0 / 5
    grid = mp.Grid(n, 2.0, boundary)
    ghost = 1 if boundary == "neumann" else -1
    left, right = ghost_matrix(n, boundary, ghost)
    one = np.eye(n)
    for got, want in (
        (grid.laplacian, (left + right - 2 * one) / dx**2),
        (lambda u: grid.gradient(u)[0], (right - left) / (2 * dx)),
        (lambda u: grid.difference(u, 0, "left"), (one - left) / dx),
        (lambda u: grid.difference(u, 0, "right"), (right - one) / dx),
        (lambda u: grid.divergence([u]), -((right - left) / (2 * dx)).T),
    ):
        np.testing.assert_allclose(matrix(got, (n,)), want, atol=1e-13)


@pytest.mark.parametrize("mean", ["arithmetic", "harmonic"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_diffusion_with_a_coefficient_is_a_sum_of_fluxes(boundary, mean):
    """Against loops over faces, in two dimensions, with two components and a coefficient for each."""
    shape, lengths = (4, 3), (2.0, 1.0)
    grid, rng = mp.Grid(shape, lengths, boundary), np.random.default_rng(1)
    k, u = rng.uniform(0.1, 3.0, (2, *shape)), rng.normal(size=(2, *shape))
    want = np.zeros_like(u)
    for place in np.ndindex(*u.shape):
        for axis in (1, 2):
            for side in (-1, 1):
                other, dx = list(place), lengths[axis - 1] / shape[axis - 1]
                other[axis] += side
                outside = not 0 <= other[axis] < u.shape[axis]
                if outside and boundary == "periodic":
                    other[axis] %= u.shape[axis]
                    outside = False
                there = k[place] if outside else k[tuple(other)]
                between = (k[place] + there) / 2 if mean == "arithmetic" else 2 / (1 / k[place] + 1 / there)
                ghost = u[place] if boundary == "neumann" else -u[place]
                beyond = ghost if outside else u[tuple(other)]
                want[place] += between * (beyond - u[place]) / dx**2
    np.testing.assert_allclose(grid.diffuse(k, jnp.asarray(u), mean), want, rtol=1e-12, atol=1e-12)
    same = grid.diffuse((0.7, 0.7), jnp.asarray(u), mean)
    np.testing.assert_allclose(same, 0.7 * grid.laplacian(jnp.asarray(u)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_diffusion_with_a_coefficient_is_second_order(boundary):
    def error(n):
        grid = mp.Grid(n, 1.0, boundary)
        (x,) = grid.coordinates
        wave = np.pi if boundary != "periodic" else 2 * np.pi
        f, g = (jnp.sin, jnp.cos) if boundary == "dirichlet" else (jnp.cos, lambda x: -jnp.sin(x))
        k, slope = 2 + jnp.cos(2 * np.pi * x), -2 * np.pi * jnp.sin(2 * np.pi * x)
        want = slope * wave * g(wave * x) - k * wave**2 * f(wave * x)
        return float(jnp.sqrt(jnp.mean((grid.diffuse(k, f(wave * x)) - want) ** 2)))

    assert 3.6 < error(64) / error(128) < 4.4


def test_coefficients_that_do_not_fit_are_refused():
    grid = mp.Grid((4, 3))
    for k, mean, message in (
        (jnp.ones((3, 4)), "arithmetic", "must broadcast"),
        ((1.0, 2.0, 3.0), "arithmetic", "one coefficient per axis"),
        (1.0, "geometric", "'arithmetic' or 'harmonic'"),
    ):
        with pytest.raises(ValueError, match=message):
            grid.diffuse(k, jnp.ones((4, 3)), mean)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_laplacian_and_gradient_of_waves_are_second_order(boundary):
    def errors(n):
        grid = mp.Grid((n, n), (1.0, 2.0), boundary)
        x, y = grid.coordinates
        wave = np.pi if boundary != "periodic" else 2 * np.pi
        f, g = (jnp.sin, jnp.cos) if boundary == "dirichlet" else (jnp.cos, lambda x: -jnp.sin(x))
        u, factor = f(wave * x) * f(wave * y), -2 * wave**2
        slope = grid.gradient(u)[1] - wave * f(wave * x) * g(wave * y)
        return [float(jnp.sqrt(jnp.mean(e**2))) for e in (grid.laplacian(u) - factor * u, slope)]

    # Away from walls all is second order; at a wall the stencil of a gradient is as good as its ghost.
    for coarse, fine in zip(errors(32), errors(64), strict=True):
        assert 3.6 < coarse / fine < 4.4


def test_divergence_of_a_flux_keeps_mass(rng):
    grid = mp.Grid((6, 7), boundary=("neumann", "periodic"))
    flux = [jnp.asarray(rng.normal(size=(2, 6, 7))) for _ in range(2)]
    np.testing.assert_allclose(jnp.sum(grid.divergence(flux), axis=(-2, -1)), 0, atol=1e-12)


def test_upwind_looks_against_the_wind(rng):
    grid = mp.Grid(6, boundary="periodic")
    u, v = jnp.asarray(rng.normal(size=6)), jnp.array([1.0, -2.0, 0.5, -0.1, 0.0, 3.0])
    left, right = grid.difference(u, 0, "left"), grid.difference(u, 0, "right")
    np.testing.assert_allclose(grid.advection([v], u), jnp.where(v > 0, v * left, v * right), atol=1e-13)
    np.testing.assert_allclose(grid.advection([0.5], u, "central"), 0.5 * grid.difference(u, 0), atol=1e-13)


def test_stencils_make_one_pass_and_no_copy():
    grid = mp.Grid((512, 512))
    u = jnp.zeros((2, 512, 512))
    for stencil in (lambda u: 0.1 * grid.laplacian(u) + u, lambda u: grid.diffuse(u**2 + 1, u) + u):
        compiled = jax.jit(stencil).lower(u).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * u.nbytes
        assert compiled.cost_analysis()["bytes accessed"] < 2.5 * u.nbytes


def test_stencils_under_single_precision_and_components():
    grid = mp.Grid((4, 3), boundary="dirichlet")
    u = jnp.ones((5, 4, 3), jnp.float32)
    assert grid.laplacian(u).dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in (*grid.gradient(u), grid.advection([1.0, -1.0], u)))
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(4, 3\)"):
        grid.laplacian(jnp.ones((3, 4)))


def test_coordinates_are_cell_centres():
    x, y = mp.Grid((2, 3), (1.0, 3.0)).coordinates
    np.testing.assert_allclose(x, [[0.25] * 3, [0.75] * 3])
    np.testing.assert_allclose(y, [[0.5, 1.5, 2.5]] * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mp.Grid((3.5,)), "regular; for others"),
        (lambda: mp.Grid(()), "regular; for others"),
        (lambda: mp.Grid((3,), (1.0, 1.0)), "one positive length per axis"),
        (lambda: mp.Grid(3, -1.0), "one positive length per axis"),
        (lambda: mp.Grid(3, boundary="robin"), "DiagonalEK1"),
        (lambda: mp.Grid((3, 3), boundary=("neumann",)), "one per axis"),
        (lambda: mp.Grid((3, 3)).divergence([jnp.ones((3, 3))]), "takes 2 fields"),
        (lambda: mp.Grid(3).advection([1.0, 2.0], jnp.ones(3)), "one velocity per axis"),
        (lambda: mp.Grid(3).advection([1.0], jnp.ones(3), "weno"), "scheme"),
        (lambda: mp.Grid(3).difference(jnp.ones(3), 0, "up"), "side"),
    ],
)
def test_bad_grids_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, millipode as mp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()), ("x",))
u = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 12)), jnp.float32)
for boundary in ("neumann", "dirichlet", "periodic"):
    grid = mp.Grid((16, 12), boundary=boundary)
    every = lambda u: grid.laplacian(u) + grid.divergence(grid.gradient(u)) + grid.advection((u, -u), u)
    function = jax.jit(every)
    sharded = jax.device_put(u, NamedSharding(mesh, PartitionSpec(None, "x")))
    np.testing.assert_allclose(function(sharded), function(u), rtol=1e-5, atol=1e-3)
    one = jax.jit(grid.laplacian).lower(sharded).compile().as_text()
    print(one.count(" collective-permute("), one.count("all-gather("))
"""


def test_stencils_on_two_devices_exchange_two_edges_and_gather_nothing():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    run = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=True
    )
    for line in run.stdout.split("\n")[:3]:
        permutes, gathers = map(int, line.split())
        assert permutes <= 2 and gathers == 0, run.stdout
