"""Periods and their windows."""

from __future__ import annotations

import functools
import itertools
import struct
import zoneinfo
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_budget.core.periods import FOREVER_US, PERIODS, Period, Window
from celery_budget.errors import InvalidPeriod

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
SECOND, MINUTE, HOUR, DAY = 10**6, 60 * 10**6, 3600 * 10**6, 24 * 3600 * 10**6


def us(text: str) -> int:
    """Return the microseconds since the epoch of a time in UTC."""
    at = datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    return (at - EPOCH) // timedelta(microseconds=1)


LAST_US = us("9998-12-31 23:59:59.999999")

# Kind, zone and anchor day, the bounds of its windows that follow each other. All in UTC.
SEQUENCES = [
    # Nothing happens.
    ("minute", "UTC", 1, ["2024-01-01", "2024-01-01 00:01", "2024-01-01 00:02"]),
    ("hour", "UTC", 1, ["2024-01-01", "2024-01-01 01:00", "2024-01-01 02:00"]),
    ("day", "UTC", 1, ["2024-02-28", "2024-02-29", "2024-03-01"]),
    ("month", "UTC", 1, ["2023-12-01", "2024-01-01", "2024-02-01"]),
    # Leap seconds are none of the epoch's.
    ("minute", "UTC", 1, ["2016-12-31 23:59", "2017-01-01", "2017-01-01 00:01"]),
    # Months that have no such day begin on their last.
    ("month", "UTC", 29, ["2023-01-29", "2023-02-28", "2023-03-29", "2023-04-29"]),
    ("month", "UTC", 30, ["2023-01-30", "2023-02-28", "2023-03-30", "2023-04-30"]),
    ("month", "UTC", 31, ["2023-01-31", "2023-02-28", "2023-03-31", "2023-04-30"]),
    ("month", "UTC", 29, ["2024-01-29", "2024-02-29", "2024-03-29"]),
    ("month", "UTC", 30, ["2024-01-30", "2024-02-29", "2024-03-30"]),
    ("month", "UTC", 31, ["2024-01-31", "2024-02-29", "2024-03-31"]),
    ("month", "UTC", 15, ["2023-12-15", "2024-01-15", "2024-02-15"]),
    # 2024-01-01 is a Monday.
    ("week", "UTC", 1, ["2024-01-01", "2024-01-08", "2024-01-15"]),
    ("week", "UTC", 2, ["2024-01-02", "2024-01-09"]),
    ("week", "UTC", 3, ["2024-01-03", "2024-01-10"]),
    ("week", "UTC", 4, ["2023-12-28", "2024-01-04"]),
    ("week", "UTC", 5, ["2023-12-29", "2024-01-05"]),
    ("week", "UTC", 6, ["2023-12-30", "2024-01-06"]),
    ("week", "UTC", 7, ["2023-12-31", "2024-01-07"]),
    # Clocks that are not whole hours away from UTC, or not even whole minutes.
    ("hour", "Asia/Kolkata", 1, ["2024-01-01 00:30", "2024-01-01 01:30"]),
    ("day", "Asia/Kolkata", 1, ["2023-12-31 18:30", "2024-01-01 18:30"]),
    ("hour", "Asia/Kathmandu", 1, ["2024-01-01 00:15", "2024-01-01 01:15"]),
    ("day", "Asia/Kathmandu", 1, ["2023-12-31 18:15", "2024-01-01 18:15"]),
    ("minute", "Africa/Monrovia", 1, ["1971-05-31 23:59:30", "1971-06-01 00:00:30"]),
    # It went from 44 minutes and 30 seconds behind to UTC at a local midnight.
    (
        "minute",
        "Africa/Monrovia",
        1,
        ["1972-01-07 00:43:30", "1972-01-07 00:44:30", "1972-01-07 00:45:00"],
    ),
    (
        "hour",
        "Africa/Monrovia",
        1,
        ["1972-01-06 23:44:30", "1972-01-07 00:44:30", "1972-01-07 01:00:00"],
    ),
    ("day", "Africa/Monrovia", 1, ["1972-01-06 00:44:30", "1972-01-07 00:44:30", "1972-01-08"]),
    # Forward and back at 1:00 UTC.
    ("hour", "Europe/Berlin", 1, ["2024-03-31", "2024-03-31 01:00", "2024-03-31 02:00"]),
    ("day", "Europe/Berlin", 1, ["2024-03-29 23:00", "2024-03-30 23:00", "2024-03-31 22:00"]),
    ("week", "Europe/Berlin", 1, ["2024-03-24 23:00", "2024-03-31 22:00", "2024-04-07 22:00"]),
    ("month", "Europe/Berlin", 1, ["2024-02-29 23:00", "2024-03-31 22:00", "2024-04-30 22:00"]),
    ("hour", "Europe/Berlin", 1, ["2024-10-27", "2024-10-27 01:00", "2024-10-27 02:00"]),
    ("day", "Europe/Berlin", 1, ["2024-10-25 22:00", "2024-10-26 22:00", "2024-10-27 23:00"]),
    ("month", "Europe/Berlin", 27, ["2024-09-26 22:00", "2024-10-26 22:00", "2024-11-26 23:00"]),
    ("day", "America/New_York", 1, ["2024-03-10 05:00", "2024-03-11 04:00", "2024-03-12 04:00"]),
    ("day", "America/New_York", 1, ["2024-11-03 04:00", "2024-11-04 05:00", "2024-11-05 05:00"]),
    # Years ahead, by rule.
    ("day", "America/New_York", 1, ["2090-03-12 05:00", "2090-03-13 04:00", "2090-03-14 04:00"]),
    # Half an hour back at 2:00 repeats half of an hour, half an hour forward leaves half of one.
    (
        "hour",
        "Australia/Lord_Howe",
        1,
        ["2024-04-06 14:00", "2024-04-06 15:00", "2024-04-06 15:30", "2024-04-06 16:30"],
    ),
    (
        "hour",
        "Australia/Lord_Howe",
        1,
        ["2024-10-05 14:30", "2024-10-05 15:30", "2024-10-05 16:00", "2024-10-05 17:00"],
    ),
    ("day", "Australia/Lord_Howe", 1, ["2024-04-06 13:00", "2024-04-07 13:30"]),
    ("day", "Australia/Lord_Howe", 1, ["2024-10-05 13:30", "2024-10-06 13:00"]),
    # Forward at 0:00: the day has no midnight.
    ("day", "America/Sao_Paulo", 1, ["2018-11-03 03:00", "2018-11-04 03:00", "2018-11-05 02:00"]),
    ("week", "America/Sao_Paulo", 7, ["2018-10-28 03:00", "2018-11-04 03:00", "2018-11-11 02:00"]),
    ("month", "America/Sao_Paulo", 4, ["2018-10-04 03:00", "2018-11-04 03:00", "2018-12-04 02:00"]),
    ("day", "Asia/Beirut", 1, ["2022-03-25 22:00", "2022-03-26 22:00", "2022-03-27 21:00"]),
    ("day", "America/Havana", 1, ["2024-03-09 05:00", "2024-03-10 05:00", "2024-03-11 04:00"]),
    # Back from 0:00 to 23:00: the date was not reached before.
    ("day", "America/Sao_Paulo", 1, ["2018-02-17 02:00", "2018-02-18 03:00", "2018-02-19 03:00"]),
    ("day", "Asia/Beirut", 1, ["2022-10-28 21:00", "2022-10-29 22:00", "2022-10-30 22:00"]),
    # Back from 1:00 to 0:00: midnight comes twice.
    ("day", "America/Havana", 1, ["2024-11-02 04:00", "2024-11-03 04:00", "2024-11-04 05:00"]),
    ("hour", "America/Havana", 1, ["2024-11-03 04:00", "2024-11-03 05:00", "2024-11-03 06:00"]),
    # Back from 0:01 to 23:01 of the day before.
    ("day", "America/St_Johns", 1, ["2010-11-06 02:30", "2010-11-07 02:30", "2010-11-08 03:30"]),
    (
        "hour",
        "America/St_Johns",
        1,
        ["2010-11-07 01:30", "2010-11-07 02:30", "2010-11-07 02:31", "2010-11-07 03:30"],
    ),
    ("week", "America/St_Johns", 7, ["2010-10-31 02:30", "2010-11-07 02:30", "2010-11-14 03:30"]),
    # The same at the end of a month: the hour back in October is November's.
    ("month", "America/St_Johns", 1, ["2009-10-01 02:30", "2009-11-01 02:30", "2009-12-01 03:30"]),
    # Forward from 0:01 to 1:01.
    (
        "hour",
        "America/St_Johns",
        1,
        ["2010-03-14 02:30", "2010-03-14 03:30", "2010-03-14 03:31", "2010-03-14 04:30"],
    ),
    # There was no 30 December.
    ("day", "Pacific/Apia", 1, ["2011-12-29 10:00", "2011-12-30 10:00", "2011-12-31 10:00"]),
    ("hour", "Pacific/Apia", 1, ["2011-12-30 09:00", "2011-12-30 10:00", "2011-12-30 11:00"]),
    ("week", "Pacific/Apia", 5, ["2011-12-23 10:00", "2011-12-30 10:00", "2012-01-05 10:00"]),
    ("month", "Pacific/Apia", 30, ["2011-11-30 10:00", "2011-12-30 10:00", "2012-01-29 10:00"]),
    ("month", "Pacific/Apia", 31, ["2011-11-30 10:00", "2011-12-30 10:00", "2012-01-30 10:00"]),
]


