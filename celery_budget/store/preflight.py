"""Preflight: which lanes' workers are to be asked, and what is kept of their answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.lanes import Lane
from celery_budget.store import outbox as outboxes
from celery_budget.store.lanes import find, holds
from celery_budget.store.schema import (
    IS_HELD,
    attempts,
    instant,
    lanes,
    now_us,
    outbox,
    reservations,
)

__all__ = ["ToAsk", "asked", "note_answer", "take_to_ask"]


def asked(connection: Connection, root: str, every_us: int) -> list[str]:
    """Return the lanes that hold work and whose workers were not asked for so long.

    Only those with preflight. Locks nothing.
    """
    return list(
        connection.execute(
            sa.select(lanes.c.name)
            .where(
                lanes.c.root == root,
                lanes.c.preflight,
                lanes.c.deleted.is_(False),
                lanes.c.checked_us <= instant() - every_us,
                holds(root),
            )
            .order_by(lanes.c.checked_us, lanes.c.name)
        ).scalars()
    )


@dataclass(frozen=True)
class ToAsk:
    """A lane whose workers are to be asked.

    :ivar brokers: those that the work it holds goes to.
    :ivar works: whether anything of it runs whose lease is kept: some worker of it lives.
    """

    lane: Lane
    brokers: tuple[str, ...]
    works: bool


#: How many of the messages that wait tell to which brokers they go.
LOOKED_AT = 100


def take_to_ask(connection: Connection, root: str, name: str) -> ToAsk | None:
    """Return what is to be asked about a lane; none where it is gone. Locks nothing."""
    lane = find(connection, root, name).get(name)
    if lane is None:
        return None
    oldest = (
        sa.select(outbox.c.broker)
        .where(outbox.c.root == root, outbox.c.lane == name, sa.text(IS_HELD))
        .order_by(outbox.c.due_us)
        .limit(LOOKED_AT)
    )
    brokers: Collection[str] = set(connection.execute(oldest).scalars())
    works = connection.execute(
        sa.select(attempts.c.attempt)
        .join(
            reservations,
            sa.and_(
                reservations.c.root == attempts.c.root,
                reservations.c.reservation_id == attempts.c.reservation_id,
            ),
        )
        .where(
            attempts.c.root == root,
            attempts.c.lease_until_us > instant(),
            attempts.c.ended_us.is_(None),
            reservations.c.lane == name,
        )
        .limit(1)
    ).first()
    return ToAsk(lane, tuple(sorted(brokers)), works is not None)


def note_answer(
    connection: Connection, root: str, name: str, awake: bool, reason: str | None
) -> None:
    """Note whether a lane's workers answered, and why not. Locks the lane's row.

    A relay that sleeps is woken where they do: they are asked where the lane holds something.
    """
    connection.execute(
        lanes.update()
        .where(lanes.c.root == root, lanes.c.name == name)
        .values(awake=awake, asleep_reason=reason, checked_us=now_us())
    )
    if awake:
        outboxes.wake(connection, root)
