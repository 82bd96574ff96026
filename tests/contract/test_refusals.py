"""The decision log: a storm of refusals is counted to the last one and does not grow the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_budget.core.reservations import Refused
from celery_budget.store import Store, refusals
from tests.contract.racers import Processes, at_once, refuse_often
from tests.contract.support import Ledger, admit_many, message_of

STORM = 2000


def counted(ledger: Ledger) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for row in ledger.rows("refusals"):
        key = row.budget, row.reason
        found[key] = found.get(key, 0) + row.count
    return found


def slots(ledger: Ledger) -> int:
    rows = [(row.budget, row.reason) for row in ledger.rows("refusals")]
    return max(rows.count(row) for row in rows)


def size(ledger: Ledger) -> dict[str, int]:
    return {table: len(rows) for table, rows in ledger.dump().items() if table != "refusals"}


@pytest.mark.parametrize("how", ["one by one", "together"])
def test_a_storm_leaves_a_few_rows_and_an_exact_count(funded: Ledger, how: str) -> None:
    before = size(funded)
    # On SQLite each is a transaction of several milliseconds.
    slow = how == "one by one" and funded.store.dialect == "sqlite"
    storm = STORM // 4 if slow else STORM
    requests = [funded.request(101) for _ in range(storm)]
    if how == "together":
        asked = [(request, message_of(request)) for request in requests]
        outcomes: list[Any] = []
        for some in (asked[:500], asked[500:1500], asked[1500:]):
            outcomes += admit_many(funded.store, funded.settings, some, best_effort=True)
    else:
        outcomes = [funded.admit(request) for request in requests]
    assert all(isinstance(outcome, Refused) for outcome in outcomes)
    assert counted(funded) == {("b", "exhausted"): storm}
    assert slots(funded) == len(funded.rows("refusals")) == refusals.SLOTS
    assert size(funded) == before
    # A sample is kept: what was refused last in each.
    ids = {request.reservation_id for request in requests}
    for row in funded.rows("refusals"):
        assert row.refusal_id in ids
        assert (row.requested, row.limit_amount, row.reserved, row.spent) == (101, 100, 0, 0)
        assert row.slot == row.refusal_id.bytes[-1] % refusals.SLOTS


def test_each_budget_and_reason_has_its_own_count(ledger: Ledger) -> None:
    ledger.set("held", 100)
    ledger.reserve(60, budget="held")
    ledger.set("blocked", 0)
    ledger.set("closed", 100)
    ledger.close("closed")
    ledger.set("draining", 100)
    ledger.reserve(1, budget="draining")
    ledger.close("draining", drain=True)
    expected = {
        ("held", "held"): (50, 5),
        ("held", "exhausted"): (101, 4),
        ("blocked", "blocked"): (1, 3),
        ("closed", "closed"): (1, 2),
        ("draining", "draining"): (1, 1),
    }
    requests = [
        ledger.request(amount, budget=budget)
        for (budget, _), (amount, count) in expected.items()
        for _ in range(count)
    ]
    for request in requests:
        ledger.admit(request)
    assert counted(ledger) == {key: count for key, (_, count) in expected.items()}
    asked = [
        (again, message_of(again))
        for again in (ledger.request(50, budget="held") for _ in range(3))
    ]
    admit_many(ledger.store, ledger.settings, asked, best_effort=True)
    assert counted(ledger)["held", "held"] == 8


def test_a_repeat_after_a_lost_answer_is_not_counted_again(funded: Ledger) -> None:
    request = funded.request(101)
    asked = [(request, message_of(request))]
    for _ in range(3):
        funded.admit(request)
        admit_many(funded.store, funded.settings, asked, best_effort=True)
    assert funded.refused() == 1
    funded.admit(replace(request, reservation_id=funded.request().reservation_id))
    assert funded.refused() == 2


def test_storms_at_once_are_counted_exactly(funded: Ledger) -> None:
    funded.set("c", 100)
    stores = [Store(funded.settings.database_url) for _ in range(4)]
    storms = [Ledger(store, funded.settings) for store in stores]

    def storm(ledger: Ledger, names: str) -> None:
        for _ in range(25):
            for name in names:
                ledger.admit(ledger.request(101, budget=name))
        requests = [ledger.request(101, budget=name) for name in names * 25]
        asked = [(request, message_of(request)) for request in requests]
        admit_many(ledger.store, ledger.settings, asked, best_effort=True)

    at_once(
        [
            lambda ledger=ledger, names=names: storm(ledger, names)
            for ledger in storms
            for names in ("bc", "cb")
        ]
    )
    for store in stores:
        store.dispose()
    assert counted(funded) == {("b", "exhausted"): 400, ("c", "exhausted"): 400}
    assert slots(funded) <= refusals.SLOTS


def test_storms_of_several_processes_are_counted_exactly(funded: Ledger) -> None:
    started = Processes(3, refuse_often, funded.settings, 200)
    assert started.results() == [200] * 3
    assert counted(funded) == {("b", "exhausted"): 600}
    assert slots(funded) == refusals.SLOTS
