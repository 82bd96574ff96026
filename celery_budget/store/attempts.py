"""Attempts: claimed under a fence, kept alive by a lease, ended once, closed when nothing is left.

An attempt is open while it has a lease: it runs, or it has ended and its worker still publishes
what follows and stores the result. Every function locks the reservation first.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    CLAIMABLE,
    Again,
    AlreadyExtended,
    Charge,
    Claimed,
    Closed,
    Ended,
    Extended,
    Missing,
    Outcome,
    Parked,
    Refused,
    Replay,
    Reserved,
    ReserveRequest,
    Running,
    Settlement,
    StoredOutcome,
)
from celery_budget.core.retries import DEADLINE, MAX_ATTEMPTS, RETRY_WITHIN, Keep, Retries
from celery_budget.store import deadlines, outbox, parked, plans, quarantine, reuse, untold, usage
from celery_budget.store.continuations import (
    CANCELLED,
    again_request,
    cancel,
    drop_next,
    next_attempt,
    refit,
)
from celery_budget.store.reservations import (
    CHANGING,
    How,
    Lines,
    charge_of,
    finish,
    lines_of,
    lock,
    release,
    start,
)
from celery_budget.store.schema import attempts, now_us, of_reservation, reservations
from celery_budget.store.schema import outbox as messages
from celery_budget.store.schema import parked as parked_requests

__all__ = [
    "COMPRESSED",
    "NOBODY",
    "UNCERTAIN",
    "Delivery",
    "as_sent",
    "attempt_key",
    "claim",
    "close",
    "end",
    "extend",
    "follow",
    "has_returned",
    "is_known",
    "note_answered",
    "of_reservation",
    "owned",
    "owners_of",
    "renew",
    "run_again",
    "set_reservation",
    "write_end",
    "write_retry",
]

#: Who holds the lease of an ended attempt that waits for a worker to give its outcome again.
NOBODY = uuid.UUID(int=0)

#: The outcome of an attempt whose worker went away.
UNCERTAIN = "uncertain"


@dataclass(frozen=True)
class Delivery:
    """One delivery of a message to a worker.

    :ivar retries: Celery's count of retries in the message; with the task id and the nesting it
        tells which attempt the message stands for.
    :ivar late_ack: whether the broker still has the message while the task runs.
    :ivar pid: the worker's process that runs it; none where nobody watches that.
    :ivar rerun: whether another attempt follows where this one is lost; by default where it is
        acknowledged late.
    :ivar inquires: whether the task can tell, or undo, what a lost attempt has done.
    :ivar task_name: the task that the message names; none where it is not to be compared.
    :ivar digest: SHA-256 of the message's body in hex, as it came; none where it is not to be
        compared. What is compressed is not.
    """

    root: str
    reservation_id: uuid.UUID
    task_id: str
    nesting: int
    retries: int
    worker: str
    boot_id: uuid.UUID
    late_ack: bool
    pid: int | None = None
    rerun: bool | None = None
    inquires: bool = False
    task_name: str | None = None
    digest: str | None = None

    @property
    def reruns(self) -> bool:
        """Whether another attempt follows where this one is lost, said or by default."""
        return self.late_ack if self.rerun is None else self.rerun


def attempt_key(root: str, reservation_id: uuid.UUID, attempt: int) -> sa.ColumnElement[bool]:
    """Return the condition for one attempt's row."""
    return sa.and_(
        attempts.c.root == root,
        attempts.c.reservation_id == reservation_id,
        attempts.c.attempt == attempt,
    )


