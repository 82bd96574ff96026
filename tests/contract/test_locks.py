"""Who waits for whom on PostgreSQL, shown with transactions that are held open on purpose.

SQLite has one lock for all that write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import settlement
from celery_budget.core.reservations import Refused, Reserved
from celery_budget.errors import HoldsOpen, StoreError
from celery_budget.settings import Settings
from celery_budget.store import (
    Store,
    budgets,
    declaring,
    journal,
    migrate,
    repairs,
    requests,
    windows,
)
from celery_budget.store.balances import Key, lock_balances
from tests.contract.racers import Beside, OneTry, at_once, racing_url, wait_for_waiting
from tests.contract.support import RETURNED, Ledger, admit_many, message_of

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session"),
]


@pytest.fixture
def impatient(racing: Ledger) -> Iterator[Ledger]:
    """The same ledger for whoever waits no longer than a moment, and tries once."""
    store = OneTry(racing_url(racing.settings.database_url), lock_seconds=0.05)
    yield Ledger(store, replace(racing.settings, lock_seconds=0.05))
    store.dispose()


@contextmanager
def open_transaction(ledger: Ledger, *calls: Callable[[sa.Connection], Any]) -> Iterator[None]:
    """Hold a transaction open in which ``calls`` were made, then commit it."""
    with ledger.store.transaction() as connection:
        for call in calls:
            call(connection)
        yield


def holding(ledger: Ledger, budget: str) -> Callable[[sa.Connection], Any]:
    key = Key(budget, ledger.windows(budget)[-1][0])
    return lambda connection: lock_balances(connection, ledger.root, [key])


def reserving(ledger: Ledger, budget: str) -> Callable[[sa.Connection], Any]:
    request = ledger.request(1, budget=budget)
    return lambda connection: requests.reserve(connection, request, message_of(request))


def test_a_held_balance_holds_up_nobody_elses(racing: Ledger, impatient: Ledger) -> None:
    racing.set("org", None)
    for name in ("x", "y"):
        racing.set(name, None, parent="org")
    racing.set("tenant:*", 10)
    with open_transaction(racing, holding(racing, "x")):
        impatient.reserve(1, budget="y")
        impatient.reserve(1, budget="b")
        impatient.reserve(1, budget="tenant:new")
        asked = [(one, message_of(one)) for one in (impatient.request(1, budget="y"),)]
        admit_many(impatient.store, impatient.settings, asked)
        _, attempt = impatient.start(1, budget="y")
        attempt.end(RETURNED)
    assert racing.balances("x", "y", "org", "b", "tenant:new") == [
        (0, 0),
        (2, 1),
        (2, 1),
        (1, 0),
        (1, 0),
    ]


@pytest.mark.parametrize("made", ["window", "template"])
def test_what_is_made_and_not_committed_holds_up_nobody_else(
    racing: Ledger, impatient: Ledger, made: str
) -> None:
    racing.set("x", None, period="hour")
    racing.set("y", None, period="hour")
    racing.set("tenant:*", None)
    for name in ("x", "y"):
        racing.age(name, 24 * 3_600_000_000)
    prepare: Callable[[sa.Connection], Any]
    if made == "window":
        prepare = lambda connection: windows.open_window(connection, racing.root, "x")  # noqa: E731
    else:
        prepare = lambda connection: declaring.ready(connection, racing.root, ["tenant:a"])  # noqa: E731
    with open_transaction(racing, prepare):
        impatient.reserve(1)
        # Their own first use of a window, in a transaction of its own.
        impatient.reserve(1, budget="y")
        if made == "window":
            with pytest.raises(StoreError) as caught:
                impatient.reserve(1, budget="x")
            assert caught.value.retryable
    impatient.reserve(1, budget="x")
    assert racing.balances("b", "x", "y") == [(1, 0)] * 3
    assert len(racing.windows("x")) == 2


def test_a_refusal_waits_for_nobody(racing: Ledger, impatient: Ledger) -> None:
    racing.reserve(60)
    with open_transaction(racing, holding(racing, "b")):
        assert isinstance(impatient.admit(impatient.request(41)), Refused)


def test_whoever_waits_too_long_may_try_again(racing: Ledger, impatient: Ledger) -> None:
    racing.set("child", None, parent="b")
    waiting = impatient.reserve(10)
    _, attempt = impatient.start(10)
    root = racing.root
    request = impatient.request(1, budget="child")
    ask = [(request, message_of(request))]
    run = impatient.store.run
    key = (root, waiting.reservation_id, "revoked")
    calls: list[Callable[[], Any]] = [
        lambda: impatient.admit(request),
        lambda: impatient.admit(request, continuation=True),
        lambda: admit_many(impatient.store, impatient.settings, ask),
        lambda: attempt.record(50),
        lambda: attempt.extend(5),
        lambda: attempt.end(RETURNED),
        lambda: settlement.revoke(impatient.store, *key),
        lambda: settlement.cancel(impatient.store, impatient.settings, waiting.task_id),
        lambda: impatient.adjust("k", 1),
        lambda: impatient.set("b", 50),
        lambda: impatient.set("b", 100, period="day"),
        lambda: impatient.close("b", drain=True),
        lambda: run(journal.fold, root, "b", 0, 0, -1_000_000),
        lambda: run(repairs.rebuild, root, Key("b", 0), "test"),
    ]
    before = racing.dump()
    with open_transaction(racing, holding(racing, "b")):
        for call in calls:
            with pytest.raises(StoreError) as caught:
                call()
            assert caught.value.retryable
    after = racing.dump()
    assert after == before
    assert impatient.admit(request) == Reserved(request.reservation_id)


def test_a_lock_that_is_had_in_time_is_waited_for(racing: Ledger) -> None:
    with open_transaction(racing, holding(racing, "b")):
        ask = Beside(lambda: racing.reserve(1))
        wait_for_waiting(racing.store)
    ask.result()
    assert racing.balance() == (1, 0)


def test_a_parent_that_changes_under_whoever_waits_is_the_new_one(racing: Ledger) -> None:
    """Its balance sorts before what is locked already: everything is given back first."""
    racing.set("d", 10)
    racing.set("a", 10)
    racing.set("c", None, parent="d")
    request = racing.request(3, budget="c")
    batch = [racing.request(2, budget="c"), racing.request(1, budget="d")]
    asked = [(one, message_of(one)) for one in batch]
    other = racing.request(4, budget="c")

    def move(connection: sa.Connection) -> None:
        declaring.set_budget(connection, racing.root, "c", {"parent": "a"})

    with open_transaction(racing, move):
        waiting = [
            Beside(lambda: racing.admit(request)),
            Beside(lambda: admit_many(racing.store, racing.settings, asked)),
            Beside(lambda: racing.admit(other, continuation=True)),
        ]
        wait_for_waiting(racing.store, 3)
    assert waiting[0].result() == Reserved(request.reservation_id)
    assert waiting[1].result() == [Reserved(one.reservation_id) for one in batch]
    assert waiting[2].result() == Reserved(other.reservation_id)
    assert racing.balances("a", "c", "d") == [(9, 0), (9, 0), (1, 0)]


def test_a_parent_that_was_closed_meanwhile_refuses(racing: Ledger) -> None:
    racing.set("c", None, parent="b")
    with open_transaction(
        racing, lambda connection: budgets.close(connection, racing.root, "b", False)
    ):
        ask = Beside(lambda: racing.admit(racing.request(1, budget="c")))
        wait_for_waiting(racing.store)
    assert isinstance(ask.result(), Refused)
    assert racing.rows("reservations") == []


def test_a_closing_waits_for_an_admission_into_a_window_that_has_ended_since(
    racing: Ledger,
) -> None:
    racing.set("short", 100, period="hour")
    soon = racing.now() + 300_000
    racing.put("balances", {"end_us": soon}, budget="short")

    def close() -> str:
        try:
            return racing.close("short")
        except HoldsOpen:
            return "open"

    with open_transaction(racing, reserving(racing, "short")):
        assert racing.now() < soon, "this machine is too slow for this test"
        while racing.now() <= soon:
            pass
        closing = Beside(close)
        wait_for_waiting(racing.store)
    assert closing.result() == "open"
    assert racing.standing("short").state == "open"


def test_of_one_request_twice_the_second_waits_for_the_first(racing: Ledger) -> None:
    request = racing.request(60)
    again = replace(request, reservation_id=racing.request().reservation_id)
    with open_transaction(
        racing, lambda connection: requests.reserve(connection, request, message_of(request))
    ):
        waiting = [
            Beside(lambda: racing.admit(again)),
            Beside(lambda: admit_many(racing.store, racing.settings, [(again, message_of(again))])),
        ]
        wait_for_waiting(racing.store, 2)
    for one in waiting:
        found = one.result()
        [outcome] = found if isinstance(found, list) else [found]
        assert outcome.reservation_id == request.reservation_id
    assert racing.balance() == (60, 0)


@pytest.mark.usefixtures("store_url")
def test_a_server_of_another_isolation_level_decides_the_same(postgres_url: str) -> None:
    """There a statement by itself would not see what was committed while it waited."""
    made = Store(postgres_url)
    made.run(migrate.upgrade)
    made.run(_isolate)
    made.dispose()
    store = Store(postgres_url)
    ledger = Ledger(store, Settings(database_url=postgres_url))
    ledger.set("b", 100)
    ledger.set("t:*", 5)
    with open_transaction(ledger, lambda connection: _lower(connection, ledger.root)):
        beside = Beside(lambda: ledger.admit(ledger.request(50)))
        wait_for_waiting(store)
    assert beside.result() == Refused("b", "tokens", 50, 10, 0, 0, "exhausted", 10)
    at_once([lambda: ledger.reserve(1, budget="t:1")] * 4)
    assert ledger.balances("b", "t:1") == [(0, 0), (4, 0)]
    store.dispose()


def _lower(connection: sa.Connection, root: str) -> None:
    declaring.set_budget(connection, root, "b", {"limit": 10})


def _isolate(connection: sa.Connection) -> None:
    name = connection.engine.url.database
    level = "'repeatable read'"
    connection.exec_driver_sql(
        f'ALTER DATABASE "{name}" SET default_transaction_isolation TO {level}'
    )
