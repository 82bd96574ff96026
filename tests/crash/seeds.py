"""Which cells the tests run: the same ones for one seed."""

from __future__ import annotations

import os
import random

from tests.crash.points import CELLS

__all__ = ["chosen", "seed"]

#: Fixed, so that a change is judged by itself and not by the day; ``make crash-matrix`` runs all.
DEFAULT = 1


def seed() -> int:
    """Return the seed: ``CRASH_SEED``, or the fixed one."""
    return int(os.environ.get("CRASH_SEED") or DEFAULT)


def chosen(part: int, of: int, seed_: int | None = None) -> int:
    """Return the cell that a seed chooses in one of ``of`` equal parts of the path."""
    first, last = len(CELLS) * part // of, len(CELLS) * (part + 1) // of
    given = seed() if seed_ is None else seed_
    return random.Random(f"{given} {part}").randrange(first, last)
