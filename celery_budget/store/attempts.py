"""Attempts: claimed under a fence, kept alive by a lease, ended once, closed when nothing is left.

An attempt is open while it has a lease: it runs, or it has ended and its worker still publishes
what follows and stores the result. Every function locks the reservation first.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    CLAIMABLE,
    Claimed,
    Closed,
    Missing,
    Outcome,
    Parked,
    Replay,
    Reserved,
    ReserveRequest,
    Running,
    StoredOutcome,
)
from celery_budget.store import outbox, parked, usage
from celery_budget.store.continuations import again_request, next_attempt
from celery_budget.store.reservations import finish, lines_of, lock, release
from celery_budget.store.schema import attempts, now_us, reservations

__all__ = [
    "REPLAY_LEASES",
    "Delivery",
    "OpenAttempt",
    "abandon",
    "claim",
    "close",
    "end",
    "lapsed",
    "open_of",
    "owned",
    "renew",
    "republish_ended",
    "unclaimed_lost",
    "write_retry",
]


#: A replay may take this many leases before the message is published once more.
REPLAY_LEASES = 2

#: Who holds the lease of an ended attempt that waits for a worker to give its outcome again.
NOBODY = uuid.UUID(int=0)


@dataclass(frozen=True)
class Delivery:
    """One delivery of a message to a worker.

    :ivar retries: Celery's count of retries in the message; with the task id and the nesting it
        tells which attempt the message stands for.
    :ivar late_ack: whether the broker still has the message while the task runs.
    """

    root: str
    reservation_id: uuid.UUID
    task_id: str
    nesting: int
    retries: int
    worker: str
    boot_id: uuid.UUID
    late_ack: bool


def _key(root: str, reservation_id: uuid.UUID, attempt: int) -> sa.ColumnElement[bool]:
    return sa.and_(
        attempts.c.root == root,
        attempts.c.reservation_id == reservation_id,
        attempts.c.attempt == attempt,
    )


def claim(
    connection: Connection, delivery: Delivery, claim_id: uuid.UUID, lease_us: int
) -> Claimed | Replay | Running | Closed | Missing:
    """Claim the attempt a delivery stands for; of several deliveries one gets it.

    Locks the reservation, so that deliveries of one message go one after another. A claim that
    committed while the connection was lost is found again by its ``claim_id``.
    """
    root, reservation_id = delivery.root, delivery.reservation_id
    row = lock(connection, root, reservation_id)
    if row is None or row.task_id != delivery.task_id or row.nesting != delivery.nesting:
        return Missing()
    current = connection.execute(
        sa.select(attempts, (attempts.c.lease_until_us > now_us()).label("alive")).where(
            _key(root, reservation_id, row.attempts)
        )
    ).first()
    if current is not None and current.claim_id == claim_id:
        if current.ended_us is None:
            return Claimed(current.attempt, claim_id)
        return Replay(
            current.attempt, claim_id, StoredOutcome(str(current.outcome), current.payload)
        )
    if row.state in CLAIMABLE and delivery.retries == row.retries:
        if parked.parked_of(connection, root, reservation_id) is not None:
            # The broker's own redelivery: what it would need is not held yet. It is published
            # again when it fits.
            return Closed(str(row.state))
        connection.execute(
            attempts.insert().values(
                root=root,
                reservation_id=reservation_id,
                attempt=row.attempts + 1,
                claim_id=claim_id,
                retries=row.retries,
                worker=delivery.worker,
                boot_id=delivery.boot_id,
                late_ack=delivery.late_ack,
                started_us=now_us(),
                lease_until_us=now_us() + lease_us,
                replays=0,
            )
        )
        _update(
            connection,
            root,
            reservation_id,
            state="running",
            attempts=row.attempts + 1,
            deliveries=row.deliveries + 1,
        )
        return Claimed(row.attempts + 1, claim_id)
    if current is None or current.lease_until_us is None or current.retries != delivery.retries:
        return Running() if row.state == "running" else Closed(str(row.state))
    if current.ended_us is None or (current.alive and current.boot_id != NOBODY):
        # It runs, or its worker is still busy with what follows; should that worker be gone,
        # recovery publishes the message again when the lease has lapsed.
        return Running()
    connection.execute(
        attempts.update()
        .where(_key(root, reservation_id, current.attempt))
        .values(
            claim_id=claim_id,
            worker=delivery.worker,
            boot_id=delivery.boot_id,
            lease_until_us=now_us() + lease_us,
        )
    )
    return Replay(current.attempt, claim_id, StoredOutcome(str(current.outcome), current.payload))


def owned(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int, claim_id: uuid.UUID
) -> sa.Row[Any] | None:
    """Lock the reservation and return its row if ``claim_id`` still holds the running attempt."""
    row = lock(connection, root, reservation_id)
    if row is None or row.state != "running" or row.attempts != attempt:
        return None
    held = connection.execute(
        sa.select(attempts.c.claim_id).where(_key(root, reservation_id, attempt))
    ).scalar()
    return row if held == claim_id else None


def write_retry(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    attempt: int,
    claim_id: uuid.UUID,
    park_us: int,
) -> Reserved | Parked | None:
    """Write the message of a running attempt's retry, blocked until the attempt ends.

    Locks the reservation, then as :func:`next_attempt`. None where the fence is gone.
    """
    if owned(connection, request.root, request.reservation_id, attempt, claim_id) is None:
        return None
    return next_attempt(connection, request, message, attempt, True, park_us)


def end(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    outcome: Outcome,
) -> str | None:
    """End the running attempt, settle what follows from it, and return the state reached.

    In one transaction; locks the reservation, its balances, its outbox rows. None where the fence
    is gone: somebody else ended the attempt, and this outcome has no effect.

    With a successor (a retry) the reservation waits and keeps its hold. Otherwise it is settled:
    at what was used, or, where a success recorded nothing, at the estimate on top of what earlier
    attempts used.
    """
    row = owned(connection, root, reservation_id, attempt, claim_id)
    if row is None:
        return _ended_as(connection, root, reservation_id, attempt, claim_id, outcome)
    retries = _successor(connection, root, reservation_id, attempt)
    if retries is not None:
        _update(connection, root, reservation_id, state="waiting", retries=retries, deliveries=0)
        _end_attempt(connection, root, reservation_id, attempt, outcome, is_open=False)
    elif outcome.kind == "rejected" and outcome.requeue:
        # The broker delivers the same message again.
        _update(connection, root, reservation_id, state="waiting")
        _end_attempt(connection, root, reservation_id, attempt, outcome, is_open=False)
    else:
        recorded = usage.recorded(connection, root, reservation_id, attempt)
        unmetered = outcome.kind == "returned" and recorded is None
        charges = {
            line.line: line.used + (line.estimate if unmetered else 0)
            for line in lines_of(connection, root, reservation_id)
        }
        finish(connection, root, row, "settled", charges, unmetered=unmetered)
        _end_attempt(connection, root, reservation_id, attempt, outcome, is_open=True)
        return "settled"
    return "waiting"


def _successor(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> int | None:
    """Let what was written to follow ``attempt`` take its place; its retries, none without one.

    The message of the attempt itself goes, be its successor in the outbox or parked.
    """
    retries = outbox.unblock(connection, root, reservation_id, attempt)
    if retries is None:
        retries = parked.successor_of(connection, root, reservation_id, attempt)
        if retries is not None:
            outbox.drop(connection, root, reservation_id)
    return retries


def _ended_as(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    outcome: Outcome,
) -> str | None:
    """Return the state if this very call ended the attempt before and its answer was lost."""
    return connection.execute(
        sa.select(reservations.c.state)
        .join(
            attempts,
            sa.and_(
                attempts.c.root == reservations.c.root,
                attempts.c.reservation_id == reservations.c.reservation_id,
            ),
        )
        .where(
            _key(root, reservation_id, attempt),
            attempts.c.claim_id == claim_id,
            attempts.c.outcome == outcome.kind,
        )
    ).scalar()


def _end_attempt(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    outcome: Outcome,
    is_open: bool,
) -> None:
    """Write an attempt's outcome; ``is_open`` keeps lease and payload until :func:`close`."""
    values: dict[str, Any] = {"ended_us": now_us(), "outcome": outcome.kind}
    if is_open:
        values["payload"] = outcome.payload
    else:
        values["lease_until_us"] = None
    connection.execute(
        attempts.update().where(_key(root, reservation_id, attempt)).values(**values)
    )


