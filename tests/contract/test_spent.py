"""Requests that are not tried any more: ended once, kept in quarantine, run again as new ones."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import reconcile
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Closed, Outcome, Reserved, ReserveRequest, Running
from celery_budget.core.retries import Keep, Retries
from celery_budget.errors import RequestEnding
from celery_budget.settlement import Attempt, Delivery
from celery_budget.store import Connection, attempts, continuations, quarantine
from tests.contract.support import BOOT, RETURNED, Ledger

FAILED = Outcome("raised", '"boom"', keep=Keep("failed", "ValueError('boom')", 100))
RETRIED = Outcome("retried", json.dumps(["ValueError('no')", '"written"']))
ONCE, TWICE = Retries(max_attempts=1), Retries(max_attempts=2)


def deliver(ledger: Ledger, request: ReserveRequest, retries: Retries, **changes: Any) -> Any:
    return ledger.deliver(request, limits=retries, **changes)


def lost(ledger: Ledger, request: ReserveRequest) -> None:
    """Have the worker that runs the request go away, and its message come again."""
    ledger.lapse(request)
    assert ledger.recover().rerun == 1


def requeue(ledger: Ledger, some_id: object, **more: Any) -> Any:
    def readdress(message: WireMessage, reservation_id: uuid.UUID) -> WireMessage:
        return replace(message, envelope=str(reservation_id))

    return ledger.store.run(
        quarantine.requeue, ledger.root, str(some_id), readdress, lock_ms=5000, bound=None, **more
    )


def kept(ledger: Ledger) -> list[dict[str, Any]]:
    return [one.as_dict() for one in reconcile.quarantined(ledger.store, ledger.settings, 10)]


def test_a_request_that_failed_is_kept_by_the_transaction_that_ends_it(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(7)
    before = funded.dump()

    def end_and_fail(connection: Connection) -> None:
        attempts.end(connection, *attempt._key, FAILED)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        funded.store.run(end_and_fail)
    assert funded.dump() == before
    assert attempt.end(FAILED)
    [one] = kept(funded)
    assert (one["task_id"], one["reason"], one["error"]) == (
        request.task_id,
        "failed",
        "ValueError('boom')",
    )
    assert (one["attempts"], one["used"], one["budgeted"]) == (1, {"b": 7}, True)
    assert (funded.state(request), funded.balance()) == ("settled", (0, 7))
    assert attempt.end(FAILED), "a repeat after a lost answer"
    assert len(kept(funded)) == 1
    assert funded.message(request) is not None, "for a replay, until it is closed"
    assert attempt.close()
    assert funded.message(request) is None
    assert reconcile.report(funded.store, funded.settings).quarantine == {"failed": 1}


def test_it_runs_again_from_the_start_and_is_charged_again(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    following, _ = funded.retry(request, attempt)
    assert attempt.end(RETRIED)
    attempt = funded.run(following)
    attempt.record(3)
    assert attempt.end(FAILED)
    with pytest.raises(RequestEnding):
        requeue(funded, request.task_id)
    assert attempt.close()
    forgotten: list[str] = []
    again = quarantine.Again(lambda message: replace(message, queue="again"), forgotten.append)
    outcome = requeue(funded, request.task_id, again=again)
    assert isinstance(outcome, Reserved)
    assert forgotten == [request.task_id]
    assert funded.balance() == (10, 7)
    anew = replace(request, reservation_id=outcome.reservation_id)
    assert (funded.message(anew).retries, funded.message(anew).queue) == (0, "again")
    assert funded.relay().published == 1
    attempt = deliver(funded, anew, ONCE)
    assert (attempt.number, attempt.replay) == (1, None)
    attempt.record(5)
    assert attempt.end(RETURNED)
    assert attempt.close()
    assert funded.balance() == (0, 12)
    assert kept(funded) == []


def test_where_its_result_cannot_be_taken_back_it_stays(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert attempt.end(FAILED)
    assert attempt.close()

    def forget(task_id: str) -> None:
        raise ConnectionError

    before = funded.dump()
    with pytest.raises(ConnectionError):
        requeue(funded, request.task_id, again=quarantine.Again(forget=forget))
    assert funded.dump() == before


def test_an_attempt_too_many_is_refused_and_told(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    lost(funded, request)
    refused = deliver(funded, request, ONCE)
    assert isinstance(refused, Attempt)
    assert refused.replay is not None
    assert refused.replay.kind == "refused"
    assert json.loads(refused.replay.payload or "") == ["max_attempts", 1, None]
    # What became of the first one is not known.
    assert (funded.state(request), funded.row(request).reason) == ("lost", "max_attempts")
    assert funded.balance() == (0, 10)
    [one] = kept(funded)
    assert (one["reason"], one["attempts"], one["used"]) == ("max_attempts", 1, {"b": 10})
    # A copy of its message does nothing; when its worker is gone it is given again.
    assert deliver(funded, request, ONCE) == Running()
    funded.lapse(request)
    assert funded.recover().replayed == 1
    again = deliver(funded, request, ONCE)
    assert again.replay == refused.replay
    assert not refused.close()
    assert again.close()
    assert isinstance(deliver(funded, request, ONCE), Closed)
    assert len(kept(funded)) == 1
    assert [row.outcome for row in funded.rows("attempts")] == ["uncertain", "refused"]


def test_a_retry_that_comes_too_late_is_told_its_last_error(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    following, _ = funded.retry(request, attempt)
    assert attempt.end(RETRIED)
    funded.put("attempts", {"started_us": 1})
    refused = deliver(funded, following, Retries(retry_within=60))
    assert json.loads(refused.replay.payload) == ["retry_within", 1, '"written"']
    assert (funded.state(request), funded.balance()) == ("settled", (0, 4))
    [one] = kept(funded)
    assert (one["reason"], one["error"]) == ("retry_within", "ValueError('no')")
    assert refused.close()
    assert [row.payload for row in funded.rows("attempts")] == [None, None]


def test_within_its_limits_a_retry_runs_and_no_delivery_runs_twice(funded: Ledger) -> None:
    limits = Retries(max_attempts=4, retry_within=3600)
    request = funded.reserve(10)
    for number in range(1, 5):
        attempt = deliver(funded, request, limits)
        assert (attempt.number, attempt.replay) == (number, None)
        assert deliver(funded, request, limits) == Running()
        if number < 4:
            following, _ = funded.retry(request, attempt)
            assert deliver(funded, following, limits) == Running()
            assert attempt.end(RETRIED)
            assert deliver(funded, request, limits) == Closed("waiting")
            request = following
    assert attempt.end(RETURNED)
    assert attempt.close()
    assert deliver(funded, request, limits) == Closed("settled")
    assert [row.payload for row in funded.rows("attempts")] == [None] * 4


def test_a_claim_that_is_repeated_finds_its_own(funded: Ledger) -> None:
    request, _ = funded.start(10)
    lost(funded, request)
    delivery = Delivery(
        funded.root, request.reservation_id, request.task_id, 0, 0, "w", BOOT, late_ack=True
    )
    claim_id = new_id()
    first, second = (
        funded.store.run(attempts.claim, delivery, claim_id, 60_000_000, ONCE, 10) for _ in range(2)
    )
    assert first == second
    assert len(kept(funded)) == 1
    funded.store.run(attempts.close, funded.root, request.reservation_id, 2, claim_id)


def test_a_full_quarantine_keeps_what_it_has(
    funded: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    funded.settings = replace(funded.settings, max_quarantine=2)
    for number in range(3):
        outcome = replace(FAILED, keep=Keep("failed", str(number), 2))
        _, attempt = funded.start(1)
        caplog.clear()
        assert attempt.end(outcome)
        assert ("quarantine is full" in caplog.text) is (number == 2)
        assert attempt.close()
    assert [one["error"] for one in kept(funded)] == ["1", "0"]
    report = reconcile.report(funded.store, funded.settings)
    assert report.quarantine_full
    assert report.as_dict()["quarantine_full"]
    request, _ = funded.start(1)
    lost(funded, request)
    assert deliver(funded, request, ONCE).close()
    assert "quarantine is full" in caplog.text
    assert len(kept(funded)) == 2


def test_what_was_cancelled_is_not_kept(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    funded.store.run(continuations.cancel, funded.root, request.task_id)
    assert attempt.end(FAILED)
    assert kept(funded) == []
    assert attempt.close()


def test_one_is_found_by_either_id(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert attempt.end(FAILED)
    assert attempt.close()

    def find(some_id: str) -> Any:
        return reconcile.find_quarantined(
            funded.store, funded.settings, some_id, lambda envelope: (None, None)
        )

    one = find(request.task_id)
    assert one is not None
    assert one == find(one.quarantine_id)
    assert find("nothing") is None
    assert funded.store.run(quarantine.discard, funded.root, one.quarantine_id)
    assert kept(funded) == []


def test_a_request_without_limits_pays_nothing_for_them(funded: Ledger) -> None:
    request, _ = funded.start(10)
    lost(funded, request)
    attempt = deliver(funded, request, Retries())
    assert (attempt.number, attempt.replay) == (2, None)
    assert attempt.end(RETURNED)
    assert attempt.close()
    assert TWICE.spent(1, 0) is None


def test_each_request_of_a_task_is_shown_with_what_it_has_in_quarantine(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert attempt.end(FAILED)
    assert attempt.close()
    [first] = kept(funded)
    again = requeue(funded, first["quarantine_id"])
    assert isinstance(again, Reserved)
    following = funded.run(replace(request, reservation_id=again.reservation_id))
    assert following.end(FAILED)
    stories = reconcile.explain(funded.store, funded.settings, request.task_id)
    by_request = {
        story.reservation["reservation_id"]: len(story.reservation["quarantine"])
        for story in stories
    }
    assert by_request == {str(request.reservation_id): 0, str(again.reservation_id): 1}