def claim(
    connection: Connection,
    delivery: Delivery,
    claim_id: uuid.UUID,
    lease_us: int,
    retries: Retries | None = None,
    bound: int = 0,
) -> Claimed | Replay | Running | Closed | Missing:
    """Claim the attempt a delivery stands for; of several deliveries one gets it.

    Where ``retries`` lets no further attempt start, the request ends here without a run, into
    quarantine: the attempt is written as refused, and its outcome is to be given as in a replay. So
    does one whose deadline has passed, which is in quarantine only with ``retries``; where it has
    never run it is ``Closed``, and its result is to be told.

    ``Missing`` also for a message that is not the one that the ledger has, see :func:`is_known`.

    Locks the reservation, so that deliveries of one message go one after another, and the balances
    of lines that are charged at the start; of all lines where the request ends. A claim that
    committed while the connection was lost is found again by its ``claim_id``.
    """
    root, reservation_id = delivery.root, delivery.reservation_id
    row = lock(connection, root, reservation_id, also=_sent(delivery))
    if row is None or row.task_id != delivery.task_id or row.nesting != delivery.nesting:
        return Missing()
    if not _as_sent(row, delivery):
        return Missing()
    current = connection.execute(
        sa.select(attempts, (attempts.c.lease_until_us > now_us()).label("alive")).where(
            attempt_key(root, reservation_id, row.attempts)
        )
    ).first()
    if current is not None and current.claim_id == claim_id:
        if current.ended_us is None:
            elapsed_us = _elapsed_us(connection, row, retries)
            left = deadlines.left_us(connection, row)
            return Claimed(current.attempt, claim_id, elapsed_us, row.deadline_us, left)
        return _replay(row, current, claim_id)
    if row.state in CLAIMABLE and delivery.retries == row.retries:
        if parked.is_held_back(connection, row):
            # The broker's own redelivery: what it would need is not held yet, or its lane has no
            # room for it. It is published again when it fits.
            return Closed(str(row.state))
        elapsed_us = _elapsed_us(connection, row, retries)
        left = deadlines.left_us(connection, row)
        why = DEADLINE if left is not None and left <= 0 else None
        if current is None:
            if why is not None:
                release(connection, root, reservation_id, why)
                untold.note(connection, root, row.task_id, why, reservation_id)
                return Closed("released")
        else:
            if why is None and retries is not None:
                why = retries.spent(row.attempts, elapsed_us)
            if why is not None:
                keep = None if retries is None else bound
                return _refuse(connection, row, current, delivery, claim_id, lease_us, why, keep)
            if retries is not None or left is not None:
                _erase(connection, current)
        _write_claim(connection, row, delivery, claim_id, lease_us)
        set_reservation(
            connection,
            root,
            reservation_id,
            state="running",
            attempts=row.attempts + 1,
            deliveries=row.deliveries + 1,
        )
        if row.charges_start:
            start(connection, root, reservation_id)
        outbox.wake_lane(connection, row)
        return Claimed(row.attempts + 1, claim_id, elapsed_us, row.deadline_us, left)
    if current is None or current.lease_until_us is None or current.retries != delivery.retries:
        return Running() if row.state == "running" else Closed(str(row.state))
    if (
        current.ended_us is None
        or current.outcome == UNCERTAIN
        or (current.alive and current.boot_id != NOBODY)
    ):
        # It runs, or it is being asked about, or its worker is still busy with what follows; should
        # that worker be gone, recovery publishes the message again when the lease has lapsed.
        return Running()
    connection.execute(
        attempts.update()
        .where(attempt_key(root, reservation_id, current.attempt))
        .values(
            claim_id=claim_id,
            worker=delivery.worker,
            boot_id=delivery.boot_id,
            pid=delivery.pid,
            lease_until_us=now_us() + lease_us,
            suspected_us=None,
        )
    )
    return _replay(row, current, claim_id)


def _replay(row: sa.Row[Any], ended: sa.Row[Any], claim_id: uuid.UUID) -> Replay:
    """Return that an attempt which has ended is to give its outcome again."""
    stored = StoredOutcome(str(ended.outcome), ended.payload)
    return Replay(ended.attempt, claim_id, stored, deadline_us=row.deadline_us)


#: Of a stored message whose body is compressed, which a worker has without that.
COMPRESSED = '"compression": "'


def _sent(delivery: Delivery) -> list[sa.ColumnElement[Any]]:
    """Return what the ledger has of the message that a delivery is of, where it is compared."""
    if delivery.digest is None and delivery.task_name is None:
        return []
    mine = sa.and_(
        messages.c.root == delivery.root,
        messages.c.reservation_id == delivery.reservation_id,
        messages.c.retries == delivery.retries,
    )
    return [
        sa.select(column).where(mine).limit(1).scalar_subquery().label(f"sent_{column.name}")
        for column in (messages.c.task_name, messages.c.body, messages.c.envelope)
    ]


def _as_sent(row: sa.Row[Any], delivery: Delivery) -> bool:
    """Tell whether a delivery is of the message that the ledger has; also where it has none."""
    if (delivery.digest is None and delivery.task_name is None) or row.sent_task_name is None:
        return True
    if delivery.task_name not in (None, row.sent_task_name):
        return False
    if delivery.digest is None or COMPRESSED in row.sent_envelope:
        return True
    return hashlib.sha256(row.sent_body).hexdigest() == delivery.digest


