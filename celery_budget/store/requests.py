"""Requests: admitted with their message, refused, or given up before they were admitted.

On PostgreSQL a stored function does it in one statement (``migrations/versions/*.sql``), on SQLite
the same is done here, under its one write lock.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    AlreadyReserved,
    Line,
    Refused,
    Reserved,
    ReserveRequest,
)
from celery_budget.errors import RequestConflict, UnknownBudget
from celery_budget.store import outbox
from celery_budget.store.insert import insert_new
from celery_budget.store.schema import balances, budgets, lines, now_us, refusals, reservations

__all__ = ["note_given_up", "note_refusal", "reserve"]


def reserve(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    *,
    delivered_us: int | None = None,
    note_refusal: bool = True,
    lock_ms: int = 5000,
) -> Reserved | AlreadyReserved | Refused:
    """Admit a request: identity, budgets, lines and outbox row, all or nothing.

    PostgreSQL: one statement, a stored function. Locks the request's key, then the balances by
    (budget, window, stripe). Of two calls with one key the second waits and finds the first. What
    does not fit by one snapshot is refused without a lock; what fits it is decided behind the lock.

    :param delivered_us: the message is with a worker already; it is not to be published, unless
        that worker has not claimed it after this time.
    :param note_refusal: count a refusal in the reports.
    :raises UnknownBudget: where a budget does not exist.
    :raises RequestConflict: where the request's id is in use for another request.
    """
    if connection.dialect.name == "postgresql":
        row = _reserve_postgresql(connection, request, message, delivered_us, note_refusal, lock_ms)
    else:
        row = _reserve_sqlite(connection, request, message, delivered_us, note_refusal)
    if row["outcome"] == "unknown":
        raise UnknownBudget(row["budget"])
    if row["outcome"] == "refused":
        return Refused(
            row["budget"],
            row["unit"],
            row["requested"],
            MAX_AMOUNT if row["limit_amount"] is None else row["limit_amount"],
            row["reserved"],
            row["spent"],
        )
    if row["reservation_id"] == request.reservation_id:
        return Reserved(request.reservation_id)
    if row["fingerprint"] != request.fingerprint:
        raise RequestConflict(request.request_id, request.owner, row["task_id"])
    return AlreadyReserved(row["reservation_id"], row["task_id"])


_RESERVE = sa.text(
    "SELECT * FROM budget_reserve(:root, :reservation_id, :owner, :request_id, :nesting,"
    " :task_id, :task_name, :stage, :fingerprint, :opaque, :estimator, :estimator_version,"
    " CAST(:parent_id AS uuid), :retries, :unreserved,"
    " CAST(:budgets AS text[]), CAST(:amounts AS bigint[]), CAST(:charges AS text[]),"
    " :outbox_id, :state, CAST(:again_us AS bigint), CAST(:due_us AS bigint),"
    " CAST(:expires_us AS bigint), :queue,"
    " :body, :envelope, :note, :lock_ms)"
)


def _reserve_postgresql(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    delivered_us: int | None,
    note: bool,
    lock_ms: int,
) -> Mapping[str, Any]:
    row = connection.execute(
        _RESERVE,
        {
            **_columns(request),
            "budgets": [line.budget for line in request.lines],
            "amounts": [line.amount for line in request.lines],
            "charges": [line.charge for line in request.lines],
            "outbox_id": new_id(),
            "state": "due" if delivered_us is None else "published",
            "again_us": delivered_us,
            "due_us": message.due_us,
            "expires_us": message.expires_us,
            "queue": message.queue,
            "body": message.body,
            "envelope": message.envelope,
            "note": note,
            "lock_ms": str(lock_ms),
        },
    ).one()
    return cast(Mapping[str, Any], row._mapping)


def _reserve_sqlite(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    delivered_us: int | None,
    note: bool,
) -> Mapping[str, Any]:
    """Do the same under SQLite's one write lock, which :class:`Store` has taken."""
    existing = connection.execute(
        sa.select(
            reservations.c.reservation_id, reservations.c.task_id, reservations.c.fingerprint
        ).where(
            reservations.c.root == request.root,
            sa.or_(
                reservations.c.reservation_id == request.reservation_id,
                sa.and_(
                    reservations.c.owner == request.owner,
                    reservations.c.request_id == request.request_id,
                    reservations.c.nesting == request.nesting,
                    reservations.c.state != "released",
                ),
            ),
        )
    ).first()
    if existing is not None:
        return {"outcome": "existing", **existing._mapping}
    short = _short(connection, request)
    if short is not None:
        if short["outcome"] == "refused" and note:
            note_refusal(
                connection,
                request.root,
                short["budget"],
                request.stage,
                request.task_name,
                short["requested"],
                request.reservation_id,
            )
        return short
    connection.execute(
        reservations.insert().values(
            **_columns(request),
            state="reserved" if delivered_us is None else "published",
            attempts=0,
            deliveries=0,
            unmetered=False,
            over=False,
            created_us=now_us(),
        )
    )
    for number, line in enumerate(request.lines):
        connection.execute(
            balances.update()
            .where(
                balances.c.root == request.root,
                balances.c.budget == line.budget,
                balances.c.window_us == 0,
                balances.c.stripe == 0,
            )
            .values(reserved=balances.c.reserved + line.amount)
        )
        _insert_line(connection, request, number, line, line.amount)
    outbox.enqueue(
        connection,
        request.root,
        message,
        delivered_us=delivered_us,
        reservation_id=request.reservation_id,
        retries=request.retries,
    )
    return {"outcome": "reserved", "reservation_id": request.reservation_id}


