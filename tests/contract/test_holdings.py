"""What holds a budget, what waits for it and what it refused, exactly and at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_budget import reconcile
from celery_budget.errors import InvalidAmount, InvalidBudget, UnknownBudget
from celery_budget.reconcile import BudgetStory
from tests.contract.support import RETRIED, RETURNED, Ledger

DAY_US = 86_400_000_000


def told(
    ledger: Ledger, name: str = "b", limit: int = 20, amount: int | None = None
) -> BudgetStory:
    found = reconcile.explain_budget(ledger.store, ledger.settings, name, limit, amount)
    json.dumps(found.as_dict())
    return found


def test_what_holds_a_budget_is_counted_by_state_and_the_largest_is_named(funded: Ledger) -> None:
    running, _ = funded.start(30)
    reserved = funded.reserve(20)
    small = [funded.reserve(1) for _ in range(3)]
    _, settled = funded.start(40)
    settled.record(7)
    assert settled.end(RETURNED)
    funded.set("c", 100)
    funded.reserve(50, budget="c")
    found = told(funded, limit=2)
    assert found.holding == {"reserved": 4, "running": 1}
    assert found.held == {"reserved": 23, "running": 30}
    assert [(one.task_id, one.held, one.state, one.worker) for one in found.holds] == [
        (running.task_id, 30, "running", "worker@host"),
        (reserved.task_id, 20, "reserved", None),
    ]
    balance = found.standing.balance
    assert (balance.reserved, balance.spent) == (sum(found.held.values()), 7)
    assert found.holds[0].since_us == funded.row(running).created_us
    assert found.holds[0].next[0].at_us == funded.rows("attempts")[0].lease_until_us
    assert len(small) == 3


def test_a_parent_is_held_by_the_requests_of_the_budgets_below_it(ledger: Ledger) -> None:
    ledger.set("all", 50)
    ledger.set("a", 100, parent="all")
    ledger.set("b", 100, parent="all")
    ledger.reserve(20, budget="a")
    ledger.reserve(30, budget="b")
    found = told(ledger, "all")
    assert [(one.owner, one.held) for one in found.holds] == [("b", 30), ("a", 20)]
    below = told(ledger, "a")
    assert below.rooms == {"a": 80, "all": 0}
    assert (below.standing.room, below.standing.room_of) == (0, "all")


def test_what_is_held_from_a_window_that_has_ended_is_told(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    ledger.reserve(10)
    ledger.age(by_us=2 * DAY_US)
    ledger.reserve(3)
    found = told(ledger)
    assert [(one.reserved, one.is_open) for one in found.windows] == [(10, False), (3, True)]
    assert sorted(one.held for one in found.holds) == [3, 10]
    assert found.frees[0].at_us == found.windows[1].end_us
    assert found.frees[0].what == "the window ends: the 0 spent in it count no longer"


def test_what_changes_the_room_by_itself_is_told_with_its_time(ledger: Ledger) -> None:
    ledger.set("all", 10, period="hour")
    ledger.set("b", 100, parent="all")
    ledger.reserve(10)
    until_us = ledger.now() + DAY_US
    ledger.grant("g-1", 7, until_us=until_us)
    ledger.grant("for ever", 1)
    found = told(ledger)
    [above] = found.standing.above
    assert [(one.what, one.at_us) for one in found.frees] == [
        ("the window of budget all above it ends", above.end_us),
        ("grant g-1 of 7 ends: less room", until_us),
    ]


def test_what_waits_is_counted_and_told_in_its_turn(funded: Ledger) -> None:
    _, attempt = funded.start(60)
    attempt.record(60)
    request, _ = funded.retry(*_first(funded, attempt), 60)
    waiting = [funded.request(90 + n) for n in range(3)]
    for one in waiting:
        funded.admit(one, continuation=True)
    oldest = min(row.created_us for row in funded.rows("parked"))
    funded.put("parked", {"ahead_us": funded.now() + DAY_US}, task_id=waiting[0].task_id)
    found = told(funded, limit=2)
    assert (found.parked, found.oldest_us) == (4, oldest)
    assert [(one.task_id, one.amount, one.runs_on, one.ahead) for one in found.waiting] == [
        (request.task_id, 60, True, False),
        (waiting[0].task_id, 90, False, True),
    ]
    assert attempt.end(RETRIED)
    [hold] = told(funded).holds
    assert hold.next[0].what == "admitted when 60 of budget b is free"


def _first(ledger: Ledger, attempt: Any) -> tuple[Any, Any]:
    row = ledger.rows("reservations")[0]
    request = ledger.request(
        60, task_id=row.task_id, reservation_id=row.reservation_id, request_id=row.request_id
    )
    return request, attempt


def test_refusals_are_counted_by_reason(funded: Ledger) -> None:
    for amount in (101, 102, 103):
        funded.admit(funded.request(amount))
    funded.reserve(60)
    funded.admit(funded.request(50, task_name="shop.other"))
    found = {one.reason: one for one in told(funded).refusals}
    assert {reason: one.count for reason, one in found.items()} == {"exhausted": 3, "held": 1}
    assert (found["held"].requested, found["held"].task_name) == (50, "shop.other")
    assert found["held"].last_us == max(row.refused_us for row in funded.rows("refusals"))
    funded.set("c", 5)
    assert told(funded, "c").refusals == ()


@pytest.mark.parametrize(("amount", "reason"), [(40, None), (41, "held"), (101, "exhausted")])
def test_what_a_request_would_meet_is_told(funded: Ledger, amount: int, reason: str | None) -> None:
    funded.reserve(60)
    before = funded.dump()
    asking = told(funded, amount=amount).asking
    assert asking is not None
    assert asking.outlook.admits is (reason is None)
    if reason is not None:
        assert getattr(asking.outlook.error, "reason", None) == reason
    assert funded.dump() == before
    assert told(funded).asking is None


def test_a_budget_that_nothing_holds(funded: Ledger) -> None:
    found = told(funded)
    assert (found.holds, found.holding, found.parked, found.oldest_us) == ((), {}, 0, None)
    assert (found.frees, found.refusals) == ((), ())


def test_holds_beyond_64_bits_are_summed_exactly(ledger: Ledger) -> None:
    most = 2**63 - 1
    ledger.set("b", None, period="day")
    ledger.reserve(most)
    ledger.age(by_us=2 * DAY_US)
    ledger.reserve(most)
    assert told(ledger).held == {"reserved": 2 * most}


def test_what_holds_nothing_is_refused(funded: Ledger) -> None:
    with pytest.raises(UnknownBudget):
        told(funded, "nobody")
    with pytest.raises(InvalidBudget, match="is a template: it holds nothing"):
        told(funded, "tenant:*")
    with pytest.raises(InvalidAmount):
        told(funded, amount=-1)


def test_refusals_of_long_ago_are_not_told(funded: Ledger) -> None:
    funded.admit(funded.request(101))
    [row] = funded.rows("refusals")
    for days, count in ((30, 1), (31, 0)):
        funded.put("refusals", {"day": row.day - days})
        assert sum(one.count for one in told(funded).refusals) == count
