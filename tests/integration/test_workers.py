"""Workers in this process: what they leave behind, and what they make of a task's own requests."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery._state import get_current_worker_task
from celery.app.task import Context
from celery.contrib.testing.worker import start_worker
from celery.worker import state
from celery.worker.request import Request

from celery_budget import BudgetedTask
from celery_budget.errors import StoreError
from celery_budget.integration import asking as asking_module
from celery_budget.integration import worker
from celery_budget.integration.asking import Asking
from celery_budget.integration.spooling import gives_back, stopping
from tests.cluster import eventually
from tests.integration.placements import BUDGET, NAME, fresh, with_base
from tests.integration.publication.conftest import logging_kept
from tests.integration.support import Shop, current
from tests.messages import Told


def _begun(before: set[threading.Thread]) -> set[str]:
    """Return the product's threads that there are now, and were not before."""
    begun = set(threading.enumerate()) - before
    return {one.name for one in begun if one.name.startswith("budget-")}


def test_a_worker_that_has_ended_leaves_no_thread_and_the_next_one_works(shop: Shop) -> None:
    """Celery's testing worker is terminated, of which no signal tells."""
    shop.app.conf.update(worker_hijack_root_logger=False, budget_sweep_seconds=0.05)
    before = set(threading.enumerate())
    with current(shop.app), logging_kept():
        task = with_base(shop.app)
        for spent in (2, 4):
            result = task.delay(2, "a")
            shop.relay()
            with start_worker(shop.app, perform_ping_check=False, shutdown_timeout=60):
                assert {"budget-leases", "budget-spool", "budget-received"} <= _begun(before)
                assert not stopping.is_set()
                assert result.get(timeout=60) == 2
            assert stopping.is_set(), "what is left of it waits for no ledger"
            assert shop.amounts("tenant:a") == (0, spent, 10 - spent)
        eventually(lambda: _begun(before), lambda left: not left)


def test_what_another_worker_of_this_process_has_left_open_is_none_of_its_own(shop: Shop) -> None:
    """Celery counts what is active by process; a task that never ended would stay for ever."""
    stopped = threading.Event()
    stopped.set()
    with current(shop.app):
        task = with_base(shop.app)

    def open_here(app: Celery) -> list[str] | None:
        left = Mock(app=app, task=task, args=(1, "a"), kwargs={}, id="left")
        state.active_requests.add(left)
        try:
            return worker._active_task_ids(shop.app, stopped)
        finally:
            state.active_requests.discard(left)

    assert open_here(shop.app) == ["left"]
    assert open_here(Celery(set_as_current=False)) is None


def test_a_copy_does_not_say_that_its_task_has_started(shop: Shop) -> None:
    """Celery stores it before the claim, where nobody would ever store anything over it."""
    shop.app.conf.update(worker_hijack_root_logger=False, task_track_started=True)
    seen: list[str] = []
    with current(shop.app), logging_kept():

        @shop.app.task(name=NAME, base=BudgetedTask, bind=True, **BUDGET)
        def draft(self: Any, size: int, tenant: str) -> None:
            seen.append(self.AsyncResult(self.request.id).state)

        @shop.app.task(name="plain")
        def plain(item: int) -> None:
            inline = get_current_worker_task()
            seen.append(inline.AsyncResult(inline.request.id).state)

        cancelled = draft.delay(1, "a")
        shop.relay()
        shop.budget.cancel(cancelled.id)
        assert cancelled.state == "REVOKED"
        runs, free = draft.delay(2, "a"), plain.map([1]).delay()
        shop.relay()
        with start_worker(shop.app, perform_ping_check=False, shutdown_timeout=60):
            runs.get(timeout=60)
            free.get(timeout=60)
    assert shop.app.AsyncResult(cancelled.id).state == "REVOKED"
    assert seen == ["STARTED", "STARTED"]
    assert shop.amounts("tenant:a") == (0, 2, 8)


class Own(Request):
    """A class of requests that somebody else has made."""

    def on_failure(self, *args: Any, **kwargs: Any) -> Any:
        return "own"


@pytest.mark.parametrize("given", [Own, f"{__name__}:Own"], ids=["class", "name"])
def test_a_tasks_own_requests_ask_the_ledger_first(shop: Shop, given: Any) -> None:
    class Base(BudgetedTask):
        abstract = True
        Request = given

    task = shop.app.task(name=NAME, base=Base, **BUDGET)(fresh())
    plain = shop.app.task(name="plain", Request=given)(fresh())
    other = with_other(shop)
    for _ in range(2):
        worker._check(shop.budget)
        order = shop.task(NAME).Request.__mro__
        assert order.index(worker.BudgetRequest) < order.index(Own) < order.index(Request)
    assert task.Request.__name__ == "Own"
    assert plain.Request is given, "one without a budget keeps what it has"
    assert other.Request == BudgetedTask.Request


def with_other(shop: Shop) -> Any:
    return shop.app.task(name="other", base=BudgetedTask, **BUDGET)(fresh())


def test_a_ledger_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(asking_module, "time", type("Clock", (), {"monotonic": lambda: clock[0]}))
    asked: list[float] = []

    def ask(takes: float) -> str:
        asked.append(clock[0])
        clock[0] += takes
        if takes:
            raise StoreError("away", retryable=True)
        return "told"

    def fails(takes: float) -> None:
        with pytest.raises(StoreError):
            asking.ask(ask, takes)

    asking = Asking()
    fails(0.5)
    fails(0.5)
    assert asked == [0.0, 0.5], "one that refuses is asked each time"
    fails(40)
    clock[0] = 120.0
    fails(0)
    assert asked == [0.0, 0.5, 1.0], "not asked"
    clock[0] = 121.0
    assert asking.ask(ask, 0) == "told"
    assert asking.ask(ask, 0) == "told"


def test_what_a_worker_gives_back_as_it_stops_is_told(shop: Shop, told: Told) -> None:
    with current(shop.app):
        result = with_base(shop.app).delay(2, "a")
    shop.relay()
    [message] = shop.received()
    request = Context(message.headers)
    assert not gives_back(shop.budget, request)
    stopping.set()
    try:
        assert gives_back(shop.budget, request)
    finally:
        stopping.clear()
    assert told("delivery.given_back") == [{"task_id": result.id}]
