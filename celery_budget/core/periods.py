"""Periods: how a budget's time is cut into windows.

Calendar periods follow the clock on a wall in the period's time zone. Such a clock jumps, stands
still for no one and runs through an hour twice, while windows have to partition time: each instant
is in exactly one. So windows are cut in elapsed time, and the local clock only says where.
"""

from __future__ import annotations

import calendar
import functools
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.errors import InvalidPeriod

__all__ = ["FOREVER_US", "PERIODS", "Period", "Window", "zone_named"]

#: The kinds of period there are.
PERIODS = ("total", "minute", "hour", "day", "week", "month")

#: The end of a window that never closes, in microseconds: the largest a 64-bit column holds.
FOREVER_US = MAX_AMOUNT

_UTC = timezone.utc
_EPOCH = datetime(1970, 1, 1, tzinfo=_UTC)
_SECOND = timedelta(seconds=1)
_SECOND_US = 1_000_000
#: The first instant that is refused. ``datetime`` ends a year later, which leaves room for the
#: end of the last window, whatever its zone and length.
_TOO_LATE_US = (datetime(9999, 1, 1, tzinfo=_UTC) - _EPOCH) // _SECOND * _SECOND_US

#: Clock periods: their lengths in seconds.
_LENGTHS = {"minute": 60, "hour": 3600}
#: Calendar periods that begin on a day of choice: the last day to choose.
_LAST_ANCHORS = {"week": 7, "month": 31}

#: What zone databases hold besides IANA's names: they mean another zone on another machine, or
#: none, or count leap seconds, which the epoch does not.
_NO_ZONES = frozenset({"Factory", "localtime", "posixrules"})
_NO_ZONE_FOLDERS = ("posix/", "right/")


@dataclass(frozen=True)
class Window:
    """The instants ``start_us <= t < end_us``, in microseconds since the epoch."""

    start_us: int
    end_us: int


@dataclass(frozen=True)
class Period:
    """How often a budget begins anew, and by whose clock.

    :param kind: one of :data:`PERIODS`.
    :param timezone: the IANA name of the zone whose clock cuts the windows.
    :param anchor_day: where a week or a month begins: 1 (Monday) to 7, or 1 to 31, which stands
        for the last day of a month that is shorter. 1 for other kinds.
    :raises InvalidPeriod: if one of them is not so.
    """

    kind: str = "total"
    timezone: str = "UTC"
    anchor_day: int = 1

    def __post_init__(self) -> None:
        if self.kind not in PERIODS:
            raise InvalidPeriod(
                f"a period is one of {', '.join(PERIODS)}, not {self.kind!r}; give one of those"
            )
        if not isinstance(self.timezone, str):
            raise InvalidPeriod(
                f"a period's time zone is a name, not {self.timezone!r} "
                f"({type(self.timezone).__name__})"
                "; give one such as 'Europe/Berlin'"
            )
        zone_named(self.timezone)
        last = _LAST_ANCHORS.get(self.kind, 1)
        if type(self.anchor_day) is not int or not 1 <= self.anchor_day <= last:
            allowed = f"an integer from 1 to {last}" if last > 1 else "always 1"
            raise InvalidPeriod(
                f"the anchor day of the period {self.kind!r} is {allowed}, not "
                f"{self.anchor_day!r} ({type(self.anchor_day).__name__})"
                "; give one of those"
            )

    def window(self, at_us: int) -> Window:
        """Return the window that contains an instant.

        - ``total`` has one window, which never closes.
        - ``minute`` and ``hour`` are cut where the local clock shows a full one, and where it is
          set to another time. None is longer than 60 or 3600 seconds; an hour that the clock
          repeats is a window of its own.
        - ``day``, ``week`` and ``month`` begin at the first instant at which the local clock shows
          their first date or a later one. They are not reopened by a clock that is set back over
          midnight, and a date that the clock jumps over has no window.

        :param at_us: microseconds since the epoch, from 0 to the end of the year 9998 (UTC).
            Time begins with the epoch: the window that it falls in starts at 0.
        :raises InvalidPeriod: for an instant out of this range.
        """
        if not 0 <= at_us < _TOO_LATE_US:
            raise InvalidPeriod(
                f"a window's instant lies between the years 1970 and 9998 (0 to "
                f"{_TOO_LATE_US - 1} microseconds since the epoch), not at {at_us}"
                "; see the clock of the database's host"
            )
        if self.kind == "total":
            return Window(0, FOREVER_US)
        # Zones change their offset at full seconds, and by full seconds.
        second = at_us // _SECOND_US
        zone = zone_named(self.timezone)
        if self.kind in _LENGTHS:
            start, end = _clock_window(zone, second, _LENGTHS[self.kind])
        else:
            start, end = self._calendar_window(zone, second)
        return Window(max(start, 0) * _SECOND_US, end * _SECOND_US)

    def _calendar_window(self, zone: tzinfo, second: int) -> tuple[int, int]:
        first, following = self._first_dates(_local(zone, second).date())
        end = _begin(zone, following)
        # The clock was set back from a later period, which has begun for good.
        while end <= second:
            first, following = self._first_dates(following)
            end = _begin(zone, following)
        return _begin(zone, first), end

    def _first_dates(self, day: date) -> tuple[date, date]:
        """Return the first dates of the calendar period that has ``day``, and of the next."""
        if self.kind == "day":
            return day, day + timedelta(days=1)
        if self.kind == "week":
            first = day - timedelta(days=(day.isoweekday() - self.anchor_day) % 7)
            return first, first + timedelta(days=7)
        month = day.year * 12 + day.month - 1
        first = _anchored(month, self.anchor_day)
        if day < first:
            return _anchored(month - 1, self.anchor_day), first
        return first, _anchored(month + 1, self.anchor_day)


