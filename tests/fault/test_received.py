"""What waits inside of a worker is in no queue, and not lost for as long as the worker lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget.store.schema import outbox
from tests.cluster import WAIT, Cluster, eventually

pytestmark = pytest.mark.fault

REPUBLISH_US = 1_000_000
#: How many wait beside the one that runs.
WAITING = 3


@pytest.fixture
def cluster(
    make_cluster: Callable[..., Cluster], broker: str, redis_url: str, postgres_url: str
) -> Cluster:
    cluster = make_cluster(
        broker_url=broker,
        result_backend=redis_url,
        budget_database_url=postgres_url,
        budget_republish_seconds=REPUBLISH_US / 1_000_000,
        worker_prefetch_multiplier=WAITING + 1,
        task_annotations={"shop.quiet": {"rate_limit": "1/h"}},
    )
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    return cluster


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def messages(cluster: Cluster, results: list[Any]) -> list[Any]:
    """The messages of these tasks that the ledger has published."""
    with cluster.budget.store.transaction() as connection:
        return list(
            connection.execute(
                sa.select(outbox.c.publishes, outbox.c.published_us, outbox.c.due_us).where(
                    outbox.c.task_id.in_([result.id for result in results]),
                    outbox.c.state == "published",
                )
            )
        )


def watched(cluster: Cluster, results: list[Any]) -> None:
    """Wait until each was looked after for several times the time after which it would be lost."""
    seen = eventually(
        lambda: messages(cluster, results),
        lambda rows: (
            len(rows) == WAITING
            and all(row.due_us > row.published_us + 4 * REPUBLISH_US for row in rows)
        ),
    )
    assert [row.publishes for row in seen] == [1] * WAITING


def test_what_is_prefetched_is_published_again_when_its_worker_is_gone(cluster: Cluster) -> None:
    held = cluster.task("held")
    worker = cluster.worker(concurrency=1)
    cluster.beat()
    first = held.delay("go", "a")
    eventually(cluster.journal, lambda journal: journal == ["start go"])
    rest = [held.delay("go", "a") for _ in range(WAITING)]
    watched(cluster, rest)
    worker.kill()
    cluster.release("go")
    cluster.worker(concurrency=2)
    assert [result.get(timeout=WAIT) for result in [first, *rest]] == ["go"] * (WAITING + 1)
    cluster.settle()


def test_what_waits_for_a_rate_limit_is_not_lost(cluster: Cluster) -> None:
    quiet = cluster.task("quiet")
    cluster.worker(concurrency=1)
    cluster.beat()
    assert quiet.delay("a").get(timeout=WAIT) == "quiet"
    watched(cluster, [quiet.delay("a") for _ in range(WAITING)])
    assert cluster.journal() == ["quiet"]
