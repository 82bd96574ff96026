"""Parked work: waits for budget, holds nothing, is admitted when it fits or given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget import reconcile, settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    AlreadyReserved,
    Line,
    Parked,
    Reserved,
    ReserveRequest,
)
from celery_budget.errors import RequestConflict, UnknownBudget
from tests.contract.support import RETRIED, RETURNED, Ledger, Swept


def park(ledger: Ledger, amount: int = 10, **changes: object) -> ReserveRequest:
    """Admit a continuation that does not fit."""
    request = ledger.request(amount, **changes)  # type: ignore[arg-type]
    assert isinstance(ledger.admit(request, continuation=True), Parked)
    return request


def test_a_continuation_that_fits_is_admitted(funded: Ledger) -> None:
    request = funded.request(10)
    assert funded.admit(request, continuation=True) == Reserved(request.reservation_id)
    again = replace(request, reservation_id=new_id())
    assert isinstance(funded.admit(again, continuation=True), AlreadyReserved)


def test_a_continuation_that_does_not_fit_is_parked_once(funded: Ledger) -> None:
    funded.set("b", 5)
    request = park(funded)
    again = replace(request, reservation_id=new_id())
    park_again = funded.admit(again, continuation=True)
    [row] = funded.rows("parked")
    assert park_again == Parked(row.parked_id)
    assert funded.balance() == (0, 0)
    assert funded.rows("refusals") == [], "nobody was refused"


def test_a_continuation_of_an_unknown_budget_or_a_conflict_is_an_error(funded: Ledger) -> None:
    request = funded.reserve(10)
    before = funded.dump()
    with pytest.raises(UnknownBudget):
        funded.admit(funded.request(1, budget="c"), continuation=True)
    with pytest.raises(RequestConflict):
        funded.admit(replace(request, reservation_id=new_id(), fingerprint="x"), continuation=True)
    assert funded.dump() == before


@pytest.mark.parametrize("how", ["limit", "settlement", "release"])
def test_parked_work_is_admitted_when_it_fits(funded: Ledger, how: str) -> None:
    holder = funded.reserve(100)
    parent = new_id()
    request = park(funded, 30, parent=parent, nesting=2, retries=1, opaque=True)
    assert funded.sweep().admitted == 0
    if how == "limit":
        funded.set("b", 130)
    elif how == "release":
        settlement.revoke(funded.store, funded.root, holder.reservation_id, "cancelled")
    else:
        attempt = funded.run(holder)
        attempt.record(70)
        attempt.end(RETURNED)
    assert funded.sweep() == funded.sweep().__class__(1, ())
    assert funded.rows("parked") == []
    row = funded.row(request)
    assert (row.state, row.parent_id, row.nesting, row.retries, row.opaque) == (
        "reserved", parent, 2, 1, True,
    )  # fmt: skip
    assert funded.line(request) == (30, 0, 0)
    message = funded.message(request)
    assert (message.task_id, bytes(message.body), message.state) == (
        request.task_id,
        b"body",
        "due",
    )
    funded.run(request)


def test_what_was_parked_first_comes_first(funded: Ledger) -> None:
    funded.set("b", 0)
    big, small = park(funded, 90), park(funded, 20)
    funded.set("b", 100)
    assert funded.sweep().admitted == 1
    assert funded.state(big) == "reserved"
    assert [row.task_id for row in funded.rows("parked")] == [small.task_id]


@pytest.mark.parametrize("clock", ["deadline", "expires"])
def test_parked_work_is_given_up_when_its_time_is_over(funded: Ledger, clock: str) -> None:
    funded.set("b", 5)
    request = funded.request(10)
    message = {"expires_us": 1} if clock == "expires" else {}
    assert isinstance(funded.admit(request, continuation=True, **message), Parked)
    if clock == "deadline":
        funded.put("parked", {"deadline_us": 1})
    funded.set("b", 100)
    swept = funded.sweep()
    assert (swept.admitted, swept.over) == (0, (request.task_id,))
    assert funded.rows("parked") == []
    assert (funded.state(request), funded.row(request).reason) == ("released", "park_expired")
    report = reconcile.report(funded.store, funded.settings)
    assert (report.counts["admitted"], report.counts["given_up"]) == (0, 1)
    # It never ran: its id may be used again.
    funded.reserve(10, task_id=request.task_id)


def test_parked_work_that_is_cancelled_did_not_wait_too_long(funded: Ledger) -> None:
    request = park(funded, 1000)
    settlement.cancel(funded.store, funded.settings, request.task_id)
    counts = reconcile.report(funded.store, funded.settings).counts
    assert (counts["admitted"], counts["given_up"], counts["cancelled"]) == (0, 0, 1)


def test_a_parked_retry_is_given_up_at_what_it_used(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    attempt.record(50)
    funded.retry(request, attempt)
    funded.put("parked", {"deadline_us": 1})
    assert funded.sweep().over == (), "its attempt still runs"
    assert len(funded.rows("parked")) == 1
    attempt.end(RETRIED)
    assert funded.sweep().over == (request.task_id,)
    row = funded.row(request)
    assert (row.state, row.reason) == ("settled", "park_expired")
    assert funded.balance() == (0, 50)


def test_a_parked_retry_goes_with_its_request(funded: Ledger) -> None:
    request, attempt = funded.start(60, late_ack=False)
    attempt.record(50)
    funded.retry(request, attempt)
    funded.lapse(request)
    assert funded.recover().lost == 1
    assert funded.rows("parked") == []
    assert funded.sweep() == Swept(0, ())
    assert funded.balance() == (0, 60)


def test_work_whose_id_is_taken_meanwhile_waits_until_it_is_over(funded: Ledger) -> None:
    funded.set("b", 5)
    request = park(funded)
    funded.set("b", 100)
    other = funded.request(10, task_id=request.task_id, fingerprint="1:other")
    with pytest.raises(RequestConflict):
        funded.admit(other)
    assert funded.admit(other, continuation=True) == Reserved(other.reservation_id)
    assert funded.sweep() == Swept(0, ())
    funded.put("parked", {"deadline_us": 1})
    assert funded.sweep() == Swept(0, ()), "the task's result is that of the other"
    assert funded.rows("parked") == []
    assert funded.state(other) == "reserved"


def test_work_that_was_admitted_meanwhile_is_not_admitted_twice(funded: Ledger) -> None:
    funded.set("b", 5)
    request = park(funded)
    funded.set("b", 100)
    admitted = replace(request, reservation_id=new_id())
    assert isinstance(funded.admit(admitted, continuation=True), Reserved)
    assert funded.sweep() == Swept(1, ())
    assert funded.rows("parked") == []
    assert funded.balance() == (10, 0)


def test_what_cannot_be_decided_changes_nothing_and_waits_until_it_is_over(funded: Ledger) -> None:
    funded.set("other", 5)
    lines = (Line("b", 10), Line("other", 10, "start"))
    request = park(funded, lines=lines)
    # Charged by both rules now: a request that no new one could make.
    funded.set("other", 100)
    funded.set("b", parent="other")
    for _ in range(3):
        assert funded.sweep() == Swept(0, ())
        assert funded.rows("reservations") == []
    funded.put("parked", {"deadline_us": 1})
    assert funded.sweep().over == (request.task_id,)


def test_one_that_fails_does_not_hold_up_the_others(funded: Ledger) -> None:
    funded.set("stuck", 5)
    first, second = park(funded, budget="stuck"), park(funded, 101)
    funded.set("b", 200)
    funded.set("stuck", 100)
    # Its window has to be opened, and this host does not know the budget's time zone.
    funded.put("balances", {"end_us": 1}, budget="stuck")
    funded.put("budgets", {"period": "day", "timezone": "Mars/Olympus_Mons"}, name="stuck")
    assert funded.sweep() == Swept(1, ())
    assert funded.state(second) == "reserved"
    funded.put("budgets", {"timezone": "UTC"}, name="stuck")
    assert funded.sweep() == Swept(0, ()), "it is left alone for a while"
    funded.put("parked", {"checked_us": 0})
    assert funded.sweep() == Swept(1, ())
    assert funded.state(first) == "reserved"
