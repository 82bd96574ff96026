"""The outbox: messages that are to be published, were, or must wait for an attempt to end."""

from __future__ import annotations

import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.identity import new_id
from celery_budget.core.messages import RANKS, WireMessage
from celery_budget.core.reservations import CLAIMABLE, ReserveRequest
from celery_budget.store.insert import AT_ONCE, insert_new
from celery_budget.store.schema import (
    IS_KEPT,
    IS_NEXT,
    IS_UNPUBLISHED,
    attempts,
    instant,
    now_us,
    outbox,
    reservations,
)

#: How many messages of one order key are let go at a time, and how many keys by one statement.
FOLLOWERS = 100
KEYS_AT_ONCE = 100

__all__ = [
    "Batch",
    "Due",
    "Silent",
    "claim_due",
    "columns_of",
    "drop",
    "enqueue",
    "enqueue_many",
    "enqueue_plain",
    "forget",
    "give_back",
    "lock_orders",
    "lock_taken",
    "make_due",
    "mark_published",
    "message_of",
    "prune",
    "republish",
    "reschedule",
    "silent",
    "take",
    "unblock",
    "wake",
]


@dataclass(frozen=True)
class Due:
    """A message a relay has taken.

    :ivar due_us: when it was due: it keeps its place where it is given back.
    :ivar expired: whether its ``expires`` has passed by the database's clock.
    :ivar started: whether its reservation runs or has ended: it is a duplicate, or to be replayed.
    :ivar failures: how often publishing it failed before.
    """

    outbox_id: uuid.UUID
    reservation_id: uuid.UUID | None
    message: WireMessage
    due_us: int
    expired: bool
    started: bool
    failures: int


