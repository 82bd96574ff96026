"""What estimators promised against what was used, and what they might promise instead."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from celery_budget.core.estimates import quantile
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, estimates
from celery_budget.store.windows import read_now

__all__ = ["LAST", "Drift", "Suggestion", "suggest"]

#: So many requests of a stage are looked at for a suggestion, the last ones.
LAST = 1000


@dataclass(frozen=True)
class Drift:
    """Estimated against actual of the settled requests of one stage and estimator.

    :ivar shadow: whether the estimator was only asked, and nothing was reserved by it. Its requests
        are those that have an answer of it and ran once.
    :ivar ceiling: up to which ratio of actual to estimated the estimator is good enough; none where
        that is not looked at.
    """

    stage: str
    estimator: str
    version: str
    requests: int
    estimated: int
    actual: int
    shadow: bool = False
    ceiling: float | None = None

    @property
    def ratio(self) -> float | None:
        """Actual over estimated; none where nothing was estimated."""
        return self.actual / self.estimated if self.estimated else None

    @property
    def above(self) -> bool:
        """Whether more was used than the ceiling of its stage lets pass; decided exactly."""
        if self.ceiling is None:
            return False
        return self.actual > Fraction(str(self.ceiling)) * self.estimated

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        ratio = None if self.ratio is None else round(self.ratio, 4)
        return {**asdict(self), "ratio": ratio, "above": self.above}


@dataclass(frozen=True)
class Suggestion:
    """What a constant estimate of a stage would have to be for most of its last requests.

    :ivar unit: of the budget that they name first.
    :ivar requests: how many it is taken from; of few of them it is little more than their largest.
    :ivar quantile: how many of them it would have been enough for, as a share.
    :ivar amount: the estimate.
    :ivar median: what half of them used at most.
    :ivar largest: what the largest of them used.
    :ivar covered: for how many of them what was estimated was enough.
    """

    stage: str
    unit: str
    requests: int
    quantile: float
    amount: int
    median: int
    largest: int
    covered: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def suggest(
    store: Store,
    settings: Settings,
    stage: str | None,
    of: Decimal,
    since_us: int | None = None,
    lasting_us: int | None = None,
) -> tuple[Suggestion, ...]:
    """Return suggestions for one stage or all, by what their last requests have used.

    :param since_us: only of those that ended since then, in microseconds since the epoch.
    :param lasting_us: or within so many microseconds before now.
    """
    return store.read(_suggest, settings.root, stage, of, since_us, lasting_us)


def _suggest(
    connection: Connection,
    root: str,
    stage: str | None,
    of: Decimal,
    since_us: int | None,
    lasting_us: int | None,
) -> tuple[Suggestion, ...]:
    if lasting_us is not None:
        since_us = max(0, read_now(connection) - lasting_us)
    stages = estimates.stages(connection, root) if stage is None else [stage]
    found: list[Suggestion] = []
    for one in stages:
        by_unit: dict[str, list[tuple[int, int]]] = {}
        for row in estimates.measured(connection, root, one, LAST, since_us):
            by_unit.setdefault(row.unit, []).append((row.estimate, row.settled))
        found.extend(_of(one, unit, by_unit[unit], of) for unit in sorted(by_unit))
    return tuple(found)


def _of(stage: str, unit: str, both: list[tuple[int, int]], of: Decimal) -> Suggestion:
    """Return the suggestion from estimates and actuals."""
    actuals = [actual for _, actual in both]
    return Suggestion(
        stage,
        unit,
        len(both),
        float(of),
        quantile(actuals, of),
        quantile(actuals, Decimal("0.5")),
        max(actuals),
        sum(actual <= estimate for estimate, actual in both),
    )
