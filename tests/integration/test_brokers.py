"""Which broker a message goes to, how urgent it is there, and what a broker's answer leads to."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import kombu
import pytest
from celery import states
from kombu import Connection, Exchange, Queue
from kombu.transport.redis import Channel as RedisChannel
from redis import Redis

from celery_budget import budgeted
from celery_budget.errors import (
    BudgetExceeded,
    ConfigurationError,
    NotQuarantined,
    UnsupportedPublication,
)
from celery_budget.integration import links, ways
from celery_budget.integration.results import BackendResults
from celery_budget.relay import Relay, Relayed
from celery_budget.store import schema
from tests.integration.support import Shop, received
from tests.messages import Told
from tests.services import rabbitmq
from tests.services.rabbitmq import RabbitServer

NEVER = threading.Event()
NOWHERE = "amqp://guest:secret@127.0.0.1:1//"

MakeShop = Callable[..., Shop]

on_rabbitmq = pytest.mark.rabbitmq
#: Before 5.7 kombu cannot have messages for Redis written together; `test_releases` has that.
in_pipelines = pytest.mark.skipif(
    not getattr(RedisChannel, "supports_batch_publish", False), reason="kombu 5.7 has pipelines"
)


def budgeted_task(shop: Shop, name: str = "brokers.draft") -> Any:
    """A task that draws one token; its argument may be of any size."""
    return budgeted(budget="tenant:a", estimate=1)(shop.app.task(name=name, shared=False)(_draft))


def _draft(*args: object) -> None:
    pass


def ids(messages: list[Any]) -> list[str]:
    return [message.headers["id"] for message in messages]


def reasons(shop: Shop) -> list[str]:
    return [one.reason for one in shop.budget.quarantine()]


def a_relay(shop: Shop) -> Relay:
    """A relay that goes on from one pass to the next."""
    budget = shop.budget
    return Relay(budget.store, budget.settings, shop.publisher, BackendResults(shop.app).ended)


# Priorities, as the broker itself has them.


@pytest.mark.parametrize(
    ("url", "ranks"),
    [
        ("amqp://guest@127.0.0.1:1//", {None: 9, 0: 9, 3: 6, 9: 0, 200: 0}),
        ("redis://127.0.0.1:1/0", {None: 0, 0: 0, 3: 3, 9: 9}),
        ("memory://", {None: 0, 0: 0, 3: 3, 9: 9}),
    ],
)
def test_the_relay_has_the_order_of_the_broker(
    make_shop: MakeShop, url: str, ranks: dict[int | None, int]
) -> None:
    shop = make_shop(broker_url=url)
    draft = budgeted_task(shop)
    for priority in ranks:
        draft.apply_async(priority=priority)
    found = sorted(shop.rows(schema.outbox), key=lambda row: row.created_us)
    assert [row.rank for row in found] == list(ranks.values())
    # Sent by its name without one, it has kombu's default.
    shop.app.send_task("brokers.draft")
    rank = max(shop.rows(schema.outbox), key=lambda row: row.created_us).rank
    assert rank == ranks[None]


# Other brokers


@pytest.mark.parametrize("given", ["connection", "producer"])
@on_rabbitmq
@pytest.mark.redis
def test_a_task_goes_to_the_broker_it_is_sent_to(
    make_shop: MakeShop, redis_url: str, rabbitmq_url: str, given: str
) -> None:
    shop = make_shop(broker_url=redis_url, budget_brokers={"rabbit": rabbitmq_url})
    draft = budgeted_task(shop)
    with Connection(rabbitmq_url) as connection:
        options = {
            "connection": {"connection": connection},
            "producer": {"producer": shop.app.amqp.Producer(connection, auto_declare=False)},
        }[given]
        there = draft.apply_async(priority=9, **options)
    here = draft.delay()
    rows = {row.task_id: (row.broker, row.rank) for row in shop.rows(schema.outbox)}
    assert rows == {there.id: ("rabbit", 0), here.id: ("", 0)}
    for table in (schema.outbox, schema.reservations):
        assert rabbitmq_url not in repr(shop.rows(table))
    assert shop.relay() == Relayed(published=2, taken=2)
    assert ids(shop.received()) == [here.id]
    queue = shop.app.conf.task_default_queue
    with shop.app.connection_for_write(rabbitmq_url) as connection:
        message = connection.default_channel.basic_get(queue, no_ack=True)
    assert message.headers["id"] == there.id


@pytest.mark.parametrize(
    "url",
    [
        "amqp://guest:secret@127.0.0.1:1/other",
        "amqp://somebody:secret@127.0.0.1:1//",
        "amqp://guest:secret@127.0.0.2:1//",
        "amqp://guest:secret@127.0.0.1:2//",
        "redis://127.0.0.1:1/0",
    ],
)
def test_a_broker_without_a_name_is_refused(make_shop: MakeShop, url: str) -> None:
    shop = make_shop(broker_url=NOWHERE, budget_brokers={"eu": "amqp://guest@127.0.0.3:1//"})
    draft = budgeted_task(shop)
    with Connection(url) as connection, pytest.raises(UnsupportedPublication) as caught:
        draft.apply_async(connection=connection)
    assert "budget_brokers" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert shop.rows(schema.outbox) == []
    assert shop.amounts("tenant:a") == (0, 0, 10)


@pytest.mark.parametrize(
    "url",
    [
        "amqp://guest:another@127.0.0.1:1//",
        "amqp://guest@localhost:1//",
        "pyamqp://127.0.0.1:1",
        "amqp://guest@127.0.0.9:1//",
    ],
)
def test_the_applications_own_broker_is_known_by_its_place(make_shop: MakeShop, url: str) -> None:
    """Whatever the password, the spelling, or which of several nodes."""
    shop = make_shop(broker_url=f"{NOWHERE};amqp://guest@127.0.0.9:1//")
    with Connection(url) as connection:
        budgeted_task(shop).apply_async(connection=connection)
    assert [row.broker for row in shop.rows(schema.outbox)] == [""]


@pytest.mark.redis
def test_a_broker_that_is_down_holds_up_only_its_own(make_shop: MakeShop, redis_url: str) -> None:
    shop = make_shop(broker_url=redis_url, budget_brokers={"down": NOWHERE}, budget_batch_size=2)
    draft = budgeted_task(shop)
    with Connection(NOWHERE) as connection:
        for _ in range(4):
            draft.apply_async(connection=connection)
    fine = [draft.delay().id for _ in range(4)]
    one = a_relay(shop)
    relayed = [one.run_once(NEVER) for _ in range(3)]
    assert [passed.published for passed in relayed] == [2, 2, 0]
    assert not any(passed.broker_down for passed in relayed)
    assert sorted(ids(shop.received())) == sorted(fine)
    waiting = [row for row in shop.rows(schema.outbox) if row.broker == "down"]
    assert [row.state for row in waiting] == ["due"] * 4


# What the configuration may forbid


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"broker_transport_options": {"confirm_publish": False}}, "confirm_publish"),
        ({"budget_brokers": {"eu": "nothing://host"}}, r"budget_brokers\['eu'\]"),
        (
            {
                "broker_url": "memory://",
                "budget_brokers": {"eu": NOWHERE},
                "broker_transport_options": {"confirm_publish": False},
            },
            r"budget_brokers\['eu'\]",
        ),
    ],
)
def test_what_makes_a_relay_impossible_is_told_at_its_start(
    make_shop: MakeShop, conf: dict[str, Any], said: str
) -> None:
    shop = make_shop(**{"broker_url": NOWHERE, **conf})
    with pytest.raises(ConfigurationError, match=said):
        shop.publisher.check()


@pytest.mark.parametrize("url", [NOWHERE, "redis://127.0.0.1:1/0", "memory://"])
def test_a_broker_need_not_be_up_to_be_checked(make_shop: MakeShop, url: str) -> None:
    options = {"confirm_publish": True}
    make_shop(broker_url=url, broker_transport_options=options).publisher.check()


# Queues are declared once a connection, and again where they are gone.


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the queues that are declared, each time they are."""
    names: list[str] = []
    whole = kombu.Queue.declare

    def declare(self: Queue, *args: Any, **options: Any) -> Any:
        names.append(self.name)
        return whole(self, *args, **options)

    monkeypatch.setattr(kombu.Queue, "declare", declare)
    return names


