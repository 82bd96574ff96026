"""Lanes with budgets of their own: kept, looked through, and turned to by what runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from celery_budget import admission
from celery_budget.core.lanes import Lane, LaneBudget
from celery_budget.core.reservations import (
    AlreadyExtended,
    AlreadyReserved,
    Closed,
    Extended,
    Line,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
)
from celery_budget.core.usage import Used
from celery_budget.errors import PolicyError, QueueFull, UnknownBudget, UnknownLane
from celery_budget.store import lanes, usage
from tests.contract.support import RETRIED, RETURNED, Ledger, message_of


def lane(ledger: Ledger, name: str, *budgets: str, **terms: Any) -> Lane:
    """Declare a lane with budgets, which feeds a queue with its name and asks no workers."""
    given = {"queues": (name,), "preflight": False, "budgets": budgets, **terms}
    return ledger.store.run(lanes.declare, ledger.root, name, given)


@pytest.fixture
def funded(ledger: Ledger) -> Ledger:
    """A task's own budget and a paid lane with two: what is used of one, each start of another."""
    ledger.set("b", 1000)
    ledger.set("paid", 100)
    ledger.set("calls", 3, unit="requests")
    lane(ledger, "paid", "paid", "calls=1")
    return ledger


def amounts(ledger: Ledger, name: str) -> tuple[int, int]:
    """What is reserved and what is spent of a budget."""
    return ledger.balance(name)


def lines(ledger: Ledger, request: ReserveRequest) -> dict[str, tuple[int, int, int]]:
    """Reserved, used and settled of a request's lines."""
    return {
        row.budget: (row.reserved, row.used, row.settled)
        for row in ledger.rows("lines")
        if row.reservation_id == request.reservation_id
    }


def test_a_lanes_budgets_are_kept_in_their_order(funded: Ledger) -> None:
    found = funded.store.read(lanes.find, funded.root, "paid")["paid"]
    assert found.budgets == (LaneBudget("paid"), LaneBudget("calls", 1))
    lane(funded, "free")
    both = funded.store.read(lanes.named, funded.root, ["paid", "free"])
    assert [(one.name, one.queues, len(one.budgets)) for one in both] == [
        ("paid", ("paid",), 2),
        ("free", ("free",), 0),
    ]
    funded.store.run(lanes.delete, funded.root, "free")
    with pytest.raises(UnknownLane, match="free"):
        funded.store.read(lanes.named, funded.root, ["paid", "free"])


def test_a_way_that_is_not_the_last_counts_no_refusal_and_parks_nothing(funded: Ledger) -> None:
    request = funded.request(101, budget="paid", parks=True)
    for continuation in (False, True):
        tried = admission.admit(
            funded.store,
            funded.settings,
            request,
            message_of(request),
            continuation=continuation,
            last=False,
        )
        assert isinstance(tried, Refused)
    assert (funded.rows("refusals"), funded.rows("parked")) == ([], [])
    assert isinstance(funded.admit(request), Parked)


def test_one_request_in_two_lanes_is_one(funded: Ledger) -> None:
    """A repeat that is asked with the budgets of another lane finds the first."""
    first = funded.request(5, ("paid", 5))
    assert isinstance(funded.admit(first), Reserved)
    again = funded.request(5, task_id=first.task_id)
    found = funded.admit(again)
    assert isinstance(found, AlreadyReserved)
    assert found.reservation_id == first.reservation_id
    assert amounts(funded, "b") == (5, 0)


def look(ledger: Ledger, *names: str, amount: int = 10, finishing: bool = False) -> Any:
    known = ledger.store.read(lanes.named, ledger.root, names)
    ways = [(one, (Line("b", amount), *one.lines(amount))) for one in known]
    return admission.outlook_through(ledger.store, ledger.settings, ways, amount, finishing)


