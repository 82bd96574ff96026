"""Jobs: a request as those see it who have asked for it, by what the ledger knows.

``docs/jobs.md`` has all of it in one table, which a test compares with what is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery_budget.core.reservations import TERMINAL

__all__ = [
    "BY_OUTCOME",
    "BY_REASON",
    "CANCELLED",
    "ENDED",
    "EXPIRED",
    "FAILED",
    "GIVEN_UP",
    "PARKED",
    "QUARANTINED",
    "QUEUED",
    "RUNNING",
    "STATES",
    "SUCCEEDED",
    "Job",
    "job_state",
]

PARKED = "parked"
QUEUED = "queued"
RUNNING = "running"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"
EXPIRED = "expired"
QUARANTINED = "quarantined"

#: In the order in which a job may pass through them; the last five are its end.
STATES = (PARKED, QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED, QUARANTINED)
ENDED = (SUCCEEDED, FAILED, CANCELLED, EXPIRED, QUARANTINED)

#: What it came to by the outcome of its last attempt; none where another task has its result. Of
#: other outcomes another attempt was to follow, and the reason tells.
BY_OUTCOME: Mapping[str, str | None] = {
    "returned": SUCCEEDED,
    "raised": FAILED,
    "refused": FAILED,
    "ignored": CANCELLED,
    "replaced": None,
}

#: What it came to by the reason of an end without a run of its own. All others are failures.
BY_REASON: Mapping[str, str] = {
    "cancelled": CANCELLED,
    "revoked": CANCELLED,
    "ignored": CANCELLED,
    "expired": EXPIRED,
    "deadline": EXPIRED,
    "park_expired": EXPIRED,
    "wait_expired": EXPIRED,
    "not_claimed": SUCCEEDED,
}

#: Why a job expired whose stored result is a failure that says so; of others it is ``REVOKED``.
GIVEN_UP = ("park_expired", "wait_expired")


@dataclass(frozen=True)
class Job:
    """How a job stands.

    :ivar state: one of :data:`STATES`.
    :ivar reason: why it has ended, in the ledger's word, where that is no outcome of a run.
    :ivar progress: what the task has last set by ``update_state`` with a state of its own, while it
        runs: its ``meta``; none where there is none, or no result backend that knows.
    :ivar position: how many its lane lets go before it, of those that its tenant has there, a
        thousand at most; none where no lane holds it.
    :ivar usage: what it has used so far, in each unit.
    :ivar attempts: how often it has run.
    :ivar created: when it was admitted, or parked; as all times by the database's clock.
    :ivar started: when its first attempt started.
    :ivar deadline: when all of it is to be over.
    """

    task_id: str
    task_name: str
    owner: str
    state: str
    reason: str | None
    progress: Any
    position: int | None
    usage: Mapping[str, int]
    attempts: int
    created: datetime
    started: datetime | None
    ended: datetime | None
    deadline: datetime | None

    @property
    def has_ended(self) -> bool:
        """Whether its state is one that it keeps."""
        return self.state in ENDED


def job_state(
    state: str | None,
    reason: str | None = None,
    outcome: str | None = None,
    *,
    parked: bool = False,
    quarantined: bool = False,
) -> str | None:
    """Return the state of a job; none where only the result backend knows.

    That is where a task without a budget has taken its place.

    :param state: of its last reservation; none where it has none.
    :param reason: why that has ended.
    :param outcome: of its last attempt; none where there is none, or it runs.
    :param parked: whether it waits for budget.
    :param quarantined: whether what has ended is in quarantine.
    """
    if parked and state != "running":
        return PARKED
    if state == "running":
        return RUNNING
    if state not in TERMINAL:
        return QUEUED
    if quarantined:
        return QUARANTINED
    if state == "lost":
        return FAILED
    if state == "settled" and outcome is not None and outcome in BY_OUTCOME:
        return BY_OUTCOME[outcome]
    # What became of it in quarantine may be added to it.
    return BY_REASON.get((reason or "").split(",")[0], FAILED)
