"""The progress bar reports, and changes nothing."""

import builtins

import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp


def decay(t, y):
    return -y


@pytest.mark.parametrize("save", ["end", "steps", [0.3, 1.0]], ids=str)
def test_the_bar_shows_progress_and_changes_nothing(save, capsys):
    options = dict(solver=mp.EK0(2), rtol=1e-7, atol=1e-9, save=save)
    plain = mp.solve(decay, jnp.ones(2), (0.0, 1.0), **options)
    assert capsys.readouterr().err == ""
    shown = mp.solve(decay, jnp.ones(2), (0.0, 1.0), progress=True, **options)
    bar = capsys.readouterr().err
    last = bar.replace("\r", "\n").strip().splitlines()[-1]
    for part in (
        "100%",
        "t=1",
        "h=",
        f"{int(plain.stats.steps)} accepted",
        "0 rejected",
        "steps/s",
    ):
        assert part in last
    np.testing.assert_array_equal(plain.mean, shown.mean)
    np.testing.assert_array_equal(plain.std, shown.std)
    np.testing.assert_array_equal(plain.log_evidence, shown.log_evidence)


def test_without_tqdm_the_user_is_told_what_to_install(monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ImportError, match=r"pip install 'millipode\[cli\]'"):
        mp.solve(decay, jnp.ones(2), (0.0, 1.0), progress=True)


def test_the_bar_is_closed_when_the_solve_fails(capsys):
    with pytest.raises(mp.SolveError):
        mp.solve(lambda t, y: y**2, jnp.ones(1), (0.0, 2.0), progress=True, save="end")
    assert "accepted" in capsys.readouterr().err
