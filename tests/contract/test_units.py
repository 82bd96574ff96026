"""Several units in one request: each line with its own estimate and its own rule of charge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import admission, settlement
from celery_budget.core.reservations import (
    AlreadyExtended,
    Closed,
    Extended,
    Line,
    Outcome,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
    Running,
)
from celery_budget.errors import InvalidAmount, PolicyError
from celery_budget.settlement import Attempt
from tests.contract.support import BOOT, RAISED, RETRIED, RETURNED, Ledger, message_of

MOST = 2**63 - 1
UNITS = ("tokens", "money", "calls")
LINES = (Line("tokens", 100), Line("money", 7), Line("calls", 1, "start"))


@pytest.fixture
def three(ledger: Ledger) -> Ledger:
    """Tokens, micro-dollars and calls, the last below calls of everybody."""
    ledger.set("tokens", 1000)
    ledger.set("money", 50, "micro-usd")
    ledger.set("all-calls", 10, "requests")
    ledger.set("calls", 5, "requests", parent="all-calls")
    return ledger


def asked(three: Ledger, *lines: Line, **changes: Any) -> ReserveRequest:
    """A request of all three, or of ``lines``."""
    lines = lines or LINES
    return three.request(budget=lines[0].budget, lines=lines, **changes)


def admitted(three: Ledger, *lines: Line, **changes: Any) -> ReserveRequest:
    request = asked(three, *lines)
    assert three.admit(request, **changes) == Reserved(request.reservation_id)
    return request


def started(three: Ledger, *lines: Line, **changes: Any) -> tuple[ReserveRequest, Attempt]:
    request = admitted(three, *lines)
    return request, three.run(request, **changes)


def of(three: Ledger) -> list[tuple[int, int]]:
    return three.balances(*UNITS, "all-calls")


def retried(three: Ledger, request: ReserveRequest, attempt: Attempt) -> ReserveRequest:
    following, written = three.retry(request, attempt)
    assert isinstance(written, Reserved)
    assert attempt.end(RETRIED)
    return following


def test_each_unit_is_held_by_its_own_estimate(three: Ledger) -> None:
    admitted(three)
    assert of(three) == [(100, 0), (7, 0), (1, 0), (1, 0)]
    assert [(row.budget, row.unit, row.charge) for row in three.rows("lines")] == [
        ("tokens", "tokens", "used"),
        ("money", "micro-usd", "used"),
        ("calls", "requests", "start"),
        ("all-calls", "requests", "start"),
    ]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("tokens", "tokens"),
        ("money", "micro-usd"),
        ("calls", "requests"),
        ("all-calls", "requests"),
    ],
)
def test_all_units_or_none(three: Ledger, name: str, unit: str) -> None:
    three.set(name, 0, unit)
    before = three.dump()
    refused = three.admit(asked(three))
    assert isinstance(refused, Refused)
    assert (refused.budget, refused.unit, refused.reason) == (name, unit, "blocked")
    assert {**three.dump(), "refusals": []} == before


def test_usage_goes_by_unit(three: Ledger) -> None:
    _, attempt = started(three)
    assert attempt.record(30, key="reply")
    assert attempt.record(4, key="reply", unit="micro-usd"), "one key, two units"
    assert not attempt.record(4, key="reply", unit="micro-usd")
    assert not attempt.record(30, key="reply", unit="tokens"), "the unit named first, by its name"
    assert attempt.record(2, unit="micro-usd")
    attempt.end(RETURNED)
    assert of(three) == [(0, 30), (0, 6), (0, 1), (0, 1)]


def test_two_budgets_of_one_unit_count_what_is_recorded_of_it(three: Ledger) -> None:
    three.set("more", 200, "micro-usd")
    _, attempt = started(three, *LINES, Line("more", 3))
    attempt.record(9, unit="micro-usd")
    assert three.balances("money", "more") == [(9, 0), (9, 0)]
    attempt.end(RAISED)
    assert three.balances("money", "more") == [(0, 9), (0, 9)]


@pytest.mark.parametrize(
    ("recorded", "charged"),
    [
        ({}, (100, 7)),
        ({"tokens": 30}, (30, 7)),
        ({"micro-usd": 3}, (100, 3)),
        ({"micro-usd": 0}, (100, 0)),
        ({"tokens": 0, "micro-usd": 0}, (0, 0)),
    ],
)
def test_a_success_is_unmetered_by_unit(
    three: Ledger, recorded: dict[str, int], charged: tuple[int, int]
) -> None:
    request, attempt = started(three)
    for unit, amount in recorded.items():
        attempt.record(amount, unit=unit)
    attempt.end(RETURNED)
    assert of(three) == [(0, charged[0]), (0, charged[1]), (0, 1), (0, 1)]
    assert three.row(request).unmetered == (len(recorded) < 2)


def test_a_failure_charges_what_was_recorded_of_each_unit(three: Ledger) -> None:
    _, attempt = started(three)
    attempt.record(3, unit="micro-usd")
    attempt.end(RAISED)
    assert of(three) == [(0, 0), (0, 3), (0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("recorded", "charged"), [({}, (100, 7)), ({"tokens": 130, "micro-usd": 2}, (130, 7))]
)
def test_what_was_lost_is_charged_by_unit(
    three: Ledger, recorded: dict[str, int], charged: tuple[int, int]
) -> None:
    request, attempt = started(three, late_ack=False)
    for unit, amount in recorded.items():
        attempt.record(amount, unit=unit)
    three.lapse(request)
    assert three.recover().lost == 1
    assert of(three) == [(0, charged[0]), (0, charged[1]), (0, 1), (0, 1)]
    attempt.record(20, unit="micro-usd")
    assert of(three)[1] == (0, recorded.get("micro-usd", 0) + 20)


def test_a_retry_is_unmetered_by_unit_on_top_of_what_was_used(three: Ledger) -> None:
    request, attempt = started(three)
    attempt.record(30)
    attempt.record(2, unit="micro-usd")
    following = retried(three, request, attempt)
    assert of(three) == [(130, 0), (9, 0), (1, 1), (1, 1)]
    attempt = three.run(following)
    attempt.record(5, unit="micro-usd")
    attempt.end(RETURNED)
    assert of(three) == [(0, 130), (0, 7), (0, 2), (0, 2)]


@pytest.mark.parametrize("unit", ["requests", "seconds", "Tokens"])
@pytest.mark.parametrize("state", ["running", "settled"])
def test_a_unit_it_does_not_draw_on_by_use_is_an_error(
    three: Ledger, unit: str, state: str
) -> None:
    _, attempt = started(three)
    if state == "settled":
        attempt.end(RETURNED)
    before = three.dump()
    with pytest.raises(PolicyError, match=unit):
        attempt.record(1, unit=unit)
    assert three.dump() == before


def test_nothing_can_be_recorded_where_all_is_charged_at_the_start(three: Ledger) -> None:
    _, attempt = started(three, Line("calls", 1, "start"))
    before = three.dump()
    with pytest.raises(PolicyError, match="it can record and extend nothing"):
        attempt.record(1)
    with pytest.raises(PolicyError, match="it can record and extend nothing"):
        attempt.extend(1)
    assert three.dump() == before
    attempt.end(RETURNED)
    assert three.balance("calls") == (0, 1)


# Charged at the start.


def test_what_is_charged_at_the_start_is_spent_by_the_claim(three: Ledger) -> None:
    request = admitted(three)
    assert of(three)[2:] == [(1, 0), (1, 0)]
    three.run(request)
    assert of(three) == [(100, 0), (7, 0), (0, 1), (0, 1)]


@pytest.mark.parametrize(
    "outcome", [RETURNED, RAISED, Outcome("ignored"), Outcome("rejected"), Outcome("replaced")]
)
def test_no_end_gives_back_what_was_charged_at_the_start(three: Ledger, outcome: Outcome) -> None:
    _, attempt = started(three)
    attempt.end(outcome)
    attempt.close()
    assert of(three)[2:] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("how", ["cancelled", "expired", "worker_lost"])
def test_what_never_started_is_given_back(three: Ledger, how: str) -> None:
    request = admitted(three, **({"expires_us": 1} if how == "expired" else {}))
    if how == "expired":
        three.relay()
    elif how == "cancelled":
        assert settlement.revoke(three.store, three.root, request.reservation_id, how)
    else:
        settlement.worker_lost(three.store, three.settings, request.task_id, BOOT, False)
    assert three.state(request) == "released"
    assert of(three) == [(0, 0)] * 4


def test_a_second_delivery_does_not_charge_the_start_again(three: Ledger) -> None:
    request, attempt = started(three)
    before = three.dump()
    assert three.deliver(request) == Running()
    again = settlement.claim(
        three.store,
        three.settings,
        settlement.Delivery(
            three.root,
            request.reservation_id,
            request.task_id,
            0,
            0,
            "w",
            request.reservation_id,
            True,
        ),
        attempt.claim_id,
    )
    assert isinstance(again, Attempt), "the same claim after a lost answer"
    assert three.dump() == before
    attempt.end(RETURNED)
    attempt.close()
    assert three.deliver(request) == Closed("settled")
    assert of(three)[2:] == [(0, 1), (0, 1)]


def test_each_attempt_is_charged_at_its_start(three: Ledger) -> None:
    request, attempt = started(three)
    for number in range(2, 6):
        request = retried(three, request, attempt)
        assert three.balance("calls") == (1, number - 1)
        attempt = three.run(request)
        assert three.balance("calls") == (0, number)
    following, written = three.retry(request, attempt)
    assert isinstance(written, Parked), "five calls are all there are"
    attempt.end(RETRIED)
    assert three.balance("calls") == (0, 5)
    three.set("calls", 6, "requests")
    assert three.sweep().admitted == 1
    three.run(following).end(RAISED)
    assert of(three) == [(0, 0), (0, 0), (0, 6), (0, 6)]


def test_an_attempt_whose_worker_died_is_charged_and_so_is_the_next(three: Ledger) -> None:
    request, _ = started(three)
    three.lapse(request)
    assert three.recover().rerun == 1
    assert three.balance("calls") == (1, 1)
    three.run(request).end(RAISED)
    assert three.balance("calls") == (0, 2)


def test_a_retry_that_is_cancelled_keeps_what_the_first_attempt_paid(three: Ledger) -> None:
    request, attempt = started(three)
    attempt.record(30)
    retried(three, request, attempt)
    assert settlement.revoke(three.store, three.root, request.reservation_id, "cancelled")
    assert three.state(request) == "settled"
    assert of(three) == [(0, 30), (0, 0), (0, 1), (0, 1)]


def test_a_parked_retry_holds_no_start(three: Ledger) -> None:
    request, attempt = started(three)
    three.set("tokens", 100)
    attempt.record(30)
    _, written = three.retry(request, attempt)
    assert isinstance(written, Parked)
    assert of(three) == [(30, 0), (0, 0), (0, 1), (0, 1)]
    attempt.end(RETRIED)
    three.put("parked", {"deadline_us": 1})
    assert three.sweep().over == (request.task_id,)
    assert of(three) == [(0, 30), (0, 0), (0, 1), (0, 1)]


def test_a_retry_that_needs_no_more_of_a_full_start_line(three: Ledger) -> None:
    """Nothing more is asked of it, so that its being over does not matter."""
    request, attempt = started(three)
    three.set("calls", 1, "requests")
    following = replace(request, retries=1, lines=(*LINES[:2], Line("calls", 0, "start")))
    written = admission.retry(
        three.store, three.settings, following, message_of(following), 1, attempt.claim_id
    )
    assert isinstance(written, Reserved)
    attempt.end(RETRIED)
    three.run(following).end(RAISED)
    assert three.balance("calls") == (0, 1)


def test_amounts_of_more_than_one_may_be_charged_at_the_start(three: Ledger) -> None:
    _, attempt = started(three, Line("tokens", 40, "start"), Line("money", 5))
    assert three.balance("tokens") == (0, 40)
    attempt.record(3, unit="micro-usd")
    attempt.end(RETURNED)
    assert three.balances("tokens", "money") == [(0, 40), (0, 3)]


# Extensions.


@pytest.fixture
def deep(ledger: Ledger) -> Ledger:
    """``user`` below ``org``, and micro-dollars beside them."""
    ledger.set("org", 100)
    ledger.set("user", 100, parent="org")
    ledger.set("money", 50, "micro-usd")
    return ledger


def held(deep: Ledger) -> list[tuple[int, int]]:
    return deep.balances("user", "org", "money")


def running(deep: Ledger, **changes: Any) -> tuple[ReserveRequest, Attempt]:
    return started(deep, Line("user", 10), Line("money", 5), **changes)


def test_an_extension_holds_more_at_every_level(deep: Ledger) -> None:
    _, attempt = running(deep)
    assert attempt.extend(20, key="more") == Extended(20)
    assert held(deep) == [(30, 0), (30, 0), (5, 0)]
    assert attempt.extend(1, key="more", unit="micro-usd") == Extended(1)
    assert held(deep) == [(30, 0), (30, 0), (6, 0)]
    attempt.record(25)
    attempt.record(1, unit="micro-usd")
    assert held(deep) == [(30, 0), (30, 0), (6, 0)]
    attempt.end(RETURNED)
    assert held(deep) == [(0, 25), (0, 25), (0, 1)]


def test_a_repeated_extension_changes_nothing(deep: Ledger) -> None:
    _, attempt = running(deep)
    assert attempt.extend(20, key="more") == Extended(20)
    before = deep.dump()
    assert attempt.extend(20, key="more") == AlreadyExtended()
    assert attempt.extend(30, key="more") == AlreadyExtended()
    assert deep.dump() == before
    assert attempt.extend(20) == attempt.extend(20) == Extended(20), "without a key each counts"
    assert held(deep)[0] == (70, 0)


@pytest.mark.parametrize("short", ["user", "org"])
def test_an_extension_is_all_or_nothing(deep: Ledger, short: str) -> None:
    _, attempt = running(deep)
    deep.set(short, 29)
    before = deep.dump()
    assert attempt.extend(20, key="more") == Refused(short, "tokens", 20, 29, 10, 0, "held", 29)
    assert deep.dump() == before, "no refusal of a request either"
    assert attempt.extend(19, key="more") == Extended(19), "what was refused may be tried again"
    assert held(deep)[:2] == [(29, 0)] * 2


def test_an_extension_may_use_what_is_above_a_soft_stop(deep: Ledger) -> None:
    _, attempt = running(deep)
    deep.set("org", 100, soft_stop=100_000, hard_stop=500_000)
    assert attempt.extend(41) == Refused("org", "tokens", 41, 100, 10, 0, "held", 50)
    assert attempt.extend(40) == Extended(40)


@pytest.mark.parametrize(
    "gone", ["ended", "retried", "lapsed", "taken over", "elsewhere", "another attempt"]
)
def test_an_extension_after_the_fence_is_lost_changes_nothing(deep: Ledger, gone: str) -> None:
    request, attempt = running(deep)
    if gone == "ended":
        attempt.end(RETURNED)
    elif gone == "retried":
        retried(deep, request, attempt)
    elif gone in ("lapsed", "taken over"):
        deep.lapse(request)
        assert deep.recover().rerun == 1
        if gone == "taken over":
            deep.run(request)
    elif gone == "elsewhere":
        attempt.root = "elsewhere"
    else:
        attempt.number = 2
    before = deep.dump()
    assert isinstance(attempt.extend(1, key="more"), Closed)
    assert deep.dump() == before


def test_an_unmetered_success_is_charged_estimate_and_extensions(deep: Ledger) -> None:
    _, attempt = running(deep)
    attempt.extend(20)
    attempt.extend(3)
    attempt.end(RETURNED)
    assert held(deep) == [(0, 33), (0, 33), (0, 5)]


@pytest.mark.parametrize(("records", "charged"), [([], 30), ([25], 30), ([31], 31)])
def test_what_was_lost_is_charged_with_its_extension(
    deep: Ledger, records: list[int], charged: int
) -> None:
    request, attempt = running(deep, late_ack=False)
    attempt.extend(20)
    for amount in records:
        attempt.record(amount)
    deep.lapse(request)
    assert deep.recover().lost == 1
    assert held(deep) == [(0, charged), (0, charged), (0, 5)]


def by_retry(deep: Ledger, request: ReserveRequest, attempt: Attempt) -> ReserveRequest:
    return retried(deep, request, attempt)


def by_lapse(deep: Ledger, request: ReserveRequest, attempt: Attempt) -> ReserveRequest:
    deep.lapse(request)
    assert deep.recover().rerun == 1
    return request


@pytest.mark.parametrize("go_on", [by_retry, by_lapse])
def test_an_extension_ends_with_its_attempt(
    deep: Ledger, go_on: Callable[[Ledger, ReserveRequest, Attempt], ReserveRequest]
) -> None:
    request, attempt = running(deep)
    attempt.extend(20, key="more")
    following = go_on(deep, request, attempt)
    assert held(deep) == [(10, 0), (10, 0), (5, 0)]
    attempt = deep.run(following)
    assert attempt.extend(15, key="more") == Extended(15), "the next may ask for it by the same key"
    assert attempt.extend(15, key="more") == AlreadyExtended()
    assert held(deep) == [(25, 0), (25, 0), (5, 0)]
    attempt.end(RETURNED)
    assert held(deep) == [(0, 25), (0, 25), (0, 5)]


def test_an_extension_comes_on_top_of_what_went_over(deep: Ledger) -> None:
    _, attempt = running(deep)
    attempt.record(25)
    assert attempt.extend(20) == Extended(20)
    assert held(deep)[0] == (45, 0)
    attempt.end(RETURNED)
    assert held(deep)[0] == (0, 25)


def test_an_extension_of_nothing_fits_anywhere(deep: Ledger) -> None:
    _, attempt = running(deep)
    deep.set("org", 0)
    assert attempt.extend(0) == Extended(0)
    assert attempt.extend(1) == Refused("org", "tokens", 1, 0, 10, 0, "blocked", 0)


def test_an_extension_goes_on_in_a_draining_budget(deep: Ledger) -> None:
    _, attempt = running(deep)
    assert deep.close("org", drain=True) == "draining"
    assert attempt.extend(20) == Extended(20)


@pytest.mark.parametrize("amount", [-1, 1.5, True, "6", None, MOST + 1])
def test_what_is_no_amount_is_no_extension(deep: Ledger, amount: object) -> None:
    _, attempt = running(deep)
    before = deep.dump()
    with pytest.raises(InvalidAmount):
        attempt.extend(amount)
    assert deep.dump() == before


def test_an_extension_of_an_unlimited_budget_stays_in_its_column(deep: Ledger) -> None:
    deep.set("org", None)
    deep.set("user", None)
    _, attempt = running(deep)
    assert attempt.extend(MOST - 9) == Refused(
        "user", "tokens", MOST - 9, MOST, 10, 0, "held", MOST
    )
    assert attempt.extend(MOST - 10) == Extended(MOST - 10)
    assert held(deep)[:2] == [(MOST, 0)] * 2
    attempt.end(RAISED)
    assert held(deep)[:2] == [(0, 0)] * 2


def test_extensions_that_would_be_charged_beyond_64_bits(deep: Ledger) -> None:
    """Used, estimate and extension together: each may be held in turn, the sum cannot."""
    deep.set("org", None)
    deep.set("user", None)
    request, attempt = running(deep)
    attempt.extend(MOST - 10)
    attempt.record(5)
    following, written = deep.retry(request, attempt)
    assert isinstance(written, Reserved)
    attempt.end(RETRIED)
    attempt = deep.run(following)
    assert attempt.extend(MOST - 15) == Extended(MOST - 15)
    attempt.end(RETURNED)
    assert held(deep)[:2] == [(0, MOST)] * 2


def test_one_unit_by_two_rules_on_two_budgets(three: Ledger) -> None:
    """What is charged at the start does not count what is recorded of its unit."""
    three.set("tokens-each", 500)
    _, attempt = started(three, Line("tokens", 100), Line("tokens-each", 20, "start"))
    attempt.record(70)
    attempt.extend(50)
    assert three.balances("tokens", "tokens-each") == [(150, 0), (0, 20)]
    attempt.end(RETURNED)
    assert three.balances("tokens", "tokens-each") == [(0, 70), (0, 20)]