@pytest.fixture(
    params=[
        pytest.param("rabbitmq_url", marks=pytest.mark.rabbitmq),
        pytest.param("redis_url", marks=pytest.mark.redis),
    ]
)
def broker_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_a_queue_is_declared_once_a_connection(
    make_shop: MakeShop, broker_url: str, declared: list[str]
) -> None:
    shop = make_shop(broker_url=broker_url)
    draft = budgeted_task(shop)
    queue = shop.app.conf.task_default_queue
    for _ in range(5):
        draft.delay()
    assert shop.relay().published == 5
    assert declared == [queue]
    shop.publisher.reset()
    draft.delay()
    assert shop.relay().published == 1
    assert declared == [queue] * 2


@on_rabbitmq
def test_a_queue_that_was_deleted_is_declared_again(
    make_shop: MakeShop, rabbitmq_url: str, declared: list[str]
) -> None:
    shop = make_shop(broker_url=rabbitmq_url)
    draft = budgeted_task(shop)
    queue = shop.app.conf.task_default_queue
    draft.delay()
    assert shop.relay().published == 1
    with rabbitmq.connect(rabbitmq_url) as connection:
        connection.channel().queue_delete(queue)
    wanted = [draft.delay().id for _ in range(3)]
    assert shop.relay() == Relayed(published=3, taken=3)
    assert ids(shop.received()) == wanted
    assert declared == [queue] * 2


