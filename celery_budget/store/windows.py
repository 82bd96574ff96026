"""Windows: one row for each budget and stretch of time, made ahead or when first drawn on.

The windows of a budget follow one another without overlap: another period moves the end of the one
that is open.
A window is made in a transaction of its own, never in one that goes on: whoever comes second waits
for that short one, and not for a caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from celery_budget.core.periods import Period
from celery_budget.errors import InvalidPeriod
from celery_budget.events import Logger
from celery_budget.store.balances import WHOLE, Key, lock_balances
from celery_budget.store.insert import insert_new
from celery_budget.store.schema import adjustments, balances, budgets, instant, lines, now_us

__all__ = [
    "Gone",
    "ahead",
    "insert_window",
    "open_window",
    "period_of",
    "prune",
    "read_now",
    "restore_window",
    "retime",
    "rows_for",
    "spread",
]

logger = Logger(__name__)


#: The bound that shares add up to while they add up to none.
UNSHARED = -1
#: What a row of a window has at first that is spread over several.
_EMPTY = {
    "reserved": 0,
    "spent": 0,
    "entries": 0,
    "share": 0,
    "basis": UNSHARED,
    "waits": 0,
}

#: How long after a window's end an admission may still go on that began in it.
LATE_US = 3_600_000_000


def read_now(connection: Connection) -> int:
    """Return the database's clock, in microseconds since the epoch."""
    return int(connection.execute(sa.select(now_us())).scalar_one())


def period_of(row: Any) -> Period:
    """Return the period of a budget's row."""
    return Period(row.period, row.timezone, row.anchor_day)


def open_window(connection: Connection, root: str, name: str) -> None:
    """Make the window of budget ``name`` that is open now, unless it is there.

    One that is there and lacks rows is given them. Locks the budget's row, so that it is neither
    closed nor given another period meanwhile. Of two at once, whose hosts may know time zones
    differently, the second waits for the first to commit, and finds its row.
    """
    row = connection.execute(
        sa.select(budgets)
        .where(budgets.c.root == root, budgets.c.name == name)
        .with_for_update(key_share=True)
    ).first()
    if row is None:
        return
    now = read_now(connection)
    window = period_of(row).window(now)
    last = connection.execute(
        sa.select(balances.c.window_us, balances.c.end_us)
        .where(balances.c.root == root, balances.c.budget == name, balances.c.window_us <= now)
        .order_by(balances.c.window_us.desc())
        .limit(1)
    ).first()
    last_end = 0 if last is None else last.end_us
    next_start = _begins_after(connection, root, name, now)
    if last is not None and last_end > now:
        _complete(connection, root, name, last.window_us, last_end, row.spread)
    else:
        # Rows that are there stay as they are: those of another period, or made by a host whose
        # time zones are of another version.
        insert_window(
            connection,
            root,
            name,
            max(window.start_us, last_end),
            min(window.end_us, next_start or window.end_us),
            row.spread,
        )


def _begins_after(connection: Connection, root: str, name: str, at_us: int) -> int | None:
    """Return when the first window of ``name`` begins that does so after ``at_us``."""
    return connection.execute(
        sa.select(sa.func.min(balances.c.window_us)).where(
            balances.c.root == root, balances.c.budget == name, balances.c.window_us > at_us
        )
    ).scalar()


def rows_for(connection: Connection, stripes: int) -> int:
    """Return over how many rows a window is spread that is to have ``stripes``.

    On SQLite one transaction writes at a time, and several rows are of no use.
    """
    return stripes if connection.dialect.name == "postgresql" else 1


def insert_window(
    connection: Connection, root: str, name: str, start_us: int, end_us: int, rows: int = 1
) -> bool:
    """Insert a window of ``name`` with nothing in it; false where it is there already.

    The caller holds the budget's row, or has just made it.

    :param rows: over how many rows it is spread, of which none admits by itself before all were
        locked together.
    """
    shared = {"share": 0, "basis": UNSHARED} if rows > 1 else {}
    made = insert_new(
        connection,
        balances,
        root=root,
        budget=name,
        window_us=start_us,
        stripe=0,
        reserved=0,
        spent=0,
        end_us=end_us,
        entries=0,
        **shared,
    )
    if made and rows > 1:
        _add_rows(connection, root, name, rows, balances.c.window_us == start_us)
    return made