def owners_of(connection: Connection, root: str, task_id: str) -> set[str]:
    """Return whose requests have this task id, what is parked included. Locks nothing."""
    found = [
        sa.select(table.c.owner).where(table.c.root == root, table.c.task_id == task_id)
        for table in (reservations, parked_requests)
    ]
    return set(connection.execute(sa.union(*found)).scalars())


def as_sent(connection: Connection, delivery: Delivery) -> bool:
    """Tell whether a delivery is of the very message that the ledger has. Locks nothing."""
    row = connection.execute(sa.select(*_sent(delivery))).one()
    return _as_sent(row, delivery)


def is_known(connection: Connection, delivery: Delivery) -> bool:
    """Tell whether a delivery that cannot claim names a request of its task. Locks nothing.

    Then its message is another one than the ledger has: it was altered.
    """
    found = connection.execute(
        sa.select(reservations.c.task_id, reservations.c.nesting).where(
            reservations.c.root == delivery.root,
            reservations.c.reservation_id == delivery.reservation_id,
        )
    ).first()
    return found is not None and tuple(found) == (delivery.task_id, delivery.nesting)


def _write_claim(
    connection: Connection,
    row: sa.Row[Any],
    delivery: Delivery,
    claim_id: uuid.UUID,
    lease_us: int,
    **more: Any,
) -> None:
    """Write the next attempt of a reservation whose row the caller holds.

    With what is known of the message that started it, which goes with the attempt's end.
    """
    values: dict[str, Any] = {
        "root": row.root,
        "reservation_id": row.reservation_id,
        "attempt": row.attempts + 1,
        "claim_id": claim_id,
        "retries": row.retries,
        "worker": delivery.worker,
        "boot_id": delivery.boot_id,
        "pid": delivery.pid,
        "late_ack": delivery.late_ack,
        "rerun": delivery.reruns,
        "inquires": delivery.inquires,
        "started_us": now_us(),
        "lease_until_us": now_us() + lease_us,
        "replays": 0,
        **more,
    }
    seen = ("queue", "publishes", "published_us")
    one = sa.select(sa.literal(1).label("one")).subquery()
    mine = sa.and_(
        messages.c.root == row.root,
        messages.c.reservation_id == row.reservation_id,
        messages.c.retries == row.retries,
    )
    connection.execute(
        attempts.insert().from_select(
            [*values, *seen],
            sa.select(
                *(_given(name, value) for name, value in values.items()),
                *(messages.c[name] for name in seen),
            ).select_from(one.outerjoin(messages, mine)),
        )
    )


def _given(name: str, value: Any) -> sa.ColumnElement[Any]:
    """Return a value of a column as it is selected."""
    if isinstance(value, sa.ColumnElement):
        return value
    return sa.cast(sa.literal(value, attempts.c[name].type), attempts.c[name].type)


def _elapsed_us(connection: Connection, row: sa.Row[Any], retries: Retries | None) -> int:
    """Return how long ago a reservation's first attempt started; 0 where that does not matter."""
    if retries is None or retries.retry_within is None or row.attempts == 0:
        return 0
    elapsed = connection.execute(
        sa.select(now_us() - attempts.c.started_us).where(
            attempt_key(row.root, row.reservation_id, 1)
        )
    ).scalar_one()
    return max(0, int(elapsed))


def _erase(connection: Connection, last: sa.Row[Any]) -> None:
    """Erase the error by which an attempt was retried: another one follows."""
    if last.payload is not None:
        connection.execute(
            attempts.update()
            .where(attempt_key(last.root, last.reservation_id, last.attempt))
            .values(payload=None)
        )


#: The last error of a request whose last attempt said nothing.
UNKNOWN = "its worker went away, or it gave its message back"
#: The payload of a lost attempt whose task has told what it used: its last error, as of others.
ANSWERED = json.dumps(["its worker went away; what it used was looked up", None])


