"""One deadline for all of a request: its waiting, parking, attempts and retries, on both stores."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from celery_budget import DeadlinePassed, admission, settlement
from celery_budget.core.reservations import Closed, Parked, Reserved, StoredOutcome
from celery_budget.core.retries import Retries
from celery_budget.store import quarantine
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger, admit_many, message_of

MINUTE = 60_000_000
#: A moment that has passed, and was not before the epoch.
PAST = 1


def over(ledger: Ledger, request: Any) -> None:
    """Let a request's deadline have passed, in all that is kept of it."""
    ledger.put("reservations", {"deadline_us": PAST}, reservation_id=request.reservation_id)
    if ledger.message(request) is not None:
        ledger.put("outbox", {"expires_us": PAST}, reservation_id=request.reservation_id)


def test_seconds_are_counted_by_the_databases_clock_from_its_admission(funded: Ledger) -> None:
    before = funded.now()
    request = funded.reserve(within_us=MINUTE)
    after = funded.now()
    kept = funded.row(request).deadline_us
    assert before + MINUTE <= kept <= after + MINUTE
    assert funded.message(request).expires_us == kept, "it is not published, or started, later"


@pytest.mark.parametrize(
    ("given", "expires_us", "kept", "until"),
    [
        ({"deadline_us": 2 * 10**18}, None, 2 * 10**18, 2 * 10**18),
        ({"deadline_us": 2 * 10**18}, 10**18, 2 * 10**18, 10**18),
        ({"deadline_us": 10**18}, 2 * 10**18, 10**18, 10**18),
        ({"deadline_us": 10**16, "within_us": MINUTE}, None, None, None),
        ({"deadline_us": 5, "within_us": MINUTE}, None, 5, 5),
        ({}, 10**18, None, 10**18),
    ],
    ids=["alone", "expires-first", "deadline-first", "within-first", "moment-first", "none"],
)
def test_of_several_bounds_the_earliest_counts(
    funded: Ledger, given: dict[str, Any], expires_us: int | None, kept: Any, until: Any
) -> None:
    request = funded.reserve(1, expires_us=expires_us, **given)
    row, message = funded.row(request), funded.message(request)
    if kept is None and given:
        kept = until = row.deadline_us
        assert abs(kept - funded.now() - MINUTE) < MINUTE
    assert (row.deadline_us, message.expires_us) == (kept, until)


def test_all_of_a_batch_have_one_deadline(funded: Ledger) -> None:
    requests = [funded.request(1, within_us=MINUTE) for _ in range(3)]
    plain = funded.request(1)
    asked = [(one, message_of(one)) for one in [*requests, plain]]
    admit_many(funded.store, funded.settings, asked)
    assert len({funded.row(one).deadline_us for one in requests}) == 1
    assert {funded.message(one).expires_us for one in requests} == {
        funded.row(requests[0]).deadline_us
    }
    assert funded.row(plain).deadline_us is None


def test_what_is_not_published_by_then_ends(funded: Ledger) -> None:
    request = funded.reserve(10, deadline_us=PAST)
    assert funded.relay().released == 1
    assert (funded.state(request), funded.row(request).reason) == ("released", "deadline")
    assert funded.results.told == [(request.task_id, "deadline")]
    assert funded.balance() == (0, 0)


def test_one_that_expires_before_its_deadline_says_so(funded: Ledger) -> None:
    request = funded.reserve(10, expires_us=PAST, within_us=MINUTE)
    assert funded.relay().released == 1
    assert funded.row(request).reason == "expired"


def test_a_claim_after_it_is_refused_and_ends_the_request(funded: Ledger) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    assert funded.relay().published == 1
    over(funded, request)
    assert funded.deliver(request) == Closed("released")
    assert (funded.state(request), funded.row(request).reason) == ("released", "deadline")
    assert funded.balance() == (0, 0)
    assert funded.tell_all().told == 1
    assert funded.results.told == [(request.task_id, "deadline")]
    assert settlement.leaves_chord(funded.store, funded.root, request.reservation_id)
    assert funded.deliver(request) == Closed("released"), "a copy changes nothing"
    assert funded.results.told == [(request.task_id, "deadline")]


@pytest.mark.parametrize(
    ("past", "reason"), [(True, "deadline"), (False, "expired")], ids=["past", "before"]
)
def test_what_a_worker_finds_expired_says_by_what(funded: Ledger, past: bool, reason: str) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    assert funded.relay().published == 1
    if past:
        over(funded, request)
    revoked = (funded.store, funded.root, request.reservation_id, "expired")
    assert settlement.revoke(*revoked)
    assert settlement.revoke(*revoked), "a copy finds it so"
    assert (funded.state(request), funded.row(request).reason) == ("released", reason)


def test_a_claim_in_time_knows_how_long_it_has(funded: Ledger) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    attempt = funded.run(request)
    assert attempt.deadline_us == funded.row(request).deadline_us
    assert attempt.seconds_left is not None
    assert 0 < attempt.seconds_left <= 60
    attempt.check()
    _, unbound = funded.start(10)
    assert (unbound.deadline_us, unbound.seconds_left) == (None, None)
    unbound.check()


def test_a_running_attempt_is_stopped_only_where_it_asks(funded: Ledger) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    attempt = funded.run(request)
    over(funded, request)
    attempt.until = 0.0
    attempt.record(4)
    assert attempt.seconds_left == 0
    with pytest.raises(DeadlinePassed) as raised:
        attempt.check()
    assert raised.value.reservation_id == str(request.reservation_id)
    assert datetime.fromisoformat(raised.value.deadline).timestamp() > PAST
    assert attempt.end(RETURNED)
    assert funded.state(request) == "settled"
    assert funded.balance() == (0, 4)