@pytest.mark.redis
def test_a_redis_that_was_emptied_is_told_its_bindings_again(
    make_shop: MakeShop, redis_url: str
) -> None:
    """As after a failover to an empty server, which a connection need not notice."""
    topic = Queue("topic", Exchange("topic", type="topic"), routing_key="draft.#")
    shop = make_shop(broker_url=redis_url)
    shop.app.amqp.queues.add(topic)
    draft = budgeted_task(shop)
    options = {"queue": "topic", "routing_key": "draft.new"}
    draft.apply_async(**options)
    assert shop.relay().published == 1
    with Redis.from_url(redis_url) as client:
        client.flushdb()
    wanted = draft.apply_async(**options).id
    assert shop.relay() == Relayed(published=1, taken=1)
    assert ids(received(shop.app, "topic")) == [wanted]


@pytest.mark.redis
def test_what_no_queue_on_redis_gets_goes_into_quarantine(
    make_shop: MakeShop, redis_url: str
) -> None:
    shop = make_shop(broker_url=redis_url)
    draft = budgeted_task(shop)
    draft.apply_async(exchange=Exchange("nowhere", type="topic"), routing_key="x")
    fine = draft.delay().id
    assert shop.relay() == Relayed(published=1, failed=1, quarantined=1, taken=2)
    assert reasons(shop) == ["unroutable"]
    assert ids(shop.received()) == [fine]