def test_a_look_tells_the_first_lane_that_would_take_it(funded: Ledger) -> None:
    lane(funded, "free", "none")
    funded.set("none", 5)
    assert look(funded, "free", "paid", amount=5)[0] == 0
    number, outlook = look(funded, "free", "paid")
    assert (number, outlook.admits) == (1, True)
    number, outlook = look(funded, "free", "paid", amount=101)
    assert (number, outlook.admits) == (1, False)
    assert outlook.error.budget == "paid"
    # What no other lane could mend is told at once.
    lane(funded, "lost", "gone")
    number, outlook = look(funded, "lost", "paid")
    assert (number, type(outlook.error)) == (0, UnknownBudget)


def test_a_look_passes_a_full_lane_by(funded: Ledger) -> None:
    lane(funded, "free", max_waiting_jobs=1)
    assert look(funded, "free", "paid")[0] == 0
    funded.reserve(1, queue="free")
    assert look(funded, "free", "paid")[0] == 1
    assert type(look(funded, "free")[1].error) is QueueFull
    # What goes on is held, however much waits there.
    assert look(funded, "free", "paid", finishing=True)[0] == 0


def test_turning_passes_the_lanes_gate(funded: Ledger) -> None:
    request = funded.reserve(20)
    attempt = funded.run(request)
    attempt.record(7, "before")
    assert isinstance(attempt.turn_to("paid"), Extended)
    assert amounts(funded, "paid") == (20, 0)
    # It runs: this is the start of what the lane charges for.
    assert amounts(funded, "calls") == (0, 1)
    attempt.record(11, "after")
    assert lines(funded, request) == {"b": (20, 18, 0), "paid": (20, 11, 0), "calls": (0, 1, 1)}
    assert attempt.end(RETURNED)
    assert (amounts(funded, "b"), amounts(funded, "paid")) == ((0, 18), (0, 11))
    assert amounts(funded, "calls") == (0, 1)


def test_what_does_not_fit_changes_nothing(funded: Ledger) -> None:
    request = funded.reserve(20)
    attempt = funded.run(request)
    before = (lines(funded, request), amounts(funded, "paid"), amounts(funded, "calls"))
    refused = attempt.turn_to("paid", 101)
    assert isinstance(refused, Refused)
    assert refused.budget == "paid"
    # All or none: here the second of them is short.
    funded.set("calls", 0, unit=None)
    refused = attempt.turn_to("paid", 1)
    assert isinstance(refused, Refused)
    assert refused.budget == "calls"
    assert (lines(funded, request), amounts(funded, "paid"), amounts(funded, "calls")) == before


def test_the_hard_stop_counts_and_not_the_soft_one(funded: Ledger) -> None:
    funded.set("paid", 100, unit=None, soft_stop=500_000)
    request = funded.reserve(20)
    attempt = funded.run(request)
    assert isinstance(attempt.turn_to("paid", 90), Extended)


def test_a_closing_budget_is_not_turned_to(funded: Ledger) -> None:
    funded.put("budgets", {"state": "draining"}, name="paid")
    attempt = funded.run(funded.reserve(20))
    refused = attempt.turn_to("paid")
    assert isinstance(refused, Refused)
    assert refused.reason == "draining"


def test_it_turns_once(funded: Ledger) -> None:
    attempt = funded.run(funded.reserve(20))
    assert isinstance(attempt.turn_to("paid", 30), Extended)
    assert isinstance(attempt.turn_to("paid", 40), AlreadyExtended)
    assert (amounts(funded, "paid"), amounts(funded, "calls")) == ((30, 0), (0, 1))


def test_many_threads_turn_once(funded: Ledger) -> None:
    attempt = funded.run(funded.reserve(20))
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(attempt.turn_to("paid"))) for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(type(one).__name__ for one in found) == ["AlreadyExtended"] * 3 + ["Extended"]
    assert (amounts(funded, "paid"), amounts(funded, "calls")) == ((20, 0), (0, 1))


def test_what_was_admitted_there_has_nothing_to_turn_to(funded: Ledger) -> None:
    request = funded.request(20)
    [there] = funded.store.read(lanes.named, funded.root, ["paid"])
    asked = (*request.lines, *there.lines(20))
    admitted = funded.request(20, lines=asked)
    assert isinstance(funded.admit(admitted), Reserved)
    attempt = funded.run(admitted)
    assert isinstance(attempt.turn_to("paid"), AlreadyExtended)


