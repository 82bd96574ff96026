"""Closing: a budget takes nothing new, and goes when what is open has ended."""

from __future__ import annotations

import pytest

from celery_budget import settlement, upkeep
from celery_budget.core.reservations import AlreadyReserved, Closed, Parked, Refused, Reserved
from celery_budget.errors import HoldsOpen, UnknownBudget
from celery_budget.store import budgets, declaring
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger

DAY_US = 86_400_000_000


@pytest.fixture
def tree(ledger: Ledger) -> Ledger:
    """``user`` below ``tenant`` below ``org``."""
    ledger.set("org", 1000)
    ledger.set("tenant", 500, parent="org")
    ledger.set("user", 100, parent="tenant")
    return ledger


def state_of(ledger: Ledger, name: str = "b") -> str:
    return ledger.standing(name).state


@pytest.mark.parametrize("drain", [True, False])
def test_what_nothing_draws_on_is_closed_at_once(funded: Ledger, drain: bool) -> None:
    funded.start(10)[1].end(RETURNED)
    assert funded.close(drain=drain) == "closed"
    assert state_of(funded) == "closed"
    before = funded.dump()
    for again in (True, False):
        assert funded.close(drain=again) == "closed"
    assert funded.dump() == before


@pytest.mark.parametrize("finishing", [True, False])
@pytest.mark.parametrize("amount", [0, 1])
def test_a_closed_budget_takes_nothing(funded: Ledger, amount: int, finishing: bool) -> None:
    funded.close()
    assert funded.admit(funded.request(amount, finishing=finishing)) == Refused(
        "b", "tokens", amount, 100, 0, 0, "closed", 100
    )


@pytest.mark.parametrize("state", ["reserved", "published", "running", "waiting", "parked"])
def test_open_holds_keep_it_open(tree: Ledger, state: str) -> None:
    request = tree.reserve(0 if state == "reserved" else 10, budget="user")
    if state == "published":
        tree.relay()
    if state in ("running", "waiting", "parked"):
        attempt = tree.run(request)
        if state == "parked":
            attempt.record(1)
            tree.set("org", 10)
        if state != "running":
            tree.retry(request, attempt)
            attempt.end(RETRIED)
    assert len(tree.rows("parked")) == (state == "parked")
    tree.reserve(1, budget="tenant")
    for name, holds in (("user", 1), ("tenant", 2), ("org", 2)):
        before = tree.dump()
        with pytest.raises(HoldsOpen) as caught:
            tree.close(name)
        assert (caught.value.budget, caught.value.holds) == (name, holds)
        assert tree.dump() == before
        assert tree.close(name, drain=True) == "draining"


def test_holds_are_counted_by_requests(tree: Ledger) -> None:
    tree.set("other", 100, parent="org")
    for _ in range(3):
        tree.reserve(1, ("other", 2), budget="user")
    with pytest.raises(HoldsOpen) as caught:
        tree.close("org")
    assert caught.value.holds == 3


