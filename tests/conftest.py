"""Fixtures of all tests: real servers, started when the first test asks for one.

A server that cannot be had fails the test where CI=true and skips it elsewhere, naming the service.
Tests that kill a server use the `own_*` fixtures; the session's servers belong to everybody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import pytest
from celery import _state
from hypothesis import settings

from celery_budget.events import EVENTS, PREFIX
from celery_budget.integration.task import BudgetedFunction
from tests.cluster import Cluster, embedded_in
from tests.crash.seeds import seed
from tests.messages import Told
from tests.services import pgbouncer, postgres, rabbitmq, redis
from tests.services.base import Service, ServiceUnavailable
from tests.services.pgbouncer import PgBouncer
from tests.services.postgres import ExternalPostgres, PostgresReplica, PostgresServer
from tests.services.rabbitmq import ExternalRabbit, RabbitServer
from tests.services.redis import ExternalRedis, RedisServer

Owned = TypeVar("Owned", bound=Service)

SERVERS = ("POSTGRES", "REDIS", "RABBITMQ")

#: The files that take more than a minute or two, the longest first.
LONGEST = (
    "integration/test_eager.py",
    "fault/test_spool.py",
    "contract/test_model.py",
    "fault/test_kills.py",
    "outcomes/test_on_rabbitmq.py",
    "outcomes/test_on_redis.py",
    "contract/test_relay.py",
    "integration/test_canvas_repeats.py",
    "contract/test_budget_races.py",
    "publication/test_runs.py",
    "examples/test_examples.py",
    "enlist/test_kinds.py",
)

#: A server that is killed loses nothing by these: its machine stays up, and has what was written.
UNFLUSHED = {"fsync": "off", "full_page_writes": "off"}

# The machines that run this are small and shared: how long an example takes says nothing.
settings.register_profile("budget", deadline=None, print_blob=True)
settings.load_profile("budget")


def pytest_report_header() -> str:
    """Say by which seed the tests of the crash matrix choose their cells."""
    return f"crash matrix: CRASH_SEED={seed()}"


def pytest_xdist_auto_num_workers() -> int:
    """In how many processes to test, three on two processors; each has servers of its own.

    They wait for servers and other processes for half of their time. Where a server is given by its
    URL, and so would be shared, in this process alone.
    """
    given = any(os.environ.get(f"BUDGET_TEST_{name}_URL") for name in SERVERS)
    return 0 if given else (os.cpu_count() or 1) * 3 // 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, of several processes, so that all end together.

    Each file is one process's (`--dist loadfile`), and xdist is told to keep this order.
    """
    if hasattr(config, "workerinput"):
        place = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))


