"""Declarations that cannot work, and what a declaration makes of the arguments of a call."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from celery_budget import BudgetedTask, InvalidAmount, budgeted
from celery_budget.errors import PolicyError
from tests.integration.placements import BUDGET, NAME, above_task, fresh
from tests.integration.support import Shop, current


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"budget": None, "estimate": 1}, PolicyError),
        ({"budget": 7, "estimate": 1}, PolicyError),
        ({"budget": "b", "estimate": -1}, InvalidAmount),
        ({"budget": "b", "estimate": 1.5}, InvalidAmount),
        ({"budget": "b", "estimate": True}, InvalidAmount),
        ({"budget": "b", "estimate": "6"}, InvalidAmount),
        ({"budget": "b", "estimate": None}, InvalidAmount),
        ({"budget": "b", "estimate": 2**63}, InvalidAmount),
        ({"budget": "b", "estimate": 1, "stage": ""}, PolicyError),
    ],
    ids=repr,
)
def test_a_wrong_declaration_fails_where_it_is_made(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        budgeted(**wrong)(fresh())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": "b"}, "estimate="),
        ({"estimate": 1}, "budget="),
    ],
    ids=["no estimate", "no budget"],
)
def test_half_a_declaration_on_the_base_class_is_an_error(
    shop: Shop, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        shop.app.task(base=BudgetedTask, lazy=False, name=NAME, **options)(fresh())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"budget": "tenant:{who}", "estimate": 1}, "who"),
        ({"budget": "tenant:{}", "estimate": 1}, "names"),
        ({"budget": "tenant:{", "estimate": 1}, "no template"),
        ({"budget": lambda who: who, "estimate": 1}, "who"),
        ({"budget": "b", "estimate": lambda prompt: prompt}, "prompt"),
    ],
    ids=["template", "empty field", "broken template", "callable budget", "estimator"],
)
def test_a_declaration_that_does_not_fit_its_task_fails_at_first_use(
    shop: Shop, wrong: dict[str, Any], says: str
) -> None:
    task = budgeted(**wrong)(shop.app.task(name=NAME)(fresh()))
    before = shop.ledger()
    with pytest.raises(PolicyError, match=says):
        task.delay(1, "a")
    assert shop.ledger() == before
    assert shop.received() == []


def test_only_functions_and_tasks_can_be_budgeted() -> None:
    with pytest.raises(PolicyError, match="functions and tasks"):
        budgeted(**BUDGET)(7)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("tenant:{tenant}", "tenant:a"),
        ("tenant:{tenant}:{extra:03d}", "tenant:a:004"),
        (lambda tenant: f"tenant:{tenant}", "tenant:a"),
        (lambda **arguments: f"tenant:{arguments['tenant']}", "tenant:a"),
        (lambda tenant, region="eu": f"{region}:{tenant}", "eu:a"),
        ("fixed", "fixed"),
    ],
)
def test_a_budgets_name_comes_from_the_bound_arguments(
    shop: Shop, budget: Any, expected: str
) -> None:
    shop.budget.set(expected, limit=10, unit="tokens")
    task = budgeted(budget=budget, estimate=lambda size, extra: size + extra)(
        shop.app.task(name=NAME)(fresh())
    )
    task.delay(1, tenant="a", extra=4)
    assert shop.amounts(expected) == (5, 0, 5)


def test_a_budgeted_task_can_be_pickled(shop: Shop) -> None:
    with current(shop.app):
        task = above_task(shop.app)
        signature = pickle.loads(pickle.dumps(task.s(2, "a")))  # noqa: S301 - our own bytes
        signature.apply_async()
    assert shop.amounts("tenant:a") == (2, 0, 8)
