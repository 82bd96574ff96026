"""Quarantine: what cannot go on by itself. It holds no budget and waits for somebody.

Messages that cannot be published, and those of requests that failed for good. What goes there ends
its reservation; to publish it all the same is a new admission.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

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
from celery_budget.core.retries import ENDED, Keep
from celery_budget.errors import RequestConflict, RequestEnding
from celery_budget.store import claims, outbox, parked, untold
from celery_budget.store.claims import Due
from celery_budget.store.continuations import again_request
from celery_budget.store.outbox import columns_of, message_of
from celery_budget.store.requests import reserve
from celery_budget.store.reservations import Lines, lock, release
from celery_budget.store.schema import attempts as attempts_table
from celery_budget.store.schema import now_us, quarantine, reservations
from celery_budget.store.schema import outbox as outbox_table

__all__ = [
    "UNPUBLISHABLE",
    "Row",
    "count_by_reason",
    "discard",
    "find",
    "isolate",
    "keep",
    "listed",
    "of_request",
    "requeue",
]

#: Why a reservation ends whose message went into quarantine.
UNPUBLISHABLE = "unpublishable"

Row = sa.Row[Any]

#: Returns the message of a reservation with the id that it has from now on.
Readdress = Callable[[WireMessage, uuid.UUID], WireMessage]


class Again(NamedTuple):
    """What there is to do for a request that has failed and runs again.

    :ivar message: returns its message as that of a first attempt.
    :ivar forget: called with its task's id when it is admitted, before that is committed: takes
        back the result that was stored. Where it raises nothing is changed.
    """

    message: Callable[[WireMessage], WireMessage] = lambda message: message
    forget: Callable[[str], None] = lambda task_id: None


#: Runs again what has failed as it is.
UNCHANGED = Again()


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
    row = None
    if due.reservation_id is not None:
        row = lock(connection, root, due.reservation_id)
        if row is None or row.state == "running" or row.state in TERMINAL:
            return False
    message = claims.lock_taken(connection, root, fence, due.outbox_id)
    if message is None:
        return False
    request: ReserveRequest | None = None
    if row is not None:
        request = again_request(connection, row, message.tenant)
        request = replace(request, finishing=row.attempts > 0)
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


def keep(
    connection: Connection,
    row: sa.Row[Any],
    attempts: int,
    of: Lines,
    charges: Mapping[int, int],
    why: Keep,
) -> bool:
    """Keep a copy of the present message of a request that ends now, having failed for good.

    The message itself stays in the outbox until its attempt is closed. False where there is none,
    or where quarantine is full: what is in it is kept, this is not. Of several at once each may be
    the last that fits. The caller holds the reservation's row, and ends it; locks nothing more.

    :param row: the reservation before its end.
    :param attempts: how often it ran.
    :param of: its lines, with what each was charged.
    """
    root = row.root
    kept = sa.select(quarantine.c.quarantine_id).where(quarantine.c.root == root).limit(why.bound)
    counted = sa.select(sa.func.count()).select_from(kept.subquery())
    message = connection.execute(
        sa.select(outbox_table).where(
            outbox_table.c.root == root,
            outbox_table.c.reservation_id == row.reservation_id,
            outbox_table.c.retries == row.retries,
            counted.scalar_subquery() < why.bound,
        )
    ).first()
    if message is None:
        return False
    used: dict[str, int] = {}
    for line in of:
        used[line.budget] = used.get(line.budget, 0) + charges[line.line]
    connection.execute(
        quarantine.insert().values(
            **columns_of(message_of(message)),
            root=root,
            quarantine_id=new_id(),
            request=parked.written(again_request(connection, row, message.tenant)),
            reservation_id=row.reservation_id,
            reason=why.reason,
            error=why.error,
            failures=message.failures,
            quarantined_us=now_us(),
            due_us=0,
            attempts=attempts,
            used=json.dumps(used),
        )
    )
    return True


def requeue(
    connection: Connection,
    root: str,
    some_id: str,
    readdress: Readdress,
    *,
    again: Again = UNCHANGED,
    lock_ms: int,
    bound: int | None,
) -> Reserved | Refused | Missing:
    """Publish a message of the quarantine again: what drew on a budget is admitted anew.

    The same request and message, but for the reservation's id. ``Refused``, and it stays where it
    is, where that does not fit. A message that drew on no budget just goes to the outbox, in place
    of the row that has kept a replay of its parent from writing it.

    Locks the row of the quarantine, the reservation that has ended, then as
    :func:`~celery_budget.store.requests.reserve`. Of two calls at once the second finds it gone.

    One that has failed begins anew: with no attempt, and no retry.

    :raises RequestConflict: where its request was admitted again meanwhile. Nothing was changed.
    :raises RequestEnding: where it has failed just now, and its result is still to be stored; of
        what drew on no budget, where its result is being stored.
    :raises OutboxFull, UnknownBudget, Unready: as by ``reserve``.
    """
    row = _lock(connection, root, some_id)
    if row is None:
        return Missing()
    message = message_of(row, row.due_us)
    if row.request is None:
        if untold.is_being_told(connection, root, row.task_id):
            raise RequestEnding(row.task_id)
        outbox.lock_orders(connection, root, [message])
        if row.parent_id is not None:
            claims.recall(connection, root, row.parent_id, row.task_id)
        outbox.enqueue(connection, root, message, parent_id=row.parent_id)
        _delete(connection, root, row.quarantine_id)
        untold.withdraw(connection, root, row.task_id)
        return Reserved(row.quarantine_id)
    if row.reservation_id is not None:
        # Before the balances: usage that comes late locks it first as well.
        lock(connection, root, row.reservation_id)
    before = parked.request_of(row)
    if before.deadline_us is not None and before.deadline_us == message.expires_us:
        message = replace(message, expires_us=None)
    request = _anew(connection, before)
    if row.reason in ENDED:
        _check_closed(connection, row)
        request, message = replace(request, retries=0), again.message(message)
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
        _note(connection, row, f"requeued as {request.reservation_id}")
        if row.reason in ENDED:
            again.forget(row.task_id)
    return admitted


def _check_closed(connection: Connection, row: sa.Row[Any]) -> None:
    """Check that nothing is left to do for the last attempt of what failed.

    :raises RequestEnding: where there is.
    """
    is_open = connection.execute(
        sa.select(attempts_table.c.attempt).where(
            attempts_table.c.root == row.root,
            attempts_table.c.reservation_id == row.reservation_id,
            attempts_table.c.lease_until_us.is_not(None),
        )
    ).first()
    if is_open is not None:
        raise RequestEnding(row.task_id)


def _anew(connection: Connection, request: ReserveRequest) -> ReserveRequest:
    """Return the request under an id of its own, as what was admitted under the first has ended.

    One that ran, and waited for a retry, keeps its request id: what it used was charged to that.
    Whoever has it run again does so in spite of its deadline.
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
        deadline_us=None,
        request_id=str(reservation_id) if ran else request.request_id,
    )


