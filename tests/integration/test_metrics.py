"""Metrics of a real ledger, and of a relay that runs."""

from __future__ import annotations

import http.client
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from celery_budget import BudgetExceeded, MissingExtra, budgeted, usage
from celery_budget.integration.service import RelayService
from celery_budget.metrics import collector, exposition
from celery_budget.store import schema
from tests.cluster import Cluster, eventually
from tests.integration.commands import runner
from tests.integration.support import Shop
from tests.monitoring.readings import Samples, samples_in
from tests.services.base import free_port

NAME = 'tenant:"b" \\ \u00e9'


@pytest.fixture
def often(on_both: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A shop on either store whose ledger is read at each scrape."""
    monkeypatch.setattr(collector, "REST", 0)
    on_both.budget._settings = replace(on_both.budget.settings, metrics_seconds=1e-9)
    return on_both


def scraped(shop: Shop) -> Samples:
    return samples_in(families(exposition(shop.budget)[0].decode()))


def work(shop: Shop, name: str = NAME) -> Any:
    """A task that runs in place, on a budget of 20 tokens; what it uses, it is told."""
    shop.budget.set(name, limit=20, unit="tokens")

    @budgeted(budget=name, estimate=6, stage="draft")
    @shop.app.task(name="shop.work", shared=False)
    def work(used: int) -> None:
        usage.record(used)

    return work


def test_figures_are_those_of_the_ledger(often: Shop) -> None:
    task = work(often)
    assert scraped(often)["spent", (NAME, "tokens")] == 0
    task.apply((9,))
    task.apply((5,))
    task.delay(1)
    with pytest.raises(BudgetExceeded):
        task.delay(1)
    got = scraped(often)
    own = (NAME, "tokens")
    figures = [got[name, own] for name in ("limit", "reserved", "spent", "available")]
    assert figures == [20, 6, 14, 0]
    assert got["used_ratio", own] == 1
    assert got["outbox_messages", ("due",)] == 1
    assert [got["requests_admitted_total", ("draft",)], got["open_requests", ("reserved",)]] == [
        3,
        1,
    ]
    assert got["requests_ended_total", ("draft", "settled")] == 2
    assert got["requests_flagged_total", ("draft", "over")] == 1
    assert got["requests_refused_total", ("draft",)] == 1
    assert got["refusals_total", (NAME, "held")] == 1
    assert got["failures_total", ("draft", "refused")] == 1
    assert [got[f"{name}_total", own] for name in ("charged", "estimated", "over")] == [14, 12, 3]
    assert got["estimator_requests_total", ("draft", "constant", "1", "false")] == 2
    assert got["run_seconds_count", ("draft",)] == 2
    assert got["run_seconds_bucket", ("draft", "+Inf")] == 2
    assert got["wait_seconds_count", ("draft",)] == 2


def test_counters_go_on_as_the_ledger_is_swept(often: Shop) -> None:
    task = work(often)
    names = ("requests_admitted_total", "charged_total", "run_seconds_count", "run_seconds_sum")
    before: Samples = {}
    for number in range(1, 4):
        task.apply((1,))
        for _ in range(2):
            got = {key: value for key, value in scraped(often).items() if key[0] in names}
            assert [key for key, value in before.items() if got[key] < value] == []
            before = got
            often.sweep()
        assert got["requests_admitted_total", ("draft",)] == number
        assert got["run_seconds_count", ("draft",)] == number


def test_a_ledger_that_is_gone_is_told(often: Shop) -> None:
    assert scraped(often)["up", ()] == 1
    schema.metadata.drop_all(often.budget.store._engine)
    got = scraped(often)
    assert got["up", ()] == 0
    assert {name for name, _ in got} == {"up", "read_duration_seconds", "read_errors_total"}


def scrape(port: int, accept: str = "") -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics", headers={"Accept": accept})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    assert response.status == 200
    return body


def is_served(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_relay_serves_them(
    make_cluster: Callable[..., Cluster], embedded: dict[str, Any]
) -> None:
    cluster = make_cluster(**embedded, budget_metrics_seconds=0.01)
    cluster.budget.set("tenant:a", limit=20, unit="tokens")
    draft = cluster.task("draft")
    draft.apply((6, "a", 5))
    draft.delay(10, "a")
    with pytest.raises(BudgetExceeded):
        draft.delay(10, "a")
    port = free_port()
    relay = cluster.start("relay", "budget", "relay", "--metrics-port", str(port))
    relay.says(f"metrics are served on http://127.0.0.1:{port}/metrics")

    def look() -> Samples:
        return samples_in(families(scrape(port)))

    got = eventually(
        look, lambda got: got["relay_messages_total", ("published",)] == 1, 30, "one published"
    )
    balance = cluster.budget.balance("tenant:a")
    own = ("tenant:a", "tokens")
    figures = [got[name, own] for name in ("limit", "reserved", "spent", "available")]
    assert figures == [balance.limit, balance.reserved, balance.spent, balance.available]
    assert figures == [20, 10, 5, 5]
    assert got["charged_total", own] == 5
    assert got["requests_admitted_total", ("draft",)] == 2
    assert got["requests_refused_total", ("draft",)] == 1
    assert [got[name, ()] for name in ("up", "relays", "relay_broker_down")] == [1, 1, 0]
    assert got["relay_passes_total", ()] > 0
    opened = samples_in(open_families(scrape(port, "application/openmetrics-text; version=1.0.0")))
    assert opened.keys() == got.keys()
    assert opened["spent", own] == 5
    assert relay.terminate() == 0


def test_a_port_without_the_library_is_an_error_at_the_start(
    make_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = make_shop(budget_metrics_port=free_port())
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    service = RelayService(shop.budget)
    with pytest.raises(MissingExtra, match=r"celery-budget\[prometheus\]"):
        service.start()
    assert not service.alive
    without = RelayService(shop.budget, metrics_port=0)
    without.start()
    assert without.alive
    without.stop()


def test_whatever_the_relay_runs_in_serves_on_the_port_that_is_set(
    make_shop: Callable[..., Shop],
) -> None:
    port = free_port()
    shop = make_shop(budget_metrics_port=port)
    service = RelayService(shop.budget)
    service.start()
    try:
        eventually(lambda: is_served(port), bool, 30, "metrics are served")
        assert samples_in(families(scrape(port)))["up", ()] == 1
        assert service.alive
    finally:
        service.stop()
    assert not is_served(port)


@pytest.mark.parametrize("option", [["--metrics-port", "9464"], ["--metrics-host", "::"]])
def test_its_options_are_not_for_health(
    shop: Shop,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
) -> None:
    run = runner(capsys, monkeypatch)
    assert run(shop.app, "relay", "--health", *option).failed(2, "are not for --health")
