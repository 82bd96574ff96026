"""Shared tasks with each way to end or to go on, for the worker of ``tests/integration``.

A worker of ``tests.apps.shop`` gets them by the setting ``imports``.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery import Task, current_app, group, shared_task
from celery.exceptions import Ignore, Reject

from celery_budget import BudgetedTask, BudgetExceeded, BudgetLine, budgeted, estimator, usage
from celery_budget.core.estimators import estimators
from celery_budget.estimators import by_characters
from tests.replies import load

TENANT = "tenant:{tenant}"


def note(what: str) -> None:
    with open(current_app.conf["shop_journal"], "a") as file:
        file.write(what + "\n")


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.ignored")
def ignored(tenant: str) -> None:
    usage.record(2)
    raise Ignore


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.rejected")
def rejected(tenant: str) -> None:
    usage.record(2)
    raise Reject("no", requeue=False)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.work", acks_late=True)
def work(value: Any, tenant: str, used: int = 5) -> Any:
    """Use ``used`` units and give ``value`` on."""
    usage.record(used)
    return value


@estimator("steps", version="2", at_most=90)
def size(value: Any) -> int:
    return len(value)


estimators.register("steps", by_characters("value", units_per_character=2), version="3")


@budgeted(budget=TENANT, estimate="steps:2", shadows=["steps:3", "steps:gone"], stage="estimated")
@shared_task(name="steps.estimated", acks_late=True)
def estimated(value: str, tenant: str, used: int) -> str:
    """Use ``used`` units, whatever was estimated."""
    usage.record(used)
    return value


@shared_task(name="steps.plain")
def plain(value: Any) -> Any:
    return value


@shared_task(name="steps.total")
@budgeted(budget=TENANT, estimate=6)
def total(values: list[int], tenant: str) -> int:
    """A chord's body."""
    usage.record(1)
    return sum(values)


@budgeted(budget=TENANT, estimate=lambda value: value, name="steps.priced")
def priced(value: Any, tenant: str) -> Any:
    """The estimate is what the step before has returned."""
    return value


@shared_task(name="steps.keys", base=BudgetedTask, budget=TENANT, estimate=6)
def keys(tenant: str, records: list[tuple[int, str | None]]) -> list[bool]:
    """Record each amount under its key."""
    return [usage.record(amount, key=key) for amount, key in records]


@budgeted(
    budget=[
        TENANT,
        BudgetLine("usd:{tenant}", estimate=lambda tokens: tokens * 3),
        BudgetLine("calls:{tenant}", estimate=1, charge="start"),
    ],
    estimate=6,
)
@shared_task(name="steps.metered", bind=True, max_retries=3)
def metered(
    self: Any, tenant: str, tokens: int, failures: int = 0, more: int = 0
) -> list[bool | str]:
    """Draw on three budgets; record tokens and money under one key, once in each attempt."""
    key = f"reply-{self.request.retries}"
    done: list[bool | str] = []
    if more:
        try:
            done += [usage.extend(more, key="more"), usage.extend(more, key="more")]
        except BudgetExceeded as refused:
            done.append(refused.reason)
    done += [usage.record(tokens, key), usage.record(tokens * 2, key, unit="micro-usd")]
    done += [usage.record(tokens * 2, key, unit="micro-usd")]
    if self.request.retries < failures:
        raise self.retry(countdown=0)
    return done


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.unmetered")
def unmetered(tenant: str) -> None:
    """Record nothing."""


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.fail", bind=True)
def fail(self: Any, tenant: str, used: int) -> None:
    if used:
        usage.record(used)
    raise ValueError(self.request.id)


