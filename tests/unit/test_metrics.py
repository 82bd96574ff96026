"""The collector for Prometheus, on readings made by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from celery_budget.core.tallies import bin_of
from celery_budget.errors import MissingExtra, StoreError
from celery_budget.metrics import CATALOGUE, BudgetCollector, Passes, collector, exposition
from celery_budget.metrics.families import Families
from celery_budget.metrics.reading import Reading, Sums
from celery_budget.metrics.series import BOUNDS
from celery_budget.reconcile import Drift, Queued
from celery_budget.reconcile.totals import Total
from celery_budget.relay import Relayed
from celery_budget.settings import Settings
from tests.monitoring.readings import (
    Samples,
    amounts,
    balance,
    lane,
    reading,
    samples_in,
    stage,
)


class Ledger:
    """What is read, or raised, by each reading."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = Settings("sqlite://", metrics_seconds=1e-9)
        self.reading = SimpleNamespace()
        self.next: Reading | Exception = reading()
        self.on_look: Callable[[], object] = lambda: None
        self.looks = 0
        self.taken_over: list[Sums | None] = []
        monkeypatch.setattr(collector, "look", self._look)
        monkeypatch.setattr(collector, "REST", 0)

    def _look(self, store: Any, settings: Any, sums: Sums | None) -> Reading:
        self.looks += 1
        self.taken_over.append(sums)
        self.on_look()
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    def set(self, **settings: Any) -> None:
        self.settings = Settings("sqlite://", **{"metrics_seconds": 1e-9, **settings})


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return Ledger(monkeypatch)


def samples(of: BudgetCollector, accept: str = "") -> Samples:
    """Every sample of a scrape."""
    body, content_type = of.exposition(accept)
    parse = open_families if "openmetrics" in content_type else families
    return samples_in(parse(body.decode()))


def test_what_is_exposed_is_what_the_catalogue_lists(ledger: Ledger) -> None:
    passes = Passes()
    passes.count(0.0, Relayed(published=1))
    scraped = BudgetCollector(ledger, passes)
    ledger.next = StoreError("down")
    scraped.exposition()
    ledger.next = reading()
    found: dict[str, set[frozenset[str]]] = {}
    for family in families(scraped.exposition()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).add(frozenset(sample.labels))
    wanted: dict[str, set[frozenset[str]]] = {}
    for metric in CATALOGUE:
        for name in metric.series:
            labels = metric.all_labels if name.endswith("_bucket") else frozenset(metric.labels)
            wanted[name] = {labels}
    assert found == wanted


def test_names_and_types_follow_the_conventions() -> None:
    for metric in CATALOGUE:
        assert metric.name.startswith("celery_budget_")
        assert metric.name.endswith("_total") is (metric.kind == "counter")
        assert not {"id", "task_id", "request_id", "le", "quantile"} & set(metric.labels)
        assert not metric.name.endswith(("_milliseconds", "_ms", "_us"))


