"""Suspicion: what waits in a queue is left there, what is lost comes back, at a bounded rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import recovery, suspicion
from celery_budget.core.reservations import ReserveRequest
from celery_budget.recovery import Recovered
from celery_budget.store import lapses, silent
from celery_budget.suspicion import SUSPECTED
from tests.contract.support import RETRIED, RETURNED, Ledger
from tests.messages import Told

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
#: Where messages are said to have gone; the queues that hold something.
FULL = ("", "full")


@pytest.fixture
def wide(ledger: Ledger) -> Ledger:
    """A ledger with room for many, whose queue named ``full`` holds something."""
    ledger.set("b", 10_000)
    ledger.queues.said[FULL] = False
    return ledger


def publish(ledger: Ledger, ago_us: int = HOUR_US, **message: Any) -> ReserveRequest:
    """A request whose message was published that long ago, to the full queue if nothing is said."""
    request = ledger.reserve(1, **{"envelope": "full", **message})
    ledger.relay()
    wait(ledger, request, ago_us)
    return request


def wait(ledger: Ledger, request: ReserveRequest, ago_us: int) -> None:
    """Let a message have been published that long ago, and its time be over."""
    published_us = ledger.now() - ago_us
    ledger.put(
        "outbox",
        {"published_us": published_us, "due_us": published_us + SECOND_US},
        reservation_id=request.reservation_id,
    )


def copies(ledger: Ledger) -> int:
    """How many messages the next pass of the relay publishes."""
    return ledger.relay().published


@contextmanager
def statements(ledger: Ledger) -> Iterator[list[str]]:
    """Note the statements that run meanwhile."""
    noted: list[str] = []

    def note(*event: Any) -> None:
        noted.append(event[2])

    engine = ledger.store.engine
    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield noted
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


def test_a_backlog_of_three_hours_adds_no_copies(wide: Ledger) -> None:
    """Each look finds all of them over their time, more often than a sweep would."""
    requests = [publish(wide, 0) for _ in range(20)]
    wide.broker.published.clear()
    for minutes in range(5, 185, 10):
        for request in requests:
            wait(wide, request, minutes * 60 * SECOND_US)
        assert wide.recover() == Recovered()
        assert copies(wide) == 0
    for request in requests:
        row = wide.message(request)
        assert (row.state, row.publishes) == ("published", 1)
        assert wide.run(request).end(RETURNED)
    assert wide.broker.published == []


def test_what_waits_is_looked_at_again_after_a_quarter_of_its_age(wide: Ledger) -> None:
    young, old = publish(wide, 60 * SECOND_US), publish(wide, 3 * HOUR_US)
    before_us = wide.now()
    wide.recover()
    again_us = wide.settings.republish_us
    for request, wait_us in ((young, again_us), (old, 3 * HOUR_US // 4)):
        assert wide.message(request).due_us - before_us == pytest.approx(wait_us, rel=0.05)


@pytest.mark.parametrize("empty", [False, None], ids=["full", "unknown"])
def test_a_pass_costs_the_same_however_many_wait(wide: Ledger, empty: bool | None) -> None:
    wide.queues.said[FULL] = empty
    counts = []
    for number in (1, 30):
        for _ in range(number):
            publish(wide)
        wide.queues.asked.clear()
        with statements(wide) as noted:
            assert wide.suspicion().look() == []
        counts.append(len(noted))
        assert wide.queues.asked == [FULL]
    assert counts[0] == counts[1]


def test_a_message_of_an_empty_queue_is_published_again(wide: Ledger) -> None:
    lost, waiting = publish(wide, envelope="empty", queue="other"), publish(wide)
    assert wide.recover() == Recovered(republished=1)
    assert (wide.message(lost).state, wide.message(waiting).state) == ("due", "published")
    assert copies(wide) == 1
    assert wide.message(lost).publishes == 2


def test_what_is_not_over_its_time_is_not_suspected(wide: Ledger) -> None:
    wide.reserve(1, envelope="empty")
    eta = wide.reserve(1, envelope="empty", due_us=wide.now() + HOUR_US)
    wide.relay()
    assert wide.recover() == Recovered()
    assert wide.queues.asked == []
    assert wide.message(eta).state == "due"


def test_a_broker_that_cannot_be_asked_raises_no_suspicion(wide: Ledger) -> None:
    wide.queues.said[FULL] = None
    request = publish(wide)
    assert wide.recover() == Recovered()
    row = wide.message(request)
    assert (row.state, row.publishes) == ("published", 1)
    assert row.due_us > wide.now(), "it is asked again later"


def test_a_message_is_lost_that_was_overtaken(wide: Ledger) -> None:
    overtaken, later = publish(wide), publish(wide, HOUR_US // 2)
    assert wide.recover() == Recovered()
    wait(wide, overtaken, HOUR_US)
    attempt = wide.run(later)
    assert wide.recover() == Recovered(republished=1)
    assert wide.message(overtaken).state == "due"
    # What has ended and is not closed tells as well; what is closed left nothing to tell by.
    another = publish(wide)
    attempt.end(RETURNED)
    assert wide.recover() == Recovered(republished=1)
    assert wide.message(another).state == "due"
    attempt.close()
    third = publish(wide)
    assert wide.recover() == Recovered()
    assert wide.message(third).state == "published"


@pytest.mark.parametrize(
    "later",
    [
        {"ago_us": HOUR_US - 20 * SECOND_US},
        {"ago_us": HOUR_US // 2, "rank": 1},
        {"ago_us": HOUR_US // 2, "queue": "other"},
        {"ago_us": HOUR_US // 2, "broker": "eu"},
    ],
    ids=["in the same batch", "another rank", "another queue", "another broker"],
)
def test_only_what_was_certainly_published_later_overtakes(
    wide: Ledger, later: dict[str, Any]
) -> None:
    wide.settings = replace(wide.settings, brokers={"eu": "memory://eu"})
    waiting, started = publish(wide), publish(wide, **later)
    wide.run(started)
    assert wide.recover() == Recovered()
    assert wide.message(waiting).state == "published"


def test_a_clock_that_is_set_back_loses_nothing(wide: Ledger) -> None:
    """What was seen before is of a time that is to come: by that all that waits is lost."""
    sweep = wide.suspicion()
    gone = publish(wide, envelope="empty")
    assert wide.recover(sweep) == Recovered(republished=1)
    assert copies(wide) == 1
    waiting = publish(wide)
    sweep._looked_us += HOUR_US
    sweep._emptied[("", "celery")] = wide.now() + HOUR_US
    assert wide.recover(sweep) == Recovered()
    assert wide.message(waiting).state == "published"
    assert wide.message(gone).publishes == 2


def test_what_was_published_in_a_time_to_come_overtakes_nothing(wide: Ledger) -> None:
    waiting, started = publish(wide), publish(wide, -HOUR_US)
    wide.run(started)
    assert wide.recover() == Recovered()
    assert wide.message(waiting).state == "published"


def test_what_was_started_since_is_not_given_up(wide: Ledger) -> None:
    """It was seen for the last time, and has asked to be retried before that was acted on."""
    request = publish(wide)
    [seen] = wide.store.read(silent.look, wide.root, 10).unstarted
    attempt = wide.run(request)
    wide.retry(request, attempt)
    attempt.end(RETRIED)
    assert not wide.store.run(lapses.undelivered, wide.root, seen)
    assert (wide.state(request), wide.message(request).retries) == ("waiting", 1)


def test_what_is_published_again_since_is_not_given_up(wide: Ledger) -> None:
    request = publish(wide, envelope="empty")
    [seen] = wide.store.read(silent.look, wide.root, 10).unstarted
    assert wide.recover() == Recovered(republished=1)
    assert not wide.store.run(lapses.undelivered, wide.root, seen)
    assert copies(wide) == 1
    assert not wide.store.run(lapses.undelivered, wide.root, seen)
    wait(wide, request, HOUR_US)
    [seen] = wide.store.read(silent.look, wide.root, 10).unstarted
    assert wide.store.run(lapses.undelivered, wide.root, seen)
    assert wide.state(request) == "released"


def test_a_second_copy_overtakes_nothing(wide: Ledger) -> None:
    """The first one may be what was delivered."""
    waiting, twice = publish(wide), publish(wide, HOUR_US // 2)
    wide.put("outbox", {"publishes": 2}, reservation_id=twice.reservation_id)
    wide.run(twice)
    assert wide.recover() == Recovered()
    assert wide.message(waiting).state == "published"


def test_what_came_without_a_reservation_overtakes_nothing(wide: Ledger) -> None:
    """It was published before the ledger knew of it."""
    waiting = publish(wide)
    request = wide.request(1, unreserved=True)
    wide.admit(request, envelope="full", delivered=True)
    wide.run(request)
    assert wide.recover() == Recovered()
    assert wide.message(waiting).state == "published"


def test_a_queue_that_was_lost_comes_back_at_the_rate(
    wide: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies fill it again, which does not hide what is still lost."""
    monkeypatch.setattr(suspicion, "SUSPECTED", 4)
    wide.queues.said[FULL] = True
    requests = [publish(wide) for _ in range(10)]
    not_yet = wide.reserve(1, envelope="full")
    wide.relay()
    wide.broker.published.clear()
    sweep = wide.suspicion()
    for number in (4, 4, 2, 0):
        assert wide.recover(sweep) == Recovered(republished=number)
        wide.queues.said[FULL] = False
        assert copies(wide) == number
    assert sorted(wide.broker.published) == sorted(one.task_id for one in requests)
    # One whose time was not over then was lost with them.
    wide.put("outbox", {"due_us": 1}, reservation_id=not_yet.reservation_id)
    assert wide.recover(sweep) == Recovered(republished=1)
    # The copies are in the queue.
    assert copies(wide) == 1
    for request in [*requests, not_yet]:
        wide.put("outbox", {"due_us": 1}, reservation_id=request.reservation_id)
    assert wide.recover(sweep) == Recovered()


