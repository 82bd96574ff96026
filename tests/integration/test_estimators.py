"""Estimators, refusals that say when, and looks, as an application uses them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import chain, group
from celery.contrib.testing.worker import start_worker

from celery_budget import BudgetedTask, BudgetLine, Estimator, budgeted, usage
from celery_budget.core import estimators as registry
from celery_budget.errors import (
    BudgetError,
    BudgetExceeded,
    EstimateError,
    EstimateOutOfBounds,
    InvalidAmount,
    InvalidBudget,
    PolicyError,
    QueueFull,
    UnknownBudget,
)
from celery_budget.estimators import by_characters
from celery_budget.store import schema
from tests.cluster import WAIT
from tests.integration.commands import Run, runner
from tests.integration.publication.conftest import logging_kept
from tests.integration.support import Shop, current
from tests.integration.tenant import Tenant
from tests.unit.test_estimators import BY_NAME


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Forget the estimators of a test when it is over."""
    known = {name: dict(versions) for name, versions in registry.estimators._known.items()}
    yield
    registry.estimators._known = known


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def shop(request: pytest.FixtureRequest, make_shop: Callable[..., Shop]) -> Shop:
    """A shop on either store."""
    if request.param == "sqlite":
        return make_shop()
    return make_shop(budget_database_url=request.getfixturevalue("postgres_url"))


def draft_in(shop: Shop, **policy: Any) -> Any:
    policy = {"budget": "tenant:{tenant}", "stage": "draft", **policy}

    @budgeted(**policy)
    @shop.app.task(name="shop.draft", shared=False)
    def draft(prompt: Any, tenant: str = "a") -> Any:
        usage.record(3)
        return prompt

    return draft


def length(prompt: str) -> int:
    return len(prompt)


def nothing() -> None:
    """A task without a budget."""


def kept(shop: Shop) -> list[tuple[Any, ...]]:
    return [
        (row.estimator, row.estimator_version, json.loads(row.shadows or "null"))
        for row in shop.rows(schema.reservations)
    ]


def test_a_registered_estimator_and_its_shadows_from_admission_to_report(
    make_shop: Callable[..., Shop], capsys: Any, monkeypatch: Any
) -> None:
    """By a worker that runs the task."""
    shop = make_shop(worker_hijack_root_logger=False)
    register = shop.budget.estimators.register
    register("draft", by_characters("prompt", units_per_character=1), at_most=9)
    register("draft", lambda prompt: len(prompt) * 2, version="2")
    with current(shop.app), logging_kept():
        task = draft_in(shop, estimate="draft:1", shadows=["draft:2", "gone"])
        result = task.delay("x")
        assert shop.amounts("tenant:a") == (1, 0, 9)
        assert kept(shop) == [("draft", "1", {"draft:2": 2})]
        shop.relay()
        with start_worker(shop.app, perform_ping_check=False, shutdown_timeout=60):
            assert result.get(timeout=60) == "x"
    assert shop.amounts("tenant:a") == (0, 3, 7)
    drift = [one.as_dict() for one in shop.budget.report().drift]
    assert [(one["version"], one["ratio"], one["shadow"], one["above"]) for one in drift] == [
        ("1", 3.0, False, True),
        ("2", 1.5, True, False),
    ]
    run = runner(capsys, monkeypatch)
    assert "mend the estimator before you change a limit" in run(shop.app, "report").out
    [found] = run(shop.app, "suggest", "--stage", "draft", "--json").json["suggestions"]
    assert (found["amount"], found["requests"], found["covered"]) == (3, 1, 0)


@pytest.mark.redis
@pytest.mark.postgres
def test_versions_are_told_apart_where_workers_run(tenant: Tenant) -> None:
    """Callers, a worker's children and continuations know one estimator by its name."""
    task, budget = tenant.task("estimated"), tenant.cluster.budget
    first = chain(task.si("x" * 30, tenant.name, 45), task.si("y" * 20, tenant.name, 30))
    assert budget.would_admit(task, ("x" * 30, tenant.name, 45))
    assert first.apply_async().get(timeout=WAIT) == "y" * 20
    tenant.spent(75)
    with pytest.raises(EstimateOutOfBounds):
        task.delay("x" * 91, tenant.name, 1)
    with pytest.raises(BudgetExceeded) as caught:
        task.delay("x" * 26, tenant.name, 1)
    assert (caught.value.reason, caught.value.retry_after) == ("exhausted", None)
    assert not budget.would_admit(task, ("x" * 26, tenant.name, 1))
    rows = [one for one in budget.report().drift if one.stage == "estimated"]
    assert [(one.version, one.requests, one.estimated, one.actual, one.shadow) for one in rows] == [
        ("2", 2, 50, 75, False),
        ("3", 2, 100, 75, True),
    ]
    [found] = budget.suggest("estimated")
    assert (found.amount, found.covered) == (45, 0)


