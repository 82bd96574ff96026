"""Budgets and templates as they are: read, locked, closed and opened again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.budgets import (
    WILDCARD,
    Balance,
    Budget,
    Limit,
    Share,
    check_name,
    is_template,
)
from celery_budget.core.draws import OPEN, limits_in_force
from celery_budget.errors import HoldsOpen, UnknownBudget
from celery_budget.store import levels, windows
from celery_budget.store.schema import (
    balances,
    budgets,
    instant,
    lines,
    now_us,
    reservations,
)

__all__ = [
    "balance",
    "balances_of",
    "beginning",
    "budget_of",
    "close",
    "declared",
    "draining",
    "find",
    "first_made",
    "lock_budgets",
    "lock_root",
    "made_from",
    "names_of",
    "open_budgets",
    "reopen",
    "rows_of",
    "some_of",
    "thresholds_of",
]


def find(connection: Connection, root: str, name: str) -> Budget | None:
    """Return a budget or template as declared; none where there is none. Locks nothing."""
    return declared(connection, root, [name]).get(name)


def declared(
    connection: Connection, root: str, names: Iterable[str] | None = None
) -> dict[str, Budget]:
    """Return budgets and templates as declared, by name; all of ``root`` unless ``names`` tells."""
    return {row.name: budget_of(row) for row in rows_of(connection, root, names)}


def rows_of(
    connection: Connection, root: str, names: Iterable[str] | None = None
) -> list[sa.Row[Any]]:
    """Return the rows of budgets and templates, by name. Locks nothing."""
    statement = sa.select(budgets).where(budgets.c.root == root).order_by(budgets.c.name)
    if names is not None:
        statement = statement.where(budgets.c.name.in_(list(names)))
    return list(connection.execute(statement))


def budget_of(row: sa.Row[Any]) -> Budget:
    """Return a row as the budget it declares."""
    limit: Limit = row.limit_amount if row.limit_share is None else Share(row.limit_share)
    return Budget(
        row.name,
        row.unit,
        limit,
        row.parent,
        windows.period_of(row),
        row.soft_stop,
        row.hard_stop,
        row.stripes or None,
        row.weight,
        thresholds_of(row.alert_at),
    )


def thresholds_of(written: str | None) -> tuple[int, ...] | None:
    """Return the thresholds of a row: parts per million with commas between them."""
    return None if written is None else tuple(int(one) for one in written.split(",") if one)


def open_budgets(connection: Connection, root: str, made: bool = False) -> list[Budget]:
    """Return the budgets and templates that take new requests, by name. Locks nothing.

    :param made: also those that templates made.
    """
    return [
        budget_of(row)
        for row in rows_of(connection, root)
        if row.state == OPEN and (made or row.template is None)
    ]


def made_from(connection: Connection, root: str) -> dict[str, int]:
    """Return how many budgets were made from each template. Locks nothing."""
    rows = connection.execute(
        sa.select(budgets.c.template, sa.func.count())
        .where(budgets.c.root == root, budgets.c.template.is_not(None))
        .group_by(budgets.c.template)
    )
    return {template: int(count) for template, count in rows}


def lock_root(connection: Connection, root: str) -> None:
    """Let nobody else change the budgets of ``root`` until the transaction ends.

    The first lock of everything that may give a budget another parent: two such changes could make
    a circle that neither of them sees. Admissions do not wait for it.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT pg_advisory_xact_lock(1734502, hashtext(:root))"), {"root": root}
        )


def lock_budgets(connection: Connection, root: str, names: Iterable[str]) -> list[sa.Row[Any]]:
    """Lock budgets and templates, then the balances that may still change, both in order.

    No window is made for them meanwhile, and no admission that draws on them is between its
    decision and its commit: one that got a balance first has committed, one that waits decides
    anew. Returns the rows of those that exist.
    """
    wanted = sorted(set(names))
    postgresql = connection.dialect.name == "postgresql"
    # By code points, as all names are ordered for locking.
    name: Any = sa.collate(budgets.c.name, "C") if postgresql else budgets.c.name
    rows = connection.execute(
        sa.select(budgets)
        .where(budgets.c.root == root, budgets.c.name.in_(wanted))
        .order_by(name)
        .with_for_update()
    ).all()
    if rows and postgresql:
        connection.execute(
            sa.select(balances.c.stripe)
            .where(
                balances.c.root == root,
                balances.c.budget.in_(wanted),
                # An admission into a window may still go on for a while after its end.
                sa.or_(balances.c.end_us > instant() - windows.LATE_US, balances.c.reserved > 0),
            )
            .order_by(
                sa.collate(balances.c.budget, "C"),
                balances.c.window_us,
                balances.c.stripe,
            )
            .with_for_update()
        )
    return list(rows)


def close(
    connection: Connection, root: str, name: str, drain: bool, only_draining: bool = False
) -> str:
    """Close a budget: it takes nothing new, for good. Returns the state it is in then.

    Locks as :func:`lock_budgets`: an admission that got a balance first is counted as open, one
    that comes later finds the budget closed.

    :param drain: where requests that draw on it have not ended, let them end first.
    :param only_draining: leave it alone where it was reopened meanwhile.
    :raises UnknownBudget: where there is none.
    :raises HoldsOpen: where some have not ended, and it is not to be drained.
    """
    rows = lock_budgets(connection, root, [check_name(name)])
    if not rows:
        raise UnknownBudget(name)
    if rows[0].state == "closed" or (only_draining and rows[0].state == OPEN):
        return str(rows[0].state)
    open_holds = connection.execute(
        sa.select(sa.func.count())
        .select_from(reservations)
        .join(
            lines,
            sa.and_(
                lines.c.root == reservations.c.root,
                lines.c.reservation_id == reservations.c.reservation_id,
            ),
        )
        .where(
            reservations.c.root == root,
            reservations.c.ended_us.is_(None),
            lines.c.budget == name,
        )
    ).scalar_one()
    if open_holds and not drain:
        raise HoldsOpen(name, "the closing", open_holds)
    state = "draining" if open_holds else "closed"
    if state != rows[0].state:
        _set_state(connection, root, name, state)
    return state


