"""Shared tasks that wait for budget, for ``tests/integration/test_parking.py``."""

from __future__ import annotations

import time
from pathlib import Path

from celery import current_app, shared_task

from celery_budget import BudgetedTask, budgeted, usage
from tests.apps.steps import note

TENANT = "tenant:{tenant}"


@budgeted(budget=TENANT, estimate=8)
@shared_task(name="waiting.hold")
def hold(tenant: str, until: str) -> None:
    """Hold budget until the file ``until`` is there, beside the journal; use 2 of it."""
    note(f"holds {until}")
    end = time.monotonic() + 60
    while not (Path(current_app.conf["shop_journal"]).parent / until).exists():
        if time.monotonic() > end:
            raise TimeoutError(until)
        time.sleep(0.05)
    usage.record(2)


@shared_task(
    name="waiting.draft",
    base=BudgetedTask,
    budget=TENANT,
    estimate=6,
    on_refused="park",
    park_for=300,
)
def draft(value: int, tenant: str) -> int:
    usage.record(2)
    return value
