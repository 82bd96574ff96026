"""How a job stands: a few reads of what is known of one task, however often it was retried.

A task id is its owner's: the first budget that the first request with it has named. Whoever names
another owner finds nothing, as of an id that nobody has used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.reservations import CLAIMABLE
from celery_budget.store.parked import request_of
from celery_budget.store.schema import (
    IS_HELD,
    attempts,
    exact_sum,
    lanes,
    now_us,
    of_reservation,
    outbox,
    parked,
    quarantine,
    reservations,
    untold,
    usage,
)

#: Up to how many messages are counted that go before one.
MOST_COUNTED = 1000

__all__ = ["Known", "find", "last_of"]


@dataclass(frozen=True)
class Known:
    """What the ledger knows of a job; see :func:`celery_budget.core.jobs.job_state`.

    :ivar position: how many a lane lets go before it, of what its tenant has there; none where
        none holds it.
    :ivar unfinished: whether its result has still to be stored.
    :ivar ended_for_us: how long ago it has ended; none where it has not.
    """

    task_id: str
    task_name: str
    owner: str
    state: str | None
    reason: str | None
    outcome: str | None
    parked: bool
    position: int | None
    quarantined: bool
    unfinished: bool
    usage: dict[str, int]
    attempts: int
    created_us: int
    started_us: int | None
    ended_us: int | None
    ended_for_us: int | None
    deadline_us: int | None


def find(connection: Connection, root: str, task_id: str, owner: str) -> Known | None:
    """Return what is known of an owner's job; none where it is unknown, or another owner's.

    Of a task that has replaced itself, what it has become. Locks nothing; seven reads at most.
    """
    of_task = sa.and_(reservations.c.root == root, reservations.c.task_id == task_id)
    first = connection.execute(
        sa.select(reservations.c.owner, reservations.c.task_name, reservations.c.created_us)
        .where(of_task)
        .order_by(reservations.c.created_us, reservations.c.nesting)
        .limit(1)
    ).first()
    waits = connection.execute(
        sa.select(parked)
        .where(parked.c.root == root, parked.c.task_id == task_id)
        # Another owner may have given a request of its own the same task id.
        .where((parked.c.owner == owner) | (parked.c.nesting > 0))
        .order_by(parked.c.created_us.desc())
        .limit(1)
    ).first()
    begun = first if first is not None else waits
    if begun is None or begun.owner != owner:
        return None
    # A request of another owner's that was given the same task id is none of its.
    mine = sa.and_(of_task, (reservations.c.owner == owner) | (reservations.c.nesting > 0))
    last = last_of(connection, mine)
    used, started_us, ran = _used(connection, mine)
    return Known(
        task_id=task_id,
        task_name=(begun if last is None else last).task_name,
        owner=owner,
        state=None if last is None else last.state,
        reason=None if last is None else last.reason,
        outcome=None if last is None else last.outcome,
        parked=waits is not None,
        position=None if last is None else _position(connection, last),
        quarantined=last is not None and last.quarantined,
        unfinished=last is not None and (last.lease_until_us is not None or last.untold),
        usage=used,
        attempts=ran,
        created_us=begun.created_us,
        started_us=started_us,
        ended_us=None if last is None else last.ended_us,
        ended_for_us=None if last is None else last.ended_for_us,
        deadline_us=_deadline_us(last, waits),
    )


def _deadline_us(last: sa.Row[Any] | None, waits: sa.Row[Any] | None) -> int | None:
    if last is not None:
        return None if last.deadline_us is None else int(last.deadline_us)
    return None if waits is None else request_of(waits).deadline_us


def _position(connection: Connection, last: sa.Row[Any]) -> int | None:
    """Return how many messages a lane lets go before a reservation's; none where none holds it.

    Of those that its tenant has there, which go by weight, what waits counting lighter by the time;
    but for what waits for another one by its order key. At most :data:`MOST_COUNTED`. Reads those
    that are lighter, or were due before they could overtake it; locks nothing.
    """
    if last.state not in CLAIMABLE:
        return None
    mine = connection.execute(
        sa.select(outbox, lanes.c.ageing)
        .join(lanes, sa.and_(lanes.c.root == outbox.c.root, lanes.c.name == outbox.c.lane))
        .where(
            outbox.c.root == last.root,
            outbox.c.reservation_id == last.reservation_id,
            sa.text(f"budget_outbox.{IS_HELD}"),
        )
        .limit(1)
    ).first()
    if mine is None:
        return None
    lighter = sa.cast(outbox.c.weight - mine.weight, sa.Float(53)) * 1_000_000
    later = sa.cast(outbox.c.due_us - mine.due_us, sa.Float(53)) * mine.ageing
    # What is due after that has no less weight than is overtaken.
    latest = mine.due_us + mine.weight * 1_000_000 // mine.ageing if mine.ageing else None
    in_reach = (
        outbox.c.weight <= mine.weight
        if latest is None
        else outbox.c.due_us <= min(latest, MAX_AMOUNT)
    )
    counts = lighter + later
    same = sa.and_(
        counts == 0, sa.tuple_(outbox.c.due_us, outbox.c.outbox_id) < (mine.due_us, mine.outbox_id)
    )
    before = sa.select(outbox.c.outbox_id).where(
        outbox.c.root == last.root,
        outbox.c.lane == mine.lane,
        outbox.c.behind == sa.false(),
        outbox.c.tenant == mine.tenant,
        outbox.c.outbox_id != mine.outbox_id,
        sa.text(IS_HELD),
        in_reach,
        sa.or_(counts < 0, same),
    )
    counted = sa.select(sa.func.count()).select_from(before.limit(MOST_COUNTED).subquery())
    return int(connection.execute(counted).scalar_one())


def last_of(connection: Connection, mine: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
    """Return the last of some reservations, with its last attempt and where it is noted.

    Locks nothing.
    """

    def noted_in(table: sa.Table) -> sa.ColumnElement[bool]:
        return sa.exists(sa.text("1")).where(
            table.c.root == reservations.c.root,
            table.c.task_id == reservations.c.task_id,
            table.c.reservation_id == reservations.c.reservation_id,
        )

    return connection.execute(
        sa.select(
            reservations,
            attempts.c.outcome,
            attempts.c.lease_until_us,
            noted_in(quarantine).label("quarantined"),
            noted_in(untold).label("untold"),
            (now_us() - reservations.c.ended_us).label("ended_for_us"),
        )
        .outerjoin(attempts, sa.and_(of_reservation, attempts.c.attempt == reservations.c.attempts))
        .where(mine)
        .order_by(reservations.c.nesting.desc(), reservations.c.created_us.desc())
        .limit(1)
    ).first()


def _used(
    connection: Connection, mine: sa.ColumnElement[bool]
) -> tuple[dict[str, int], int | None, int]:
    """Return what was used in each unit, when the first attempt started, and how many have run."""
    ran = connection.execute(
        sa.select(
            sa.func.min(attempts.c.started_us).label("started_us"),
            sa.func.count().label("runs"),
        )
        .select_from(sa.join(reservations, attempts, of_reservation))
        .where(mine, sa.func.coalesce(attempts.c.outcome, "") != "refused")
    ).one()
    if not ran.runs:
        return {}, None, 0
    amounts = connection.execute(
        sa.select(usage.c.unit, exact_sum(usage.c.amount).label("amount"))
        .select_from(
            sa.join(
                reservations,
                usage,
                sa.and_(
                    usage.c.root == reservations.c.root,
                    usage.c.reservation_id == reservations.c.reservation_id,
                ),
            )
        )
        .where(mine)
        .group_by(usage.c.unit)
        .order_by(usage.c.unit)
    )
    return {row.unit: int(row.amount) for row in amounts}, ran.started_us, int(ran.runs)
