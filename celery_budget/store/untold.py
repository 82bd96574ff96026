"""Untold results: the ledger has ended a request, and its task's result does not say so yet.

Whatever ends a request notes it here in the same transaction, behind all other locks; the result is
stored after that, in no transaction. So a task that a worker has claimed first gets none, and what
a process that dies, or a result backend that is down, leaves here is told later.

While one is being told, no message of the same task is published: the result of a request with the
same id comes after it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.backoff import backoff_seconds
from celery_budget.core.identity import new_id
from celery_budget.store.schema import instant, now_us, reservations, untold

__all__ = [
    "Untold",
    "due",
    "failed",
    "forget",
    "is_anothers",
    "is_being_told",
    "note",
    "take",
    "told_until",
    "withdraw",
]

#: How long whoever takes a row has to tell it, before it is due again; longer with each try.
FIRST_WAIT_SECONDS = 2.0
LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Untold:
    """A result that had still to be stored when it was looked at.

    :ivar tries: how often somebody has set out to store it; negative where the last one has said
        that it failed.
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
    """Take what was ``seen``, to tell it at once; false where another process has it, or told it.

    Of several the first wins. It is due again after a while, longer each time, since whoever takes
    it may die, or fail. Locks the row.
    """
    tries = abs(seen.tries) + 1
    wait = backoff_seconds(tries, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
    return bool(
        connection.execute(
            untold.update()
            .where(
                untold.c.root == root,
                untold.c.untold_id == seen.untold_id,
                untold.c.tries == seen.tries,
            )
            .values(tries=tries, due_us=now_us() + int(wait * 1_000_000))
        ).rowcount
    )


def failed(connection: Connection, root: str, seen: Untold) -> None:
    """Note that whoever has taken what was ``seen`` tells it no more. Locks the row."""
    tries = abs(seen.tries) + 1
    connection.execute(
        untold.update()
        .where(untold.c.root == root, untold.c.untold_id == seen.untold_id, untold.c.tries == tries)
        .values(tries=-tries)
    )


def is_anothers(connection: Connection, root: str, seen: Untold) -> bool:
    """Delete what was taken where the result is another request's; tell whether it was.

    That is where one with this task id was admitted since, is open, or replaces it. To be called
    when :func:`take` has been committed: what is admitted later finds that it is being told, and is
    not published until it is. Locks the row.
    """
    ended, other = reservations.alias("ended"), reservations.alias("other")
    since = sa.tuple_(other.c.created_us, other.c.reservation_id) > sa.tuple_(
        ended.c.created_us, ended.c.reservation_id
    )
    of_another = sa.exists(sa.text("1")).where(
        ended.c.root == root,
        ended.c.reservation_id == untold.c.reservation_id,
        other.c.root == root,
        other.c.task_id == ended.c.task_id,
        other.c.reservation_id != ended.c.reservation_id,
        other.c.nesting >= ended.c.nesting,
        other.c.ended_us.is_(None) | since,
    )
    return bool(
        connection.execute(
            untold.delete().where(
                untold.c.root == root, untold.c.untold_id == seen.untold_id, of_another
            )
        ).rowcount
    )


def told_until(
    root: sa.ColumnElement[str], task_id: sa.ColumnElement[str]
) -> sa.ScalarSelect[int | None]:
    """Return until when, at the longest, a result of a task is being told; null where none is.

    Whoever has taken it has died after that: it is told anew then, or is another's.
    """
    return (
        sa.select(sa.func.max(untold.c.due_us))
        .where(
            untold.c.root == root,
            untold.c.task_id == task_id,
            untold.c.tries > 0,
            untold.c.due_us > instant(),
        )
        .scalar_subquery()
    )


def is_being_told(connection: Connection, root: str, task_id: str) -> bool:
    """Tell whether a result of a task is being told. Locks nothing."""
    until = told_until(sa.literal(root), sa.literal(task_id))
    return connection.execute(sa.select(until)).scalar() is not None


def forget(connection: Connection, root: str, untold_id: uuid.UUID) -> None:
    """Delete what was told. Locks the row."""
    connection.execute(
        untold.delete().where(untold.c.root == root, untold.c.untold_id == untold_id)
    )


def withdraw(connection: Connection, root: str, task_id: str) -> None:
    """Tell no more of a task whose message, which draws on no budget, is published after all.

    Locks its rows. Of one that is being told just now it is too late; see :func:`is_being_told`.
    """
    connection.execute(
        untold.delete().where(
            untold.c.root == root, untold.c.task_id == task_id, untold.c.reservation_id.is_(None)
        )
    )
