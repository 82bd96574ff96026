"""Budgets with counters over several rows: exact all the same, and many draw on one at once."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import reconcile, upkeep
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Refused, Reserved
from celery_budget.errors import InvalidBudget
from celery_budget.settings import Settings
from celery_budget.store import Store, balances, journal, requests
from celery_budget.store.balances import WHOLE, Key
from tests.contract.racers import Beside, OneTry, at_once, racing_url, wait_for_waiting
from tests.contract.support import RETURNED, Ledger, admit_many, id_of, message_of

on_postgresql = pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session")
pytestmark = pytest.mark.postgres

STRIPES = 4


@pytest.fixture
def striped(racing: Ledger) -> Ledger:
    """A ledger whose budget ``b`` has 100 tokens over four rows, shared out."""
    racing.set("b", 100, stripes=STRIPES)
    return racing


@pytest.fixture
def impatient(striped: Ledger) -> Iterator[Ledger]:
    """The same ledger for whoever waits no longer than a moment, and tries once."""
    store = OneTry(racing_url(striped.settings.database_url), lock_seconds=0.05)
    yield Ledger(store, replace(striped.settings, lock_seconds=0.05))
    store.dispose()


def at(stripe: int, ledger: Ledger, amount: int, **changes: Any) -> Any:
    """A request that begins with this stripe of four."""
    made = id_of(lambda last: last % STRIPES == stripe)
    return ledger.request(amount, reservation_id=made, **changes)


def admit_all(ledger: Ledger, amount: int = 10) -> int:
    """Admit requests until one is refused; how many were."""
    admitted = 0
    while isinstance(ledger.admit(ledger.request(amount)), Reserved):
        admitted += 1
    return admitted


def admitting(ledger: Ledger, request: Any) -> Callable[[sa.Connection], Any]:
    return lambda connection: requests.reserve(connection, request, message_of(request))


def stripe_of(ledger: Ledger, request: Any) -> int:
    return int(ledger.rows("lines", reservation_id=request.reservation_id)[0].stripe)


@on_postgresql
def test_small_requests_spread_and_the_sum_is_exact(striped: Ledger) -> None:
    assert admit_all(striped, 3) == 33
    assert len({row.stripe for row in striped.rows("lines")}) == STRIPES
    refused = striped.admit(striped.request(3))
    assert isinstance(refused, Refused)
    assert (refused.reserved, refused.spent, refused.limit, refused.reason) == (99, 0, 100, "held")
    striped.reserve(1)
    assert striped.balance() == (100, 0)


@on_postgresql
def test_a_large_request_gathers_from_all(striped: Ledger) -> None:
    striped.reserve(1)
    striped.reserve(90)
    assert isinstance(striped.admit(striped.request(10)), Refused)
    striped.reserve(9)
    assert striped.balance() == (100, 0)


@on_postgresql
def test_two_that_begin_at_different_rows_do_not_wait(striped: Ledger, impatient: Ledger) -> None:
    striped.reserve(4)
    first, second = at(1, striped, 5), at(2, striped, 5)
    with striped.store.transaction() as connection:
        assert admitting(striped, first)(connection) == Reserved(first.reservation_id)
        assert impatient.admit(second) == Reserved(second.reservation_id)
    assert [stripe_of(striped, one) for one in (first, second)] == [1, 2]
    assert striped.balance() == (14, 0)


@on_postgresql
def test_a_row_that_is_locked_is_passed_by(striped: Ledger, impatient: Ledger) -> None:
    striped.reserve(4)
    first, second = at(1, striped, 5), at(1, striped, 5)
    with striped.store.transaction() as connection:
        admitting(striped, first)(connection)
        impatient.admit(second)
    assert [stripe_of(striped, one) for one in (first, second)] == [1, 2]


@on_postgresql
def test_a_refusal_waits_for_nobody(striped: Ledger, impatient: Ledger) -> None:
    with striped.store.transaction() as connection:
        balances.lock_balances(connection, striped.root, [Key("b", 0, WHOLE)])
        assert isinstance(impatient.admit(impatient.request(101)), Refused)


@on_postgresql
def test_a_gathering_waits_for_what_is_open_and_counts_it(striped: Ledger) -> None:
    striped.reserve(4)
    small = at(3, striped, 20)
    with striped.store.transaction() as connection:
        admitting(striped, small)(connection)
        large = Beside(lambda: striped.admit(striped.request(80)))
        wait_for_waiting(striped.store)
    refused = large.result()
    assert isinstance(refused, Refused)
    assert (refused.reserved, refused.reason) == (24, "held")


@on_postgresql
def test_use_beyond_a_share_takes_from_the_others(striped: Ledger) -> None:
    _, attempt = striped.start(10)
    attempt.record(70)
    others = [striped.reserve(10) for _ in range(3)]
    assert isinstance(striped.admit(striped.request(1)), Refused)
    attempt.record(50, key="more")
    assert striped.balance() == (150, 0)
    for one in others:
        settled = striped.run(one)
        settled.record(0)
        settled.end(RETURNED)
        # Room that came back to one row while all together are over is no room.
        assert isinstance(striped.admit(striped.request(1)), Refused)
    attempt.end(RETURNED)
    assert striped.balance() == (0, 120)
    assert isinstance(striped.admit(striped.request(0)), Refused)


@on_postgresql
def test_use_beyond_a_share_waits_for_admissions_and_they_for_it(striped: Ledger) -> None:
    _, attempt = striped.start(10)
    others = [at(stripe, striped, 10) for stripe in range(STRIPES)]
    with striped.store.transaction() as connection:
        for one in others:
            admitting(striped, one)(connection)
        using = Beside(lambda: attempt.record(60))
        wait_for_waiting(striped.store)
    using.result()
    assert striped.balance() == (100, 0)
    assert isinstance(striped.admit(striped.request(1)), Refused)


@on_postgresql
def test_use_that_waited_for_a_row_gives_it_back_to_whoever_waits_for_all(striped: Ledger) -> None:
    """It seemed to fit, and then did not: all rows come before that one."""
    using, other = at(2, striped, 10), at(2, striped, 15)
    striped.admit(using)
    attempt = striped.run(using)
    assert stripe_of(striped, using) == 2
    with striped.store.transaction() as connection:
        admitting(striped, other)(connection)
        recorded = Beside(lambda: attempt.record(30))
        wait_for_waiting(striped.store, 1)
        gathering = Beside(lambda: striped.admit(striped.request(80)))
        wait_for_waiting(striped.store, 2)
    recorded.result()
    assert isinstance(gathering.result(), Refused)
    assert striped.balance() == (45, 0)


@on_postgresql
def test_over_use_beside_admissions_never_lets_one_pass(striped: Ledger) -> None:
    """What the journal tells in the order of its times: no admission brings it above the limit."""
    for turn in range(6):
        striped.set(f"r{turn}", 100, stripes=STRIPES)
        started = [striped.start(5, budget=f"r{turn}")[1] for _ in range(4)]

        def use(attempt: Any) -> None:
            attempt.record(30)

        def ask(budget: str = f"r{turn}") -> Any:
            return striped.admit(striped.request(7, budget=budget))

        at_once([*(lambda one=one: use(one) for one in started), *[ask] * 8])
        total = 0
        rows = striped.store.read(journal.entries, striped.root, f"r{turn}", 1000)
        for row in reversed(rows):
            total += row.reserved + row.spent
            assert row.what != "reserve" or total <= 100


@on_postgresql
@pytest.mark.parametrize("amount", [1, 7, 30])
def test_exactly_what_fits_is_admitted_of_many_at_once(striped: Ledger, amount: int) -> None:
    def ask() -> Any:
        return striped.admit(striped.request(amount))

    calls = 100 // amount + 5
    outcomes = at_once([ask] * min(calls, 24))
    admitted = sum(isinstance(one, Reserved) for one in outcomes) + admit_all(striped, amount)
    assert admitted == 100 // amount


@on_postgresql
def test_a_hierarchy_with_rows_of_its_own_at_each_level(striped: Ledger) -> None:
    striped.set("child", 60, parent="b", stripes=3)
    striped.set("other", None, parent="b", stripes=7)

    def ask(*names: str) -> Any:
        first, *more = names
        return striped.admit(striped.request(4, *((name, 4) for name in more), budget=first))

    asked = [("child",), ("other",), ("other", "child"), ("child", "other")] * 6
    at_once([lambda names=names: ask(*names) for names in asked])
    while any(isinstance(ask(name), Reserved) for name in ("child", "other")):
        pass
    assert striped.balance("b") == (100, 0)
    assert striped.balance("child")[0] <= 60


@on_postgresql
def test_the_number_changes_while_work_is_open(striped: Ledger) -> None:
    stop = threading.Event()

    def work() -> int:
        done, chance = 0, random.Random(7)
        while not stop.is_set():
            request = striped.request(chance.randint(1, 30))
            if isinstance(striped.admit(request), Reserved):
                attempt = striped.run(request)
                attempt.record(0)
                attempt.end(RETURNED)
                done += 1
        return done

    def change() -> int:
        for stripes in (1, 8, 3, 16, 2, 5, 1, 4):
            striped.set("b", 100, stripes=stripes)
        stop.set()
        return 1

    assert all(at_once([*[work] * 3, change]))
    assert striped.balance() == (0, 0)
    assert admit_all(striped, 5) == 20


@on_postgresql
def test_what_is_held_in_rows_that_are_no_more_drawn_on_counts(striped: Ledger) -> None:
    attempts = [striped.start(10)[1] for _ in range(9)]
    striped.set("b", 100, stripes=1)
    assert striped.balance() == (90, 0)
    assert isinstance(striped.admit(striped.request(11)), Refused)
    striped.reserve(10)
    for attempt in attempts:
        attempt.record(10)
        attempt.end(RETURNED)
    assert striped.balance() == (10, 90)
    striped.set("b", 200)
    assert admit_all(striped) == 10


@on_postgresql
def test_a_lower_limit_counts_at_once_and_so_does_a_grant(striped: Ledger) -> None:
    striped.reserve(40)
    striped.set("b", 50)
    assert isinstance(striped.admit(striped.request(11)), Refused)
    striped.grant("g", 30)
    striped.reserve(40)
    striped.put("grants", {"until_us": 1}, key="g")
    assert isinstance(striped.admit(striped.request(1)), Refused)
    striped.set("b", 90)
    assert admit_all(striped, 2) == 5


@on_postgresql
def test_new_work_stops_softly_over_all_rows(striped: Ledger) -> None:
    striped.set("b", 100, soft_stop=500_000)
    assert admit_all(striped, 5) == 10
    striped.reserve(40, finishing=True)
    assert isinstance(striped.admit(striped.request(11, finishing=True)), Refused)
    striped.reserve(10, finishing=True)
    assert isinstance(striped.admit(striped.request(1)), Refused)


@on_postgresql
def test_more_is_taken_back_than_one_row_has_spent(striped: Ledger) -> None:
    for _ in range(8):
        _, attempt = striped.start(10)
        attempt.record(10)
        attempt.end(RETURNED)
    striped.adjust("a", -75)
    assert striped.balance() == (0, 5)
    assert admit_all(striped) == 9
    striped.adjust("b", 60)
    assert striped.balance() == (90, 65)
    assert isinstance(striped.admit(striped.request(0)), Refused)


@on_postgresql
def test_a_batch_draws_on_one_row_or_gathers(striped: Ledger, impatient: Ledger) -> None:
    striped.reserve(4)

    def pairs(count: int, amount: int) -> list[Any]:
        made = [striped.request(amount) for _ in range(count)]
        return [(one, message_of(one)) for one in made]

    few = pairs(2, 5)
    assert all(
        isinstance(one, Reserved) for one in admit_many(striped.store, striped.settings, few)
    )
    assert len({stripe_of(striped, one) for one, _ in few}) == 1
    many = pairs(8, 10)
    admit_many(striped.store, striped.settings, many)
    assert striped.balance() == (94, 0)
    refused = admit_many(striped.store, striped.settings, pairs(2, 5))
    assert not any(isinstance(one, Reserved) for one in refused)
    assert admit_all(striped, 3) == 2


@on_postgresql
def test_a_journal_reads_as_one(striped: Ledger) -> None:
    for amount in range(1, 9):
        striped.reserve(amount)
    assert len({row.stripe for row in striped.rows("journal")}) > 1
    told = reconcile.journal(striped.store, striped.settings, "b", 5)
    assert [(one.entry, one.reserved, one.reserved_after) for one in told] == [
        (8, 8, 36),
        (7, 7, 28),
        (6, 6, 21),
        (5, 5, 15),
        (4, 4, 10),
    ]


@on_postgresql
def test_shares_that_do_not_add_up_are_found_and_made_anew(striped: Ledger) -> None:
    striped.reserve(4)
    striped.put("balances", {"share": 90}, stripe=2)
    [told] = reconcile.reconcile(striped.store, striped.settings).mismatches
    assert "budget 'b' has shares of" in told
    assert len(reconcile.repair(striped.store, striped.settings)) == 1
    assert admit_all(striped, 6) == 16


@on_postgresql
def test_a_budget_that_many_wait_for_is_spread(
    racing: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    racing.set("pinned", 100, stripes=1)
    # The first request of a root makes its count of the outbox, which the next one waits for.
    racing.reserve(1, budget="pinned")
    passes = upkeep.Upkeep(racing.store, racing.settings)
    passes.run_once()
    # One of eight notes that it waits: these.
    waiting = [
        racing.request(1, budget=budget, reservation_id=id_of(lambda last: last % 8 == 0))
        for budget in ("b", "pinned")
    ]
    with racing.store.transaction() as connection:
        for budget in ("b", "pinned"):
            balances.lock_balances(connection, racing.root, [Key(budget, 0)])
        mine = connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        asked = [Beside(lambda one=one: racing.admit(one)) for one in waiting]
        wait_for_waiting(racing.store, 2, behind=mine)
    assert all(isinstance(one.result(), Reserved) for one in asked)
    assert [row.waits for row in racing.rows("balances", budget="b")] == [8]
    monkeypatch.setattr(upkeep, "WAITS_A_SECOND", 0.001)
    assert passes.run_once().spread == ("b",)
    assert [len(racing.rows("balances", budget=name)) for name in ("b", "pinned")] == [4, 1]
    assert admit_all(racing, 3) == 33
    # It was given once; nobody waits any more.
    assert passes.run_once().spread == ()
    off = upkeep.Upkeep(racing.store, replace(racing.settings, auto_stripes=1))
    assert off.run_once().spread == ()


def live_until_killed(settings: Settings) -> None:
    ledger = Ledger(Store(settings.database_url), settings)
    chance = random.Random(os.getpid())
    while True:
        request = ledger.request(chance.randint(1, 40))
        if isinstance(ledger.admit(request), Reserved):
            attempt = ledger.run(request)
            attempt.record(chance.randint(0, 60))
            if chance.random() < 0.9:
                attempt.end(RETURNED)
        ledger.adjust(str(new_id()), -1 if chance.random() < 0.5 else 1)


@on_postgresql
@pytest.mark.slow
def test_processes_that_are_killed_leave_what_adds_up(striped: Ledger) -> None:
    striped.set("b", 10_000, stripes=STRIPES)
    striped.adjust("begin", 1000)
    for _ in range(2):
        before = len(striped.rows("adjustments"))
        running = [
            get_context("spawn").Process(target=live_until_killed, args=(striped.settings,))
            for _ in range(2)
        ]
        for one in running:
            one.start()
        while len(striped.rows("adjustments")) < before + 6:
            pass
        for one in running:
            os.kill(one.pid or 0, signal.SIGKILL)
            one.join()
    # The fixture asserts that balances, journal and shares add up; so does what is left.
    reserved, spent = striped.balance()
    left = 10_000 - reserved - spent
    assert isinstance(striped.admit(striped.request(left + 1)), Refused)
    striped.reserve(left)


def test_a_number_that_cannot_be(ledger: Ledger) -> None:
    for stripes in (0, 129, True, "4"):
        with pytest.raises(InvalidBudget, match="stripes of 'b'"):
            ledger.set("b", 100, stripes=stripes)


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True, scope="session")
def test_on_sqlite_a_number_is_kept_and_changes_nothing(ledger: Ledger) -> None:
    ledger.set("b", 100, stripes=64)
    ledger.reserve(100)
    assert [row.stripe for row in ledger.rows("balances")] == [0]
    assert ledger.rows("budgets")[0].stripes == 64
