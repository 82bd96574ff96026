"""What a dashboard shows first: budgets, lanes, what waits, relays; bounded, and at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_budget.core.budgets import Balance, Budget, most
from celery_budget.reconcile.isolation import Quarantined, quarantined_in
from celery_budget.reconcile.lanes import LaneStanding, lane_standings_in
from celery_budget.reconcile.reports import RelaySeen, relays_in
from celery_budget.reconcile.terms import balance_as_dict, budget_as_dict
from celery_budget.reconcile.waiting import ParkedRequest, Queued, parked_in, queued_in
from celery_budget.settings import Settings
from celery_budget.store import (
    Connection,
    ReadFrom,
    Store,
    budgets,
    quarantine,
    reports,
    windows,
)

__all__ = ["BudgetSeen", "Overview", "overview"]

#: Of what is parked or in quarantine so much less is read than of budgets: it says more.
LISTED = 10


@dataclass(frozen=True)
class BudgetSeen:
    """A budget, as it is declared and as it stands."""

    budget: Budget
    balance: Balance

    @property
    def soft_at(self) -> int | None:
        """The total at which new work stops; none for an unlimited budget."""
        limit = self.balance.limit
        return None if limit is None else most(limit, self.budget.soft_stop)

    @property
    def hard_at(self) -> int | None:
        """The total at which all work stops; none for an unlimited budget."""
        limit = self.balance.limit
        return None if limit is None else most(limit, self.budget.hard_stop)

    @property
    def overcommitted(self) -> bool:
        """Whether more is held and spent than its limit allows."""
        return self.balance.available is not None and self.balance.available < 0

    @property
    def full(self) -> bool:
        """Whether it takes no new work, however small: its limit or its soft stop is reached."""
        total = self.balance.reserved + self.balance.spent
        return self.soft_at is not None and total >= self.soft_at

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON: a balance, and more beside it."""
        return {
            **balance_as_dict(self.balance),
            "declared": budget_as_dict(self.budget),
            "soft_at": self.soft_at,
            "hard_at": self.hard_at,
            "overcommitted": self.overcommitted,
            "full": self.full,
        }


@dataclass(frozen=True)
class Overview:
    """A ledger at one look.

    :ivar at_us: when that was, in microseconds since the epoch, by the database's clock.
    :ivar budgets: by name; one page of them where that was asked for.
    :ivar found: how many there are on all pages, up to the limit.
    :ivar more_budgets: whether there are more than that.
    :ivar parked: the first of what waits for budget; how much there is of it says ``queued``.
    :ivar quarantine: the last of what is in quarantine; ``isolated`` counts all of it by reason.
    :ivar quarantine_bound: how much may be there.
    :ivar open_work: requests that have not ended, by state, and what else has still to be done.
    :ivar overdue_seconds: for how long the oldest due message has been waiting for a relay.
    :ivar read_from: which server it was read from, and how far that is behind.
    """

    at_us: int
    budgets: tuple[BudgetSeen, ...]
    found: int
    more_budgets: bool
    lanes: tuple[LaneStanding, ...]
    parked: tuple[ParkedRequest, ...]
    queued: tuple[Queued, ...]
    quarantine: tuple[Quarantined, ...]
    isolated: dict[str, int]
    quarantine_bound: int
    relays: tuple[RelaySeen, ...]
    open_work: dict[str, int]
    overdue_seconds: float
    read_from: ReadFrom | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        several = ("budgets", "lanes", "parked", "queued", "quarantine", "relays")
        return {
            "at_us": self.at_us,
            "found": self.found,
            "more_budgets": self.more_budgets,
            **{name: [one.as_dict() for one in getattr(self, name)] for name in several},
            "isolated": self.isolated,
            "quarantine_bound": self.quarantine_bound,
            "open_work": self.open_work,
            "overdue_seconds": self.overdue_seconds,
            "read_from": None if self.read_from is None else self.read_from.as_dict(),
        }


def overview(
    store: Store,
    settings: Settings,
    containing: str,
    state: str | None,
    limit: int,
    page: int | None,
    size: int,
) -> Overview:
    """Return how everything stands, all of it at one moment.

    :param limit: so many budgets are told at most, by name, and a tenth of what waits.
    :param page: tell only this page of them, from 1 on, of ``size`` budgets; the last one where
        there are fewer.
    """
    bound, wanted = settings.max_quarantine, (containing, state, limit, page, size)
    return store.read(_overview, settings.root, bound, *wanted)


def _overview(
    connection: Connection,
    root: str,
    quarantine_bound: int,
    containing: str,
    state: str | None,
    limit: int,
    page: int | None,
    size: int,
) -> Overview:
    names = budgets.names_of(connection, root, limit + 1, containing, state)
    known = names[:limit]
    if page is not None:
        last = max(0, len(known) - 1) // size
        begin = size * min(page - 1, last)
        known = known[begin : begin + size]
    lanes = lane_standings_in(connection, root)
    listed = max(1, limit // LISTED)
    return Overview(
        windows.read_now(connection),
        tuple(BudgetSeen(*one) for one in budgets.some_of(connection, root, known)),
        min(len(names), limit),
        len(names) > limit,
        tuple(one for one in lanes if containing.casefold() in one.lane.name.casefold()),
        tuple(parked_in(connection, root, listed, containing)),
        queued_in(connection, root),
        tuple(quarantined_in(connection, root, listed, containing)),
        quarantine.count_by_reason(connection, root),
        quarantine_bound,
        relays_in(connection, root),
        reports.open_work(connection, root),
        reports.overdue_us(connection, root) / 1_000_000,
    )
