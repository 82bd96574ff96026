"""The matrix as text: a row for each step and moment, a column for each broker and victim."""

from __future__ import annotations

from collections.abc import Iterable

from tests.crash.matrix import Outcome
from tests.crash.points import BROKERS, CELLS, STEPS, Cell

__all__ = ["matrix"]

VICTIMS = ("process", "main", "machine", "store", "broker")
WIDTH = 8


def matrix(outcomes: Iterable[Outcome]) -> str:
    """Return the matrix: ``ok``, ``WRONG``, or how many of several seeds were; a dot is not run.

    Blank is what cannot be.
    """
    told: dict[Cell, list[bool]] = {cell: [] for cell in CELLS}
    for outcome in outcomes:
        told[CELLS[outcome.number]].append(not outcome.problems)
    left = max(len(f"{step.name}, {when}") for step in STEPS for when in step.whens) + 1
    above = "".join(f"{broker:<{WIDTH * len(VICTIMS)}}" for broker in BROKERS)
    heads = "".join(f"{victim:<{WIDTH}}" for _ in BROKERS for victim in VICTIMS)
    rows = [f"{'':{left}}{above}", f"{'':{left}}{heads}"]
    for step in STEPS:
        for when in step.whens:
            cells = [Cell(broker, step, when, who) for broker in BROKERS for who in VICTIMS]
            marks = "".join(f"{_mark(told.get(cell)):<{WIDTH}}" for cell in cells)
            rows.append(f"{f'{step.name}, {when}':{left}}{marks}")
    return "\n".join(row.rstrip() for row in rows)


def _mark(held: list[bool] | None) -> str:
    if held is None:
        return ""
    if not held:
        return "."
    if all(held):
        return "ok" if len(held) == 1 else f"ok x{len(held)}"
    return "WRONG" if len(held) == 1 else f"WRONG {held.count(False)}"
