"""Pickled content: admitted as Celery publishes it, and loaded by nobody who does not accept it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.contrib.testing.worker import start_worker

from celery_budget import budgeted
from celery_budget.store import schema
from tests.cluster import eventually
from tests.integration.support import Shop

loaded: list[str] = []
ran: list[Any] = []


def load(what: str) -> str:
    loaded.append(what)
    return what


class Trap:
    """Does something when it is unpickled."""

    def __reduce__(self) -> Any:
        return load, ("trap",)


def declare(shop: Shop, **options: Any) -> Any:
    def draft(what: Any) -> None:
        ran.append(what)

    ran.clear()
    loaded.clear()
    return budgeted(budget="tenant:a", estimate=2)(
        shop.app.task(name="pickled.draft", shared=False, **options)(draft)
    )


def test_no_one_loads_what_is_not_accepted(make_shop: Callable[..., Shop]) -> None:
    """Neither who admits it, nor the relay, nor the worker, which gives its hold back."""
    shop = make_shop(worker_pool="solo", budget_poll_seconds=0.02)
    result = declare(shop).apply_async((Trap(),), serializer="pickle")
    shop.sql(schema.outbox.update().values(last_error=None))
    assert shop.amounts("tenant:a") == (2, 0, 8)
    assert shop.relay().published == 1
    with start_worker(shop.app, perform_ping_check=False, shutdown_timeout=60):
        eventually(lambda: shop.amounts("tenant:a") == (0, 0, 10))
    [row] = shop.rows(schema.reservations)
    assert (row.state, row.reason) == ("released", "unreadable")
    assert loaded == ran == []
    assert shop.budget.explain(result.id)
    assert loaded == []


def test_a_worker_that_accepts_it_runs_it(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(worker_pool="solo", accept_content=["json", "pickle"])
    declare(shop).apply_async((Trap(),), serializer="pickle")
    shop.relay()
    with start_worker(shop.app, perform_ping_check=False, shutdown_timeout=60):
        eventually(lambda: ran == ["trap"])
    assert loaded.count("trap") >= 1


def test_what_came_back_from_a_replay_is_the_result_serializers(shop: Shop) -> None:
    """A run in place makes no message: nothing is written or loaded."""
    declare(shop, serializer="pickle").apply((Trap(),))
    assert loaded == []
    assert len(ran) == 1


def test_what_a_ledger_tells_of_a_pickled_message_is_read_without_it(shop: Shop) -> None:
    """The sweep, retention and reports of one that waits, and one in quarantine."""
    task = declare(shop)
    task.apply_async((Trap(),), serializer="pickle", countdown=1000)
    shop.budget.set("tenant:a", limit=3)
    task.apply_async((Trap(),), serializer="pickle", on_refused="park")
    shop.sweep()
    shop.budget.reconcile()
    shop.budget.report()
    shop.budget.set("tenant:a", limit=10)
    shop.sweep()
    assert shop.amounts("tenant:a") == (4, 0, 6)
    shop.make_due()
    assert shop.relay().published == 2
    assert loaded == []
