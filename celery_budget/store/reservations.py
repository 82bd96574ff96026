"""Reservations and their lines: what is held, and the one way each comes to an end."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.draws import OPEN, Level, limits_in_force, short, unlimited
from celery_budget.core.reservations import (
    START,
    TERMINAL,
    USED,
    Closed,
    Missing,
    Refused,
    Released,
    Running,
)
from celery_budget.store import outbox, plans, stripes
from celery_budget.store.balances import Key, Move, key_of, lock_balances, move
from celery_budget.store.batch import insert_lines, moved
from celery_budget.store.declaring import not_ready
from celery_budget.store.levels import levels_of
from celery_budget.store.refusals import is_waived
from celery_budget.store.schema import budgets, lines, now_us, reservations

__all__ = [
    "CHANGING",
    "IN_EFFECT",
    "TAKING",
    "How",
    "charge_of",
    "drop_lines",
    "finish",
    "kept",
    "levels_above",
    "lines_of",
    "lock",
    "raise_holds",
    "release",
    "renew_start_lines",
    "set_holds",
    "start",
    "write_lines",
]

Lines = Sequence[sa.Row[Any]]


class How(NamedTuple):
    """How a reservation's row is locked, in the words of ``SELECT … FOR``."""

    key_share: bool
    read: bool


#: FOR NO KEY UPDATE: of these there is one at a time.
CHANGING = How(key_share=True, read=False)
#: FOR KEY SHARE: for as long as the caller's transaction is open. Beside it the attempt goes on to
#: record, extend, retry and end by the ledger's own connections: a stronger lock would keep them
#: waiting for the very task that waits for them.
IN_EFFECT = How(key_share=True, read=True)
#: FOR UPDATE: who takes the claim away waits for all of these.
TAKING = How(key_share=False, read=False)


def lock(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    how: How = CHANGING,
    *,
    pass_by: bool = False,
    also: Sequence[sa.ColumnElement[Any]] = (),
) -> sa.Row[Any] | None:
    """Return the reservation's row, locked until the transaction ends; none where there is none.

    The first lock of everything that changes a reservation.

    :param how: which other locks it goes with, on PostgreSQL.
    :param pass_by: return none as well where the lock cannot be had at once.
    :param also: what else is read with it.
    """
    return connection.execute(
        sa.select(reservations, *also)
        .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
        .with_for_update(
            of=reservations, key_share=how.key_share, read=how.read, skip_locked=pass_by
        )
    ).first()


def lines_of(connection: Connection, root: str, reservation_id: uuid.UUID) -> list[sa.Row[Any]]:
    """Return the lines of a reservation by their numbers: that of the budget named first is 0."""
    return list(
        connection.execute(
            sa.select(lines)
            .where(lines.c.root == root, lines.c.reservation_id == reservation_id)
            .order_by(lines.c.line)
        )
    )


def named_by(connection: Connection, root: str, reservation_id: uuid.UUID) -> dict[str, int]:
    """Return the budgets that a reservation names, with what it has estimated, its owner first.

    Not those that it draws on for being above another one of its own. One SELECT; locks nothing.
    """
    below = lines.alias("below")
    above = (
        sa.exists(sa.text("1"))
        .where(
            below.c.root == root,
            below.c.reservation_id == reservation_id,
            budgets.c.root == root,
            budgets.c.name == below.c.budget,
            budgets.c.parent == lines.c.budget,
        )
        .correlate(lines)
    )
    rows = connection.execute(
        sa.select(lines.c.budget, lines.c.estimate)
        .where(lines.c.root == root, lines.c.reservation_id == reservation_id, ~above)
        .order_by(lines.c.line)
    )
    return {row.budget: row.estimate for row in rows}


def write_lines(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    columns: Mapping[str, Mapping[int, int]],
) -> None:
    """Give columns of a reservation's lines new values, by the lines' numbers; one statement."""
    numbers = sorted({number for values in columns.values() for number in values})
    if not numbers:
        return
    connection.execute(
        lines.update()
        .where(
            lines.c.root == root,
            lines.c.reservation_id == reservation_id,
            lines.c.line.in_(numbers),
        )
        .values(
            {
                name: sa.case(
                    {number: sa.literal(value, sa.BigInteger) for number, value in values.items()},
                    value=lines.c.line,
                    else_=lines.c[name],
                )
                for name, values in columns.items()
            }
        )
    )


