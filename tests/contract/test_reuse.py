"""Which run calls of one identity join, on both stores and at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from celery_budget import settlement
from celery_budget.core.identity import task_id_of
from celery_budget.core.reservations import AlreadyReserved, Outcome, Reserved, ReserveRequest
from celery_budget.store import reuse, schema
from tests.contract.support import RAISED, RETURNED, Ledger

HOUR = 3_600_000_000
KEY = "k" * 64


def joined(ledger: Ledger, owner: str = "b", key: str = KEY, kept_us: int = HOUR) -> str:
    """The request id that a call joins."""
    of = (ledger.root, owner, key, kept_us)
    return ledger.store.read(reuse.joined, *of) or ledger.store.run(reuse.renewed, *of)


def request(ledger: Ledger, request_id: str, owner: str = "b") -> ReserveRequest:
    task_id = task_id_of(owner, request_id)
    return replace(ledger.request(10, budget=owner, task_id=task_id), request_id=request_id)


def started(ledger: Ledger) -> tuple[ReserveRequest, settlement.Attempt]:
    one = request(ledger, joined(ledger))
    assert ledger.admit(one) == Reserved(one.reservation_id)
    return one, ledger.run(one)


def kept(ledger: Ledger, one: ReserveRequest, owner: str = "b") -> str | None:
    return ledger.store.read(reuse.kept, ledger.root, one.task_id, owner)


def test_what_is_in_flight_is_joined(funded: Ledger) -> None:
    first = joined(funded)
    assert joined(funded) == first, "before it is admitted"
    one = request(funded, first)
    assert funded.admit(one) == Reserved(one.reservation_id)
    again = request(funded, joined(funded))
    assert funded.admit(again) == AlreadyReserved(one.reservation_id, one.task_id)
    attempt = funded.run(one)
    assert joined(funded) == first
    attempt.end(RETURNED)
    assert joined(funded) == first
    assert funded.admit(request(funded, first)) == AlreadyReserved(one.reservation_id, one.task_id)
    assert len(funded.rows("reservations")) == 1


def test_its_result_is_kept_beyond_its_close(funded: Ledger) -> None:
    one, attempt = started(funded)
    assert kept(funded, one) is None
    attempt.end(RETURNED)
    attempt.close()
    assert kept(funded, one) == RETURNED.payload
    assert kept(funded, one, "c") is None, "not for another owner"
    [row] = funded.rows("reuse")
    assert abs(row.until_us - funded.now() - HOUR) < HOUR // 2


def test_after_its_time_it_runs_again(funded: Ledger) -> None:
    one, attempt = started(funded)
    attempt.end(RETURNED)
    attempt.close()
    ended_us = funded.row(one).ended_us
    funded.put("reservations", {"ended_us": ended_us - HOUR})
    second = joined(funded)
    assert second != one.request_id
    assert kept(funded, one) is None
    fresh = request(funded, second)
    assert funded.admit(fresh) == Reserved(fresh.reservation_id)
    assert fresh.task_id != one.task_id


@pytest.mark.parametrize("how", ["raised", "cancelled", "expired", "ignored"])
def test_what_did_not_succeed_is_not_joined(funded: Ledger, how: str) -> None:
    one = request(funded, joined(funded))
    funded.admit(one, **({"expires_us": 1} if how == "expired" else {}))
    if how == "cancelled":
        settlement.cancel(funded.store, funded.settings, one.task_id)
    elif how == "expired":
        funded.relay()
    else:
        funded.run(one).end(Outcome(how, RAISED.payload))
    second = joined(funded)
    assert second != one.request_id
    assert joined(funded) == second


def test_what_failed_after_an_effect_is_not_had_again(funded: Ledger) -> None:
    one, attempt = started(funded)
    proof = schema.effects.insert().values(
        root=funded.root,
        reservation_id=one.reservation_id,
        key="charge",
        attempt=1,
        created_us=funded.now(),
    )
    funded.store.run(lambda connection: connection.execute(proof).rowcount)
    attempt.end(RAISED)
    assert joined(funded) == one.request_id
    assert funded.store.run(reuse.forget, funded.root, one.task_id, "b")
    assert joined(funded) != one.request_id


@pytest.mark.parametrize("how", ["task", "key"])
def test_what_is_forgotten_runs_again(funded: Ledger, how: str) -> None:
    one, attempt = started(funded)
    if how == "task":
        assert not funded.store.run(reuse.forget, funded.root, one.task_id, "c")
        assert funded.store.run(reuse.forget, funded.root, one.task_id, "b")
        assert not funded.store.run(reuse.forget, funded.root, one.task_id, "b")
    else:
        assert not funded.store.run(reuse.forget_key, funded.root, "c", KEY)
        assert funded.store.run(reuse.forget_key, funded.root, "b", KEY)
    second = joined(funded)
    assert second != one.request_id
    attempt.end(RETURNED)
    assert kept(funded, one) is None, "what was in flight tells nobody any more"
    assert joined(funded) == second


def test_owners_and_works_do_not_meet(funded: Ledger) -> None:
    funded.set("c", 100)
    ids = {joined(funded), joined(funded, "c"), joined(funded, key="l" * 64)}
    assert len(ids) == 3


def test_a_refused_one_leaves_its_place_to_the_next(funded: Ledger) -> None:
    full = funded.reserve(100)
    one = request(funded, joined(funded))
    assert not isinstance(funded.admit(one), Reserved)
    settlement.cancel(funded.store, funded.settings, full.task_id)
    assert joined(funded) == one.request_id
    assert funded.admit(one) == Reserved(one.reservation_id)


def test_what_took_its_place_is_its_result(funded: Ledger) -> None:
    one, attempt = started(funded)
    following = replace(funded.request(5, task_id=one.task_id), nesting=1)
    funded.admit(following, continuation=True)
    attempt.end(Outcome("replaced"))
    assert joined(funded) == one.request_id
    funded.run(following).end(RETURNED)
    assert joined(funded) == one.request_id
    assert kept(funded, one) == RETURNED.payload


def test_what_is_over_is_pruned(funded: Ledger) -> None:
    one, attempt = started(funded)
    funded.put("reuse", {"until_us": 1})
    funded.recover()
    assert funded.rows("reuse"), "not while it runs"
    attempt.end(RETURNED)
    attempt.close()
    funded.put("reuse", {"until_us": 1})
    funded.recover()
    assert funded.rows("reuse"), "nor in its time"
    funded.put("reservations", {"ended_us": funded.row(one).ended_us - HOUR - 1})
    funded.recover()
    assert funded.rows("reuse") == []
    assert joined(funded) != one.request_id


@pytest.mark.parametrize("before", ["nothing", "a failure"])
def test_at_the_same_time_there_is_one_run(racing: Ledger, before: str) -> None:
    if before == "a failure":
        started(racing)[1].end(RAISED)
    barrier = Barrier(6)

    def call(_: int) -> tuple[str, bool]:
        barrier.wait()
        request_id = joined(racing)
        barrier.wait()
        admitted = racing.admit(request(racing, request_id))
        return request_id, isinstance(admitted, Reserved)

    with ThreadPoolExecutor(6) as pool:
        came = list(pool.map(call, range(6)))
    assert len({request_id for request_id, _ in came}) == 1
    assert sorted(new for _, new in came) == [False] * 5 + [True]
    assert len(racing.rows("reservations")) == (2 if before == "a failure" else 1)


def test_beside_forgetting_each_run_has_its_own_callers(racing: Ledger) -> None:
    """Whoever forgets, and whoever calls meanwhile: no caller is without a run."""
    one, attempt = started(racing)
    attempt.end(RETURNED)
    barrier = Barrier(4)

    def call(number: int) -> str | None:
        barrier.wait()
        if number == 0:
            racing.store.run(reuse.forget, racing.root, one.task_id, "b")
            return None
        request_id = joined(racing)
        racing.admit(request(racing, request_id))
        return request_id

    with ThreadPoolExecutor(4) as pool:
        came = {found for found in pool.map(call, range(4)) if found is not None}
    known = {row.request_id for row in racing.rows("reservations")}
    assert came <= known
    assert len(known) <= 2
