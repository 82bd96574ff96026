"""Alerts where the relay runs: who is told, from which thread, and what the command line shows."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from celery import current_app

from celery_budget import Alert, ConfigurationError, InvalidBudget, alert, budgeted, usage
from celery_budget.integration.alerts import alerting_of
from celery_budget.integration.service import RelayService
from celery_budget.store import schema
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

MODULE = "shop_alerts"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the application's, to be named in its settings."""
    made = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


@pytest.fixture
def told() -> Iterator[list[Alert]]:
    """What the signal says."""
    heard: list[Alert] = []

    def hear(alert: Alert, **_: Any) -> None:
        heard.append(alert)
        raise RuntimeError("a receiver that fails is logged")

    alert.connect(hear, weak=False)
    yield heard
    alert.disconnect(hear)


def test_a_relay_tells_signal_and_callable_outside_of_the_admission(
    make_shop: Callable[..., Shop], module: ModuleType, told: list[Alert], run: Run
) -> None:
    heard: queue.Queue[tuple[Alert, str, Any]] = queue.Queue()

    def notify(alert: Alert) -> None:
        heard.put((alert, threading.current_thread().name, current_app.main))

    module.notify = notify  # type: ignore[attr-defined]
    shop = make_shop(budget_on_alert=f"{MODULE}:notify", budget_alert_seconds=0.05)
    budget = shop.budget
    budget.set("tenant:a", alert_at=(0.5,))

    @budgeted(budget="tenant:a", estimate=5)
    @shop.app.task
    def draft() -> None:
        """Is held, and does not run."""

    draft.delay()
    assert heard.empty()
    service = RelayService(budget)
    service.start()
    try:
        found, thread, app = heard.get(timeout=60)
        assert service.alive
    finally:
        service.stop()
    assert (found.kind, found.subject, found.threshold, found.value) == (
        "budget",
        "tenant:a",
        0.5,
        0.5,
    )
    assert thread == "budget-alert"
    assert app == "shop"
    assert told == [found]
    shown = run(shop.app, "alerts")
    assert (shown.code, shown.err) == (0, "")
    assert "budget 'tenant:a' has come to 50% of its limit" in " ".join(shown.out.split())
    [stands] = run(shop.app, "alerts", "--json").json["alerts"]
    assert stands.items() >= {**found.as_dict(), "tries": 1}.items()
    [same] = budget.alerts()
    assert same.alert == found


def test_without_alerts_the_command_says_so(shop: Shop, run: Run) -> None:
    assert run(shop.app, "alerts").out == "no alert stands\n"
    assert run(shop.app, "alerts", "--json").json == {"alerts": []}


async def asynchronous(alert: Alert) -> None:
    """Cannot be called from a thread."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no_such_module:notify", "cannot be imported"),
        (f"{MODULE}:missing", "cannot be imported"),
        (f"{MODULE}:number", "cannot be called"),
        (f"{MODULE}:asynchronous", "coroutine function"),
    ],
)
def test_a_relay_does_not_start_with_what_cannot_be_called(
    make_shop: Callable[..., Shop], module: ModuleType, given: str, said: str
) -> None:
    module.number = 7  # type: ignore[attr-defined]
    module.asynchronous = asynchronous  # type: ignore[attr-defined]
    service = RelayService(make_shop(budget_on_alert=given).budget)
    with pytest.raises(ConfigurationError, match=said):
        service.start()
    assert not service.alive


def test_thresholds_are_set_exported_and_applied(shop: Shop, run: Run) -> None:
    budget = shop.budget
    done = run(shop.app, "set", "tenant:a", "--alert-at", "50%,0.9")
    assert (done.code, done.err) == (0, "")
    assert done.facts["alerts at"].strip() == "50%,90%"
    assert budget.set("quiet", limit=1, unit="tokens", alert_at=None).alert_at == ()
    assert budget.set("t:*", limit=1, unit="tokens", alert_at=[0.25]).alert_at == (250_000,)
    text = budget.export()
    assert 'alert_at = "50%,90%"' in text
    assert 'alert_at = "none"' in text
    assert budget.apply(text) == ()
    run(shop.app, "set", "tenant:a", "--alert-at", "default")
    assert "alert_at" not in budget.export().partition("tenant:a")[2]
    [change] = budget.apply(text)
    assert change.fields == (("alert_at", "default", "50%,90%"),)
    assert run(shop.app, "show", "tenant:a", "--json").json["declared"]["alert_at"] == [0.5, 0.9]


@pytest.mark.parametrize("given", [0.8, "much", (0,), ("80%", True), "20"], ids=repr)
def test_thresholds_that_cannot_be_change_nothing(shop: Shop, given: Any) -> None:
    before = shop.budget.export()
    with pytest.raises(InvalidBudget, match="give shares of the limit"):
        shop.budget.set("tenant:a", alert_at=given)
    assert shop.budget.export() == before


def test_drift_and_a_ledger_that_does_not_add_up(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(budget_alert_drift_requests=2, budget_alert_at=())

    @budgeted(budget="tenant:a", estimate=1, stage="draft")
    @shop.app.task
    def draft() -> None:
        usage.record(2, key="one")

    for _ in range(2):
        draft.apply()
    alerting_of(shop.budget).run_once()
    [drift] = shop.budget.alerts()
    assert (drift.alert.kind, drift.alert.value, drift.state) == ("drift", 2.0, "told")
    assert drift.alert.subject == "draft (constant:1)"
    shop.sql(schema.balances.update().values(spent=0))
    shop.sql(schema.alert_looks.update().values(looked_us=0))
    alerting_of(shop.budget).run_once()
    assert {one.alert.kind for one in shop.budget.alerts()} == {"drift", "reconcile"}
