"""Deliveries that fail before their claim end what they stand for, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget import admission, settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Closed, Line, Parked, Reserved, ReserveRequest
from celery_budget.recovery import Recovered
from celery_budget.settlement import Attempt
from celery_budget.store import lapses
from tests.contract.support import BOOT, RETRIED, RETURNED, Ledger, message_of
from tests.contract.test_plans import planned


def fail(ledger: Ledger, request: ReserveRequest, retries: int = 0, tell: bool = False) -> bool:
    """A delivery of ``request`` with so many retries that fails before its claim."""
    key = (request.reservation_id, request.task_id, retries)
    return settlement.unclaimed(ledger.store, ledger.root, *key, "failed", tell=tell)


def retry_early(
    ledger: Ledger, request: ReserveRequest, amount: int = 10, due_us: int = 0
) -> tuple[ReserveRequest, Reserved | Parked | None]:
    """The retry of a delivery that has not claimed, and what came of it."""
    following = replace(request, retries=request.retries + 1, lines=(Line("b", amount),))
    message = message_of(following, due_us=due_us)
    written = admission.retry_unclaimed(
        ledger.store, ledger.settings, following, message, request.retries
    )
    return following, written


@pytest.mark.parametrize("published", [True, False], ids=["published", "faster than its mark"])
def test_what_never_ran_is_released(funded: Ledger, published: bool) -> None:
    request = funded.reserve(10)
    if published:
        funded.relay()
    assert fail(funded, request)
    row = funded.row(request)
    assert (row.state, row.reason, funded.balance()) == ("released", "failed", (0, 0))
    assert funded.message(request) is None
    assert funded.deliver(request) == Closed("released")
    assert funded.recover() == Recovered(), "Celery has stored its result"
    assert not fail(funded, request), "it has ended"


def test_what_celery_stores_no_result_of_is_told(funded: Ledger) -> None:
    request = funded.reserve(10)
    assert fail(funded, request, tell=True)
    assert not fail(funded, request, tell=True)
    assert funded.recover() == Recovered(told=1)
    assert funded.results.told == [(request.task_id, "failed")]


def test_what_waits_between_attempts_is_settled_at_what_it_used(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    following, _ = funded.retry(request, attempt)
    attempt.end(RETRIED)
    assert not fail(funded, request, retries=0), "a copy of the first message"
    assert funded.balance() == (14, 0)
    assert fail(funded, request, retries=1)
    assert (funded.state(request), funded.balance()) == ("settled", (0, 4))
    assert funded.deliver(following) == Closed("settled")


def test_a_copy_changes_nothing_while_the_task_runs_or_after_it_has_ended(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    before = funded.dump()
    assert not fail(funded, request)
    assert funded.dump() == before
    attempt.end(RETURNED)
    before = funded.dump()
    assert not fail(funded, request)
    assert funded.dump() == before


def test_a_copy_changes_nothing_while_the_next_attempt_is_parked(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    attempt.record(50)
    funded.lapse(request)
    assert funded.recover() == Recovered(rerun=1)
    assert len(funded.rows("parked")) == 1
    before = funded.dump()
    assert not fail(funded, request)
    assert funded.dump() == before


def test_a_message_of_another_task_or_ledger_changes_nothing(funded: Ledger) -> None:
    request = funded.reserve(10)
    before = funded.dump()
    assert not fail(funded, replace(request, task_id="another"))
    assert not fail(funded, replace(request, reservation_id=new_id()))
    key = (request.reservation_id, request.task_id, 0, "failed")
    assert not settlement.unclaimed(funded.store, "elsewhere", *key)
    assert funded.dump() == before


def test_later_steps_of_its_chain_go_with_it(funded: Ledger) -> None:
    first, second = planned(funded, 10, 5)
    assert funded.balance() == (15, 0)
    assert fail(funded, first)
    assert (funded.balance(), funded.state(second)) == ((0, 0), "released")


# Retries


def test_a_retry_before_the_claim_takes_the_place_of_its_message(funded: Ledger) -> None:
    request = funded.reserve(10)
    funded.relay()
    following, written = retry_early(funded, request)
    assert written == Reserved(request.reservation_id)
    assert (funded.message(request).retries, funded.message(request).state) == (1, "due")
    assert funded.balance() == (10, 0)
    assert funded.relay().published == 1
    assert isinstance(funded.deliver(request), Closed), "a copy of the first message"
    assert not fail(funded, request, retries=0), "nor does it end anything"
    attempt = funded.run(following)
    assert attempt.number == 1
    attempt.end(RETURNED)
    assert funded.balance() == (0, 10)


def test_of_a_retry_that_was_written_before_nothing_is_written(funded: Ledger) -> None:
    request = funded.reserve(10)
    assert retry_early(funded, request)[1] == Reserved(request.reservation_id)
    before = funded.dump()
    assert retry_early(funded, request)[1] is None
    assert funded.dump() == before


def test_a_copy_writes_no_retry_while_the_task_runs(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    before = funded.dump()
    assert retry_early(funded, request)[1] is None
    assert funded.dump() == before
    assert attempt.end(RETURNED)


def test_a_retry_before_the_claim_that_needs_more_is_parked(funded: Ledger) -> None:
    request = funded.reserve(10)
    other = funded.reserve(80)
    following, written = retry_early(funded, request, 30)
    assert isinstance(written, Parked)
    assert funded.balance() == (80, 0)
    assert funded.deliver(following) == Closed("reserved")
    funded.run(other).end(RETURNED)
    funded.set("b", 200)
    assert funded.sweep().admitted == 1
    assert funded.balance() == (30, 80)
    assert isinstance(funded.deliver(following), Attempt)


# Processes that die before they claim


def lost(ledger: Ledger, request: ReserveRequest, retries: int | None, may_rerun: bool) -> bool:
    key = (request.task_id, BOOT, may_rerun)
    return settlement.worker_lost(ledger.store, ledger.settings, *key, retries=retries)


@pytest.mark.parametrize("retries", [0, None])
def test_a_process_that_died_has_its_message_come_again(
    funded: Ledger, retries: int | None
) -> None:
    request = funded.reserve(10)
    funded.relay()
    assert lost(funded, request, retries, may_rerun=True)
    assert funded.relay().published == 1
    assert not lost(funded, request, retries, may_rerun=False)
    assert (funded.state(request), funded.row(request).reason) == ("released", "worker_lost")


@pytest.mark.parametrize("tell", [True, False])
def test_what_kills_every_process_that_gets_it_comes_to_its_end(funded: Ledger, tell: bool) -> None:
    funded.settings = replace(funded.settings, max_publishes=3)
    request = funded.reserve(10)
    key = (request.task_id, BOOT, True, tell)
    again = []
    for _ in range(3):
        assert funded.relay().published == 1
        again.append(settlement.worker_lost(funded.store, funded.settings, *key, retries=0))
    assert again == [True, True, False]
    row = funded.row(request)
    assert (row.state, row.reason, funded.balance()) == ("released", "worker_lost", (0, 0))
    assert funded.message(request) is None
    assert settlement.worker_lost(funded.store, funded.settings, *key, retries=0), "nothing is left"
    assert funded.recover() == Recovered(told=int(tell))
    assert funded.results.told == ([(request.task_id, "worker_lost")] if tell else [])


@pytest.mark.parametrize("may_rerun", [True, False])
def test_a_copy_whose_process_died_changes_nothing_of_a_later_retry(
    funded: Ledger, may_rerun: bool
) -> None:
    request, attempt = funded.start(10)
    funded.retry(request, attempt)
    attempt.end(RETRIED)
    before = funded.dump()
    lost(funded, request, 0, may_rerun)
    assert funded.dump() == before


@pytest.mark.parametrize("may_rerun", [True, False])
def test_a_child_that_had_a_copy_takes_nothing_from_the_one_that_runs(
    funded: Ledger, may_rerun: bool
) -> None:
    request = funded.reserve(10)
    attempt = funded.run(request, worker="w@host/1", late_ack=False)
    settlement.worker_lost(
        funded.store,
        funded.settings,
        request.task_id,
        BOOT,
        may_rerun,
        retries=0,
        worker="w@host/2",
        reservation_id=request.reservation_id,
    )
    assert funded.state(request) == "running"
    assert attempt.end(RETURNED)
    assert funded.state(request) == "settled"


def test_what_recovery_takes_meanwhile_is_no_failure(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = funded.start(10)
    seen = funded.store.run(lapses.open_of, funded.root, request.task_id, BOOT)
    funded.lapse(request)
    assert funded.recover().rerun == 1
    monkeypatch.setattr(lapses, "open_of", lambda *_: seen)
    assert lost(funded, request, 0, may_rerun=True), "Celery stores nothing"
    assert funded.state(request) == "waiting"
