"""What estimators promised against what was used. Locks and changes nothing."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import USED
from celery_budget.store.reports import Rows, same_reservation, total
from celery_budget.store.schema import IS_MEASURED, attempts, lines, reservations

__all__ = ["drift", "measured", "shadow_drift", "stages"]


def drift(connection: Connection, root: str) -> Rows:
    """Return estimate against actual by stage and estimator, where the actual was measured.

    That is of requests that succeeded and recorded what they used: a failure may have stopped
    half-way, and what recorded nothing was charged the estimate itself. Of a request that draws on
    several budgets the first it names counts.
    """
    return list(
        connection.execute(
            sa.select(
                reservations.c.stage,
                reservations.c.estimator,
                reservations.c.estimator_version,
                sa.func.count(sa.distinct(reservations.c.reservation_id)).label("requests"),
                total(lines.c.estimate).label("estimated"),
                total(lines.c.settled).label("actual"),
            )
            .join(lines, sa.and_(same_reservation(lines), lines.c.line == 0))
            .join(
                attempts,
                sa.and_(same_reservation(attempts), attempts.c.attempt == reservations.c.attempts),
            )
            .where(
                reservations.c.root == root,
                reservations.c.state == "settled",
                attempts.c.outcome == "returned",
                ~reservations.c.unmetered,
            )
            .group_by(
                reservations.c.stage, reservations.c.estimator, reservations.c.estimator_version
            )
            .order_by(reservations.c.stage, reservations.c.estimator)
        )
    )


def shadow_drift(connection: Connection, root: str) -> Rows:
    """Return what shadow estimators would have promised against the actual, by stage and shadow.

    Of the requests of :func:`drift` that have an answer of it and ran once: that is what it was
    asked for.
    """
    answers: Any
    if connection.dialect.name == "postgresql":
        answers = sa.func.json_each_text(sa.cast(reservations.c.shadows, sa.JSON))
    else:
        answers = sa.func.json_each(reservations.c.shadows)
    shadow = answers.table_valued("key", "value").alias("shadow")
    return list(
        connection.execute(
            sa.select(
                reservations.c.stage,
                shadow.c.key.label("shadow"),
                sa.func.count().label("requests"),
                total(sa.cast(shadow.c.value, sa.BigInteger)).label("estimated"),
                total(lines.c.settled).label("actual"),
            )
            .select_from(reservations)
            .join(lines, sa.and_(same_reservation(lines), lines.c.line == 0))
            .join(attempts, sa.and_(same_reservation(attempts), attempts.c.attempt == 1))
            .join(shadow, sa.true())
            .where(
                reservations.c.root == root,
                reservations.c.shadows.is_not(None),
                reservations.c.attempts == 1,
                sa.text(IS_MEASURED),
                attempts.c.outcome == "returned",
            )
            .group_by(reservations.c.stage, shadow.c.key)
            .order_by(reservations.c.stage, shadow.c.key)
        )
    )


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