def _complete(
    connection: Connection, root: str, name: str, start_us: int, end_us: int, rows: int
) -> None:
    """Insert the rows that a window of ``name`` lacks, if any, with nothing in them.

    Where it has several the next admission shares what is left anew. Locks those that are there;
    the caller holds the budget's row.
    """
    window = sa.and_(
        balances.c.root == root, balances.c.budget == name, balances.c.window_us == start_us
    )
    there = connection.execute(
        sa.select(sa.func.count()).select_from(balances).where(window, balances.c.stripe < rows)
    ).scalar_one()
    if there >= rows:
        return
    lock_balances(connection, root, [Key(name, start_us, WHOLE)])
    insert_window(connection, root, name, start_us, end_us, rows)
    if rows > 1:
        _add_rows(connection, root, name, rows, balances.c.window_us == start_us)
        connection.execute(
            balances.update().where(window, balances.c.share.is_(None)).values(share=0)
        )
        connection.execute(balances.update().where(window).values(basis=UNSHARED))


def _add_rows(
    connection: Connection, root: str, name: str, rows: int, which: sa.ColumnElement[bool]
) -> None:
    """Add the rows that windows lack. The caller holds those that are there."""
    connection.execute(
        postgresql.insert(balances)
        .from_select(
            ["root", "budget", "window_us", "stripe", "end_us", *_EMPTY],
            sa.select(
                balances.c.root,
                balances.c.budget,
                balances.c.window_us,
                sa.func.generate_series(1, rows - 1),
                balances.c.end_us,
                *map(sa.literal, _EMPTY.values()),
            ).where(
                balances.c.root == root,
                balances.c.budget == name,
                balances.c.stripe == 0,
                which,
            ),
        )
        .on_conflict_do_nothing()
    )


def spread(connection: Connection, root: str, name: str, stripes: int) -> None:
    """Spread the windows of ``name`` that are open or to come over so many rows.

    What a row holds stays with it: one that is not drawn on any more goes when nothing was ever
    counted in it. The next admission locks all of them, and shares what is left.
    The caller holds the budget's row and its balances
    (:func:`~celery_budget.store.budgets.lock_budgets`).
    """
    rows = rows_for(connection, stripes)
    mine = sa.and_(balances.c.root == root, balances.c.budget == name)
    changed = connection.execute(
        budgets.update()
        .where(budgets.c.root == root, budgets.c.name == name, budgets.c.spread != rows)
        .values(spread=rows)
    )
    if not changed.rowcount:
        return
    lasting = balances.c.end_us > instant()
    if rows > 1:
        _add_rows(connection, root, name, rows, lasting)
    connection.execute(
        balances.delete().where(
            mine,
            lasting,
            balances.c.stripe >= rows,
            balances.c.entries == 0,
            ~sa.exists(sa.text("1")).where(
                lines.c.root == root,
                lines.c.budget == name,
                lines.c.window_us == balances.c.window_us,
                lines.c.stripe == balances.c.stripe,
            ),
        )
    )
    several = _any_row(root, balances, lambda row: row.c.stripe > 0)
    for shared, condition in (((0, UNSHARED), several), ((None, None), ~several)):
        connection.execute(
            balances.update()
            .where(mine, lasting, condition)
            .values(share=shared[0], basis=shared[1], waits=0)
        )


def restore_window(
    connection: Connection, root: str, name: str, start_us: int, stripe: int = 0
) -> None:
    """Insert anew what was lost of a window of ``name``, with nothing in it, with all its rows.

    It ends where its period does, or the next one begins. Locks the budget's row, shared, then
    those of the window.

    :param stripe: the last row that is known to have been there.
    """
    row = connection.execute(
        sa.select(budgets)
        .where(budgets.c.root == root, budgets.c.name == name)
        .with_for_update(read=True)
    ).first()
    following = _begins_after(connection, root, name, start_us)
    end_us = start_us if row is None else period_of(row).window(start_us).end_us
    rows = max(stripe + 1, 1 if row is None else row.spread)
    _complete(connection, root, name, start_us, min(end_us, following or end_us), rows)


def retime(connection: Connection, root: str, name: str, period: Period) -> None:
    """Let the window of ``name`` that is open end where one of ``period`` would.

    What was spent in it stays: nobody gets a new allowance by another period, time zone or anchor
    day. The caller holds the budget's row and its balances. What was made ahead goes, unless it was
    drawn on by a clock that was set back; then the window ends where that begins.
    """
    mine = sa.and_(balances.c.root == root, balances.c.budget == name)
    now = read_now(connection)
    ahead_of_now = sa.select(balances.c.window_us).where(mine, balances.c.window_us > now)
    for window_us in connection.execute(ahead_of_now).scalars().all():
        _prune_one(connection, root, name, window_us)
    following = _begins_after(connection, root, name, now)
    ends = period.window(now).end_us
    connection.execute(
        balances.update()
        .where(mine, balances.c.window_us <= now, balances.c.end_us > now)
        .values(end_us=ends if following is None else min(ends, following))
    )


