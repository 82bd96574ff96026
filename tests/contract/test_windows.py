"""Windows: one row for each stretch of time, one after another; what was admitted settles there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from celery_budget import reconcile, settlement
from celery_budget.core.periods import FOREVER_US, Period
from celery_budget.core.reservations import Line, Parked, Refused, Reserved
from celery_budget.errors import InvalidPeriod
from celery_budget.settings import Settings
from celery_budget.store import Store
from celery_budget.upkeep import EMPTY_US, HORIZON_US
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger
from tests.messages import Told

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
DAY_US = 24 * HOUR_US
PERIODS = ("total", "minute", "hour", "day", "week", "month")


@pytest.fixture
def daily(ledger: Ledger) -> Ledger:
    """A ledger whose budget ``b`` has 100 tokens a day."""
    ledger.set("b", 100, period="day")
    return ledger


@pytest.fixture
def noon(ledger: Ledger) -> Ledger:
    """The same, where it is about noon: the next window is not made ahead."""
    east = (12 - datetime.now(timezone.utc).hour + 11) % 24 - 11
    # The names of these zones say how far they are behind.
    ledger.set("b", 100, period="day", timezone=f"Etc/GMT{-east:+d}")
    return ledger


def standings(ledger: Ledger, name: str = "b") -> list[tuple[int, int]]:
    """What is reserved and spent in each window."""
    return [(row.reserved, row.spent) for row in ledger.counted(budget=name)]


def follow_one_another(ledger: Ledger, name: str = "b") -> bool:
    windows = ledger.windows(name)
    return all(start < end for start, end in windows) and all(
        first[1] <= second[0] for first, second in pairwise(windows)
    )


def end_at(ledger: Ledger, end_us: int, name: str = "b") -> None:
    """Let the last window of a budget end at another time."""
    ledger.put("balances", {"end_us": end_us}, budget=name, window_us=ledger.windows(name)[-1][0])


# One window after another.


@pytest.mark.parametrize("period", PERIODS)
def test_a_new_budget_has_the_window_that_is_open(ledger: Ledger, period: str) -> None:
    ledger.set("b", 100, period=period)
    [(start_us, end_us)] = ledger.windows()
    window = Period(period).window(start_us)
    assert (start_us, end_us) == (window.start_us, window.end_us)
    assert start_us <= ledger.now() < end_us
    standing = ledger.standing()
    assert (standing.period, standing.start_us) == (period, start_us)
    assert standing.end_us == (None if period == "total" else end_us)


def test_a_window_begins_by_the_clock_of_its_zone(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day", timezone="Asia/Kathmandu")
    [(start_us, _)] = ledger.windows()
    assert start_us % DAY_US == 18 * HOUR_US + HOUR_US // 4, "their midnight is at 18:15 UTC"


@pytest.mark.parametrize(
    "terms",
    [
        {"period": "year"},
        {"period": "day", "timezone": "Mars/Olympus"},
        {"period": "week", "anchor_day": 8},
        {"period": "day", "anchor_day": 2},
    ],
)
def test_what_is_no_period_changes_nothing(funded: Ledger, terms: dict[str, Any]) -> None:
    before = funded.dump()
    with pytest.raises(InvalidPeriod):
        funded.set("b", 100, **terms)
    with pytest.raises(InvalidPeriod):
        funded.set("c", 100, **terms)
    assert funded.dump() == before


@pytest.mark.parametrize("period", ["minute", "hour", "day", "week", "month"])
def test_a_budget_begins_anew_in_each_window(ledger: Ledger, period: str) -> None:
    ledger.set("b", 100, period=period)
    ledger.age("b", 40 * DAY_US)
    assert ledger.balance() == (0, 0)
    assert len(ledger.windows()) == 1, "looking makes no window"
    ledger.reserve(100)
    ledger.age("b", 40 * DAY_US)
    request = ledger.reserve(100)
    assert standings(ledger) == [(0, 0), (100, 0), (100, 0)]
    assert (
        ledger.rows("lines", reservation_id=request.reservation_id)[0].window_us
        == (ledger.windows()[-1][0])
    )
    assert follow_one_another(ledger)
    start_us, end_us = ledger.windows()[-1]
    assert start_us <= ledger.now()
    assert Period(period).window(start_us).end_us == end_us


def test_what_is_refused_makes_no_window(daily: Ledger) -> None:
    daily.reserve(100)
    daily.age("b", DAY_US)
    before = daily.dump()
    assert daily.admit(daily.request(101)) == Refused(
        "b", "tokens", 101, 100, 0, 0, "exhausted", 100
    )
    assert {**daily.dump(), "refusals": []} == before
    daily.reserve(100)


def test_each_level_has_windows_of_its_own(ledger: Ledger) -> None:
    ledger.set("org", 1000, period="month")
    ledger.set("user", 100, parent="org", period="hour")
    ledger.reserve(70, budget="user")
    ledger.age("user", DAY_US)
    ledger.reserve(80, budget="user")
    assert (standings(ledger, "user"), standings(ledger, "org")) == (
        [(70, 0), (80, 0)],
        [(150, 0)],
    )
    ledger.age("user", DAY_US)
    ledger.age("org", 40 * DAY_US)
    ledger.reserve(90, budget="user")
    assert (standings(ledger, "user"), standings(ledger, "org")) == (
        [(70, 0), (80, 0), (90, 0)],
        [(150, 0), (90, 0)],
    )


def test_a_window_begins_where_the_last_one_ended(ledger: Ledger) -> None:
    """One that ended before its time: time is not counted twice."""
    ledger.set("b", 100, period="month")
    ledger.reserve(100)
    ended = ledger.now() - SECOND_US
    end_at(ledger, ended)
    ledger.reserve(100)
    first, second = ledger.windows()
    assert first[1] == second[0] == ended
    assert second[1] == Period("month").window(ended).end_us


def test_a_window_ends_where_the_next_one_begins(ledger: Ledger) -> None:
    """One that was made ahead by a host with another idea of time."""
    ledger.set("b", 100, period="month")
    ledger.reserve(10)
    soon = ledger.now() + 120 * SECOND_US
    end_at(ledger, soon)
    assert ledger.upkeep().made == 1
    first, _ = ledger.windows()
    ledger.put("balances", {"end_us": ledger.now() - SECOND_US}, window_us=first[0])
    ledger.reserve(20)
    windows = ledger.windows()
    assert follow_one_another(ledger)
    assert windows[1][1] == soon
    assert standings(ledger) == [(10, 0), (20, 0), (0, 0)]


# What was admitted settles where it was admitted.


def test_a_reservation_settles_in_its_window_however_late(daily: Ledger) -> None:
    request, attempt = daily.start(40)
    other = daily.reserve(50)
    daily.age("b", DAY_US)
    daily.reserve(100)
    attempt.record(30)
    assert standings(daily) == [(90, 0), (100, 0)]
    attempt.record(30)
    assert standings(daily) == [(110, 0), (100, 0)], "over, in the window that is over"
    attempt.end(RETURNED)
    assert settlement.revoke(daily.store, daily.root, other.reservation_id, "cancelled")
    daily.age("b", DAY_US)
    attempt.record(5)
    assert standings(daily) == [(0, 65), (100, 0)]
    assert daily.balance() == (0, 0)
    assert daily.row(request).over


@pytest.mark.parametrize("parked", [True, False])
def test_a_retry_is_held_in_the_window_that_admitted_it(daily: Ledger, parked: bool) -> None:
    request, attempt = daily.start(40)
    attempt.record(40)
    daily.reserve(21 if parked else 20)
    daily.age("b", DAY_US)
    daily.reserve(100)
    following, written = daily.retry(request, attempt)
    attempt.end(RETRIED)
    if parked:
        assert isinstance(written, Parked), "though the new window would not have it either way"
        assert standings(daily) == [(61, 0), (100, 0)]
        daily.set("b", 101)
        assert daily.sweep().admitted == 1
        assert standings(daily) == [(101, 0), (100, 0)]
    else:
        assert isinstance(written, Reserved)
        assert standings(daily) == [(100, 0), (100, 0)]
    daily.run(following).end(RAISED)
    assert standings(daily) == [(21 if parked else 20, 40), (100, 0)]


def test_what_is_charged_at_the_start_is_charged_there_too(daily: Ledger) -> None:
    request = daily.reserve(budget="b", lines=(Line("b", 3, "start"),))
    daily.age("b", DAY_US)
    daily.reserve(1)
    attempt = daily.run(request)
    assert standings(daily) == [(0, 3), (1, 0)]
    attempt.end(RETURNED)


@pytest.mark.parametrize("ahead", [0, 2], ids=["free", "in use"])
def test_a_retry_starts_in_the_window_that_is_open_then(daily: Ledger, ahead: int) -> None:
    """Three starts a day: one that is retried the next day counts there."""
    daily.set("b", 3)
    request, attempt = daily.start(3, lines=(Line("b", 3, "start"),))
    daily.age("b", DAY_US)
    if ahead:
        daily.reserve(ahead)
    following, written = daily.retry(request, attempt)
    assert isinstance(written, Parked if ahead else Reserved)
    assert attempt.end(RETRIED)
    assert len(daily.rows("lines", reservation_id=request.reservation_id)) == (1 if ahead else 2)
    if ahead:
        assert daily.sweep().admitted == 0
        daily.set("b", 5)
        assert daily.sweep().admitted == 1
    assert standings(daily) == [(0, 3), (3 + ahead, 0)]
    again = daily.run(following)
    assert standings(daily) == [(0, 3), (ahead, 3)]
    daily.age("b", DAY_US)
    third, written = daily.retry(following, again)
    assert isinstance(written, Reserved)
    again.end(RETRIED)
    assert settlement.revoke(daily.store, daily.root, third.reservation_id, "cancelled")
    assert [spent for _, spent in standings(daily)] == [3, 3, 0]


def test_a_retry_on_a_draining_budget_starts_in_its_old_window(daily: Ledger) -> None:
    request, attempt = daily.start(3, lines=(Line("b", 3, "start"),))
    daily.age("b", DAY_US)
    assert daily.close(drain=True) == "draining"
    following, written = daily.retry(request, attempt)
    assert isinstance(written, Reserved)
    assert attempt.end(RETRIED)
    assert daily.run(following).end(RETURNED)
    assert standings(daily) == [(0, 6)]
    assert daily.upkeep().closed == ("b",)


def test_parked_work_goes_to_the_window_in_which_it_fits(daily: Ledger) -> None:
    daily.reserve(100)
    assert isinstance(daily.admit(daily.request(10), continuation=True), Parked)
    assert daily.sweep().admitted == 0
    daily.age("b", DAY_US)
    assert daily.sweep().admitted == 1
    assert standings(daily) == [(100, 0), (10, 0)]


def test_the_limit_is_that_of_the_budget_in_every_window(daily: Ledger) -> None:
    request, attempt = daily.start(40)
    attempt.record(40)
    daily.age("b", DAY_US)
    daily.set("b", 79)
    _, written = daily.retry(request, attempt)
    assert isinstance(written, Parked)
    attempt.end(RETRIED)
    daily.set("b", 80)
    assert daily.sweep().admitted == 1


# Made ahead.


def ending_soon(ledger: Ledger, in_us: int = 120 * SECOND_US) -> int:
    """Let the window of ``b`` end soon; tell when."""
    ledger.set("b", 100, period="month")
    ends = ledger.now() + in_us
    end_at(ledger, ends)
    return ends


def test_the_next_window_is_made_ahead_once(ledger: Ledger) -> None:
    ends = ending_soon(ledger)
    ledger.reserve(10)
    assert ledger.upkeep().made == 1
    assert ledger.windows()[-1] == (ends, Period("month").window(ends).end_us)
    assert ledger.balance() == (10, 0), "it is not the one that is open"
    assert ledger.upkeep().made == 0
    assert len(ledger.windows()) == 2


@pytest.mark.parametrize("used", ["held", "spent", "adjusted"])
def test_it_is_made_for_what_is_used(ledger: Ledger, used: str) -> None:
    ending_soon(ledger)
    if used == "adjusted":
        ledger.adjust("k", 5)
    else:
        request = ledger.reserve(10)
        if used == "spent":
            ledger.run(request).end(RETURNED)
    assert ledger.upkeep().made == 1


@pytest.mark.parametrize("why", ["unused", "given back", "not soon", "closed", "draining", "total"])
def test_no_window_is_made_ahead(ledger: Ledger, why: str) -> None:
    ending_soon(ledger, HORIZON_US + 60 * SECOND_US if why == "not soon" else 120 * SECOND_US)
    if why == "total":
        ledger.set("b", 100, period="total")
    if why != "unused":
        request = ledger.reserve(10)
    if why == "given back":
        assert settlement.revoke(ledger.store, ledger.root, request.reservation_id, "cancelled")
    elif why == "draining":
        ledger.close(drain=True)
    elif why == "closed":
        ledger.run(request).end(RETURNED)
        ledger.close()
    before = ledger.windows()
    assert ledger.upkeep().made == 0
    assert ledger.windows() == before


def test_a_zone_that_is_not_known_here_holds_up_no_other(ledger: Ledger, told: Told) -> None:
    ends = ending_soon(ledger)
    ledger.set("a", 100, period="month")
    ledger.put("balances", {"end_us": ends}, budget="a")
    for name in ("a", "b"):
        ledger.reserve(10, budget=name)
    ledger.put("budgets", {"timezone": "Mars/Olympus_Mons"}, name="a")
    assert ledger.upkeep().made == 1
    assert [len(ledger.windows(name)) for name in ("a", "b")] == [1, 2]
    ledger.put("budgets", {"timezone": "UTC"}, name="a")
    assert ledger.upkeep().made == 1
    assert [one["name"] for one in told("window.unmade")] == ["a"]


def test_one_made_ahead_is_used_when_its_time_comes(ledger: Ledger) -> None:
    ending_soon(ledger)
    ledger.reserve(100)
    ledger.upkeep()
    ledger.age("b", 150 * SECOND_US)
    ledger.reserve(90)
    assert standings(ledger) == [(100, 0), (90, 0)]


# Pruned.


@pytest.mark.parametrize(
    ("touch", "goes"),
    [
        (lambda ledger: None, True),
        (lambda ledger: ledger.reserve(0), False),
        (lambda ledger: ledger.reserve(1), False),
        (lambda ledger: ledger.start(1)[1].end(RETURNED), False),
        (lambda ledger: (ledger.adjust("k", 5), ledger.adjust("l", -5)), False),
        (
            lambda ledger: settlement.revoke(
                ledger.store, ledger.root, ledger.reserve(1).reservation_id, "cancelled"
            ),
            False,
        ),
    ],
    ids=["nothing", "asked for nothing", "held", "spent", "adjusted", "given back"],
)
def test_empty_windows_go_when_they_have_ended(
    noon: Ledger, touch: Callable[[Ledger], Any], goes: bool
) -> None:
    touch(noon)
    noon.age("b", 2 * DAY_US)
    noon.reserve(7)
    before = noon.windows()
    assert noon.upkeep().pruned == goes
    assert noon.windows() == (before[1:] if goes else before)
    assert noon.balance() == (7, 0)


def test_a_window_stays_while_someone_may_be_looking_at_it(daily: Ledger) -> None:
    end_at(daily, daily.now() - EMPTY_US + 60 * SECOND_US)
    assert daily.upkeep().pruned == 0
    end_at(daily, daily.now() - EMPTY_US - SECOND_US)
    assert daily.upkeep().pruned == 1
    assert daily.windows() == []
    assert daily.balance() == (0, 0)
    daily.reserve(10)


def test_an_open_window_stays_be_it_empty(ledger: Ledger) -> None:
    for period in PERIODS:
        ledger.set(period, 100, period=period)
    ledger.upkeep()
    assert len(ledger.counted()) == len(PERIODS)


# Other periods.


@pytest.mark.parametrize(
    "terms",
    [
        {"period": "month"},
        {"period": "hour"},
        {"period": "total"},
        {"timezone": "Asia/Tokyo"},
    ],
)
def test_another_period_gives_no_new_allowance(daily: Ledger, terms: dict[str, Any]) -> None:
    request, attempt = daily.start(40)
    attempt.record(10)
    [(begins, _)] = daily.windows()
    daily.set("b", 100, **terms)
    period = Period(terms.get("period", "day"), terms.get("timezone", "UTC"))
    assert daily.windows() == [(begins, period.window(daily.now()).end_us)]
    assert isinstance(daily.admit(daily.request(61)), Refused)
    daily.reserve(60)
    attempt.end(RETURNED)
    assert standings(daily) == [(60, 10)]
    assert daily.state(request) == "settled"


def test_the_same_period_again_changes_nothing(daily: Ledger) -> None:
    daily.reserve(10)
    before = daily.windows()
    daily.set("b", 100, period="day", timezone="UTC")
    daily.set("b", 200)
    assert daily.windows() == before


def test_there_and_back_again(ledger: Ledger) -> None:
    ledger.set("b", 100, period="month")
    _, attempt = ledger.start(90)
    attempt.end(RETURNED)
    for period in ("total", "month", "total", "day", "hour", "month"):
        ledger.set("b", 100, period=period)
        assert ledger.balance() == (0, 90)
    [(_, ends)] = ledger.windows()
    assert ends == Period("month").window(ledger.now()).end_us


def test_what_was_made_ahead_goes_with_its_period(ledger: Ledger) -> None:
    ending_soon(ledger)
    ledger.reserve(10)
    assert ledger.upkeep().made == 1
    ledger.set("b", 100, period="total")
    assert follow_one_another(ledger)
    assert [end for _, end in ledger.windows()] == [FOREVER_US]
    ledger.reserve(90)


@pytest.mark.parametrize("drawn_by", ["hold", "nothing held", "adjustment"])
def test_a_period_changed_by_a_clock_that_was_set_back(ledger: Ledger, drawn_by: str) -> None:
    """The window that was drawn on seems to lie ahead; it is not one that was made ahead."""
    ledger.set("b", 100, period="hour")
    request = None
    if drawn_by == "adjustment":
        ledger.adjust("k", 5)
    else:
        request = ledger.reserve(10 if drawn_by == "hold" else 0)
    ledger.age("b", -2 * HOUR_US)
    ledger.set("b", 100, period="total")
    assert follow_one_another(ledger)
    if request is not None:
        attempt = ledger.run(request)
        attempt.record(3)
        attempt.end(RETURNED)
    assert sum(row.spent for row in ledger.rows("balances")) == (3 if request else 5)
    ledger.reserve(50)
    assert follow_one_another(ledger)
    assert ledger.balance() == (50, 0)


def test_periods_that_change_within_one_moment(ledger: Ledger) -> None:
    """By SQLite's clock, which ticks once a millisecond, all this may be at one time."""
    ledger.set("b", None, period="month")
    for number in range(20):
        ledger.set("b", None, period=PERIODS[number % 6], timezone="UTC")
        ledger.reserve(1)
    assert follow_one_another(ledger)
    assert sum(row.reserved for row in ledger.rows("balances")) == 20


