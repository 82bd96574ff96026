"""How lanes stand: what each holds back, what it has let go, and why it holds anything back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from celery_budget.core.lanes import Lane, Load
from celery_budget.core.shares import LANE, Account, Key, Order, Shares
from celery_budget.errors import UnknownLane
from celery_budget.reconcile.terms import lane_as_dict
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, shares
from celery_budget.store import lanes as stored

__all__ = ["LaneStanding", "TenantShare", "lane_standings", "lane_standings_in", "why_held"]

#: For how long it counts that workers answered, in seconds.
FRESH_SECONDS = stored.FRESH_ANSWER_US / 1_000_000
#: How many tenants are listed of those of which a lane holds most, and of those served last.
TENANTS = 20


@dataclass(frozen=True)
class TenantShare:
    """How one tenant stands in a lane, or a budget above tenants.

    :ivar turn: whose turn is next is 1; none for who has nothing that waits, and for those that go
        only where nobody beside them has work.
    :ivar above: the budget from whose share it is served; none for the lane's.
    :ivar weight: its weight beside the others there.
    :ivar waiting: what the lane holds of it, be its time come or not.
    :ivar oldest_seconds: for how long the oldest of that has been due.
    :ivar ahead: what it has had more than the one that is furthest back, in units over its weight.
    :ivar served_us: when it was served last, in microseconds since the epoch; none for not lately.
    """

    tenant: str
    turn: int | None
    above: str | None
    weight: int
    waiting: Load
    oldest_seconds: float
    ahead: int
    served_us: int | None


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
    :ivar shares: who shares it, where it was looked at alone: those whose turn is next first.
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
    shares: tuple[TenantShare, ...] = ()

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
            **({"shares": [asdict(one) for one in self.shares]} if self.shares else {}),
        }


def lane_standings(store: Store, settings: Settings, name: str | None = None) -> list[LaneStanding]:
    """Return how each lane stands, by name, or only the one with this name.

    :raises UnknownLane: where there is none.
    """
    return store.read(lane_standings_in, settings.root, name)


def lane_standings_in(
    connection: Connection, root: str, name: str | None = None
) -> list[LaneStanding]:
    """As :func:`lane_standings`."""
    found = [_seen(one) for one in stored.standings(connection, root, name)]
    if name is None:
        return found
    if not found:
        raise UnknownLane(name)
    return [replace(one, shares=_shares(connection, root, name)) for one in found]


def _shares(connection: Connection, root: str, lane: str) -> tuple[TenantShare, ...]:
    """Return how the tenants stand of which a lane holds most, and those it has served last."""
    waits = {row.tenant: row for row in shares.waiting(connection, root, lane, TENANTS)}
    served = shares.served(connection, root, lane, TENANTS)
    names = {*waits, *(key.name for key in served)}
    known = shares.read(connection, root, lane, names)
    order = Order(known, {name: max(0, int(row.oldest_us)) for name, row in waits.items()})
    turns: list[str] = []
    while (tenant := order.next()) is not None:
        turns.append(tenant)
        order.leave(tenant)
    inner = {above for tenant in waits for above in _above(known, tenant)}
    found = []
    for name in names:
        # The work of a budget itself has an account of its own, where others are below it.
        own = Key(name, own=True)
        key = own if own in known.accounts or (name in inner and name in waits) else Key(name)
        above = name if key.own else known.parents.get(name)
        account = known.accounts.get(key, Account())
        floor = known.accounts.get(LANE if above is None else Key(above), Account()).floor
        row = waits.get(name)
        found.append(
            TenantShare(
                name,
                turns.index(name) + 1 if name in turns else None,
                above,
                1 if key.own else known.weights.get(name, 1),
                Load() if row is None else Load(row.jobs, int(row.units)),
                0.0 if row is None else max(0, int(row.oldest_us)) / 1_000_000,
                max(0, account.finish - floor),
                served.get(key),
            )
        )
    last = len(found) + 1
    return tuple(sorted(found, key=lambda one: (one.turn or last, one.tenant)))


def _above(known: Shares, tenant: str) -> set[str]:
    found: set[str] = set()
    above = known.parents.get(tenant)
    while above is not None and above not in found:
        found.add(above)
        above = known.parents.get(above)
    return found


def _seen(one: stored.LaneStanding) -> LaneStanding:
    answer = one.answer
    return LaneStanding(
        one.lane,
        one.waiting,
        one.queued,
        one.running,
        one.oldest_us / 1_000_000,
        why_held(one),
        answer.awake,
        answer.seconds,
        answer.reason,
    )


def why_held(one: stored.LaneStanding) -> str | None:
    """Return what keeps a lane from letting go anything; none for nothing."""
    if one.lane.paused:
        return "paused"
    answer = one.answer
    stale = answer.seconds is None or answer.seconds > FRESH_SECONDS
    # Nobody asks while nothing waits.
    if one.lane.preflight and one.waiting.jobs and (not answer.awake or stale):
        return "asleep"
    return one.lane.full(one.queued, one.running)
