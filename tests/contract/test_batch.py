"""Several requests admitted together: what comes of each, and what it costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from celery_budget import settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    START,
    AlreadyReserved,
    Conflict,
    Line,
    Refused,
    Reserved,
    ReserveRequest,
    Skipped,
    Tried,
    Unknown,
)
from celery_budget.errors import PolicyError, StoreError
from celery_budget.store.canvases import undone
from celery_budget.store.requests import reserve
from tests.contract.support import RETURNED, Ledger, admit_many, message_of

SKIPPED = Skipped()


def admit(ledger: Ledger, *requests: ReserveRequest, best_effort: bool = False) -> list[Tried]:
    asked = [(request, message_of(request)) for request in requests]
    return admit_many(ledger.store, ledger.settings, asked, best_effort=best_effort)


def reserved(*requests: ReserveRequest) -> list[Tried]:
    return [Reserved(request.reservation_id) for request in requests]


def held(ledger: Ledger) -> set[str]:
    """The task ids of all that is reserved."""
    return {row.task_id for row in ledger.rows("reservations")}


@contextmanager
def statements(ledger: Ledger) -> Iterator[list[str]]:
    """What is said to the database meanwhile."""
    said: list[str] = []

    def note(connection: object, cursor: object, statement: str, *more: object) -> None:
        said.append(statement)

    event.listen(ledger.store._engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(ledger.store._engine, "before_cursor_execute", note)


@pytest.mark.parametrize("best_effort", [False, True])
def test_all_are_reserved_with_their_messages(funded: Ledger, best_effort: bool) -> None:
    requests = [funded.request(amount) for amount in (50, 30, 20)]
    assert admit(funded, *requests, best_effort=best_effort) == reserved(*requests)
    assert funded.balance() == (100, 0)
    assert [funded.line(request) for request in requests] == [(50, 0, 0), (30, 0, 0), (20, 0, 0)]
    assert {funded.message(request).state for request in requests} == {"due"}
    assert funded.relay().published == 3
    for request in requests:
        assert funded.run(request).end(RETURNED)
    assert funded.balance() == (0, 100)


def test_nothing_is_asked(funded: Ledger) -> None:
    with statements(funded) as said:
        assert admit(funded) == []
    assert said == []


def test_all_or_none(funded: Ledger) -> None:
    first, second, third = (funded.request(amount) for amount in (60, 50, 1))
    before = funded.dump()
    # What the whole asked for: less than that waits for its own others, for ever.
    short = Refused("b", "tokens", 111, 100, 0, 0, "exhausted", 100)
    assert admit(funded, first, second, third) == [SKIPPED, short, SKIPPED]
    after = funded.dump()
    assert funded.refused() == 1
    assert {name for name in after if after[name] != before[name]} == {"refusals"}


def test_each_that_fits_in_their_order(funded: Ledger) -> None:
    requests = [funded.request(amount) for amount in (60, 50, 40, 1)]
    outcomes = admit(funded, *requests, best_effort=True)
    assert outcomes == [
        Reserved(requests[0].reservation_id),
        Refused("b", "tokens", 50, 100, 60, 0, "held", 100),
        Reserved(requests[2].reservation_id),
        Refused("b", "tokens", 1, 100, 100, 0, "held", 100),
    ]
    assert funded.balance() == (100, 0)
    assert held(funded) == {requests[0].task_id, requests[2].task_id}
    assert funded.refused() == 2


@pytest.mark.parametrize("best_effort", [False, True])
def test_each_outcome_has_its_place(funded: Ledger, best_effort: bool) -> None:
    funded.set("closed", 10)
    funded.close("closed")
    known = funded.reserve(10)
    repeated = replace(known, reservation_id=new_id())
    other = replace(known, reservation_id=new_id(), fingerprint="1:other")
    fits = funded.request(10)
    requests = [
        fits,
        repeated,
        other,
        funded.request(1, budget="unknown"),
        funded.request(1, budget="closed"),
        funded.request(91),
    ]
    outcomes = admit(funded, *requests, best_effort=best_effort)
    assert outcomes == [
        Reserved(fits.reservation_id) if best_effort else SKIPPED,
        AlreadyReserved(known.reservation_id, known.task_id),
        Conflict(known.request_id, "b", known.task_id),
        Unknown("unknown"),
        Refused("closed", "tokens", 1, 10, 0, 0, "closed", 10),
        Refused("b", "tokens", 91, 100, 20, 0, "held", 100)
        if best_effort
        else Refused("b", "tokens", 101, 100, 10, 0, "exhausted", 100),
    ]
    assert funded.balance() == (20 if best_effort else 10, 0)
    assert held(funded) == {known.task_id} | ({fits.task_id} if best_effort else set())


def test_one_that_is_there_already_does_not_stand_in_the_way_of_all(funded: Ledger) -> None:
    known = funded.reserve(90)
    fits = funded.request(10)
    outcomes = admit(funded, replace(known, reservation_id=new_id()), fits)
    assert outcomes == [AlreadyReserved(known.reservation_id, known.task_id), *reserved(fits)]


@pytest.mark.parametrize("best_effort", [False, True])
def test_a_request_that_comes_twice_is_one(funded: Ledger, best_effort: bool) -> None:
    request = funded.request(60)
    again = replace(request, reservation_id=new_id())
    other = funded.request(40)
    outcomes = admit(funded, request, again, request, other, best_effort=best_effort)
    assert outcomes == [
        Reserved(request.reservation_id),
        AlreadyReserved(request.reservation_id, request.task_id),
        Reserved(request.reservation_id),
        Reserved(other.reservation_id),
    ]
    assert funded.balance() == (100, 0)
    assert len(funded.rows("outbox")) == 2


@pytest.mark.parametrize("best_effort", [False, True])
def test_a_request_that_comes_twice_is_refused_twice(funded: Ledger, best_effort: bool) -> None:
    request = funded.request(101)
    fits = funded.request(1)
    twice = replace(request, reservation_id=new_id())
    whole = 101 if best_effort else 102
    short = Refused("b", "tokens", whole, 100, 0, 0, "exhausted", 100)
    outcomes = admit(funded, request, twice, fits, fits, best_effort=best_effort)
    rest = reserved(fits, fits) if best_effort else [SKIPPED, SKIPPED]
    assert outcomes == [short, short, *rest]
    assert funded.refused() == 2
    assert held(funded) == ({fits.task_id} if best_effort else set())


@pytest.mark.parametrize("best_effort", [False, True])
def test_two_requests_with_one_id_conflict(funded: Ledger, best_effort: bool) -> None:
    request = funded.request(10)
    other = replace(request, reservation_id=new_id(), fingerprint="1:other")
    first, second = admit(funded, request, other, best_effort=best_effort)
    assert first == (Reserved(request.reservation_id) if best_effort else SKIPPED)
    assert second == Conflict(request.request_id, "b", request.task_id)


@pytest.mark.parametrize("best_effort", [False, True])
def test_a_batch_that_is_repeated_after_a_lost_answer_changes_nothing(
    funded: Ledger, best_effort: bool
) -> None:
    requests = [funded.request(amount) for amount in (60, 20, 20)]
    asked = [*requests, *([funded.request(70)] if best_effort else [])]
    outcomes = admit(funded, *asked, best_effort=best_effort)
    before = funded.dump()
    again = admit(funded, *asked, best_effort=best_effort)
    if best_effort:
        # What the batch itself holds by now is what the last one is short of.
        assert replace(again.pop(), reserved=0) == replace(outcomes.pop(), reserved=0)
    assert again == outcomes == reserved(*requests)
    after = funded.dump()
    del before["refusals"], after["refusals"]
    assert after == before
    assert funded.refused() == int(best_effort)


def test_what_was_released_since_is_not_admitted_by_a_late_repeat(funded: Ledger) -> None:
    kept, gone = funded.request(10), funded.request(20)
    admit(funded, kept, gone)
    settlement.revoke(funded.store, funded.root, gone.reservation_id, "cancelled")
    assert admit(funded, kept, gone) == reserved(kept, gone)
    assert funded.balance() == (10, 0)
    anew = replace(gone, reservation_id=new_id())
    assert admit(funded, anew) == reserved(anew)


def test_a_repeat_of_all_tells_what_is_reserved_even_where_one_conflicts(funded: Ledger) -> None:
    kept, gone = funded.request(10), funded.request(20)
    admit(funded, kept, gone)
    settlement.revoke(funded.store, funded.root, gone.reservation_id, "cancelled")
    other = replace(gone, reservation_id=new_id(), fingerprint="1:other")
    admit(funded, other)
    assert admit(funded, kept, gone) == [
        Reserved(kept.reservation_id),
        Conflict(gone.request_id, "b", gone.task_id),
    ]


def test_each_goes_by_all_budgets_above_it(ledger: Ledger) -> None:
    ledger.set("org", 100)
    ledger.set("left", 80, parent="org")
    ledger.set("right", None, parent="org")
    requests = [
        ledger.request(70, budget="left"),
        ledger.request(40, budget="right"),
        ledger.request(20, budget="left"),
        ledger.request(30, budget="right"),
    ]
    outcomes = admit(ledger, *requests, best_effort=True)
    assert outcomes == [
        Reserved(requests[0].reservation_id),
        Refused("org", "tokens", 40, 100, 70, 0, "held", 100),
        Refused("left", "tokens", 20, 80, 70, 0, "held", 80),
        Reserved(requests[3].reservation_id),
    ]
    assert ledger.balances("left", "right", "org") == [(70, 0), (30, 0), (100, 0)]


def test_each_has_its_lines_units_and_charges(ledger: Ledger) -> None:
    ledger.set("b", 100)
    ledger.set("cost", 1000, unit="usd")
    ledger.set("rate", 2, unit="requests", period="month")
    lines = (Line("b", 10), Line("cost", 300), Line("rate", 1, START))
    requests = [ledger.request(lines=lines) for _ in range(3)]
    outcomes = admit(ledger, *requests, best_effort=True)
    assert outcomes == [
        *reserved(*requests[:2]),
        Refused("rate", "requests", 1, 2, 2, 0, "held", 2),
    ]
    ledger.run(requests[0])
    assert ledger.balances("b", "cost", "rate") == [(20, 0), (600, 0), (1, 1)]


def test_the_soft_stop_is_for_what_is_not_finishing(ledger: Ledger) -> None:
    ledger.set("b", 100, soft_stop=500_000)
    requests = [ledger.request(60), ledger.request(60, finishing=True)]
    outcomes = admit(ledger, *requests, best_effort=True)
    assert outcomes == [
        Refused("b", "tokens", 60, 100, 0, 0, "exhausted", 50),
        Reserved(requests[1].reservation_id),
    ]


@pytest.mark.parametrize("best_effort", [False, True])
def test_budgets_and_windows_are_made_before(ledger: Ledger, best_effort: bool) -> None:
    ledger.set("tenants", 100, period="day")
    ledger.set("tenant:*", 30, parent="tenants", period="hour")
    for name in ("tenants", "old"):
        ledger.set(name, 100, period="day")
        ledger.put("balances", {"window_us": 0, "end_us": 1}, budget=name)
    requests = [
        ledger.request(20, budget="tenant:a"),
        ledger.request(20, budget="tenant:b"),
        ledger.request(20, budget="tenant:a"),
        ledger.request(20, budget="old"),
    ]
    outcomes = admit(ledger, *requests, best_effort=best_effort)
    short = Refused("tenant:a", "tokens", 20, 30, 20, 0, "held", 30)
    if best_effort:
        assert outcomes == [*reserved(*requests[:2]), short, *reserved(requests[3])]
        assert ledger.balances("tenants", "tenant:a", "tenant:b", "old") == [
            (40, 0),
            (20, 0),
            (20, 0),
            (20, 0),
        ]
    else:
        whole = Refused("tenant:a", "tokens", 40, 30, 0, 0, "exhausted", 30)
        assert outcomes == [SKIPPED, SKIPPED, whole, SKIPPED]
        assert {row.name for row in ledger.rows("budgets") if row.template} == {
            "tenant:a",
            "tenant:b",
        }
        # Nothing is drawn from it, so it needs no window.
        assert ledger.windows("old") == [(0, 1)]


def test_nothing_is_made_for_a_request_that_cannot_be(ledger: Ledger) -> None:
    ledger.set("tenant:*", 30)
    request = ledger.request(1, ("unknown", 1), budget="tenant:a")
    assert admit(ledger, request, best_effort=True) == [Unknown("unknown")]
    assert len(ledger.rows("budgets")) == 1


def test_what_is_no_request_at_all_fails_the_batch_and_changes_nothing(funded: Ledger) -> None:
    funded.set("below", 10, parent="b")
    mixed = funded.request(lines=(Line("below", 1), Line("b", 1, START)))
    before = funded.dump()
    with pytest.raises(PolicyError):
        admit(funded, funded.request(1), mixed, best_effort=True)
    assert funded.dump() == before


def _several(ledger: Ledger, count: int, what: str) -> list[ReserveRequest]:
    if what == "refused":
        return [ledger.request(10**6, budget=f"c{one % 7}") for one in range(count)]
    if what == "unknown":
        return [ledger.request(1, budget=f"unknown{one}") for one in range(count)]
    return [ledger.request(1, ("r", 1), budget=f"c{one % 7}") for one in range(count)]


@pytest.mark.parametrize("what", ["reserved", "refused", "unknown", "repeated"])
def test_the_number_of_statements_does_not_depend_on_that_of_requests(
    ledger: Ledger, what: str
) -> None:
    ledger.set("org", None)
    ledger.set("r", None, unit="requests")
    for one in range(7):
        ledger.set(f"c{one}", None if what != "refused" else 10, parent="org")
    ledger.reserve(1, budget="org")
    # Counted once in two seconds, by one admission; here by none.
    ledger.put("backlog", {"counted_us": 2**62})
    counted = {}
    for count in (2, 500):
        requests = _several(ledger, count, what)
        if what == "repeated":
            admit(ledger, *requests)
            requests = [replace(request, reservation_id=new_id()) for request in requests]
        with statements(ledger) as said:
            outcomes = admit(ledger, *requests, best_effort=True)
        kinds = {type(outcome).__name__.lower() for outcome in outcomes}
        assert kinds == {what.replace("repeated", "alreadyreserved")}
        counted[count] = len(said)
    assert counted[2] == counted[500] <= 12, counted


def test_a_thousand_requests_take_little_memory(ledger: Ledger) -> None:
    ledger.set("org", None)
    for one in range(40):
        ledger.set(f"c{one}", 1000, parent="org")
    requests = [ledger.request(7, budget=f"c{one % 40}") for one in range(1000)]
    tracemalloc.start()
    outcomes = admit(ledger, *requests)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcomes == reserved(*requests)
    assert ledger.balance("org") == (7000, 0)
    assert peak < 100_000_000
    assert admit(ledger, *requests) == outcomes


@pytest.mark.parametrize("raises", [None, ZeroDivisionError, KeyboardInterrupt, StoreError])
def test_a_look_leaves_no_savepoint_and_no_trace(
    ledger: Ledger, raises: type[BaseException] | None
) -> None:
    """Whatever ends it: what goes on in the same transaction is not in its savepoint."""
    ledger.set("b", 100)

    def look(connection: Connection) -> None:
        with undone(connection):
            reserve(connection, ledger.request(1), message_of(ledger.request(1)))
            if raises is StoreError:
                connection.execute(text("SELECT no_such_column FROM budget_lines"))
            if raises is not None:
                raise raises

    def look_and_go_on(connection: Connection) -> None:
        errors = (DBAPIError,) if raises is StoreError else raises
        with pytest.raises(errors) if errors else nullcontext():
            look(connection)
        connection.exec_driver_sql("SAVEPOINT mine")
        with pytest.raises(DBAPIError, match=r"budget_undone"):
            connection.exec_driver_sql("RELEASE SAVEPOINT budget_undone")
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT mine")
        reserve(connection, last, message_of(last))

    last = ledger.request(2)
    ledger.store.run(look_and_go_on)
    assert (held(ledger), ledger.balance()) == ({last.task_id}, (2, 0))
