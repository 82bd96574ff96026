"""What a process is to close: with the next claim, when it is idle, and by recovery without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import settlement
from celery_budget.closings import Closings, flush_all
from celery_budget.core.reservations import Outcome, ReserveRequest
from celery_budget.errors import StoreError
from celery_budget.settlement import Attempt
from celery_budget.store import Store, lanes
from tests.cluster import eventually
from tests.contract.support import RETURNED, Ledger

NEVER = 3600.0
DONE = Outcome("returned")


@pytest.fixture
def closings(funded: Ledger) -> Closings:
    """Those of a process that is never idle."""
    if funded.store.dialect == "sqlite":
        pytest.skip("SQLite has one writer: each attempt is closed at once")
    return Closings(funded.store, funded.root, NEVER)


def ended(ledger: Ledger, closings: Closings, **changes: Any) -> tuple[ReserveRequest, Attempt]:
    """An attempt whose result is stored."""
    request, attempt = ledger.start(1, **changes)
    assert attempt.end(RETURNED)
    attempt.closings = closings
    assert attempt.close()
    return request, attempt


def is_closed(ledger: Ledger, request: ReserveRequest) -> bool:
    [attempt] = ledger.rows("attempts", reservation_id=request.reservation_id)
    closed = attempt.lease_until_us is None
    assert (attempt.payload is None) == closed
    assert (ledger.message(request) is None) == closed
    return bool(closed)


def claim(ledger: Ledger, closings: Closings) -> None:
    ledger.run(ledger.reserve(1), closings=closings)


def test_the_next_claim_takes_them_along(funded: Ledger, closings: Closings) -> None:
    requests = [ended(funded, closings)[0] for _ in range(3)]
    assert [is_closed(funded, request) for request in requests] == [False] * 3
    claim(funded, closings)
    assert [is_closed(funded, request) for request in requests] == [True] * 3
    assert closings.take() == []


@pytest.mark.parametrize("end", [Closings.flush, lambda closings: flush_all()])
def test_they_are_closed_when_the_process_ends(
    funded: Ledger, closings: Closings, end: Any
) -> None:
    request, _ = ended(funded, closings)
    end(closings)
    assert is_closed(funded, request)


def test_they_are_closed_when_the_process_is_idle(funded: Ledger, closings: Closings) -> None:
    idle = Closings(funded.store, funded.root, 0.01)
    for _ in range(2):
        # Its thread ends when there is nothing, and another one begins.
        request, _ = ended(funded, idle)
        where = {"reservation_id": request.reservation_id, "lease_until_us": None}
        eventually(partial(funded.rows, "attempts", **where))
        assert is_closed(funded, request)


def test_a_claim_that_failed_leaves_them(
    funded: Ledger, closings: Closings, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = ended(funded, closings)
    waiting = funded.reserve(1)

    def away(*args: Any, **options: Any) -> None:
        raise StoreError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "wait_out_statement", away)
        with pytest.raises(StoreError, match="away"):
            funded.run(waiting, closings=closings)
    assert not is_closed(funded, request)
    claim(funded, closings)
    assert is_closed(funded, request)


def test_one_whose_fence_is_gone_is_left_alone(funded: Ledger, closings: Closings) -> None:
    request, _ = ended(funded, closings)
    funded.lapse(request)
    assert funded.recover().replayed == 1
    replay = funded.deliver(request)
    assert replay.replay is not None
    claim(funded, closings)
    assert not is_closed(funded, request)
    assert replay.close()
    assert is_closed(funded, request)


def test_what_is_locked_just_now_is_waited_for_by_no_claim(
    funded: Ledger, closings: Closings
) -> None:
    request, _ = ended(funded, closings)
    with locked(funded, request):
        claim(funded, closings)
        assert not is_closed(funded, request)
    closings.flush()
    assert is_closed(funded, request)


@contextmanager
def locked(ledger: Ledger, request: ReserveRequest) -> Iterator[None]:
    store = ledger.store.beside()
    with store.transaction() as connection:
        connection.execute(
            sa.text("SELECT 1 FROM budget_reservations WHERE reservation_id = :id FOR UPDATE"),
            {"id": request.reservation_id},
        )
        yield
    store.dispose()


@pytest.mark.parametrize("closes", [True, False])
def test_a_lane_hears_of_what_it_has_let_go(
    funded: Ledger, closings: Closings, closes: bool
) -> None:
    terms = {"queues": ("celery",), "preflight": False}
    funded.store.run(lanes.declare, funded.root, "llm", terms)
    request, attempt = funded.start(10, order_key=None)
    funded.put("outbox", {"state": "published"}, reservation_id=request.reservation_id)
    attempt.record(4)
    attempt.closings = closings
    assert attempt.end(DONE, closes=closes)
    assert (attempt.settled, attempt.closed) == (True, False)
    assert attempt.close()
    claim(funded, closings)
    closings.flush()
    assert is_closed(funded, request)
    assert [row.units for row in funded.rows("share_returns")] == [6]


def test_what_nobody_waits_for_is_closed_with_its_end(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    assert attempt.end(DONE, closes=True)
    if funded.store.dialect == "sqlite":
        assert attempt.settled
        assert attempt.close()
    assert attempt.closed == (funded.store.dialect == "postgresql")
    assert is_closed(funded, request)
    assert funded.balance() == (0, 10)


def test_a_forked_process_begins_with_none(
    funded: Ledger, closings: Closings, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = ended(funded, closings)
    pid = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: pid + 1)
        assert closings.take() == []
    assert not is_closed(funded, request)


def test_what_is_lost_with_its_process_is_given_again(funded: Ledger, closings: Closings) -> None:
    request, _ = ended(funded, closings)
    funded.lapse(request)
    assert funded.recover().replayed == 1
    given = funded.deliver(request)
    assert isinstance(given, settlement.Attempt)
    assert given.replay is not None
    assert given.replay.payload == RETURNED.payload
