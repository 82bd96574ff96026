"""Inquiries: attempts whose outcome nobody knows, and whose task is asked what became of them.

Such an attempt is open and nobody's: its reservation still holds what it held, and no delivery gets
it. It is concluded once: when its task has answered or undone it, or the time for that is over.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.messages import WireMessage
from celery_budget.core.usage import Used
from celery_budget.store import usage
from celery_budget.store.attempts import (
    UNCERTAIN,
    attempt_key,
    note_answered,
    of_reservation,
)
from celery_budget.store.lapses import conclude as go_on
from celery_budget.store.outbox import message_of
from celery_budget.store.reservations import TAKING, lock
from celery_budget.store.schema import attempts, instant, now_us, outbox, reservations
from celery_budget.store.tallies import taken_out

__all__ = ["Inquiry", "ask_again", "conclude", "due", "record_total", "take"]


@dataclass(frozen=True)
class Inquiry:
    """An attempt that is to be asked about.

    :ivar claim_id: its fence, which no worker holds.
    :ivar rerun: whether another attempt is to follow.
    :ivar tries: how often somebody has set out to ask.
    :ivar age_us: how long ago it was found to be lost.
    :ivar message: what started it; none where that is gone.
    :ivar used: what it has recorded of each unit.
    """

    reservation_id: uuid.UUID
    attempt: int
    claim_id: uuid.UUID
    rerun: bool
    tries: int
    age_us: int
    task_id: str
    task_name: str
    message: WireMessage | None
    used: dict[str, int]


def due(connection: Connection, root: str, limit: int) -> list[Inquiry]:
    """Return attempts that are to be asked about now, due longest first. Locks nothing."""
    its_message = sa.and_(
        outbox.c.root == attempts.c.root,
        outbox.c.reservation_id == attempts.c.reservation_id,
        outbox.c.retries == attempts.c.retries,
    )
    rows = connection.execute(
        sa.select(
            attempts.c.reservation_id,
            attempts.c.attempt,
            attempts.c.claim_id,
            attempts.c.rerun,
            attempts.c.replays,
            (now_us() - attempts.c.ended_us).label("age_us"),
            reservations.c.task_id.label("id_of_task"),
            reservations.c.task_name.label("name_of_task"),
            outbox.c.outbox_id,
            *(
                outbox.c[name]
                for name in (
                    "task_id",
                    "task_name",
                    "body",
                    "envelope",
                    "queue",
                    "expires_us",
                    "rank",
                    "order_key",
                    "broker",
                )
            ),
        )
        .select_from(attempts.join(reservations, of_reservation).outerjoin(outbox, its_message))
        .where(
            attempts.c.root == root,
            attempts.c.lease_until_us.is_not(None),
            attempts.c.lease_until_us <= instant(),
            attempts.c.outcome == UNCERTAIN,
        )
        .order_by(attempts.c.lease_until_us)
        .limit(limit)
    ).all()
    return [
        Inquiry(
            row.reservation_id,
            row.attempt,
            row.claim_id,
            row.rerun,
            row.replays,
            max(0, int(row.age_us)),
            row.id_of_task,
            row.name_of_task,
            None if row.outbox_id is None else message_of(row),
            usage.recorded(connection, root, row.reservation_id, row.attempt),
        )
        for row in rows
    ]


def take(connection: Connection, root: str, seen: Inquiry, hold_us: int) -> bool:
    """Take an inquiry for ``hold_us``, to make it at once; of several the first gets it.

    One statement, locking the attempt. Whoever dies with it has it made again by another.
    """
    taken = connection.execute(
        attempts.update()
        .where(
            _mine(root, seen),
            attempts.c.replays == seen.tries,
            attempts.c.lease_until_us <= now_us(),
        )
        .values(lease_until_us=now_us() + hold_us, replays=seen.tries + 1)
    )
    return bool(taken.rowcount)


def ask_again(connection: Connection, root: str, seen: Inquiry, wait_us: int) -> None:
    """Give back what was taken, to be asked about again in ``wait_us``.

    One statement, locking the attempt. Nothing happens where another has taken it since.
    """
    connection.execute(
        attempts.update()
        .where(_mine(root, seen), attempts.c.replays == seen.tries + 1)
        .values(lease_until_us=now_us() + wait_us)
    )


def record_total(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    key: str,
    amounts: dict[str | None, int],
) -> None:
    """Record what an attempt has used in all, as far as it has not recorded that itself.

    What was assumed of its replies that did not tell all is taken back. Locks as
    :func:`usage.record`; a repeat adds nothing, unless it tells of more.

    :param amounts: by unit; none stands for the first that is charged by use.
    :raises PolicyError, InvalidAmount: as :func:`usage.record`; nothing may be committed then.
    """
    row = lock(connection, root, reservation_id)
    totals = {
        usage.unit_of(connection, root, reservation_id, unit): amount
        for unit, amount in amounts.items()
    }
    # Around all of it: the tallies are locked after the last balance.
    with taken_out(connection, row):
        if row is not None:
            usage.take_back(connection, row, attempt, totals)
        known = usage.recorded(connection, root, reservation_id, attempt)
        for unit, total in totals.items():
            if total > known.get(unit, -1):
                missing = Used({unit: total - known.get(unit, 0)})
                usage.record(connection, root, reservation_id, attempt, f"{key}:{total}", missing)


def conclude(
    connection: Connection,
    root: str,
    seen: Inquiry,
    *,
    park_us: int,
    answered: bool,
    reason: str | None,
) -> str | None:
    """Close the attempt and go on; return the state reached, none where that was done before.

    Locks the reservation, its balances, its messages.

    :param answered: whether its task has told what it used: that is charged, and nothing flagged.
    :param reason: why the reservation ends, if it does.
    :param park_us: how long another attempt may wait where it does not fit again.
    """
    row = lock(connection, root, seen.reservation_id, TAKING)
    closed = connection.execute(
        attempts.update()
        .where(_mine(root, seen))
        .values(lease_until_us=None)
        .returning(attempts.c.rerun)
    ).scalar()
    if row is None or closed is None:
        return None
    state = go_on(
        connection,
        row,
        seen.attempt,
        again=closed,
        park_us=park_us,
        answered=answered,
        reason=reason,
        # Of one that was not to run again it is told already, or Celery has stored it.
        tell=closed,
    )
    if answered and state == "waiting":
        note_answered(connection, root, seen.reservation_id, seen.attempt)
    return state


def _mine(root: str, seen: Inquiry) -> sa.ColumnElement[Any]:
    return sa.and_(
        attempt_key(root, seen.reservation_id, seen.attempt),
        attempts.c.claim_id == seen.claim_id,
        attempts.c.outcome == UNCERTAIN,
        attempts.c.lease_until_us.is_not(None),
    )
