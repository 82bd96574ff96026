"""Queues of parked work: one for each budget that was short. What of them is worth a try now.

What is looked at grows with the budgets that have parked work, never with how much is parked.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.budgets import most
from celery_budget.core.draws import OPEN, Level, limits_in_force
from celery_budget.core.parking import GOES_ON, Room, Waiting
from celery_budget.store.levels import levels_of
from celery_budget.store.schema import balances, lines, now_us, parked

__all__ = ["Queue", "Row", "by_budget", "find", "go_ahead", "heads", "listed", "look", "past"]

Row = sa.Row[Any]

#: How many times as many next attempts of ended windows are looked at as are returned.
PAST_SEEN = 10


@dataclass(frozen=True)
class Queue:
    """What waits for one budget, at one look.

    :ivar smallest: how much the smallest of it needs.
    :ivar oldest_us: since when the oldest waits.
    :ivar ahead_us: until when one of it goes ahead; none where none does.
    :ivar past: whether a next attempt of it is held in a window that is not the open one.
    :ivar now_us: when this was looked at.
    """

    budget: str
    smallest: int
    oldest_us: int
    ahead_us: int | None
    past: bool
    now_us: int
    room: Room


def look(connection: Connection, root: str, after: str, limit: int) -> list[Queue]:
    """Return the queues of budgets whose names come after ``after``, in their order.

    Two statements; a few index entries are read for each budget. Locks nothing.
    """
    own = parked.alias("own")

    def of(column: sa.ColumnElement[Any], *where: sa.ColumnElement[bool]) -> Any:
        of_budget = (own.c.root == root, own.c.budget == short.c.budget)
        return sa.select(column).where(*of_budget, *where).correlate(short).scalar_subquery()

    first = sa.select(sa.func.min(parked.c.budget)).where(
        parked.c.root == root, parked.c.budget > after
    )
    # From one name to the next, past all that waits for it.
    short = sa.select(first.scalar_subquery().label("budget")).cte("short", recursive=True)
    following = (
        sa.select(sa.func.min(own.c.budget))
        .where(own.c.root == root, own.c.budget > short.c.budget)
        .correlate(short)
        .scalar_subquery()
    )
    short = short.union_all(sa.select(following).where(short.c.budget.is_not(None)))
    rows = connection.execute(
        sa.select(
            short.c.budget,
            of(sa.func.min(own.c.amount)).label("smallest"),
            of(sa.func.min(own.c.created_us)).label("oldest_us"),
            of(sa.func.max(own.c.ahead_us), own.c.ahead_us.is_not(None)).label("ahead_us"),
            of(sa.func.min(own.c.window_us), own.c.window_us.is_not(None)).label("window_us"),
            now_us().label("now_us"),
        )
        .where(short.c.budget.is_not(None))
        .limit(limit)
    ).all()
    known = levels_of(connection, root, [row.budget for row in rows]) if rows else {}
    return [
        Queue(
            row.budget,
            row.smallest,
            row.oldest_us,
            row.ahead_us,
            row.window_us is not None and row.window_us != _open_window(known, row.budget),
            row.now_us,
            _room(known, row.budget),
        )
        for row in rows
    ]


def _open_window(known: dict[str, Level], name: str) -> int | None:
    return known[name].window_us if name in known else None


def _room(known: dict[str, Level], name: str) -> Room:
    if name not in known:
        return Room(-1, -1, -1, False)
    level = known[name]
    limit, blocked = limits_in_force(known, name)[name]
    if blocked:
        return Room(-1, -1, -1, level.state == OPEN)
    total = level.reserved + level.spent
    new = most(limit, level.soft_stop)
    return Room(
        new - total,
        most(limit, level.hard_stop) - total,
        new - level.spent,
        level.state == OPEN,
    )


def heads(
    connection: Connection, root: str, queue: Queue, aged_us: int, limit: int
) -> tuple[list[Waiting], Room]:
    """Return the first of a queue, of what fits its room or may go ahead; and that room.

    What waiting attempts have used does not come back before they have run. Locks nothing.

    :param aged_us: as for :func:`celery_budget.core.parking.plan`.
    """
    room = queue.room
    if queue.oldest_us <= aged_us:
        room = replace(room, possible=room.possible - _kept(connection, root, queue.budget))
    fits = sa.or_(
        sa.and_(parked.c.turn == GOES_ON, parked.c.amount <= room.finishing),
        sa.and_(parked.c.turn > GOES_ON, parked.c.amount <= room.new),
        sa.and_(
            parked.c.created_us <= aged_us,
            parked.c.reservation_id.is_(None),
            parked.c.amount <= room.possible,
        ),
    )
    rows = connection.execute(
        sa.select(
            parked.c.parked_id,
            parked.c.amount,
            parked.c.turn,
            parked.c.created_us,
            parked.c.reservation_id,
        )
        .where(
            parked.c.root == root,
            parked.c.budget == queue.budget,
            parked.c.checked_us <= queue.now_us,
            fits,
            sa.true() if room.is_open else parked.c.reservation_id.is_not(None),
        )
        .order_by(parked.c.turn, parked.c.created_us, parked.c.parked_id)
        .limit(limit)
    )
    waiting = [
        Waiting(row.parked_id, row.amount, row.turn, row.created_us, row.reservation_id is not None)
        for row in rows
    ]
    return waiting, room


def past(connection: Connection, root: str, queue: Queue, limit: int) -> list[uuid.UUID]:
    """Return the next attempts of a queue that fit windows which have ended, oldest first.

    They go on in the window that admitted them, whatever is left of the open one. Of the oldest
    some; locks nothing.
    """
    known = levels_of(connection, root, [queue.budget])
    if queue.budget not in known:
        return []
    limit_amount, blocked = limits_in_force(known, queue.budget)[queue.budget]
    if blocked:
        return []
    total = most(limit_amount, known[queue.budget].hard_stop)
    held = (
        sa.select(
            parked.c.parked_id, parked.c.root, parked.c.budget, parked.c.window_us, parked.c.amount
        )
        .where(
            parked.c.root == root,
            parked.c.budget == queue.budget,
            parked.c.window_us.is_not(None),
            parked.c.window_us != (_open_window(known, queue.budget) or -1),
            parked.c.checked_us <= queue.now_us,
        )
        .order_by(parked.c.window_us, parked.c.created_us)
        .limit(PAST_SEEN * limit)
        .subquery()
    )
    found = connection.execute(
        sa.select(held.c.parked_id)
        .join(
            balances,
            sa.and_(
                balances.c.root == held.c.root,
                balances.c.budget == held.c.budget,
                balances.c.window_us == held.c.window_us,
            ),
        )
        .where(balances.c.root == root)
        .group_by(held.c.parked_id, held.c.amount)
        .having(sa.func.sum(balances.c.reserved + balances.c.spent) <= total - held.c.amount)
        .limit(limit)
    )
    return list(found.scalars())


def _kept(connection: Connection, root: str, budget: str) -> int:
    """Return what attempts that wait for budget, for this one or another, hold of one."""
    held = (
        sa.select(sa.func.coalesce(sa.func.sum(lines.c.reserved), 0))
        .join(
            parked,
            sa.and_(
                parked.c.root == lines.c.root, parked.c.reservation_id == lines.c.reservation_id
            ),
        )
        .where(parked.c.root == root, lines.c.root == root, lines.c.budget == budget)
    )
    return int(connection.execute(held).scalar_one())


def go_ahead(connection: Connection, root: str, parked_id: uuid.UUID, for_us: int) -> None:
    """Have nothing else admitted to a parked request's budget for a while. Locks its row.

    Whoever is admitting just now is not kept from it.
    """
    connection.execute(
        parked.update()
        .where(parked.c.root == root, parked.c.parked_id == parked_id)
        .values(ahead_us=now_us() + for_us)
    )


_SHOWN: tuple[Any, ...] = (
    parked.c.parked_id,
    parked.c.task_id,
    parked.c.task_name,
    parked.c.owner,
    parked.c.request_id,
    parked.c.budget,
    parked.c.reason,
    parked.c.amount,
    parked.c.reservation_id,
    parked.c.created_us,
    parked.c.deadline_us,
)


def listed(connection: Connection, root: str, limit: int, containing: str = "") -> list[Row]:
    """Return what is parked, budget by budget, in the order in which it is served.

    :param containing: only what has this in a name or an id, in whatever case.
    """
    where = [parked.c.root == root]
    if containing:
        names = ("budget", "owner", "task_name", "task_id", "request_id")
        found = (parked.c[name].icontains(containing, autoescape=True) for name in names)
        where.append(sa.or_(*found))
    return list(
        connection.execute(
            sa.select(*_SHOWN)
            .where(*where)
            .order_by(parked.c.budget, parked.c.turn, parked.c.created_us, parked.c.parked_id)
            .limit(limit)
        )
    )


def find(connection: Connection, root: str, some_id: str) -> Row | None:
    """Return what is parked by this id, or last of the task with it; none where nothing is."""
    known = [parked.c.task_id == some_id]
    with suppress(ValueError):
        known.append(parked.c.parked_id == uuid.UUID(some_id))
    found: Row | None = connection.execute(
        sa.select(*_SHOWN)
        .where(parked.c.root == root, sa.or_(*known))
        .order_by(parked.c.created_us.desc())
        .limit(1)
    ).first()
    return found


def by_budget(connection: Connection, root: str) -> list[Row]:
    """Return for each budget how much waits for it, what that needs, and since when the oldest."""
    return list(
        connection.execute(
            sa.select(
                parked.c.budget,
                sa.func.count().label("requests"),
                sa.func.min(parked.c.created_us).label("oldest_us"),
                now_us().label("now_us"),
            )
            .where(parked.c.root == root)
            .group_by(parked.c.budget)
            .order_by(parked.c.budget)
        )
    )
