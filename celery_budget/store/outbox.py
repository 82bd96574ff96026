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
from celery_budget.core.reservations import ReserveRequest
from celery_budget.store import advisory, shares
from celery_budget.store.drivers import is_lent
from celery_budget.store.insert import Value, insert_many, insert_new
from celery_budget.store.schema import (
    IS_HELD,
    IS_KEPT,
    IS_UNPUBLISHED,
    attempts,
    now_us,
    outbox,
    reservations,
)
from celery_budget.store.waiting import feeding

#: How many messages of one order key are let go at a time, and how many keys by one statement.
FOLLOWERS = 100
KEYS_AT_ONCE = 100
#: How many messages that are kept are looked at, at a time, whether they may go.
KEPT_AT_ONCE = 1000

__all__ = [
    "Pruned",
    "columns_of",
    "delete",
    "drop",
    "drop_next",
    "enqueue",
    "enqueue_many",
    "enqueue_plain",
    "held",
    "let_follow",
    "lock_orders",
    "make_due",
    "message_of",
    "prune",
    "publishes",
    "take",
    "unblock",
    "wake",
    "wake_lane",
]


def message_of(row: sa.Row[Any], due_us: int = 0, left_us: int | None = None) -> WireMessage:
    """Return the message that a row of the outbox, or a parked one, keeps.

    :param left_us: how long until it expires, by the database's clock.
    """
    return WireMessage(
        row.task_id,
        row.task_name,
        bytes(row.body),
        row.envelope,
        row.queue,
        due_us,
        row.expires_us,
        row.rank,
        row.order_key,
        row.broker,
        left_us,
    )


def columns_of(message: WireMessage) -> dict[str, Any]:
    """Return a message's columns, but for the time it is due, in all tables that keep one."""
    return {
        "task_id": message.task_id,
        "task_name": message.task_name,
        "queue": message.queue,
        "expires_us": message.expires_us,
        "body": message.body,
        "envelope": message.envelope,
        "rank": message.rank,
        "order_key": message.order_key,
        "broker": message.broker,
    }


def enqueue(
    connection: Connection,
    root: str,
    message: WireMessage,
    *,
    state: str = "due",
    outbox_id: uuid.UUID | None = None,
    request: ReserveRequest | None = None,
    parent_id: uuid.UUID | None = None,
    after_attempt: int | None = None,
    delivered_us: int | None = None,
) -> bool:
    """Write a message; false where the reservation's attempt, or the parent, has it already.

    What a lane feeds is held until that lets it go.

    :param request: whose next attempt it starts; none for a message without a budget.
    :param outbox_id: its id, where the same call may be made again after a lost answer.
    :param delivered_us: a worker has it already: it counts as published and is looked at again
        after this time.
    """
    delivered = delivered_us is not None
    # What is due at once is due now, not before all that has waited for its time.
    due: Any = now_us() if message.due_us == 0 else message.due_us
    lock_orders(connection, root, [message])
    lane = feeding(root, message.queue)
    written: Any = "published" if delivered else state
    laned: dict[str, Any] = {}
    if request is not None:
        tenant = request.tenant or request.owner
        laned = {"lane": lane, "tenant": tenant, "weight": request.weight}
        if written == "due":
            written = _held_if(lane)
    inserted = insert_new(
        connection,
        outbox,
        **columns_of(message),
        **laned,
        root=root,
        outbox_id=outbox_id or new_id(),
        reservation_id=None if request is None else request.reservation_id,
        parent_id=parent_id,
        retries=0 if request is None else request.retries,
        state=written,
        after_attempt=after_attempt,
        due_us=due if delivered_us is None else now_us() + delivered_us,
        publishes=int(delivered),
        failures=0,
        created_us=now_us(),
        published_us=now_us() if delivered else None,
    )
    if state == "due" and not delivered and message.due_us == 0:
        wake(connection, root)
    return inserted


def _held_if(lane: Any) -> Any:
    """Return what stands in a statement for the state of a message that is due."""
    return sa.case((lane.is_(None), "due"), else_="held")


