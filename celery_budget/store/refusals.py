"""The decision log: every refusal is counted, a sample of them is kept.

A budget and reason have a fixed number of rows, each a count and the refusal that fell to it last.
A storm of refusals neither grows the table nor queues for one row.
"""

from __future__ import annotations

import uuid

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import Refused, ReserveRequest
from celery_budget.store.schema import now_us, refusals

__all__ = ["SLOTS", "note_refusal", "note_turned_away"]

#: Rows for each budget and reason. The function ``budget_reserve`` has the same number.
SLOTS = 16


def note_refusal(connection: Connection, request: ReserveRequest, refused: Refused) -> None:
    """Count a refusal; a repeat of the same call, after a lost answer, is not counted again."""
    _note(
        connection,
        request.root,
        request.reservation_id,
        refused.budget,
        refused.reason,
        request.stage,
        request.task_name,
        refused.requested,
        refused,
    )


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
    _note(connection, root, refusal_id, budget, "unreserved", stage, task_name, requested, None)


def _note(
    connection: Connection,
    root: str,
    refusal_id: uuid.UUID,
    budget: str,
    reason: str,
    stage: str,
    task_name: str,
    requested: int,
    refused: Refused | None,
) -> None:
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(refusals).values(
        root=root,
        budget=budget,
        reason=reason,
        slot=refusal_id.bytes[-1] % SLOTS,
        count=1,
        refusal_id=refusal_id,
        stage=stage,
        task_name=task_name,
        requested=requested,
        limit_amount=None if refused is None else refused.limit,
        reserved=None if refused is None else refused.reserved,
        spent=None if refused is None else refused.spent,
        refused_us=now_us(),
    )
    last = {
        column.name: statement.excluded[column.name]
        for column in refusals.c
        if not column.primary_key and column.name != "count"
    }
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=list(refusals.primary_key),
            set_={**last, "count": refusals.c.count + 1},
            where=refusals.c.refusal_id != statement.excluded.refusal_id,
        )
    )
