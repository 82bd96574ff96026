"""How soon budgets that were short may have room again. Locks and changes nothing.

On PostgreSQL the function ``budget_pace`` tells it, within the statement that refuses a request.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.backpressure import Pace
from celery_budget.core.periods import FOREVER_US
from celery_budget.store.journal import ABSOLUTE
from celery_budget.store.schema import balances, instant, journal

__all__ = ["CHANGES", "paces"]

#: So many changes of a window are looked at. The function has the same number.
CHANGES = 32

_PACES = sa.text(
    "SELECT k.budget, p.* FROM unnest(CAST(:budgets AS text[])) AS k (budget),"
    " LATERAL budget_pace(:root, k.budget) AS p"
)


def paces(connection: Connection, root: str, budgets: Collection[str]) -> dict[str, Pace]:
    """Return the pace of each budget that has an open window.

    Of each at most :data:`CHANGES` entries of its journal are read, by their key. On PostgreSQL one
    statement.
    """
    if not budgets:
        return {}
    if connection.dialect.name == "postgresql":
        rows = connection.execute(_PACES, {"root": root, "budgets": sorted(set(budgets))})
        return {row.budget: Pace(row.left_us, row.freed, row.span_us) for row in rows}
    found = {}
    for budget in sorted(set(budgets)):
        pace = _pace(connection, root, budget)
        if pace is not None:
            found[budget] = pace
    return found


def _pace(connection: Connection, root: str, budget: str) -> Pace | None:
    now = instant()
    opened = (
        sa.select(balances.c.window_us, balances.c.end_us)
        .where(
            balances.c.root == root,
            balances.c.budget == budget,
            balances.c.stripe == 0,
            balances.c.window_us <= now,
        )
        .order_by(balances.c.window_us.desc())
        .limit(1)
        .subquery("opened")
    )
    rows = connection.execute(
        sa.select(
            opened.c.end_us,
            now.label("now_us"),
            journal.c.at_us,
            journal.c.what,
            journal.c.reserved,
            journal.c.spent,
        )
        .select_from(opened)
        .outerjoin(
            journal,
            sa.and_(
                journal.c.root == root,
                journal.c.budget == budget,
                journal.c.window_us == opened.c.window_us,
                journal.c.stripe == 0,
            ),
        )
        .order_by(journal.c.entry.desc())
        .limit(CHANGES)
    ).all()
    if not rows:
        return None
    end_us, now_us = rows[0].end_us, rows[0].now_us
    changes = [row for row in rows if row.at_us is not None]
    freed = sum(max(0, -(row.reserved + row.spent)) for row in changes if row.what not in ABSOLUTE)
    begun = min((row.at_us for row in changes), default=now_us)
    return Pace(
        end_us - now_us if end_us < FOREVER_US else None, min(freed, MAX_AMOUNT), now_us - begun
    )
