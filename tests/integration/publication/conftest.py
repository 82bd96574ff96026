"""Both applications on Redis, with native chords, and on RabbitMQ, with unlocked ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from uuid import uuid4

import pytest
from celery.contrib.testing.worker import start_worker
from redis import Redis

from celery_budget.integration.service import RelayService
from tests.integration.publication.sides import Servers, Sides, make_sides, stop_clocks
from tests.integration.support import current
from tests.services.postgres import PostgresServer


@pytest.fixture(
    scope="package",
    params=[
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
    ],
)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """Redis keeps results and counts a chord's members; with files Celery polls for them."""
    if request.param == "rabbitmq":
        server = request.getfixturevalue("rabbitmq_server")
        folder = tmp_path_factory.mktemp("results")
        return Servers((server.create_vhost(), server.create_vhost()), f"file://{folder}")
    server = request.getfixturevalue("redis_server")
    urls = [server.database_url(number) for number in (5, 6, 7)]
    for url in urls:
        with Redis.from_url(url) as client:
            client.flushdb()
    return Servers((urls[0], urls[1]), urls[2])


@pytest.fixture(scope="package")
def still(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """Both applications without workers, their clocks stopped: a test takes each step itself."""
    database = tmp_path_factory.mktemp("publication") / "budget.db"
    prefix = f"paths-{uuid4().hex[:6]}"
    with make_sides(servers, f"sqlite:///{database}", (prefix, prefix)) as sides:
        stop_clocks(sides, datetime.now(timezone.utc))
        yield sides


@pytest.fixture
def sides(still: Sides) -> Sides:
    """Both applications with an empty broker and a full budget."""
    for side in still:
        side.take()
    still.begin()
    return still


@pytest.fixture(scope="package")
def running(servers: Servers, postgres_server: PostgresServer) -> Iterator[Sides]:
    """Both applications; that with a budget has a worker and the relay in threads of this process.

    Celery's event loop is one for a process, and so are its workers' switches: there can be one.
    """
    database = postgres_server.create_database()
    name = uuid4().hex[:6]
    settings = {
        "budget_poll_seconds": 0.02,
        "budget_sweep_seconds": 0.2,
        "worker_hijack_root_logger": False,
        "worker_enable_remote_control": False,
    }
    with make_sides(servers, database, (f"{name}-plain", f"{name}-budget"), **settings) as sides:
        app, budget = sides.budget.app, sides.budget.shop.budget
        relay = RelayService(budget)
        worker = start_worker(app, perform_ping_check=False, shutdown_timeout=60)
        with logging_kept(), current(app), worker:
            relay.start()
            yield sides
            relay.stop()


@contextmanager
def logging_kept() -> Iterator[None]:
    """Give the root logger back as it was: a worker sets its level and handlers."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@pytest.fixture
def workers(running: Sides) -> Sides:
    """Both applications, one with a worker and a full budget."""
    running.begin()
    return running