def _set_state(connection: Connection, root: str, name: str, state: str) -> None:
    connection.execute(
        budgets.update()
        .where(budgets.c.root == root, budgets.c.name == name)
        .values(state=state, updated_us=now_us())
    )


def draining(connection: Connection, root: str, after: str, limit: int) -> list[str]:
    """Return budgets that are closed as soon as nothing draws on them any more.

    :param after: the name behind which to begin.
    """
    return list(
        connection.execute(
            sa.select(budgets.c.name)
            .where(budgets.c.root == root, budgets.c.state == "draining", budgets.c.name > after)
            .order_by(budgets.c.name)
            .limit(limit)
        ).scalars()
    )


def reopen(connection: Connection, root: str, name: str) -> bool:
    """Let a closed or draining budget take new requests again; false where it does already.

    :raises UnknownBudget: where there is none.
    """
    rows = lock_budgets(connection, root, [check_name(name)])
    if not rows:
        raise UnknownBudget(name)
    if rows[0].state == OPEN:
        return False
    _set_state(connection, root, name, OPEN)
    return True


def balances_of(connection: Connection, root: str) -> list[Balance]:
    """Return the balance of every budget of ``root``, by name. Locks nothing."""
    rows = connection.execute(levels.select_levels(root, {}).order_by(budgets.c.name)).all()
    known = {row.name: levels.level(row) for row in rows}
    now = windows.read_now(connection)
    return [
        _balance(row, limits_in_force(known, row.name)[row.name][0], now)
        for row in rows
        if not is_template(row.name)
    ]


def names_of(
    connection: Connection, root: str, limit: int, containing: str = "", state: str | None = None
) -> list[str]:
    """Return the names of budgets, not of templates, in order, at most ``limit``. Locks nothing.

    :param containing: only those with this in their name, in whatever case.
    :param state: only those in this state.
    """
    wanted = sa.select(budgets.c.name).where(
        budgets.c.root == root, ~budgets.c.name.contains(WILDCARD, autoescape=True)
    )
    if containing:
        wanted = wanted.where(budgets.c.name.icontains(containing, autoescape=True))
    if state is not None:
        wanted = wanted.where(budgets.c.state == state)
    return list(connection.execute(wanted.order_by(budgets.c.name).limit(limit)).scalars())


def beginning(connection: Connection, root: str, start: str, limit: int) -> list[str]:
    """Return the names of budgets that begin with ``start``, the first by name."""
    rows = connection.execute(
        sa.select(budgets.c.name)
        .where(budgets.c.root == root, budgets.c.name.startswith(start, autoescape=True))
        .order_by(budgets.c.name)
        .limit(limit)
    )
    return list(rows.scalars())


def some_of(
    connection: Connection, root: str, names: Sequence[str]
) -> list[tuple[Budget, Balance]]:
    """Return budgets as they are declared with their balances, in the order of ``names``.

    What is read grows with these and all above them. Locks nothing.
    """
    rows = {row.name: row for row in levels.rows_above(connection, root, names)}
    known = {name: levels.level(row) for name, row in rows.items()}
    now = windows.read_now(connection)
    return [
        (budget_of(rows[name]), _balance(rows[name], limits_in_force(known, name)[name][0], now))
        for name in names
    ]


def first_made(connection: Connection, root: str, limit: int) -> list[str]:
    """Return the names of the budgets that were made first, at most ``limit``. Locks nothing."""
    return list(
        connection.execute(
            sa.select(budgets.c.name)
            .where(budgets.c.root == root, budgets.c.name.not_like("%*%"))
            .order_by(budgets.c.created_us, budgets.c.name)
            .limit(limit)
        ).scalars()
    )


def balance(connection: Connection, root: str, name: str) -> Balance:
    """Return the balance of budget ``name`` in the window that is open now. Locks nothing.

    :raises UnknownBudget: where there is none.
    """
    if is_template(check_name(name)):
        raise UnknownBudget(name)
    rows = {row.name: row for row in levels.rows_above(connection, root, [name])}
    row = rows.get(name)
    if row is None:
        raise UnknownBudget(name)
    known = {above: levels.level(one) for above, one in rows.items()}
    now = 0 if row.window_us is not None else windows.read_now(connection)
    return _balance(row, limits_in_force(known, name)[name][0], now)


def _balance(row: sa.Row[Any], limit: int | None, now: int) -> Balance:
    start_us, end_us = row.window_us, row.end_us
    if start_us is None:
        # Nobody has drawn on this window yet.
        window = windows.period_of(row).window(now)
        start_us, end_us = window.start_us, window.end_us
    return Balance(
        row.name,
        row.unit,
        limit,
        int(row.reserved or 0),
        int(row.spent or 0),
        row.parent,
        row.period,
        start_us,
        None if row.period == "total" else end_us,
        row.state,
    )