# What RabbitMQ refuses


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connections that are opened."""
    opened: list[Any] = []
    whole = kombu.Connection.ensure_connection

    def ensure(self: Connection, *args: Any, **options: Any) -> Any:
        opened.append(self)
        return whole(self, *args, **options)

    monkeypatch.setattr(kombu.Connection, "ensure_connection", ensure)
    return opened


@on_rabbitmq
def test_an_exchange_that_is_missing_costs_a_channel_and_no_connection(
    make_shop: MakeShop, rabbitmq_url: str, sockets: list[Any]
) -> None:
    shop = make_shop(broker_url=rabbitmq_url)
    draft = budgeted_task(shop)
    lost = draft.apply_async(exchange=Exchange("nowhere", type="topic"), routing_key="x")
    unbound = draft.apply_async(exchange="amq.direct", routing_key="nobody")
    fine = [draft.delay().id for _ in range(3)]
    assert shop.relay() == Relayed(published=3, failed=2, quarantined=2, taken=5)
    assert len(sockets) == 1
    assert ids(shop.received()) == fine
    assert reasons(shop) == ["unroutable"] * 2
    assert {one.task_id for one in shop.budget.quarantine()} == {lost.id, unbound.id}
    assert "NOT_FOUND" in shop.budget.quarantine()[1].error
    assert lost.state == states.FAILURE
    assert shop.amounts("tenant:a") == (3, 0, 7)
    assert shop.budget.reconcile().ok


@on_rabbitmq
def test_a_full_queue_is_tried_again_then_given_up(
    make_shop: MakeShop, rabbitmq_url: str, sockets: list[Any]
) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    full = Queue("full", Exchange("full"), routing_key="full", queue_arguments=arguments)
    shop = make_shop(broker_url=rabbitmq_url, budget_max_publishes=2)
    shop.app.amqp.queues.add(full)
    draft = budgeted_task(shop)
    for _ in range(3):
        draft.apply_async(queue="full")
    fine = draft.delay().id
    assert shop.relay() == Relayed(published=2, failed=2, taken=4)
    assert ids(shop.received()) == [fine]
    assert reasons(shop) == []
    shop.make_due()
    assert shop.relay() == Relayed(failed=2, quarantined=2, taken=2)
    assert reasons(shop) == ["rejected"] * 2
    assert len(sockets) == 1
    # When there is room again:
    assert len(received(shop.app, "full")) == 1
    shop.budget.requeue(shop.budget.quarantine()[0].quarantine_id)
    assert shop.relay() == Relayed(published=1, taken=1)
    assert len(received(shop.app, "full")) == 1


@on_rabbitmq
def test_what_is_too_large_goes_into_quarantine_at_once(
    make_shop: MakeShop, own_rabbitmq: RabbitServer
) -> None:
    own_rabbitmq.evaluate("application:set_env(rabbit, max_message_size, 10000).")
    try:
        shop = make_shop(broker_url=own_rabbitmq.create_vhost())
        draft = budgeted_task(shop)
        draft.delay("x" * 20_000)
        # More than AMQP has room for: in one frame, in a short string.
        draft.apply_async(headers={"more": "x" * 200_000})
        draft.apply_async(exchange="amq.direct", routing_key="x" * 300)
        fine = draft.delay("x").id
        one = a_relay(shop)
        relayed = [one.run_once(NEVER)]
        while any(row.state == "due" for row in shop.rows(schema.outbox)):
            shop.make_due()
            relayed.append(a_relay(shop).run_once(NEVER))
            assert len(relayed) < 10
        assert sum(passed.quarantined for passed in relayed) == 3
        assert reasons(shop) == ["oversize"] * 3
        assert ids(shop.received()) == [fine]
    finally:
        own_rabbitmq.evaluate("application:set_env(rabbit, max_message_size, 134217728).")


@on_rabbitmq
def test_what_cannot_be_read_goes_into_quarantine_at_once(
    make_shop: MakeShop, rabbitmq_url: str
) -> None:
    shop = make_shop(broker_url=rabbitmq_url)
    draft = budgeted_task(shop)
    draft.delay()
    shop.sql(schema.outbox.update().values(envelope="{"))
    fine = draft.delay().id
    assert shop.relay() == Relayed(published=1, failed=1, quarantined=1, taken=2)
    assert ids(shop.received()) == [fine]
    [isolated] = shop.budget.quarantine()
    assert isolated.reason == "undecodable"
    with pytest.raises(UnsupportedPublication, match="cannot be read"):
        shop.budget.requeue(isolated.quarantine_id)
    shop.budget.discard(isolated.quarantine_id)
    with pytest.raises(NotQuarantined):
        shop.budget.discard(isolated.quarantine_id)


def test_what_is_published_again_carries_its_new_reservation(make_shop: MakeShop) -> None:
    shop = make_shop()
    draft = budgeted_task(shop)
    result = draft.delay("x")
    shop.sql(schema.outbox.update().values(envelope=schema.outbox.c.envelope + "}"))
    assert shop.relay().quarantined == 1
    assert result.state == states.FAILURE
    envelope = shop.rows(schema.quarantine)[0].envelope[:-1]
    shop.sql(schema.quarantine.update().values(envelope=envelope))
    shop.budget.set("tenant:a", limit=0)
    with pytest.raises(BudgetExceeded):
        shop.budget.requeue(result.id)
    shop.budget.set("tenant:a", limit=10)
    shop.budget.requeue(result.id)
    assert shop.relay().published == 1
    [message] = shop.received()
    [row] = [row for row in shop.rows(schema.reservations) if row.state == "published"]
    assert message.headers["budget_reservation"].endswith(str(row.reservation_id))
    assert message.headers["id"] == result.id
    assert shop.budget.quarantine() == []
    with pytest.raises(NotQuarantined, match=result.id):
        shop.budget.requeue(result.id)


# Several at a time


def warm(shop: Shop, draft: Any, window: int = 8) -> None:
    """Have the broker answer until it is trusted with so many messages at a time."""
    while shop.publisher.window("") < window:
        for _ in range(shop.publisher.window("")):
            draft.delay()
        shop.relay()
    assert shop.received()


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages went out before their answers were awaited, each time.

    However slow this machine is just now.
    """
    sizes: list[int] = []
    for name in ("QUICK_SECONDS", "SLOW_SECONDS"):
        monkeypatch.setattr(links, name, 600.0)
    for way in (ways.Confirmed, ways.Pipelined):
        send = way.send

        def counted(self: Any, parcels: Any, send: Any = send) -> Any:
            sizes.append(len(parcels))
            return send(self, parcels)

        monkeypatch.setattr(way, "send", counted)
    return sizes


