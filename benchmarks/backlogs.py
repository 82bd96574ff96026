"""How much memory relay and recovery need, whatever is open."""

from __future__ import annotations

import json
import logging
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

import sqlalchemy as sa

from benchmarks.application import fund, make_app
from benchmarks.histories import filling
from benchmarks.measure import Check, Comparison, Effort, Side, compare
from benchmarks.processes import talking
from benchmarks.servers import Servers
from celery_budget import inquiry
from celery_budget.integration.alerts import alerting_of
from celery_budget.integration.context import installed_on
from celery_budget.integration.inquiries import TaskInquiries
from celery_budget.integration.publisher import KombuPublisher
from celery_budget.integration.queues import KombuQueues
from celery_budget.integration.results import BackendResults
from celery_budget.integration.service import sweep
from celery_budget.recovery import Kept
from celery_budget.relay import Relay
from celery_budget.store import lanes
from celery_budget.suspicion import Suspicion
from celery_budget.upkeep import Upkeep
from tests.contract.support import Ledger

__all__ = ["run"]

SMALL = 1_000
LARGE = 1_000_000
#: Of each step; each takes a batch of what is open.
PASSES = 20
MOST_MB = 20.0

#: What is open, in equal parts, by the task id of the one that the others are copies of: due,
#: published long ago, running with a lease that is over, and held by a lane.
KINDS = ("due", "silent", "lapsed", "held")

_COPIES = (
    "INSERT INTO budget_{0} SELECT made.* FROM budget_reservations r"
    " JOIN budget_{0} o ON o.root = r.root AND o.reservation_id = r.reservation_id,"
    " generate_series(1, :many) AS n,"
    " LATERAL jsonb_populate_record(o, jsonb_build_object("
    " 'reservation_id', md5(:kind || n)::uuid{1})) AS made"
    " WHERE r.root = :root AND r.task_id = :kind"
)
_IDS = {
    "lines": "",
    "attempts": "",
    "outbox": ", 'outbox_id', md5('m' || :kind || n)::uuid, 'task_id', :kind || n",
    "reservations": ", 'request_id', :kind || n, 'task_id', :kind || n",
}
#: What the others are copies of is as a client sends it.
_AS_SENT = (
    "UPDATE budget_outbox o SET body = d.body, envelope = d.envelope FROM budget_outbox d"
    " WHERE o.root = :root AND d.root = :root AND d.task_id = 'due'"
)
_LATE = (
    "UPDATE budget_attempts SET lease_until_us = 1 WHERE root = :root AND lease_until_us > 0",
    "UPDATE budget_outbox SET due_us = 1 WHERE root = :root AND state = 'published'",
)
#: Children of those that run, kept against a replay.
_KEPT = (
    "INSERT INTO budget_outbox SELECT made.* FROM budget_outbox o,"
    " generate_series(1, :many) AS n, LATERAL jsonb_populate_record(o, jsonb_build_object("
    " 'outbox_id', md5('kept' || n)::uuid, 'reservation_id', NULL,"
    " 'parent_id', md5('lapsed' || n)::uuid, 'task_id', 'kept' || n, 'state', 'published')) AS made"
    " WHERE o.root = :root AND o.task_id = 'lapsed'"
)


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare what one process needs that makes passes over few and over many."""
    large = effort.history or LARGE
    broker = servers.redis.database_url(5)
    ledgers = {many: servers.postgres.create_database() for many in (SMALL, large)}
    with filling(servers.postgres):
        for many, url in ledgers.items():
            _fill(url, broker, many)
    needed: dict[int, list[float]] = {many: [] for many in ledgers}
    few = f"{SMALL:,} open"
    sides = [
        Side(
            f"{many:,} open",
            _block(servers, url, broker, needed[many]),
            () if many == SMALL else (few,),
        )
        for many, url in ledgers.items()
    ]
    comparison = compare(
        "backlog",
        "a pass of relay, sweep, inquiries and alerts, in milliseconds",
        "ms",
        f"{PASSES} passes in a process of its own over what is due, silent, lapsed and held;\n"
        "PostgreSQL with fsync, Redis.",
        sides,
        Effort(min(effort.rounds, 3), effort.seconds),
    )
    usual, most = max(needed[SMALL]), max(needed[large])
    return comparison.with_checks(
        Check(f"backlog: memory with {SMALL:,} open", round(usual, 1), "MB"),
        Check(
            f"backlog: more memory with {large:,} open",
            round(most - usual, 1),
            "MB",
            None,
            f"at most {MOST_MB:g}",
            most - usual <= MOST_MB,
        ),
    )


def _fill(url: str, broker: str, many: int) -> None:
    """Make so many requests that are open, in a new database."""
    with closing(make_app(budget_database_url=url, broker_url=broker)) as app:
        budget = installed_on(app)
        fund(budget)
        ledger = Ledger(budget.store, budget.settings)
        ledger.set("b", 10**15)
        terms = {"queues": ("slow",), "preflight": False, "max_queued_jobs": 10}
        budget.store.run(lanes.declare, ledger.root, "llm", terms)
        ledger.reserve(1, task_id="silent")
        ledger.start(1, task_id="lapsed")
        ledger.relay()
        ledger.reserve(1, task_id="held", queue="slow")
        app.tasks["bench.budgeted_mark"].apply_async(task_id="due")
        with budget.store.transaction() as connection:
            for statement in (_AS_SENT, *_LATE):
                connection.execute(sa.text(statement), {"root": ledger.root})
            for kind in KINDS:
                given = {"root": ledger.root, "kind": kind, "many": many // len(KINDS)}
                for table, ids in _IDS.items():
                    connection.execute(sa.text(_COPIES.format(table, ids)), given)
            connection.execute(sa.text(_KEPT), {"root": ledger.root, "many": many // 10})
        with budget.store.statement() as connection:
            for table in _IDS:
                connection.exec_driver_sql(f"VACUUM (ANALYZE) budget_{table}")
        budget.store.dispose()


def _block(
    servers: Servers, url: str, broker: str, needed: list[float]
) -> Callable[[], list[float]]:
    def block() -> list[float]:
        conf = json.dumps({"budget_database_url": url, "broker_url": broker})
        with talking("benchmarks.backlogs", conf) as process:
            found = json.loads(process.hear())
        needed.append(found["rss_mb"])
        return [float(one) for one in found["passes_ms"]]

    return block


def _main(conf: str) -> None:
    """Make passes, as the service does, and say how long each took and what all of them needed."""
    # Each piece that it brings on is told, at a level that nobody reads here.
    logging.getLogger("celery_budget").setLevel(logging.CRITICAL)
    app = make_app(**json.loads(conf))
    budget = installed_on(app)
    store, settings = budget.store, budget.settings
    results, publisher, queues = BackendResults(app), KombuPublisher(app), KombuQueues(app)
    relay = Relay(store, settings, publisher, results.ended)
    suspicion, upkeep, kept = Suspicion(store, settings, queues), Upkeep(store, settings), Kept()
    alerts, tasks, never = alerting_of(budget), TaskInquiries(budget), threading.Event()
    took: list[float] = []
    for _ in range(PASSES):
        begin = time.monotonic()
        relay.run_once(never)
        sweep(budget, upkeep, suspicion, kept)
        inquiry.run_once(store, settings, tasks)
        took.append((time.monotonic() - begin) * 1000)
        alerts.run_once()
    # In kilobytes, on Linux.
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rss_mb": rss_mb, "passes_ms": took}), flush=True)
    publisher.reset()
    queues.close()
    store.dispose()


if __name__ == "__main__":
    _main(*sys.argv[1:])
