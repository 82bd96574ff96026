"""Several requests admitted together: one transaction, a fixed number of statements.

One request on SQLite is a batch of one. The same decisions as those of the PostgreSQL function
``budget_reserve``; one contract suite holds both to that.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
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
from celery_budget.store import budgets, declaring, levels, outbox
from celery_budget.store.balances import Key, Move, lock_balances, move
from celery_budget.store.insert import AT_ONCE
from celery_budget.store.refusals import note_refusals
from celery_budget.store.schema import lines, now_us, reservations
from celery_budget.store.unready import Unready

__all__ = ["columns_of", "first_unknown", "insert_lines", "moved", "repeated", "reserve_many"]

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
    ``best_effort`` each that fits, in their order. One that was admitted before fits. A request
    that comes twice in one batch is one, be it admitted or not.

    Locks the new reservations' keys in order, then all balances in order: of two batches that meet
    the second waits for the first. Everything is decided behind the locks.

    :param delivered_us: as for :func:`celery_budget.store.requests.reserve`.
    :param note: count refusals in the reports.
    :raises Unready: as for :func:`celery_budget.store.requests.reserve`.
    """
    found, inserted = _insert(connection, root, asked, delivered_us)
    known, possible = _standing(connection, root, asked) if inserted else ({}, set())
    new = {row.reservation_id for row in inserted}
    outcomes: list[Tried] = []
    admitted: list[tuple[Asked, tuple[Draw, ...]]] = []
    refused: dict[RequestKey, Tried] = {}
    for one in asked:
        request, key = one[0], key_of(one[0])
        existing = found[key]
        outcome = repeated(request, existing)
        if key in refused:
            outcome = outcome if isinstance(outcome, Conflict) else refused[key]
        elif existing.reservation_id in new:
            # The first of its key; what follows it in this batch finds it.
            new.remove(existing.reservation_id)
            decided = _decide(request, known, possible)
            if isinstance(decided, tuple):
                admitted.append((one, decided))
                _take(known, decided)
            else:
                outcome = refused[key] = decided
        outcomes.append(outcome)
    if not best_effort and any(isinstance(one, (Refused, Unknown, Conflict)) for one in outcomes):
        dropped = {request.reservation_id for (request, _), _ in admitted}
        outcomes = [
            Skipped()
            if isinstance(one, (Reserved, AlreadyReserved)) and one.reservation_id in dropped
            else one
            for one in outcomes
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
        raise declaring.not_ready(root, unopened)
    _delete(connection, root, {row.reservation_id for row in inserted} - kept)
    _write(connection, root, admitted, delivered_us)
    if note:
        note_refusals(
            connection,
            root,
            [
                (request, outcome)
                for (request, _), outcome in zip(asked, outcomes, strict=True)
                if isinstance(outcome, Refused)
            ],
        )
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
    inserted = list(connection.execute(statement.returning(*seen), rows, execution_options=AT_ONCE))
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


#: How budgets stand, and the names of those that a template could make.
_Standing = tuple[dict[str, Level], set[str]]


def _standing(connection: Connection, root: str, asked: Sequence[Asked]) -> _Standing:
    """Return how all budgets stand that are drawn on, their balances being locked.

    Read twice on PostgreSQL: to know what to lock, and again behind the locks.
    """
    names = {line.budget for request, _ in asked for line in request.lines}
    requests = [request for request, _ in asked]
    known = levels.levels_of(connection, root, names)
    if connection.dialect.name == "sqlite":
        return _with_templates(connection, root, requests, known)
    keys = _windows(known)
    lock_balances(connection, root, [Key(*key) for key in keys.items()])
    again = levels.levels_of(connection, root, names, keys)
    if _windows(again) != keys:
        raise moved(min(names))
    return _with_templates(connection, root, requests, again)


def _windows(known: dict[str, Level]) -> dict[str, int]:
    return {name: level.window_us for name, level in known.items() if level.window_us is not None}


def _with_templates(
    connection: Connection, root: str, requests: Sequence[ReserveRequest], known: dict[str, Level]
) -> _Standing:
    """Return ``known``, and the names that a template could make, where nothing has to be made now.

    Nothing is made for a request that names another budget that does not exist.

    :raises Unready: where something has to be made first.
    """
    asked = [[line.budget for line in request.lines] for request in requests]
    unseen = {name for names in asked for name in names if name not in known}
    if not unseen:
        return known, set()
    possible = set(declaring.templates_for(connection, root, unseen))
    wanted = (names for names in asked if not unseen.intersection(names) - possible)
    missing = sorted(unseen.intersection(chain.from_iterable(wanted)))
    if missing:
        raise declaring.not_ready(root, missing)
    return known, possible


def first_unknown(connection: Connection, root: str, names: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is no budget and that no template stands for."""
    known = budgets.declared(connection, root, names)
    unseen = [name for name in names if name not in known]
    made = declaring.templates_for(connection, root, unseen) if unseen else {}
    return next((name for name in unseen if name not in made), None)


def moved(name: str) -> Unready:
    """Return what is raised where budgets got other parents, or windows, behind our back.

    What else is to be locked may come before what is locked already: everything is given back, and
    begins anew.
    """
    return Unready(f"what is above budget {name!r}", lambda connection: None)


def repeated(request: ReserveRequest, existing: Any) -> Tried:
    """Return what a request is, by the reservation that its key has."""
    if existing.reservation_id == request.reservation_id:
        return Reserved(request.reservation_id)
    if existing.fingerprint != request.fingerprint:
        return Conflict(request.request_id, request.owner, existing.task_id)
    return AlreadyReserved(existing.reservation_id, existing.task_id)


def _decide(
    request: ReserveRequest, known: dict[str, Level], possible: set[str]
) -> tuple[Draw, ...] | Refused | Unknown:
    """Decide one request."""
    for line in request.lines:
        if line.budget not in known and line.budget not in possible:
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
    insert_lines(
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


def insert_lines(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert lines that nothing was used of."""
    fixed = {"stripe": 0, "used": 0, "settled": 0, "extended": 0}
    # What comes back makes SQLAlchemy send them in one statement.
    connection.execute(
        lines.insert().returning(lines.c.line),
        [{**row, **fixed} for row in rows],
        execution_options=AT_ONCE,
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
