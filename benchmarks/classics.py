"""Classical problems from the literature, to tune on and to measure on.

``TUNED`` are the nonstiff problems that choices in the code were made with; ``UNSEEN`` were written down
after these choices, for measuring. ``STIFF`` are the stiff ones. Names of one letter and a digit are those of
DETEST (Hull, Enright, Fellen, Sedgwick, *Comparing numerical methods for ordinary differential equations*,
SIAM J. Numer. Anal. 9, 1972); the others are from Hairer, Nørsett, Wanner, *Solving ordinary differential
equations* I and II, from the Test Set for IVP Solvers (Mazzia, Magherini), or from the papers that they are
named for.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.integrate import solve_ivp

import millipode as mp
from millipode.problems import Problem

Right = Callable[[Array, Array], Array]
_MADE: dict[str, Callable[[], Problem]] = {}


def _problem(name: str, y0: object, t1: float) -> Callable[[Right], Right]:
    """A decorator that files a right-hand side as a problem from t = 0."""

    def file(f: Right) -> Right:
        _MADE[name] = functools.cache(lambda: Problem(f, jnp.asarray(y0, float), (0.0, t1)))
        return f

    return file


def problem(name: str) -> Problem:
    """A problem by its name."""
    return _MADE[name]()


@_problem("A1 decay", [1.0], 20)
def _decay(t: Array, y: Array) -> Array:
    return -y


@_problem("A2 cubic decay", [1.0], 20)
def _cubic_decay(t: Array, y: Array) -> Array:
    return -(y**3) / 2


@_problem("A3 oscillating rate", [1.0], 20)
def _oscillating(t: Array, y: Array) -> Array:
    return y * jnp.cos(t)


@_problem("A4 logistic", [1.0], 20)
def _logistic(t: Array, y: Array) -> Array:
    return y / 4 * (1 - y / 20)


@_problem("A5 spiral", [4.0], 20)
def _spiral(t: Array, y: Array) -> Array:
    return (y - t) / (y + t)


@_problem("B1 populations", [1.0, 3.0], 20)
def _populations(t: Array, y: Array) -> Array:
    a, b = y
    return jnp.stack([2 * (a - a * b), -(b - a * b)])


@_problem("B2 linear chemistry", [2.0, 0.0, 1.0], 20)
def _linear_chemistry(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([-a + b, a - 2 * b + c, b - c])


@_problem("B3 nonlinear chemistry", [1.0, 0.0, 0.0], 20)
def _nonlinear_chemistry(t: Array, y: Array) -> Array:
    a, b, _ = y
    return jnp.stack([-a, a - b**2, b**2])


@_problem("B4 torus", [3.0, 0.0, 0.0], 20)
def _torus(t: Array, y: Array) -> Array:
    a, b, c = y
    r = jnp.sqrt(a**2 + b**2)
    return jnp.stack([-b - a * c / r, a - b * c / r, a / r])


@_problem("B5 rigid body", [0.0, 1.0, 1.0], 20)
def _rigid_body(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([b * c, -a * c, -0.51 * a * b])


@_problem("C1 decay chain", np.eye(10)[0], 20)
def _chain(t: Array, y: Array) -> Array:
    leaves = y.at[-1].set(0)
    return jnp.roll(leaves, 1) - leaves


@_problem("C2 fast decay chain", np.eye(10)[0], 20)
def _fast_chain(t: Array, y: Array) -> Array:
    leaves = (y * jnp.arange(1, 11)).at[-1].set(0)
    return jnp.roll(leaves, 1) - leaves


@_problem("C3 heat, d = 10", np.eye(10)[0], 20)
@_problem("C4 heat, d = 51", np.eye(51)[0], 20)
def _heat(t: Array, y: Array) -> Array:
    padded = jnp.pad(y, 1)
    return padded[2:] - 2 * y + padded[:-2]


def _orbit(t: Array, y: Array) -> Array:
    position, velocity = y[:2], y[2:]
    return jnp.concatenate([velocity, -position / jnp.sum(position**2) ** 1.5])


for _name, _e in [("D1", 0.1), ("D2", 0.3), ("D3", 0.5), ("D4", 0.7), ("D5", 0.9)]:
    _problem(f"{_name} orbit, e = {_e}", [1 - _e, 0, 0, ((1 + _e) / (1 - _e)) ** 0.5], 20)(_orbit)


@_problem("E1 Bessel", [0.6713967071418030, 0.09540051444747446], 20)
def _bessel(t: Array, y: Array) -> Array:
    a, b = y
    return jnp.stack([b, -b / (t + 1) - (1 - 0.25 / (t + 1) ** 2) * a])


@_problem("E2 Van der Pol", [2.0, 0.0], 20)
def _van_der_pol(t: Array, y: Array) -> Array:
    a, b = y
    return jnp.stack([b, (1 - a**2) * b - a])


@_problem("E3 Duffing", [0.0, 0.0], 20)
def _duffing(t: Array, y: Array) -> Array:
    a, b = y
    return jnp.stack([b, a**3 / 6 - a + 2 * jnp.sin(2.78535 * t)])


@_problem("E4 falling body", [30.0, 0.0], 20)
def _falling(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], 0.032 - 0.4 * y[1] ** 2])


@_problem("E5 pursuit", [0.0, 0.0], 20)
def _pursuit(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], jnp.sqrt(1 + y[1] ** 2) / (25 - t)])


_MADE["Pleiades"] = mp.problems.pleiades
_MADE["Lotka–Volterra"] = mp.problems.lotka_volterra
_MADE["Lorenz96"] = functools.cache(lambda: mp.problems.lorenz96(20)._replace(t_span=(0.0, 1.0)))


@_problem("Arenstorf, half an orbit", [0.994, 0.0, 0.0, -2.00158510637908252], 8.5)
def _arenstorf(t: Array, y: Array) -> Array:
    moon = 0.012277471
    a, b, u, v = y
    near, far = ((a + moon) ** 2 + b**2) ** 1.5, ((a - 1 + moon) ** 2 + b**2) ** 1.5
    pull_a = (1 - moon) * (a + moon) / near + moon * (a - 1 + moon) / far
    return jnp.stack([u, v, a + 2 * v - pull_a, b - 2 * u - (1 - moon) * b / near - moon * b / far])


@_problem("Lorenz63", [1.0, 1.0, 1.0], 5)
def _lorenz63(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c])


@_problem("Rössler", [1.0, 1.0, 0.0], 20)
def _roessler(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([-b - c, a + 0.2 * b, 0.2 + c * (a - 5.7)])


@_problem("Hénon–Heiles", [0.0, 0.1, 0.5, 0.0], 50)
def _henon_heiles(t: Array, y: Array) -> Array:
    a, b, u, v = y
    return jnp.stack([u, v, -a - 2 * a * b, -b - a**2 + b**2])


@_problem("Brusselator", [1.5, 3.0], 20)
def _brusselator(t: Array, y: Array) -> Array:
    a, b = y
    return jnp.stack([1 + a**2 * b - 4 * a, 3 * a - a**2 * b])


@_problem("pendulum", [2.0, 0.0], 20)
def _pendulum(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], -jnp.sin(y[0])])


@_problem("harmonic oscillator", [1.0, 0.0], 30)
def _oscillator(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], -y[0]])


@_problem("epidemic", [0.99, 0.01, 0.0], 60)
def _epidemic(t: Array, y: Array) -> Array:
    infections, recoveries = 0.5 * y[0] * y[1], 0.1 * y[1]
    return jnp.stack([-infections, infections - recoveries, recoveries])


@_problem("Toda lattice", np.concatenate([np.zeros(8), np.sin(2 * np.pi * np.arange(8) / 8)]), 10)
def _toda(t: Array, y: Array) -> Array:
    q, p = y[:8], y[8:]
    force = jnp.exp(q - jnp.roll(q, -1))
    return jnp.concatenate([p, jnp.roll(force, 1) - force])


@_problem("Fermi–Pasta–Ulam", np.concatenate([np.sin(np.pi * np.arange(1, 17) / 17), np.zeros(16)]), 30)
def _fermi_pasta_ulam(t: Array, y: Array) -> Array:
    stretch = jnp.diff(jnp.pad(y[:16], 1))
    return jnp.concatenate([y[16:], jnp.diff(stretch + 0.25 * stretch**2)])


@_problem("advection", np.exp(-40 * (np.arange(64) / 64 - 0.5) ** 2), 2)
def _advection(t: Array, y: Array) -> Array:
    return -(jnp.roll(y, -1) - jnp.roll(y, 1)) * y.size / 4


@_problem("Burgers", 1 + 0.5 * np.sin(2 * np.pi * np.arange(64) / 64), 0.3)
def _burgers(t: Array, y: Array) -> Array:
    after, before, n = jnp.roll(y, -1), jnp.roll(y, 1), y.size
    return -y * (after - before) * n / 2 + 0.005 * (after - 2 * y + before) * n**2


@_problem("wave", np.concatenate([np.exp(-100 * (np.arange(1, 41) / 41 - 0.3) ** 2), np.zeros(40)]), 5)
def _wave(t: Array, y: Array) -> Array:
    return jnp.concatenate([y[40:], _heat(t, y[:40]) * 41**2 / 100])


@_problem("repressilator", [1.0, 2.0, 3.0, 0.0, 0.0, 0.0], 30)
def _repressilator(t: Array, y: Array) -> Array:
    m, p = y[:3], y[3:]
    return jnp.concatenate([-m + 20 / (1 + jnp.roll(p, 1) ** 2) + 0.02, -0.5 * (p - m)])


@_problem("FitzHugh–Nagumo", [-1.0, 1.0], 40)
def _fitzhugh_nagumo(t: Array, y: Array) -> Array:
    v, w = y
    return jnp.stack([v - v**3 / 3 - w + 0.5, 0.08 * (v + 0.7 - 0.8 * w)])


@_problem("double pendulum", [1.0, 1.2, 0.0, 0.0], 5)
def _double_pendulum(t: Array, y: Array) -> Array:
    a, b, u, v = y
    g, sine, cosine = 9.81, jnp.sin(a - b), jnp.cos(a - b)
    inertia = 2 - cosine**2
    du = -sine * (v**2 + u**2 * cosine) - g * (2 * jnp.sin(a) - jnp.sin(b) * cosine)
    dv = sine * (2 * u**2 + v**2 * cosine) + 2 * g * (jnp.sin(a) * cosine - jnp.sin(b))
    return jnp.stack([u, v, du / inertia, dv / inertia])


TUNED = tuple(_MADE)


@_problem(
    "figure eight",
    [
        0.97000436,
        -0.97000436,
        0.0,
        -0.24308753,
        0.24308753,
        0.0,
        0.466203685,
        0.466203685,
        -0.93240737,
        0.43236573,
        0.43236573,
        -0.86473146,
    ],
    6.3259,
)
def _figure_eight(t: Array, y: Array) -> Array:
    x, velocity = y[:6].reshape(2, 3), y[6:]
    apart = x[:, None, :] - x[:, :, None]
    cubes = jnp.sum(apart**2, axis=0) ** 1.5 + jnp.eye(3)
    return jnp.concatenate([velocity, jnp.sum(apart / cubes, axis=2).reshape(-1)])


@_problem("free rigid body", [np.cos(1.1), 0.0, np.sin(1.1)], 20)
def _free_rigid_body(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([(1 / (2 / 3) - 1) * b * c, (1 / 2 - 1 / (2 / 3)) * c * a, (1 - 1 / 2) * a * b])


@_problem("swinging spring", [0.2, -1.2, 0.3, 0.0], 15)
def _swinging_spring(t: Array, y: Array) -> Array:
    position, velocity = y[:2], y[2:]
    length = jnp.sqrt(jnp.sum(position**2))
    return jnp.concatenate([velocity, -5 * (1 - 1 / length) * position - jnp.array([0.0, 1.0])])


@_problem("tadpole orbit", [0.497722529, 0.876025404, 0.01, 0.0], 20)
def _tadpole(t: Array, y: Array) -> Array:
    return _arenstorf(t, y)


@_problem("charged particle", [1.0, 0.0, 0.0, 0.0, 1.0, 0.5], 20)
def _charged(t: Array, y: Array) -> Array:
    position, velocity = y[:3], y[3:]
    field = jnp.stack([-0.1 * position[0], -0.1 * position[1], 1 + 0.2 * position[2]])
    return jnp.concatenate([velocity, jnp.cross(velocity, field) + jnp.array([0.05, 0.0, 0.0])])


@_problem("Mathieu", [1.0, 0.0], 30)
def _mathieu(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], -(1.2 - 0.8 * jnp.cos(2 * t)) * y[0]])


@_problem("Airy", [0.3550280538878172, 0.2588194037928068], 15)
def _airy(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], -t * y[0]])


@_problem("Blasius", [0.0, 0.0, 0.332057336215195], 6)
def _blasius(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], y[2], -y[0] * y[2] / 2])


@_problem("Ueda", [2.5, 0.0], 10)
def _ueda(t: Array, y: Array) -> Array:
    return jnp.stack([y[1], 7.5 * jnp.cos(t) - 0.05 * y[1] - y[0] ** 3])


@_problem("Thomas", [1.0, 0.2, 0.0], 30)
def _thomas(t: Array, y: Array) -> Array:
    return jnp.sin(jnp.roll(y, -1)) - 0.208186 * y


@_problem("Lorenz84", [1.0, 1.0, 0.5], 10)
def _lorenz84(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([-(b**2) - c**2 - 0.25 * a + 2, a * b - 4 * a * c - b + 1, 4 * a * b + a * c - c])


@_problem("Kuramoto", np.linspace(0, 3, 20), 10)
def _kuramoto(t: Array, y: Array) -> Array:
    speeds = jnp.linspace(-1.0, 1.0, y.size)
    return speeds + 1.5 * jnp.mean(jnp.sin(y[None, :] - y[:, None]), axis=1)


@_problem("predator, saturated", [1.0, 0.5], 40)
def _rosenzweig(t: Array, y: Array) -> Array:
    eaten = y[0] * y[1] / (1 + 0.8 * y[0])
    return jnp.stack([y[0] * (1 - y[0] / 4) - eaten, eaten - 0.5 * y[1]])


@_problem("three competitors", [0.6, 0.3, 0.2], 40)
def _may_leonard(t: Array, y: Array) -> Array:
    return y * (1 - y - 0.8 * jnp.roll(y, -1) - 1.5 * jnp.roll(y, -2))


@_problem("epidemic with exposure", [0.99, 0.0, 0.01, 0.0], 80)
def _exposure(t: Array, y: Array) -> Array:
    caught, ill, over = 0.6 * y[0] * y[2], 0.25 * y[1], 0.15 * y[2]
    return jnp.stack([-caught, caught - ill, ill - over, over])


@_problem("glycolysis", [1.0, 1.0], 40)
def _glycolysis(t: Array, y: Array) -> Array:
    reaction = 0.06 * y[1] + y[0] ** 2 * y[1]
    return jnp.stack([-y[0] + reaction, 0.6 - reaction])


@_problem("Goodwin", [0.1, 0.2, 2.5], 40)
def _goodwin(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([1 / (1 + c**10) - 0.1 * a, a - 0.1 * b, b - 0.1 * c])


@_problem("enzyme", [1.0, 0.5, 0.0, 0.0], 20)
def _enzyme(t: Array, y: Array) -> Array:
    s, e, c, _ = y
    bound, free, made = 2.0 * s * e, 0.5 * c, 1.0 * c
    return jnp.stack([free - bound, free + made - bound, bound - free - made, made])


@_problem("radiating body", [2.0, 1.0], 10)
def _radiating(t: Array, y: Array) -> Array:
    a, b = y
    return jnp.stack([-0.1 * (a**4 - b**4), 0.05 * (a**4 - b**4) - 0.2 * (b - 0.5)])


@_problem("Hindmarsh–Rose", [-1.3, -7.0, 0.2], 40)
def _hindmarsh_rose(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([b - a**3 + 3 * a**2 - c + 3, 1 - 5 * a**2 - b, 0.006 * (4 * (a + 1.6) - c)])


@_problem("sine–Gordon", np.concatenate([2 * np.exp(-((np.arange(40) - 20) ** 2) / 20), np.zeros(40)]), 10)
def _sine_gordon(t: Array, y: Array) -> Array:
    u = y[:40]
    return jnp.concatenate([y[40:], jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1) - jnp.sin(u)])


@_problem("Schrödinger", np.concatenate([np.exp(-((np.arange(32) - 16) ** 2) / 20), np.zeros(32)]), 5)
def _schroedinger(t: Array, y: Array) -> Array:
    u, v = y.reshape(2, 32)

    def rhs(w: Array) -> Array:
        return jnp.roll(w, 1) - 2 * w + jnp.roll(w, -1) + 2 * (u**2 + v**2) * w

    return jnp.concatenate([-rhs(v), rhs(u)])


@_problem("Fisher's wave", np.exp(-np.arange(30) / 2), 8)
def _fisher(t: Array, y: Array) -> Array:
    padded = jnp.pad(y, 1, mode="edge")
    return padded[2:] - 2 * y + padded[:-2] + y * (1 - y)


@_problem("upwind advection", np.exp(-((np.arange(50) - 15) ** 2) / 30), 10)
def _upwind(t: Array, y: Array) -> Array:
    return jnp.roll(y, 1) - y


UNSEEN = tuple(name for name in _MADE if name not in TUNED)


@_problem("Robertson to 1e5", [1.0, 0.0, 0.0], 1e5)
@_problem("Robertson to 1e11", [1.0, 0.0, 0.0], 1e11)
def _robertson(t: Array, y: Array) -> Array:
    a, b, c = y
    slow, fast = -0.04 * a + 1e4 * b * c, 3e7 * b**2
    return jnp.stack([slow, -slow - fast, fast])


@_problem("HIRES", [1.0, 0, 0, 0, 0, 0, 0, 0.0057], 321.8122)
def _hires(t: Array, y: Array) -> Array:
    a, b, c, d, e, f, g, h = y
    return jnp.stack(
        [
            -1.71 * a + 0.43 * b + 8.32 * c + 0.0007,
            1.71 * a - 8.75 * b,
            -10.03 * c + 0.43 * d + 0.035 * e,
            8.32 * b + 1.71 * c - 1.12 * d,
            -1.745 * e + 0.43 * f + 0.43 * g,
            -280 * f * h + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g,
            280 * f * h - 1.81 * g,
            -280 * f * h + 1.81 * g,
        ]
    )


@_problem("Oregonator", [1.0, 2.0, 3.0], 360)
def _oregonator(t: Array, y: Array) -> Array:
    a, b, c = y
    return jnp.stack([77.27 * (b + a * (1 - 8.375e-6 * a - b)), (c - (1 + a) * b) / 77.27, 0.161 * (a - c)])


@_problem("Van der Pol, μ = 10⁶", [2.0, 0.0], 2)
def _stiff_van_der_pol(t: Array, y: Array) -> Array:
    a, b = y
    return jnp.stack([b, 1e6 * ((1 - a**2) * b - a)])


@_problem("E5", [1.76e-3, 0.0, 0.0, 0.0], 1e11)
def _e5(t: Array, y: Array) -> Array:
    a, b, c, d = y
    first, second, third, fourth = 7.89e-10 * a, 1.1e7 * a * c, 1.13e9 * b * c, 1.13e3 * d
    return jnp.stack([-first - second, first - third, first - second + fourth - third, second - fourth])


# (rate, what reacts, what comes of it) of the 25 reactions of Verwer's air pollution model, 1994.
_POLLU = (
    (0.35, (1,), (2, 3)),
    (26.6, (2, 4), (1,)),
    (12300.0, (5, 2), (6, 1)),
    (8.6e-4, (7,), (8, 5, 5)),
    (8.2e-4, (7,), (8,)),
    (15000.0, (7, 6), (8, 5)),
    (1.3e-4, (9,), (10, 8, 5)),
    (24000.0, (9, 6), (11,)),
    (16500.0, (11, 2), (10, 1, 12)),
    (9000.0, (11, 1), (13,)),
    (0.022, (13,), (11, 1)),
    (12000.0, (10, 2), (14, 1)),
    (1.88, (14,), (7, 5)),
    (16300.0, (1, 6), (15,)),
    (4.8e6, (3,), (4,)),
    (3.5e-4, (4,), (16,)),
    (0.0175, (4,), (3,)),
    (1.0e8, (16,), (6, 6)),
    (4.44e11, (16,), (3,)),
    (1240.0, (17, 6), (18, 5)),
    (2.1, (19,), (2,)),
    (5.78, (19,), (1, 3)),
    (0.0474, (1, 4), (19,)),
    (1780.0, (19, 1), (20,)),
    (3.12, (20,), (19, 1)),
)
_POLLU_START = {2: 0.2, 4: 0.04, 7: 0.1, 8: 0.3, 9: 0.01, 17: 0.007}


@_problem("POLLU", [_POLLU_START.get(i, 0.0) for i in range(1, 21)], 60)
def _pollu(t: Array, y: Array) -> Array:
    change = [0.0] * 20
    for rate, used, made in _POLLU:
        speed = rate * functools.reduce(jnp.multiply, (y[i - 1] for i in used))
        for i in used:
            change[i - 1] = change[i - 1] - speed
        for i in made:
            change[i - 1] = change[i - 1] + speed
    return jnp.stack([jnp.asarray(c, y.dtype) for c in change])


STIFF = tuple(name for name in _MADE if name not in TUNED and name not in UNSEEN)


# Prothero and Robinson 1974: stiff decay towards a solution that moves.
@_problem("Prothero–Robinson", [0.0], 10)
def _prothero_robinson(t: Array, y: Array) -> Array:
    return -1e6 * (y - jnp.sin(t)) + jnp.cos(t)


def _damped(degrees: float) -> None:
    """A slow decay, and oscillations of |λ| = 1000 at this angle to the negative real axis."""
    angle = np.deg2rad(degrees)
    a, b = 1e3 * np.cos(angle), 1e3 * np.sin(angle)

    def f(t: Array, y: Array) -> Array:
        u, v, w = y
        return jnp.stack([-a * u - b * v + b * w, b * u - a * v + a * w, -w])

    _problem(f"damped at {degrees:g}°", [1.0, 0.0, 1.0], 5)(f)


for _degrees in (80, 85, 89):
    _damped(_degrees)

# Stiff and linear, so that nothing but stability and the order counts.
STIFF_LINEAR = tuple(name for name in _MADE if name not in (*TUNED, *UNSEEN, *STIFF))


@functools.cache
def reference(name: str) -> np.ndarray:
    """The solution at the end, by SciPy at a tight tolerance."""
    p = problem(name)
    f = jax.jit(p.f)
    method, tolerance = ("Radau", 1e-11) if name in (*STIFF, *STIFF_LINEAR) else ("DOP853", 3e-14)
    options = {"jac": jax.jit(jax.jacfwd(p.f, argnums=1))} if name in (*STIFF, *STIFF_LINEAR) else {}
    start = np.asarray(p.y0)
    atol = 1e-24 if name == "E5" else 1e-3 * tolerance
    solution = solve_ivp(
        lambda t, y: np.asarray(f(t, y)), p.t_span, start, method, rtol=tolerance, atol=atol, **options
    )
    return solution.y[:, -1]