def kept(line: sa.Row[Any]) -> int:
    """Return what a line has to hold even while nothing runs: what was used and not charged yet."""
    return int(line.used) if line.charge == USED else 0


def charge_of(line: sa.Row[Any], fresh: int = 0) -> int:
    """Return what a line has been charged when its reservation ends.

    :param fresh: what the last attempt is charged beyond what was used.
    """
    return int(line.settled if line.charge == START else line.used + fresh)


def levels_above(connection: Connection, root: str, of: Lines) -> dict[str, Level]:
    """Return how the budgets of lines stand, and all above them, in the lines' own windows."""
    return levels_of(
        connection, root, [line.budget for line in of], {line.budget: line.window_us for line in of}
    )


def renew_start_lines(connection: Connection, root: str, of: Lines) -> list[int]:
    """Add a line in the open window for each that is charged at the start in one that has ended.

    A start is charged when it happens: ten requests a minute are ten starts in that minute, retries
    included. A budget that drains gets no new window; there the old one goes on. Returns the
    numbers of the lines added; they hold nothing yet. The caller holds the reservation's row.

    :raises Unready: where the window has to be opened before.
    """
    latest = {line.budget: line for line in of if line.charge == START}
    if not latest:
        return []
    levels = levels_of(connection, root, latest)
    ended = [
        line
        for name, line in latest.items()
        if levels[name].state == OPEN and levels[name].window_us != line.window_us
    ]
    unopened = [line.budget for line in ended if levels[line.budget].window_us is None]
    if unopened:
        raise not_ready(root, unopened)
    number = max(line.line for line in of)
    rows = [
        {
            "root": root,
            "reservation_id": line.reservation_id,
            "line": number + nth,
            "budget": line.budget,
            "window_us": levels[line.budget].window_us,
            "stripe": stripes.one_of(levels[line.budget], line.reservation_id),
            "charge": START,
            "unit": line.unit,
            "estimate": line.estimate,
            "reserved": 0,
        }
        for nth, line in enumerate(ended, 1)
    ]
    if rows:
        insert_lines(connection, rows)
    return [row["line"] for row in rows]


def drop_lines(
    connection: Connection, root: str, reservation_id: uuid.UUID, numbers: Sequence[int]
) -> None:
    """Delete lines that were just added and hold nothing."""
    if numbers:
        connection.execute(
            lines.delete().where(
                lines.c.root == root,
                lines.c.reservation_id == reservation_id,
                lines.c.line.in_(numbers),
            )
        )


def raise_holds(
    connection: Connection,
    root: str,
    of: Lines,
    holds: Mapping[int, int],
    what: str,
    *,
    note: bool = True,
) -> Refused | None:
    """Make each line hold its amount of ``holds``; why not, and nothing changed, if one cannot.

    For work that goes on: the hard stops count, and a draining budget lets it. Of a reservation
    that was admitted without enforcement all do, over the limit if need be. The caller holds
    the reservation's row. Locks the balances in order.

    :param note: count, of such a one, what it would have been refused with.
    :raises Unready: where a budget's room was used up between the look and the lock.
    """
    if all(holds[line.line] <= line.reserved for line in of):
        set_holds(connection, root, of, holds, what)
        return None
    growth: Counter[Key] = Counter()
    for line in of:
        growth[key_of(line)] += max(0, holds[line.line] - line.reserved)
    if not stripes.grow(connection, root, growth):
        raise moved(of[0].budget)
    levels = levels_above(connection, root, of)
    refused = _short(levels, of, holds)
    if refused is not None:
        if not is_waived(connection, root, of[0].reservation_id, refused, note=note):
            return refused
        refused = _short(unlimited(levels), of, holds)
        if refused is not None:
            return refused
    set_holds(connection, root, of, holds, what)
    return None


def _short(levels: Mapping[str, Level], of: Lines, holds: Mapping[int, int]) -> Refused | None:
    for line in of:
        more = holds[line.line] - line.reserved
        if more <= 0:
            continue
        limit, blocked = limits_in_force(levels, line.budget)[line.budget]
        refused = short(replace(levels[line.budget], state=OPEN), limit, blocked, more, True)
        if refused is not None:
            return refused
    return None