def test_the_period_of_a_template_makes_no_window(ledger: Ledger) -> None:
    ledger.set("t:*", 100, period="day")
    ledger.set("t:*", 100, period="month")
    assert ledger.rows("balances") == []
    ledger.reserve(10, budget="t:1")
    ledger.set("t:*", 100, period="hour")
    [(start_us, end_us)] = ledger.windows("t:1")
    assert Period("month").window(start_us).end_us == end_us, "what was made of it keeps its own"


# Closed.


def test_a_closed_budget_gets_no_window(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    ledger.set("c", 100, parent="b")
    ledger.set("t:*", 100, parent="b")
    ledger.start(5)[1].end(RETURNED)
    ledger.age("b", DAY_US)
    ledger.close()
    before = ledger.windows()
    for budget, *more in (("b",), ("c",), ("b", ("t:1", 1))):
        request = ledger.request(1, *more, budget=budget)
        assert ledger.admit(request) == Refused("b", "tokens", 1, 100, 0, 0, "closed", 100)
    assert isinstance(ledger.admit(ledger.request(1), continuation=True), Parked)
    assert ledger.sweep().admitted == 0
    assert ledger.upkeep().made == 0
    assert ledger.windows() == before
    ledger.reopen()
    assert ledger.sweep().admitted == 1
    assert len(ledger.windows()) == len(before) + 1


# Whatever happens.

AGES = [SECOND_US, 61 * SECOND_US, HOUR_US, 25 * HOUR_US, 32 * DAY_US]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 5)),
        st.tuples(st.just("settle"), st.integers(0, 9)),
        st.tuples(st.just("period"), st.sampled_from(PERIODS)),
        st.tuples(st.just("zone"), st.sampled_from(["UTC", "Asia/Tokyo", "Africa/Casablanca"])),
        st.tuples(st.just("age"), st.sampled_from([*AGES, -SECOND_US, -HOUR_US])),
        st.tuples(st.just("upkeep"), st.just(0)),
        st.tuples(st.just("close"), st.just(0)),
        st.tuples(st.just("adjust"), st.integers(1, 9)),
    ),
    max_size=14,
)


