"""Recovery: what died is run again, charged, given again or given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Closed, Outcome, Running, StoredOutcome
from celery_budget.core.retries import Retries
from celery_budget.recovery import Recovered
from celery_budget.settlement import Attempt
from celery_budget.store import outbox, silent
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger


def test_nothing_is_done_where_nothing_is_stuck(funded: Ledger) -> None:
    funded.reserve(10)
    published = funded.reserve(10)
    funded.relay()
    funded.run(published)
    _, attempt = funded.start(10)
    attempt.end(RETURNED)
    before = funded.dump()
    assert funded.recover() == Recovered()
    assert funded.dump() == before
    assert funded.results.told == []


@pytest.mark.parametrize("published", [True, False])
def test_a_late_acknowledged_attempt_runs_again(funded: Ledger, published: bool) -> None:
    request = funded.reserve(10)
    if published:
        funded.relay()
    attempt = funded.run(request)
    attempt.record(4)
    funded.lapse(request)
    assert funded.recover() == Recovered(rerun=1)
    assert funded.state(request) == "waiting"
    assert funded.balance() == (14, 0), "what was used, and the estimate again"
    assert funded.relay().published == 1
    second = funded.run(request)
    second.record(5)
    second.end(RETURNED)
    assert funded.balance() == (0, 9)
    assert [row.outcome for row in funded.rows("attempts")] == ["uncertain", "returned"]


def test_what_cannot_run_again_at_once_is_parked(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    attempt.record(50)
    funded.lapse(request)
    assert funded.recover() == Recovered(rerun=1)
    assert funded.balance() == (50, 0)
    assert len(funded.rows("parked")) == 1
    assert funded.deliver(request) == Closed("waiting"), "the broker's own redelivery"
    assert funded.balance() == (50, 0)
    funded.set("b", 110)
    assert funded.sweep().admitted == 1
    assert funded.relay().published == 1
    funded.run(request).end(RAISED)
    assert funded.balance() == (0, 50)


@pytest.mark.parametrize(("recorded", "charged"), [([], 10), ([4], 10), ([7, 8], 15)])
def test_an_early_acknowledged_attempt_is_lost(
    funded: Ledger, recorded: list[int], charged: int
) -> None:
    request, attempt = funded.start(10, late_ack=False)
    for amount in recorded:
        attempt.record(amount)
    funded.lapse(request)
    assert funded.recover() == Recovered(lost=1, told=1)
    assert funded.results.told == [(request.task_id, "lost")]
    row = funded.row(request)
    assert (row.state, row.unmetered) == ("lost", not recorded)
    assert funded.balance() == (0, charged)
    assert funded.message(request) is None
    assert funded.deliver(request) == Closed("lost")
    assert not attempt.end(RETURNED)
    assert funded.recover() == Recovered()


def test_late_usage_of_another_attempt_is_not_what_the_last_was_charged_for(
    funded: Ledger,
) -> None:
    """The last one was charged its estimate, since nobody knows what it used."""
    request = funded.reserve(10)
    funded.relay()
    first = funded.run(request)
    first.record(4)
    funded.lapse(request)
    assert funded.recover().rerun == 1
    funded.relay()
    second = funded.run(request, rerun=False)
    funded.lapse(request)
    assert funded.recover().lost == 1
    assert funded.balance() == (0, 14)
    first.record(6)
    assert funded.balance() == (0, 20)
    second.record(7)
    assert funded.balance() == (0, 20), "of its estimate"
    second.record(7)
    assert funded.balance() == (0, 24)
    assert funded.line(request) == (0, 24, 24)


def test_late_usage_of_the_last_attempt_that_ran_is_what_it_was_charged_for(
    funded: Ledger,
) -> None:
    """One that was refused its run stands after it."""
    request, attempt = funded.start(10)
    funded.lapse(request)
    assert funded.recover().rerun == 1
    assert funded.deliver(request, Retries(max_attempts=1)).replay.kind == "refused"
    assert funded.balance() == (0, 10)
    attempt.record(7)
    assert funded.balance() == (0, 10)
    attempt.record(7)
    assert funded.balance() == (0, 14)


def test_a_lost_retry_is_charged_on_top_of_what_was_used_before(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(7)
    following, _ = funded.retry(request, attempt)
    attempt.end(RETRIED)
    second = funded.run(following, late_ack=False)
    second.record(4)
    funded.lapse(request)
    assert funded.recover().lost == 1
    assert funded.balance() == (0, 17)
    second.record(5)
    assert funded.balance() == (0, 17), "within what its estimate was charged for"
    second.record(2)
    assert funded.balance() == (0, 18)


def test_deliveries_are_bounded(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, max_deliveries=2)
    request = funded.reserve(10)
    for expected in (Recovered(rerun=1), Recovered(lost=1, told=1)):
        funded.run(request)
        funded.lapse(request)
        assert funded.recover() == expected
    assert funded.balance() == (0, 10)


@pytest.mark.parametrize("late_ack", [True, False])
@pytest.mark.parametrize("ready", ["returned", "raised"])
@pytest.mark.parametrize(("recorded", "charged"), [([], 10), ([4], 4), ([12], 12)])
def test_a_stored_result_stands(
    funded: Ledger, late_ack: bool, ready: str, recorded: list[int], charged: int
) -> None:
    request, attempt = funded.start(10, late_ack=late_ack)
    for amount in recorded:
        attempt.record(amount)
    funded.results.stored[request.task_id] = ready
    funded.lapse(request)
    assert funded.recover() == Recovered(finished=1)
    assert funded.results.told == []
    assert (funded.state(request), funded.balance()) == ("settled", (0, charged))
    assert funded.rows("attempts")[0].outcome == ready
    assert funded.deliver(request) == Closed("settled")


@pytest.mark.parametrize("outcome", [RETURNED, RAISED])
@pytest.mark.parametrize("expired", [True, False])
def test_an_unclosed_attempt_is_given_again_and_closed(
    funded: Ledger, outcome: Outcome, expired: bool
) -> None:
    request, attempt = funded.start(10)
    funded.relay()
    attempt.end(outcome)
    if expired:
        funded.put("outbox", {"expires_us": 1})
    funded.lapse(request)
    assert funded.recover() == Recovered(replayed=1)
    assert funded.recover() == Recovered(), "the replay has its time"
    assert funded.relay().published == 1
    assert funded.results.told == []
    replay = funded.deliver(request)
    assert isinstance(replay, Attempt)
    assert replay.replay == StoredOutcome(outcome.kind, outcome.payload)
    assert funded.deliver(request) == Running()
    assert replay.close()
    assert funded.message(request) is None
    assert funded.deliver(request) == Closed("settled")


def test_a_slow_worker_may_still_close_what_is_to_be_given_again(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.end(RETURNED)
    funded.lapse(request)
    assert funded.recover() == Recovered(replayed=1)
    assert attempt.close()
    assert funded.deliver(request) == Closed("settled")


def test_replays_are_bounded(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, max_deliveries=2)
    request, attempt = funded.start(10)
    attempt.end(RETURNED)
    for expected in (Recovered(replayed=1), Recovered(replayed=1), Recovered(finished=1)):
        funded.lapse(request)
        assert funded.recover() == expected
    assert funded.deliver(request) == Closed("settled")


@pytest.mark.parametrize("why", ["result stored", "nothing to give"])
def test_an_unclosed_attempt_with_nothing_left_to_do_is_closed(funded: Ledger, why: str) -> None:
    request, attempt = funded.start(10)
    attempt.end(RETURNED if why == "result stored" else Outcome("ignored"))
    if why == "result stored":
        # And it would count a chord's member once more.
        funded.results.stored[request.task_id] = "returned"
        funded.results.counts_chord_members = True
    funded.lapse(request)
    assert funded.recover() == Recovered(finished=1)
    assert funded.message(request) is None
    assert funded.deliver(request) == Closed("settled")


def test_a_stored_result_is_given_again_for_what_comes_after_it(funded: Ledger) -> None:
    """Celery stores a result before it counts a chord's member and calls errbacks."""
    request, attempt = funded.start(10)
    attempt.end(RETURNED)
    funded.results.stored[request.task_id] = "returned"
    funded.lapse(request)
    assert funded.recover() == Recovered(replayed=1)


