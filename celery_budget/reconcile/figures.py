"""What a report is made of: plain figures, each of which says for itself what it means.

Only data: :mod:`~celery_budget.reconcile.reports` fills it, :mod:`~celery_budget.render` shows it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["FAILURES", "GROUPINGS", "Amounts", "Day", "Group", "Refusals", "Spread", "Waived"]

#: By what the figures of a report may be grouped.
GROUPINGS = ("tenant", "stage", "task", "day", "estimator")

#: How work fails: it was never admitted; an attempt failed and another followed; it failed for good
#: by its error; it used up its attempts or their time; nobody knows how it ended; its time was over
#: before it ran.
FAILURES = ("refused", "transient", "permanent", "exhausted", "uncertain", "expired")


@dataclass(frozen=True)
class Spread:
    """How long something took, in seconds.

    Kept in bins: a figure is the upper end of the bin in which it lies, at most a twentieth above
    the true one.

    :ivar count: how often it was measured.
    :ivar p50: what half of them took at most; none where nothing was measured, as of the others.
    """

    count: int = 0
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Amounts:
    """What was promised and used of one budget, by requests that ran and have ended.

    :ivar requests: how many of them drew on it.
    :ivar estimated: what was estimated of it.
    :ivar charged: what it was charged.
    :ivar over: how much of that was beyond the estimate, request by request.
    :ivar requests_over: by how many of them.
    """

    budget: str
    unit: str
    requests: int
    estimated: int
    charged: int
    over: int
    requests_over: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Refusals:
    """How often a budget was short, by reason."""

    budget: str
    reason: str
    count: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Waived:
    """What a budget would have refused, had it been enforced, by stage and reason.

    :ivar count: how often.
    :ivar amount: what that asked for in all.
    """

    budget: str
    stage: str
    reason: str
    count: int
    amount: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """The figures of one tenant, stage, task, day or estimator.

    :ivar key: which one: its name, the day (UTC) in ISO 8601, or ``name:version``.
    :ivar counts: as in a report, of what is counted by group.
    :ivar failures: see :data:`FAILURES`.
    :ivar waits: of requests that have ended, from when each was due to its first start.
    :ivar runs: of their attempts, each by itself.
    """

    key: str
    counts: dict[str, int]
    failures: dict[str, int] = field(default_factory=dict)
    amounts: tuple[Amounts, ...] = ()
    waits: Spread = Spread()
    runs: Spread = Spread()

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Day(Group):
    """The figures of one day, for plots over time; amounts of some budgets, the fullest.

    :ivar limits: the limits of those that have one, as they are now.
    """

    limits: dict[str, int] = field(default_factory=dict)
