"""Effects: proofs that something was done, each written in the transaction that does it.

A proof is there for others when that transaction has been committed, with what was done. It is kept
at least until its request has ended, so that no attempt of it does the same again.
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import Begun, Closed, Happened
from celery_budget.store.attempts import owned
from celery_budget.store.insert import insert_new
from celery_budget.store.reservations import IN_EFFECT
from celery_budget.store.schema import attempts, effects, instant, now_us, reservations

__all__ = ["begin", "keep", "prune", "withdraw"]


def begin(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    key: str,
) -> Begun | Happened | Closed:
    """Write the proof of an effect that the running attempt is about to have; or what it had.

    ``Closed``, and nothing changed, where the attempt's fence is gone. Locks the reservation until
    the transaction ends, so that nobody takes the claim away before it is known what became of the
    effect. On SQLite the one write lock does that. Of two calls at once, both of this attempt, the
    second waits for the first one's transaction to end.
    """
    if owned(connection, root, reservation_id, attempt, claim_id, IN_EFFECT) is None:
        return Closed("ended")
    inserted = insert_new(
        connection,
        effects,
        root=root,
        reservation_id=reservation_id,
        key=key,
        attempt=attempt,
        created_us=now_us(),
    )
    if inserted:
        return Begun()
    found = connection.execute(
        sa.select(effects.c.value).where(_key(root, reservation_id, key))
    ).first()
    return Happened(None if found is None else found.value)


def keep(
    connection: Connection, root: str, reservation_id: uuid.UUID, key: str, value: str | None
) -> bool:
    """Write what an effect led to beside its proof; false where that is gone: it was rolled back.

    Its own transaction holds the row.
    """
    kept = connection.execute(
        effects.update()
        .where(_key(root, reservation_id, key))
        .values(value=value)
        .returning(effects.c.attempt)
    )
    return kept.first() is not None


def withdraw(connection: Connection, root: str, reservation_id: uuid.UUID, key: str) -> None:
    """Delete the proof of an effect that its own transaction did not have after all."""
    connection.execute(effects.delete().where(_key(root, reservation_id, key)))


def prune(connection: Connection, root: str, kept_us: int, limit: int) -> int:
    """Delete up to ``limit`` effects of requests that ended longer ago than ``kept_us``.

    Not while an attempt is open that may be given again. Locks what it deletes, and skips what is
    locked. Returns how many there were.
    """
    before = instant() - kept_us
    has_open_attempt = sa.exists(sa.text("1")).where(
        attempts.c.root == root,
        attempts.c.reservation_id == effects.c.reservation_id,
        attempts.c.lease_until_us.is_not(None),
    )
    gone = connection.execute(
        sa.select(effects.c.reservation_id, effects.c.key)
        .join(
            reservations,
            sa.and_(
                reservations.c.root == effects.c.root,
                reservations.c.reservation_id == effects.c.reservation_id,
            ),
        )
        # An effect is older than its request's end: by its own age it is found without a scan.
        .where(
            effects.c.root == root,
            effects.c.created_us < before,
            reservations.c.ended_us < before,
            ~has_open_attempt,
        )
        .order_by(effects.c.created_us)
        .limit(limit)
        .with_for_update(of=effects, skip_locked=True)
    ).all()
    if gone:
        connection.execute(
            effects.delete().where(
                effects.c.root == root,
                sa.tuple_(effects.c.reservation_id, effects.c.key).in_(
                    [tuple(row) for row in gone]
                ),
            )
        )
    return len(gone)


def _key(root: str, reservation_id: uuid.UUID, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(
        effects.c.root == root, effects.c.reservation_id == reservation_id, effects.c.key == key
    )
