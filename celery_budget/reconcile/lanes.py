"""How lanes stand: what each holds back, what it has let go, and why it holds anything back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.core.lanes import Lane, Load
from celery_budget.errors import UnknownLane
from celery_budget.reconcile.terms import lane_as_dict
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store
from celery_budget.store import lanes as stored

__all__ = ["LaneStanding", "lane_standings", "lane_standings_in"]

#: For how long it counts that workers answered, in seconds.
FRESH_SECONDS = stored.FRESH_ANSWER_US / 1_000_000


@dataclass(frozen=True)
class LaneStanding:
    """How a lane stands.

    :ivar waiting: what it holds back, be its time come or not.
    :ivar queued: what it has let go that nobody has started.
    :ivar running: what of it runs.
    :ivar oldest_seconds: for how long the oldest that it holds has been due.
    :ivar why: what keeps it from letting go anything: ``paused``, ``asleep``, ``running`` or
        ``queued`` (its limits are reached); none for nothing.
    :ivar awake: whether its workers answered when they were asked last; none where nobody asked.
    :ivar asked_seconds: how long ago that was.
    :ivar asleep: why they count as asleep.
    """

    lane: Lane
    waiting: Load
    queued: Load
    running: Load
    oldest_seconds: float
    why: str | None
    awake: bool | None
    asked_seconds: float | None
    asleep: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        loads = {name: asdict(getattr(self, name)) for name in ("waiting", "queued", "running")}
        return {
            **lane_as_dict(self.lane),
            "paused": self.lane.paused,
            **loads,
            "oldest_seconds": self.oldest_seconds,
            "why": self.why,
            "awake": self.awake,
            "asked_seconds": self.asked_seconds,
            "asleep": self.asleep,
        }


def lane_standings(store: Store, settings: Settings, name: str | None = None) -> list[LaneStanding]:
    """Return how each lane stands, by name, or only the one with this name.

    :raises UnknownLane: where there is none.
    """
    found = store.read(lane_standings_in, settings.root, name)
    if name is not None and not found:
        raise UnknownLane(name)
    return found


def lane_standings_in(
    connection: Connection, root: str, name: str | None = None
) -> list[LaneStanding]:
    """As :func:`lane_standings`; none where there is no lane."""
    return [_seen(one) for one in stored.standings(connection, root, name)]


def _seen(one: stored.LaneStanding) -> LaneStanding:
    answer = one.answer
    return LaneStanding(
        one.lane,
        one.waiting,
        one.queued,
        one.running,
        one.oldest_us / 1_000_000,
        _why(one),
        answer.awake,
        answer.seconds,
        answer.reason,
    )


def _why(one: stored.LaneStanding) -> str | None:
    if one.lane.paused:
        return "paused"
    answer = one.answer
    stale = answer.seconds is None or answer.seconds > FRESH_SECONDS
    # Nobody asks while nothing waits.
    if one.lane.preflight and one.waiting.jobs and (not answer.awake or stale):
        return "asleep"
    return one.lane.full(one.queued, one.running)
