"""Events at WARNING or above that nothing else raises, by what raises them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from celery import signals, states
from celery.app.task import Context
from celery.exceptions import Ignore

from celery_budget import Estimator, admission, budgeted, relay, settlement
from celery_budget.errors import StoreError
from celery_budget.integration.context import attach
from celery_budget.integration.execution import AttemptBackend, say_started
from celery_budget.integration.queues import KombuQueues
from celery_budget.integration.results import BackendResults
from celery_budget.store import schema, wakeup
from tests.contract.support import Ledger
from tests.integration.support import Shop
from tests.messages import Told


def declare(shop: Shop) -> object:
    @budgeted(budget="tenant:a", estimate=1)
    @shop.app.task(name="shop.draft")
    def draft() -> None:
        pass

    return draft


def test_an_event_that_cannot_be_stored_is_lost_and_its_task_is_not(
    make_shop: Callable[..., Shop], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = make_shop(task_send_sent_event=True)
    declare(shop)

    def away(*_: object) -> None:
        raise StoreError("away", retryable=True)

    monkeypatch.setattr(admission, "enqueue", away)
    result = shop.task("shop.draft").delay()
    assert told("message.event_lost") == [{"task": "shop.draft", "task_id": result.id}]
    assert shop.counts()["admitted"] == 1


def test_a_result_that_rpc_cannot_store(make_shop: Callable[..., Shop], told: Told) -> None:
    BackendResults(make_shop(result_backend="rpc://").app).ended("1", "cancelled")
    assert told("result.unstorable") == [{"task_id": "1", "reason": "cancelled"}]


def test_a_backend_that_can_forget_nothing(make_shop: Callable[..., Shop], told: Told) -> None:
    shop = make_shop(result_backend="celery.backends.base:BaseBackend")
    BackendResults(shop.app).forget("1")
    assert told("result.unforgotten") == [{"task_id": "1"}]


def test_a_message_whose_queue_cannot_be_read(shop: Shop, told: Told) -> None:
    assert KombuQueues(shop.app).loads("", "no envelope") is None
    assert told("message.unreadable") == [{"broker": ""}]


def test_a_broker_that_cannot_be_asked(make_shop: Callable[..., Shop], told: Told) -> None:
    shop = make_shop(broker_url="amqp://127.0.0.1:1//")
    declare(shop)
    shop.task("shop.draft").delay()
    [row] = shop.rows(schema.outbox)
    assert KombuQueues(shop.app).loads("", row.envelope) is None
    assert [one["broker"] for one in told("broker.unasked")] == [""]


def test_a_start_that_cannot_be_stored(
    shop: Shop, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object, **__: object) -> None:
        raise OSError("down")

    monkeypatch.setattr(shop.app.backend, "store_result", down)
    request = Context(id="1")
    AttemptBackend(shop.app.backend).store_result("1", {}, states.STARTED, request=request)
    say_started(request)
    assert told("result.start_unstored") == [{"task_id": "1"}]


def test_a_task_that_has_had_its_attempts(make_shop: Callable[..., Shop], told: Told) -> None:
    shop = make_shop(task_always_eager=True)

    @budgeted(budget="tenant:a", estimate=1, max_attempts=1)
    @shop.app.task(name="shop.again", bind=True, max_retries=None)
    def again(self: Any) -> None:
        raise self.retry(exc=ValueError("no"), countdown=0)

    shop.task("shop.again").apply()
    [spent] = told("request.spent")
    assert (spent["task"], spent["attempt"], spent["reason"]) == ("shop.again", 1, "max_attempts")


def test_a_shadow_that_fails_is_told_once(shop: Shop, told: Told) -> None:
    def bad() -> int:
        raise LookupError("no such model")

    shadow = Estimator("told-once", bad)

    @budgeted(budget="tenant:a", estimate=1, shadows=[shadow])
    @shop.app.task(name="shop.shadowed")
    def shadowed() -> None:
        pass

    for _ in range(2):
        shop.task("shop.shadowed").delay()
    [one] = told("shadow.failed")
    assert "told-once" in one["shadow"]
    assert one["task"] == "shop.shadowed"


def test_a_delivery_that_cannot_start(
    shop: Shop, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the ledger cannot be told that is said, and where it is, that the task has ended."""
    declare(shop)
    result = shop.task("shop.draft").delay()
    shop.relay()
    [message] = shop.received()
    consumer = Mock(app=shop.app)

    def away(*_: object, **__: object) -> None:
        raise StoreError("away", retryable=True)

    with monkeypatch.context() as patched:
        patched.setattr(settlement, "unclaimed", away)
        signals.task_rejected.send(sender=consumer, message=message, exc=None)
    assert told("store.untold") == [{"matter": "how a delivery ended"}]
    assert told("request.unstarted") == []
    signals.task_rejected.send(sender=consumer, message=message, exc=None)
    assert told("request.unstarted") == [
        {"task": "shop.draft", "task_id": result.id, "reason": "unreadable"}
    ]


def test_a_pass_of_the_relay_that_fails(
    shop: Shop, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def away(*_: object, **__: object) -> None:
        stop.set()
        raise StoreError("away", retryable=False)

    budget = shop.budget
    one = relay.Relay(budget.store, budget.settings, shop.publisher, BackendResults(shop.app).ended)
    monkeypatch.setattr(one, "run_once", away)
    relay.run(one, budget.settings, wakeup.sleeper(budget.store, budget.settings), stop)
    assert told("step.failed") == [{"step": "a pass through the outbox"}]


def test_what_is_stored_of_an_attempt_that_could_not_be(
    shop: Shop, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery stores the backend's own failure as the task's; and a retry that is cut short."""
    ledger = Ledger(shop.budget.store, shop.budget.settings)
    backend = AttemptBackend(shop.app.backend)
    request, attempt = ledger.start(1, budget="tenant:a")
    context = Context(id=request.task_id)
    attach(context, attempt)
    attempt.called = attempt.cut_short = True
    with pytest.raises(Ignore):
        backend.mark_as_failure(request.task_id, OSError("down"), request=context)
    assert told("outcome.unstored") == [{"task_id": request.task_id}]

    def away(*_: object) -> None:
        raise StoreError("away", retryable=True)

    monkeypatch.setattr(attempt, "cancelled_since", away)
    backend.mark_as_retry(request.task_id, ValueError(), None, request=context)
    assert told("result.cancel_unknown") == [{"task_id": request.task_id}]
