"""Admission: all or nothing, once, and exact."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import AlreadyReserved, Refused, Reserved
from celery_budget.errors import PolicyError, RequestConflict, UnknownBudget
from celery_budget.store import balances
from celery_budget.store.balances import WHOLE, Key
from celery_budget.store.schema import budgets
from tests.contract.racers import Beside, wait_for_waiting
from tests.contract.support import RETURNED, Ledger, id_of

MOST = 2**63 - 1


def test_admitted_work_holds_its_estimate_and_has_a_message(funded: Ledger) -> None:
    request = funded.reserve(10)
    assert funded.balance() == (10, 0)
    assert funded.line(request) == (10, 0, 0)
    assert funded.state(request) == "reserved"
    message = funded.message(request)
    assert (message.state, message.task_id, bytes(message.body)) == (
        "due",
        request.task_id,
        b"body",
    )
    assert message.created_us > 1_700_000_000_000_000


#: Last bytes of ids: on PostgreSQL those are admitted by budget_admit, and these by budget_reserve.
WAYS = (lambda last: last % 8 == 0, lambda last: last % 8 > 0)


def test_whichever_way_a_request_is_admitted_it_is_written_alike(funded: Ledger) -> None:
    parent = new_id()
    later = int(time.time() + 3600) * 1_000_000
    requests = [
        funded.request(
            7,
            reservation_id=id_of(way),
            task_id=f"task-{number}",
            deadline_us=later,
            prices="p1",
            shadows='{"v2": 9}',
            parent=parent,
            retries=2,
            unreserved=True,
        )
        for number, way in enumerate(WAYS)
    ]
    for request in requests:
        message = {"due_us": later - 1, "expires_us": later + 1, "rank": 3}
        assert funded.admit(request, **message) == Reserved(request.reservation_id)
    # Of the journal the second entry goes on where the first has ended, or stands by another row.
    differ = {"reservation_id", "request_id", "task_id", "outbox_id", "created_us", "at_us"}
    differ |= {"entry", "reserved_after", "stripe"}
    for table in ("reservations", "lines", "outbox", "journal"):
        first, second = (
            {name: value for name, value in row._asdict().items() if name not in differ}
            for row in funded.rows(table)
            if table != "journal" or row.what == "reserve"
        )
        assert first == second
    assert funded.balance() == (14, 0)


@pytest.mark.postgres
@pytest.mark.parametrize("way", WAYS, ids=["admit", "reserve"])
def test_what_waited_for_the_balance_is_decided_by_what_holds_then(
    racing: Ledger, way: Callable[[int], bool]
) -> None:
    if racing.store.dialect == "sqlite":
        pytest.skip("SQLite has one writer")
    racing.reserve(10)
    with racing.store.transaction() as connection:
        balances.lock_balances(connection, racing.root, [Key("b", 0, WHOLE)])
        asked = Beside(lambda: racing.admit(racing.request(10, reservation_id=id_of(way))))
        wait_for_waiting(racing.store)
        connection.execute(
            budgets.update().where(budgets.c.root == racing.root).values(limit_amount=19)
        )
    assert asked.result() == Refused("b", "tokens", 10, 19, 10, 0, "held", 19)


@pytest.mark.parametrize("amounts", [[100], [99, 1], [50, 50], [0, 100, 0]])
def test_a_budget_fills_to_its_limit_exactly(funded: Ledger, amounts: list[int]) -> None:
    for amount in amounts:
        funded.reserve(amount)
    assert funded.admit(funded.request(1)) == Refused("b", "tokens", 1, 100, 100, 0, "held", 100)


def test_a_refusal_tells_the_figures_and_changes_nothing_but_its_count(funded: Ledger) -> None:
    _, attempt = funded.start(30)
    attempt.record(20)
    attempt.end(RETURNED)
    attempt.close()
    funded.reserve(50)
    before = funded.dump()
    refused = funded.request(31)
    assert funded.admit(refused) == Refused("b", "tokens", 31, 100, 50, 20, "held", 100)
    after = funded.dump()
    [refusal] = funded.rows("refusals")
    assert (refusal.budget, refusal.stage, refusal.requested) == ("b", "draft", 31)
    assert {**after, "refusals": []} == before


def test_a_refusal_that_is_repeated_after_a_lost_answer_counts_once(funded: Ledger) -> None:
    request = funded.request(101)
    assert isinstance(funded.admit(request), Refused)
    assert isinstance(funded.admit(request), Refused)
    assert len(funded.rows("refusals")) == 1


def test_an_unknown_budget_changes_nothing(funded: Ledger) -> None:
    before = funded.dump()
    with pytest.raises(UnknownBudget, match="'c'"):
        funded.admit(funded.request(1, ("c", 1)))
    assert funded.dump() == before


def test_a_refused_request_may_come_again(funded: Ledger) -> None:
    request = funded.request(150)
    assert isinstance(funded.admit(request), Refused)
    funded.set("b", 150)
    assert funded.admit(request) == Reserved(request.reservation_id)


SAME: list[dict[str, Any]] = [{}, {"reservation_id": None}, {"stage": "other", "estimator": "f"}]


@pytest.mark.parametrize("changes", SAME)
def test_the_same_request_comes_out_as_the_first(funded: Ledger, changes: dict[str, Any]) -> None:
    request = funded.reserve(10)
    before = funded.dump()
    new = {"reservation_id": new_id()}
    again = funded.admit(replace(request, **{**changes, **new}))
    assert again == AlreadyReserved(request.reservation_id, request.task_id)
    assert funded.dump() == before


def test_the_same_call_after_a_lost_answer_finds_itself(funded: Ledger) -> None:
    request = funded.reserve(10)
    assert funded.admit(request) == Reserved(request.reservation_id)
    assert funded.balance() == (10, 0)


def test_a_repeat_is_no_refusal_where_the_budget_is_full(funded: Ledger) -> None:
    request = funded.reserve(100)
    again = replace(request, reservation_id=new_id())
    assert isinstance(funded.admit(again), AlreadyReserved)
    funded.set("b", 0)
    assert isinstance(funded.admit(again), AlreadyReserved)


def test_another_request_under_the_same_id_is_a_conflict(funded: Ledger) -> None:
    request = funded.reserve(10, request_id="order-1")
    before = funded.dump()
    with pytest.raises(RequestConflict) as caught:
        funded.admit(replace(request, reservation_id=new_id(), fingerprint="1:other"))
    assert (caught.value.request_id, caught.value.task_id) == ("order-1", request.task_id)
    assert funded.dump() == before


@pytest.mark.parametrize("other", [{"owner": "c"}, {"nesting": 1}, {"request_id": "order-2"}])
def test_another_key_is_another_request(funded: Ledger, other: dict[str, Any]) -> None:
    request = funded.reserve(10, request_id="order-1")
    another = replace(request, reservation_id=new_id(), **other)
    assert funded.admit(another) == Reserved(another.reservation_id)
    assert funded.balance() == (20, 0)


def test_an_id_that_never_ran_may_be_reserved_anew(funded: Ledger) -> None:
    request = funded.reserve(10)
    assert settlement.revoke(funded.store, funded.root, request.reservation_id, "cancelled")
    assert funded.balance() == (0, 0)
    again = replace(request, reservation_id=new_id(), fingerprint="1:other")
    assert funded.admit(again) == Reserved(again.reservation_id)
    assert [funded.state(one) for one in (request, again)] == ["released", "reserved"]


def test_an_id_that_ran_is_taken_for_good(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.end(RETURNED)
    attempt.close()
    again = replace(request, reservation_id=new_id())
    assert funded.admit(again) == AlreadyReserved(request.reservation_id, request.task_id)


def test_several_budgets_are_held_together(funded: Ledger) -> None:
    for name in ("a", "z"):
        funded.set(name, 50)
    request = funded.reserve(10, ("z", 1), ("a", 2))
    assert [funded.balance(name) for name in ("a", "b", "z")] == [(2, 0), (10, 0), (1, 0)]
    attempt = funded.run(request)
    attempt.record(4)
    attempt.end(RETURNED)
    assert [funded.balance(name) for name in ("a", "b", "z")] == [(0, 4), (0, 4), (0, 4)]


@pytest.mark.parametrize("short", ["a", "b", "z"])
def test_several_budgets_all_or_none(funded: Ledger, short: str) -> None:
    for name in ("a", "z"):
        funded.set(name, 100)
    funded.set(short, 5)
    before = funded.dump()
    refused = funded.admit(funded.request(10, ("z", 10), ("a", 10)))
    assert isinstance(refused, Refused)
    assert refused.budget == short
    assert {**funded.dump(), "refusals": []} == before


def test_the_first_short_budget_is_the_one_told(funded: Ledger) -> None:
    funded.set("a", 5)
    refused = funded.admit(funded.request(101, ("a", 6)))
    assert isinstance(refused, Refused)
    assert refused.budget == "b"


def test_one_budget_is_named_once(funded: Ledger) -> None:
    with pytest.raises(PolicyError, match=r"draws on budget 'b' twice"):
        funded.request(60, ("b", 60))


def test_an_unlimited_budget_counts_to_the_end_of_its_column(ledger: Ledger) -> None:
    ledger.set("b", None)
    ledger.reserve(MOST - 5)
    assert ledger.admit(ledger.request(6)) == Refused(
        "b", "tokens", 6, MOST, MOST - 5, 0, "held", MOST
    )
    ledger.reserve(5)
    assert ledger.admit(ledger.request(MOST)) == Refused(
        "b", "tokens", MOST, MOST, MOST, 0, "held", MOST
    )
    assert ledger.balance() == (MOST, 0)


def test_a_delivered_message_is_kept_and_not_published(funded: Ledger) -> None:
    request = funded.request(10, unreserved=True)
    assert isinstance(funded.admit(request, delivered=True), Reserved)
    assert funded.state(request) == "published"
    assert funded.message(request).state == "published"
    assert funded.relay().taken == 0
    funded.run(request)


@pytest.mark.parametrize("ended", [True, False])
def test_what_runs_or_has_ended_is_not_released(funded: Ledger, ended: bool) -> None:
    request, attempt = funded.start(10)
    if ended:
        attempt.end(RETURNED)
        attempt.close()
    before = funded.dump()
    assert not settlement.revoke(funded.store, funded.root, request.reservation_id, "cancelled")
    assert settlement.revoke(funded.store, funded.root, new_id(), "cancelled"), "not ours to keep"
    assert funded.dump() == before
