"""Several requests admitted together: one transaction, a fixed number of statements.

One request on SQLite is a batch of one. The same decisions as those of the PostgreSQL function
``budget_reserve``; one contract suite holds both to that.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.draws import Draw, Level, decide
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    START,
    AlreadyReserved,
    Conflict,
    Refused,
    Reserved,
    ReserveRequest,
    Skipped,
    Tried,
    Unknown,
)
from celery_budget.errors import StoreError
from celery_budget.store import budgets, levels, outbox
from celery_budget.store.balances import Key, Move, lock_balances, move
from celery_budget.store.refusals import note_refusal
from celery_budget.store.schema import lines, now_us, reservations
from celery_budget.store.unready import Unready

__all__ = ["columns_of", "not_ready", "reserve_many", "write_lines"]

Asked = tuple[ReserveRequest, WireMessage]
#: What makes a request one and the same: root, owner, request id, nesting.
RequestKey = tuple[str, str, int]


def reserve_many(
    connection: Connection,
    root: str,
    asked: Sequence[Asked],
    *,
    best_effort: bool,
    delivered_us: int | None = None,
    note: bool = True,
) -> list[Tried]:
    """Admit requests of ``root`` in one transaction; what came of each, in their order.

    All of them or, where one does not fit, none (the others are ``Skipped``); with
    ``best_effort`` each that fits, in their order. One that was admitted before fits.

    Locks the new reservations' keys in order, then all balances in order: of two batches that meet
    the second waits for the first. Everything is decided behind the locks.

    :param delivered_us: as for :func:`celery_budget.store.requests.reserve`.
    :param note: count refusals in the reports.
    :raises Unready: where a budget has to be made of its template, or a window opened, before.
    """
    found, inserted = _insert(connection, root, asked, delivered_us)
    known = _standing(connection, root, asked)
    outcomes: list[Tried] = []
    admitted: list[tuple[Asked, tuple[Draw, ...]]] = []
    for one in asked:
        request = one[0]
        existing = found[key_of(request)]
        outcome: Tried
        if existing.reservation_id != request.reservation_id or existing not in inserted:
            outcome = _repeated(request, existing)
        else:
            decided = _decide(request, known)
            if isinstance(decided, tuple):
                outcome = Reserved(request.reservation_id)
                admitted.append((one, decided))
                _take(known, decided)
            else:
                outcome = decided
        outcomes.append(outcome)
    failed = [isinstance(one, (Refused, Unknown, Conflict)) for one in outcomes]
    if any(failed) and not best_effort:
        outcomes = [
            one if bad or isinstance(one, AlreadyReserved) else Skipped()
            for one, bad in zip(outcomes, failed, strict=True)
        ]
        admitted = []
    kept = {request.reservation_id for (request, _), _ in admitted}
    unopened = [
        draw.budget
        for _, draws in admitted
        for draw in draws
        if known[draw.budget].window_us is None
    ]
    if unopened:
        raise not_ready(root, unopened)
    _delete(connection, root, {row.reservation_id for row in inserted} - kept)
    _write(connection, root, admitted, delivered_us)
    if note:
        for (request, _), outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome, Refused):
                note_refusal(connection, request, outcome)
    return outcomes


def key_of(request: ReserveRequest) -> RequestKey:
    """Return what a request is known by within its root."""
    return request.owner, request.request_id, request.nesting


def _insert(
    connection: Connection, root: str, asked: Sequence[Asked], delivered_us: int | None
) -> tuple[dict[RequestKey, Any], list[Any]]:
    """Insert the reservations that are not there; return all that are then, and the new ones.

    In the order of their keys, so that of two batches with the same ones the second waits.
    """
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    state = "reserved" if delivered_us is None else "published"
    first: dict[RequestKey, ReserveRequest] = {}
    for request, _ in asked:
        first.setdefault(key_of(request), request)
    fixed = {
        "state": state,
        "attempts": 0,
        "deliveries": 0,
        "unmetered": False,
        "over": False,
    }
    rows = [{**columns_of(first[key]), **fixed} for key in sorted(first)]
    seen = (
        reservations.c.reservation_id,
        reservations.c.task_id,
        reservations.c.fingerprint,
        reservations.c.owner,
        reservations.c.request_id,
        reservations.c.nesting,
    )
    statement = insert(reservations).values(created_us=now_us()).on_conflict_do_nothing()
    inserted = list(connection.execute(statement.returning(*seen), rows))
    found = {(row.owner, row.request_id, row.nesting): row for row in inserted}
    missing = [request for key, request in sorted(first.items()) if key not in found]
    if missing:
        same_key = sa.tuple_(
            reservations.c.owner, reservations.c.request_id, reservations.c.nesting
        ).in_([key_of(request) for request in missing])
        # A repeat of this very call, after a lost connection, may find even what has been
        # released since.
        same_call = reservations.c.reservation_id.in_([one.reservation_id for one in missing])
        existing = connection.execute(
            sa.select(*seen)
            .where(
                reservations.c.root == root,
                sa.or_(same_call, sa.and_(same_key, reservations.c.state != "released")),
            )
            .order_by(reservations.c.state == "released")
        )
        for row in existing:
            found.setdefault((row.owner, row.request_id, row.nesting), row)
    if any(key not in found for key in first):
        raise StoreError("a request was released while it was repeated; try again", True)
    return found, inserted


def _standing(connection: Connection, root: str, asked: Sequence[Asked]) -> dict[str, Level]:
    """Return how all budgets stand that are drawn on, their balances being locked.

    Read twice on PostgreSQL: to know what to lock, and again behind the locks.
    """
    names = {line.budget for request, _ in asked for line in request.lines}
    known = levels.levels_of(connection, root, names)
    if connection.dialect.name == "sqlite":
        return _with_templates(connection, root, names, known)
    while True:
        keys = _windows(known)
        lock_balances(connection, root, [Key(*key) for key in keys.items()])
        again = levels.levels_of(connection, root, names, keys)
        if _windows(again) == keys:
            return _with_templates(connection, root, names, again)
        # The budgets were given other parents, or windows, meanwhile.
        known = again


def _windows(known: dict[str, Level]) -> dict[str, int]:
    return {name: level.window_us for name, level in known.items() if level.window_us is not None}


def _with_templates(
    connection: Connection, root: str, names: set[str], known: dict[str, Level]
) -> dict[str, Level]:
    """Return ``known``, unless a template stands for one of the names that is missing from it.

    :raises Unready: then: the budget has to be made first.
    """
    made = [
        name
        for name in sorted(names - known.keys())
        if budgets.template_for(connection, root, name) is not None
    ]
    if made:
        raise not_ready(root, made)
    return known


def not_ready(root: str, names: Sequence[str]) -> Unready:
    """Return what is raised where budgets, or their windows, have to be made first."""
    return Unready(f"budget {names[0]!r}", partial(budgets.ready, root=root, names=names))


def _repeated(request: ReserveRequest, existing: Any) -> Tried:
    """Return what a request is that was there already."""
    if existing.reservation_id == request.reservation_id:
        return Reserved(request.reservation_id)
    if existing.fingerprint != request.fingerprint:
        return Conflict(request.request_id, request.owner, existing.task_id)
    return AlreadyReserved(existing.reservation_id, existing.task_id)


def _decide(
    request: ReserveRequest, known: dict[str, Level]
) -> tuple[Draw, ...] | Refused | Unknown:
    """Decide one request."""
    for line in request.lines:
        if line.budget not in known:
            return Unknown(line.budget)
    return decide(request.lines, known, request.finishing)


def _take(known: dict[str, Level], draws: tuple[Draw, ...]) -> None:
    """Count what was decided, for the decisions that follow."""
    for draw in draws:
        level = known[draw.budget]
        known[draw.budget] = replace(level, reserved=level.reserved + draw.amount)


def _delete(connection: Connection, root: str, ids: set[uuid.UUID]) -> None:
    if ids:
        connection.execute(
            reservations.delete().where(
                reservations.c.root == root, reservations.c.reservation_id.in_(sorted(ids))
            )
        )


def _write(
    connection: Connection,
    root: str,
    admitted: Sequence[tuple[Asked, tuple[Draw, ...]]],
    delivered_us: int | None,
) -> None:
    if not admitted:
        return
    move(
        connection,
        root,
        [
            Move(Key(draw.budget, draw.window_us), draw.amount, 0, request.reservation_id)
            for (request, _), draws in admitted
            for draw in draws
        ],
        "reserve",
    )
    write_lines(
        connection,
        [line for (request, _), draws in admitted for line in _lines(request, draws)],
    )
    outbox.enqueue_many(
        connection,
        root,
        [(request, message) for (request, message), _ in admitted],
        delivered_us,
    )


def _lines(request: ReserveRequest, draws: tuple[Draw, ...]) -> Iterator[dict[str, Any]]:
    for number, draw in enumerate(draws):
        yield {
            "root": request.root,
            "reservation_id": request.reservation_id,
            "line": number,
            "budget": draw.budget,
            "window_us": draw.window_us,
            "charge": draw.charge,
            "unit": draw.unit,
            "estimate": draw.amount,
            "reserved": draw.amount,
        }


def write_lines(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert lines that nothing was used of."""
    fixed = {"stripe": 0, "used": 0, "settled": 0, "extended": 0}
    # What comes back makes SQLAlchemy send them in one statement.
    connection.execute(
        lines.insert().returning(lines.c.line), [{**row, **fixed} for row in rows]
    ).all()


def columns_of(request: ReserveRequest) -> dict[str, Any]:
    """Return a request's columns of its reservation."""
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
        "charges_start": any(line.charge == START for line in request.lines),
    }
