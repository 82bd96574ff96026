"""What a lane releases next: a pure function of a snapshot. First in, first out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_budget.core.lanes import Lane, Load

__all__ = ["Decision", "Snapshot", "Waiting", "choose"]


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


@dataclass(frozen=True)
class Snapshot:
    """How a lane stands.

    :ivar queued: what was released and has not started.
    :ivar running: what runs.
    :ivar waiting: of each tenant at least the one that waits longest, if it has any.
    """

    lane: Lane
    queued: Load
    running: Load
    waiting: Sequence[Waiting]


@dataclass(frozen=True)
class Decision:
    """What is released.

    :ivar release: in the order in which it is released.
    :ivar accounts: the shares that change.
    :ivar why: what held the first of the rest back: ``running``, ``queued`` or ``burst``; none
        where nothing was held back.
    """

    release: tuple[uuid.UUID, ...]
    accounts: Mapping[Any, Any] = field(default_factory=dict)
    why: str | None = None


def choose(snapshot: Snapshot) -> Decision:
    """Return what one tick releases: within all limits, the longest waiting first."""
    lane = snapshot.lane
    released = Load()
    chosen: list[uuid.UUID] = []
    for job in sorted(snapshot.waiting, key=lambda one: (-one.waited_us, one.outbox_id)):
        if lane.too_heavy(job.weight) is not None:
            continue
        after = released + Load(1, job.weight)
        queued, both = snapshot.queued + after, snapshot.queued + snapshot.running + after
        for used, jobs, units, why in (
            (both, lane.max_running_jobs, lane.max_running_units, "running"),
            (queued, lane.max_queued_jobs, lane.max_queued_units, "queued"),
            (after, None, lane.burst_units if chosen else None, "burst"),
        ):
            if (jobs is not None and used.jobs > jobs) or (
                units is not None and used.units > units
            ):
                return Decision(tuple(chosen), why=why)
        released = after
        chosen.append(job.outbox_id)
    return Decision(tuple(chosen))
