"""Pending work: what was accepted and lacks a step, by kind. Reading only; locks nothing.

Each source (messages, attempts, parked work, planned steps, results, quarantine) is one SELECT that
says of each row what kind it is, since when, and when its next step is due by the rules that bring
it there. Counting and listing are the same for all of them: exact counts, and of each kind a few.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import CLAIMABLE
from celery_budget.store.attempts import UNCERTAIN
from celery_budget.store.continuations import GIVEN_UP
from celery_budget.store.lapses import select_open
from celery_budget.store.schema import (
    attempts,
    instant,
    lanes,
    outbox,
    parked,
    quarantine,
    reservations,
    untold,
)
from celery_budget.store.silent import unstarted

__all__ = [
    "KINDS",
    "Counted",
    "Published",
    "admitted",
    "counted",
    "listed",
    "published",
    "settled",
]

#: What is late by less is not overdue: somebody is at it.
SECOND_US = 1_000_000

#: What can be lacking, in the order of a request's life.
KINDS = (
    "parked",
    "planned",
    "held",
    "behind",
    "later",
    "due",
    "taken",
    "failing",
    "published",
    "running",
    "lapsed",
    "asked",
    "retry",
    "unclosed",
    "untold",
    "quarantined",
)


@dataclass(frozen=True)
class Counted:
    """How much lacks one kind of step.

    :ivar oldest_us: since when the oldest does.
    :ivar overdue: of how many the time is over at which something was to be done.
    :ivar overdue_us: for how long, at the most.
    """

    kind: str
    count: int
    oldest_us: int
    overdue: int
    overdue_us: int


@dataclass(frozen=True)
class Published:
    """What was published to one queue and nobody has started.

    :ivar queue: as the outbox calls it.
    :ivar envelope: of one of the messages.
    :ivar next_us: when the first of them is looked at again.
    """

    broker: str
    queue: str
    count: int
    oldest_us: int
    next_us: int
    envelope: str


def _messages(root: str, now: sa.ColumnElement[int]) -> sa.Select[Any]:
    """Messages that are to be published, or were and nobody has started them.

    Of requests that an attempt runs, or has ended, the attempt says what is lacking.
    """
    to_come = outbox.c.due_us > now
    its_lane = sa.and_(lanes.c.root == outbox.c.root, lanes.c.name == outbox.c.lane)
    kind = sa.case(
        (outbox.c.state == "published", "published"),
        (outbox.c.behind, "behind"),
        (outbox.c.state == "held", "held"),
        (sa.not_(to_come), "due"),
        (outbox.c.taken_by.is_not(None), "taken"),
        (outbox.c.last_error.is_not(None), "failing"),
        (reservations.c.state == "waiting", "retry"),
        else_="later",
    )
    waited = outbox.c.due_us + lanes.c.max_wait_us
    ends = sa.case(
        (outbox.c.expires_us < waited, outbox.c.expires_us),
        else_=sa.func.coalesce(waited, outbox.c.expires_us),
    )
    next_us = sa.case(
        (outbox.c.state == "held", ends),
        (sa.and_(outbox.c.behind, outbox.c.state != "published"), sa.null()),
        else_=outbox.c.due_us,
    )
    return (
        sa.select(
            kind.label("kind"),
            outbox.c.outbox_id.label("id"),
            outbox.c.task_id,
            outbox.c.task_name,
            sa.func.coalesce(outbox.c.published_us, outbox.c.created_us).label("since_us"),
            next_us.label("next_us"),
            outbox.c.due_us,
            outbox.c.broker,
            outbox.c.queue,
            outbox.c.lane,
            outbox.c.order_key,
            outbox.c.expires_us,
            outbox.c.publishes,
            outbox.c.failures,
            outbox.c.last_error,
        )
        .select_from(
            outbox.outerjoin(
                reservations,
                sa.and_(
                    reservations.c.root == outbox.c.root,
                    reservations.c.reservation_id == outbox.c.reservation_id,
                ),
            ).outerjoin(lanes, its_lane)
        )
        .where(
            outbox.c.root == root,
            sa.or_(
                unstarted(root),
                sa.and_(
                    outbox.c.state.in_(("due", "held")),
                    sa.or_(
                        outbox.c.reservation_id.is_(None),
                        reservations.c.state.in_(CLAIMABLE),
                    ),
                ),
            ),
        )
    )


def _attempts(root: str, now: sa.ColumnElement[int]) -> sa.Select[Any]:
    """Attempts that run, or have ended and are not closed."""
    kind = sa.case(
        (attempts.c.outcome == UNCERTAIN, "asked"),
        (attempts.c.ended_us.is_not(None), "unclosed"),
        (attempts.c.lease_until_us <= now, "lapsed"),
        else_="running",
    )
    return (
        select_open()
        .add_columns(
            kind.label("kind"),
            attempts.c.reservation_id.label("id"),
            sa.func.coalesce(attempts.c.ended_us, attempts.c.started_us).label("since_us"),
            attempts.c.lease_until_us.label("next_us"),
            attempts.c.worker,
            attempts.c.started_us,
            attempts.c.suspected_us,
            reservations.c.cancelled_us,
        )
        .where(attempts.c.root == root, attempts.c.lease_until_us.is_not(None))
    )


def _parked(root: str, now: sa.ColumnElement[int]) -> sa.Select[Any]:
    return sa.select(
        sa.literal("parked").label("kind"),
        parked.c.parked_id.label("id"),
        parked.c.task_id,
        parked.c.task_name,
        parked.c.created_us.label("since_us"),
        parked.c.deadline_us.label("next_us"),
        parked.c.budget,
        parked.c.amount,
        parked.c.reservation_id.is_not(None).label("retries"),
    ).where(parked.c.root == root)


def _planned(root: str, now: sa.ColumnElement[int]) -> sa.Select[Any]:
    before = reservations.alias("before")
    step = (
        sa.select(before.c.task_id)
        .where(
            before.c.root == root,
            sa.or_(
                before.c.plan_id == reservations.c.plan_id,
                before.c.reservation_id == reservations.c.plan_id,
            ),
            before.c.step == reservations.c.step - 1,
        )
        .order_by(before.c.nesting.desc())
        .limit(1)
        .correlate(reservations)
        .scalar_subquery()
    )
    return sa.select(
        sa.literal("planned").label("kind"),
        reservations.c.reservation_id.label("id"),
        reservations.c.task_id,
        reservations.c.task_name,
        reservations.c.created_us.label("since_us"),
        sa.cast(sa.null(), sa.BigInteger).label("next_us"),
        reservations.c.step,
        step.label("follows"),
    ).where(
        reservations.c.root == root,
        reservations.c.state == "planned",
        reservations.c.ended_us.is_(None),
    )


def _untold(root: str, now: sa.ColumnElement[int]) -> sa.Select[Any]:
    return (
        sa.select(
            sa.literal("untold").label("kind"),
            untold.c.untold_id.label("id"),
            untold.c.task_id,
            sa.func.coalesce(reservations.c.task_name, "").label("task_name"),
            untold.c.created_us.label("since_us"),
            untold.c.due_us.label("next_us"),
            untold.c.reason,
            untold.c.tries,
        )
        .select_from(
            untold.outerjoin(
                reservations,
                sa.and_(
                    reservations.c.root == untold.c.root,
                    reservations.c.reservation_id == untold.c.reservation_id,
                ),
            )
        )
        .where(untold.c.root == root)
    )


def _quarantined(root: str, now: sa.ColumnElement[int]) -> sa.Select[Any]:
    return sa.select(
        sa.literal("quarantined").label("kind"),
        quarantine.c.quarantine_id.label("id"),
        quarantine.c.task_id,
        quarantine.c.task_name,
        quarantine.c.quarantined_us.label("since_us"),
        sa.cast(sa.null(), sa.BigInteger).label("next_us"),
        quarantine.c.reason,
    ).where(quarantine.c.root == root)


def _moment(at_us: int) -> sa.ColumnElement[int]:
    """One moment for all statements: by a clock that moves on a row would be of two kinds."""
    return sa.literal(at_us, sa.BigInteger)


_SOURCES = (_messages, _attempts, _parked, _planned, _untold, _quarantined)


def counted(connection: Connection, root: str, at_us: int) -> list[Counted]:
    """Return how much lacks each kind of step at a moment; no kind that nothing lacks."""
    now = _moment(at_us)
    found = {}
    for source in _SOURCES:
        rows = source(root, now).subquery()
        over = now - rows.c.next_us
        for row in connection.execute(
            sa.select(
                rows.c.kind,
                sa.func.count().label("requests"),
                sa.func.max(now - rows.c.since_us).label("oldest_us"),
                sa.func.count(sa.case((over >= SECOND_US, 1))).label("overdue"),
                sa.func.max(over).label("overdue_us"),
            ).group_by(rows.c.kind)
        ):
            found[row.kind] = Counted(
                row.kind,
                int(row.requests),
                max(0, int(row.oldest_us)),
                int(row.overdue),
                max(0, int(row.overdue_us or 0)),
            )
    return [found[kind] for kind in KINDS if kind in found]


def listed(connection: Connection, root: str, limit: int, at_us: int) -> Iterator[sa.Row[Any]]:
    """Yield what lacks a step at a moment, up to ``limit`` of each kind, longest overdue first."""
    now = _moment(at_us)
    for source in _SOURCES:
        rows = source(root, now).subquery()
        # What is due at no time comes last, in both dialects.
        order = (rows.c.next_us.is_(None), rows.c.next_us, rows.c.since_us, rows.c.id)
        place = sa.func.row_number().over(partition_by=rows.c.kind, order_by=order)
        placed = sa.select(rows, place.label("place"), now.label("now_us")).subquery()
        yield from connection.execute(
            sa.select(placed).where(placed.c.place <= limit).order_by(placed.c.place)
        )


def published(connection: Connection, root: str, limit: int, at_us: int) -> list[Published]:
    """Return for each queue what was published to it and nobody has started, the most first.

    :param limit: of how many queues.
    """
    mine, now = unstarted(root), _moment(at_us)
    queues = connection.execute(
        sa.select(
            outbox.c.broker,
            outbox.c.queue,
            sa.func.count().label("requests"),
            sa.func.max(now - outbox.c.published_us).label("oldest_us"),
            sa.func.min(outbox.c.due_us).label("next_us"),
        )
        .where(mine)
        .group_by(outbox.c.broker, outbox.c.queue)
        .order_by(sa.func.count().desc(), outbox.c.broker, outbox.c.queue)
        .limit(limit)
    ).all()
    found = []
    for row in queues:
        envelope = connection.execute(
            sa.select(outbox.c.envelope)
            .where(mine, outbox.c.broker == row.broker, outbox.c.queue == row.queue)
            .limit(1)
        ).scalar_one()
        found.append(
            Published(
                row.broker,
                row.queue,
                int(row.requests),
                max(0, int(row.oldest_us)),
                int(row.next_us),
                envelope,
            )
        )
    return found


def admitted(connection: Connection, root: str) -> int:
    """Return how many requests were admitted."""
    return connection.execute(
        sa.select(sa.func.count())
        .select_from(reservations)
        .where(
            reservations.c.root == root,
            # What was given up before it was ever admitted is kept for its story.
            sa.or_(
                reservations.c.state != "released",
                sa.func.coalesce(reservations.c.reason, "") != GIVEN_UP,
            ),
        )
    ).scalar_one()


def settled(
    connection: Connection, root: str, limit: int, age_us: int | None
) -> list[tuple[uuid.UUID, str, str, str]]:
    """Return requests whose result should be stored: those admitted last that have ended.

    Id, task id, task's name, and what the last attempt came to. Those whose attempts are closed,
    with nothing untold, and whose task id stands for no other request.

    :param age_us: only those that ended within this time; none for all.
    """
    other = reservations.alias("other")
    last = sa.and_(
        attempts.c.root == reservations.c.root,
        attempts.c.reservation_id == reservations.c.reservation_id,
        attempts.c.attempt == reservations.c.attempts,
    )
    rows = connection.execute(
        sa.select(
            reservations.c.reservation_id,
            reservations.c.task_id,
            reservations.c.task_name,
            attempts.c.outcome,
        )
        .join(attempts, last)
        .where(
            reservations.c.root == root,
            reservations.c.state.in_(("settled", "lost")),
            attempts.c.outcome.in_(("returned", "raised", UNCERTAIN)),
            attempts.c.lease_until_us.is_(None),
            # What runs in place is at a host's process, not at a worker: Celery stores no result.
            attempts.c.worker.like("%@%"),
            sa.true() if age_us is None else reservations.c.ended_us > instant() - age_us,
            ~sa.exists(sa.text("1")).where(
                untold.c.root == root, untold.c.task_id == reservations.c.task_id
            ),
            ~sa.exists(sa.text("1")).where(
                other.c.root == root,
                other.c.task_id == reservations.c.task_id,
                other.c.reservation_id != reservations.c.reservation_id,
            ),
        )
        .order_by(reservations.c.reservation_id.desc())
        .limit(limit)
    )
    return [(row.reservation_id, row.task_id, row.task_name, row.outcome) for row in rows]
