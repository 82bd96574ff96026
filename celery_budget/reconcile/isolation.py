"""What is in quarantine: messages that could not be published, requests that failed for good."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.core.retries import TRACEBACK
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, quarantine

__all__ = [
    "Quarantined",
    "find_quarantined",
    "is_full",
    "of_request",
    "quarantined",
    "quarantined_in",
    "shown",
]

#: Reads of a message's envelope how its task's arguments are written, positional ones and others.
Arguments = Callable[[str], tuple[str | None, str | None]]


@dataclass(frozen=True)
class Quarantined:
    """A message in quarantine.

    :ivar quarantine_id: its id there.
    :ivar broker: the name of the broker it was for; empty for the application's own.
    :ivar reason: ``unroutable``, ``rejected``, ``oversize`` or ``undecodable``; of a request that
        failed: ``max_attempts``, ``retry_within``, ``terminal`` or ``failed``.
    :ivar error: what the broker said; the last error.
    :ivar failures: how often publishing it failed.
    :ivar budgeted: whether it drew on a budget, and does again when it is published.
    :ivar attempts: how often it ran; none for what could not be published.
    :ivar used: what it used of each budget, as it was charged when it ended; none as well.
    :ivar traceback: of the last error, where one is known.
    :ivar args: how Celery has written its task's positional arguments for people to read, cut where
        they are long; none where that is not known.
    :ivar kwargs: the same of those by name.
    """

    quarantine_id: str
    task_id: str
    task_name: str
    queue: str
    broker: str
    reason: str
    error: str
    failures: int
    quarantined_us: int
    budgeted: bool
    attempts: int | None = None
    used: dict[str, int] | None = None
    traceback: str | None = None
    args: str | None = None
    kwargs: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def quarantined(store: Store, settings: Settings, limit: int) -> list[Quarantined]:
    """Return what is in quarantine, the last first."""
    return store.read(quarantined_in, settings.root, limit)


def quarantined_in(
    connection: Connection, root: str, limit: int, containing: str = ""
) -> list[Quarantined]:
    """As :func:`quarantined`; only what has a text in a name or an id, where one is given."""
    return [shown(row) for row in quarantine.listed(connection, root, limit, containing)]


def is_full(store: Store, settings: Settings) -> bool:
    """Tell whether requests that fail for good are not kept any more."""
    counts = store.read(quarantine.count_by_reason, settings.root)
    return sum(counts.values()) >= settings.max_quarantine


def find_quarantined(
    store: Store, settings: Settings, some_id: str, read: Arguments
) -> Quarantined | None:
    """Return what has this id in quarantine, or the last one of the task with this id."""
    row = store.read(quarantine.find, settings.root, some_id)
    return None if row is None else shown(row, read)


def of_request(
    connection: Connection, root: str, task_id: str, reservation_id: uuid.UUID
) -> list[Quarantined]:
    """Return what a request has in quarantine, the first first."""
    return [shown(row) for row in quarantine.of_request(connection, root, task_id, reservation_id)]


def shown(row: quarantine.Row, read: Arguments = lambda envelope: (None, None)) -> Quarantined:
    """Return what a row of the quarantine shows.

    :param read: reads the arguments of its envelope, where that is among what was read of it.
    """
    values = {**row._mapping, "quarantine_id": str(row.quarantine_id)}
    envelope = values.pop("envelope", None)
    args, kwargs = (None, None) if envelope is None else read(envelope)
    error, begins, traceback = row.error.partition(TRACEBACK)
    return Quarantined(
        **values
        | {
            "budgeted": bool(row.budgeted),
            "used": None if row.used is None else json.loads(row.used),
            "error": error,
            "traceback": begins.lstrip() + traceback if begins else None,
            "args": args,
            "kwargs": kwargs,
        }
    )
