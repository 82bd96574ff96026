"""The application that is measured; a worker gets its configuration as JSON in ``BENCH_CONF``."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.signals import task_prerun
from redis import Redis

from celery_budget import CeleryBudget, budgeted, usage

__all__ = ["BUDGET", "CONFIRMS", "MARKS", "SIZE", "TENANT", "fund", "make_app"]

TENANT = "bench"
BUDGET = f"tenant:{TENANT}"
SIZE = 5

#: RabbitMQ confirms what it has taken: without that, a message may be lost unseen.
CONFIRMS = {"confirm_publish": True}

#: The Redis list to which ``bench.mark`` and ``bench.budgeted_mark`` append when they began.
MARKS = "bench-marks"


def make_app(**conf: Any) -> Celery:
    """Return an application with ``bench.plain`` and, where it has a ledger, budgeted tasks.

    None of them does anything, and no result is kept.
    """
    app = Celery("bench", set_as_current=False)
    app.conf.update({"worker_enable_remote_control": False, **conf})

    @app.task(name="bench.plain", shared=False, acks_late=True)
    def plain(size: int, tenant: str) -> None:
        pass

    @app.task(name="bench.mark", shared=False, acks_late=True)
    def mark() -> None:
        leave_mark()

    def leave_mark() -> None:
        """Tell when the worker began with the task, before the ledger was asked, and when we do."""
        entered = time.monotonic()
        with Redis.from_url(app.conf.broker_url) as client:
            client.rpush(MARKS, f"{begun[0]} {entered}")

    begun = [0.0]

    def begin(**_: Any) -> None:
        begun[0] = time.monotonic()

    task_prerun.connect(begin, weak=False)

    if "budget_database_url" in conf:
        CeleryBudget(app)
        declare = budgeted(budget="tenant:{tenant}", estimate=lambda size, tenant: size)

        @declare
        @app.task(name="bench.budgeted", shared=False, acks_late=True)
        def silent(size: int, tenant: str) -> None:
            pass

        @budgeted(budget=BUDGET, estimate=SIZE)
        @app.task(name="bench.budgeted_mark", shared=False, acks_late=True)
        def budgeted_mark() -> None:
            leave_mark()

        @declare
        @app.task(name="bench.recording", shared=False, acks_late=True)
        def recording(size: int, tenant: str) -> None:
            usage.record(size)

    app.finalize()
    return app


def fund(budget: CeleryBudget) -> None:
    """Make the ledger and a budget that is never short."""
    budget.init()
    budget.set(BUDGET, limit=10**15, unit="tokens")


if "BENCH_CONF" in os.environ:
    app = make_app(**json.loads(os.environ["BENCH_CONF"]))
