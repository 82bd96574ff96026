"""The ledger at one look: balances, counts, drift, and whether it adds up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from celery_budget.core.budgets import Balance
from celery_budget.reconcile.estimates import Drift, drifts
from celery_budget.reconcile.proof import Reconciliation, prove
from celery_budget.reconcile.terms import balance_as_dict
from celery_budget.reconcile.waiting import Queued, queued_in
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, budgets, reports
from celery_budget.store import quarantine as isolated
from celery_budget.store import relays as relay_rows
from celery_budget.store.relays import Seen

__all__ = ["RelaySeen", "Report", "relays", "report"]


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

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """The ledger at one look.

    :ivar counts: ``admitted`` requests, those ``refused`` and ``parked``, and of the admitted how
        many are in each state and carry each flag.
    :ivar quarantine: how many messages are in quarantine, by reason; no reason without any.
    :ivar quarantine_bound: how many may be; none where that was not asked for.
    :ivar lanes: how many requests were admitted in each lane, by name.
    :ivar parked: how much waits for each budget that anything waits for.
    """

    balances: tuple[Balance, ...]
    counts: dict[str, int]
    drift: tuple[Drift, ...]
    relays: tuple[RelaySeen, ...]
    reconciliation: Reconciliation
    quarantine: dict[str, int] = field(default_factory=dict)
    quarantine_bound: int | None = None
    parked: tuple[Queued, ...] = ()
    lanes: dict[str, int] = field(default_factory=dict)

    @property
    def quarantine_full(self) -> bool:
        """Whether requests that fail for good are not kept any more."""
        bound = self.quarantine_bound
        return bound is not None and sum(self.quarantine.values()) >= bound

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "budgets": [balance_as_dict(balance) for balance in self.balances],
            "counts": self.counts,
            "drift": [drift.as_dict() for drift in self.drift],
            "relays": [relay.as_dict() for relay in self.relays],
            "lanes": self.lanes,
            "quarantine": self.quarantine,
            "quarantine_full": self.quarantine_full,
            "parked": [queued.as_dict() for queued in self.parked],
            "reconciliation": self.reconciliation.as_dict(),
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
        _relays(connection, root),
        prove(connection, root),
        isolated.count_by_reason(connection, root),
        quarantine_bound,
        queued_in(connection, root),
        reports.by_lane(connection, root),
    )


def relays(store: Store, settings: Settings) -> tuple[RelaySeen, ...]:
    """Return the relays that run, and those that ended without a word in the last hour."""
    return store.read(_relays, settings.root)


def _relays(connection: Connection, root: str) -> tuple[RelaySeen, ...]:
    return tuple(map(_relay, relay_rows.seen(connection, root)))


def _relay(row: Seen) -> RelaySeen:
    # With a clock that was set back meanwhile nothing was seen in the future.
    seconds = round(max(0, row.age_us) / 1_000_000, 3)
    return RelaySeen(row.host, row.pid, row.started_us, row.seen_us, seconds, row.sleeping)
