"""Deliveries that came to their end before they claimed their attempt.

What they stood for has not started. All compare the delivery's retries with the reservation's: a
copy of a message whose turn is over changes nothing, nor does one whose attempt runs elsewhere.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import CLAIMABLE, Parked, Reserved, ReserveRequest
from celery_budget.store import outbox, parked, untold
from celery_budget.store.continuations import next_attempt
from celery_budget.store.reservations import lock, release
from celery_budget.store.schema import reservations

__all__ = ["end", "lost", "retry"]

#: Why a request ends whose process died before it claimed, and which is not to run again.
WORKER_LOST = "worker_lost"


def _unstarted(
    connection: Connection, root: str, reservation_id: uuid.UUID, task_id: str, retries: int
) -> sa.Row[Any] | None:
    """Lock the reservation; return its row where the delivery stands for its next attempt."""
    row = lock(connection, root, reservation_id)
    if (
        row is None
        or row.state not in CLAIMABLE
        or row.task_id != task_id
        or row.retries != retries
        # It has no message that could be delivered.
        or parked.is_held_back(connection, row)
    ):
        return None
    return row


def end(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    task_id: str,
    retries: int,
    reason: str,
    *,
    tell: bool = False,
) -> bool:
    """End a request whose task will not start: released, or settled at what earlier attempts used.

    False, and nothing changed, where the delivery does not stand for the reservation's next
    attempt, as where that runs, has ended or is another one. Locks the reservation, its balances,
    its messages; against a claim the one that locks the reservation first wins.

    :param tell: Celery stores no result of it: that is to be told.
    """
    if _unstarted(connection, root, reservation_id, task_id, retries) is None:
        return False
    release(connection, root, reservation_id, reason)
    if tell:
        untold.note(connection, root, task_id, reason, reservation_id)
    return True


def retry(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    retries: int,
    park_us: int,
) -> Reserved | Parked | None:
    """Write the message of a retry in place of a delivery's own, which has not claimed.

    None, and nothing changed, where the delivery does not stand for the reservation's next attempt.
    Locks the reservation, its balances, its messages.

    :param request: carries the reservation's own id and the retry's number.
    :param retries: the delivery's.
    """
    root, reservation_id = request.root, request.reservation_id
    row = _unstarted(connection, root, reservation_id, request.task_id, retries)
    if row is None:
        return None
    request = replace(request, deadline_us=row.deadline_us)
    outbox.take(connection, root, reservation_id, retries)
    connection.execute(
        reservations.update()
        .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
        .values(retries=request.retries, deliveries=0)
    )
    return next_attempt(connection, request, message, row.attempts, False, park_us)


def lost(
    connection: Connection,
    root: str,
    task_id: str,
    retries: int | None,
    again: bool,
    most: int,
    reservation_id: uuid.UUID | None = None,
    *,
    tell: bool = False,
) -> bool:
    """Bring on a request whose worker process died before it claimed the attempt.

    Locks its reservation, its balances, its messages. With ``again`` the message is published anew,
    unless it was published ``most`` times: what kills each process that gets it comes to its end.
    Otherwise the hold is given back. Nothing is done where it runs elsewhere or has ended. True,
    with ``again``, but where the request has ended here.

    :param retries: the delivery's, where they are known.
    :param reservation_id: only this request of the task.
    :param tell: note that its result is to be told, where it ends. Otherwise Celery stores it.
    """
    found = connection.execute(
        sa.select(reservations.c.reservation_id, reservations.c.retries).where(
            reservations.c.root == root,
            reservations.c.task_id == task_id,
            reservations.c.ended_us.is_(None),
            *([] if reservation_id is None else [reservations.c.reservation_id == reservation_id]),
        )
    ).first()
    if found is None:
        return again
    turn = found.retries if retries is None else retries
    row = _unstarted(connection, root, found.reservation_id, task_id, turn)
    if row is None:
        return again
    if again and outbox.publishes(connection, root, row.reservation_id, row.retries) < most:
        outbox.make_due(connection, root, row.reservation_id, row.retries)
        return True
    release(connection, root, row.reservation_id, WORKER_LOST)
    if tell:
        untold.note(connection, root, task_id, WORKER_LOST, row.reservation_id)
    return False
