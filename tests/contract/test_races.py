"""Races: whatever commits first, the ledger adds up and no limit is passed."""

from __future__ import annotations

import random
from dataclasses import replace
from uuid import uuid4

import pytest

from celery_budget import admission, reconcile, settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import AlreadyReserved, Parked, Refused, Reserved, Running
from celery_budget.settlement import Attempt
from celery_budget.store import budgets, claims, declaring, schema
from tests.contract.racers import (
    Processes,
    at_once,
    live_in_threads,
    reserve_in_rounds,
)
from tests.contract.support import RETRIED, RETURNED, Ledger, message_of

ROUNDS = 50


@pytest.mark.parametrize("request_id", [None, "order"])
def test_of_two_processes_one_gets_what_is_left(racing: Ledger, request_id: str | None) -> None:
    for one in range(ROUNDS):
        racing.set(f"b{one}", 10)
    started = Processes(2, reserve_in_rounds, racing.settings, ROUNDS, request_id)
    for one, outcomes in enumerate(zip(*started.results(), strict=True)):
        [first] = [outcome for outcome in outcomes if isinstance(outcome, Reserved)]
        [second] = [outcome for outcome in outcomes if outcome is not first]
        if request_id is None:
            assert second == Refused(f"b{one}", "tokens", 6, 10, 6, 0, "held", 10)
        else:
            assert second == AlreadyReserved(first.reservation_id, "t")
        assert racing.balance(f"b{one}") == (6, 0)


def test_no_read_ever_sees_a_limit_passed(funded: Ledger) -> None:
    limit = 3000
    funded.set("b", limit)
    started = Processes(8, live_in_threads, funded.settings, 8, 5)
    reads = 0
    while started.running:
        balance = funded.store.run(budgets.balance, funded.root, "b")
        assert balance.reserved + balance.spent <= limit
        # One snapshot each: at no committed moment does a balance differ from its lines.
        assert reconcile.reconcile(funded.store, funded.settings).ok
        reads += 1
    admitted = sum(started.results())
    assert reads > 1
    assert admitted == len(funded.rows("reservations"))
    assert funded.refused() == 8 * 8 * 5 - admitted
    assert 0 < admitted < 8 * 8 * 5


@pytest.mark.parametrize(("lowered_at", "limit"), [(10, 25), (30, 20), (1, 0)])
def test_a_limit_that_is_lowered_holds_from_its_commit_on(
    racing: Ledger, lowered_at: int, limit: int
) -> None:
    racing.set("b", 10_000)

    def admit_until_refused() -> None:
        while isinstance(racing.admit(racing.request(1)), Reserved):
            pass

    def lower() -> int:
        while racing.balance()[0] < lowered_at:
            pass
        with racing.store.transaction() as connection:
            declaring.set_budget(connection, racing.root, "b", {"limit": limit})
            return budgets.balance(connection, racing.root, "b").reserved

    at_commit: int = at_once([lower, *[admit_until_refused] * 4])[0]
    assert racing.balance()[0] == max(at_commit, limit)


def test_of_many_deliveries_one_is_claimed(racing: Ledger) -> None:
    for _ in range(5):
        request = racing.reserve(1)
        heard = at_once([lambda request=request: racing.deliver(request)] * 16)
        assert sum(isinstance(one, Attempt) for one in heard) == 1
        assert heard.count(Running()) == 15


def test_of_many_deliveries_one_replays(racing: Ledger) -> None:
    request, attempt = racing.start(1)
    attempt.end(RETURNED)
    racing.lapse(request)
    assert racing.recover().replayed == 1
    heard = at_once([lambda: racing.deliver(request)] * 8)
    assert sum(isinstance(one, Attempt) for one in heard) == 1
    assert heard.count(Running()) == 7


def test_usage_beside_its_settlement_is_not_lost(racing: Ledger) -> None:
    for settled in range(1, 9):
        racing.set("b", None)
        _, attempt = racing.start(10)
        calls = [lambda attempt=attempt: attempt.record(3) for _ in range(4)]
        at_once([*calls, lambda attempt=attempt: attempt.end(RETURNED)])
        assert racing.balance() == (0, 12 * settled)


def test_one_usage_key_at_once_counts_once(racing: Ledger) -> None:
    _, attempt = racing.start(10)
    recorded = at_once([lambda: attempt.record(3, key="response")] * 8)
    assert sorted(recorded) == [False] * 7 + [True]


