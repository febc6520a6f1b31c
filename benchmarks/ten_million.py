"""What does a step cost with ten million unknowns, in time and in memory?

Lorenz96, d = 10⁷, EK0(order=2), float64, 20 fixed steps, save="end".
Run: ``python benchmarks/ten_million.py`` (on Linux, where a process can ask for its peak memory).
"""

import re
import time
from pathlib import Path

import jax

import millipode as mp

STEPS = 20


def main() -> None:
    """Solve twice, the second time warm, and print."""
    jax.config.update("jax_enable_x64", True)
    problem = mp.problems.lorenz96(10**7)

    def solve(steps: int) -> float:
        start = time.perf_counter()
        sol = mp.solve(
            problem.f,
            problem.y0,
            (0.0, 1e-3 * steps),
            solver=mp.EK0(order=2),
            controller=mp.FixedStep(1e-3),
            save="end",
        )
        jax.block_until_ready(sol.mean)
        assert int(sol.stats.steps) == steps
        return time.perf_counter() - start

    solve(STEPS)
    status = Path("/proc/self/status").read_text()
    memory = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1e6
    # The difference of two warm solves is what the additional steps cost.
    long, short = (min(solve(n) for _ in range(3)) for n in (3 * STEPS, STEPS))
    print(f"resident memory at its highest  {memory:.2f} GB")
    print(f"a step                          {1e3 * (long - short) / (2 * STEPS):.0f} ms")
    print(f"{STEPS} steps and all around them     {short:.2f} s")


if __name__ == "__main__":
    main()
