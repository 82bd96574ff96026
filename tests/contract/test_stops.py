"""Limits: none and nothing, shares of a parent's, stops, changes, grants and adjustments."""

from __future__ import annotations

from typing import Any

import pytest

from celery_budget.core.budgets import MILLION, Share
from celery_budget.core.reservations import Extended, Parked, Refused, Reserved
from celery_budget.errors import (
    InvalidAmount,
    InvalidBudget,
    InvalidName,
    KeyConflict,
    UnknownBudget,
)
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger

MOST = 2**63 - 1
HOUR_US = 3_600_000_000


@pytest.fixture
def tree(ledger: Ledger) -> Ledger:
    """``user`` below ``tenant`` below ``org``; none is limited."""
    ledger.set("org", None)
    ledger.set("tenant", None, parent="org")
    ledger.set("user", None, parent="tenant")
    return ledger


def limit_of(ledger: Ledger, name: str = "b") -> int | None:
    return ledger.standing(name).limit


def spend(ledger: Ledger, amount: int, **changes: Any) -> None:
    """Have ``amount`` spent."""
    _, attempt = ledger.start(amount, **changes)
    attempt.record(amount)
    attempt.end(RETURNED)
    attempt.close()


LEVELS = ("user", "tenant", "org")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("amount", [0, 1, MOST])
def test_a_limit_of_zero_blocks_at_every_level(tree: Ledger, level: str, amount: int) -> None:
    tree.set(level, 0)
    for finishing in (False, True):
        refused = tree.admit(tree.request(amount, budget="user", finishing=finishing))
        assert refused == Refused(level, "tokens", amount, 0, 0, 0, "blocked", 0)


def test_none_is_unlimited_at_every_level(tree: Ledger) -> None:
    tree.reserve(MOST, budget="user")
    assert tree.balances(*LEVELS) == [(MOST, 0)] * 3
    assert [tree.standing(name).available for name in LEVELS] == [None] * 3


def test_no_stop_limits_what_is_unlimited(tree: Ledger) -> None:
    tree.set("user", None, soft_stop=0, hard_stop=0)
    tree.reserve(MOST, budget="user")


# Shares.


