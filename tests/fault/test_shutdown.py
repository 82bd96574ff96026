"""What Celery ends or delivers in its own way while a task runs longer than its lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from billiard.exceptions import WorkerLostError
from kombu.utils.json import dumps, loads

from celery_budget.core.messages import WireMessage
from celery_budget.store import claims, outbox
from celery_budget.store.schema import attempts
from celery_budget.store.schema import outbox as outbox_table
from tests.apps import ends
from tests.cluster import SHORT_LEASES, WAIT, Cluster, eventually

pytestmark = pytest.mark.fault


def _lease_until(cluster: Cluster) -> int:
    with cluster.budget.store.snapshot() as connection:
        return int(connection.execute(attempts.select()).one().lease_until_us or 0)


@pytest.mark.parametrize("task", ["held", "held_early"])
def test_leases_live_through_a_warm_shutdown(
    embedded: dict[str, Any], make_cluster: Callable[..., Cluster], task: str
) -> None:
    cluster = make_cluster(**embedded, **SHORT_LEASES)
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
    assert result.get(timeout=WAIT) == "go"
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
    result = cluster.task("held").apply_async(("go", "a"), expires=3600)
    copy = store.run(claims.claim_due, settings.root, "", 1, 0, uuid4()).messages[0].message
    cluster.beat()
    worker = cluster.worker()
    eventually(cluster.journal)
    # The hour is over, by what the ledger says and by the header of a copy that is published late.
    with store.transaction() as connection:
        connection.execute(outbox_table.update().values(expires_us=1))
    store.run(outbox.enqueue, settings.root, _over(copy))
    worker.says("Discarding revoked task")
    assert result.state == "PENDING"
    cluster.release("go")
    assert result.get(timeout=WAIT) == "go"
    cluster.settle()
    assert cluster.counts()["settled"] == 1


def _over(message: WireMessage) -> WireMessage:
    """A message that the relay publishes and a worker finds expired."""
    envelope = loads(message.envelope)
    assert envelope["headers"]["expires"]
    envelope["headers"]["expires"] = "2000-01-01T00:00:00+00:00"
    return replace(message, envelope=dumps(envelope))


def test_what_has_died_too_often_is_not_retried_past_the_ledger(
    embedded: dict[str, Any], make_cluster: Callable[..., Cluster]
) -> None:
    """Celery's own retry on a lost worker would leave it at RETRY, for ever."""
    cluster = make_cluster(**embedded, budget_max_deliveries=1, imports=[ends.__name__])
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    result = cluster.app.tasks["ends.early.retried"].delay("die", "a", True)
    cluster.worker("--budget-relay", concurrency=1)
    with pytest.raises(WorkerLostError):
        result.get(timeout=WAIT)
    cluster.settle()
    assert cluster.counts()["lost"] == 1
    assert cluster.journal() == [f"run {result.id}"]