def assert_follow(period: Period, bounds: list[str]) -> None:
    for start, end in itertools.pairwise([us(bound) for bound in bounds]):
        probes = [start + (end - start) * n // 60 for n in range(60)]
        for at in (*probes, start + 1, end - 1):
            assert period.window(at) == Window(start, end)


@pytest.mark.parametrize(("kind", "zone", "anchor", "bounds"), SEQUENCES)
def test_windows_follow_the_local_clock(
    kind: str, zone: str, anchor: int, bounds: list[str]
) -> None:
    assert_follow(Period(kind, zone, anchor), bounds)


@pytest.fixture
def made_up_zone(tmp_path: Path) -> Iterator[str]:
    """Put a zone into the database that is an hour ahead in summer, and no zone's like since 1970.

    On the second Sunday of March it goes from 23:30 to 0:30, on the first of November back from
    0:15 to 23:15.
    """
    counts = struct.pack(">4sc15x6l", b"TZif", b"2", 0, 0, 0, 0, 1, 4)
    block = counts + struct.pack(">l2x4s", 0, b"AAA")
    rule = b"\nAAA0BBB,M3.2.0/23:30,M11.1.0/0:15\n"
    (tmp_path / "Made_Up").write_bytes(block + block + rule)
    zoneinfo.reset_tzpath([tmp_path])
    yield "Made_Up"
    zoneinfo.reset_tzpath()


def test_a_day_begins_where_the_clock_jumps_past_its_midnight(made_up_zone: str) -> None:
    day, hour = Period("day", made_up_zone), Period("hour", made_up_zone)
    assert_follow(day, ["2024-03-10", "2024-03-10 23:30", "2024-03-11 23:00"])
    assert_follow(hour, ["2024-03-10 23:00", "2024-03-10 23:30", "2024-03-11", "2024-03-11 01:00"])
    assert_follow(day, ["2024-11-01 23:00", "2024-11-02 23:00", "2024-11-04"])
    assert_follow(hour, ["2024-11-02 23:00", "2024-11-02 23:15", "2024-11-03", "2024-11-03 01:00"])
    assert_follow(Period("week", made_up_zone, 7), ["2024-11-02 23:00", "2024-11-10"])


def test_the_total_is_one_window() -> None:
    assert Period() == Period("total", "UTC", 1)
    for at in (0, us("2024-05-06"), LAST_US):
        assert Period().window(at) == Period("total", "Asia/Tokyo").window(at)
        assert Period().window(at) == Window(0, FOREVER_US)


@pytest.mark.parametrize(
    ("period", "end"),
    [
        (Period("minute"), "1970-01-01 00:01"),
        (Period("hour", "Asia/Kolkata"), "1970-01-01 00:30"),
        (Period("day", "America/New_York"), "1970-01-01 05:00"),
        (Period("week"), "1970-01-05 00:00"),  # it was a Thursday
        (Period("month", "UTC", 31), "1970-01-31 00:00"),
    ],
)
def test_time_begins_with_the_epoch(period: Period, end: str) -> None:
    assert period.window(0) == Window(0, us(end))


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Etc/GMT+12", "America/Nuuk"])
@pytest.mark.parametrize("kind", PERIODS)
def test_time_ends_with_the_year_9998(kind: str, zone: str) -> None:
    period = Period(kind, zone)
    window = period.window(LAST_US)
    assert window.start_us <= LAST_US < window.end_us
    for at in (-1, LAST_US + 1, 2**63 - 1, -(10**30), 10**30):
        with pytest.raises(InvalidPeriod, match=f"1970 and 9998 .* not at {at};"):
            period.window(at)


@pytest.mark.parametrize("kind", ["", "Day", "year", "days", None, 1, [], b"day"])
def test_other_kinds_are_refused(kind: object) -> None:
    with pytest.raises(InvalidPeriod, match=r"^a period is one of total, minute, .* not "):
        Period(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "zone",
    [
        "", " ", "Mars/Base", "Europe", "europe/Berlin ", "UTC ", "CEST", "+02:00", "Factory",
        "localtime", "posixrules", "right/UTC", "posix/UTC", "../x", "../zoneinfo/UTC",
        "Europe/../UTC", "Europe//Berlin", "./UTC", "/UTC", "/etc/localtime", "tzdata.zi",
        "zone.tab", "UTC\0", "\ud800", "x" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["total", "day"])
def test_zones_that_iana_does_not_name_are_refused(kind: str, zone: str) -> None:
    with pytest.raises(InvalidPeriod, match=r"^there is no time zone .*IANA"):
        Period(kind, zone)


@pytest.mark.parametrize("zone", [None, 1, b"UTC", [], timezone.utc, ZoneInfo("Europe/Berlin")])
def test_a_zone_is_given_by_name(zone: object) -> None:
    with pytest.raises(InvalidPeriod, match=r"^a period's time zone is a name, not .* \(\w+\);"):
        Period("day", zone)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "last"),
    [("total", 1), ("minute", 1), ("hour", 1), ("day", 1), ("week", 7), ("month", 31)],
)
def test_anchor_days_are_checked(kind: str, last: int) -> None:
    assert Period(kind, "UTC", last).anchor_day == last
    allowed = "always 1" if last == 1 else f"an integer from 1 to {last}"
    for anchor in (0, -1, last + 1, True, False, 1.0, "1", None, [], 10**40):
        with pytest.raises(
            InvalidPeriod, match=f"^the anchor day of the period '{kind}' is {allowed}, not "
        ):
            Period(kind, "UTC", anchor)  # type: ignore[arg-type]


