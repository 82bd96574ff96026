"""Figures added up for a report: in all, by group, and by day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone

from celery_budget.core.tallies import (
    DAY_US,
    FAILED,
    RUN,
    WAIT,
    Figures,
    Key,
    add,
    quantile,
    shadows_in,
)
from celery_budget.reconcile.estimates import Drift
from celery_budget.reconcile.figures import FAILURES, Amounts, Spread
from celery_budget.settings import ANY_STAGE

__all__ = [
    "GROUPED_BY",
    "LAST_US",
    "STATES",
    "Total",
    "day_name",
    "drifts",
    "group_of",
    "instant_name",
    "named",
]

#: Of an estimator: how many requests were measured, what was promised for them, and used.
MEASURED = ("measured", "promised", "used")

#: The states of a request, in the order of its life.
STATES = ("planned", "reserved", "published", "running", "waiting", "settled", "released", "lost")
#: What else is counted of them.
FLAGS = ("cancelled", "expired", "over", "unmetered", "unreserved")

#: Of a key, what makes a group.
GROUPED_BY: Mapping[str, tuple[str, ...]] = {
    "tenant": ("owner",),
    "stage": ("stage",),
    "task": ("task_name",),
    "day": ("day",),
    "estimator": ("estimator", "estimator_version"),
}

_EPOCH = date(1970, 1, 1)
_EPOCH_INSTANT = datetime(1970, 1, 1, tzinfo=timezone.utc)
#: The last instant that has a name.
LAST_US = (datetime.max.replace(tzinfo=timezone.utc) - _EPOCH_INSTANT) // timedelta(microseconds=1)


def group_of(key: Key, by: str) -> str:
    """Return the name of the group that a key belongs to."""
    return named(by, tuple(getattr(key, name) for name in GROUPED_BY[by]))


def named(by: str, values: tuple[object, ...]) -> str:
    """Return the name of a group, by the values of its columns."""
    if by == "day":
        (day,) = values
        return day_name(int(str(day)))
    return ":".join(map(str, values))


def day_name(day: int) -> str:
    """Return a day (UTC), in days since the epoch, in ISO 8601; its number out of all years."""
    if not 0 <= day <= LAST_US // DAY_US:
        return f"day {day}"
    return (_EPOCH + timedelta(days=day)).isoformat()


def instant_name(us: int) -> str:
    """Return an instant (UTC), in microseconds since the epoch, in ISO 8601."""
    return (_EPOCH_INSTANT + timedelta(microseconds=us)).isoformat()


@dataclass
class Total:
    """What some requests add up to.

    :ivar refused: how often a budget was short.
    :ivar amounts: by budget and unit.
    """

    figures: Figures = field(default_factory=dict)
    refused: int = 0
    amounts: dict[tuple[str, str], Figures] = field(default_factory=dict)

    def draw(self, budget: str, unit: str, more: Mapping[str, int]) -> None:
        """Add what was estimated and charged of a budget."""
        add(self.amounts.setdefault((budget, unit), {}), more)

    def counts(self, parked: int | None = None) -> dict[str, int]:
        """How many requests there are, by what became of them.

        :param parked: how many are parked now, where that is counted.
        """
        states = {state: self.figures.get(state, 0) for state in STATES}
        return {
            "admitted": sum(states.values()),
            "refused": self.refused,
            **({} if parked is None else {"parked": parked}),
            "given_up": self.figures.get("given_up", 0),
            **states,
            **{flag: self.figures.get(flag, 0) for flag in FLAGS},
        }

    def failures(self) -> dict[str, int]:
        """How work failed."""
        found = {name: self.figures.get(f"{FAILED}{name}", 0) for name in FAILURES}
        return {**found, "refused": self.refused}

    def waits(self) -> Spread:
        """From when a request was due to its first start."""
        return self._spread(WAIT)

    def runs(self) -> Spread:
        """Of attempts, each by itself."""
        return self._spread(RUN)

    def _spread(self, kind: str) -> Spread:
        bins = {
            int(name.removeprefix(kind)): number
            for name, number in self.figures.items()
            if name.startswith(kind)
        }
        at = (quantile(bins, hundredths) for hundredths in (50, 95, 99))
        p50, p95, p99 = (None if us is None else us / 1_000_000 for us in at)
        return Spread(sum(bins.values()), p50, p95, p99)

    def drawn(self) -> tuple[Amounts, ...]:
        """What was estimated and charged, by budget."""
        return tuple(
            Amounts(
                budget,
                unit,
                of["requests"],
                of.get("estimated", 0),
                of.get("charged", 0),
                of.get("excess", 0),
                of.get("exceeded", 0),
            )
            for (budget, unit), of in sorted(self.amounts.items())
            if of.get("requests")
        )


def drifts(
    by_estimator: Mapping[tuple[str, str, str], Figures], ceilings: Mapping[str, float]
) -> tuple[Drift, ...]:
    """Return the drift of each stage and estimator, that of a stage's shadows after its own.

    :param by_estimator: by stage, estimator and version.
    :param ceilings: of stages, and of all others.
    """
    found, shadows = [], dict[tuple[str, str], list[int]]()
    for (stage, estimator, version), figures in sorted(by_estimator.items()):
        if figures.get("measured"):
            ceiling = ceilings.get(stage, ceilings.get(ANY_STAGE))
            requests, promised, used = (figures.get(name, 0) for name in MEASURED)
            one = Drift(stage, estimator, version, requests, promised, used, ceiling=ceiling)
            found.append(one)
        for shadow, added in shadows_in(figures).items():
            total = shadows.setdefault((stage, shadow), [0, 0, 0])
            total[:] = (one + more for one, more in zip(total, added, strict=True))
    for (stage, shadow), (requests, estimated, actual) in sorted(shadows.items()):
        name, _, version = shadow.rpartition(":")
        found.append(Drift(stage, name, version, requests, estimated, actual, shadow=True))
    return tuple(sorted(found, key=lambda one: one.stage))