def note_given_up(connection: Connection, request: ReserveRequest, reason: str) -> None:
    """Write a request that was never admitted as a released one that held nothing.

    Its lines keep what was asked; the id may be used anew, as that of any released request.
    """
    written = insert_new(
        connection,
        reservations,
        **_columns(request),
        state="released",
        reason=reason,
        attempts=0,
        deliveries=0,
        unmetered=False,
        over=False,
        created_us=now_us(),
        ended_us=now_us(),
    )
    if written:
        for number, line in enumerate(request.lines):
            _insert_line(connection, request, number, line, 0)


def _insert_line(
    connection: Connection, request: ReserveRequest, number: int, line: Line, reserved: int
) -> None:
    connection.execute(
        lines.insert().values(
            root=request.root,
            reservation_id=request.reservation_id,
            line=number,
            budget=line.budget,
            window_us=0,
            stripe=0,
            charge=line.charge,
            estimate=line.amount,
            reserved=reserved,
            used=0,
            settled=0,
        )
    )


def note_refusal(
    connection: Connection,
    root: str,
    budget: str,
    stage: str,
    task_name: str,
    requested: int,
    refusal_id: uuid.UUID | None = None,
) -> None:
    """Count a refusal for the reports; once for each ``refusal_id``."""
    insert_new(
        connection,
        refusals,
        root=root,
        refusal_id=refusal_id or new_id(),
        budget=budget,
        stage=stage,
        task_name=task_name,
        requested=requested,
        refused_us=now_us(),
    )


def _short(connection: Connection, request: ReserveRequest) -> Mapping[str, Any] | None:
    for line in request.lines:
        row = connection.execute(
            sa.select(budgets.c.unit, budgets.c.limit_amount, balances.c.reserved, balances.c.spent)
            .join(
                balances,
                sa.and_(balances.c.root == budgets.c.root, balances.c.budget == budgets.c.name),
            )
            .where(
                budgets.c.root == request.root,
                budgets.c.name == line.budget,
                balances.c.window_us == 0,
            )
        ).first()
        if row is None:
            return {"outcome": "unknown", "budget": line.budget}
        bound = MAX_AMOUNT if row.limit_amount is None else row.limit_amount
        if bound == 0 or row.reserved + row.spent > bound - line.amount:
            return {
                "outcome": "refused",
                "budget": line.budget,
                "requested": line.amount,
                **row._mapping,
            }
    return None


def _columns(request: ReserveRequest) -> dict[str, Any]:
    return {
        "root": request.root,
        "reservation_id": request.reservation_id,
        "owner": request.owner,
        "request_id": request.request_id,
        "nesting": request.nesting,
        "task_id": request.task_id,
        "task_name": request.task_name,
        "stage": request.stage,
        "fingerprint": request.fingerprint,
        "opaque": request.opaque,
        "estimator": request.estimator,
        "estimator_version": request.estimator_version,
        "parent_id": request.parent,
        "retries": request.retries,
        "unreserved": request.unreserved,
    }
