"""Lanes with real workers: nothing is released to those that sleep, and limits hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_budget.reconcile import LaneStanding
from tests.cluster import WAIT, Cluster, eventually

pytestmark = pytest.mark.fault

MakeCluster = Callable[..., Cluster]
MOST = 2
JOBS = 6


@pytest.mark.parametrize("broker", ["redis_url", "rabbitmq_url", "embedded"])
def test_a_lane_sleeps_wakes_pauses_and_keeps_its_limit(
    request: pytest.FixtureRequest, redis_url: str, make_cluster: MakeCluster, broker: str
) -> None:
    found = request.getfixturevalue(broker)
    conf = found
    if broker != "embedded":
        ledger = request.getfixturevalue("postgres_url")
        conf = {"broker_url": found, "result_backend": redis_url, "budget_database_url": ledger}
    cluster = make_cluster(**{**conf, "worker_enable_remote_control": True})
    cluster.budget.set("tenant:a", limit=1000, unit="tokens")
    cluster.budget.lanes.set("llm", queues=["celery"], max_running_jobs=MOST)
    cluster.relay()

    held = cluster.task("held")
    results = [held.delay("go", "a") for _ in range(JOBS)]
    asleep = _stands(cluster, lambda one: one.asleep is not None)
    # Nobody is there: nothing is at the broker.
    assert (asleep.why, asleep.awake) == ("asleep", False)
    assert (asleep.waiting.jobs, asleep.queued.jobs) == (JOBS, 0)
    assert "no worker consumes queue 'celery'" in str(asleep.asleep)

    worker = cluster.worker(concurrency=4)
    full = _stands(cluster, lambda one: one.running.jobs == MOST)
    assert (full.why, full.waiting.jobs, full.queued.jobs) == ("running", JOBS - MOST, 0)
    cluster.budget.lanes.pause("llm")
    cluster.release("go")
    paused = _stands(cluster, lambda one: one.running.jobs == 0)
    assert (paused.why, paused.waiting.jobs) == ("paused", JOBS - MOST)
    cluster.budget.lanes.resume("llm")
    assert [one.get(timeout=WAIT) for one in results] == ["go"] * JOBS
    assert _most_at_once(cluster.journal()) <= MOST

    # Its workers leave: what comes is held until they are back.
    cluster.budget.lanes.pause("llm")
    worker.terminate()
    late = held.delay("go", "a")
    _stands(cluster, lambda one: one.awake is False)
    cluster.budget.lanes.resume("llm")
    still = _stands(cluster, lambda one: one.why == "asleep")
    assert (still.waiting.jobs, still.queued.jobs) == (1, 0)
    cluster.worker()
    assert late.get(timeout=WAIT) == "go"
    cluster.settle()


def _stands(cluster: Cluster, until: Callable[[LaneStanding], bool]) -> LaneStanding:
    return eventually(lambda: cluster.budget.lanes.show("llm"), until)


def _most_at_once(journal: list[str]) -> int:
    """Return how many tasks ran at a time, at most, by what they noted."""
    runs = most = 0
    for line in journal:
        runs += 1 if line.startswith("start") else -1
        most = max(most, runs)
    return most
