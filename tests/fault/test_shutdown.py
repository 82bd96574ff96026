"""What Celery ends or delivers in its own way while a task runs longer than its lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_budget.store import claims, outbox
from celery_budget.store.schema import attempts, now_us
from celery_budget.store.schema import outbox as outbox_table
from tests.cluster import Cluster, eventually

pytestmark = pytest.mark.fault


def _lease_until(cluster: Cluster) -> int:
    with cluster.budget.store.snapshot() as connection:
        return int(connection.execute(attempts.select()).one().lease_until_us or 0)


@pytest.mark.parametrize("task", ["held", "held_early"])
def test_leases_live_through_a_warm_shutdown(
    embedded: dict[str, Any], make_cluster: Callable[..., Cluster], task: str
) -> None:
    cluster = make_cluster(**embedded, budget_lease_seconds=1)
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    result = cluster.task(task).delay("go", "a")
    cluster.beat()
    worker = cluster.worker()
    eventually(cluster.journal)
    worker.ask_to_end()
    worker.says("Warm shutdown")
    before = _lease_until(cluster)
    # Renewed well past the lease it had when the worker was told to end.
    eventually(lambda: _lease_until(cluster), lambda until: until > before + 2_000_000)
    cluster.release("go")
    assert result.get(timeout=30) == "go"
    cluster.settle()
    assert cluster.journal() == ["start go", "end go"]
    assert cluster.counts()["settled"] == 1
    assert cluster.budget.balance("tenant:a").spent == (5 if task == "held" else 2)


def test_a_copy_that_comes_after_expires_does_not_revoke_what_runs(
    redis_url: str, postgres_url: str, make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(
        broker_url=redis_url, result_backend=redis_url, budget_database_url=postgres_url
    )
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    store, settings = cluster.budget.store, cluster.budget.settings
    result = cluster.task("held").apply_async(("go", "a"), expires=8)
    copy = store.run(claims.claim_due, settings.root, "", 1, 0, uuid4()).messages[0].message
    cluster.beat()
    worker = cluster.worker()
    eventually(cluster.journal)
    with store.snapshot() as connection:
        expires_us = connection.execute(outbox_table.select()).one().expires_us
    eventually(lambda: _now_us(cluster), lambda now: now > expires_us)
    # With more time than its header says, or the relay would not publish it.
    store.run(outbox.enqueue, settings.root, replace(copy, expires_us=expires_us + 3_600_000_000))
    worker.says("Discarding revoked task")
    assert result.state == "PENDING"
    cluster.release("go")
    assert result.get(timeout=30) == "go"
    cluster.settle()
    assert cluster.counts()["settled"] == 1


def _now_us(cluster: Cluster) -> int:
    with cluster.budget.store.snapshot() as connection:
        return int(connection.execute(sa.select(now_us())).scalar_one())
