"""Each peer's own job, done by it and by us, on the same servers in the same run."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import sqlalchemy as sa

from benchmarks.application import SIZE, TENANT, fund, make_app
from benchmarks.caller import timed
from benchmarks.histories import History, fill
from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.peers.environments import OUTBOX, PROCRASTINATE, SNIPZ, Peer, running
from benchmarks.relaying import drain
from benchmarks.servers import Servers
from celery_budget import CeleryBudget
from celery_budget.integration.context import installed_on
from celery_budget.integration.publisher import KombuPublisher
from tests.services.postgres import plain_url

__all__ = ["calls", "holds", "relays"]

CALLS = 200
MESSAGES = 1000
HOLDS = 100
#: What has been settled in the store of those that have a history.
SETTLED = 20_000
FASTER = 1.0


def calls(servers: Servers, effort: Effort) -> Comparison:
    """Compare what a task costs its caller: budgeted, in an outbox, in a queue of PostgreSQL's."""
    broker = servers.redis.database_url(4)
    app, _ = _ours(servers, broker)
    task = app.tasks["bench.budgeted"]
    outbox, deferring = "django-celery-outbox, .delay()", "procrastinate, .defer()"
    sides = [
        _peer(servers, OUTBOX, outbox, _outbox(servers, broker, "enqueue", CALLS)),
        _peer(servers, PROCRASTINATE, deferring, _deferring(servers)),
        Side(
            "budgeted .delay()",
            timed(lambda: task.delay(SIZE, tenant=TENANT), CALLS),
            (Target(outbox, at_most=FASTER), Target(deferring, at_most=FASTER)),
        ),
    ]
    return compare(
        "peers-call",
        "one client's call, in microseconds",
        "us",
        f"{CALLS} calls a side; PostgreSQL with fsync, a transaction each; nothing runs beside it.",
        sides,
        effort,
    )


def relays(servers: Servers, effort: Effort) -> Comparison:
    """Compare what publishes an outbox: one process, from PostgreSQL to Redis."""
    broker = servers.redis.database_url(5)
    app, _ = _ours(servers, broker)
    publisher = KombuPublisher(app)
    servers.callback(publisher.reset)
    task = app.tasks["bench.budgeted"]

    def relay() -> list[float]:
        for _ in range(MESSAGES):
            task.delay(SIZE, tenant=TENANT)
        begin = time.perf_counter()
        published = drain(app, publisher)
        assert published == MESSAGES, published
        return [published / (time.perf_counter() - begin)]

    outbox = "django-celery-outbox"
    conf = _outbox(servers, broker, "relay", MESSAGES)
    return compare(
        "peers-relay",
        "one relay, in messages a second",
        "1/s",
        f"{MESSAGES} messages a side; PostgreSQL with fsync, Redis.",
        [
            _peer(servers, OUTBOX, outbox, conf),
            Side("our relay", relay, (Target(outbox, at_least=FASTER),)),
        ],
        effort,
    )


def holds(servers: Servers, effort: Effort) -> Comparison:
    """Compare a hold that is settled at once: run in its caller's process, nothing is published."""
    sides = []
    for settled in (0, SETTLED):
        name = f"Snipz, {settled:,} settled before"
        dsn = plain_url(servers.postgres.create_database())
        sides.append(_peer(servers, SNIPZ, name, {"dsn": dsn, "calls": HOLDS, "settled": settled}))
        app, budget = _ours(servers, "memory://")
        if settled:
            fill(budget.store, budget.settings.root, History(settled, above="all", whole=False))
        # As autovacuum does within a minute: no plan is of an empty table.
        _holding(app)()
        with budget.store.transaction() as connection:
            connection.exec_driver_sql("ANALYZE")
        sides.append(
            Side(
                f"ours, {settled:,} settled before", _holding(app), (Target(name, at_least=FASTER),)
            )
        )
    return compare(
        "peers-hold",
        "one client's holds, each settled at once, a second",
        "1/s",
        f"{HOLDS} holds a side, of one budget, settled at what was held; PostgreSQL with fsync.\n"
        "Ours: a budgeted task's .apply(), Celery's own work included.",
        sides,
        effort,
    )


def _holding(app: Any) -> Any:
    task = app.tasks["bench.budgeted"]

    def block() -> list[float]:
        begin = time.perf_counter()
        for _ in range(HOLDS):
            task.apply((SIZE,), {"tenant": TENANT}, throw=True)
        return [HOLDS / (time.perf_counter() - begin)]

    return block


def _ours(servers: Servers, broker: str) -> tuple[Any, CeleryBudget]:
    ledger = servers.postgres.create_database()
    app = servers.enter_context(closing(make_app(broker_url=broker, budget_database_url=ledger)))
    budget = installed_on(app)
    servers.callback(budget.store.dispose)
    fund(budget)
    return app, budget


def _peer(servers: Servers, peer: Peer, name: str, conf: dict[str, Any]) -> Side:
    return Side(name, servers.enter_context(running(peer, conf)))


def _outbox(servers: Servers, broker: str, block: str, count: int) -> dict[str, Any]:
    url = sa.make_url(servers.postgres.create_database())
    database = {
        "NAME": url.database,
        "USER": url.username,
        "HOST": url.host,
        "PORT": str(url.port),
        # As ours keeps its connection.
        "CONN_MAX_AGE": None,
    }
    return {"database": database, "broker": broker, "block": block, "calls": count}


def _deferring(servers: Servers) -> dict[str, Any]:
    return {"conninfo": plain_url(servers.postgres.create_database()), "calls": CALLS}
