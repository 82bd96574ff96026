"""``python -m tests.crash``: the matrix, or parts of it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.crash.matrix import Matrix, Outcome
from tests.crash.points import CELLS
from tests.crash.table import matrix

__all__ = ["main"]

_matrix: Matrix | None = None


def _run(number: int, seed: int, stripes: int) -> Outcome:
    """Run a cell on the servers of this process, which end with it."""
    global _matrix  # noqa: PLW0603 - one for each process of the pool
    _matrix = _matrix or Matrix(stripes)
    return _matrix.run(number, seed)


def numbers(text: str) -> list[int]:
    """Return the numbers of ``7``, ``1..10`` or ``3,5,8..10``."""
    chosen: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        chosen += range(int(first), int(last or first) + 1)
    return chosen


def main() -> int:
    """Run cells, print each as it ends and then the matrix; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--cells", type=numbers, help="7, 1..10 or 3,5,8..10; all unless given")
    parser.add_argument("--match", default="", help="only those whose description has this text")
    parser.add_argument("--seeds", type=numbers, default=[1], help="each cell once for each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of what was wrong")
    parser.add_argument("--stripes", type=int, default=1, help="rows that each budget has")
    parser.add_argument("--list", action="store_true", help="only list the cells")
    given = parser.parse_args()
    cells = [
        number
        for number in (range(len(CELLS)) if given.cells is None else given.cells)
        if given.match in str(CELLS[number])
    ]
    if given.list:
        _tell("\n".join(f"{number:4}  {CELLS[number]}" for number in cells))
        return 0
    began, outcomes = time.monotonic(), []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, given.jobs), mp_context=context) as pool:
        runs = [
            pool.submit(_run, number, seed, given.stripes)
            for seed in given.seeds
            for number in cells
        ]
        for run in as_completed(runs):
            outcomes.append(run.result())
            _tell(str(outcomes[-1]))
            _keep_logs(given.logs, outcomes[-1])
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    minutes = (time.monotonic() - began) / 60
    _tell(f"\n{matrix(outcomes)}\n")
    _tell(f"{len(outcomes)} cells, {wrong} wrong, {minutes:.1f} minutes, {given.jobs} at a time")
    return int(wrong > 0)


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _keep_logs(folder: Path | None, outcome: Outcome) -> None:
    if folder is not None and outcome.logs:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{outcome.number}-{outcome.seed}.log").write_text(f"{outcome}\n{outcome.logs}")
