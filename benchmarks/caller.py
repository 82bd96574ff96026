"""What ``.delay()`` costs its caller, with a budget and without."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
from celery import group

from benchmarks.application import CONFIRMS, SIZE, TENANT, fund, make_app
from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.servers import Servers
from celery_budget.integration.context import installed_on
from tests.services.postgres import plain_url

__all__ = ["run", "run_group", "timed"]

CALLS = 200
MEMBERS = 1000

REDIS = "plain .delay(), Redis"
RABBITMQ = "plain .delay(), RabbitMQ with confirms"
INSERT = "one row of 1.5 KB, psycopg, PostgreSQL"


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare budgeted calls with plain ones, and with the least that a durable write costs."""
    redis = servers.redis.database_url(0)
    ledger = servers.postgres.create_database()
    sides = [
        _plain(servers, REDIS, broker_url=redis),
        _plain(
            servers,
            RABBITMQ,
            broker_url=servers.rabbitmq.create_vhost(),
            broker_transport_options=CONFIRMS,
        ),
        Side(INSERT, timed(_insert(servers, servers.postgres.create_database()))),
        _budgeted(servers, "budgeted .delay(), PostgreSQL", redis, ledger),
        _budgeted(
            servers, "budgeted .delay(), SQLite", redis, f"sqlite:///{servers.folder / 'caller.db'}"
        ),
    ]
    return compare(
        "caller",
        "one client's .delay(), in microseconds a call",
        "us",
        f"{CALLS} calls a side; one budget; no relay runs beside it; no result "
        "backend.\nRedis without append-only file, RabbitMQ with durable queue, PostgreSQL with "
        "fsync, SQLite in WAL mode.",
        sides,
        effort,
    )


def run_group(servers: Servers, effort: Effort) -> Comparison:
    """Compare a group, which is admitted in one transaction, with as many single plain calls."""
    redis = servers.redis.database_url(0)
    ledger = servers.postgres.create_database()
    app = servers.enter_context(closing(make_app(broker_url=redis, budget_database_url=ledger)))
    budget = installed_on(app)
    servers.callback(budget.store.dispose)
    fund(budget)
    plain, budgeted = app.tasks["bench.plain"], app.tasks["bench.budgeted"]

    def single() -> None:
        for _ in range(MEMBERS):
            plain.delay(SIZE, tenant=TENANT)

    def together() -> None:
        group([budgeted.s(SIZE, tenant=TENANT) for _ in range(MEMBERS)], app=app).apply_async()

    singly = f"{MEMBERS:,} single plain .delay(), Redis"
    return compare(
        "group",
        f"{MEMBERS:,} tasks, in milliseconds for all of them",
        "ms",
        "one time all of them a side; one budget; no relay runs beside it; no result backend.",
        [
            Side(singly, _whole(single)),
            Side(
                f"a budgeted group of {MEMBERS:,}, PostgreSQL",
                _whole(together),
                (Target(singly, at_most=0.6),),
            ),
        ],
        effort,
    )


def _whole(call: Callable[[], object]) -> Callable[[], list[float]]:
    def block() -> list[float]:
        begin = time.perf_counter_ns()
        call()
        return [(time.perf_counter_ns() - begin) / 1_000_000]

    return block


def _plain(servers: Servers, name: str, **conf: Any) -> Side:
    app = servers.enter_context(closing(make_app(**conf)))
    task = app.tasks["bench.plain"]
    return Side(name, timed(lambda: task.delay(SIZE, tenant=TENANT)))


def _budgeted(servers: Servers, name: str, broker: str, ledger: str) -> Side:
    app = servers.enter_context(closing(make_app(broker_url=broker, budget_database_url=ledger)))
    budget = installed_on(app)
    servers.callback(budget.store.dispose)
    fund(budget)
    task = app.tasks["bench.budgeted"]
    against: tuple[str | Target, ...] = (REDIS, RABBITMQ)
    if ledger.startswith("postgresql"):
        against = (Target(REDIS, at_most=1.15), Target(RABBITMQ, at_most=0.65), INSERT)
    return Side(name, timed(lambda: task.delay(SIZE, tenant=TENANT)), against)


def _insert(servers: Servers, url: str) -> Callable[[], object]:
    connection = servers.enter_context(psycopg.connect(plain_url(url), autocommit=True))
    connection.execute(
        "CREATE TABLE note (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea)"
    )
    body = b"x" * 1500
    return lambda: connection.execute("INSERT INTO note (body) VALUES (%s)", (body,))


def timed(call: Callable[[], object], calls: int = CALLS) -> Callable[[], list[float]]:
    """Return a block of so many calls, in microseconds each."""

    def block() -> list[float]:
        samples = []
        for _ in range(calls):
            begin = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - begin) / 1000)
        return samples

    return block