def test_who_lost_the_claim_turns_to_nothing(funded: Ledger) -> None:
    request = funded.reserve(20)
    attempt = funded.run(request, late_ack=False)
    funded.lapse(request)
    assert funded.recover().lost == 1
    assert isinstance(attempt.turn_to("paid"), Closed)
    assert amounts(funded, "paid") == (0, 0)


def test_a_lane_without_budgets_has_no_gate(funded: Ledger) -> None:
    lane(funded, "free")
    attempt = funded.run(funded.reserve(20))
    with pytest.raises(PolicyError, match="'free' has no budgets"):
        attempt.turn_to("free")
    with pytest.raises(UnknownLane, match="other"):
        attempt.turn_to("other")
    lane(funded, "lost", "gone")
    with pytest.raises(UnknownBudget, match="gone"):
        attempt.turn_to("lost")


def test_a_budget_above_both_holds_for_both(funded: Ledger) -> None:
    """What is drawn on already holds no more than the request may use of it."""
    funded.set("org", 100)
    funded.set("mine", 100, parent="org")
    funded.set("theirs", 100, parent="org")
    lane(funded, "other", "theirs")
    request = funded.reserve(40, budget="mine")
    attempt = funded.run(request)
    attempt.record(10, "before")
    assert isinstance(attempt.turn_to("other", 50), Extended)
    assert lines(funded, request) == {"mine": (40, 10, 0), "org": (60, 10, 0), "theirs": (50, 0, 0)}
    refused = funded.run(funded.reserve(40, budget="mine")).turn_to("other", 60)
    assert isinstance(refused, Refused)
    assert refused.budget == "org"
    attempt.record(50, "after")
    assert attempt.end(RETURNED)
    assert amounts(funded, "theirs") == (0, 50)
    assert amounts(funded, "mine") == (40, 60)


def test_the_next_attempt_holds_above_both_what_either_needs(funded: Ledger) -> None:
    funded.set("org", 200)
    funded.set("mine", 100, parent="org")
    funded.set("theirs", 100, parent="org")
    lane(funded, "other", "theirs")
    request = funded.reserve(40, budget="mine")
    attempt = funded.run(request)
    attempt.record(10, "before")
    assert isinstance(attempt.turn_to("other", 50), Extended)
    following, _ = funded.retry(request, attempt)
    assert attempt.end(RETRIED)
    assert lines(funded, request) == {"mine": (50, 10, 0), "org": (60, 10, 0), "theirs": (50, 0, 0)}
    assert funded.run(following).end(RETURNED)


def test_the_next_attempt_draws_on_it_from_the_beginning(funded: Ledger) -> None:
    request = funded.reserve(20)
    attempt = funded.run(request)
    attempt.record(5, "before")
    assert isinstance(attempt.turn_to("paid", 30), Extended)
    attempt.record(6, "after")
    following, _ = funded.retry(request, attempt)
    assert attempt.end(RETRIED)
    assert lines(funded, request)["paid"] == (36, 6, 0)
    again = funded.run(following)
    assert amounts(funded, "calls") == (0, 2)
    assert isinstance(again.turn_to("paid", 30), AlreadyExtended)
    again.record(4, "again")
    assert again.end(RETURNED)
    assert (amounts(funded, "b"), amounts(funded, "paid")) == ((0, 15), (0, 10))


def test_what_is_taken_back_of_before_was_never_counted_there(funded: Ledger) -> None:
    """A reply that told too little before, and tells less than was assumed of it afterwards."""
    request = funded.reserve(20)
    attempt = funded.run(request)
    of = (funded.root, request.reservation_id, 1, "reply")
    funded.store.run(usage.record, *of, Used({"tokens": 4}, of_reply=True, incomplete=("tokens",)))
    assert isinstance(attempt.turn_to("paid", 30), Extended)
    funded.store.run(usage.record, *of, Used({"tokens": 6}, of_reply=True))
    assert lines(funded, request)["paid"] == (30, 0, 0)
    assert attempt.end(RETURNED)
    assert (amounts(funded, "b"), amounts(funded, "paid")) == ((0, 6), (0, 0))
