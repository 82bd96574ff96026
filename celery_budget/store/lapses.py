"""Attempts whose worker is gone, or seems to be: found, ended, run again, or given again.

A lease that is over is suspected first and taken at a second look, so that a worker which could not
renew it, since the ledger was away or the machine stood still, has its time to do so. What is found
is looked at again behind the lock of its reservation before it is changed. A worker that was only
slow finds its fence gone.

What a task may be asked about is not ended at once: its attempt is open, and nobody's, until the
answer is there (see :mod:`celery_budget.store.inquiries`).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.identity import new_id
from celery_budget.core.reservations import CLAIMABLE, Outcome
from celery_budget.store import outbox, parked, plans, silent, untold, usage
from celery_budget.store.attempts import (
    NOBODY,
    UNCERTAIN,
    attempt_key,
    follow,
    of_reservation,
    owned,
    run_again,
    set_reservation,
    write_end,
)
from celery_budget.store.continuations import cancel, drop_next
from celery_budget.store.insert import insert_new
from celery_budget.store.reservations import TAKING, charge_of, finish, lines_of, lock, release
from celery_budget.store.schema import attempts, instant, now_us, reservations, sweeps
from celery_budget.store.silent import Silent

__all__ = [
    "REPLAY_LEASES",
    "SUSPECTED_AT_ONCE",
    "OpenAttempt",
    "abandon",
    "conclude",
    "is_replayed",
    "lapsed",
    "open_of",
    "postpone",
    "republish_ended",
    "runs_again",
    "select_open",
    "suspect",
    "undelivered",
]

#: Why a request ends whose message nobody started, however often it was published.
UNDELIVERED = "undelivered"

#: How many leases that are over are noted in a transaction.
SUSPECTED_AT_ONCE = 1000

#: A replay may take this many leases before the message is published once more.
REPLAY_LEASES = 2


@dataclass(frozen=True)
class OpenAttempt:
    """An attempt that was not closed when it was looked at.

    :ivar rerun: whether another attempt follows where its outcome is not known.
    :ivar inquires: whether its task can be asked about it.
    :ivar ended_us: when its call ended; none while it runs.
    :ivar replayable: whether its outcome was kept and can be given again.
    """

    reservation_id: uuid.UUID
    attempt: int
    claim_id: uuid.UUID
    retries: int
    rerun: bool
    inquires: bool
    ended_us: int | None
    outcome: str | None
    replayable: bool
    replays: int
    task_id: str
    task_name: str
    deliveries: int


def runs_again(rerun: bool, deliveries: int, max_deliveries: int) -> bool:
    """Tell whether another attempt follows one whose worker is gone, and not its request's end.

    :param rerun: as its row has it, and so on.
    """
    return rerun and deliveries < max_deliveries


def is_replayed(replayable: bool, replays: int, max_deliveries: int) -> bool:
    """Tell whether an attempt that has ended, and was not closed, is given again, not just closed.

    :param replayable: whether its outcome was kept.
    """
    return replayable and replays < max_deliveries


def open_of(
    connection: Connection,
    root: str,
    task_id: str,
    boot_id: uuid.UUID,
    worker: str | None = None,
    reservation_id: uuid.UUID | None = None,
) -> OpenAttempt | None:
    """Return the open attempt of a task that this worker claimed; none where it has none.

    :param worker: only one of this process of it.
    :param reservation_id: only one of this request of the task.
    """
    row = connection.execute(
        select_open().where(
            attempts.c.root == root,
            reservations.c.task_id == task_id,
            attempts.c.boot_id == boot_id,
            attempts.c.lease_until_us.is_not(None),
            *([] if worker is None else [attempts.c.worker == worker]),
            *([] if reservation_id is None else [attempts.c.reservation_id == reservation_id]),
        )
    ).first()
    return None if row is None else OpenAttempt(**row._mapping)


def undelivered(connection: Connection, root: str, seen: Silent) -> bool:
    """Release a request that nobody has started, however often; its result is to be told.

    Locks its reservation, its balances, its messages. False where it was started, or has ended,
    since its message was ``seen``, be it that another attempt is to follow.
    """
    row = lock(connection, root, seen.reservation_id)
    if row is None or row.state not in CLAIMABLE or not silent.is_there(connection, root, seen):
        return False
    release(connection, root, seen.reservation_id, UNDELIVERED)
    untold.note(connection, root, row.task_id, UNDELIVERED, row.reservation_id)
    return True


def suspect(connection: Connection, root: str, lease_us: int) -> bool:
    """Note which leases are over that were not the last time; the first look at them.

    :data:`SUSPECTED_AT_ONCE` of them, the longest ones first; true where there may be more.

    Where nobody has looked for half a lease, the ledger was away, or the machine stood still, and
    workers could not renew them either: they are extended by that time, up to a whole lease from
    now. Until all of those are, nobody has looked. Locks the root's row of the sweeps, then those
    attempts; what another sweep or a worker has locked is passed by.
    """
    mine = sweeps.c.root == root
    last = connection.execute(
        sa.select(now_us() - sweeps.c.seen_us).where(mine).with_for_update(skip_locked=True)
    ).scalar()
    if last is None and not insert_new(connection, sweeps, root=root, seen_us=now_us()):
        return False
    gap_us = int(last or 0)
    extends = gap_us >= lease_us // 2
    until: Any = attempts.c.lease_until_us
    if extends:
        # No CASE: a distributed ledger takes no clock in one.
        least = sa.func.least if connection.dialect.name == "postgresql" else sa.func.min
        until = least(until + gap_us, now_us() + lease_us)
    # Said of both: PostgreSQL takes what is due for a third of all there ever was, and reads that.
    is_open = attempts.c.lease_until_us.is_not(None)
    over = (
        sa.select(attempts.c.reservation_id, attempts.c.attempt)
        .where(
            attempts.c.root == root,
            is_open,
            attempts.c.lease_until_us <= instant(),
            attempts.c.suspected_us.is_(None),
        )
        .order_by(attempts.c.lease_until_us)
        # Written out: of a parameter PostgreSQL takes a tenth of all for what there is.
        .limit(sa.literal_column(str(SUSPECTED_AT_ONCE)))
        .with_for_update(skip_locked=True)
        .cte("over")
    )
    # Counted by rows: SQLite's driver counts none of a statement that begins with what it reads.
    suspected = connection.execute(
        attempts.update()
        .where(
            attempts.c.root == root,
            is_open,
            sa.exists(sa.text("1")).where(
                over.c.reservation_id == attempts.c.reservation_id,
                over.c.attempt == attempts.c.attempt,
            ),
        )
        .values(suspected_us=now_us(), lease_until_us=until)
        .returning(attempts.c.attempt)
    ).all()
    more = len(suspected) == SUSPECTED_AT_ONCE
    if not (extends and more):
        connection.execute(sweeps.update().where(mine).values(seen_us=now_us()))
    return more


def lapsed(connection: Connection, root: str, limit: int, second_us: int) -> list[OpenAttempt]:
    """Return open attempts whose lease is over at a second look, longest first. Locks nothing.

    :param second_us: how long after the first look that is: a worker renews as often.
    """
    # Their keys first, and so few: of the join PostgreSQL may read all that ever was requested. And
    # between two times: what is only before one it takes for a third of all there ever was.
    over = (
        sa.select(attempts.c.reservation_id, attempts.c.attempt)
        .where(
            attempts.c.root == root,
            attempts.c.lease_until_us.between(0, instant()),
            attempts.c.suspected_us <= instant() - second_us,
            sa.func.coalesce(attempts.c.outcome, "") != UNCERTAIN,
        )
        .order_by(attempts.c.lease_until_us)
        .limit(limit)
    )
    keys = [tuple(row) for row in connection.execute(over)]
    if not keys:
        return []
    rows = connection.execute(
        select_open()
        .where(
            attempts.c.root == root,
            sa.tuple_(attempts.c.reservation_id, attempts.c.attempt).in_(keys),
            attempts.c.lease_until_us.is_not(None),
        )
        .order_by(attempts.c.lease_until_us)
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


def select_open() -> sa.Select[Any]:
    """Return what selects attempts as :class:`OpenAttempt`, with their reservations."""
    return sa.select(
        attempts.c.reservation_id,
        attempts.c.attempt,
        attempts.c.claim_id,
        attempts.c.retries,
        attempts.c.rerun,
        attempts.c.inquires,
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
        .values(
            boot_id=NOBODY,
            lease_until_us=now_us() + wait_us,
            suspected_us=None,
            replays=attempts.c.replays + 1,
        )
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
    tell: bool = True,
) -> str | None:
    """End a running attempt whose outcome is not known; return the state reached.

    None where it has ended or was renewed in the meantime; ``asked`` where its task is asked first
    what became of it. Its worker has no say any more. Locks the reservation, its balances, its
    messages. An effect of the attempt in a transaction that is open has it pass the reservation by
    (none as well), or wait where the process is known to be gone, and its transaction soon.

    :param again: have it run again, unless it was cancelled: the reservation waits, what this
        attempt recorded stays recorded. Otherwise it is lost and flagged: the greater of recorded
        and estimated is charged on top of what earlier attempts used.
    :param park_us: how long it may wait where it does not fit again on top of what it used.
    :param ready: ``returned`` or ``raised`` where Celery has stored that result: the ledger ends
        with it, charged like a lost one unless something was recorded.
    :param only_lapsed: leave it alone while its lease is valid. Otherwise its process is known to
        be gone.
    :param tell: note that its result is to be told, where it is lost. Otherwise Celery stores it.
    """
    row = owned(connection, root, reservation_id, attempt, claim_id, TAKING, pass_by=only_lapsed)
    if row is None:
        return None
    this = attempt_key(root, reservation_id, attempt)
    seen = connection.execute(
        sa.select(attempts.c.inquires, (attempts.c.lease_until_us <= now_us()).label("over")).where(
            this
        )
    ).one()
    if only_lapsed and not seen.over:
        return None
    if ready is not None:
        write_end(connection, root, reservation_id, attempt, Outcome(ready), is_open=False)
        return conclude(connection, row, attempt, park_us=park_us, ready=ready)
    if not seen.inquires:
        write_end(connection, root, reservation_id, attempt, Outcome(UNCERTAIN), is_open=False)
        return conclude(connection, row, attempt, again=again, park_us=park_us, tell=tell)
    again = again and row.cancelled_us is None
    # Under a new fence, which nobody holds.
    connection.execute(
        attempts.update()
        .where(this)
        .values(
            ended_us=now_us(),
            outcome=UNCERTAIN,
            rerun=again,
            claim_id=new_id(),
            boot_id=NOBODY,
            lease_until_us=now_us(),
            replays=0,
        )
    )
    if not again and tell:
        untold.note(connection, root, row.task_id, "lost", reservation_id)
    return "asked"


def conclude(
    connection: Connection,
    row: sa.Row[Any],
    attempt: int,
    *,
    park_us: int,
    again: bool = False,
    ready: str | None = None,
    answered: bool = False,
    reason: str | None = None,
    tell: bool = False,
) -> str:
    """Go on after an attempt whose outcome is not known; return the state reached.

    The caller holds the reservation's row and has ended the attempt. Locks its balances, its
    messages. Parameters are as for :func:`abandon`.

    :param answered: whether its task has told what it used, so that nothing is flagged but a unit
        of which it told nothing.
    :param reason: why the reservation ends, if it does.
    """
    root, reservation_id = row.root, row.reservation_id
    if row.cancelled_us is not None:
        drop_next(connection, root, reservation_id, attempt)
    elif again:
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
    known = ready is not None or answered
    charges = {}
    for line in of:
        missing = not known or line.line in unmetered
        promised = line.estimate + line.extended if missing else 0
        charges[line.line] = charge_of(line, max(0, promised - recorded.get(line.unit, 0)))
    state = "settled" if known else "lost"
    goes_on = ready == "returned"
    if ready is None and row.plan_id is not None:
        # Its replacement may have been admitted before it was lost, and goes on with the chain.
        goes_on = plans.hand_over(connection, row)
    finish(
        connection,
        root,
        row,
        state,
        charges,
        reason=reason,
        unmetered=bool(unmetered),
        of=of,
        goes_on=goes_on,
    )
    if ready == "returned" and row.plan_id is not None:
        plans.release_unreached(connection, row)
    outbox.drop(connection, root, reservation_id)
    parked.drop(connection, root, reservation_id)
    if row.cancelled_us is not None:
        # So is what replaces it.
        cancel(connection, root, row.task_id)
    if tell and not ready:
        untold.note(connection, root, row.task_id, "lost", reservation_id)
    return state