@pytest.mark.parametrize("limits", [None, Retries(max_attempts=9)], ids=["plain", "declared"])
def test_a_retry_after_it_is_refused_with_the_last_error(
    funded: Ledger, limits: Retries | None
) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    attempt = funded.run(request)
    attempt.record(7)
    following, written = funded.retry(request, attempt)
    assert written == Reserved(request.reservation_id)
    assert funded.rows("outbox", retries=1)[0].expires_us == funded.row(request).deadline_us
    assert attempt.end(replace(RETRIED, payload='["boom", "stored"]'))
    assert funded.relay().published == 1
    over(funded, request)

    refused = funded.deliver(following, limits)
    assert refused.replay == StoredOutcome("refused", '["deadline", 1, "stored"]')
    assert refused.deadline_us == PAST
    assert (funded.state(request), funded.row(request).reason) == ("settled", "deadline")
    assert funded.balance() == (0, 7)
    kept = [row.reason for row in funded.rows("quarantine")]
    assert kept == ([] if limits is None else ["deadline"])


def test_a_retry_that_is_due_after_it_is_not_published(funded: Ledger) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    attempt = funded.run(request)
    attempt.record(7)
    funded.retry(request, attempt)
    attempt.end(RETRIED)
    over(funded, request)
    assert funded.relay().released == 1
    assert (funded.state(request), funded.row(request).reason) == ("settled", "deadline")
    assert funded.results.told == [(request.task_id, "deadline")]
    assert funded.balance() == (0, 7)


def test_a_lost_attempt_is_not_followed_after_it(funded: Ledger) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    assert funded.relay().published == 1
    funded.run(request)
    over(funded, request)
    funded.lapse(request)
    assert funded.recover().rerun == 1
    assert funded.message(request).expires_us == PAST, "the message of the next one is bound by it"
    assert funded.relay().released == 1
    assert funded.row(request).reason == "deadline"


@pytest.mark.parametrize("given", [{"within_us": MINUTE}, {"deadline_us": PAST}])
def test_parked_work_gives_up_at_it(funded: Ledger, given: dict[str, int]) -> None:
    request = funded.request(101, finishing=True, **given)
    tried = funded.admit(request, continuation=True)
    assert isinstance(tried, Parked)
    [row] = funded.rows("parked")
    assert row.deadline_us == row.expires_us
    assert row.deadline_us < funded.now() + 2 * MINUTE, "not after a day, as other parked work"
    if "within_us" in given:
        assert funded.sweep().over == ()
        # It keeps its moment, however late it is looked at.
        fixed = row.request.replace(f'"deadline_us": {row.deadline_us}', f'"deadline_us": {PAST}')
        assert fixed != row.request
        values = {"deadline_us": PAST, "expires_us": PAST, "request": fixed}
        funded.put("parked", values)
    funded.sweep()
    told = funded.rows("reservations", reservation_id=request.reservation_id)
    assert [(one.state, one.reason) for one in told] == [("released", "deadline")]


def test_parked_work_that_fits_in_time_keeps_it(funded: Ledger) -> None:
    holder = funded.reserve(60)
    request = funded.request(50, finishing=True, within_us=MINUTE)
    assert isinstance(funded.admit(request, continuation=True), Parked)
    [row] = funded.rows("parked")
    funded.run(holder).end(RAISED)
    assert funded.sweep().admitted == 1
    assert funded.row(request).deadline_us == row.deadline_us
    assert funded.message(request).expires_us == row.deadline_us


def test_a_parked_retry_gives_up_at_it(funded: Ledger) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    attempt = funded.run(request)
    attempt.record(95)
    _, written = funded.retry(request, attempt)
    assert isinstance(written, Parked)
    attempt.end(RETRIED)
    [row] = funded.rows("parked")
    assert row.deadline_us == funded.row(request).deadline_us
    fixed = row.request.replace(f'"deadline_us": {row.deadline_us}', f'"deadline_us": {PAST}')
    funded.put("parked", {"deadline_us": PAST, "request": fixed})
    assert funded.sweep().over == (request.task_id,)
    assert (funded.state(request), funded.row(request).reason) == ("settled", "deadline")


def test_a_planned_step_is_bound_by_it(funded: Ledger) -> None:
    head = funded.request(10, within_us=MINUTE)
    head = replace(head, plan=head.reservation_id, step=0)
    step = funded.request(10, within_us=MINUTE, plan=head.reservation_id, step=1)
    publications = [
        admission.Publication(head, message_of(head)),
        admission.Publication(step, None),
    ]
    admission.admit_many(funded.store, funded.settings, publications)
    kept = funded.row(head).deadline_us
    assert funded.row(step).deadline_us == kept
    reached = admission.activate(funded.store, funded.settings, step, message_of(step))
    assert reached == Reserved(step.reservation_id)
    assert funded.message(step).expires_us == kept


def test_what_is_run_again_by_hand_has_none(funded: Ledger) -> None:
    request = funded.reserve(10, within_us=MINUTE)
    attempt = funded.run(request)
    following, _ = funded.retry(request, attempt)
    attempt.end(RETRIED)
    over(funded, request)
    assert funded.deliver(following, Retries(max_attempts=9)).close()
    [kept] = funded.rows("quarantine")
    admitted = funded.store.run(
        quarantine.requeue,
        funded.root,
        str(kept.quarantine_id),
        lambda message, reservation_id: message,
        lock_ms=1000,
        bound=None,
    )
    assert isinstance(admitted, Reserved)
    [row] = funded.rows("reservations", reservation_id=admitted.reservation_id)
    assert row.deadline_us is None
    [message] = funded.rows("outbox", reservation_id=admitted.reservation_id)
    assert message.expires_us is None
