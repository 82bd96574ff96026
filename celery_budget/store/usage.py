"""Usage records: what attempts really used, each once under its own key."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.reservations import (
    TERMINAL,
    USED,
    AlreadyExtended,
    AlreadyRecorded,
    Exceeded,
    Extended,
    Recorded,
    Refused,
)
from celery_budget.core.usage import Used
from celery_budget.errors import InvalidAmount, PolicyError
from celery_budget.store.balances import Move, key_of, move
from celery_budget.store.insert import insert_each_new, insert_new
from celery_budget.store.reservations import (
    Lines,
    lines_of,
    lock,
    raise_holds,
    set_holds,
    write_lines,
)
from celery_budget.store.schema import (
    attempts,
    effects,
    extensions,
    now_us,
    reservations,
    usage,
)
from celery_budget.store.tallies import taken_out

__all__ = [
    "extend",
    "is_enforced",
    "is_unmetered",
    "record",
    "recorded",
    "remaining",
    "take_back",
    "unit_of",
]


def record(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    key: str,
    used: Used,
) -> Recorded | AlreadyRecorded:
    """Record what was used under ``key``; nothing is added where the key is there already.

    Locks the reservation, which only its own attempts use. Balances are locked only where the
    total passes the hold (the excess is added to it at once, over the limit if need be, and
    flagged) or where the reservation has ended (it is charged at once, as late). What has ended and
    is tallied is taken out of the tallies, which are locked last.

    A key stands for one record of each unit. An attempt with a reply that does not tell all it used
    is charged the greater of recorded and estimated, and flagged; when that reply tells it later,
    what was assumed of it is taken back.

    :raises PolicyError: where the request draws on no budget that is charged by use in a unit of
        ``used``, or in none where that was read from a reply.
    :raises InvalidAmount: where the total would leave 64 bits.
    """
    row = lock(connection, root, reservation_id)
    if row is None:
        raise LookupError(f"reservation {reservation_id} is not in the ledger")
    drawn = _drawn_on(lines_of(connection, root, reservation_id), used)
    ended = row.state in TERMINAL
    inserted = insert_each_new(
        connection,
        usage,
        [
            {
                "root": root,
                "reservation_id": reservation_id,
                "key": key,
                "unit": unit,
                "attempt": attempt,
                "amount": amount,
                "late": ended,
                "recorded_us": now_us(),
                "details": used.details,
                "assumed": 0 if unit in used.incomplete else None,
            }
            for unit, (amount, _) in drawn.items()
        ],
        usage.c.unit,
    )
    changes = {unit: drawn[unit][0] for unit in inserted}
    whose = dict.fromkeys(inserted, attempt)
    for unit in drawn.keys() - inserted:
        _note_repeated(connection, root, reservation_id, attempt, key, unit)
        if row.unmetered and unit not in used.incomplete:
            amount, _ = drawn[unit]
            told = _tell(connection, root, reservation_id, key, unit, amount, used.details)
            if told is not None:
                changes[unit], whose[unit] = told
    units = tuple(drawn)
    if not changes:
        return AlreadyRecorded(units)
    incomplete = inserted & set(used.incomplete)
    if row.unmetered or incomplete:
        for unit in changes:
            changes[unit] += _assume(connection, root, reservation_id, whose[unit], drawn[unit][1])
    metered = [line for unit in changes for line in drawn[unit][1]]
    totals, earlier = _totals(metered, changes)
    for line in metered:
        if totals[line.line] > MAX_AMOUNT:
            raise InvalidAmount(
                f"one request cannot have used {totals[line.line]} {line.unit} of budget "
                f"{line.budget!r}; record at most 2^63-1 in all"
            )
    exceeded = None
    with taken_out(connection, row):
        write_lines(connection, root, reservation_id, {"used": totals, **earlier})
        if ended:
            over = _charge_late(connection, root, reservation_id, metered, changes, whose)
        else:
            holds = {line.line: max(line.reserved, totals[line.line]) for line in metered}
            exceeded = next((line for line in metered if holds[line.line] > line.reserved), None)
            over = exceeded is not None
            set_holds(connection, root, metered, holds, "exceed")
        told_now = changes.keys() > inserted
        _flag(connection, row, over=over, unmetered=bool(incomplete), told=told_now)
    return Recorded(
        ended,
        over,
        units,
        exceeded
        and Exceeded(exceeded.budget, exceeded.unit, totals[exceeded.line], exceeded.reserved),
    )


def _totals(
    of: Lines, changes: Mapping[str, int]
) -> tuple[dict[int, int], dict[str, dict[int, int]]]:
    """Return what lines have used after their units' use has changed, and what counts elsewhere.

    What is taken back of a time before the request turned to a budget was never counted there.
    """
    sums = {line.line: line.used + changes[line.unit] for line in of}
    under = [line for line in of if sums[line.line] < 0]
    earlier = {line.line: line.earlier + sums[line.line] for line in under}
    totals = {number: max(0, used) for number, used in sums.items()}
    return totals, {"earlier": earlier} if earlier else {}


def remaining(
    connection: Connection, root: str, reservation_id: uuid.UUID, unit: str | None
) -> int:
    """Return how much of a unit a request may still use of what is held for it; locks nothing.

    Of several budgets in that unit the one with the least counts.

    :raises PolicyError: as :func:`record`.
    """
    _, metered = _metered(lines_of(connection, root, reservation_id), unit)
    return max(0, min(int(line.reserved - line.used) for line in metered))


def is_enforced(connection: Connection, root: str, reservation_id: uuid.UUID) -> bool:
    """Tell whether a request was admitted under enforcement, which it keeps; locks nothing."""
    return (
        connection.execute(
            sa.select(reservations.c.enforced).where(
                reservations.c.root == root, reservations.c.reservation_id == reservation_id
            )
        ).scalar()
        is not False
    )


def _drawn_on(of: Lines, used: Used) -> dict[str, tuple[int, Lines]]:
    """Return the amount of each unit that counts, and the lines that it counts for.

    :raises PolicyError: as :func:`record`.
    """
    if not used.of_reply:
        drawn: dict[str, tuple[int, Lines]] = {}
        for unit, amount in used.amounts.items():
            name, metered = _metered(of, unit)
            drawn[name] = amount, metered
        return drawn
    by_unit: dict[str, list[sa.Row[Any]]] = {}
    for line in of:
        if line.charge == USED:
            by_unit.setdefault(line.unit, []).append(line)
    drawn = {unit: (used.amounts[unit], by_unit[unit]) for unit in by_unit if unit in used.amounts}
    if not drawn:
        raise PolicyError(
            "the task draws on no budget that is charged what it uses of what a reply tells; it "
            f"can record {', '.join(sorted(by_unit)) or 'nothing'}"
            "; name one of these with unit=, or leave the reply out"
        )
    return drawn


def _metered(of: Lines, unit: str | None) -> tuple[str, Lines]:
    """Return a unit, by default the first, and the lines that are charged what is used of it.

    :raises PolicyError: where there are none.
    """
    by_use = [line for line in of if line.charge == USED]
    if unit is None and by_use:
        unit = by_use[0].unit
    metered = [line for line in by_use if line.unit == unit]
    if unit is None or not metered:
        known = ", ".join(sorted({line.unit for line in by_use}))
        of_unit = "" if unit is None else f" of {unit!r}"
        raise PolicyError(
            f"the task draws on no budget that is charged what it uses{of_unit}; it can record "
            f"and extend {known or 'nothing'}"
            "; name one of these with unit="
        )
    return unit, metered


def _tell(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    key: str,
    unit: str,
    amount: int,
    details: str | None,
) -> tuple[int, int] | None:
    """Let a record that did not tell all tell it now; by how much it changed, and whose it is.

    None where it had told all, or where more was known than it tells now.
    """
    this = sa.and_(
        usage.c.root == root,
        usage.c.reservation_id == reservation_id,
        usage.c.key == key,
        usage.c.unit == unit,
    )
    before = connection.execute(
        sa.select(usage.c.amount, usage.c.assumed, usage.c.attempt).where(
            this, usage.c.assumed.is_not(None)
        )
    ).first()
    if before is None or amount < before.amount - before.assumed:
        return None
    connection.execute(
        usage.update().where(this).values(amount=amount, assumed=None, details=details)
    )
    return amount - before.amount, before.attempt


def _assume(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int, of: Lines
) -> int:
    """Have the records of an attempt that do not tell all make up for the rest of its estimate.

    One of them does, with what is missing; the others with nothing. Where all is told nothing is
    assumed. Returns by how much the attempt's total has changed.
    """
    unit = of[0].unit
    estimate = max(line.estimate + line.extended for line in of)
    rows = connection.execute(
        sa.select(usage.c.key, usage.c.amount, usage.c.assumed)
        .where(
            usage.c.root == root,
            usage.c.reservation_id == reservation_id,
            usage.c.unit == unit,
            usage.c.attempt == attempt,
        )
        .order_by(usage.c.key)
    ).all()
    known = sum(row.amount - (row.assumed or 0) for row in rows)
    missing, change = max(0, estimate - known), 0
    for row in rows:
        if row.assumed is None:
            continue
        if row.assumed != missing:
            connection.execute(
                usage.update()
                .where(
                    usage.c.root == root,
                    usage.c.reservation_id == reservation_id,
                    usage.c.key == row.key,
                    usage.c.unit == unit,
                )
                .values(amount=row.amount - row.assumed + missing, assumed=missing)
            )
            change += missing - row.assumed
        missing = 0
    return change


def _flag(
    connection: Connection, row: sa.Row[Any], *, over: bool, unmetered: bool, told: bool
) -> None:
    """Flag a reservation as over, and as unmetered until all of its records tell what they used."""
    flags: dict[str, Any] = {}
    if over and not row.over:
        flags["over"] = True
    if unmetered and not row.unmetered:
        flags["unmetered"] = True
    elif told and row.state not in TERMINAL:
        flags["unmetered"] = sa.exists(sa.text("1")).where(
            usage.c.root == row.root,
            usage.c.reservation_id == row.reservation_id,
            usage.c.assumed.is_not(None),
        )
    if flags:
        connection.execute(
            reservations.update()
            .where(
                reservations.c.root == row.root,
                reservations.c.reservation_id == row.reservation_id,
            )
            .values(**flags)
        )


def _charge_late(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    metered: Lines,
    changes: dict[str, int],
    whose: dict[str, int],
) -> bool:
    """Charge what was used beyond what the end has charged; tell whether that is over the estimate.

    An unmetered or lost end has charged the estimate of the last attempt already: what that one
    used is part of it, what another one used is not.

    :param changes: by how much the use of each unit has changed, and by ``whose`` attempt.
    """
    used, _ = _totals(metered, changes)
    last = connection.execute(
        sa.select(sa.func.max(attempts.c.attempt)).where(
            attempts.c.root == root,
            attempts.c.reservation_id == reservation_id,
            # It stands for an attempt that was not had.
            sa.func.coalesce(attempts.c.outcome, "") != "refused",
        )
    ).scalar()
    settled = {
        line.line: max(line.settled, used[line.line])
        if whose[line.unit] == last
        else line.settled + max(0, changes[line.unit])
        for line in metered
    }
    move(
        connection,
        root,
        [
            Move(key_of(line), 0, settled[line.line] - line.settled, reservation_id)
            for line in metered
        ],
        "late",
    )
    write_lines(connection, root, reservation_id, {"settled": settled})
    return any(used[line.line] > line.estimate for line in metered)


def _note_repeated(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    key: str,
    unit: str,
) -> None:
    """Note that an attempt was given a reply that an earlier one had recorded: it is metered."""
    connection.execute(
        usage.update()
        .where(
            usage.c.root == root,
            usage.c.reservation_id == reservation_id,
            usage.c.key == key,
            usage.c.unit == unit,
            usage.c.attempt < attempt,
        )
        .values(repeated_by=attempt)
    )


def take_back(
    connection: Connection, row: sa.Row[Any], attempt: int, units: Collection[str]
) -> None:
    """Take back what was assumed of an attempt's use of these units: all of it is told now.

    The caller holds the reservation's row.
    """
    root, reservation_id = row.root, row.reservation_id
    assumed = sa.and_(
        usage.c.root == root,
        usage.c.reservation_id == reservation_id,
        usage.c.attempt == attempt,
        usage.c.unit.in_(sorted(units)),
        usage.c.assumed.is_not(None),
    )
    found = connection.execute(
        sa.select(usage.c.unit, sa.func.sum(usage.c.assumed)).where(assumed).group_by(usage.c.unit)
    ).all()
    if not found:
        return
    connection.execute(
        usage.update().where(assumed).values(amount=usage.c.amount - usage.c.assumed, assumed=None)
    )
    less = {unit: int(amount) for unit, amount in found}
    metered = [
        line
        for line in lines_of(connection, root, reservation_id)
        if line.charge == USED and line.unit in less
    ]
    totals, earlier = _totals(metered, {unit: -amount for unit, amount in less.items()})
    write_lines(connection, root, reservation_id, {"used": totals, **earlier})
    _flag(connection, row, over=False, unmetered=False, told=True)


def recorded(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> dict[str, int]:
    """Return what an attempt has recorded of each unit, be it 0 or again; nothing of the others.

    0 as well of what was recorded by an attempt before that had an effect: this one is given what
    came of it, without the work. So an effect is no free work, but for one that told nothing.
    """
    mine = sa.or_(usage.c.attempt == attempt, usage.c.repeated_by == attempt)
    counted = mine
    if attempt > 1:
        had = sa.select(effects.c.attempt).where(
            effects.c.root == root,
            effects.c.reservation_id == reservation_id,
            effects.c.attempt < attempt,
        )
        counted = sa.or_(mine, usage.c.attempt.in_(had))
    rows = connection.execute(
        sa.select(usage.c.unit, sa.func.sum(sa.case((mine, usage.c.amount), else_=0)))
        .where(usage.c.root == root, usage.c.reservation_id == reservation_id, counted)
        .group_by(usage.c.unit)
    )
    return {unit: int(total) for unit, total in rows}


def unit_of(connection: Connection, root: str, reservation_id: uuid.UUID, unit: str | None) -> str:
    """Return a unit that a request draws on, by default the first. Locks nothing.

    :raises PolicyError: as :func:`record`.
    """
    return _metered(lines_of(connection, root, reservation_id), unit)[0]


def is_unmetered(line: sa.Row[Any], recorded: dict[str, int]) -> bool:
    """Return whether a line is charged what was used and an attempt has not told how much."""
    return line.charge == USED and line.unit not in recorded


def extend(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    key: str,
    amount: int,
    unit: str | None,
) -> Extended | AlreadyExtended | Refused:
    """Make a running attempt hold ``amount`` more of a unit, on all of its budgets or on none.

    The caller holds the reservation's row and has seen that the attempt has the claim. Locks the
    balances in order. The hard stops count, as for all work that goes on.

    :param key: makes a repeat of the same call by the same attempt change nothing.
    :raises PolicyError: as :func:`record`.
    """
    unit, longer = _metered(lines_of(connection, root, reservation_id), unit)
    inserted = insert_new(
        connection,
        extensions,
        root=root,
        reservation_id=reservation_id,
        key=key,
        attempt=attempt,
        unit=unit,
        amount=amount,
        extended_us=now_us(),
    )
    if not inserted:
        return AlreadyExtended()
    holds = {line.line: line.reserved + amount for line in longer}
    refused = raise_holds(connection, root, longer, holds, "extend")
    if refused is not None:
        connection.execute(
            extensions.delete().where(
                extensions.c.root == root,
                extensions.c.reservation_id == reservation_id,
                extensions.c.attempt == attempt,
                extensions.c.key == key,
                extensions.c.unit == unit,
            )
        )
        return refused
    write_lines(
        connection,
        root,
        reservation_id,
        {"extended": {line.line: line.extended + amount for line in longer}},
    )
    return Extended(amount)
