"""The command: what it writes can be read again, what it refuses it explains, what is interrupted is kept."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import typer
import xarray
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

import millipode as mp
from millipode.cli import app, catalogue
from millipode.paper import EXPERIMENTS, Experiment, reproduce
from millipode.paper.high_dimensional import Course
from millipode.paper.measuring import as_json, versions

SNAPSHOT = Path(__file__).parent / "snapshots" / "help.txt"
SMALL = ["solve", "fitzhugh_nagumo", "--size", "8", "--order", "1", "--t1", "0.5", "-q"]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def read(folder, name="solution.nc"):
    with xarray.open_dataset(folder / name) as dataset:
        return dataset.load()


def flat(text):
    """Without boxes and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"[─│╭╮╰╯]", " ", text))


def test_help_says_what_it_said():
    """All that the help texts are made of; to accept new ones, delete the file and run this twice."""
    commands = typer.main.get_command(app).commands
    lines = []
    for name, command in commands.items():
        lines += ["", f"millipode {name}", command.help.strip()]
        for parameter in command.params:
            names = " ".join([*parameter.opts, *parameter.secondary_opts])
            lines.append(f"  {names} [{parameter.default}]: {parameter.help or ''}")
    text = "\n".join(lines).strip() + "\n"
    if not SNAPSHOT.exists():
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(text)
        pytest.fail("There was no snapshot; now there is.")
    assert text == SNAPSHOT.read_text()
    for name, command in commands.items():
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400", "NO_COLOR": "1"}).output
        for parameter in command.params:
            assert all(option in shown for option in parameter.opts if option.startswith("-"))
            assert flat(parameter.help or "") in flat(shown)
        assert flat(command.help).strip() in flat(shown)


def test_fields_come_back_with_their_axes(tmp_path):
    run(*SMALL, "--out", tmp_path, "--save-at", "0,0.25,0.5", "--samples", 2, "--param", "seed=3")
    data = read(tmp_path)
    assert dict(data.sizes) == {"time": 3, "component": 2, "x": 8, "y": 8, "draw": 2}
    assert data.component.values.tolist() == ["u", "v"] and data["mean"].attrs["units"] == "1"
    np.testing.assert_allclose(data.x, (np.arange(8) + 0.5) / 8)
    problem = mp.problems.fitzhugh_nagumo(8, seed=3)
    solver = mp.SpectralEK1(1, linear=problem.linear)
    sol = mp.solve(problem.f, problem.y0, (0.0, 0.5), solver=solver, save=[0.0, 0.25, 0.5])
    np.testing.assert_allclose(data["mean"], sol.mean, rtol=1e-10)
    np.testing.assert_allclose(data["std"], sol.std, rtol=1e-6, atol=1e-15)
    np.testing.assert_allclose(data.diffusion, sol.diffusion, rtol=1e-8)
    spread = np.abs(data["sample"] - data["mean"]).max()
    assert 0 < spread < 20 * data["std"].max()
    assert data.attrs["solver"] == "spectral-ek1" and data.attrs["rtol"] == 1e-3
    assert json.loads(data.attrs["parameters"])["seed"] == 3
    assert json.loads(data.attrs["versions"]) == versions()


def test_the_summary_says_how_it_went(tmp_path):
    result = run("solve", "heat", "--size", "8x4", "--out", tmp_path, "-q")
    summary = json.loads((tmp_path / "summary.json").read_text())
    kinds = {
        **{"problem": str, "parameters": dict, "unknowns": int, "t_span": list, "solver": str, "order": int},
        **{"diffusion": str, "structure": str, "rtol": float, "atol": float, "save": list, "smooth": bool},
        **{"dtype": str, "versions": dict, "success": bool, "status": str, "message": str, "reached": float},
        **{"saved_times": int, "stats": dict, "log_evidence": float, "final": dict, "seconds": float},
        **{"files": list, "members": int},
    }
    assert {key: type(value) for key, value in summary.items()} == kinds
    assert summary["unknowns"] == 32 and summary["success"] and summary["reached"] == 1.0
    assert summary["final"]["rms_error"] < 1e-2 * summary["final"]["rms_mean"]
    assert summary["files"] == ["solution.nc", "solution.png"]
    for line in (f"{summary['stats']['steps']} accepted", "solution.nc, solution.png, summary.json"):
        assert line in result.stdout


