"""Trace context, custom headers, priority and times: from the first message to the last."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_budget.integration.context import HEADER
from tests.integration.publication.paths import HEADERS, PATHS, given
from tests.integration.publication.sides import Sides
from tests.integration.publication.tasks import Tasks
from tests.integration.wire import view

WITH_HEADERS: dict[str, Callable[[Tasks], Any]] = {
    "retry": lambda t: t.retried.apply_async((1, t.tenant), {"countdown": 0}, headers=HEADERS),
    "autoretry": lambda t: t.autoretried.apply_async((1, t.tenant), headers=HEADERS),
    "chain": lambda t: (t.work.s(1, t.tenant) | t.work.s(t.tenant)).apply_async(headers=HEADERS),
    "step of a chain": lambda t: (
        t.work.s(1, t.tenant) | t.work.s(t.tenant).set(headers=HEADERS) | t.work.s(t.tenant)
    ).apply_async(),
    "retry in a chain": lambda t: (
        t.retried.s(1, t.tenant, countdown=0) | t.work.s(t.tenant)
    ).apply_async(headers=HEADERS),
    "callback": lambda t: given(link=t.work.s(t.tenant), headers=HEADERS)(t),
    "replace": lambda t: t.replaced.apply_async(("budgeted", t.tenant), headers=HEADERS),
}


@pytest.mark.parametrize("name", WITH_HEADERS)
def test_headers_go_on_as_by_celery(sides: Sides, name: str) -> None:
    seen = []
    for side in sides:
        side.publish(WITH_HEADERS[name])
        side.run_all()
        seen.append([(run.task, run.request[2], run.watched) for run in side.tasks.ran])
    assert seen[1] == seen[0]
    assert HEADERS in [watched for _, _, watched in seen[1]]
    if "retry" in name:
        assert all(watched == HEADERS for _, retries, watched in seen[1] if retries)


@pytest.mark.parametrize("name", ["retry", "autoretry"])
def test_every_attempt_of_a_request_has_its_reservation(sides: Sides, name: str) -> None:
    sides.budget.publish(WITH_HEADERS[name])
    rounds = sides.budget.run_all()
    assert len(rounds) > 1
    assert len({message.headers[HEADER] for messages in rounds for message in messages}) == 1


def test_the_priority_survives_a_retry(sides: Sides) -> None:
    for side in sides:
        side.publish(PATHS["a retry with a priority"].publish)
        side.run_all()
        assert [run.priority for run in side.tasks.ran] == [7, 7]


# Published again.


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_lost_message_is_published_again_as_it_was(sides: Sides, serializer: str) -> None:
    side = sides.budget
    side.publish(
        given(
            headers=HEADERS,
            serializer=serializer,
            queue=side.tasks.queue("ranked"),
            priority=7,
            link=side.tasks.plain.s(),
            expires=86_400,
        )
    )
    (first,) = side.take()
    side.lose()
    (second,) = side.take()
    assert second.body == first.body
    assert view(second) == view(first)
    assert {name: second.headers[name] for name in HEADERS} == HEADERS
    for message in (first, second):
        side.execute(message)
    # The second copy found the request closed; what follows it is published once.
    assert [run.task for run in side.tasks.ran] == ["paths.work"]
    side.run_all()
    assert [run.task for run in side.tasks.ran] == ["paths.work", "paths.plain"]


# Times.


@pytest.mark.parametrize("when", ["countdown", "eta"])
def test_nothing_is_at_the_broker_before_its_time(sides: Sides, when: str) -> None:
    side = sides.budget
    later = {"countdown": 3600, "eta": side.app.now() + timedelta(hours=1)}
    side.publish(given(**{when: later[when]}))
    assert side.shop.relay().taken == 0
    assert side.received() == []
    (message,) = side.take()
    assert message.headers["eta"] == (side.app.now() + timedelta(hours=1)).isoformat()


def test_a_retry_waits_in_the_outbox(sides: Sides) -> None:
    side = sides.budget
    side.publish(lambda t: t.retried.delay(1, t.tenant, countdown=3600))
    (message,) = side.take()
    side.execute(message)
    assert side.shop.relay().taken == 0
    assert side.received() == []
    (message,) = side.take()
    assert message.headers["retries"] == 1


def test_a_message_that_is_published_late_expires_in_time(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = sides.budget
    now = datetime.now(timezone.utc)
    # It was written a quarter of an hour ago, and its time has come only now.
    monkeypatch.setattr(side.app, "now", lambda: now - timedelta(minutes=15))
    side.publish(given(countdown=600, expires=3600))
    (message,) = side.take()
    left = int(message.properties["expiration"]) / 1000
    assert 2700 - 60 < left <= 2700
