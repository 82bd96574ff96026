"""How many admissions a second one budget takes from many clients, beside a budget for each.

The clients are processes and threads that send the statement which the store sends for a call of
``.delay()``, and nothing else: on two cores 32 callers in Python would show what Python costs. Each
admission is a transaction of its own; it is answered when its commit is on disk.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import psycopg
import sqlalchemy as sa

from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.servers import Servers
from celery_budget.core.budgets import Budget
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Line, ReserveRequest
from celery_budget.store import Store, declaring, migrate, requests, schema
from tests.services.postgres import PostgresServer, plain_url

__all__ = ["run"]

CLIENTS, THREADS, BUDGETS = 32, 4, 1000
#: For how long a block admits.
SECONDS = 1.0
STRIPES = 64
#: The flush of a disk that is far away: whoever commits waits for so long, and takes others along.
SLOW = {"commit_delay": "1000", "commit_siblings": "0"}
AMOUNT, LIMIT, ROOT = 10, 10**15, "hot"

#: A statement and what is sent with it.
Sent = tuple[Any, Any]


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare one budget with a thousand at a slow flush, and one client at a normal one."""
    slow = _clients(servers, servers.enter_context(PostgresServer(settings=SLOW)), CLIENTS, BUDGETS)
    quick = _clients(servers, servers.postgres, 1, 0)
    spread = f"one budget over {STRIPES} rows"
    alone = "one client, normal flush"
    separate, single = f"{BUDGETS:,} budgets", f"one row, {alone}"
    sides = [
        Side(separate, lambda: slow([f"b{number}" for number in range(BUDGETS)])),
        Side("one budget over one row", lambda: slow(["single"]), (separate,)),
        Side(spread, lambda: slow(["spread"]), (Target(separate, at_least=0.7),)),
        Side(single, lambda: quick(["single"])),
        Side(
            f"{STRIPES} rows, {alone}", lambda: quick(["spread"]), (Target(single, at_least=0.95),)
        ),
    ]
    return compare(
        "hot",
        "admissions to one budget, a second",
        "1/s",
        f"{SECONDS:g} s of {CLIENTS} clients at a flush of 1 ms, or of one at a normal one; "
        "PostgreSQL with fsync.",
        sides,
        effort,
    )


def _clients(
    servers: Servers, server: PostgresServer, clients: int, budgets: int
) -> Callable[[Sequence[str]], list[float]]:
    """Make a ledger and clients; return what runs them on budgets, and tells the rate of all."""
    url = server.create_database()
    store = Store(url)
    servers.callback(store.dispose)
    store.run(migrate.upgrade)
    wanted = [Budget("single", "tokens", LIMIT, stripes=1)]
    wanted += [Budget("spread", "tokens", LIMIT, stripes=STRIPES)]
    store.run(declaring.apply, {ROOT: wanted})
    store.run(_multiply, budgets)
    sent = _sent(store)
    # Nothing of the parent's is used in them: its connections are closed, and it has no threads.
    store.dispose()
    context = multiprocessing.get_context("fork")
    threads = min(THREADS, clients)
    pipes = []
    for number in range(clients // threads):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, url, sent, threads, number), daemon=True
        )
        process.start()
        servers.callback(process.join)
        servers.callback(ours.send, None)
        pipes.append(ours)

    def block(names: Sequence[str]) -> list[float]:
        for pipe in pipes:
            pipe.send(names)
        return [sum(pipe.recv() for pipe in pipes)]

    return block


def _multiply(connection: sa.Connection, budgets: int) -> None:
    """Make budgets as ``single`` is, by two statements instead of thousands."""
    for table, name in ((schema.budgets, "name"), (schema.balances, "budget")):
        columns = [one for one in table.c if one.name != name]
        number = sa.func.generate_series(0, budgets - 1)
        copies = sa.select(sa.literal("b") + sa.cast(number, sa.Text), *columns).where(
            table.c[name] == "single"
        )
        connection.execute(table.insert().from_select([name, *columns], copies))


def _sent(store: Store) -> Sent:
    """Return the statement that an admission sends, as the driver gets it, with its parameters."""
    seen: list[Sent] = []
    execute = psycopg.Cursor.execute

    def spy(self: Any, query: Any, params: Any = None, **more: Any) -> Any:
        if "budget_reserve" in str(query):
            seen.append((query, params))
        return execute(self, query, params, **more)

    with mock.patch.object(psycopg.Cursor, "execute", spy):
        store.run(requests.reserve, _request("single"), _MESSAGE)
    [sent] = seen
    return sent


_MESSAGE = WireMessage(
    task_id="t",
    task_name="bench.budgeted",
    body=b"x" * 200,
    envelope="{}",
    queue="bench",
)


def _request(budget: str) -> ReserveRequest:
    return ReserveRequest(
        reservation_id=uuid.UUID(int=1),
        root=ROOT,
        owner=budget,
        request_id="t",
        task_id="t",
        task_name="bench.budgeted",
        stage="bench",
        fingerprint="1:same",
        estimator="constant",
        estimator_version="1",
        lines=(Line(budget, AMOUNT),),
    )


def _serve(pipe: Connection, url: str, sent: Sent, threads: int, number: int) -> None:
    """Admit on the budgets that are asked for, for a while each time; tell the rate."""
    clients = [_Client(url, sent, number * threads + thread) for thread in range(threads)]
    while (names := pipe.recv()) is not None:
        running = [threading.Thread(target=one.admit, args=(names,)) for one in clients]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        pipe.send(sum(one.rate for one in clients))


class _Client:
    """One connection, and the statement prepared on it.

    :ivar rate: admissions a second of the last block.
    """

    def __init__(self, url: str, sent: Sent, number: int) -> None:
        self._connection = psycopg.connect(plain_url(url), autocommit=True)
        self._query, self._params = sent
        self._number = number
        self.rate = 0.0

    def admit(self, names: Sequence[str]) -> None:
        begin, admitted = time.monotonic(), 0
        with self._connection.cursor() as cursor:
            while (now := time.monotonic()) < begin + SECONDS:
                name = names[(self._number + CLIENTS * admitted) % len(names)]
                row = cursor.execute(self._query, self._anew(name), prepare=True).fetchone()
                if row is None or row[0] not in ("reserved", "moved"):
                    raise AssertionError(f"not admitted: {row}")
                admitted += row[0] == "reserved"
            self.rate = admitted / (now - begin)

    def _anew(self, budget: str) -> Any:
        """Return the parameters with other ids, and another budget."""
        fresh = new_id()

        def of(value: Any) -> Any:
            if isinstance(value, uuid.UUID):
                return fresh if value.int == 1 else new_id()
            if isinstance(value, list):
                return [budget if one == "single" else one for one in value]
            return (
                {"t": str(fresh), "single": budget}.get(value, value)
                if isinstance(value, str)
                else value
            )

        if isinstance(self._params, dict):
            return {key: of(value) for key, value in self._params.items()}
        return [of(value) for value in self._params]
