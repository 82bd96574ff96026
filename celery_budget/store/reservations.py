"""Reservations and their lines: what is held, and the one way each comes to an end."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import TERMINAL
from celery_budget.store import outbox
from celery_budget.store.budgets import move
from celery_budget.store.schema import lines, now_us, reservations

__all__ = ["finish", "hold", "lines_of", "lock", "release", "revoke"]


def lock(connection: Connection, root: str, reservation_id: uuid.UUID) -> sa.Row[Any] | None:
    """Return the reservation's row, locked until the transaction ends; none where there is none.

    The first lock of everything that changes a reservation.
    """
    return connection.execute(
        sa.select(reservations)
        .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
        .with_for_update()
    ).first()


def lines_of(connection: Connection, root: str, reservation_id: uuid.UUID) -> list[sa.Row[Any]]:
    """Return the lines in the order in which their balances are locked.

    Sorted here, by code points, which is PostgreSQL's ``COLLATE "C"``: one order for both.
    """
    rows = connection.execute(
        sa.select(lines).where(lines.c.root == root, lines.c.reservation_id == reservation_id)
    )
    return sorted(rows, key=lambda row: (row.budget, row.window_us, row.stripe))


def hold(
    connection: Connection,
    root: str,
    line: sa.Row[Any],
    amount: int,
    *,
    within_limit: bool,
    estimate: int | None = None,
    held: int | None = None,
) -> bool:
    """Make ``amount`` what a line holds; false, and nothing changed, where it does not fit.

    The caller holds the reservation's row; locks the line's balance.

    :param held: what it holds now, where ``line`` was read before that changed.
    """
    held = line.reserved if held is None else held
    if not move(connection, root, line, amount - held, 0, within_limit):
        return False
    connection.execute(
        lines.update()
        .where(
            lines.c.root == root,
            lines.c.reservation_id == line.reservation_id,
            lines.c.line == line.line,
        )
        .values(reserved=amount, estimate=line.estimate if estimate is None else estimate)
    )
    return True


def finish(
    connection: Connection,
    root: str,
    reservation: sa.Row[Any],
    state: str,
    charges: Mapping[int, int],
    *,
    reason: str | None = None,
    unmetered: bool = False,
) -> None:
    """Bring a reservation to a terminal state: charge each line, give the rest back.

    The caller holds the reservation's row and has checked that it has not ended. Locks the
    balances in order.

    :param charges: the amount to charge for each line's number.
    """
    if state not in TERMINAL or reservation.state in TERMINAL:
        raise ValueError(f"a reservation cannot go from {reservation.state} to {state}")
    for line in lines_of(connection, root, reservation.reservation_id):
        charge = charges[line.line]
        move(connection, root, line, -line.reserved, charge)
        connection.execute(
            lines.update()
            .where(
                lines.c.root == root,
                lines.c.reservation_id == line.reservation_id,
                lines.c.line == line.line,
            )
            .values(reserved=0, settled=charge)
        )
    connection.execute(
        reservations.update()
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == reservation.reservation_id,
        )
        .values(
            state=state,
            reason=reason or reservation.reason,
            unmetered=reservation.unmetered or unmetered,
            ended_us=now_us(),
        )
    )


def release(
    connection: Connection, root: str, reservation_id: uuid.UUID, reason: str
) -> sa.Row[Any] | None:
    """End a reservation whose message will not run: give the hold back, drop the message.

    One that waits between attempts has run: it is settled at what it used. Returns its row as it
    was, or none where there was nothing to release: it runs, has ended, or does not exist.
    Locks the reservation, then its balances, then its outbox rows.
    """
    row = lock(connection, root, reservation_id)
    if row is None or row.state in TERMINAL or row.state == "running":
        return None
    used = {line.line: line.used for line in lines_of(connection, root, reservation_id)}
    state = "released" if row.attempts == 0 else "settled"
    finish(connection, root, row, state, used, reason=reason)
    outbox.drop(connection, root, reservation_id)
    return row


def revoke(connection: Connection, root: str, reservation_id: uuid.UUID, reason: str) -> bool:
    """Release a request, as :func:`release`; false where there is one that runs or has ended."""
    if release(connection, root, reservation_id, reason) is not None:
        return True
    return lock(connection, root, reservation_id) is None
