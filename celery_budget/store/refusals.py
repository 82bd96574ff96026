"""The decision log: every refusal is counted, a sample of them is kept.

A budget, stage and reason have a fixed number of rows a day, each a count and the refusal that fell
to it last. A storm of refusals neither grows the table nor queues for one row. Of a day that is
over one row of each is left.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Backlogged, Full, Refused, ReserveRequest
from celery_budget.core.tallies import DAY_US
from celery_budget.store.drivers import is_lent
from celery_budget.store.insert import AT_ONCE
from celery_budget.store.schema import instant, now_us, refusals, reservations

__all__ = [
    "IS_WAIVED",
    "SLOTS",
    "WAIVED",
    "fold",
    "is_waived",
    "note_refusals",
    "note_turned_away",
    "note_waived",
]

#: What the reason of a refusal begins with that was waived: its request was admitted.
WAIVED = "waived:"
#: Tells such rows from those of refusals.
IS_WAIVED = refusals.c.reason.startswith(WAIVED, autoescape=True)
#: What is added up in a row that counts.
ADDED = ("count", "amount")

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
    _count(
        connection,
        root,
        [
            (request.reservation_id, request.stage, request.task_name, outcome)
            for request, outcome in refused
        ],
    )


def note_waived(
    connection: Connection,
    root: str,
    waived: Sequence[tuple[uuid.UUID, str, str, Refused | Backlogged | Full]],
) -> None:
    """Note what was admitted only since it is not enforced: with the request, and counted.

    Of each the reservation's id, its stage and task, and what it would have been refused with. The
    last counts for the request. The caller holds the reservations' rows. Locks the rows that count
    them last, in the order of their keys; what no budget has refused is not counted.
    """
    for reservation_id, _, _, refused in waived:
        told = {"kind": type(refused).__name__.lower(), **asdict(refused)}
        told.pop("pace", None)
        connection.execute(
            reservations.update()
            .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
            .values(waived=json.dumps(told))
        )
    _count(
        connection,
        root,
        [
            # A retry of the same request counts anew.
            (new_id(), stage, task_name, refused)
            for _, stage, task_name, refused in waived
            if isinstance(refused, Refused)
        ],
        waived=True,
    )


def _count(
    connection: Connection,
    root: str,
    refused: Sequence[tuple[uuid.UUID, str, str, Refused]],
    *,
    waived: bool = False,
) -> None:
    """Count refusals, each by an id of its own, with its stage and task.

    :param waived: whether their requests were admitted; then what they asked for is added up too.
    """
    lent = is_lent(connection)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for refusal_id, stage, task_name, outcome in refused:
        reason = f"{WAIVED}{outcome.reason}" if waived else outcome.reason
        row = _row(root, refusal_id, outcome.budget, reason, stage, task_name, outcome.requested)
        if lent:
            row["slot"] = SLOTS + int.from_bytes(refusal_id.bytes[-2:], "big") % LENT_SLOTS
        row |= {
            "limit_amount": outcome.limit,
            "reserved": outcome.reserved,
            "spent": outcome.spent,
            "amount": outcome.requested if waived else 0,
        }
        key = row["budget"], row["stage"], row["reason"], row["slot"]
        if key in rows:
            row["count"] += rows[key]["count"]
            row["amount"] = min(MAX_AMOUNT, row["amount"] + rows[key]["amount"])
        rows[key] = row
    _write(connection, [rows[key] for key in sorted(rows)])


def is_waived(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    refused: Refused,
    *,
    note: bool = True,
) -> bool:
    """Tell whether a reservation may hold more all the same, since it is not enforced, and note it.

    The caller holds its row. Locks as :func:`note_waived`.
    """
    row = connection.execute(
        sa.select(reservations.c.enforced, reservations.c.stage, reservations.c.task_name).where(
            reservations.c.root == root, reservations.c.reservation_id == reservation_id
        )
    ).one()
    if not row.enforced and note:
        note_waived(connection, root, [(reservation_id, row.stage, row.task_name, refused)])
    return not row.enforced


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
        "amount": 0,
    }


def _write(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(refusals).values(refused_us=now_us(), day=now_us() // DAY_US)
    last = {
        column.name: statement.excluded[column.name]
        for column in refusals.c
        if not column.primary_key and column.name not in ADDED
    }
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=list(refusals.primary_key),
            set_={**last, **_added(statement)},
            where=refusals.c.refusal_id != statement.excluded.refusal_id,
        ).returning(refusals.c.slot),
        list(rows),
        execution_options=AT_ONCE,
    ).all()


def _added(statement: Any) -> dict[str, Any]:
    """Return what a row's sums become where it is there already; at most what can be counted."""
    before, more = refusals.c.amount, statement.excluded["amount"]
    most = sa.case((before > MAX_AMOUNT - more, MAX_AMOUNT), else_=before + more)
    return {"count": refusals.c["count"] + statement.excluded["count"], "amount": most}


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
        amount = row.amount + (last[key]["amount"] if key in last else 0)
        told = {"count": count, "amount": min(MAX_AMOUNT, amount)}
        last[key] = {**row._mapping, "slot": 0, **told}
    if last:
        insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        statement = insert(refusals)
        newer = statement.excluded.refused_us >= refusals.c.refused_us
        values: dict[str, Any] = {
            column.name: sa.case((newer, statement.excluded[column.name]), else_=column)
            for column in refusals.c
            if not column.primary_key and column.name not in ADDED
        }
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=list(refusals.primary_key),
                set_={**values, **_added(statement)},
            ),
            [last[key] for key in sorted(last)],
        )
    return len(gone)
