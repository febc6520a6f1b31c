"""What fits into memory: every large allocation is planned here, before any work is done."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from millipode.covariance import STRUCTURES
from millipode.filter.control import Controller
from millipode.filter.ensemble import Transported, TransportedError, kind_of
from millipode.linalg.fields import Field, dtype, size
from millipode.solvers import Solver

# Saving every step of an adaptive solve is planned for about this many steps.
TYPICAL_STEPS = 1000
# This many bytes are always available.
LITTLE = 2**20


class Needs(NamedTuple):
    """What a problem and a solver need, in bytes.

    Attributes:
        per_state: of a saved state of the filter, with the standard deviation of y and γ̂ if that is a field.
        per_smoothed: of the smoother's covariance in addition.
        per_marginal: of y alone, its standard deviation, and γ̂ if that is a field.
        members: of all ensemble members, while they are carried along.
        per_saved_members: of the ensemble of y at one saved time.
        working: of a step, where that is much more than the state.
    """

    per_state: int
    per_smoothed: int
    per_marginal: int
    members: int
    per_saved_members: int
    working: int

    @classmethod
    def of(
        cls, y0: Field, solver: Solver, order: int, uncertainty: Transported | TransportedError | None
    ) -> "Needs":
        """Those of a state like y0."""
        d, n, item = size(y0), order + 1, dtype(y0).itemsize
        storage = STRUCTURES[solver.structure].storage(d, n, solver.components)
        # With one γ per unknown, standard deviations are fields in every structure; γ is saved if dynamic.
        per_unknown = solver.diffusion.vector
        marginal = d * (1 + solver.diffusion.is_dynamic) if per_unknown else storage.std
        members = 0 if uncertainty is None else uncertainty.members * d * kind_of(y0).itemsize
        return cls(
            per_state=(n * d + storage.root + marginal) * item,
            per_smoothed=storage.smoothed * item,
            per_marginal=(d + marginal) * item,
            members=n * members,
            per_saved_members=_saved(uncertainty, members, item),
            working=storage.working * item,
        )

    def per_step(self, smooth: bool | str) -> int:
        """Of one step with ``save="steps"``."""
        if smooth == "recompute":
            return self.per_marginal
        return self.per_state + self.per_saved_members + (self.per_smoothed if smooth else 0)


def _saved(uncertainty: Transported | TransportedError | None, members: int, item: int) -> int:
    """What is kept of errors at one saved time: all members, or the size of a single estimate."""
    if uncertainty is None:
        return 0
    return members if isinstance(uncertainty, Transported) else item


def check_working(needs: Needs, y0: Field, solver: Solver, order: int) -> None:
    """Refuse a covariance that cannot fit."""
    if not fits(needs.working):
        raise ValueError(
            f"A {solver.structure} covariance for {size(y0)} unknowns and order {order} needs about "
            f"{gigabytes(needs.working)}, and {gigabytes(available())} is available. Use mp.EK0 or "
            "mp.DiagonalEK1 with their default structure, which take O(d)."
        )


def check_members(needs: Needs, uncertainty: Transported, y0: Field, order: int, times: int) -> None:
    """Refuse an ensemble that cannot fit, or cannot be saved at this number of times."""
    if not fits(needs.members):
        raise ValueError(
            f"{uncertainty.members} members of {size(y0)} unknowns and order {order} take "
            f"{gigabytes(needs.members)}, and {gigabytes(available())} is available. Use fewer members or "
            "a lower order."
        )
    kept = times * needs.per_saved_members
    if not fits(needs.members + kept):
        raise ValueError(
            f"{uncertainty.members} members at {times} times take {gigabytes(kept)}, and "
            f"{gigabytes(available())} is available. Save fewer times, or use fewer members."
        )


def budget_for_steps(needs: Needs, y0: Field, smooth: bool | str, steps: int, bounded: bool) -> int:
    """The memory (bytes) that records of ``save="steps"`` may use; refuses what cannot fit.

    Args:
        needs: of the problem.
        y0: the initial value.
        smooth: True, False or "recompute".
        steps: how many steps to plan for. If there are more, the solve stops with a status.
        bounded: whether steps are collected as they come; under a transformation, buffers have their full
            length.
    """
    per_step = needs.per_step(smooth)
    is_enough, budget = fits(2 * per_step * steps), max(LITTLE, available() // 2)
    if not is_enough:
        less = needs.per_marginal * steps
        cheaper = (
            f"smooth='recompute' ({gigabytes(less)}, and a second pass), "
            if bounded and needs.per_saved_members < needs.per_marginal and less <= budget
            else ""
        )
        raise ValueError(
            f"save='steps' stores {gigabytes(per_step)} per step for {size(y0)} unknowns; the "
            f"{steps} steps to be expected need {gigabytes(per_step * steps)}, and "
            f"{gigabytes(budget)} is available for them. Use save=times with the times that matter, "
            f"save='end', {cheaper}or bound the steps with max_steps."
        )
    # While the steps are collected, their smoothed covariances are still to come.
    recorded = needs.per_step(False) if smooth != "recompute" else per_step
    return budget * recorded // per_step


def expected_steps(controller: Controller, span: float, max_steps: int, bounded: bool) -> int:
    """How many steps to plan for."""
    if not bounded:
        return max_steps
    return min(max_steps, controller.expected_steps(span, TYPICAL_STEPS))


def fits(needed: int) -> bool:
    """Whether this many bytes are available; looked up again before the answer is no."""
    if needed <= LITTLE or needed <= available():
        return True
    _last.when = -math.inf
    return needed <= available()


def available() -> int:
    """The free memory of this machine, or of the container that the process runs in; in bytes.

    It is looked up at most once a second, because that takes longer than a small solve. Systems that do not
    say what is free are taken for empty.
    """
    now = time.monotonic()
    if not now - _last.when < 1:
        _last.when, _last.free = now, max(0, min([_free_on_machine(), *_free_in_groups()]))
    return _last.free


@dataclass
class _Look:
    """The last look at the free memory: when it was, and what it found."""

    when: float = -math.inf
    free: int = 0


_last = _Look()


def _free_on_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):  # not Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 8 * 2**30


def _free_in_groups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What is left of the limits of this process's control groups, in both versions of Linux's interface."""
    try:
        groups = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in groups:
        if controllers == "":
            folder, limit, used = root / path.lstrip("/"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder = root / "memory" / path.lstrip("/")
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A group inherits the limits of all groups around it; inside of a container, only the innermost are
        # seen.
        for place in (folder, *folder.parents):
            if place != root and root not in place.parents:
                break
            try:
                found.append(int((place / limit).read_text()) - _in_use(place, used))
            except (OSError, ValueError):  # no such group here, or no limit: "max"
                continue
    return found


def _in_use(group: Path, used: str) -> int:
    """What a group cannot give back: its caches of files are free for the asking."""
    total = int((group / used).read_text())
    lines = (group / "memory.stat").read_text().splitlines()
    caches = [
        int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "total_inactive_file")
    ]
    return total - max(caches, default=0)


def gigabytes(n: float) -> str:
    """A number of bytes, for messages."""
    return f"{n / 1e9:.3g} GB"