def _refuse(
    connection: Connection,
    row: sa.Row[Any],
    last: sa.Row[Any],
    delivery: Delivery,
    claim_id: uuid.UUID,
    lease_us: int,
    why: str,
    bound: int | None,
) -> Replay:
    """End a request that may not run again, in place of its next attempt; that tells the outcome.

    It goes into quarantine, which holds up to ``bound``, unless that is none.

    It is settled at what it used. Where the last attempt's outcome is unknown it is lost, and
    charged the greater of recorded and estimated for that one; where its task has told what it
    used, only of units of which it told nothing.
    """
    root, reservation_id = row.root, row.reservation_id
    of = lines_of(connection, root, reservation_id)
    fresh: dict[int, int] = {}
    answered = last.payload == ANSWERED
    if last.outcome == UNCERTAIN:
        recorded = usage.recorded(connection, root, reservation_id, last.attempt)
        fresh = {
            line.line: max(0, line.estimate - recorded.get(line.unit, 0))
            for line in of
            if not answered or usage.is_unmetered(line, recorded)
        }
    charges = {line.line: charge_of(line, fresh.get(line.line, 0)) for line in of}
    text, error = json.loads(last.payload) if last.payload is not None else (UNKNOWN, None)
    kept = None
    if bound is not None:
        kept = quarantine.keep(connection, row, row.attempts, of, charges, Keep(why, text, bound))
    lost = last.outcome == UNCERTAIN and not answered
    finish(
        connection,
        root,
        row,
        "lost" if lost else "settled",
        charges,
        reason=why,
        unmetered=answered and bool(fresh),
        of=of,
    )
    _erase(connection, last)
    stored = StoredOutcome("refused", json.dumps([why, row.attempts, error]))
    _write_claim(
        connection,
        row,
        delivery,
        claim_id,
        lease_us,
        ended_us=now_us(),
        outcome=stored.kind,
        payload=stored.payload,
    )
    set_reservation(connection, root, reservation_id, attempts=row.attempts + 1)
    return Replay(row.attempts + 1, claim_id, stored, kept, row.deadline_us)


def owned(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    how: How = CHANGING,
    *,
    pass_by: bool = False,
) -> sa.Row[Any] | None:
    """Lock the reservation and return its row if ``claim_id`` still holds the running attempt.

    :param how: as for :func:`celery_budget.store.reservations.lock`, as is ``pass_by``.
    """
    row = lock(connection, root, reservation_id, how, pass_by=pass_by)
    if row is None or row.state != "running" or row.attempts != attempt:
        return None
    held = connection.execute(
        sa.select(attempts.c.claim_id).where(attempt_key(root, reservation_id, attempt))
    ).scalar()
    return row if held == claim_id else None


def extend(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    key: str,
    amount: int,
    unit: str | None,
) -> Extended | AlreadyExtended | Refused | Closed:
    """Make a running attempt hold more, all or nothing; ``Closed`` where its fence is gone.

    Locks the reservation, then its balances.
    """
    if owned(connection, root, reservation_id, attempt, claim_id) is None:
        return Closed("ended")
    return usage.extend(connection, root, reservation_id, attempt, key, amount, unit)


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
    row = owned(connection, request.root, request.reservation_id, attempt, claim_id)
    if row is None:
        return None
    request = replace(request, deadline_us=row.deadline_us)
    return next_attempt(connection, request, message, attempt, True, park_us)


def end(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    outcome: Outcome,
) -> Ended | Closed:
    """End the running attempt and settle what follows from it.

    In one transaction; locks the reservation, its balances, its outbox rows. ``Closed`` where the
    fence is gone: somebody else ended the attempt, and this outcome has no effect.

    With a successor (a retry) the reservation waits and keeps its hold. Otherwise it is settled:
    at what was used, or, where a success recorded nothing of a unit, at the estimate on top of what
    earlier attempts used. A rejected message comes again from the outbox, later each time, until
    its turns are over.

    Where the request was cancelled meanwhile nothing follows: what was written to is dropped, and
    if the attempt was to be followed, its result is to be told. What replaces it is cancelled too.
    """
    row = owned(connection, root, reservation_id, attempt, claim_id)
    if row is None:
        return _ended_as(connection, root, reservation_id, attempt, claim_id, outcome)
    if row.cancelled_us is not None:
        drop_next(connection, root, reservation_id, attempt)
        if outcome.kind == "retried" or outcome.again is not None:
            return _end_cancelled(connection, row, attempt, outcome)
    retries = follow(connection, root, reservation_id, attempt)
    if retries is not None:
        set_reservation(
            connection, root, reservation_id, state="waiting", retries=retries, deliveries=0
        )
        outbox.wake_lane(connection, row)
        write_end(connection, root, reservation_id, attempt, outcome, is_open=False)
    elif outcome.again is None or not _reject(connection, row, attempt, outcome, outcome.again):
        of = lines_of(connection, root, reservation_id)
        recorded = usage.recorded(connection, root, reservation_id, attempt)
        fresh = {
            line.line: line.estimate + line.extended
            for line in of
            if outcome.kind == "returned" and usage.is_unmetered(line, recorded)
        }
        charges = {line.line: charge_of(line, fresh.get(line.line, 0)) for line in of}
        goes_on = outcome.kind == "returned"
        kept = None
        if outcome.keep is not None and row.cancelled_us is None:
            kept = quarantine.keep(connection, row, attempt, of, charges, outcome.keep)
        if outcome.kind == "replaced" and row.plan_id is not None:
            goes_on = plans.hand_over(connection, row)
        finish(
            connection,
            root,
            row,
            "settled",
            charges,
            reason=_spent(outcome.keep),
            unmetered=bool(fresh),
            of=of,
            goes_on=goes_on,
        )
        write_end(connection, root, reservation_id, attempt, outcome, is_open=True)
        if outcome.kind == "returned" and outcome.payload is not None:
            reuse.keep(connection, row, outcome.payload)
        if row.cancelled_us is not None and outcome.kind == "replaced":
            cancel(connection, root, row.task_id)
        return Ended("settled", kept=kept, settlement=_settlement(row, of, charges, bool(fresh)))
    return Ended("waiting")


