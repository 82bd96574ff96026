"""Quarantine: messages that cannot be published. They hold no budget and wait for somebody.

A message that goes there ends its reservation; to publish it all the same is a new admission.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    TERMINAL,
    AlreadyReserved,
    Missing,
    Refused,
    Reserved,
    ReserveRequest,
)
from celery_budget.errors import RequestConflict
from celery_budget.store import claims, outbox, parked, untold
from celery_budget.store.claims import Due
from celery_budget.store.continuations import again_request
from celery_budget.store.outbox import columns_of, message_of
from celery_budget.store.requests import reserve
from celery_budget.store.reservations import lock, release
from celery_budget.store.schema import now_us, quarantine, reservations

__all__ = [
    "UNPUBLISHABLE",
    "Row",
    "count_by_reason",
    "discard",
    "isolate",
    "listed",
    "of_task",
    "requeue",
]

#: Why a reservation ends whose message went into quarantine.
UNPUBLISHABLE = "unpublishable"

Row = sa.Row[Any]

#: Returns the message of a reservation with the id that it has from now on.
Readdress = Callable[[WireMessage, uuid.UUID], WireMessage]


def isolate(
    connection: Connection, root: str, fence: uuid.UUID, due: Due, reason: str, error: str
) -> bool:
    """Move a message that cannot be published into quarantine; its reservation ends.

    One that never ran is ``released``, one that waited between attempts is settled at what it used;
    the result of its task is to be told, and what follows the message by its order key may be
    published. Of one without a reservation that follows an attempt a row stays in the outbox, so
    that a replay does not write it again.

    Locks the reservation, its balances, then the message. Against a claim the one that locks the
    reservation first wins. False, and nothing changed, where the task has been started or has
    ended, and where another relay has taken the message since.
    """
    request: ReserveRequest | None = None
    if due.reservation_id is not None:
        row = lock(connection, root, due.reservation_id)
        if row is None or row.state == "running" or row.state in TERMINAL:
            return False
        request = replace(again_request(connection, row), finishing=row.attempts > 0)
    message = claims.lock_taken(connection, root, fence, due.outbox_id)
    if message is None:
        return False
    connection.execute(
        quarantine.insert().values(
            **columns_of(message_of(message)),
            root=root,
            quarantine_id=new_id(),
            request=None if request is None else parked.written(request),
            reservation_id=due.reservation_id,
            parent_id=message.parent_id,
            reason=reason,
            error=error,
            failures=message.failures + 1,
            quarantined_us=now_us(),
            due_us=due.due_us,
        )
    )
    if due.reservation_id is None:
        claims.forget(connection, root, fence, due.outbox_id)
    else:
        release(connection, root, due.reservation_id, UNPUBLISHABLE)
    # Events start no task.
    if due.message.task_name:
        untold.note(connection, root, due.message.task_id, UNPUBLISHABLE, due.reservation_id)
    return True


def requeue(
    connection: Connection,
    root: str,
    some_id: str,
    readdress: Readdress,
    *,
    lock_ms: int,
    bound: int | None,
) -> Reserved | Refused | Missing:
    """Publish a message of the quarantine again: what drew on a budget is admitted anew.

    The same request and message, but for the reservation's id. ``Refused``, and it stays where it
    is, where that does not fit. A message that drew on no budget just goes to the outbox, in place
    of the row that has kept a replay of its parent from writing it.

    Locks the row of the quarantine, then as :func:`~celery_budget.store.requests.reserve`. Of two
    calls at once the second finds it gone.

    :raises RequestConflict: where its request was admitted again meanwhile. Nothing was changed.
    :raises OutboxFull, UnknownBudget, Unready: as by ``reserve``.
    """
    row = _lock(connection, root, some_id)
    if row is None:
        return Missing()
    message = message_of(row, row.due_us)
    if row.request is None:
        outbox.lock_orders(connection, root, [message])
        if row.parent_id is not None:
            claims.recall(connection, root, row.parent_id, row.task_id)
        outbox.enqueue(connection, root, message, parent_id=row.parent_id)
        _delete(connection, root, row.quarantine_id)
        untold.withdraw(connection, root, row.task_id)
        return Reserved(row.quarantine_id)
    request = _anew(connection, parked.request_of(row))
    admitted = reserve(
        connection,
        request,
        readdress(message, request.reservation_id),
        lock_ms=lock_ms,
        bound=bound,
    )
    if isinstance(admitted, AlreadyReserved):
        raise RequestConflict(request.request_id, request.owner, admitted.task_id)
    if isinstance(admitted, Reserved):
        _delete(connection, root, row.quarantine_id)
    return admitted


def _anew(connection: Connection, request: ReserveRequest) -> ReserveRequest:
    """Return the request under an id of its own, as what was admitted under the first has ended.

    One that ran, and waited for a retry, keeps its request id: what it used was charged to that.
    """
    reservation_id = new_id()
    ended: str | None = connection.execute(
        sa.select(reservations.c.state).where(
            reservations.c.root == request.root,
            reservations.c.reservation_id == request.reservation_id,
        )
    ).scalar()
    ran = ended is not None and ended != "released"
    return replace(
        request,
        reservation_id=reservation_id,
        request_id=str(reservation_id) if ran else request.request_id,
    )


def discard(connection: Connection, root: str, some_id: str) -> bool:
    """Delete a message of the quarantine; false where there is none. Locks its row."""
    row = _lock(connection, root, some_id)
    if row is None:
        return False
    _delete(connection, root, row.quarantine_id)
    return True


def listed(connection: Connection, root: str, limit: int) -> list[Row]:
    """Return what is in quarantine, the last first. Locks nothing."""
    return list(
        connection.execute(
            _shown()
            .where(quarantine.c.root == root)
            .order_by(quarantine.c.quarantine_id.desc())
            .limit(limit)
        )
    )


def of_task(connection: Connection, root: str, task_id: str) -> list[Row]:
    """Return the messages of a task in quarantine, the first first. Locks nothing."""
    return list(
        connection.execute(
            _shown()
            .where(quarantine.c.root == root, quarantine.c.task_id == task_id)
            .order_by(quarantine.c.quarantine_id)
        )
    )


def count_by_reason(connection: Connection, root: str) -> dict[str, int]:
    """Return how many messages are in quarantine, by reason. Locks nothing."""
    counted = connection.execute(
        sa.select(quarantine.c.reason, sa.func.count().label("messages"))
        .where(quarantine.c.root == root)
        .group_by(quarantine.c.reason)
        .order_by(quarantine.c.reason)
    )
    return {row.reason: row.messages for row in counted}


def _shown() -> sa.Select[Any]:
    return sa.select(
        quarantine.c.quarantine_id,
        quarantine.c.task_id,
        quarantine.c.task_name,
        quarantine.c.queue,
        quarantine.c.broker,
        quarantine.c.reason,
        quarantine.c.error,
        quarantine.c.failures,
        quarantine.c.quarantined_us,
        quarantine.c.request.is_not(None).label("budgeted"),
    )


def _lock(connection: Connection, root: str, some_id: str) -> sa.Row[Any] | None:
    """Lock and return the message with this id, or the last one of the task with this id."""
    named = quarantine.c.task_id == some_id
    with_id = _uuid(some_id)
    if with_id is not None:
        named = named | (quarantine.c.quarantine_id == with_id)
    return connection.execute(
        sa.select(quarantine)
        .where(quarantine.c.root == root, named)
        .order_by(quarantine.c.quarantine_id.desc())
        .limit(1)
        .with_for_update()
    ).first()


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def _delete(connection: Connection, root: str, quarantine_id: uuid.UUID) -> None:
    connection.execute(
        quarantine.delete().where(
            quarantine.c.root == root, quarantine.c.quarantine_id == quarantine_id
        )
    )
