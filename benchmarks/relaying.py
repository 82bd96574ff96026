"""How fast relays empty the outbox, beside a loop that only publishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from threading import Event
from typing import Any

from celery import Celery
from kombu import Connection, Producer
from redis import Redis

from benchmarks.application import CONFIRMS, fund, make_app
from benchmarks.filling import Filler
from benchmarks.measure import Check, Comparison, Effort, Side, Target, compare
from benchmarks.servers import Servers
from celery_budget import relay
from celery_budget.core.messages import WireMessage
from celery_budget.integration.capture import read
from celery_budget.integration.context import installed_on
from celery_budget.integration.publisher import KombuPublisher

__all__ = ["drain", "run", "run_long"]

#: How many messages a block has, in the short run and in the long one.
ROWS = 1_000
LONG_ROWS = 50_000
#: Two relays, the store and the broker need a core each, at least.
CORES_FOR_TWO = 4
TWO = "two relays to Redis"


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare relays with a bare kombu loop, on Redis and on RabbitMQ."""
    return _run(servers, replace(effort, seconds=min(effort.seconds, 25)), "relay", ROWS)


def run_long(servers: Servers, effort: Effort) -> Comparison:
    """The same, draining fifty thousand messages."""
    return _run(servers, effort, "relay, 50,000 rows", LONG_ROWS)


def _run(servers: Servers, effort: Effort, name: str, rows: int) -> Comparison:
    ledger = servers.postgres.create_database()
    redis_url = servers.redis.database_url(1)
    vhost = servers.rabbitmq.create_vhost()
    to_redis = {"broker_url": redis_url, "budget_database_url": ledger, "budget_root": "redis"}
    to_rabbit = {
        "broker_url": vhost,
        "broker_transport_options": CONFIRMS,
        "budget_database_url": ledger,
        "budget_root": "rabbitmq",
    }
    redis = _Outbox(servers, rows, **to_redis)
    rabbit = _Outbox(servers, rows, **to_rabbit)
    enough = (os.cpu_count() or 1) >= CORES_FOR_TWO
    one = "one relay to Redis, a process"
    sides = [
        Side("bare kombu loop to Redis", redis.bare()),
        Side("relay to Redis", redis.relay(), (Target("bare kombu loop to Redis", at_least=0.8),)),
        Side("bare kombu loop to RabbitMQ, one confirm each", rabbit.bare()),
        Side(
            "relay to RabbitMQ",
            rabbit.relay(),
            (Target("bare kombu loop to RabbitMQ, one confirm each", at_least=4),),
        ),
        Side(one, redis.processes(servers, 1, to_redis)),
        Side(
            TWO,
            redis.processes(servers, 2, to_redis),
            (Target(one, at_least=1.5 if enough else None),),
        ),
    ]
    found = compare(
        name,
        "publishing what is ready, in messages a second",
        "1/s",
        f"{rows} messages a side; PostgreSQL with fsync; Redis without an append-only file, which "
        "is emptied before each block",
        sides,
        effort,
    )
    if enough:
        return found
    told = f"{TWO}: {os.cpu_count()} cores, judged from {CORES_FOR_TWO}"
    return found.with_checks(Check(told, float(os.cpu_count() or 1), "cores"))


class _Outbox:
    """An outbox that is filled for each block, and what empties it."""

    def __init__(self, servers: Servers, rows: int, **conf: Any) -> None:
        self._rows = rows
        self.app = servers.enter_context(closing(make_app(**conf)))
        budget = installed_on(self.app)
        servers.callback(budget.store.dispose)
        fund(budget)
        self._filler = Filler(self.app)
        self._connection = servers.enter_context(self.app.connection_for_write())
        self._publisher = KombuPublisher(self.app)
        servers.callback(self._publisher.reset)

    def _clear(self) -> None:
        """Have a broker with empty queues, which neither side made long."""
        if self._connection.transport.driver_type == "redis":
            with Redis.from_url(self.app.conf.broker_url) as client:
                client.flushdb()
        else:
            queue = self.app.conf.task_default_queue
            with self.app.connection_for_write() as connection:
                self.app.amqp.queues[queue](connection.default_channel).purge()

    def bare(self) -> Callable[[], list[float]]:
        """A loop that publishes finished messages, their envelopes read beforehand."""
        self._filler.fill(self._rows)
        block = bare(self.app, self._connection, self._filler.messages())

        def clear_and_run() -> list[float]:
            self._clear()
            return block()

        return clear_and_run

    def relay(self) -> Callable[[], list[float]]:
        """One relay, in this process."""
        one = _relay(self.app, self._publisher)

        def block() -> list[float]:
            self._filler.fill(self._rows)
            self._clear()
            begin = time.perf_counter()
            published = _drain(one)
            seconds = time.perf_counter() - begin
            assert published == self._rows, published
            return [published / seconds]

        return block

    def processes(
        self, servers: Servers, number: int, conf: dict[str, Any]
    ) -> Callable[[], list[float]]:
        """As many relays, each a process that waits for the start of each block."""
        environment = {**os.environ, "BENCH_CONF": json.dumps(conf)}
        command = [sys.executable, "-m", "benchmarks.draining"]
        children = [
            servers.enter_context(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(number)
        ]

        def ask(child: subprocess.Popen[str], what: str) -> None:
            assert child.stdin is not None
            child.stdin.write(what + "\n")
            child.stdin.flush()

        def end() -> None:
            for child in children:
                ask(child, "end")

        servers.callback(end)

        def block() -> list[float]:
            self._filler.fill(self._rows)
            self._clear()
            begin = time.perf_counter()
            for child in children:
                ask(child, "drain")
            published = sum(int(child.stdout.readline()) for child in children if child.stdout)
            seconds = time.perf_counter() - begin
            assert published == self._rows, published
            return [published / seconds]

        return block


def drain(app: Celery, publisher: relay.Publisher) -> int:
    """Relay until nothing is due; return how much that was."""
    return _drain(_relay(app, publisher))


def _relay(app: Celery, publisher: relay.Publisher) -> relay.Relay:
    budget = installed_on(app)
    return relay.Relay(budget.store, budget.settings, publisher, _no_end)


def _drain(one: relay.Relay) -> int:
    published, never = 0, Event()
    while True:
        relayed = one.run_once(never)
        if not relayed.taken:
            return published
        published += relayed.published


def _no_end(task_id: str, reason: str) -> None:
    raise AssertionError(f"task {task_id} was not published: {reason}")


def bare(
    app: Celery, connection: Connection, messages: list[WireMessage]
) -> Callable[[], list[float]]:
    """Publish finished messages one by one, as kombu does it."""
    producer = Producer(connection, auto_declare=False)
    mandatory = connection.transport.driver_type == "amqp"
    ready: list[tuple[bytes, dict[str, Any]]] = []
    for message in messages:
        envelope = read(message)
        options = {
            "content_type": envelope.content_type,
            "content_encoding": envelope.content_encoding,
            "headers": envelope.headers,
            "exchange": envelope.exchange,
            "routing_key": envelope.routing_key,
            "mandatory": mandatory,
            **envelope.properties,
        }
        ready.append((message.body, options))
    app.amqp.queues[app.conf.task_default_queue](producer.channel).declare()

    def block() -> list[float]:
        begin = time.perf_counter()
        for body, options in ready:
            producer.publish(body, **options)
        return [len(ready) / (time.perf_counter() - begin)]

    return block