def missing(name: str, how_to_get: str, error: ServiceUnavailable) -> NoReturn:
    """Fail on CI and skip elsewhere."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"{name} is needed on CI: {error}", pytrace=False)
    pytest.skip(f"no {name}: {how_to_get}")


def _own(make: Callable[[], Owned], how_to_get: str) -> Iterator[Owned]:
    """A server of its own for a test that kills it."""
    server = make()
    variable = {
        "PostgreSQL": "POSTGRES",
        "PgBouncer": "POSTGRES",
        "Redis": "REDIS",
        "RabbitMQ": "RABBITMQ",
    }[server.name]
    if os.environ.get(f"BUDGET_TEST_{variable}_URL"):
        pytest.skip(f"BUDGET_TEST_{variable}_URL is set: that {server.name} is not ours to kill")
    try:
        server.start()
    except ServiceUnavailable as error:
        missing(server.name, how_to_get, error)
    try:
        yield server
    finally:
        server.stop()


def a_postgres() -> PostgresServer:
    """A PostgreSQL that waits for no disk."""
    return PostgresServer(settings=UNFLUSHED)


@pytest.fixture(autouse=True)
def _celery_state() -> Iterator[None]:
    """Forget the applications and shared tasks of a test when it is over.

    A task is shared by `shared_task`, and by `app.task` unless told otherwise: every application
    that is finalized later gets it, before one of the same name that was declared there.
    """
    finalizers = set(_state._on_app_finalizers)
    made = list(BudgetedFunction.made)
    current, default = _state._tls.current_app, _state.default_app
    tasks = {app: set(app._tasks) for app in list(_state._get_active_apps())}
    yield
    for app in list(_state._get_active_apps()):
        if app not in tasks:
            _state._deregister_app(app)
        elif tasks[app]:
            for name in set(app._tasks) - tasks[app]:
                del app._tasks[name]
    _state._on_app_finalizers.intersection_update(finalizers)
    BudgetedFunction.made[:] = made
    _state._tls.current_app, _state.default_app = current, default


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """Return the fields of each time that an event was logged in this test."""

    def found(name: str) -> list[dict[str, Any]]:
        records = [vars(one) for one in caplog.records]
        fields = EVENTS[name].fields
        return [
            {field: one[PREFIX + field] for field in fields}
            for one in records
            if one.get(PREFIX + "event") == name
        ]

    return found


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer | ExternalPostgres]:
    """The session's PostgreSQL, for tests that leave it alone."""
    url = os.environ.get("BUDGET_TEST_POSTGRES_URL")
    if url:
        yield ExternalPostgres(url)
    else:
        yield from _own(a_postgres, postgres.HOW_TO_GET)


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    """A proxy before the session's PostgreSQL, which pools transactions."""
    yield from _own(lambda: PgBouncer(postgres_server), pgbouncer.HOW_TO_GET)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer | ExternalRedis]:
    """The session's Redis, for tests that leave it alone."""
    url = os.environ.get("BUDGET_TEST_REDIS_URL")
    if url:
        yield ExternalRedis(url)
    else:
        yield from _own(lambda: RedisServer(appendonly=False), redis.HOW_TO_GET)


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitServer | ExternalRabbit]:
    """The session's RabbitMQ, for tests that leave it alone."""
    url = os.environ.get("BUDGET_TEST_RABBITMQ_URL")
    if url:
        yield ExternalRabbit(url)
    else:
        yield from _own(RabbitServer, rabbitmq.HOW_TO_GET)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer | ExternalPostgres) -> Iterator[str]:
    """A fresh, empty PostgreSQL database."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite database that does not exist yet."""
    return f"sqlite:///{tmp_path / 'budget.db'}"


@pytest.fixture
def redis_url(redis_server: RedisServer | ExternalRedis) -> str:
    """An empty Redis database."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def rabbitmq_url(rabbitmq_server: RabbitServer | ExternalRabbit) -> str:
    """A fresh RabbitMQ virtual host; with a broker given by its URL, that one for all tests."""
    return rabbitmq_server.create_vhost()


@pytest.fixture
def unique_name() -> str:
    """A name for a queue or an exchange that no other test uses."""
    return f"budget-{uuid4().hex[:12]}"


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that the test may kill, and that keeps what was committed."""
    yield from _own(a_postgres, postgres.HOW_TO_GET)


@pytest.fixture(scope="module")
def replicated() -> Iterator[PostgresReplica]:
    """A replica of a primary of its own, for the tests of a module, which leave both running.

    A test that kills or promotes makes a `PostgresReplica` of its own, of `own_postgres`.
    """
    with contextmanager(_own)(a_postgres, postgres.HOW_TO_GET) as primary:
        yield from _own(lambda: PostgresReplica(primary, settings=UNFLUSHED), postgres.HOW_TO_GET)


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A durable Redis that the test may kill."""
    yield from _own(RedisServer, redis.HOW_TO_GET)


@pytest.fixture(scope="module")
def _module_rabbitmq() -> Iterator[RabbitServer]:
    yield from _own(RabbitServer, rabbitmq.HOW_TO_GET)


@pytest.fixture
def own_rabbitmq(_module_rabbitmq: RabbitServer) -> RabbitServer:
    """A RabbitMQ node that the test may kill; one a module, brought back for the next test."""
    if not _module_rabbitmq.alive:
        _module_rabbitmq.restart()
    return _module_rabbitmq


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make a :class:`Cluster` of processes from settings; all are stopped after the test."""
    made: list[Cluster] = []

    def make(**conf: Any) -> Cluster:
        cluster = Cluster(tmp_path, conf)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.stop()


@pytest.fixture
def embedded(tmp_path: Path) -> dict[str, Any]:
    """Settings of the embedded default, in the folder of the test."""
    return embedded_in(tmp_path)
