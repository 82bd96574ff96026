"""The ledger at one look: balances, counts, drift, and whether it adds up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.core.budgets import Balance
from celery_budget.reconcile.proof import Reconciliation, prove
from celery_budget.reconcile.terms import balance_as_dict
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, budgets, reports

__all__ = ["Drift", "Report", "report"]


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
    return Report(balances, counts, drift, prove(connection, root))