# ``ZoneInfo`` keeps only the eight zones used last and reads the others again; a ledger may see
# more, and there are some 600 in all.
@functools.cache
def zone_named(name: str) -> tzinfo:
    """Return the zone of this name. UTC, the default, needs no zone database.

    :raises InvalidPeriod: where there is none.
    """
    if name == "UTC":
        return _UTC
    if name not in _NO_ZONES and not name.startswith(_NO_ZONE_FOLDERS):
        try:
            return ZoneInfo(name)
        except (LookupError, ValueError, OSError):
            pass  # not found, not a name but a path, or a folder
    raise InvalidPeriod(
        f"there is no time zone {name!r}; a period's time zone is a name from the IANA database, "
        "such as 'UTC' or 'Europe/Berlin' (where the system has no database, install the Python "
        "package 'tzdata')"
    )


def _local(zone: tzinfo, second: int) -> datetime:
    return (_EPOCH + second * _SECOND).astimezone(zone)


def _offset(zone: tzinfo, second: int) -> int:
    """Return by how many seconds the local clock is ahead of UTC."""
    return (_local(zone, second).replace(tzinfo=_UTC) - _EPOCH) // _SECOND - second


def _change(zone: tzinfo, before: int, after: int) -> int:
    """Return the first second of the offset at ``after``, knowing that ``before`` had another."""
    offset = _offset(zone, after)
    while after - before > 1:
        middle = (before + after) // 2
        if _offset(zone, middle) == offset:
            after = middle
        else:
            before = middle
    return after


def _clock_window(zone: tzinfo, second: int, length: int) -> tuple[int, int]:
    offset = _offset(zone, second)
    start = second - (second + offset) % length
    end = start + length
    if _offset(zone, start) != offset:
        start = _change(zone, start, second)
    if _offset(zone, end - 1) != offset:
        end = _change(zone, second, end - 1)
    return start, end


def _begin(zone: tzinfo, day: date) -> int:
    """Return the first second at which the local clock shows ``day`` or a later date."""
    midnight = datetime.combine(day, time.min, zone)
    # These differ where the clock is set, by the offsets before and after (PEP 495). Set back,
    # midnight comes twice and the old offset leads to the first. Set forward over midnight, there
    # is none: the new offset leads to a second before the jump, the old one to one after it.
    by_old = (midnight - _EPOCH) // _SECOND
    by_new = (midnight.replace(fold=1) - _EPOCH) // _SECOND
    return by_old if by_old <= by_new else _change(zone, by_new, by_old)


def _anchored(month: int, day: int) -> date:
    """Return the date of ``day``, or the month's last, in a month counted from year 0."""
    year, month = month // 12, month % 12 + 1
    return date(year, month, min(day, calendar.monthrange(year, month)[1]))
