"""How much time buys how much accuracy on a stiff PDE?

FitzHugh–Nagumo (no flux) and Allen–Cahn (periodic) on n × n cells: root-mean-square error of the final value
against the time of a warm solve, at tolerances rtol = 100 atol. The solvers of other libraries are used as is
usual for such problems:

- SciPy's BDF with the sparse Jacobian, LSODA with a banded one (neighbours in memory are neighbours on the
  grid), f in NumPy;
- diffrax's KenCarp4, implicit in the diffusion, explicit in the reaction; the linear systems are solved by
  GMRES without a matrix or a preconditioner, to a tenth of the tolerance;
- exponax's ETDRK4 with fixed steps, in the periodic case, with the eigenvalues of the same stencil.

The reference is diffrax's Dopri8 at 1e-10. Run: ``python benchmarks/stiff.py [--quick]`` (needs the ``bench``
extra).
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import diffrax
import exponax
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
from harness import publish, quick
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp
from scipy.sparse import csc_matrix, diags, identity, kron

import millipode as mp
from millipode.model.priors import Prior
from millipode.paper.measuring import Claim, Row, at_least, at_most
from millipode.problems import Problem

PATIENCE = 60.0  # seconds after which a solve is given up, and with it all tighter tolerances
RATIO = 1e-2  # atol / rtol


class Task(NamedTuple):
    """A problem, its reaction without diffusion, and the diffusion coefficient of each component."""

    problem: Problem
    reaction: Callable
    coefficients: np.ndarray

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (components, n, n) of y."""
        n = self.problem.grid.shape[0]
        return len(self.coefficients), n, n

    def diffusion(self, y: jax.Array) -> jax.Array:
        """The stiff part of f, like y."""
        a = jnp.asarray(self.coefficients).reshape(-1, 1, 1)
        return (a * self.problem.grid.laplacian(y.reshape(self.shape))).reshape(y.shape)


def tasks(n: int) -> dict[str, Task]:
    """The two problems, by name."""
    fhn = mp.problems.fitzhugh_nagumo(n)
    p = fhn.f

    def react(y: jax.Array) -> jax.Array:
        u, v = y
        return jnp.stack([u - u**3 - v + p.k, (u - v) / p.tau])

    cahn = mp.problems.allen_cahn(n, boundary="periodic")
    return {
        f"FitzHugh–Nagumo, {n}²": Task(fhn, react, np.array([p.a, p.b / p.tau])),
        f"Allen–Cahn, periodic, {n}²": Task(cahn, lambda u: u - u**3, np.array([cahn.f.epsilon**2])),
    }


def laplacian_matrix(task: Task) -> csc_matrix:
    """The matrix of the Laplacian of one component, with cells in the order of the grid."""
    n, dx = task.shape[1], task.problem.grid.spacing[0]
    line = diags([np.ones(n - 1), -2 * np.ones(n), np.ones(n - 1)], [-1, 0, 1]).tolil()
    if task.problem.grid.boundary[0] == "periodic":
        line[0, -1] = line[-1, 0] = 1
    else:
        line[0, 0] = line[-1, -1] = -1
    one = identity(n)
    return csc_matrix((kron(line, one) + kron(one, line)) / dx**2)


def spectral(task: Task, order: int, prior: Prior | None = None) -> Callable[[float], np.ndarray]:
    """SpectralEK1, as a function of rtol that returns the final value."""
    problem = task.problem
    solver = mp.SpectralEK1(order, linear=problem.linear, prior=prior)

    def run(rtol: float) -> np.ndarray:
        sol = mp.solve(
            problem.f,
            problem.y0,
            problem.t_span,
            solver=solver,
            rtol=rtol,
            atol=RATIO * rtol,
            save="end",
            smooth=False,
        )
        jax.block_until_ready(sol.std)
        return np.asarray(sol.mean[-1])

    return run


def kencarp(task: Task) -> Callable[[float], np.ndarray]:
    """The implicit–explicit method KenCarp4 of diffrax, as a function of rtol."""
    problem = task.problem
    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, args: task.reaction(y)),
        diffrax.ODETerm(lambda t, y, args: task.diffusion(y)),
    )

    @jax.jit
    def solve(y0: jax.Array, rtol: jax.Array) -> jax.Array:
        atol = RATIO * rtol
        linear = lineax.GMRES(0.1 * rtol, 0.1 * atol)
        root = optimistix.Newton(rtol, atol, linear_solver=linear)
        return diffrax.diffeqsolve(
            terms,
            diffrax.KenCarp4(root_finder=root),
            *problem.t_span,
            None,
            y0,
            stepsize_controller=diffrax.PIDController(rtol, atol),
            saveat=diffrax.SaveAt(t1=True),
            adjoint=diffrax.ForwardMode(),
            max_steps=10**6,
            throw=False,
        ).ys[0]

    return lambda rtol: np.asarray(solve(problem.y0, rtol))