@pytest.mark.parametrize(
    ("above", "share", "limit"),
    [
        (1000, "10%", 100),
        (1000, "0.0001%", 0),
        (1_000_000, "0.0001%", 1),
        (999, "10%", 99),
        (9, "10%", 0),
        (7, "100%", 7),
        (7, "0%", 0),
        (0, "50%", 0),
        (MOST, "100%", MOST),
        (MOST, "33.3333%", MOST * 333_333 // MILLION),
        (None, "10%", None),
        (None, "0%", None),
    ],
)
def test_a_share_is_rounded_down(
    ledger: Ledger, above: int | None, share: str, limit: int | None
) -> None:
    ledger.set("org", above)
    ledger.set("user", Share.parse(share, "limit"), parent="org")
    assert limit_of(ledger, "user") == limit
    if limit is None:
        ledger.reserve(MOST, budget="user")
        return
    refused = ledger.admit(ledger.request(min(limit + 1, MOST), budget="user"))
    if limit < MOST:
        reason = "exhausted" if limit else "blocked"
        assert refused == Refused("user", "tokens", limit + 1, limit, 0, 0, reason, limit)
        if limit:
            ledger.reserve(limit, budget="user")


def test_a_share_moves_with_what_it_is_a_share_of(tree: Ledger) -> None:
    tree.set("org", 1000)
    tree.set("user", Share.parse("10%", "limit"), parent="org")
    tree.reserve(100, budget="user")
    assert isinstance(tree.admit(tree.request(1, budget="user")), Refused)
    tree.set("org", 1500)
    tree.reserve(50, budget="user")
    tree.set("org", 200)
    assert tree.admit(tree.request(0, budget="user")) == Refused(
        "user", "tokens", 0, 20, 150, 0, "held", 20
    )
    assert tree.standing("user").available == -130
    tree.set("org", None)
    tree.reserve(MOST - 150, budget="user")


def test_a_share_of_a_share(tree: Ledger) -> None:
    half = Share.parse("50%", "limit")
    tree.set("org", 1001)
    tree.set("tenant", half)
    tree.set("user", half)
    assert [limit_of(tree, name) for name in LEVELS] == [250, 500, 1001]
    tree.set("tenant", None)
    assert [limit_of(tree, name) for name in LEVELS] == [None, None, 1001]
    assert tree.admit(tree.request(1002, budget="user")) == Refused(
        "org", "tokens", 1002, 1001, 0, 0, "exhausted", 1001
    )


def test_a_share_counts_what_was_granted_to_the_parent(tree: Ledger) -> None:
    tree.set("org", 1000)
    tree.set("tenant", Share.parse("10%", "limit"))
    tree.set("user", Share.parse("10%", "limit"))
    tree.grant("k", 500, "org")
    assert [limit_of(tree, name) for name in LEVELS] == [15, 150, 1500]
    tree.grant("l", 50, "tenant")
    assert [limit_of(tree, name) for name in LEVELS] == [20, 200, 1500]
    tree.grant("m", 5, "user")
    assert [limit_of(tree, name) for name in LEVELS] == [25, 200, 1500]
    tree.reserve(25, budget="user")
    assert isinstance(tree.admit(tree.request(1, budget="user")), Refused)


def test_what_is_spent_does_not_move_a_share(tree: Ledger) -> None:
    tree.set("org", 1000)
    tree.set("user", Share.parse("10%", "limit"), parent="org")
    spend(tree, 950, budget="org")
    assert limit_of(tree, "user") == 100
    assert tree.admit(tree.request(51, budget="user")) == Refused(
        "org", "tokens", 51, 1000, 0, 950, "exhausted", 1000
    )


@pytest.mark.parametrize("parent", [None, "org"])
def test_a_share_needs_a_parent(tree: Ledger, parent: str | None) -> None:
    with pytest.raises(InvalidBudget, match="it has none"):
        tree.set("new", Share(1))
    tree.set("user", Share(1), parent="org")
    before = tree.dump()
    with pytest.raises(InvalidBudget, match="it has none"):
        tree.set("user", Share(1), parent=None)
    assert tree.dump() == before


# Stops.


def stopped(tree: Ledger, level: str) -> None:
    """Let new work fill 50 of 100, and what goes on 80."""
    tree.set(level, 100, soft_stop=500_000, hard_stop=800_000)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("before", "amount", "finishing", "fits"),
    [
        (0, 50, False, True),
        (0, 51, False, False),
        (20, 30, False, True),
        (20, 31, False, False),
        (50, 0, False, True),
        (0, 80, True, True),
        (0, 81, True, False),
        (50, 30, True, True),
        (50, 31, True, False),
        (80, 0, True, True),
    ],
)
def test_stops_to_the_unit(
    tree: Ledger, level: str, before: int, amount: int, finishing: bool, fits: bool
) -> None:
    stopped(tree, level)
    spend(tree, before // 2, budget="user", finishing=True)
    tree.reserve(before - before // 2, budget="user", finishing=True)
    request = tree.request(amount, budget="user", finishing=finishing)
    most = 80 if finishing else 50
    if fits:
        assert tree.admit(request) == Reserved(request.reservation_id)
    else:
        reason = "exhausted" if before // 2 > most - amount else "held"
        assert tree.admit(request) == Refused(
            level, "tokens", amount, 100, before - before // 2, before // 2, reason, most
        )


def test_nothing_new_fits_above_the_soft_stop_be_it_nothing(tree: Ledger) -> None:
    stopped(tree, "org")
    tree.reserve(51, budget="user", finishing=True)
    assert tree.admit(tree.request(0, budget="user")) == Refused(
        "org", "tokens", 0, 100, 51, 0, "held", 50
    )
    tree.reserve(0, budget="user", finishing=True)
    tree.reserve(29, budget="user", finishing=True)
    for finishing in (True, False):
        assert isinstance(tree.admit(tree.request(1, budget="user", finishing=finishing)), Refused)


@pytest.mark.parametrize(
    ("limit", "stop", "most"),
    [(9, 500_000, 4), (3, 333_333, 0), (MOST, 999_999, MOST * 999_999 // MILLION)],
)
def test_a_stop_is_rounded_down(ledger: Ledger, limit: int, stop: int, most: int) -> None:
    ledger.set("b", limit, soft_stop=stop)
    assert ledger.admit(ledger.request(most + 1)) == Refused(
        "b", "tokens", most + 1, limit, 0, 0, "exhausted", most
    )
    ledger.reserve(most)


@pytest.mark.parametrize("level", LEVELS)
def test_a_retry_may_use_what_is_above_the_soft_stop(tree: Ledger, level: str) -> None:
    stopped(tree, level)
    request, attempt = tree.start(40, budget="user")
    attempt.record(40)
    following, written = tree.retry(request, attempt)
    assert isinstance(written, Reserved)
    assert tree.balances(*LEVELS) == [(80, 0)] * 3
    attempt.end(RETRIED)
    attempt = tree.run(following)
    attempt.record(1)
    following, written = tree.retry(following, attempt)
    assert isinstance(written, Parked), "81 are above the hard stop"
    assert tree.balances(*LEVELS) == [(41, 0)] * 3
    attempt.end(RETRIED)
    assert tree.sweep().admitted == 0
    tree.set(level, 100, hard_stop=810_000)
    assert tree.sweep().admitted == 1
    assert tree.balances(*LEVELS) == [(81, 0)] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_message_that_runs_again_may_use_what_is_above_the_soft_stop(
    tree: Ledger, level: str
) -> None:
    stopped(tree, level)
    request, attempt = tree.start(40, budget="user")
    attempt.record(40)
    tree.lapse(request)
    assert tree.recover().rerun == 1
    assert tree.rows("parked") == []
    assert tree.balances(*LEVELS) == [(80, 0)] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_parked_work_may_use_what_is_above_the_soft_stop(tree: Ledger, level: str) -> None:
    stopped(tree, level)
    first = tree.reserve(50, budget="user")
    request = tree.request(31, budget="user", finishing=True)
    assert isinstance(tree.admit(request, continuation=True), Parked)
    assert tree.sweep().admitted == 0
    attempt = tree.run(first)
    attempt.record(49)
    attempt.end(RAISED)
    assert tree.sweep().admitted == 1
    assert tree.balances(*LEVELS) == [(31, 49)] * 3


def test_an_extension_goes_by_the_hard_stop(tree: Ledger) -> None:
    stopped(tree, "tenant")
    _, attempt = tree.start(50, budget="user")
    assert isinstance(attempt.extend(31), Refused)
    assert attempt.extend(30) == Extended(30)


def test_stops_apply_to_the_limit_in_force(tree: Ledger) -> None:
    stopped(tree, "org")
    tree.set("user", Share.parse("50%", "limit"), parent="org", soft_stop=500_000)
    tree.grant("k", 100, "org")
    assert tree.admit(tree.request(51, budget="user")) == Refused(
        "user", "tokens", 51, 100, 0, 0, "exhausted", 50
    )
    tree.reserve(50, budget="user")
    tree.reserve(50, budget="org")
    assert isinstance(tree.admit(tree.request(1, budget="org")), Refused)


# Limits that change.


@pytest.mark.parametrize("level", LEVELS)
def test_a_limit_below_use_admits_nothing_until_it_fits(tree: Ledger, level: str) -> None:
    spend(tree, 40, budget="user")
    request = tree.reserve(20, budget="user")
    tree.set(level, 50)
    standing = tree.standing(level)
    assert (standing.spent, standing.reserved, standing.available) == (40, 20, -10)
    for amount in (0, 1):
        assert tree.admit(tree.request(amount, budget="user", finishing=True)) == Refused(
            level, "tokens", amount, 50, 20, 40, "held", 50
        )
    attempt = tree.run(request)
    attempt.record(9)
    attempt.end(RETURNED)
    assert tree.standing(level).available == 1
    tree.reserve(1, budget="user")
    tree.reserve(0, budget="user")


def test_a_limit_is_lifted_and_put_back(tree: Ledger) -> None:
    tree.set("user", 10)
    spend(tree, 10, budget="user")
    tree.set("user", None)
    spend(tree, 90, budget="user")
    tree.set("user", 100)
    assert tree.standing("user").available == 0
    tree.reserve(0, budget="user")
    tree.set("user", 99)
    assert isinstance(tree.admit(tree.request(0, budget="user")), Refused)


# Grants.


def test_a_grant_raises_the_limit(funded: Ledger) -> None:
    assert funded.grant("k", 20, reason="launch day")
    assert limit_of(funded) == 120
    funded.reserve(120)
    assert funded.admit(funded.request(1)) == Refused("b", "tokens", 1, 120, 120, 0, "held", 120)
    [row] = funded.rows("grants")
    assert (row.key, row.budget, row.amount, row.reason, row.until_us) == (
        "k",
        "b",
        20,
        "launch day",
        MOST,
    )


def test_grants_add_up_until_each_ends(funded: Ledger) -> None:
    now = funded.now()
    funded.grant("a", 20, until_us=now + HOUR_US)
    funded.grant("b", 5, until_us=now + 2 * HOUR_US)
    funded.grant("c", 1)
    assert limit_of(funded) == 126
    funded.reserve(126)
    funded.put("grants", {"until_us": now - 1}, key="a")
    assert limit_of(funded) == 106
    assert funded.standing().available == -20
    for amount in (0, 1):
        assert funded.admit(funded.request(amount)) == Refused(
            "b", "tokens", amount, 106, 126, 0, "held", 106
        )


def test_work_that_goes_on_does_not_fit_once_a_grant_has_ended(funded: Ledger) -> None:
    funded.grant("k", 20, until_us=funded.now() + HOUR_US)
    request, attempt = funded.start(120)
    attempt.record(110)
    funded.put("grants", {"until_us": 1}, key="k")
    _, written = funded.retry(request, attempt)
    assert isinstance(written, Parked)
    attempt.end(RETRIED)
    assert funded.balance() == (110, 0)
    funded.grant("again", 130)
    assert funded.sweep().admitted == 1


@pytest.mark.parametrize("until", [None, HOUR_US])
def test_a_grant_is_one_by_its_key(funded: Ledger, until: int | None) -> None:
    until_us = None if until is None else funded.now() + until
    assert funded.grant("k", 20, until_us=until_us)
    before = funded.dump()
    assert not funded.grant("k", 20, until_us=until_us)
    assert not funded.grant("k", 20, until_us=until_us, reason="told later")
    funded.set("c", 5)
    before = funded.dump()
    others: list[dict[str, Any]] = [
        {"amount": 21},
        {"name": "c"},
        {"until_us": (until_us or 0) + 2 * HOUR_US + funded.now()},
    ]
    for other in others:
        with pytest.raises(KeyConflict) as caught:
            funded.grant("k", **{"amount": 20, "until_us": until_us, **other})
        assert caught.value.key == "k"
    assert funded.dump() == before
    assert limit_of(funded) == 120


def test_a_grant_that_has_ended_is_still_one_by_its_key(funded: Ledger) -> None:
    until_us = funded.now() + 200_000
    assert funded.grant("k", 20, until_us=until_us)
    while funded.now() <= until_us:
        pass
    assert not funded.grant("k", 20, until_us=until_us)
    assert limit_of(funded) == 100


@pytest.mark.parametrize(
    ("grant", "error"),
    [
        ({"amount": 0}, InvalidAmount),
        ({"amount": -1}, InvalidAmount),
        ({"amount": 2**63}, InvalidAmount),
        ({"amount": 1.0}, InvalidAmount),
        ({"key": ""}, InvalidName),
        ({"key": "k" * 256}, InvalidName),
        ({"key": "a\nb"}, InvalidName),
        ({"name": "nobody"}, UnknownBudget),
        ({"name": "b*"}, InvalidName),
        ({"until_us": 1}, InvalidBudget),
        ({"until_us": -1}, InvalidAmount),
        ({"until_us": 1.5}, InvalidAmount),
    ],
)
def test_what_cannot_be_granted(
    funded: Ledger, grant: dict[str, Any], error: type[Exception]
) -> None:
    before = funded.dump()
    with pytest.raises(error):
        funded.grant(**{"key": "k", "amount": 5, **grant})
    assert funded.dump() == before


def test_no_grant_lifts_a_block(funded: Ledger) -> None:
    funded.set("b", 0)
    funded.grant("k", 50)
    assert funded.admit(funded.request(1)) == Refused("b", "tokens", 1, 50, 0, 0, "blocked", 50)


def test_a_grant_to_what_is_unlimited_changes_nothing(funded: Ledger) -> None:
    funded.set("b", None)
    funded.grant("k", 50)
    assert limit_of(funded) is None
    funded.reserve(MOST)


def test_grants_beyond_64_bits_are_refused(funded: Ledger) -> None:
    """What has ended does not count."""
    funded.grant("a", MOST, until_us=funded.now() + HOUR_US)
    before = funded.dump()
    with pytest.raises(InvalidAmount, match="has been granted"):
        funded.grant("b", 1)
    assert funded.dump() == before
    assert limit_of(funded) == MOST, "what limit and grants come to is as much as can be counted"
    funded.put("grants", {"until_us": 1}, key="a")
    funded.grant("b", MOST)
    funded.reserve(MOST)
    assert funded.admit(funded.request(1)) == Refused("b", "tokens", 1, MOST, MOST, 0, "held", MOST)


def test_grants_are_summed_exactly(funded: Ledger) -> None:
    for number, amount in enumerate([2**53 + 1, 2**62 + 1, 2**32 - 1, 2**31, 3]):
        funded.grant(f"k{number}", amount)
    assert limit_of(funded) == 100 + 2**53 + 1 + 2**62 + 1 + 2**32 - 1 + 2**31 + 3


def test_a_grant_counts_in_every_window(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    ledger.grant("k", 20, until_us=ledger.now() + HOUR_US)
    ledger.reserve(120)
    ledger.age("b", 25 * HOUR_US)
    assert ledger.standing().limit == 120
    ledger.reserve(120)
    assert isinstance(ledger.admit(ledger.request(1)), Refused)


# Adjustments.


def test_an_adjustment_corrects_what_is_spent(funded: Ledger) -> None:
    spend(funded, 30)
    assert funded.adjust("charge", 50)
    assert funded.balance() == (0, 80)
    assert funded.adjust("refund", -70)
    assert funded.balance() == (0, 10)
    assert funded.adjust("to-nothing", -10)
    assert funded.balance() == (0, 0)
    rows = {row.key: (row.amount, row.reason) for row in funded.rows("adjustments")}
    assert rows == {
        "charge": (50, "invoice"),
        "refund": (-70, "invoice"),
        "to-nothing": (-10, "invoice"),
    }


def test_an_adjustment_may_pass_the_limit(funded: Ledger) -> None:
    funded.reserve(60)
    funded.adjust("k", 500)
    assert funded.standing().available == -460
    assert funded.admit(funded.request(0)) == Refused(
        "b", "tokens", 0, 100, 60, 500, "exhausted", 100
    )


def test_no_more_is_refunded_than_was_spent(funded: Ledger) -> None:
    spend(funded, 30)
    funded.reserve(50)
    before = funded.dump()
    with pytest.raises(InvalidAmount, match="has spent 30"):
        funded.adjust("k", -31)
    assert funded.dump() == before
    assert funded.adjust("k", -30), "the key is free"


def test_an_adjustment_is_one_by_its_key(funded: Ledger) -> None:
    funded.set("c", 5)
    assert funded.adjust("k", 20)
    before = funded.dump()
    assert not funded.adjust("k", 20)
    assert not funded.adjust("k", 20, reason="another")
    for other in ({"amount": 21}, {"amount": -20}, {"amount": 20, "name": "c"}):
        with pytest.raises(KeyConflict, match="'k'"):
            funded.adjust("k", **other)  # type: ignore[arg-type]
    assert funded.dump() == before
    assert funded.balance() == (0, 20)
    assert funded.grant("k", 1), "grants have keys of their own"


@pytest.mark.parametrize(
    ("adjustment", "error"),
    [
        ({"amount": 0}, InvalidAmount),
        ({"amount": True}, InvalidAmount),
        ({"amount": 1.0}, InvalidAmount),
        ({"amount": 2**63}, InvalidAmount),
        ({"amount": -(2**63)}, InvalidAmount),
        ({"amount": MOST}, InvalidAmount),
        ({"key": ""}, InvalidName),
        ({"reason": ""}, InvalidName),
        ({"reason": "x" * 256}, InvalidName),
        ({"name": "nobody"}, UnknownBudget),
        ({"name": "b*"}, InvalidName),
    ],
)
def test_what_cannot_be_adjusted(
    funded: Ledger, adjustment: dict[str, Any], error: type[Exception]
) -> None:
    funded.reserve(1)
    before = funded.dump()
    with pytest.raises(error):
        funded.adjust(**{"key": "k", "amount": 5, **adjustment})
    assert funded.dump() == before


def test_an_adjustment_is_of_one_budget_only(tree: Ledger) -> None:
    tree.adjust("k", 5, "tenant")
    assert tree.balances(*LEVELS) == [(0, 0), (0, 5), (0, 0)]


def test_an_adjustment_counts_in_the_window_that_is_open(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    spend(ledger, 30)
    ledger.age("b", 25 * HOUR_US)
    with pytest.raises(InvalidAmount, match="has spent 0"):
        ledger.adjust("k", -1)
    assert ledger.adjust("k", 7), "its window is made where nobody was in it yet"
    assert ledger.balance() == (0, 7)
    assert [row.spent for row in ledger.counted()] == [30, 7]
    ledger.age("b", 25 * HOUR_US)
    assert not ledger.adjust("k", 7), "a repeat is one in another window too"
    assert ledger.balance() == (0, 0)


def test_a_closed_budget_may_be_adjusted(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    ledger.age("b", 25 * HOUR_US)
    ledger.close()
    assert ledger.adjust("k", 7)
    assert ledger.balance() == (0, 7)


def test_an_adjustment_to_the_last_unit_that_can_be_counted(ledger: Ledger) -> None:
    ledger.set("b", None)
    ledger.reserve(10)
    assert ledger.adjust("k", MOST - 10)
    before = ledger.dump()
    with pytest.raises(InvalidAmount):
        ledger.adjust("l", 1)
    assert ledger.dump() == before
    assert ledger.adjust("l", -(MOST - 10))
