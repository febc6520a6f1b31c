"""``millipode doctor``: information for a bug report."""

import os
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import millipode as mp
from millipode.paper.measuring import bandwidth, processor, versions

PACKAGES = (
    *("millipode", "jax", "jaxlib", "equinox", "jaxtyping", "numpy", "scipy"),
    *("matplotlib", "xarray", "h5netcdf", "zarr", "matfree", "typer", "tqdm"),
)


def report() -> dict[str, Any]:
    """Versions, devices, settings, memory, bandwidth, and whether a small problem is solved correctly."""
    total, available = memory()
    return {
        "versions": {"python": platform.python_version()} | versions(PACKAGES),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory [GB]": total,
        "memory available [GB]": available,
        "backend": jax.default_backend(),
        "devices": [str(device) for device in jax.devices()],
        "jax_enable_x64": bool(jax.config.read("jax_enable_x64")),
        "environment": {
            key: value for key, value in os.environ.items() if key.startswith(("XLA_", "JAX_", "OMP_"))
        },
        "bandwidth, triad [GB/s]": round(bandwidth(2**22, 5) / 1e9, 1),
        "self-test": check(),
    }


def memory() -> tuple[float | None, float | None]:
    """The total and the available memory in gigabytes; None if they are not known."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None, None
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
    found = [round(int(fields[key].split()[0]) / 1e6, 1) for key in ("MemTotal", "MemAvailable")]
    return found[0], found[1]


def check() -> str:
    """Solve y' = −y, and return "ok" or a description of the failure."""
    sol = mp.solve(lambda t, y: -y, jnp.ones(2), (0.0, 1.0), rtol=1e-4, save="end", throw=False)
    error = float(jnp.abs(sol.mean[-1] - jnp.exp(-1.0)).max())
    return "ok" if sol.success and error < 1e-3 else f"failed: {sol.message} Its error is {error:.1e}."


def as_text(found: dict[str, Any]) -> str:
    """The report as text, with one line per entry."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items()) or "nothing set"
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        lines.append(f"{key:<24}{value}")
    return "\n".join(lines)
