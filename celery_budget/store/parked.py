"""Parked work: requests, and next attempts, that wait for budget and hold nothing new.

Each waits in the queue of the budget that was short; see :mod:`celery_budget.store.queues`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.parking import GOES_ON, turn_of
from celery_budget.core.reservations import (
    USED,
    Conflict,
    Line,
    Parked,
    Refused,
    ReserveRequest,
)
from celery_budget.store import deadlines
from celery_budget.store.insert import insert_new
from celery_budget.store.outbox import columns_of, held
from celery_budget.store.schema import instant, lines, now_us, parked, reservations

#: How many requests are looked for by one statement.
MOST_KEYS = 2000

__all__ = [
    "ahead",
    "before",
    "count",
    "drop",
    "is_held_back",
    "lock_parked",
    "look_anew",
    "note_waited",
    "of_task",
    "over",
    "park",
    "parked_of",
    "put_off",
    "request_of",
    "requeue",
    "reservation_of",
    "same",
    "successor_of",
    "unpark",
    "written",
]


def park(
    connection: Connection,
    request: ReserveRequest,
    message: WireMessage,
    park_us: int,
    refused: Refused,
    *,
    reservation_id: uuid.UUID | None = None,
    after_attempt: int | None = None,
) -> uuid.UUID:
    """Park a request, or with ``reservation_id`` the next attempt of one; a repeat changes nothing.

    :param park_us: how long it may wait, where it does not say so itself. Its deadline and its
        message's ``expires`` end it before.
    :param refused: what it was refused with: the budget that it waits for.
    :param after_attempt: the attempt it follows.
    """
    parked_id = new_id()
    [request] = deadlines.fixed(connection, [request])
    message = deadlines.bounded(message, request.deadline_us)
    goes_on = request.finishing or reservation_id is not None
    inserted = insert_new(
        connection,
        parked,
        **columns_of(message) | {"task_id": request.task_id},
        root=request.root,
        parked_id=parked_id,
        reservation_id=reservation_id,
        after_attempt=after_attempt,
        owner=request.owner,
        request_id=request.request_id,
        nesting=request.nesting,
        retries=request.retries,
        request=written(request),
        created_us=now_us(),
        deadline_us=_deadline(message, request.park_us or park_us),
        checked_us=0,
        due_us=message.due_us,
        window_us=_window(request.root, reservation_id, refused.budget),
        **_place(connection, request.root, request.owner, goes_on, refused),
    )
    if inserted:
        return parked_id
    existing: uuid.UUID = connection.execute(
        sa.select(parked.c.parked_id).where(
            parked.c.root == request.root,
            parked.c.owner == request.owner,
            parked.c.task_id == request.task_id,
            parked.c.nesting == request.nesting,
            parked.c.retries == request.retries,
        )
    ).scalar_one()
    return existing


def _deadline(message: WireMessage, park_us: int) -> Any:
    waits: Any = now_us() + park_us
    if message.expires_us is None:
        return waits
    return sa.case((waits > message.expires_us, message.expires_us), else_=waits)


def _window(root: str, reservation_id: uuid.UUID | None, budget: str) -> Any:
    """Return what stands in a statement for the window that a next attempt is held in."""
    if reservation_id is None:
        return None
    held = (
        sa.select(lines.c.window_us)
        .where(
            lines.c.root == root,
            lines.c.reservation_id == reservation_id,
            lines.c.budget == budget,
            lines.c.charge == USED,
        )
        .order_by(lines.c.line.desc())
        .limit(1)
    )
    return held.scalar_subquery()


def _place(
    connection: Connection, root: str, owner: str, goes_on: bool, refused: Refused
) -> dict[str, Any]:
    """Return the columns that say where in which queue something waits."""
    place = {"budget": refused.budget, "reason": refused.reason, "amount": refused.requested}
    if goes_on:
        return {**place, "turn": GOES_ON}
    of_budget = sa.and_(
        parked.c.root == root, parked.c.budget == refused.budget, parked.c.turn > GOES_ON
    )
    first = sa.select(sa.func.min(parked.c.turn)).where(of_budget)
    last = sa.select(sa.func.max(parked.c.turn)).where(of_budget, parked.c.owner == owner)
    row = connection.execute(
        sa.select(last.scalar_subquery().label("last"), first.scalar_subquery().label("first"))
    ).one()
    return {**place, "turn": turn_of(row.last, row.first)}


def requeue(connection: Connection, row: sa.Row[Any], refused: Refused) -> None:
    """Have what did not fit wait for the budget that was short this time; holds its row.

    In another queue it joins the turn that a newcomer would.
    """
    place: dict[str, Any] = {"reason": refused.reason, "amount": refused.requested}
    changed = any(getattr(row, name) != value for name, value in place.items())
    if row.budget != refused.budget:
        changed = True
        place = _place(connection, row.root, row.owner, row.turn == GOES_ON, refused)
        place["ahead_us"] = None
        place["window_us"] = _window(row.root, row.reservation_id, refused.budget)
    if changed:
        connection.execute(
            parked.update()
            .where(parked.c.root == row.root, parked.c.parked_id == row.parked_id)
            .values(**place)
        )


def drop(connection: Connection, root: str, reservation_id: uuid.UUID) -> None:
    """Delete what is parked of a reservation that has ended. The caller holds its row."""
    connection.execute(
        parked.delete().where(parked.c.root == root, parked.c.reservation_id == reservation_id)
    )


def put_off(connection: Connection, root: str, parked_id: uuid.UUID, wait_us: int) -> None:
    """Have a row that cannot be decided, or ended, left alone for a while. Locks it."""
    connection.execute(
        parked.update()
        .where(parked.c.root == root, parked.c.parked_id == parked_id)
        .values(checked_us=now_us() + wait_us)
    )


def look_anew(connection: Connection, root: str) -> None:
    """Have all that waits tried once more: budgets were given other parents. Locks the rows."""
    connection.execute(
        parked.update()
        .where(parked.c.root == root)
        .values(budget=parked.c.owner, amount=0, ahead_us=None)
    )


def count(connection: Connection, root: str, most: int) -> int:
    """Return how much is parked, or ``most`` where it is more. Locks nothing."""
    some = sa.select(parked.c.parked_id).where(parked.c.root == root).limit(most)
    found: int = connection.execute(
        sa.select(sa.func.count()).select_from(some.subquery())
    ).scalar_one()
    return found


def before(
    connection: Connection, root: str, requests: Sequence[ReserveRequest]
) -> tuple[dict[tuple[str, str, int], sa.Row[Any]], set[str]]:
    """Return what comes before new requests: those of them that are parked, and who goes ahead.

    By owner, request id and nesting the rows of the first; of the others the names of the budgets
    that nothing else is admitted to. One SELECT for some thousand requests; locks nothing.
    """
    wanted = sorted({(one.owner, one.task_id, one.nesting) for one in requests})
    goes_ahead = sa.and_(parked.c.ahead_us.is_not(None), parked.c.ahead_us > instant())
    known: dict[tuple[str, str, int], sa.Row[Any]] = {}
    budgets: set[str] = set()
    for page in range(0, len(wanted), MOST_KEYS):
        some = wanted[page : page + MOST_KEYS]
        keys = set(some)
        key = sa.tuple_(parked.c.owner, parked.c.task_id, parked.c.nesting)
        rows = connection.execute(
            sa.select(
                parked.c.parked_id,
                parked.c.reservation_id,
                parked.c.owner,
                parked.c.request_id,
                parked.c.task_id,
                parked.c.nesting,
                parked.c.request,
                parked.c.budget,
                sa.func.coalesce(goes_ahead, sa.false()).label("ahead"),
            ).where(parked.c.root == root, sa.or_(key.in_(some), goes_ahead))
        ).all()
        budgets.update(row.budget for row in rows if row.ahead)
        known.update(
            ((row.owner, row.request_id, row.nesting), row)
            for row in rows
            # Of what goes ahead some are others.
            if row.reservation_id is None and (row.owner, row.task_id, row.nesting) in keys
        )
    return known, budgets


def ahead(connection: Connection, root: str) -> set[str]:
    """Return the budgets that nothing is admitted to but what goes ahead. Locks nothing."""
    rows = connection.execute(
        sa.select(parked.c.budget).where(
            parked.c.root == root, parked.c.ahead_us.is_not(None), parked.c.ahead_us > instant()
        )
    )
    return set(rows.scalars())


def same(request: ReserveRequest, parked_id: uuid.UUID, fingerprint: str) -> Parked | Conflict:
    """Return what a request is whose id is parked already, for a request with ``fingerprint``."""
    if fingerprint != request.fingerprint:
        return Conflict(request.request_id, request.owner, request.task_id)
    return Parked(parked_id)


def over(connection: Connection, root: str, limit: int) -> list[sa.Row[Any]]:
    """Return parked work whose time is over, but for what follows an attempt that still runs.

    Locks nothing.
    """
    running = sa.exists(sa.text("1")).where(
        reservations.c.root == parked.c.root,
        reservations.c.reservation_id == parked.c.reservation_id,
        reservations.c.state == "running",
    )
    return list(
        connection.execute(
            sa.select(parked.c.parked_id, parked.c.reservation_id, parked.c.task_id)
            .where(
                parked.c.root == root,
                parked.c.deadline_us <= instant(),
                ~running,
            )
            # What could not be ended comes last.
            .order_by(parked.c.checked_us, parked.c.deadline_us)
            .limit(limit)
        )
    )


def lock_parked(
    connection: Connection, root: str, parked_id: uuid.UUID, wait: bool = False
) -> sa.Row[Any] | None:
    """Lock and return one parked row; none where it is gone or another sweep is at it.

    The caller holds the row of the reservation it belongs to, if any.

    :param wait: wait for the other sweep.
    """
    return connection.execute(
        sa.select(parked)
        .where(parked.c.root == root, parked.c.parked_id == parked_id)
        .with_for_update(skip_locked=not wait)
    ).first()


def reservation_of(connection: Connection, root: str, parked_id: uuid.UUID) -> uuid.UUID | None:
    """Return the reservation that a parked row belongs to; none without one. Locks nothing."""
    return connection.execute(
        sa.select(parked.c.reservation_id).where(
            parked.c.root == root, parked.c.parked_id == parked_id
        )
    ).scalar()


def unpark(connection: Connection, root: str, parked_id: uuid.UUID) -> None:
    """Delete a parked row: it was admitted, or its time is over."""
    connection.execute(
        parked.delete().where(parked.c.root == root, parked.c.parked_id == parked_id)
    )


def note_waited(connection: Connection, row: sa.Row[Any]) -> None:
    """Note with its reservation that a parked row has waited until now, for what, and why.

    The last time it did. The caller holds the row and the reservation's, which may be of this very
    transaction; of a request that was never admitted, and leaves none, nothing is noted.
    """
    reservation_id = row.reservation_id
    if reservation_id is None:
        reservation_id = request_of(row).reservation_id
    connection.execute(
        reservations.update()
        .where(
            reservations.c.root == row.root,
            reservations.c.reservation_id == reservation_id,
        )
        .values(
            parked_us=row.created_us,
            unparked_us=now_us(),
            parked_budget=row.budget,
            parked_reason=row.reason,
        )
    )


def successor_of(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> int | None:
    """Return the retries of the parked message that follows ``attempt``; none where none does."""
    return connection.execute(
        sa.select(parked.c.retries).where(
            parked.c.root == root,
            parked.c.reservation_id == reservation_id,
            parked.c.after_attempt == attempt,
        )
    ).scalar()


def parked_of(connection: Connection, root: str, reservation_id: uuid.UUID) -> uuid.UUID | None:
    """Return the parked row that holds a reservation's next attempt; none where it is not parked.

    The caller holds the reservation's row.
    """
    return connection.execute(
        sa.select(parked.c.parked_id).where(
            parked.c.root == root, parked.c.reservation_id == reservation_id
        )
    ).scalar()


def is_held_back(connection: Connection, row: sa.Row[Any]) -> bool:
    """Tell whether a reservation's next attempt is parked, or held by a lane. One SELECT.

    Then it has no message that could be delivered: what is, is the broker's own redelivery of its
    last attempt's. The lane may be younger than the reservation. The caller holds its row.
    """
    waits = sa.select(parked.c.parked_id).where(
        parked.c.root == row.root, parked.c.reservation_id == row.reservation_id
    )
    laned = held(row.root, row.reservation_id, row.retries)
    found = connection.execute(sa.union_all(waits, laned) if row.attempts else waits)
    return found.first() is not None


def of_task(connection: Connection, root: str, task_id: str) -> uuid.UUID | None:
    """Return the parked row of a task that was written last; none without one. Locks nothing."""
    return connection.execute(
        sa.select(parked.c.parked_id)
        .where(parked.c.root == root, parked.c.task_id == task_id)
        .order_by(parked.c.created_us.desc())
        .limit(1)
    ).scalar()


def written(request: ReserveRequest) -> str:
    """Return a request in JSON, as parked work and quarantine keep it."""
    return json.dumps(asdict(request), default=str)


def request_of(row: sa.Row[Any]) -> ReserveRequest:
    """Return the request of a row that keeps one :func:`written`."""
    values = json.loads(row.request)
    # All that was parked continues something; the first release did not write it.
    values.setdefault("finishing", True)
    for name in ("reservation_id", "parent", "plan"):
        if values.get(name) is not None:
            values[name] = uuid.UUID(values[name])
    return ReserveRequest(**values | {"lines": tuple(Line(**line) for line in values["lines"])})