def discard(connection: Connection, root: str, some_id: str) -> bool:
    """Delete a message of the quarantine; false where there is none.

    Locks its row, then its reservation's, if that is there still.
    """
    row = _lock(connection, root, some_id)
    if row is None:
        return False
    _delete(connection, root, row.quarantine_id)
    _note(connection, row, "discarded")
    return True


def _note(connection: Connection, row: sa.Row[Any], what: str) -> None:
    """Add what became of a message to why its request ended, for whoever asks. Locks that."""
    reason = sa.func.coalesce(reservations.c.reason, row.reason)
    connection.execute(
        reservations.update()
        .where(
            reservations.c.root == row.root,
            reservations.c.reservation_id == row.reservation_id,
            reservations.c.ended_us.is_not(None),
        )
        .values(reason=reason.concat(f", {what}"))
    )


def listed(connection: Connection, root: str, limit: int, containing: str = "") -> list[Row]:
    """Return what is in quarantine, the last first. Locks nothing.

    :param containing: only what has this in a name or an id, in whatever case.
    """
    named = (quarantine.c.task_name, quarantine.c.task_id, quarantine.c.queue, quarantine.c.reason)
    found = [one.icontains(containing, autoescape=True) for one in named] if containing else []
    return list(
        connection.execute(
            _shown()
            .where(quarantine.c.root == root, *([sa.or_(*found)] if found else []))
            .order_by(quarantine.c.quarantine_id.desc())
            .limit(limit)
        )
    )


def find(connection: Connection, root: str, some_id: str) -> Row | None:
    """Return what has this id, or the last one of the task with this id. Locks nothing."""
    return connection.execute(
        _shown()
        .add_columns(quarantine.c.envelope)
        .where(quarantine.c.root == root, _named(some_id))
        .order_by(quarantine.c.quarantine_id.desc())
        .limit(1)
    ).first()


def of_request(
    connection: Connection, root: str, task_id: str, reservation_id: uuid.UUID
) -> list[Row]:
    """Return what a request has in quarantine, the first first. Locks nothing."""
    return list(
        connection.execute(
            _shown()
            .where(
                quarantine.c.root == root,
                quarantine.c.task_id == task_id,
                quarantine.c.reservation_id == reservation_id,
            )
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
        quarantine.c.attempts,
        quarantine.c.used,
        quarantine.c.quarantined_us,
        quarantine.c.request.is_not(None).label("budgeted"),
    )


def _lock(connection: Connection, root: str, some_id: str) -> sa.Row[Any] | None:
    """Lock and return the message with this id, or the last one of the task with this id."""
    return connection.execute(
        sa.select(quarantine)
        .where(quarantine.c.root == root, _named(some_id))
        .order_by(quarantine.c.quarantine_id.desc())
        .limit(1)
        .with_for_update()
    ).first()


def _named(some_id: str) -> sa.ColumnElement[bool]:
    named = quarantine.c.task_id == some_id
    with_id = _uuid(some_id)
    return named if with_id is None else named | (quarantine.c.quarantine_id == with_id)


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
