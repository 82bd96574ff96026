"""The application of the soak; its processes get the configuration as JSON in ``SOAK_CONF``."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_budget import CeleryBudget, budgeted, effect, usage
from tests.soak.plan import STAGES

__all__ = ["CONF", "QUEUE", "WORK", "make_app"]

CONF = "SOAK_CONF"
QUEUE = "soak"
#: The business's own table: a row for each effect, and nothing keeps one from being there twice.
WORK = sa.table("work", sa.column("job"))
#: How many units a worker works through in a second.
UNITS_A_SECOND = 500_000


class Transient(Exception):
    """What may go better the next time."""


class Permanent(Exception):
    """What no retry mends."""


def make_app(conf: dict[str, Any]) -> Celery:
    """Return the application under the given configuration."""
    app = Celery("soak", set_as_current=False)
    app.conf.update(conf)
    app.conf.task_default_queue = QUEUE
    CeleryBudget(app)
    folder = Path(conf["soak_folder"])

    def connect() -> sa.Engine:
        return sa.create_engine(conf["budget_database_url"], poolclass=sa.NullPool)

    def work(self: Any, tenant: str, number: int, weight: int, actual: int, fate: str) -> int:
        if fate == "exhausted" or (fate == "transient" and self.request.retries < 2):
            raise Transient(number)
        time.sleep(weight / UNITS_A_SECOND)
        usage.record(actual, key="reply")
        if fate == "permanent":
            raise Permanent(number)
        with connect().begin() as connection, effect(connection, "work") as first:
            if first:
                connection.execute(WORK.insert().values(job=number))
        if fate == "dies" and _is_first(folder / f"died-{number}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    for stage in STAGES:
        made: Callable[[Any], Any] = app.task(
            name=f"soak.{stage}",
            shared=False,
            bind=True,
            acks_late=True,
            autoretry_for=(Transient,),
            retry_backoff=False,
            default_retry_delay=0,
            max_retries=3,
        )
        budgeted(
            budget="tenant:{tenant}",
            estimate=lambda weight: weight,
            stage=stage,
            terminal=[Permanent],
        )(made(work))
    return app


def _is_first(marker: Path) -> bool:
    """Tell whether nobody has been here before."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if CONF in os.environ:
    app = make_app(json.loads(os.environ[CONF]))
