"""Usage records: what attempts really used, each once under its own key."""

from __future__ import annotations

import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.reservations import (
    TERMINAL,
    USED,
    AlreadyExtended,
    AlreadyRecorded,
    Extended,
    Recorded,
    Refused,
)
from celery_budget.errors import InvalidAmount, PolicyError
from celery_budget.store.balances import Move, key_of, move
from celery_budget.store.insert import insert_new
from celery_budget.store.reservations import lines_of, lock, raise_holds, set_holds, write_lines
from celery_budget.store.schema import extensions, now_us, reservations, usage

__all__ = ["extend", "is_unmetered", "record", "recorded"]


def record(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    key: str,
    amount: int,
    unit: str | None = None,
) -> Recorded | AlreadyRecorded:
    """Record ``amount`` under ``key``; nothing is added where the key is there already.

    Locks the reservation, which only its own attempts use. Balances are locked only where the
    total passes the hold (the excess is added to it at once, over the limit if need be, and
    flagged) or where the reservation has ended (it is charged at once, as late).

    :param unit: what is counted; none for the unit of the first budget that is charged by use. A
        key stands for one record of each unit.
    :raises PolicyError: where the request draws on no budget that is charged by use in that unit.
    :raises InvalidAmount: where the total would leave 64 bits.
    """
    row = lock(connection, root, reservation_id)
    if row is None:
        raise LookupError(f"reservation {reservation_id} is not in the ledger")
    unit, metered = _metered(connection, root, reservation_id, unit)
    ended = row.state in TERMINAL
    inserted = insert_new(
        connection,
        usage,
        root=root,
        reservation_id=reservation_id,
        key=key,
        unit=unit,
        attempt=attempt,
        amount=amount,
        late=ended,
        recorded_us=now_us(),
    )
    if not inserted:
        _note_repeated(connection, root, reservation_id, attempt, key, unit)
        return AlreadyRecorded()
    used = {line.line: line.used + amount for line in metered}
    if max(used.values()) > MAX_AMOUNT:
        raise InvalidAmount(f"usage of {max(used.values())} in one request cannot be counted")
    write_lines(connection, root, reservation_id, {"used": used})
    if ended:
        over = _charge_late(connection, root, reservation_id, metered, used)
    else:
        holds = {line.line: max(line.reserved, used[line.line]) for line in metered}
        over = any(holds[line.line] > line.reserved for line in metered)
        set_holds(connection, root, metered, holds, "exceed")
    if over and not row.over:
        connection.execute(
            reservations.update()
            .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
            .values(over=True)
        )
    return Recorded(late=ended, over=over)


def _metered(
    connection: Connection, root: str, reservation_id: uuid.UUID, unit: str | None
) -> tuple[str, list[sa.Row[Any]]]:
    """Return a unit, by default the first, and the lines that are charged what is used of it.

    :raises PolicyError: where there are none.
    """
    by_use = [line for line in lines_of(connection, root, reservation_id) if line.charge == USED]
    if unit is None and by_use:
        unit = by_use[0].unit
    metered = [line for line in by_use if line.unit == unit]
    if unit is None or not metered:
        known = ", ".join(sorted({line.unit for line in by_use}))
        of_unit = "" if unit is None else f" of {unit!r}"
        raise PolicyError(
            f"the task draws on no budget that is charged what it uses{of_unit}; it can record "
            f"and extend {known or 'nothing'}"
        )
    return unit, metered


def _charge_late(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    metered: list[sa.Row[Any]],
    used: dict[int, int],
) -> bool:
    """Charge what was used beyond what the end has charged; tell whether that is over the estimate.

    An unmetered or lost end has charged the estimate already.
    """
    settled = {line.line: max(line.settled, used[line.line]) for line in metered}
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


def recorded(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> dict[str, int]:
    """Return what an attempt has recorded of each unit, be it 0 or again; nothing of the others."""
    rows = connection.execute(
        sa.select(usage.c.unit, sa.func.sum(usage.c.amount))
        .where(
            usage.c.root == root,
            usage.c.reservation_id == reservation_id,
            sa.or_(usage.c.attempt == attempt, usage.c.repeated_by == attempt),
        )
        .group_by(usage.c.unit)
    )
    return {unit: int(total) for unit, total in rows}


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
    unit, longer = _metered(connection, root, reservation_id, unit)
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