def scipy(task: Task, name: str) -> Callable[[float], np.ndarray]:
    """SciPy's BDF with sparse or LSODA with banded matrices, as a function of rtol.

    The components of a cell are neighbours in memory.
    """
    c, n, _ = task.shape
    deadline = np.inf
    matrix = kron(laplacian_matrix(task), diags(task.coefficients)).tocsr()
    rates = jax.jit(jax.vmap(jax.jacfwd(lambda y: task.reaction(y.reshape(c, 1, 1)).ravel()), in_axes=1))

    def reaction(y: np.ndarray) -> np.ndarray:
        cells = y.reshape(n, n, c)
        if c == 1:
            return (cells - cells**3).ravel()
        u, v, p = cells[..., 0], cells[..., 1], task.problem.f
        return np.stack([u - u**3 - v + p.k, (u - v) / p.tau], axis=-1).ravel()

    def f(t: float, y: np.ndarray) -> np.ndarray:
        if time.perf_counter() > deadline:
            raise TimeoutError
        return matrix @ y + reaction(y)

    def jacobian(t: float, y: np.ndarray) -> csc_matrix:
        blocks = np.asarray(rates(y.reshape(n * n, c).T))
        offsets = [np.repeat(np.arange(n * n) * c, c * c), np.tile(np.repeat(np.arange(c), c), n * n)]
        rows = offsets[0] + offsets[1]
        columns = offsets[0] + np.tile(np.tile(np.arange(c), c), n * n)
        return csc_matrix(matrix + csc_matrix((blocks.ravel(), (rows, columns)), shape=matrix.shape))

    def banded(t: float, y: np.ndarray) -> np.ndarray:
        whole, width = jacobian(t, y).tocoo(), c * n
        packed, offset = np.zeros((2 * width + 1, y.size)), whole.row - whole.col
        inside = np.abs(offset) <= width  # what is periodic in the outer direction is not
        packed[width + offset[inside], whole.col[inside]] = whole.data[inside]
        return packed

    options = {"jac": jacobian} if name == "BDF" else {"jac": banded, "lband": c * n, "uband": c * n}
    y0 = np.moveaxis(np.asarray(task.problem.y0).reshape(task.shape), 0, -1).ravel()

    def run(rtol: float) -> np.ndarray:
        nonlocal deadline
        deadline = time.perf_counter() + PATIENCE
        sol = solve_ivp(f, task.problem.t_span, y0, name, rtol=rtol, atol=RATIO * rtol, **options)
        return np.moveaxis(sol.y[:, -1].reshape(n, n, c), -1, 0)

    return run


def exponential(task: Task) -> Callable[[int], np.ndarray]:
    """The ETDRK4 method of exponax, as a function of the number of fixed steps."""
    problem, n = task.problem, task.shape[1]
    phase = 2 * np.sin(np.pi * np.fft.fftfreq(n)) / problem.grid.spacing[0]
    half = 2 * np.sin(np.pi * np.fft.rfftfreq(n)) / problem.grid.spacing[0]
    laplacian = -(phase[:, None] ** 2 + half[None, :] ** 2)
    linear = jnp.asarray(task.coefficients[0] * laplacian)[None].astype(complex)

    class Reaction(exponax.nonlin_fun.BaseNonlinearFun):
        """The reaction, evaluated in space and transformed back to modes."""

        def __call__(self, u_hat: jax.Array) -> jax.Array:
            return self.fft(task.reaction(self.ifft(u_hat)))

    @partial(jax.jit, static_argnums=1)
    def solve(y0: jax.Array, steps: int) -> jax.Array:
        stepper = exponax.etdrk.ETDRK4(problem.t_span[1] / steps, linear, Reaction(2, n))
        modes = exponax.fft(y0[None], num_spatial_dims=2)
        modes = jax.lax.fori_loop(0, steps, lambda _, m: stepper.step_fourier(m), modes)
        return exponax.ifft(modes, num_spatial_dims=2, num_points=n)

    return lambda steps: np.asarray(solve(problem.y0, int(steps)))


def reference(task: Task) -> np.ndarray:
    """The final value by diffrax's Dopri8 at 1e-10, an explicit method whose steps stability limits."""
    problem = task.problem
    return np.asarray(
        diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: problem.f(t, y)),
            diffrax.Dopri8(),
            *problem.t_span,
            None,
            problem.y0,
            stepsize_controller=diffrax.PIDController(1e-10, 1e-10),
            saveat=diffrax.SaveAt(t1=True),
            adjoint=diffrax.ForwardMode(),
            max_steps=10**7,
        ).ys[0]
    )


