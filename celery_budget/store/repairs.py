"""Putting a balance right that is not what its lines and adjustments add up to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.errors import InvalidAmount
from celery_budget.store.balances import WHOLE, Key, lock_balances, where
from celery_budget.store.journal import REPAIR, of_balance, reads, who
from celery_budget.store.schema import adjustments, balances, exact_sum, journal, lines, now_us
from celery_budget.store.windows import UNSHARED, restore_window

__all__ = ["rebuild", "share_anew"]


def rebuild(connection: Connection, root: str, key: Key, reason: str) -> bool:
    """Make a balance what its lines and adjustments add up to; false where nothing was changed.

    Nothing is where balance and journal agree against the lines: two witnesses say that a line is
    wrong, and to follow it would charge for what nobody used.

    Whoever changes a line changes its balance first: behind the lock of the balance, which this
    takes, the sum stands still. The journal is told in an entry that stands for all before it.

    :raises InvalidAmount: where the sum is more than a balance can hold.
    """
    mine = where(root, key)
    if connection.execute(sa.select(balances.c.stripe).where(mine)).first() is None:
        # Before any of the window's rows is locked: the budget's comes first.
        restore_window(connection, root, key.budget, key.window_us, key.stripe)
    lock_balances(connection, root, [replace(key, stripe=WHOLE)])
    row = connection.execute(sa.select(balances).where(mine).with_for_update()).one()
    reserved, settled = _sums(connection, lines, root, key, lines.c.reserved, lines.c.settled)
    (adjusted,) = _sums(connection, adjustments, root, key, adjustments.c.amount)
    spent = settled + adjusted
    if reserved + spent > MAX_AMOUNT or (spent < 0 and row.share is None):
        raise InvalidAmount(
            f"the lines of budget {key.budget!r} add up to {reserved} reserved and {spent} spent, "
            "which no balance can be"
            "; see who wrote into the ledger's tables, and restore them from a backup"
        )
    entries = of_balance(root, key.budget, key.window_us, key.stripe)
    told = reads(connection, entries)
    if told == (row.reserved, row.spent, row.entries):
        return False
    last = connection.execute(sa.select(sa.func.max(journal.c.entry)).where(entries)).scalar()
    entry = max(row.entries, last or 0) + 1
    connection.execute(
        balances.update().where(mine).values(reserved=reserved, spent=spent, entries=entry)
    )
    share_anew(connection, root, key)
    connection.execute(
        journal.insert().values(
            root=root,
            budget=key.budget,
            window_us=key.window_us,
            stripe=key.stripe,
            entry=entry,
            at_us=now_us(),
            what=REPAIR,
            who=who(),
            reserved=reserved - row.reserved,
            spent=spent - row.spent,
            reserved_after=reserved,
            spent_after=spent,
            reason=reason,
        )
    )
    return True


def share_anew(connection: Connection, root: str, key: Key) -> None:
    """Have the next admission share anew what is left of a window with several rows.

    Locks all of them.
    """
    lock_balances(connection, root, [replace(key, stripe=WHOLE)])
    connection.execute(
        balances.update()
        .where(
            balances.c.root == root,
            balances.c.budget == key.budget,
            balances.c.window_us == key.window_us,
            balances.c.share.is_not(None),
        )
        .values(basis=UNSHARED)
    )


def _sums(
    connection: Connection, table: sa.Table, root: str, key: Key, *columns: Any
) -> tuple[int, ...]:
    found = connection.execute(
        sa.select(*(sa.func.coalesce(exact_sum(column), 0) for column in columns)).where(
            table.c.root == root,
            table.c.budget == key.budget,
            table.c.window_us == key.window_us,
            table.c.stripe == key.stripe,
        )
    ).one()
    return tuple(map(int, found))