class OddError(Exception):
    """One that does not survive pickling."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.odd")
def odd(tenant: str) -> None:
    usage.record(2)
    raise OddError("this", "that")


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.retried", bind=True, max_retries=5)
def retried(self: Any, failures: int, tenant: str, used: int = 1, countdown: float = 0) -> int:
    usage.record(used)
    if self.request.retries < failures:
        raise self.retry(countdown=countdown)
    return int(self.request.retries)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.replaced", bind=True)
def replaced(self: Any, tenant: str, by: str) -> Any:
    usage.record(2)
    raise self.replace(
        {
            "budgeted": work.s("in its place", tenant),
            "plain": plain.s("in its place"),
            "chain": work.s("in its", tenant) | plain.s(),
            "group": group(work.s(1, tenant), work.s(2, tenant)),
        }[by]
    )


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.silent", ignore_result=True)
def silent(tenant: str) -> str:
    usage.record(3)
    return "nobody asks"


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.spawn")
def spawn(tenant: str, amount: int) -> list[Any]:
    """Publish a task of its own in its body."""
    usage.record(1)
    try:
        return ["admitted", priced.delay(amount, tenant).id]
    except BudgetExceeded as refusal:
        return ["refused", *refusal.args]


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.propagate")
def propagate(tenant: str, amount: int) -> None:
    """The same, not caught."""
    usage.record(1)
    priced.delay(amount, tenant)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.stoppable", acks_late=True, bind=True, max_retries=5)
def stoppable(self: Any, tenant: str, then: str) -> str:
    """Run until cancelled, then ``return``, ``retry``, ``raise`` or ``reject``."""
    note(f"stoppable {tenant}")
    usage.record(2)
    until = time.monotonic() + 60
    while not usage.cancelled():
        if time.monotonic() > until:
            raise TimeoutError("nobody cancelled it")
        time.sleep(0.02)
    if then == "retry":
        raise self.retry(countdown=0)
    if then == "reject":
        raise Reject("stopped", requeue=True)
    if then == "raise":
        raise ValueError("stopped")
    return "stopped"


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.slow", acks_late=True)
def slow(tenant: str, seconds: float) -> None:
    usage.record(2)
    note(f"slow {tenant}")
    time.sleep(seconds)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.calls")
def calls(tenant: str) -> list[Any]:
    """Call another budgeted task: its usage is this one's. Run it in place: that is its own."""
    return [work(1, tenant, used=1), work.apply((2, tenant, 2)).get(disable_sync_subtasks=False)]


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.nested", bind=True)
def nested(self: Any, tenant: str, deep: int) -> int:
    """Call itself."""
    usage.record(1)
    return 1 + self(tenant, deep - 1) if deep else 1


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.unwritable")
def unwritable(tenant: str) -> object:
    """Return what no serializer takes."""
    usage.record(2)
    return object()


class Late(Task):
    """One that records after the call."""

    def on_success(self, *args: Any) -> None:
        usage.record(3)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.late", base=Late)
def late(tenant: str) -> None:
    usage.record(2)


class Loud(Task):
    """A class with a call of its own that does not call the next one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["loud", self.run(*args, **kwargs)]


class Polite(Task):
    """One that calls the next one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["polite", super().__call__(*args, **kwargs)]


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.loud", base=Loud, bind=True)
def loud(self: Any, tenant: str) -> str:
    usage.record(3)
    return str(self.request.id)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.polite", base=Polite, bind=True)
def polite(self: Any, tenant: str) -> str:
    usage.record(3)
    return str(self.request.id)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="steps.after_failure")
def after_failure(failed_id: str, tenant: str = "") -> str:
    """An errback that Celery publishes: it takes the failed task's id."""
    usage.record(1)
    note(f"after {failed_id}")
    return failed_id


@budgeted(budget="tenant:{tenant}", estimate=6)
@shared_task(name="steps.inline_errback")
def inline_errback(request: Any, error: Any, traceback: Any, tenant: str = "") -> None:
    """An errback that Celery calls in the failed task's process."""
    note(f"inline {request.id}")


@budgeted(budget=TENANT, estimate=40)
@shared_task(name="steps.reply")
def reply(tenant: str, name: str) -> bool:
    """Record a provider's reply."""
    return usage.record(load(name))


@budgeted(budget=TENANT, estimate=40)
@shared_task(name="steps.streamed")
def streamed(tenant: str, name: str, until: int | None) -> int:
    """Read a provider's stream, and die within."""
    seen = 0
    for _ in usage.stream(iter(load(name))):
        seen += 1
        if seen == until:
            raise ConnectionError("gone")
    return seen


@budgeted(budget=TENANT, estimate=40, stop_at_hold=True)
@shared_task(name="steps.careful")
def careful(tenant: str) -> None:
    """Use more than is reserved."""
    while True:
        usage.record(usage.remaining() or 5)


@budgeted(budget=TENANT, estimate=40)
@shared_task(name="steps.dies")
def dies(tenant: str) -> None:
    """Record a reply, and die before anything of it is returned."""
    usage.record(load("mistral_chat"))
    os.kill(os.getpid(), signal.SIGKILL)
