"""How long a request is tried: what can be declared, and when it ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
from celery import Celery

from celery_budget import BudgetedTask, budgeted
from celery_budget.core.retries import Retries
from celery_budget.errors import AttemptsSpent, PolicyError


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "3"])
def test_a_number_of_attempts_is_one_from_1_on(most: Any) -> None:
    with pytest.raises(PolicyError, match="max_attempts= is"):
        Retries(max_attempts=most)


@pytest.mark.parametrize("within", [0, -1, math.inf, math.nan, True, "60"])
def test_a_time_is_one_in_seconds(within: Any) -> None:
    with pytest.raises(PolicyError, match="retry_within= is"):
        Retries(retry_within=within)


def test_a_deadline_leaves_no_hint_to_quarantine() -> None:
    said = str(AttemptsSpent("t-1", 3, "deadline"))
    assert "its deadline has passed" in said
    assert "requeue" not in said


@pytest.mark.parametrize("terminal", ["ValueError", [1], ValueError(), int, KeyboardInterrupt, 3])
def test_errors_are_classes_of_exceptions(terminal: Any) -> None:
    with pytest.raises(PolicyError, match="terminal= has"):
        Retries(terminal=terminal)


def test_when_it_ends() -> None:
    limits = Retries(max_attempts=3, retry_within=2)
    assert limits.spent(2, 2_000_000) is None
    assert limits.spent(3, 0) == "max_attempts"
    assert limits.spent(1, 2_000_001) == "retry_within"
    assert Retries().spent(10**6, 10**15) is None
    assert (bool(Retries()), bool(limits), bool(Retries(terminal=ValueError))) == (
        False,
        True,
        True,
    )  # type: ignore[arg-type]
    assert Retries(terminal=[KeyError, OSError]).is_terminal(None, FileNotFoundError())  # type: ignore[arg-type]
    assert not Retries().is_terminal(ValueError())


def _draft() -> None:
    pass


def test_a_task_declares_it_by_decorator_or_class() -> None:
    expected = Retries(3, 60, (ValueError,))

    class Base(BudgetedTask):
        abstract = True
        budget = "b"
        estimate = 1
        max_attempts = 3
        retry_within = 60
        terminal = (ValueError,)

    assert Base.budget_policy is not None
    assert Base.budget_policy.retries == expected
    app = Celery("retries", set_as_current=False)
    task = budgeted(budget="b", estimate=1, max_attempts=3, retry_within=60, terminal=ValueError)(
        app.task(name="t", shared=False)(_draft)
    )
    assert task.budget_retries((), {}) == expected
    with pytest.raises(PolicyError, match="max_attempts"):
        budgeted(budget="b", estimate=1, max_attempts=0)
