"""What waits for budget, and work that goes on: that is never refused, but parked.

The next attempt of a reservation (a retry, or the same message again after a lost worker) needs
the estimate once more on top of what was used so far. While it is parked no more is held than was
used, so that two of them never wait for each other's holds.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.draws import chain, decide, queued
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    TERMINAL,
    AlreadyReserved,
    Cancelling,
    Closed,
    Crowded,
    GivenUp,
    Line,
    Missing,
    Parked,
    Refused,
    Released,
    Reserved,
    ReserveRequest,
    Running,
    Tried,
)
from celery_budget.core.retries import DEADLINE
from celery_budget.store import advisory, deadlines, outbox, parked, untold, waiting
from celery_budget.store.batch import MOST_KEYS
from celery_budget.store.levels import levels_of
from celery_budget.store.refusals import note_refusals
from celery_budget.store.requests import note_given_up, reserve, try_reserve
from celery_budget.store.reservations import (
    drop_lines,
    kept,
    levels_above,
    lines_of,
    lock,
    raise_holds,
    release,
    renew_start_lines,
    set_holds,
    write_lines,
)
from celery_budget.store.schema import attempts, now_us, reservations

#: Returns what is published in place of a message that is dropped; none where nothing is.
Last = Callable[[WireMessage], WireMessage | None]

#: Why parked work ends that waited longer than it may.
GIVEN_UP = "park_expired"
#: Why a request ends that its caller does not want any more.
CANCELLED = "cancelled"

__all__ = [
    "CANCELLED",
    "GIVEN_UP",
    "again_request",
    "cancel",
    "drop_next",
    "ended_unrun",
    "give_up",
    "has_ended_cancelled",
    "hold_next",
    "is_cancelled",
    "leaves_chord",
    "next_attempt",
    "park_new",
    "refit",
    "reserve_or_park",
    "try_continued",
    "try_parked",
]


def reserve_or_park(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    *,
    delivered_us: int | None,
    lock_ms: int,
    park_us: int,
) -> Reserved | AlreadyReserved | Parked:
    """Admit a continuation, or park it; a repeat changes nothing. Locks as :func:`reserve`."""
    admitted = try_continued(
        connection, request, message, delivered_us=delivered_us, lock_ms=lock_ms
    )
    if isinstance(admitted, Refused):
        return Parked(parked.park(connection, request, message, park_us, admitted))
    return admitted


def try_continued(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    *,
    delivered_us: int | None,
    lock_ms: int,
) -> Reserved | AlreadyReserved | Refused:
    """Admit a continuation where it fits; nothing of a refusal is noted. As :func:`reserve`."""
    before = ended_unrun(connection, request.root, [request])
    if before:
        return before[request.reservation_id]
    return reserve(
        connection, request, message, delivered_us=delivered_us, note_refusal=False, lock_ms=lock_ms
    )


def park_new(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    *,
    lock_ms: int,
    park_us: int,
    bound: int,
    most: int,
) -> Tried:
    """Park a new request that was refused just now, unless it fits by now; a repeat finds it.

    Locks as :func:`reserve`. Two with one id at once: the second waits for the first, and is it.

    :param bound: how many messages may wait to be published.
    :param most: how much may be parked; beyond that, give or take what is parked just now, it is
        ``Crowded`` and counted as a refusal. What its lane could never release is ``Full``.
    """
    tried = try_reserve(
        connection, request, message, note=False, lock_ms=lock_ms, bound=bound, queues=True
    )
    if not isinstance(tried, Refused):
        return tried
    heavy = waiting.never(connection, request.root, message.queue, request.weight)
    if heavy is not None:
        return heavy
    if parked.count(connection, request.root, most) >= most:
        note_refusals(connection, request.root, [(request, tried)])
        return Crowded(tried, most)
    return Parked(parked.park(connection, request, message, park_us, tried))


def ended_unrun(
    connection: Connection, root: str, requests: Sequence[ReserveRequest]
) -> dict[uuid.UUID, AlreadyReserved]:
    """Return which requests their parent has made before, and have ended without a run, by id.

    They stay ended, though their ids may be reserved anew: whoever waits for them was told, and a
    replay of the parent asks for nothing new. One SELECT, none for what has no parent; locks
    nothing: one that ends meanwhile is admitted once more, and not twice.
    """
    made = [one for one in requests if one.parent is not None]
    ended: dict[Any, uuid.UUID] = {}
    for first in range(0, len(made), MOST_KEYS):
        some = made[first : first + MOST_KEYS]
        found = connection.execute(
            sa.select(
                reservations.c.parent_id,
                reservations.c.task_id,
                reservations.c.nesting,
                reservations.c.fingerprint,
                reservations.c.reservation_id,
            ).where(
                reservations.c.root == root,
                reservations.c.task_id.in_([one.task_id for one in some]),
                reservations.c.parent_id.is_not(None),
                reservations.c.state == "released",
            )
        )
        ended.update({row[:4]: row.reservation_id for row in found})
    return {
        one.reservation_id: AlreadyReserved(ended[key], one.task_id)
        for one in made
        for key in [(one.parent, one.task_id, one.nesting, one.fingerprint)]
        if key in ended
    }


def next_attempt(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    after_attempt: int,
    running: bool,
    park_us: int,
) -> Reserved | Parked:
    """Hold what the next attempt needs and write its message, or park both; parked, it stays so.

    The caller holds the reservation's row. Locks its balances in order, then its outbox row.

    :param request: carries the reservation's id and deadline, the estimates and the message's
        retries.
    :param after_attempt: the attempt it follows.
    :param running: whether that one still runs: the message is blocked until it ends.
    """
    reservation_id = request.reservation_id
    parked_id = parked.parked_of(connection, request.root, reservation_id)
    if parked_id is not None:
        # A repeat after a lost answer.
        return Parked(parked_id)
    refused = hold_next(connection, request)
    if refused is None:
        _write_next(connection, request, message, after_attempt, running)
        return Reserved(reservation_id)
    of = lines_of(connection, request.root, reservation_id)
    set_holds(connection, request.root, of, {line.line: kept(line) for line in of}, "park")
    return Parked(
        parked.park(
            connection,
            request,
            message,
            park_us,
            refused,
            reservation_id=reservation_id,
            after_attempt=after_attempt,
        )
    )


def _write_next(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    after_attempt: int,
    running: bool,
) -> None:
    outbox.enqueue(
        connection,
        request.root,
        deadlines.bounded(message, request.deadline_us),
        state="blocked" if running else "due",
        request=request,
        after_attempt=after_attempt,
    )


def hold_next(connection: Connection, request: ReserveRequest) -> Refused | None:
    """Make each line hold its estimate on top of what was used; all, or none and why.

    What the request asks of a budget it asks of all above it. What is charged at the start of each
    attempt is taken from the window that is open now, by a line of its own. The caller holds the
    reservation's row. Locks the balances in order.
    """
    reservation_id = request.reservation_id
    of = lines_of(connection, request.root, reservation_id)
    added = renew_start_lines(connection, request.root, of)
    if added:
        of = lines_of(connection, request.root, reservation_id)
    estimates = _estimates(connection, request, of)
    # More than an amount can be fits no limit.
    refused = raise_holds(connection, request.root, of, _holds(of, estimates), "raise")
    if refused is not None:
        drop_lines(connection, request.root, reservation_id, added)
        return refused
    write_lines(
        connection,
        request.root,
        reservation_id,
        {"estimate": estimates, "extended": dict.fromkeys(estimates, 0)},
    )
    if request.prices is not None:
        connection.execute(
            reservations.update()
            .where(
                reservations.c.root == request.root,
                reservations.c.reservation_id == reservation_id,
            )
            .values(prices=request.prices)
        )
    return None


def _holds(of: list[sa.Row[Any]], estimates: dict[int, int]) -> dict[int, int]:
    """Return what lines hold for a next attempt; of several on one budget the last holds for it."""
    latest = {line.budget: line.line for line in of}
    return {
        line.line: kept(line) + (estimates[line.line] if latest[line.budget] == line.line else 0)
        for line in of
    }


def refit(connection: Connection, root: str, reservation_id: uuid.UUID) -> None:
    """Make a reservation hold what its next attempt needs, after all that the last one recorded.

    Its message was written before that one ended, which may have recorded, or extended, since. What
    does not fit any more is not held; the attempt runs all the same. The caller holds the
    reservation's row. Locks the balances in order.
    """
    of = lines_of(connection, root, reservation_id)
    holds = _holds(of, {line.line: line.estimate for line in of})
    if raise_holds(connection, root, of, holds, "raise", note=False) is not None:
        lowered = {line.line: min(holds[line.line], line.reserved) for line in of}
        set_holds(connection, root, of, lowered, "raise")
    if any(line.extended for line in of):
        write_lines(connection, root, reservation_id, {"extended": {line.line: 0 for line in of}})


def _estimates(
    connection: Connection, request: ReserveRequest, of: list[sa.Row[Any]]
) -> dict[int, int]:
    """Return what the next attempt asks of each line; as before where nothing new reaches it."""
    levels = levels_above(connection, request.root, of)
    asked: dict[str, int] = {}
    for line in request.lines:
        if line.budget in levels:
            for level in chain(levels, line.budget):
                asked[level.budget] = max(line.amount, asked.get(level.budget, 0))
    # What it has turned to since it was asked for, and what is above that.
    for row in of:
        if row.budget not in asked:
            for level in chain(levels, row.budget):
                asked[level.budget] = max(row.estimate, asked.get(level.budget, 0))
    return {line.line: asked.get(line.budget, line.estimate) for line in of}


def again_request(connection: Connection, row: sa.Row[Any], tenant: str | None) -> ReserveRequest:
    """Return the request that would run a reservation's present message once more.

    :param tenant: whose share of a lane that message counts to.
    """
    reservation_id: uuid.UUID = row.reservation_id
    return ReserveRequest(
        reservation_id=reservation_id,
        root=row.root,
        owner=row.owner,
        request_id=row.request_id,
        task_id=row.task_id,
        task_name=row.task_name,
        stage=row.stage,
        fingerprint=row.fingerprint,
        estimator=row.estimator,
        estimator_version=row.estimator_version,
        lines=tuple(
            Line(line.budget, line.estimate, line.charge)
            for line in {
                line.budget: line for line in lines_of(connection, row.root, reservation_id)
            }.values()
        ),
        opaque=row.opaque,
        nesting=row.nesting,
        parent=row.parent_id,
        retries=row.retries,
        unreserved=row.unreserved,
        finishing=True,
        tenant=tenant,
        prices=row.prices,
        deadline_us=row.deadline_us,
        shadows=row.shadows,
        enforced=row.enforced,
    )


def try_parked(
    connection: Connection,
    root: str,
    parked_id: uuid.UUID,
    queue: str,
    lock_ms: int,
) -> bool | Refused:
    """Admit one parked row if it fits now; what it was refused with, if not.

    Locks, without a wait, the queue, then the reservation it belongs to, the parked row, then as
    :func:`reserve`. Two sweeps at once: the second passes by the queue that the first is at. False
    where it does, and where the row is gone.

    :param queue: the budget that it waits for.
    :raises BudgetError: for what cannot be decided, as by :func:`reserve`. Nothing of it may be
        committed: the caller rolls back, and sees to it that others come first then.
    """
    if not advisory.try_lock(connection, root, advisory.QUEUES, queue):
        return False
    reservation_id = parked.reservation_of(connection, root, parked_id)
    held = None if reservation_id is None else lock(connection, root, reservation_id)
    row = parked.lock_parked(connection, root, parked_id)
    if row is None:
        return False
    request, message = parked.request_of(row), outbox.message_of(row, row.due_us)
    refused: object = None
    if reservation_id is None:
        refused = _kept_for_others(connection, row, request)
        if refused is None:
            refused = reserve(connection, request, message, note_refusal=False, lock_ms=lock_ms)
    elif held is not None and held.state not in TERMINAL:
        refused = hold_next(connection, request)
        if refused is None:
            running = held.state == "running" and held.attempts == row.after_attempt
            _write_next(connection, request, message, row.after_attempt, running)
    if isinstance(refused, Refused):
        parked.requeue(connection, row, refused)
        return refused
    parked.note_waited(connection, row)
    parked.unpark(connection, root, parked_id)
    return True


def _kept_for_others(
    connection: Connection, row: sa.Row[Any], request: ReserveRequest
) -> Refused | None:
    """Return why a parked request waits where another goes ahead, in the queue of another budget.

    Those of its own come in their order anyway. Locks nothing.
    """
    ahead = parked.ahead(connection, row.root) - {row.budget}
    if request.finishing or not request.enforced or not ahead:
        return None
    known = levels_of(connection, row.root, [line.budget for line in request.lines])
    decided = decide(request.lines, known, False) if known else ()
    return decided if isinstance(decided, Refused) else queued(known, decided, ahead)


def cancel(
    connection: Connection, root: str, task_id: str, last: Last = lambda message: None
) -> Released | Cancelling | Closed | Missing:
    """End a request that does not run: give back what it holds, drop its message.

    Of a task that replaced itself, its last request. One that waits between attempts is settled at
    what it used. Whoever gets the message afterwards finds it ended. Its result is to be told. A
    repeat finds it cancelled, and has that told again. One that runs is only marked: no further
    attempt follows the one that runs.

    Locks the reservation, its parked row, its balances, its outbox rows; against a claim or a
    settlement the one that locks the reservation first wins.

    :param last: returns what is published in place of a message that no worker has got: it draws on
        nothing, and tells whoever waits for the task; or none.
    """
    found = connection.execute(
        sa.select(reservations.c.reservation_id)
        .where(
            reservations.c.root == root,
            reservations.c.task_id == task_id,
            reservations.c.reason.is_distinct_from(GIVEN_UP),
        )
        .order_by(reservations.c.nesting.desc(), reservations.c.created_us.desc())
        .limit(1)
    ).scalar()
    row = None if found is None else lock(connection, root, found)
    waits = parked.of_task(connection, root, task_id)
    if row is not None and (row.state not in TERMINAL or waits is None):
        message = outbox.unpublished(connection, root, row.reservation_id)
        if waits is not None and row.state != "running":
            held = parked.lock_parked(connection, root, waits, wait=True)
            message = message if held is None else outbox.message_of(held)
            if held is not None:
                parked.note_waited(connection, held)
            parked.unpark(connection, root, waits)
        released = release(connection, root, row.reservation_id, CANCELLED)
        if isinstance(released, Running):
            return Cancelling(_mark_cancelled(connection, row))
        if isinstance(released, Released):
            untold.note(connection, root, task_id, CANCELLED, row.reservation_id)
            _publish_last(connection, root, message, last)
        return released
    if waits is None:
        return Missing()
    request = parked.lock_parked(connection, root, waits, wait=True)
    if request is None:
        # It was admitted, or given up, meanwhile.
        return cancel(connection, root, task_id, last)
    parked.unpark(connection, root, request.parked_id)
    _never_admitted(connection, parked.request_of(request), CANCELLED)
    parked.note_waited(connection, request)
    _publish_last(connection, root, outbox.message_of(request), last)
    return Released(task_id, "released")


def _publish_last(
    connection: Connection, root: str, message: WireMessage | None, last: Last
) -> None:
    published = None if message is None else last(message)
    if published is not None:
        # It runs nothing: there is nothing that it could overtake.
        free = replace(published, due_us=0, expires_us=None, order_key=None)
        outbox.enqueue(connection, root, free)


def _mark_cancelled(connection: Connection, row: sa.Row[Any]) -> str:
    """Note, once, that a request was cancelled while it ran; return who runs it.

    The caller holds its row.
    """
    if row.cancelled_us is None:
        connection.execute(
            reservations.update()
            .where(
                reservations.c.root == row.root,
                reservations.c.reservation_id == row.reservation_id,
            )
            .values(cancelled_us=now_us())
        )
    worker = connection.execute(
        sa.select(attempts.c.worker).where(
            attempts.c.root == row.root,
            attempts.c.reservation_id == row.reservation_id,
            attempts.c.attempt == row.attempts,
        )
    ).scalar()
    return str(worker or "")


def is_cancelled(connection: Connection, root: str, reservation_id: uuid.UUID) -> bool:
    """Tell whether a request was cancelled while it ran. Locks nothing."""
    cancelled_us = connection.execute(
        sa.select(reservations.c.cancelled_us).where(
            reservations.c.root == root, reservations.c.reservation_id == reservation_id
        )
    ).scalar()
    return cancelled_us is not None


def has_ended_cancelled(connection: Connection, root: str, reservation_id: uuid.UUID) -> bool:
    """Tell whether a request has ended since it was cancelled. Locks nothing."""
    reason = connection.execute(
        sa.select(reservations.c.reason).where(
            reservations.c.root == root, reservations.c.reservation_id == reservation_id
        )
    ).scalar()
    return bool(reason == CANCELLED)


def leaves_chord(connection: Connection, root: str, reservation_id: uuid.UUID) -> bool:
    """Tell whether a request has ended as cancelled, and its task was not admitted anew since.

    So is one that was found past its deadline. Then nobody else tells its chord that a member is
    missing. Locks nothing.
    """
    other = reservations.alias("other")
    anew = sa.exists(sa.text("1")).where(
        other.c.root == root,
        other.c.task_id == reservations.c.task_id,
        other.c.reservation_id != reservations.c.reservation_id,
        other.c.created_us >= reservations.c.created_us,
    )
    found = connection.execute(
        sa.select(reservations.c.reservation_id).where(
            reservations.c.root == root,
            reservations.c.reservation_id == reservation_id,
            reservations.c.reason.in_((CANCELLED, DEADLINE)),
            ~anew,
        )
    ).first()
    return found is not None


def drop_next(connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int) -> None:
    """Drop what was written to follow ``attempt``, be it in the outbox or parked.

    The caller holds the reservation's row.
    """
    outbox.drop_next(connection, root, reservation_id, attempt)
    parked_id = parked.parked_of(connection, root, reservation_id)
    if parked_id is not None:
        parked.unpark(connection, root, parked_id)


def give_up(
    connection: Connection, root: str, parked_id: uuid.UUID, reservation_id: uuid.UUID | None
) -> GivenUp | None:
    """Drop a parked row whose time is over; the reservation that waited for it is settled.

    A request that never had one stays known as released, having held nothing. The result of its
    task is to be told.

    Locks the reservation, then the parked row. None while the attempt it follows still runs, and
    where another sweep is at it.
    """
    held = None if reservation_id is None else lock(connection, root, reservation_id)
    row = parked.lock_parked(connection, root, parked_id)
    if row is None or (held is not None and held.state == "running"):
        return None
    parked.unpark(connection, root, parked_id)
    request = parked.request_of(row)
    reason = deadlines.why(GIVEN_UP, request.deadline_us, row.deadline_us, row.expires_us)
    if reservation_id is None:
        _never_admitted(connection, request, reason)
    elif isinstance(release(connection, root, reservation_id, reason), Released):
        untold.note(connection, root, row.task_id, reason, reservation_id)
    parked.note_waited(connection, row)
    return GivenUp(
        row.task_id,
        row.task_name,
        row.owner,
        row.request_id,
        row.budget,
        row.amount,
        row.created_us,
    )


def _never_admitted(connection: Connection, request: ReserveRequest, reason: str) -> None:
    """Note how a request ended that was parked and never had a reservation."""
    note_given_up(connection, request, reason)
    untold.note(connection, request.root, request.task_id, reason, request.reservation_id)
