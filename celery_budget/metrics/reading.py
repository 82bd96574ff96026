"""What is read of the ledger for a scrape, all of it at one moment.

But for what has been added up since the ledger began, which takes longer the longer that is: a
reading may take that from one before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from celery_budget.core.budgets import Balance
from celery_budget.core.tallies import AMOUNTS, Figures, Key, add
from celery_budget.reconcile import Drift, LaneStanding, Queued
from celery_budget.reconcile.figures import Amounts, Refusals, Waived
from celery_budget.reconcile.lanes import lane_standings_in
from celery_budget.reconcile.totals import MEASURED, Total, drifts
from celery_budget.reconcile.waiting import queued_in
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, budgets, figures, quarantine, relays, reports
from celery_budget.store.figures import Asked

__all__ = ["Reading", "Sums", "look"]

EVERYTHING = Asked()
#: The stage of refusals that were counted without one.
UNKNOWN = "(unknown)"


@dataclass(frozen=True)
class Sums:
    """What there was since the ledger began.

    :ivar stages: what became of requests, by stage.
    :ivar amounts: of what has ended, by budget.
    :ivar seconds: how long it took to add that up.
    """

    stages: Mapping[str, Total]
    drift: Sequence[Drift]
    amounts: Sequence[Amounts]
    refusals: Sequence[Refusals]
    waived: Sequence[Waived]
    seconds: float = 0.0


@dataclass(frozen=True)
class Reading:
    """The ledger at one look.

    :ivar relays: how long ago each relay was seen, in microseconds.
    :ivar quarantine_bound: how many requests that failed for good are kept.
    :ivar overdue_us: for how long the oldest due message has been waiting for a relay.
    :ivar first: the budgets that were made first, as many as have series of their own.
    """

    sums: Sums
    balances: Sequence[Balance]
    open_work: Mapping[str, int]
    overdue_us: int
    parked: Sequence[Queued]
    quarantine: Mapping[str, int]
    quarantine_bound: int
    relays: Sequence[int]
    lanes: Sequence[LaneStanding]
    first: Sequence[str]


def look(store: Store, settings: Settings, sums: Sums | None = None) -> Reading:
    """Read the ledger; locks nothing.

    :param sums: those of a reading before, to be taken over.
    """
    return store.read(_look, settings, sums)


def _look(connection: Connection, settings: Settings, sums: Sums | None) -> Reading:
    root = settings.root
    return Reading(
        _added_up(connection, root) if sums is None else sums,
        budgets.balances_of(connection, root),
        reports.open_work(connection, root),
        reports.overdue_us(connection, root),
        queued_in(connection, root),
        quarantine.count_by_reason(connection, root),
        settings.max_quarantine,
        [max(0, one.age_us) for one in relays.seen(connection, root)],
        lane_standings_in(connection, root),
        budgets.first_made(connection, root, settings.metrics_labels),
    )


def _added_up(connection: Connection, root: str) -> Sums:
    begun = time.monotonic()
    adding = _Adding()
    adding.gather(connection, root)
    return Sums(
        adding.stages,
        drifts(adding.measured, {}),
        adding.total.drawn(),
        [Refusals(*key, count) for key, count in adding.refused.items()],
        adding.waived,
        time.monotonic() - begun,
    )


class _Adding:
    """What is added up over all days, as a report does it by stage; nothing by day."""

    def __init__(self) -> None:
        self.stages: dict[str, Total] = {}
        self.measured: dict[tuple[str, str, str], Figures] = {}
        self.refused: dict[tuple[str, str], int] = {}
        self.waived: list[Waived] = []
        self.total = Total()

    def gather(self, connection: Connection, root: str) -> None:
        """Add up the tallies, what they lack, and what is open."""
        for key, found in figures.tallied(connection, root, EVERYTHING, owners=False):
            self._count(key, found)
        for key, found in figures.direct(connection, root, EVERYTHING):
            if key.budget:
                self.total.draw(key.budget, key.unit, {n: found[n] for n in AMOUNTS if n in found})
            elif not key.owner:
                self._count(key, found)
        for key, found in figures.opened(connection, root, EVERYTHING):
            self._count(key, found)
        for _, budget, unit, found in figures.amounts(connection, root, EVERYTHING):
            self.total.draw(budget, unit, found)
        for _, budget, stage, reason, count in figures.refused(connection, root, EVERYTHING):
            self.refused[budget, reason] = self.refused.get((budget, reason), 0) + count
            # Before days were counted it was not kept.
            self._stage(stage or UNKNOWN).refused += count
        for _, budget, stage, reason, count, amount in figures.waived(connection, root, EVERYTHING):
            self.waived.append(Waived(budget, stage, reason, count, amount))

    def _count(self, key: Key, found: Figures) -> None:
        add(self._stage(key.stage).figures, found)
        if MEASURED[0] in found:
            estimator = key.stage, key.estimator, key.estimator_version
            add(self.measured.setdefault(estimator, {}), found)

    def _stage(self, name: str) -> Total:
        return self.stages.setdefault(name, Total())
