"""Cancelling: what waits ends at once, what runs is told and nothing follows it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import parking, settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    Again,
    Cancelling,
    Closed,
    Missing,
    Outcome,
    Parked,
    Released,
    Reserved,
    ReserveRequest,
)
from celery_budget.settlement import Attempt
from celery_budget.store import attempts, continuations
from tests.contract.racers import Beside, at_once, wait_for_waiting
from tests.contract.support import BOOT, RAISED, RETRIED, RETURNED, Ledger

ROUNDS = 6
REQUEUED = Outcome("rejected", again=Again(deliveries=5, wait_us=0, park_us=1_000_000))


def cancel(ledger: Ledger, request: ReserveRequest) -> Any:
    return settlement.cancel(ledger.store, ledger.settings, request.task_id)


def told(ledger: Ledger, request: ReserveRequest) -> list[str]:
    """Why results of the request's task are to be told."""
    return [row.reason for row in ledger.rows("untold", task_id=request.task_id)]


# Before it runs


def unpublished(ledger: Ledger) -> ReserveRequest:
    return ledger.reserve(10)


def queued(ledger: Ledger) -> ReserveRequest:
    request = ledger.reserve(10)
    assert ledger.relay().published == 1
    return request


def with_an_eta(ledger: Ledger) -> ReserveRequest:
    return ledger.reserve(10, due_us=ledger.now() + 3_600_000_000)


def parked(ledger: Ledger) -> ReserveRequest:
    request = ledger.request(1000)
    assert isinstance(ledger.admit(request, continuation=True), Parked)
    return request


def between_attempts(ledger: Ledger) -> ReserveRequest:
    request, attempt = ledger.start(10)
    attempt.record(4)
    following, _ = ledger.retry(request, attempt)
    assert attempt.end(RETRIED)
    return following


def parked_between_attempts(ledger: Ledger) -> ReserveRequest:
    request, attempt = ledger.start(60)
    attempt.record(50)
    following, written = ledger.retry(request, attempt)
    assert isinstance(written, Parked)
    assert attempt.end(RETRIED)
    return following


@pytest.mark.parametrize(
    ("waits", "state", "spent"),
    [
        (unpublished, "released", 0),
        (queued, "released", 0),
        (with_an_eta, "released", 0),
        (parked, "released", 0),
        (between_attempts, "settled", 4),
        (parked_between_attempts, "settled", 50),
    ],
)
def test_what_does_not_run_ends_at_once(
    funded: Ledger, waits: Callable[[Ledger], ReserveRequest], state: str, spent: int
) -> None:
    request = waits(funded)
    for _ in range(2):
        assert cancel(funded, request) == Released(request.task_id, state)
    assert funded.balance() == (0, spent)
    assert funded.rows("outbox") == funded.rows("parked") == []
    assert set(told(funded, request)) == {"cancelled"}
    # The broker may deliver it all the same.
    assert isinstance(funded.deliver(request), (Closed, Missing))
    [row] = funded.rows("reservations")
    assert (row.state, row.reason, row.cancelled_us) == (state, "cancelled", None)


# While it runs


