"""kill -9 in the middle of thirty jobs: each ends once, nothing is billed twice or left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_budget.store.schema import attempts
from tests.cluster import WAIT, Cluster, eventually
from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import RabbitServer
from tests.services.redis import RedisServer

pytestmark = pytest.mark.fault

JOBS = 30
USED = 5
MakeCluster = Callable[..., Cluster]


class Jobs:
    """Thirty jobs of one tenant on a cluster with short leases."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        cluster.budget.set("tenant:a", limit=1000, unit="tokens")
        busy = cluster.task("busy")
        self.results = [busy.delay(number, 0.15, "a") for number in range(JOBS)]

    def wait_until_in_the_middle(self) -> None:
        """Wait until some have ended, some run and many wait."""
        eventually(lambda: sum(line.startswith("end") for line in self.cluster.journal()), _some)

    def check(self) -> None:
        """Check that every job ended once, as its own success, and that the ledger adds up."""
        cluster = self.cluster
        assert [result.get(timeout=WAIT) for result in self.results] == list(range(JOBS))
        cluster.settle()
        counts = cluster.counts()
        assert (counts["admitted"], counts["settled"]) == (JOBS, JOBS)
        balance = cluster.budget.balance("tenant:a")
        assert (balance.reserved, balance.spent) == (0, JOBS * USED)
        with cluster.budget.store.transaction() as connection:
            ended = Counter(
                row.reservation_id
                for row in connection.execute(attempts.select())
                if row.outcome == "returned"
            )
        assert sorted(ended.values()) == [1] * JOBS
        assert _reconcile(cluster) == 0


def _some(ended: int) -> bool:
    return ended >= 5


def _reconcile(cluster: Cluster) -> int:
    process = cluster.start("reconcile", "budget", "reconcile")
    return process.popen.wait(WAIT)


def _conf(broker: str, results: str, ledger: str, **more: Any) -> dict[str, Any]:
    return {
        "broker_url": broker,
        "result_backend": results,
        "budget_database_url": ledger,
        "budget_republish_seconds": 2,
        **more,
    }


@pytest.mark.parametrize("store", ["sqlite_url", "postgres_url"])
def test_relay_between_publish_and_mark(
    redis_url: str, request: pytest.FixtureRequest, store: str, make_cluster: MakeCluster
) -> None:
    ledger = request.getfixturevalue(store)
    cluster = make_cluster(**_conf(redis_url, redis_url, ledger, shop_die_after="publish"))
    jobs = Jobs(cluster)
    cluster.worker()
    dying = cluster.start("relay", "budget", "relay")
    assert dying.popen.wait(WAIT) != 0
    # Its first message is with the broker and not marked; another relay publishes it again.
    cluster.beat()
    jobs.check()


@pytest.mark.parametrize("broker", ["redis_url", "rabbitmq_url"])
def test_child_of_the_worker(
    redis_url: str,
    postgres_url: str,
    request: pytest.FixtureRequest,
    broker: str,
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(**_conf(request.getfixturevalue(broker), redis_url, postgres_url))
    jobs = Jobs(cluster)
    cluster.beat()
    worker = cluster.worker()
    jobs.wait_until_in_the_middle()
    for child in worker.children():
        child.kill()
    jobs.check()


@pytest.mark.parametrize("store", ["sqlite_url", "postgres_url"])
@pytest.mark.parametrize("broker", ["redis_url", "rabbitmq_url", "embedded"])
def test_main_process_of_the_worker(
    redis_url: str,
    request: pytest.FixtureRequest,
    broker: str,
    store: str,
    make_cluster: MakeCluster,
) -> None:
    ledger = request.getfixturevalue(store)
    found = request.getfixturevalue(broker)
    conf = found if broker == "embedded" else _conf(found, redis_url, ledger)
    cluster = make_cluster(**{**conf, "budget_database_url": ledger, "budget_republish_seconds": 2})
    jobs = Jobs(cluster)
    cluster.beat()
    worker = cluster.worker()
    jobs.wait_until_in_the_middle()
    worker.kill()
    cluster.worker()
    jobs.check()


def test_worker_that_dies_right_after_its_claim(
    redis_url: str, postgres_url: str, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster(**_conf(redis_url, redis_url, postgres_url, shop_die_after="claim"))
    jobs = Jobs(cluster)
    cluster.beat()
    cluster.worker()
    jobs.check()


def test_postgresql(
    own_postgres: PostgresServer, redis_url: str, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster(**_conf(redis_url, redis_url, own_postgres.create_database()))
    jobs = Jobs(cluster)
    cluster.beat()
    cluster.worker()
    jobs.wait_until_in_the_middle()
    own_postgres.kill()
    own_postgres.restart()
    jobs.check()


def test_rabbitmq(
    own_rabbitmq: RabbitServer, redis_url: str, postgres_url: str, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster(**_conf(own_rabbitmq.create_vhost(), redis_url, postgres_url))
    jobs = Jobs(cluster)
    cluster.beat()
    cluster.worker()
    jobs.wait_until_in_the_middle()
    own_rabbitmq.kill()
    own_rabbitmq.restart()
    jobs.check()


def test_redis(own_redis: RedisServer, postgres_url: str, make_cluster: MakeCluster) -> None:
    cluster = make_cluster(**_conf(own_redis.url, own_redis.url, postgres_url))
    jobs = Jobs(cluster)
    cluster.beat()
    cluster.worker()
    jobs.wait_until_in_the_middle()
    own_redis.kill()
    own_redis.restart()
    jobs.check()


def test_redis_that_comes_back_empty(
    own_redis: RedisServer, postgres_url: str, tmp_path: Path, make_cluster: MakeCluster
) -> None:
    """Messages that the broker lost are published again from the ledger."""
    results = f"file://{tmp_path / 'results'}"
    (tmp_path / "results").mkdir()
    cluster = make_cluster(**_conf(own_redis.url, results, postgres_url))
    jobs = Jobs(cluster)
    cluster.beat()
    cluster.worker()
    jobs.wait_until_in_the_middle()
    own_redis.flush()
    jobs.check()
