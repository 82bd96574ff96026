"""What was accepted and lacks a step: what will happen to it, and when.

Told by the rules that bring it on, from the times that stand in its rows: nothing is guessed. Work
that is open is not wrong. It is overdue where the time is over at which something was to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.reconcile import kinds
from celery_budget.reconcile.brokers import QueueStanding
from celery_budget.reconcile.kinds import STEPS, Known
from celery_budget.reconcile.lanes import LaneStanding
from celery_budget.settings import Settings
from celery_budget.store import Connection, pending

__all__ = ["Pending", "Seen", "Step", "look", "pending_steps"]


@dataclass(frozen=True)
class Step:
    """One request, or message, that lacks a step.

    :ivar kind: what it lacks; a key of :data:`STEPS`.
    :ivar since_us: since when, in microseconds since the epoch.
    :ivar next_us: when something is done about it at the latest; none where that hangs on others.
    :ivar overdue_seconds: for how long that time is over; 0 while it is not.
    :ivar told: what it lacks and what will happen, in words.
    :ivar commands: what can be run to act on it.
    """

    kind: str
    task_id: str
    task_name: str
    since_us: int
    next_us: int | None
    overdue_seconds: int
    told: str
    commands: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**asdict(self), "commands": list(self.commands)}


@dataclass(frozen=True)
class Pending:
    """All that lacks one kind of step.

    :ivar count: how much that is, exactly.
    :ivar oldest_seconds: for how long the oldest has been so.
    :ivar overdue: of how much the time is over at which something was to be done.
    :ivar overdue_seconds: for how long, at the most.
    :ivar steps: some of it, what is overdue longest first.
    """

    kind: str
    count: int
    oldest_seconds: int
    overdue: int
    overdue_seconds: int
    steps: tuple[Step, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        lacks, happens, when = STEPS[self.kind]
        return {
            **asdict(self),
            "lacks": lacks,
            "happens": happens,
            "when": when,
            "steps": [step.as_dict() for step in self.steps],
        }


@dataclass(frozen=True)
class Seen:
    """What was read of pending work at one moment, before brokers are asked."""

    counted: tuple[pending.Counted, ...]
    rows: tuple[Any, ...]
    lanes: Mapping[str, LaneStanding]
    relays: int


def look(
    connection: Connection,
    root: str,
    limit: int,
    at_us: int,
    lanes: Mapping[str, LaneStanding],
    relays: int,
) -> Seen:
    """Read how much lacks each step, and up to ``limit`` of each kind. Locks nothing."""
    return Seen(
        tuple(pending.counted(connection, root, at_us)),
        tuple(pending.listed(connection, root, limit, at_us)),
        lanes,
        relays,
    )


def pending_steps(
    seen: Seen, settings: Settings, queues: Mapping[tuple[str, str], QueueStanding]
) -> tuple[Pending, ...]:
    """Return what lacks a step by kind, in the order of a request's life, told in words."""
    known = Known(settings, seen.lanes, queues, seen.relays)
    steps: dict[str, list[Step]] = {}
    for row in seen.rows:
        steps.setdefault(row.kind, []).append(_step(row, known))
    return tuple(
        Pending(
            one.kind,
            one.count,
            one.oldest_us // 1_000_000,
            one.overdue,
            one.overdue_us // 1_000_000,
            tuple(steps.get(one.kind, ())),
        )
        for one in seen.counted
    )


def _step(row: Any, known: Known) -> Step:
    over = 0 if row.next_us is None else max(0, row.now_us - row.next_us) // 1_000_000
    return Step(
        row.kind,
        row.task_id,
        row.task_name,
        row.since_us,
        row.next_us,
        over,
        kinds.told(row, known),
        kinds.commands(row, known),
    )