def test_holds_of_windows_that_are_over_count(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    request = ledger.reserve(1)
    ledger.age("b", DAY_US)
    with pytest.raises(HoldsOpen):
        ledger.close()
    assert settlement.revoke(ledger.store, ledger.root, request.reservation_id, "cancelled")
    assert ledger.close() == "closed"


def test_holds_of_former_children_count(tree: Ledger) -> None:
    request = tree.reserve(10, budget="user")
    tree.set("user", 100, parent=None)
    with pytest.raises(HoldsOpen):
        tree.close("org")
    assert tree.close("org", drain=True) == "draining"
    tree.reserve(5, budget="user")
    tree.run(request).end(RETURNED)
    assert sorted(tree.upkeep().closed) == ["org"]


def test_an_unknown_budget_cannot_be_closed_or_opened(ledger: Ledger) -> None:
    ledger.set("t:*", 5)
    for name in ("nobody", "t:1"):
        with pytest.raises(UnknownBudget):
            ledger.close(name)
        with pytest.raises(UnknownBudget):
            ledger.reopen(name)


# Draining.


@pytest.mark.parametrize("level", ["user", "tenant", "org"])
def test_what_drains_takes_nothing_new(tree: Ledger, level: str) -> None:
    request = tree.reserve(10, budget="user")
    assert tree.close(level, drain=True) == "draining"
    limit = tree.standing(level).limit or 0
    for amount, finishing in ((0, False), (1, False), (1, True)):
        assert tree.admit(tree.request(amount, budget="user", finishing=finishing)) == Refused(
            level, "tokens", amount, limit, 10, 0, "draining", limit
        )
    parked = tree.request(1, budget="user", finishing=True)
    assert isinstance(tree.admit(parked, continuation=True), Parked)
    assert tree.sweep().admitted == 0
    again = tree.request(10, budget="user", task_id=request.task_id)
    assert tree.admit(again) == AlreadyReserved(request.reservation_id, request.task_id)


def test_what_is_open_goes_on_to_its_end(tree: Ledger) -> None:
    request, attempt = tree.start(10, budget="user")
    waits = tree.reserve(20, budget="user")
    for name in ("user", "tenant", "org"):
        assert tree.close(name, drain=True) == "draining"
    attempt.record(15)
    following, written = tree.retry(request, attempt)
    assert written == Reserved(request.reservation_id)
    assert tree.balances("user", "tenant", "org") == [(45, 0)] * 3
    attempt.end(RETRIED)
    second = tree.run(following)
    tree.lapse(following)
    assert tree.recover().rerun == 1
    assert not second.end(RETURNED)
    assert tree.upkeep().closed == ()
    tree.run(following).end(RETURNED)
    assert tree.upkeep().closed == ()
    tree.run(waits).end(RAISED)
    assert sorted(tree.upkeep().closed) == ["org", "tenant", "user"]
    assert [state_of(tree, name) for name in ("user", "tenant", "org")] == ["closed"] * 3
    assert tree.balances("user", "tenant", "org") == [(0, 25)] * 3
    assert tree.upkeep().closed == ()


def test_a_retry_that_was_parked_goes_on(tree: Ledger) -> None:
    request, attempt = tree.start(60, budget="user")
    attempt.record(50)
    following, written = tree.retry(request, attempt)
    assert isinstance(written, Parked)
    attempt.end(RETRIED)
    assert tree.close("user", drain=True) == "draining"
    assert tree.upkeep().closed == ()
    tree.set("user", 110)
    assert tree.sweep().admitted == 1
    tree.run(following).end(RAISED)
    assert tree.upkeep().closed == ("user",)


def test_the_limit_counts_while_it_drains(tree: Ledger) -> None:
    request, attempt = tree.start(60, budget="user")
    tree.close("user", drain=True)
    tree.set("user", 0)
    attempt.record(1)
    _, written = tree.retry(request, attempt)
    assert isinstance(written, Parked)
    attempt.end(RETRIED)


@pytest.mark.parametrize("end", ["settled", "released", "lost"])
def test_it_closes_when_the_last_has_ended(funded: Ledger, end: str) -> None:
    request = funded.reserve(10)
    funded.close(drain=True)
    assert funded.upkeep().closed == ()
    if end == "released":
        assert settlement.revoke(funded.store, funded.root, request.reservation_id, "cancelled")
    else:
        attempt = funded.run(request, late_ack=False)
        assert funded.upkeep().closed == ()
        if end == "lost":
            funded.lapse(request)
            assert funded.recover().lost == 1
        else:
            attempt.end(RETURNED)
    assert funded.state(request) == end
    assert funded.upkeep().closed == ("b",)
    assert funded.admit(funded.request(1)).reason == "closed"  # type: ignore[union-attr]


def test_draining_is_idempotent_and_may_turn_to_closing(funded: Ledger) -> None:
    request = funded.reserve(10)
    funded.close(drain=True)
    before = funded.dump()
    assert funded.close(drain=True) == "draining"
    with pytest.raises(HoldsOpen):
        funded.close()
    assert funded.dump() == before
    funded.run(request).end(RETURNED)
    assert funded.close() == "closed"


def test_late_usage_counts_in_what_is_closed(funded: Ledger) -> None:
    _, attempt = funded.start(10)
    attempt.record(4)
    attempt.end(RETURNED)
    funded.close()
    attempt.record(8)
    assert funded.balance() == (0, 12)
    assert state_of(funded) == "closed"


# Parents, and back.


@pytest.mark.parametrize("level", ["tenant", "org"])
def test_closing_a_parent_blocks_what_is_below(tree: Ledger, level: str) -> None:
    tree.close(level)
    limit = tree.standing(level).limit or 0
    assert tree.admit(tree.request(1, budget="user")) == Refused(
        level, "tokens", 1, limit, 0, 0, "closed", limit
    )
    if level == "tenant":
        tree.reserve(1, budget="org")
    tree.set("user", 100, parent=None)
    tree.reserve(1, budget="user")


def test_closing_a_child_leaves_its_parent_open(tree: Ledger) -> None:
    tree.close("user")
    tree.reserve(1, budget="tenant")


@pytest.mark.parametrize("state", ["draining", "closed"])
def test_what_is_reopened_takes_new_work(funded: Ledger, state: str) -> None:
    request = funded.reserve(10)
    funded.close(drain=True)
    if state == "closed":
        funded.run(request).end(RETURNED)
        assert funded.upkeep().closed == ("b",)
    assert state_of(funded) == state
    assert funded.reopen()
    assert not funded.reopen(), "it is open already"
    funded.reserve(20)
    assert funded.upkeep().closed == ()
    assert state_of(funded) == "open"


def test_what_was_reopened_meanwhile_is_not_closed_by_the_sweep(funded: Ledger) -> None:
    """The sweep has seen it drain; then it was reopened, and nothing is held."""
    assert funded.close(drain=True) == "closed"
    funded.reopen()
    state = funded.store.run(budgets.close, funded.root, "b", True, True)
    assert state == state_of(funded) == "open"
    funded.reserve(1)
    funded.close(drain=True)
    assert funded.store.run(budgets.close, funded.root, "b", True, True) == "draining"


def test_new_terms_do_not_reopen(funded: Ledger) -> None:
    funded.close()
    funded.set("b", 500, period="day")
    assert state_of(funded) == "closed"
    assert funded.store.run(declaring.set_budget, funded.root, "b", {"limit": 7}, True).limit == 7
    assert state_of(funded) == "open"
    funded.reserve(7)


def test_a_grant_does_not_reopen(funded: Ledger) -> None:
    funded.close()
    funded.grant("k", 50)
    assert funded.admit(funded.request(1)) == Refused("b", "tokens", 1, 150, 0, 0, "closed", 150)


def test_a_closed_budget_is_a_parent_only_of_what_waits_for_it(tree: Ledger) -> None:
    tree.close("org")
    tree.set("new", 5, parent="org")
    assert tree.admit(tree.request(1, budget="new")) == Refused(
        "org", "tokens", 1, 1000, 0, 0, "closed", 1000
    )
    tree.reopen("org")
    tree.reserve(1, budget="new")


def test_a_delivery_of_what_ended_finds_it_closed(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.end(RETURNED)
    attempt.close()
    funded.close()
    assert funded.deliver(request) == Closed("settled")


def test_budgets_that_cannot_be_closed_yet_keep_no_other_from_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "LIMIT", 2)
    requests = {}
    for name in "abcde":
        ledger.set(name, 10)
        requests[name] = ledger.reserve(1, budget=name)
        assert ledger.close(name, drain=True) == "draining"
    assert settlement.revoke(ledger.store, ledger.root, requests["e"].reservation_id, "cancelled")
    sweep = upkeep.Upkeep(ledger.store, ledger.settings)
    closed = [sweep.run_once().closed for _ in range(3)]
    assert closed == [(), (), ("e",)]
    for request in requests.values():
        settlement.revoke(ledger.store, ledger.root, request.reservation_id, "cancelled")
    assert {name for _ in range(4) for name in sweep.run_once().closed} == set("abcd")