def _update(connection: Connection, root: str, reservation_id: uuid.UUID, **values: Any) -> None:
    connection.execute(
        reservations.update()
        .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
        .values(**values)
    )


def close(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int, claim_id: uuid.UUID
) -> bool:
    """Close an attempt that has ended: erase its payload, drop the reservation's messages.

    From here on a duplicate of its message does nothing. False where the fence is gone or the
    attempt is closed already.
    """
    row = lock(connection, root, reservation_id)
    closed = connection.execute(
        attempts.update()
        .where(
            _key(root, reservation_id, attempt),
            attempts.c.claim_id == claim_id,
            attempts.c.ended_us.is_not(None),
            attempts.c.lease_until_us.is_not(None),
        )
        .values(lease_until_us=None, payload=None)
    ).rowcount
    if closed and row is not None and row.ended_us is not None:
        outbox.drop(connection, root, reservation_id)
    return bool(closed)


def renew(
    connection: Connection,
    root: str,
    task_ids: Collection[str],
    boot_id: uuid.UUID,
    lease_us: int,
) -> int:
    """Extend the leases of these tasks' open attempts that this worker claimed; return how many.

    One statement; it skips locked attempts, which somebody is ending anyway.
    """
    mine = (
        sa.select(attempts.c.reservation_id, attempts.c.attempt)
        .join(
            reservations,
            sa.and_(
                reservations.c.root == attempts.c.root,
                reservations.c.reservation_id == attempts.c.reservation_id,
            ),
        )
        .where(
            attempts.c.root == root,
            reservations.c.task_id.in_(task_ids),
            attempts.c.boot_id == boot_id,
            attempts.c.lease_until_us.is_not(None),
        )
        .with_for_update(of=attempts, skip_locked=True)
        .cte("mine")
    )
    renewed = connection.execute(
        attempts.update()
        .where(
            attempts.c.root == root,
            sa.exists().where(
                mine.c.reservation_id == attempts.c.reservation_id,
                mine.c.attempt == attempts.c.attempt,
            ),
        )
        .values(lease_until_us=now_us() + lease_us)
        .returning(attempts.c.attempt)
    )
    return len(renewed.all())


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


