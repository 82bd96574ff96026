"""Untold results: the ledger has ended a request, and its task's result does not say so yet.

Whatever ends a request notes it here in the same transaction, behind all other locks; the result is
stored after that, in no transaction. So a task that a worker has claimed first gets none, and what
a process that dies, or a result backend that is down, leaves here is told later.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.backoff import backoff_seconds
from celery_budget.core.identity import new_id
from celery_budget.store.schema import instant, now_us, reservations, untold

__all__ = ["Untold", "due", "forget", "note", "take", "withdraw"]

#: How long whoever takes a row has to tell it, before it is due again; longer with each try.
FIRST_WAIT_SECONDS = 2.0
LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Untold:
    """A result that had still to be stored when it was looked at.

    :ivar tries: how often somebody has set out to store it.
    """

    untold_id: uuid.UUID
    task_id: str
    reason: str
    tries: int


def note(
    connection: Connection,
    root: str,
    task_id: str,
    reason: str,
    reservation_id: uuid.UUID | None,
) -> None:
    """Note that a task's result has still to be stored. Locks nothing that others wait for.

    :param reservation_id: what has ended; none for a message that drew on no budget.
    """
    connection.execute(
        untold.insert().values(
            root=root,
            untold_id=new_id(),
            task_id=task_id,
            reason=reason,
            reservation_id=reservation_id,
            tries=0,
            due_us=now_us(),
            created_us=now_us(),
        )
    )


def due(connection: Connection, root: str, limit: int, task_id: str | None = None) -> list[Untold]:
    """Return what is to be told now, due longest first; with ``task_id`` only of that task.

    Locks nothing.
    """
    rows = connection.execute(
        sa.select(untold.c.untold_id, untold.c.task_id, untold.c.reason, untold.c.tries)
        .where(
            untold.c.root == root,
            untold.c.due_us <= instant(),
            sa.true() if task_id is None else untold.c.task_id == task_id,
        )
        .order_by(untold.c.due_us, untold.c.untold_id)
        .limit(limit)
    )
    return [Untold(**row._mapping) for row in rows]


def take(connection: Connection, root: str, seen: Untold) -> bool:
    """Take what was ``seen``, to tell it at once; false where there is nothing to tell.

    That is where another process has taken or told it since, of which the first wins; and where the
    result is another request's: one with this task id was admitted since, is open, or replaces it.
    Then the row goes. Otherwise it is due again after a while, longer each time, since whoever
    takes it may die, or fail. Locks the row.
    """
    mine = sa.and_(
        untold.c.root == root, untold.c.untold_id == seen.untold_id, untold.c.tries == seen.tries
    )
    ended, other = reservations.alias("ended"), reservations.alias("other")
    since = sa.tuple_(other.c.created_us, other.c.reservation_id) > sa.tuple_(
        ended.c.created_us, ended.c.reservation_id
    )
    of_another = sa.exists().where(
        ended.c.root == root,
        ended.c.reservation_id == untold.c.reservation_id,
        other.c.root == root,
        other.c.task_id == ended.c.task_id,
        other.c.reservation_id != ended.c.reservation_id,
        other.c.nesting >= ended.c.nesting,
        other.c.ended_us.is_(None) | since,
    )
    connection.execute(untold.delete().where(mine, of_another))
    wait = backoff_seconds(seen.tries + 1, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
    return bool(
        connection.execute(
            untold.update()
            .where(mine)
            .values(tries=seen.tries + 1, due_us=now_us() + int(wait * 1_000_000))
        ).rowcount
    )


def forget(connection: Connection, root: str, untold_id: uuid.UUID) -> None:
    """Delete what was told. Locks the row."""
    connection.execute(
        untold.delete().where(untold.c.root == root, untold.c.untold_id == untold_id)
    )


def withdraw(connection: Connection, root: str, task_id: str) -> None:
    """Tell no more of a task whose message, which draws on no budget, is published after all.

    Locks its rows. Of one that is being told just now it is too late.
    """
    connection.execute(
        untold.delete().where(
            untold.c.root == root, untold.c.task_id == task_id, untold.c.reservation_id.is_(None)
        )
    )
