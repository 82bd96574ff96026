"""Where something was read, in words."""

from __future__ import annotations

from celery_budget.reconcile import Report
from celery_budget.store import ReadFrom

__all__ = ["LATE_SECONDS", "replica_of", "replica_told"]

#: From so many seconds on relays look gone and leases over that are not.
LATE_SECONDS = 10.0


def replica_told(source: ReadFrom) -> str:
    """Return which replica it is, how far behind, and what of that is not to be believed."""
    if not source.follows:
        late = "which follows no other server: it was promoted, or is no replica"
    elif source.behind_seconds is None:
        late = "and nobody can tell how far it is behind"
    else:
        late = f"{source.behind_seconds:,.1f} s behind"
    said = f"read from a replica, {source.server}, {late}"
    if source.behind_seconds is None or source.behind_seconds >= LATE_SECONDS:
        said += (
            "; relays may run that look gone, and leases go on that look lapsed: '--primary' asks "
            "the ledger's own database"
        )
    return said


def replica_of(report: Report) -> str:
    """Return from which replica a report was read; nothing where it was the ledger itself."""
    source = report.read_from
    return replica_told(source) if source is not None and source.replica else ""