def test_a_sweep_that_begins_anew_waits_until_a_queue_is_empty_again(
    wide: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspicion, "SUSPECTED", 1)
    wide.queues.said[FULL] = True
    requests = [publish(wide), publish(wide)]
    assert wide.recover() == Recovered(republished=1)
    copies(wide)
    wide.queues.said[FULL] = False
    assert wide.recover() == Recovered()
    wide.queues.said[FULL] = True
    for request in requests:
        if wide.message(request).publishes == 1:
            wait(wide, request, HOUR_US)
    assert wide.recover() == Recovered(republished=1)


def test_a_pass_suspects_a_hundred() -> None:
    assert SUSPECTED == 100


def test_of_two_sweeps_one_publishes_a_message(wide: Ledger) -> None:
    wide.queues.said[FULL] = True
    request = publish(wide)
    first, second = wide.suspicion(), wide.suspicion()
    [seen], [same] = first.look(), second.look()
    assert wide.store.run(silent.republish, wide.root, seen)
    assert not wide.store.run(silent.republish, wide.root, same)
    assert copies(wide) == 1
    assert wide.message(request).publishes == 2


def test_a_relay_that_stands_still_makes_no_more_copies(wide: Ledger) -> None:
    wide.queues.said[FULL] = True
    publish(wide)
    assert wide.recover() == Recovered(republished=1)
    for _ in range(3):
        assert wide.recover() == Recovered()
    assert copies(wide) == 1