def test_what_runs_is_told_once_and_its_success_counts(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert not attempt.is_cancelled()
    assert cancel(funded, request) == Cancelling()
    at = funded.row(request).cancelled_us
    assert cancel(funded, request) == Cancelling()
    assert funded.row(request).cancelled_us == at
    assert attempt.is_cancelled()
    attempt.record(4)
    assert attempt.end(RETURNED)
    assert (attempt.settled, attempt.cancelled) == (True, False)
    assert attempt.close()
    assert funded.balance() == (0, 4)
    assert (funded.row(request).state, funded.row(request).reason) == ("settled", None)
    assert cancel(funded, request) == Closed("settled")
    assert told(funded, request) == []


def test_a_failure_counts_too(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    cancel(funded, request)
    assert attempt.end(RAISED)
    assert attempt.settled
    assert funded.row(request).reason is None
    assert told(funded, request) == []


@pytest.mark.parametrize("used", [4, 95])
@pytest.mark.parametrize("early", [False, True])
def test_no_retry_follows(funded: Ledger, early: bool, used: int) -> None:
    request, attempt = funded.start(10)
    attempt.record(used)
    if early:
        cancel(funded, request)
    following, written = funded.retry(request, attempt)
    assert isinstance(written, Parked if used == 95 else Reserved)
    cancel(funded, request)
    for _ in range(2):
        attempt.settled = attempt.cancelled = False
        assert attempt.end(RETRIED)
        assert (attempt.settled, attempt.cancelled) == (True, True)
    assert funded.balance() == (0, used)
    assert (funded.row(request).state, funded.row(request).reason) == ("settled", "cancelled")
    assert funded.rows("outbox") == funded.rows("parked") == []
    assert told(funded, request) == ["cancelled"]
    for late in (request, following):
        assert funded.deliver(late) == Closed("settled")
    assert cancel(funded, request) == Released(request.task_id, "settled")


@pytest.mark.parametrize("used", [4, 95])
def test_a_retry_that_was_written_is_dropped_where_the_task_succeeds(
    funded: Ledger, used: int
) -> None:
    request, attempt = funded.start(10)
    attempt.record(used)
    following, _ = funded.retry(request, attempt)
    cancel(funded, request)
    assert attempt.end(RETURNED)
    assert funded.balance() == (0, used)
    assert funded.rows("parked") == []
    assert funded.row(request).reason is None
    # Its own message stays: should the worker die now, the outcome is given again.
    assert funded.message(request).retries == request.retries
    assert funded.deliver(following) == Closed("settled")
    funded.lapse(request)
    assert funded.recover().replayed == 1
    replay = funded.deliver(request)
    assert isinstance(replay, Attempt)
    assert replay.replay is not None


def test_a_rejected_message_does_not_come_again(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    cancel(funded, request)
    assert attempt.end(REQUEUED)
    assert attempt.cancelled
    assert funded.balance() == (0, 4)
    assert funded.message(request) is None
    assert told(funded, request) == ["cancelled"]


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("how", ["child", "lease"])
def test_it_does_not_run_again_once_its_worker_is_lost(
    funded: Ledger, how: str, retry: bool
) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    if retry:
        funded.retry(request, attempt)
    cancel(funded, request)
    if how == "child":
        lost = (funded.store, funded.settings, request.task_id, BOOT)
        assert not settlement.worker_lost(*lost, may_rerun=True)
    else:
        funded.lapse(request)
        assert funded.recover().lost == 1
    assert funded.state(request) == "lost"
    assert funded.balance() == (0, 10)
    assert funded.message(request) is None
    assert funded.deliver(request) == Closed("lost")


@pytest.mark.parametrize("parks", [False, True])
def test_what_takes_its_place_is_cancelled_with_it(funded: Ledger, parks: bool) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    cancel(funded, request)
    amount = 1000 if parks else 10
    instead = replace(
        request,
        reservation_id=new_id(),
        nesting=1,
        parent=request.reservation_id,
        lines=(replace(request.lines[0], amount=amount),),
    )
    assert isinstance(funded.admit(instead, continuation=True), Parked if parks else Reserved)
    assert attempt.end(Outcome("replaced"))
    assert attempt.close()
    assert funded.balance() == (0, 4)
    assert funded.rows("outbox") == funded.rows("parked") == []
    assert isinstance(funded.deliver(instead), (Closed, Missing))
    assert told(funded, request) == ["cancelled"]
    assert cancel(funded, request) == Released(request.task_id, "released")


# Races


def claimed(ledger: Ledger, request: ReserveRequest) -> Callable[[], Any]:
    return lambda: ledger.deliver(request)


@pytest.fixture
def on_postgresql(racing: Ledger) -> Ledger:
    if racing.store.dialect != "postgresql":
        pytest.skip("SQLite has one writer: there is no order to choose")
    return racing


@pytest.mark.postgres
def test_a_claim_waits_for_a_cancel_and_finds_it_ended(on_postgresql: Ledger) -> None:
    ledger, request = on_postgresql, on_postgresql.reserve(10)
    with ledger.store.transaction() as connection:
        ended = continuations.cancel(connection, ledger.root, request.task_id)
        claim = Beside(claimed(ledger, request))
        wait_for_waiting(ledger.store)
    assert ended == Released(request.task_id, "released")
    assert claim.result() == Closed("released")


@pytest.mark.postgres
def test_a_cancel_waits_for_a_claim_and_finds_it_running(on_postgresql: Ledger) -> None:
    ledger, request = on_postgresql, on_postgresql.reserve(10)
    delivery = attempts.Delivery(
        ledger.root, request.reservation_id, request.task_id, 0, 0, "w@h", BOOT, True
    )
    with ledger.store.transaction() as connection:
        attempts.claim(connection, delivery, uuid.uuid4(), 60_000_000)
        cancelling = Beside(lambda: cancel(ledger, request))
        wait_for_waiting(ledger.store)
    assert cancelling.result() == Cancelling()
    assert ledger.row(request).cancelled_us is not None


@pytest.mark.postgres
@pytest.mark.parametrize("outcome", [RETRIED, RETURNED])
def test_an_end_waits_for_a_cancel_and_nothing_follows(
    on_postgresql: Ledger, outcome: Outcome
) -> None:
    ledger = on_postgresql
    request, attempt = ledger.start(10)
    ledger.retry(request, attempt)
    with ledger.store.transaction() as connection:
        assert continuations.cancel(connection, ledger.root, request.task_id) == Cancelling()
        ending = Beside(lambda: attempt.end(outcome))
        wait_for_waiting(ledger.store)
    assert ending.result()
    assert attempt.cancelled == (outcome == RETRIED)
    assert ledger.state(request) == "settled"
    assert ledger.balance()[0] == 0


@pytest.mark.postgres
@pytest.mark.parametrize("outcome", [RETRIED, RETURNED])
def test_a_cancel_waits_for_an_end(on_postgresql: Ledger, outcome: Outcome) -> None:
    ledger = on_postgresql
    request, attempt = ledger.start(10)
    attempt.record(4)
    if outcome == RETRIED:
        ledger.retry(request, attempt)
    key = (request.reservation_id, attempt.number, attempt.claim_id)
    with ledger.store.transaction() as connection:
        attempts.end(connection, ledger.root, *key, outcome)
        cancelling = Beside(lambda: cancel(ledger, request))
        wait_for_waiting(ledger.store)
    if outcome == RETRIED:
        assert cancelling.result() == Released(request.task_id, "settled")
    else:
        assert cancelling.result() == Closed("settled")
    assert ledger.balance() == (0, 4)


@pytest.mark.parametrize("late", [False, True])
def test_a_cancel_beside_a_retry(racing: Ledger, late: bool) -> None:
    for number in range(ROUNDS):
        request, attempt = racing.start(10)
        attempt.record(1)
        if late:
            racing.retry(request, attempt)

        def work(request: Any = request, attempt: Attempt = attempt) -> bool:
            if not late:
                racing.retry(request, attempt)
            return attempt.end(RETRIED)

        ended, first, second = at_once(
            [work, *[lambda request=request: cancel(racing, request)] * 2]
        )
        assert ended
        assert {type(first), type(second)} <= {Cancelling, Released}
        assert (racing.row(request).state, racing.row(request).reason) == ("settled", "cancelled")
        assert racing.balance() == (0, number + 1)
        assert racing.rows("outbox") == []
        assert "cancelled" in told(racing, request)
    assert parking.run_once(racing.store, racing.settings).admitted == 0


def test_a_cancel_beside_a_claim(racing: Ledger) -> None:
    for _ in range(ROUNDS):
        request = racing.reserve(10)
        asked = lambda request=request: cancel(racing, request)  # noqa: E731
        got, cancelled = at_once([claimed(racing, request), asked])
        if isinstance(got, Attempt):
            assert cancelled == Cancelling()
            assert got.is_cancelled()
            assert got.end(RAISED)
        else:
            assert (got, cancelled) == (
                Closed("released"),
                Released(request.task_id, "released"),
            )
        assert racing.balance() == (0, 0)


def test_what_is_not_known_is_not_cancelled(funded: Ledger) -> None:
    assert cancel(funded, funded.request()) == Missing()
