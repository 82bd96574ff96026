"""kill -9 around effects: each is had once, whatever was committed when the process died."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget.store import lapses, schema
from tests.apps.effects import ORDERS
from tests.cluster import Cluster, eventually

pytestmark = pytest.mark.fault

MakeCluster = Callable[..., Cluster]


def make(make_cluster: MakeCluster, broker: str, ledger: str, **more: Any) -> Cluster:
    cluster = make_cluster(
        broker_url=broker,
        result_backend=broker,
        budget_database_url=ledger,
        imports=["tests.apps.effects"],
        **more,
    )
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    with cluster.budget.store.transaction() as connection:
        connection.execute(sa.text("CREATE TABLE orders (word TEXT)"))
    return cluster


def rows(cluster: Cluster, table: Any) -> list[Any]:
    with cluster.budget.store.snapshot() as connection:
        return list(connection.execute(sa.select(table)))


@pytest.mark.parametrize("store", ["sqlite_url", "postgres_url"])
@pytest.mark.parametrize(
    ("settles", "die", "firsts", "outcomes"),
    [
        (False, "", ["True"], ["returned"]),
        (True, "", ["True"], ["returned"]),
        # Between the effect and its commit nothing has happened.
        (False, "effect", ["True", "True"], ["uncertain", "returned"]),
        (True, "effect", ["True", "True"], ["uncertain", "returned"]),
        # After it, before the settlement, the next attempt gets what was stored.
        (False, "commit", ["True", "False"], ["uncertain", "returned"]),
        # The settlement was part of it: no attempt follows, what was settled is the result.
        (True, "commit", ["True"], ["returned"]),
    ],
)
def test_an_order_is_written_once(
    redis_url: str,
    request: pytest.FixtureRequest,
    store: str,
    settles: bool,
    die: str,
    firsts: list[str],
    outcomes: list[str],
    make_cluster: MakeCluster,
) -> None:
    ledger = request.getfixturevalue(store)
    cluster = make(make_cluster, redis_url, ledger, shop_die_at=die)
    result = cluster.app.tasks["effects.order"].apply_async(
        ("a", settles), link=cluster.task("plain").s()
    )
    cluster.worker()
    cluster.relay()
    assert result.get(timeout=90) == "stored"
    eventually(cluster.journal, lambda lines: "plain stored" in lines and "child" in lines)
    cluster.settle()
    lines = cluster.journal()
    assert [one.removeprefix("first ") for one in lines if one.startswith("first")] == firsts
    assert lines.count("child") == lines.count("plain stored") == 1
    # One key for the provider, in each attempt.
    assert len({one for one in lines if one.startswith("order ")}) == 1
    assert [row.word for row in rows(cluster, ORDERS)] == ["order"]
    [effect] = rows(cluster, schema.effects)
    assert (effect.key, effect.value, effect.attempt) == ("order", '"stored"', firsts.count("True"))
    [story] = cluster.budget.explain(result.id)
    assert [attempt["outcome"] for attempt in story.attempts] == outcomes
    [sent] = [row for row in rows(cluster, schema.reservations) if row.task_name == "effects.child"]
    assert str(sent.parent_id) == story.reservation["reservation_id"]
    assert cluster.budget.balance("tenant:a").spent == 5 + 1


def test_a_worker_that_was_cut_off_keeps_its_effect(
    redis_url: str, postgres_url: str, make_cluster: MakeCluster
) -> None:
    """Its lease lapses while its effect is in an open transaction; another attempt follows it."""
    cluster = make(make_cluster, redis_url, postgres_url)
    first = cluster.worker(concurrency=1)
    cluster.relay()
    result = cluster.app.tasks["effects.held"].delay("a", "go")
    eventually(cluster.journal, lambda lines: "first True" in lines)
    first.popen.send_signal(signal.SIGSTOP)
    try:
        # Recovery passes by for as long as the transaction is open, and others get their turn.
        store, root = cluster.budget.store, cluster.budget.settings.root
        eventually(lambda: store.read(lapses.lapsed, root, 10, 0))
        cluster.worker(concurrency=1)
        quiet = cluster.task("quiet").delay("a")
        assert quiet.get(timeout=60) == "quiet"
        assert cluster.journal() == ["first True", "quiet"]
        cluster.release("go")
        assert result.get(timeout=90) == "done"
    finally:
        first.popen.send_signal(signal.SIGCONT)
    cluster.settle()
    assert cluster.journal().count("first True") == 1
    assert [row.word for row in rows(cluster, ORDERS)] == ["held"]
    assert len(rows(cluster, schema.effects)) == 1
