"""Runs in place: admitted and claimed at once, ended and closed at once, on both paths alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    AlreadyReserved,
    Closed,
    Conflict,
    Line,
    Outcome,
    Refused,
    ReserveRequest,
    Unknown,
)
from celery_budget.errors import StoreError
from celery_budget.recovery import Recovered
from celery_budget.settlement import Attempt
from celery_budget.store import Store, in_place
from tests.contract.support import Ledger

DONE = Outcome("returned")


@pytest.fixture(params=["at once", "general"])
def place(request: pytest.FixtureRequest, funded: Ledger, monkeypatch: Any) -> Ledger:
    """A ledger where runs start by one statement, where it can, and one where they never do."""
    if request.param == "general":
        if funded.store.dialect == "sqlite":
            pytest.skip("SQLite has no other path")
        monkeypatch.setattr(in_place, "start_at_once", lambda *args, **how: None)
        monkeypatch.setattr("celery_budget.store.at_once.end", lambda *args, **how: None)
    return funded


def started(ledger: Ledger, amount: int = 10, **changes: Any) -> tuple[ReserveRequest, Attempt]:
    request = ledger.request(amount, **changes)
    attempt = ledger.start_in_place(request)
    assert isinstance(attempt, Attempt)
    return request, attempt


def test_it_holds_its_estimate_while_it_runs(place: Ledger) -> None:
    request, attempt = started(place)
    assert place.balance() == (10, 0)
    [reservation] = place.rows("reservations")
    assert (reservation.state, reservation.attempts, reservation.deliveries) == ("running", 1, 1)
    [row] = place.rows("attempts")
    assert (row.attempt, row.claim_id, row.worker) == (1, attempt.claim_id, "caller@host")
    assert (row.late_ack, row.queue, row.publishes) == (False, None, None)
    assert 0 <= row.lease_until_us - row.started_us - place.settings.lease_us < 10_000_000
    assert place.rows("outbox") == []
    assert place.message(request) is None


@pytest.mark.parametrize(("used", "spent"), [(4, 4), (None, 10), (25, 25)])
def test_its_end_settles_and_closes_it(place: Ledger, used: int | None, spent: int) -> None:
    _, attempt = started(place)
    if used is not None:
        attempt.record(used)
    assert attempt.end(DONE)
    assert place.balance() == (0, spent)
    [row] = place.rows("attempts")
    assert (row.outcome, row.lease_until_us, row.payload) == ("returned", None, None)
    [reservation] = place.rows("reservations")
    assert (reservation.state, reservation.unmetered) == ("settled", used is None)


@pytest.mark.parametrize("kind", ["raised", "ignored", "rejected", "replaced", "retried"])
def test_whatever_ends_it_is_charged_for_what_it_used(place: Ledger, kind: str) -> None:
    _, attempt = started(place)
    attempt.record(3)
    assert attempt.end(Outcome(kind, error="E"))
    assert place.balance() == (0, 3)
    [row] = place.rows("attempts")
    assert (row.outcome, row.lease_until_us, row.error) == (kind, None, "E")


def test_it_ends_once(place: Ledger) -> None:
    _, attempt = started(place)
    assert attempt.end(DONE)
    before = place.dump()
    # As after a lost answer.
    assert attempt.end(DONE)
    assert place.dump() == before
    assert not replace(attempt, claim_id=new_id()).end(DONE)
    assert place.dump() == before


def test_the_same_call_finds_its_own_claim(place: Ledger) -> None:
    request, claim_id = place.request(10), new_id()
    first = place.start_in_place(request, claim_id)
    assert isinstance(first, Attempt)
    before = place.dump()
    again = place.start_in_place(request, claim_id)
    assert isinstance(again, Attempt)
    assert (again.number, again.claim_id) == (first.number, claim_id)
    assert place.dump() == before


def test_the_same_call_does_not_begin_what_has_ended(place: Ledger) -> None:
    request, claim_id = place.request(10), new_id()
    attempt = place.start_in_place(request, claim_id)
    assert isinstance(attempt, Attempt)
    attempt.end(DONE)
    before = place.dump()
    with pytest.raises(StoreError, match="has ended while this was repeated"):
        place.start_in_place(request, claim_id)
    assert place.dump() == before


def test_another_call_of_a_request_finds_it(place: Ledger) -> None:
    request, _ = started(place)
    before = place.dump()
    again = replace(request, reservation_id=new_id())
    found = AlreadyReserved(request.reservation_id, request.task_id)
    assert place.start_in_place(again) == found
    other = place.start_in_place(replace(again, fingerprint="f" * 64))
    assert other == Conflict(request.request_id, request.owner, request.task_id)
    assert place.dump() == before


def test_what_does_not_fit_is_refused_and_counted(place: Ledger) -> None:
    refused = place.start_in_place(place.request(101))
    assert isinstance(refused, Refused)
    assert (refused.budget, refused.requested, refused.limit) == ("b", 101, 100)
    assert place.refused() == 1
    assert place.rows("reservations") == []
    assert place.balance() == (0, 0)


def test_an_unknown_budget_changes_nothing(place: Ledger) -> None:
    unknown = place.start_in_place(place.request(10, lines=(Line("nobody", 10),)))
    assert unknown == Unknown("nobody")
    assert place.rows("reservations") == []


def test_what_is_charged_at_the_start_is_spent_then(place: Ledger) -> None:
    place.set("calls", 5, unit="calls")
    lines = (Line("b", 10), Line("calls", 1, charge="start"))
    _, attempt = started(place, lines=lines)
    assert place.balances("b", "calls") == [(10, 0), (0, 1)]
    attempt.end(Outcome("raised"))
    assert place.balances("b", "calls") == [(0, 0), (0, 1)]


@pytest.mark.parametrize("late", [{"deadline_us": 1}, {"within_us": -1}], ids=["at", "within"])
def test_it_does_not_begin_past_its_deadline(place: Ledger, late: dict[str, int]) -> None:
    closed = place.start_in_place(place.request(10, **late))
    assert isinstance(closed, Closed)
    [reservation] = place.rows("reservations")
    assert (reservation.state, reservation.attempts) == ("released", 0)
    assert place.balance() == (0, 0)


def test_its_deadline_is_told(place: Ledger) -> None:
    _, attempt = started(place, within_us=60_000_000)
    [reservation] = place.rows("reservations")
    assert attempt.deadline_us == reservation.deadline_us
    assert attempt.seconds_left == pytest.approx(60, abs=10)


def test_a_deadline_that_passes_meanwhile_leaves_nothing_half_done(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    if funded.store.dialect == "sqlite":
        pytest.skip("SQLite has one path, and its one transaction")
    general: list[Callable[..., Any]] = []
    run = Store.run

    def noted(self: Store, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        if function is in_place.start:
            assert funded.rows("reservations") == []
            general.append(function)
        return run(self, function, *args, **how)

    monkeypatch.setattr(Store, "run", noted)
    # Far too short for what comes between the look and the claim.
    assert isinstance(funded.start_in_place(funded.request(10, within_us=1)), Closed)
    assert general == [in_place.start]
    [reservation] = funded.rows("reservations")
    assert (reservation.state, reservation.attempts) == ("released", 0)


def test_its_process_is_killed_while_it_runs(place: Ledger) -> None:
    request, _ = started(place)
    place.lapse(request)
    assert place.recover() == Recovered(lost=1, told=1)
    [reservation] = place.rows("reservations")
    assert reservation.state == "lost"
    assert place.balance() == (0, 10)
