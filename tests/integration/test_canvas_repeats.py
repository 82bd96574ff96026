"""A canvas under its request id once more: at any time, by two at once, in part, released."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
import sqlalchemy as sa
from celery import chain, chord, group
from celery.backends import cache
from redis import Redis
from sqlalchemy import event

from celery_budget import RequestConflict
from celery_budget.store import schema
from tests.contract.racers import at_once
from tests.integration.publication.sides import Side
from tests.integration.publication.tasks import Tasks, conf
from tests.integration.support import Shop


class Counters(cache.CacheBackend):
    """Counts members by plain counters, and is told of each chord once or fails.

    As memcached, DynamoDB and GCS count; as Django's backend is told. Each thread has one of its
    own; what they keep is one.
    """

    #: The groups they were told of, in order; and what is called before.
    told: ClassVar[list[str]] = []
    before: ClassVar[Callable[[], None]]

    def _apply_chord_incr(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        self.before()
        assert header_result_args[0] not in self.told
        self.told.append(header_result_args[0])
        super()._apply_chord_incr(header_result_args, body, **kwargs)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of such a backend, which is empty."""
    monkeypatch.setattr(cache, "_DUMMY_CLIENT_CACHE", type(cache._DUMMY_CLIENT_CACHE)())
    monkeypatch.setattr(Counters, "told", [])
    monkeypatch.setattr(Counters, "before", lambda self: None, raising=False)
    return f"{__name__}:Counters+memory://"


@pytest.fixture(
    params=[
        pytest.param("redis", marks=[pytest.mark.redis, pytest.mark.postgres]),
        pytest.param("counters", marks=[pytest.mark.rabbitmq, pytest.mark.postgres]),
        "counters embedded",
        pytest.param("polled", marks=[pytest.mark.rabbitmq]),
    ]
)
def side(
    request: pytest.FixtureRequest, make_shop: Callable[..., Shop], tmp_path: Path
) -> Iterator[Side]:
    """An application with a budget of 100 tokens; each kind of result backend, broker and store."""
    get = request.getfixturevalue
    settings = conf(f"again-{uuid4().hex[:6]}")
    if request.param == "redis":
        url = get("redis_url")
        settings |= {"broker_url": url, "result_backend": url}
    elif request.param == "polled":
        (tmp_path / "results").mkdir()
        settings |= {"result_backend": f"file://{tmp_path / 'results'}"}
    else:
        settings |= {"result_backend": get("counters")}
    if request.param in ("counters", "polled"):
        settings |= {
            "broker_url": get("rabbitmq_url"),
            "broker_transport_options": {"confirm_publish": True},
        }
    if request.param in ("redis", "counters"):
        settings |= {"budget_database_url": get("postgres_url")}
    made = _side(make_shop(**settings))
    yield made
    consumer = getattr(made.app.backend, "result_consumer", None)
    getattr(consumer, "subscribed_to", set()).clear()


@pytest.fixture
def counting(on_both: Shop, counters: str) -> Side:
    """An application on either store whose chords' members are counted by plain counters."""
    on_both.app.conf.update(result_backend=counters, **conf(f"again-{uuid4().hex[:6]}"))
    return _side(on_both)


def _side(shop: Shop) -> Side:
    side = Side(Tasks(shop.app, budgets=True), shop)
    side.tasks.tenant = "a"
    shop.budget.set("tenant:a", limit=100)
    shop.app.finalize()
    return side


def header(t: Tasks) -> list[Any]:
    return [t.work.s(1, "a"), t.plain.s(2), t.work.s(3, "a")]


def a_chord(t: Tasks) -> Any:
    return chord(header(t), t.total.s("a")).apply_async(request_id="r")


def a_chain_to_a_chord(t: Tasks) -> Any:
    return (group(header(t)) | t.total.s("a")).apply_async(request_id="r")


def a_chord_in_a_group(t: Tasks) -> Any:
    return group(chord(header(t), t.total.s("a")), t.work.s(4, "a")).apply_async(request_id="r")


def a_chord_without_a_budget(t: Tasks) -> Any:
    inner = chord([t.plain.s(1), t.plain.s(2), t.plain.s(3)], t.total.s("a"))
    return group(t.work.s(4, "a"), inner).apply_async(request_id="r", partial=True)


def ids(result: Any) -> list[str]:
    """The ids of all that a result stands for."""
    found = [str(result.id)]
    for part in (*getattr(result, "results", ()), result.parent):
        found += ids(part) if part is not None else []
    return found


