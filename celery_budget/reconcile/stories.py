"""The life of one request, as far as the ledger knows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.reconcile import isolation
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, reports

__all__ = ["Story", "explain"]


@dataclass(frozen=True)
class Story:
    """The life of one request, as far as the ledger knows it."""

    reservation: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...]
    attempts: tuple[dict[str, Any], ...]
    usage: tuple[dict[str, Any], ...]
    effects: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def explain(store: Store, settings: Settings, some_id: str) -> list[Story]:
    """Return what is known of the requests with this task id, request id or reservation id."""
    return store.read(_explain, settings.root, some_id)


def _explain(connection: Connection, root: str, some_id: str) -> list[Story]:
    stories = []
    for row in reports.find_reservations(connection, root, some_id):
        parts = reports.story(connection, root, row.reservation_id)
        waits = {
            "parked": list(map(_plain, reports.find_parked(connection, root, row.task_id))),
            "quarantine": [
                one.as_dict()
                for one in isolation.of_request(connection, root, row.task_id, row.reservation_id)
            ],
        }
        stories.append(
            Story(
                {**_plain(row), **waits},
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
