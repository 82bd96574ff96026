"""Attempts: claimed once, ended once, closed, and given again where they were not."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    Again,
    Closed,
    Missing,
    Outcome,
    Running,
    StoredOutcome,
)
from celery_budget.settlement import Attempt
from celery_budget.store import attempts
from celery_budget.store.attempts import Delivery
from tests.contract.support import BOOT, RAISED, RETRIED, RETURNED, Ledger
from tests.messages import Told


def test_a_claimed_attempt_runs(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert attempt.number == 1
    assert funded.state(request) == "running"
    assert funded.balance() == (10, 0)


@pytest.mark.parametrize("published", [True, False])
def test_a_worker_may_be_faster_than_the_mark(funded: Ledger, published: bool) -> None:
    request = funded.reserve(10)
    if published:
        funded.relay()
        assert funded.state(request) == "published"
    funded.run(request)


def test_a_second_delivery_does_not_get_the_claim(funded: Ledger) -> None:
    request, _ = funded.start(10)
    before = funded.dump()
    assert funded.deliver(request) == Running()
    funded.lapse(request)
    # Only recovery may take a claim away: the worker may be alive.
    assert funded.deliver(request) == Running()
    assert len(funded.dump()["attempts"]) == len(before["attempts"]) == 1


def test_a_claim_whose_answer_was_lost_is_found_again(funded: Ledger) -> None:
    request = funded.reserve(10)
    delivery = Delivery(
        funded.root, request.reservation_id, request.task_id, 0, 0, "w", BOOT, late_ack=True
    )
    claim_id = new_id()
    for _ in range(2):
        claimed = funded.store.run(attempts.claim, delivery, claim_id, 1_000_000)
        assert (claimed.attempt, claimed.claim_id) == (1, claim_id)
    assert len(funded.rows("attempts")) == 1


WRONG: list[dict[str, Any]] = [
    {"task_id": "another"},
    {"nesting": 1},
    {"reservation_id": uuid.UUID(int=1)},
    {"root": "elsewhere"},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_ledger_does_not_know_is_missing(funded: Ledger, wrong: dict[str, Any]) -> None:
    request = funded.reserve(10)
    before = funded.dump()
    assert funded.deliver(request, **wrong) == Missing()
    assert funded.dump() == before


def test_a_message_of_another_retry_runs_nothing(funded: Ledger) -> None:
    request = funded.reserve(10)
    assert funded.deliver(request, retries=1) == Closed("reserved")
    funded.run(request)
    assert funded.deliver(request, retries=1) == Running()


def test_a_released_request_does_not_run(funded: Ledger) -> None:
    request = funded.reserve(10)
    settlement.revoke(funded.store, funded.root, request.reservation_id, "cancelled")
    assert funded.deliver(request) == Closed("released")


#: outcome, what is recorded, a retry is written, the state, (reserved, spent) and the flag.
REQUEUED = Outcome("rejected", again=Again(10, 1, 10**12))

ENDS = [
    pytest.param(RETURNED, [4], False, "settled", (0, 4), False, id="returned-metered"),
    pytest.param(RETURNED, [0], False, "settled", (0, 0), False, id="returned-metered-as-0"),
    pytest.param(RETURNED, [], False, "settled", (0, 10), True, id="returned-unmetered"),
    pytest.param(RETURNED, [9, 9], False, "settled", (0, 18), False, id="returned-over"),
    pytest.param(RAISED, [], False, "settled", (0, 0), False, id="raised"),
    pytest.param(RAISED, [3], False, "settled", (0, 3), False, id="raised-with-usage"),
    pytest.param(RETRIED, [3], True, "waiting", (13, 0), False, id="retried"),
    pytest.param(RETRIED, [], True, "waiting", (10, 0), False, id="retried-without-usage"),
    pytest.param(RETRIED, [3], False, "settled", (0, 3), False, id="retried-no-successor"),
    pytest.param(Outcome("replaced"), [3], False, "settled", (0, 3), False, id="replaced"),
    pytest.param(Outcome("ignored"), [], False, "settled", (0, 0), False, id="ignored"),
    pytest.param(Outcome("rejected"), [2], False, "settled", (0, 2), False, id="rejected"),
    pytest.param(REQUEUED, [2], False, "waiting", (12, 0), False, id="requeued"),
]


@pytest.mark.parametrize(("outcome", "records", "retry", "state", "balance", "unmetered"), ENDS)
def test_an_attempt_ends(
    funded: Ledger,
    outcome: Outcome,
    records: list[int],
    retry: bool,
    state: str,
    balance: tuple[int, int],
    unmetered: bool,
) -> None:
    request, attempt = funded.start(10)
    for amount in records:
        attempt.record(amount)
    if retry:
        funded.retry(request, attempt)
    assert attempt.end(outcome)
    assert attempt.settled == (state == "settled")
    row = funded.row(request)
    assert (row.state, row.unmetered, funded.balance()) == (state, unmetered, balance)
    [stored] = funded.rows("attempts")
    assert stored.outcome == outcome.kind
    assert stored.ended_us is not None
    assert (row.ended_us is None) == (state == "waiting")
    assert attempt.end(outcome), "the same call after a lost answer"
    other = RAISED if outcome.kind != "raised" else RETURNED
    assert not attempt.end(other), "an attempt ends once"
    assert attempt.settled is False
    assert funded.balance() == balance


def test_a_requeued_message_comes_again_until_its_turns_are_over(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    for turn in range(2):
        attempt.end(replace(REQUEUED, again=Again(3, 60_000_000, 10**12)))
        message = funded.message(request)
        assert message.state == "due"
        assert message.due_us > message.created_us + 60_000_000 * 2**turn - 10_000_000
        attempt = funded.run(request)
    attempt.record(4)
    attempt.end(replace(REQUEUED, again=Again(3, 60_000_000, 10**12)))
    assert attempt.settled
    assert (funded.state(request), funded.balance()) == ("settled", (0, 4))


def test_a_requeued_message_that_does_not_fit_again_is_parked(funded: Ledger) -> None:
    """Its usage counts: rejecting for ever must not pass the limit."""
    request, attempt = funded.start(60)
    attempt.record(50)
    attempt.end(REQUEUED)
    assert (funded.state(request), funded.balance()) == ("waiting", (50, 0))
    [parked] = funded.rows("parked")
    assert parked.reservation_id == request.reservation_id


def test_a_requeued_message_starts_the_next_attempt(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(2)
    attempt.end(REQUEUED)
    second = funded.run(request)
    assert second.number == 2
    assert funded.row(request).deliveries == 2
    second.record(5)
    second.end(RETURNED)
    assert funded.balance() == (0, 7)


@pytest.mark.parametrize("what", ["end", "close", "retry"])
def test_nothing_is_done_without_the_fence(funded: Ledger, what: str) -> None:
    request, attempt = funded.start(10)
    attempt.claim_id = new_id()
    before = funded.dump()
    if what == "retry":
        assert funded.retry(request, attempt)[1] is None
    else:
        assert not (attempt.end(RETURNED) if what == "end" else attempt.close())
    assert funded.dump() == before


def test_an_attempt_that_lost_its_claim_changes_only_its_usage(funded: Ledger, told: Told) -> None:
    request, first = funded.start(10)
    funded.lapse(request)
    assert funded.recover().rerun == 1
    second = funded.run(request)
    before = funded.dump()
    assert not first.end(RETURNED)
    assert not first.close(), "what was abandoned is closed"
    assert funded.retry(request, first)[1] is None
    assert funded.dump() == before
    first.record(4)
    second.record(5)
    assert second.end(RETURNED)
    assert funded.balance() == (0, 9)
    assert told("attempt.lapsed")


def test_close_erases_the_outcome_and_the_messages(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert not attempt.close(), "what runs cannot be closed"
    attempt.end(RETURNED)
    assert funded.rows("attempts")[0].payload == '"done"'
    assert funded.deliver(request) == Running(), "its worker is busy with what follows"
    assert attempt.close()
    [row] = funded.rows("attempts")
    assert (row.payload, row.lease_until_us) == (None, None)
    assert funded.message(request) is None
    assert funded.deliver(request) == Closed("settled")


@pytest.mark.parametrize("outcome", [RETURNED, RAISED])
def test_an_outcome_is_given_again_where_its_worker_died(funded: Ledger, outcome: Outcome) -> None:
    request, attempt = funded.start(10)
    attempt.end(outcome)
    funded.lapse(request)
    before = funded.balance()
    replay = funded.deliver(request)
    assert isinstance(replay, Attempt)
    assert replay.replay == StoredOutcome(outcome.kind, outcome.payload)
    assert replay.number == 1
    assert funded.deliver(request) == Running(), "one replay at a time"
    assert not attempt.close(), "the replay has the fence now"
    assert not replay.end(Outcome("ignored"))
    assert replay.close()
    assert funded.deliver(request) == Closed("settled")
    assert funded.balance() == before


def test_a_worker_keeps_its_own_leases(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    ended, done = funded.start(10)
    done.end(RETURNED)
    closed, finished = funded.start(10)
    finished.end(RETURNED)
    finished.close()
    ids = [one.task_id for one in (request, ended, closed)]
    for one in (request, ended):
        funded.lapse(one)
    assert settlement.renew(funded.store, funded.settings, ids, uuid.UUID(int=8), []) == 0
    assert settlement.renew(funded.store, funded.settings, [], BOOT, []) == 0
    assert settlement.renew(funded.store, funded.settings, ids, BOOT, []) == 2
    assert funded.recover().rerun == 0
    assert attempt.end(RETURNED)
