"""A reading of a ledger in which there is some of everything, made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from prometheus_client import Metric

from celery_budget.core.budgets import Balance
from celery_budget.core.lanes import Lane, Load
from celery_budget.metrics import CATALOGUE
from celery_budget.metrics.reading import Reading
from celery_budget.reconcile import Drift, LaneStanding, Queued, RelaySeen, Report
from celery_budget.reconcile.figures import FAILURES, Amounts, Group, Refusals

#: By name without the prefix, and the values of the labels in the order of the catalogue.
Samples = dict[tuple[str, tuple[str, ...]], float]

COUNTS = {
    "admitted": 20,
    "refused": 3,
    "settled": 10,
    "released": 4,
    "lost": 1,
    "expired": 2,
    "cancelled": 1,
    "given_up": 1,
    "over": 1,
    "unmetered": 2,
    "unreserved": 1,
}


def samples_in(families: Iterable[Metric]) -> Samples:
    """Every sample of a scrape; none of them twice."""
    order = {name: metric.labels for metric in CATALOGUE for name in metric.series}
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in order[sample.name])
            if "le" in sample.labels:
                labels += (sample.labels["le"],)
            key = sample.name.removeprefix("celery_budget_"), labels
            assert key not in found
            found[key] = sample.value
    return found


def balance(name: str = "tenant:a", **changes: Any) -> Balance:
    return replace(Balance(name, "tokens", 100, 10, 20, end_us=1_700_000_000_500_000), **changes)


def group(key: str = "draft", **counts: int) -> Group:
    return Group(key, {**COUNTS, **counts}, dict.fromkeys(FAILURES, 1))


def amounts(name: str = "tenant:a", charged: int = 50) -> Amounts:
    return Amounts(name, "tokens", 10, 40, charged, 12, 2)


def report(**changes: Any) -> Report:
    full = Report(
        balances=(balance(),),
        counts=COUNTS,
        drift=(
            Drift("draft", "constant", "1", 10, 40, 50),
            Drift("draft", "x", "2", 1, 2, 3, True),
        ),
        relays=(RelaySeen("web-1", 7, 1, 2, 1.5, True), RelaySeen("web-2", 8, 1, 2, 100.0, False)),
        open_work={
            "running": 2,
            "waiting": 1,
            "cancelling": 1,
            "unclosed": 3,
            "due": 4,
            "untold": 5,
        },
        overdue_seconds=7,
        quarantine={"oversize": 2},
        quarantine_bound=100,
        parked=(Queued("tenant:a", 3, 12.5),),
        refusals=(Refusals("tenant:a", "held", 3),),
        amounts=(amounts(),),
        groups=(group(),),
    )
    return replace(full, **changes)


def lane(name: str = "gpu", **changes: Any) -> LaneStanding:
    full = LaneStanding(
        Lane(name, (name,)), Load(3, 30), Load(2, 20), Load(1, 10), 9.0, "asleep", False, 2.0, "why"
    )
    return replace(full, **changes)


def reading(**changes: Any) -> Reading:
    full = Reading(report(), (lane(),), ("tenant:a",))
    return replace(full, **changes)
