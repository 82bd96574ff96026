"""Grants and adjustments: each once under its own key, however many bring it at once."""

from __future__ import annotations

import pytest

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.reservations import Refused, Reserved
from celery_budget.errors import BudgetError, InvalidAmount, KeyConflict
from tests.contract.racers import at_once
from tests.contract.support import Ledger


def test_a_grant_counts_once_under_its_key(funded: Ledger) -> None:
    assert funded.grant("k", 50) is True
    assert funded.grant("k", 50) is False
    assert funded.standing().limit == 150
    assert funded.grant("l", 50) is True
    assert funded.standing().limit == 200


@pytest.mark.parametrize("change", [{"amount": 51}, {"name": "c"}, {"until_us": 10**17}])
def test_another_grant_under_a_key_is_a_conflict(funded: Ledger, change: dict[str, object]) -> None:
    funded.set("c", 100)
    funded.grant("k", 50)
    before = funded.dump()
    with pytest.raises(KeyConflict):
        funded.grant("k", **{"amount": 50, **change})  # type: ignore[arg-type]
    assert funded.dump() == before


def test_an_adjustment_counts_once_under_its_key(funded: Ledger) -> None:
    assert funded.adjust("k", 30) is True
    assert funded.adjust("k", 30) is False
    assert funded.balance() == (0, 30)
    assert funded.adjust("l", -30) is True
    assert funded.balance() == (0, 0)
    with pytest.raises(KeyConflict):
        funded.adjust("k", 31)


def test_an_adjustment_that_cannot_be_leaves_its_key_free(funded: Ledger) -> None:
    with pytest.raises(InvalidAmount):
        funded.adjust("k", -1)
    assert funded.adjust("k", 1) is True
    with pytest.raises(InvalidAmount):
        funded.adjust("l", MAX_AMOUNT)
    assert funded.adjust("l", 1) is True


def test_grants_as_large_as_may_be_do_not_block_a_budget(funded: Ledger) -> None:
    granted = 0
    for key in ("k", "l"):
        try:
            granted += funded.grant(key, MAX_AMOUNT)
        except BudgetError:
            continue
    assert granted
    assert funded.standing().limit == MAX_AMOUNT
    request = funded.request(MAX_AMOUNT)
    assert funded.admit(request) == Reserved(request.reservation_id)
    assert isinstance(funded.admit(funded.request(1)), Refused)


def test_one_grant_by_many_at_once_counts_once(funded: Ledger) -> None:
    for one in range(5):
        done = at_once([lambda key=f"k{one}": funded.grant(key, 10)] * 8)
        assert sorted(done) == [False] * 7 + [True]
        assert funded.standing().limit == 100 + 10 * (one + 1)


def test_one_adjustment_by_many_at_once_counts_once(funded: Ledger) -> None:
    for one in range(5):
        done = at_once([lambda key=f"k{one}": funded.adjust(key, 10)] * 8)
        assert sorted(done) == [False] * 7 + [True]
        assert funded.balance() == (0, 10 * (one + 1))


def test_adjustments_beside_admissions_are_not_lost(funded: Ledger) -> None:
    funded.set("b", None)
    at_once(
        [
            *[lambda key=f"k{one}": funded.adjust(key, 7) for one in range(6)],
            *[lambda: funded.reserve(3)] * 6,
        ]
    )
    assert funded.balance() == (18, 42)


def test_of_two_that_take_back_the_same_one_may(funded: Ledger) -> None:
    def take(key: str) -> bool:
        try:
            return funded.adjust(key, -10)
        except InvalidAmount:
            return False

    for one in range(5):
        funded.adjust(f"given{one}", 10)
        keys = [f"{one}-{two}" for two in range(4)]
        done = at_once([lambda key=key: take(key) for key in keys])
        assert sorted(done) == [False, False, False, True]
        assert funded.balance() == (0, 0)


def test_a_grant_beside_admissions_is_used_and_not_passed(funded: Ledger) -> None:
    def admit() -> bool:
        request = funded.request(30)
        return funded.admit(request) == Reserved(request.reservation_id)

    done = at_once([*[admit] * 8, lambda: funded.grant("k", 50)])
    assert sum(done[:8]) in (3, 4, 5)
    while admit():
        pass
    assert funded.balance() == (150, 0)
