"""Usage: each record once, nothing dropped, the excess shown."""

from __future__ import annotations

from typing import Any

import pytest

from celery_budget.core.reservations import Outcome, Refused
from celery_budget.errors import InvalidAmount
from celery_budget.store import Store
from tests.contract.support import RAISED, RETURNED, Ledger
from tests.messages import Told

MOST = 2**63 - 1


def test_a_key_counts_once(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert attempt.record(3, key="response-1")
    assert not attempt.record(3, key="response-1")
    assert not attempt.record(9, key="response-1")
    assert attempt.record(3, key="response-2")
    assert funded.line(request) == (10, 6, 0)


def test_without_keys_each_call_counts(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert [attempt.record(2) for _ in range(3)] == [True] * 3
    keys = [row.key for row in funded.rows("usage")]
    assert keys == ["attempt:1:1", "attempt:1:2", "attempt:1:3"]
    assert attempt.record(1, key="attempt:1:1"), "a caller's key is not one of ours"
    assert funded.line(request) == (10, 7, 0)


@pytest.mark.parametrize("amount", [-1, 1.5, float("nan"), True, "6", None, 2**63])
def test_what_is_no_amount_is_not_recorded(funded: Ledger, amount: object) -> None:
    _, attempt = funded.start(10)
    before = funded.dump()
    with pytest.raises(InvalidAmount):
        attempt.record(amount)
    assert funded.dump() == before


@pytest.mark.parametrize("key", ["", "x" * 256, 7, b"k", "a\0b", "\ud800"])
def test_what_is_no_key_is_not_recorded(funded: Ledger, key: object) -> None:
    _, attempt = funded.start(10)
    with pytest.raises(ValueError, match="usage key"):
        attempt.record(1, key=key)
    assert funded.rows("usage") == []


class Limit(BaseException):
    """Strikes while the ledger is told, as a soft time limit does."""


def telling(store: Store) -> str:
    """The method by which a store is told what was used."""
    return "wait_out" if store.dialect == "sqlite" else "wait_out_statement"


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("key", [None, "reply"])
@pytest.mark.parametrize("outcome", [RETURNED, RAISED])
def test_what_was_interrupted_is_recorded_with_the_end(
    funded: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
    key: str | None,
    outcome: Outcome,
) -> None:
    request, attempt = funded.start(10)
    attempt.record(1)
    wait_out = getattr(funded.store, telling(funded.store))

    def strike(*args: Any, **options: Any) -> None:
        if committed:
            wait_out(*args, **options)
        raise Limit

    with monkeypatch.context() as patch:
        patch.setattr(funded.store, telling(funded.store), strike)
        with pytest.raises(Limit):
            attempt.record(4, key=key)
    assert attempt.end(outcome)
    assert funded.line(request) == (0, 5, 5)
    assert len(funded.rows("usage")) == 2


def test_what_was_interrupted_and_cannot_be_keeps_no_attempt_from_its_end(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, attempt = funded.start(10)

    def strike(*args: Any, **options: Any) -> None:
        raise Limit

    with monkeypatch.context() as patch:
        patch.setattr(funded.store, telling(funded.store), strike)
        for amount, unit in ((1, "no such unit"), (MOST, None), (MOST, None)):
            with pytest.raises(Limit):
                attempt.record(amount, unit=unit)
    assert attempt.end(RAISED)
    assert funded.line(request) == (0, MOST, MOST)


def test_keys_may_be_as_long_as_they_say(funded: Ledger) -> None:
    _, attempt = funded.start(10)
    assert attempt.record(1, key="ü" * 255)


def test_usage_above_the_hold_raises_it_over_the_limit(funded: Ledger) -> None:
    request, attempt = funded.start(90)
    attempt.record(90)
    assert not funded.row(request).over
    attempt.record(30)
    assert funded.row(request).over
    assert funded.balance() == (120, 0)
    assert funded.admit(funded.request(1)) == Refused("b", "tokens", 1, 100, 120, 0, "held", 100)
    attempt.end(RETURNED)
    assert funded.balance() == (0, 120)


LATE: list[Any] = [
    # how it ended, recorded before, recorded late, spent in the end, over
    pytest.param(RETURNED, [4], [3], 7, False, id="metered"),
    pytest.param(RETURNED, [4], [7], 11, True, id="metered-over"),
    pytest.param(RETURNED, [], [3], 10, False, id="unmetered-below-the-estimate"),
    pytest.param(RETURNED, [], [3, 8], 11, True, id="unmetered-above-the-estimate"),
    pytest.param(RAISED, [], [3], 3, False, id="raised"),
    pytest.param(Outcome("ignored"), [1], [2], 3, False, id="ignored"),
    pytest.param("lost", [], [3], 10, False, id="lost-below-the-estimate"),
    pytest.param("lost", [8], [3], 11, True, id="lost-above-the-estimate"),
]


@pytest.mark.parametrize(("outcome", "records", "late", "spent", "over"), LATE)
def test_late_usage_is_charged_in_full(
    funded: Ledger,
    outcome: Outcome | str,
    records: list[int],
    late: list[int],
    spent: int,
    over: bool,
    told: Told,
) -> None:
    request, attempt = funded.start(10, late_ack=False)
    for amount in records:
        attempt.record(amount)
    if isinstance(outcome, Outcome):
        attempt.end(outcome)
        attempt.close()
    else:
        funded.lapse(request)
        assert funded.recover().lost == 1
    for amount in late:
        assert attempt.record(amount)
    assert funded.balance() == (0, spent)
    assert funded.row(request).over == over
    assert [row.late for row in funded.rows("usage")] == [False] * len(records) + [True] * len(late)
    assert len(told("usage.late")) == len(late)


@pytest.mark.parametrize("ended", [True, False])
def test_usage_that_cannot_be_counted_changes_nothing(ledger: Ledger, ended: bool) -> None:
    ledger.set("b", None)
    ledger.reserve(MOST - 20)
    _, attempt = ledger.start(10)
    attempt.record(5)
    if ended:
        attempt.end(RETURNED)
    before = ledger.dump()
    for too_much in (16 if not ended else 20, MOST):
        with pytest.raises(InvalidAmount):
            attempt.record(too_much)
        assert ledger.dump() == before
    assert attempt.record(15)


def test_every_line_counts_what_was_used(funded: Ledger) -> None:
    funded.set("c", 5)
    request = funded.reserve(10, ("c", 1))
    attempt = funded.run(request)
    attempt.record(8)
    assert funded.balance("b") == (10, 0)
    assert funded.balance("c") == (8, 0)
    attempt.end(RAISED)
    assert (funded.balance("b"), funded.balance("c")) == ((0, 8), (0, 8))


def test_usage_of_an_unknown_request_is_an_error(funded: Ledger) -> None:
    _, attempt = funded.start(10)
    attempt.root = "elsewhere"
    with pytest.raises(LookupError):
        attempt.record(1)


def test_a_key_recorded_again_by_a_later_attempt_meters_that_one(funded: Ledger) -> None:
    """The provider gave the same reply again: it is neither billed twice nor unmetered."""
    request, attempt = funded.start(40)
    assert attempt.record(30, key="reply")
    funded.lapse(request)
    assert funded.recover().rerun == 1
    funded.relay()
    again = funded.run(request)
    assert not again.record(30, key="reply")
    again.end(RETURNED)
    row = funded.row(request)
    assert (row.state, row.unmetered) == ("settled", False)
    assert funded.balance() == (0, 30)
