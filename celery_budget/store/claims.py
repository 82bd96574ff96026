"""Batches: what a relay takes out of the outbox, and gives back, or marks as published.

Each is taken under a fence, which stands in its rows until another relay takes them: what has a
fence of its own by then is neither marked nor given back.
"""

from __future__ import annotations

import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.messages import RANKS, WireMessage
from celery_budget.core.reservations import CLAIMABLE, Closed, Missing, Released, Running
from celery_budget.core.retries import DEADLINE
from celery_budget.store import deadlines, untold
from celery_budget.store.outbox import delete, let_follow, message_of
from celery_budget.store.reservations import lock, release
from celery_budget.store.schema import (
    IS_NEXT,
    IS_UNPUBLISHED,
    instant,
    now_us,
    outbox,
    reservations,
)

#: Why a request ends that was not published in time.
EXPIRED = "expired"

#: Of how many bytes a batch is, whatever the number of its messages: a relay has them in memory.
MOST_BYTES = 16 * 1024 * 1024

__all__ = [
    "EXPIRED",
    "MOST_BYTES",
    "Batch",
    "Due",
    "claim_due",
    "expire",
    "forget",
    "give_back",
    "lock_taken",
    "mark_published",
    "pass_by",
    "predecessor",
    "recall",
    "reschedule",
    "revoke",
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
    :ivar full: whether no more fitted into it, so that more may be due.
    :ivar undecided: whether nothing was taken since more than one statement is needed for it.
    """

    fence: uuid.UUID
    messages: tuple[Due, ...] = ()
    behind: int = 0
    full: bool = False
    undecided: bool = False


def claim_due(
    connection: Connection,
    root: str,
    broker: str,
    limit: int,
    hold_us: int,
    fence: uuid.UUID,
    *,
    alone: bool = False,
) -> Batch:
    """Take up to ``limit`` due messages for one broker; nobody else gets them for ``hold_us``.

    By rank, then by the time they are due. Of those with one order key only the first that is not
    published, and what follows it directly: they are in the order in which they were written.
    Not those of a task whose result is being told, of an earlier request: they wait for that.
    No more than :data:`MOST_BYTES` of them, or one that is larger; the rest keep their places.

    Locks those rows and skips what another relay is taking. A relay that dies gives them back
    when the time is over: the message may then be published twice, and is claimed once. Of two
    relays the last one to take a row has it: the other one's fence is gone.

    :param alone: by one statement that waits for no lock, and may be a transaction of its own
        (PostgreSQL). Where that does not do, as of messages with order keys, nothing is taken.
    """
    # No name of a column of the outbox, which would be a value to write.
    values = {"of_root": root, "of_broker": broker, "most": limit}
    if connection.dialect.name != "postgresql":
        found = connection.execute(_next("sqlite"), values).all()
        return _take_in_turn(connection, root, limit, hold_us, fence, found)
    found = connection.execute(
        _take_plain(), {**values, "hold_us": hold_us, "fence": fence, "bytes": MOST_BYTES}
    ).all()
    if any(row.order_key is not None or row.told_until is not None for row in found):
        if alone:
            return Batch(fence, undecided=True)
        return _take_in_turn(connection, root, limit, hold_us, fence, found)
    messages = tuple(_due(row, row) for row in found if row.task_id is not None)
    return Batch(fence, messages, 0, len(found) == limit or len(messages) < len(found))


def _take_in_turn(
    connection: Connection,
    root: str,
    limit: int,
    hold_us: int,
    fence: uuid.UUID,
    found: Sequence[sa.Row[Any]],
) -> Batch:
    """Take of messages that were found and locked those that may be published now."""
    found, full = _hold_back(connection, root, found), len(found) == limit
    in_turn = _in_turn(found)
    behind = pass_by(connection, root, [row for row in found if row.outbox_id not in in_turn])
    if not in_turn:
        return Batch(fence, (), behind, full)
    turns = _that_fit(in_turn)
    rows = connection.execute(
        _TAKE, {"of_root": root, "ids": list(turns), "hold_us": hold_us, "fence": fence}
    ).all()
    taken = {row.outbox_id: row for row in rows}
    messages = tuple(_due(before, taken[outbox_id]) for outbox_id, before in turns.items())
    return Batch(fence, messages, behind, full or len(messages) < len(in_turn))


def _due(found: sa.Row[Any], taken: sa.Row[Any]) -> Due:
    """Return a message as a relay has it, from how it was found and what was taken."""
    left_us = taken.left_us
    return Due(
        found.outbox_id,
        taken.reservation_id,
        message_of(taken, left_us=left_us),
        found.due_us,
        left_us is not None and left_us <= 0,
        bool(found.started),
        taken.failures,
    )


_HOLD = sa.bindparam("hold_us", type_=sa.BigInteger)
#: How long what is taken has still, by the clock that the taking reads: a distributed ledger reads
#: none in what a change returns.
_LEFT = (outbox.c.expires_us - outbox.c.due_us + _HOLD).label("left_us")

#: Made once, as all statements of a claim: making them takes longer than they take.
_TAKE = (
    outbox.update()
    .where(
        outbox.c.root == sa.bindparam("of_root"),
        outbox.c.outbox_id.in_(sa.bindparam("ids", expanding=True)),
    )
    .values(
        due_us=now_us() + _HOLD,
        taken_by=sa.bindparam("fence"),
    )
    .returning(outbox, _LEFT)
)


@cache
def _take_plain() -> sa.Select[Any]:
    """Return what takes the next messages on PostgreSQL, if nothing has to be decided about any.

    Where one of them has an order key, or waits for a result, it finds and locks them, and takes
    none. Of those that are too large together the rest are not taken.
    """
    found = _next("postgresql").cte("found")
    place = (found.c.rank, found.c.due_us, found.c.outbox_id)
    numbered = sa.select(
        found.c.outbox_id,
        sa.func.row_number().over(order_by=place).label("number"),
        sa.func.sum(found.c.size).over(order_by=place).label("bytes"),
    ).subquery("numbered")
    undecided = sa.exists(sa.text("1")).where(
        sa.or_(found.c.order_key.is_not(None), found.c.told_until.is_not(None))
    )
    taken = (
        outbox.update()
        .where(
            outbox.c.root == sa.bindparam("of_root"),
            outbox.c.outbox_id == numbered.c.outbox_id,
            sa.or_(
                numbered.c.number == 1,
                numbered.c.bytes <= sa.bindparam("bytes", type_=sa.BigInteger),
            ),
            ~undecided,
        )
        .values(
            due_us=now_us() + _HOLD,
            taken_by=sa.bindparam("fence"),
        )
        .returning(
            outbox.c.outbox_id.label("taken_id"),
            outbox.c.reservation_id,
            outbox.c.task_id,
            outbox.c.task_name,
            outbox.c.body,
            outbox.c.envelope,
            outbox.c.queue,
            outbox.c.expires_us,
            outbox.c.broker,
            outbox.c.failures,
            _LEFT,
        )
        .cte("taken")
    )
    return (
        sa.select(found, *(column for column in taken.c if column.key != "taken_id"))
        .select_from(found.outerjoin(taken, taken.c.taken_id == found.c.outbox_id))
        .order_by(*place)
    )


@cache
def _next(dialect: str) -> sa.Select[Any]:
    """Return what selects the next messages for a broker, locks them, and skips what is locked.

    On PostgreSQL each rank is looked at by itself, in the order of the index, and only until there
    are enough: what is due later, or of a later rank, is not read.
    """
    most = sa.bindparam("most", type_=sa.Integer)
    # Neither reads a body for it: PostgreSQL keeps a value's octets beside it, SQLite a blob's.
    # For SQLite an envelope is as long as its characters.
    length = sa.func.octet_length if dialect == "postgresql" else sa.func.length
    candidates = _candidates().add_columns(
        (length(outbox.c.body) + length(outbox.c.envelope)).label("size")
    )
    if dialect != "postgresql":
        return candidates.order_by(outbox.c.rank, outbox.c.due_us, outbox.c.outbox_id).limit(most)
    ready = candidates.order_by(outbox.c.due_us, outbox.c.outbox_id).limit(most)
    # Written out: of parameters it would take a thousand, and plan anew for each claim.
    ranks = (
        sa.func.generate_series(sa.text("0"), sa.text(str(RANKS - 1)))
        .table_valued("number")
        .render_derived("ranks")
    )
    each = (
        ready.where(outbox.c.rank == ranks.c.number)
        .with_for_update(skip_locked=True, of=outbox)
        .lateral("each")
    )
    return sa.select(each).select_from(ranks.join(each, sa.true())).limit(most)


def _candidates() -> sa.Select[Any]:
    root: sa.BindParameter[str] = sa.bindparam("of_root")
    # A value and no EXISTS, for which PostgreSQL may read all that ever ended, of every root.
    started = (
        sa.select(reservations.c.state.not_in(CLAIMABLE))
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == outbox.c.reservation_id,
        )
        .scalar_subquery()
    )
    return sa.select(
        outbox.c.outbox_id,
        outbox.c.rank,
        outbox.c.due_us,
        outbox.c.order_key,
        outbox.c.created_us,
        started.label("started"),
        untold.told_until(root, outbox.c.task_id).label("told_until"),
        predecessor(root).label("follows"),
    ).where(
        outbox.c.root == root,
        outbox.c.broker == sa.bindparam("of_broker"),
        sa.text(IS_NEXT),
        outbox.c.due_us <= instant(),
    )


def predecessor(root: Any) -> sa.ColumnElement[Any]:
    """Return what stands in a statement for the unpublished message that is before one by its key.

    The one directly before it: one look into the index, and none without a key.
    """
    before = outbox.alias("before")
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
    return sa.case((outbox.c.order_key.is_not(None), follows))


def _hold_back(
    connection: Connection, root: str, found: Sequence[sa.Row[Any]]
) -> Sequence[sa.Row[Any]]:
    """Have messages wait whose task's result, of an earlier request, is being told; return others.

    Until it is told the task must not run: its own result would be stored first, and be lost. The
    caller has locked the rows.
    """
    held = [row.outbox_id for row in found if row.told_until is not None]
    if not held:
        return found
    until = untold.told_until(outbox.c.root, outbox.c.task_id)
    connection.execute(
        outbox.update()
        .where(outbox.c.root == root, outbox.c.outbox_id.in_(held))
        .values(due_us=sa.func.coalesce(until, outbox.c.due_us))
    )
    return [row for row in found if row.told_until is None]


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


def _that_fit(turns: dict[uuid.UUID, sa.Row[Any]]) -> dict[uuid.UUID, sa.Row[Any]]:
    """Return the first of them up to :data:`MOST_BYTES`, and the very first in any case.

    What comes before another by its order key stays before it.
    """
    sizes = accumulate(row.size for row in turns.values())
    return {
        outbox_id: row
        for number, ((outbox_id, row), size) in enumerate(zip(turns.items(), sizes, strict=True))
        if number == 0 or size <= MOST_BYTES
    }


def pass_by(connection: Connection, root: str, rows: Sequence[sa.Row[Any]]) -> int:
    """Have rows looked at no more until what comes before them is published or gone.

    So a long queue of one key costs the claims of others nothing. Only behind the lock of an
    unpublished row before it, which whoever publishes or deletes that one takes first: it sees
    then what follows, and :func:`let_follow` lets it. Where another has that lock the row stays as
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


#: By one statement on PostgreSQL.
_MARK = sa.text(
    "SELECT marked, order_keys FROM budget_mark_published("
    ":root, :fence, CAST(:ids AS uuid[]), CAST(:held AS uuid[]), :again)"
).bindparams(sa.bindparam("fence", type_=sa.Uuid))


def _taken(root: str, fence: uuid.UUID, ids: Iterable[uuid.UUID]) -> sa.ColumnElement[bool]:
    """Rows that are still in the batch with this fence."""
    return sa.and_(
        outbox.c.root == root,
        outbox.c.outbox_id.in_(sorted(ids)),
        outbox.c.taken_by == fence,
        outbox.c.state == "due",
    )


def _array(ids: Iterable[uuid.UUID]) -> str:
    """Return ids as PostgreSQL reads an array: to have the driver write each takes far longer."""
    return f"{{{','.join([one.hex for one in ids])}}}"


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
    key = {"root": root, "fence": fence}
    ids = [due.outbox_id for due in published]
    if connection.dialect.name == "postgresql":
        held = {due.reservation_id for due in published if due.reservation_id is not None}
        given = {"ids": _array(ids), "held": _array(held), "again": again_us}
        row = connection.execute(_MARK, {**key, **given}).one()
        if row.order_keys is not None:
            let_follow(connection, root, row.order_keys)
        return int(row.marked)
    rows = connection.execute(
        sa.select(
            outbox.c.outbox_id, outbox.c.reservation_id, outbox.c.parent_id, outbox.c.order_key
        ).where(_taken(root, fence, ids))
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
                # Another relay may have passed it by before it was marked.
                behind=False,
            )
        )
    let_follow(connection, root, [row.order_key for row in rows])
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
    waits_us: Mapping[uuid.UUID, int],
    error: str,
    failed: bool,
) -> None:
    """Give messages back, each to be tried again in that time.

    Those that another relay has taken since are left alone. Locks the messages by id.

    :param failed: whether it counts as the messages' own failure, not the broker's.
    """
    rows = _taken(root, fence, waits_us)
    if len(waits_us) > 1:
        connection.execute(
            sa.select(outbox.c.state).where(rows).order_by(outbox.c.outbox_id).with_for_update()
        )
    connection.execute(
        outbox.update()
        .where(rows)
        .values(
            due_us=now_us() + sa.case(dict(waits_us), value=outbox.c.outbox_id),
            failures=outbox.c.failures + int(failed),
            last_error=error,
            taken_by=None,
        )
    )


