"""Dispatching: what lanes hold is let go, as far as their limits let it, or comes to its end.

One relay at a time dispatches a lane: it holds the lane's row. What is released and not started,
and what runs, is counted from the ledger each time, so that whoever dies, and whenever, nothing of
it is lost or counted twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.dispatch import Snapshot, Waiting, choose, unseen
from celery_budget.core.lanes import TICK_US, Load
from celery_budget.core.reservations import CLAIMABLE
from celery_budget.store import deadlines, shares, untold
from celery_budget.store.claims import EXPIRED, pass_by, predecessor
from celery_budget.store.lanes import FRESH_ANSWER_US, holds, loads
from celery_budget.store.outbox import let_follow
from celery_budget.store.reservations import lock, release
from celery_budget.store.schema import IS_HELD, instant, lanes, now_us, outbox, reservations
from celery_budget.store.waiting import lane_of

__all__ = ["WAITED", "Overdue", "dispatch", "end", "holding", "overdue"]

#: Why a request ends that its lane has held back for too long.
WAITED = "wait_expired"

#: How many tenants one look takes, and how many of their jobs in all: half of them those that have
#: waited longest, half the lightest.
MOST_TENANTS = 100
LOOKED_AT = 1000
#: How many a lane that was deleted lets go at a time.
LET_GO = 1000


@dataclass(frozen=True)
class Overdue:
    """A message that a lane held for too long, or past its ``expires``, when it was looked at."""

    outbox_id: uuid.UUID
    reservation_id: uuid.UUID
    task_id: str
    lane: str


def holding(connection: Connection, root: str) -> list[str]:
    """Return the lanes that hold anything, by name. One SELECT; locks nothing."""
    return list(
        connection.execute(
            sa.select(lanes.c.name).where(lanes.c.root == root, holds(root)).order_by(lanes.c.name)
        ).scalars()
    )


def dispatch(connection: Connection, root: str, name: str) -> int:
    """Let go what a lane may release now; return how many messages became due.

    Locks the lane's row, or returns 0 where another relay has it; then the messages, passing by
    what is locked: whoever ends one of those has it. A claim, a settlement or a cancellation beside
    it takes no lock of a lane's: what they give back is seen by the next call. Of what was chosen
    nothing is released, or all, at commit.

    Of messages with one order key the first that is not published is released, and what follows it
    when that is: none takes a place in the queue for which it cannot be published yet.
    """
    row = connection.execute(
        sa.select(
            lanes,
            (lanes.c.checked_us <= now_us() - FRESH_ANSWER_US).label("is_stale"),
            (lanes.c.ticked_us > now_us() - TICK_US).label("ticks"),
        )
        .where(lanes.c.root == root, lanes.c.name == name)
        .with_for_update(skip_locked=True)
    ).first()
    if row is None:
        return 0
    if row.deleted:
        return _let_go(connection, root, name)
    # Which queues it feeds does not matter for what it holds already.
    lane = lane_of(row, [name])
    asleep = lane.preflight and (not row.awake or row.is_stale)
    if lane.paused or asleep or (lane.burst_units is not None and row.ticks):
        return 0
    # Where it has no limit to it, what was let go is not counted, however much that is.
    queued, running = loads(connection, root, name) if lane.is_limited else (Load(), Load())
    if lane.full(queued, running) is not None:
        return 0
    heads, each = _heads(connection, root, row)
    due = [one for one in heads if one.waited_us >= 0]
    started = [one for one in due if one.state not in CLAIMABLE]
    follows = [one for one in due if one.follows is not None and one not in started]
    if follows:
        pass_by(connection, root, follows)
    passed = {one.outbox_id for one in (*started, *follows)}
    seen = [Waiting(one.outbox_id, one.tenant, one.weight, one.waited_us) for one in heads]
    waiting = [one for one in seen if one.waited_us >= 0 and one.outbox_id not in passed]
    back = shares.take_back(connection, root, name)
    standing = shares.read(connection, root, name, {*back, *(one.tenant for one in waiting)})
    corrected = standing.corrected(back)
    standing = replace(standing, accounts={**standing.accounts, **corrected})
    decision = choose(Snapshot(lane, queued, running, waiting, standing, unseen(seen, each)))
    released = _release(connection, root, [*(one.outbox_id for one in started), *decision.release])
    changed = {**corrected, **decision.accounts}
    # Another has the rest, and ends it: it was not served.
    not_mine = set(decision.release) - released
    missed: dict[str, int] = {}
    for one in waiting:
        if one.outbox_id in not_mine:
            missed[one.tenant] = missed.get(one.tenant, 0) + one.weight
    changed |= replace(standing, accounts={**standing.accounts, **changed}).corrected(missed)
    shares.write(connection, root, name, changed)
    if decision.release and lane.burst_units is not None:
        connection.execute(
            lanes.update()
            .where(lanes.c.root == root, lanes.c.name == name)
            .values(ticked_us=now_us())
        )
    return len(released)


def _let_go(connection: Connection, root: str, name: str) -> int:
    """Let go what a lane holds that was deleted; it belongs to no lane from here on."""
    ids = (
        connection.execute(
            sa.select(outbox.c.outbox_id)
            .where(outbox.c.root == root, outbox.c.lane == name, sa.text(IS_HELD))
            .order_by(outbox.c.due_us)
            .limit(LET_GO)
            .with_for_update(skip_locked=True)
        )
        .scalars()
        .all()
    )
    if ids:
        connection.execute(
            outbox.update()
            .where(outbox.c.root == root, outbox.c.outbox_id.in_(ids))
            .values(state="due", lane=None)
        )
    return len(ids)


def _release(connection: Connection, root: str, chosen: Sequence[uuid.UUID]) -> set[uuid.UUID]:
    """Make held messages due, in this order; return those that still were held and not locked."""
    if not chosen:
        return set()
    mine = set(
        connection.execute(
            sa.select(outbox.c.outbox_id)
            .where(outbox.c.root == root, outbox.c.outbox_id.in_(chosen), sa.text(IS_HELD))
            .order_by(outbox.c.outbox_id)
            .with_for_update(skip_locked=True)
        ).scalars()
    )
    if not mine:
        return mine
    # Due now, and in the order in which they were chosen.
    places = {one: place for place, one in enumerate(reversed(chosen)) if one in mine}
    connection.execute(
        outbox.update()
        .where(outbox.c.root == root, outbox.c.outbox_id.in_(sorted(mine)))
        .values(state="due", due_us=instant() - sa.case(places, value=outbox.c.outbox_id, else_=0))
    )
    return mine


def _heads(connection: Connection, root: str, lane: sa.Row[Any]) -> tuple[list[sa.Row[Any]], int]:
    """Return of each tenant what has waited longest and what is lightest, and how many of both.

    Among them may be some that are not due: they have waited for less than nothing.

    Of more than :data:`MOST_TENANTS` one call looks at so many, and the next one at others. What
    that reads depends on neither how much waits nor how much ever did.
    """
    tenants = _tenants(connection, root, lane.name, lane.after_tenant)
    if len(tenants) < MOST_TENANTS and lane.after_tenant:
        again = _tenants(connection, root, lane.name, "")
        tenants = list(dict.fromkeys([*tenants, *again]))[:MOST_TENANTS]
    after = tenants[-1] if len(tenants) == MOST_TENANTS else ""
    if after != lane.after_tenant:
        connection.execute(
            lanes.update()
            .where(lanes.c.root == root, lanes.c.name == lane.name)
            .values(after_tenant=after)
        )
    if not tenants:
        return [], 1
    each = max(1, LOOKED_AT // len(tenants) // 2)
    held = (
        sa.select(outbox.c.outbox_id, outbox.c.due_us)
        .where(
            outbox.c.root == root,
            outbox.c.lane == lane.name,
            outbox.c.behind == sa.false(),
            sa.text(IS_HELD),
        )
        .limit(each)
    )
    looks = []
    for tenant in tenants:
        mine = held.where(outbox.c.tenant == tenant)
        oldest = mine.order_by(outbox.c.due_us, outbox.c.outbox_id)
        lightest = mine.order_by(outbox.c.weight, outbox.c.outbox_id)
        looks += [sa.select(look.subquery().c.outbox_id) for look in (oldest, lightest)]
    found: dict[uuid.UUID, sa.Row[Any]] = {}
    # SQLite puts no more than five hundred together.
    ids = connection.execute(sa.union(*looks)).scalars().all()
    if ids:
        found = {row.outbox_id: row for row in connection.execute(_details(root, ids))}
    return sorted(found.values(), key=lambda one: (-one.waited_us, one.outbox_id)), each


def _details(root: str, ids: Sequence[uuid.UUID]) -> sa.Select[Any]:
    state = (
        sa.select(reservations.c.state)
        .where(
            reservations.c.root == root,
            reservations.c.reservation_id == outbox.c.reservation_id,
        )
        .scalar_subquery()
    )
    return sa.select(
        outbox.c.outbox_id,
        outbox.c.tenant,
        outbox.c.weight,
        (instant() - outbox.c.due_us).label("waited_us"),
        state.label("state"),
        predecessor(root).label("follows"),
    ).where(
        outbox.c.root == root,
        outbox.c.outbox_id.in_(ids),
    )


def _tenants(connection: Connection, root: str, name: str, after: str) -> list[str]:
    """Return tenants that have something held, after one by name, each by one look at the index."""

    def following(last: Any) -> Any:
        return (
            sa.select(outbox.c.tenant)
            .where(
                outbox.c.root == root,
                outbox.c.lane == name,
                outbox.c.behind == sa.false(),
                outbox.c.tenant > last,
                sa.text(IS_HELD),
            )
            .order_by(outbox.c.tenant)
            .limit(1)
            .scalar_subquery()
        )

    chain = sa.select(following(after).label("tenant")).cte("tenants", recursive=True)
    chain = chain.union_all(sa.select(following(chain.c.tenant)).where(chain.c.tenant.is_not(None)))
    found = sa.select(chain.c.tenant).where(chain.c.tenant.is_not(None)).limit(MOST_TENANTS)
    return list(connection.execute(found).scalars())


def overdue(connection: Connection, root: str, limit: int) -> list[Overdue]:
    """Return messages that lanes have held for too long, or past their ``expires``.

    The oldest first, up to so many of each lane and kind. Locks nothing.
    """
    fields = (outbox.c.outbox_id, outbox.c.reservation_id, outbox.c.task_id, outbox.c.lane)
    held = sa.select(*fields).where(outbox.c.root == root, sa.text(IS_HELD)).limit(limit)
    expired = held.where(outbox.c.expires_us <= instant()).order_by(outbox.c.expires_us)
    found = list(connection.execute(expired))
    for name, wait_us in connection.execute(
        sa.select(lanes.c.name, lanes.c.max_wait_us).where(
            lanes.c.root == root, lanes.c.max_wait_us.is_not(None), lanes.c.deleted.is_(False)
        )
    ).all():
        found += connection.execute(
            held.where(outbox.c.lane == name, outbox.c.due_us <= instant() - wait_us).order_by(
                outbox.c.due_us
            )
        )
    return [Overdue(**row._mapping) for row in {row.outbox_id: row for row in found}.values()]


def end(connection: Connection, root: str, seen: Overdue) -> bool:
    """End a request that its lane held for too long; its result is to be told.

    Locks the reservation, the message, the balances. Against a claim or a cancellation the one that
    locks the reservation first wins; against a dispatch the one that has the message. False, and
    nothing ended, where it is held no more; what was started meanwhile is let go, to be told from
    its attempt.
    """
    row = lock(connection, root, seen.reservation_id)
    lane = sa.select(lanes.c.max_wait_us).where(lanes.c.root == root, lanes.c.name == outbox.c.lane)
    message = connection.execute(
        sa.select(
            outbox.c.outbox_id,
            outbox.c.order_key,
            outbox.c.expires_us,
            sa.func.coalesce(outbox.c.expires_us <= now_us(), sa.false()).label("expired"),
            sa.func.coalesce(
                outbox.c.due_us <= now_us() - lane.scalar_subquery(), sa.false()
            ).label("waited"),
        )
        .where(outbox.c.root == root, outbox.c.outbox_id == seen.outbox_id, sa.text(IS_HELD))
        .with_for_update(skip_locked=True)
    ).first()
    if message is None or not (message.expired or message.waited):
        return False
    if row is None or row.state not in CLAIMABLE:
        connection.execute(
            outbox.update()
            .where(outbox.c.root == root, outbox.c.outbox_id == seen.outbox_id)
            .values(state="due")
        )
        let_follow(connection, root, [message.order_key])
        return False
    reason = WAITED
    if message.expired:
        reason = deadlines.why(EXPIRED, row.deadline_us, message.expires_us)
    release(connection, root, seen.reservation_id, reason)
    untold.note(connection, root, seen.task_id, reason, seen.reservation_id)
    return True