# An oracle that knows nothing but how to read the local clock, minute by minute.

CHANGES = [
    ("Africa/Cairo", "2023-04-27 22:00"),
    ("America/Havana", "2024-03-10 05:00"),
    ("America/Havana", "2024-11-03 05:00"),
    ("America/Nuuk", "2024-10-27 01:00"),
    ("America/Sao_Paulo", "2018-02-18 02:00"),
    ("America/Sao_Paulo", "2018-11-04 03:00"),
    ("America/St_Johns", "2009-11-01 02:31"),
    ("America/St_Johns", "2010-03-14 03:31"),
    ("Asia/Beirut", "2022-10-29 21:00"),
    ("Asia/Pyongyang", "2018-05-04 15:00"),
    ("Australia/Lord_Howe", "2024-04-06 15:00"),
    ("Europe/Berlin", "2024-10-27 01:00"),
    ("Pacific/Apia", "2011-12-30 10:00"),
    ("Pacific/Kiritimati", "1994-12-31 10:00"),
    ("Pacific/Kwajalein", "1993-08-21 12:00"),
]


def begins(kind: str, anchor: int, day: date) -> bool:
    if kind == "week":
        return day.isoweekday() == anchor
    last_of_month = (day + timedelta(days=1)).day == 1
    return kind == "day" or day.day == anchor or (last_of_month and day.day < anchor)


