"""Turning to a lane at run time: a running attempt that draws on its budgets from then on."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.draws import OPEN, Draw, Level, drawn_by, limits_in_force, mixed, short
from celery_budget.core.reservations import (
    START,
    USED,
    AlreadyExtended,
    Closed,
    Extended,
    Refused,
)
from celery_budget.errors import PolicyError, UnknownBudget
from celery_budget.store import lanes, stripes
from celery_budget.store.attempts import owned
from celery_budget.store.batch import first_unknown, insert_lines
from celery_budget.store.declaring import not_ready
from celery_budget.store.levels import levels_of
from celery_budget.store.reservations import (
    Lines,
    drop_lines,
    lines_of,
    raise_holds,
    start,
    write_lines,
)
from celery_budget.store.schema import reservations, usage

__all__ = ["turn_to"]


def turn_to(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    lane: str,
    estimate: int | None,
) -> Extended | AlreadyExtended | Refused | Closed:
    """Have a running attempt draw on a lane's budgets as well, on all of them or on none.

    What is charged by use is held, up to the hard stop, and charged for what is recorded from then
    on; what is charged at a start is charged at once. A budget above them that the request draws on
    already holds more where it has to. ``AlreadyExtended`` where the request draws on all of them;
    ``Closed`` where the fence is gone. Locks the reservation, then its balances.

    :param estimate: what is held; none for what the request has estimated of its first budget.
    :raises UnknownLane, UnknownBudget: where there is none.
    :raises PolicyError: where the lane has no budgets, or one would be charged by two rules.
    :raises Unready: where a budget, or its window, has to be made before.
    """
    if owned(connection, root, reservation_id, attempt, claim_id) is None:
        return Closed("ended")
    [found] = lanes.named(connection, root, [lane])
    if not found.budgets:
        raise PolicyError(
            f"lane {lane!r} has no budgets, and nothing would be asked for; give it some: "
            f"'celery -A PROJ budget lane set {shlex.quote(lane)} --budget NAME'"
        )
    of = lines_of(connection, root, reservation_id)
    before = {line.budget: line for line in of}
    amount = of[0].estimate if estimate is None else estimate
    asked = [line for line in found.lines(amount) if line.budget not in before]
    if not asked:
        return AlreadyExtended()
    levels = _levels(connection, root, [line.budget for line in asked])
    draws = drawn_by(asked, levels)
    new = [draw for name, draw in draws.items() if name not in before]
    refused = _closed(levels, new)
    if refused is not None:
        return refused
    added = _add(connection, root, reservation_id, new, of, levels)
    of = lines_of(connection, root, reservation_id)
    holds = _holds(of, draws)
    refused = raise_holds(connection, root, of, holds, "turn")
    if refused is not None:
        drop_lines(connection, root, reservation_id, added)
        return refused
    longer = [line for line in of if line.charge == USED and line.line not in added]
    write_lines(
        connection,
        root,
        reservation_id,
        {
            "extended": {
                line.line: line.extended + holds[line.line] - line.reserved for line in longer
            }
        },
    )
    if any(draw.charge == START for draw in draws.values()):
        start(connection, root, reservation_id)
        connection.execute(
            reservations.update()
            .where(reservations.c.root == root, reservations.c.reservation_id == reservation_id)
            .values(charges_start=True)
        )
    return Extended(amount)


def _levels(connection: Connection, root: str, names: list[str]) -> Mapping[str, Level]:
    """Return how the named budgets stand, and all above them, in the windows that are open.

    :raises UnknownBudget, Unready: where one is not there, or has no window.
    """
    levels = levels_of(connection, root, names)
    if any(name not in levels for name in names):
        unknown = first_unknown(connection, root, names)
        if unknown is not None:
            raise UnknownBudget(unknown)
        raise not_ready(root, names)
    if any(level.window_us is None for level in levels.values()):
        raise not_ready(root, names)
    return levels


def _closed(levels: Mapping[str, Level], new: list[Draw]) -> Refused | None:
    """Return why a budget takes nothing new; none where all of them do."""
    for draw in new:
        level = levels[draw.budget]
        if level.state != OPEN:
            limit, blocked = limits_in_force(levels, draw.budget)[draw.budget]
            return short(level, limit, blocked, draw.amount, True)
    return None


def _add(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    new: list[Draw],
    of: Lines,
    levels: Mapping[str, Level],
) -> list[int]:
    """Add a line for each draw, which holds nothing yet; return their numbers."""
    recorded = {
        unit: int(amount)
        for unit, amount in connection.execute(
            sa.select(usage.c.unit, sa.func.sum(usage.c.amount))
            .where(usage.c.root == root, usage.c.reservation_id == reservation_id)
            .group_by(usage.c.unit)
        )
    }
    first = max(line.line for line in of) + 1
    rows: list[dict[str, Any]] = [
        {
            "root": root,
            "reservation_id": reservation_id,
            "line": number,
            "budget": draw.budget,
            "window_us": draw.window_us,
            "stripe": stripes.one_of(levels[draw.budget], reservation_id),
            "charge": draw.charge,
            "unit": draw.unit,
            "estimate": draw.amount,
            "reserved": 0,
            "earlier": recorded.get(draw.unit, 0) if draw.charge == USED else 0,
        }
        for number, draw in enumerate(new, first)
    ]
    if rows:
        insert_lines(connection, rows)
    return [row["line"] for row in rows]


def _holds(of: Lines, draws: Mapping[str, Draw]) -> dict[int, int]:
    """Return what each line is to hold; of several on one budget the last holds for it.

    :raises PolicyError: where a budget would be charged by two rules.
    """
    holds = {line.line: int(line.reserved) for line in of}
    for line in {line.budget: line for line in of}.values():
        draw = draws.get(line.budget)
        if draw is None:
            continue
        if draw.charge != line.charge:
            raise mixed(line.budget)
        if draw.charge == USED:
            holds[line.line] = max(line.reserved, line.used + draw.amount)
        elif line.settled == 0:
            holds[line.line] = draw.amount
    return holds
