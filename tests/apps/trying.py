"""Shared tasks that declare how long they are tried, for ``tests/integration/test_trying.py``.

They fail until the file named by their ``until`` is there, beside the journal.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import current_app, shared_task

from celery_budget import BudgetedTask, budgeted, usage
from tests.apps.steps import note

TENANT = "tenant:{tenant}"


def works(until: str) -> bool:
    return (Path(current_app.conf["shop_journal"]).parent / until).exists()


@budgeted(budget=TENANT, estimate=6, max_attempts=2)
@shared_task(
    name="trying.limited",
    bind=True,
    acks_late=True,
    autoretry_for=(ValueError,),
    retry_backoff=False,
    default_retry_delay=0,
    max_retries=None,
)
def limited(self: Any, tenant: str, until: str) -> str:
    """Use 2 in each attempt."""
    note(f"limited {until} {self.request.retries}")
    usage.record(2)
    if not works(until):
        raise ValueError(until)
    return until


@budgeted(budget=TENANT, estimate=6, terminal=[KeyError])
@shared_task(name="trying.hopeless", autoretry_for=(LookupError,), default_retry_delay=0)
def hopeless(tenant: str) -> None:
    note("hopeless")
    raise KeyError("nothing")


@shared_task(
    name="trying.timed",
    base=BudgetedTask,
    budget=TENANT,
    estimate=6,
    retry_within=60,
    bind=True,
    max_retries=None,
)
def timed(self: Any, tenant: str, countdown: float) -> None:
    """Retry without ``exc``, later than it may start."""
    usage.record(1)
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError:
        self.retry(countdown=countdown)


@budgeted(budget=TENANT, estimate=6, max_attempts=5)
@shared_task(name="trying.bare", bind=True, max_retries=1)
def bare(self: Any, tenant: str) -> None:
    """Retry without any error, until Celery has enough of it."""
    usage.record(1)
    self.retry(countdown=0)


@budgeted(budget=TENANT, estimate=6, max_attempts=1)
@shared_task(name="trying.bare_once", bind=True)
def bare_once(self: Any, tenant: str) -> None:
    self.retry(countdown=0)


@budgeted(budget=TENANT, estimate=6, max_attempts=2)
@shared_task(name="trying.dies", acks_late=True, bind=True)
def dies(self: Any, tenant: str) -> None:
    note(f"dies {self.request.id}")
    usage.record(1)
    os.kill(os.getpid(), signal.SIGKILL)


@shared_task(name="trying.told")
def told(request: Any, error: Any, traceback: Any) -> None:
    """An errback."""
    note(f"told {request.id}")


@shared_task(name="trying.after")
def after(value: Any) -> Any:
    note(f"after {value}")
    return value


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="trying.hurried", bind=True, max_retries=None)
def hurried(self: Any, tenant: str, countdown: float) -> None:
    """Tell how long it has, and retry later than that."""
    note(f"hurried {self.request.id} {usage.seconds_left()} {usage.deadline()}")
    usage.record(1)
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError:
        self.retry(countdown=countdown)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="trying.watched", bind=True)
def watched(self: Any, tenant: str, until: str) -> str:
    """Tell of its progress, and wait."""
    usage.record(2)
    self.update_state(state="PROGRESS", meta={"done": 1, "of": 2})
    note(f"watched {until}")
    while not works(until):
        time.sleep(0.05)
    usage.record(1)
    return until


@budgeted(budget=TENANT, estimate=6, reuse="1h")
@shared_task(name="trying.reused")
def reused(tenant: str, until: str) -> list[str]:
    note(f"reused {until}")
    usage.record(2)
    while not works(until):
        time.sleep(0.05)
    return [until]


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="trying.next")
def following(value: Any, tenant: str) -> str:
    """Give on when it has to be over."""
    usage.record(1)
    return str(usage.deadline())
