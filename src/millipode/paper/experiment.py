"""An experiment is a list of data points, each measured once and stored.

Points are written to a file as soon as they are measured, so that an interrupted run continues where it
stopped. Points that were measured with other versions or on another processor are measured again.
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
        name: its name on the command line, and that of its files.
        question: the question that it answers.
        claimed: what the paper claims, in one line.
        points: returns all data points, or with ``quick`` those of a small version.
        measure: measures a point and returns its row, given the rows so far (so that a solver that has become
            too slow is not tried again) and a folder for data that does not fit into a row.
        claims: compares the rows with the claims of the paper and with our own.
        draw: draws the figure from the rows and the data in the folder.
    """

    name: str
    question: str
    claimed: str
    points: Callable[[bool], list[Point]]
    measure: Callable[[Point, Sequence[Row], Path], Row]
    claims: Callable[[Sequence[Row]], list[Claim]]
    draw: Callable[[Sequence[Row], Path], Any]


class Ledger:
    """The rows that have been measured, by their points, stored in a file.

    Args:
        path: the file; rows that were measured under other conditions are ignored.
    """

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
        """Add the row of a point, in memory and in the file."""
        # The row as it will be read from the file, so that a resumed run has the same values.
        row = json.loads(json.dumps(row))
        self.rows[_key(point)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"point": point, "row": row, "conditions": self.conditions}
        with self.path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _read(line: str) -> Any:
    """The entry in a line of the file; None if the line is incomplete."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and {"point", "row", "conditions"} <= entry.keys() else None


def _key(point: Point) -> str:
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()


class Report(NamedTuple):
    """The result of an experiment.

    Attributes:
        text: the tables, in Markdown.
        claims: the claims, with what was measured.
        picture: the path of the figure; the other files are beside it.
    """

    text: str
    claims: list[Claim]
    picture: Path


def reproduce(
    experiment: Experiment, folder: Path, quick: bool, show: Callable[[int, int, str], None] | None = None
) -> Report:
    """Measure the points that are missing, and write PNG, JSON and Markdown files.

    Args:
        experiment: the experiment.
        folder: the folder to write to; points that have been measured already are read from there.
        quick: whether to measure a small version only.
        show: called with the number of points done, the number of all points, and what comes next.
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
    """A short description of a point."""
    return ", ".join(f"{key} = {value}" if key in "dnμν" else str(value) for key, value in point.items())
