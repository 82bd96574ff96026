"""Requests: admitted with their message, refused, or given up before they were admitted.

On PostgreSQL a stored function does it in one statement (``migrations/versions/*.sql``), on SQLite
a batch of one, under its one write lock; so is on both what is not enforced.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Connection

from celery_budget.core.backpressure import OUTBOX_SECONDS, Pace, spread
from celery_budget.core.draws import mixed
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    AlreadyReserved,
    Backlogged,
    Conflict,
    Crowded,
    Full,
    Refused,
    Reserved,
    ReserveRequest,
    Skipped,
    Tried,
    Unknown,
)
from celery_budget.errors import BudgetError, OutboxFull, QueueFull, RequestConflict, UnknownBudget
from celery_budget.store import declaring, levels, parked
from celery_budget.store.backlog import uncounted
from celery_budget.store.batch import (
    columns_of,
    first_unknown,
    insert_lines,
    moved,
    repeated,
    reserve_many,
)
from celery_budget.store.drivers import is_lent
from celery_budget.store.insert import insert_new
from celery_budget.store.journal import who
from celery_budget.store.prepared import (
    BIGINT,
    BIGINTS,
    BOOLEAN,
    BYTES,
    INTEGER,
    TEXT,
    TEXTS,
    UUID_,
    Statement,
)
from celery_budget.store.schema import now_us, reservations
from celery_budget.store.standbys import REPLICATED

__all__ = [
    "ANSWERED",
    "ASKED",
    "answer",
    "asked_of",
    "error_of",
    "note_given_up",
    "reserve",
    "try_reserve",
]


def reserve(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    *,
    delivered_us: int | None = None,
    note_refusal: bool = True,
    lock_ms: int = 5000,
    bound: int | None = None,
) -> Reserved | AlreadyReserved | Refused:
    """Admit a request: identity, budgets, lines and outbox row, all or nothing.

    PostgreSQL: one statement, a stored function, unless the request is not enforced. Locks the
    request's key, then the balances by (budget, window, stripe). Of two calls with one key the
    second waits and finds the first. What does not fit by one look is refused without a lock; what
    fits it is decided behind the locks.

    :param delivered_us: the message is with a worker already; it is not to be published, unless
        that worker has not claimed it after this time.
    :param note_refusal: count a refusal in the reports.
    :param bound: how many messages may wait to be published; none for any number, and for work
        that goes on, which its lane holds however much waits there.
    :raises QueueFull: where the lane that feeds the message's queue takes no more.
    :raises OutboxFull: where more wait than that, give or take what came within two seconds.
    :raises UnknownBudget: where a budget does not exist.
    :raises RequestConflict: where the request's id is in use for another request.
    :raises Unready: where a budget has to be made of its template, or a window opened, before; and
        where the budgets were given other parents meanwhile.
    """
    tried = try_reserve(
        connection,
        request,
        message,
        delivered_us=delivered_us,
        note=note_refusal,
        lock_ms=lock_ms,
        bound=bound,
    )
    if not isinstance(tried, (Reserved, AlreadyReserved, Refused)):
        raise error_of(tried)
    return tried


def try_reserve(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    *,
    delivered_us: int | None = None,
    note: bool = True,
    lock_ms: int = 5000,
    bound: int | None = None,
    queues: bool = False,
) -> Tried:
    """As :func:`reserve`, with every end an outcome.

    Beyond the ``bound`` it is ``Backlogged``, beyond a lane's ``Full``.

    :param queues: it is new: ``Parked`` where it is parked already, and refused where what was
        parked before goes ahead.
    :raises Unready: as :func:`reserve`.
    """
    if connection.dialect.name == "postgresql" and request.enforced:
        return _reserve_postgresql(
            connection, request, message, delivered_us, note, lock_ms, bound, queues
        )
    [tried] = reserve_many(
        connection,
        request.root,
        [(request, message)],
        delivered_us=delivered_us,
        note=note,
        bound=bound,
        queues=queues,
    )
    return tried


def error_of(outcome: Tried) -> BudgetError:
    """Return what a caller is told whose request was turned away."""
    if isinstance(outcome, (Refused, Crowded)):
        return outcome.error()
    if isinstance(outcome, Backlogged):
        return OutboxFull(outcome.messages, outcome.bound, spread(OUTBOX_SECONDS))
    if isinstance(outcome, Full):
        return QueueFull(
            outcome.lane,
            outcome.reason,
            outcome.weight,
            outcome.waiting,
            outcome.bound,
            None if outcome.reason == "heavy" else spread(OUTBOX_SECONDS),
        )
    if isinstance(outcome, Unknown):
        return UnknownBudget(outcome.budget)
    if isinstance(outcome, Conflict):
        return RequestConflict(outcome.request_id, outcome.owner, outcome.task_id)
    if isinstance(outcome, Skipped) and outcome.because is not None:
        return error_of(outcome.because)
    raise AssertionError("what is left out is left out for another one that was turned away")


#: What a stored function is told of a request.
ASKED = {
    "root": TEXT,
    "reservation_id": UUID_,
    "owner": TEXT,
    "request_id": TEXT,
    "nesting": INTEGER,
    "task_id": TEXT,
    "task_name": TEXT,
    "stage": TEXT,
    "fingerprint": TEXT,
    "opaque": BOOLEAN,
    "estimator": TEXT,
    "estimator_version": TEXT,
    "prices": TEXT,
    "parent_id": UUID_,
    "retries": INTEGER,
    "unreserved": BOOLEAN,
    "finishing": BOOLEAN,
    "budgets": TEXTS,
    "amounts": BIGINTS,
    "charges": TEXTS,
    "deadline_us": BIGINT,
    "within_us": BIGINT,
    "shadows": TEXT,
}

#: What it tells of what came of it.
ANSWERED = {
    "outcome": TEXT,
    "reservation_id": UUID_,
    "task_id": TEXT,
    "fingerprint": TEXT,
    "budget": TEXT,
    "unit": TEXT,
    "requested": BIGINT,
    "limit_amount": BIGINT,
    "reserved": BIGINT,
    "spent": BIGINT,
    "most": BIGINT,
    "left_us": BIGINT,
    "freed": BIGINT,
    "span_us": BIGINT,
}

_RESERVE = Statement(
    "SELECT r.*"  # noqa: S608 - of constants
    " FROM budget_reserve(:root, :reservation_id, :owner, :request_id, :nesting,"
    " :task_id, :task_name, :stage, :fingerprint, :opaque, :estimator, :estimator_version,"
    " CAST(:prices AS text),"
    " CAST(:parent_id AS uuid), :retries, :unreserved, :finishing,"
    " CAST(:budgets AS text[]), CAST(:amounts AS bigint[]), CAST(:charges AS text[]),"
    " :outbox_id, :state, CAST(:again_us AS bigint), CAST(:due_us AS bigint),"
    " CAST(:expires_us AS bigint), :queue,"
    " :body, :envelope, :rank, :order_key, :broker, CAST(:deadline_us AS bigint),"
    " CAST(:within_us AS bigint),"
    " CAST(:shadows AS text), :tenant, :weight, CAST(:bound AS bigint), :queues,"
    " :note, :who, :lock_ms, :lent) AS r"
    # What was there writes nothing, and is told as what is admitted is.
    f" WHERE CASE WHEN r.outcome IN ('existing', 'parked') THEN {REPLICATED} ELSE true END",
    given={
        **ASKED,
        "outbox_id": UUID_,
        "state": TEXT,
        "again_us": BIGINT,
        "due_us": BIGINT,
        "expires_us": BIGINT,
        "queue": TEXT,
        "body": BYTES,
        "envelope": TEXT,
        "rank": INTEGER,
        "order_key": TEXT,
        "broker": TEXT,
        "tenant": TEXT,
        "weight": BIGINT,
        "bound": BIGINT,
        "queues": BOOLEAN,
        "note": BOOLEAN,
        "who": TEXT,
        "lock_ms": TEXT,
        "lent": BOOLEAN,
    },
    found=ANSWERED,
)


def _reserve_postgresql(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    delivered_us: int | None,
    note: bool,
    lock_ms: int,
    bound: int | None,
    queues: bool,
) -> Tried:
    row = _RESERVE.one(
        connection,
        {
            **asked_of(request),
            "outbox_id": new_id(),
            "state": "due" if delivered_us is None else "published",
            "again_us": delivered_us,
            "due_us": message.due_us,
            "expires_us": message.expires_us,
            "queue": message.queue,
            "body": message.body,
            "envelope": message.envelope,
            "rank": message.rank,
            "order_key": message.order_key,
            "broker": message.broker,
            "tenant": request.tenant or request.owner,
            "weight": request.weight,
            "bound": bound,
            "queues": queues,
            "note": note,
            "who": who(),
            "lock_ms": str(lock_ms),
            "lent": is_lent(connection),
        },
    )
    return answer(connection, request, row)


def asked_of(request: ReserveRequest) -> dict[str, Any]:
    """Return what is said of a request by :data:`ASKED`."""
    columns = columns_of(request)
    for unsaid in ("charges_start", "plan_id", "step", "enforced"):
        del columns[unsaid]
    return {
        **columns,
        "within_us": request.within_us,
        "finishing": request.finishing,
        "budgets": [line.budget for line in request.lines],
        "amounts": [line.amount for line in request.lines],
        "charges": [line.charge for line in request.lines],
    }


def answer(connection: Connection, request: ReserveRequest, row: Any) -> Tried:
    """Return what came of a request, by what was :data:`ANSWERED`.

    :raises Unready: as :func:`reserve`.
    """
    names = [line.budget for line in request.lines]
    if row.outcome == "unknown":
        unknown = first_unknown(connection, request.root, names)
        if unknown is not None:
            return Unknown(unknown)
    if row.outcome in ("unknown", "window"):
        raise declaring.not_ready(request.root, names)
    if row.outcome == "uncounted":
        raise uncounted(request.root, row.limit_amount)
    if row.outcome == "backlog":
        return Backlogged(row.requested, row.limit_amount)
    if row.outcome == "lane":
        return Full(row.budget, row.unit, request.weight, row.requested, row.limit_amount)
    if row.outcome == "moved":
        raise moved(names[0])
    if row.outcome == "mixed":
        raise mixed(row.budget)
    if row.outcome == "parked":
        return parked.same(request, row.reservation_id, row.fingerprint)
    if row.reservation_id is None:
        return Refused(
            row.budget,
            row.unit,
            row.requested,
            row.limit_amount,
            row.reserved,
            row.spent,
            row.outcome,
            row.most,
            None if row.freed is None else Pace(row.left_us, row.freed, row.span_us),
        )
    return repeated(request, row)


def note_given_up(connection: Connection, request: ReserveRequest, reason: str) -> None:
    """Write a request that was never admitted as a released one that held nothing.

    Its lines keep what was asked; the id may be used anew, as that of any released request.
    """
    written = insert_new(
        connection,
        reservations,
        **columns_of(request),
        state="released",
        admitted=False,
        reason=reason,
        attempts=0,
        deliveries=0,
        unmetered=False,
        over=False,
        created_us=now_us(),
        ended_us=now_us(),
    )
    if not written:
        return
    known = levels.levels_of(connection, request.root, [one.budget for one in request.lines])
    insert_lines(
        connection,
        [
            {
                "root": request.root,
                "reservation_id": request.reservation_id,
                "line": number,
                "budget": line.budget,
                "window_us": (known[line.budget].window_us or 0) if line.budget in known else 0,
                "charge": line.charge,
                "unit": known[line.budget].unit if line.budget in known else "",
                "estimate": line.amount,
                "reserved": 0,
            }
            for number, line in enumerate(request.lines)
        ],
    )