def test_a_worker_that_wakes_while_its_attempt_is_given_up_has_no_say(funded: Ledger) -> None:
    request, attempt = funded.start(10, late_ack=False)
    funded.lapse(request)
    ended: list[bool] = []

    def wake(task_id: str, reason: str) -> None:
        ended.append(attempt.end(RETURNED))

    funded.results.ended = wake  # type: ignore[method-assign]
    assert funded.recover().lost == 1
    assert ended == [False]
    assert funded.state(request) == "lost"


def test_a_request_with_a_result_is_not_started_any_more(funded: Ledger) -> None:
    """A time limit struck while the worker waited for the ledger to claim it."""
    request = funded.reserve(10)
    funded.relay()
    funded.results.stored[request.task_id] = "raised"
    funded.make_due(request)
    assert funded.recover() == Recovered(finished=1)
    assert (funded.state(request), funded.balance()) == ("released", (0, 0))


def test_a_result_backend_that_is_down_holds_nothing_up(funded: Ledger) -> None:
    late, request = funded.reserve(1, expires_us=1), funded.reserve(1)

    def down(task_id: str, reason: str) -> None:
        raise ConnectionError

    funded.results.ended = down  # type: ignore[method-assign]
    assert funded.relay().published == 1
    assert (funded.state(late), funded.state(request)) == ("released", "published")


