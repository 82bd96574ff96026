"""What a lane releases next: a pure function of a snapshot.

Among tenants by fair shares (:mod:`celery_budget.core.shares`). Inside a tenant the smallest first,
with ageing: what waits counts ``ageing`` units lighter for each second. So

    *a job of weight w is overtaken, inside its tenant, only by what begins to wait at most
    w / ageing seconds after it,*

and by no more than that, whatever arrives. After that time it is *aged*. Where the turn of an aged
job has come and it does not fit, nothing else is released until it does: the lane keeps for it what
becomes free, and smaller work cannot take that unit by unit. Where a job that is not aged does not
fit, what comes after it may go in its place.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from celery_budget.core.lanes import HEAVY, Lane, Load
from celery_budget.core.shares import Account, Key, Order, Shares

__all__ = [
    "BURST",
    "QUEUED",
    "RUNNING",
    "Decision",
    "Snapshot",
    "Unseen",
    "Waiting",
    "choose",
    "short_of",
    "unseen",
]

#: What holds work back: what is released and not started, what runs, and what one tick releases.
QUEUED = "queued"
RUNNING = "running"
BURST = "burst"

_SECOND = 1_000_000


@dataclass(frozen=True)
class Waiting:
    """A job that is held back.

    :ivar tenant: whose share it counts to.
    :ivar weight: what it weighs, in units.
    :ivar waited_us: for how long it has been due, in microseconds.
    """

    outbox_id: uuid.UUID
    tenant: str
    weight: int
    waited_us: int

    def counts(self, ageing: int) -> int:
        """Return what it weighs by its wait, in millionths of a unit: the smallest goes first."""
        return self.weight * _SECOND - ageing * self.waited_us


@dataclass(frozen=True)
class Unseen:
    """What is known of a tenant's jobs that are not in a snapshot.

    :ivar waited_us: for how long each of them has waited at most.
    :ivar weight: what each of them weighs at least.
    """

    waited_us: int
    weight: int


@dataclass(frozen=True)
class Snapshot:
    """How a lane stands.

    :ivar queued: what was released and has not started.
    :ivar running: what runs.
    :ivar waiting: of each tenant at least the one that waits longest, if it has any.
    :ivar unseen: of tenants that have more work than that.
    """

    lane: Lane
    queued: Load
    running: Load
    waiting: Sequence[Waiting]
    shares: Shares = field(default_factory=Shares)
    unseen: Mapping[str, Unseen] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What is released.

    :ivar release: in the order in which it is released.
    :ivar accounts: the shares that change.
    :ivar why: what held the first of the rest back: ``running``, ``queued`` or ``burst``; none
        where nothing was held back.
    """

    release: tuple[uuid.UUID, ...]
    accounts: Mapping[Key, Account]
    why: str | None


def short_of(lane: Lane, queued: Load, running: Load, weight: int) -> str | None:
    """Return what keeps a job of this weight from being released; none where it has room.

    ``heavy`` for what could never keep to the limits. Whose turn it is does not count.

    :param queued: what was released and has not started.
    """
    if lane.too_heavy(weight) is not None:
        return HEAVY
    return _Room(Snapshot(lane, queued, running, ())).short_of(weight)


def unseen(seen: Iterable[Waiting], each: int) -> dict[str, Unseen]:
    """Return what is known of those jobs that a look does not see, by tenant.

    :param seen: of each tenant the ``each`` lightest and the ``each`` that wait longest, or all
        that it has.
    """
    jobs: dict[str, list[Waiting]] = {}
    for job in seen:
        jobs.setdefault(job.tenant, []).append(job)
    return {
        tenant: Unseen(
            sorted((one.waited_us for one in mine), reverse=True)[each - 1],
            sorted(one.weight for one in mine)[each - 1],
        )
        for tenant, mine in jobs.items()
        if len(mine) >= each
    }


def choose(snapshot: Snapshot) -> Decision:
    """Return what one tick releases.

    With what is queued it stays within ``max_queued``, with what is queued and runs within
    ``max_running``, in jobs and in units, and in all within ``burst_units``. What is heavier than
    ``burst_units`` goes alone, in a tick that releases nothing else. What could never keep to the
    limits, since they were lowered, is passed by: it holds nobody back.
    """
    lane, queues = snapshot.lane, _queues(snapshot)
    waits = {tenant: max(one.waited_us for one in queue) for tenant, queue in queues.items()}
    order, room = Order(snapshot.shares, waits), _Room(snapshot)
    release: list[uuid.UUID] = []
    why: str | None = None
    while (tenant := order.next()) is not None:
        if not queues[tenant]:
            order.leave(tenant)
            continue
        job = queues[tenant].pop()
        short = room.short_of(job.weight)
        if short is None:
            release.append(job.outbox_id)
            room.take(job.weight)
            order.serve(tenant, job.weight)
        else:
            why = why or short
            if room.is_full or (lane.ageing and job.counts(lane.ageing) <= 0):
                break
    return Decision(tuple(release), order.changed() if release else {}, why)


def _queues(snapshot: Snapshot) -> dict[str, list[Waiting]]:
    """Return what may go of each tenant; the first is the last one."""
    lane = snapshot.lane
    queues: dict[str, list[Waiting]] = {}
    for job in snapshot.waiting:
        if lane.too_heavy(job.weight) is None:
            queues.setdefault(job.tenant, []).append(job)
    for tenant, queue in queues.items():
        # None where all that wait longest are too heavy; then the others go.
        in_turn = [job for job in queue if _may_go(job, lane, snapshot.unseen.get(tenant))]
        queues[tenant] = sorted(
            in_turn or queue,
            key=lambda job: (job.counts(lane.ageing), -job.waited_us, job.outbox_id),
        )[::-1]
    return queues


def _may_go(job: Waiting, lane: Lane, others: Unseen | None) -> bool:
    """Tell whether a job overtakes none of those that are not seen by more than it may.

    Those that wait longest always may: what is not seen began to wait after them.
    """
    return others is None or (
        lane.ageing * (others.waited_us - job.waited_us) <= others.weight * _SECOND
    )


class _Room:
    """What a lane still takes in one tick."""

    def __init__(self, snapshot: Snapshot) -> None:
        lane, queued = snapshot.lane, snapshot.queued
        used = queued + snapshot.running
        self._jobs = {
            RUNNING: _left(lane.max_running_jobs, used.jobs),
            QUEUED: _left(lane.max_queued_jobs, queued.jobs),
        }
        self._units = {
            RUNNING: _left(lane.max_running_units, used.units),
            QUEUED: _left(lane.max_queued_units, queued.units),
        }
        self._burst = lane.burst_units
        self._released = Load()

    @property
    def is_full(self) -> bool:
        """Whether it takes no job at all."""
        jobs = self._released.jobs
        return any(left is not None and jobs >= left for left in self._jobs.values())

    def short_of(self, weight: int) -> str | None:
        """Return what a job of this weight does not fit; none where it fits."""
        after = self._released + Load(1, weight)
        for limit in (RUNNING, QUEUED):
            jobs, units = self._jobs[limit], self._units[limit]
            if (jobs is not None and after.jobs > jobs) or (
                units is not None and after.units > units
            ):
                return limit
        if self._burst is not None and after.units > self._burst and self._released.jobs:
            return BURST
        return None

    def take(self, weight: int) -> None:
        self._released += Load(1, weight)


def _left(limit: int | None, used: int) -> int | None:
    return None if limit is None else limit - used
