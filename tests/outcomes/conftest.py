"""One cluster for each broker, one run of everything in it for each pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.apps import ends
from tests.cluster import Cluster
from tests.outcomes import unknown  # noqa: F401 - a task that the workers do not know
from tests.outcomes.rows import POOLS, ROWS, cases
from tests.outcomes.running import Pool
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each row, in each pool of its module's broker, for each acknowledgement."""
    if "row" in metafunc.fixturenames:
        metafunc.parametrize(
            ("pool_name", "row", "ack"),
            [
                pytest.param(pool, row, ack, id=f"{pool}-{row.name}-{ack}")
                for pool, row, ack in cases(metafunc.module.BROKER)
            ],
        )


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest, cluster: Cluster) -> dict[str, Pool]:
    """What is asked of each pool: what the tests that were chosen need."""
    wanted = {
        (item.callspec.params["pool_name"], item.callspec.params["row"].name)
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    pools = {
        name: Pool(cluster, name, [row for row in ROWS if (name, row.name) in wanted])
        for name in POOLS
    }
    for pool in pools.values():
        pool.publish_what_expires()
    # All of them first: their leases lapse while others run.
    for pool in pools.values():
        pool.run_in_doomed_workers()
    return pools


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: PostgresServer,
    redis_server: RedisServer,
) -> Iterator[Cluster]:
    """The relay and what follows: each pool's own workers come and go."""
    broker: str = request.module.BROKER
    conf: dict[str, Any] = {
        "result_backend": redis_server.database_url(14 if broker == "redis" else 15),
        "budget_database_url": postgres_server.create_database(),
        "budget_lease_seconds": 10,
        "budget_republish_seconds": 20,
        "worker_enable_remote_control": True,
        # So that some wait in a worker that is busy.
        "worker_prefetch_multiplier": 4,
        "imports": [ends.__name__],
    }
    if broker == "redis":
        conf["broker_url"] = redis_server.database_url(13)
    else:
        conf["broker_url"] = request.getfixturevalue("rabbitmq_server").create_vhost()
    cluster = Cluster(tmp_path_factory.mktemp(f"outcomes-{broker}"), conf)
    try:
        # One thread: what is published later runs later.
        cluster.worker("-Q", ends.FOLLOWERS, "--budget-relay", pool="threads", concurrency=1)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def ran(pools: dict[str, Pool], pool_name: str) -> Pool:
    """A pool in which everything has run."""
    pool = pools[pool_name]
    pool.run_once()
    return pool
