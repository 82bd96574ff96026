"""Silent messages: published, their time is over, and no worker has started them.

Most of them wait in a long queue. What tells those that are lost is not here: only what the ledger
knows, which is what else was started since.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.schema import attempts, instant, now_us, outbox, reservations

__all__ = [
    "Lane",
    "Looked",
    "Silent",
    "envelopes",
    "hold",
    "is_given_up",
    "is_there",
    "look",
    "postpone",
    "postpone_all",
    "republish",
    "started",
    "unstarted",
]

#: Of how many open attempts a look at what workers have in hand is.
IN_HAND = 10_000

#: A message that has waited is looked at again after this part of the time it has waited.
PART_OF_AGE = 4

#: In which states a request is whose message is published, and not started.
UNSTARTED = ("published", "waiting")

#: In which order messages reach workers: broker, queue and rank. Of those with one of these, the
#: first that is published is the first to be delivered.
Lane = tuple[str, str, int]


@dataclass(frozen=True)
class Silent:
    """A published message whose time was over, and not started, when it was looked at.

    :ivar published_us: when it was marked as published, for the last time.
    :ivar seen_us: when it was looked at.
    """

    outbox_id: uuid.UUID
    reservation_id: uuid.UUID
    task_id: str
    publishes: int
    broker: str
    queue: str
    rank: int
    published_us: int
    seen_us: int

    @property
    def lane(self) -> Lane:
        """Its broker, queue and rank."""
        return self.broker, self.queue, self.rank


@dataclass(frozen=True)
class Looked:
    """What was seen of published messages whose time was over.

    :ivar unstarted: those whose attempt has not started.
    :ivar others: the ids of those whose attempt has, and of those that stand for none.
    :ivar full: whether there may be more.
    """

    unstarted: list[Silent]
    others: list[uuid.UUID]
    full: bool


def is_given_up(publishes: int, max_publishes: int) -> bool:
    """Tell whether a message that is lost is given up, and not published once more."""
    return publishes >= max_publishes


def unstarted(root: str) -> sa.ColumnElement[bool]:
    """Tell published messages whose attempt has not started, of both tables."""
    return sa.and_(
        outbox.c.root == root,
        outbox.c.state == "published",
        reservations.c.root == outbox.c.root,
        reservations.c.reservation_id == outbox.c.reservation_id,
        reservations.c.state.in_(UNSTARTED),
    )


def _to_look_at(root: str) -> sa.ColumnElement[bool]:
    return sa.and_(unstarted(root), outbox.c.due_us <= instant())


def look(connection: Connection, root: str, limit: int) -> Looked:
    """Look at published messages whose time is over, those due longest, up to ``limit``.

    Reads so many and no more, whatever else waits in its queue or runs. Locks nothing.
    """
    # A value and no join, for which PostgreSQL may read all that is open.
    state = (
        sa.select(reservations.c.state)
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == outbox.c.reservation_id,
        )
        .scalar_subquery()
    )
    rows = connection.execute(
        sa.select(
            outbox.c.outbox_id,
            outbox.c.reservation_id,
            outbox.c.task_id,
            outbox.c.publishes,
            outbox.c.broker,
            outbox.c.queue,
            outbox.c.rank,
            outbox.c.published_us,
            instant().label("seen_us"),
            state.label("of"),
        )
        .where(
            outbox.c.root == root,
            outbox.c.state == "published",
            outbox.c.due_us <= instant(),
        )
        .order_by(outbox.c.due_us)
        .limit(limit)
    ).all()
    unstarted = [row for row in rows if row.of in UNSTARTED]
    return Looked(
        [Silent(*row[:-1]) for row in unstarted],
        [row.outbox_id for row in rows if row.of not in UNSTARTED],
        len(rows) == limit,
    )


def is_there(connection: Connection, root: str, seen: Silent) -> bool:
    """Tell whether a message is still as it was ``seen``. Locks nothing."""
    found = connection.execute(
        sa.select(outbox.c.outbox_id).where(
            outbox.c.root == root,
            outbox.c.outbox_id == seen.outbox_id,
            outbox.c.state == "published",
            outbox.c.publishes == seen.publishes,
        )
    )
    return found.first() is not None


def envelopes(
    connection: Connection, root: str, ids: Collection[uuid.UUID]
) -> dict[uuid.UUID, str]:
    """Return the envelopes of messages by their ids, as far as they are still there."""
    rows = connection.execute(
        sa.select(outbox.c.outbox_id, outbox.c.envelope).where(
            outbox.c.root == root, outbox.c.outbox_id.in_(sorted(ids))
        )
    )
    return {row.outbox_id: row.envelope for row in rows}


def started(connection: Connection, root: str) -> dict[Lane, int]:
    """Return of each lane when the last message was published that a worker has in hand now.

    In hand is what runs, or has ended and is not closed. Only messages that were published once
    count: of others nobody knows which copy was delivered; nor what came to a worker without a
    reservation, which was published before it came into the ledger. Of :data:`IN_HAND` attempts,
    those that were claimed or renewed last: the others may tell more, and do so another time.
    Locks nothing.
    """
    in_hand = (
        sa.select(attempts.c.root, attempts.c.reservation_id, attempts.c.retries)
        .where(attempts.c.root == root, attempts.c.lease_until_us.is_not(None))
        .order_by(attempts.c.lease_until_us.desc())
        .limit(sa.literal_column(str(IN_HAND)))
        .subquery("in_hand")
    )
    # A value for each and no join, for which PostgreSQL may read all that is open.
    reserved = (
        sa.select(reservations.c.unreserved.is_(False))
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == in_hand.c.reservation_id,
        )
        .scalar_subquery()
    )
    rows = connection.execute(
        sa.select(
            outbox.c.broker,
            outbox.c.queue,
            outbox.c.rank,
            sa.func.max(outbox.c.published_us).label("published_us"),
        )
        .select_from(in_hand)
        .join(
            outbox,
            sa.and_(
                outbox.c.root == in_hand.c.root,
                outbox.c.reservation_id == in_hand.c.reservation_id,
                outbox.c.retries == in_hand.c.retries,
            ),
        )
        .where(
            outbox.c.root == root,
            reserved,
            outbox.c.state == "published",
            outbox.c.publishes == 1,
            # By a clock that has been set back since it tells nothing.
            outbox.c.published_us <= instant(),
        )
        .group_by(outbox.c.broker, outbox.c.queue, outbox.c.rank)
    )
    return {(row.broker, row.queue, row.rank): row.published_us for row in rows}


def republish(connection: Connection, root: str, seen: Silent) -> bool:
    """Publish a message again unless its attempt has started since it was ``seen``.

    One statement, locking the message; should a claim commit beside it, a worker gets a message
    that it ignores. Of two that have seen it one publishes it.
    """
    return bool(
        connection.execute(
            outbox.update()
            .where(_to_look_at(root), outbox.c.outbox_id == seen.outbox_id)
            .values(state="due", due_us=now_us(), taken_by=None, behind=False)
        ).rowcount
    )


def postpone(connection: Connection, root: str, seen: Silent, wait_us: int) -> None:
    """Let a silent message be for ``wait_us``, so that others come first meanwhile.

    One statement, locking the message. Nothing happens where its attempt has started, or it is
    published again, since it was ``seen``.
    """
    connection.execute(
        outbox.update()
        .where(_to_look_at(root), outbox.c.outbox_id == seen.outbox_id)
        .values(due_us=now_us() + wait_us)
    )


def postpone_all(
    connection: Connection, root: str, outbox_ids: Sequence[uuid.UUID], wait_us: int
) -> None:
    """Let messages be, which wait or run: for ``wait_us``, or longer the older they are.

    A quarter of the time that each has waited, so that what it costs to look at a backlog does not
    grow with how long that lasts. Locks the messages by id, and skips what is locked; nothing
    happens to those that are published again, or looked at by another, meanwhile.
    """
    mine = (
        connection.execute(
            sa.select(outbox.c.outbox_id)
            .where(
                outbox.c.root == root,
                outbox.c.outbox_id.in_(sorted(outbox_ids)),
                outbox.c.state == "published",
                outbox.c.due_us <= instant(),
            )
            .order_by(outbox.c.outbox_id)
            .with_for_update(skip_locked=True)
        )
        .scalars()
        .all()
    )
    if not mine:
        return
    part = (instant() - outbox.c.published_us) // PART_OF_AGE
    wait = sa.case((part > wait_us, part), else_=wait_us)
    connection.execute(
        outbox.update()
        .where(outbox.c.root == root, outbox.c.outbox_id.in_(mine))
        .values(due_us=instant() + wait)
    )


def hold(
    connection: Connection, root: str, reservation_ids: Collection[uuid.UUID], wait_us: int
) -> int:
    """Let published messages be that a worker has received; return how many were to be looked at.

    Those that would be looked at in less than half of ``wait_us`` are left alone for all of it.
    Locks the messages by id, and skips what is locked: somebody does something about it anyway.
    """
    soon = (
        connection.execute(
            sa.select(outbox.c.outbox_id)
            .where(
                outbox.c.root == root,
                outbox.c.reservation_id.in_(sorted(reservation_ids)),
                outbox.c.state == "published",
                outbox.c.due_us <= instant() + wait_us // 2,
            )
            .order_by(outbox.c.outbox_id)
            .with_for_update(skip_locked=True)
        )
        .scalars()
        .all()
    )
    if soon:
        connection.execute(
            outbox.update()
            .where(outbox.c.root == root, outbox.c.outbox_id.in_(soon))
            .values(due_us=instant() + wait_us)
        )
    return len(soon)
