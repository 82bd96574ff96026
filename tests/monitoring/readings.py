"""A reading of a ledger in which there is some of everything, made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from prometheus_client import Metric

from celery_budget.core.budgets import Balance
from celery_budget.core.lanes import Lane, Load
from celery_budget.core.tallies import RUN, WAIT, bin_of
from celery_budget.metrics import CATALOGUE
from celery_budget.metrics.reading import Reading, Sums
from celery_budget.reconcile import Drift, LaneStanding, Queued
from celery_budget.reconcile.figures import Amounts, Refusals, Waived
from celery_budget.reconcile.totals import Total

#: By name without the prefix, and the values of the labels in the order of the catalogue.
Samples = dict[tuple[str, tuple[str, ...]], float]

COUNTS = {
    "running": 5,
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


def stage(admitted: int = 20, refused: int = 3) -> Total:
    """What became of so many requests."""
    figures = {**COUNTS, "running": admitted - 15, "failed.permanent": 1}
    # One that took up to 50 ms, one that took longer than any bound.
    times = {f"{kind}{bin_of(us)}": 1 for kind in (WAIT, RUN) for us in (50_000, 90_000_000_000)}
    return Total({**figures, **times}, refused)


def amounts(name: str = "tenant:a", charged: int = 50) -> Amounts:
    return Amounts(name, "tokens", 10, 40, charged, 12, 2)


def lane(name: str = "gpu", **changes: Any) -> LaneStanding:
    full = LaneStanding(
        Lane(name, (name,)), Load(3, 30), Load(2, 20), Load(1, 10), 9.0, "asleep", False, 2.0, "why"
    )
    return replace(full, **changes)


def reading(**changes: Any) -> Reading:
    sums = Sums(
        stages={"draft": stage()},
        drift=(
            Drift("draft", "constant", "1", 10, 40, 50),
            Drift("draft", "x", "2", 1, 2, 3, shadow=True),
        ),
        amounts=(amounts(),),
        refusals=(Refusals("tenant:a", "held", 3),),
        waived=(Waived("tenant:a", "draft", "held", 4, 400),),
        seconds=1e-9,
    )
    added = {one.name: changes.pop(one.name) for one in fields(Sums) if one.name in changes}
    full = Reading(
        sums=replace(sums, **added),
        balances=(balance(),),
        open_work={"running": 2, "cancelling": 1, "unclosed": 3, "due": 4, "untold": 5},
        overdue_us=7_500_000,
        parked=(Queued("tenant:a", 3, 12.5),),
        quarantine={"oversize": 2},
        quarantine_bound=100,
        relays=(1_500_000, 100_000_000),
        lanes=(lane(),),
        first=("tenant:a",),
    )
    return replace(full, **changes)