def test_a_message_that_nobody_starts_is_published_again_later_and_later(funded: Ledger) -> None:
    request = funded.reserve(10)
    waits = []
    for publishes in (1, 2, 3):
        assert funded.relay().published == 1
        row = funded.message(request)
        assert (row.state, row.publishes) == ("published", publishes)
        waits.append(row.due_us - row.published_us)
        assert funded.recover() == Recovered(), "its time is not over"
        funded.make_due(request)
        assert funded.recover() == Recovered(republished=1)
        assert funded.recover() == Recovered()
    again_us = funded.settings.republish_us
    # The two times are read one after the other.
    assert [round(wait / again_us, 2) for wait in waits] == [1, 2, 4]
    assert funded.broker.published == [request.task_id] * 3
    funded.run(request)


def test_a_message_that_nobody_ever_starts_is_released(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, max_publishes=2)
    request = funded.reserve(10)
    for expected in (Recovered(republished=1), Recovered(undelivered=1, told=1)):
        funded.relay()
        funded.make_due(request)
        assert funded.recover() == expected
    row = funded.row(request)
    assert (row.state, row.reason) == ("released", "undelivered")
    assert funded.balance() == (0, 0)
    assert funded.results.told == [(request.task_id, "undelivered")]
    assert funded.deliver(request) == Closed("released")
    assert funded.message(request) is None


@pytest.mark.parametrize("then", ["runs", "ended"])
def test_a_message_that_was_started_is_not_silent(funded: Ledger, then: str) -> None:
    request = funded.reserve(10)
    funded.relay()
    funded.make_due(request)
    [seen] = funded.store.read(silent.look, funded.root, 9).unstarted
    attempt = funded.run(request)
    if then == "ended":
        attempt.end(RETURNED)
    assert funded.recover() == Recovered()
    assert not funded.store.run(silent.republish, funded.root, seen)


def test_messages_of_closed_parents_are_pruned(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    funded.relay()
    child = WireMessage("child", "shop.notify", b"", "{}", "celery")
    write = (outbox.enqueue, funded.root, child)
    assert funded.store.run(*write, parent_id=request.reservation_id)
    assert not funded.store.run(*write, parent_id=request.reservation_id), "once for its parent"
    assert funded.store.run(*write, parent_id=new_id()), "another parent's"
    assert funded.store.run(*write), "and nobody's"
    assert funded.relay().published == 3
    funded.recover()
    rows = funded.rows("outbox", task_id="child")
    assert [row.parent_id for row in rows] == [request.reservation_id]
    attempt.end(RETURNED)
    funded.recover()
    assert not funded.store.run(*write, parent_id=request.reservation_id), "a replay's"
    attempt.close()
    funded.recover()
    assert funded.rows("outbox") == []
