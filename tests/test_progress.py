"""The progress bar reports, and changes nothing."""

import builtins
import signal

import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from millipode.run.progress import Interruption


def decay(t, y):
    return -y


def oscillation(t, y):
    return jnp.stack([y[1], -y[0]])


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


@pytest.mark.parametrize(
    "options",
    [
        {"save": "steps"},
        {"save": "steps", "smooth": "recompute"},
        {"save": [0.01, 0.02, 1e3]},
        {"save": "end"},
    ],
    ids=["steps", "recompute", "times", "end"],
)
def test_an_interrupted_solve_gives_what_it_has(options):
    calls, interrupted = [], []

    def interrupt(now):
        calls.append(now)
        if now.t > 0.1 and not interrupted:
            interrupted.append(now)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(mp.SolveInterrupted, match="INTERRUPTED at t = ") as caught:
        mp.solve(
            oscillation,
            jnp.ones(2),
            (0.0, 1e3),
            progress=interrupt,
            rtol=1e-8,
            throw=False,
            max_steps=10**6,
            **options,
        )
    sol = caught.value.solution
    assert sol.status is mp.Status.INTERRUPTED and 0.1 < caught.value.t < 1e3
    assert isinstance(caught.value, KeyboardInterrupt)
    if "steps" in options["save"]:
        assert len(sol.t) == int(sol.stats.steps) + 1 and float(sol.t[-1]) == caught.value.t
    elif options["save"] != "end":
        np.testing.assert_allclose(sol.t, [0.01, 0.02])
    np.testing.assert_allclose(sol.mean[:, 0], jnp.cos(sol.t) + jnp.sin(sol.t), rtol=1e-5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    accepted = [now.accepted for now in calls]
    assert accepted == sorted(accepted) and calls[-1].rate > 0


def test_a_second_ctrl_c_does_not_wait():
    with pytest.raises(KeyboardInterrupt), Interruption():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
