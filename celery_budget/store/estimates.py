"""What was used, where it was measured, by which estimates are suggested. Locks nothing."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import USED
from celery_budget.store.reports import Rows
from celery_budget.store.schema import IS_MEASURED, attempts, lines, reservations

__all__ = ["measured", "stages"]


def stages(connection: Connection, root: str) -> list[str]:
    """Return the stages of which anything was measured; one look into the index for each."""
    found: list[str] = []
    next_one = sa.select(sa.func.min(reservations.c.stage)).where(
        reservations.c.root == root, sa.text(IS_MEASURED)
    )
    while True:
        after = next_one.where(reservations.c.stage > found[-1]) if found else next_one
        stage = connection.execute(after).scalar()
        if stage is None:
            return found
        found.append(stage)


def measured(
    connection: Connection, root: str, stage: str, limit: int, since_us: int | None = None
) -> Rows:
    """Return what the last requests of a stage promised and used: unit, estimate and actual.

    Of the last ``limit`` that were measured those that succeeded, ran once and pay by use: what
    else there is tells nothing of what an attempt needs. Found by an index, the last first.

    :param since_us: none that ended before that, in microseconds since the epoch.
    """
    last = (
        sa.select(reservations.c.reservation_id, reservations.c.attempts, reservations.c.ended_us)
        .where(
            reservations.c.root == root,
            reservations.c.stage == stage,
            reservations.c.ended_us >= (since_us or 0),
            sa.text(IS_MEASURED),
        )
        .order_by(reservations.c.ended_us.desc())
        .limit(limit)
        .subquery("last")
    )
    return list(
        connection.execute(
            sa.select(lines.c.unit, lines.c.estimate, lines.c.settled)
            .select_from(last)
            .join(
                lines,
                sa.and_(
                    lines.c.root == root,
                    lines.c.reservation_id == last.c.reservation_id,
                    lines.c.line == 0,
                    lines.c.charge == USED,
                ),
            )
            .join(
                attempts,
                sa.and_(
                    attempts.c.root == root,
                    attempts.c.reservation_id == last.c.reservation_id,
                    attempts.c.attempt == 1,
                    attempts.c.outcome == "returned",
                ),
            )
            .where(last.c.attempts == 1)
            .order_by(last.c.ended_us.desc())
        )
    )
