"""Which cells the tests run: others each day, the same ones for one seed."""

from __future__ import annotations

import os
import random
import time

from tests.crash.points import CELLS

__all__ = ["chosen", "seed"]

#: When this process began; a run of the tests does not change its seed at midnight.
TODAY = int(time.time()) // 86_400


def seed() -> int:
    """Return the seed: ``CRASH_SEED``, or the day's."""
    return int(os.environ.get("CRASH_SEED") or TODAY)


def chosen(part: int, of: int, seed_: int | None = None) -> int:
    """Return the cell that a seed chooses in one of ``of`` equal parts of the path."""
    first, last = len(CELLS) * part // of, len(CELLS) * (part + 1) // of
    given = seed() if seed_ is None else seed_
    return random.Random(f"{given} {part}").randrange(first, last)
