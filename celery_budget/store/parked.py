"""Parked work: continuations that wait for budget and hold nothing new."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Line, ReserveRequest
from celery_budget.store import deadlines
from celery_budget.store.insert import insert_new
from celery_budget.store.outbox import columns_of
from celery_budget.store.schema import now_us, parked, reservations

__all__ = [
    "lock_parked",
    "of_task",
    "park",
    "parked_of",
    "request_of",
    "successor_of",
    "touch",
    "unpark",
    "waiting",
    "written",
]


def park(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    park_us: int,
    *,
    reservation_id: uuid.UUID | None = None,
    after_attempt: int | None = None,
) -> uuid.UUID:
    """Park a request, or with ``reservation_id`` the next attempt of one; a repeat changes nothing.

    :param park_us: how long it may wait, but not beyond the request's deadline.
    :param after_attempt: the attempt it follows.
    """
    parked_id = new_id()
    [request] = deadlines.fixed(connection, [request])
    message = deadlines.bounded(message, request.deadline_us)
    until: Any = now_us() + park_us
    if request.deadline_us is not None:
        until = sa.case((until < request.deadline_us, until), else_=request.deadline_us)
    inserted = insert_new(
        connection,
        parked,
        **columns_of(message) | {"task_id": request.task_id},
        root=request.root,
        parked_id=parked_id,
        reservation_id=reservation_id,
        after_attempt=after_attempt,
        owner=request.owner,
        request_id=request.request_id,
        nesting=request.nesting,
        retries=request.retries,
        request=written(request),
        created_us=now_us(),
        deadline_us=until,
        checked_us=0,
        due_us=message.due_us,
    )
    if inserted:
        return parked_id
    existing: uuid.UUID = connection.execute(
        sa.select(parked.c.parked_id).where(
            parked.c.root == request.root,
            parked.c.owner == request.owner,
            parked.c.task_id == request.task_id,
            parked.c.nesting == request.nesting,
            parked.c.retries == request.retries,
        )
    ).scalar_one()
    return existing


def waiting(connection: Connection, root: str, limit: int) -> list[sa.Row[Any]]:
    """Return parked work, what was looked at longest ago first. Locks nothing.

    ``over`` where its time has passed, unless the attempt it follows still runs.
    """
    return list(
        connection.execute(
            sa.select(
                parked.c.parked_id,
                parked.c.reservation_id,
                parked.c.task_id,
                sa.and_(
                    (parked.c.deadline_us <= now_us())
                    | sa.func.coalesce(parked.c.expires_us <= now_us(), sa.false()),
                    sa.func.coalesce(reservations.c.state, "") != "running",
                ).label("over"),
            )
            .outerjoin(
                reservations,
                sa.and_(
                    reservations.c.root == parked.c.root,
                    reservations.c.reservation_id == parked.c.reservation_id,
                ),
            )
            .where(parked.c.root == root)
            .order_by(parked.c.checked_us, parked.c.parked_id)
            .limit(limit)
        )
    )


def lock_parked(
    connection: Connection, root: str, parked_id: uuid.UUID, wait: bool = False
) -> sa.Row[Any] | None:
    """Lock and return one parked row; none where it is gone or another sweep is at it.

    The caller holds the row of the reservation it belongs to, if any.

    :param wait: wait for the other sweep.
    """
    return connection.execute(
        sa.select(parked)
        .where(parked.c.root == root, parked.c.parked_id == parked_id)
        .with_for_update(skip_locked=not wait)
    ).first()


def unpark(connection: Connection, root: str, parked_id: uuid.UUID) -> None:
    """Delete a parked row: it was admitted, or its time is over."""
    connection.execute(
        parked.delete().where(parked.c.root == root, parked.c.parked_id == parked_id)
    )


def touch(connection: Connection, root: str, parked_id: uuid.UUID) -> None:
    """Note that a parked row was looked at and did not fit: others come first now."""
    connection.execute(
        parked.update()
        .where(parked.c.root == root, parked.c.parked_id == parked_id)
        .values(checked_us=now_us())
    )


def successor_of(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> int | None:
    """Return the retries of the parked message that follows ``attempt``; none where none does."""
    return connection.execute(
        sa.select(parked.c.retries).where(
            parked.c.root == root,
            parked.c.reservation_id == reservation_id,
            parked.c.after_attempt == attempt,
        )
    ).scalar()


def parked_of(connection: Connection, root: str, reservation_id: uuid.UUID) -> uuid.UUID | None:
    """Return the parked row that holds a reservation's next attempt; none where it is not parked.

    The caller holds the reservation's row.
    """
    return connection.execute(
        sa.select(parked.c.parked_id).where(
            parked.c.root == root, parked.c.reservation_id == reservation_id
        )
    ).scalar()


def of_task(connection: Connection, root: str, task_id: str) -> uuid.UUID | None:
    """Return the parked row of a task that was written last; none without one. Locks nothing."""
    return connection.execute(
        sa.select(parked.c.parked_id)
        .where(parked.c.root == root, parked.c.task_id == task_id)
        .order_by(parked.c.created_us.desc())
        .limit(1)
    ).scalar()


def written(request: ReserveRequest) -> str:
    """Return a request in JSON, as parked work and quarantine keep it."""
    return json.dumps(asdict(request), default=str)


def request_of(row: sa.Row[Any]) -> ReserveRequest:
    """Return the request of a row that keeps one :func:`written`."""
    values = json.loads(row.request)
    # All that was parked continues something; the first release did not write it.
    values.setdefault("finishing", True)
    for name in ("reservation_id", "parent", "plan"):
        if values.get(name) is not None:
            values[name] = uuid.UUID(values[name])
    return ReserveRequest(**values | {"lines": tuple(Line(**line) for line in values["lines"])})
