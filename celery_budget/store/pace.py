"""How soon budgets that were short may have room again. Locks and changes nothing.

On PostgreSQL the function ``budget_pace`` tells it, also to the one statement that refuses a
request; one contract suite holds both to the same.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.backpressure import Pace
from celery_budget.core.periods import FOREVER_US
from celery_budget.store.journal import ABSOLUTE
from celery_budget.store.schema import balances, instant, journal, wide_sum

__all__ = ["CHANGES", "paces"]

#: So many changes of a window are looked at. The function has the same number.
CHANGES = 32


_PACES = sa.text(
    "SELECT k.budget, p.* FROM unnest(CAST(:budgets AS text[])) AS k (budget),"
    " LATERAL budget_pace(:root, k.budget) AS p"
)


def paces(connection: Connection, root: str, budgets: Collection[str]) -> dict[str, Pace]:
    """Return the pace of each budget that has an open window, in one statement.

    Of each at most :data:`CHANGES` entries of its journal are read, by their key.
    """
    if not budgets:
        return {}
    if connection.dialect.name == "postgresql":
        told = connection.execute(_PACES, {"root": root, "budgets": sorted(set(budgets))})
        return {row.budget: Pace(row.left_us, row.freed, row.span_us) for row in told}
    now = instant()
    of = balances.alias("of")
    latest = (
        sa.select(sa.func.max(of.c.window_us))
        .where(of.c.root == root, of.c.budget == balances.c.budget, of.c.window_us <= now)
        .scalar_subquery()
    )
    change = journal.c.reserved + journal.c.spent
    gives = sa.and_(change < 0, journal.c.what.not_in(ABSOLUTE))
    rows = connection.execute(
        sa.select(
            balances.c.budget,
            balances.c.end_us,
            now.label("now_us"),
            wide_sum(sa.case((gives, -change), else_=0)).label("freed"),
            sa.func.min(journal.c.at_us).label("begun_us"),
        )
        .outerjoin(
            journal,
            sa.and_(
                journal.c.root == balances.c.root,
                journal.c.budget == balances.c.budget,
                journal.c.window_us == balances.c.window_us,
                journal.c.stripe == balances.c.stripe,
                # They are numbered without a gap.
                journal.c.entry > balances.c.entries - CHANGES,
            ),
        )
        .where(
            balances.c.root == root,
            balances.c.budget.in_(sorted(set(budgets))),
            balances.c.stripe == 0,
            balances.c.window_us == latest,
        )
        .group_by(balances.c.budget, balances.c.end_us)
    )
    return {
        row.budget: Pace(
            row.end_us - row.now_us if row.end_us < FOREVER_US else None,
            min(int(row.freed or 0), MAX_AMOUNT),
            row.now_us - row.begun_us if row.begun_us is not None else 0,
        )
        for row in rows
    }