def test_figures_are_those_of_the_ledger(ledger: Ledger) -> None:
    got = samples(BudgetCollector(ledger))
    own = ("tenant:a", "tokens")
    assert got["up", ()] == 1
    assert [got[name, own] for name in ("limit", "reserved", "spent", "available")] == [
        100, 10, 20, 70
    ]  # fmt: skip
    assert got["used_ratio", own] == pytest.approx(0.3)
    assert got["window_end_timestamp_seconds", own] == 1_700_000_000.5
    assert [got["budgets", (state,)] for state in ("open", "draining", "closed")] == [1, 0, 0]
    assert got["requests_admitted_total", ("draft",)] == 20
    assert got["requests_ended_total", ("draft", "lost")] == 1
    assert got["requests_flagged_total", ("draft", "unmetered")] == 2
    assert got["requests_expired_total", ("draft",)] == 2
    assert got["refusals_total", ("tenant:a", "held")] == 3
    assert got["waived_total", ("tenant:a", "held")] == 4
    assert got["waived_amount_total", ("tenant:a", "held")] == 400
    assert got["failures_total", ("draft", "permanent")] == 1
    assert got["failures_total", ("draft", "refused")] == 3
    assert [got[f"{name}_total", own] for name in ("estimated", "charged", "over")] == [40, 50, 12]
    assert got["estimator_actual_total", ("draft", "constant", "1", "false")] == 50
    assert got["estimator_drift_ratio", ("draft", "constant", "1", "false")] == 1.25
    assert got["estimator_drift_ratio", ("draft", "x", "2", "true")] == 1.5
    assert got["open_requests", ("running",)] == 2
    assert got["open_requests", ("planned",)] == 0
    assert [got[f"{name}", ()] for name in ("cancelling_requests", "unclosed_attempts")] == [1, 3]
    assert [got["outbox_messages", (state,)] for state in ("due", "held")] == [4, 0]
    assert [got[name, ()] for name in ("untold_results", "outbox_overdue_seconds")] == [5, 7.5]
    assert got["parked_requests", ("tenant:a",)] == 3
    assert got["parked_oldest_seconds", ("tenant:a",)] == 12.5
    assert got["quarantine_entries", ("oversize",)] == 2
    assert got["quarantine_entries", ("failed",)] == 0
    assert got["quarantine_limit", ()] == 100
    assert [got[name, ()] for name in ("relays", "relay_silence_seconds")] == [1, 1.5]
    assert [got["lane_jobs", ("gpu", state)] for state in ("waiting", "queued", "running")] == [
        3, 2, 1
    ]  # fmt: skip
    assert got["lane_units", ("gpu", "waiting")] == 30
    assert got["lane_blocked", ("gpu", "asleep")] == 1
    assert got["lane_blocked", ("gpu", "paused")] == 0
    assert [got[f"lane_{name}", ("gpu",)] for name in ("oldest_seconds", "awake")] == [9, 0]


def test_times_are_counted_up_to_each_bound(ledger: Ledger) -> None:
    got = samples(BudgetCollector(ledger))
    for name in ("wait_seconds", "run_seconds"):
        buckets = {
            le: got[f"{name}_bucket", ("draft", le)] for le in ("0.05", "0.1", "86400.0", "+Inf")
        }
        assert buckets == {"0.05": 0, "0.1": 1, "86400.0": 1, "+Inf": 2}
        assert got[f"{name}_count", ("draft",)] == 2
        assert 90_000.05 <= got[f"{name}_sum", ("draft",)] <= 90_000.05 * 1.05


def test_a_bucket_holds_no_time_above_its_bound_but_those_beside_it(ledger: Ledger) -> None:
    """The longest time of a bin decides, at most a 32nd above the true one."""
    for bound in BOUNDS:
        us = int(bound * 1_000_000)
        figures = {f"run.{bin_of(us // 2)}": 1, f"run.{bin_of(us * 33 // 32 + 1)}": 1}
        ledger.next = reading(stages={"s": Total(figures)})
        got = samples(BudgetCollector(ledger))
        assert got["run_seconds_bucket", ("s", str(float(bound)))] == 1


def test_what_has_no_value_is_not_shown(ledger: Ledger) -> None:
    ledger.next = reading(
        balances=(
            balance("none", limit=None, end_us=None),
            balance("blocked", limit=0),
            balance("over", spent=150),
            balance("closed", state="closed"),
        ),
        relays=(),
        lanes=(lane(awake=None),),
    )
    got = samples(BudgetCollector(ledger))
    shown = {(name, labels[0]) for name, labels in got if labels[1:] == ("tokens",)}
    assert ("spent", "none") in shown
    for name in ("limit", "available", "used_ratio", "window_end_timestamp_seconds"):
        assert (name, "none") not in shown
    assert ("limit", "blocked") in shown
    assert ("used_ratio", "blocked") not in shown
    assert got["used_ratio", ("over", "tokens")] == 1.6
    assert got["available", ("over", "tokens")] == -60
    assert "closed" not in {name for _, name in shown}
    assert got["budgets", ("closed",)] == 1
    assert got["relays", ()] == 0
    assert ("relay_silence_seconds", ()) not in got
    assert ("lane_awake", ("gpu",)) not in got


