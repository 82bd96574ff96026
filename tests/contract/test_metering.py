"""Records of several units, replies that do not tell all they used, holds that are used up."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from celery_budget.core.reservations import Line, Outcome
from celery_budget.core.usage import Used
from celery_budget.errors import InvalidAmount, PolicyError, ReservationExhausted
from celery_budget.settlement import Attempt
from tests.contract.support import RAISED, RETURNED, Ledger

MOST = 2**63 - 1

#: What a reply tells of the units that are drawn on here, and of others.
REPLY = {"tokens": 30, "micro-usd": 7, "requests": 1, "input_tokens": 20, "output_tokens": 10}
INCOMPLETE = frozenset(REPLY) - {"requests"}


def reply(incomplete: Any = (), **amounts: int) -> Used:
    told = {name.replace("_usd", "-usd"): amount for name, amount in amounts.items()}
    return Used({**REPLY, **told}, True, incomplete, '{"model": "m"}')


def nothing(**known: int) -> Used:
    """A reply that does not tell what it used, or not all of it."""
    return reply(INCOMPLETE, **{"tokens": 0, "micro_usd": 0, **known})


@pytest.fixture
def metered(ledger: Ledger) -> Ledger:
    """A ledger with 100 tokens and 1000 micro-dollars."""
    ledger.set("b", 100)
    ledger.set("usd", 1000, "micro-usd")
    return ledger


def begin(ledger: Ledger, tokens: int = 40, money: int = 50) -> tuple[Any, Attempt]:
    request = ledger.reserve(tokens, ("usd", money))
    return request, ledger.run(request)


def both(ledger: Ledger) -> list[tuple[int, int]]:
    return ledger.balances("b", "usd")


# Several units.


def test_several_units_are_recorded_together(metered: Ledger) -> None:
    _, attempt = begin(metered)
    assert attempt.write(Used({"tokens": 12, "micro-usd": 9}), "one") == (
        True, ("tokens", "micro-usd"),
    )  # fmt: skip
    assert not attempt.write(Used({"tokens": 12, "micro-usd": 9}), "one")[0]
    attempt.end(RETURNED)
    assert both(metered) == [(0, 12), (0, 9)]


@pytest.mark.parametrize(
    ("amounts", "error"),
    [
        ({"tokens": 1, "credits": 2}, PolicyError),
        ({"tokens": 1, "micro-usd": MOST}, InvalidAmount),
    ],
)
def test_all_of_them_or_none(
    metered: Ledger, amounts: dict[str | None, int], error: type[Exception]
) -> None:
    _, attempt = begin(metered)
    attempt.record(1, unit="micro-usd")
    before = metered.dump()
    with pytest.raises(error):
        attempt.write(Used(amounts), "one")
    assert metered.dump() == before


def test_what_is_missing_of_a_key_is_added(metered: Ledger) -> None:
    request, attempt = begin(metered)
    attempt.record(5, "one", "tokens")
    assert attempt.write(Used({"tokens": 9, "micro-usd": 9}), "one")[0]
    attempt.end(RETURNED)
    assert both(metered) == [(0, 5), (0, 9)]
    assert not metered.row(request).unmetered


def test_of_a_reply_what_is_drawn_on_counts(metered: Ledger) -> None:
    metered.set("out", 100, "output_tokens")
    metered.set("calls", 100, "requests")
    request = metered.request(
        40, lines=(Line("b", 40), Line("out", 20), Line("calls", 1), Line("usd", 50, "start"))
    )
    metered.admit(request)
    attempt = metered.run(request)
    assert attempt.write(reply())[1] == ("tokens", "output_tokens", "requests")
    attempt.end(RETURNED)
    assert metered.balances("b", "out", "calls", "usd") == [(0, 30), (0, 10), (0, 1), (0, 50)]
    assert {row.details for row in metered.rows("usage")} == {'{"model": "m"}'}


def test_a_reply_that_counts_nowhere_is_an_error(ledger: Ledger) -> None:
    ledger.set("credits", 100, "credits")
    request = ledger.reserve(10, budget="credits")
    attempt = ledger.run(request)
    with pytest.raises(PolicyError, match="can record credits"):
        attempt.write(reply())
    assert ledger.rows("usage") == []


# Replies that do not tell what they used.


@pytest.mark.parametrize("outcome", [RETURNED, RAISED, Outcome("ignored"), "lost", "none"])
def test_such_a_reply_is_charged_the_estimate(metered: Ledger, outcome: Any) -> None:
    request, attempt = begin(metered)
    assert attempt.write(nothing(), "one") == (True, ("tokens", "micro-usd"))
    assert metered.row(request).unmetered
    assert both(metered) == [(40, 0), (50, 0)]
    if outcome == "none":
        return
    if outcome == "lost":
        metered.put("attempts", {"rerun": False}, reservation_id=request.reservation_id)
        metered.lapse(request)
        metered.recover()
    else:
        attempt.end(outcome)
    assert both(metered) == [(0, 40), (0, 50)]
    row = metered.row(request)
    assert (row.unmetered, row.over) == (True, False)


def test_it_is_charged_once_however_often_it_is_recorded(metered: Ledger) -> None:
    _, attempt = begin(metered)
    assert attempt.write(nothing(), "one")[0]
    assert not attempt.write(nothing(), "one")[0]
    assert attempt.write(nothing(), "two")[0]
    attempt.end(RETURNED)
    assert both(metered) == [(0, 40), (0, 50)]


PARTS: list[tuple[str, Used]] = [
    ("one", nothing()),
    ("two", reply(tokens=25, micro_usd=4)),
    ("three", nothing(tokens=3)),
    ("two", reply(tokens=99)),
]


#: The first record of a key counts.
ORDERS = [one for one in itertools.permutations(range(4)) if one.index(1) < one.index(3)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_greater_of_recorded_and_estimated_in_any_order(
    metered: Ledger, order: tuple[int, ...]
) -> None:
    _, attempt = begin(metered)
    for number in order:
        key, used = PARTS[number]
        attempt.write(used, key)
    attempt.end(RAISED)
    assert both(metered) == [(0, 40), (0, 50)]


def test_what_is_known_above_the_estimate_is_charged(metered: Ledger) -> None:
    request, attempt = begin(metered)
    attempt.write(nothing(tokens=35), "one")
    attempt.write(reply(tokens=30, micro_usd=60), "two")
    attempt.end(RETURNED)
    assert both(metered) == [(0, 65), (0, 60)]
    row = metered.row(request)
    assert (row.unmetered, row.over) == (True, True)


@pytest.mark.parametrize("told", [0, 30, 40, 70])
def test_told_later_it_counts_what_it_tells(metered: Ledger, told: int) -> None:
    request, attempt = begin(metered)
    attempt.write(nothing(), "one")
    assert attempt.write(reply(tokens=told), "one")[0]
    assert not attempt.write(reply(tokens=99), "one")[0]
    row = metered.row(request)
    assert (row.unmetered, row.over) == (False, told > 40)
    attempt.end(RETURNED)
    assert both(metered) == [(0, told), (0, 7)]


def test_told_less_than_is_known_changes_nothing(metered: Ledger) -> None:
    request, attempt = begin(metered)
    attempt.write(nothing(tokens=30, micro_usd=30), "one")
    assert not attempt.write(reply(tokens=20), "one")[0]
    assert metered.row(request).unmetered


def test_one_that_is_told_does_not_settle_the_others(metered: Ledger) -> None:
    request, attempt = begin(metered)
    attempt.write(nothing(), "one")
    attempt.write(nothing(), "two")
    attempt.write(reply(tokens=30), "one")
    assert metered.row(request).unmetered
    attempt.end(RETURNED)
    assert both(metered) == [(0, 40), (0, 50)]


def test_each_attempt_has_its_own_estimate(metered: Ledger) -> None:
    request, attempt = begin(metered, 20, 50)
    attempt.write(nothing(), "one")
    metered.lapse(request)
    assert metered.recover().rerun == 1
    metered.relay()
    again = metered.run(request)
    assert again.remaining("tokens") == 20
    again.write(reply(tokens=5, micro_usd=6), "two")
    # What the attempt before was given is told by the provider's second answer.
    again.write(reply(tokens=11, micro_usd=12), "one")
    again.end(RETURNED)
    assert both(metered) == [(0, 16), (0, 18)]
    assert not metered.row(request).unmetered


def test_late_it_is_charged_the_estimate_too(metered: Ledger) -> None:
    _, attempt = begin(metered)
    attempt.write(reply(tokens=25, micro_usd=60), "one")
    attempt.end(RAISED)
    attempt.close()
    assert both(metered) == [(0, 25), (0, 60)]
    attempt.write(nothing(), "two")
    assert both(metered) == [(0, 40), (0, 60)]
    # What was charged at the end stays charged.
    attempt.write(reply(tokens=5, micro_usd=5), "two")
    assert both(metered) == [(0, 40), (0, 65)]


def test_what_was_added_counts_as_estimated(metered: Ledger) -> None:
    _, attempt = begin(metered)
    attempt.extend(10, unit="tokens")
    attempt.write(nothing(), "one")
    attempt.end(RETURNED)
    assert both(metered) == [(0, 50), (0, 50)]


# What is left of a hold.


def test_what_is_left_of_a_hold(metered: Ledger) -> None:
    metered.set("c", 100)
    request = metered.reserve(40, ("usd", 50), ("c", 30))
    attempt = metered.run(request)
    assert (attempt.remaining(), attempt.remaining("micro-usd")) == (30, 50)
    attempt.record(12)
    assert (attempt.remaining("tokens"), attempt.remaining("micro-usd")) == (18, 50)
    attempt.extend(5)
    assert attempt.remaining() == 23
    attempt.record(100)
    assert attempt.remaining() == 0
    attempt.end(RETURNED)
    assert attempt.remaining() == 0
    with pytest.raises(PolicyError):
        attempt.remaining("credits")


def test_an_attempt_may_stop_at_its_hold(metered: Ledger) -> None:
    request, attempt = begin(metered)
    attempt.stop_at_hold = True
    attempt.record(40)
    attempt.check()
    with pytest.raises(ReservationExhausted) as caught:
        attempt.record(25, "more")
    assert caught.value.args == ("b", "tokens", 65, 40)
    assert metered.line(request) == (65, 65, 0)
    for again in (attempt.check, lambda: attempt.record(1, "more"), lambda: attempt.record(0)):
        with pytest.raises(ReservationExhausted):
            again()
    attempt.extend(10)
    attempt.check()
    attempt.record(10)
    with pytest.raises(ReservationExhausted):
        attempt.write(Used({"tokens": 1, "micro-usd": 1}))
    attempt.end(RAISED)
    assert both(metered) == [(0, 76), (0, 1)]


def test_it_stops_by_what_this_attempt_has_used(metered: Ledger) -> None:
    request, attempt = begin(metered, 20)
    attempt.stop_at_hold = True
    with pytest.raises(ReservationExhausted):
        attempt.record(30)
    metered.lapse(request)
    metered.recover()
    metered.relay()
    again = metered.run(request)
    again.stop_at_hold = True
    again.record(20)
    again.check()
    with pytest.raises(ReservationExhausted):
        again.record(1)


def test_others_go_over(metered: Ledger) -> None:
    _, attempt = begin(metered)
    attempt.record(500)
    attempt.check()


def test_usage_after_the_end_stops_nothing(metered: Ledger) -> None:
    _, attempt = begin(metered)
    attempt.stop_at_hold = True
    attempt.end(RETURNED)
    assert attempt.record(100)


# By which prices.


def test_a_reservation_keeps_its_prices(metered: Ledger) -> None:
    request = metered.reserve(10, prices="p 1")
    assert metered.row(request).prices == "p 1"
    attempt = metered.run(request)
    following, _ = metered.retry(request, attempt)
    assert metered.row(request).prices == "p 1"
    plain = metered.reserve(10)
    assert metered.row(plain).prices is None
    assert following.prices == "p 1"


def test_a_retry_is_by_its_own_prices(metered: Ledger) -> None:
    request = metered.reserve(10, prices="p 1")
    attempt = metered.run(request)
    metered.retry(replace(request, prices="p 2"), attempt)
    assert metered.row(request).prices == "p 2"


def test_parked_work_keeps_them(metered: Ledger) -> None:
    metered.reserve(95)
    request = metered.request(10, prices="p 1")
    metered.admit(request, continuation=True)
    metered.set("b", 200)
    assert metered.sweep().admitted == 1
    [row] = metered.rows("reservations", request_id=request.request_id)
    assert row.prices == "p 1"
