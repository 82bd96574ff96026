"""The ledger at one look: balances, what became of requests, what that took, and what is open."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from celery_budget.core.budgets import Balance
from celery_budget.core.tallies import AMOUNTS, DAY_US, Figures, Key, add, day_of
from celery_budget.errors import InvalidReport
from celery_budget.reconcile.estimates import Drift
from celery_budget.reconcile.figures import Amounts, Day, Group, Refusals, Spread, Waived
from celery_budget.reconcile.terms import balance_as_dict
from celery_budget.reconcile.totals import (
    GROUPED_BY,
    LAST_US,
    STATES,
    Total,
    day_name,
    drifts,
    group_of,
    instant_name,
    named,
)
from celery_budget.reconcile.waiting import Queued, queued_in
from celery_budget.settings import Settings
from celery_budget.store import Connection, ReadFrom, Store, budgets, figures, reports
from celery_budget.store import quarantine as isolated
from celery_budget.store import relays as relay_rows
from celery_budget.store.figures import Asked
from celery_budget.store.relays import Seen
from celery_budget.store.windows import read_now

__all__ = ["GONE_SECONDS", "Asked", "RelaySeen", "Report", "relays", "relays_in", "report"]

#: A relay is seen every few seconds; one that was not for longer than this does not run any more.
GONE_SECONDS = 15
#: All that was ever admitted.
EVERYTHING = Asked()


@dataclass(frozen=True)
class RelaySeen:
    """A relay, as it was last seen.

    :ivar seconds: how long ago that was.
    :ivar sleeping: whether it waits to be told of the next message (PostgreSQL); otherwise it works
        or looks by itself.
    """

    host: str
    pid: int
    started_us: int
    seen_us: int
    seconds: float
    sleeping: bool

    @property
    def gone(self) -> bool:
        """Whether it does not run any more."""
        return self.seconds > GONE_SECONDS

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """The ledger at one look.

    :ivar at_us: when that was, by the ledger's clock, in microseconds since the epoch.
    :ivar counts: ``admitted`` requests, those ``refused`` and ``parked``, and of the admitted how
        many are in each state and carry each flag.
    :ivar drift: what estimators promised against what was used, shadows beside.
    :ivar open_work: requests that have not ended, by state; how many of them were cancelled while
        they ran; messages still due; parked work; results that have still to be stored.
    :ivar overdue_seconds: for how long the oldest due message has been waiting for a relay.
    :ivar since_us: only requests that were admitted from then on, in microseconds since the epoch;
        none for all.
    :ivar until_us: and before then.
    :ivar budget: only those that draw on this one.
    :ivar stage: only those of this one.
    :ivar by: by what the figures are grouped; see :data:`~.figures.GROUPINGS`.
    :ivar quarantine: how many messages are in quarantine, by reason; no reason without any.
    :ivar quarantine_bound: how many may be; none where that was not asked for.
    :ivar lanes: how many requests were admitted in each lane, by name.
    :ivar parked: how much waits for each budget that anything waits for.
    :ivar refusals: how often a budget was short, by budget and reason.
    :ivar waived: how often one would have refused what was admitted, since that is not enforced.
    :ivar amounts: of the requests that have ended, by budget.
    :ivar failures: by all of :data:`~.figures.FAILURES`.
    :ivar waits: from when a request was due to its first start.
    :ivar runs: of attempts, each by itself.
    :ivar groups: only with ``by``.
    :ivar days: the last days of the period, for plots.
    :ivar read_from: which server it was read from, and how far that is behind.
    """

    balances: tuple[Balance, ...]
    counts: dict[str, int]
    drift: tuple[Drift, ...] = ()
    relays: tuple[RelaySeen, ...] = ()
    open_work: dict[str, int] = field(default_factory=dict)
    overdue_seconds: int = 0
    since_us: int | None = None
    until_us: int | None = None
    budget: str | None = None
    stage: str | None = None
    by: str | None = None
    quarantine: dict[str, int] = field(default_factory=dict)
    quarantine_bound: int | None = None
    parked: tuple[Queued, ...] = ()
    lanes: dict[str, int] = field(default_factory=dict)
    refusals: tuple[Refusals, ...] = ()
    waived: tuple[Waived, ...] = ()
    amounts: tuple[Amounts, ...] = ()
    failures: dict[str, int] = field(default_factory=dict)
    waits: Spread = field(default_factory=Spread)
    runs: Spread = field(default_factory=Spread)
    groups: tuple[Group, ...] = ()
    days: tuple[Day, ...] = ()
    at_us: int = 0
    read_from: ReadFrom | None = None

    @property
    def quarantine_full(self) -> bool:
        """Whether requests that fail for good are not kept any more."""
        bound = self.quarantine_bound
        return bound is not None and sum(self.quarantine.values()) >= bound

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "at_us": self.at_us,
            "since_us": self.since_us,
            "until_us": self.until_us,
            "budget": self.budget,
            "stage": self.stage,
            "by": self.by,
            "budgets": [balance_as_dict(balance) for balance in self.balances],
            "counts": self.counts,
            "drift": [drift.as_dict() for drift in self.drift],
            "relays": [relay.as_dict() for relay in self.relays],
            "lanes": self.lanes,
            "quarantine": self.quarantine,
            "quarantine_full": self.quarantine_full,
            "parked": [queued.as_dict() for queued in self.parked],
            "refusals": [one.as_dict() for one in self.refusals],
            "waived": [one.as_dict() for one in self.waived],
            "amounts": [one.as_dict() for one in self.amounts],
            "failures": self.failures,
            "waits": self.waits.as_dict(),
            "runs": self.runs.as_dict(),
            "groups": [one.as_dict() for one in self.groups],
            "days": [one.as_dict() for one in self.days],
            "open": self.open_work,
            "overdue_seconds": self.overdue_seconds,
            "read_from": None if self.read_from is None else self.read_from.as_dict(),
        }


#: How many days are shown for plots, and of how many budgets at most what they were charged.
DAYS, PLOTTED = 31, 12


def report(
    store: Store,
    settings: Settings,
    asked: Asked = EVERYTHING,
    by: str | None = None,
    ago: tuple[int | None, int | None] = (None, None),
) -> Report:
    """Gather the report, all of it at one moment.

    :param by: one of :data:`~.figures.GROUPINGS`.
    :param ago: in place of either end of the period, how long before now that is, in microseconds.
    :raises UnknownBudget: where there is no such budget.
    :raises InvalidReport: where the period ends before it begins.
    """
    return store.read(_report, settings, asked, by, ago)


def _report(
    connection: Connection,
    settings: Settings,
    asked: Asked,
    by: str | None,
    ago: tuple[int | None, int | None],
) -> Report:
    root = settings.root
    now_us = read_now(connection)
    asked = _at(asked, ago, now_us)
    if asked.budget is None:
        balances = tuple(budgets.balances_of(connection, root))
    else:
        balances = (budgets.balance(connection, root, asked.budget),)
    sums = _Sums(asked, by, now_us)
    sums.gather(connection, root)
    sums.gather_days(connection, root, balances)
    groups = tuple(
        Group(name, one.counts(), one.failures(), one.drawn(), one.waits(), one.runs())
        for name, one in sorted(sums.groups.items())
    )
    total = sums.total
    parked = figures.parked_count(connection, root, asked)
    return Report(
        balances,
        total.counts(parked),
        drifts(sums.by_estimator, settings.drift_ceilings),
        relays_in(connection, root),
        reports.open_work(connection, root),
        reports.overdue_us(connection, root) // 1_000_000,
        asked.since_us,
        asked.until_us,
        asked.budget,
        asked.stage,
        by,
        isolated.count_by_reason(connection, root),
        settings.max_quarantine,
        tuple(
            one
            for one in queued_in(connection, root)
            if asked.budget is None or one.budget == asked.budget
        ),
        dict(sorted(sums.lanes.items())),
        tuple(Refusals(*key, number) for key, number in sorted(sums.refused.items())),
        tuple(Waived(*key, *sums.waived[key]) for key in sorted(sums.waived)),
        total.drawn(),
        total.failures(),
        total.waits(),
        total.runs(),
        groups,
        sums.days_of(balances),
        now_us,
    )


def _at(asked: Asked, ago: tuple[int | None, int | None], now_us: int) -> Asked:
    """Return what is asked for with its period in instants.

    :raises InvalidReport: where it ends before it begins.
    """
    ends = (asked.since_us, asked.until_us)
    since, until = (
        us if before is None else now_us - before for us, before in zip(ends, ago, strict=True)
    )
    # Nothing was, or will be, admitted out of these years.
    since, until = (None if us is None else min(max(0, us), LAST_US) for us in (since, until))
    last = now_us if until is None else until
    if since is not None and since >= last:
        raise InvalidReport(
            f"the period begins at {instant_name(since)} and ends at {instant_name(last)}; give "
            "one that begins before it ends, and before now"
        )
    return replace(asked, since_us=since, until_us=until)


class _Sums:
    """What is added up for a report: each request is looked at once, and counted all round."""

    def __init__(self, asked: Asked, by: str | None, now_us: int) -> None:
        self.total = Total()
        self.groups: dict[str, Total] = {}
        self.by_estimator: dict[tuple[str, str, str], Figures] = {}
        self.lanes: dict[str, int] = {}
        self.refused: dict[tuple[str, str], int] = {}
        self.waived: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._days: dict[int, Total] = {}
        self._asked, self._by = asked, by
        self._owners = by == "tenant" and asked.budget is None
        last = now_us if asked.until_us is None else asked.until_us - 1
        self._last = day_of(last)
        self._first = self._last - DAYS + 1

    def gather(self, connection: Connection, root: str) -> None:
        """Add up everything but the amounts of whole days, by day."""
        asked = self._asked
        for key, found in figures.tallied(connection, root, asked, self._owners):
            self._count(key, found)
        for key, found in figures.direct(connection, root, asked):
            if self._is_counted(key):
                self._count(key, found)
            if key.budget and asked.budget in (None, key.budget):
                self._draw(key, found)
        for key, found in figures.opened(connection, root, asked):
            self._count(key, found)
        columns = () if self._by is None else GROUPED_BY[self._by]
        for group, budget, unit, found in figures.amounts(connection, root, asked, columns):
            self.total.draw(budget, unit, found)
            if self._by is not None:
                self._group(named(self._by, group)).draw(budget, unit, found)
        for day, budget, stage, reason, number in figures.refused(connection, root, asked):
            self._refuse(day, budget, stage, reason, number)
        for _, budget, stage, reason, number, amount in figures.waived(connection, root, asked):
            before = self.waived.get((budget, stage, reason), (0, 0))
            self.waived[budget, stage, reason] = before[0] + number, before[1] + amount

    def gather_days(self, connection: Connection, root: str, balances: tuple[Balance, ...]) -> None:
        """Add up what some budgets were charged on each of the last days.

        Of those that have a limit the fullest, where they are too many for a plot.
        """
        self._plotted = _fullest(balances)
        since = self._first * DAY_US
        asked = replace(self._asked, since_us=max(since, self._asked.since_us or 0))
        for (day,), budget, unit, found in figures.amounts(
            connection, root, asked, ("day",), self._plotted
        ):
            self._day(day).draw(budget, unit, found)

    def days_of(self, balances: tuple[Balance, ...]) -> tuple[Day, ...]:
        """Return the last days, from the first of which there is anything to tell."""
        if not self._days:
            return ()
        limits = {
            one.budget: one.limit
            for one in balances
            if one.limit is not None and one.budget in self._plotted
        }
        found = []
        for day in range(min(self._days), self._last + 1):
            one = self._days.get(day, Total())
            drawn = tuple(amount for amount in one.drawn() if amount.budget in self._plotted)
            times = one.waits(), one.runs()
            found.append(
                Day(day_name(day), one.counts(), one.failures(), drawn, *times, limits=limits)
            )
        return tuple(found)

    def _is_counted(self, key: Key) -> bool:
        """Whether a key is the one by which each request is counted once, as it is asked for."""
        if self._asked.budget is not None:
            return key.budget == self._asked.budget
        return key.budget == "" and (key.owner != "") == self._owners

    def _count(self, key: Key, found: Figures) -> None:
        totals = [self.total]
        if self._by is not None:
            totals.append(self._group(group_of(key, self._by)))
        if key.day >= self._first:
            totals.append(self._day(key.day))
        for one in totals:
            add(one.figures, found)
        estimator = key.stage, key.estimator, key.estimator_version
        if "measured" in found:
            add(self.by_estimator.setdefault(estimator, {}), found)
        if key.lane:
            admitted = sum(found.get(state, 0) for state in STATES)
            self.lanes[key.lane] = self.lanes.get(key.lane, 0) + admitted

    def _draw(self, key: Key, found: Figures) -> None:
        drawn = {name: found[name] for name in AMOUNTS if name in found}
        self.total.draw(key.budget, key.unit, drawn)
        if self._by is not None:
            self._group(group_of(key, self._by)).draw(key.budget, key.unit, drawn)
        if key.day >= self._first:
            self._day(key.day).draw(key.budget, key.unit, drawn)

    def _refuse(self, day: int, budget: str, stage: str, reason: str, number: int) -> None:
        self.total.refused += number
        key = budget, reason
        self.refused[key] = self.refused.get(key, 0) + number
        if day >= self._first:
            self._day(day).refused += number
        # Of what else a refusal was only a sample is kept. Before days were counted there is none.
        if self._by == "tenant":
            self._group(budget).refused += number
        elif self._by == "stage" and stage:
            self._group(stage).refused += number
        elif self._by == "day" and day:
            self._group(day_name(day)).refused += number

    def _group(self, name: str) -> Total:
        return self.groups.setdefault(name, Total())

    def _day(self, day: int) -> Total:
        return self._days.setdefault(day, Total())


def _fullest(balances: tuple[Balance, ...]) -> list[str]:
    """Return the budgets whose days are told: of those with a limit first, and the fullest."""

    def full(one: Balance) -> tuple[bool, float, int]:
        taken = one.spent + one.reserved
        return one.limit is not None, taken / one.limit if one.limit else 0.0, taken

    return [one.budget for one in sorted(balances, key=full, reverse=True)[:PLOTTED]]


def relays(store: Store, settings: Settings) -> tuple[RelaySeen, ...]:
    """Return the relays that run, and those that ended without a word in the last hour."""
    return store.read(relays_in, settings.root)


def relays_in(connection: Connection, root: str) -> tuple[RelaySeen, ...]:
    """As :func:`relays`."""
    return tuple(map(_relay, relay_rows.seen(connection, root)))


def _relay(row: Seen) -> RelaySeen:
    # With a clock that was set back meanwhile nothing was seen in the future.
    seconds = round(max(0, row.age_us) / 1_000_000, 3)
    return RelaySeen(row.host, row.pid, row.started_us, row.seen_us, seconds, row.sleeping)