def test_of_many_budgets_the_fullest_have_their_own_series(ledger: Ledger) -> None:
    ledger.set(metrics_labels=2)
    balances = [balance(f"t{n}", spent=n * 10, reserved=0) for n in range(6)]
    ledger.next = reading(
        balances=(*balances, balance("other unit", unit="usd", spent=1, reserved=0))
    )
    scraped = BudgetCollector(ledger)
    got = samples(scraped)
    spent = {labels: value for (name, labels), value in got.items() if name == "spent"}
    assert spent == {
        ("t5", "tokens"): 50,
        ("t4", "tokens"): 40,
        ("(other)", "tokens"): 60,
        ("(other)", "usd"): 1,
    }
    assert got["used_ratio", ("(other)", "tokens")] == 0.3
    assert got["limit", ("(other)", "tokens")] == 400
    assert ("window_end_timestamp_seconds", ("(other)", "tokens")) not in got
    ledger.next = reading(balances=(*balances, balance("t9", spent=100)))
    assert ("spent", ("t9", "tokens")) in samples(scraped)


def test_a_counter_stays_in_its_series(ledger: Ledger) -> None:
    ledger.set(metrics_labels=2)

    def read(*charged: int, first: tuple[str, ...] = ("t0", "t1")) -> Reading:
        each = tuple(amounts(f"t{n}", one) for n, one in enumerate(charged))
        stages = {f"s{n}": stage(15 + one) for n, one in enumerate(charged)}
        return reading(amounts=each, stages=stages, first=first)

    scraped = BudgetCollector(ledger)
    ledger.next = read(1, 2, 3)
    before = samples(scraped)
    budgets, stages = ("t0", "t1", "(other)"), ("s2", "s1", "(other)")
    assert [before["charged_total", (one, "tokens")] for one in budgets] == [1, 2, 3]
    assert [before["requests_admitted_total", (one,)] for one in stages] == [18, 17, 16]
    # Others come first now, by every rule.
    ledger.next = read(9, 2, 4, 100, first=("t3", "t2"))
    after = samples(scraped)
    assert [after["charged_total", (one, "tokens")] for one in budgets] == [9, 2, 104]
    assert [after["requests_admitted_total", (one,)] for one in stages] == [19, 17, 139]
    assert ("charged_total", ("t3", "tokens")) not in after


def test_of_many_lanes_estimators_and_parked_the_others_are_summed(ledger: Ledger) -> None:
    ledger.set(metrics_labels=1)
    ledger.next = reading(
        drift=tuple(Drift("s", "e", str(n), n, 10, n) for n in range(1, 4)),
        parked=(Queued("a", 1, 5.0), Queued("b", 2, 9.0), Queued("c", 3, 7.0)),
        lanes=(lane("a", why=None), lane("b", why="paused", oldest_seconds=1.0), lane("c")),
    )
    got = samples(BudgetCollector(ledger))
    other = ("(other)", "(other)", "(other)", "false")
    assert got["estimator_requests_total", ("s", "e", "3", "false")] == 3
    assert [got[f"estimator_{name}_total", other] for name in ("requests", "estimated")] == [3, 20]
    assert got["estimator_drift_ratio", other] == 0.15
    assert got["parked_requests", ("(other)",)] == 4
    assert got["parked_oldest_seconds", ("b",)] == 9
    assert got["parked_oldest_seconds", ("(other)",)] == 7
    assert got["lane_jobs", ("(other)", "waiting")] == 6
    assert got["lane_oldest_seconds", ("(other)",)] == 9
    assert got["lane_blocked", ("a", "paused")] == 0
    assert got["lane_blocked", ("(other)", "paused")] == 1


