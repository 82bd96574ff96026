"""Chains that are reserved whole: their later steps are planned, and hold what they will need.

A planned step has no message. It is reserved with its message by the attempt that comes before it,
or released in the transaction in which that one ends without success.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import AlreadyReserved, Missing, Reserved, ReserveRequest
from celery_budget.store import deadlines, outbox
from celery_budget.store.balances import Move, key_of, move
from celery_budget.store.schema import lines, now_us, reservations
from celery_budget.store.waiting import feeding

__all__ = ["activate", "hand_over", "lock_rest", "release_rest", "release_unreached"]

#: Why a planned step ends: the one before it did not succeed, or nothing came of its success.
PREDECESSOR = "predecessor"


def activate(
    connection: Connection, request: ReserveRequest, message: WireMessage
) -> Reserved | AlreadyReserved | Missing:
    """Write the message of a planned step whose turn has come; a repeat changes nothing.

    It keeps what it holds. Locks its reservation: of two at once the second finds it reserved, and
    against a release the first wins. ``Missing`` where it was given back because the chain went
    another way: then the step is admitted like any that continues. One that was cancelled stays so.
    """
    mine = sa.and_(
        reservations.c.root == request.root,
        reservations.c.reservation_id == request.reservation_id,
    )
    outbox.lock_orders(connection, request.root, [message])
    row = connection.execute(sa.select(reservations).where(mine).with_for_update()).first()
    if row is None or row.task_id != request.task_id or row.reason == PREDECESSOR:
        return Missing()
    if row.state != "planned":
        return AlreadyReserved(row.reservation_id, row.task_id)
    connection.execute(
        reservations.update()
        .where(mine)
        .values(
            state="reserved",
            # Celery counts the replacements of a step for those after it as well.
            nesting=request.nesting,
            fingerprint=request.fingerprint,
            opaque=request.opaque,
            parent_id=request.parent,
            retries=request.retries,
            due_us=message.due_us or now_us(),
            lane=feeding(request.root, message.queue),
        )
    )
    outbox.enqueue(
        connection, request.root, deadlines.bounded(message, row.deadline_us), request=request
    )
    return Reserved(row.reservation_id)


def lock_rest(
    connection: Connection, root: str, plan_id: uuid.UUID, step: int
) -> list[sa.Row[Any]]:
    """Lock the steps of a plan that come after ``step`` and are planned still; return their lines.

    By id, after the reservation of the step that ends, whose id is smaller.
    """
    rest = sa.and_(
        reservations.c.root == root,
        reservations.c.plan_id == plan_id,
        reservations.c.state == "planned",
        reservations.c.step > step,
    )
    ids = (
        connection.execute(
            sa.select(reservations.c.reservation_id)
            .where(rest)
            .order_by(reservations.c.reservation_id)
            .with_for_update()
        )
        .scalars()
        .all()
    )
    if not ids:
        return []
    return list(
        connection.execute(
            sa.select(lines).where(lines.c.root == root, lines.c.reservation_id.in_(ids))
        )
    )


def release_rest(connection: Connection, root: str, rest: Sequence[sa.Row[Any]]) -> None:
    """Release planned steps by their lines, as :func:`lock_rest` returned them.

    The caller holds the locks of all balances that are moved.
    """
    if not rest:
        return
    move(
        connection,
        root,
        [Move(key_of(line), -line.reserved, 0, line.reservation_id) for line in rest],
        "release",
        PREDECESSOR,
    )
    ids = sorted({line.reservation_id for line in rest})
    connection.execute(
        lines.update()
        .where(lines.c.root == root, lines.c.reservation_id.in_(ids))
        .values(reserved=0)
    )
    connection.execute(
        reservations.update()
        .where(reservations.c.root == root, reservations.c.reservation_id.in_(ids))
        .values(state="released", reason=PREDECESSOR, ended_us=now_us())
    )


def release_unreached(connection: Connection, reservation: sa.Row[Any]) -> None:
    """Release what is planned after a step that succeeded, where the next one was never published.

    The chain was changed, or its next step refused by the worker. The caller holds the step's
    reservation. Locks the planned ones by id, then their balances in order.
    """
    root: str = reservation.root
    rest = lock_rest(connection, root, reservation.plan_id, reservation.step)
    following = {
        row.reservation_id
        for row in connection.execute(
            sa.select(reservations.c.reservation_id).where(
                reservations.c.root == root,
                reservations.c.plan_id == reservation.plan_id,
                reservations.c.state == "planned",
                reservations.c.step == reservation.step + 1,
            )
        )
    }
    if following.intersection(line.reservation_id for line in rest):
        release_rest(connection, root, rest)


def hand_over(connection: Connection, reservation: sa.Row[Any]) -> bool:
    """Have a task's replacement take its step of the plan; false where none has a reservation.

    The caller holds the replaced task's reservation; locks that of its replacement, made later.
    """
    return bool(
        connection.execute(
            reservations.update()
            .where(
                reservations.c.root == reservation.root,
                reservations.c.task_id == reservation.task_id,
                reservations.c.nesting == reservation.nesting + 1,
                reservations.c.ended_us.is_(None),
            )
            .values(plan_id=reservation.plan_id, step=reservation.step)
        ).rowcount
    )
