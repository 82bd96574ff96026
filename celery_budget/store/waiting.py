"""What lanes hold back: which lane feeds a queue, and whether it takes more, as admissions ask.

The same decisions as those of the PostgreSQL function ``budget_lane_full``.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.lanes import HEAVY, Lane, LaneBudget, Load
from celery_budget.core.reservations import Full
from celery_budget.store.schema import (
    IS_HELD,
    lane_queues,
    lane_tallies,
    lanes,
    now_us,
    outbox,
    wide_sum,
)

__all__ = [
    "FRESH_US",
    "MOST_COUNTED",
    "TERMS",
    "Fed",
    "fed",
    "feeding",
    "full",
    "has_lanes",
    "lane_of",
    "never",
    "written_budgets",
]

#: Up to how many messages are counted each time; of more than that a count is good for a while.
MOST_COUNTED = 500
FRESH_US = 2_000_000

#: The columns of a lane that are what it was declared with.
TERMS = (
    "max_queued_jobs",
    "max_queued_units",
    "max_running_jobs",
    "max_running_units",
    "burst_units",
    "max_waiting_jobs",
    "max_waiting_units",
    "max_wait_us",
    "paused",
    "preflight",
    "ageing",
)


@dataclass
class Fed:
    """A lane, and how much it holds back."""

    lane: Lane
    waiting: Load


def feeding(root: str, queue: Any) -> Any:
    """Return what stands in a statement for the lane that feeds a queue; NULL where none does."""
    return (
        sa.select(lane_queues.c.lane)
        .where(lane_queues.c.root == root, lane_queues.c.queue == queue)
        .scalar_subquery()
    )


def has_lanes(root: str) -> sa.ColumnElement[bool]:
    """Return what tells in a statement whether any queue is fed by a lane, as ``has_lanes``."""
    return sa.exists(sa.text("1")).where(lane_queues.c.root == root).label("has_lanes")


def lane_of(row: sa.Row[Any], queues: Collection[str]) -> Lane:
    """Return the lane that a row of the table declares."""
    budgets = tuple(LaneBudget(name, amount) for name, amount in json.loads(row.budgets))
    terms = {term: getattr(row, term) for term in TERMS}
    return Lane(row.name, tuple(queues), budgets=budgets, **terms)


def written_budgets(lane: Lane) -> str:
    """Return a lane's budgets as its row keeps them."""
    return json.dumps([(one.budget, one.amount) for one in lane.budgets])


def fed(
    connection: Connection, root: str, queues: Collection[str], *, note: bool = True
) -> dict[str, Fed]:
    """Return the lanes that feed some queues, by the queues, with what they hold back now.

    Up to :data:`MOST_COUNTED` messages are counted each time. Of more than that one call in two
    seconds counts them all, and the others read what it found. Locks the lane's row of the count,
    only to count, and never waits for it.

    :param note: note what was counted; where not, nothing is locked.
    """
    if not queues:
        return {}
    rows = connection.execute(
        sa.select(lanes, lane_queues.c.queue, lane_tallies, _is_fresh())
        .join(
            lane_queues,
            sa.and_(lane_queues.c.root == lanes.c.root, lane_queues.c.lane == lanes.c.name),
        )
        .join(
            lane_tallies,
            sa.and_(lane_tallies.c.root == lanes.c.root, lane_tallies.c.lane == lanes.c.name),
        )
        .where(lanes.c.root == root, lane_queues.c.queue.in_(sorted(queues)))
    ).all()
    found: dict[str, Fed] = {}
    for row in rows:
        if row.name not in found:
            lane = lane_of(row, [row.queue])
            bounded = lane.max_waiting_jobs is not None or lane.max_waiting_units is not None
            found[row.name] = Fed(lane, _waiting(connection, row, note) if bounded else Load())
    return {row.queue: found[row.name] for row in rows}


def never(connection: Connection, root: str, queue: str, weight: int) -> Full | None:
    """Return what a request is that its lane could never release; none where it may some time.

    Asked before it is parked, as it would wait for its budget in vain. One SELECT; locks nothing.
    """
    row = connection.execute(
        sa.select(lanes)
        .join(
            lane_queues,
            sa.and_(lane_queues.c.root == lanes.c.root, lane_queues.c.lane == lanes.c.name),
        )
        .where(lanes.c.root == root, lane_queues.c.queue == queue)
    ).first()
    return None if row is None else full(Fed(lane_of(row, [queue]), Load()), weight, HEAVY)


def full(fed: Fed, weight: int, *reasons: str) -> Full | None:
    """Return why a lane takes no new request of this weight; none where it does.

    :param reasons: only these count; all unless given.
    """
    refusal = fed.lane.refusal(weight, fed.waiting)
    if refusal is None or (reasons and refusal[0] not in reasons):
        return None
    reason, waiting, bound = refusal
    return Full(fed.lane.name, reason, weight, waiting, bound)


def _is_fresh() -> sa.ColumnElement[bool]:
    return (lane_tallies.c.counted_us > now_us() - FRESH_US).label("fresh")


def _waiting(connection: Connection, row: sa.Row[Any], note: bool) -> Load:
    counted = Load(int(row.jobs), int(row.units))
    if counted.jobs > MOST_COUNTED and row.fresh:
        return counted
    held = sa.select(outbox.c.weight).where(
        outbox.c.root == row.root, outbox.c.lane == row.name, sa.text(IS_HELD)
    )
    seen = _sum(connection, held.limit(MOST_COUNTED + 1))
    if seen.jobs <= MOST_COUNTED:
        return seen
    if not note:
        return _sum(connection, held)
    mine = sa.and_(lane_tallies.c.root == row.root, lane_tallies.c.lane == row.name)
    if not connection.execute(
        sa.select(lane_tallies.c.lane).where(mine).with_for_update(skip_locked=True)
    ).first():
        # Another one counts. What it counted last is nearer than what was just seen.
        return Load(max(counted.jobs, seen.jobs), max(counted.units, seen.units))
    seen = _sum(connection, held)
    connection.execute(
        lane_tallies.update()
        .where(mine)
        .values(jobs=seen.jobs, units=min(seen.units, MAX_AMOUNT), counted_us=now_us())
    )
    return seen


def _sum(connection: Connection, held: sa.Select[Any]) -> Load:
    weights = held.subquery()
    found = connection.execute(
        sa.select(sa.func.count().label("jobs"), wide_sum(weights.c.weight).label("units"))
    ).one()
    return Load(found.jobs, int(found.units or 0))