def scan(kind: str, zone: str, anchor: int, first_us: int, end_us: int) -> Iterator[int]:
    """Give each full minute in a span at which a window begins."""
    clock = ZoneInfo(zone)
    before = datetime.fromtimestamp(first_us // SECOND - 60, clock)
    latest = before.date()
    for at in range(first_us // SECOND, end_us // SECOND, 60):
        now = datetime.fromtimestamp(at, clock)
        if kind == "hour":
            if now.minute == 0 or now.utcoffset() != before.utcoffset():
                yield at * SECOND
        elif now.date() > latest:
            passed = (now.date() - latest).days
            if any(begins(kind, anchor, now.date() - timedelta(days=n)) for n in range(passed)):
                yield at * SECOND
            latest = now.date()
        before = now


@pytest.mark.parametrize(("zone", "change"), CHANGES)
@pytest.mark.parametrize(
    ("kind", "anchors"), [("hour", [1]), ("day", [1]), ("week", range(1, 8)), ("month", [1, 30])]
)
def test_windows_begin_where_a_scan_of_the_clock_says(
    kind: str, anchors: list[int], zone: str, change: str
) -> None:
    first, end = us(change) - 3 * DAY // 2, us(change) + 3 * DAY // 2
    for anchor in anchors:
        period = Period(kind, zone, anchor)
        starts = list(scan(kind, zone, anchor, first, end))
        followed = []
        at = period.window(first - 1).end_us
        while at < end:
            followed.append(at)
            at = period.window(at).end_us
        assert followed == starts
        for at in range(us(change) - 3 * HOUR, us(change) + 3 * HOUR, 10 * MINUTE):
            started = [start for start in starts if start <= at]
            assert period.window(at).start_us == max(started, default=period.window(first).start_us)


# Properties, with the instants at which clocks are set more often than chance would find them.

ZONES = sorted(available_timezones() - {"Factory", "localtime", "posixrules"})


@functools.cache
def changes(zone: str, year: int) -> list[int]:
    """Return the days, by their first second in UTC, within which a clock is set."""
    start = (datetime(year, 1, 1, tzinfo=timezone.utc) - EPOCH) // timedelta(seconds=1)
    days = range(start, start + 366 * 86400, 86400)
    offsets = [datetime.fromtimestamp(at, ZoneInfo(zone)).utcoffset() for at in days]
    return [days[n] for n in range(365) if offsets[n] != offsets[n + 1]]


@st.composite
def places(draw: st.DrawFn) -> tuple[str, int]:
    """Draw a zone and an instant from 1970 to 2100, often near one at which its clock is set."""
    zone = draw(st.sampled_from(ZONES))
    year = draw(st.integers(1970, 2100))
    days = changes(zone, year)
    if not days or draw(st.booleans()):
        return zone, draw(st.integers(us(f"{year}-01-01"), us(f"{year}-12-31 23:59:59.999999")))
    before = draw(st.sampled_from(days))
    after = before + 86400
    clock = ZoneInfo(zone)
    offset = datetime.fromtimestamp(after, clock).utcoffset()
    while after - before > 1:
        middle = (before + after) // 2
        if datetime.fromtimestamp(middle, clock).utcoffset() == offset:
            after = middle
        else:
            before = middle
    reach = draw(st.sampled_from([1, MINUTE, HOUR, 30 * HOUR]))
    return zone, max(after * SECOND + draw(st.integers(-reach, reach)), 0)


KINDS = st.one_of(
    st.tuples(st.sampled_from(["minute", "hour", "day"]), st.just(1)),
    st.tuples(st.just("week"), st.integers(1, 7)),
    st.tuples(st.just("month"), st.integers(1, 31)),
)

# No clock was set back by more than some hours since 1970.
LONGEST = {
    "minute": MINUTE,
    "hour": HOUR,
    "day": 50 * HOUR,
    "week": 7 * DAY + 26 * HOUR,
    "month": 31 * DAY + 26 * HOUR,
}


@settings(max_examples=1000)
@given(places(), KINDS)
def test_windows_partition_time(place: tuple[str, int], shape: tuple[str, int]) -> None:
    (zone, at), (kind, anchor) = place, shape
    period = Period(kind, zone, anchor)
    window = period.window(at)
    assert window.start_us <= at < window.end_us
    assert period.window(window.start_us) == window
    assert period.window(window.end_us - 1) == window
    assert period.window(window.end_us).start_us == window.end_us
    if window.start_us:
        assert period.window(window.start_us - 1).end_us == window.start_us
    assert window.end_us - window.start_us <= LONGEST[kind]


@settings(max_examples=300)
@given(places(), st.integers(0, 10 * DAY), KINDS)
def test_later_instants_have_the_same_window_or_a_later_one(
    place: tuple[str, int], wait: int, shape: tuple[str, int]
) -> None:
    (zone, at), (kind, anchor) = place, shape
    period = Period(kind, zone, anchor)
    window, later = period.window(at), period.window(at + wait)
    assert later == window or (later.start_us >= window.end_us and at + wait >= window.end_us)


@given(places())
def test_coarser_windows_consist_of_finer_ones(place: tuple[str, int]) -> None:
    zone, at = place
    day = Period("day", zone).window(at)
    for anchor in range(1, 8):
        week = Period("week", zone, anchor).window(at)
        assert week.start_us <= day.start_us
        assert day.end_us <= week.end_us
    month = Period("month", zone, 31).window(at)
    assert month.start_us <= day.start_us
    assert day.end_us <= month.end_us
