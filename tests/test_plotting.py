"""Pictures exist for every kind of solution, and show what they should."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import millipode as mp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_lines_with_bands_and_samples(tmp_path):
    problem = mp.problems.lotka_volterra()
    sol = mp.solve(problem.f, problem.y0, (0.0, 5.0), solver=mp.EK0(1))
    figure = sol.plot(samples=3, points=40)
    top, bottom = figure.axes
    assert len(top.lines) == 2 * (1 + 3) and len(top.collections) == 2 and len(bottom.lines) == 2
    t, mean = top.lines[0].get_data()
    np.testing.assert_allclose(mean, sol(t).mean[:, 0])
    assert [text.get_text() for text in top.get_legend().get_texts()] == ["y[0]", "y[1]"]
    figure.savefig(tmp_path / "lines.png")
    assert (tmp_path / "lines.png").stat().st_size > 10_000
    chosen = sol.plot(components=[1], times=[1.0, 2.0])
    np.testing.assert_allclose(chosen.axes[0].lines[0].get_ydata(), sol(jnp.array([1.0, 2.0])).mean[:, 1])
    with pytest.raises(ValueError, match="indices from 0 to 1"):
        sol.plot(components=[2])


def test_fields(tmp_path):
    line = mp.problems.lorenz96(40)
    sol = mp.solve(line.f, line.y0, (0.0, 0.5), solver=mp.EK0(1), save=np.linspace(0.1, 0.5, 5))
    figure = sol.plot()
    assert [a.get_title() for a in figure.axes[:2]] == ["y, mean", "y, log10 std"]
    np.testing.assert_allclose(figure.axes[0].collections[0].get_array(), sol.mean.T)
    with pytest.raises(ValueError, match="components"):
        sol.plot(samples=2)
    assert len(sol.plot(components=[0, 39]).axes[0].lines) == 2

    plane = mp.problems.fitzhugh_nagumo(16)
    sol = mp.solve(plane.f, plane.y0, (0.0, 0.02), solver=mp.EK0(1), save=[0.01, 0.02], smooth=False)
    figure = sol.plot()
    images = [a for a in figure.axes if a.images]
    assert len(images) == 2 * 4  # two times; mean and log10 std of two components
    np.testing.assert_allclose(images[0].images[0].get_array(), sol.mean[0, 0])
    figure.savefig(tmp_path / "field.png")


def test_trees_and_what_cannot_be_drawn():
    sol = mp.solve(
        lambda t, y: jax.tree.map(lambda x: -x, y),
        {"u": jnp.ones(2), "v": jnp.ones(())},
        (0.0, 1.0),
        save="end",
    )
    assert [t.get_text() for t in sol.plot().axes[0].get_legend().get_texts()] == ["u[0]", "u[1]", "v"]
    cube = mp.solve(lambda t, y: -y, jnp.ones((5, 5, 5)), (0.0, 1.0), save="end")
    with pytest.raises(ValueError, match="one or two axes"):
        cube.plot()
