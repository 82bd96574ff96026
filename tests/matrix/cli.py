"""``python -m tests.matrix``: each cell, a table, and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from tests.matrix import pythons, servers
from tests.matrix.cells import (
    DEPENDENCIES,
    ROOT,
    Cell,
    OnPostgres,
    Result,
    python_cells,
    unreachable,
)

__all__ = ["NOTHING_TO_RUN", "main", "table"]

#: The exit status where there was no cell to run, which is neither well nor wrong.
NOTHING_TO_RUN = 3

_FOLDER = ROOT / "build" / "matrix"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix. Returns 1 where a cell failed, and `NOTHING_TO_RUN` where none could be."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--python", action="append", default=[], help="3.10, for instance")
    parser.add_argument("--deps", choices=DEPENDENCIES, action="append", default=[])
    parser.add_argument("--postgres", type=int, action="append", default=[])
    parser.add_argument("--only", choices=("python", "postgres"))
    parser.add_argument(
        "--ends",
        action="store_true",
        help="the oldest Python with the oldest dependencies, the newest with the newest",
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("-n", dest="processes", default="auto", help="processes, as of pytest")
    given = parser.parse_args(arguments)
    cells, missing = _cells(given)
    for one in missing:
        _say(f"left out: {one}")
    if given.list:
        for cell in cells:
            _say(cell.name)
        return 0
    results: list[tuple[Cell, Result]] = []
    for cell in cells:
        _say(f"{cell.name} …")
        results.append((cell, cell.run(given.processes)))
    _say(table([(cell.name, result) for cell, result in results]))
    if not results:
        return NOTHING_TO_RUN
    return int(any(result.problem for _, result in results))


def _cells(given: argparse.Namespace) -> tuple[list[Cell], list[str]]:
    """Return what is to be run, and what was asked for and is not here."""
    cells: list[Cell] = []
    missing: list[str] = []
    supported = pythons.supported(ROOT)
    if given.only != "postgres" and not (given.postgres and not given.python):
        wanted = [one for one in supported if not given.python or pythons.told(one) in given.python]
        here = pythons.present(wanted)
        missing += [
            f"Python {pythons.told(one)}, which is not here" for one in wanted if one not in here
        ]
        if not given.list and (problem := unreachable()):
            missing.append(f"each Python, as there is no index to install from ({problem})")
            here = {}
        ends = given.deps or list(DEPENDENCIES)
        if given.ends and here:
            oldest, newest = min(here), max(here)
            cells += python_cells({oldest: here[oldest]}, ["oldest"], _FOLDER)
            cells += python_cells({newest: here[newest]}, ["newest"], _FOLDER)
        else:
            cells += python_cells(here, ends, _FOLDER)
    if given.only != "python" and not given.ends and not (given.python and not given.postgres):
        majors = [one for one in servers.MAJORS if not given.postgres or one in given.postgres]
        found = servers.present(majors, _FOLDER / "postgres")
        missing += [
            f"PostgreSQL {one}, which cannot be had here" for one in majors if one not in found
        ]
        cells += [
            OnPostgres(name, _FOLDER / name, programs)
            for major, programs in found.items()
            for name in (f"postgres{major}",)
        ]
    return cells, missing


def table(results: Iterable[tuple[str, Result]]) -> str:
    """Return the results in rows, and under them what failed."""
    results = list(results)
    width = max((len(name) for name, _ in results), default=4)
    rows = [f"{'cell':<{width}}  result  passed  failed  skipped  seconds  with"]
    for name, one in results:
        verdict = "FAILED" if one.problem else "ok"
        rows.append(
            f"{name:<{width}}  {verdict:<6}{one.passed:>8}{len(one.failed):>8}{one.skipped:>9}"
            f"{one.seconds:>9.0f}  {one.what}"
        )
    for name, one in results:
        if one.problem:
            rows += ["", f"{name}: {one.problem}", *(f"  {test}" for test in one.failed)]
    return "\n".join(["", *rows])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
