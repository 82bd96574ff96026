"""Runs in place: a request is admitted and claimed in one transaction, and has no message.

On PostgreSQL one statement does it, and one ends it (:mod:`celery_budget.store.at_once`), where
nothing out of the ordinary follows.

Nobody ever sees it but running or ended. Whatever its process does its lease finds it, and since
there is no message it never runs anywhere else: it is lost then, and charged.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import (
    TERMINAL,
    AlreadyReserved,
    Backlogged,
    Claimed,
    Closed,
    Conflict,
    Crowded,
    Ended,
    Full,
    Outcome,
    Parked,
    Refused,
    Released,
    Reserved,
    ReserveRequest,
    Skipped,
    Unknown,
)
from celery_budget.core.retries import DEADLINE
from celery_budget.errors import StoreError
from celery_budget.store import attempts, deadlines
from celery_budget.store.at_once import BEGUN, begun
from celery_budget.store.attempts import Delivery
from celery_budget.store.batch import reserve_many
from celery_budget.store.continuations import hold_next
from celery_budget.store.engine import state_of
from celery_budget.store.prepared import BIGINT, BOOLEAN, Statement
from celery_budget.store.refusals import note_refusals
from celery_budget.store.requests import ANSWERED, ASKED, answer, asked_of
from celery_budget.store.schema import attempts as attempts_table
from celery_budget.store.schema import outbox, reservations
from celery_budget.store.standbys import REPLICATED

__all__ = ["NotStarted", "Standing", "end", "go_on", "standing", "start", "start_at_once"]

#: Why a request does not run now.
NotStarted = (
    AlreadyReserved
    | Refused
    | Unknown
    | Conflict
    | Backlogged
    | Full
    | Skipped
    | Closed
    | Parked
    | Crowded
)

RETRIED = Outcome("retried")

#: What budget_start raises where the deadline passes while it waits.
PASSED = "CB002"


def start(
    connection: Connection,
    request: ReserveRequest,
    delivery: Delivery,
    claim_id: uuid.UUID,
    lease_us: int,
    *,
    note: bool = True,
) -> Claimed | NotStarted:
    """Admit a request and claim its first attempt.

    Locks as :func:`celery_budget.store.batch.reserve_many`: of two calls with one key the second
    waits, and finds the first one's. A repeat after a lost answer finds its own claim. ``Closed``
    where its deadline has passed: it has ended then.

    :param note: count a refusal in the reports.
    :raises Unready: as for :func:`celery_budget.store.requests.reserve`.
    """
    [tried] = reserve_many(connection, request.root, [(request, None)], delivered_us=0, note=note)
    if not isinstance(tried, Reserved):
        return tried
    claimed = attempts.claim(connection, delivery, claim_id, lease_us)
    if isinstance(claimed, Closed):
        return claimed
    if not isinstance(claimed, Claimed):
        raise StoreError(
            "a request that was to run at once has ended while this was repeated; call it again"
        )
    return replace(claimed, waived=tried.waived)


_START = Statement(
    "SELECT s.*"  # noqa: S608 - of constants
    " FROM budget_start(:root, :reservation_id, :owner, :request_id, :nesting,"
    " :task_id, :task_name, :stage, :fingerprint, :opaque, :estimator, :estimator_version,"
    " CAST(:prices AS text), CAST(:parent_id AS uuid), :retries, :unreserved, :finishing,"
    " CAST(:budgets AS text[]), CAST(:amounts AS bigint[]), CAST(:charges AS text[]),"
    " CAST(:deadline_us AS bigint), CAST(:within_us AS bigint), CAST(:shadows AS text), :note,"
    " :worker, :boot, CAST(:pid AS integer), :late_ack, :rerun, :inquires, :claim,"
    " CAST(:lease AS bigint), :who, :lock_ms) AS s"
    # What was there writes nothing, and is told as what is admitted is.
    f" WHERE CASE WHEN s.outcome = 'existing' THEN {REPLICATED} ELSE true END",
    given={
        **ASKED,
        "note": BOOLEAN,
        **BEGUN,
    },
    found={
        **ANSWERED,
        "deadline_us": BIGINT,
        "time_us": BIGINT,
    },
)


def start_at_once(
    connection: Connection,
    request: ReserveRequest,
    delivery: Delivery,
    claim_id: uuid.UUID,
    lease_us: int,
    *,
    note: bool,
    lock_ms: int,
) -> Claimed | NotStarted | None:
    """Start as :func:`start` in one statement, a stored function, on PostgreSQL.

    None, and nothing changed, where the deadline has passed or this very call was made before.

    :raises Unready: as :func:`start`.
    """
    how = {
        **asked_of(request),
        "note": note,
        **begun(delivery, claim_id, lease_us, lock_ms),
    }
    try:
        row = _START.one(connection, how)
    except exc.DBAPIError as error:
        if state_of(error) == PASSED:
            return None
        raise
    if row.outcome == "general":
        return None
    if row.outcome == "reserved":
        return Claimed(1, claim_id, 0, row.deadline_us, row.time_us)
    tried = answer(connection, request, row)
    if isinstance(tried, Reserved):
        raise AssertionError("this very call is left to the general path")
    return tried


def go_on(
    connection: Connection,
    request: ReserveRequest,
    attempt: int,
    claim_id: uuid.UUID,
    delivery: Delivery,
    next_claim_id: uuid.UUID,
    lease_us: int,
) -> Claimed | Refused | Released | Closed:
    """End a running attempt as retried, and claim the next one.

    That holds its estimate on top of what was used. Where it does not fit, or the request was
    cancelled (``Released``), there is none: the request is settled at what it used; past its
    deadline with that as the state of ``Closed``. Otherwise ``Closed``, and nothing changed, is
    where the fence is gone.

    Locks the reservation, then its balances. A repeat after a lost answer finds its own claim, or
    that the request has ended.
    """
    root, reservation_id = request.root, request.reservation_id
    row = attempts.owned(connection, root, reservation_id, attempt, claim_id)
    if row is not None:
        if row.cancelled_us is not None:
            end(connection, root, reservation_id, attempt, claim_id, RETRIED)
            return Released(row.task_id, "settled")
        left = deadlines.left_us(connection, row)
        if left is not None and left <= 0:
            end(connection, root, reservation_id, attempt, claim_id, RETRIED)
            return Closed(DEADLINE)
        refused = hold_next(connection, request)
        if refused is not None:
            note_refusals(connection, root, [(request, refused)])
            end(connection, root, reservation_id, attempt, claim_id, RETRIED)
            return refused
        attempts.write_end(connection, root, reservation_id, attempt, RETRIED, is_open=False)
        attempts.set_reservation(
            connection, root, reservation_id, state="waiting", retries=request.retries
        )
    claimed = attempts.claim(connection, delivery, next_claim_id, lease_us)
    return claimed if isinstance(claimed, Claimed) else Closed("ended")


def end(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    outcome: Outcome,
) -> Ended | Closed:
    """End the running attempt and close it: nothing is ever given again.

    Locks as :func:`celery_budget.store.attempts.end`, and as that finds what it has done before.
    """
    ended = attempts.end(connection, root, reservation_id, attempt, claim_id, outcome)
    if isinstance(ended, Ended):
        attempts.close(connection, root, reservation_id, attempt, claim_id)
    return ended


@dataclass(frozen=True)
class Standing:
    """How the last request of a task stands.

    :ivar outcome: of its last attempt, once that has ended.
    :ivar in_place: whether no message runs it; none does any more where it has ended.
    """

    state: str
    outcome: str | None
    in_place: bool


def standing(connection: Connection, root: str, task_id: str) -> Standing | None:
    """Return how a task stands that was reserved; of one that replaced itself, what it became.

    Locks nothing.
    """
    message = sa.exists(sa.text("1")).where(
        outbox.c.root == root, outbox.c.reservation_id == reservations.c.reservation_id
    )
    last = sa.and_(attempts.of_reservation, attempts_table.c.attempt == reservations.c.attempts)
    row = connection.execute(
        sa.select(reservations.c.state, attempts_table.c.outcome, message.label("has_message"))
        .outerjoin(attempts_table, last)
        .where(reservations.c.root == root, reservations.c.task_id == task_id)
        .order_by(reservations.c.nesting.desc(), reservations.c.created_us.desc())
        .limit(1)
    ).first()
    if row is None:
        return None
    begun = row.state == "running" or row.state in TERMINAL
    return Standing(row.state, row.outcome, begun and not row.has_message)
