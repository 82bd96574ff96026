"""Applications for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from celery_budget.integration.context import installed_on
from tests.apps import steps, trying
from tests.cluster import Cluster
from tests.conftest import missing
from tests.integration.support import Shop, make_app
from tests.integration.tenant import Tenant
from tests.services import chromium
from tests.services.base import ServiceUnavailable
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def make_shop(sqlite_url: str) -> Iterator[Callable[..., Shop]]:
    """Make a :class:`Shop` from settings: SQLite and the in-memory broker unless told otherwise.

    Its ledger exists and has the budget ``tenant:a`` of 10 tokens.
    """
    made: list[Shop] = []

    def make(*, init: bool = True, **conf: Any) -> Shop:
        conf.setdefault("budget_database_url", sqlite_url)
        app = make_app(**conf)
        shop = Shop(app, installed_on(app))
        made.append(shop)
        if init:
            shop.budget.init()
            shop.budget.set("tenant:a", limit=10, unit="tokens")
        return shop

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    """A shop on SQLite and the in-memory broker."""
    return make_shop()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def either(request: pytest.FixtureRequest) -> dict[str, str]:
    """What a shop is made with to be on this store."""
    if request.param == "sqlite":
        return {}
    return {"budget_database_url": request.getfixturevalue("postgres_url")}


@pytest.fixture
def on_both(either: dict[str, str], make_shop: Callable[..., Shop]) -> Shop:
    """A shop on either store."""
    return make_shop(**either)


@pytest.fixture(scope="package")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: PostgresServer,
    redis_server: RedisServer,
) -> Iterator[Cluster]:
    """One worker and one beat on PostgreSQL and Redis; each test has a budget of its own."""
    cluster = Cluster(
        tmp_path_factory.mktemp("cluster"),
        {
            "broker_url": redis_server.database_url(11),
            "result_backend": redis_server.database_url(12),
            "budget_database_url": postgres_server.create_database(),
            "budget_lease_seconds": 10,
            "worker_enable_remote_control": True,
            "imports": [steps.__name__, trying.__name__],
        },
    )
    # Whatever the test that is the first to use it does to tasks that are shared.
    cluster.app.finalize()
    try:
        cluster.worker(concurrency=3)
        cluster.beat()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def tenant(cluster: Cluster) -> Tenant:
    """A budget of 100 tokens on the shared cluster."""
    return Tenant(cluster)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The module's browser. While it runs, no other event loop can in this thread."""
    try:
        opened = chromium.browser()
        found = opened.__enter__()
    except ServiceUnavailable as error:
        missing("Chromium", chromium.HOW_TO_GET, error)
    try:
        yield found
    finally:
        opened.__exit__(None, None, None)