def test_only_publishes_count_as_tries(wide: Ledger) -> None:
    wide.settings = replace(wide.settings, max_publishes=2)
    request = publish(wide)
    for _ in range(5):
        wait(wide, request, HOUR_US)
        assert wide.recover() == Recovered()
    wide.queues.said[FULL] = True
    wait(wide, request, HOUR_US)
    assert wide.recover() == Recovered(republished=1)
    copies(wide)
    wait(wide, request, HOUR_US)
    assert wide.recover() == Recovered(undelivered=1, told=1)


def test_brokers_are_asked_for_a_while_only(
    wide: Ledger, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """What there was no time for comes first in the next pass."""
    monkeypatch.setattr(suspicion, "ASK_SECONDS", -1.0)
    request = publish(wide, envelope="empty")
    due_us = wide.message(request).due_us
    assert wide.recover() == Recovered()
    assert (wide.queues.asked, wide.message(request).due_us) == ([], due_us)
    monkeypatch.undo()
    assert wide.recover() == Recovered(republished=1)
    assert told("broker.slow") == [{"count": 1}]


def test_what_a_worker_has_received_is_not_looked_at(wide: Ledger) -> None:
    wide.queues.said[FULL] = True
    received, lost = publish(wide), publish(wide)
    ids = [received.reservation_id]
    hold = (silent.hold, wide.root, ids, wide.settings.republish_us)
    assert wide.store.run(*hold) == 1
    assert wide.store.run(*hold) == 0, "nor is it written again"
    assert wide.recover() == Recovered(republished=1)
    assert wide.message(lost).state == "due"
    assert wide.message(received).state == "published"


def test_a_backend_that_fails_keeps_what_is_lost(wide: Ledger) -> None:
    wide.queues.said[FULL] = True
    request = publish(wide)

    def down(task_id: str) -> str | None:
        raise ConnectionError

    ready, wide.results.ready = wide.results.ready, down  # type: ignore[method-assign]
    assert wide.recover() == Recovered()
    assert wide.message(request).due_us <= wide.now() + recovery.AGAIN_US
    wide.results.ready = ready  # type: ignore[method-assign]
    wait(wide, request, HOUR_US)
    assert wide.recover() == Recovered(republished=1)


def test_of_very_many_that_run_those_tell_that_began_last(
    wide: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken = publish(wide)
    first, last = publish(wide, HOUR_US // 2), publish(wide, HOUR_US // 2)
    wide.put("outbox", {"queue": "other"}, task_id=last.task_id)
    wide.run(first)
    monkeypatch.setattr(silent, "IN_HAND", 1)
    wide.run(last)
    wide.put("attempts", {"lease_until_us": wide.now() + 1}, reservation_id=first.reservation_id)
    assert {lane[1] for lane in wide.store.read(silent.started, wide.root)} == {"other"}
    assert wide.recover() == Recovered()
    # Another time it is the others.
    monkeypatch.setattr(silent, "IN_HAND", 2)
    wait(wide, overtaken, HOUR_US)
    assert wide.recover() == Recovered(republished=1)
