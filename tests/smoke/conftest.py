"""Fixtures of the smoke tests, by the names that pytest-celery gives them.

pytest-celery's own would make everything anew for each test, and its plugin is not loaded (see
``addopts``), so that no other test waits for it. Here a broker's servers, worker and relay are one
module's, and each test has a setup over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import docker
import pytest
from celery import _state
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBroker,
    CeleryTestCluster,
    CeleryTestWorker,
    CeleryWorkerCluster,
    RabbitMQTestBroker,
    RedisTestBroker,
)

from celery_budget.integration.context import installed_on
from tests.smoke import engine
from tests.smoke.app import DONE
from tests.smoke.components import (
    BudgetTestBackend,
    BudgetTestLedger,
    BudgetTestRelay,
    BudgetTestSetup,
    BudgetWorkerContainer,
    RelayContainer,
)
from tests.smoke.places import Containers, Place, Processes, ready


def pytest_report_header() -> str:
    """Say which way it goes; heard where this folder is asked for."""
    return f"smoke tests: {engine.chosen()} ({engine.VARIABLE})"


@pytest.fixture(scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """Containers where an engine answers, processes where none does."""
    folder = tmp_path_factory.mktemp("smoke")
    made: Place = (
        Containers(docker.from_env(), folder)
        if engine.chosen() == engine.CONTAINERS
        else Processes(request.getfixturevalue, folder)
    )
    yield made
    made.close()


@pytest.fixture(scope="module", params=["rabbitmq", "redis"])
def celery_broker(request: pytest.FixtureRequest, place: Place) -> Iterator[CeleryTestBroker]:
    """RabbitMQ, then Redis."""
    broker = (
        RabbitMQTestBroker(place.server("rabbitmq"))
        if request.param == "rabbitmq"
        else RedisTestBroker(place.server("redis-broker"))
    )
    yield broker
    broker.teardown()


@pytest.fixture(scope="module")
def celery_broker_cluster(celery_broker: CeleryTestBroker) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(celery_broker)


@pytest.fixture(scope="module")
def celery_backend_cluster(place: Place) -> Iterator[CeleryBackendCluster]:
    """Redis."""
    backend = BudgetTestBackend(place.server("redis-backend"))
    yield CeleryBackendCluster(backend)
    backend.teardown()


@pytest.fixture(scope="module")
def budget_ledger_cluster(celery_broker: CeleryTestBroker, place: Place) -> CeleryTestCluster:
    """PostgreSQL, with a ledger for each broker."""
    return CeleryTestCluster(BudgetTestLedger(place.server("ledger")))


@pytest.fixture(scope="module")
def celery_worker_cluster_config(
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
    budget_ledger_cluster: CeleryTestCluster,
) -> dict[str, Any]:
    """Where they are, in an initialised ledger."""
    config = {
        "celery_broker_cluster_config": celery_broker_cluster.config(),
        "celery_backend_cluster_config": celery_backend_cluster.config(),
        "budget_ledger_cluster_config": budget_ledger_cluster.config(),
    }
    app = BudgetTestSetup.create_setup_app(BudgetTestSetup.config(config), BudgetTestSetup.name())
    budget = installed_on(app)
    budget.init()
    with budget.store.transaction() as connection:
        DONE.create(connection)
    budget.store.dispose()
    app.close()
    return config


@pytest.fixture(scope="module")
def programs(
    celery_worker_cluster_config: dict[str, Any], place: Place
) -> Iterator[tuple[CeleryTestWorker, BudgetTestRelay]]:
    """Worker and relay, which start side by side."""
    with ExitStack() as running:
        worker, relay = (
            running.enter_context(place.program(cls, cls.initial_env(celery_worker_cluster_config)))
            for cls in (BudgetWorkerContainer, RelayContainer)
        )
        for one in (worker, relay):
            ready(one)
        node = BudgetTestRelay(relay)
        yield CeleryTestWorker(worker, None), node
        code, said = node.command("reconcile")
        assert code == 0, said


@pytest.fixture
def celery_setup(
    programs: tuple[CeleryTestWorker, BudgetTestRelay],
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
    budget_ledger_cluster: CeleryTestCluster,
    celery_worker_cluster_config: dict[str, Any],
) -> Iterator[BudgetTestSetup]:
    """All of it, running, with an application of the test's own."""
    worker, relay = programs
    for node in programs:
        # The test before may have failed between killing it and starting it again.
        if node.container.status != "running":
            node.restart()
    [ledger] = budget_ledger_cluster
    setup = BudgetTestSetup(
        worker_cluster=CeleryWorkerCluster(worker),
        broker_cluster=celery_broker_cluster,
        backend_cluster=celery_backend_cluster,
        ledger=ledger,
        relay=relay,
        app=BudgetTestSetup.create_setup_app(
            BudgetTestSetup.config(celery_worker_cluster_config), BudgetTestSetup.name()
        ),
    )
    assert setup.ready(docker=True)
    # A node that is restarted makes its application the current one.
    before = _state._tls.current_app
    yield setup
    _state._tls.current_app = before
    setup.teardown()