def set_holds(
    connection: Connection, root: str, of: Lines, holds: Mapping[int, int], what: str
) -> None:
    """Make each line hold its amount of ``holds``, over the limit if need be.

    The caller holds the reservation's row. Locks the balances in order.

    :raises InvalidAmount: where a sum would leave 64 bits; nothing was changed.
    """
    changed = [line for line in of if holds[line.line] != line.reserved]
    move(
        connection,
        root,
        [
            Move(key_of(line), holds[line.line] - line.reserved, 0, line.reservation_id)
            for line in changed
        ],
        what,
    )
    if changed:
        write_lines(
            connection,
            root,
            changed[0].reservation_id,
            {"reserved": {line.line: holds[line.line] for line in changed}},
        )


def start(connection: Connection, root: str, reservation_id: uuid.UUID) -> None:
    """Charge the lines that pay when an attempt starts; what they pay does not come back.

    The caller holds the reservation's row. Locks their balances in order.
    """
    starting = [line for line in lines_of(connection, root, reservation_id) if line.charge == START]
    move(
        connection,
        root,
        [Move(key_of(line), -line.reserved, line.reserved, reservation_id) for line in starting],
        "start",
    )
    write_lines(
        connection,
        root,
        reservation_id,
        {
            "used": {line.line: line.used + line.reserved for line in starting},
            "settled": {line.line: line.settled + line.reserved for line in starting},
            "reserved": {line.line: 0 for line in starting},
        },
    )


#: What the journal calls a reservation's end.
_ENDED = {"settled": "settle", "released": "release", "lost": "lose"}


def finish(
    connection: Connection,
    root: str,
    reservation: sa.Row[Any],
    state: str,
    charges: Mapping[int, int],
    *,
    reason: str | None = None,
    unmetered: bool = False,
    of: Lines | None = None,
    goes_on: bool = False,
) -> None:
    """Bring a reservation to a terminal state: charge each line, give the rest back.

    With it the later steps of a chain that was reserved whole are released, unless it goes on. The
    caller holds the reservation's row and has checked that it has not ended. Locks what is planned
    after it by id, then all balances in order.

    :param charges: what each line has been charged then, by its number.
    :param of: the lines, where they were read before.
    :param goes_on: whether the next step of its chain follows.
    """
    if state not in TERMINAL or reservation.state in TERMINAL:
        raise ValueError(f"a reservation cannot go from {reservation.state} to {state}")
    reservation_id = reservation.reservation_id
    ending = lines_of(connection, root, reservation_id) if of is None else of
    if reservation.plan_id is not None and not goes_on:
        rest = plans.lock_rest(connection, root, reservation.plan_id, reservation.step)
        lock_balances(connection, root, map(key_of, [*ending, *rest]))
        plans.release_rest(connection, root, rest)
    move(
        connection,
        root,
        [
            Move(key_of(line), -line.reserved, charges[line.line] - line.settled, reservation_id)
            for line in ending
        ],
        _ENDED[state],
        reason,
    )
    write_lines(
        connection,
        root,
        reservation_id,
        {"reserved": {line.line: 0 for line in ending}, "settled": charges},
    )
    connection.execute(
        reservations.update()
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == reservation_id,
        )
        .values(
            state=state,
            reason=reason or reservation.reason,
            unmetered=reservation.unmetered or unmetered,
            ended_us=now_us(),
        )
    )
    outbox.wake_lane(connection, reservation)


def release(
    connection: Connection, root: str, reservation_id: uuid.UUID, reason: str
) -> Released | Running | Closed | Missing:
    """End a reservation whose message will not run: give the hold back, drop the message.

    One that waits between attempts has run: it is settled at what it used. ``Running`` and
    ``Closed``, and nothing changed, where it runs or has ended otherwise; a repeat finds it
    released. Locks the reservation, then its balances, then its outbox rows.
    """
    row = lock(connection, root, reservation_id)
    if row is None:
        return Missing()
    if row.state == "running":
        return Running()
    if row.state in TERMINAL:
        same = row.reason == reason
        return Released(row.task_id, row.state) if same else Closed(row.state)
    ending = lines_of(connection, root, reservation_id)
    used = {line.line: charge_of(line) for line in ending}
    state = "released" if row.attempts == 0 else "settled"
    finish(connection, root, row, state, used, reason=reason, of=ending)
    outbox.drop(connection, root, reservation_id)
    return Released(row.task_id, state)
