"""Budgets whose admissions wait for one another: found by what they have noted, and spread."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.draws import OPEN
from celery_budget.store import windows
from celery_budget.store.budgets import lock_budgets
from celery_budget.store.schema import balances, budgets, instant

__all__ = ["noted", "spread_further"]

#: By how much the number of rows is raised at a time.
FACTOR = 4


def noted(connection: Connection, root: str, most: int) -> dict[str, int]:
    """Return how often admissions have waited for each budget, in the windows that are open.

    Of those whose number of stripes is left to be found, and is less than ``most``. Locks nothing;
    what is read grows with the windows that anybody has waited for.
    """
    rows = connection.execute(
        sa.select(balances.c.budget, sa.func.sum(balances.c.waits).label("waits"))
        .join(budgets, sa.and_(budgets.c.root == root, budgets.c.name == balances.c.budget))
        .where(
            balances.c.root == root,
            balances.c.waits > 0,
            balances.c.end_us > instant(),
            budgets.c.stripes == 0,
            budgets.c.spread < most,
            budgets.c.state == OPEN,
        )
        .group_by(balances.c.budget)
    )
    return {row.budget: int(row.waits) for row in rows}


def spread_further(connection: Connection, root: str, name: str, most: int) -> int | None:
    """Spread a budget over more rows, ``most`` at most; return over how many, none for as before.

    Locks as :func:`~celery_budget.store.budgets.lock_budgets`: admissions wait for that once.
    """
    rows = lock_budgets(connection, root, [name])
    if not rows or rows[0].stripes or rows[0].state != OPEN or rows[0].spread >= most:
        return None
    stripes: int = min(rows[0].spread * FACTOR, most)
    windows.spread(connection, root, name, stripes)
    return stripes
