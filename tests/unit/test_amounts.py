"""Amounts and limits."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum

import pytest

from celery_budget.core.amounts import MAX_AMOUNT, check_amount, check_limit
from celery_budget.core.budgets import Balance
from celery_budget.errors import InvalidAmount


class Level(IntEnum):
    HIGH = 3


NO_AMOUNTS = [
    -1, 2**63, 10**40, 1.0, 1.5, float("nan"), float("inf"), True, False, None, "6", b"6",
    Decimal(6), [6], Level.HIGH,
]  # fmt: skip


@pytest.mark.parametrize("amount", [0, 1, MAX_AMOUNT])
def test_integers_in_range_are_amounts(amount: int) -> None:
    assert check_amount(amount, "it") == amount
    assert check_limit(amount, "it") == amount


@pytest.mark.parametrize("value", NO_AMOUNTS, ids=repr)
def test_anything_else_is_not(value: object) -> None:
    with pytest.raises(InvalidAmount, match=r"^the estimate is .*an integer from 0 to 2\^63-1"):
        check_amount(value, "the estimate")
    if value is not None:
        with pytest.raises(InvalidAmount):
            check_limit(value, "the limit")


def test_no_limit_is_a_limit() -> None:
    assert check_limit(None, "it") is None


def test_the_largest_amount_fills_a_signed_column() -> None:
    assert MAX_AMOUNT == 2**63 - 1


@pytest.mark.parametrize(
    ("limit", "reserved", "spent", "available"),
    [(100, 30, 20, 50), (10, 30, 20, -40), (0, 0, 0, 0), (None, 30, 20, None)],
)
def test_available_is_what_is_left(
    limit: int | None, reserved: int, spent: int, available: int | None
) -> None:
    assert Balance("b", "tokens", limit, reserved, spent).available == available
