"""The ledger at one look: balances, what became of requests, what that took, and what is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from celery_budget.core.budgets import Balance
from celery_budget.reconcile.estimates import Drift, drifts
from celery_budget.reconcile.figures import Amounts, Day, Group, Refusals, Spread
from celery_budget.reconcile.terms import balance_as_dict
from celery_budget.reconcile.waiting import Queued, queued_in
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, budgets, reports
from celery_budget.store import quarantine as isolated
from celery_budget.store import relays as relay_rows
from celery_budget.store.relays import Seen

__all__ = ["GONE_SECONDS", "RelaySeen", "Report", "relays", "relays_in", "report"]

#: A relay is seen every few seconds; one that was not for longer than this does not run any more.
GONE_SECONDS = 15


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
    :ivar amounts: of the requests that have ended, by budget.
    :ivar failures: by all of :data:`~.figures.FAILURES`.
    :ivar waits: from when a request was due to its first start.
    :ivar runs: of attempts, each by itself.
    :ivar groups: only with ``by``.
    :ivar days: the last days of the period, for plots.
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
    amounts: tuple[Amounts, ...] = ()
    failures: dict[str, int] = field(default_factory=dict)
    waits: Spread = field(default_factory=Spread)
    runs: Spread = field(default_factory=Spread)
    groups: tuple[Group, ...] = ()
    days: tuple[Day, ...] = ()

    @property
    def quarantine_full(self) -> bool:
        """Whether requests that fail for good are not kept any more."""
        bound = self.quarantine_bound
        return bound is not None and sum(self.quarantine.values()) >= bound

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
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
            "amounts": [one.as_dict() for one in self.amounts],
            "failures": self.failures,
            "waits": self.waits.as_dict(),
            "runs": self.runs.as_dict(),
            "groups": [one.as_dict() for one in self.groups],
            "days": [one.as_dict() for one in self.days],
            "open": self.open_work,
            "overdue_seconds": self.overdue_seconds,
        }


_STATES = ("planned", "reserved", "published", "running", "waiting", "settled", "released", "lost")


def report(store: Store, settings: Settings) -> Report:
    """Gather the report, all of it at one moment."""
    return store.read(_report, settings.root, settings.max_quarantine, settings.drift_ceilings)


def _report(
    connection: Connection, root: str, quarantine_bound: int, ceilings: Mapping[str, float]
) -> Report:
    raw = reports.counts(connection, root)
    states = {state: raw.get(f"state_{state}", 0) for state in _STATES}
    flags = {flag: raw[flag] for flag in ("over", "unmetered", "unreserved")}
    # What was given up before it was ever admitted is kept as released, for its story.
    states["released"] -= raw["given_up"]
    counts = {
        "admitted": sum(states.values()),
        "refused": raw["refused"],
        "parked": raw["parked"],
        "given_up": raw["given_up"],
        **states,
        **flags,
    }
    balances = tuple(budgets.balances_of(connection, root))
    return Report(
        balances,
        counts,
        drifts(connection, root, ceilings),
        relays_in(connection, root),
        reports.open_work(connection, root),
        reports.overdue_us(connection, root) // 1_000_000,
        quarantine=isolated.count_by_reason(connection, root),
        quarantine_bound=quarantine_bound,
        parked=queued_in(connection, root),
        lanes=reports.by_lane(connection, root),
    )


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
