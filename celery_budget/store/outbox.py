"""The outbox: messages that are to be published, were, or must wait for an attempt to end."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import CLAIMABLE, ReserveRequest
from celery_budget.store.insert import AT_ONCE, insert_new
from celery_budget.store.schema import attempts, instant, now_us, outbox, reservations

__all__ = [
    "Due",
    "Silent",
    "claim_due",
    "drop",
    "enqueue",
    "enqueue_many",
    "forget",
    "make_due",
    "mark_published",
    "message_of",
    "prune",
    "republish",
    "reschedule",
    "silent",
    "take",
    "unblock",
]


@dataclass(frozen=True)
class Due:
    """A message a relay has taken.

    :ivar expired: whether its ``expires`` has passed by the database's clock.
    :ivar started: whether its reservation runs or has ended: it is a duplicate, or to be replayed.
    :ivar failures: how often publishing it failed before.
    """

    outbox_id: uuid.UUID
    reservation_id: uuid.UUID | None
    message: WireMessage
    expired: bool
    started: bool
    failures: int


def message_of(row: sa.Row[Any], due_us: int = 0) -> WireMessage:
    """Return the message that a row of the outbox, or a parked one, keeps."""
    return WireMessage(
        row.task_id,
        row.task_name,
        bytes(row.body),
        row.envelope,
        row.queue,
        due_us,
        row.expires_us,
    )


def enqueue(
    connection: Connection,
    root: str,
    message: WireMessage,
    *,
    state: str = "due",
    reservation_id: uuid.UUID | None = None,
    parent_id: uuid.UUID | None = None,
    retries: int = 0,
    after_attempt: int | None = None,
    delivered_us: int | None = None,
) -> bool:
    """Write a message; false where the reservation's attempt, or the parent, has it already.

    :param delivered_us: a worker has it already: it counts as published and is looked at again
        after this time.
    """
    delivered = delivered_us is not None
    # What is due at once is due now, not before all that has waited for its time.
    due: Any = now_us() if message.due_us == 0 else message.due_us
    return insert_new(
        connection,
        outbox,
        root=root,
        outbox_id=new_id(),
        reservation_id=reservation_id,
        parent_id=parent_id,
        task_id=message.task_id,
        task_name=message.task_name,
        retries=retries,
        state="published" if delivered else state,
        after_attempt=after_attempt,
        due_us=due if delivered_us is None else now_us() + delivered_us,
        expires_us=message.expires_us,
        publishes=int(delivered),
        failures=0,
        created_us=now_us(),
        published_us=now_us() if delivered else None,
        queue=message.queue,
        body=message.body,
        envelope=message.envelope,
    )


def enqueue_many(
    connection: Connection,
    root: str,
    messages: Sequence[tuple[ReserveRequest, WireMessage]],
    delivered_us: int | None,
) -> None:
    """Write the messages of reservations that were just admitted; as :func:`enqueue`, for each."""
    delivered = delivered_us is not None
    # One time for all, or that of each.
    now = sa.select(now_us()).scalar_subquery()
    timed = sa.bindparam("timed_us", type_=sa.BigInteger)
    due: Any = now + delivered_us if delivered else sa.case((timed == 0, now), else_=timed)
    statement = outbox.insert().values(
        due_us=due, created_us=now, published_us=now if delivered else None
    )
    connection.execute(
        statement.returning(outbox.c.retries),
        [
            {
                "root": root,
                "outbox_id": new_id(),
                "reservation_id": request.reservation_id,
                "task_id": message.task_id,
                "task_name": message.task_name,
                "retries": request.retries,
                "state": "published" if delivered else "due",
                "expires_us": message.expires_us,
                "publishes": int(delivered),
                "failures": 0,
                "queue": message.queue,
                "body": message.body,
                "envelope": message.envelope,
                **({} if delivered else {"timed_us": message.due_us}),
            }
            for request, message in messages
        ],
        execution_options=AT_ONCE,
    ).all()


def claim_due(connection: Connection, root: str, limit: int, hold_us: int) -> list[Due]:
    """Take up to ``limit`` due messages, oldest first; nobody else gets them for ``hold_us``.

    Locks those rows and skips what another relay is taking. A relay that dies gives them back
    when the time is over: the message may then be published twice, and is claimed once.
    """
    # A value and no EXISTS, for which PostgreSQL may read all that ever ended, of every root.
    started = (
        sa.select(reservations.c.state.not_in(CLAIMABLE))
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == outbox.c.reservation_id,
        )
        .scalar_subquery()
    )
    due = (
        sa.select(outbox.c.outbox_id, started.label("started"))
        .where(outbox.c.root == root, outbox.c.state == "due", outbox.c.due_us <= instant())
        .order_by(outbox.c.due_us, outbox.c.outbox_id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    taken = {row.outbox_id: row for row in connection.execute(due)}
    if not taken:
        return []
    rows = connection.execute(
        outbox.update()
        .where(outbox.c.root == root, outbox.c.outbox_id.in_(list(taken)))
        .values(due_us=now_us() + hold_us)
        .returning(outbox, (outbox.c.expires_us <= now_us()).label("expired"))
    ).all()
    order = {outbox_id: number for number, outbox_id in enumerate(taken)}
    return [
        Due(
            row.outbox_id,
            row.reservation_id,
            message_of(row),
            bool(row.expired),
            bool(taken[row.outbox_id].started),
            row.failures,
        )
        for row in sorted(rows, key=lambda row: order[row.outbox_id])
    ]


def mark_published(
    connection: Connection, root: str, published: Sequence[Due], again_us: int
) -> None:
    """Note that the broker has confirmed these messages.

    Locks their reservations by id, then the messages by id. Only ``reserved`` becomes
    ``published``: a worker may have been faster. A message that starts nothing in the ledger and
    is no attempt's successor is done with and goes.

    :param again_us: how long until a message that was never started is looked at again, for the
        first time; doubled with each time it is published.
    """
    held = sorted({due.reservation_id for due in published if due.reservation_id is not None})
    if held:
        mine = sa.and_(reservations.c.root == root, reservations.c.reservation_id.in_(held))
        connection.execute(
            sa.select(reservations.c.state)
            .where(mine)
            .order_by(reservations.c.reservation_id)
            .with_for_update()
        )
        connection.execute(
            reservations.update()
            .where(mine, reservations.c.state == "reserved")
            .values(state="published")
        )
    ids = [due.outbox_id for due in published]
    rows = sa.and_(outbox.c.root == root, outbox.c.outbox_id.in_(ids))
    connection.execute(
        sa.select(outbox.c.state).where(rows).order_by(outbox.c.outbox_id).with_for_update()
    )
    connection.execute(
        outbox.delete().where(rows, outbox.c.reservation_id.is_(None), outbox.c.parent_id.is_(None))
    )
    doubled = sa.case(
        *((outbox.c.publishes == count, again_us * 2**count) for count in range(12)),
        else_=again_us * 2**12,
    )
    connection.execute(
        outbox.update()
        .where(rows, outbox.c.state == "due")
        .values(
            state="published",
            publishes=outbox.c.publishes + 1,
            published_us=now_us(),
            due_us=now_us() + doubled,
            last_error=None,
        )
    )


def reschedule(
    connection: Connection,
    root: str,
    ids: Iterable[uuid.UUID],
    wait_us: int,
    error: str | None,
    failed: bool,
) -> None:
    """Give messages back that could not be published, to be tried in ``wait_us``.

    :param failed: whether it counts as the message's own failure, not the broker's.
    """
    rows = sa.and_(
        outbox.c.root == root, outbox.c.outbox_id.in_(sorted(ids)), outbox.c.state == "due"
    )
    connection.execute(
        sa.select(outbox.c.state).where(rows).order_by(outbox.c.outbox_id).with_for_update()
    )
    connection.execute(
        outbox.update()
        .where(rows)
        .values(
            # One time for all of them, so that they keep their order.
            due_us=sa.select(now_us() + wait_us).scalar_subquery(),
            failures=outbox.c.failures + int(failed),
            last_error=error,
        )
    )


@dataclass(frozen=True)
class Silent:
    """A published message whose time was over, and not started, when it was looked at."""

    outbox_id: uuid.UUID
    reservation_id: uuid.UUID
    task_id: str
    publishes: int


def _unstarted(root: str) -> sa.ColumnElement[bool]:
    return sa.and_(
        outbox.c.root == root,
        outbox.c.state == "published",
        outbox.c.due_us <= instant(),
        reservations.c.root == outbox.c.root,
        reservations.c.reservation_id == outbox.c.reservation_id,
        reservations.c.state.in_(("published", "waiting")),
    )


def silent(connection: Connection, root: str, limit: int) -> list[Silent]:
    """Return published messages whose time is over and whose attempt has not started.

    Locks nothing.
    """
    rows = connection.execute(
        sa.select(outbox.c.outbox_id, outbox.c.reservation_id, outbox.c.task_id, outbox.c.publishes)
        .where(_unstarted(root))
        .order_by(outbox.c.due_us)
        .limit(limit)
    )
    return [Silent(**row._mapping) for row in rows]


def republish(connection: Connection, root: str, seen: Silent) -> bool:
    """Publish a message again unless its attempt has started since it was ``seen``.

    One statement, locking the message; should a claim commit beside it, a worker gets a message
    that it ignores.
    """
    return bool(
        connection.execute(
            outbox.update()
            .where(_unstarted(root), outbox.c.outbox_id == seen.outbox_id)
            .values(state="due", due_us=now_us())
        ).rowcount
    )


def make_due(
    connection: Connection, root: str, reservation_id: uuid.UUID, retries: int, wait_us: int = 0
) -> bool:
    """Have the message of a reservation's attempt published (again) in ``wait_us``."""
    return bool(
        connection.execute(
            outbox.update()
            .where(
                outbox.c.root == root,
                outbox.c.reservation_id == reservation_id,
                outbox.c.retries == retries,
                outbox.c.state != "blocked",
            )
            .values(state="due", due_us=now_us() + wait_us)
        ).rowcount
    )