def lock_taken(
    connection: Connection, root: str, fence: uuid.UUID, outbox_id: uuid.UUID
) -> sa.Row[Any] | None:
    """Lock and return one message of a batch; none where another relay has taken it since.

    The caller holds the row of its reservation, if it has one.
    """
    return connection.execute(
        sa.select(outbox).where(_taken(root, fence, [outbox_id])).with_for_update()
    ).first()


def expire(connection: Connection, root: str, fence: uuid.UUID, due: Due) -> bool:
    """End a message whose time is over, and its reservation with it; its result is to be told.

    Locks the reservation, the message, the balances: nobody who holds one of those waits for a
    message that was taken. Against a claim the one that locks the reservation first wins. False,
    and nothing changed, where the task has been started or has ended, and where another relay has
    taken the message since.
    """
    reason = EXPIRED
    if due.reservation_id is not None:
        row = lock(connection, root, due.reservation_id)
        if row is None or row.state not in CLAIMABLE:
            return False
        reason = deadlines.why(EXPIRED, row.deadline_us, due.message.expires_us)
    if lock_taken(connection, root, fence, due.outbox_id) is None:
        return False
    if due.reservation_id is None:
        forget(connection, root, fence, due.outbox_id)
    else:
        release(connection, root, due.reservation_id, reason)
    # Events start no task.
    if due.message.task_name:
        untold.note(connection, root, due.message.task_id, reason, due.reservation_id)
    return True


