"""New requests that wait for budget: parked once, bounded, in fair order, admitted or given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import admission, parking, reconcile, settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    AlreadyReserved,
    Crowded,
    GivenUp,
    Parked,
    Refused,
    Released,
    Reserved,
    ReserveRequest,
    Skipped,
)
from celery_budget.errors import BudgetExceeded, ParkingFull, RequestConflict, UnknownBudget
from celery_budget.store import continuations, parked, schema
from tests.contract.racers import at_once
from tests.contract.support import RETRIED, RETURNED, Ledger, Swept, message_of
from tests.messages import Told

AGES_AGO = 1


def park(ledger: Ledger, amount: int = 10, *more: Any, **changes: Any) -> ReserveRequest:
    """Ask for what does not fit, and is to wait."""
    message = {name: changes.pop(name) for name in ("expires_us",) if name in changes}
    request = ledger.request(amount, *more, parks=True, **changes)
    assert isinstance(ledger.admit(request, **message), Parked)
    return request


def waits(ledger: Ledger) -> list[str]:
    return [row.task_id for row in ledger.rows("parked")]


def order(ledger: Ledger, *requests: ReserveRequest) -> list[int]:
    """Raise the limit step by step; in which order these were admitted, by their numbers."""
    names = {request.task_id: number for number, request in enumerate(requests)}
    admitted: list[int] = []
    while len(admitted) < len(requests):
        ledger.set("p", ledger.standing("p").limit + 10)
        assert ledger.sweep().admitted == 1
        left = set(waits(ledger))
        admitted += [
            number
            for task_id, number in names.items()
            if task_id not in left and number not in admitted
        ]
    return admitted


@contextmanager
def statements(ledger: Ledger) -> Iterator[list[str]]:
    said: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(statement)

    sa.event.listen(ledger.store.engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        sa.event.remove(ledger.store.engine, "before_cursor_execute", note)


def test_what_does_not_fit_is_parked_and_holds_nothing(funded: Ledger) -> None:
    held = funded.reserve(95)
    request = park(funded)
    [row] = funded.rows("parked")
    assert (row.task_id, row.budget, row.reason, row.amount) == (request.task_id, "b", "held", 10)
    assert funded.balance() == (95, 0)
    assert (funded.rows("refusals"), len(funded.rows("reservations"))) == ([], 1)
    settlement.revoke(funded.store, funded.root, held.reservation_id, "cancelled")
    assert funded.sweep() == Swept(1, ())
    assert (funded.state(request), funded.balance()) == ("reserved", (10, 0))
    assert funded.message(request).state == "due"
    funded.run(request)


def test_what_fits_is_not_parked(funded: Ledger) -> None:
    request = funded.reserve(10, parks=True)
    assert (waits(funded), funded.state(request)) == ([], "reserved")


def test_a_repeat_is_the_one_that_waits(funded: Ledger) -> None:
    funded.set("b", 5)
    request = park(funded)
    before = funded.dump()
    [row] = funded.rows("parked")
    again = replace(request, reservation_id=new_id())
    assert funded.admit(again) == Parked(row.parked_id)
    assert funded.admit(replace(again, parks=False)) == Parked(row.parked_id), "it is accepted"
    with pytest.raises(RequestConflict):
        funded.admit(replace(again, fingerprint="1:other"))
    assert funded.dump() == before
    # There is room now: it waits for the sweep all the same, and does not run twice.
    funded.set("b", 100)
    assert funded.admit(again) == Parked(row.parked_id)
    assert funded.sweep().admitted == 1
    assert funded.admit(again) == AlreadyReserved(request.reservation_id, request.task_id)
    assert funded.balance() == (10, 0)


def test_many_repeats_at_once_are_one(racing: Ledger) -> None:
    racing.set("b", 5)
    request = racing.request(10, parks=True)
    calls = [lambda: racing.admit(replace(request, reservation_id=new_id())) for _ in range(5)]
    assert len(set(at_once(calls))) == 1
    assert waits(racing) == [request.task_id]


def test_beyond_the_bound_the_refusal_is_raised(funded: Ledger) -> None:
    funded.set("b", 5)
    funded.settings = replace(funded.settings, max_parked=2)
    first = park(funded)
    park(funded)
    before = {**funded.dump(), "refusals": []}
    with pytest.raises(ParkingFull) as raised:
        funded.admit(funded.request(10, parks=True))
    assert isinstance(raised.value, BudgetExceeded)
    assert (raised.value.bound, raised.value.budget, raised.value.requested) == (2, "b", 10)
    assert {**funded.dump(), "refusals": []} == before
    assert funded.refused() == 1
    assert isinstance(funded.admit(replace(first, reservation_id=new_id())), Parked)
    assert isinstance(funded.admit(funded.request(10), continuation=True), Parked), "it goes on"


def test_what_cannot_be_worked_out_is_an_error(funded: Ledger) -> None:
    before = funded.dump()
    with pytest.raises(UnknownBudget):
        funded.admit(funded.request(1, budget="nobody's", parks=True))
    assert funded.dump() == before


def settle(ledger: Ledger, holder: ReserveRequest) -> None:
    attempt = ledger.run(holder)
    attempt.record(50)
    attempt.end(RETURNED)


def expire(ledger: Ledger, holder: ReserveRequest) -> None:
    ledger.put("outbox", {"expires_us": 1}, reservation_id=holder.reservation_id)
    ledger.relay()


def open_window(ledger: Ledger, holder: ReserveRequest) -> None:
    ledger.age()


BACK: dict[str, Callable[[Ledger, ReserveRequest], object]] = {
    "settlement": settle,
    "limit": lambda ledger, holder: ledger.set("b", 150),
    "no limit": lambda ledger, holder: ledger.set("b", None),
    "grant": lambda ledger, holder: ledger.grant("k", 50, until_us=ledger.now() + 10**9),
    "release": lambda ledger, holder: settlement.revoke(
        ledger.store, ledger.root, holder.reservation_id, "cancelled"
    ),
    "expiry": expire,
    "window": open_window,
}


@pytest.mark.parametrize("how", BACK)
def test_it_is_admitted_when_budget_comes_back(ledger: Ledger, how: str) -> None:
    ledger.set("b", 100, period="hour")
    holder = ledger.reserve(90)
    request = park(ledger, 40)
    assert ledger.sweep() == Swept(0, ())
    BACK[how](ledger, holder)
    assert ledger.sweep().admitted == 1
    assert ledger.state(request) == "reserved"


def test_an_adjustment_gives_back(funded: Ledger) -> None:
    funded.adjust("more", 90)
    request = park(funded, 40)
    assert funded.sweep().admitted == 0
    funded.adjust("less", -50)
    assert funded.sweep().admitted == 1
    assert funded.state(request) == "reserved"


def test_owners_take_turns(ledger: Ledger) -> None:
    ledger.set("p", 0)
    for name in ("a", "c", "d"):
        ledger.set(name, None, parent="p")
    flood = [park(ledger, budget="a") for _ in range(4)]
    others = [park(ledger, budget=name) for name in ("c", "d", "c")]
    # Two of the first owner, which came first, then each in turn.
    assert order(ledger, *flood, *others) == [0, 1, 4, 5, 2, 6, 3]


def test_what_goes_on_comes_before_what_is_new(ledger: Ledger) -> None:
    ledger.set("p", 0)
    ledger.set("a", None, parent="p")
    new = park(ledger, budget="a")
    goes_on = ledger.request(10, budget="a", finishing=True)
    assert isinstance(ledger.admit(goes_on, continuation=True), Parked)
    assert order(ledger, new, goes_on) == [1, 0]


def test_what_waits_for_another_budget_by_now_joins_its_queue(ledger: Ledger) -> None:
    ledger.set("p", 5)
    ledger.set("a", 5, parent="p")
    request = park(ledger, budget="a")
    assert [row.budget for row in ledger.rows("parked")] == ["a"]
    ledger.set("a", 100)
    assert ledger.sweep().admitted == 0
    assert [row.budget for row in ledger.rows("parked")] == ["p"]
    ledger.set("p", 100)
    assert ledger.sweep().admitted == 1
    assert ledger.state(request) == "reserved"


def test_what_draws_on_another_parent_by_now_is_tried_anew(ledger: Ledger) -> None:
    ledger.set("p", 5)
    ledger.set("a", 100, parent="p")
    request = park(ledger, budget="a")
    ledger.set("a", parent=None)
    assert ledger.sweep().admitted == 1
    assert ledger.state(request) == "reserved"


def test_a_small_one_passes_a_large_one_for_a_while_only(funded: Ledger) -> None:
    holder = funded.reserve(50)
    large = park(funded, 60)
    passing = funded.reserve(20)
    assert funded.sweep() == Swept(0, ())
    funded.put("parked", {"created_us": AGES_AGO})
    assert funded.sweep() == Swept(0, ())
    before = funded.dump()
    refused = funded.admit(funded.request(10))
    assert refused == Refused("b", "tokens", 10, 100, 70, 0, "queued", 100)
    assert {**funded.dump(), "refusals": []} == before
    assert funded.refused() == 1
    small = park(funded)
    assert funded.sweep() == Swept(0, ()), "what came after it waits, too"
    assert isinstance(funded.admit(funded.request(10, finishing=True), continuation=True), Reserved)
    for one in (holder, passing):
        settlement.revoke(funded.store, funded.root, one.reservation_id, "cancelled")
    assert funded.sweep() == Swept(2, ())
    assert (funded.state(large), funded.state(small)) == ("reserved", "reserved")
    funded.reserve(10)


def test_what_waits_for_another_budget_passes_nothing_that_goes_ahead(ledger: Ledger) -> None:
    ledger.set("p", 100)
    ledger.set("a", 5, parent="p")
    ledger.set("c", 1000, parent="p")
    holder = ledger.reserve(50, budget="c")
    large = park(ledger, 60, budget="c")
    ledger.put("parked", {"created_us": AGES_AGO})
    small = park(ledger, budget="a")
    assert ledger.sweep().admitted == 0
    ledger.set("a", 100)
    assert ledger.sweep().admitted == 0
    assert {(row.budget, row.reason) for row in ledger.rows("parked")} == {
        ("p", "held"), ("p", "queued"),
    }  # fmt: skip
    settlement.revoke(ledger.store, ledger.root, holder.reservation_id, "cancelled")
    assert ledger.sweep().admitted == 2
    assert (ledger.state(large), ledger.state(small)) == ("reserved", "reserved")


def test_nothing_is_kept_free_for_longer_than_a_sweep_that_runs(funded: Ledger) -> None:
    funded.reserve(50)
    park(
        funded,
        60,
    )
    funded.put("parked", {"created_us": AGES_AGO})
    funded.sweep()
    assert isinstance(funded.admit(funded.request(10)), Refused)
    funded.put("parked", {"ahead_us": funded.now() - 1})
    funded.reserve(10)


def test_what_is_too_large_for_the_rest_of_the_window_keeps_nobody_out(funded: Ledger) -> None:
    funded.adjust("used", 45)
    park(funded, 60)
    funded.put("parked", {"created_us": AGES_AGO})
    assert funded.sweep() == Swept(0, ())
    assert [row.ahead_us for row in funded.rows("parked")] == [None]
    funded.reserve(10)


def test_an_attempt_that_waits_for_its_own_hold_keeps_nobody_out(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    attempt.record(55)
    _, written = funded.retry(request, attempt)
    assert isinstance(written, Parked)
    attempt.end(RETRIED)
    # With what that has used, which does not come back, this one does not fit either.
    park(funded, 50)
    funded.put("parked", {"created_us": AGES_AGO})
    assert funded.sweep() == Swept(0, ())
    assert [row.ahead_us for row in funded.rows("parked")] == [None, None]
    funded.reserve(10)


def test_a_cancelled_one_never_runs(funded: Ledger) -> None:
    funded.set("b", 5)
    request = park(funded)
    cancelled = settlement.cancel(funded.store, funded.settings, request.task_id)
    assert cancelled == Released(request.task_id, "released")
    funded.set("b", 100)
    assert funded.sweep() == Swept(0, (request.task_id,))
    assert (waits(funded), funded.row(request).reason) == ([], "cancelled")
    assert funded.balance() == (0, 0)


def test_past_its_deadline_it_is_given_up_and_told_once(funded: Ledger) -> None:
    funded.set("b", 5)
    request = park(funded)
    funded.put("parked", {"deadline_us": 1, "created_us": 7})
    heard: list[GivenUp] = []

    def hear(given_up: GivenUp) -> None:
        heard.append(given_up)
        # In no transaction: the ledger can be asked, and an error is not the sweep's.
        assert funded.state(request) == "released"
        raise RuntimeError("a receiver that fails")

    funded.set("b", 100)
    for _ in range(2):
        looked = parking.run_once(funded.store, funded.settings, hear)
    assert (looked.admitted, looked.given_up) == (0, 0)
    assert heard == [GivenUp(request.task_id, "shop.draft", "b", request.request_id, "b", 10, 7)]
    assert funded.row(request).reason == "park_expired"
    assert funded.sweep() == Swept(0, (request.task_id,))
    assert funded.balance() == (0, 0)


@pytest.mark.parametrize("says", ["setting", "park_us", "deadline_us", "expires_us"])
def test_when_it_is_given_up(funded: Ledger, says: str) -> None:
    funded.set("b", 5)
    funded.settings = replace(funded.settings, park_seconds=600)
    now = funded.now()
    changes = {
        "setting": {},
        "park_us": {"park_us": 60_000_000},
        "deadline_us": {"deadline_us": now + 60_000_000},
        "expires_us": {"expires_us": now + 60_000_000},
    }[says]
    park(funded, **changes)
    [row] = funded.rows("parked")
    waits_us = 600_000_000 if says == "setting" else 60_000_000
    assert waits_us <= row.deadline_us - now < waits_us + 30_000_000


def test_two_sweeps_at_once_admit_each_once(racing: Ledger) -> None:
    racing.set("b", 5)
    requests = [park(racing) for _ in range(8)]
    racing.set("b", 60)
    looked = at_once([lambda: parking.run_once(racing.store, racing.settings)] * 3)
    rest = parking.run_once(racing.store, racing.settings)
    assert sum(one.admitted for one in looked) + rest.admitted == 6
    assert racing.balance() == (60, 0)
    assert waits(racing) == [one.task_id for one in requests[6:]]
    assert len(racing.rows("outbox")) == 6


def test_a_sweep_does_not_wait_for_another(racing: Ledger) -> None:
    if racing.store.dialect == "sqlite":
        pytest.skip("SQLite has one writer")
    racing.set("b", 5)
    racing.set("other", 5)
    park(racing)
    other = park(racing, budget="other")
    for name in ("b", "other"):
        racing.set(name, 100)
    [row] = [row for row in racing.rows("parked") if row.budget == "b"]
    with racing.store.transaction() as connection:
        assert continuations.try_parked(connection, racing.root, row.parked_id, "b", 5000) is True
        at_it = threading.Thread(
            target=lambda: parking.run_once(racing.store, racing.settings), daemon=True
        )
        at_it.start()
        at_it.join(30)
        assert not at_it.is_alive()
        assert racing.state(other) == "reserved"
    assert racing.sweep() == Swept(0, ())
    assert racing.balances("b", "other") == [(10, 0), (10, 0)]


def test_a_cancel_beside_the_sweep(racing: Ledger) -> None:
    for _ in range(5):
        racing.set("b", 5)
        request = park(racing)
        racing.set("b", 100)
        at_once(
            [
                lambda: parking.run_once(racing.store, racing.settings),
                lambda request=request: settlement.cancel(
                    racing.store, racing.settings, request.task_id
                ),
            ]
        )
        assert (waits(racing), racing.state(request)) == ([], "released")
        assert racing.balance() == (0, 0)


def fill(ledger: Ledger, count: int) -> None:
    """Park that many more of the same kind as the one that is."""
    [row] = ledger.rows("parked")

    def copy(connection: sa.Connection) -> None:
        rows = [
            {**row._mapping, "parked_id": new_id(), "task_id": f"task {number}"}
            for number in range(count)
        ]
        connection.execute(schema.parked.insert(), rows)

    ledger.store.run(copy)


@pytest.mark.parametrize("aged", [False, True])
def test_how_much_waits_does_not_make_a_sweep_dearer(funded: Ledger, aged: bool) -> None:
    funded.reserve(95)
    park(funded)
    fill(funded, 9)
    if aged:
        funded.put("parked", {"created_us": AGES_AGO})
    funded.sweep()
    with statements(funded) as few:
        parking.run_once(funded.store, funded.settings)
    [_, *rest] = funded.rows("parked")
    for one in rest:
        funded.store.run(parked.unpark, funded.root, one.parked_id)
    fill(funded, 9_999)
    if aged:
        funded.sweep()
    with statements(funded) as many:
        looked = parking.run_once(funded.store, funded.settings)
    assert (looked.admitted, looked.waits, looked.more) == (0, True, False)
    assert many == few
    assert len(few) <= 8


def test_what_comes_back_at_once_is_admitted_in_portions(funded: Ledger) -> None:
    funded.set("b", 0)
    request = park(funded, 1)
    for _ in range(parking.LIMIT + 4):
        park(funded, 1)
    funded.set("b", 1000)
    looked = parking.run_once(funded.store, funded.settings)
    assert (looked.admitted, looked.more) == (parking.LIMIT, True)
    assert funded.state(request) == "reserved"
    looked = parking.run_once(funded.store, funded.settings)
    assert (looked.admitted, looked.more) == (5, False)
    assert not parking.run_once(funded.store, funded.settings).waits


def test_all_budgets_that_wait_are_looked_at(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "PAGE", 2)
    names = [f"budget {number}" for number in range(5)]
    for name in names:
        ledger.set(name, 5)
        park(ledger, budget=name)
        ledger.set(name, 100)
    assert ledger.sweep().admitted == 5


def admit_all(ledger: Ledger, *requests: ReserveRequest, **how: Any) -> list[Any]:
    units = how.pop("units", range(len(requests)))
    publications = [
        admission.Publication(request, message_of(request), unit)
        for request, unit in zip(requests, units, strict=True)
    ]
    return admission.admit_many(ledger.store, ledger.settings, publications, **how)


def test_in_a_batch_what_does_not_fit_waits_and_turns_away_nothing(funded: Ledger) -> None:
    large, small = funded.request(101, parks=True), funded.request(30)
    waiting, reserved = admit_all(funded, large, small)
    assert (isinstance(waiting, Parked), isinstance(reserved, Reserved)) == (True, True)
    assert waits(funded) == [large.task_id]
    again = [replace(one, reservation_id=new_id()) for one in (large, small)]
    assert admit_all(funded, *again) == [
        waiting, AlreadyReserved(small.reservation_id, small.task_id),
    ]  # fmt: skip
    assert (funded.balance(), funded.rows("refusals")) == ((30, 0), [])


def test_in_a_batch_that_is_turned_away_nothing_waits(funded: Ledger) -> None:
    large, small, refused = (
        funded.request(101, parks=True), funded.request(5, parks=True), funded.request(102),
    )  # fmt: skip
    outcomes = admit_all(funded, large, small, refused)
    assert [type(one) for one in outcomes] == [Skipped, Skipped, Refused]
    assert (waits(funded), funded.rows("reservations")) == ([], [])


def test_a_canvas_is_admitted_whole_or_refused(funded: Ledger) -> None:
    two = [funded.request(60, parks=True) for _ in range(2)]
    outcomes = admit_all(funded, *two, units=[1, 1])
    assert [type(one) for one in outcomes] == [Skipped, Refused]
    assert (waits(funded), funded.rows("reservations")) == ([], [])


def test_what_fits_of_a_partial_batch_is_admitted_and_the_rest_waits(funded: Ledger) -> None:
    three = [funded.request(60, parks=True), funded.request(60, parks=True), funded.request(70)]
    outcomes = admit_all(funded, *three, partial=True)
    assert [type(one) for one in outcomes] == [Reserved, Parked, Refused]
    assert waits(funded) == [three[1].task_id]


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_that_would_park_too_much_is_refused(funded: Ledger, count: int) -> None:
    funded.settings = replace(funded.settings, max_parked=1)
    park(funded, 101)
    outcomes = admit_all(funded, *(funded.request(102, parks=True) for _ in range(count)))
    assert isinstance(outcomes[0], Crowded)
    assert len(waits(funded)) == 1
    assert funded.refused() == count


def test_in_a_batch_nothing_new_passes_what_goes_ahead(funded: Ledger) -> None:
    funded.reserve(50)
    park(funded, 60)
    funded.put("parked", {"created_us": AGES_AGO})
    funded.sweep()
    outcomes = admit_all(funded, funded.request(10), funded.request(10, parks=True), partial=True)
    assert [type(one) for one in outcomes] == [Refused, Parked]
    assert outcomes[0] == Refused("b", "tokens", 10, 100, 50, 0, "queued", 100)


def test_what_waits_is_counted_by_budget_and_listed(ledger: Ledger) -> None:
    for name in ("a", "b"):
        ledger.set(name, 5)
    requests = [park(ledger, budget=name) for name in ("b", "a", "b")]
    ledger.put("parked", {"created_us": ledger.now() - 90_000_000}, task_id=requests[2].task_id)
    queued = reconcile.report(ledger.store, ledger.settings).parked
    assert [(one.budget, one.requests) for one in queued] == [("a", 1), ("b", 2)]
    assert 90 <= queued[1].oldest_seconds < 180
    shown = reconcile.parked(ledger.store, ledger.settings, 10)
    assert [one.task_id for one in shown] == [requests[n].task_id for n in (1, 0, 2)]
    assert (shown[0].budget, shown[0].amount, shown[0].reason) == ("a", 10, "exhausted")
    [found] = [reconcile.find_parked(ledger.store, ledger.settings, shown[1].parked_id)]
    assert found == shown[1]
    assert reconcile.find_parked(ledger.store, ledger.settings, "nobody's") is None


@pytest.mark.parametrize("event", ["parked.failed", "parked.give_up_failed"])
def test_what_fails_of_what_is_parked_is_told_and_put_off(
    funded: Ledger, told: Told, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    funded.set("b", 5)
    request = park(funded)
    [row] = funded.rows("parked")

    def locked(*_: object) -> None:
        raise ConnectionError("locked")

    if event == "parked.failed":
        funded.set("b", 100)
        monkeypatch.setattr(parking.continuations, "try_parked", locked)
        fields = {"parked_id": str(row.parked_id), "error_type": "ConnectionError"}
    else:
        funded.put("parked", {"deadline_us": 1})
        monkeypatch.setattr(parking.continuations, "give_up", locked)
        fields = {"task_id": request.task_id}
    assert funded.sweep() == Swept(0, ())
    assert told(event) == [fields]
    assert len(funded.rows("parked")) == 1
