"""When a refused request may come back, and looks that change nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_budget import admission, settlement
from celery_budget.core.backpressure import (
    LONGEST_SECONDS,
    MOST_SPREAD,
    SHARE,
    UNKNOWN_SECONDS,
    Pace,
)
from celery_budget.core.budgets import Share
from celery_budget.core.reservations import Backlogged, Line, Refused, Reserved, Skipped
from celery_budget.errors import BudgetExceeded, OutboxFull, PolicyError, UnknownBudget
from celery_budget.store import backlog, pace, requests, schema
from tests.contract.support import RETURNED, Ledger, admit_many, message_of

SECOND = 1_000_000


def refused(ledger: Ledger, amount: int, **changes: Any) -> Refused:
    outcome = ledger.admit(ledger.request(amount, **changes))
    assert isinstance(outcome, Refused)
    return outcome


def after(ledger: Ledger, amount: int, **changes: Any) -> float | None:
    return refused(ledger, amount, **changes).error().retry_after


def spend(ledger: Ledger, amount: int, used: int, budget: str = "b") -> None:
    _, attempt = ledger.start(amount, budget=budget)
    attempt.record(used)
    attempt.end(RETURNED)
    attempt.close()


def left(ledger: Ledger, seconds: int, budget: str = "b") -> None:
    """Have the window that is open end in so many seconds."""
    with ledger.store.transaction() as connection:
        connection.execute(
            schema.balances.update()
            .where(schema.balances.c.root == ledger.root, schema.balances.c.budget == budget)
            .values(end_us=schema.now_us() + seconds * SECOND)
        )


def age_journal(ledger: Ledger, seconds: int) -> None:
    """Have all changes so far be so many seconds older."""
    with ledger.store.transaction() as connection:
        connection.execute(
            schema.journal.update()
            .where(schema.journal.c.root == ledger.root)
            .values(at_us=schema.journal.c.at_us - seconds * SECOND)
        )


def test_what_is_exhausted_has_room_when_its_window_ends(ledger: Ledger) -> None:
    ledger.set("b", 100, period="hour")
    spend(ledger, 95, 95)
    left(ledger, 600)
    for _ in range(20):
        found = after(ledger, 10)
        assert found is not None
        assert 590 <= found <= 600 + MOST_SPREAD


def test_those_who_are_refused_together_do_not_come_back_together(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    spend(ledger, 95, 95)
    assert len({after(ledger, 10) for _ in range(20)}) > 10


def never(ledger: Ledger) -> list[tuple[str, int]]:
    """Budgets and amounts that are refused for good."""
    ledger.set("total", 100)
    spend(ledger, 95, 95, budget="total")
    ledger.set("blocked", 0, period="hour")
    ledger.set("closed", 100, period="hour")
    ledger.close("closed")
    ledger.set("draining", 100, period="hour")
    ledger.reserve(1, budget="draining")
    ledger.close("draining", drain=True)
    ledger.set("small", 100, period="hour")
    spend(ledger, 1, 1, budget="small")
    ledger.set("stopped", 100, period="hour", soft_stop=500_000)
    spend(ledger, 1, 1, budget="stopped")
    return [
        ("total", 10),
        ("blocked", 1),
        ("closed", 1),
        ("draining", 1),
        ("small", 101),
        ("stopped", 51),
    ]


def test_a_refusal_for_good_says_so(ledger: Ledger) -> None:
    for budget, amount in never(ledger):
        assert (budget, after(ledger, amount, budget=budget)) == (budget, None)


def test_what_is_held_comes_back_at_the_pace_of_late(ledger: Ledger) -> None:
    ledger.set("b", 100)
    # 40 came back in 100 seconds; 20 are missing.
    spend(ledger, 50, 10)
    age_journal(ledger, 100)
    ledger.reserve(80)
    outcome = refused(ledger, 30)
    assert outcome.reason == "held"
    assert outcome.pace is not None
    assert (outcome.pace.left_us, outcome.pace.freed) == (None, 40)
    assert 100 * SECOND <= outcome.pace.span_us < 160 * SECOND
    found = outcome.error().retry_after
    assert found is not None
    assert 50 <= found < 80 + 80 / SHARE


def test_what_is_held_is_given_back_by_the_end_of_the_window(ledger: Ledger) -> None:
    ledger.set("b", 100, period="hour")
    ledger.reserve(95)
    left(ledger, 5)
    found = after(ledger, 10)
    assert found is not None
    assert found <= 5 + 5 / SHARE


def test_what_is_held_and_never_came_back_is_looked_at_again(ledger: Ledger) -> None:
    ledger.set("b", 100)
    ledger.reserve(95)
    found = after(ledger, 10)
    assert found is not None
    assert UNKNOWN_SECONDS <= found <= UNKNOWN_SECONDS * (1 + 1 / SHARE)
    # What was charged in full has given no room.
    spend(ledger, 5, 5)
    seen = refused(ledger, 10).pace
    assert seen is not None
    assert seen.freed == 0


def test_the_longest_wait_for_holds_is_bounded(ledger: Ledger) -> None:
    ledger.set("b", 1000)
    spend(ledger, 2, 1)
    age_journal(ledger, 1_000_000)
    ledger.reserve(900)
    found = after(ledger, 900 - 1)
    assert found is not None
    assert found <= LONGEST_SECONDS + MOST_SPREAD


def test_only_the_last_changes_count(ledger: Ledger) -> None:
    ledger.set("b", 1000)
    spend(ledger, 500, 0)
    for _ in range(pace.CHANGES):
        ledger.reserve(1)
    ledger.reserve(900)
    seen = refused(ledger, 200).pace
    assert seen is not None
    assert seen.freed == 0


def test_adjustments_give_room_and_repairs_do_not(ledger: Ledger) -> None:
    ledger.set("b", 100)
    ledger.adjust("more", 50)
    ledger.adjust("less", -20)
    ledger.reserve(60)
    seen = refused(ledger, 20).pace
    assert seen is not None
    assert seen.freed == 20
    ledger.put("journal", {"what": "repair"})
    seen = refused(ledger, 20).pace
    assert seen is not None
    assert seen.freed == 0
    ledger.conserved = False


def test_the_pace_is_that_of_the_budget_that_was_short(ledger: Ledger) -> None:
    ledger.set("top", 100, period="hour")
    ledger.set("b", 1000, parent="top", unit=None)
    spend(ledger, 95, 95)
    left(ledger, 600, "top")
    outcome = refused(ledger, 10)
    assert outcome.budget == "top"
    assert outcome.error().retry_after is not None


def test_refusals_of_a_batch_say_when(ledger: Ledger) -> None:
    ledger.set("b", 100, period="hour")
    ledger.set("c", 0)
    spend(ledger, 95, 95)
    left(ledger, 600)
    several = [ledger.request(1), ledger.request(10), ledger.request(1, budget="c")]
    asked = [(request, message_of(request)) for request in several]
    first, second, third = admit_many(ledger.store, ledger.settings, asked, best_effort=True)
    assert isinstance(first, Reserved)
    assert isinstance(second, Refused)
    assert isinstance(third, Refused)
    assert second.error().retry_after is not None
    assert third.error().retry_after is None
    # All or none: what was left out is told what the other was refused for.
    more = [ledger.request(1), ledger.request(10)]
    left_out, _ = admit_many(
        ledger.store, ledger.settings, [(one, message_of(one)) for one in more]
    )
    assert isinstance(left_out, Skipped)
    assert requests.error_of(left_out).retry_after is not None


def test_retries_of_a_refused_client_do_not_prolong_its_block(ledger: Ledger) -> None:
    ledger.set("b", 100, period="hour")
    spend(ledger, 95, 95)
    left(ledger, 600)
    before = {name: rows for name, rows in ledger.dump().items() if name != "refusals"}
    request = ledger.request(10, request_id="order-1")
    first = ledger.admit(request)
    waits = [ledger.admit(request).pace.left_us for _ in range(50)]  # type: ignore[union-attr]
    # The time that is left grows shorter, however often it is asked, and nothing else was written.
    assert isinstance(first, Refused)
    assert waits == sorted(waits, reverse=True)
    assert {name: rows for name, rows in ledger.dump().items() if name != "refusals"} == before
    # The window ends: it fits at once.
    left(ledger, -1)
    ledger.conserved = False
    assert ledger.admit(request) == Reserved(request.reservation_id)


def test_a_full_outbox_says_when(funded: Ledger) -> None:
    error = requests.error_of(Backlogged(7, 5))
    assert isinstance(error, OutboxFull)
    assert error.retry_after is not None
    assert 2 <= error.retry_after <= 3


def look(ledger: Ledger, *lines: tuple[Any, ...], finishing: bool = False) -> Any:
    asked = [Line(*line) for line in lines]
    return admission.outlook(ledger.store, ledger.settings, asked, finishing)


def test_a_look_says_what_an_admission_would(ledger: Ledger) -> None:
    ledger.set("top", 100)
    ledger.set("b", 60, parent="top", unit=None)
    ledger.set("c", None, parent="top", unit=None, soft_stop=500_000)
    ledger.set("d", Share(100_000), parent="top", unit=None)
    ledger.grant("g", 20, "top")
    spend(ledger, 30, 10)
    ledger.reserve(20)
    before = ledger.dump()
    looks: list[Any] = [
        ([("b", 30)], False),
        ([("b", 31)], False),
        ([("c", 90)], False),
        ([("c", 91)], False),
        ([("d", 12)], False),
        ([("d", 13)], False),
        ([("b", 1), ("d", 13)], False),
        ([("b", 30), ("c", 90)], False),
        ([("b", 61)], True),
    ]
    found = [look(ledger, *lines, finishing=finishing) for lines, finishing in looks]
    assert ledger.dump() == before
    for (lines, finishing), outlook in zip(looks, found, strict=True):
        (budget, amount), *more = lines
        request = ledger.request(amount, *more, budget=budget, finishing=finishing)
        outcome = ledger.admit(request)
        assert outlook.admits == bool(outlook) == isinstance(outcome, Reserved), lines
        if isinstance(outcome, Refused):
            shown, told = vars(outlook.error), vars(outcome.error())
            for one in (shown, told):
                one["retry_after"] = one["retry_after"] is not None
            assert shown == told
            assert outlook.as_dict()["refusal"]["reason"] == outcome.reason
        else:
            assert (outlook.error, outlook.retry_after) == (None, None)
            settlement.revoke(ledger.store, ledger.root, request.reservation_id, "cancelled")
        assert json.loads(json.dumps(outlook.as_dict()))["admits"] is outlook.admits


def test_a_look_makes_nothing_of_a_template(ledger: Ledger) -> None:
    ledger.set("top", 100)
    ledger.set("tenant:*", 50, parent="top", unit=None)
    ledger.set("tenant:*/user:*", Share(500_000), parent="tenant:*", unit=None)
    before = ledger.dump()
    assert look(ledger, ("tenant:a", 50))
    assert look(ledger, ("tenant:a/user:7", 25))
    found = look(ledger, ("tenant:a/user:7", 26))
    assert isinstance(found.error, BudgetExceeded)
    assert (found.error.budget, found.error.limit) == ("tenant:a/user:7", 25)
    unknown = look(ledger, ("tenant:a", 1), ("nobody", 1))
    assert isinstance(unknown.error, UnknownBudget)
    assert unknown.error.budget == "nobody"
    assert unknown.as_dict() == {
        "admits": False,
        "refusal": {"error": "UnknownBudget", "budget": "nobody"},
        "retry_after": None,
    }
    assert ledger.dump() == before


def test_a_look_at_a_window_that_nobody_opened(ledger: Ledger) -> None:
    ledger.set("b", 100, period="hour")
    before = ledger.dump()
    assert look(ledger, ("b", 100))
    assert look(ledger, ("b", 101)).retry_after is None
    assert ledger.dump() == before


def test_a_look_sees_that_the_outbox_is_full(funded: Ledger) -> None:
    assert look(funded, ("b", 1))
    funded.reserve(1)
    # Full when it was counted, which was just now; later it is counted anew.
    bound = funded.settings.max_outbox
    funded.put("backlog", {"messages": bound, "counted_us": 2**62})
    full = look(funded, ("b", 1))
    assert isinstance(full.error, OutboxFull)
    assert full.retry_after is not None
    funded.put("backlog", {"counted_us": 1})
    assert look(funded, ("b", 1))
    assert funded.store.read(backlog.seen, funded.root, 1) == 1


def test_a_look_by_two_rules(ledger: Ledger) -> None:
    ledger.set("top", 100)
    ledger.set("b", 60, parent="top", unit=None)
    ledger.set("c", 60, parent="top", unit=None)
    with pytest.raises(PolicyError, match="twice"):
        look(ledger, ("b", 1), ("c", 1, "start"))


def test_a_budget_without_a_window_has_no_pace(ledger: Ledger) -> None:
    ledger.set("b", 100, period="hour")
    ledger.set("c", 100)
    ledger.put("balances", {"window_us": 2**62}, budget="b")
    found = ledger.store.read(pace.paces, ledger.root, ["b", "c", "nobody"])
    assert set(found) == {"c"}
    ledger.conserved = False
    assert isinstance(found["c"], Pace)
    assert ledger.store.read(pace.paces, ledger.root, []) == {}


def test_one_statement_and_a_look_tell_the_same(ledger: Ledger) -> None:
    ledger.set("top", 1000, period="day")
    ledger.set("b", 100, parent="top", unit=None, period="hour")
    for used in (1, 5, 9):
        spend(ledger, 10, used)
    ledger.adjust("less", -3)
    age_journal(ledger, 50)
    ledger.reserve(80)
    by_admission = refused(ledger, 60).pace
    by_look = ledger.store.read(pace.paces, ledger.root, ["b", "top"])["b"]
    assert by_admission is not None
    assert by_admission.freed == by_look.freed == 9 + 5 + 1 + 3
    assert by_admission.left_us is not None
    assert by_look.left_us is not None
    for one, other in (
        (by_look.left_us, by_admission.left_us),
        (by_admission.span_us, by_look.span_us),
    ):
        assert one <= other < one + 60 * SECOND