def test_pictures_show_something(tmp_path):
    run(*SMALL, "--out", tmp_path)
    with Image.open(tmp_path / "solution.png") as picture:
        assert min(picture.size) >= 400
        assert len(np.unique(np.asarray(picture).reshape(-1, 4), axis=0)) > 50


@pytest.mark.parametrize(
    ("words", "shape"),
    [(["fitzhugh_nagumo", "--size", "6"], (4, 2, 6, 6)), (["burgers", "--size", "8"], (4, 8))],
)
@pytest.mark.wide(quick=1)
def test_animations_have_a_frame_per_time(tmp_path, words, shape):
    given = ["solve", *words, "--t1", "0.01", "--save-at", "4", "--no-plot", "-q", "--animate", "gif"]
    run(*given, "--out", tmp_path)
    assert read(tmp_path)["mean"].shape == shape
    with Image.open(tmp_path / "solution.gif") as movie:
        assert movie.n_frames == 4


def test_mp4(tmp_path):
    run(*SMALL, "--save-at", 3, "--animate", "mp4", "--no-plot", "--out", tmp_path)
    assert (tmp_path / "solution.mp4").read_bytes()[4:8] == b"ftyp"


def test_every_step_of_a_few_unknowns_in_single_precision_as_zarr(tmp_path):
    run(
        *("solve", "lotka-volterra", "--solver", "ek0", "--order", 2, "--t1", 1, "--float32"),
        *("--diffusion", "constant-vector", "--no-smooth", "--format", "zarr", "--out", tmp_path, "-q"),
    )
    with xarray.open_zarr(tmp_path / "solution.zarr") as data:
        assert data["mean"].dtype == data.time.dtype == np.float32
        assert data.sizes["time"] == data.attrs["steps"] + 1
        assert data.unknown.values.tolist() == ["prey", "predators"]
        assert data.diffusion.shape == (2,)


