"""For how long runs are joined, and which calls are the same."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_budget import BudgetedTask, PolicyError, budgeted
from celery_budget.core.identity import fingerprint
from celery_budget.core.reuse import Reuse

HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("given", "kept_us"),
    [
        ("24h", 24 * HOUR),
        ("90s", 90_000_000),
        ("15m", HOUR // 4),
        ("7d", 7 * 24 * HOUR),
        (3600, HOUR),
        (0.5, 500_000),
        (timedelta(hours=1), HOUR),
    ],
    ids=str,
)
def test_a_time_is_written_in_several_ways(given: Any, kept_us: int) -> None:
    assert Reuse.given(given) == Reuse(kept_us, "1")


@pytest.mark.parametrize(
    "wrong",
    [0, -1, True, math.inf, math.nan, "", "24", "h", "1w", "-1h", "1.5h", "٣h", "0s",
     "99999999999d", 10**10, timedelta(0), timedelta(-1), [1]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_time_is_an_error(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="reuse= is"):
        Reuse.given(wrong)
    with pytest.raises(PolicyError, match="reuse= is"):
        budgeted(budget="b", estimate=1, reuse=wrong)


@pytest.mark.parametrize("wrong", ["", None, True, 1.5])
def test_a_version_is_text_or_a_number(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="version= is"):
        Reuse.given("1h", wrong)
    assert Reuse.given(None, wrong) is None, "a task may have a version of its own"


def test_the_same_calls_have_one_key() -> None:
    one = Reuse(1, "1")
    same = one.key(fingerprint("draft", {"a": [1, 2]}))
    assert same == Reuse(2, "1").key(fingerprint("draft", {"a": (1, 2)}))
    others = [
        one.key(fingerprint("other", {"a": [1, 2]})),
        one.key(fingerprint("draft", {"a": [1, 3]})),
        Reuse(1, "2").key(fingerprint("draft", {"a": [1, 2]})),
    ]
    assert len({same, *others}) == 4
    assert len(same) == 64


def test_what_cannot_be_compared_is_not_joined() -> None:
    with pytest.raises(PolicyError, match="can be compared"):
        Reuse(1, "1").key(fingerprint("draft", {"a": object()}))


def _draft() -> None:
    pass


def test_a_task_declares_it_by_decorator_or_class() -> None:
    class Base(BudgetedTask):
        abstract = True
        budget = "b"
        estimate = 1
        reuse = "1h"
        version = 2

    assert Base.budget_policy is not None
    assert Base.budget_policy.reuse == Reuse(HOUR, "2")
    app = Celery("reuse", set_as_current=False)
    task = budgeted(budget="b", estimate=1, reuse="1h", version="2")(
        app.task(name="t", shared=False)(_draft)
    )
    assert task.budget_policy.reuse == Reuse(HOUR, "2")
    assert task.budget_reuses()