@hypothesis_settings(max_examples=40)
@given(steps=STEPS)
def test_windows_never_overlap(store: Store, store_url: str, steps: list[tuple[str, Any]]) -> None:
    ledger = Ledger(store, Settings(database_url=store_url, root=f"root-{uuid4().hex[:12]}"))
    ledger.set("b", None, period="day")
    running = []
    total = 0
    for step, value in steps:
        if step == "reserve":
            ledger.reopen()
            running.append(ledger.start(value))
        elif step == "settle" and running:
            _, attempt = running.pop()
            attempt.record(value)
            attempt.end(RETURNED)
            total += value
        elif step == "period":
            ledger.set("b", None, period=value)
        elif step == "zone":
            ledger.set("b", None, timezone=value)
        elif step == "age":
            ledger.age("b", value)
        elif step == "upkeep":
            ledger.upkeep()
        elif step == "close":
            ledger.close(drain=True)
        elif step == "adjust":
            ledger.adjust(uuid4().hex, value)
            total += value
        assert follow_one_another(ledger), ledger.windows()
    ledger.reopen()
    ledger.reserve(1)
    open_ones = [end for start, end in ledger.windows() if start <= ledger.now() < end]
    assert len(open_ones) == 1
    assert sum(row.spent for row in ledger.rows("balances")) == total
    assert reconcile.reconcile(ledger.store, ledger.settings).mismatches == ()