def held(root: str, reservation_id: uuid.UUID, retries: int) -> sa.Select[Any]:
    """Return what selects the message of a reservation's attempt where a lane holds it."""
    return sa.select(outbox.c.outbox_id).where(
        outbox.c.root == root,
        outbox.c.reservation_id == reservation_id,
        outbox.c.retries == retries,
        sa.text(IS_HELD),
    )


def lock_orders(connection: Connection, root: str, messages: Iterable[WireMessage]) -> None:
    """Until commit, keep others from writing messages with the same order keys.

    So that who writes first is seen first. On SQLite there is one writer anyway. Before any other
    lock, and in one order.
    """
    keys = {message.order_key for message in messages if message.order_key is not None}
    advisory.lock(connection, root, advisory.ORDER_KEYS, keys)


def wake(connection: Connection, root: str) -> None:
    """Have a relay that sleeps told at commit (PostgreSQL); elsewhere it looks by itself.

    Takes the rows of relays that sleep, passing by what is locked: of several that commit one tells
    them. A caller's transaction takes none.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.budget_wake(root, is_lent(connection))))


def wake_lane(connection: Connection, reservation: sa.Row[Any]) -> None:
    """Have a relay that sleeps told that a reservation's lane has room, if it has a lane."""
    if reservation.lane is not None:
        wake(connection, reservation.root)


def enqueue_many(
    connection: Connection,
    root: str,
    messages: Sequence[tuple[ReserveRequest, WireMessage]],
    delivered_us: int | None,
) -> None:
    """Write the messages of reservations that were just admitted; as :func:`enqueue`, for each.

    The caller holds the locks of their order keys.
    """
    if not messages:
        return
    delivered = delivered_us is not None
    # One time for all, or that of each.
    now = sa.select(now_us()).scalar_subquery()

    def made(value: Value) -> dict[str, Any]:
        lane = feeding(root, value("fed_queue"))
        timed = sa.func.coalesce(sa.func.nullif(value("timed_us"), 0), now)
        return {
            "due_us": now + delivered_us if delivered else timed,
            "created_us": now,
            "published_us": now if delivered else sa.literal(None, sa.BigInteger),
            "lane": lane,
            "state": sa.literal("published") if delivered else _held_if(lane),
        }

    insert_many(
        connection,
        outbox,
        [
            {
                "root": root,
                "outbox_id": new_id(),
                "reservation_id": request.reservation_id,
                "retries": request.retries,
                "fed_queue": message.queue,
                "timed_us": message.due_us,
                "publishes": int(delivered),
                "failures": 0,
                "tenant": request.tenant or request.owner,
                "weight": request.weight,
                **columns_of(message),
            }
            for request, message in messages
        ],
        (outbox.c.retries,),
        more={"fed_queue": sa.String(), "timed_us": sa.BigInteger()},
        made=made,
    )
    if not delivered and any(message.due_us == 0 for _, message in messages):
        wake(connection, root)


def enqueue_plain(
    connection: Connection,
    root: str,
    messages: Sequence[tuple[uuid.UUID, WireMessage, uuid.UUID | None]],
) -> None:
    """Write messages that draw on no budget, each with its id and its parent's reservation, if any.

    What the same call, or the parent, has written before is left as it is. The caller holds the
    locks of their order keys.
    """
    if not messages:
        return
    now = sa.select(now_us()).scalar_subquery()
    insert_many(
        connection,
        outbox,
        [
            {
                "root": root,
                "outbox_id": outbox_id,
                "parent_id": parent_id,
                "retries": 0,
                "state": "due",
                "publishes": 0,
                "failures": 0,
                **columns_of(message),
                "timed_us": message.due_us,
            }
            for outbox_id, message, parent_id in messages
        ],
        (outbox.c.retries,),
        more={"timed_us": sa.BigInteger()},
        made=lambda value: {
            "due_us": sa.func.coalesce(sa.func.nullif(value("timed_us"), 0), now),
            "created_us": now,
        },
        new=True,
    )
    wake(connection, root)


