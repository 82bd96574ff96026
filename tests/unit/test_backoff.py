"""Waiting longer after each failure."""

from __future__ import annotations

import pytest

from celery_budget.core.backoff import backoff_seconds


@pytest.mark.parametrize(
    ("failures", "bound"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (50, 10), (10**9, 10)]
)
def test_waits_double_up_to_a_bound_and_spread_by_half(failures: int, bound: float) -> None:
    waits = [backoff_seconds(failures, 1.0, 10.0) for _ in range(200)]
    assert all(bound / 2 <= wait <= bound for wait in waits)
    assert max(waits) - min(waits) > bound / 10


def test_the_bound_holds_for_the_first_wait_too() -> None:
    assert backoff_seconds(1, 100.0, 2.0) <= 2.0