def test_counters_do_not_fall(ledger: Ledger) -> None:
    scraped = BudgetCollector(ledger)
    assert samples(scraped)["charged_total", ("tenant:a", "tokens")] == 50
    for charged, shown in ((45, 50), (52, 52)):
        ledger.next = reading(amounts=(amounts(charged=charged),))
        assert samples(scraped)["charged_total", ("tenant:a", "tokens")] == shown
    # What is no counter does.
    ledger.next = reading(balances=(balance(spent=0),))
    assert samples(scraped)["spent", ("tenant:a", "tokens")] == 0


NAMES = ('quote"', "back\\slash", "line\u2028sep", "\\n", "{}", "(other)", "ünï", "a,b=c", " ", "#")


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_hostile_names_are_read_as_they_are(ledger: Ledger, accept: str) -> None:
    ledger.next = reading(
        balances=tuple(balance(name) for name in NAMES), stages={name: stage() for name in NAMES}
    )
    got = samples(BudgetCollector(ledger), accept)
    assert {labels[0] for name, labels in got if name == "spent"} == set(NAMES)
    assert {labels[0] for name, labels in got if name == "requests_admitted_total"} == set(NAMES)


def test_a_budget_called_other_is_summed_with_the_others(ledger: Ledger) -> None:
    ledger.set(metrics_labels=2)
    names = ("(other)", "a", "b")
    ledger.next = reading(balances=tuple(balance(name) for name in names))
    assert samples(BudgetCollector(ledger))["spent", ("(other)", "tokens")] in (20, 40)


def test_a_ledger_that_is_down_is_told_and_no_scrape_fails(ledger: Ledger) -> None:
    scraped = BudgetCollector(ledger)
    ledger.next = StoreError("the database does not answer")
    got = samples(scraped)
    assert got.pop(("read_duration_seconds", ())) >= 0
    assert got == {("up", ()): 0, ("read_errors_total", ("StoreError",)): 1}
    ledger.next = ZeroDivisionError()
    assert samples(scraped)["read_errors_total", ("ZeroDivisionError",)] == 1
    ledger.next = reading()
    got = samples(scraped)
    assert (got["up", ()], got["read_errors_total", ("StoreError",)]) == (1, 1)
    assert got["requests_admitted_total", ("draft",)] == 20


def test_settings_that_cannot_be_read_fail_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        reading = None

        @property
        def settings(self) -> Any:
            raise StoreError("no settings")

    assert samples(BudgetCollector(Broken()))["up", ()] == 0  # type: ignore[arg-type]


def test_one_reading_answers_all_scrapes_for_a_while(ledger: Ledger) -> None:
    ledger.set(metrics_seconds=1000.0)
    scraped = BudgetCollector(ledger)
    first = scraped.exposition()
    assert scraped.exposition() == first
    assert ledger.looks == 1
    ledger.next = StoreError("down")
    other = BudgetCollector(ledger)
    assert [samples(other)["up", ()] for _ in range(3)] == [0, 0, 0]
    assert ledger.looks == 2


def test_a_reading_that_takes_long_is_seldom(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "REST", 1e9)
    scraped = BudgetCollector(ledger)
    assert scraped.exposition() == scraped.exposition()
    assert ledger.looks == 1


def test_what_takes_long_to_add_up_is_taken_over(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "REST", 1)
    scraped = BudgetCollector(ledger)
    ledger.next = reading(seconds=1000.0)
    scraped.exposition()
    assert ledger.taken_over == [None]
    sums = ledger.next.sums
    ledger.next = replace(reading(balances=(balance(spent=33),)), sums=sums)
    # How long the sums took does not keep the rest from being read.
    assert samples(scraped)["spent", ("tenant:a", "tokens")] == 33
    assert ledger.taken_over == [None, sums]
    # After an outage nothing is taken over.
    ledger.next = StoreError("down")
    scraped.exposition()
    ledger.next = reading()
    while samples(scraped)["up", ()] == 0:
        pass
    assert ledger.taken_over[:2] + ledger.taken_over[-1:] == [None, sums, None]


