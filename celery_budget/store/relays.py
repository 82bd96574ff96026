"""Relays that run: each has a row of its own, by which it is seen and told of what is due.

Nothing else rests on these rows: who claims a message is decided by the message's own row. A relay
whose row is gone, or wrong, finds its work by looking; so what is written here need not be on disk
before it counts.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.insert import insert_new
from celery_budget.store.schema import instant, now_us, outbox, relays

__all__ = [
    "Look",
    "Seen",
    "announce",
    "anything_due",
    "channel",
    "leave",
    "look",
    "notify",
    "seen",
    "tell",
]

#: A relay that was not seen for so long is gone: its row goes with the next announcement.
FORGET_US = 3_600_000_000


@dataclass(frozen=True)
class Seen:
    """A relay, as it was last seen.

    :ivar age_us: for how long it has not been seen, by the database's clock.
    :ivar sleeping: whether it waits to be told of the next message that is due.
    """

    relay_id: uuid.UUID
    host: str
    pid: int
    started_us: int
    seen_us: int
    age_us: int
    sleeping: bool


@dataclass(frozen=True)
class Look:
    """What a relay sees that is about to sleep, all of one moment (PostgreSQL).

    :ivar due: whether a message is due, or held by a lane.
    :ivar oldest: all transactions with a smaller number have ended, and it sees what they did.
    :ivar following: all transactions that had begun to write by then have a smaller number.
    """

    due: bool
    oldest: int
    following: int


def announce(connection: Connection, root: str, relay_id: uuid.UUID, host: str, pid: int) -> None:
    """Write the row of a relay that has just started, and is awake.

    Forgets those of the root that were not seen for an hour: locks only their rows, which nobody
    writes any more. One that comes back after all announces itself anew.
    """
    connection.execute(
        relays.delete().where(relays.c.root == root, relays.c.seen_us < instant() - FORGET_US)
    )
    # One reading of the clock for both times.
    now = sa.select(now_us()).scalar_subquery()
    insert_new(
        connection,
        relays,
        root=root,
        relay_id=relay_id,
        host=host,
        pid=pid,
        started_us=now,
        seen_us=now,
        sleeping=False,
    )


def tell(connection: Connection, root: str, relay_id: uuid.UUID, sleeping: bool) -> bool:
    """Note that a relay was seen, and whether it sleeps; false where it is not announced.

    One statement, locking the relay's own row, which only it writes. On PostgreSQL its commit does
    not wait for the disk: a server that crashes wakes nobody, and takes no word for it.
    """
    mine = sa.and_(relays.c.root == root, relays.c.relay_id == relay_id)
    if connection.dialect.name == "postgresql":
        # By a query of its own: a distributed ledger takes it in no change.
        unwaited = sa.select(sa.func.set_config("synchronous_commit", "off", True))
        mine &= unwaited.scalar_subquery().is_not(None)
    told = connection.execute(
        relays.update().where(mine).values(seen_us=now_us(), sleeping=sleeping)
    )
    return bool(told.rowcount)


def leave(connection: Connection, root: str, relay_id: uuid.UUID) -> None:
    """Delete the row of a relay that stops; one statement."""
    connection.execute(relays.delete().where(relays.c.root == root, relays.c.relay_id == relay_id))


def anything_due(connection: Connection, root: str) -> bool:
    """Tell whether a message is due, or held by a lane. One SELECT; locks nothing."""
    return bool(connection.execute(sa.select(_is_due(root))).scalar())


def look(connection: Connection, root: str) -> Look:
    """Look whether a message is due, and who may commit one still. One SELECT; locks nothing."""
    snapshot = sa.func.pg_current_snapshot()
    oldest, following = (
        sa.cast(sa.cast(bound(snapshot), sa.Text), sa.BigInteger)
        for bound in (sa.func.pg_snapshot_xmin, sa.func.pg_snapshot_xmax)
    )
    found = connection.execute(sa.select(_is_due(root), oldest, following)).one()
    return Look(*found)


def _is_due(root: str) -> sa.ColumnElement[bool]:
    """Return whether a message is due: by the first of each state, one look into the index.

    However many are due later: asked whether any exists, PostgreSQL may read all of them.
    """
    firsts = (
        sa.select(sa.func.min(outbox.c.due_us))
        .where(outbox.c.root == root, outbox.c.state == state)
        .scalar_subquery()
        for state in ("due", "held")
    )
    return sa.or_(*(sa.func.coalesce(first <= instant(), sa.false()) for first in firsts))


def seen(connection: Connection, root: str) -> list[Seen]:
    """Return the relays of a root, the one that was seen last first. Locks nothing."""
    rows = connection.execute(
        sa.select(
            relays.c.relay_id,
            relays.c.host,
            relays.c.pid,
            relays.c.started_us,
            relays.c.seen_us,
            (now_us() - relays.c.seen_us).label("age_us"),
            relays.c.sleeping,
        )
        .where(relays.c.root == root)
        .order_by(relays.c.seen_us.desc(), relays.c.relay_id)
    )
    return [Seen(**row._mapping) for row in rows]


def channel(root: str) -> str:
    """Return the channel on which the function ``budget_wake`` tells sleeping relays of a root."""
    return f"budget_{hashlib.md5(root.encode(), usedforsecurity=False).hexdigest()}"


def notify(connection: Connection, root: str, payload: str) -> None:
    """Send a notification to the root's relays (PostgreSQL); one that is to wake has no payload.

    :raises StoreError: from :class:`Store`, where the server's queue of notifications is full.
    """
    connection.execute(sa.select(sa.func.pg_notify(channel(root), payload)))
