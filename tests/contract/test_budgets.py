"""Budgets: made, changed, and never changed into what was not meant."""

from __future__ import annotations

import threading

import pytest

from celery_budget.core.reservations import Refused
from celery_budget.errors import BudgetError, InvalidAmount, InvalidName, UnknownBudget
from celery_budget.store import budgets
from tests.contract.support import RETURNED, Ledger


def test_a_new_budget_has_everything_available(ledger: Ledger) -> None:
    ledger.set("b", 100, "tokens")
    balance = ledger.store.run(budgets.balance, ledger.root, "b")
    assert (balance.unit, balance.limit, balance.reserved, balance.spent) == ("tokens", 100, 0, 0)
    assert balance.available == 100


@pytest.mark.parametrize("limit", [0, 5, 10, 11, 1000, None, 2**63 - 1])
def test_a_limit_moves_and_what_was_drawn_stays(funded: Ledger, limit: int | None) -> None:
    _, attempt = funded.start(4)
    attempt.record(4)
    attempt.end(RETURNED)
    attempt.close()
    funded.reserve(6)
    funded.set("b", limit, None)
    balance = funded.store.run(budgets.balance, funded.root, "b")
    assert (balance.limit, balance.reserved, balance.spent) == (limit, 6, 4)
    assert balance.available == (None if limit is None else limit - 10)


def test_a_limit_below_what_was_drawn_admits_nothing(funded: Ledger) -> None:
    funded.reserve(60)
    funded.set("b", 50)
    assert funded.admit(funded.request(1)) == Refused("b", "tokens", 1, 50, 60, 0, "held", 50)
    assert isinstance(funded.admit(funded.request(0)), Refused)


@pytest.mark.parametrize("amount", [0, 1])
def test_a_limit_of_zero_blocks_everything(ledger: Ledger, amount: int) -> None:
    """Also what asks for nothing: it could record any usage."""
    ledger.set("b", 0)
    assert ledger.admit(ledger.request(amount)) == Refused(
        "b", "tokens", amount, 0, 0, 0, "blocked", 0
    )


def test_nothing_fits_a_budget_that_is_used_up(ledger: Ledger) -> None:
    ledger.set("b", 1)
    ledger.reserve(1)
    ledger.reserve(0)


def test_a_unit_may_change_until_the_budget_was_drawn_on(funded: Ledger) -> None:
    funded.set("b", 100, "requests")
    funded.reserve(1)
    before = funded.dump()
    with pytest.raises(BudgetError, match=r"counts requests and was drawn on.*tokens"):
        funded.set("b", 5, "tokens")
    assert funded.dump() == before
    funded.set("b", 5, "requests")


def test_a_new_budget_needs_a_unit(ledger: Ledger) -> None:
    with pytest.raises(BudgetError, match="unit="):
        ledger.set("b", 5, None)
    assert ledger.rows("budgets") == []


@pytest.mark.parametrize(
    ("name", "limit", "unit", "error"),
    [
        ("", 5, "tokens", InvalidName),
        ("a\nb", 5, "tokens", InvalidName),
        ("e\u0301", 5, "tokens", InvalidName),
        ("x" * 256, 5, "tokens", InvalidName),
        ("b", 5, "", InvalidName),
        ("b", -1, "tokens", InvalidAmount),
        ("b", 2**63, "tokens", InvalidAmount),
        ("b", True, "tokens", InvalidAmount),
        ("b", 1.0, "tokens", InvalidAmount),
    ],
)
def test_what_cannot_be_a_budget_is_refused(
    ledger: Ledger, name: str, limit: int, unit: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        ledger.set(name, limit, unit)
    assert ledger.rows("budgets") == ledger.rows("balances") == []


@pytest.mark.parametrize("name", ["tenant:ä", "Ω", "a'b\"c;--", "%s {x} \\", "x" * 255, "日本"])
def test_names_are_kept_to_the_letter(ledger: Ledger, name: str) -> None:
    ledger.set(name, 7)
    ledger.set(name.swapcase() if name.swapcase() != name else "other", 9)
    ledger.reserve(7, budget=name)
    assert ledger.balance(name) == (7, 0)
    assert len(ledger.rows("budgets")) == 2


def test_an_unknown_budget_has_no_balance(ledger: Ledger) -> None:
    with pytest.raises(UnknownBudget):
        ledger.balance("b")


def test_roots_do_not_see_each_other(funded: Ledger, ledger: Ledger) -> None:
    other = Ledger(funded.store, funded.settings.__class__(funded.settings.database_url, "other-"))
    names = [balance.budget for balance in funded.store.run(budgets.balances_of, other.root)]
    assert names == []
    with pytest.raises(UnknownBudget):
        other.admit(other.request(1))


def test_two_that_create_one_budget_at_once_both_succeed(ledger: Ledger) -> None:
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def create(limit: int) -> None:
        barrier.wait()
        try:
            ledger.set("b", limit)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=create, args=(limit,)) for limit in range(10, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [row.limit_amount in range(10, 14) for row in ledger.rows("budgets")] == [True]
    assert len(ledger.counted()) == 1
