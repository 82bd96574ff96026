"""Every metric there is: its name, type, labels and meaning. Nothing else is ever exposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BY_NAME", "CATALOGUE", "OTHER", "PREFIX", "Kind", "Metric"]

PREFIX = "celery_budget_"

#: The label of all that have no series of their own, summed.
OTHER = "(other)"

Kind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    :ivar name: as it is queried: counters end in ``_total``, an info in ``_info``; a histogram's
        series add ``_bucket``, ``_sum`` and ``_count``.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> frozenset[str]:
        """The names of its series."""
        if self.kind != "histogram":
            return frozenset({self.name})
        return frozenset(f"{self.name}{end}" for end in ("_bucket", "_sum", "_count"))

    @property
    def all_labels(self) -> frozenset[str]:
        """Its labels, and that of a histogram's buckets."""
        return frozenset({*self.labels, "le"} if self.kind == "histogram" else self.labels)


def _gauge(name: str, help_: str, *labels: str) -> Metric:
    return Metric(f"{PREFIX}{name}", "gauge", labels, help_)


def _counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(f"{PREFIX}{name}", "counter", labels, help_)


def _histogram(name: str, help_: str, *labels: str) -> Metric:
    return Metric(f"{PREFIX}{name}", "histogram", labels, help_)


CATALOGUE: tuple[Metric, ...] = (
    # Of whoever is scraped.
    _gauge("up", "whether the ledger could be read; at 0 there is nothing else of the ledger"),
    _gauge("read_duration_seconds", "how long the last reading of the ledger took"),
    _counter("read_errors_total", "readings that failed, by the error's type, here", "error"),
    Metric(f"{PREFIX}build_info", "info", ("root", "version"), "the package's version, the root"),
    # Budgets, in their open windows.
    _gauge("limit", "the limit in force, grants included; none where unlimited", "budget", "unit"),
    _gauge("reserved", "what is held for work that has not ended", "budget", "unit"),
    _gauge("spent", "what was charged in this window", "budget", "unit"),
    _gauge("available", "limit less reserved and spent; may be negative", "budget", "unit"),
    _gauge(
        "used_ratio",
        "reserved and spent over the limit; of (other) that of the fullest; none at a limit of 0",
        "budget",
        "unit",
    ),
    _gauge("window_end_timestamp_seconds", "when the window ends, if ever", "budget", "unit"),
    _gauge("budgets", "budgets there are: open, draining, closed", "state"),
    # What became of requests, since the ledger began.
    _counter("requests_admitted_total", "requests that were admitted", "stage"),
    _counter(
        "requests_ended_total",
        "requests that have ended: settled (it ran), released (it never did), lost",
        "stage",
        "outcome",
    ),
    _counter("requests_expired_total", "requests whose time was over before they ran", "stage"),
    _counter("requests_cancelled_total", "requests that were cancelled", "stage"),
    _counter("requests_given_up_total", "requests that waited for budget for too long", "stage"),
    _counter(
        "requests_flagged_total",
        "requests with a flag: over (used more than was held), unmetered, unreserved",
        "stage",
        "flag",
    ),
    _counter("requests_refused_total", "requests that were refused", "stage"),
    _counter("refusals_total", "refusals by the budget that was short", "budget", "reason"),
    _counter(
        "waived_total",
        "requests that a budget would have refused, were they enforced",
        "budget",
        "reason",
    ),
    _counter("waived_amount_total", "what those have asked for", "budget", "reason"),
    _counter(
        "failures_total",
        "failures: refused, transient, permanent, exhausted, uncertain, expired",
        "stage",
        "category",
    ),
    _counter("charged_total", "what ended requests were charged", "budget", "unit"),
    _counter("estimated_total", "what was estimated for those requests", "budget", "unit"),
    _counter("over_total", "what of it was beyond the estimate", "budget", "unit"),
    _counter(
        "estimator_requests_total",
        "settled requests by the estimator that promised; shadow=true: that was only asked",
        "stage",
        "estimator",
        "version",
        "shadow",
    ),
    _counter(
        "estimator_estimated_total",
        "what it promised for them",
        "stage",
        "estimator",
        "version",
        "shadow",
    ),
    _counter(
        "estimator_actual_total",
        "what they used",
        "stage",
        "estimator",
        "version",
        "shadow",
    ),
    _gauge(
        "estimator_drift_ratio",
        "actual over estimated, of all of them",
        "stage",
        "estimator",
        "version",
        "shadow",
    ),
    _histogram("wait_seconds", "from when a request was due to its first start", "stage"),
    _histogram("run_seconds", "how long attempts ran, each by itself", "stage"),
    # What has still to be done.
    _gauge("open_requests", "requests that have not ended, by state", "state"),
    _gauge("cancelling_requests", "running requests that were asked to stop"),
    _gauge("unclosed_attempts", "attempts that have ended and are not closed"),
    _gauge("untold_results", "results that have still to be stored"),
    _gauge("outbox_messages", "messages that wait to be published: due, held by a lane", "state"),
    _gauge("outbox_overdue_seconds", "for how long the oldest due message has waited for a relay"),
    _gauge("parked_requests", "what waits for a budget", "budget"),
    _gauge("parked_oldest_seconds", "for how long the oldest of it waits", "budget"),
    _gauge("quarantine_entries", "what is in quarantine", "reason"),
    _gauge("quarantine_limit", "how much of what failed for good is kept (budget_max_quarantine)"),
    _gauge("relays", "relays that were seen in the last 15 seconds"),
    _gauge("relay_silence_seconds", "how long ago a relay was seen last; none if never this hour"),
    # Lanes.
    _gauge("lane_jobs", "jobs of a lane: waiting in it, queued, running", "lane", "state"),
    _gauge("lane_units", "what those weigh", "lane", "state"),
    _gauge("lane_oldest_seconds", "for how long the oldest that it holds has been due", "lane"),
    _gauge(
        "lane_blocked",
        "whether it lets go nothing now, by why: paused, asleep, running, queued (its limits)",
        "lane",
        "why",
    ),
    _gauge("lane_awake", "whether its workers answered last; none where nobody asked", "lane"),
    # The relay of this process, if it has one.
    _counter(
        "relay_messages_total",
        "messages of this process' relay: published, failed, released, quarantined",
        "outcome",
    ),
    _counter("relay_passes_total", "passes over the outbox"),
    _counter("relay_pass_seconds_total", "how long they took"),
    _counter("relay_errors_total", "passes that an error broke off"),
    _gauge("relay_broker_down", "whether no broker could be reached in the last pass"),
)

BY_NAME = {metric.name: metric for metric in CATALOGUE}