def _spent(keep: Keep | None) -> str | None:
    """Return why a request ends that has used up its attempts; its last error does not say so."""
    return keep.reason if keep is not None and keep.reason in (MAX_ATTEMPTS, RETRY_WITHIN) else None


def _end_cancelled(
    connection: Connection, row: sa.Row[Any], attempt: int, outcome: Outcome
) -> Ended:
    """Settle a cancelled request at what it used, in place of another attempt, and close it."""
    of = lines_of(connection, row.root, row.reservation_id)
    charges = {line.line: charge_of(line) for line in of}
    finish(connection, row.root, row, "settled", charges, reason=CANCELLED, of=of)
    ended = Outcome(outcome.kind)
    write_end(connection, row.root, row.reservation_id, attempt, ended, is_open=False)
    outbox.drop(connection, row.root, row.reservation_id)
    untold.note(connection, row.root, row.task_id, CANCELLED, row.reservation_id)
    return Ended("settled", cancelled=True, settlement=_settlement(row, of, charges))


def _settlement(
    row: sa.Row[Any], of: Lines, charges: Mapping[int, int], unmetered: bool = False
) -> Settlement:
    """Return what a reservation with this row and these lines has just been settled at."""
    told = tuple(
        Charge(line.budget, line.unit, line.estimate + line.extended, line.used, charges[line.line])
        for line in of
    )
    return Settlement(told, bool(row.over), bool(row.unmetered) or unmetered)


def _reject(
    connection: Connection, row: sa.Row[Any], attempt: int, outcome: Outcome, again: Again
) -> bool:
    """Have a rejected message published again, later each time; false where its turns are over."""
    if row.deliveries >= again.deliveries or not run_again(connection, row, attempt, again.park_us):
        return False
    write_end(connection, row.root, row.reservation_id, attempt, outcome, is_open=False)
    wait_us = again.wait_us * 2 ** min(row.deliveries - 1, 10)
    outbox.make_due(connection, row.root, row.reservation_id, row.retries, wait_us)
    return True


def run_again(connection: Connection, row: sa.Row[Any], attempt: int, park_us: int) -> bool:
    """Have the message of an attempt that ends start the next one; false where it is gone.

    The caller holds the reservation's row. What the next attempt needs may have to be parked for.
    """
    taken = outbox.take(connection, row.root, row.reservation_id, row.retries)
    if taken is None:
        return False
    message, tenant = taken
    set_reservation(connection, row.root, row.reservation_id, state="waiting")
    request = again_request(connection, row, tenant)
    next_attempt(connection, request, message, attempt, False, park_us)
    return True