@pytest.mark.parametrize(("estimate", "kind"), BY_NAME)
def test_a_wrong_number_changes_nothing(
    make_shop: Callable[..., Shop], estimate: Any, kind: type[BudgetError]
) -> None:
    shop = make_shop()
    task = draft_in(shop, estimate=estimate)
    before = shop.ledger()
    for publish in (
        lambda: task.delay("x"),
        lambda: task.apply_async(("x",), request_id="order-1"),
        lambda: group(task.s("x"), task.s("y")).apply_async(),
        lambda: task.apply(("x",)),
        lambda: shop.budget.would_admit(task, ("x",)),
    ):
        with pytest.raises(BudgetError) as caught:
            publish()
        assert type(caught.value) is kind
    assert shop.ledger() == before
    assert shop.received() == []


@pytest.mark.parametrize(("estimate", "kind"), BY_NAME)
def test_a_shadow_that_fails_does_not_touch_admission(
    make_shop: Callable[..., Shop], estimate: Any, kind: type[BudgetError]
) -> None:
    shop = make_shop()
    task = draft_in(shop, estimate=4, shadows=[Estimator("bad", estimate), Estimator("good", 7)])
    task.delay("x")
    assert shop.amounts("tenant:a") == (4, 0, 6)
    assert kept(shop) == [("constant", "1", {"good:1": 7})]


def test_shadows_are_kept_wherever_a_request_is_made(shop: Shop) -> None:
    shop.budget.set("tenant:a", limit=100)
    task = draft_in(shop, estimate=1, shadows=[Estimator("two", 2)])
    task.apply_async(("x",), request_id="order-1")
    group(task.s("x"), task.s("y")).apply_async()
    chain(task.si("x"), task.si("y")).apply_async(reserve="chain")
    task.map(["x", "y", "z"]).apply_async()
    found = kept(shop)
    assert found.count(("constant", "1", {"two:1": 2})) == 5
    assert found.count(("constant", "1", {"two:1": 6})) == 1
    task.apply(("x",))
    assert len(kept(shop)) == 7


def test_a_task_class_has_estimators_as_well(shop: Shop) -> None:
    shop.budget.estimators.register("size", length, version="3")

    class Draft(BudgetedTask):
        name = "shop.class"
        budget = "tenant:a"
        estimate = "size"
        shadows = ("size:3",)

        def run(self, prompt: str) -> None:
            """Nothing."""

    task = shop.app.register_task(Draft())
    task.delay("four")
    assert kept(shop) == [("size", "3", {"size:3": 4})]


def test_an_estimator_that_is_registered_later(shop: Shop) -> None:
    task = draft_in(shop, estimate="later")
    with pytest.raises(PolicyError, match="no estimator 'later'"):
        task.delay("x")
    shop.budget.estimators.register("later", 2)
    task.delay("x")
    assert shop.amounts("tenant:a") == (2, 0, 8)


def test_what_is_out_of_bounds_is_refused_and_said(shop: Shop) -> None:
    task = draft_in(shop, estimate=Estimator("d", length, at_most=5))
    with pytest.raises(EstimateOutOfBounds) as caught:
        task.delay("x" * 6)
    assert isinstance(caught.value, EstimateError)
    assert (caught.value.estimator, caught.value.estimate) == ("d:1", 6)
    task.delay("x" * 5)


def test_a_refusal_says_when(shop: Shop) -> None:
    shop.budget.set("tenant:day", limit=10, unit="tokens", period="day")
    task = draft_in(shop, estimate=6)
    task.delay("x", "day")
    with pytest.raises(BudgetExceeded) as caught:
        task.delay("x", "day")
    # Held: half a minute at most, or what is left of the day.
    assert caught.value.reason == "held"
    assert caught.value.retry_after is not None
    assert caught.value.retry_after <= 37.5
    with pytest.raises(BudgetExceeded) as caught, shop.budget.batch():
        task.delay("x", "day")
    assert caught.value.retry_after is not None
    with pytest.raises(BudgetExceeded) as caught:
        task.apply(("x", "day"))
    assert caught.value.retry_after is not None
    shop.budget.set("tenant:day", limit=0)
    with pytest.raises(BudgetExceeded) as caught:
        task.delay("x", "day")
    assert caught.value.retry_after is None


