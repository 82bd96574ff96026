"""How long a report takes, and how much memory, where a million requests have ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import sqlalchemy as sa

from benchmarks.application import make_app
from benchmarks.measure import Comparison, Effort, Side, compare
from benchmarks.servers import Servers
from celery_budget.integration.context import installed_on
from celery_budget.store import Store, tallies

__all__ = ["fill", "run"]

REQUESTS = 1_000_000
#: They are of so many tenants below one budget, and of so many stages; the last days' of so many.
TENANTS, STAGES, DAYS = 40, 5, 60
#: Tallied at a time: more than by the sweep, which lets others at the rows in between.
BATCH = 5000
#: What is asked, by the name of a side.
ASKED: dict[str, dict[str, Any]] = {
    "the default report": {},
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
    fill(budget.store, budget.settings.root, REQUESTS)
    while budget.store.run(tallies.roll, budget.settings.root, BATCH, 0):
        pass
    with budget.store.apart() as connection:
        connection.execute(sa.text("VACUUM ANALYZE"))
    peaks: list[float] = []
    sides = [Side(name, _block(url, asked, peaks)) for name, asked in ASKED.items()]
    found = compare(
        "report",
        f"a report of {REQUESTS:,} requests, in microseconds",
        "us",
        f"one report a side, each in a process of its own, on PostgreSQL with fsync.\n"
        f"{TENANTS} tenants below one budget, {STAGES} stages, {DAYS} days, all of it tallied.",
        sides,
        effort,
    )
    print(f"a process that reports took at most {max(peaks):.0f} MiB of memory in all", flush=True)
    return found


def _block(url: str, asked: dict[str, Any], peaks: list[float]) -> Callable[[], Sequence[float]]:
    def block() -> list[float]:
        told = subprocess.run(
            [sys.executable, "-c", _REPORT, json.dumps([url, asked])],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        took, peak, admitted = json.loads(told)
        if not asked.get("budget") and admitted != REQUESTS:
            raise AssertionError(f"{admitted} requests were reported, and {REQUESTS} are there")
        peaks.append(peak)
        return [took]

    return block


def fill(store: Store, root: str, requests: int) -> None:
    """Write requests that have ended, with lines and attempts, as if they had been run.

    Balances and journals stay as they are: it is not about them.
    """
    given = {
        "root": root, "requests": requests, "tenants": TENANTS, "stages": STAGES, "days": DAYS
    }  # fmt: skip
    with store.apart() as connection:
        for statement in _FILL:
            connection.execute(sa.text(statement), given)


_FILL = (
    """
    INSERT INTO budget_reservations (
        root, reservation_id, owner, request_id, nesting, task_id, task_name, stage, fingerprint,
        opaque, estimator, estimator_version, state, retries, attempts, deliveries, unreserved,
        unmetered, over, created_us, ended_us)
    SELECT :root, CAST(lpad(to_hex(n), 32, '0') AS uuid), 'tenant:' || n % :tenants, 'r' || n, 0,
           't' || n, 'shop.task' || n % :stages, 'stage' || n % :stages, '1:x', false, 'words', '1',
           CASE n % 50 WHEN 0 THEN 'released' WHEN 1 THEN 'lost' ELSE 'settled' END,
           0, CAST(n % 50 > 0 AS integer), CAST(n % 50 > 0 AS integer), false, n % 20 = 2,
           n % 10 = 3, at_us, at_us + 60000000
      FROM generate_series(1, :requests) AS n,
           LATERAL (SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)
                           - 120000000 - (CAST(:requests AS bigint) - n)
                             * (CAST(:days AS bigint) * 86400000000 / :requests) AS at_us) AS t
    """,
    """
    INSERT INTO budget_lines (
        root, reservation_id, line, budget, window_us, stripe, charge, unit, estimate, reserved,
        used, settled)
    SELECT r.root, r.reservation_id, l.line, CASE l.line WHEN 0 THEN r.owner ELSE 'all' END, 0, 0,
           'used', 'tokens', 1000, 0, used, CASE r.state WHEN 'released' THEN 0 ELSE used END
      FROM budget_reservations r, generate_series(0, 1) AS l (line),
           LATERAL (SELECT 500 + get_byte(uuid_send(r.reservation_id), 15) * 4 AS used) AS u
     WHERE r.root = :root
    """,
    """
    INSERT INTO budget_attempts (
        root, reservation_id, attempt, claim_id, retries, worker, boot_id, late_ack, started_us,
        ended_us, outcome, replays)
    SELECT r.root, r.reservation_id, 1, r.reservation_id, 0, 'w/1', r.reservation_id, true,
           r.created_us + waited, r.created_us + waited + lasted,
           CASE WHEN r.state = 'lost' THEN 'uncertain' WHEN tail % 9 = 0 THEN 'raised'
                ELSE 'returned' END, 0
      FROM budget_reservations r,
           LATERAL (SELECT get_byte(uuid_send(r.reservation_id), 15) AS tail) AS t,
           LATERAL (SELECT CAST(1000 * exp(tail / 40.0) AS bigint) AS waited,
                           CAST(20000 * exp((255 - tail) / 50.0) AS bigint) AS lasted) AS d
     WHERE r.root = :root AND r.state <> 'released'
    """,
    "ANALYZE",
)