@pytest.mark.parametrize("other", ["settle", "release", "claim"])
def test_a_mark_beside_what_it_marks(racing: Ledger, other: str) -> None:
    def settle(request: object) -> None:
        attempt = racing.run(request)  # type: ignore[arg-type]
        assert attempt.end(RETURNED)
        assert attempt.close()

    for _ in range(5):
        requests = [racing.reserve(1) for _ in range(6)]
        fence = uuid4()
        batch = racing.store.run(claims.claim_due, racing.root, "", 100, 60_000_000, fence)
        assert len(batch.messages) == 6
        marks = [batch.messages, batch.messages[::-1]]
        calls = [
            lambda key=(racing.root, fence, one, 1): racing.store.run(claims.mark_published, *key)
            for one in marks
        ]
        for request in requests:
            if other == "settle":
                calls.append(lambda request=request: settle(request))
            elif other == "claim":
                calls.append(lambda request=request: racing.deliver(request))
            else:
                key = (racing.root, request.reservation_id, "cancelled")
                calls.append(lambda key=key: settlement.revoke(racing.store, *key))
        at_once(calls)
        wanted = {"settle": "settled", "release": "released", "claim": "running"}[other]
        assert {racing.state(request) for request in requests} == {wanted}


def test_several_budgets_in_any_order_do_not_deadlock(racing: Ledger) -> None:
    names = ["a", "b", "Z", "ä", "z"]
    for name in names:
        racing.set(name, None)

    def live(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(5):
            first, *more = chance.sample(names, 3)
            request = racing.reserve(1, *[(name, 1) for name in more], budget=first)
            attempt = racing.run(request)
            attempt.record(2)
            following = replace(request, retries=1)
            written = admission.retry(
                racing.store,
                racing.settings,
                following,
                message_of(following),
                1,
                attempt.claim_id,
            )
            assert isinstance(written, Reserved)
            attempt.end(RETRIED)
            racing.run(following).end(RETURNED)

    at_once([lambda seed=seed: live(seed) for seed in range(6)])


def test_recovery_sweeps_and_relays_beside_each_other_do_each_thing_once(racing: Ledger) -> None:
    lapsed = []
    for _ in range(6):
        request, _ = racing.start(5)
        racing.lapse(request)
        lapsed.append(request)
    racing.relay()
    racing.broker.published.clear()
    over = [racing.request(200) for _ in range(3)]
    for request in over:
        assert isinstance(racing.admit(request, continuation=True), Parked)
    fits = racing.request(40)
    racing.set("b", 30)
    assert isinstance(racing.admit(fits, continuation=True), Parked)
    racing.set("b", 100)
    racing.store.run(_let_parked_end, racing.root, [request.task_id for request in over])
    results = at_once([racing.recover] * 3 + [racing.sweep] * 3 + [racing.relay] * 3)
    assert sum(result.rerun for result in results[:3]) == 6
    # By whichever takes it: recovery tells what a sweep has given up.
    told = [task_id for result in results[3:6] for task_id in result.over]
    told += [task_id for task_id, _ in racing.results.told]
    assert sorted(told) == sorted(request.task_id for request in over)
    assert sum(result.admitted for result in results[3:6]) == 1
    racing.relay()
    published = racing.broker.published
    assert sorted(published) == sorted([*(one.task_id for one in lapsed), fits.task_id])
    assert {racing.run(one).number for one in lapsed} == {2}


def _let_parked_end(connection: object, root: str, task_ids: list[str]) -> None:
    parked = schema.parked
    connection.execute(  # type: ignore[attr-defined]
        parked.update()
        .where(parked.c.root == root, parked.c.task_id.in_(task_ids))
        .values(deadline_us=1)
    )


def test_a_repeat_beside_a_release_is_reserved_or_was(racing: Ledger) -> None:
    for _ in range(10):
        request = racing.reserve(10)
        again = replace(request, reservation_id=new_id())
        key = (racing.root, request.reservation_id, "cancelled")
        admitted, released = at_once(
            [
                lambda again=again: racing.admit(again),
                lambda key=key: settlement.revoke(racing.store, *key),
            ]
        )
        assert released
        held = 10 if admitted == Reserved(again.reservation_id) else 0
        assert racing.balance() == (held, 0)
        if held:
            settlement.revoke(racing.store, racing.root, again.reservation_id, "cancelled")
