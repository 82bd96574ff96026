"""The brokers' queues as recovery sees them: what waits, what is gone, what cannot be asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from celery_budget import budgeted
from celery_budget.integration import queues as queues_module
from celery_budget.integration.context import installed_on
from celery_budget.integration.preflight import CeleryWorkers
from celery_budget.integration.queues import KombuQueues
from celery_budget.store import schema
from tests.integration.support import Shop
from tests.services.rabbitmq import RabbitServer

MakeShop = Callable[..., Shop]

BROKERS = [
    "memory",
    "filesystem",
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
]


@pytest.fixture(params=BROKERS)
def conf(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where each kind of broker is."""
    if request.param == "memory":
        return {"broker_url": "memory://"}
    if request.param == "filesystem":
        found: dict[str, Any] = request.getfixturevalue("embedded")
        return {name: found[name] for name in ("broker_url", "broker_transport_options")}
    return {"broker_url": request.getfixturevalue(f"{request.param}_url")}


class Queued:
    """A shop with a task, and the view of its queues."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        task = shop.app.task(name="queues.draft", shared=False, acks_late=True)(_draft)
        self.draft = budgeted(budget="tenant:a", estimate=1)(task)
        self.queues = KombuQueues(shop.app)

    def publish(self, **options: Any) -> str:
        """Publish a message; return its envelope."""
        result = self.draft.apply_async(**options)
        assert self.shop.relay().published == 1
        return self.envelope(result.id)

    def envelope(self, task_id: str) -> str:
        rows = [row for row in self.shop.rows(schema.outbox) if row.task_id == task_id]
        return str(rows[0].envelope)

    def is_empty(self, envelope: str, broker: str = "") -> bool | None:
        return self.queues.is_empty(broker, envelope)


def _draft(*args: object) -> None:
    pass


@pytest.fixture
def make_queued(make_shop: MakeShop) -> Iterator[Callable[..., Queued]]:
    """Make a :class:`Queued` from settings."""
    made: list[Queued] = []

    def make(**conf: Any) -> Queued:
        made.append(Queued(make_shop(**conf)))
        return made[-1]

    yield make
    for queued in made:
        queued.queues.close()


def test_a_queue_is_empty_when_nothing_waits_there(
    make_queued: Callable[..., Queued], conf: dict[str, Any]
) -> None:
    queued = make_queued(**conf)
    envelope = queued.publish()
    assert queued.is_empty(envelope) is False
    assert len(queued.shop.received()) == 1
    assert queued.is_empty(envelope) is True
    queued.publish(priority=9)
    assert queued.is_empty(envelope) is False


@pytest.mark.parametrize("listens", [True, False])
def test_where_no_worker_can_say_what_it_consumes_preflight_tells_why(
    make_shop: MakeShop, listens: bool
) -> None:
    shop = make_shop(broker_url="memory://", worker_enable_remote_control=listens)
    workers = CeleryWorkers(shop.app)
    told = str(workers.missing("", ("llm",), works=False))
    workers.close()
    assert told.startswith("no worker consumes queue 'llm'")
    assert ("worker_enable_remote_control is off" in told) is not listens


def test_a_queue_that_is_gone_is_empty(
    make_queued: Callable[..., Queued], conf: dict[str, Any]
) -> None:
    """RabbitMQ closes the channel by which it was asked; what is asked next is answered."""
    queued = make_queued(**conf)
    envelope = queued.publish()
    assert queued.is_empty(envelope) is False
    queue = queued.shop.app.conf.task_default_queue
    with queued.shop.app.connection_for_write() as connection:
        # Of a queue that it has not bound itself a virtual channel deletes nothing.
        connection.default_channel.queue_purge(queue)
        connection.default_channel.queue_delete(queue)
    assert queued.is_empty(envelope) is True
    other = queued.publish(queue=f"other-{queue}")
    assert queued.is_empty(other) is False


@pytest.mark.parametrize("route", ["bound by a key", "by exchange and key", "nobody knows"])
def test_a_queue_is_found_by_its_name_and_not_by_its_key(
    make_queued: Callable[..., Queued], conf: dict[str, Any], unique_name: str, route: str
) -> None:
    exchange = Exchange(f"x-{unique_name}", type="direct")
    queued = make_queued(**conf)
    app = queued.shop.app
    queue = Queue(f"q-{unique_name}", exchange, routing_key="some.key")
    if route == "nobody knows":
        with app.connection_for_write() as connection:
            queue(connection.default_channel).declare()
        options: dict[str, Any] = {"exchange": exchange.name, "routing_key": "some.key"}
    else:
        app.amqp.queues.add(queue)
        with app.connection_for_write() as connection:
            queue(connection.default_channel).declare()
        options = {"queue": queue.name}
        if route == "by exchange and key":
            options = {"exchange": exchange.name, "routing_key": "some.key"}
    envelope = queued.publish(**options)
    expected = None if route == "nobody knows" else False
    assert queued.is_empty(envelope) is expected
    queued.shop.received(queue.name)
    assert queued.is_empty(envelope) is (None if route == "nobody knows" else True)


def test_a_broker_that_is_down_tells_nothing(make_queued: Callable[..., Queued]) -> None:
    queued = make_queued()
    envelope = queued.publish()
    elsewhere = make_queued(broker_url="amqp://guest:guest@127.0.0.1:1//")
    assert elsewhere.is_empty(envelope) is None


def test_a_broker_that_does_not_answer_is_given_up_and_left_alone_for_a_while(
    make_queued: Callable[..., Queued], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues_module, "ANSWER_SECONDS", 0.2)
    queued = make_queued()
    envelope = queued.publish()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for scheme in ("redis", "amqp"):
            hanging = make_queued(broker_url=f"{scheme}://127.0.0.1:{port}/")
            began = time.monotonic()
            assert hanging.is_empty(envelope) is None
            assert time.monotonic() - began < 10
            # It is not asked again: nothing is opened.
            monkeypatch.setattr(installed_on(hanging.shop.app).brokers, "connection", None)
            assert hanging.is_empty(envelope) is None


@pytest.mark.rabbitmq
def test_a_connection_that_was_ended_is_opened_anew(
    make_queued: Callable[..., Queued], own_rabbitmq: RabbitServer
) -> None:
    queued = make_queued(broker_url=own_rabbitmq.create_vhost())
    envelope = queued.publish()
    assert queued.is_empty(envelope) is False
    own_rabbitmq.close_connections()
    assert queued.is_empty(envelope) is False


@pytest.mark.redis
def test_another_broker_is_asked_by_its_name(
    make_queued: Callable[..., Queued], redis_url: str
) -> None:
    queued = make_queued(budget_brokers={"eu": redis_url})
    with Connection(redis_url) as connection:
        envelope = queued.publish(connection=connection)
    assert queued.is_empty(envelope, "eu") is False
    assert queued.is_empty(envelope) is True, "it is not here"
    assert queued.is_empty(envelope, "unknown") is None


def test_what_cannot_be_read_tells_nothing(make_queued: Callable[..., Queued]) -> None:
    assert make_queued().is_empty("no envelope") is None


@pytest.mark.parametrize("lost", [False, True], ids=["a backlog", "lost"])
def test_only_what_is_lost_is_published_again(
    make_queued: Callable[..., Queued], conf: dict[str, Any], lost: bool
) -> None:
    """The sweep, the relay and a real queue that nobody consumes, as after three hours."""
    queued = make_queued(**conf)
    shop, queue = queued.shop, queued.shop.app.conf.task_default_queue
    for _ in range(5):
        queued.publish()
    if lost:
        with shop.app.connection_for_write() as connection:
            connection.default_channel.queue_purge(queue)
    for _ in range(3):
        shop.sql(schema.outbox.update().values(due_us=1, published_us=1))
        shop.sweep()
        published = shop.relay().published
        assert published == (5 if lost else 0)
        lost = False
    assert len(shop.received()) == 5


def test_a_thread_asks_while_another_publishes(make_queued: Callable[..., Queued]) -> None:
    """The sweep has connections of its own."""
    queued = make_queued()
    envelope = queued.publish()
    seen: list[bool | None] = []
    asking = threading.Thread(target=lambda: seen.append(queued.is_empty(envelope)))
    asking.start()
    queued.publish()
    asking.join()
    assert seen == [False]
