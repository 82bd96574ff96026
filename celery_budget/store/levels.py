"""How budgets stand, with all above them: what admission decides by. Locks nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.draws import Level
from celery_budget.store.schema import balances, budgets, grants, instant

__all__ = ["MAX_DEPTH", "levels_of", "rows_above", "select_levels"]

#: How many budgets may be above one another.
MAX_DEPTH = 16


def levels_of(
    connection: Connection,
    root: str,
    names: Iterable[str],
    windows: dict[str, int] | None = None,
) -> dict[str, Level]:
    """Return the named budgets and all above them, by name; what does not exist is left out.

    :param windows: the windows to look at, where they are not those that are open now.
    """
    return {row.name: level(row) for row in rows_above(connection, root, names, windows)}


def rows_above(
    connection: Connection,
    root: str,
    names: Iterable[str],
    windows: dict[str, int] | None = None,
) -> list[sa.Row[Any]]:
    """Return the rows of :func:`select_levels` for the named budgets and all above them."""
    wanted = sorted(set(names))
    up = (
        sa.select(budgets.c.name, budgets.c.parent)
        .where(budgets.c.root == root, budgets.c.name.in_(wanted))
        .cte("up", recursive=True)
    )
    above = budgets.alias("above")
    up = up.union(
        sa.select(above.c.name, above.c.parent).where(
            above.c.root == root, above.c.name == up.c.parent
        )
    )
    # No more than that are above: PostgreSQL takes them for a hundred, for which it would rather
    # read all budgets and balances there are.
    found = sa.select(up.c.name).limit((MAX_DEPTH + 1) * len(wanted))
    statement = select_levels(root, windows or {}).where(budgets.c.name.in_(found))
    return list(connection.execute(statement))


def level(row: sa.Row[Any]) -> Level:
    """Return the level that a row of :func:`select_levels` tells of."""
    return Level(
        row.name,
        row.unit,
        row.parent,
        row.limit_amount,
        row.limit_share,
        int(row.granted),
        row.soft_stop,
        row.hard_stop,
        row.state,
        row.window_us,
        int(row.reserved or 0),
        int(row.spent or 0),
        row.spread if row.share is not None else 0,
    )


def select_levels(root: str, windows: dict[str, int]) -> sa.Select[Any]:
    """Select the budgets of ``root`` with what was granted and the balance of their open window."""
    now = instant()
    latest = (
        sa.select(sa.func.max(balances.c.window_us))
        .where(
            balances.c.root == root,
            balances.c.budget == budgets.c.name,
            balances.c.window_us <= now,
        )
        .correlate(budgets)
        .scalar_subquery()
    )
    window: Any = latest
    is_open: Any = balances.c.end_us > now
    if windows:
        window = sa.case(windows, value=budgets.c.name, else_=latest)
        is_open = sa.or_(is_open, budgets.c.name.in_(list(windows)))
    granted = (
        sa.select(sa.func.coalesce(sa.func.sum(grants.c.amount), 0))
        .where(
            grants.c.root == root,
            grants.c.budget == budgets.c.name,
            grants.c.until_us > now,
        )
        .correlate(budgets)
        .scalar_subquery()
    )
    current = sa.and_(
        balances.c.root == root,
        balances.c.budget == budgets.c.name,
        balances.c.window_us == window,
        balances.c.stripe == 0,
        is_open,
    )
    return (
        sa.select(
            budgets,
            granted.label("granted"),
            balances.c.window_us,
            balances.c.end_us,
            _of_all(root, balances.c.reserved).label("reserved"),
            _of_all(root, balances.c.spent).label("spent"),
            balances.c.share,
        )
        .outerjoin(balances, current)
        .where(budgets.c.root == root)
    )


def _of_all(root: str, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """Return a counter of a window: of all of its rows, where it has several."""
    row = balances.alias("row")
    every = (
        sa.select(sa.func.sum(row.c[column.name]))
        .where(
            row.c.root == root,
            row.c.budget == balances.c.budget,
            row.c.window_us == balances.c.window_us,
        )
        .correlate(balances)
        .scalar_subquery()
    )
    return sa.case((balances.c.share.is_(None), column), else_=every)