def ahead(connection: Connection, root: str, horizon_us: int, limit: int) -> int:
    """Make the windows that follow those in use which end within ``horizon_us``; return how many.

    Locks the budgets' rows and passes by those that are being changed. Looks again behind the
    locks: one may have been given another period after the first look.
    """
    ending = _ending(root, horizon_us)
    found = connection.execute(
        ending.limit(limit).with_for_update(of=budgets, key_share=True, skip_locked=True)
    ).all()
    if not found:
        return 0
    made = 0
    locked = ending.where(budgets.c.name.in_([row.name for row in found]))
    for row in sorted(connection.execute(locked), key=lambda row: str(row.name)):
        try:
            window = period_of(row).window(row.end_us)
        except InvalidPeriod as error:
            # This host's time zones lack it; the others' budgets do not wait for that.
            logger.event("window.unmade", name=row.name, error=error)
            continue
        made += insert_window(connection, root, row.name, row.end_us, window.end_us, row.spread)
    return made


def _ending(root: str, horizon_us: int) -> sa.Select[Any]:
    """Select budgets and the ends of their windows in use that end soon, none following."""
    now = instant()
    following = balances.alias("following")
    return (
        sa.select(
            budgets.c.name,
            budgets.c.period,
            budgets.c.timezone,
            budgets.c.anchor_day,
            budgets.c.spread,
            balances.c.end_us,
        )
        .join(
            balances,
            sa.and_(balances.c.root == budgets.c.root, balances.c.budget == budgets.c.name),
        )
        .where(
            budgets.c.root == root,
            budgets.c.state == "open",
            balances.c.root == root,
            balances.c.stripe == 0,
            balances.c.end_us > now,
            balances.c.end_us <= now + horizon_us,
            sa.or_(
                _is_used(balances),
                sa.and_(balances.c.share.is_not(None), _any_row(root, balances, _is_used)),
            ),
            ~sa.exists(sa.text("1")).where(
                following.c.root == root,
                following.c.budget == balances.c.budget,
                following.c.window_us >= balances.c.end_us,
            ),
        )
    )


#: A closed window: where it ended, and its key; what comes after it sorts later.
Gone = tuple[int, str, int]


def prune(
    connection: Connection, root: str, after: Gone, age_us: int, limit: int
) -> tuple[int, Gone | None]:
    """Delete windows that ended more than ``age_us`` ago and that nobody drew on.

    Looks at ``limit`` of them after ``after``, in the order in which they ended; returns how many
    it deleted and how far it came, none where it came to the end. Locks what it deletes.
    """
    key = sa.tuple_(balances.c.end_us, balances.c.budget, balances.c.window_us)
    rows = connection.execute(
        sa.select(
            balances.c.end_us,
            balances.c.budget,
            balances.c.window_us,
            (~_is_drawn_on(root, balances)).label("untouched"),
        )
        .where(
            balances.c.root == root,
            balances.c.stripe == 0,
            balances.c.end_us >= after[0],
            balances.c.end_us <= instant() - age_us,
            key > sa.tuple_(*map(sa.literal, after)),
        )
        .order_by(balances.c.end_us, balances.c.budget, balances.c.window_us)
        .limit(limit)
    ).all()
    deleted = 0
    for row in rows:
        if row.untouched:
            deleted += _prune_one(connection, root, row.budget, row.window_us)
    last = (rows[-1].end_us, rows[-1].budget, rows[-1].window_us) if rows else None
    return deleted, last


def _is_used(row: sa.FromClause) -> sa.ColumnElement[bool]:
    return sa.or_(row.c.reserved > 0, row.c.spent > 0)


def _is_drawn_on(root: str, of: sa.Table) -> sa.ColumnElement[bool]:
    """Tell whether anything was ever counted in a window, in whichever of its rows."""
    return _any_row(root, of, lambda row: row.c.entries > 0)


def _any_row(
    root: str, of: sa.Table, holds: Callable[[sa.FromClause], sa.ColumnElement[bool]]
) -> sa.ColumnElement[bool]:
    """Tell whether something holds of any row of a window."""
    row = balances.alias("row")
    return sa.exists(sa.text("1")).where(
        row.c.root == root,
        row.c.budget == of.c.budget,
        row.c.window_us == of.c.window_us,
        holds(row),
    )


def _prune_one(connection: Connection, root: str, name: str, window_us: int) -> int:
    def of_window(table: sa.Table) -> sa.ColumnElement[bool]:
        return sa.and_(table.c.root == root, table.c.budget == name, table.c.window_us == window_us)

    gone = connection.execute(
        balances.delete()
        .where(
            of_window(balances),
            ~_is_drawn_on(root, balances),
            balances.c.entries == 0,
            balances.c.reserved == 0,
            balances.c.spent == 0,
            ~sa.exists(sa.text("1")).where(of_window(lines)),
            ~sa.exists(sa.text("1")).where(of_window(adjustments)),
        )
        .returning(balances.c.stripe)
    )
    return sum(row.stripe == 0 for row in gone)
