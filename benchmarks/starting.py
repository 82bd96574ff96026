"""How long after ``.delay()`` has returned a worker begins with the task."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.application import fund, make_app
from benchmarks.measure import Check, Comparison, Effort, Side, compare
from benchmarks.processes import next_start, relay, worker
from benchmarks.servers import Servers
from celery_budget.integration.context import installed_on

__all__ = ["run"]

#: In a block: three hundred of the sides that are held to a target make a p99 of a few.
CALLS = 30
#: SQLite is held to none.
FEW_CALLS = 6
#: Between two calls, at most: the relay has nothing to do by then, and none has the same distance
#: from its next look.
PAUSE_SECONDS = 0.04

PLAIN = "plain task"
POSTGRESQL = "budgeted task, PostgreSQL"

#: By how many milliseconds a budgeted task may start later than a plain one.
MOST_P50_MS = 4.0
MOST_P99_MS = 15.0


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare tasks that pass through the outbox and a relay with a plain one."""
    broker = servers.redis.database_url(3)
    client = servers.enter_context(Redis.from_url(broker, socket_timeout=None))
    plain, begins, bodies = _Starts(), _Starts(), _Starts()
    database = servers.postgres.create_database()
    file = f"sqlite:///{servers.folder / 'starting.db'}"
    sides = [
        _side(servers, client, PLAIN, plain, broker_url=broker),
        _side(
            servers,
            client,
            POSTGRESQL,
            begins,
            bodies,
            broker_url=broker,
            budget_database_url=database,
        ),
        _side(
            servers,
            client,
            "budgeted task, SQLite",
            _Starts(FEW_CALLS),
            broker_url=broker,
            budget_database_url=file,
        ),
    ]
    comparison = compare(
        "latency",
        "from .delay()'s return to the start of the task in the worker, in microseconds",
        "us",
        f"{CALLS} calls a side, {FEW_CALLS} of SQLite, each after the last one ran, up to "
        f"{PAUSE_SECONDS:g} s apart.\n"
        "Idle workers and relays, a process each; Redis, PostgreSQL with fsync, SQLite with WAL.\n"
        "A task starts when its worker's process sends task_prerun; its own code when the claim is "
        "through.\n"
        "A p99 is that of all calls of a side, whatever round they are of.",
        sides,
        effort,
    )
    return comparison.with_checks(
        _later("starts later, p50", begins.part(50) - plain.part(50), MOST_P50_MS),
        _later("starts later, p99", begins.part(99) - plain.part(99), MOST_P99_MS),
        _later("p99 of a plain task", plain.part(99)),
        _later("own code later, p50", bodies.part(50) - plain.part(50)),
        _later("own code later, p99", bodies.part(99) - plain.part(99)),
    )


def _later(what: str, us: float, most_ms: float | None = None) -> Check:
    ms = round(us / 1000, 2)
    if most_ms is None:
        return Check(f"latency: {what}", ms, "ms")
    return Check(f"latency: {what}", ms, "ms", None, f"at most {most_ms:g}", ms <= most_ms)


class _Starts:
    """How long each call of a side took to start, the first block left out.

    :ivar calls: how many a block has.
    """

    def __init__(self, calls: int = CALLS) -> None:
        self.calls = calls
        self._all: list[float] = []

    def note(self, us: float) -> None:
        self._all.append(us)

    def part(self, hundredth: int) -> float:
        """Return what so many of a hundred calls stay below."""
        parts = statistics.quantiles(self._all[self.calls :], n=100, method="inclusive")
        return parts[hundredth - 1]


def _side(
    servers: Servers,
    client: Redis,
    name: str,
    begins: _Starts,
    bodies: _Starts | None = None,
    **conf: Any,
) -> Side:
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
    return Side(name, _block(app, client, task, begins, bodies or _Starts()), against)


def _block(
    app: Celery, client: Redis, name: str, begins: _Starts, bodies: _Starts
) -> Callable[[], list[float]]:
    task = app.tasks[name]

    def block() -> list[float]:
        samples = []
        for _ in range(begins.calls):
            time.sleep(random.uniform(0.4, 1.0) * PAUSE_SECONDS)
            task.delay()
            returned = time.monotonic()
            mark = next_start(client)
            samples.append((mark.begun - returned) * 1_000_000)
            begins.note(samples[-1])
            bodies.note((mark.entered - returned) * 1_000_000)
        return samples

    return block