@on_rabbitmq
@pytest.mark.redis
@pytest.mark.parametrize("broker", [pytest.param("redis", marks=in_pipelines), "rabbitmq"])
def test_more_go_out_together_while_the_broker_answers(
    make_shop: MakeShop, redis_url: str, rabbitmq_url: str, broker: str, windows: list[int]
) -> None:
    shop = make_shop(broker_url=redis_url if broker == "redis" else rabbitmq_url)
    shop.budget.set("tenant:a", limit=100)
    draft = budgeted_task(shop)
    wanted = [draft.delay().id for _ in range(20)]
    assert shop.relay() == Relayed(published=20, taken=20)
    assert ids(shop.received()) == wanted
    assert windows == [1, 2, 4, 8, 5]
    draft.delay()
    assert shop.relay().published == 1
    assert windows[5:] == [1], "one alone does not wait for others"


@on_rabbitmq
def test_what_comes_back_of_a_window_is_told_by_its_name(
    make_shop: MakeShop, rabbitmq_url: str, windows: list[int], sockets: list[Any]
) -> None:
    shop = make_shop(broker_url=rabbitmq_url)
    shop.budget.set("tenant:a", limit=100)
    draft = budgeted_task(shop)
    nowhere = {"exchange": "amq.direct", "routing_key": "nobody"}
    # From now on the exchange is known to be there.
    draft.apply_async(**nowhere)
    assert shop.relay().quarantined == 1
    warm(shop, draft)
    windows.clear()
    first = draft.delay().id
    lost = [draft.apply_async(**nowhere).id for _ in range(2)]
    rest = [draft.delay().id for _ in range(3)]
    assert shop.relay() == Relayed(published=4, failed=2, quarantined=2, taken=6)
    # All of them together; what came back once more, since its queue may have been deleted.
    assert windows == [6, 1, 1]
    assert ids(shop.received()) == [first, *rest]
    assert {one.task_id for one in shop.budget.quarantine()} >= set(lost)
    assert len(sockets) == 1


