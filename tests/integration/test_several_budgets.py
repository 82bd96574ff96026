"""Tasks that draw on several budgets and units, on budgets above them, and more while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain

from celery_budget import (
    BudgetExceeded,
    BudgetLine,
    InvalidAmount,
    InvalidName,
    PolicyError,
    RequestRuns,
    UnknownBudget,
    UnknownRequest,
    budgeted,
    usage,
)
from celery_budget.store import schema
from tests.integration.support import Shop
from tests.integration.tenant import WAIT, Tenant


def line_of(tenant: str, size: int) -> Any:
    return size


@pytest.fixture
def declare(shop: Shop) -> Callable[..., Any]:
    """Make a task of ``line_of`` that draws on the given budgets."""

    def make(budget: Any, estimate: Any = None) -> Any:
        task = shop.app.task(name="several.line", shared=False)(line_of)
        return budgeted(budget=budget, estimate=estimate)(task)

    return make


def test_a_list_draws_on_each_with_its_own_estimate(
    shop: Shop, declare: Callable[..., Any]
) -> None:
    shop.budget.set("usd", limit=100, unit="micro-usd")
    shop.budget.set("calls", limit=5, unit="calls")
    task = declare(
        [
            "tenant:{tenant}",
            BudgetLine(lambda: "usd", estimate=lambda size: size * 10),
            BudgetLine("calls", estimate=1, charge="start"),
        ],
        estimate=lambda size: size,
    )
    task.delay("a", 4)
    assert [shop.amounts(name)[0] for name in ("tenant:a", "usd", "calls")] == [4, 40, 1]
    [reservation] = shop.rows(schema.reservations)
    assert (reservation.owner, reservation.charges_start) == ("tenant:a", True)


def test_all_or_none_and_the_one_that_is_short_is_told(
    shop: Shop, declare: Callable[..., Any]
) -> None:
    shop.budget.set("usd", limit=9, unit="micro-usd")
    task = declare(["tenant:{tenant}", BudgetLine("usd", estimate=10)], estimate=1)
    before = shop.ledger("budget_refusals")
    with pytest.raises(BudgetExceeded) as caught:
        task.delay("a", 1)
    assert (caught.value.budget, caught.value.reason, caught.value.unit) == (
        "usd",
        "exhausted",
        "micro-usd",
    )
    assert shop.ledger("budget_refusals") == before
    assert shop.received() == []


def test_what_a_budget_gives_is_taken_from_those_above_it(
    shop: Shop, declare: Callable[..., Any]
) -> None:
    shop.budget.set("org", limit=100, unit="tokens")
    shop.budget.set("tenant:*", limit="50%", parent="org")
    task = declare("tenant:{tenant}", estimate=lambda size: size)
    task.delay("new", 50)
    assert shop.amounts("org") == (50, 0, 50)
    assert shop.amounts("tenant:new") == (50, 0, 0)
    task.delay("other", 50)
    with pytest.raises(BudgetExceeded) as caught:
        task.delay("third", 1)
    assert caught.value.budget == "org"
    with pytest.raises(UnknownBudget):
        task.delay("x/y", 1)


def test_finishing_work_may_use_what_is_above_the_soft_stop(
    shop: Shop, declare: Callable[..., Any]
) -> None:
    shop.budget.set("tenant:a", limit=10, soft_stop=0.5, hard_stop=0.8)
    task = declare("tenant:{tenant}", estimate=lambda size: size)
    task.delay("a", 5)
    with pytest.raises(BudgetExceeded) as caught:
        task.delay("a", 1)
    assert (caught.value.most, caught.value.limit) == (5, 10)
    task.apply_async(("a", 3), finishing=True)
    with pytest.raises(BudgetExceeded) as caught:
        task.apply_async(("a", 1), finishing=True)
    assert caught.value.most == 8
    message = shop.rows(schema.outbox)[-1]
    assert "finishing" not in message.envelope


@pytest.mark.parametrize("finishing", [1, "yes"])
def test_finishing_is_true_or_false(
    shop: Shop, declare: Callable[..., Any], finishing: object
) -> None:
    task = declare("tenant:{tenant}", estimate=1)
    before = shop.ledger()
    with pytest.raises(PolicyError, match="finishing="):
        task.apply_async(("a", 1), finishing=finishing)
    assert shop.ledger() == before


@pytest.mark.parametrize(
    ("budget", "estimate", "error", "said"),
    [
        ([], 1, PolicyError, "empty list"),
        (["a", BudgetLine("b")], None, PolicyError, "has no estimate"),
        ([1], 1, PolicyError, "budget= is 1"),
        (["a"], 1.5, InvalidAmount, "1.5"),
        ("a", None, InvalidAmount, "None"),
        (["a", "{other}"], 1, PolicyError, "'other'"),
    ],
)
def test_a_list_that_cannot_work_is_told(
    shop: Shop,
    declare: Callable[..., Any],
    budget: Any,
    estimate: Any,
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        declare(budget, estimate).delay("a", 1)


@pytest.mark.parametrize("charge", ["spent", None, 1])
def test_a_charge_rule_is_one_of_two(charge: Any) -> None:
    with pytest.raises(PolicyError, match="charge= is"):
        BudgetLine("a", estimate=1, charge=charge)


def test_one_budget_named_twice_is_told(shop: Shop, declare: Callable[..., Any]) -> None:
    task = declare(["tenant:{tenant}", "tenant:a"], estimate=1)
    with pytest.raises(PolicyError, match="twice"):
        task.delay("a", 1)


def test_a_template_is_no_budget_to_draw_on(shop: Shop, declare: Callable[..., Any]) -> None:
    shop.budget.set("tenant:*", limit=5, unit="tokens")
    task = declare("tenant:{tenant}", estimate=1)
    with pytest.raises(InvalidName, match="template"):
        task.delay("*", 1)


def test_a_request_that_has_not_started_can_be_cancelled(
    shop: Shop, declare: Callable[..., Any]
) -> None:
    task = declare("tenant:{tenant}", estimate=lambda size: size)
    waiting = task.delay("a", 4)
    sent = task.delay("a", 2)
    shop.sql(schema.outbox.delete().where(schema.outbox.c.task_id == "none"))
    shop.budget.cancel(waiting.id)
    assert shop.amounts("tenant:a") == (2, 0, 8)
    assert waiting.state == "REVOKED"
    shop.relay()
    assert len(shop.received()) == 1
    shop.budget.cancel(sent.id)
    shop.budget.cancel(sent.id)
    assert shop.amounts("tenant:a") == (0, 0, 10)
    assert shop.budget.reconcile().ok


def test_what_is_cancelled_while_the_result_backend_is_down_is_told_by_the_sweep(
    shop: Shop, declare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object, **__: object) -> None:
        raise ConnectionError("no backend")

    sent = declare("tenant:{tenant}", estimate=1).delay("a", 4)
    with monkeypatch.context() as patched:
        patched.setattr(shop.app.backend, "mark_as_revoked", down)
        shop.budget.cancel(sent.id)
    assert sent.state == "PENDING"
    assert shop.budget.reconcile().open_work["untold"] == 1
    shop.sql(schema.untold.update().values(due_us=0))
    shop.sweep()
    assert sent.state == "REVOKED"
    assert not any(shop.budget.reconcile().open_work.values())


def test_what_is_not_known_cannot_be_cancelled(shop: Shop) -> None:
    with pytest.raises(UnknownRequest, match="'nothing'"):
        shop.budget.cancel("nothing")


def test_outside_of_a_task_nothing_is_extended() -> None:
    assert usage.extend(1) is False


metered = pytest.mark.usefixtures("cluster")


@pytest.fixture
def units(tenant: Tenant) -> Tenant:
    """A tenant with a budget of money and one of calls, made of templates."""
    tenant.cluster.budget.set("usd:*", limit=1000, unit="micro-usd")
    tenant.cluster.budget.set("calls:*", limit=10, unit="calls")
    return tenant


def drawn(tenant: Tenant) -> list[tuple[int, int]]:
    """What is reserved and spent of tokens, money and calls."""
    found = [
        tenant.cluster.budget.balance(f"{kind}:{tenant.name}")
        for kind in ("tenant", "usd", "calls")
    ]
    return [(balance.reserved, balance.spent) for balance in found]


@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.parametrize(("failures", "spent"), [(0, [4, 8, 1]), (2, [12, 24, 3])])
def test_each_unit_is_charged_by_its_own_rule(
    units: Tenant, failures: int, spent: list[int]
) -> None:
    result = units.task("metered").delay(units.name, 4, failures=failures)
    assert result.get(timeout=WAIT) == [True, True, False]
    units.spent(spent[0])
    assert drawn(units) == [(0, amount) for amount in spent]


@pytest.mark.redis
@pytest.mark.postgres
def test_a_running_task_reserves_more_or_is_told(units: Tenant) -> None:
    fits = units.task("metered").delay(units.name, 20, more=30)
    assert fits.get(timeout=WAIT) == [True, False, True, True, False]
    units.spent(20)
    short = units.task("metered").delay(units.name, 5, more=90)
    assert short.get(timeout=WAIT) == ["exhausted", True, True, False]
    units.spent(25)


@pytest.mark.redis
@pytest.mark.postgres
def test_what_has_run_cannot_be_cancelled(units: Tenant) -> None:
    result = units.task("metered").delay(units.name, 4)
    result.get(timeout=WAIT)
    units.spent(4)
    with pytest.raises(RequestRuns, match="settled"):
        units.cluster.budget.cancel(result.id)


@pytest.mark.redis
@pytest.mark.postgres
def test_a_parked_step_can_be_cancelled(units: Tenant) -> None:
    units.set(50)
    first = chain(units.task("work").s(1, units.name), units.task("priced").s(units.name))
    large = chain(units.task("work").s(60, units.name), units.task("priced").s(units.name))
    first.apply_async().get(timeout=WAIT)
    result = large.apply_async()
    units.parked(result.id)
    units.cluster.budget.cancel(result.id)
    assert units.story(result.id).reservation["reason"] == "cancelled"
    units.spent(11)
