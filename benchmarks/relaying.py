"""How fast one relay empties the outbox, beside a loop that only publishes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from kombu import Connection, Producer

from benchmarks.application import CONFIRMS, SIZE, TENANT, fund, make_app
from benchmarks.measure import Comparison, Effort, Side, compare
from benchmarks.servers import Servers
from celery_budget import relay
from celery_budget.core.messages import WireMessage
from celery_budget.integration.capture import read
from celery_budget.integration.context import installed_on
from celery_budget.integration.publisher import KombuPublisher

__all__ = ["drain", "run"]

MESSAGES = 400


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare one relay with a bare kombu loop, on Redis and on RabbitMQ."""
    ledger = servers.postgres.create_database()
    sides = [
        *_pair(servers, "Redis", broker_url=servers.redis.database_url(1), ledger=ledger),
        *_pair(
            servers,
            "RabbitMQ",
            broker_url=servers.rabbitmq.create_vhost(),
            broker_transport_options=CONFIRMS,
            ledger=ledger,
        ),
    ]
    return compare(
        "relay",
        "one process publishing what is ready, in messages a second",
        "1/s",
        f"{MESSAGES} messages a side; PostgreSQL with fsync; on RabbitMQ one "
        "confirm for each message on both sides.",
        sides,
        effort,
    )


def _pair(servers: Servers, broker: str, *, ledger: str, **conf: Any) -> tuple[Side, Side]:
    app = servers.enter_context(
        closing(make_app(budget_database_url=ledger, budget_root=broker.lower(), **conf))
    )
    budget = installed_on(app)
    servers.callback(budget.store.dispose)
    fund(budget)
    publisher = KombuPublisher(app)
    servers.callback(publisher.reset)
    connection = servers.enter_context(app.connection_for_write())
    fill(app)
    collected = Collector()
    drain(app, collected)
    bare = f"bare kombu loop, {broker}"
    return (
        Side(bare, _bare(app, connection, collected.messages)),
        Side(f"relay, PostgreSQL to {broker}", _relay(app, publisher), (bare,)),
    )


def fill(app: Celery) -> None:
    """Have the outbox hold one round's messages."""
    task = app.tasks["bench.budgeted"]
    for _ in range(MESSAGES):
        task.delay(SIZE, tenant=TENANT)


def drain(app: Celery, publisher: relay.Publisher) -> int:
    """Relay until nothing is due; return how much that was."""
    budget = installed_on(app)
    published = 0
    while True:
        relayed = relay.run_once(budget.store, budget.settings, publisher, _no_end)
        if not relayed.taken:
            return published
        published += relayed.published


def _no_end(task_id: str, reason: str) -> None:
    raise AssertionError(f"task {task_id} was not published: {reason}")


def _relay(app: Celery, publisher: KombuPublisher) -> Callable[[], list[float]]:
    def block() -> list[float]:
        fill(app)
        begin = time.perf_counter()
        published = drain(app, publisher)
        seconds = time.perf_counter() - begin
        assert published == MESSAGES, published
        return [published / seconds]

    return block


def _bare(
    app: Celery, connection: Connection, messages: list[WireMessage]
) -> Callable[[], list[float]]:
    """Publish finished messages as the relay would, their envelopes read beforehand."""
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


@dataclass
class Collector:
    """A publisher that keeps the messages."""

    messages: list[WireMessage] = field(default_factory=list)

    def publish(self, message: WireMessage) -> None:
        self.messages.append(message)

    def reset(self) -> None:
        """Nothing to reset."""
