"""The decision log: every refusal is counted, a sample of them is kept.

A budget and reason have a fixed number of rows, each a count and the refusal that fell to it last.
A storm of refusals neither grows the table nor queues for one row.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import Refused, ReserveRequest
from celery_budget.store.insert import AT_ONCE
from celery_budget.store.schema import now_us, refusals

__all__ = ["SLOTS", "note_refusals", "note_turned_away"]

#: Rows for each budget and reason. The function ``budget_reserve`` has the same number.
SLOTS = 16


def note_refusals(
    connection: Connection, root: str, refused: Sequence[tuple[ReserveRequest, Refused]]
) -> None:
    """Count refusals, in one statement; locks the rows that count them in the order of their keys.

    A repeat of the same call, after a lost answer, is not counted again.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for request, outcome in refused:
        row = _row(
            root,
            request.reservation_id,
            outcome.budget,
            outcome.reason,
            request.stage,
            request.task_name,
            outcome.requested,
        )
        row |= {
            "limit_amount": outcome.limit,
            "reserved": outcome.reserved,
            "spent": outcome.spent,
        }
        key = row["budget"], row["reason"], row["slot"]
        if key in rows:
            row["count"] += rows[key]["count"]
        rows[key] = row
    _write(connection, [rows[key] for key in sorted(rows)])


def note_turned_away(
    connection: Connection,
    root: str,
    refusal_id: uuid.UUID,
    budget: str,
    stage: str,
    task_name: str,
    requested: int,
) -> None:
    """Count a request that was turned away since it came without a reservation."""
    row = _row(root, refusal_id, budget, "unreserved", stage, task_name, requested)
    _write(connection, [{**row, "limit_amount": None, "reserved": None, "spent": None}])


def _row(
    root: str,
    refusal_id: uuid.UUID,
    budget: str,
    reason: str,
    stage: str,
    task_name: str,
    requested: int,
) -> dict[str, Any]:
    return {
        "root": root,
        "budget": budget,
        "reason": reason,
        "slot": refusal_id.bytes[-1] % SLOTS,
        "count": 1,
        "refusal_id": refusal_id,
        "stage": stage,
        "task_name": task_name,
        "requested": requested,
    }


def _write(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(refusals).values(refused_us=now_us())
    last = {
        column.name: statement.excluded[column.name]
        for column in refusals.c
        if not column.primary_key and column.name != "count"
    }
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=list(refusals.primary_key),
            set_={**last, "count": refusals.c.count + statement.excluded["count"]},
            where=refusals.c.refusal_id != statement.excluded.refusal_id,
        ).returning(refusals.c.slot),
        list(rows),
        execution_options=AT_ONCE,
    ).all()
