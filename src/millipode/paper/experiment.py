"""An experiment is a list of data points, each measured once and remembered.

Points are kept in a file as soon as they are measured, so that a run that was interrupted goes on where it
was. What other versions or another machine have measured is not taken for what this one would.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millipode.paper.measuring import Claim, Row, processor, versions, write

Point = dict[str, Any]


class Experiment(NamedTuple):
    """One of the paper's figures.

    Attributes:
        name: on the command line, and of the files.
        question: which it answers.
        claimed: by the paper, in a line.
        points: all data points, given whether to be quick.
        measure: one of them, given the rows so far (a solver that has become too slow is not tried again) and
            a folder for what does not fit into a row.
        claims: what the rows say of the paper's claims and of ours.
        draw: the figure, given the folder.
    """

    name: str
    question: str
    claimed: str
    points: Callable[[bool], list[Point]]
    measure: Callable[[Point, Sequence[Row], Path], Row]
    claims: Callable[[Sequence[Row]], list[Claim]]
    draw: Callable[[Sequence[Row], Path], Any]


class Ledger:
    """Rows by their points, on disk."""

    def __init__(self, path: Path):
        self.path = path
        self.conditions = {"versions": versions(), "processor": processor(), "cores": os.cpu_count()}
        self.rows: dict[str, Row] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = _read(line)
                if entry is not None and entry["conditions"] == self.conditions:
                    self.rows[_key(entry["point"])] = entry["row"]

    def __contains__(self, point: Point) -> bool:
        return _key(point) in self.rows

    def __getitem__(self, point: Point) -> Row:
        return self.rows[_key(point)]

    def add(self, point: Point, row: Row) -> None:
        """Remember a row, for good."""
        # As it will be read again, so that a resumed run is no different.
        row = json.loads(json.dumps(row))
        self.rows[_key(point)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"point": point, "row": row, "conditions": self.conditions}
        with self.path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _read(line: str) -> Any:
    """An entry, or None for one that was cut off in the middle."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and {"point", "row", "conditions"} <= entry.keys() else None


def _key(point: Point) -> str:
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()


class Report(NamedTuple):
    """What came out: the tables as text, the claims, and where everything is."""

    text: str
    claims: list[Claim]
    picture: Path


def reproduce(
    experiment: Experiment, folder: Path, quick: bool, show: Callable[[int, int, str], None] | None = None
) -> Report:
    """Measure what is missing, and write PNG, JSON and Markdown.

    Args:
        experiment: which.
        folder: where to; what is measured already is taken from there.
        quick: whether a small version will do.
        show: told the number of points done, that of all, and what comes next.
    """
    name = f"{experiment.name}-quick" if quick else experiment.name
    workshop = folder / "points" / name
    ledger = Ledger(workshop / "points.jsonl")
    points = experiment.points(quick)
    rows: list[Row] = []
    for i, point in enumerate(points):
        if point not in ledger:
            if show is not None:
                show(i, len(points), label(point))
            ledger.add(point, experiment.measure(point, rows, workshop))
        rows.append(ledger[point])
    if show is not None:
        show(len(points), len(points), "drawing")
    claims = experiment.claims(rows)
    figure = experiment.draw(rows, workshop)
    question = f"{experiment.question} {experiment.claimed}"
    text = write(folder, name, question, rows, figure, claims)
    return Report(text, claims, folder / f"{name}.png")


def label(point: Point) -> str:
    """A point in a few words."""
    return ", ".join(f"{key} = {value}" if key in "dnμν" else str(value) for key, value in point.items())
