"""The one place that moves a balance: locked in order, counted in 64 bits, told to the journal."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.errors import InvalidAmount
from celery_budget.store.journal import who
from celery_budget.store.schema import balances, journal, now_us

__all__ = ["WHOLE", "Key", "Move", "key_of", "lock_balances", "move"]

#: In place of a stripe: all of them.
WHOLE = -1


@dataclass(frozen=True, order=True)
class Key:
    """Which balance of a root; sorts as balances are locked.

    Python compares text by code points, which is PostgreSQL's ``COLLATE "C"``: one order for both.
    """

    budget: str
    window_us: int
    stripe: int = 0


@dataclass(frozen=True)
class Move:
    """What is added to a balance; either amount may be negative.

    :ivar reservation_id: whose move it is; none for an adjustment or a repair.
    """

    key: Key
    reserved: int
    spent: int
    reservation_id: uuid.UUID | None = None


def key_of(row: sa.Row[Any]) -> Key:
    """Return the balance that a row belongs to: a line, an entry of the journal, its own."""
    return Key(row.budget, row.window_us, row.stripe)


def where(root: str, key: Key) -> sa.ColumnElement[bool]:
    """Return the condition for one balance's row."""
    return sa.and_(
        balances.c.root == root,
        balances.c.budget == key.budget,
        balances.c.window_us == key.window_us,
        balances.c.stripe == key.stripe,
    )


def lock_balances(connection: Connection, root: str, keys: Iterable[Key]) -> None:
    """Lock balances in order, before it is decided by them whether something fits.

    On SQLite the transaction has the one write lock already.

    :param keys: with :data:`WHOLE` as its stripe all of a window's rows.
    """
    wanted = sorted(set(keys))
    if connection.dialect.name == "sqlite" or not wanted:
        return
    connection.execute(
        _LOCK_WHOLE if any(key.stripe == WHOLE for key in wanted) else _LOCK,
        {
            "root": root,
            "budgets": [key.budget for key in wanted],
            "windows": [key.window_us for key in wanted],
            "stripes": [key.stripe for key in wanted],
        },
    )


_LOCK = sa.text(
    "SELECT 1 FROM budget_balances b"
    " JOIN unnest(CAST(:budgets AS text[]), CAST(:windows AS bigint[]),"
    " CAST(:stripes AS smallint[])) AS k (budget, window_us, stripe)"
    " ON b.budget = k.budget AND b.window_us = k.window_us AND b.stripe = k.stripe"
    " WHERE b.root = :root"
    ' ORDER BY b.budget COLLATE "C", b.window_us, b.stripe FOR UPDATE OF b'
)


_LOCK_WHOLE = sa.text(
    "SELECT budget_take(:root, CAST(:budgets AS text[]), CAST(:windows AS bigint[]),"
    " (SELECT array_agg(nullif(k.stripe, -1) ORDER BY k.n)"
    " FROM unnest(CAST(:stripes AS smallint[])) WITH ORDINALITY AS k (stripe, n)),"
    " CAST(:windows AS bigint[]), false)"
)


def move(
    connection: Connection,
    root: str,
    moves: Sequence[Move],
    what: str,
    reason: str | None = None,
) -> None:
    """Make all of ``moves``, in their order; moves of nothing are left out.

    Locks the balances in order; the caller holds the rows of the reservations. On PostgreSQL one
    statement.

    :param what: what the journal says was done.
    :raises InvalidAmount: where a sum would leave 64 bits; nothing was changed.
    """
    real = [one for one in moves if one.reserved or one.spent]
    if not real:
        return
    if connection.dialect.name == "sqlite":
        _move_sqlite(connection, root, real, what, reason)
        return
    connection.execute(
        _MOVE,
        {
            "root": root,
            "budgets": [one.key.budget for one in real],
            "windows": [one.key.window_us for one in real],
            "stripes": [one.key.stripe for one in real],
            "reserved": [one.reserved for one in real],
            "spent": [one.spent for one in real],
            "reservations": [one.reservation_id for one in real],
            "what": what,
            "who": who(),
            "reason": reason,
        },
    )


_MOVE = sa.text(
    "SELECT budget_move(:root, CAST(:budgets AS text[]), CAST(:windows AS bigint[]),"
    " CAST(:stripes AS smallint[]), CAST(:reserved AS bigint[]), CAST(:spent AS bigint[]),"
    " :reservations, :what, :who, :reason)"
).bindparams(sa.bindparam("reservations", type_=postgresql.ARRAY(sa.Uuid)))


def _move_sqlite(
    connection: Connection, root: str, moves: Sequence[Move], what: str, reason: str | None
) -> None:
    keys = sorted({one.key for one in moves})
    of = sa.tuple_(balances.c.budget, balances.c.window_us, balances.c.stripe)
    rows = connection.execute(
        sa.select(balances).where(
            balances.c.root == root,
            of.in_([(key.budget, key.window_us, key.stripe) for key in keys]),
        )
    )
    now = {key_of(row): (int(row.reserved), int(row.spent), int(row.entries)) for row in rows}
    entries = []
    for one in moves:
        reserved, spent, entry = now[one.key]
        reserved, spent, entry = reserved + one.reserved, spent + one.spent, entry + 1
        now[one.key] = reserved, spent, entry
        entries.append(
            {
                "root": root,
                "budget": one.key.budget,
                "window_us": one.key.window_us,
                "stripe": one.key.stripe,
                "entry": entry,
                "what": what,
                "who": who(),
                "reservation_id": one.reservation_id,
                "reserved": one.reserved,
                "spent": one.spent,
                "reserved_after": reserved,
                "spent_after": spent,
                "reason": reason,
            }
        )
    for key, (reserved, spent, _) in now.items():
        if reserved + spent > MAX_AMOUNT:
            raise InvalidAmount(
                f"budget {key.budget!r} cannot count {reserved + spent}; a balance is at most "
                "2^63-1"
                "; use a larger unit"
            )
    connection.execute(
        balances.update().where(
            balances.c.root == root,
            balances.c.budget == sa.bindparam("of_budget"),
            balances.c.window_us == sa.bindparam("of_window"),
            balances.c.stripe == sa.bindparam("of_stripe"),
        ),
        [
            {
                "of_budget": key.budget,
                "of_window": key.window_us,
                "of_stripe": key.stripe,
                "reserved": reserved,
                "spent": spent,
                "entries": entry,
            }
            for key, (reserved, spent, entry) in now.items()
        ],
    )
    connection.execute(journal.insert().values(at_us=now_us()), entries)
