"""Shared tasks that go by a free lane or a paid one: ``tests/integration/test_fallbacks.py``."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from celery_budget import BudgetedTask, BudgetExceeded, usage

TENANT = "tenant:{tenant}"
LANES = ["free", "paid"]


def queue_of(task: Any) -> str:
    return str(task.request.delivery_info["routing_key"])


@shared_task(
    name="falling.draft",
    bind=True,
    base=BudgetedTask,
    budget=TENANT,
    estimate=6,
    fallback=LANES,
    acks_late=True,
)
def draft(self: Any, tenant: str, retries: int = 0) -> list[Any]:
    """Use 2 at each attempt; return the queue and the lane of the last one."""
    usage.record(2)
    if self.request.retries < retries:
        raise self.retry(countdown=0)
    return [queue_of(self), self.request.budget_lane]


@shared_task(
    name="falling.turns",
    bind=True,
    base=BudgetedTask,
    budget=TENANT,
    estimate=6,
    fallback=LANES,
    acks_late=True,
)
def turns(self: Any, tenant: str, more: int) -> str:
    """Use 2 in the lane it came by, and 3 in the paid one where that lets it."""
    usage.record(2)
    try:
        usage.turn_to("paid", more)
    except BudgetExceeded as refusal:
        return f"refused by {refusal.budget}"
    usage.record(3)
    return queue_of(self)
