"""How long a caller that was refused should wait: when its request could fit, at the earliest."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from celery_budget.errors import BudgetError

__all__ = ["OUTBOX_SECONDS", "Outlook", "Pace", "spread", "wait_seconds"]

#: Where nothing has come back of late nobody can tell when what is held does.
UNKNOWN_SECONDS = 30.0
#: What is held may come back sooner than it did of late.
LONGEST_SECONDS = 3600.0
#: What waits in a full outbox, or a full lane, is counted every two seconds.
OUTBOX_SECONDS = 2.0
#: Callers that are told the same time come back over a quarter of it, from a second to a minute.
SHARE = 4
LEAST_SPREAD, MOST_SPREAD = 1.0, 60.0


@dataclass(frozen=True)
class Pace:
    """How soon a budget may have room, as seen when it was short.

    :ivar left_us: how long its open window lasts; none where it never ends, or none is open.
    :ivar freed: how much room its last changes gave back: of what came back of holds, less what was
        charged.
    :ivar span_us: for how long these changes went on.
    """

    left_us: int | None
    freed: int
    span_us: int


@dataclass(frozen=True)
class Outlook:
    """Whether a request would be admitted now.

    :ivar admits: whether it would. It holds nothing: another request may be faster.
    :ivar error: what its publication would raise; none where it would be admitted.
    """

    admits: bool
    error: BudgetError | None = None

    def __bool__(self) -> bool:
        return self.admits

    @property
    def retry_after(self) -> float | None:
        """In how many seconds it makes sense to ask again; none where it does not, or need not."""
        return None if self.error is None else self.error.retry_after

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        told = None if self.error is None else {"error": type(self.error).__name__}
        return {
            "admits": self.admits,
            "refusal": None if told is None else {**told, **vars(self.error)},
            "retry_after": self.retry_after,
        }


def wait_seconds(reason: str, needed: int, impossible: bool, pace: Pace | None) -> float | None:
    """Return in how many seconds a refused request could fit at the earliest; none for never.

    What is exhausted has room when its window ends. What is held, or kept for what was parked
    before, has it once ``needed`` has come back, at the pace of its last changes, and when its
    window ends at the latest.

    :param reason: of the refusal.
    :param needed: how much room is missing.
    :param impossible: whether the request is larger than the budget ever has room for.
    :param pace: how soon it may have room; none where that was not looked at.
    """
    if pace is None or impossible or reason not in ("exhausted", "held", "queued"):
        return None
    left = None if pace.left_us is None else max(0, pace.left_us) / 1_000_000
    if reason == "exhausted":
        return left
    expected = UNKNOWN_SECONDS
    if pace.freed > 0:
        # Both may be as large as amounts and times are; the ratio of integers is exact enough.
        expected = min(
            LONGEST_SECONDS, max(needed, 0) * max(pace.span_us, 0) / pace.freed / 1_000_000
        )
    return expected if left is None else min(expected, left)


def spread(seconds: float | None) -> float | None:
    """Return a time from ``seconds`` on, so that those who wait for it do not come all at once."""
    if seconds is None:
        return None
    width = min(max(seconds / SHARE, LEAST_SPREAD), MOST_SPREAD)
    return round(seconds + random.uniform(0, width), 3)  # noqa: S311 - a spread, not a secret
