"""What a budget is held by, what waits for it, and what it refused. Locks and changes nothing.

What is read grows with the requests that have not ended, be they of this budget or of another, and
never with those that have: a settled request holds nothing, and its lines are not looked at.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.tallies import DAY_US
from celery_budget.store.claims import predecessor
from celery_budget.store.refusals import IS_WAIVED
from celery_budget.store.schema import (
    attempts,
    balances,
    exact_sum,
    instant,
    lines,
    now_us,
    outbox,
    parked,
    refusals,
    reservations,
)
from celery_budget.store.stories import replayable

__all__ = [
    "REFUSED_DAYS",
    "by_state",
    "first_waiting",
    "holders",
    "refused",
    "what_follows",
    "windows",
]

Rows = list[sa.Row[Any]]

#: For how many days it is told what a budget has refused, that of today included.
REFUSED_DAYS = 31


def _held(root: str, budget: str) -> Any:
    """Select what each request that has not ended holds of a budget.

    The amount is a value of the request's own lines, and neither a join nor looked for by the
    budget, for which a database without statistics may read all lines of the budget each time.
    """
    amount = (
        sa.select(sa.func.sum(sa.case((lines.c.budget == budget, lines.c.reserved))))
        .where(
            lines.c.root == root,
            lines.c.reservation_id == reservations.c.reservation_id,
        )
        .correlate(reservations)
        .scalar_subquery()
    )
    return (
        sa.select(reservations, sa.cast(amount, sa.BigInteger).label("held"))
        .where(reservations.c.root == root, reservations.c.ended_us.is_(None))
        .subquery()
    )


def by_state(connection: Connection, root: str, budget: str) -> Rows:
    """Return how many requests hold any of a budget, and how much, by their state."""
    held = _held(root, budget)
    return list(
        connection.execute(
            sa.select(
                held.c.state,
                sa.func.count().label("requests"),
                exact_sum(held.c.held).label("held"),
            )
            .where(held.c.held > 0)
            .group_by(held.c.state)
            .order_by(held.c.state)
        )
    )


def holders(connection: Connection, root: str, budget: str, limit: int) -> Rows:
    """Return the requests that hold the most of a budget, the largest hold first."""
    held = _held(root, budget)
    return list(
        connection.execute(
            sa.select(held)
            .where(held.c.held > 0)
            .order_by(held.c.held.desc(), held.c.created_us, held.c.reservation_id)
            .limit(limit)
        )
    )


def what_follows(connection: Connection, root: str, ids: Sequence[uuid.UUID]) -> dict[str, Rows]:
    """Return the open attempts, the messages and what is parked of reservations, by what it is."""

    def rows(table: sa.Table, *more: Any, where: Any = None) -> Rows:
        left_out = ("body", "envelope", "payload", "request")
        columns = [one for one in table.c if one.name not in left_out]
        mine = [table.c.root == root, table.c.reservation_id.in_(ids)]
        if where is not None:
            mine.append(where)
        return list(connection.execute(sa.select(*columns, *more).where(*mine)))

    if not ids:
        return {"attempts": [], "messages": [], "parked": []}
    return {
        "attempts": rows(attempts, replayable(), where=attempts.c.lease_until_us.is_not(None)),
        "messages": rows(outbox, predecessor(root).label("follows")),
        "parked": rows(parked),
    }


def windows(connection: Connection, root: str, budget: str) -> Rows:
    """Return the windows of a budget that are open, or have ended and are held from, in order."""
    held = balances.alias("held")
    opened = sa.and_(held.c.window_us <= instant(), held.c.end_us > instant())
    is_open = sa.and_(balances.c.window_us <= instant(), balances.c.end_us > instant())
    return list(
        connection.execute(
            sa.select(
                balances.c.window_us,
                balances.c.end_us,
                sa.cast(sa.func.sum(balances.c.reserved), sa.BigInteger).label("reserved"),
                sa.cast(sa.func.sum(balances.c.spent), sa.BigInteger).label("spent"),
                is_open.label("is_open"),
            )
            .where(
                balances.c.root == root,
                balances.c.budget == budget,
                balances.c.window_us.in_(
                    sa.select(held.c.window_us).where(
                        held.c.root == root,
                        held.c.budget == budget,
                        sa.or_(held.c.reserved > 0, opened),
                    )
                ),
            )
            .group_by(balances.c.window_us, balances.c.end_us)
            .order_by(balances.c.window_us)
        )
    )


def first_waiting(
    connection: Connection, root: str, budget: str, limit: int
) -> tuple[Rows, int, int | None]:
    """Return what waits for a budget, the next one first; how much does, and since when."""
    mine = sa.and_(parked.c.root == root, parked.c.budget == budget)
    count, oldest_us = connection.execute(
        sa.select(sa.func.count(), sa.func.min(parked.c.created_us)).where(mine)
    ).one()
    shown: tuple[Any, ...] = (
        parked.c.parked_id,
        parked.c.task_id,
        parked.c.task_name,
        parked.c.owner,
        parked.c.reason,
        parked.c.amount,
        parked.c.created_us,
        parked.c.deadline_us,
        sa.func.coalesce(parked.c.ahead_us > instant(), sa.false()).label("ahead"),
        parked.c.reservation_id,
    )
    first = connection.execute(
        sa.select(*shown)
        .where(mine)
        .order_by(parked.c.turn, parked.c.created_us, parked.c.parked_id)
        .limit(limit)
    )
    return list(first), count, oldest_us


def refused(connection: Connection, root: str, budget: str) -> Rows:
    """Return what a budget has refused of late, by reason: how often, and the last that is kept.

    In the last :data:`REFUSED_DAYS` days, of each of which a few rows are read.
    """
    today = connection.execute(sa.select(now_us())).scalar_one() // DAY_US
    mine = sa.and_(
        refusals.c.root == root,
        refusals.c.day.in_(range(today - REFUSED_DAYS + 1, today + 1)),
        refusals.c.budget == budget,
        ~IS_WAIVED,
    )
    counted = (
        sa.select(
            refusals.c.reason,
            exact_sum(refusals.c["count"]).label("times"),
            sa.func.max(refusals.c.refused_us).label("refused_us"),
        )
        .where(mine)
        .group_by(refusals.c.reason)
        .subquery()
    )
    rows = connection.execute(
        sa.select(
            counted.c.reason,
            counted.c.times,
            counted.c.refused_us,
            refusals.c.task_name,
            refusals.c.requested,
            refusals.c.slot,
        )
        .join(
            refusals,
            sa.and_(
                mine,
                refusals.c.reason == counted.c.reason,
                refusals.c.refused_us == counted.c.refused_us,
            ),
        )
        .order_by(counted.c.refused_us.desc(), counted.c.reason, refusals.c.slot)
    )
    # Of several at one moment the first.
    return list({row.reason: row for row in reversed(list(rows))}.values())[::-1]