def note_answered(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> None:
    """Note of a lost attempt that another one is to follow: its task has told what it used.

    The caller holds the reservation's row.
    """
    connection.execute(
        attempts.update().where(attempt_key(root, reservation_id, attempt)).values(payload=ANSWERED)
    )


def follow(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> int | None:
    """Let what was written to follow ``attempt`` take its place; its retries, none without one.

    The message of the attempt itself goes, be its successor in the outbox or parked.
    """
    retries = outbox.unblock(connection, root, reservation_id, attempt)
    if retries is not None:
        refit(connection, root, reservation_id)
    else:
        retries = parked.successor_of(connection, root, reservation_id, attempt)
        if retries is not None:
            outbox.drop(connection, root, reservation_id)
    return retries


def has_returned(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int, claim_id: uuid.UUID
) -> bool:
    """Tell whether the attempt has ended as returned, under this claim. Locks nothing."""
    row = connection.execute(
        sa.select(attempts.c.attempt).where(
            attempt_key(root, reservation_id, attempt),
            attempts.c.claim_id == claim_id,
            attempts.c.outcome == "returned",
        )
    ).first()
    return row is not None


def _ended_as(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    outcome: Outcome,
) -> Ended | Closed:
    """Return whether this very call ended the attempt before and its answer was lost.

    One that another attempt followed has settled nothing, whatever that one has come to.
    """
    found = connection.execute(
        sa.select(
            reservations.c.state,
            reservations.c.attempts,
            (reservations.c.reason == CANCELLED).label("cancelled"),
        )
        .join(
            attempts,
            of_reservation,
        )
        .where(
            attempt_key(root, reservation_id, attempt),
            attempts.c.claim_id == claim_id,
            attempts.c.outcome == outcome.kind,
        )
    ).first()
    if found is None:
        return Closed("ended")
    if found.attempts != attempt:
        return Ended("waiting")
    return Ended(str(found.state), cancelled=bool(found.cancelled))


def write_end(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    outcome: Outcome,
    is_open: bool,
) -> None:
    """Write an attempt's outcome; ``is_open`` keeps lease and payload until :func:`close`.

    The error of one that is retried stays until the next one is claimed.
    """
    values: dict[str, Any] = {
        "ended_us": now_us(),
        "outcome": outcome.kind,
        "error": outcome.error,
    }
    if is_open or outcome.kind == "retried":
        values["payload"] = outcome.payload
    if not is_open:
        values["lease_until_us"] = None
    connection.execute(
        attempts.update().where(attempt_key(root, reservation_id, attempt)).values(**values)
    )


def set_reservation(
    connection: Connection, root: str, reservation_id: uuid.UUID, **values: Any
) -> None:
    """Change columns of a reservation whose row the caller holds."""
    connection.execute(
        reservations.update()
        .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
        .values(**values)
    )


def close(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int, claim_id: uuid.UUID
) -> bool:
    """Close an attempt that has ended: erase its payload, drop the reservation's messages.

    From here on a duplicate of its message does nothing. Planned steps that its success has not
    reached are released. False where the fence is gone or the attempt is closed already.
    """
    row = lock(connection, root, reservation_id)
    outcome = connection.execute(
        attempts.update()
        .where(
            attempt_key(root, reservation_id, attempt),
            attempts.c.claim_id == claim_id,
            attempts.c.ended_us.is_not(None),
            attempts.c.lease_until_us.is_not(None),
        )
        .values(lease_until_us=None, payload=None)
        .returning(attempts.c.outcome)
    ).scalar()
    if outcome is not None and row is not None and row.ended_us is not None:
        outbox.drop(connection, root, reservation_id)
        if row.plan_id is not None and outcome == "returned":
            plans.release_unreached(connection, row)
    return outcome is not None


def renew(
    connection: Connection,
    root: str,
    task_ids: Collection[str],
    boot_id: uuid.UUID,
    pids: Collection[int],
    lease_us: int,
) -> int:
    """Extend the leases of these tasks' open attempts that this worker claimed; return how many.

    One statement; it skips locked attempts, which somebody is ending anyway.

    :param pids: the worker's processes that live: what another one ran is over, whatever its main
        process still waits for.
    """
    mine = (
        sa.select(attempts.c.reservation_id, attempts.c.attempt)
        .join(
            reservations,
            of_reservation,
        )
        .where(
            attempts.c.root == root,
            reservations.c.task_id.in_(task_ids),
            attempts.c.boot_id == boot_id,
            attempts.c.pid.is_(None) | attempts.c.pid.in_(pids),
            attempts.c.lease_until_us.is_not(None),
        )
        .with_for_update(of=attempts, skip_locked=True)
        .cte("mine")
    )
    renewed = connection.execute(
        attempts.update()
        .where(
            attempts.c.root == root,
            attempts.c.lease_until_us.is_not(None),
            sa.exists(sa.text("1")).where(
                mine.c.reservation_id == attempts.c.reservation_id,
                mine.c.attempt == attempts.c.attempt,
            ),
        )
        .values(lease_until_us=now_us() + lease_us, suspected_us=None)
        .returning(attempts.c.attempt)
    )
    return len(renewed.all())