@dataclass(frozen=True)
class Batch:
    """What a relay has taken at a time.

    :ivar fence: stands in its rows for as long as nobody else has taken them.
    :ivar messages: in the order in which they are to be published.
    :ivar behind: how many were passed by, now and until they follow, since an unpublished message
        with the same order key comes first.
    """

    fence: uuid.UUID
    messages: tuple[Due, ...] = ()
    behind: int = 0


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
        row.rank,
        row.order_key,
        row.broker,
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
    lock_orders(connection, root, [message])
    inserted = insert_new(
        connection,
        outbox,
        **columns_of(message),
        root=root,
        outbox_id=new_id(),
        reservation_id=reservation_id,
        parent_id=parent_id,
        retries=retries,
        state="published" if delivered else state,
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


def lock_orders(connection: Connection, root: str, messages: Iterable[WireMessage]) -> None:
    """Until commit, keep others from writing messages with the same order keys.

    So that who writes first is seen first. On SQLite there is one writer anyway. Before any other
    lock, and in one order.
    """
    keys = sorted({message.order_key for message in messages if message.order_key is not None})
    if keys and connection.dialect.name == "postgresql":
        connection.execute(
            sa.text(
                "SELECT pg_advisory_xact_lock(h) FROM (SELECT DISTINCT"
                " hashtextextended(:root || chr(1) || k, 0) AS h"
                " FROM unnest(CAST(:keys AS text[])) AS k ORDER BY h) AS hashes"
            ),
            {"root": root, "keys": keys},
        )


def wake(connection: Connection, root: str) -> None:
    """Have a relay that sleeps told at commit (PostgreSQL); elsewhere it looks by itself."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.budget_wake(root)))


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
    timed = sa.bindparam("timed_us", type_=sa.BigInteger)
    due: Any = now + delivered_us if delivered else sa.func.coalesce(sa.func.nullif(timed, 0), now)
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
                "retries": request.retries,
                "state": "published" if delivered else "due",
                "publishes": int(delivered),
                "failures": 0,
                **columns_of(message),
                **({} if delivered else {"timed_us": message.due_us}),
            }
            for request, message in messages
        ],
        execution_options=AT_ONCE,
    ).all()
    if not delivered and any(message.due_us == 0 for _, message in messages):
        wake(connection, root)


def enqueue_plain(
    connection: Connection, root: str, messages: Sequence[tuple[WireMessage, uuid.UUID | None]]
) -> None:
    """Write messages that draw on no budget, each with the reservation that publishes it, if any.

    What a reservation has written before is left as it is. The caller holds the locks of their
    order keys.
    """
    if not messages:
        return
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    now = sa.select(now_us()).scalar_subquery()
    timed = sa.bindparam("timed_us", type_=sa.BigInteger)
    statement = insert(outbox).values(
        due_us=sa.func.coalesce(sa.func.nullif(timed, 0), now), created_us=now
    )
    connection.execute(
        statement.on_conflict_do_nothing().returning(outbox.c.retries),
        [
            {
                "root": root,
                "outbox_id": new_id(),
                "parent_id": parent_id,
                "retries": 0,
                "state": "due",
                "publishes": 0,
                "failures": 0,
                **columns_of(message),
                "timed_us": message.due_us,
            }
            for message, parent_id in messages
        ],
        execution_options=AT_ONCE,
    ).all()
    wake(connection, root)


def claim_due(
    connection: Connection, root: str, broker: str, limit: int, hold_us: int, fence: uuid.UUID
) -> Batch:
    """Take up to ``limit`` due messages for one broker; nobody else gets them for ``hold_us``.

    By rank, then by the time they are due. Of those with one order key only the first that is not
    published, and what follows it directly: they are in the order in which they were written.

    Locks those rows and skips what another relay is taking. A relay that dies gives them back
    when the time is over: the message may then be published twice, and is claimed once. Of two
    relays the last one to take a row has it: the other one's fence is gone.
    """
    found = connection.execute(_next(connection, root, broker, limit)).all()
    turns = _in_turn(found)
    behind = _pass_by(connection, root, [row for row in found if row.outbox_id not in turns])
    if not turns:
        return Batch(fence, (), behind)
    rows = connection.execute(
        outbox.update()
        .where(outbox.c.root == root, outbox.c.outbox_id.in_(list(turns)))
        .values(due_us=now_us() + hold_us, taken_by=fence)
        .returning(outbox, (outbox.c.expires_us <= now_us()).label("expired"))
    ).all()
    taken = {row.outbox_id: row for row in rows}
    messages = tuple(
        Due(
            outbox_id,
            row.reservation_id,
            message_of(row),
            before.due_us,
            bool(row.expired),
            bool(before.started),
            row.failures,
        )
        for outbox_id, before in turns.items()
        for row in [taken[outbox_id]]
    )
    return Batch(fence, messages, behind)


def _next(connection: Connection, root: str, broker: str, limit: int) -> sa.Select[Any]:
    """Return what selects the next messages for a broker, locks them, and skips what is locked.

    On PostgreSQL each rank is looked at by itself, in the order of the index, and only until there
    are enough: what is due later, or of a later rank, is not read.
    """
    ready = _candidates(root, broker).order_by(outbox.c.due_us, outbox.c.outbox_id).limit(limit)
    if connection.dialect.name != "postgresql":
        return (
            _candidates(root, broker)
            .order_by(outbox.c.rank, outbox.c.due_us, outbox.c.outbox_id)
            .limit(limit)
        )
    ranks = sa.func.generate_series(0, RANKS - 1).table_valued("number").render_derived("ranks")
    each = (
        ready.where(outbox.c.rank == ranks.c.number)
        .with_for_update(skip_locked=True, of=outbox)
        .lateral("each")
    )
    return sa.select(each).select_from(ranks.join(each, sa.true())).limit(limit)


def _candidates(root: str, broker: str) -> sa.Select[Any]:
    # A value and no EXISTS, for which PostgreSQL may read all that ever ended, of every root.
    started = (
        sa.select(reservations.c.state.not_in(CLAIMABLE))
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == outbox.c.reservation_id,
        )
        .scalar_subquery()
    )
    before = outbox.alias("before")
    # The one directly before it with its key: one look into the index, and none without a key.
    follows = (
        sa.select(before.c.outbox_id)
        .where(
            before.c.root == root,
            before.c.order_key == outbox.c.order_key,
            sa.text(f"before.{IS_UNPUBLISHED}"),
            sa.tuple_(before.c.created_us, before.c.outbox_id)
            < sa.tuple_(outbox.c.created_us, outbox.c.outbox_id),
        )
        .order_by(before.c.created_us.desc(), before.c.outbox_id.desc())
        .limit(1)
        .scalar_subquery()
    )
    return sa.select(
        outbox.c.outbox_id,
        outbox.c.due_us,
        outbox.c.order_key,
        outbox.c.created_us,
        started.label("started"),
        sa.case((outbox.c.order_key.is_not(None), follows)).label("follows"),
    ).where(
        outbox.c.root == root,
        outbox.c.broker == broker,
        sa.text(IS_NEXT),
        outbox.c.due_us <= instant(),
    )


def _in_turn(found: Sequence[sa.Row[Any]]) -> dict[uuid.UUID, sa.Row[Any]]:
    """Return which of the rows may be published now, in that order.

    Of each order key those whose predecessors are all among them; where the first of them stands,
    they take their turns in the order in which they were written.
    """
    written = sorted(
        (row for row in found if row.order_key is not None),
        key=lambda row: (row.created_us, row.outbox_id),
    )
    turns: dict[uuid.UUID, sa.Row[Any]] = {}
    queues: dict[str, deque[sa.Row[Any]]] = defaultdict(deque)
    for row in written:
        if row.follows is None or row.follows in turns:
            turns[row.outbox_id] = row
            queues[row.order_key].append(row)
    ordered = (
        row if row.order_key is None else queues[row.order_key].popleft()
        for row in found
        if row.order_key is None or row.outbox_id in turns
    )
    return {row.outbox_id: row for row in ordered}


def _pass_by(connection: Connection, root: str, rows: Sequence[sa.Row[Any]]) -> int:
    """Have rows looked at no more until what comes before them is published or gone.

    So a long queue of one key costs the claims of others nothing. Only behind the lock of an
    unpublished row before it, which whoever publishes or deletes that one takes first: it sees
    then what follows, and :func:`_let_follow` lets it. Where another has that lock the row stays as
    it is, and is looked at again with the next claim. The caller has locked the rows.
    """
    mine = {row.outbox_id for row in rows}
    others = {row.follows for row in rows} - mine
    locked = set(
        connection.execute(
            sa.select(outbox.c.outbox_id)
            .where(
                outbox.c.root == root,
                outbox.c.outbox_id.in_(sorted(others)),
                sa.text(IS_UNPUBLISHED),
            )
            .order_by(outbox.c.outbox_id)
            .with_for_update(skip_locked=True)
        ).scalars()
        if others
        else ()
    )
    passed = [row.outbox_id for row in rows if row.follows in locked | mine]
    if passed:
        connection.execute(
            outbox.update()
            .where(outbox.c.root == root, outbox.c.outbox_id.in_(passed))
            .values(behind=True)
        )
    return len(passed)


def _let_follow(connection: Connection, root: str, keys: Iterable[str | None]) -> None:
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


def _taken(root: str, fence: uuid.UUID, ids: Iterable[uuid.UUID]) -> sa.ColumnElement[bool]:
    """Rows that are still in the batch with this fence."""
    return sa.and_(
        outbox.c.root == root,
        outbox.c.outbox_id.in_(sorted(ids)),
        outbox.c.taken_by == fence,
        outbox.c.state == "due",
    )


def mark_published(
    connection: Connection,
    root: str,
    fence: uuid.UUID,
    published: Sequence[Due],
    again_us: int,
) -> int:
    """Note that the broker has confirmed these messages; return how many were still the batch's.

    Those that another relay has taken since are left alone. Locks the reservations by id, then the
    messages by id. Only ``reserved`` becomes ``published``: a worker may have been faster. A
    message that starts nothing in the ledger and is no attempt's successor is done with and goes.

    :param again_us: how long until a message that was never started is looked at again, for the
        first time; doubled with each time it is published.
    """
    held = sorted({due.reservation_id for due in published if due.reservation_id is not None})
    if held:
        connection.execute(
            sa.select(reservations.c.state)
            .where(reservations.c.root == root, reservations.c.reservation_id.in_(held))
            .order_by(reservations.c.reservation_id)
            .with_for_update()
        )
    rows = connection.execute(
        sa.select(
            outbox.c.outbox_id, outbox.c.reservation_id, outbox.c.parent_id, outbox.c.order_key
        )
        .where(_taken(root, fence, [due.outbox_id for due in published]))
        .order_by(outbox.c.outbox_id)
        .with_for_update()
    ).all()
    started = [row.reservation_id for row in rows if row.reservation_id is not None]
    if started:
        connection.execute(
            reservations.update()
            .where(
                reservations.c.root == root,
                reservations.c.reservation_id.in_(started),
                reservations.c.state == "reserved",
            )
            .values(state="published")
        )
    done = [row.outbox_id for row in rows if row.reservation_id is None and row.parent_id is None]
    if done:
        connection.execute(
            outbox.delete().where(outbox.c.root == root, outbox.c.outbox_id.in_(done))
        )
    kept = sorted({row.outbox_id for row in rows}.difference(done))
    if kept:
        doubled = sa.case(
            *((outbox.c.publishes == count, again_us * 2**count) for count in range(12)),
            else_=again_us * 2**12,
        )
        connection.execute(
            outbox.update()
            .where(outbox.c.root == root, outbox.c.outbox_id.in_(kept))
            .values(
                state="published",
                publishes=outbox.c.publishes + 1,
                published_us=now_us(),
                due_us=now_us() + doubled,
                last_error=None,
                taken_by=None,
            )
        )
    _let_follow(connection, root, [row.order_key for row in rows])
    return len(rows)


def give_back(
    connection: Connection,
    root: str,
    fence: uuid.UUID,
    messages: Sequence[Due],
    error: str | None = None,
) -> None:
    """Give messages back that were not published: each is due when it was, and keeps its place.

    Those that another relay has taken since are left alone. Locks the messages by id.

    :param error: why they were not published, where that is to be noted.
    """
    rows = _taken(root, fence, [due.outbox_id for due in messages])
    connection.execute(
        sa.select(outbox.c.state).where(rows).order_by(outbox.c.outbox_id).with_for_update()
    )
    noted = {} if error is None else {"last_error": error}
    connection.execute(
        outbox.update()
        .where(rows)
        .values(
            due_us=sa.case(
                {due.outbox_id: due.due_us for due in messages}, value=outbox.c.outbox_id
            ),
            taken_by=None,
            **noted,
        )
    )


def reschedule(
    connection: Connection,
    root: str,
    fence: uuid.UUID,
    outbox_id: uuid.UUID,
    wait_us: int,
    error: str,
    failed: bool,
) -> None:
    """Give one message back, to be tried again in ``wait_us``.

    Nothing happens where another relay has taken it since. One statement, locking the message.

    :param failed: whether it counts as the message's own failure, not the broker's.
    """
    connection.execute(
        outbox.update()
        .where(_taken(root, fence, [outbox_id]))
        .values(
            due_us=now_us() + wait_us,
            failures=outbox.c.failures + int(failed),
            last_error=error,
            taken_by=None,
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
            .values(state="due", due_us=now_us(), taken_by=None)
        ).rowcount
    )


def make_due(
    connection: Connection, root: str, reservation_id: uuid.UUID, retries: int, wait_us: int = 0
) -> bool:
    """Have the message of a reservation's attempt published (again) in ``wait_us``.

    A relay that has published it, and was too slow to say so, says so no more.
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
            .values(state="due", due_us=now_us() + wait_us, taken_by=None)
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
        _delete(connection, root, mine, outbox.c.retries < retries)
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
    if row is None:
        return None
    _let_follow(connection, root, [row.order_key])
    return message_of(row)


def drop(connection: Connection, root: str, reservation_id: uuid.UUID) -> None:
    """Delete the messages of a reservation that has ended; what follows them may be published."""
    _delete(connection, root, outbox.c.reservation_id == reservation_id)


def lock_taken(
    connection: Connection, root: str, fence: uuid.UUID, outbox_id: uuid.UUID
) -> sa.Row[Any] | None:
    """Lock and return one message of a batch; none where another relay has taken it since.

    The caller holds the row of its reservation, if it has one.
    """
    return connection.execute(
        sa.select(outbox).where(_taken(root, fence, [outbox_id])).with_for_update()
    ).first()


def forget(connection: Connection, root: str, fence: uuid.UUID, outbox_id: uuid.UUID) -> None:
    """Delete a message without a reservation that will not be published.

    Nothing happens where another relay has taken it since.
    """
    _delete(connection, root, _taken(root, fence, [outbox_id]), outbox.c.reservation_id.is_(None))


def _delete(connection: Connection, root: str, *which: sa.ColumnElement[bool]) -> None:
    gone = connection.execute(
        outbox.delete()
        .where(outbox.c.root == root, *which)
        .returning(outbox.c.order_key, outbox.c.state)
    ).all()
    _let_follow(connection, root, [row.order_key for row in gone if row.state != "published"])


def prune(connection: Connection, root: str, limit: int) -> int:
    """Delete up to ``limit`` published messages without a reservation whose parent is closed.

    Until then they keep a replay of the parent from publishing them again. Locks what it deletes,
    and skips what is locked. Returns how many there were.
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
                sa.text(IS_KEPT),
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
