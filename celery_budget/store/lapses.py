"""Attempts whose worker is gone, or seems to be: found, ended, run again, or given again.

What is found is looked at again behind the lock of its reservation before it is changed. A worker
that was only slow finds its fence gone.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import CLAIMABLE, Outcome
from celery_budget.store import outbox, plans, untold, usage
from celery_budget.store.attempts import (
    NOBODY,
    attempt_key,
    follow,
    of_reservation,
    owned,
    run_again,
    set_reservation,
    write_end,
)
from celery_budget.store.continuations import drop_next
from celery_budget.store.reservations import TAKING, charge_of, finish, lines_of, lock, release
from celery_budget.store.schema import attempts, instant, now_us, reservations
from celery_budget.store.silent import Silent

__all__ = [
    "REPLAY_LEASES",
    "OpenAttempt",
    "abandon",
    "lapsed",
    "open_of",
    "postpone",
    "republish_ended",
    "undelivered",
]

#: Why a request ends whose message nobody started, however often it was published.
UNDELIVERED = "undelivered"

#: A replay may take this many leases before the message is published once more.
REPLAY_LEASES = 2


@dataclass(frozen=True)
class OpenAttempt:
    """An attempt that was not closed when it was looked at.

    :ivar ended_us: when its call ended; none while it runs.
    :ivar replayable: whether its outcome was kept and can be given again.
    """

    reservation_id: uuid.UUID
    attempt: int
    claim_id: uuid.UUID
    retries: int
    late_ack: bool
    ended_us: int | None
    outcome: str | None
    replayable: bool
    replays: int
    task_id: str
    task_name: str
    deliveries: int


def open_of(
    connection: Connection, root: str, task_id: str, boot_id: uuid.UUID
) -> OpenAttempt | None:
    """Return the open attempt of a task that this worker claimed; none where it has none."""
    row = connection.execute(
        _select_open().where(
            attempts.c.root == root,
            reservations.c.task_id == task_id,
            attempts.c.boot_id == boot_id,
            attempts.c.lease_until_us.is_not(None),
        )
    ).first()
    return None if row is None else OpenAttempt(**row._mapping)


def undelivered(connection: Connection, root: str, seen: Silent) -> bool:
    """Release a request that nobody has started, however often; its result is to be told.

    Locks its reservation, its balances, its messages. False where it was started, or has ended,
    since its message was ``seen``.
    """
    row = lock(connection, root, seen.reservation_id)
    if row is None or row.state not in CLAIMABLE:
        return False
    release(connection, root, seen.reservation_id, UNDELIVERED)
    untold.note(connection, root, row.task_id, UNDELIVERED, row.reservation_id)
    return True


def lapsed(connection: Connection, root: str, limit: int) -> list[OpenAttempt]:
    """Return open attempts whose lease is over, longest first. Locks nothing."""
    rows = connection.execute(
        _select_open()
        .where(attempts.c.root == root, attempts.c.lease_until_us <= instant())
        .order_by(attempts.c.lease_until_us)
        .limit(limit)
    )
    return [OpenAttempt(**row._mapping) for row in rows]


def postpone(connection: Connection, root: str, seen: OpenAttempt, wait_us: int) -> None:
    """Let a lapsed attempt be for ``wait_us``, so that others come first meanwhile.

    One statement, locking the attempt. Nothing happens where it was renewed, claimed, closed or
    postponed since it was ``seen``.
    """
    connection.execute(
        attempts.update()
        .where(
            attempt_key(root, seen.reservation_id, seen.attempt),
            attempts.c.claim_id == seen.claim_id,
            attempts.c.lease_until_us <= now_us(),
        )
        .values(lease_until_us=now_us() + wait_us)
    )


def _select_open() -> sa.Select[Any]:
    return sa.select(
        attempts.c.reservation_id,
        attempts.c.attempt,
        attempts.c.claim_id,
        attempts.c.retries,
        attempts.c.late_ack,
        attempts.c.ended_us,
        attempts.c.outcome,
        attempts.c.payload.is_not(None).label("replayable"),
        attempts.c.replays,
        reservations.c.task_id,
        reservations.c.task_name,
        reservations.c.deliveries,
    ).join(
        reservations,
        of_reservation,
    )


def republish_ended(
    connection: Connection,
    root: str,
    seen: OpenAttempt,
    wait_us: int,
    *,
    only_lapsed: bool = True,
) -> bool:
    """Publish an ended attempt's message again and give its replay ``wait_us``.

    The lease is nobody's from here on, so that the first delivery gets it; a worker that was only
    slow may still close. Locks the reservation; false where the attempt was closed, replayed or
    (unless its process is known to be gone) renewed since it was ``seen``.
    """
    lock(connection, root, seen.reservation_id)
    extended = connection.execute(
        attempts.update()
        .where(
            attempt_key(root, seen.reservation_id, seen.attempt),
            attempts.c.claim_id == seen.claim_id,
            attempts.c.lease_until_us.is_not(None),
            attempts.c.lease_until_us <= now_us() if only_lapsed else sa.true(),
        )
        .values(boot_id=NOBODY, lease_until_us=now_us() + wait_us, replays=attempts.c.replays + 1)
    ).rowcount
    if extended:
        outbox.make_due(connection, root, seen.reservation_id, seen.retries)
    return bool(extended)


def abandon(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    *,
    again: bool,
    park_us: int,
    ready: str | None = None,
    only_lapsed: bool = True,
) -> str | None:
    """End a running attempt whose outcome is not known; return the state reached.

    None where it has ended or was renewed in the meantime. Its worker has no say any more: where it
    is lost, its result is to be told. Locks the reservation, its balances, its messages. An effect
    of the attempt in a transaction that is open has it pass the reservation by (none as well), or
    wait where the process is known to be gone, and its transaction soon.

    :param again: have it run again, unless it was cancelled: the reservation waits, what this
        attempt recorded stays recorded. Otherwise it is lost and flagged: the greater of recorded
        and estimated is charged on top of what earlier attempts used.
    :param park_us: how long it may wait where it does not fit again on top of what it used.
    :param ready: ``returned`` or ``raised`` where Celery has stored that result: the ledger ends
        with it, charged like a lost one unless something was recorded.
    :param only_lapsed: leave it alone while its lease is valid. Otherwise its process is known to
        be gone, and Celery, which knows it too, stores the result of a lost one.
    """
    key = (root, reservation_id, attempt, claim_id)
    row = owned(connection, *key, TAKING, pass_by=only_lapsed)
    if row is None:
        return None
    if only_lapsed:
        over = connection.execute(
            sa.select(attempts.c.attempt).where(
                attempt_key(root, reservation_id, attempt), attempts.c.lease_until_us <= now_us()
            )
        ).first()
        if over is None:
            return None
    uncertain = Outcome(ready or "uncertain")
    write_end(connection, root, reservation_id, attempt, uncertain, is_open=False)
    if row.cancelled_us is not None:
        drop_next(connection, root, reservation_id, attempt)
    elif again and ready is None:
        retries = follow(connection, root, reservation_id, attempt)
        if retries is not None:
            # A retry that the attempt had written already takes over.
            set_reservation(
                connection, root, reservation_id, state="waiting", retries=retries, deliveries=0
            )
            return "waiting"
        if run_again(connection, row, attempt, park_us):
            return "waiting"
    of = lines_of(connection, root, reservation_id)
    recorded = usage.recorded(connection, root, reservation_id, attempt)
    unmetered = [line.line for line in of if usage.is_unmetered(line, recorded)]
    charges = {}
    for line in of:
        missing = ready is None or line.line in unmetered
        promised = line.estimate + line.extended if missing else 0
        charges[line.line] = charge_of(line, max(0, promised - recorded.get(line.unit, 0)))
    state = "settled" if ready else "lost"
    finish(
        connection,
        root,
        row,
        state,
        charges,
        unmetered=bool(unmetered),
        of=of,
        goes_on=ready == "returned",
    )
    if ready == "returned" and row.plan_id is not None:
        plans.release_unreached(connection, row)
    outbox.drop(connection, root, reservation_id)
    if state == "lost" and only_lapsed:
        untold.note(connection, root, row.task_id, state, reservation_id)
    return state
