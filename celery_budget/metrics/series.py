"""As which series a reading is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from celery_budget.core.budgets import Balance
from celery_budget.core.retries import ENDED as ENDED_FOR_GOOD
from celery_budget.core.tallies import RUN, WAIT, top_of
from celery_budget.metrics.catalogue import OTHER
from celery_budget.metrics.families import Families, Labels
from celery_budget.metrics.reading import Reading, Sums
from celery_budget.reconcile import Drift, LaneStanding
from celery_budget.reconcile.totals import Total

__all__ = ["BOUNDS", "Series"]

#: A relay is seen every few seconds, unless its broker has stalled or its ledger is down.
SEEN_US = 15_000_000
#: Bounds of waits and runs, in seconds.
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400)
#: Of the states of open work; what else is open has metrics of its own.
OPEN = ("planned", "reserved", "published", "running", "waiting")
ENDED = ("settled", "released", "lost")
FLAGS = ("over", "unmetered", "unreserved")
COUNTS = ("admitted", "expired", "cancelled", "given_up", "refused")
STATES = ("open", "draining", "closed")
WHYS = ("paused", "asleep", "running", "queued")
UNPUBLISHABLE = ("unroutable", "oversize", "undecodable")


class Series:
    """Adds readings, one after another: what has had a series of its own keeps it.

    Of balances those have their own that are fullest, at each reading anew, since what matters of
    them is who is short. Of counters those budgets that were made first, for ever.

    :param most: how many budgets, stages, estimators and lanes have their own, of each.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._budgets = Labels(most)
        self._stages = Labels(most)
        self._lanes = Labels(most)
        self._estimators = Labels(most)

    def add_to(self, families: Families, reading: Reading) -> None:
        """Add all that was read."""
        self._budgets.keep(reading.first)
        self._lanes.keep(sorted(one.lane.name for one in reading.lanes))
        self._add_balances(families, reading.balances)
        self._add_requests(families, reading.sums.stages)
        self._add_amounts(families, reading.sums)
        self._add_estimators(families, reading.sums.drift)
        self._add_open(families, reading)
        for lane in reading.lanes:
            self._add_lane(families, lane)

    def _add_balances(self, families: Families, balances: Sequence[Balance]) -> None:
        for state in STATES:
            families.add("budgets", sum(one.state == state for one in balances), state)
        open_ones = [one for one in balances if one.state != "closed"]
        fullest = sorted(open_ones, key=_fullness, reverse=True)
        labels = Labels(self._most).keep(one.budget for one in fullest)
        for one in open_ones:
            own = labels.of(one.budget), one.unit
            families.add("reserved", one.reserved, *own)
            families.add("spent", one.spent, *own)
            if one.limit is not None and one.available is not None:
                families.add("limit", one.limit, *own)
                families.add("available", one.available, *own)
                if one.limit:
                    families.most("used_ratio", (one.reserved + one.spent) / one.limit, *own)
            if one.end_us is not None and own[0] != OTHER:
                families.add("window_end_timestamp_seconds", one.end_us / 1_000_000, *own)

    def _add_requests(self, families: Families, stages: Mapping[str, Total]) -> None:
        counts = {name: total.counts() for name, total in stages.items()}
        self._stages.keep(sorted(counts, key=lambda name: (-counts[name]["admitted"], name)))
        for name, total in stages.items():
            stage, of = self._stages.of(name), counts[name]
            for one in COUNTS:
                families.add(f"requests_{one}_total", of[one], stage)
            for outcome in ENDED:
                families.add("requests_ended_total", of[outcome], stage, outcome)
            for flag in FLAGS:
                families.add("requests_flagged_total", of[flag], stage, flag)
            for category, count in total.failures().items():
                families.add("failures_total", count, stage, category)
            for metric, kind in (("wait_seconds", WAIT), ("run_seconds", RUN)):
                bins = families.bins(metric, BOUNDS, stage)
                for figure, count in total.figures.items():
                    if figure.startswith(kind):
                        bins.add(top_of(int(figure.removeprefix(kind))), count)

    def _add_amounts(self, families: Families, sums: Sums) -> None:
        for refused in sums.refusals:
            budget = self._budgets.of(refused.budget)
            families.add("refusals_total", refused.count, budget, refused.reason)
        for waived in sums.waived:
            named = self._budgets.of(waived.budget), waived.reason
            families.add("waived_total", waived.count, *named)
            families.add("waived_amount_total", waived.amount, *named)
        for amounts in sums.amounts:
            own = self._budgets.of(amounts.budget), amounts.unit
            families.add("charged_total", amounts.charged, *own)
            families.add("estimated_total", amounts.estimated, *own)
            families.add("over_total", amounts.over, *own)

    def _add_estimators(self, families: Families, drift: Sequence[Drift]) -> None:
        totals: dict[tuple[str, ...], list[int]] = {}
        busiest = sorted(drift, key=lambda one: (-one.requests, _identity(one)))
        self._estimators.keep(map(_identity, busiest))
        for one in drift:
            labels: tuple[str, ...] = (one.stage, one.estimator, one.version)
            if self._estimators.of(_identity(one)) == OTHER:
                labels = (OTHER, OTHER, OTHER)
            labels = (*labels, str(one.shadow).lower())
            families.add("estimator_requests_total", one.requests, *labels)
            families.add("estimator_estimated_total", one.estimated, *labels)
            families.add("estimator_actual_total", one.actual, *labels)
            found = totals.setdefault(labels, [0, 0])
            found[0] += one.estimated
            found[1] += one.actual
        for labels, (estimated, actual) in totals.items():
            if estimated:
                families.add("estimator_drift_ratio", actual / estimated, *labels)

    def _add_open(self, families: Families, reading: Reading) -> None:
        work = reading.open_work
        for state in OPEN:
            families.add("open_requests", work.get(state, 0), state)
        families.add("cancelling_requests", work.get("cancelling", 0))
        families.add("unclosed_attempts", work.get("unclosed", 0))
        families.add("untold_results", work.get("untold", 0))
        for state in ("due", "held"):
            families.add("outbox_messages", work.get(state, 0), state)
        families.add("outbox_overdue_seconds", reading.overdue_us / 1_000_000)
        longest = sorted(reading.parked, key=lambda one: one.oldest_seconds, reverse=True)
        labels = Labels(self._most).keep(one.budget for one in longest)
        for one in reading.parked:
            budget = labels.of(one.budget)
            families.add("parked_requests", one.requests, budget)
            families.most("parked_oldest_seconds", one.oldest_seconds, budget)
        for reason in (*UNPUBLISHABLE, *ENDED_FOR_GOOD):
            families.add("quarantine_entries", 0, reason)
        for reason, count in reading.quarantine.items():
            families.add("quarantine_entries", count, reason)
        families.add("quarantine_limit", reading.quarantine_bound)
        families.add("relays", sum(age_us <= SEEN_US for age_us in reading.relays))
        if reading.relays:
            families.add("relay_silence_seconds", min(reading.relays) / 1_000_000)

    def _add_lane(self, families: Families, one: LaneStanding) -> None:
        name = self._lanes.of(one.lane.name)
        for state in ("waiting", "queued", "running"):
            load = getattr(one, state)
            families.add("lane_jobs", load.jobs, name, state)
            families.add("lane_units", load.units, name, state)
        families.most("lane_oldest_seconds", one.oldest_seconds, name)
        for why in WHYS:
            families.most("lane_blocked", one.why == why, name, why)
        if one.awake is not None:
            families.most("lane_awake", one.awake, name)


def _fullness(one: Balance) -> tuple[float, int, str]:
    """Order by the share of the limit that is used, then by how much that is."""
    used = one.reserved + one.spent
    return (used / one.limit if one.limit else 0.0, used, one.budget)


def _identity(one: Drift) -> str:
    return json.dumps([one.stage, one.estimator, one.version, one.shadow])
