"""Usage records: what attempts really used, each once under its own key."""

from __future__ import annotations

import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.reservations import TERMINAL
from celery_budget.errors import InvalidAmount
from celery_budget.store.budgets import move
from celery_budget.store.insert import insert_new
from celery_budget.store.reservations import hold, lines_of, lock
from celery_budget.store.schema import attempts, lines, now_us, reservations, usage

__all__ = ["record", "recorded"]


def record(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    key: str,
    amount: int,
) -> bool:
    """Record ``amount`` under ``key``; false, and nothing added, where the key is there already.

    Locks the reservation, which only its own attempts use. A balance is locked only where the
    total passes the hold (the excess is added to it at once, over the limit if need be, and
    flagged) or where the reservation has ended (it is charged at once, as late).

    :raises InvalidAmount: where the total would leave 64 bits.
    """
    row = lock(connection, root, reservation_id)
    if row is None:
        raise LookupError(f"reservation {reservation_id} is not in the ledger")
    ended = row.state in TERMINAL
    inserted = insert_new(
        connection,
        usage,
        root=root,
        reservation_id=reservation_id,
        key=key,
        attempt=attempt,
        amount=amount,
        late=ended,
        recorded_us=now_us(),
    )
    if not inserted:
        _note_repeated(connection, root, reservation_id, attempt, key)
        return False
    over = False
    for line in lines_of(connection, root, reservation_id):
        total = line.used + amount
        if total > MAX_AMOUNT:
            raise InvalidAmount(f"usage of {total} in one request cannot be counted")
        changes: dict[str, Any] = {"used": total}
        if ended:
            # An unmetered or lost end has charged the estimate already: charge what is above it.
            excess = max(0, total - line.settled)
            move(connection, root, line, 0, excess)
            changes["settled"] = line.settled + excess
            over = over or total > line.estimate
        elif total > line.reserved:
            hold(connection, root, line, total, within_limit=False)
            over = True
        connection.execute(
            lines.update()
            .where(
                lines.c.root == root,
                lines.c.reservation_id == reservation_id,
                lines.c.line == line.line,
            )
            .values(**changes)
        )
    if over and not row.over:
        connection.execute(
            reservations.update()
            .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
            .values(over=True)
        )
    return True


def _note_repeated(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int, key: str
) -> None:
    """Note that an attempt was given a reply that an earlier one had recorded: it is metered."""
    earlier = connection.execute(
        sa.select(usage.c.amount).where(
            usage.c.root == root,
            usage.c.reservation_id == reservation_id,
            usage.c.key == key,
            usage.c.attempt < attempt,
        )
    ).scalar()
    if earlier is not None:
        connection.execute(
            attempts.update()
            .where(
                attempts.c.root == root,
                attempts.c.reservation_id == reservation_id,
                attempts.c.attempt == attempt,
            )
            .values(repeated=sa.func.coalesce(attempts.c.repeated, 0) + earlier)
        )


def recorded(
    connection: Connection, root: str, reservation_id: uuid.UUID, attempt: int
) -> int | None:
    """Return what an attempt has recorded, be it 0 or again; none where it recorded nothing."""
    totals = connection.execute(
        sa.select(sa.func.sum(usage.c.amount))
        .where(
            usage.c.root == root,
            usage.c.reservation_id == reservation_id,
            usage.c.attempt == attempt,
        )
        .union_all(
            sa.select(attempts.c.repeated).where(
                attempts.c.root == root,
                attempts.c.reservation_id == reservation_id,
                attempts.c.attempt == attempt,
            )
        )
    ).scalars()
    found = [int(total) for total in totals if total is not None]
    return sum(found) if found else None
