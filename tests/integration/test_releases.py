"""What the supported releases of Celery and kombu differ in, and that it makes no difference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Task
from celery.worker import request as requests
from celery.worker import state
from kombu.transport.redis import Channel

from celery_budget import budgeted
from celery_budget.integration import releases
from celery_budget.relay import Relayed
from tests.integration.support import Shop


@pytest.mark.redis
def test_a_redis_without_publish_batches_gets_its_messages_one_by_one(
    make_shop: Callable[..., Shop], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kombu before 5.7 has it, whichever is installed."""
    monkeypatch.setattr(Channel, "supports_batch_publish", False, raising=False)
    monkeypatch.setattr(
        Channel, "create_publish_batch", lambda *_: pytest.fail("a batch"), raising=False
    )
    shop = make_shop(broker_url=redis_url)
    shop.budget.set("tenant:a", limit=100)
    task = shop.app.task(name="releases.draft", shared=False)(_draft)
    draft = budgeted(budget="tenant:a", estimate=1)(task)
    wanted = [draft.delay(number).id for number in range(5)]
    assert shop.relay() == Relayed(published=5, taken=5)
    assert [message.headers["id"] for message in shop.received()] == wanted


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (SimpleNamespace(retry_on_worker_lost=True), True),
        (SimpleNamespace(retry_on_worker_lost=None), False),
        (SimpleNamespace(), False),
    ],
    ids=["set", "unset", "before 5.7"],
)
def test_a_retry_on_a_lost_worker_may_be_unknown(task: Any, expected: bool) -> None:
    assert releases.retries_on_worker_lost(task) is expected


def _draft(number: int) -> None:
    pass


class Told:
    """Celery's request, as far as a cancellation goes."""

    _already_cancelled = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[object] = []
        monkeypatch.setattr(state, "task_ready", lambda request: self.told.append("ready"))

    def send_event(self, name: str) -> None:
        self.told.append(name)

    def by_56(self, emit_retry: bool = True) -> None:
        self.told.append(emit_retry)

    def by_55(self) -> None:
        self.told.append("retry")


@pytest.mark.parametrize("emit", [True, False], ids=["retry", "no retry"])
def test_a_cancellation_is_told_by_celery_where_it_can_be_asked(
    emit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: Any = Told(monkeypatch)
    releases.announce_cancelled(request, request.by_56, emit)
    assert request.told == [emit]


def test_a_cancellation_without_a_retry_is_told_here_where_celery_knows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request: Any = Told(monkeypatch)
    releases.announce_cancelled(request, request.by_55, True)
    assert (request.told, request._already_cancelled) == (["retry"], False)
    request.told.clear()
    releases.announce_cancelled(request, request.by_55, False)
    assert (request.told, request._already_cancelled) == (["ready", "task-cancelled"], True)


def test_celery_has_what_a_cancellation_without_a_retry_is_made_of() -> None:
    """Each is called or set by name, past Celery, where it cannot be asked."""
    announced = requests.Request._announce_cancelled.__code__.co_names
    assert {"task_ready", "send_event", "_already_cancelled"} <= set(announced)


def test_a_task_that_has_returned_is_told_from_one_that_runs(
    make_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before Celery 5.7, which says of itself what it publishes."""
    monkeypatch.delattr("celery.app.amqp._callback_publish_retry", raising=False)
    shop, seen = make_shop(), []

    class Plain(Task):
        name = "releases.plain"

        def run(self) -> None:
            seen.append(releases.publishes_what_follows())

        def on_success(self, *args: object) -> None:
            seen.append(releases.publishes_what_follows())

    shop.app.register_task(Plain()).apply()
    assert seen == [False, True]
    assert not releases.publishes_what_follows()
