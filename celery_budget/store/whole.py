"""Reading all requests of a ledger at once: for tests of applications, whose ledgers are small."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.refusals import IS_WAIVED
from celery_budget.store.schema import attempts, lines, parked, refusals, reservations

__all__ = ["parked_requests", "refused_requests", "requests_by_line"]

Rows = list[sa.Row[Any]]


def requests_by_line(connection: Connection, root: str) -> Rows:
    """Return each line of every reservation, with its request; the oldest request first."""
    last = (
        sa.select(attempts.c.outcome)
        .where(
            attempts.c.root == reservations.c.root,
            attempts.c.reservation_id == reservations.c.reservation_id,
            attempts.c.attempt == reservations.c.attempts,
        )
        .scalar_subquery()
    )
    joined = reservations.join(
        lines,
        sa.and_(
            lines.c.root == reservations.c.root,
            lines.c.reservation_id == reservations.c.reservation_id,
        ),
    )
    return list(
        connection.execute(
            sa.select(
                reservations.c.reservation_id,
                reservations.c.task_name,
                reservations.c.task_id,
                reservations.c.request_id,
                reservations.c.state,
                reservations.c.reason,
                reservations.c.attempts,
                last.label("outcome"),
                lines.c.budget,
                lines.c.unit,
                lines.c.estimate,
                lines.c.reserved,
                lines.c.settled,
            )
            .select_from(joined)
            .where(reservations.c.root == root)
            .order_by(reservations.c.created_us, reservations.c.reservation_id, lines.c.line)
        )
    )


def refused_requests(connection: Connection, root: str) -> Rows:
    """Return how often each budget refused each task, with the last reason and amount."""
    return list(
        connection.execute(
            sa.select(
                refusals.c.budget,
                refusals.c.task_name,
                refusals.c.reason,
                refusals.c["count"].label("times"),
                refusals.c.requested,
            )
            .where(refusals.c.root == root, ~IS_WAIVED)
            .order_by(refusals.c.refused_us, refusals.c.refusal_id)
        )
    )


def parked_requests(connection: Connection, root: str) -> Rows:
    """Return what waits for budget, the oldest first."""
    return list(
        connection.execute(
            sa.select(
                parked.c.budget,
                parked.c.task_name,
                parked.c.task_id,
                parked.c.request_id,
                parked.c.reason,
                parked.c.amount,
            )
            .where(parked.c.root == root)
            .order_by(parked.c.created_us, parked.c.parked_id)
        )
    )
