"""What is parked: requests that wait for budget, and how many for each budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, queues

__all__ = ["ParkedRequest", "Queued", "find_parked", "parked", "parked_in", "queued", "queued_in"]


@dataclass(frozen=True)
class ParkedRequest:
    """One request that waits for budget.

    :ivar parked_id: its id there.
    :ivar budget: the budget that was short when it was last tried.
    :ivar reason: why; see :class:`~celery_budget.BudgetExceeded`.
    :ivar amount: how much more it needs of that budget.
    :ivar retries: whether it has run before, and this is its next attempt.
    :ivar created_us: since when it waits, in microseconds since the epoch.
    :ivar deadline_us: when it is given up.
    """

    parked_id: str
    task_id: str
    task_name: str
    owner: str
    request_id: str
    budget: str
    reason: str
    amount: int
    retries: bool
    created_us: int
    deadline_us: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Queued:
    """How much waits for one budget.

    :ivar requests: how many requests.
    :ivar oldest_seconds: for how long the oldest waits.
    """

    budget: str
    requests: int
    oldest_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def parked(store: Store, settings: Settings, limit: int) -> list[ParkedRequest]:
    """Return what is parked, budget by budget, in the order in which it is served."""
    return store.read(parked_in, settings.root, limit)


def parked_in(
    connection: Connection, root: str, limit: int, containing: str = ""
) -> list[ParkedRequest]:
    """As :func:`parked`; only what has a text in a name or an id, where one is given."""
    return [_shown(row) for row in queues.listed(connection, root, limit, containing)]


def find_parked(store: Store, settings: Settings, some_id: str) -> ParkedRequest | None:
    """Return what is parked by this id, or of the task with it; none where nothing is."""
    row = store.read(queues.find, settings.root, some_id)
    return None if row is None else _shown(row)


def _shown(row: queues.Row) -> ParkedRequest:
    values = dict(row._mapping)
    retries = values.pop("reservation_id") is not None
    return ParkedRequest(**values | {"parked_id": str(row.parked_id), "retries": retries})


def queued(store: Store, settings: Settings) -> tuple[Queued, ...]:
    """Return for each budget how much waits for it; no budget that nothing waits for."""
    return store.read(queued_in, settings.root)


def queued_in(connection: Connection, root: str) -> tuple[Queued, ...]:
    """As :func:`queued`."""
    return tuple(
        Queued(row.budget, row.requests, round(max(0, row.now_us - row.oldest_us) / 1_000_000, 3))
        for row in queues.by_budget(connection, root)
    )
