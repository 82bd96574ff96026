"""Reuse: which run the calls of one identity join now, and what it has returned.

One row for each identity, with the request id of its present run. Whether that may be joined is
told by the run itself; where not, the row is given another request id, behind its lock: of callers
at the same time one makes it, the others find it. Who admits first under a request id has the
reservation, and the others are told so as of any request that is repeated.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.identity import new_id, task_id_of
from celery_budget.core.jobs import ENDED, SUCCEEDED, job_state
from celery_budget.core.reuse import PREFIX
from celery_budget.store import jobs, parked
from celery_budget.store.insert import insert_new
from celery_budget.store.schema import effects, instant, now_us, reservations, reuse
from celery_budget.store.schema import parked as parked_table

__all__ = ["forget", "forget_key", "joined", "keep", "kept", "prune", "renewed"]


def joined(connection: Connection, root: str, owner: str, key: str, kept_us: int) -> str | None:
    """Return the request id that calls of one identity join; none where a new run is due.

    Joined is what has not ended, and what has succeeded, for ``kept_us`` after its end. So is what
    has failed after it had an effect, so that it is not had again by somebody who only asked for
    the same once more. Locks nothing; three reads.
    """
    row = connection.execute(sa.select(reuse).where(*_key(root, owner, key))).first()
    return None if row is None or not _may_join(connection, row, kept_us) else row.request_id


def renewed(connection: Connection, root: str, owner: str, key: str, kept_us: int) -> str:
    """Return the request id that calls of one identity join, a new one where a new run is due.

    Locks the identity's row: of several at once the second finds what the first has made.
    """
    request_id = PREFIX + str(new_id())
    fresh: dict[str, Any] = {
        "request_id": request_id,
        "task_id": task_id_of(owner, request_id),
        "kept_us": kept_us,
        "until_us": now_us() + kept_us,
        "payload": None,
    }
    if insert_new(connection, reuse, root=root, owner=owner, key=key, **fresh):
        return request_id
    row = connection.execute(
        sa.select(reuse).where(*_key(root, owner, key)).with_for_update()
    ).first()
    if row is None:
        # Forgotten, or pruned, in between.
        return renewed(connection, root, owner, key, kept_us)
    if _may_join(connection, row, kept_us):
        return str(row.request_id)
    connection.execute(reuse.update().where(*_key(root, owner, key)).values(**fresh))
    return request_id


def _may_join(connection: Connection, row: sa.Row[Any], kept_us: int) -> bool:
    of_task = sa.and_(
        reservations.c.root == row.root,
        reservations.c.task_id == row.task_id,
        (reservations.c.owner == row.owner) | (reservations.c.nesting > 0),
    )
    last = jobs.last_of(connection, of_task)
    if last is None:
        # Whoever has made it is about to admit it, or was refused: it is free for the next one.
        return True
    waits = parked.of_task(connection, row.root, row.task_id) is not None
    state = job_state(
        last.state, last.reason, last.outcome, parked=waits, quarantined=last.quarantined
    )
    if state is not None and state not in ENDED:
        return True
    if last.ended_for_us is not None and last.ended_for_us > kept_us:
        return False
    # Of what a task without a budget goes on with nobody knows better.
    return state in (SUCCEEDED, None) or _had_effect(connection, of_task)


def _had_effect(connection: Connection, of_task: sa.ColumnElement[bool]) -> bool:
    found = connection.execute(
        sa.select(effects.c.key)
        .join(
            reservations,
            sa.and_(
                effects.c.root == reservations.c.root,
                effects.c.reservation_id == reservations.c.reservation_id,
            ),
        )
        .where(of_task)
        .limit(1)
    )
    return found.first() is not None


def keep(connection: Connection, row: sa.Row[Any], payload: str) -> None:
    """Keep what a reservation's attempt has returned, where its request is one to be joined.

    Nothing happens where it was forgotten meanwhile. The caller holds the reservation's row; locks
    that of the identity.
    """
    if not (row.request_id.startswith(PREFIX) or row.nesting):
        return
    connection.execute(
        reuse.update()
        .where(
            reuse.c.root == row.root,
            reuse.c.task_id == row.task_id,
            reuse.c.owner == row.owner,
        )
        .values(payload=payload, until_us=now_us() + reuse.c.kept_us)
    )


def kept(connection: Connection, root: str, task_id: str, owner: str) -> str | None:
    """Return what was kept of a task's return value, for its owner; none where nothing is.

    Locks nothing.
    """
    return connection.execute(
        sa.select(reuse.c.payload).where(
            reuse.c.root == root,
            reuse.c.task_id == task_id,
            reuse.c.owner == owner,
            reuse.c.until_us > instant(),
        )
    ).scalar()


def forget(connection: Connection, root: str, task_id: str, owner: str) -> bool:
    """Have calls join a task's run no more, and forget what it returned; false where none do."""
    return _delete(
        connection, reuse.c.root == root, reuse.c.task_id == task_id, reuse.c.owner == owner
    )


def forget_key(connection: Connection, root: str, owner: str, key: str) -> bool:
    """As :func:`forget`, by what makes calls the same."""
    return _delete(connection, *_key(root, owner, key))


def _delete(connection: Connection, *which: sa.ColumnElement[bool]) -> bool:
    return bool(connection.execute(reuse.delete().where(*which)).rowcount)


def prune(connection: Connection, root: str, limit: int) -> int:
    """Delete up to ``limit`` identities whose time is over; return how many there were.

    Not where their run has not ended, or ended within their time. Locks what it deletes, and skips
    what is locked.
    """
    counts = sa.exists(sa.text("1")).where(
        reservations.c.root == reuse.c.root,
        reservations.c.task_id == reuse.c.task_id,
        reservations.c.ended_us.is_(None) | (reservations.c.ended_us > instant() - reuse.c.kept_us),
    )
    waits = sa.exists(sa.text("1")).where(
        parked_table.c.root == reuse.c.root, parked_table.c.task_id == reuse.c.task_id
    )
    gone = connection.execute(
        sa.select(reuse.c.owner, reuse.c.key)
        .where(reuse.c.root == root, reuse.c.until_us <= instant(), ~counts, ~waits)
        .order_by(reuse.c.until_us)
        .limit(limit)
        .with_for_update(of=reuse, skip_locked=True)
    ).all()
    if gone:
        connection.execute(
            reuse.delete().where(
                reuse.c.root == root,
                sa.tuple_(reuse.c.owner, reuse.c.key).in_([tuple(row) for row in gone]),
            )
        )
    return len(gone)


def _key(root: str, owner: str, key: str) -> tuple[sa.ColumnElement[bool], ...]:
    return reuse.c.root == root, reuse.c.owner == owner, reuse.c.key == key