def test_a_look_at_a_task(shop: Shop) -> None:
    task = draft_in(shop, estimate=length)
    plain = shop.app.task(name="plain", shared=False)(nothing)
    look, before = shop.budget.would_admit, shop.ledger()
    for fits in (
        look(task, ("x" * 10,)),
        look("shop.draft", ("x",), {"tenant": "a"}),
        look(task.s("x" * 10)),
        look(task.s("x" * 10), kwargs={"tenant": "a"}),
        look(task.si("x" * 10), ("left out",)),
        look(task.map(["x" * 5, "y" * 5])),
        look(plain),
        look("elsewhere", ("x",)),
        look(lines={"tenant:a": 10}),
        look(lines=[BudgetLine("tenant:a", 10, "start")]),
        look(lines={"tenant:a": 0}),
    ):
        assert (fits.admits, fits.error) == (True, None)
    for refused in (
        look(task, ("x" * 11,)),
        look(task.s("x" * 11)),
        look(task.map(["x" * 5, "y" * 6])),
        look(lines={"tenant:a": 11}),
    ):
        assert isinstance(refused.error, BudgetExceeded)
        assert refused.error.requested == 11
    assert isinstance(look(task, ("x", "nobody")).error, UnknownBudget)
    assert shop.ledger() == before
    assert shop.received() == []


def test_a_look_goes_to_the_lane_that_the_call_would(shop: Shop) -> None:
    task, look = draft_in(shop, estimate=2), shop.budget.would_admit
    plain, fast = task.s("x"), task.s("x").set(queue="fast")
    keyed = task.s("x").set(routing_key="fast", exchange="other")
    alone = task.s("x").set(routing_key="fast")
    shop.budget.lanes.set("llm", queues=["fast"], max_running_units=1)
    assert look(plain)
    assert look(task, ("x",))
    assert not look(task, ("x",), queue="fast")
    assert look(fast, queue="slow")
    assert not look(lines={"tenant:a": 2}, queue="fast")
    for routed in (fast, keyed):
        assert isinstance(look(routed).error, QueueFull)
        with pytest.raises(QueueFull):
            routed.apply_async()
    for routed in (plain, alone):
        assert look(routed)
        routed.apply_async()
    shop.app.conf.task_routes = {"shop.draft": {"queue": "fast"}}
    shop.app.amqp.flush_routes()
    shop.app.amqp.router = shop.app.amqp.Router()
    assert isinstance(look(plain).error, QueueFull)
    with pytest.raises(QueueFull):
        plain.apply_async()
    shop.app.conf.task_create_missing_queues = False
    shop.app.amqp.queues.create_missing = False
    with pytest.raises(PolicyError, match="nowhere"):
        look(task.s("x").set(queue="not there"))


def test_a_look_is_of_one_task_or_of_lines(shop: Shop) -> None:
    task, look = draft_in(shop, estimate=1), shop.budget.would_admit
    for wrong in (
        look,
        lambda: look(task, lines={"tenant:a": 1}),
        lambda: look(group(task.s("x"), task.s("y"))),
        lambda: look(5),
        lambda: look(task),
        lambda: look(lines={}),
        lambda: look(lines={"tenant:{tenant}": 1}),
    ):
        with pytest.raises(PolicyError):
            wrong()
    with pytest.raises(InvalidAmount, match="lines= for 'tenant:a' is -1"):
        look(lines={"tenant:a": -1})


def test_suggestions_by_method_and_command(shop: Shop, capsys: Any, monkeypatch: Any) -> None:
    run: Run = runner(capsys, monkeypatch)
    assert "Nothing has been measured yet" in run(shop.app, "suggest").out
    task = draft_in(shop, estimate=5)
    task.apply(("x",))
    [found] = shop.budget.suggest(quantile=0.5, since=timedelta(hours=1))
    assert (found.stage, found.unit, found.amount, found.covered) == ("draft", "tokens", 3, 1)
    now = datetime.now(timezone.utc)
    assert shop.budget.suggest("draft", since=now - timedelta(hours=1)) != ()
    assert shop.budget.suggest("draft", since=now + timedelta(hours=1)) == ()
    with pytest.raises(InvalidBudget, match="with a time zone"):
        shop.budget.suggest(since=datetime(2026, 1, 1))  # noqa: DTZ001 - that is what is wrong
    with pytest.raises(InvalidAmount):
        shop.budget.suggest(quantile=2)
    row = ["draft", "tokens", "1", "3", "3", "3", "100%"]
    shown = run(shop.app, "suggest", "--since", "1h", "--quantile", "0.99").out
    assert row in [line.split() for line in shown.splitlines()]
    wrong = run(shop.app, "suggest", "--quantile", "95")
    assert (wrong.code, wrong.out) == (2, "")
    assert "a quantile is a number above 0" in wrong.err