def kept(side: Side) -> Any:
    """Everything that the result backend keeps."""
    backend = side.app.backend
    if isinstance(backend, Counters):
        return dict(backend.client.cache)
    url = side.app.conf.result_backend
    if url.startswith("file://"):
        return {path.name: path.read_bytes() for path in Path(url[7:]).iterdir()}
    with Redis.from_url(url) as client:
        return {key: client.dump(key) for key in client.keys("celery-task-*")}


def waiting(side: Side) -> list[str]:
    """The tasks in the outbox that are to be published, without the polling of Celery's."""
    rows = side.shop.rows(schema.outbox)
    names = [row.task_name for row in rows if row.state == "due"]
    return sorted(name for name in names if not name.startswith("celery."))


# The result backend.


@pytest.mark.parametrize(
    "publish", [a_chord, a_chain_to_a_chord, a_chord_in_a_group, a_chord_without_a_budget]
)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_chord_that_runs_goes_on(side: Side, publish: Callable[[Tasks], Any], after: int) -> None:
    first = ids(side.publish(publish))
    messages = side.take()
    for message in messages[:after]:
        side.execute(message)
    before, ledger = kept(side), side.shop.ledger()
    assert ids(side.publish(publish)) == first
    assert (kept(side), side.shop.ledger()) == (before, ledger)
    for message in messages[after:]:
        side.execute(message)
    side.run_all()
    told = [(task, value) for task, _, value in side.tasks.told()]
    assert told.count(("paths.total", "[1, 2, 3]")) == 1
    assert len(told) == len(set(told))
    assert side.shop.budget.reconcile().ok


def test_a_chord_that_has_ended_leaves_nothing_anew(side: Side) -> None:
    side.publish(a_chord)
    side.run_all()
    before = kept(side)
    side.publish(a_chord)
    assert side.run_all() == []
    assert kept(side) == before