@on_rabbitmq
def test_what_a_full_queue_refuses_of_a_window_is_told_by_its_number(
    make_shop: MakeShop, rabbitmq_url: str, windows: list[int]
) -> None:
    arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
    shop = make_shop(broker_url=rabbitmq_url)
    shop.budget.set("tenant:a", limit=100)
    shop.app.amqp.queues.add(Queue("full", queue_arguments=arguments))
    draft = budgeted_task(shop)
    draft.apply_async(queue="full")
    assert shop.relay().published == 1
    warm(shop, draft)
    windows.clear()
    tasks = [
        draft.apply_async(**where).id for where in ({"queue": "full"}, {}, {"queue": "full"}, {})
    ]
    assert shop.relay() == Relayed(published=3, failed=1, taken=4)
    assert windows == [4]
    assert ids(shop.received()) == [tasks[1], tasks[3]]
    [refused] = [row for row in shop.rows(schema.outbox) if row.state == "due"]
    assert (refused.task_id, refused.failures) == (tasks[2], 1)


@on_rabbitmq
def test_a_channel_that_closes_over_one_message_of_a_window_costs_no_other(
    make_shop: MakeShop, rabbitmq_url: str, windows: list[int], sockets: list[Any]
) -> None:
    """Its exchange was deleted since. What was not confirmed by then goes out once more."""
    shop = make_shop(broker_url=rabbitmq_url)
    shop.budget.set("tenant:a", limit=100)
    draft = budgeted_task(shop)
    gone = Queue("gone", Exchange("gone", durable=False), routing_key="gone")
    shop.app.amqp.queues.add(gone)
    draft.apply_async(queue="gone", exchange="gone", routing_key="gone")
    assert shop.relay().published == 1
    warm(shop, draft)
    with rabbitmq.connect(rabbitmq_url) as connection:
        connection.channel().exchange_delete("gone")
    windows.clear()
    before = [draft.delay().id for _ in range(2)]
    there = draft.apply_async(queue="gone", exchange="gone", routing_key="gone").id
    after = [draft.delay().id for _ in range(2)]
    assert shop.relay() == Relayed(published=5, taken=5)
    assert windows[0] == 5
    found = Counter(ids(shop.received()))
    assert set(found) == {*before, *after}
    assert max(found.values()) <= 2
    # Its exchange and queue were declared anew.
    assert ids(received(shop.app, "gone"))[-1] == there
    assert len(sockets) == 1


