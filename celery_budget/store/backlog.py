"""How many messages wait to be published: the bound of the outbox, looked at by admissions.

Those that lanes hold back among them.
"""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.drivers import is_lent
from celery_budget.store.insert import insert_new
from celery_budget.store.schema import backlog, now_us, outbox
from celery_budget.store.unready import Unready

__all__ = ["seen", "uncounted", "waiting"]

#: For how long a count is good.
FRESH_US = 2_000_000


def waiting(connection: Connection, root: str, bound: int) -> int:
    """Return how many messages wait to be published, as last counted; ``bound`` + 1 for more.

    One call in two seconds counts them, the others read what it found. Locks the root's row of the
    count, only to count, and never waits for it. In a transaction that is lent to us, which may be
    open for long, the row is left alone on PostgreSQL: nobody else could count meanwhile. There few
    are counted each time, and many in a transaction of its own.

    :raises Unready: where nothing was ever counted, or many have to be counted anew.
    """
    if connection.dialect.name == "postgresql":
        counted = connection.execute(
            sa.select(
                sa.func.budget_backlog(
                    root, sa.cast(bound, sa.BigInteger), now_us(), is_lent(connection)
                )
            )
        ).scalar()
        if counted is None:
            raise uncounted(root, bound)
        return int(counted)
    row = connection.execute(
        sa.select(
            backlog.c.messages, (backlog.c.counted_us > now_us() - FRESH_US).label("fresh")
        ).where(backlog.c.root == root)
    ).first()
    if row is None:
        raise uncounted(root, bound)
    if row.fresh:
        return int(row.messages)
    messages = _counted(connection, root, bound)
    connection.execute(
        backlog.update()
        .where(backlog.c.root == root)
        .values(messages=messages, counted_us=now_us())
    )
    return messages


def _count_anew(connection: Connection, root: str, bound: int) -> None:
    """Note how many messages wait, unless that was done just now, by one that is waited for."""
    mine = backlog.c.root == root
    insert_new(connection, backlog, root=root, messages=0, counted_us=0)
    fresh = sa.select(backlog.c.counted_us > now_us() - FRESH_US).where(mine).with_for_update()
    if not connection.execute(fresh).scalar_one():
        connection.execute(
            backlog.update()
            .where(mine)
            .values(messages=_counted(connection, root, bound), counted_us=now_us())
        )


def seen(connection: Connection, root: str, bound: int) -> int:
    """Return how many messages wait to be published, as :func:`waiting`, without noting a count.

    Counts only where the last count was full and is no longer good. Locks nothing.
    """
    row = connection.execute(
        sa.select(
            backlog.c.messages, (backlog.c.counted_us > now_us() - FRESH_US).label("fresh")
        ).where(backlog.c.root == root)
    ).first()
    if row is None or row.fresh or row.messages < bound:
        return 0 if row is None else int(row.messages)
    return _counted(connection, root, bound)


def _counted(connection: Connection, root: str, bound: int) -> int:
    some = sa.select(outbox.c.outbox_id).where(
        outbox.c.root == root, outbox.c.state.in_(("due", "held"))
    )
    messages: int = connection.execute(
        sa.select(sa.func.count()).select_from(some.limit(bound + 1).subquery())
    ).scalar_one()
    return messages


def uncounted(root: str, bound: int) -> Unready:
    """Return what is raised where the root has no count that is good; one is made."""
    return Unready(
        f"the count of the outbox of {root!r}", partial(_count_anew, root=root, bound=bound)
    )
