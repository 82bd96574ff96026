"""The journal: every change of every balance, numbered without a gap for each of them.

Entries are only ever added, by the move they tell of and in its statement. Old ones can be folded:
a checkpoint stands for all entries up to its number.
"""

from __future__ import annotations

import functools
import getpass
import socket
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.schema import balances, exact_sum, instant, journal

__all__ = [
    "ABSOLUTE",
    "CHECKPOINT",
    "REPAIR",
    "entries",
    "fold",
    "foldable",
    "of_balance",
    "reads",
    "told",
    "who",
]

#: The kind of an entry that others were folded into.
CHECKPOINT = "checkpoint"
#: The kind of an entry that corrects a balance.
REPAIR = "repair"
#: Entries that stand for all before them: a journal is read from the last of these.
ABSOLUTE = (CHECKPOINT, REPAIR)


@functools.lru_cache(maxsize=1)
def who() -> str:
    """Return who changes balances from here: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # No such user is known, as in a container that runs under a bare number.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def entries(
    connection: Connection, root: str, budget: str, limit: int, window_us: int | None = None
) -> list[Any]:
    """Return the last ``limit`` entries of a budget, the newest first. Locks nothing.

    Of a window with several rows they are told as one journal: numbered in the order of their
    times, with what the whole window was then.

    :param window_us: of that window only.
    """
    where = [journal.c.root == root, journal.c.budget == budget]
    if window_us is not None:
        where.append(journal.c.window_us == window_us)
    found: list[Any] = []
    before: list[sa.ColumnElement[bool]] = []
    while len(found) < limit:
        rows = connection.execute(
            sa.select(journal)
            .where(*where, *before)
            # As the key is, backwards: the index gives them one by one.
            .order_by(journal.c.window_us.desc(), journal.c.stripe.desc(), journal.c.entry.desc())
            .limit(limit - len(found))
        ).all()
        several = next((row.window_us for row in rows if row.stripe > 0), None)
        found += (row for row in rows if several is None or row.window_us > several)
        if several is None:
            break
        found += _as_one(connection, root, budget, several, limit - len(found))
        before = [journal.c.window_us < several]
    return found


def _as_one(
    connection: Connection, root: str, budget: str, window_us: int, limit: int
) -> list[SimpleNamespace]:
    """Return the last entries of a window with several rows, as if it had one."""
    mine = sa.and_(
        balances.c.root == root, balances.c.budget == budget, balances.c.window_us == window_us
    )
    now = connection.execute(
        sa.select(
            exact_sum(balances.c.reserved).label("reserved"),
            exact_sum(balances.c.spent).label("spent"),
            exact_sum(balances.c.entries).label("entries"),
        ).where(mine)
    ).one()
    last = (
        sa.select(journal)
        .where(of_balance(root, budget, window_us, balances.c.stripe))
        .order_by(journal.c.entry.desc())
        .limit(limit)
        .correlate(balances)
        .lateral("last")
    )
    rows = connection.execute(
        sa.select(last)
        .select_from(balances)
        .join(last, sa.true())
        .where(mine)
        .order_by(last.c.at_us.desc(), last.c.stripe.desc(), last.c.entry.desc())
        .limit(limit)
    )
    reserved, spent, entry = int(now.reserved), int(now.spent), int(now.entries)
    told = []
    for row in rows:
        columns = dict(row._mapping)
        columns |= {"entry": entry, "reserved_after": reserved, "spent_after": spent, "stripe": 0}
        told.append(SimpleNamespace(**columns))
        reserved, spent, entry = reserved - row.reserved, spent - row.spent, entry - 1
    return told


def foldable(
    connection: Connection,
    root: str,
    age_us: int,
    limit: int,
    after: tuple[str, int, int] | None = None,
) -> list[sa.Row[Any]]:
    """Return balances that have more than one entry older than ``age_us``. Locks nothing.

    :param after: the last of those that are known already (budget, window, stripe).
    """
    where = [journal.c.root == root, journal.c.at_us < instant() - age_us]
    if after is not None:
        key = sa.tuple_(journal.c.budget, journal.c.window_us, journal.c.stripe)
        where.append(key > sa.tuple_(*map(sa.literal, after)))
    return list(
        connection.execute(
            sa.select(journal.c.budget, journal.c.window_us, journal.c.stripe)
            .where(*where)
            .group_by(journal.c.budget, journal.c.window_us, journal.c.stripe)
            .having(sa.func.count() > 1)
            .order_by(journal.c.budget, journal.c.window_us, journal.c.stripe)
            .limit(limit)
        )
    )


def fold(
    connection: Connection, root: str, budget: str, window_us: int, stripe: int, age_us: int
) -> int:
    """Fold a balance's entries older than ``age_us`` into one checkpoint; return how many went.

    Locks the balance, so that of two the second finds nothing left. An entry younger than that
    stays, and so does everything behind it; entries that do not add up stay as well.
    """
    connection.execute(
        sa.select(balances.c.entries)
        .where(
            balances.c.root == root,
            balances.c.budget == budget,
            balances.c.window_us == window_us,
            balances.c.stripe == stripe,
        )
        .with_for_update()
    )
    mine = of_balance(root, budget, window_us, stripe)
    young = sa.select(sa.func.min(journal.c.entry)).where(
        mine, journal.c.at_us >= instant() - age_us
    )
    first_young = connection.execute(young).scalar()
    old = mine if first_young is None else sa.and_(mine, journal.c.entry < first_young)
    last = connection.execute(
        sa.select(journal).where(old).order_by(journal.c.entry.desc()).limit(1)
    ).first()
    if last is None or reads(connection, old) is None:
        # Folding would hide what reconciliation has to show.
        return 0
    gone = connection.execute(
        journal.delete().where(old, journal.c.entry < last.entry).returning(journal.c.entry)
    ).all()
    if gone:
        connection.execute(
            journal.update()
            .where(mine, journal.c.entry == last.entry)
            .values(
                what=CHECKPOINT,
                who=who(),
                reservation_id=None,
                # What all of them added up to is what the balance was after the last.
                reserved=last.reserved_after,
                spent=last.spent_after,
                reason=f"{len(gone) + 1} entries",
            )
        )
    return len(gone)


def of_balance(root: str, budget: str, window_us: int, stripe: Any) -> sa.ColumnElement[bool]:
    """Return the condition for the entries of one balance."""
    return sa.and_(
        journal.c.root == root,
        journal.c.budget == budget,
        journal.c.window_us == window_us,
        journal.c.stripe == stripe,
    )


def told(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Select what the entries of each balance lead to.

    ``reserved`` and ``spent`` after the last one, its number in ``entries``; how many entries are
    ``missing`` before others, and how many are ``changed``: do not follow from the one before. All
    that is read from the last checkpoint or repair on, which stand for all before them.

    :param where: the condition for the entries; of one balance all, or the first ones.
    """
    names = ("budget", "window_us", "stripe")
    of_balance: dict[str, Any] = {"partition_by": [journal.c[name] for name in names]}
    in_order: dict[str, Any] = {**of_balance, "order_by": journal.c.entry}

    def before(column: Any) -> sa.ColumnElement[Any]:
        return sa.func.coalesce(sa.func.lag(column).over(**in_order), 0)

    base = sa.func.coalesce(
        sa.func.max(sa.case((journal.c.what.in_(ABSOLUTE), journal.c.entry))).over(**of_balance), 0
    )
    last = sa.func.max(journal.c.entry).over(**of_balance)
    each = (
        sa.select(
            *(journal.c[name] for name in names),
            journal.c.entry,
            journal.c.reserved_after,
            journal.c.spent_after,
            (journal.c.entry == last).label("is_last"),
            (journal.c.entry > base).label("counts"),
            (journal.c.entry - before(journal.c.entry) - 1).label("gap"),
            # Differences of what was: a sum might leave 64 bits where an entry was changed.
            sa.or_(
                journal.c.reserved_after - before(journal.c.reserved_after) != journal.c.reserved,
                journal.c.spent_after - before(journal.c.spent_after) != journal.c.spent,
            ).label("differs"),
        )
        .where(*where)
        .subquery()
    )

    def at_last(column: Any) -> sa.ColumnElement[Any]:
        return sa.func.max(sa.case((each.c.is_last, column)))

    def count(condition: Any) -> sa.ColumnElement[int]:
        return sa.func.count(sa.case((sa.and_(each.c.counts, condition), 1)))

    key = [each.c[name] for name in names]
    return sa.select(
        *key,
        at_last(each.c.entry).label("entries"),
        at_last(each.c.reserved_after).label("reserved"),
        at_last(each.c.spent_after).label("spent"),
        count(each.c.gap != 0).label("missing"),
        count(sa.and_(each.c.gap == 0, each.c.differs)).label("changed"),
    ).group_by(*key)


def reads(connection: Connection, some: sa.ColumnElement[bool]) -> tuple[int, int, int] | None:
    """Return what entries lead to: reserved, spent, and the number of the last one.

    None where they lead nowhere: one is missing, or was changed.

    :param some: the condition for entries of one balance, up to any of them.
    """
    row = connection.execute(told(some)).first()
    if row is None:
        return 0, 0, 0
    return None if row.missing or row.changed else (row.reserved, row.spent, row.entries)
