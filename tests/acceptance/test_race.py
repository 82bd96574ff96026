"""Two callers at the same instant: one is admitted, the other refused, whatever the store."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from celery_budget import BudgetExceeded, relay
from celery_budget.integration.publisher import KombuPublisher
from celery_budget.integration.results import BackendResults
from tests.apps.shop import make_app
from tests.cluster import WAIT, Cluster

ROUNDS = 50


def _at_once(caller: Callable[..., None], conf: dict[str, Any]) -> Iterator[list[Any]]:
    """Run ``caller`` in two processes that live through all rounds; yield each round's answers."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    callers = [
        context.Process(target=caller, args=(conf, barrier, sender), daemon=True)
        for _, sender in pipes
    ]
    for process in callers:
        process.start()
    for _ in range(ROUNDS):
        yield [receiver.recv() for receiver, _ in pipes]
    for process in callers:
        process.join(WAIT)
        assert process.exitcode == 0


def _call_each_round(conf: dict[str, Any], barrier: Any, results: Connection) -> None:
    """Ask for 6 units of each round's tenant, at the barrier; tell the task id or the refusal."""
    app = make_app(conf)
    for number in range(ROUNDS):
        tenant = f"r{number}"
        barrier.wait(WAIT)
        try:
            results.send(app.tasks["shop.draft"].delay(6, tenant, used=5).id)
        except BudgetExceeded as refusal:
            results.send(refusal)
    results.close()


@pytest.mark.parametrize("store", ["sqlite_url", "postgres_url"])
def test_two_requests_of_six_on_ten(
    redis_url: str,
    request: pytest.FixtureRequest,
    store: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=request.getfixturevalue(store),
    )
    budget = cluster.budget
    tenants = [f"tenant:r{number}" for number in range(ROUNDS)]
    for tenant in tenants:
        budget.set(tenant, limit=10, unit="tokens")
    admitted: list[str] = []
    for tenant, both in zip(tenants, _at_once(_call_each_round, cluster.conf), strict=True):
        [refusal] = [answer for answer in both if isinstance(answer, BudgetExceeded)]
        [task_id] = [answer for answer in both if isinstance(answer, str)]
        assert refusal.args[:9] == (tenant, "tokens", 6, 4, 10, 6, 0, "held", 10)
        admitted.append(task_id)
    for tenant in tenants:
        balance = budget.balance(tenant)
        assert (balance.reserved, balance.spent, balance.available) == (6, 0, 4)

    results = BackendResults(cluster.app)
    publisher = KombuPublisher(cluster.app)
    relay.run_once(budget.store, budget.settings, publisher, results.ended)
    publisher.reset()
    with cluster.app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare("celery", passive=True).message_count == (
            ROUNDS
        )

    cluster.worker()
    cluster.beat()
    for task_id in admitted:
        assert cluster.app.AsyncResult(task_id).get(timeout=WAIT) == 5
    cluster.settle()
    assert cluster.journal() == ["draft 6"] * ROUNDS
    for tenant in tenants:
        balance = budget.balance(tenant)
        assert (balance.reserved, balance.spent, balance.available) == (0, 5, 5)


def _same_request_each_round(conf: dict[str, Any], barrier: Any, results: Connection) -> None:
    app = make_app(conf)
    for number in range(ROUNDS):
        barrier.wait(WAIT)
        call = {"args": (6, "a"), "kwargs": {"used": 0}, "request_id": f"request {number}"}
        results.send(app.tasks["shop.draft"].apply_async(**call).id)
    results.close()


@pytest.mark.parametrize("store", ["sqlite_url", "postgres_url"])
def test_the_same_request_twice_at_once(
    redis_url: str,
    request: pytest.FixtureRequest,
    store: str,
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=request.getfixturevalue(store),
    )
    cluster.budget.set("tenant:a", limit=6 * ROUNDS, unit="tokens")
    for first, second in _at_once(_same_request_each_round, cluster.conf):
        assert first == second
    balance = cluster.budget.balance("tenant:a")
    assert (balance.reserved, balance.available) == (6 * ROUNDS, 0)
    cluster.worker()
    cluster.beat()
    cluster.settle()
    assert cluster.journal() == ["draft 6"] * ROUNDS
    assert cluster.budget.balance("tenant:a").available == 6 * ROUNDS