def unblock(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> int | None:
    """Free the message that waited for ``attempt`` to end; return its retries, none if none did.

    The message of the attempt that ended goes: its successor is the reservation's message now.
    """
    mine = sa.and_(outbox.c.root == root, outbox.c.reservation_id == reservation_id)
    retries = connection.execute(
        outbox.update()
        .where(mine, outbox.c.state == "blocked", outbox.c.after_attempt == attempt)
        .values(state="due")
        .returning(outbox.c.retries)
    ).scalar()
    if retries is not None:
        connection.execute(outbox.delete().where(mine, outbox.c.retries < retries))
    return retries


def take(
    connection: Connection, root: str, reservation_id: uuid.UUID, retries: int
) -> WireMessage | None:
    """Delete and return the message of a reservation's attempt; none where it is gone."""
    row = connection.execute(
        outbox.delete()
        .where(
            outbox.c.root == root,
            outbox.c.reservation_id == reservation_id,
            outbox.c.retries == retries,
        )
        .returning(outbox)
    ).first()
    return None if row is None else message_of(row)


def drop(connection: Connection, root: str, reservation_id: uuid.UUID) -> None:
    """Delete the messages of a reservation that has ended."""
    connection.execute(
        outbox.delete().where(outbox.c.root == root, outbox.c.reservation_id == reservation_id)
    )


def forget(connection: Connection, root: str, outbox_id: uuid.UUID) -> None:
    """Delete one message that has no reservation and will not be published."""
    connection.execute(
        outbox.delete().where(
            outbox.c.root == root,
            outbox.c.outbox_id == outbox_id,
            outbox.c.reservation_id.is_(None),
        )
    )


def prune(connection: Connection, root: str, limit: int) -> int:
    """Delete published messages without a reservation whose parent is closed.

    Until then they keep a replay of the parent from publishing them again.
    """
    parent_has_open_attempt = sa.exists().where(
        attempts.c.root == root,
        attempts.c.reservation_id == outbox.c.parent_id,
        attempts.c.lease_until_us.is_not(None),
    )
    parent_has_not_ended = sa.exists().where(
        reservations.c.root == root,
        reservations.c.reservation_id == outbox.c.parent_id,
        reservations.c.ended_us.is_(None),
    )
    ids = (
        connection.execute(
            sa.select(outbox.c.outbox_id)
            .where(
                outbox.c.root == root,
                outbox.c.state == "published",
                outbox.c.reservation_id.is_(None),
                ~parent_has_open_attempt,
                ~parent_has_not_ended,
            )
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        .scalars()
        .all()
    )
    if ids:
        connection.execute(
            outbox.delete().where(outbox.c.root == root, outbox.c.outbox_id.in_(ids))
        )
    return len(ids)
