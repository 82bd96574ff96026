"""Tallying: what the sweep adds up, so that a report reads days and not requests.

A report is exact without it: what is not tallied yet it counts itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from celery_budget.settings import Settings
from celery_budget.store import Store, refusals, tallies

__all__ = ["Tallied", "run_once"]

#: How many requests are tallied in one transaction: their rows are locked for so long.
LIMIT = 1000
#: How long after its end a request is left alone: its worker closes it by then, and what is late by
#: a little has come.
AGE_US = 10_000_000
#: For how long one pass goes on at most; what is left is for the next one.
SECONDS = 2.0


@dataclass(frozen=True)
class Tallied:
    """What one pass did.

    :ivar requests: how many were tallied.
    :ivar folded: how many rows of refusals of days that are over were folded into others.
    :ivar more: whether more is left than a pass takes.
    """

    requests: int = 0
    folded: int = 0
    more: bool = False


def run_once(store: Store, settings: Settings, age_us: int = AGE_US) -> Tallied:
    """Tally what has ended, batch by batch, each in a transaction; several may run.

    :param age_us: only what ended at least that long ago.
    """
    until = time.monotonic() + SECONDS
    requests = 0
    more = True
    while more and time.monotonic() < until:
        done = store.run(tallies.roll, settings.root, LIMIT, age_us)
        requests += done
        more = done == LIMIT
    folded = store.run(refusals.fold, settings.root, LIMIT)
    return Tallied(requests, folded, more)