def test_one_reading_at_a_time_is_made(ledger: Ledger) -> None:
    ledger.set(metrics_seconds=1000.0)
    scraped = BudgetCollector(ledger)
    reads, goes_on = threading.Event(), threading.Event()
    ledger.on_look = lambda: (reads.set(), goes_on.wait(30))
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda: found.append(samples(scraped)["up", ()])) for _ in range(4)
    ]
    threads[0].start()
    assert reads.wait(30)
    for thread in threads[1:]:
        thread.start()
    goes_on.set()
    for thread in threads:
        thread.join(30)
    assert (found, ledger.looks) == ([1, 1, 1, 1], 1)


def test_a_reading_that_hangs_holds_up_no_scrape(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    scraped = BudgetCollector(ledger)
    assert samples(scraped)["up", ()] == 1
    monkeypatch.setattr(collector, "WAIT_SECONDS", 0.01)
    goes_on = threading.Event()
    ledger.on_look = lambda: goes_on.wait(30)
    for _ in range(2):
        got = samples(scraped)
        assert got.pop(("read_duration_seconds", ())) >= 0
        assert got == {("up", ()): 0}
    assert ledger.looks == 2
    monkeypatch.setattr(collector, "WAIT_SECONDS", 30)
    goes_on.set()
    assert samples(scraped)["up", ()] == 1


def test_after_a_long_failure_it_is_tried_again_soon(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "REST", 1e9)
    scraped = BudgetCollector(ledger)
    ledger.next = StoreError("no answer in ten seconds")
    assert samples(scraped)["up", ()] == 0
    ledger.next = reading()
    assert samples(scraped)["up", ()] == 1


def test_registering_reads_nothing_and_names_all(ledger: Ledger) -> None:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(BudgetCollector(ledger))
    assert ledger.looks == 0
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(BudgetCollector(ledger))
    assert registry.get_sample_value("celery_budget_up") == 1


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("application/openmetrics-text; version=1.0.0,text/plain;q=0.5", "application/openmetrics"),
        ("application/openmetrics-text; version=what", "text/plain"),
        ("text/plain; version=1.x", "text/plain"),
        ("\x00;;;,,version=", "text/plain"),
    ],
)
def test_the_scrape_says_which_format_it_wants(
    ledger: Ledger, accept: str, content_type: str
) -> None:
    body, found = exposition(ledger, accept)
    assert found.startswith(content_type)
    assert body.endswith(b"# EOF\n") is ("openmetrics" in content_type)


def test_every_answer_comes_from_one_collector(ledger: Ledger) -> None:
    ledger.set(metrics_seconds=1000.0)
    assert exposition(ledger) == exposition(ledger)
    assert ledger.looks == 1


def test_without_the_library_the_extra_is_named(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for make in (BudgetCollector, exposition):
        with pytest.raises(MissingExtra, match=r"celery-budget\[prometheus\]"):
            make(ledger)


def test_the_library_is_imported_when_it_is_first_needed() -> None:
    code = "import celery_budget.cli, celery_budget.metrics, sys; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "celery_budget.metrics.collector" in done.stdout.split()
    assert "prometheus_client" not in done.stdout.split()


def test_a_relay_counts_its_passes(ledger: Ledger) -> None:
    passes = Passes()
    assert ("relay_passes_total", ()) not in samples(BudgetCollector(ledger))
    passes.count(0.0, Relayed(published=2, failed=1, quarantined=1, broker_down=True))
    passes.count(0.0, None)
    got = samples(BudgetCollector(ledger, passes))
    outcomes = ("published", "failed", "released", "quarantined")
    assert [got["relay_messages_total", (one,)] for one in outcomes] == [2, 1, 0, 1]
    assert [got[f"relay_{name}", ()] for name in ("passes_total", "errors_total")] == [2, 1]
    assert got["relay_broker_down", ()] == 1
    assert got["relay_pass_seconds_total", ()] > 0


def test_nothing_is_exposed_that_is_not_in_the_catalogue() -> None:
    with pytest.raises(KeyError):
        Families().add("invented", 1)
    with pytest.raises(ValueError, match="has the labels"):
        Families().add("spent", 1, "tenant:a")
