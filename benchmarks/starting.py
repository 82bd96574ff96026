"""How long after ``.delay()`` has returned a worker begins with the task."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.application import fund, make_app
from benchmarks.measure import Comparison, Effort, Side, compare
from benchmarks.processes import next_mark, relay, worker
from benchmarks.servers import Servers
from celery_budget.integration.context import installed_on

__all__ = ["run"]

CALLS = 20
#: Between two calls, at most: the relay has nothing to do by then, and none has the same distance
#: from its next look.
PAUSE_SECONDS = 0.12

PLAIN = "plain task"


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare tasks that pass through the outbox and a relay with a plain one."""
    broker = servers.redis.database_url(3)
    client = servers.enter_context(Redis.from_url(broker, socket_timeout=None))
    sides = [
        _side(servers, client, PLAIN, broker_url=broker),
        _side(
            servers,
            client,
            "budgeted task, PostgreSQL",
            broker_url=broker,
            budget_database_url=servers.postgres.create_database(),
        ),
        _side(
            servers,
            client,
            "budgeted task, SQLite",
            broker_url=broker,
            budget_database_url=f"sqlite:///{servers.folder / 'starting.db'}",
        ),
    ]
    return compare(
        "latency",
        "from .delay()'s return to the start of the task in the worker, in microseconds",
        "us",
        f"{CALLS} calls a side, each after the last one ran, up to {PAUSE_SECONDS:g} s apart.\n"
        "Idle workers and relays, a process each; Redis, PostgreSQL with fsync, SQLite with WAL.",
        sides,
        effort,
    )


def _side(servers: Servers, client: Redis, name: str, **conf: Any) -> Side:
    queue = "".join(filter(str.isalpha, name.lower()))
    conf["task_default_queue"] = queue
    app = servers.enter_context(closing(make_app(**conf)))
    task, against = "bench.mark", ()
    if "budget_database_url" in conf:
        budget = installed_on(app)
        servers.callback(budget.store.dispose)
        fund(budget)
        servers.enter_context(relay(servers.folder, conf, queue))
        task, against = "bench.budgeted_mark", (PLAIN,)
    servers.enter_context(worker(servers.folder, conf, queue))
    return Side(name, _block(app, client, task), against)


def _block(app: Celery, client: Redis, name: str) -> Callable[[], list[float]]:
    task = app.tasks[name]

    def block() -> list[float]:
        samples = []
        for _ in range(CALLS):
            time.sleep(random.uniform(0.2, 1.0) * PAUSE_SECONDS)
            task.delay()
            begin = time.monotonic()
            samples.append((next_mark(client) - begin) * 1_000_000)
        return samples

    return block
