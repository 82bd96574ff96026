"""Budgets and balances: create, change, read; and the one place that moves a balance."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT, check_limit
from celery_budget.core.budgets import TOTAL, Balance, check_name, check_unit
from celery_budget.errors import BudgetError, InvalidAmount, UnknownBudget
from celery_budget.store.insert import insert_new
from celery_budget.store.schema import balances, budgets, lines, now_us

__all__ = ["balance", "balances_of", "move", "set_budget"]


def set_budget(
    connection: Connection, root: str, name: str, limit: int | None, unit: str | None
) -> None:
    """Create the budget ``name`` or change its limit; what was reserved and spent stays.

    Locks the budget's balance before its limit moves: an admission that waits behind the lock
    decides by the new limit, one before it by the old. Two at once for a new name: one creates,
    the other changes.

    :param unit: what it counts; none keeps the unit of a budget that exists.
    :raises InvalidName, InvalidAmount: for what cannot be a name, a unit or a limit.
    :raises BudgetError: for a new budget without a unit, or another unit once it was drawn on.
    """
    check_name(name)
    check_limit(limit, f"the limit of {name!r}")
    if unit is not None:
        check_unit(unit)
    key = (budgets.c.root == root) & (budgets.c.name == name)
    connection.execute(
        sa.select(balances.c.stripe)
        .where(balances.c.root == root, balances.c.budget == name)
        .order_by(balances.c.window_us, balances.c.stripe)
        .with_for_update()
    )
    found = connection.execute(sa.select(budgets.c.unit).where(key).with_for_update()).first()
    if found is None:
        if unit is None:
            raise BudgetError(f"budget {name!r} is new; say what it counts with unit= (--unit)")
        if not _insert_budget(connection, root, name, limit, unit):
            # Somebody else created it in between: change that one.
            set_budget(connection, root, name, limit, unit)
        return
    if unit is not None and unit != found.unit and _drawn_on(connection, root, name):
        raise BudgetError(
            f"budget {name!r} counts {found.unit} and was drawn on; its unit cannot become {unit}"
        )
    connection.execute(
        budgets.update()
        .where(key)
        .values(limit_amount=limit, unit=unit or found.unit, updated_us=now_us())
    )


def _insert_budget(
    connection: Connection, root: str, name: str, limit: int | None, unit: str
) -> bool:
    created = insert_new(
        connection,
        budgets,
        root=root,
        name=name,
        unit=unit,
        period=TOTAL,
        limit_amount=limit,
        created_us=now_us(),
        updated_us=now_us(),
    )
    if created:
        connection.execute(
            balances.insert().values(
                root=root, budget=name, window_us=0, stripe=0, reserved=0, spent=0
            )
        )
    return created


def _drawn_on(connection: Connection, root: str, name: str) -> bool:
    found = connection.execute(
        sa.select(lines.c.line).where(lines.c.root == root, lines.c.budget == name).limit(1)
    )
    return found.first() is not None


def balances_of(connection: Connection, root: str) -> list[Balance]:
    """Return the balance of every budget of ``root``, by name. Locks nothing."""
    return [
        Balance(row.name, row.unit, row.limit_amount, row.reserved, row.spent)
        for row in connection.execute(_select_balances(root))
    ]


def balance(connection: Connection, root: str, name: str) -> Balance:
    """Return the balance of budget ``name``. Locks nothing.

    :raises UnknownBudget: where there is none.
    """
    row = connection.execute(_select_balances(root).where(budgets.c.name == name)).first()
    if row is None:
        raise UnknownBudget(name)
    return Balance(row.name, row.unit, row.limit_amount, row.reserved, row.spent)


def _select_balances(root: str) -> sa.Select[tuple[str, str, int | None, int, int]]:
    return (
        sa.select(
            budgets.c.name,
            budgets.c.unit,
            budgets.c.limit_amount,
            sa.cast(sa.func.sum(balances.c.reserved), sa.BigInteger).label("reserved"),
            sa.cast(sa.func.sum(balances.c.spent), sa.BigInteger).label("spent"),
        )
        .join(
            balances,
            (balances.c.root == budgets.c.root) & (balances.c.budget == budgets.c.name),
        )
        .where(budgets.c.root == root)
        .group_by(budgets.c.name, budgets.c.unit, budgets.c.limit_amount)
        .order_by(budgets.c.name)
    )


def move(
    connection: Connection,
    root: str,
    line: sa.Row[tuple[object, ...]],
    reserved: int,
    spent: int,
    within_limit: bool = False,
) -> bool:
    """Add ``reserved`` and ``spent`` (either may be negative) to the balance a line belongs to.

    Locks that one balance; a caller with several lines goes through them in order of the budget's
    name, window and stripe, and holds the reservation's row already.

    :param within_limit: refuse (false, nothing changed) what would bring it above the limit.
    :raises InvalidAmount: where the sum would leave 64 bits; nothing was changed.
    """
    where = [
        balances.c.root == root,
        balances.c.budget == line.budget,
        balances.c.window_us == line.window_us,
        balances.c.stripe == line.stripe,
    ]
    held = connection.execute(
        sa.select(balances.c.reserved, balances.c.spent).where(*where).with_for_update()
    ).one()
    total = held.reserved + held.spent + reserved + spent
    if within_limit:
        # Read behind the lock: whoever changes the limit holds it too.
        limit = connection.execute(
            sa.select(budgets.c.limit_amount).where(
                budgets.c.root == root, budgets.c.name == line.budget
            )
        ).scalar_one()
        if limit == 0 or total > (MAX_AMOUNT if limit is None else limit):
            return False
    if total > MAX_AMOUNT:
        raise InvalidAmount(
            f"budget {line.budget!r} cannot count {total}; a balance is at most 2^63-1"
        )
    connection.execute(
        balances.update()
        .where(*where)
        .values(reserved=held.reserved + reserved, spent=held.spent + spent)
    )
    return True