def unclaimed_lost(connection: Connection, root: str, task_id: str, again: bool) -> None:
    """Bring on a request whose worker process died before it claimed the attempt.

    Locks its reservation, then its message. With ``again`` the message is published anew,
    otherwise the hold is given back. Nothing is done where it runs elsewhere or has ended.
    """
    found = connection.execute(
        sa.select(reservations.c.reservation_id).where(
            reservations.c.root == root,
            reservations.c.task_id == task_id,
            reservations.c.ended_us.is_(None),
        )
    ).scalar()
    row = None if found is None else lock(connection, root, found)
    if row is None or row.state not in CLAIMABLE:
        return
    if again:
        outbox.make_due(connection, root, row.reservation_id, row.retries)
    else:
        release(connection, root, row.reservation_id, "worker_lost")


def lapsed(connection: Connection, root: str, limit: int) -> list[OpenAttempt]:
    """Return open attempts whose lease is over, longest first. Locks nothing."""
    rows = connection.execute(
        _select_open()
        .where(attempts.c.root == root, attempts.c.lease_until_us <= now_us())
        .order_by(attempts.c.lease_until_us)
        .limit(limit)
    )
    return [OpenAttempt(**row._mapping) for row in rows]


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
        sa.and_(
            reservations.c.root == attempts.c.root,
            reservations.c.reservation_id == attempts.c.reservation_id,
        ),
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
            _key(root, seen.reservation_id, seen.attempt),
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

    None where it has ended or was renewed in the meantime. Locks the reservation, then its
    balances.

    :param again: have it run again: the reservation waits, what this attempt recorded stays
        recorded. Otherwise it is lost and flagged: the greater of recorded and estimated is charged
        on top of what earlier attempts used.
    :param park_us: how long it may wait where it does not fit again on top of what it used.
    :param ready: ``returned`` or ``raised`` where Celery has stored that result: the ledger ends
        with it, charged like a lost one unless something was recorded.
    :param only_lapsed: leave it alone while its lease is valid.
    """
    row = owned(connection, root, reservation_id, attempt, claim_id)
    if row is None:
        return None
    if only_lapsed:
        over = connection.execute(
            sa.select(attempts.c.attempt).where(
                _key(root, reservation_id, attempt), attempts.c.lease_until_us <= now_us()
            )
        ).first()
        if over is None:
            return None
    uncertain = Outcome(ready or "uncertain")
    _end_attempt(connection, root, reservation_id, attempt, uncertain, is_open=False)
    if again and ready is None:
        retries = _successor(connection, root, reservation_id, attempt)
        if retries is not None:
            # A retry that the attempt had written already takes over.
            _update(
                connection, root, reservation_id, state="waiting", retries=retries, deliveries=0
            )
            return "waiting"
        message = outbox.take(connection, root, reservation_id, row.retries)
        if message is not None:
            _update(connection, root, reservation_id, state="waiting")
            next_attempt(
                connection, again_request(connection, row), message, attempt, False, park_us
            )
            return "waiting"
    recorded = usage.recorded(connection, root, reservation_id, attempt)
    state = "settled" if ready else "lost"
    missing = ready is None or recorded is None
    charges = {
        line.line: line.used + (max(0, line.estimate - (recorded or 0)) if missing else 0)
        for line in lines_of(connection, root, reservation_id)
    }
    finish(connection, root, row, state, charges, unmetered=recorded is None)
    outbox.drop(connection, root, reservation_id)
    return state
