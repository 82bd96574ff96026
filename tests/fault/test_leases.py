"""Leases through an outage of the ledger, a machine that stood still, a worker that was stopped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from celery_budget.store.schema import attempts, now_us
from tests.apps import losing
from tests.cluster import SHORT_LEASES, WAIT, Cluster, eventually
from tests.services.postgres import PostgresServer

pytestmark = pytest.mark.fault

NAMES = ("x", "y")
LEASE_US = 3_000_000


def _start(cluster: Cluster) -> dict[str, Any]:
    """Have two tasks run that end when they are released."""
    cluster.budget.set("tenant:a", limit=1000, unit="tokens")
    results = {name: cluster.task("held").delay(name, "a") for name in NAMES}
    eventually(cluster.journal, lambda said: len(said) == len(NAMES))
    return results


def _clock(cluster: Cluster) -> int:
    with cluster.budget.store.statement() as connection:
        return int(connection.execute(sa.select(now_us())).scalar_one())


def _rows(cluster: Cluster) -> list[Any]:
    query = attempts.select().order_by(attempts.c.started_us)
    # It is asked again where the server has just been started anew.
    return cluster.budget.store.read(lambda connection: list(connection.execute(query)))


@contextmanager
def _stopped(processes: Iterable[int]) -> Iterator[None]:
    """Stop processes with all their children, as a paused machine would."""
    trees = [psutil.Process(pid) for pid in processes]
    found = [one for tree in trees for one in (tree, *tree.children(recursive=True))]
    for one in found:
        one.suspend()
    try:
        yield
    finally:
        for one in found:
            one.resume()


def _check(cluster: Cluster, results: dict[str, Any]) -> None:
    for name in NAMES:
        cluster.release(name)
    assert [results[name].get(timeout=WAIT) for name in NAMES] == list(NAMES)
    cluster.settle()
    assert Counter(cluster.journal()) == {
        f"{what} {name}": 1 for what in ("start", "end") for name in NAMES
    }
    assert [row.outcome for row in _rows(cluster)] == ["returned", "returned"]
    assert cluster.budget.balance("tenant:a").spent == 5 * len(NAMES)


def test_an_outage_of_the_ledger_starts_nothing_again(
    own_postgres: PostgresServer, redis_url: str, make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=own_postgres.create_database(),
    )
    beat = cluster.beat()
    cluster.worker()
    results = _start(cluster)
    until = max(row.lease_until_us for row in _rows(cluster))
    own_postgres.kill()
    beat.says("the sweep failed")
    # By the machine's clock, which is the server's: the ledger cannot be asked.
    eventually(lambda: time.time() * 1_000_000 > until + LEASE_US)
    own_postgres.restart()
    eventually(lambda: [row.lease_until_us > until + LEASE_US for row in _rows(cluster)], all)
    _check(cluster, results)


def test_a_machine_that_stood_still_starts_nothing_again(
    postgres_url: str, redis_url: str, make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(
        broker_url=redis_url, result_backend=redis_url, budget_database_url=postgres_url
    )
    beat, worker = cluster.beat(), cluster.worker()
    results = _start(cluster)
    with _stopped([beat.pid, worker.pid]):
        until = max(row.lease_until_us for row in _rows(cluster))
        eventually(lambda: _clock(cluster) > until + LEASE_US)
    eventually(lambda: [row.lease_until_us > until + LEASE_US for row in _rows(cluster)], all)
    _check(cluster, results)


def test_a_worker_that_was_stopped_finds_its_fence_gone(
    postgres_url: str, redis_url: str, make_cluster: Callable[..., Cluster]
) -> None:
    """Each of its tasks runs once more elsewhere, and no more than that."""
    cluster = make_cluster(
        broker_url=redis_url, result_backend=redis_url, budget_database_url=postgres_url
    )
    cluster.beat()
    worker = cluster.worker()
    results = _start(cluster)
    with _stopped([worker.pid]):
        cluster.worker()
        eventually(cluster.journal, lambda said: len(said) == 2 * len(NAMES))
    for name in NAMES:
        cluster.release(name)
    assert [results[name].get(timeout=WAIT) for name in NAMES] == list(NAMES)
    eventually(
        cluster.journal, lambda said: sum(one.startswith("end") for one in said) == 2 * len(NAMES)
    )
    # What the old attempts used after they were given up is charged, too; the first record has
    # one key in both attempts.
    eventually(
        lambda: cluster.budget.balance("tenant:a").spent, lambda spent: spent == 2 * (2 + 2 * 3)
    )
    cluster.settle()
    assert Counter(row.outcome for row in _rows(cluster)) == {"uncertain": 2, "returned": 2}
    assert cluster.counts()["settled"] == len(NAMES)
    assert "lost its claim" in worker.text()


def test_a_child_that_keeps_the_interpreter_lock_keeps_its_lease(
    embedded: dict[str, Any], make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(**embedded, **SHORT_LEASES, imports=[losing.__name__])
    cluster.app.loader.import_default_modules()
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    cluster.beat()
    cluster.worker()
    seconds = 4 * SHORT_LEASES["budget_lease_seconds"]
    result = cluster.app.tasks["losing.hog"].delay(seconds, "a")
    assert result.get(timeout=WAIT) == seconds
    cluster.settle()
    assert cluster.journal() == ["start hog", "end hog"]
    assert [row.outcome for row in _rows(cluster)] == ["returned"]
