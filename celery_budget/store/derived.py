"""What the ledger has noted of its own rows, to save looks, and what is wrong with that.

Messages that are passed by since another comes before them, and counts of what waits. Each can be
worked out anew; none is believed where money is concerned.
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store import outbox as outboxes
from celery_budget.store.claims import predecessor
from celery_budget.store.schema import (
    IS_UNPUBLISHED,
    backlog,
    instant,
    lane_tallies,
    now_us,
    outbox,
)

__all__ = ["Misdated", "let_go", "misdated", "recount", "stuck_behind"]

#: The name of a lane, or none for the outbox, and the time that its count is from.
Misdated = tuple[str | None, int]


def _stuck(root: str) -> sa.ColumnElement[bool]:
    """Tell messages that are passed by, and before which none comes."""
    return sa.and_(
        outbox.c.root == root,
        outbox.c.behind,
        sa.text(IS_UNPUBLISHED),
        predecessor(root).is_(None),
    )


def stuck_behind(connection: Connection, root: str, limit: int) -> list[tuple[uuid.UUID, str]]:
    """Return messages that are passed by for good, and their tasks: nothing comes before them.

    Who publishes the one before, or deletes it, lets the next follow in that transaction. Locks
    nothing.
    """
    rows = connection.execute(
        sa.select(outbox.c.outbox_id, outbox.c.task_id)
        .where(_stuck(root))
        .order_by(outbox.c.outbox_id)
        .limit(limit)
    )
    return [(row.outbox_id, row.task_id) for row in rows]


def let_go(connection: Connection, root: str, outbox_id: uuid.UUID) -> bool:
    """Have a message that is passed by for good looked at again; false where it is not any more.

    Locks its row. Of one before which another is written meanwhile it is found out with the next
    claim, which looks for itself.
    """
    mine = sa.and_(_stuck(root), outbox.c.outbox_id == outbox_id)
    row = connection.execute(sa.select(outbox.c.outbox_id).where(mine).with_for_update()).first()
    if row is None:
        return False
    connection.execute(
        outbox.update()
        .where(outbox.c.root == root, outbox.c.outbox_id == outbox_id)
        .values(behind=False)
    )
    outboxes.wake(connection, root)
    return True


def misdated(connection: Connection, root: str) -> list[Misdated]:
    """Return counts of what waits that are from a time to come: they are believed until then.

    As where the clock of the database was set back. Locks nothing.
    """
    of_all = connection.execute(
        sa.select(backlog.c.counted_us).where(
            backlog.c.root == root, backlog.c.counted_us > instant()
        )
    ).scalars()
    of_lanes = connection.execute(
        sa.select(lane_tallies.c.lane, lane_tallies.c.counted_us)
        .where(lane_tallies.c.root == root, lane_tallies.c.counted_us > instant())
        .order_by(lane_tallies.c.lane)
    )
    return [*((None, counted_us) for counted_us in of_all), *((row[0], row[1]) for row in of_lanes)]


def recount(connection: Connection, root: str, lane: str | None) -> bool:
    """Have a count that is from a time to come made anew by the next admission that asks.

    One statement, locking its row; false where it is from the past by now.

    :param lane: whose it is; none for that of the outbox.
    """
    table = backlog if lane is None else lane_tallies
    mine = [table.c.root == root, table.c.counted_us > now_us()]
    if lane is not None:
        mine.append(lane_tallies.c.lane == lane)
    return bool(connection.execute(table.update().where(*mine).values(counted_us=0)).rowcount)
