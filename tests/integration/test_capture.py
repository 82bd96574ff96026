"""What the relay publishes is what Celery would have sent, but for header, tags and link ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, signals, states
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue, binding
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)
from redis import Redis

from celery_budget import budgeted
from celery_budget.integration.reprs import short_repr
from celery_budget.store import schema
from tests.cluster import eventually
from tests.integration.support import Shop, make_app, received, reservation_of
from tests.integration.wire import stop_clock, view

NAME = "captured.draft"
#: What arguments are made of.
_WRITTEN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=3),
    st.decimals(),
    st.lists(st.integers(), max_size=2),
)
NOW = datetime.now(timezone.utc)
QUEUES = [
    Queue("plain", Exchange("plain"), routing_key="plain"),
    Queue("priority", Exchange("priority"), routing_key="p", queue_arguments={"x-max-priority": 9}),
    Queue("topic", Exchange("topic", type="topic"), routing_key="draft.#"),
    Queue("transient", Exchange("transient", delivery_mode=1), routing_key="transient"),
    Queue(
        "bound",
        Exchange("first", type="topic"),
        routing_key="a.#",
        bindings=[binding(Exchange("second", type="topic"), "b.#")],
    ),
]


def tasks(app: Celery) -> tuple[Any, Any]:
    """The same two tasks on each application, none with a budget."""

    def draft(*args: Any, tenant: str = "a", **kwargs: Any) -> Any:
        return args

    def after(*args: Any) -> Any:
        return args

    return (
        app.task(name=NAME, shared=False)(draft),
        app.task(name="captured.after", shared=False)(after),
    )


def configured(url: str, **conf: Any) -> dict[str, Any]:
    return {
        "broker_url": url,
        "task_queues": QUEUES,
        "task_default_queue": "plain",
        "task_default_exchange": "plain",
        "task_default_routing_key": "plain",
        "accept_content": ["json", "pickle", "yaml"],
        **conf,
    }


@pytest.fixture(
    params=[
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
    ],
    scope="module",
)
def broker(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.flush()
        return str(server.url)
    return str(request.getfixturevalue("rabbitmq_server").create_vhost())


#: Options of ``apply_async``, given the application's second task.
CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain": lambda after: {},
    "arguments": lambda after: {"args": (1, "ä", {"x": [1.5, None]}), "kwargs": {"tenant": "a"}},
    "date arguments": lambda after: {"args": (NOW, uuid4().bytes.hex())},
    "countdown": lambda after: {"countdown": 60},
    "eta": lambda after: {"eta": NOW + timedelta(minutes=2)},
    "naive eta": lambda after: {"eta": datetime(2031, 5, 1, 12, 0)},  # noqa: DTZ001
    "expires in": lambda after: {"expires": 86_400},
    "expires at": lambda after: {"expires": NOW + timedelta(days=1)},
    "countdown and expires": lambda after: {"countdown": 5, "expires": 86_400},
    "priority": lambda after: {"queue": "priority", "priority": 7},
    "priority 0": lambda after: {"queue": "priority", "priority": 0},
    "queue": lambda after: {"queue": "topic"},
    "queue object": lambda after: {"queue": QUEUES[2]},
    "topic": lambda after: {"exchange": "topic", "routing_key": "draft.x.y"},
    "exchange object": lambda after: {
        "exchange": Exchange("topic", type="topic"),
        "routing_key": "draft.x",
    },
    "transient queue": lambda after: {"queue": "transient"},
    "transient": lambda after: {"delivery_mode": 1},
    "pickle": lambda after: {"serializer": "pickle", "args": ({1, 2},)},
    "zlib": lambda after: {"compression": "zlib", "args": ("x" * 500,)},
    "bzip2": lambda after: {"compression": "bzip2", "args": ("x" * 500,)},
    "pickle and zlib": lambda after: {"compression": "zlib", "serializer": "pickle"},
    "headers": lambda after: {"headers": {"trace": "abc", "depth": 3, "tags": ["x", {"y": None}]}},
    "stamps": lambda after: {"stamped_headers": ["tenant_stamp"], "tenant_stamp": "a"},
    "time limits": lambda after: {"time_limit": 9, "soft_time_limit": 7},
    "ignore_result": lambda after: {"ignore_result": True},
    "reply_to": lambda after: {"reply_to": "somewhere"},
    "shadow": lambda after: {"shadow": "another name"},
    "ids": lambda after: {"root_id": "the-root", "parent_id": "the-parent", "group_id": "g"},
    "link": lambda after: {"link": after.s(1)},
    "links": lambda after: {"link": [after.s(1), after.si(2) | after.s()]},
    "link with an id": lambda after: {"link": after.s(1).set(task_id="fixed")},
    "link_error": lambda after: {"link_error": [after.s(), after.si(3)]},
    "retry policy": lambda after: {"retry": True, "retry_policy": {"max_retries": 2}},
    "bindings": lambda after: {"queue": "bound", "exchange": "second", "routing_key": "b.x"},
    "mandatory": lambda after: {"mandatory": True},
    "message properties": lambda after: {"user_id": "guest", "app_id": "x", "message_id": "m"},
}


@pytest.fixture(scope="module")
def sides(
    broker: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any], Shop]]:
    """The two tasks of a plain application and of one with a budget, their clocks stopped."""
    database = tmp_path_factory.mktemp("capture") / "budget.db"
    plain = make_app(budget=False, **configured(broker))
    with_budget = make_app(**configured(broker, budget_database_url=f"sqlite:///{database}"))
    for app in (plain, with_budget):
        stop_clock(app, NOW)
    shop = Shop(with_budget, with_budget._celery_budget)
    shop.budget.init()
    shop.budget.set("tenant:a", limit=None, unit="tokens")
    plain_tasks, (draft, after) = tasks(plain), tasks(with_budget)
    draft = budgeted(budget="tenant:{tenant}", estimate=1)(draft)
    for app in (plain, with_budget):
        app.finalize()
    yield plain_tasks, (draft, after), shop
    shop.close()


def one_message(app: Celery) -> Any:
    found = [message for queue in QUEUES for message in received(app, queue.name)]
    assert len(found) == 1
    return found[0]


#: Calls of which Celery's sender is asked each time: what they give is more than where they go.
ASKED_EACH_TIME = frozenset(
    (
        "expires in",
        "expires at",
        "countdown and expires",
        "exchange object",
        "zlib",
        "bzip2",
        "pickle and zlib",
        "retry policy",
        "message properties",
    )
)


@pytest.mark.parametrize("call", CALLS)
def test_the_published_message_is_celerys(
    sides: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain, after), (draft, budgeted_after), shop = sides
    sender = shop.app.amqp.send_task_message._sender
    asked: list[str] = []
    send = sender.send
    monkeypatch.setattr(sender, "send", lambda *args, **kw: (asked.append(call), send(*args, **kw)))
    # What Celery's sender says of the first is kept for the second.
    for asked_before in (1, 2 if call in ASKED_EACH_TIME else 1):
        task_id = str(uuid4())
        plain.apply_async(task_id=task_id, **CALLS[call](after))
        direct = one_message(plain.app)
        draft.apply_async(task_id=task_id, **CALLS[call](budgeted_after))
        shop.make_due()
        assert shop.relay().published == 1
        relayed = one_message(shop.app)
        assert reservation_of(relayed) is not None
        expected, found = view(direct), view(relayed)
        if call.startswith("date"):
            # Two calls, two random arguments; everything else is compared.
            for one in (expected, found):
                del one["body"], one["headers"]["argsrepr"], one["headers"]["kwargsrepr"]
        assert found == expected
        if "expiration" in direct.properties:
            left = [int(message.properties["expiration"]) for message in (direct, relayed)]
            # The direct one was made by the clock of when the tests were collected.
            assert 0 <= left[0] - left[1] < 3_600_000
        assert len(asked) <= asked_before
    assert call not in ASKED_EACH_TIME or len(asked) == 2


def test_a_queue_that_was_changed_is_asked_for_again(shop: Shop, draft: Any) -> None:
    shop.budget.set("tenant:a", limit=None)
    queue = Queue("changing", Exchange("changing"), routing_key="changing")
    draft.apply_async(queue=queue)
    queue.exchange.type = "topic"
    draft.apply_async(queue=queue)
    first, second = (json.loads(row.envelope) for row in shop.rows(schema.outbox))
    assert (first["exchange"], second["exchange"]) == ("", "changing")


def test_receivers_that_come_later_are_heard(shop: Shop, draft: Any) -> None:
    shop.budget.set("tenant:a", limit=None)
    draft.delay()

    @signals.before_task_publish.connect(sender=NAME)
    def add(headers: Any, **_: Any) -> None:
        headers["seen"] = "yes"

    draft.delay()
    seen = [json.loads(row.envelope)["headers"].get("seen") for row in shop.rows(schema.outbox)]
    assert seen == [None, "yes"]


def test_what_the_configuration_compresses_is_compressed_each_time(
    make_shop: Callable[..., Shop],
) -> None:
    shop = make_shop(task_compression="zlib")
    draft = budgeted(budget="tenant:{tenant}", estimate=1)(tasks(shop.app)[0])
    bodies = set()
    for _ in (1, 2):
        draft.delay("x" * 500)
    for row in shop.rows(schema.outbox):
        assert json.loads(row.envelope)["headers"]["compression"] == "application/x-gzip"
        bodies.add(row.body)
    assert len(bodies) == 1
    assert len(bodies.pop()) < 100


@given(
    st.one_of(
        st.lists(_WRITTEN, max_size=5),
        st.lists(_WRITTEN, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), _WRITTEN, max_size=5),
    ),
    st.integers(10, 40),
)
def test_short_arguments_are_written_as_celery_does(arguments: Any, limit: int) -> None:
    written = short_repr(arguments, limit)
    assert written is None or written == saferepr(arguments, limit)


def test_simple_arguments_are_written_without_celerys_help() -> None:
    assert short_repr((5, "it's"), 1024) == "(5, 'it\\'s')"
    assert short_repr({"tenant": "a", "size": 1.5}, 1024) == "{'tenant': 'a', 'size': 1.5}"
    assert short_repr(([1],), 1024) is None


@pytest.mark.parametrize("call", ["plain", "countdown", "priority", "zlib", "links", "topic"])
def test_a_task_without_a_budget_is_untouched_and_sent_at_once(sides: Any, call: str) -> None:
    (plain, after), (_, budgeted_after), shop = sides
    free = shop.app.tasks["captured.after"]
    task_id = str(uuid4())
    plain.app.tasks["captured.after"].apply_async(task_id=task_id, **CALLS[call](after))
    direct = one_message(plain.app)
    before = shop.ledger()
    free.apply_async(task_id=task_id, **CALLS[call](budgeted_after))
    message = one_message(shop.app)
    assert shop.ledger() == before
    assert message.body == direct.body
    assert view(message) == view(direct)
    assert message.headers == direct.headers


@pytest.mark.redis
def test_a_task_without_a_budget_is_untouched_byte_for_byte(
    redis_url: str, sqlite_url: str
) -> None:
    raw = []
    for budget in (False, True):
        app = make_app(budget=budget, **configured(redis_url, budget_database_url=sqlite_url))
        stop_clock(app, NOW)
        _, after = tasks(app)
        after.apply_async(("ä", 1), task_id="same", countdown=5, expires=60, headers={"x": 1})
        with Redis.from_url(redis_url) as client:
            message = json.loads(client.lpop("plain"))
        message["properties"].pop("delivery_tag")
        raw.append(json.dumps(message))
    assert raw[0] == raw[1]


# Signals and events.


@pytest.fixture
def draft(shop: Shop) -> Any:
    return budgeted(budget="tenant:{tenant}", estimate=6)(tasks(shop.app)[0])


def test_what_a_before_publish_receiver_adds_is_published(shop: Shop, draft: Any) -> None:
    @signals.before_task_publish.connect(sender=NAME)
    def add(headers: Any, properties: Any, **_: Any) -> None:
        headers["seen"] = "yes"
        properties["app_id"] = "ours"

    draft.delay()
    shop.relay()
    (message,) = shop.received()
    assert message.headers["seen"] == "yes"
    assert message.properties["app_id"] == "ours"


def test_after_publish_fires_for_admitted_requests_only(shop: Shop, draft: Any) -> None:
    seen: list[str] = []

    @signals.after_task_publish.connect(sender=NAME)
    def note(headers: Any, **_: Any) -> None:
        seen.append(headers["id"])

    admitted = draft.delay()
    with pytest.raises(Exception, match="requested"):
        draft.delay()
    assert seen == [admitted.id]


def test_a_receiver_that_raises_stops_nothing(shop: Shop, draft: Any) -> None:
    @signals.before_task_publish.connect(sender=NAME)
    def fail(**_: Any) -> None:
        raise ValueError

    draft.delay()
    assert shop.counts()["admitted"] == 1


@pytest.mark.rabbitmq
def test_task_sent_events_are_published_for_admitted_requests_only(
    make_shop: Callable[..., Shop], rabbitmq_url: str
) -> None:
    shop = make_shop(broker_url=rabbitmq_url, task_send_sent_event=True)
    draft = budgeted(budget="tenant:{tenant}", estimate=6)(tasks(shop.app)[0])
    events: list[dict[str, Any]] = []
    with shop.app.connection_for_read() as connection:
        receiver = shop.app.events.Receiver(connection, {"task-sent": events.append})
        with receiver.consumer_context():
            result = draft.delay()
            with pytest.raises(Exception, match="requested"):
                draft.delay()
            again = draft.apply_async(task_id=result.id)
            assert again.id == result.id
            assert shop.relay().published == 2
            shop.relay()
            drain(connection)
    assert [event["uuid"] for event in events] == [result.id]
    assert len(shop.received()) == 1
    # The event is no request: nothing of it stays.
    assert [row.task_id for row in shop.rows(schema.outbox)] == [result.id]


def drain(connection: Connection) -> None:
    while True:
        try:
            connection.drain_events(timeout=0.2)
        except TimeoutError:
            return


# Time.


def test_an_eta_waits_in_the_outbox(shop: Shop, draft: Any) -> None:
    draft.apply_async(countdown=3600)
    assert shop.relay().taken == 0
    assert shop.received() == []
    assert shop.amounts("tenant:a") == (6, 0, 4)
    shop.make_due()
    assert shop.relay().published == 1
    (message,) = shop.received()
    assert message.headers["eta"] is not None


def test_an_expiration_is_what_is_left_when_it_is_published(shop: Shop, draft: Any) -> None:
    draft.apply_async(expires=NOW + timedelta(hours=1))
    shop.relay()
    (message,) = shop.received()
    left = NOW + timedelta(hours=1) - datetime.now(timezone.utc)
    assert abs(int(message.properties["expiration"]) - left.total_seconds() * 1000) < 5_000


@pytest.mark.parametrize("enable_utc", [True, False])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_a_countdown_is_due_by_the_clock_in_every_time_zone(
    make_shop: Callable[..., Shop], zone: str, enable_utc: bool
) -> None:
    shop = make_shop(timezone=zone, enable_utc=enable_utc)
    draft = budgeted(budget="tenant:{tenant}", estimate=1)(tasks(shop.app)[0])
    before = datetime.now(timezone.utc).timestamp()
    draft.apply_async(countdown=60, expires=120)
    (row,) = shop.rows(schema.outbox)
    assert 0 <= row.due_us / 1e6 - before - 60 < 5
    assert row.expires_us is not None
    assert 0 <= row.expires_us / 1e6 - before - 120 < 5


@pytest.mark.rabbitmq
def test_native_delayed_delivery_is_waited_out_in_the_outbox(
    make_shop: Callable[..., Shop], rabbitmq_url: str
) -> None:
    quorum = Queue(
        "quorum",
        Exchange("quorum", type="topic"),
        routing_key="quorum",
        queue_arguments={"x-queue-type": "quorum"},
    )
    shop = make_shop(broker_url=rabbitmq_url, task_queues=[quorum], task_default_queue="quorum")
    draft = budgeted(budget="tenant:{tenant}", estimate=1)(tasks(shop.app)[0])
    with shop.app.connection_for_write() as connection:
        # As the worker does when it starts.
        declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        bound = quorum(connection.default_channel)
        bound.declare()
        bind_queue_to_native_delayed_delivery_exchange(connection, bound)
    result = draft.apply_async(countdown=3600)
    assert shop.relay().taken == 0
    shop.make_due()
    assert shop.relay().published == 1
    found = eventually(lambda: shop.received("quorum"), what="the message")
    assert [message.headers["id"] for message in found] == [result.id]


@pytest.mark.parametrize("given", ["producer", "connection"])
def test_a_producer_or_a_connection_of_the_callers_sends_nothing(
    shop: Shop, draft: Any, given: str
) -> None:
    with shop.app.connection_for_write() as connection:
        options = {
            "producer": {"producer": shop.app.amqp.Producer(connection, auto_declare=False)},
            "connection": {"connection": connection},
        }[given]
        draft.apply_async(**options)
    assert shop.received() == []
    assert shop.relay().published == 1
    assert len(shop.received()) == 1


def test_what_expires_in_the_outbox_is_released_and_revoked(shop: Shop, draft: Any) -> None:
    result = draft.apply_async(countdown=60, expires=120)
    shop.sql(schema.outbox.update().values(due_us=0, expires_us=1))
    relayed = shop.relay()
    assert (relayed.published, relayed.released) == (0, 1)
    assert shop.received() == []
    assert result.state == states.REVOKED
    assert shop.amounts("tenant:a") == (0, 0, 10)
    (row,) = shop.rows(schema.reservations)
    assert (row.state, row.reason) == ("released", "expired")
    assert shop.rows(schema.outbox) == []
    assert shop.budget.reconcile().ok


@pytest.mark.rabbitmq
def test_what_no_queue_takes_goes_into_quarantine(
    make_shop: Callable[..., Shop], rabbitmq_url: str
) -> None:
    shop = make_shop(broker_url=rabbitmq_url)
    draft = budgeted(budget="tenant:{tenant}", estimate=6)(tasks(shop.app)[0])
    lost = draft.apply_async(exchange=Exchange("nowhere", type="topic"), routing_key="x")
    # Another message passes meanwhile, on the same connection.
    fine = budgeted(budget="tenant:{tenant}", estimate=1)(
        shop.app.task(name="captured.fine", shared=False)(_fine)
    ).delay(tenant="a")
    relayed = shop.relay()
    assert (relayed.published, relayed.failed, relayed.quarantined) == (1, 1, 1)
    assert [one.reason for one in shop.budget.quarantine()] == ["unroutable"]
    assert [message.headers["id"] for message in shop.received()] == [fine.id]
    assert shop.amounts("tenant:a") == (1, 0, 9)
    assert lost.state == states.FAILURE
    with pytest.raises(Exception, match="unpublishable"):
        lost.get(timeout=5)
    assert shop.budget.reconcile().ok


def _fine(tenant: str) -> None:
    pass


@pytest.mark.rabbitmq
def test_a_message_to_a_queue_that_is_full_is_kept(
    make_shop: Callable[..., Shop], rabbitmq_url: str
) -> None:
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    shop = make_shop(
        broker_url=rabbitmq_url,
        task_queues=[Queue("full", Exchange("full"), routing_key="full", queue_arguments=full)],
        task_default_queue="full",
    )
    draft = budgeted(budget="tenant:{tenant}", estimate=2)(tasks(shop.app)[0])
    ids = [draft.delay().id for _ in range(2)]
    relayed = shop.relay()
    assert (relayed.published, relayed.failed) == (1, 1)
    assert [message.headers["id"] for message in shop.received()] == ids[:1]
    shop.make_due()
    assert shop.relay().published == 1
    assert [message.headers["id"] for message in shop.received()] == ids[1:]


def test_the_ids_of_links_are_fixed_when_a_request_is_captured(shop: Shop, draft: Any) -> None:
    after = shop.task("captured.after")
    draft.apply_async(link=[after.s(1), after.s(2)], link_error=after.s(3), task_id="t")
    bodies = []
    for _ in range(2):
        # Published twice, as after a crash between publishing and marking.
        shop.make_due()
        shop.sql(schema.outbox.update().values(state="due", due_us=0))
        assert shop.relay().published == 1
        (message,) = shop.received()
        bodies.append(message.body)
    assert bodies[0] == bodies[1]
    _, _, embed = json.loads(bodies[0])
    ids = [link["options"]["task_id"] for kind in ("callbacks", "errbacks") for link in embed[kind]]
    assert len(set(ids)) == 3
