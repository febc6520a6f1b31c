"""ODE filters by the textbook, in plain NumPy: full covariances, Kronecker products, no tricks.

Written from the paper's Section 2 alone. Unknown-major ordering, Y = (Y^1, …, Y^d), as printed there.
"""

from itertools import pairwise
from math import comb, factorial

import numpy as np
from scipy.linalg import block_diag, expm


def transition(nu, h):
    n = nu + 1
    phi = np.array([[h ** (j - i) / factorial(j - i) if j >= i else 0.0 for j in range(n)] for i in range(n)])
    sigma = np.array(
        [
            [
                h ** (2 * nu + 1 - i - j) / ((2 * nu + 1 - i - j) * factorial(nu - i) * factorial(nu - j))
                for j in range(n)
            ]
            for i in range(n)
        ]
    )
    return phi, sigma


def ornstein_uhlenbeck(nu, h, rate):
    """The same for y^(ν+1) = rate · y^(ν) + noise."""
    return _van_loan([*[0.0] * nu, rate], h)


def matern(nu, h, length_scale):
    """The same for (d/dt + λ)^(ν+1) y = noise, λ = √(2(ν+½))/ℓ."""
    n, rate = nu + 1, np.sqrt(2 * (nu + 0.5)) / length_scale
    return _van_loan([-comb(n, j) * rate ** (n - j) for j in range(n)], h)


def _van_loan(last_row, h):
    """One matrix exponential for both."""
    n = len(last_row)
    drift, noise = np.diag(np.ones(n - 1), 1), np.zeros((n, n))
    drift[-1], noise[-1, -1] = last_row, 1.0
    joint = expm(h * np.block([[drift, noise], [np.zeros((n, n)), -drift.T]]))
    phi = joint[:n, :n]
    return phi, joint[:n, n:] @ phi.T


class Result:
    pass


def equal_steps(nu):
    """The gains of y of an EK0 that takes steps of length 1, and its residuals if y^(ν+1) = 1 throughout."""
    phi, sigma = transition(nu, 1.0)
    missed = np.array([1 / factorial(nu + 1 - q) for q in range(nu + 1)])
    c, e, gains, residuals = np.zeros_like(sigma), np.zeros(nu + 1), [], []
    for _ in range(300):
        c, e = phi @ c @ phi.T + sigma, phi @ e + missed
        k = c[:, 1] / c[1, 1]
        xi = np.eye(nu + 1) - np.outer(k, np.eye(nu + 1)[1])
        gains.append(k[0]), residuals.append(e[1])
        c, e = xi @ c @ xi.T, xi @ e
    return gains, np.array(residuals)


def steady_gain(nu):
    """The entry for y of the gain of an EK0 after many steps of length 1."""
    return equal_steps(nu)[0][-1]


def settling(nu, step):
    """By how much the residual of a steady EK0 exceeds that of a given step, if by more than one per cent."""
    _, residuals = equal_steps(nu)
    factors = residuals[-1] / residuals[step:]
    return factors[0] if np.abs(factors - 1).max() >= 0.01 else 1.0


def ode_filter(
    f,
    jacobian,
    derivatives,
    grid,
    *,
    nu,
    linearisation,
    dynamic,
    vector,
    space=None,
    corrections=1,
    tolerances=None,
):
    """Filter y' = f(t, y) on a given grid from exact derivatives (ν+1, d) at its start.

    With a matrix ``space``, and EK0 and a scalar diffusion, the prior has the left factor γ² space. The
    linearisation may also be a matrix, the same at all times. ``transported`` is the covariance of the error
    under the true Jacobian: Joseph's form, with the gains of this filter. With ``corrections`` > 1, f is
    linearised again at corrected points. With ``tolerances`` (rtol, atol) and a γ per unknown, each unknown
    has its own part of the residual.
    """
    n, d = derivatives.shape
    space = np.eye(d) if space is None else space
    e0, e1 = (np.kron(np.eye(d), np.eye(n)[q : q + 1]) for q in (0, 1))
    m, c = derivatives.T.reshape(-1), np.zeros((n * d, n * d))
    p, transported = c, [c]
    zs, ss, means, covs, gammas = [], [], [m], [c], []
    for i, (t_old, t) in enumerate(pairwise(grid)):
        phi, sigma = transition(nu, t - t_old)
        phi = np.kron(np.eye(d), phi)
        lead = None
        y_old, predicted = e0 @ m, phi @ m
        y = point = e0 @ predicted
        for _ in range(corrections):
            full = np.asarray(jacobian(t, point))
            known = {"ek0": 0 * full, "diagonal": np.diag(np.diag(full)), "ek1": full}
            fy = known[linearisation] if isinstance(linearisation, str) else linearisation
            h, l0 = e1 - fy @ e0, steady_gain(nu) * (t - t_old)
            z = e1 @ predicted - np.asarray(f(t, point)) - fy @ (y - point)
            noise = h @ np.kron(space, sigma) @ h.T
            if not dynamic:
                gamma = np.ones(d)
            elif vector and tolerances is not None:
                tolerated = tolerances[1] + tolerances[0] * np.maximum(np.abs(y), np.abs(y_old))
                own = np.linalg.solve(np.eye(d) - l0 * fy, z)
                gamma = (own**2 + (0.1 * tolerated / l0) ** 2) / sigma[1, 1]
            elif vector:
                gamma = z**2 / np.diag(noise)
            else:
                gamma = np.full(d, z @ np.linalg.solve(noise, z) / d)
            if dynamic and corrections > 1:
                gamma = gamma * settling(nu, i) ** 2
            root = np.diag(np.sqrt(gamma))
            process = np.kron(root @ space @ root, sigma)
            predicted_c = phi @ c @ phi.T + process
            s = h @ predicted_c @ h.T
            k = predicted_c @ h.T @ np.linalg.inv(s)
            if isinstance(linearisation, str) and linearisation == "ek0":
                lead = e0 @ k if lead is None else lead
            else:
                lead = l0 * np.linalg.inv(np.eye(d) - l0 * fy)
            point = y - lead @ z
        m = predicted - k @ z
        xi = np.eye(n * d) - k @ h
        c = xi @ predicted_c @ xi.T
        full = np.asarray(jacobian(t, y))
        seen = explicit = e1 - full @ e0
        for _ in range(corrections - 1):
            seen = explicit + (full - fy) @ lead @ seen
        joseph = np.eye(n * d) - k @ seen
        p = joseph @ (phi @ p @ phi.T + process) @ joseph.T
        transported.append(p)
        zs.append(z), ss.append(s), means.append(m), covs.append(c), gammas.append(gamma)
    scale = np.ones(d)
    if not dynamic:
        squares = np.array([z**2 / np.diag(s) for z, s in zip(zs, ss, strict=True)])
        if vector:
            scale = squares.mean(axis=0)
        else:
            whitened = [z @ np.linalg.solve(s, z) / d for z, s in zip(zs, ss, strict=True)]
            scale = np.full(d, np.mean(whitened))
        gammas = [scale] * len(zs)
    root = np.kron(np.diag(np.sqrt(scale)), np.eye(n))
    r = Result()
    r.mean = np.array([x.reshape(d, n).T for x in means])  # (time, n, d)
    r.covariance = np.array([root @ x @ root.T for x in covs])
    r.transported = np.array([root @ x @ root.T for x in transported])
    r.std = np.sqrt(np.array([np.diag(x)[::n] for x in r.covariance]))
    r.diffusion = np.array(gammas)
    calibrated = [np.diag(np.sqrt(scale)) @ s @ np.diag(np.sqrt(scale)) for s in ss]
    r.log_evidence = sum(
        -0.5 * (z @ np.linalg.solve(s, z) + np.linalg.slogdet(2 * np.pi * s)[1])
        for z, s in zip(zs, calibrated, strict=True)
    )
    return r


