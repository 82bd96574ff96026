"""Tallies: what requests that have ended add up to, kept so that a report need not read them.

The sweep tallies what has ended, in batches, each one transaction: a request is in the tallies or
it is not, whatever dies. Whoever changes one that is tallied takes it out first, behind the lock of
its reservation, and the sweep tallies it again.

Locks: reservations, then balances, then tallies, by their ids. The tallies come last: who has one
takes no other lock before it commits.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core import tallies as core
from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.tallies import AMOUNTS, DAY_US, Figures, Key, Tallies
from celery_budget.store import advisory
from celery_budget.store.schema import (
    IS_UNTALLIED,
    attempts,
    instant,
    lines,
    reservations,
    tallies,
)

__all__ = [
    "COUNTED",
    "counted",
    "days",
    "figures_of",
    "key_of",
    "mismatched_tallies",
    "rebuild",
    "roll",
    "streamed",
    "taken_out",
]

#: What is read of a reservation to count it.
COUNTED = tuple(
    reservations.c[name]
    for name in (
        "reservation_id",
        "owner",
        "stage",
        "task_name",
        "estimator",
        "estimator_version",
        "lane",
        "state",
        "reason",
        "admitted",
        "attempts",
        "over",
        "unmetered",
        "unreserved",
        "created_us",
        "due_us",
        "shadows",
    )
)
_LINES = tuple(
    lines.c[name]
    for name in ("reservation_id", "budget", "unit", "estimate", "extended", "settled")
)
_ATTEMPTS = tuple(
    attempts.c[name] for name in ("reservation_id", "attempt", "outcome", "started_us", "ended_us")
)

#: How many rows are read at a time.
PAGE = 500


def roll(connection: Connection, root: str, limit: int, age_us: int) -> int:
    """Tally up to ``limit`` requests that have ended; return how many.

    One roller of a root at a time: where there is one, nothing is done. Locks the reservations and
    passes by those that somebody holds, then the tallies.

    :param age_us: only what ended at least that long ago: its worker may still be at it.
    """
    if not advisory.try_lock(connection, root, advisory.TALLIES, ""):
        return 0
    rows = connection.execute(
        sa.select(*COUNTED)
        .where(
            reservations.c.root == root,
            sa.text(IS_UNTALLIED),
            reservations.c.ended_us <= instant() - age_us,
        )
        .order_by(reservations.c.ended_us)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True)
    ).all()
    if rows:
        _add(connection, root, counted(connection, root, rows))
        _set_tallied(connection, root, [row.reservation_id for row in rows], True)
    return len(rows)


@contextmanager
def taken_out(connection: Connection, row: sa.Row[Any] | None) -> Iterator[None]:
    """Have what a request adds no longer in the tallies while, and after, it is changed.

    The caller holds its reservation's row, ``row`` as it was locked. Locks the tallies at the end.
    """
    before: Tallies = {}
    if row is not None and row.tallied:
        before = counted(connection, row.root, [row])
        _set_tallied(connection, row.root, [row.reservation_id], False)
    yield
    if row is not None and before:
        _add(connection, row.root, before, -1)


def _set_tallied(
    connection: Connection, root: str, ids: Sequence[uuid.UUID], tallied: bool
) -> None:
    connection.execute(
        reservations.update()
        .where(reservations.c.root == root, reservations.c.reservation_id.in_(ids))
        .values(tallied=tallied)
    )


def counted(connection: Connection, root: str, rows: Iterable[sa.Row[Any]]) -> Tallies:
    """Return what reservations that have ended add; two SELECTs, and locks nothing."""
    found: Tallies = {}
    some = list(rows)
    ids = [row.reservation_id for row in some]
    of_lines, of_attempts = (
        _by_reservation(connection, root, ids, *columns, order=order)
        for columns, order in ((_LINES, lines.c.line), (_ATTEMPTS, attempts.c.attempt))
    )
    for row in some:
        added = core.contribution(
            row, of_lines[row.reservation_id], of_attempts[row.reservation_id]
        )
        for key, figures in added.items():
            core.add(found.setdefault(key, {}), figures)
    return found


def _by_reservation(
    connection: Connection,
    root: str,
    ids: Sequence[uuid.UUID],
    *columns: sa.Column[Any],
    order: sa.Column[Any],
) -> dict[uuid.UUID, list[Any]]:
    """Return the rows of one table that belong to reservations, in their order."""
    table = order.table
    found: dict[uuid.UUID, list[Any]] = defaultdict(list)
    for row in connection.execute(
        sa.select(*columns)
        .where(table.c.root == root, table.c.reservation_id.in_(ids))
        .order_by(table.c.reservation_id, order)
    ):
        found[row.reservation_id].append(row)
    return found


def _add(connection: Connection, root: str, more: Tallies, sign: int = 1) -> None:
    """Add to the tallies, or take away. Locks their rows by id; new ones only a roller inserts.

    Of one that somebody has deleted nothing is taken away: a repair makes it anew.
    """
    by_id = {key.digest(): key for key in more}
    known = {row.tally_id: row for row in _locked(connection, root, list(by_id))}
    new, changed = [], []
    for tally_id in sorted(by_id):
        key = by_id[tally_id]
        row = known.get(tally_id)
        if row is None and sign < 0:
            continue
        figures = {} if row is None else figures_of(row)
        core.add(figures, more[key], sign)
        if row is None:
            new.append({"root": root, **_columns(key, figures)})
        else:
            changed.append(_changed(root, tally_id, figures))
    if new:
        connection.execute(tallies.insert(), new)
    if changed:
        connection.execute(_CHANGE, changed)


def _locked(connection: Connection, root: str, ids: list[uuid.UUID]) -> Iterator[sa.Row[Any]]:
    ids.sort()
    for begin in range(0, len(ids), PAGE):
        yield from connection.execute(
            sa.select(tallies)
            .where(tallies.c.root == root, tallies.c.tally_id.in_(ids[begin : begin + PAGE]))
            .order_by(tallies.c.tally_id)
            .with_for_update()
        ).all()


#: Of one tally, by parameters of these names.
_CHANGE = (
    tallies.update()
    .where(
        tallies.c.root == sa.bindparam("of_root"), tallies.c.tally_id == sa.bindparam("of_tally")
    )
    .values({name: sa.bindparam(name) for name in (*AMOUNTS, "figures")})
)


def _changed(root: str, tally_id: uuid.UUID, figures: Figures) -> dict[str, Any]:
    return {"of_root": root, "of_tally": tally_id, **_written(figures)}


def _columns(key: Key, figures: Figures) -> dict[str, Any]:
    return {"tally_id": key.digest(), **key._asdict(), **_written(figures)}


def _written(figures: Figures) -> dict[str, Any]:
    rest = {name: figures[name] for name in sorted(figures) if name not in AMOUNTS}
    amounts = {name: figures.get(name, 0) for name in AMOUNTS}
    return {**amounts, "figures": json.dumps(rest, separators=(",", ":"), ensure_ascii=False)}


#: The figure of a row that somebody else has written: it is wrong, and a repair makes it anew.
UNREADABLE = "unreadable"


def figures_of(row: sa.Row[Any]) -> Figures:
    """Return the figures of a row of the tallies."""
    try:
        said: Any = json.loads(row.figures)
    except ValueError:
        said = None
    readable = isinstance(said, dict) and all(type(one) is int for one in said.values())
    figures: Figures = said if readable else {UNREADABLE: 1}
    figures.update({name: row._mapping[name] for name in AMOUNTS if row._mapping[name]})
    return figures


def key_of(row: sa.Row[Any]) -> Key:
    """Return the key of a row of the tallies."""
    return Key(*(row._mapping[name] for name in Key._fields))


def days(connection: Connection, root: str) -> list[int]:
    """Return the days of which anything is tallied, or should be. Reads every reservation."""
    admitted = sa.select((reservations.c.created_us // DAY_US).label("day")).where(
        reservations.c.root == root, reservations.c.tallied
    )
    kept = sa.select(tallies.c.day).where(tallies.c.root == root)
    both = sa.union(kept, admitted).subquery()
    return list(connection.execute(sa.select(both.c.day).order_by(both.c.day)).scalars())


def mismatched_tallies(
    connection: Connection, root: str, day: int
) -> list[tuple[Key, Figures, Figures]]:
    """Return which tallies of a day are not what its requests add up to: tallied and counted.

    In the order of their keys. What it reads is of one moment where the transaction sees only one.
    Locks nothing, and reads every request of that day.
    """
    kept, adding = _of_day(connection, root, day)
    return [
        (key, kept[key][1] if key in kept else {}, adding.get(key, {}))
        for key in sorted(_wrong(kept, adding))
    ]


def rebuild(connection: Connection, root: str, day: int) -> int:
    """Make the tallies of a day what its requests add up to; return how many were not.

    Nobody tallies meanwhile, and who takes a request of that day out waits: behind the locks of all
    its tallies, which this takes, what is tallied stands still.
    """
    advisory.lock(connection, root, advisory.TALLIES, [""])
    connection.execute(
        sa.select(tallies.c.tally_id)
        .where(tallies.c.root == root, tallies.c.day == day)
        .order_by(tallies.c.tally_id)
        .with_for_update()
    ).all()
    kept, adding = _of_day(connection, root, day)
    wrong = sorted(_wrong(kept, adding))
    # Changed in place where it is there: who waits for it finds it.
    right = {key for key in wrong if key in kept and key in adding and _is_named(kept, key)}
    gone = [kept[key][0] for key in wrong if key in kept and key not in right]
    # And what has the place of another one, of whatever day it says it is.
    gone += [key.digest() for key in wrong if key in adding and key not in right]
    if gone:
        connection.execute(
            tallies.delete().where(tallies.c.root == root, tallies.c.tally_id.in_(gone))
        )
    for key in wrong:
        if key in right:
            connection.execute(_CHANGE, [_changed(root, key.digest(), adding[key])])
        elif key in adding:
            connection.execute(tallies.insert(), [{"root": root, **_columns(key, adding[key])}])
    return len(wrong)


_Kept = dict[Key, tuple[uuid.UUID, Figures]]


def _of_day(connection: Connection, root: str, day: int) -> tuple[_Kept, Tallies]:
    """Return the tallies of a day, and what its requests add up to that are tallied."""
    kept = {
        key_of(row): (row.tally_id, figures_of(row))
        for row in connection.execute(
            sa.select(tallies).where(tallies.c.root == root, tallies.c.day == day)
        )
    }
    adding: Tallies = {}
    those = sa.select(*COUNTED).where(
        reservations.c.root == root,
        reservations.c.created_us >= _in_range(day * DAY_US),
        reservations.c.created_us <= _in_range((day + 1) * DAY_US - 1),
        reservations.c.tallied,
    )
    for some in streamed(connection, root, those):
        for key, figures in some.items():
            core.add(adding.setdefault(key, {}), figures)
    return kept, adding


def _in_range(us: int) -> int:
    """Return an instant as near as the ledger can tell."""
    return max(-MAX_AMOUNT, min(us, MAX_AMOUNT))


def _is_named(kept: _Kept, key: Key) -> bool:
    return kept[key][0] == key.digest()


def _wrong(kept: _Kept, adding: Tallies) -> set[Key]:
    return {
        key
        for key in kept.keys() | adding.keys()
        if (kept[key][1] if key in kept else {}) != adding.get(key, {})
    }


def streamed(connection: Connection, root: str, those: sa.Select[Any]) -> Iterator[Tallies]:
    """Return what reservations add that are selected by :data:`COUNTED`, some of them at a time."""
    found = connection.execute(those, execution_options={"yield_per": PAGE})
    for some in found.partitions():
        yield counted(connection, root, some)
