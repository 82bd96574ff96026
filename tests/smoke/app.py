"""The application of the smoke tests: in the tests' own process, in workers and in the relay.

Programs get its settings as JSON in ``SMOKE_CONF``. What a task has done is a row in the ledger's
database, and what it waits for is a key of the result backend, since containers share no files.
"""

from __future__ import annotations

import json
import os
from typing import Any

import sqlalchemy as sa
from celery import Celery
from redis import Redis

from celery_budget import CeleryBudget, budgeted, effect, usage

CONF = "SMOKE_CONF"
#: The queue that the worker consumes, and one that nobody does.
QUEUE = "smoke"
IDLE = "smoke-idle"
TENANT = "tenant:{tenant}"
ESTIMATE = 5
#: What a task uses, whichever of its runs gets that far.
USED = 3
#: Seconds for which a task waits to be let go: far more than a test takes.
PATIENCE = 120

DONE = sa.Table(
    "smoke_done",
    sa.MetaData(),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("word", sa.Text, nullable=False),
)
SETTINGS = {
    "task_default_queue": QUEUE,
    "broker_connection_retry_on_startup": True,
    "worker_prefetch_multiplier": 1,
    "worker_enable_remote_control": False,
    "budget_poll_seconds": 0.05,
    "budget_sweep_seconds": 0.2,
    "budget_lease_seconds": 3,
    "budget_publish_seconds": 2,
    "budget_lock_seconds": 2,
    "budget_republish_seconds": 2,
}


def started(tenant: str, word: str) -> str:
    """The list into which a task that waits puts an entry when it begins."""
    return f"smoke:{tenant}:{word}:started"


def let_go(tenant: str, word: str) -> str:
    """The list from which it takes one to go on."""
    return f"smoke:{tenant}:{word}:go"


def gates(backend: str) -> Redis:
    """A connection to both that may wait for longer than the client would by default."""
    return Redis.from_url(backend, socket_timeout=None)


def make_app(conf: dict[str, Any]) -> Celery:
    """Return the application with its budget and tasks.

    :param conf: broker, result backend and ledger, over the settings that all have.
    """
    app = Celery("smoke", set_as_current=False)
    app.conf.update({**SETTINGS, **conf})
    CeleryBudget(app)
    # A task's process opens its own connections.
    ledger = sa.create_engine(app.conf.budget_database_url, poolclass=sa.NullPool)

    def do(word: str, tenant: str) -> None:
        """Have the task's effect, once, and tell what it used, once as well."""
        usage.record(USED, key=f"{tenant}:{word}")
        with ledger.begin() as connection, effect(connection, "done") as first:
            if first:
                connection.execute(DONE.insert().values(tenant=tenant, word=word))

    def wait(word: str, tenant: str) -> None:
        with gates(app.conf.result_backend) as backend:
            backend.rpush(started(tenant, word), os.getpid())
            if backend.blpop([let_go(tenant, word)], timeout=PATIENCE) is None:
                raise TimeoutError(word)

    @budgeted(budget=TENANT, estimate=ESTIMATE)
    @app.task(name="smoke.work", shared=False, acks_late=True)
    def work(word: str, tenant: str) -> str:
        do(word, tenant)
        return word

    @budgeted(budget=TENANT, estimate=ESTIMATE)
    @app.task(name="smoke.late", shared=False, acks_late=True)
    def late(word: str, tenant: str) -> str:
        """Do it, then wait: what is left is to be acknowledged."""
        do(word, tenant)
        wait(word, tenant)
        return word

    @budgeted(budget=TENANT, estimate=ESTIMATE)
    @app.task(name="smoke.early", shared=False, acks_late=False)
    def early(word: str, tenant: str) -> str:
        """The same, acknowledged before it runs."""
        do(word, tenant)
        wait(word, tenant)
        return word

    @budgeted(budget=TENANT, estimate=ESTIMATE)
    @app.task(name="smoke.more", shared=False, acks_late=True)
    def more(text: str, word: str, tenant: str) -> str:
        """A step of a chain."""
        do(word, tenant)
        return f"{text} {word}"

    @budgeted(budget=TENANT, estimate=ESTIMATE)
    @app.task(name="smoke.join", shared=False, acks_late=True)
    def join(words: list[str], tenant: str) -> str:
        """The body of a chord."""
        do("join", tenant)
        return " ".join(words)

    del work, late, early, more, join
    return app


if CONF in os.environ:
    app = make_app(json.loads(os.environ[CONF]))
