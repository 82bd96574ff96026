"""Lanes as they are declared, and how they stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from celery_budget.core.lane_files import LaneChange, compare_lanes
from celery_budget.core.lanes import Lane, Load
from celery_budget.core.reservations import CLAIMABLE
from celery_budget.errors import InvalidLane, UnknownLane
from celery_budget.store import outbox as outboxes
from celery_budget.store.budgets import lock_root
from celery_budget.store.insert import insert_new
from celery_budget.store.schema import (
    IS_HELD,
    IS_RELEASED,
    exact_sum,
    instant,
    lane_queues,
    lane_tallies,
    lanes,
    outbox,
    reservations,
)
from celery_budget.store.waiting import TERMS, lane_of, written_budgets

__all__ = [
    "FRESH_ANSWER_US",
    "Answer",
    "LaneStanding",
    "apply",
    "declare",
    "delete",
    "find",
    "holds",
    "loads",
    "named",
    "pause",
    "standings",
]


#: For how long it counts that a lane's workers answered.
FRESH_ANSWER_US = 10_000_000


@dataclass(frozen=True)
class Answer:
    """What was found when a lane's workers were asked.

    :ivar awake: whether they answered; none where they were never asked.
    :ivar seconds: how long ago that was.
    :ivar reason: why they count as asleep.
    """

    awake: bool | None
    seconds: float | None
    reason: str | None


@dataclass(frozen=True)
class LaneStanding:
    """How a lane stands.

    :ivar waiting: what it holds back, be it due or not.
    :ivar queued: what it has released and nobody has started.
    :ivar running: what runs.
    :ivar oldest_us: for how long the oldest that it holds has been due.
    """

    lane: Lane
    waiting: Load
    queued: Load
    running: Load
    oldest_us: int
    answer: Answer


def find(connection: Connection, root: str, name: str | None = None) -> dict[str, Lane]:
    """Return the lanes of a root by name, or only the one with this name. Locks nothing."""
    one = [] if name is None else [lanes.c.name == name]
    rows = connection.execute(
        sa.select(lanes).where(lanes.c.root == root, lanes.c.deleted.is_(False), *one)
    ).all()
    queues: dict[str, list[str]] = defaultdict(list)
    for row in connection.execute(
        sa.select(lane_queues.c.lane, lane_queues.c.queue).where(lane_queues.c.root == root)
    ):
        queues[row.lane].append(row.queue)
    return {row.name: lane_of(row, queues[row.name]) for row in sorted(rows, key=_name)}


def named(connection: Connection, root: str, names: Sequence[str]) -> list[Lane]:
    """Return the lanes with these names, in their order. One SELECT; locks nothing.

    :raises UnknownLane: where there is none.
    """
    rows = connection.execute(
        sa.select(lanes, lane_queues.c.queue)
        .outerjoin(
            lane_queues,
            sa.and_(lane_queues.c.root == lanes.c.root, lane_queues.c.lane == lanes.c.name),
        )
        .where(lanes.c.root == root, lanes.c.name.in_(names), lanes.c.deleted.is_(False))
    ).all()
    queues: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        queues[row.name].append(row.queue)
    found = {row.name: row for row in rows}
    for name in names:
        if name not in found:
            raise UnknownLane(name)
    return [lane_of(found[name], queues[name]) for name in names]


def _name(row: sa.Row[Any]) -> str:
    return str(row.name)


def declare(connection: Connection, root: str, name: str, terms: Mapping[str, Any]) -> Lane:
    """Make a lane, or change the ``terms`` that are given; return it as it is then.

    What waits in it goes by its new terms. What it holds of a queue that it feeds no longer stays
    in it. Locks the root, then the lane's row: a dispatch that goes on is waited for.

    :param terms: by their names, which whoever calls has checked.
    :raises InvalidLane: for values that cannot be, and where another lane feeds a queue.
    """
    lock_root(connection, root)
    before = find(connection, root, name).get(name)
    lane = Lane(name, **{"queues": (), **terms}) if before is None else replace(before, **terms)
    write(connection, root, lane)
    return lane


def write(connection: Connection, root: str, lane: Lane) -> None:
    """Make a lane what it is to be, all of it. The caller has locked the root.

    :raises InvalidLane: where another lane feeds one of its queues.
    """
    name = lane.name
    taken = connection.execute(
        sa.select(lane_queues).where(
            lane_queues.c.root == root,
            lane_queues.c.queue.in_(lane.queues),
            lane_queues.c.lane != name,
        )
    ).first()
    if taken is not None:
        raise InvalidLane(
            f"queue {taken.queue!r} of lane {name!r} is fed by lane {taken.lane!r}; a queue has "
            "one lane: take it out of the other one first"
        )
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    values: dict[str, Any] = {term: getattr(lane, term) for term in TERMS}
    values |= {"budgets": written_budgets(lane), "deleted": False}
    connection.execute(
        insert(lanes)
        .values(root=root, name=name, **values)
        .on_conflict_do_update(index_elements=["root", "name"], set_=values)
    )
    mine = sa.and_(lane_queues.c.root == root, lane_queues.c.lane == name)
    connection.execute(lane_queues.delete().where(mine, lane_queues.c.queue.not_in(lane.queues)))
    for queue in lane.queues:
        insert_new(connection, lane_queues, root=root, queue=queue, lane=name)
    insert_new(connection, lane_tallies, root=root, lane=name, jobs=0, units=0, counted_us=0)
    outboxes.wake(connection, root)


def apply(
    connection: Connection,
    wanted: Mapping[str, Sequence[Lane]],
    prune: bool = False,
    only_compare: bool = False,
) -> tuple[LaneChange, ...]:
    """Make the lanes of each root as they are ``wanted``; return what that changes.

    All or nothing, in the caller's transaction. What is paused stays so. Locks the roots in order,
    then the lanes' rows.

    :param prune: delete what is not wanted.
    :param only_compare: change nothing.
    :raises InvalidLane: where a lane that is not wanted feeds a queue of one that is.
    """
    changes: list[LaneChange] = []
    for root in sorted(wanted):
        lock_root(connection, root)
        existing = find(connection, root)
        mine = compare_lanes(root, existing, wanted[root], prune)
        changes += mine
        if only_compare:
            continue
        changed = [one.name for one in mine if one.before is not None]
        # A queue may go from one of them to another.
        connection.execute(
            lane_queues.delete().where(lane_queues.c.root == root, lane_queues.c.lane.in_(changed))
        )
        for change in mine:
            if change.after is None:
                delete(connection, root, change.name)
            else:
                paused = change.before is not None and change.before.paused
                write(connection, root, replace(change.after, paused=paused))
    return tuple(changes)


def pause(connection: Connection, root: str, name: str, paused: bool) -> Lane:
    """Have a lane release nothing until it is resumed, or resume it; a repeat changes nothing.

    Locks the lane's row: a dispatch that goes on is waited for, and none follows it.

    :raises UnknownLane: where there is none.
    """
    done = connection.execute(
        lanes.update()
        .where(lanes.c.root == root, lanes.c.name == name, lanes.c.deleted.is_(False))
        .values(paused=paused)
    ).rowcount
    if not done:
        raise UnknownLane(name)
    if not paused:
        outboxes.wake(connection, root)
    return find(connection, root, name)[name]


def delete(connection: Connection, root: str, name: str) -> None:
    """Delete a lane: it feeds no queue any more, and all that it holds is let go.

    Its row stays until then, and afterwards, since a transaction that is open still may hold
    something by it. Locks the root, then the lane's row.

    :raises UnknownLane: where there is none.
    """
    lock_root(connection, root)
    done = connection.execute(
        lanes.update()
        .where(lanes.c.root == root, lanes.c.name == name, lanes.c.deleted.is_(False))
        .values(deleted=True, paused=False)
    ).rowcount
    if not done:
        raise UnknownLane(name)
    connection.execute(
        lane_queues.delete().where(lane_queues.c.root == root, lane_queues.c.lane == name)
    )
    outboxes.wake(connection, root)


def loads(connection: Connection, root: str, name: str) -> tuple[Load, Load]:
    """Return what a lane has released that nobody has started, and what of it runs.

    One statement, so that what starts meanwhile is in one of the two. Reads the messages that were
    released and are not done with, never what waits or has ended. Locks nothing.
    """
    released = (
        sa.select(outbox.c.reservation_id, outbox.c.weight)
        .where(outbox.c.root == root, outbox.c.lane == name, sa.text(IS_RELEASED))
        .subquery()
    )
    runs = reservations.c.state == "running"
    rows = connection.execute(
        sa.select(runs, sa.func.count(), exact_sum(released.c.weight))
        .join(
            reservations,
            sa.and_(
                reservations.c.root == root,
                reservations.c.reservation_id == released.c.reservation_id,
            ),
        )
        .where(reservations.c.state.in_((*CLAIMABLE, "running")))
        .group_by(runs)
    ).all()
    found = {bool(running): Load(jobs, int(units)) for running, jobs, units in rows}
    return found.get(False, Load()), found.get(True, Load())


def standings(connection: Connection, root: str, name: str | None = None) -> list[LaneStanding]:
    """Return how each lane stands, by name, or only one. Reads all that waits. Locks nothing."""
    answers = {
        row.name: Answer(
            row.awake,
            None if row.checked_us == 0 else max(0, row.ago_us) / 1_000_000,
            row.asleep_reason,
        )
        for row in connection.execute(
            sa.select(
                lanes.c.name,
                lanes.c.awake,
                lanes.c.checked_us,
                lanes.c.asleep_reason,
                (instant() - lanes.c.checked_us).label("ago_us"),
            ).where(lanes.c.root == root)
        )
    }
    found = []
    for lane in find(connection, root, name).values():
        jobs, units, oldest_us = connection.execute(
            sa.select(
                sa.func.count(),
                exact_sum(outbox.c.weight),
                sa.func.max(instant() - outbox.c.due_us),
            ).where(outbox.c.root == root, outbox.c.lane == lane.name, sa.text(IS_HELD))
        ).one()
        queued, running = loads(connection, root, lane.name)
        waiting = Load(jobs, int(units or 0))
        oldest = max(0, int(oldest_us or 0))
        found.append(LaneStanding(lane, waiting, queued, running, oldest, answers[lane.name]))
    return found


def holds(root: str) -> sa.ColumnElement[bool]:
    """Return what tells in a statement whether a lane holds anything.

    A value and no EXISTS, for which PostgreSQL may read all that any lane holds.
    """
    held = sa.select(outbox.c.outbox_id).where(
        outbox.c.root == root, outbox.c.lane == lanes.c.name, sa.text(IS_HELD)
    )
    return held.limit(1).scalar_subquery().is_not(None)