@on_rabbitmq
def test_a_connection_that_ends_within_a_window_leaves_its_messages_in_doubt(
    make_shop: MakeShop,
    own_rabbitmq: RabbitServer,
    windows: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = make_shop(broker_url=own_rabbitmq.create_vhost())
    shop.budget.set("tenant:a", limit=100)
    draft = budgeted_task(shop)
    warm(shop, draft)
    wanted = [draft.delay().id for _ in range(6)]
    write = ways.Confirmed._write

    def cut(self: Any, begin: int, parcels: Any) -> None:
        write(self, begin, parcels)
        if begin == 0:
            own_rabbitmq.close_connections()

    windows.clear()
    with monkeypatch.context() as patched:
        patched.setattr(ways, "TOGETHER", 4)
        patched.setattr(ways.Confirmed, "_write", cut)
        first = shop.relay()
    assert windows == [6]
    assert first.broker_down
    assert shop.publisher.window("") == 1, "with a new connection it begins anew"
    waiting = [row for row in shop.rows(schema.outbox) if row.state == "due"]
    assert len(waiting) == 6 - first.published
    assert {(row.failures, row.taken_by) for row in waiting} == {(0, None)}
    shop.make_due()
    one, published = a_relay(shop), first.published
    while published < 6:
        published += one.run_once(NEVER).published
    found = Counter(ids(shop.received()))
    assert set(found) == set(wanted)
    assert max(found.values()) <= 2


@in_pipelines
@pytest.mark.redis
def test_what_redis_refuses_of_a_pipeline_is_the_message_it_refuses(
    make_shop: MakeShop, redis_url: str, windows: list[int]
) -> None:
    shop = make_shop(broker_url=redis_url)
    shop.budget.set("tenant:a", limit=100)
    draft = budgeted_task(shop)
    warm(shop, draft)
    with Redis.from_url(redis_url) as client:
        draft.apply_async(queue="strange")
        assert shop.relay().published == 1
        # No list any more, so that nothing can be put in front of it.
        client.delete("strange")
        client.set("strange", "x")
        windows.clear()
        tasks = [draft.apply_async(**where).id for where in ({}, {"queue": "strange"}, {}, {})]
        assert shop.relay().published == 3
        assert windows == [4]
        assert ids(shop.received()) == [tasks[0], *tasks[2:]]
        row = next(row for row in shop.rows(schema.outbox) if row.task_id == tasks[1])
        assert (row.state, row.failures, row.taken_by) == ("due", 0, None)
        assert "WRONGTYPE" in row.last_error
        client.delete("strange")
    shop.make_due()
    one = a_relay(shop)
    while any(row.state == "due" for row in shop.rows(schema.outbox)):
        one.run_once(NEVER)
    assert tasks[1] in ids(received(shop.app, "strange"))


@in_pipelines
@pytest.mark.redis
def test_a_pipeline_that_breaks_leaves_its_messages_in_doubt(
    make_shop: MakeShop, redis_url: str, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has written all of them; nobody has heard it."""
    shop = make_shop(broker_url=redis_url)
    shop.budget.set("tenant:a", limit=100)
    draft = budgeted_task(shop)
    warm(shop, draft)
    wanted = [draft.delay().id for _ in range(4)]
    execute = ways.Pipelined._execute

    def broken(self: Any, written: Any) -> Any:
        execute(self, written)
        raise ConnectionResetError("reset by peer")

    windows.clear()
    with monkeypatch.context() as patched:
        patched.setattr(ways.Pipelined, "_execute", broken)
        assert shop.relay() == Relayed(taken=4, broker_down=True)
    assert windows == [4]
    rows = [row for row in shop.rows(schema.outbox) if row.state == "due"]
    assert [(row.failures, row.taken_by) for row in rows] == [(0, None)] * 4
    shop.make_due()
    assert shop.relay().published == 4
    assert Counter(ids(shop.received())) == Counter(wanted * 2)


# What a broker that is there does not answer


@on_rabbitmq
def test_a_connection_that_went_away_meanwhile_costs_no_try(
    make_shop: MakeShop, own_rabbitmq: RabbitServer, sockets: list[Any]
) -> None:
    shop = make_shop(broker_url=own_rabbitmq.create_vhost())
    draft = budgeted_task(shop)
    draft.delay()
    assert shop.relay().published == 1
    own_rabbitmq.close_connections()
    draft.delay()
    assert shop.relay() == Relayed(published=1, taken=1)
    assert len(sockets) == 2


@on_rabbitmq
@pytest.mark.parametrize("connected", [True, False])
def test_a_broker_without_memory_gets_nothing_until_it_has_some(
    make_shop: MakeShop, own_rabbitmq: RabbitServer, connected: bool, sockets: list[Any], told: Told
) -> None:
    """But for what is on its way when memory runs out, as many as were sent together: that may come
    twice."""
    shop = make_shop(broker_url=own_rabbitmq.create_vhost(), budget_publish_seconds=4)
    draft = budgeted_task(shop)
    if connected:
        draft.delay()
        assert shop.relay().published == 1
        assert len(shop.received()) == 1
    try:
        own_rabbitmq.limit_memory("{absolute, 1}")
        wanted = [draft.delay().id for _ in range(3)]
        for _ in range(3):
            relayed = shop.relay()
            assert (relayed.published, relayed.failed, relayed.broker_down) == (0, 0, True)
            shop.make_due()
        assert len(sockets) == 1 + connected, "it stays connected, once it is told"
        rows = [row for row in shop.rows(schema.outbox) if row.state == "due"]
        assert [(row.failures, row.taken_by) for row in rows] == [(0, None)] * 3
    finally:
        own_rabbitmq.limit_memory("0.8")
    one, published = a_relay(shop), 0
    while published < 3:
        published += one.run_once(NEVER).published
    assert len(sockets) == 1 + connected
    found = ids(shop.received())
    assert set(found) == set(wanted)
    # After one that was answered two go out together.
    assert len(found) <= 3 + 2 * connected
    assert told("broker.blocked")


class Line:
    """The way to a server, which can be held: nothing comes through then, either way."""

    def __init__(self, port: int) -> None:
        self._open = threading.Event()
        self._open.set()
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def hold(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.set()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [client, server]
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()


@pytest.fixture
def make_line() -> Iterator[Callable[[int], Line]]:
    made: list[Line] = []

    def make(port: int) -> Line:
        made.append(Line(port))
        return made[-1]

    yield make
    for line in made:
        line.close()


@on_rabbitmq
def test_a_broker_that_does_not_answer_is_given_up_for_a_while(
    make_shop: MakeShop, own_rabbitmq: RabbitServer, make_line: Callable[[int], Line]
) -> None:
    line = make_line(own_rabbitmq.port)
    direct = own_rabbitmq.create_vhost()
    url = direct.replace(f":{own_rabbitmq.port}/", f":{line.port}/")
    shop = make_shop(broker_url=url, budget_publish_seconds=2)
    draft = budgeted_task(shop)
    draft.delay()
    assert shop.relay().published == 1
    line.hold()
    first, second, third = (draft.delay().id for _ in range(3))
    relayed = shop.relay()
    assert (relayed.published, relayed.broker_down) == (0, True)
    rows = {row.task_id: row for row in shop.rows(schema.outbox)}
    assert [rows[one].state for one in (first, second, third)] == ["due"] * 3
    # Of the first two nobody knows: they come later. The third one was never sent.
    assert [rows[one].taken_by for one in (first, second, third)] == [None] * 3
    assert min(rows[first].due_us, rows[second].due_us) > rows[third].due_us
    line.let_go()
    shop.make_due()
    one, published = a_relay(shop), 0
    while published < 3:
        published += one.run_once(NEVER).published
    assert set(ids(shop.received())) >= {first, second, third}


@on_rabbitmq
def test_messages_that_wait_survive_a_restart_of_the_broker(
    make_shop: MakeShop, own_rabbitmq: RabbitServer
) -> None:
    shop = make_shop(broker_url=own_rabbitmq.create_vhost())
    draft = budgeted_task(shop)
    wanted = [draft.delay().id]
    assert shop.relay().published == 1
    own_rabbitmq.kill()
    wanted += [draft.delay().id for _ in range(2)]
    assert shop.relay() == Relayed(taken=2, broker_down=True)
    own_rabbitmq.restart()
    one, published = a_relay(shop), 0
    while published < 2:
        published += one.run_once(NEVER).published
    # Where the first of the two met a connection that was just ending it comes after the other.
    assert Counter(ids(shop.received())) == Counter(wanted)


@on_rabbitmq
def test_an_event_that_nobody_listens_to_is_no_failure(
    make_shop: MakeShop, rabbitmq_url: str
) -> None:
    shop = make_shop(broker_url=rabbitmq_url, task_send_sent_event=True)
    budgeted_task(shop).delay()
    assert shop.relay() == Relayed(published=2, taken=2)
    assert shop.rows(schema.quarantine) == []


@on_rabbitmq
def test_a_broker_that_withholds_the_default_exchange_is_no_failure(
    make_shop: MakeShop, own_rabbitmq: RabbitServer
) -> None:
    """The message that nobody gets, by which the connection is tried, may be forbidden."""
    url = own_rabbitmq.create_vhost()
    vhost = url.rsplit("/", 1)[1]
    own_rabbitmq.permit(vhost, write="^mine$")
    mine = Queue("mine", Exchange("mine", type="direct"), routing_key="mine")
    shop = make_shop(broker_url=url)
    shop.app.amqp.queues.add(mine)
    result = budgeted_task(shop).apply_async(queue="mine", exchange="mine", routing_key="mine")
    assert shop.relay() == Relayed(published=1, taken=1)
    assert ids(received(shop.app, "mine")) == [result.id]
