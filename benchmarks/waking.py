"""What waking a relay costs those who admit: many at once, while it sleeps when they begin."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import sqlalchemy as sa

from benchmarks.application import fund, make_app
from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.processes import relay, talking
from benchmarks.servers import Servers
from celery_budget import CeleryBudget
from celery_budget.integration.context import installed_on
from celery_budget.store import relays
from tests.services.postgres import PostgresServer

__all__ = ["run"]

PROCESSES = 4
THREADS = 8
SECONDS = 1.0
QUIET_SECONDS = 60.0
#: A flush takes as long as on a disk: what keeps others out until its commit shows.
SLOW_FLUSH = {"commit_delay": "1000", "commit_siblings": "0"}

OFF = "nobody is woken"
EACH = (
    "CREATE OR REPLACE FUNCTION budget_wake(p_root text, p_lent boolean DEFAULT false)"
    " RETURNS void LANGUAGE sql AS $$ SELECT pg_notify('budget_' || md5(p_root), '') $$"
)


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare admissions that wake a relay with the same where it hears nothing, and looks."""
    postgres = servers.enter_context(PostgresServer(settings=SLOW_FLUSH))
    sides = [
        # Notifications stay in their database.
        _side(servers, postgres, OFF, budget_listen_url=postgres.create_database()),
        _side(servers, postgres, "a relay that sleeps is woken"),
        _side(servers, postgres, "each admission notifies", instead=EACH),
    ]
    return compare(
        "wakeup",
        f"admissions a second by {PROCESSES * THREADS} clients, each with a budget of its own",
        "1/s",
        f"{SECONDS:g} s a side, the outbox empty and the relay asleep when they begin.\n"
        f"{PROCESSES} processes with {THREADS} threads each, a relay that publishes to Redis; "
        "PostgreSQL with fsync, flushes delayed to 1 ms.",
        sides,
        effort,
    )


def _side(
    servers: Servers, postgres: PostgresServer, name: str, instead: str | None = None, **conf: Any
) -> Side:
    conf |= {
        "broker_url": servers.redis.database_url(4),
        "budget_database_url": postgres.create_database(),
        "task_default_queue": "".join(filter(str.isalpha, name)),
    }
    app = make_app(**conf)
    servers.callback(app.close)
    budget = installed_on(app)
    servers.callback(budget.store.dispose)
    fund(budget)
    for client in range(PROCESSES * THREADS):
        budget.set(f"tenant:{client}", limit=10**15, unit="tokens")
    if instead is not None:
        with budget.store.transaction() as connection:
            connection.execute(sa.text(instead))
    servers.enter_context(relay(servers.folder, conf, conf["task_default_queue"]))
    clients = [
        servers.enter_context(talking("benchmarks.waking", json.dumps(conf), str(number)))
        for number in range(PROCESSES)
    ]
    sleeps = "budget_listen_url" not in conf
    against = () if name == OFF else (Target(OFF, at_least=0.9) if instead is None else OFF,)
    return Side(name, _block(budget, clients, sleeps), against)


def _block(budget: CeleryBudget, clients: list[Any], sleeps: bool) -> Callable[[], list[float]]:
    def block() -> list[float]:
        _wait_until_quiet(budget, sleeps)
        for client in clients:
            client.say("go")
        counts = [int(client.hear()) for client in clients]
        return [sum(counts) / SECONDS]

    return block


def _wait_until_quiet(budget: CeleryBudget, sleeps: bool) -> None:
    """Return when nothing is due, and the relay says that it sleeps, where it does."""
    until = time.monotonic() + QUIET_SECONDS
    root = budget.settings.root
    while time.monotonic() < until:
        seen = budget.store.read(relays.seen, root)
        if (
            seen
            and all(one.sleeping is sleeps for one in seen)
            and not budget.store.read(relays.anything_due, root)
        ):
            return
        time.sleep(0.02)
    raise TimeoutError(f"the relay is not idle after {QUIET_SECONDS:g} s")


@contextmanager
def _admitting(conf: dict[str, Any], number: int) -> Iterator[Callable[[], int]]:
    """What admits by a process' threads for a while, and returns how much."""
    with ExitStack() as stack:
        app = make_app(**conf)
        stack.callback(app.close)
        budget = installed_on(app)
        stack.callback(budget.store.dispose)
        task = app.tasks["bench.budgeted"]

        def admit(tenant: str, until: float, counts: list[int]) -> None:
            done = 0
            while time.monotonic() < until:
                task.delay(1, tenant)
                done += 1
            counts.append(done)

        def block() -> int:
            counts: list[int] = []
            until = time.monotonic() + SECONDS
            threads = [
                threading.Thread(target=admit, args=(str(number * THREADS + one), until, counts))
                for one in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(counts)

        yield block


def _main(conf: str, number: str) -> None:
    with _admitting(json.loads(conf), int(number)) as block:
        for _ in sys.stdin:
            print(block(), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