def revoke(
    connection: Connection, root: str, reservation_id: uuid.UUID, reason: str
) -> Released | Running | Closed | Missing:
    """End a request that a worker has found revoked or expired; as :func:`release`.

    What has expired by its deadline says so. Locks as that.
    """
    row = lock(connection, root, reservation_id) if reason == EXPIRED else None
    if row is not None:
        left = deadlines.left_us(connection, row)
        reason = DEADLINE if left is not None and left <= 0 else reason
    return release(connection, root, reservation_id, reason)


def forget(connection: Connection, root: str, fence: uuid.UUID, outbox_id: uuid.UUID) -> None:
    """Have a message without a reservation published no more; what follows its order key may be.

    Nothing happens where another relay has taken it since. That of an attempt's successor stays
    until the attempt is closed, as if it were published: a replay would write it again. Locks the
    message, then what follows it.
    """
    mine = sa.and_(_taken(root, fence, [outbox_id]), outbox.c.reservation_id.is_(None))
    kept = connection.execute(
        outbox.update()
        .where(mine, outbox.c.parent_id.is_not(None))
        .values(state="published", taken_by=None, behind=False)
        .returning(outbox.c.order_key)
    ).scalars()
    let_follow(connection, root, kept.all())
    delete(connection, root, mine)


def recall(connection: Connection, root: str, parent_id: uuid.UUID, task_id: str) -> None:
    """Delete what :func:`forget` has kept of an attempt's successor, for it to be written anew.

    What was published in fact stays. Locks the message, for whose order key the caller has the
    lock: whoever writes one has that first.
    """
    delete(
        connection,
        root,
        outbox.c.parent_id == parent_id,
        outbox.c.task_id == task_id,
        outbox.c.reservation_id.is_(None),
        outbox.c.state == "published",
        outbox.c.published_us.is_(None),
    )