def contenders(task: Task, short: bool) -> Iterator[tuple[str, Callable, list[float]]]:
    """The name of each method, the method, and the tolerances or numbers of steps to try."""
    tolerances = [1e-2, 1e-3, 1e-4] if short else [1e-2, 1e-3, 1e-4, 1e-5, 1e-6]
    for order in (2, 3, 4):
        yield f"SpectralEK1({order})", spectral(task, order), tolerances
    yield "SpectralEK1(3), IOUP", spectral(task, 3, mp.IOUP()), tolerances
    yield "KenCarp4 (diffrax)", kencarp(task), tolerances
    if task.problem.grid.boundary[0] == "periodic":
        yield "ETDRK4 (exponax)", exponential(task), [20, 40, 80, 160, 320, 640, 1280, 2560]
    for name in ("BDF", "LSODA"):
        yield f"{name} (SciPy)", scipy(task, name), tolerances


def timed(run: Callable, setting: float, warm: bool) -> tuple[np.ndarray, float]:
    """The answer and its seconds: the median of three runs, or of fewer if they take long."""
    seconds: list[float] = []
    if warm:
        run(setting)
    while len(seconds) < 3 and sum(seconds) < 5:
        start = time.perf_counter()
        y = run(setting)
        seconds.append(time.perf_counter() - start)
    return y, float(np.median(seconds))


def measure(name: str, task: Task, short: bool) -> list[Row]:
    """One row per method and tolerance."""
    truth, rows = reference(task).reshape(task.shape), []
    for label, run, settings in contenders(task, short):
        for setting in settings:
            row: Row = {"problem": name, "method": label, "rtol or steps": setting}
            try:
                y, seconds = timed(run, setting, warm="SciPy" not in label)
            except TimeoutError:
                rows.append(row | {"RMSE": None, "time [s]": f"> {PATIENCE:.0f}"})
                break
            error = float(np.sqrt(np.mean((y.reshape(task.shape) - truth) ** 2)))
            rows.append(row | {"RMSE": error, "time [s]": seconds})
            print(rows[-1], flush=True)
            if seconds > PATIENCE / (10 if short else 2):
                break
    return rows


def time_at(rows: list[Row], methods: str, error: float = 1e-4) -> float:
    """The seconds to an error, of the fastest method whose name begins with ``methods``.

    They are interpolated between runs; if the loosest run is more accurate than that, they are its seconds.
    """
    best = np.inf
    for method in {row["method"] for row in rows if row["method"].startswith(methods)}:
        points = [(r["RMSE"], r["time [s]"]) for r in rows if r["method"] == method and r["RMSE"] is not None]
        errors, seconds = (np.log(column) for column in zip(*sorted(points), strict=True))
        if errors[0] <= np.log(error):
            best = min(best, float(np.exp(np.interp(np.log(error), errors, seconds))))
    return best


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about stiff PDEs, in comparison with other libraries."""
    promises = []
    for problem in dict.fromkeys(row["problem"] for row in rows):
        mine = [row for row in rows if row["problem"] == problem]
        ours, implicit = (
            time_at(mine, "SpectralEK1"),
            min(time_at(mine, x) for x in ("BDF", "LSODA", "KenCarp")),
        )
        what = (
            f"{problem}, RMSE 1e-4, the best of our four: times faster than the best of BDF, LSODA, KenCarp4"
        )
        promises.append(at_least(what, 5, implicit / ours))
        exponential = time_at(mine, "ETDRK4")
        if np.isfinite(exponential):
            promises.append(
                at_most(
                    f"{problem}, RMSE 1e-4, the best of our four: time / that of ETDRK4",
                    2,
                    ours / exponential,
                )
            )
    return promises


def draw(rows: list[Row]) -> Figure:
    """Time against error, one panel per problem."""
    names = list(dict.fromkeys(row["problem"] for row in rows))
    labels = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(4.2 * len(names) + 2.2, 4), layout="constrained")
    axes: Any = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        for i, label in enumerate(labels):
            mine = [row for row in rows if row["problem"] == name and row["method"] == label]
            points = [(r["RMSE"], r["time [s]"]) for r in mine if r["RMSE"] is not None and r["RMSE"] < 1]
            if points:
                style = "o-" if label.startswith("Spectral") else "s--"
                axis.loglog(*zip(*points, strict=True), style, color=f"C{i}", markersize=4, label=label)
        axis.set(title=name, xlabel="RMSE of the final value")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time of a solve [s]")
    handles = {h.get_label(): h for axis in axes for h in axis.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    return figure


def main() -> None:
    """Measure, print and publish."""
    short = quick()
    rows = [row for name, task in tasks(32 if short else 128).items() for row in measure(name, task, short)]
    question = "How much time buys how much accuracy on a stiff PDE?"
    publish("stiff", question, rows, draw(rows), claims(rows), short)


if __name__ == "__main__":
    main()
