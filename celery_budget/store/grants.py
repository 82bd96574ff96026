"""Grants, which raise a limit for a time, and adjustments, which correct what is spent.

Each under a key of its own: the same one again changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT, check_amount
from celery_budget.core.budgets import check_own_name, check_text
from celery_budget.core.draws import Level
from celery_budget.core.periods import FOREVER_US
from celery_budget.errors import InvalidAmount, InvalidBudget, KeyConflict, UnknownBudget
from celery_budget.store import levels
from celery_budget.store.balances import WHOLE, Key, Move, lock_balances, move
from celery_budget.store.insert import insert_new
from celery_budget.store.journal import who
from celery_budget.store.schema import adjustments, grants, now_us
from celery_budget.store.unready import Unready
from celery_budget.store.windows import open_window, read_now

__all__ = ["adjust", "grant", "grants_of"]


def grant(
    connection: Connection,
    root: str,
    key: str,
    budget: str,
    amount: int,
    until_us: int | None,
    reason: str | None,
    lasts_us: int | None = None,
) -> bool:
    """Raise the limit of ``budget`` by ``amount`` until ``until_us``; false for a repeat.

    It counts in every window that is open meanwhile, and where the limit is none changes nothing.
    Locks nothing but its key.

    :param until_us: in microseconds since the epoch; none for ever.
    :param lasts_us: instead of that, for how long from now on; a repeat is one of the same length.
    :raises InvalidAmount: for what is no amount, or 0, and where all that is granted would be more
        than 2^63-1.
    :raises InvalidName: where the reason is no text of 1 to 255 characters.
    :raises InvalidBudget: for an end that has passed.
    :raises UnknownBudget: where there is no such budget.
    :raises KeyConflict: where the key is that of another grant.
    """
    check_text(key, "a grant's key")
    if reason is not None:
        check_text(reason, "the reason of a grant")
    if check_amount(amount, "a grant") == 0:
        raise InvalidAmount("a grant of 0 grants nothing; give an integer from 1 to 2^63-1")
    _level(connection, root, budget)
    existing, now = _row(connection, grants, root, key), read_now(connection)
    if lasts_us is not None:
        until_us = lasts_us + (now if existing is None else existing.created_us)
    ends = FOREVER_US if until_us is None else check_amount(until_us, "the end of a grant")
    same = {"budget": budget, "amount": amount, "until_us": ends}
    if existing is None:
        if ends <= now:
            raise InvalidBudget("the end of the grant has passed already; give a later one")
        _check_sum(connection, root, budget, amount, now)
        written = insert_new(
            connection,
            grants,
            root=root,
            key=key,
            **same,
            reason=reason,
            who=who(),
            created_us=now,
        )
        if written:
            return True
        existing = _row(connection, grants, root, key)
        if existing is not None and lasts_us is not None:
            same["until_us"] = existing.created_us + lasts_us
    _check_same(existing, same, key, "grant")
    return False


def adjust(
    connection: Connection, root: str, key: str, budget: str, amount: int, reason: str
) -> bool:
    """Add ``amount``, which may be negative, to what ``budget`` has spent; false for a repeat.

    It counts in the window that is open now. Locks its key, then that balance.

    :raises InvalidAmount: for no integer, for 0, and where less than nothing would be spent.
    :raises InvalidName: where the reason is no text of 1 to 255 characters.
    :raises UnknownBudget: where there is no such budget.
    :raises KeyConflict: where the key is that of another adjustment.
    :raises Unready: where the window has to be opened before.
    """
    check_text(key, "an adjustment's key")
    check_text(reason, "the reason of an adjustment")
    if type(amount) is not int or not 0 < abs(amount) <= MAX_AMOUNT:
        raise InvalidAmount(
            f"an adjustment of {budget!r} is an integer from 1 to 2^63-1, added or taken away, not "
            f"{amount!r}; give one"
        )
    window_us = _level(connection, root, budget).window_us
    same = {"budget": budget, "amount": amount}
    existing = _row(connection, adjustments, root, key)
    if existing is not None:
        _check_same(existing, same, key, "adjustment")
        return False
    if window_us is None:
        raise Unready(f"a window of {budget!r}", partial(open_window, root=root, name=budget))
    written = insert_new(
        connection,
        adjustments,
        root=root,
        key=key,
        **same,
        window_us=window_us,
        stripe=0,
        reason=reason,
        who=who(),
        created_us=now_us(),
    )
    if not written:
        _check_same(_row(connection, adjustments, root, key), same, key, "adjustment")
        return False
    lock_balances(connection, root, [Key(budget, window_us, WHOLE)])
    level = levels.levels_of(connection, root, [budget], {budget: window_us})[budget]
    if level.spent + amount < 0:
        raise InvalidAmount(
            f"budget {budget!r} has spent {level.spent} in its present window; {-amount} cannot "
            "be taken from that"
            "; take less"
        )
    move(connection, root, [Move(Key(budget, window_us), 0, amount)], "adjust", reason)
    return True


def grants_of(connection: Connection, root: str, budget: str) -> list[sa.Row[Any]]:
    """Return the grants of a budget, the last to end first. Locks nothing."""
    return list(
        connection.execute(
            sa.select(grants)
            .where(grants.c.root == root, grants.c.budget == budget)
            .order_by(grants.c.until_us.desc(), grants.c.key)
        )
    )


def _check_sum(connection: Connection, root: str, budget: str, amount: int, now: int) -> None:
    """Keep what is granted within what SQLite can add up (PostgreSQL has wider sums)."""
    in_force = (one.amount for one in grants_of(connection, root, budget) if one.until_us > now)
    granted = sum(in_force)
    if granted + amount > MAX_AMOUNT:
        raise InvalidAmount(
            f"budget {budget!r} has been granted {granted} already; {amount} more would be more "
            "than 2^63-1"
            "; grant less"
        )


def _level(connection: Connection, root: str, budget: str) -> Level:
    """Return how a budget stands.

    :raises UnknownBudget: where there is none.
    """
    level = levels.levels_of(connection, root, [check_own_name(budget)]).get(budget)
    if level is None:
        raise UnknownBudget(budget)
    return level


def _row(connection: Connection, table: sa.Table, root: str, key: str) -> sa.Row[Any] | None:
    return connection.execute(
        sa.select(table).where(table.c.root == root, table.c.key == key)
    ).first()


def _check_same(existing: sa.Row[Any] | None, same: dict[str, Any], key: str, what: str) -> None:
    if existing is None or any(existing._mapping[name] != value for name, value in same.items()):
        raise KeyConflict(key, what)
