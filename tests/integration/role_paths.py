"""What each kind of process does with the ledger, for tests of what it may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from celery import chain, group
from celery.exceptions import Reject

from celery_budget import (
    BudgetExceeded,
    ResultNotReady,
    budgeted,
    effect,
    usage,
)
from celery_budget.integration.alerts import alerting_of
from celery_budget.metrics.collector import BudgetCollector
from celery_budget.store import schema
from tests.integration.delivering import delivered
from tests.integration.support import Shop


def declare(shop: Shop) -> None:
    """The tasks, the same ones in each process."""

    def draft(self: Any, what: str = "", tenant: str = "a") -> str:
        usage.record(1, key="one")
        usage.record({"tokens": 1})
        usage.remaining()
        usage.cancelled()
        if what == "extend":
            usage.extend(1)
        if what == "turn":
            usage.turn_to("paid", 1)
        if what == "over":
            usage.record(5)
        if what == "effect":
            with shop.budget.store.engine.begin() as connection, effect(connection, "e") as first:
                first.store(1)
        if what == "retry" and self.request.retries == 0:
            raise self.retry(countdown=0)
        if what == "requeue":
            raise Reject("later", requeue=True)
        if what == "fail":
            raise ValueError(what)
        return what

    def joined() -> str:
        return "joined"

    def plain() -> None: ...

    budgeted(budget="tenant:{tenant}", estimate=2, max_attempts=3)(
        shop.app.task(name="role.draft", bind=True, shared=False)(draft)
    )
    budgeted(budget="tenant:a", estimate=2, reuse=60)(
        shop.app.task(name="role.joined", shared=False)(joined)
    )
    budgeted(budget="tenant:a", estimate=2, fallback=["paid"])(
        shop.app.task(name="role.laned", shared=False)(plain)
    )
    budgeted(budget="tenant:a", estimate=1000, on_refused="park")(
        shop.app.task(name="role.large", shared=False)(plain)
    )
    shop.app.task(name="role.plain", shared=False)(plain)


def migrate(shop: Shop) -> None:
    shop.budget.init()


def administer(shop: Shop) -> None:
    """Budgets, limits and lanes; what is in quarantine; repairs."""
    budget = shop.budget
    budget.set("org", limit=100_000, unit="tokens")
    budget.set("tenant:a", limit=500, unit="tokens", parent="org", soft_stop=0.9)
    budget.set("tenant:none", limit=0, unit="tokens")
    budget.set("paid", limit=500, unit="tokens")
    budget.set("hot", limit=500, unit="tokens", period="day", stripes=4)
    budget.lanes.set("paid", queues=["paid-q"], budgets=["paid"], preflight=False)
    budget.grant("tenant:a", 1)
    budget.adjust("tenant:a", 1, reason="test")
    budget.set("gone", limit=5, unit="tokens")
    budget.close("gone")
    budget.lanes.pause("paid")
    budget.lanes.resume("paid")
    for one in budget.quarantine():
        budget.requeue(str(one.quarantine_id))
    for large in budget.parked():
        budget.discard_parked(str(large.parked_id))
    budget.repair()
    budget.reconcile()


def call(shop: Shop) -> None:
    """Everything that a web process does."""
    task = shop.task
    draft = task("role.draft")
    for what in ("", "extend", "turn", "over", "effect", "retry", "fail", "requeue"):
        draft.apply_async((what,), request_id=f"r-{what}")
        draft.apply_async((what,), request_id=f"r-{what}")
    with pytest.raises(BudgetExceeded):
        draft.apply_async(("", "none"))
    task("role.large").delay()
    task("role.joined").delay()
    task("role.joined").delay()
    task("role.laned").delay()
    group(draft.s(), draft.s()).apply_async()
    chain(draft.si(), draft.si()).apply_async()
    chain(draft.si(), draft.si()).apply_async(reserve="chain")
    with shop.budget.batch():
        draft.delay()
        task("role.plain").delay()
    with shop.budget.store.engine.begin() as connection, shop.budget.enlist(connection):
        draft.delay()
    assert shop.budget.would_admit(draft, ("",))
    result = draft.apply_async(countdown=1000)
    assert shop.budget.job(result.id, owner="tenant:a").state == "queued"
    with pytest.raises(ResultNotReady):
        shop.budget.result(result.id, owner="tenant:a")
    assert shop.budget.cancel(result.id) == "ended"


def work(shop: Shop, messages: list[Any]) -> None:
    """Everything that a worker does with what it receives, each twice."""
    shop.budget.check()
    for message in messages:
        delivered(shop, message)
        delivered(shop, message)
    # One that comes without a reservation.
    message.headers["budget_reservation"] = None
    message.headers["id"] = str(uuid4())
    delivered(shop, message)
    assert shop.task("role.draft").apply(("",), {"tenant": "a"}).get() == ""


def relay(shop: Shop) -> None:
    """Passes of all that a relay does."""
    shop.relay()
    shop.sweep()
    alerting = alerting_of(shop.budget)
    alerting.run_once()


def report(shop: Shop) -> None:
    """All that is only shown, but for what looks into messages: reconcile."""
    budget = shop.budget
    budget.report()
    list(BudgetCollector(budget).collect())
    budget.overview()
    budget.balances()
    budget.standing("tenant:a")
    budget.grants("tenant:a")
    budget.journal("tenant:a")
    budget.quarantine()
    budget.parked()
    budget.queued()
    budget.alerts()
    budget.relays()
    budget.suggest()
    budget.explain_budget("tenant:a")
    budget.lanes.list()
    budget.export()
    with budget.store.transaction() as connection:
        [task_id, *_] = connection.execute(sa.select(schema.reservations.c.task_id)).scalars()
    budget.explain(task_id)


PATHS: dict[str, Callable[..., None]] = {"admin": administer, "reporter": report}
