"""Metrics of a ledger whose requests come to every kind of end: they add up, and counters grow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget import reconcile
from celery_budget.metrics import CATALOGUE, BudgetCollector, collector
from celery_budget.reconcile import Report
from celery_budget.reconcile.figures import FAILURES
from tests.contract.support import RETURNED, Ledger
from tests.contract.test_tallies import Life
from tests.monitoring.readings import Samples, samples_in

GROW = {
    name.removeprefix("celery_budget_")
    for metric in CATALOGUE
    if metric.kind in ("counter", "histogram")
    for name in metric.series
}
#: Usage that comes late tells of what was not known when the request ended.
TAKEN_BACK = "requests_flagged_total"

#: Something of everything, tallied in between.
LIFE = """
    reserve reserve reserve reserve start start finish tally late finish reserve reserve cancel lose
    tally late refuse park start retry start finish tally late park refuse reserve start isolate
    tally
"""


@pytest.fixture
def tree(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Two tenants below one budget, read at each scrape."""
    monkeypatch.setattr(collector, "REST", 0)
    ledger.settings = replace(ledger.settings, metrics_seconds=1e-9)
    ledger.set("all", None)
    ledger.set("b", None, parent="all")
    ledger.set("c", None, parent="all")
    ledger.set("small", 10)
    return ledger


def scrape(of: BudgetCollector) -> Samples:
    return samples_in(of.collect())


def total(got: Samples, name: str, *labels: str) -> float:
    """The sum over all that have these labels last."""
    return sum(v for (n, own), v in got.items() if n == name and own[-len(labels) :] == labels)


def over_all(got: Samples, name: str) -> float:
    return sum(value for (one, _), value in got.items() if one == name)


def adds_up(got: Samples, report: Report) -> None:
    """Check that what is shown by stage and budget is what the report says of all."""
    counts = report.counts
    for name in ("admitted", "refused", "expired", "cancelled", "given_up"):
        assert over_all(got, f"requests_{name}_total") == counts[name]
    for state in ("settled", "released", "lost"):
        assert total(got, "requests_ended_total", state) == counts[state]
    for flag in ("over", "unmetered", "unreserved"):
        assert total(got, "requests_flagged_total", flag) == counts[flag]
    assert {one: total(got, "failures_total", one) for one in FAILURES} == report.failures
    for one in report.amounts:
        own = one.budget, one.unit
        shown = [got[f"{name}_total", own] for name in ("estimated", "charged", "over")]
        assert shown == [one.estimated, one.charged, one.over]
    for refused in report.refusals:
        assert got["refusals_total", (refused.budget, refused.reason)] == refused.count
    for drift in report.drift:
        labels = drift.stage, drift.estimator, drift.version, str(drift.shadow).lower()
        shown = [
            got[f"estimator_{name}_total", labels] for name in ("requests", "estimated", "actual")
        ]
        assert shown == [drift.requests, drift.estimated, drift.actual]
    assert over_all(got, "wait_seconds_count") == report.waits.count
    assert over_all(got, "run_seconds_count") == report.runs.count
    for balance in report.balances:
        own = balance.budget, balance.unit
        assert [got["reserved", own], got["spent", own]] == [balance.reserved, balance.spent]


def test_whatever_happens_counters_grow_and_add_up(tree: Ledger) -> None:
    life, kept = Life(tree, 1), BudgetCollector(tree)
    raw: Samples = {}
    shown: Samples = {}
    for verb in LIFE.split():
        getattr(life, verb)()
        # As a process shows them that has just begun, and one that goes on.
        fresh, own = scrape(BudgetCollector(tree)), scrape(kept)
        if verb == "tally":
            adds_up(fresh, reconcile.report(tree.store, tree.settings))
        for before, now in ((raw, fresh), (shown, own)):
            fell = {key for key, value in before.items() if key[0] in GROW and now[key] < value}
            assert {name for name, _ in fell} <= ({TAKEN_BACK} if now is fresh else set())
        raw, shown = fresh, own
    for outcome in ("settled", "released", "lost"):
        assert total(raw, "requests_ended_total", outcome) > 0


def test_a_flag_that_late_usage_takes_back_stays_counted(tree: Ledger) -> None:
    kept = BudgetCollector(tree)
    key = "requests_flagged_total", ("draft", "unmetered")
    _, attempt = tree.start(10)
    assert attempt.end(RETURNED)
    assert scrape(kept)[key] == 1
    attempt.record(10)
    assert scrape(kept)[key] == 1
    assert scrape(kept)["charged_total", ("b", "tokens")] == 10
