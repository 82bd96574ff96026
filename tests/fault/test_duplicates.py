"""Brokers deliver a message more than once; it runs once, and what follows it runs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import chain

from celery_budget.store import claims, outbox
from celery_budget.store.schema import outbox as outbox_table
from tests.cluster import WAIT, Cluster, eventually
from tests.services.rabbitmq import RabbitServer

pytestmark = pytest.mark.fault


def _chain_of_held_and_plain(cluster: Cluster) -> Any:
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    return chain(
        cluster.task("held").s("go", "a"), cluster.task("plain").s(), cluster.task("plain").s()
    ).apply_async()


def _check_ran_once(cluster: Cluster, result: Any) -> None:
    assert result.get(timeout=WAIT) == "go"
    cluster.settle()
    assert sorted(cluster.journal()) == ["end go", "plain go", "plain go", "start go"]
    assert cluster.budget.balance("tenant:a").spent == 5
    assert cluster.counts()["settled"] == 1


def test_redis_delivers_again_while_the_task_runs(
    redis_url: str,
    postgres_url: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=postgres_url,
        broker_transport_options={
            "visibility_timeout": 1,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        },
        # So that the second copy is the broker's, however long a worker takes to start.
        budget_republish_seconds=600,
    )
    result = _chain_of_held_and_plain(cluster)
    cluster.beat()
    worker = cluster.worker()
    worker.says("is running elsewhere; this delivery does nothing")
    cluster.release("go")
    _check_ran_once(cluster, result)


def test_rabbitmq_delivers_again_after_the_connection_was_cut(
    own_rabbitmq: RabbitServer,
    redis_url: str,
    postgres_url: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(
        broker_url=own_rabbitmq.create_vhost(),
        result_backend=redis_url,
        budget_database_url=postgres_url,
        budget_republish_seconds=600,
    )
    result = _chain_of_held_and_plain(cluster)
    cluster.beat()
    worker = cluster.worker()
    eventually(cluster.journal, lambda lines: "start go" in lines)
    own_rabbitmq.close_connections()
    worker.says("is running elsewhere; this delivery does nothing")
    cluster.release("go")
    _check_ran_once(cluster, result)


def test_a_retry_waits_for_the_attempt_it_follows(
    redis_url: str,
    postgres_url: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(
        broker_url=redis_url, result_backend=redis_url, budget_database_url=postgres_url
    )
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    result = cluster.task("early_retry").delay("go", "a")
    cluster.beat()
    cluster.worker()

    eventually(lambda: _outbox_states(cluster), lambda found: found == ["blocked", "published"])
    # Another message goes all the way past it in the meantime.
    assert cluster.task("quiet").delay("a").get(timeout=WAIT) == "quiet"
    assert _outbox_states(cluster) == ["blocked", "published"]
    assert cluster.journal() == ["run 0", "quiet"]
    cluster.release("go")
    assert result.get(timeout=WAIT) == 1
    cluster.settle()
    assert cluster.journal() == ["run 0", "quiet", "first done", "run 1"]
    assert cluster.budget.balance("tenant:a").spent == 2 + 6


def _outbox_states(cluster: Cluster) -> list[str]:
    with cluster.budget.store.transaction() as connection:
        rows = connection.execute(
            outbox_table.select().where(outbox_table.c.task_name == "shop.early_retry")
        )
        return sorted(row.state for row in rows)


@pytest.mark.parametrize("store", ["sqlite_url", "postgres_url"])
@pytest.mark.parametrize("task", ["draft", "fail"])
def test_an_outcome_whose_result_was_not_stored_is_given_again(
    redis_url: str,
    request: pytest.FixtureRequest,
    store: str,
    task: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    """The child dies after it settled and before Celery stored the result or sent what follows."""
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=request.getfixturevalue(store),
        shop_die_after="end",
    )
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    notice = cluster.task("notice").si()
    if task == "draft":
        signature = cluster.task("draft").s(6, "a", used=4)
    else:
        signature = cluster.task("fail").s("no", "a", used=4)
    result = signature.apply_async(link=notice, link_error=notice)
    cluster.beat()
    cluster.worker()
    if task == "draft":
        assert result.get(timeout=WAIT) == 4
    else:
        with pytest.raises(ValueError, match="no"):
            result.get(timeout=WAIT)
    cluster.settle()
    eventually(lambda: "notice" in cluster.journal())
    assert sorted(cluster.journal()) == sorted(
        ["draft 6" if task == "draft" else "fail no", "notice"]
    )
    assert cluster.budget.balance("tenant:a").spent == 4


@pytest.mark.parametrize(
    ("task", "method"), [("draft", "mark_as_done"), ("fail", "mark_as_failure")]
)
def test_a_result_backend_that_was_away_is_no_failure_of_the_task(
    redis_url: str,
    postgres_url: str,
    make_cluster: Callable[..., Cluster],
    task: str,
    method: str,
) -> None:
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=postgres_url,
        shop_break=method,
    )
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    cluster.beat()
    cluster.worker(concurrency=1)
    if task == "draft":
        assert cluster.task("draft").delay(6, "a", used=4).get(timeout=WAIT) == 4
    else:
        with pytest.raises(ValueError, match="no"):
            cluster.task("fail").delay("no", "a", used=4).get(timeout=WAIT)
    cluster.settle()
    assert len(cluster.journal()) == 1
    assert cluster.budget.balance("tenant:a").spent == 4


def test_a_duplicate_of_a_closed_failure_does_nothing(
    redis_url: str,
    postgres_url: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(
        broker_url=redis_url, result_backend=redis_url, budget_database_url=postgres_url
    )
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    result = cluster.task("fail").delay("no", "a", used=3)
    store, settings = cluster.budget.store, cluster.budget.settings
    copy = store.run(claims.claim_due, settings.root, "", 1, 0, uuid4()).messages[0].message
    store.run(outbox.enqueue, settings.root, copy)
    store.run(outbox.enqueue, settings.root, copy)
    cluster.beat()
    worker = cluster.worker(concurrency=1)
    with pytest.raises(ValueError, match="no"):
        result.get(timeout=WAIT)
    worker.says("has ended; this delivery does nothing")
    cluster.settle()
    assert result.state == "FAILURE"
    assert cluster.journal() == ["fail no"]
    assert cluster.budget.balance("tenant:a").spent == 3
