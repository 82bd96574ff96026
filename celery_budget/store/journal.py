"""The journal: every change of every balance, numbered without a gap for each of them.

Entries are only ever added, by the move they tell of and in its statement. Old ones can be folded:
a checkpoint stands for all entries up to its number.
"""

from __future__ import annotations

import functools
import getpass
import socket
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.schema import balances, instant, journal

__all__ = [
    "ABSOLUTE",
    "CHECKPOINT",
    "REPAIR",
    "entries",
    "fold",
    "foldable",
    "of_balance",
    "reads",
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
) -> list[sa.Row[Any]]:
    """Return the last ``limit`` entries of a budget, the newest first. Locks nothing.

    :param window_us: of that window only.
    """
    where = [journal.c.root == root, journal.c.budget == budget]
    if window_us is not None:
        where.append(journal.c.window_us == window_us)
    return list(
        connection.execute(
            sa.select(journal)
            .where(*where)
            .order_by(journal.c.window_us.desc(), journal.c.stripe, journal.c.entry.desc())
            .limit(limit)
        )
    )


def foldable(connection: Connection, root: str, age_us: int, limit: int) -> list[sa.Row[Any]]:
    """Return balances that have more than one entry older than ``age_us``. Locks nothing."""
    return list(
        connection.execute(
            sa.select(journal.c.budget, journal.c.window_us, journal.c.stripe)
            .where(journal.c.root == root, journal.c.at_us < instant() - age_us)
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
    if last is None or reads(connection, old) != (
        last.reserved_after,
        last.spent_after,
        last.entry,
    ):
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


def of_balance(root: str, budget: str, window_us: int, stripe: int) -> sa.ColumnElement[bool]:
    """Return the condition for the entries of one balance."""
    return sa.and_(
        journal.c.root == root,
        journal.c.budget == budget,
        journal.c.window_us == window_us,
        journal.c.stripe == stripe,
    )


def reads(connection: Connection, some: sa.ColumnElement[bool]) -> tuple[int, int, int]:
    """Return what entries lead to: reserved, spent, and the number of the last one.

    That number is another one where an entry is missing.

    :param some: the condition for entries of one balance, up to any of them.
    """
    base = connection.execute(
        sa.select(journal)
        .where(some, journal.c.what.in_(ABSOLUTE))
        .order_by(journal.c.entry.desc())
        .limit(1)
    ).first()
    first, reserved, spent = (
        (0, 0, 0) if base is None else (base.entry, base.reserved_after, base.spent_after)
    )
    since = connection.execute(
        sa.select(
            sa.func.coalesce(sa.func.sum(journal.c.reserved), 0),
            sa.func.coalesce(sa.func.sum(journal.c.spent), 0),
            sa.func.count(),
        ).where(some, journal.c.entry > first)
    ).one()
    return reserved + int(since[0]), spent + int(since[1]), first + int(since[2])
