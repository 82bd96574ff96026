"""Budgets whose counters are spread over several rows, on PostgreSQL: which row is drawn on.

The stored functions (``migrations/versions/whole_8.sql``) say how rows share a bound. What is done
for one request inside ``budget_reserve`` is done here for a batch of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.draws import Level, chain
from celery_budget.core.reservations import Line
from celery_budget.store.balances import Key

__all__ = ["Held", "demand", "gather", "grow", "hold", "one_of", "pick_of"]

#: The stripe that was locked of each budget; none where all of them were.
Held = dict[str, int | None]


def pick_of(some_id: bytes) -> int:
    """Return which stripe an id begins with; any number of them divides it."""
    return some_id[-1]


def one_of(level: Level, reservation_id: uuid.UUID) -> int:
    """Return the stripe that a line is added for, which holds nothing yet."""
    return pick_of(reservation_id.bytes) % (level.spread or 1)


def demand(known: Mapping[str, Level], asked: Iterable[Sequence[Line]]) -> dict[str, int]:
    """Return what requests take from each budget at most; of those that name known ones only."""
    taken: dict[str, int] = {}
    for lines in asked:
        own: dict[str, int] = {}
        for line in lines:
            if line.budget in known:
                for level in chain(known, line.budget):
                    own[level.budget] = max(own.get(level.budget, 0), line.amount)
        for name, amount in own.items():
            taken[name] = taken.get(name, 0) + amount
    return taken


def hold(
    connection: Connection,
    root: str,
    windows: Mapping[str, int],
    amounts: Mapping[str, int],
    pick: int,
) -> Held:
    """Lock what is drawn on, in order: of each budget one stripe with room, or all of them.

    :param windows: the window of each budget.
    :param amounts: the most that is drawn from each.
    """
    names = sorted(windows)
    most = [amounts.get(name, 0) for name in names]
    taken = connection.execute(
        _HOLD,
        {
            "root": root,
            "budgets": names,
            "windows": [windows[name] for name in names],
            "most": most,
            "amounts": [min(amount, MAX_AMOUNT) for amount in most],
            "pick": pick,
        },
    ).scalar_one()
    return dict(zip(names, taken, strict=True))


_HOLD = sa.text(
    "SELECT budget_take(:root, CAST(:budgets AS text[]), CAST(:windows AS bigint[]),"
    " budget_place(:root, CAST(:budgets AS text[]), CAST(:windows AS bigint[]),"
    " CAST(:most AS numeric[]), :pick), CAST(:amounts AS bigint[]), false)"
)


def gather(
    connection: Connection,
    root: str,
    held: Held,
    windows: Mapping[str, int],
    amounts: Mapping[str, int],
    pick: int,
) -> dict[str, int] | None:
    """Return the stripe of each budget that ``amounts`` come from, with room for them.

    None where a stripe that was locked alone has none any more, by what has been committed since
    the look; what was locked has to be given back then.

    :param held: what :func:`hold` has locked.
    """
    names = sorted(amounts)
    stripes = connection.execute(
        _GATHER,
        {
            "root": root,
            "budgets": names,
            "windows": [windows[name] for name in names],
            "stripes": [held[name] for name in names],
            "amounts": [amounts[name] for name in names],
            "pick": pick,
        },
    ).scalar_one()
    return None if stripes is None else dict(zip(names, stripes, strict=True))


_GATHER = sa.text(
    "SELECT budget_gather(:root, CAST(:budgets AS text[]), CAST(:windows AS bigint[]),"
    " CAST(:stripes AS smallint[]), CAST(:amounts AS bigint[]), :pick, NULL)"
)


def grow(connection: Connection, root: str, more: Mapping[Key, int]) -> bool:
    """Lock balances that are to grow, in order: a stripe alone where it has room for it.

    Otherwise all of its window. False where one that was locked alone had no room then.
    """
    if connection.dialect.name == "sqlite" or not more:
        return True
    keys = sorted(more)
    return bool(
        connection.execute(
            _GROW,
            {
                "root": root,
                "budgets": [key.budget for key in keys],
                "windows": [key.window_us for key in keys],
                "stripes": [key.stripe for key in keys],
                "more": [more[key] for key in keys],
            },
        ).scalar_one()
    )


_GROW = sa.text(
    "SELECT budget_hold(:root, CAST(:budgets AS text[]), CAST(:windows AS bigint[]),"
    " CAST(:stripes AS smallint[]), CAST(:more AS numeric[]), false)"
)
