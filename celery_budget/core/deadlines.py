"""Deadlines: when all of a request is to be over, its waiting, attempts and retries together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_budget.errors import PolicyError

__all__ = ["MOST_SECONDS", "Deadline", "earliest", "moment"]

#: Thirty years; no wait is longer.
MOST_SECONDS = 1_000_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Deadline:
    """When a request is to be over; where both are said, the earlier counts.

    :ivar within_us: so long after the admission, by the database's clock.
    :ivar at_us: at this moment, in microseconds since the epoch.
    """

    within_us: int | None = None
    at_us: int | None = None

    @classmethod
    def given(cls, value: Any, what: str) -> Deadline | None:
        """Return what was given as ``deadline=``; none for none.

        :param what: whose it is, for the error.
        :raises PolicyError: for what is neither seconds above 0 nor a datetime with a time zone.
        """
        if value is None:
            return None
        if isinstance(value, datetime) and value.utcoffset() is not None:
            return cls(at_us=max(0, (value - _EPOCH) // _MICROSECOND))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and 0 < value <= MOST_SECONDS:
            return cls(within_us=max(1, int(value * 1_000_000)))
        raise PolicyError(
            f"deadline= of {what} is {value!r}; give seconds from the call, above 0, or a datetime "
            "with a time zone"
        )


def earliest(*moments: int | None) -> int | None:
    """Return the first of several moments, in microseconds since the epoch; none for none."""
    return min((one for one in moments if one is not None), default=None)


def moment(at_us: int) -> datetime:
    """Return a moment in microseconds since the epoch as a datetime in UTC."""
    return _EPOCH + at_us * _MICROSECOND
