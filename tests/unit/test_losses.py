"""What a task declares about its lost attempts: what can be declared."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from celery_budget import BudgetedTask, LostAttempt, budgeted
from celery_budget.core.losses import Losses
from celery_budget.errors import PolicyError


def plain(lost: LostAttempt) -> int:
    return 0


async def asynchronous(lost: LostAttempt) -> int:
    return 0


def generator(lost: LostAttempt) -> Iterator[int]:
    yield 0


async def asynchronous_generator(lost: LostAttempt) -> AsyncIterator[int]:
    yield 0


def of_two(lost: LostAttempt, provider: str) -> int:
    return 0


class Asker:
    def __call__(self, lost: LostAttempt) -> int:
        return 0

    def method(self, lost: LostAttempt) -> int:
        return 0


class AsyncAsker:
    async def __call__(self, lost: LostAttempt) -> int:
        return 0


@pytest.mark.parametrize("name", ["lookup", "compensate"])
@pytest.mark.parametrize(
    "given",
    [
        plain,
        lambda lost: 0,
        lambda *args: 0,
        functools.partial(of_two, provider="openai"),
        Asker(),
        Asker().method,
        dict,
        max,
    ],
    ids=["def", "lambda", "any", "partial", "object", "method", "class", "builtin"],
)
def test_whatever_can_be_called_with_an_attempt_is_taken(name: str, given: Any) -> None:
    assert getattr(Losses(**{name: given}), name) is given


@pytest.mark.parametrize("name", ["lookup", "compensate"])
@pytest.mark.parametrize(
    "given",
    [
        asynchronous,
        functools.partial(asynchronous),
        AsyncAsker(),
        generator,
        asynchronous_generator,
        of_two,
        Asker.method,
        lambda: 0,
        "lookup",
        False,
        classmethod(plain),
    ],
    ids=[
        "async",
        "partial async",
        "async object",
        "generator",
        "async generator",
        "of two",
        "unbound",
        "of none",
        "text",
        "false",
        "classmethod",
    ],
)
def test_what_would_never_be_run_is_an_error_at_once(name: str, given: Any) -> None:
    with pytest.raises(PolicyError, match=f"{name}= is .*plain function of one argument"):
        Losses(**{name: given})


@pytest.mark.parametrize("on_lost", ["retry", "CHARGE", True, b"charge", ["charge"]])
def test_a_lost_attempt_is_charged_or_nothing_is_said(on_lost: Any) -> None:
    with pytest.raises(PolicyError, match="on_lost= is"):
        Losses(on_lost=on_lost)


def test_a_method_of_a_task_class_is_no_function_of_the_attempt() -> None:
    """It has no instance there: it would fail whenever it is called, and hold its budget."""
    with pytest.raises(PolicyError, match="lookup= is"):

        class Draft(BudgetedTask):
            budget = "b"
            estimate = 1

            def lookup(self, lost: LostAttempt) -> int:
                return 0


def test_a_task_class_declares_functions_as_attributes() -> None:
    class Draft(BudgetedTask):
        budget = "b"
        estimate = 1
        lookup = staticmethod(plain)
        compensate = functools.partial(plain)

    assert Draft.budget_policy is not None
    assert Draft.budget_policy.losses == Losses(None, plain, Draft.compensate)


def test_a_decorator_takes_the_same() -> None:
    with pytest.raises(PolicyError, match="compensate= is"):
        budgeted(budget="b", estimate=1, compensate=asynchronous)
