"""What tenants have had of a lane, and how they stand to one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.shares import LANE, Account, Key, Shares
from celery_budget.store.schema import budgets, instant, shares

__all__ = ["FORGET_US", "read", "write"]

#: Who was not served for so long has had nothing: a day. That forgives what it was ahead by.
FORGET_US = 86_400_000_000
#: How many are forgotten at a time.
FORGOTTEN = 100


def read(connection: Connection, root: str, lane: str, tenants: Iterable[str]) -> Shares:
    """Return the shares of ``tenants``, and of all above them.

    By keys: what others have had is not read. The caller holds the lane's row, behind which shares
    change.
    """
    wanted = sorted(set(tenants))
    up = (
        sa.select(budgets.c.name, budgets.c.parent, budgets.c.weight)
        .where(budgets.c.root == root, budgets.c.name.in_(wanted))
        .cte("up", recursive=True)
    )
    above = budgets.alias("above")
    up = up.union(
        sa.select(above.c.name, above.c.parent, above.c.weight).where(
            above.c.root == root, above.c.name == up.c.parent
        )
    )
    rows = connection.execute(sa.select(up)).all()
    names = {LANE.name, *wanted, *(row.name for row in rows)}
    found = connection.execute(
        sa.select(shares).where(
            shares.c.root == root, shares.c.lane == lane, shares.c.name.in_(sorted(names))
        )
    )
    return Shares(
        parents={row.name: row.parent for row in rows if row.parent is not None},
        weights={row.name: row.weight for row in rows},
        accounts={
            Key(row.name, row.own): Account(row.finish, row.rest, row.floor) for row in found
        },
    )


def write(connection: Connection, root: str, lane: str, accounts: Mapping[Key, Account]) -> None:
    """Write the accounts that a decision changed, and forget some that are not used any more.

    The caller holds the lane's row: nobody else writes shares of the lane.
    """
    if not accounts:
        return
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(shares).values(served_us=instant())
    names = ("finish", "rest", "floor", "served_us")
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["root", "lane", "name", "own"],
            set_={name: statement.excluded[name] for name in names},
        ),
        [
            {
                "root": root,
                "lane": lane,
                "name": key.name,
                "own": key.own,
                "finish": account.finish,
                "rest": account.rest,
                "floor": account.floor,
            }
            for key, account in accounts.items()
        ],
    )
    _forget(connection, root, lane)


def _forget(connection: Connection, root: str, lane: str) -> None:
    mine = sa.and_(shares.c.root == root, shares.c.lane == lane)
    old = connection.execute(
        sa.select(shares.c.name, shares.c.own)
        .where(mine, shares.c.served_us < instant() - FORGET_US)
        .order_by(shares.c.served_us)
        .limit(FORGOTTEN)
    ).all()
    if old:
        connection.execute(
            shares.delete().where(
                mine, sa.tuple_(shares.c.name, shares.c.own).in_([tuple(row) for row in old])
            )
        )