def make_due(
    connection: Connection, root: str, reservation_id: uuid.UUID, retries: int, wait_us: int = 0
) -> bool:
    """Have the message of a reservation's attempt published (again) in ``wait_us``.

    A relay that has published it, and was too slow to say so, says so no more. What a lane has let
    go keeps its place there; what it holds stays held.
    """
    return bool(
        connection.execute(
            outbox.update()
            .where(
                outbox.c.root == root,
                outbox.c.reservation_id == reservation_id,
                outbox.c.retries == retries,
                outbox.c.state != "blocked",
            )
            .values(
                state=sa.case((outbox.c.state == "held", "held"), else_="due"),
                due_us=now_us() + wait_us,
                taken_by=None,
                behind=False,
            )
        ).rowcount
    )


def publishes(connection: Connection, root: str, reservation_id: uuid.UUID, retries: int) -> int:
    """Return how often the message of a reservation's attempt was published; locks nothing."""
    found = connection.execute(
        sa.select(outbox.c.publishes).where(
            outbox.c.root == root,
            outbox.c.reservation_id == reservation_id,
            outbox.c.retries == retries,
        )
    ).scalar()
    return int(found or 0)


def unblock(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> int | None:
    """Free the message that waited for ``attempt`` to end; return its retries, none if none did.

    It is held where a lane feeds its queue.

    The message of the attempt that ended goes: its successor is the reservation's message now.
    """
    mine = sa.and_(outbox.c.root == root, outbox.c.reservation_id == reservation_id)
    retries = connection.execute(
        outbox.update()
        .where(mine, outbox.c.state == "blocked", outbox.c.after_attempt == attempt)
        .values(state=_held_if(outbox.c.lane))
        .returning(outbox.c.retries)
    ).scalar()
    if retries is not None:
        delete(connection, root, mine, outbox.c.retries < retries)
    return retries


def drop_next(connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int) -> None:
    """Delete the message that waits for ``attempt`` to end, if there is one."""
    delete(
        connection,
        root,
        outbox.c.reservation_id == reservation_id,
        outbox.c.state == "blocked",
        outbox.c.after_attempt == attempt,
    )


def take(
    connection: Connection, root: str, reservation_id: uuid.UUID, retries: int
) -> tuple[WireMessage, str | None] | None:
    """Delete and return the message of a reservation's attempt; none where it is gone.

    With whose share of a lane it counted to.
    """
    row = connection.execute(
        outbox.delete()
        .where(
            outbox.c.root == root,
            outbox.c.reservation_id == reservation_id,
            outbox.c.retries == retries,
        )
        .returning(outbox)
    ).first()
    if row is None:
        return None
    let_follow(connection, root, [row.order_key])
    return message_of(row), row.tenant


def unpublished(connection: Connection, root: str, reservation_id: uuid.UUID) -> WireMessage | None:
    """Return a reservation's message that was not published yet, the last one; locks nothing."""
    row = connection.execute(
        sa.select(outbox)
        .where(
            outbox.c.root == root,
            outbox.c.reservation_id == reservation_id,
            outbox.c.state != "published",
        )
        .order_by(outbox.c.retries.desc())
        .limit(1)
    ).first()
    return None if row is None else message_of(row)


def let_follow(connection: Connection, root: str, keys: Iterable[str | None]) -> None:
    """Let the next messages with these order keys be claimed: the first of each is never behind.

    Called in the transaction that publishes or deletes one of them, and holds its row. Locks those
    that follow, by id.
    """
    distinct = sorted({key for key in keys if key is not None})
    for first in range(0, len(distinct), KEYS_AT_ONCE):
        following = [
            sa.select(
                sa.select(outbox.c.outbox_id)
                .where(
                    outbox.c.root == root,
                    outbox.c.order_key == key,
                    sa.text(IS_UNPUBLISHED),
                )
                .order_by(outbox.c.created_us, outbox.c.outbox_id)
                .limit(FOLLOWERS)
                .subquery()
                .c.outbox_id
            )
            for key in distinct[first : first + KEYS_AT_ONCE]
        ]
        passed_by = (
            connection.execute(
                sa.select(outbox.c.outbox_id)
                .where(
                    outbox.c.root == root,
                    outbox.c.outbox_id.in_(sa.union_all(*following)),
                    outbox.c.behind,
                )
                .order_by(outbox.c.outbox_id)
                .with_for_update()
            )
            .scalars()
            .all()
        )
        if passed_by:
            connection.execute(
                outbox.update()
                .where(outbox.c.root == root, outbox.c.outbox_id.in_(passed_by))
                .values(behind=False)
            )


def drop(connection: Connection, root: str, reservation_id: uuid.UUID) -> None:
    """Delete the messages of a reservation that has ended; what follows them may be published.

    What one that a lane has let go did not use is given back to its tenant's share.
    """
    for row in delete(connection, root, outbox.c.reservation_id == reservation_id):
        if row.lane is not None and row.state in ("due", "published"):
            shares.give_back(connection, row)


def delete(
    connection: Connection, root: str, *which: sa.ColumnElement[bool]
) -> Sequence[sa.Row[Any]]:
    """Delete messages, and return what they were; what follows them may be published."""
    gone: list[sa.Row[Any]] = list(
        connection.execute(
            outbox.delete()
            .where(outbox.c.root == root, *which)
            .returning(
                outbox.c.root,
                outbox.c.outbox_id,
                outbox.c.reservation_id,
                outbox.c.order_key,
                outbox.c.state,
                outbox.c.lane,
                outbox.c.tenant,
                outbox.c.weight,
            )
        )
    )
    let_follow(connection, root, [row.order_key for row in gone if row.state != "published"])
    return gone


@dataclass(frozen=True)
class Pruned:
    """What one look at messages came to that are kept against a replay of their parent.

    :ivar count: how many were deleted.
    :ivar after: what is to be looked at next comes after this one; none where that was all.
    """

    count: int
    after: uuid.UUID | None

    def __bool__(self) -> bool:
        """Whether anything was deleted."""
        return self.count > 0


def prune(connection: Connection, root: str, limit: int, after: uuid.UUID | None = None) -> Pruned:
    """Delete up to ``limit`` published messages without a reservation whose parent is closed.

    Until then they keep a replay of the parent from publishing them again. Looks at the next
    :data:`KEPT_AT_ONCE`, by their ids, and reads no more, however many there are. Locks what it
    deletes, and skips what is locked.

    :param after: where the last look has ended; none to begin anew.
    """
    # Values and no EXISTS, for which PostgreSQL may read all that is open.
    parent_is_open = (
        sa.select(reservations.c.ended_us.is_(None))
        .where(reservations.c.root == root, reservations.c.reservation_id == outbox.c.parent_id)
        .scalar_subquery()
    )
    open_attempt = (
        sa.select(attempts.c.attempt)
        .where(
            attempts.c.root == root,
            attempts.c.reservation_id == outbox.c.parent_id,
            attempts.c.lease_until_us.is_not(None),
        )
        .limit(1)
        .scalar_subquery()
    )
    rows = connection.execute(
        sa.select(
            outbox.c.outbox_id,
            parent_is_open.label("parent_is_open"),
            open_attempt.label("open_attempt"),
        )
        .where(
            outbox.c.root == root,
            sa.text(IS_KEPT),
            sa.true() if after is None else outbox.c.outbox_id > after,
        )
        .order_by(outbox.c.outbox_id)
        .limit(KEPT_AT_ONCE)
    ).all()
    gone = [row.outbox_id for row in rows if not row.parent_is_open and row.open_attempt is None]
    more = rows[-1].outbox_id if len(rows) == KEPT_AT_ONCE else None
    if len(gone) > limit:
        gone = gone[:limit]
        more = gone[-1]
    if not gone:
        return Pruned(0, more)
    mine = (
        connection.execute(
            sa.select(outbox.c.outbox_id)
            .where(outbox.c.root == root, outbox.c.outbox_id.in_(gone), sa.text(IS_KEPT))
            .with_for_update(skip_locked=True)
        )
        .scalars()
        .all()
    )
    if mine:
        connection.execute(
            outbox.delete().where(outbox.c.root == root, outbox.c.outbox_id.in_(mine))
        )
    return Pruned(len(mine), more)
