"""What reports show: balances, counts, drift, one request's life, and whether the ledger adds up.

Builds data and prints nothing; :mod:`celery_budget.render` turns it into text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from celery_budget.core.budgets import Balance
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, budgets, repairs, reports
from celery_budget.store.balances import Key

__all__ = [
    "Drift",
    "Reconciliation",
    "Report",
    "Story",
    "balance_as_dict",
    "explain",
    "reconcile",
    "repair",
    "report",
]


@dataclass(frozen=True)
class Reconciliation:
    """Whether the ledger adds up.

    :ivar mismatches: one sentence for each thing that is wrong; empty where it adds up.
    :ivar open_work: requests that have not ended, by state; messages still due; parked work.
    :ivar overdue_seconds: for how long the oldest due message has been waiting for a relay.
    """

    mismatches: tuple[str, ...]
    open_work: dict[str, int]
    overdue_seconds: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. Work that is still open is not wrong."""
        return not self.mismatches

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "ok": self.ok,
            "mismatches": list(self.mismatches),
            "open": self.open_work,
            "overdue_seconds": self.overdue_seconds,
        }


@dataclass(frozen=True)
class Drift:
    """Estimated against actual of the settled requests of one stage and estimator."""

    stage: str
    estimator: str
    version: str
    requests: int
    estimated: int
    actual: int

    @property
    def ratio(self) -> float | None:
        """Actual over estimated; none where nothing was estimated."""
        return self.actual / self.estimated if self.estimated else None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**asdict(self), "ratio": None if self.ratio is None else round(self.ratio, 4)}


@dataclass(frozen=True)
class Report:
    """The ledger at one look.

    :ivar counts: ``admitted`` requests, those ``refused`` and ``parked``, and of the admitted how
        many are in each state and carry each flag.
    """

    balances: tuple[Balance, ...]
    counts: dict[str, int]
    drift: tuple[Drift, ...]
    reconciliation: Reconciliation

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "budgets": [balance_as_dict(balance) for balance in self.balances],
            "counts": self.counts,
            "drift": [drift.as_dict() for drift in self.drift],
            "reconciliation": self.reconciliation.as_dict(),
        }


def balance_as_dict(balance: Balance) -> dict[str, Any]:
    """Return a balance for JSON, amounts as exact integers."""
    return {**asdict(balance), "available": balance.available}


@dataclass(frozen=True)
class Story:
    """The life of one request, as far as the ledger knows it."""

    reservation: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...]
    attempts: tuple[dict[str, Any], ...]
    usage: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def reconcile(store: Store, settings: Settings) -> Reconciliation:
    """Check the ledger against itself, all of it at one moment."""
    return store.read(_reconcile, settings.root)


def _reconcile(connection: Connection, root: str) -> Reconciliation:
    found = [
        f"{_balance_name(row)} says {row.reserved} reserved and {row.spent} spent, "
        f"its lines add up to {row.lines_reserved} and {row.lines_spent}"
        for row in reports.mismatched_balances(connection, root)
    ]
    found += [
        f"{_balance_name(row)} says {row.reserved} reserved and {row.spent} spent, "
        + (
            f"its journal leads to {row.journal_reserved} and {row.journal_spent}"
            if row.complete
            else "and an entry of its journal is missing"
        )
        for row in reports.mismatched_journals(connection, root)
    ]
    found += [
        f"task {row.task_id} is {row.state} and its line on {row.budget!r} holds {row.reserved}, "
        f"used {row.used} and charged {row.settled}"
        for row in reports.mismatched_lines(connection, root)
    ]
    found += [
        f"task {row.task_id} used {row.used} of {row.budget!r} by its line and "
        f"{row.recorded} by its usage records"
        for row in reports.mismatched_usage(connection, root)
    ]
    found += [
        f"task {row.task_id} of {row.owner!r} is {row.state} and nothing will bring it to an end"
        for row in reports.unreachable(connection, root)
    ]
    return Reconciliation(
        tuple(found),
        reports.open_work(connection, root),
        reports.overdue_us(connection, root) // 1_000_000,
    )


def _balance_name(row: Any) -> str:
    if row.window_us == 0:
        return f"budget {row.budget!r}"
    began = datetime.fromtimestamp(row.window_us / 1_000_000, timezone.utc)
    return f"budget {row.budget!r} in its window from {began:%Y-%m-%dT%H:%M:%SZ}"


def repair(store: Store, settings: Settings) -> tuple[str, ...]:
    """Make every balance what its lines add up to; return a sentence for each that was not.

    Each in a transaction of its own, behind the balance's lock, with an entry in its journal. What
    is wrong between requests and their lines is not put right by this: nobody can know which of
    them is.
    """
    wrong = {
        Key(row.budget, row.window_us, row.stripe): row
        for find in (reports.mismatched_journals, reports.mismatched_balances)
        for row in store.read(find, settings.root)
    }
    done = []
    for key, row in sorted(wrong.items(), key=lambda one: one[0]):
        if store.run(repairs.rebuild, settings.root, key, "budget reconcile --repair"):
            done.append(f"{_balance_name(row)} was rebuilt from its lines")
    return tuple(done)


_STATES = ("reserved", "published", "running", "waiting", "settled", "released", "lost")


def report(store: Store, settings: Settings) -> Report:
    """Gather the report, all of it at one moment."""
    return store.read(_report, settings.root)


def _report(connection: Connection, root: str) -> Report:
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
    drift = tuple(
        Drift(
            row.stage,
            row.estimator,
            row.estimator_version,
            int(row.requests),
            int(row.estimated),
            int(row.actual),
        )
        for row in reports.drift(connection, root)
    )
    balances = tuple(budgets.balances_of(connection, root))
    return Report(balances, counts, drift, _reconcile(connection, root))


def explain(store: Store, settings: Settings, some_id: str) -> list[Story]:
    """Return what is known of the requests with this task id, request id or reservation id."""
    return store.read(_explain, settings.root, some_id)


def _explain(connection: Connection, root: str, some_id: str) -> list[Story]:
    stories = []
    for row in reports.find_reservations(connection, root, some_id):
        parts = reports.story(connection, root, row.reservation_id)
        parked = list(map(_plain, reports.find_parked(connection, root, row.task_id)))
        stories.append(
            Story(
                {**_plain(row), "parked": parked},
                **{name: tuple(map(_plain, rows)) for name, rows in parts.items()},
            )
        )
    if not stories:
        stories = [
            Story({**_plain(row), "state": "parked"}, (), (), (), ())
            for row in reports.find_parked(connection, root, some_id)
        ]
    return stories


def _plain(row: Any) -> dict[str, Any]:
    """Return a row as a dictionary of JSON's types."""
    return {
        name: value if isinstance(value, (int, float, bool, str, type(None))) else str(value)
        for name, value in row._mapping.items()
    }