def unknown_major(covariance, n, d):
    """Reorder a derivative-major covariance as the oracle has it."""
    order = np.arange(n * d).reshape(n, d).T.reshape(-1)
    return covariance[np.ix_(order, order)]


def _solve(s, b):
    """S⁻¹ b with iterative refinement: neighbouring data are nearly the same, so S is nearly singular."""
    x = np.zeros_like(b)
    for _ in range(3):
        x = x + np.linalg.solve(s.astype(float), (b - s @ x).astype(float))
    return x


class LinearPosterior:
    """Exact Gaussian-process conditioning for y' = A y + g(t): one joint Gaussian over all times.

    All states are in internal time, unknown-major. The prior starts from exact derivatives, the data are zero
    residuals at grid[1:], and step k has the diffusion gammas[k] (γ², one per unknown). ``process(ν, h, i)``
    gives the transition of unknown i, an integrated Wiener process by default; ``space`` correlates unknowns.
    """

    def __init__(self, a, g, derivatives, grid, extra, gammas, process=None, space=None):
        n, d = derivatives.shape
        self.n, self.d = n, d
        self.times = np.union1d(grid, extra)
        self.index = {t: i for i, t in enumerate(self.times)}
        size, count = n * d, self.times.size
        mean = [derivatives.T.reshape(-1)]
        cov = np.zeros((count * size, count * size), np.longdouble)
        step = np.clip(np.searchsorted(grid, self.times[1:], side="left") - 1, 0, len(gammas) - 1)
        for i, (t_old, t) in enumerate(pairwise(self.times)):
            process = process or (lambda nu, h, i: transition(nu, h))
            blocks = [process(n - 1, t - t_old, unknown) for unknown in range(d)]
            phi = block_diag(*(phi for phi, _ in blocks))
            noise = block_diag(*(g * sigma for g, (_, sigma) in zip(gammas[step[i]], blocks, strict=True)))
            if space is not None:
                noise = np.kron(gammas[step[i]][0] * space, blocks[0][1])
            mean.append(phi @ mean[-1])
            here, there = slice(i * size, (i + 1) * size), slice((i + 1) * size, (i + 2) * size)
            cov[there, : here.stop] = phi @ cov[here, : here.stop]
            cov[: here.stop, there] = cov[there, : here.stop].T
            cov[there, there] = phi @ cov[here, here] @ phi.T + noise
        mean = np.concatenate(mean)
        e0, e1 = (np.kron(np.eye(d), np.eye(n)[q : q + 1]) for q in (0, 1))
        rows = np.zeros((d * (len(grid) - 1), count * size))
        target = np.zeros(d * (len(grid) - 1))
        for k, t in enumerate(grid[1:]):
            i = self.index[t]
            rows[k * d : (k + 1) * d, i * size : (i + 1) * size] = e1 - a @ e0
            target[k * d : (k + 1) * d] = g(t)
        s = rows @ cov @ rows.T
        residual = rows @ mean - target
        gain = _solve(s, rows @ cov).T
        self.prior_variance = np.diag(cov).reshape(-1, n).max(axis=0).astype(float)
        self.mean = (mean - gain @ residual).reshape(count, d, n).astype(float)
        self.covariance = cov - gain @ s @ gain.T
        self.covariance = self.covariance.reshape(count, d, n, count, d, n).astype(float)
        self.log_evidence = -0.5 * float(
            residual @ _solve(s, residual) + np.linalg.slogdet(2 * np.pi * s.astype(float))[1]
        )

    def at(self, times):
        return np.array([self.index[t] for t in times])
