"""The decision log: every refusal is counted, a sample of them is kept.

A budget, stage and reason have a fixed number of rows a day, each a count and the refusal that fell
to it last. A storm of refusals neither grows the table nor queues for one row. Of a day that is
over one row of each is left.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import Refused, ReserveRequest
from celery_budget.core.tallies import DAY_US
from celery_budget.store.drivers import is_lent
from celery_budget.store.insert import AT_ONCE
from celery_budget.store.schema import instant, now_us, refusals

__all__ = ["SLOTS", "fold", "note_refusals", "note_turned_away"]

#: Rows a day for each budget, stage and reason; as many as the function ``budget_reserve`` has.
SLOTS = 16
#: And over so many more by transactions that are lent to us: they may hold theirs for long, and who
#: is refused meanwhile must not wait for them.
LENT_SLOTS = 1008


def note_refusals(
    connection: Connection, root: str, refused: Sequence[tuple[ReserveRequest, Refused]]
) -> None:
    """Count refusals, in one statement; locks the rows that count them in the order of their keys.

    A repeat of the same call, after a lost answer, is not counted again.
    """
    lent = is_lent(connection)
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
        if lent:
            some = int.from_bytes(request.reservation_id.bytes[-2:], "big")
            row["slot"] = SLOTS + some % LENT_SLOTS
        row |= {
            "limit_amount": outcome.limit,
            "reserved": outcome.reserved,
            "spent": outcome.spent,
        }
        key = row["budget"], row["stage"], row["reason"], row["slot"]
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
    statement = insert(refusals).values(refused_us=now_us(), day=now_us() // DAY_US)
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


#: How long after its end a day is folded: nobody who refused on that day still counts there.
OVER_US = 3_600_000_000


def fold(connection: Connection, root: str, limit: int) -> int:
    """Leave one row of each budget, stage and reason of days that are over; return how many go.

    Its count is that of all, its sample the last one. Deletes up to ``limit`` rows, whose days
    nobody counts to any more; two that fold at once skip each other's rows.
    """
    some = (
        sa.select(*refusals.primary_key)
        .where(
            refusals.c.root == root,
            sa.text("slot > 0"),
            refusals.c.day < (instant() - OVER_US) // DAY_US,
        )
        .order_by(refusals.c.day)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .cte("some")
    )
    gone = connection.execute(
        refusals.delete()
        .where(refusals.c.root == root, sa.tuple_(*refusals.primary_key).in_(sa.select(some)))
        .returning(refusals)
    ).all()
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(gone, key=lambda row: (row.refused_us, row.refusal_id)):
        key = row.day, row.budget, row.stage, row.reason
        count = row._mapping["count"] + (last[key]["count"] if key in last else 0)
        last[key] = {**row._mapping, "slot": 0, "count": count}
    if last:
        insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        statement = insert(refusals)
        newer = statement.excluded.refused_us >= refusals.c.refused_us
        values: dict[str, Any] = {
            column.name: sa.case((newer, statement.excluded[column.name]), else_=column)
            for column in refusals.c
            if not column.primary_key and column.name != "count"
        }
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=list(refusals.primary_key),
                set_={**values, "count": refusals.c.count + statement.excluded["count"]},
            ),
            [last[key] for key in sorted(last)],
        )
    return len(gone)
