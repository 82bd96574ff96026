"""The whole path behind PgBouncer, which gives each transaction another session."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from celery_budget import BudgetExceeded
from tests.cluster import WAIT, Cluster, eventually
from tests.services.pgbouncer import PgBouncer
from tests.services.postgres import plain_url

pytestmark = [pytest.mark.postgres, pytest.mark.redis]


@pytest.fixture
def cluster(
    pgbouncer_server: PgBouncer,
    postgres_url: str,
    redis_url: str,
    make_cluster: Callable[..., Cluster],
) -> Cluster:
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=pgbouncer_server.through(postgres_url),
    )
    cluster.budget.set("tenant:a", limit=1000, unit="tokens")
    return cluster


def go_all_the_way(cluster: Cluster) -> None:
    """Admit, refuse, relay, run, retry and settle; the ledger adds up."""
    results = [cluster.task("draft").delay(number, "a") for number in range(20)]
    results.append(cluster.task("flaky").delay(2, "a"))
    with pytest.raises(BudgetExceeded):
        cluster.task("draft").delay(1000, "a")
    assert [result.get(timeout=WAIT) for result in results] == [*range(20), 2]
    cluster.settle()
    assert cluster.budget.balance("tenant:a").spent == sum(range(20)) + 3


def test_by_polling(cluster: Cluster) -> None:
    relay = cluster.relay()
    relay.says("no notification arrives over")
    cluster.worker()
    go_all_the_way(cluster)
    assert [one.sleeping for one in cluster.budget.relays()] == [False]
    assert relay.text().count("budget_listen_url") == 1
    assert relay.terminate() == 0


def test_with_a_way_past_the_proxy_for_notifications(cluster: Cluster, postgres_url: str) -> None:
    cluster.conf["budget_listen_url"] = postgres_url
    cluster.conf["budget_poll_seconds"] = 3600
    relay = cluster.relay()
    relay.says("the relay is woken by notifications")
    eventually(lambda: [one.sleeping for one in cluster.budget.relays()], lambda now: now == [True])
    cluster.worker()
    result = cluster.task("draft").delay(3, "a")
    assert result.get(timeout=WAIT) == 3
    assert relay.terminate() == 0
    with psycopg.connect(plain_url(postgres_url), autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'LISTEN%%'"
        ).fetchone()
    assert row == (0,)
