"""How long a report takes, and how much memory, where a million requests have ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from benchmarks.application import make_app
from benchmarks.histories import History, fill, filling
from benchmarks.measure import Check, Comparison, Effort, Side, compare
from benchmarks.servers import Servers
from celery_budget.integration.context import installed_on

__all__ = ["run"]

REQUESTS = 1_000_000
#: They are of so many tenants below one budget, and of so many stages; the last days' of so many.
TENANTS, STAGES, DAYS = 40, 5, 60
#: What a report may take at the most.
MOST_SECONDS, MOST_MIB = 2.0, 200
DEFAULT = "the default report"
#: What is asked, by the name of a side.
ASKED: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "by tenant": {"by": "tenant"},
    "of one budget": {"budget": "tenant:7"},
}

#: A process of its own reports once and tells how long that took, in microseconds, and its peak.
_REPORT = """
import json, resource, sys, time
from benchmarks.application import make_app
from celery_budget.integration.context import installed_on
url, asked = json.loads(sys.argv[1])
budget = installed_on(make_app(budget_database_url=url))
budget.balances()
begin = time.perf_counter()
report = budget.report(**asked)
took = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([took * 1e6, peak / 1024, report.counts["admitted"]]))
"""


def run(servers: Servers, effort: Effort) -> Comparison:
    """Time reports over a million requests, all of them tallied by the sweep."""
    url = servers.postgres.create_database()
    app = servers.enter_context(closing(make_app(budget_database_url=url)))
    budget = installed_on(app)
    servers.callback(budget.store.dispose)
    budget.init()
    budget.set("all", limit=None, unit="tokens")
    for number in range(TENANTS):
        budget.set(f"tenant:{number}", limit=10**12, parent="all")
    requests = effort.history or REQUESTS
    history = History(requests, TENANTS, STAGES, DAYS, above="all", whole=False, tallied=True)
    budget.store.dispose()
    with filling(servers.postgres):
        fill(budget.store, budget.settings.root, history)
        budget.store.dispose()
    peaks: list[float] = []
    sides = [Side(name, _block(url, asked, requests, peaks)) for name, asked in ASKED.items()]
    found = compare(
        "report",
        f"a report of {requests:,} requests, in microseconds",
        "us",
        f"one report a side, each in a process of its own, on PostgreSQL with fsync.\n"
        f"{TENANTS} tenants below one budget, {STAGES} stages, {DAYS} days, all of it tallied.",
        sides,
        effort,
    )
    took = found.sides[DEFAULT].median / 1e6
    return found.with_checks(
        Check(
            f"report: {DEFAULT}", took, "s", target=f"at most {MOST_SECONDS:g} s",
            ok=took <= MOST_SECONDS,
        ),
        Check(
            "report: memory of the process", max(peaks), "MiB", target=f"at most {MOST_MIB} MiB",
            ok=max(peaks) <= MOST_MIB,
        ),
    )  # fmt: skip


def _block(
    url: str, asked: dict[str, Any], requests: int, peaks: list[float]
) -> Callable[[], Sequence[float]]:
    def block() -> list[float]:
        told = subprocess.run(
            [sys.executable, "-c", _REPORT, json.dumps([url, asked])],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        took, peak, admitted = json.loads(told)
        if not asked.get("budget") and admitted != requests:
            raise AssertionError(f"{admitted} requests were reported, and {requests} are there")
        peaks.append(peak)
        return [took]

    return block