def test_of_two_at_once_one_tells_the_backend(
    counting: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits until the first is admitted, however long the backend takes."""
    in_hand, go_on = threading.Event(), threading.Event()

    def slowly(backend: Counters) -> None:
        in_hand.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Counters, "before", slowly)

    def first() -> list[str]:
        return ids(a_chord(counting.tasks))

    def second() -> list[str]:
        assert in_hand.wait(30)
        # It has time to come to where it waits.
        threading.Timer(0.3, go_on.set).start()
        return ids(a_chord(counting.tasks))

    one, other = at_once([first, second])
    assert one == other
    assert len(Counters.told) == 1
    assert waiting(counting) == ["paths.plain", "paths.work", "paths.work"]


def test_no_budget_is_locked_while_the_backend_is_told(
    counting: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    if counting.shop.budget.store.dialect == "sqlite":
        pytest.skip("it has one lock for everything")

    def meanwhile(backend: Counters) -> None:
        at_once([lambda: counting.tasks.work.delay(4, "a")])

    monkeypatch.setattr(Counters, "before", meanwhile)
    counting.publish(a_chord)
    assert len(waiting(counting)) == 4


def test_a_backend_that_fails_leaves_nothing(
    counting: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(backend: Counters) -> None:
        raise ConnectionError("no backend")

    before = counting.shop.ledger()
    with monkeypatch.context() as patch:
        patch.setattr(Counters, "before", fail)
        with pytest.raises(ConnectionError):
            counting.publish(a_chord)
    assert counting.shop.ledger() == before
    counting.publish(a_chord)
    counting.run_all()
    assert ("paths.total", 0, "[1, 2, 3]") in counting.tasks.told()


def test_a_chord_without_a_request_id_is_told_at_once(counting: Side) -> None:
    with counting.shop.budget.batch():
        chord(header(counting.tasks), counting.tasks.total.s("a")).apply_async()
        assert len(Counters.told) == 1


# Another canvas.


def test_another_chord_conflicts_wherever_its_budgeted_tasks_are(counting: Side) -> None:
    t = counting.tasks
    counting.publish(a_chord)
    before, ledger = kept(counting), counting.shop.ledger()
    for other in (
        lambda: chord([t.plain.s(2), t.work.s(1, "a")], t.total.s("a")),
        lambda: chord([t.plain.s(2), t.plain.s(2), t.plain.s(2), t.work.s(1, "a")], t.plain.si(1)),
        lambda: group(t.plain.s(2), chain(t.work.s(1, "a"), t.plain.s())),
    ):
        with pytest.raises(RequestConflict):
            other().apply_async(request_id="r")
    assert (kept(counting), counting.shop.ledger()) == (before, ledger)


# What has no budget.


def a_group(t: Tasks, **options: Any) -> Any:
    return group(header(t)).apply_async(request_id="r", **options)


def cancel(side: Side, *members: Any) -> None:
    for member in members:
        side.shop.budget.cancel(member.id)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("gone", [[0], [0, 2]])
def test_what_was_cancelled_is_admitted_anew_and_nothing_else(
    side: Side, gone: list[int], partial: bool
) -> None:
    result = a_group(side.tasks, partial=partial)
    messages = side.take()
    cancel(side, *(result.results[number] for number in gone))
    for _ in range(2):
        again = a_group(side.tasks, partial=partial)
        assert ids(again) == ids(result)
        assert waiting(side) == ["paths.work"] * len(gone)
    for message in messages:
        side.execute(message)
    side.run_all()
    assert side.tasks.told() == [
        ("paths.plain", 0, "2"),
        ("paths.work", 0, "1"),
        ("paths.work", 0, "3"),
    ]


def test_what_did_not_fit_the_first_time_comes_alone(side: Side) -> None:
    side.shop.budget.set("tenant:a", limit=6)
    assert len(a_group(side.tasks, partial=True).refused) == 1
    side.take()
    side.shop.budget.set("tenant:a", limit=100)
    assert a_group(side.tasks, partial=True).refused == ()
    assert waiting(side) == ["paths.work"]


def test_a_chord_that_did_not_fit_the_first_time_is_whole_then(side: Side) -> None:
    t = side.tasks

    def publish() -> Any:
        members = [t.work.s(4, "a"), chord(header(t), t.total.s("a")), t.plain.s(5)]
        return group(members).apply_async(request_id="r", partial=True)

    side.shop.budget.set("tenant:a", limit=6)
    assert len(publish().refused) == 2
    assert waiting(side) == ["paths.plain", "paths.work"]
    side.run_all()
    side.shop.budget.set("tenant:a", limit=100)
    for _ in range(2):
        assert publish().refused == ()
        assert waiting(side) == ["paths.plain", "paths.work", "paths.work"]
    side.run_all()
    assert ("paths.total", 0, "[1, 2, 3]") in side.tasks.told()
    assert len(side.tasks.ran) == 6


def test_a_group_of_which_nothing_fits_leaves_what_has_no_budget(side: Side) -> None:
    side.shop.budget.set("tenant:a", limit=1)
    assert len(a_group(side.tasks, partial=True).refused) == 2
    assert waiting(side) == []
    side.shop.budget.set("tenant:a", limit=100)
    a_group(side.tasks, partial=True)
    assert waiting(side) == ["paths.plain", "paths.work", "paths.work"]


def test_one_canvas_twice_in_a_batch(side: Side) -> None:
    with side.shop.budget.batch():
        a_group(side.tasks)
        a_group(side.tasks)
    assert waiting(side) == ["paths.plain", "paths.work", "paths.work"]


def test_a_member_that_is_admitted_anew_runs_by_itself(side: Side) -> None:
    """Its chord has been told that it was cancelled, and has failed."""
    result = side.publish(a_chord)
    messages = side.take()
    cancel(side, result.parent.results[0])
    for message in messages:
        side.execute(message)
    side.publish(a_chord)
    side.run_all()
    assert side.tasks.told() == [
        ("paths.plain", 0, "2"),
        ("paths.work", 0, "1"),
        ("paths.work", 0, "3"),
    ]


def test_a_lost_answer_doubles_nothing_that_was_published_meanwhile(counting: Side) -> None:
    if counting.shop.budget.store.dialect == "sqlite":
        pytest.skip("nothing lies between SQLite and its file")
    arrived: list[Any] = []
    with answer_lost(counting, lambda: arrived.extend(counting.take())):
        counting.publish(a_chord)
    arrived += counting.take()
    assert sorted(message.headers["task"] for message in arrived) == [
        "paths.plain",
        "paths.work",
        "paths.work",
    ]
    assert len(Counters.told) == 1


@contextmanager
def answer_lost(side: Side, meanwhile: Callable[[], None]) -> Iterator[None]:
    """Have the answer to the next commit that writes a message be lost, and time pass."""
    engine = side.shop.budget.store._engine
    lost: list[bool] = []

    @event.listens_for(engine, "before_cursor_execute")
    def execute(connection: sa.Connection, _: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT INTO budget_outbox"):
            connection.info["wrote"] = True

    @event.listens_for(engine, "commit")
    def commit(connection: sa.Connection) -> None:
        if not lost and connection.info.pop("wrote", False):
            lost.append(True)
            connection.connection.dbapi_connection.commit()  # type: ignore[union-attr]
            meanwhile()
            raise sa.exc.OperationalError("COMMIT", {}, ConnectionError("lost"), None)  # type: ignore[arg-type]

    try:
        yield
    finally:
        event.remove(engine, "commit", commit)
        event.remove(engine, "before_cursor_execute", execute)
    assert lost
