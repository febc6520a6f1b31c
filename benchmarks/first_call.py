"""How long until the first answer?

A fresh Python process per library and problem imports, traces, compiles, and runs the first solve. The times
of these parts come from JAX's own monitoring; the rest of the first call is its run and the Python around it.
All libraries solve to the same tolerance and save the final value. Run: ``python benchmarks/first_call.py
[--quick]`` (needs the ``bench`` extra).
"""

import json
import subprocess
import sys

import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

from millipode.paper.measuring import Claim, Row, at_most

PROBLEMS = {
    "Lotka–Volterra, d = 2": "mp.problems.lotka_volterra()",
    "FitzHugh–Nagumo, d = 20 000": "mp.problems.fitzhugh_nagumo(100)._replace(t_span=(0.0, 0.01))",
}
LIBRARIES = {
    "millipode, EK0(3)": ("millipode", "mp.EK0(3)"),
    "diffrax, Tsit5": ("diffrax", None),
    "probdiffeq, TS0(3) isotropic": ("probdiffeq.probdiffeq", None),
}
PARTS = ("import", "trace", "compile", "rest")

# The problems are made before the clock starts, with nothing compiled for them.
SCRIPT = """
import json, sys, time
start = time.perf_counter()
import {module}
imported = time.perf_counter() - start
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
sys.path.insert(0, {folder!r})
import millipode as mp
import diffrax
from methods import ISOTROPIC, from_diffrax, from_probdiffeq
from millipode.paper.methods import ours
problem = {problem}
problem = problem._replace(y0=jax.device_put(np.asarray(problem.y0)))
method = {{"millipode": ours(mp.EK0, 3), "diffrax": from_diffrax(diffrax.Tsit5),
           "probdiffeq.probdiffeq": from_probdiffeq(ISOTROPIC, 3)}}[{module!r}]
spent = {{}}
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: spent.update({{event: spent.get(event, 0.0) + seconds}}))
run = method(problem)
def call():
    start = time.perf_counter()
    jax.block_until_ready(run(problem.t_span[1], 1e-5).y)
    return time.perf_counter() - start
first = call()
traced = sum(s for e, s in spent.items() if "trace" in e or "mlir" in e)
compiled = sum(s for e, s in spent.items() if e.endswith("backend_compile_duration"))
print(json.dumps([imported, traced, compiled, first, call()]))
"""


def measure(repeats: int) -> list[Row]:
    """One row per problem and library."""
    rows = []
    folder = str(__file__).rsplit("/", 1)[0]
    for problem, expression in PROBLEMS.items():
        for library, (module, _) in LIBRARIES.items():
            code = SCRIPT.format(module=module, folder=folder, problem=expression)
            command = [sys.executable, "-c", code]
            runs = [
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                for _ in range(repeats)
            ]
            imported, traced, compiled, first, second = np.median(runs, axis=0)
            rows.append(
                {
                    "problem": problem,
                    "library": library,
                    "import [s]": float(imported),
                    "trace [s]": float(traced),
                    "compile [s]": float(compiled),
                    "rest [s]": float(max(first - traced - compiled, 0.0)),
                    "first call [s]": float(first),
                    "second call [ms]": 1e3 * float(second),
                }
            )
            print(rows[-1], flush=True)
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about the first call."""
    found = []
    for problem in PROBLEMS:
        ours, diffrax, _ = (row["first call [s]"] for row in rows if row["problem"] == problem)
        found.append(at_most(f"{problem}: first call / that of diffrax", 1.5, ours / diffrax))
    return found


def draw(rows: list[Row]) -> Figure:
    """The parts of the first call as stacked bars."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axis = figure.subplots()
    names = [f"{row['library']}\n{row['problem']}" for row in rows]
    left = np.zeros(len(rows))
    for part in PARTS:
        widths = np.array([row[f"{part} [s]"] for row in rows])
        axis.barh(names, widths, left=left, label=part)
        left += widths
    axis.set(xlabel="seconds")
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=7)
    axis.legend()
    return figure


def main() -> None:
    """Measure, print and publish."""
    few = quick()
    rows = measure(1 if few else 5)
    publish("first_call", "How long until the first answer?", rows, draw(rows), claims(rows), few)


if __name__ == "__main__":
    main()
