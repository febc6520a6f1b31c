"""Jacobians are one algebra: all kinds agree with their own dense matrices, on pytrees and with d > 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import millipode as mp
from millipode.covariance.observation import Observation
from millipode.linalg.jacobians import (
    CoupledJacobian,
    DenseJacobian,
    DiagonalJacobian,
    ProductJacobian,
    ZeroJacobian,
)
from millipode.pde.linear import InBasis

RNG = np.random.default_rng(4)
TREE = {"a": jnp.asarray(RNG.normal(size=3)), "b": jnp.asarray(RNG.normal(size=(2, 2)))}
MODES = jnp.asarray(RNG.normal(size=(2, 5)))
GRID = mp.Grid((4, 3), boundary=("neumann", "periodic"))
FIELD = jnp.asarray(RNG.normal(size=(2, 4, 3)))
MATRIX = jnp.asarray(RNG.normal(size=(7, 7)))


def product(x):
    flat, unravel = ravel_pytree(x)
    return unravel(jnp.sin(MATRIX) @ flat)


KINDS = {
    "zero": (ZeroJacobian(), TREE),
    "shared": (DiagonalJacobian(jnp.asarray(-0.7)), TREE),
    "diagonal": (DiagonalJacobian(jax.tree.map(jnp.sin, TREE)), TREE),
    "coupled": (CoupledJacobian(-(MODES**2), jnp.asarray(RNG.normal(size=(2, 2)))), MODES),
    "dense": (DenseJacobian(MATRIX), TREE),
    "products": (ProductJacobian(product), TREE),
    "in a basis": (GRID.diffusion(np.array([0.1, 0.02])).jacobian(FIELD), FIELD),
    "coupled in a basis": (
        GRID.diffusion(np.array([0.1, 0.02]), reaction=[[-1.0, 0.5], [2.0, -3.0]]).jacobian(FIELD),
        FIELD,
    ),
}


def flat(x):
    return np.asarray(ravel_pytree(x)[0])


@pytest.mark.parametrize(("jacobian", "like"), KINDS.values(), ids=KINDS)
def test_every_kind_is_its_matrix(jacobian, like):
    matrix = np.asarray(jacobian.to_dense(like))
    d = flat(like).size
    assert matrix.shape == (d, d)
    x = jax.tree.map(jnp.cos, like)
    np.testing.assert_allclose(flat(jacobian.multiply(x)), matrix @ flat(x), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(flat(jacobian.diagonal(like)), np.diag(matrix), rtol=1e-11, atol=1e-12)
    solved = flat(jacobian.solve(jnp.asarray(0.05), x))
    # GMRES stops at the root of the precision, all others at the precision.
    tolerance = 1e-7 if isinstance(jacobian, ProductJacobian) else 1e-11
    np.testing.assert_allclose((np.eye(d) - 0.05 * matrix) @ solved, flat(x), rtol=0, atol=tolerance)
    if not isinstance(jacobian, InBasis):  # a field in space is no diagonal matrix in modes
        c = jax.tree.map(lambda x: 0.05 * jnp.cos(3 * x), like)
        solved = flat(jacobian.solve(c, x))
        np.testing.assert_allclose((np.eye(d) - matrix * flat(c)) @ solved, flat(x), rtol=0, atol=tolerance)
    less = jacobian.minus(jnp.asarray(0.3)).to_dense(like)
    np.testing.assert_allclose(less, matrix - 0.3 * np.eye(d), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("jacobian", "like"), KINDS.values(), ids=KINDS)
def test_only_diagonal_kinds_have_entries(jacobian, like):
    if jacobian.is_diagonal:
        entries = jacobian.entries(like)
        assert len(entries) == len(jax.tree.leaves(like))
        spread = [
            jnp.broadcast_to(0.0 if e is None else e, x.shape) for e, x in zip(entries, jax.tree.leaves(like))
        ]
        np.testing.assert_array_equal(flat(spread), np.diag(jacobian.to_dense(like)))
    else:
        with pytest.raises(TypeError, match="structure='dense'"):
            jacobian.entries(like)


def test_damping_leaves_growth_out_of_a_diagonal():
    damped = DiagonalJacobian(jnp.array([-2.0, 3.0])).damping()
    np.testing.assert_array_equal(damped.values, [-2.0, 0.0])
    assert KINDS["dense"][0].damping() is KINDS["dense"][0]


def test_a_linear_part_is_the_jacobian_of_what_it_stands_for():
    linear = GRID.diffusion(np.array([0.1, 0.02]), shift=np.array([-1.0, 0.0]))

    def f(y):
        return jnp.stack([0.1 * GRID.laplacian(y[0]) - y[0], 0.02 * GRID.laplacian(y[1])])

    _, want = jax.jvp(f, (FIELD,), (jnp.sin(FIELD),))
    np.testing.assert_allclose(linear.jacobian(FIELD).multiply(jnp.sin(FIELD)), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("jacobian", "like"), KINDS.values(), ids=KINDS)
def test_observations_are_e1_minus_f_e0(jacobian, like):
    value, slope = jax.tree.map(jnp.sin, like), jax.tree.map(jnp.cos, like)
    want = flat(slope) - np.asarray(jacobian.to_dense(like)) @ flat(value)
    observation = Observation(jacobian)
    np.testing.assert_allclose(flat(observation.of(value, slope)), want, rtol=1e-11, atol=1e-12)
    if not isinstance(jacobian, InBasis):
        direction = (jax.tree.map(lambda x: 0.05 * jnp.cos(3 * x), like), jnp.asarray(0.5))
        w = Observation(jacobian.damping()).explain(slope, direction)
        ratio = jax.tree.map(lambda v, w: v / 0.5 * w, direction[0], w)
        back = flat(Observation(jacobian.damping()).of(ratio, w))
        np.testing.assert_allclose(back, flat(slope), rtol=0, atol=1e-7)
    dense = observation.matrix(like).of(jnp.concatenate([flat(value), flat(slope)])[None])[0]
    np.testing.assert_allclose(dense, want, rtol=1e-11, atol=1e-12)