def test_a_solver_that_fails_says_why_and_keeps_what_it_has(tmp_path):
    result = run("solve", "van_der_pol", "--max-steps", 20, "-q", "--out", tmp_path, code=1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["success"] and summary["status"] == "MAX_STEPS"
    saved = summary["stats"]["steps"] + 1
    assert 15 < saved <= 21
    assert "MAX_STEPS at t = " in result.stderr and f"{saved} saved times" in result.stderr
    assert read(tmp_path).sizes["time"] == saved


def test_a_failure_before_the_first_saved_time_leaves_a_summary(tmp_path):
    words = ["solve", "van_der_pol", "--max-steps", 5, "--save-at", "6,6.3", "-q", "--out", tmp_path]
    assert "nothing, up to t" in run(*words, code=1).stderr
    assert json.loads((tmp_path / "summary.json").read_text())["files"] == []


OWN = """
import jax.numpy as jnp
import millipode as mp

def decay(n=3, rate=1.0):
    return mp.problems.Problem(lambda t, y: {"a": -rate * y["a"], "b": y["a"]},
                               {"a": jnp.ones(n), "b": jnp.zeros(n)}, (0.0, 1.0))

problem = mp.problems.Problem(lambda t, y: -y, jnp.ones(2), (0.0, 1.0))
number = 3
def wrong():
    return 3
"""


def test_your_own_problem(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    run("solve", "--from", tmp_path / "mine.py:problem", "--out", tmp_path / "a", "-q")
    np.testing.assert_allclose(read(tmp_path / "a")["mean"][-1], np.exp(-1.0), rtol=1e-2)
    monkeypatch.chdir(tmp_path)
    words = ["solve", "--from", "mine:decay", "--size", 2, "--param", "rate=2", "--save-at", "end", "-q"]
    run(*words, "--out", tmp_path / "b", "--rtol", "1e-6")
    data = read(tmp_path / "b")
    np.testing.assert_allclose(data.mean_a[-1], np.full(2, np.exp(-2.0)), rtol=1e-4)
    assert {"mean_a", "std_a", "mean_b", "std_b"} < set(data.data_vars)


def test_what_is_no_number_is_null():
    assert json.loads(as_json({"a": [float("inf"), 1.0], "b": (float("nan"), "x")})) == {
        "a": [None, 1.0],
        "b": [None, "x"],
    }


BAD = {
    "no problem at all": (["solve"], "--from file.py:name"),
    "two problems": (["solve", "heat", "--from", "x.py:y"], "--from file.py:name"),
    "unknown problem": (["solve", "nonsense"], "There is no problem 'nonsense'"),
    "unknown solver": (["solve", "heat", "--solver", "euler"], "euler"),
    "unknown option": (["solve", "heat", "--colour", "red"], "--colour"),
    "no size": (["solve", "pleiades", "--size", "3"], "size of its own"),
    "bad size": (["solve", "heat", "--size", "big"], "64x32"),
    "two sizes": (["solve", "burgers", "--size", "8x8"], "one number"),
    "negative size": (["solve", "heat", "--size", "-3"], "--size takes a positive number"),
    "bad parameter": (["solve", "heat", "--param", "colour=red"], "heat has a, boundary, shape"),
    "bad value": (["solve", "van_der_pol", "--param", "mu=-1"], "mu must be positive"),
    "bad order": (["solve", "heat", "--order", "12"], "--order"),
    "bad times": (["solve", "heat", "--save-at", "soon"], "--save-at takes"),
    "no times": (["solve", "heat", "--save-at", "0"], "--save-at takes"),
    "times outside": (["solve", "heat", "--size", "4", "--save-at", "0.5,7"], "save"),
    "bad tolerance": (["solve", "heat", "--size", "4", "--rtol", "-1"], "rtol"),
    "no linear part": (["solve", "lorenz96", "--solver", "spectral-ek1"], "needs the linear part"),
    "no diagonal": (["solve", "burgers", "--size", "1024", "--solver", "diagonal-ek1"], "jacobian_diagonal"),
    "samples of the end": (["solve", "logistic", "--save-at", "end", "--samples", "3"], "--samples needs"),
    "samples of a filter": (["solve", "logistic", "--no-smooth", "--samples", "3"], "--samples needs"),
    "no field": (["solve", "logistic", "--animate", "gif"], "Only fields"),
    "no such file": (["solve", "--from", "nowhere.py:x"], "there is no file nowhere.py"),
    "no such module": (["solve", "--from", "nowhere:x"], "cannot be imported"),
    "a broken file": (["solve", "--from", "broken.py:x"], "ZeroDivisionError"),
    "no name": (["solve", "--from", "nowhere.py"], "file.py:name"),
    "not there": (["solve", "--from", "mine.py:nothing"], "there is no 'nothing'"),
    "no problem": (["solve", "--from", "mine.py:number"], "must be an mp.problems.Problem"),
    "makes none": (["solve", "--from", "mine.py:wrong"], "must return an mp.problems.Problem"),
    "sized already": (["solve", "--from", "mine.py:problem", "--size", "3"], "--size and --param"),
    "no folder": (["solve", "logistic", "--out", "mine.py"], "cannot be made"),
    "unknown figure": (["reproduce", "fig7"], "fig7"),
    "unknown command": (["sovle"], "sovle"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_usage_is_refused_with_a_reason(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    Path("broken.py").write_text("x = 1 / 0")
    words, reason = BAD[case]
    result = run(*words, code=2)
    assert flat(reason) in flat(result.stderr)


def test_what_there_is(monkeypatch):
    found = run("problems").stdout
    for name, entry in catalogue.problems().items():
        assert entry.equation, f"{name} shows no equation"
        assert all(line in found for line in (name, entry.title, *entry.equation))
    assert "∂v/∂t = (bΔv + u − v)/τ" in found and "y₁' = y₂" in found
    found = run("solvers").stdout
    assert all(name in found for name in ("ek0", "diagonal-ek1", "spectral-ek1", "ek1", "F_y = diag(∇f)"))


def test_all_problems_have_a_usual_size_that_works():
    for entry in catalogue.problems().values():
        problem, _ = catalogue.make(entry, None, [])
        name, solver = catalogue.solver(None, problem, None, None)
        solver.linearisation(problem.y0)
        assert name == "spectral-ek1" or problem.linear is None
        value = problem.f(0.0, problem.y0)
        assert value.shape == problem.y0.shape and jnp.isfinite(value).all()


def test_the_version():
    assert run("--version").stdout == f"millipode {mp.__version__}\n"


def test_the_doctor_tells_what_a_report_needs():
    found = json.loads(run("doctor", "--json").stdout)
    assert found["self-test"] == "ok" and found["versions"]["millipode"] == mp.__version__
    assert found["bandwidth, triad [GB/s]"] > 0.1 and found["devices"] and found["cores"] >= 1
    assert {"jax_enable_x64", "threads", "memory [GB]", "backend"} <= found.keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_solve_keeps_what_it_had_saved(number, tmp_path):
    """A solve that would take days, stopped once its bar has shown a few saved times."""
    times = ",".join(f"{t:g}" for t in [0.01, 0.02, 1e6])
    command = [sys.executable, "-m", "millipode", "solve", "lorenz96", "--solver", "ek0", "--t1", "1e6"]
    command += ["--max-steps", str(10**9), "--save-at", times, "--out", str(tmp_path)]
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, stderr=file, env=os.environ) as process:
        deadline = time.monotonic() + 120
        while not any(float(t) > 0.1 for t in re.findall(r"t=([\d.e+-]+),", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(timeout=60)
    rest = log.read_text()
    assert process.returncode == 1, rest
    assert "INTERRUPTED at t = " in rest and "2 saved times" in rest
    data = read(tmp_path)
    np.testing.assert_allclose(data.time, [0.01, 0.02])
    assert np.isfinite(data["mean"]).all() and data.attrs["status"] == "INTERRUPTED"


METHODS = ("EK0(3), Kronecker", "EK0(3), traditional", "RK45 (SciPy)", "Radau (SciPy)")
FIELDS = ("EK0(1)", "DiagonalEK1(1)", "SpectralEK1(2)", "DOP853 (SciPy)")
TINY = {
    "showcase": [
        {"solver": name, "domain": "widened", "n": 8} for name in ("SpectralEK1(2)", "DiagonalEK1(1)")
    ],
    "step-cost": [
        {"ν": 2, "solver": name, "d": d, "patience": 0.01, "repeats": 1}
        for name, sizes in (
            ("EK0, Kronecker", (8, 1024)),
            ("EK1, diagonal", (1024,)),
            ("EK1, traditional", (4, 64)),
        )
        for d in sizes
    ],
    "pleiades": [{"method": name, "tolerance": 1e-4} for name in METHODS],
    "high-dimensional": [
        {"domain": domain, "solver": name, "n": 8, "budget": 0.5}
        for domain in ("widened", "refined")
        for name in FIELDS
    ],
    "stability": [
        {"solver": name, "μ": mu, "limit": 10**5}
        for name in ("EK0", "DiagonalEK1", "EK1")
        for mu in (1.0, 100.0)
    ],
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.wide(quick=1)
def test_figures_are_measured_drawn_and_told(name, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, name, EXPERIMENTS[name]._replace(points=lambda quick: TINY[name]))
    result = run("reproduce", name, "--quick", "--out", tmp_path)
    assert "The paper (Fig." in result.stdout and str(tmp_path) in result.stdout
    assert result.stdout.count("measured") >= 1
    data = json.loads((tmp_path / f"{name}-quick.json").read_text())
    assert len(data["rows"]) == len(TINY[name]) and data["about"]["versions"]["jax"]
    for claim in data["claims"]:
        assert claim.keys() == {"what", "promised", "measured", "holds"} and claim["what"] in result.stdout
    with Image.open(tmp_path / f"{name}-quick.png") as picture:
        assert min(picture.size) >= 300
    assert "|---|" in (tmp_path / f"{name}-quick.md").read_text()


def test_infeasible_points_are_not_tried_and_long_ones_extrapolated():
    slow = {"ν": 2, "solver": "EK1, traditional", "d": 64, "time per step [ms]": 100.0}
    point = {"ν": 2, "solver": "EK1, traditional", "d": 512, "patience": 0.5, "repeats": 1}
    assert EXPERIMENTS["step-cost"].measure(point, [slow], Path())["time per step [ms]"] is None
    half = Course([0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 4.0, 6.0], 10, finished=False)
    # From 3 to 6 seconds it went from 1 to 3: the 17 that are left take 25.5 more.
    assert half.total == 6 + 25.5
    assert Course([0.0, 20.0], [0.0, 3.0], 10, finished=True).total == 3.0


def test_an_experiment_goes_on_where_it_was(tmp_path):
    measured = []

    def measure(point, rows, folder):
        if point["x"] == 3 and len(measured) < 3:
            raise KeyboardInterrupt
        measured.append(point["x"])
        return {"x": point["x"], "square": point["x"] ** 2, "before": len(rows)}

    def draw(rows, folder):
        return Figure()

    points = [{"x": x} for x in (1, 2, 3)]
    experiment = Experiment("test", "?", "!", lambda quick: points, measure, lambda rows: [], draw)
    with pytest.raises(KeyboardInterrupt):
        reproduce(experiment, tmp_path, quick=False)
    ledger = tmp_path / "points" / "test" / "points.jsonl"
    ledger.write_text(ledger.read_text() + '{"point": {"x": 3}, "ro')  # the power went
    measured += [0]
    reproduce(experiment, tmp_path, quick=False)
    assert measured == [1, 2, 0, 3]
    rows = json.loads((tmp_path / "test.json").read_text())["rows"]
    assert [row["square"] for row in rows] == [1, 4, 9] and [row["before"] for row in rows] == [0, 1, 2]
    ledger.write_text(ledger.read_text().replace('"cores": ', '"cores": 9'))
    reproduce(experiment, tmp_path, quick=False)  # another machine: all again
    assert measured == [1, 2, 0, 3, 1, 2, 3]


def test_an_interrupted_figure_says_how_to_go_on(tmp_path, monkeypatch):
    def measure(point, rows, folder):
        raise KeyboardInterrupt

    monkeypatch.setitem(EXPERIMENTS, "stability", EXPERIMENTS["stability"]._replace(measure=measure))
    result = run("reproduce", "stability", "--quick", "--out", tmp_path, code=1)
    assert "goes on from here" in result.stderr


def test_members_make_the_standard_deviation(tmp_path):
    run(*SMALL, "--members", 4, "--samples", 2, "--out", tmp_path / "a")
    run(*SMALL, "--out", tmp_path / "b")
    members, plain = read(tmp_path / "a"), read(tmp_path / "b")
    np.testing.assert_allclose(members["mean"], plain["mean"], rtol=1e-9, atol=1e-12)
    assert float(abs(members["std"][-1] / plain["std"][-1] - 1).max()) > 1e-3
    assert members["sample"].sizes["draw"] == 2
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["members"] == 4 and summary["smooth"] is True
    result = run(*SMALL, "--members", 4, "--samples", 5, "--out", tmp_path / "c", code=2)
    assert "there are 4" in result.output
