"""What tenants have had of a lane, and how they stand to one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.shares import LANE, MOST_COUNTED, Account, Key, Shares
from celery_budget.store.insert import AT_ONCE, insert_new
from celery_budget.store.schema import (
    IS_HELD,
    budgets,
    exact_sum,
    instant,
    lines,
    outbox,
    reservations,
    share_returns,
    shares,
    usage,
    wide_sum,
)

__all__ = ["FORGET_US", "give_back", "read", "served", "take_back", "waiting", "write"]

#: Who was not served for so long has had nothing: a day. That forgives what it was ahead by.
FORGET_US = 86_400_000_000
#: How many are forgotten at a time.
FORGOTTEN = 100
#: How many corrections one dispatch makes.
CORRECTED = 1000


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


def waiting(connection: Connection, root: str, lane: str, limit: int) -> list[sa.Row[Any]]:
    """Return the tenants that a lane holds most of: how much, and for how long it has been due.

    Reads all that it holds. Locks nothing.
    """
    jobs = sa.func.count().label("jobs")
    return list(
        connection.execute(
            sa.select(
                outbox.c.tenant,
                jobs,
                exact_sum(outbox.c.weight).label("units"),
                sa.func.max(instant() - outbox.c.due_us).label("oldest_us"),
            )
            .where(outbox.c.root == root, outbox.c.lane == lane, sa.text(IS_HELD))
            .group_by(outbox.c.tenant)
            .order_by(jobs.desc(), outbox.c.tenant)
            .limit(limit)
        )
    )


def served(connection: Connection, root: str, lane: str, limit: int) -> dict[Key, int]:
    """Return who was served by a lane last, and when. Locks nothing."""
    rows = connection.execute(
        sa.select(shares.c.name, shares.c.own, shares.c.served_us)
        .where(shares.c.root == root, shares.c.lane == lane, shares.c.name != LANE.name)
        .order_by(shares.c.served_us.desc(), shares.c.name, shares.c.own)
        .limit(limit)
    )
    return {Key(row.name, row.own): row.served_us for row in rows}


def give_back(connection: Connection, message: sa.Row[Any]) -> None:
    """Note what was counted for a message and not used, once its request has ended.

    What one that never ran weighs; of one that ran the difference to what was charged for its last
    run. What reached its worker without the lane was not counted before. Only a row is written: the
    dispatcher, which holds the lane's, makes the correction.
    """
    by_earlier_runs = (
        sa.select(wide_sum(usage.c.amount))
        .where(
            usage.c.root == lines.c.root,
            usage.c.reservation_id == lines.c.reservation_id,
            usage.c.unit == lines.c.unit,
            usage.c.attempt < reservations.c.attempts,
        )
        .correlate(lines, reservations)
        .scalar_subquery()
    )
    found = connection.execute(
        sa.select(
            lines.c.settled,
            by_earlier_runs.label("earlier"),
            sa.and_(reservations.c.unreserved, reservations.c.attempts <= 1).label("uncounted"),
        )
        .join(
            reservations,
            sa.and_(
                reservations.c.root == lines.c.root,
                reservations.c.reservation_id == lines.c.reservation_id,
            ),
        )
        .where(
            lines.c.root == message.root,
            lines.c.reservation_id == message.reservation_id,
            lines.c.line == 0,
        )
    ).first()
    if found is None:
        return
    counted = 0 if found.uncounted else message.weight
    units = counted - max(0, found.settled - int(found.earlier or 0))
    if units:
        insert_new(
            connection,
            share_returns,
            root=message.root,
            lane=message.lane,
            outbox_id=message.outbox_id,
            tenant=message.tenant,
            units=max(-MOST_COUNTED, min(units, MOST_COUNTED)),
        )


def take_back(connection: Connection, root: str, lane: str) -> dict[str, int]:
    """Take what is to be given back out of the ledger; return it by tenant, a thousand at a time.

    The caller holds the lane's row, and makes the corrections in the same transaction.
    """
    mine = sa.and_(share_returns.c.root == root, share_returns.c.lane == lane)
    first = sa.select(share_returns.c.outbox_id).where(mine).limit(CORRECTED)
    found: dict[str, int] = {}
    for row in connection.execute(
        share_returns.delete()
        .where(mine, share_returns.c.outbox_id.in_(first))
        .returning(share_returns.c.tenant, share_returns.c.units)
    ):
        found[row.tenant] = found.get(row.tenant, 0) + row.units
    return found


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
        ).returning(shares.c.own),
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
        execution_options=AT_ONCE,
    ).all()
    _forget(connection, root, lane)


def _forget(connection: Connection, root: str, lane: str) -> None:
    key = sa.tuple_(shares.c.name, shares.c.own)
    mine = sa.and_(shares.c.root == root, shares.c.lane == lane)
    old = (
        sa.select(shares.c.name, shares.c.own)
        .where(mine, shares.c.served_us < instant() - FORGET_US)
        .order_by(shares.c.served_us)
        .limit(FORGOTTEN)
    )
    connection.execute(shares.delete().where(mine, key.in_(old)))
