"""Clocks that differ: the database's decides, whatever those of callers and relays say."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import budgeted
from celery_budget.core import identity
from celery_budget.core.identity import new_id
from celery_budget.store import claims, schema
from tests.integration.support import Shop

HOUR = 3600


@pytest.fixture
def work(on_both: Shop) -> Any:
    """A task of 3 of the 10 tokens of ``tenant:a``."""

    @budgeted(budget="tenant:a", estimate=3)
    @on_both.app.task(name="shop.work", shared=False)
    def work(number: int) -> int:
        return number

    return work


class Clock:
    """This process's clock, set forward or back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._real, self._real_ns = time.time, time.time_ns

    def shift(self, seconds: int) -> None:
        real, real_ns = self._real, self._real_ns
        self._patch.setattr(time, "time", lambda: real() + seconds)
        self._patch.setattr(identity.time, "time_ns", lambda: real_ns() + seconds * 10**9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_what_is_due_at_once_is_published_at_once(
    on_both: Shop, work: Any, clock: Clock, seconds: int
) -> None:
    clock.shift(seconds)
    result = work.delay(1)
    assert on_both.relay().published == 1
    [message] = on_both.received()
    assert message.headers["id"] == result.id
    [row] = on_both.rows(schema.outbox)
    assert abs(row.due_us / 10**6 - (time.time() - seconds)) < HOUR / 2


def test_messages_go_out_in_the_order_they_came_whoever_sent_them(
    on_both: Shop, work: Any, clock: Clock
) -> None:
    """Ids that are made by clocks which differ do not sort by time."""
    sent = []
    for seconds in (HOUR, -HOUR, 0):
        clock.shift(seconds)
        sent.append(work.apply_async((1,), order_key="k").id)
    ids = [row.outbox_id for row in sorted(on_both.rows(schema.outbox), key=lambda r: r.created_us)]
    assert ids != sorted(ids)
    while on_both.relay().published:
        pass
    assert [message.headers["id"] for message in on_both.received()] == sent


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_what_is_left_of_a_messages_time_is_told_by_the_database(
    on_both: Shop, work: Any, clock: Clock, seconds: int
) -> None:
    """A relay whose clock is fast does not give the broker a message that is over at once."""
    work.apply_async((1,), expires=600)
    clock.shift(seconds)
    assert on_both.relay().published == 1
    [message] = on_both.received()
    assert 500 < int(message.properties["expiration"]) / 1000 <= 600


def test_what_is_over_by_the_database_is_over(on_both: Shop, work: Any, clock: Clock) -> None:
    work.apply_async((1,), expires=600)
    on_both.sql(schema.outbox.update().values(expires_us=1))
    clock.shift(-100 * HOUR)
    assert on_both.relay().released == 1
    assert on_both.amounts("tenant:a") == (0, 0, 10)


def test_what_has_run_goes_out_without_its_end(on_both: Shop, work: Any) -> None:
    work.apply_async((1,), expires=600)
    batch = on_both.budget.store.run(
        claims.claim_due, on_both.budget.settings.root, "", 1, 60_000_000, new_id()
    )
    [due] = batch.messages
    message = replace(due.message, expires_us=None, left_us=None)
    assert on_both.publisher.publish_all([message]) == [None]
    [message] = on_both.received()
    assert message.headers["expires"] is None
    assert "expiration" not in message.properties
