"""How long a caller that was refused should wait."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from celery_budget.core.backpressure import (
    LEAST_SPREAD,
    LONGEST_SECONDS,
    MOST_SPREAD,
    UNKNOWN_SECONDS,
    Outlook,
    Pace,
    spread,
    wait_seconds,
)
from celery_budget.core.estimates import checked_quantile, quantile
from celery_budget.core.reservations import Refused
from celery_budget.errors import BudgetError, InvalidAmount, StoreError, UnknownBudget

S = 1_000_000
MAX = 2**63 - 1

WAITS: list[Any] = [
    # reason, needed, impossible, pace, seconds
    ("exhausted", 1, False, Pace(90 * S, 0, 0), 90.0),
    ("exhausted", 1, False, Pace(None, 5, S), None),
    ("exhausted", 1, False, None, None),
    ("exhausted", 1, False, Pace(-5, 0, 0), 0.0),
    ("exhausted", 1, True, Pace(90 * S, 0, 0), None),
    ("held", 10, False, Pace(None, 5, 4 * S), 8.0),
    ("held", 10, False, Pace(3 * S, 5, 4 * S), 3.0),
    ("held", 10, False, Pace(None, 0, 4 * S), UNKNOWN_SECONDS),
    ("held", 10, False, Pace(3 * S, 0, 0), 3.0),
    ("held", MAX, False, Pace(None, 1, MAX), LONGEST_SECONDS),
    ("held", 1, False, Pace(None, MAX, 0), 0.0),
    ("held", 1, False, Pace(None, 1, -S), 0.0),
    ("held", 1, True, Pace(9 * S, 1, S), None),
    ("queued", 0, False, Pace(9 * S, 1, S), 0.0),
    ("queued", 0, False, Pace(9 * S, 0, S), 9.0),
    ("blocked", 1, False, Pace(9 * S, 1, S), None),
    ("draining", 1, False, Pace(9 * S, 1, S), None),
    ("closed", 1, False, Pace(9 * S, 1, S), None),
]


@pytest.mark.parametrize(
    ("reason", "needed", "impossible", "pace", "seconds"),
    WAITS,
    ids=[f"{number}-{row[0]}" for number, row in enumerate(WAITS)],
)
def test_when_a_request_could_fit(
    reason: str, needed: int, impossible: bool, pace: Pace | None, seconds: float | None
) -> None:
    assert wait_seconds(reason, needed, impossible, pace) == seconds


@pytest.mark.parametrize(
    ("seconds", "width"), [(0.0, LEAST_SPREAD), (40.0, 10.0), (86_400.0, MOST_SPREAD)]
)
def test_a_wait_is_spread_and_never_shorter(seconds: float, width: float) -> None:
    found = [spread(seconds) or 0.0 for _ in range(500)]
    assert seconds <= min(found) < seconds + width / 4
    assert seconds + width * 3 / 4 < max(found) <= seconds + width
    assert spread(None) is None


def test_an_error_keeps_its_time() -> None:
    refused = Refused("b", "tokens", 5, 10, 8, 0, "held", 10, Pace(None, 3, 30 * S))
    error = refused.error()
    assert error.retry_after == error.args[-1]
    assert 30 <= (error.retry_after or 0) <= 37.5
    # How soon it may have room is nothing by which refusals differ.
    assert refused == Refused("b", "tokens", 5, 10, 8, 0, "held", 10)
    assert Refused("b", "tokens", 5, 10, 8, 0, "held", 10).error().retry_after is None


def test_every_error_can_be_asked() -> None:
    for error in (BudgetError("x"), UnknownBudget("b"), StoreError("x", True)):
        assert error.retry_after is None


def test_an_outlook_is_true_or_false() -> None:
    assert Outlook(True)
    assert not Outlook(False, UnknownBudget("b"))
    assert Outlook(True).as_dict() == {"admits": True, "refusal": None, "retry_after": None}


@pytest.mark.parametrize(
    ("of", "wanted"),
    [("0.0001", 1), ("0.2", 1), ("0.2000001", 2), ("0.95", MAX), ("1", MAX), ("0.8", 4)],
)
def test_a_quantile_is_one_of_the_numbers(of: str, wanted: int) -> None:
    assert quantile([MAX, 3, 1, 2, 4], Decimal(of)) == wanted
    assert quantile([7], Decimal(of)) == 7


def test_a_quantile_is_exact() -> None:
    # 0.07 * 100 is 7.000000000000001 in floats.
    assert quantile(range(1, 101), checked_quantile(0.07)) == 7


@pytest.mark.parametrize(
    "wrong", [0, 1.1, -0.5, "x", "", None, True, float("nan"), float("inf"), [1]], ids=repr
)
def test_what_is_no_quantile(wrong: Any) -> None:
    with pytest.raises(InvalidAmount, match="a quantile is a number above 0"):
        checked_quantile(wrong)
