"""How a job stands, as both stores tell it, and that another owner is told nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import settlement
from celery_budget.core.jobs import job_state
from celery_budget.core.reservations import Outcome, Parked, ReserveRequest
from celery_budget.core.retries import Keep
from celery_budget.store import jobs
from celery_budget.store.jobs import Known
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger


def find(ledger: Ledger, request: ReserveRequest, owner: str = "b") -> Known | None:
    return ledger.store.read(jobs.find, ledger.root, request.task_id, owner)


def state(ledger: Ledger, request: ReserveRequest) -> str | None:
    known = find(ledger, request)
    assert known is not None
    return job_state(
        known.state,
        known.reason,
        known.outcome,
        parked=known.parked,
        quarantined=known.quarantined,
    )


def test_from_its_admission_to_its_end(funded: Ledger) -> None:
    before = funded.now()
    request = funded.reserve(10)
    assert state(funded, request) == "queued"
    funded.relay()
    assert state(funded, request) == "queued"
    attempt = funded.run(request)
    assert state(funded, request) == "running"
    attempt.record(3)
    following, _ = funded.retry(request, attempt)
    attempt.end(RETRIED)
    assert state(funded, request) == "queued"
    second = funded.run(following)
    second.record(4)
    second.end(RETURNED)
    known = find(funded, request)
    assert known is not None
    assert (state(funded, request), known.unfinished) == ("succeeded", True)
    second.close()
    known = find(funded, request)
    assert known is not None
    assert (known.usage, known.attempts, known.unfinished) == ({"tokens": 7}, 2, False)
    assert known.started_us is not None
    assert known.ended_us is not None
    assert before <= known.created_us <= known.started_us <= known.ended_us <= funded.now()
    assert known.ended_for_us is not None
    assert 0 <= known.ended_for_us <= funded.now() - before


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (RAISED, "failed"),
        (Outcome("ignored"), "cancelled"),
        (Outcome("rejected"), "failed"),
        (replace(RAISED, keep=Keep("failed", "boom", 10)), "quarantined"),
    ],
    ids=["raised", "ignored", "rejected", "kept"],
)
def test_how_a_run_ends(funded: Ledger, outcome: Outcome, expected: str) -> None:
    request, attempt = funded.start(10)
    attempt.end(outcome)
    assert state(funded, request) == expected


def test_what_waits_for_budget_is_parked(funded: Ledger) -> None:
    request = funded.request(101, finishing=True, deadline_us=2**60)
    assert isinstance(funded.admit(request, continuation=True), Parked)
    assert state(funded, request) == "parked"
    known = find(funded, request)
    assert known is not None
    assert (known.task_name, known.started_us, known.usage) == ("shop.draft", None, {})
    assert known.deadline_us == 2**60
    funded.put("parked", {"deadline_us": 1})
    funded.sweep()
    assert state(funded, request) == "expired"


def test_a_retry_that_waits_for_budget_is_parked(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(95)
    funded.retry(request, attempt)
    assert state(funded, request) == "running"
    attempt.end(RETRIED)
    assert state(funded, request) == "parked"


def test_what_never_ran(funded: Ledger) -> None:
    cancelled, expired, late = (
        funded.reserve(10),
        funded.reserve(10, expires_us=1),
        funded.reserve(10, deadline_us=1),
    )
    settlement.cancel(funded.store, funded.settings, cancelled.task_id)
    funded.relay()
    assert [state(funded, one) for one in (cancelled, expired, late)] == [
        "cancelled",
        "expired",
        "expired",
    ]


def test_a_lost_one_has_failed(funded: Ledger) -> None:
    request, _ = funded.start(10, late_ack=False)
    funded.lapse(request)
    assert funded.recover().lost == 1
    assert state(funded, request) == "failed"


def test_of_what_replaced_itself_the_last_one_tells(funded: Ledger) -> None:
    """And the first one's owner is the job's, whatever budget comes after it."""
    funded.set("c", 100)
    request, attempt = funded.start(10)
    attempt.record(2)
    following = replace(funded.request(5, budget="c", task_id=request.task_id), nesting=1)
    funded.admit(following, continuation=True)
    attempt.end(Outcome("replaced"))
    assert state(funded, request) == "queued"
    second = funded.run(following)
    second.record(3)
    second.end(RAISED)
    known = find(funded, request)
    assert known is not None
    assert (state(funded, request), known.usage, known.attempts) == ("failed", {"tokens": 5}, 2)
    assert find(funded, request, "c") is None


@pytest.mark.parametrize("how", ["reserved", "parked", "settled", "released"])
def test_another_owner_finds_nothing(funded: Ledger, how: str) -> None:
    funded.set("c", 100)
    request = funded.request(101 if how == "parked" else 10, finishing=True)
    funded.admit(request, continuation=True)
    if how == "settled":
        funded.run(request).end(RETURNED)
    elif how == "released":
        settlement.cancel(funded.store, funded.settings, request.task_id)
    assert find(funded, request) is not None
    assert find(funded, request, "c") is None
    assert find(funded, request, "") is None
    # Nor with a request of its own, by the same task id, which stays the first one's.
    funded.reserve(1, budget="c", task_id=request.task_id)
    if how != "parked":
        assert find(funded, request, "c") is None
    known = find(funded, request)
    assert how == "parked" or (known is not None and known.owner == "b")


def test_it_is_a_few_reads_however_much_there_is(funded: Ledger) -> None:
    request, attempt = funded.start(1)
    for number in range(20):
        attempt.record(1, key=f"k{number}")
    for _ in range(3):
        request, _ = funded.retry(request, attempt)
        attempt.end(RETRIED)
        attempt = funded.run(request)
        attempt.record(1)
    statements: list[str] = []

    def note(*args: Any) -> None:
        statements.extend([args[2]] if args[2].startswith("SELECT") else [])

    def counted(connection: sa.Connection, *args: Any) -> Any:
        sa.event.listen(connection, "before_cursor_execute", note)
        return jobs.find(connection, *args)

    known = funded.store.read(counted, funded.root, request.task_id, "b")
    assert known is not None
    assert (known.usage, known.attempts) == ({"tokens": 23}, 4)
    assert len(statements) == 5
