"""Lanes: what they hold, what they let go, and that their limits hold."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import relay
from celery_budget.core.lanes import Lane, Load
from celery_budget.core.reservations import (
    Cancelling,
    Closed,
    Outcome,
    Parked,
    Refused,
    Reserved,
)
from celery_budget.dispatcher import Dispatcher
from celery_budget.errors import InvalidLane, QueueFull, UnknownLane
from celery_budget.store import continuations, dispatching, lanes, preflight
from tests.contract.support import RETURNED, Ledger, admit_many, message_of
from tests.messages import Told

Q = "celery"


def lane(ledger: Ledger, name: str = "llm", **terms: Any) -> Lane:
    """Declare a lane that feeds the queue of all messages, and asks no workers."""
    given = {"queues": (Q,), "preflight": False, **terms}
    return ledger.store.run(lanes.declare, ledger.root, name, given)


def standing(ledger: Ledger, name: str = "llm") -> tuple[Load, Load, Load]:
    """What a lane holds back, what it has released that was not started, and what runs."""
    [found] = ledger.store.read(lanes.standings, ledger.root, name)
    return found.waiting, found.queued, found.running


def dispatch(ledger: Ledger, name: str = "llm") -> int:
    return ledger.store.run(dispatching.dispatch, ledger.root, name)


@pytest.fixture
def funded(ledger: Ledger) -> Ledger:
    ledger.set("b", 10_000)
    return ledger


def test_no_lane_changes_nothing(funded: Ledger) -> None:
    request = funded.reserve()
    assert funded.message(request).state == "due"
    assert funded.message(request).lane is None
    assert funded.relay().published == 1


def test_a_fed_queue_is_held_until_the_relay_dispatches(funded: Ledger) -> None:
    lane(funded)
    request = funded.reserve(7)
    message = funded.message(request)
    assert (message.state, message.lane, message.tenant, message.weight) == ("held", "llm", "b", 7)
    assert funded.row(request).lane == "llm"
    other = funded.reserve(queue="elsewhere")
    assert funded.message(other).state == "due"
    assert funded.relay().published == 2
    assert funded.message(request).state == "published"


def test_many_at_once_are_held_as_one_is(funded: Ledger) -> None:
    lane(funded)
    asked = [(one, message_of(one)) for one in (funded.request(1), funded.request(2))]
    elsewhere = funded.request(3)
    asked.append((elsewhere, message_of(elsewhere, queue="elsewhere")))
    assert all(
        isinstance(one, Reserved) for one in admit_many(funded.store, funded.settings, asked)
    )
    found = {row.weight: (row.state, row.lane) for row in funded.rows("outbox")}
    assert found == {1: ("held", "llm"), 2: ("held", "llm"), 3: ("due", None)}
    assert {row.lane for row in funded.rows("reservations")} == {"llm", None}


def test_max_running_bounds_what_is_queued_and_runs_together(funded: Ledger) -> None:
    lane(funded, max_running_jobs=2)
    requests = [funded.reserve(1) for _ in range(4)]
    assert funded.relay().published == 2
    assert standing(funded) == (Load(2, 2), Load(2, 2), Load())
    first = funded.run(requests[0])
    assert standing(funded)[1:] == (Load(1, 1), Load(1, 1))
    assert funded.relay().published == 0
    assert first.end(RETURNED)
    # It is not closed yet, and takes no place any more.
    assert funded.relay().published == 1
    assert standing(funded) == (Load(1, 1), Load(2, 2), Load())


def test_max_queued_counts_what_nobody_has_started(funded: Ledger) -> None:
    lane(funded, max_queued_units=10)
    requests = [funded.reserve(6) for _ in range(3)]
    assert funded.relay().published == 1
    assert funded.relay().published == 0
    funded.run(requests[0])
    assert funded.relay().published == 1
    assert standing(funded) == (Load(1, 6), Load(1, 6), Load(1, 6))


@pytest.mark.parametrize("how", ["returned", "raised", "cancelled", "expired", "lost", "rejected"])
def test_capacity_comes_back_however_it_ends(funded: Ledger, how: str) -> None:
    lane(funded, max_running_jobs=1)
    expires = funded.now() + 3_600_000_000
    first = funded.reserve(1, expires_us=expires)
    second = funded.reserve(1)
    if how == "expired":
        # Released, and over before it was published.
        assert dispatch(funded) == 1
        funded.put("outbox", {"expires_us": 1}, reservation_id=first.reservation_id)
        assert funded.relay().released == 1
    else:
        assert funded.relay().published == 1
    if how == "cancelled":
        continuations_cancel(funded, first)
    elif how in ("returned", "raised", "rejected"):
        assert funded.run(first).end(Outcome(how, payload='"x"'))
    elif how == "lost":
        funded.run(first, late_ack=False)
        funded.lapse(first)
        assert funded.recover().lost == 1
    assert funded.relay().published == 1
    assert funded.message(second).state == "published"
    assert standing(funded) == (Load(), Load(1, 1), Load())


def continuations_cancel(ledger: Ledger, request: Any) -> None:
    ended = ledger.store.run(continuations.cancel, ledger.root, request.task_id)
    assert not isinstance(ended, (Cancelling, Closed))


def test_what_runs_past_its_lease_gives_its_place_back_when_it_is_taken(funded: Ledger) -> None:
    """A worker that is lost, with late acknowledgement: its message waits its turn again."""
    lane(funded, max_running_jobs=1)
    first = funded.reserve(1)
    assert funded.relay().published == 1
    funded.run(first)
    second = funded.reserve(1)
    assert funded.relay().published == 0
    funded.lapse(first)
    assert funded.recover().rerun == 1
    assert funded.message(first).state == "held"
    # The broker delivers its own copy as well: it does not run past the limit.
    assert isinstance(funded.deliver(first), Closed)
    assert funded.relay().published == 1
    assert standing(funded) == (Load(1, 1), Load(1, 1), Load())
    del second


def test_a_retry_is_held_again_and_never_refused(funded: Ledger) -> None:
    lane(funded, max_running_jobs=1, max_waiting_jobs=1)
    first = funded.reserve(5)
    assert funded.relay().published == 1
    attempt = funded.run(first)
    funded.reserve(1)
    with pytest.raises(QueueFull):
        funded.reserve(1)
    following, written = funded.retry(first, attempt)
    assert isinstance(written, Reserved)
    assert [row.state for row in funded.rows("outbox", reservation_id=first.reservation_id)] == [
        "published",
        "blocked",
    ]
    assert attempt.end(Outcome("retried"))
    message = funded.message(first)
    assert (message.state, message.lane, message.weight) == ("held", "llm", 5)
    assert standing(funded)[0] == Load(2, 6)
    del following


def test_parked_work_is_held_when_it_is_admitted(funded: Ledger) -> None:
    lane(funded, max_waiting_jobs=0)
    request = funded.request(20_000, finishing=True)
    assert isinstance(funded.admit(request, continuation=True), Parked)
    funded.set("b", 50_000)
    assert funded.sweep().admitted == 1
    assert funded.message(request).state == "held"


@pytest.mark.parametrize("many", [False, True])
def test_a_full_lane_refuses_before_anything_is_reserved(funded: Ledger, many: bool) -> None:
    lane(funded, max_waiting_jobs=2)
    funded.reserve(1)
    funded.reserve(1)
    before = funded.dump()
    turned = funded.request(1)
    with pytest.raises(QueueFull) as caught:
        _admit(funded, [turned, funded.request(1)] if many else [turned])
    assert caught.value.args[:5] == ("llm", "jobs", 1, 2, 2)
    assert funded.dump() == before
    # The same request finds itself, however full it is.
    lane(funded, max_waiting_jobs=None)
    _admit(funded, [turned])
    lane(funded, max_waiting_jobs=0)
    _admit(funded, [turned])


def _admit(ledger: Ledger, requests: list[Any]) -> None:
    if len(requests) == 1:
        ledger.admit(requests[0])
        return
    from celery_budget.store.requests import error_of

    for tried in admit_many(
        ledger.store, ledger.settings, [(one, message_of(one)) for one in requests]
    ):
        if not isinstance(tried, Reserved):
            raise error_of(tried)  # type: ignore[arg-type]


def test_units_bound_what_waits_and_batches_count_themselves(funded: Ledger) -> None:
    lane(funded, max_waiting_units=10)
    funded.reserve(6)
    with pytest.raises(QueueFull) as caught:
        funded.reserve(5)
    assert caught.value.args[:5] == ("llm", "units", 5, 6, 10)
    funded.reserve(4)
    lane(funded, max_waiting_units=30)
    requests = [funded.request(15) for _ in range(2)]
    asked = [(one, message_of(one)) for one in requests]
    tried = admit_many(funded.store, funded.settings, asked, best_effort=True)
    assert isinstance(tried[0], Reserved)
    assert (tried[1].reason, tried[1].waiting) == ("units", 25)  # type: ignore[union-attr]


@pytest.mark.parametrize("many", [False, True])
def test_a_budget_that_is_short_is_told_before_a_lane_that_is_full(
    funded: Ledger, many: bool
) -> None:
    lane(funded, max_waiting_jobs=0)
    requests = [funded.request(20_000), *([funded.request(1)] if many else [])]
    asked = [(one, message_of(one)) for one in requests]
    tried = (
        admit_many(funded.store, funded.settings, asked)[0] if many else funded.admit(requests[0])
    )
    assert isinstance(tried, Refused)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("limit", ["max_queued_units", "max_running_units", "max_waiting_units"])
def test_what_is_heavier_than_a_limit_is_refused_at_once(
    funded: Ledger, limit: str, many: bool
) -> None:
    lane(funded, **{limit: 9})
    requests = [funded.request(10), *([funded.request(1)] if many else [])]
    with pytest.raises(QueueFull) as caught:
        _admit(funded, requests)
    assert caught.value.args == ("llm", "heavy", 10, 0, 9, None)
    assert funded.balance() == (0, 0)
    _admit(funded, [funded.request(9)])


def test_a_large_backlog_is_counted_now_and_then(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to five hundred it is exact; beyond that a count is good for two seconds."""
    funded.set("b", None)
    lane(funded, max_waiting_jobs=600)
    for _ in range(3):
        requests = [funded.request(1) for _ in range(200)]
        admit_many(funded.store, funded.settings, [(one, message_of(one)) for one in requests])
    with pytest.raises(QueueFull) as caught:
        funded.reserve(1)
    assert caught.value.waiting == 600
    # It was counted: what leaves is not seen for a while.
    [tally] = funded.rows("lane_tallies")
    assert (tally.jobs, tally.units) == (600, 600)
    lane(funded, max_waiting_jobs=600, max_queued_jobs=10)
    assert dispatch(funded) == 10
    with pytest.raises(QueueFull):
        funded.reserve(1)
    funded.put("lane_tallies", {"counted_us": 1})
    funded.reserve(1)
    assert funded.rows("lane_tallies")[0].jobs == 590


def test_pause_and_resume(funded: Ledger) -> None:
    lane(funded)
    request = funded.reserve(1)
    funded.store.run(lanes.pause, funded.root, "llm", True)
    assert funded.relay().published == 0
    assert funded.message(request).state == "held"
    # Changing a term leaves it paused.
    assert lane(funded, max_queued_jobs=5).paused
    funded.store.run(lanes.pause, funded.root, "llm", False)
    assert funded.relay().published == 1
    with pytest.raises(UnknownLane):
        funded.store.run(lanes.pause, funded.root, "none", True)


def test_a_deleted_lane_lets_everything_go(funded: Ledger) -> None:
    lane(funded, paused=True)
    request = funded.reserve(1)
    later = funded.reserve(1, due_us=funded.now() + 3_600_000_000)
    funded.store.run(lanes.delete, funded.root, "llm")
    assert funded.store.read(lanes.find, funded.root) == {}
    assert funded.relay().published == 1
    assert funded.message(request).lane is None
    assert (funded.message(later).state, funded.message(later).lane) == ("due", None)
    assert funded.message(funded.reserve(1)).state == "due"
    with pytest.raises(UnknownLane):
        funded.store.run(lanes.delete, funded.root, "llm")
    # A lane of that name begins anew, and feeds again.
    lane(funded)
    assert funded.message(funded.reserve(1)).state == "held"


def test_what_is_written_while_a_lane_is_deleted_is_let_go_too(funded: Ledger) -> None:
    lane(funded, paused=True)
    request = funded.reserve(1)
    funded.store.run(lanes.delete, funded.root, "llm")
    assert funded.relay().published == 1
    # A transaction that had read the lane before commits now.
    held = {"state": "held", "lane": "llm", "due_us": 1}
    funded.put("outbox", held, reservation_id=request.reservation_id)
    assert funded.relay().published == 1


def test_a_queue_has_one_lane(funded: Ledger) -> None:
    lane(funded)
    with pytest.raises(InvalidLane, match="'celery' of lane 'other' is fed by lane 'llm'"):
        lane(funded, "other")
    assert list(funded.store.read(lanes.find, funded.root)) == ["llm"]
    with pytest.raises(InvalidLane, match="feeds no queue"):
        lane(funded, "other", queues=())
    lane(funded, queues=("a", "b"))
    lane(funded, "other")
    assert funded.store.read(lanes.find, funded.root)["llm"].queues == ("a", "b")


def test_what_is_not_due_waits_for_its_time(funded: Ledger) -> None:
    lane(funded)
    request = funded.reserve(1, due_us=funded.now() + 3_600_000_000)
    assert funded.relay().published == 0
    assert funded.message(request).state == "held"
    funded.put("outbox", {"due_us": funded.now()})
    assert funded.relay().published == 1


def test_past_its_expires_what_is_held_ends_as_expired(funded: Ledger) -> None:
    lane(funded, paused=True)
    request = funded.reserve(1, expires_us=funded.now() + 3_600_000_000)
    kept = funded.reserve(1)
    assert funded.relay().released == 0
    funded.put("outbox", {"expires_us": 1}, reservation_id=request.reservation_id)
    assert funded.relay().released == 1
    assert (funded.state(request), funded.row(request).reason) == ("released", "expired")
    assert funded.results.told == [(request.task_id, "expired")]
    assert funded.message(request) is None
    assert funded.state(kept) == "reserved"


@pytest.mark.parametrize("why", ["paused", "full", "asleep"])
def test_what_is_held_too_long_ends_with_a_reason_of_its_own(funded: Ledger, why: str) -> None:
    terms: dict[str, Any] = {"paused": why == "paused", "preflight": why == "asleep"}
    lane(funded, max_wait_us=60_000_000, **terms, max_running_jobs=0 if why == "full" else None)
    request = funded.reserve(1)
    assert funded.relay().released == 0
    funded.put("outbox", {"due_us": funded.now() - 61_000_000})
    assert funded.relay().released == 1
    assert (funded.state(request), funded.row(request).reason) == ("released", "wait_expired")
    assert funded.results.told == [(request.task_id, "wait_expired")]
    assert funded.balance() == (0, 0)


def test_a_retry_that_is_held_too_long_is_settled_at_what_it_used(funded: Ledger) -> None:
    lane(funded, max_wait_us=60_000_000)
    request = funded.reserve(5)
    assert funded.relay().published == 1
    attempt = funded.run(request)
    attempt.record(3, key="one")
    funded.retry(request, attempt)
    assert attempt.end(Outcome("retried"))
    lane(funded, paused=True)
    funded.put("outbox", {"due_us": funded.now() - 61_000_000})
    assert funded.relay().released == 1
    assert (funded.state(request), funded.row(request).reason) == ("settled", "wait_expired")
    assert funded.balance() == (0, 3)


def test_messages_with_one_key_are_released_one_after_another(funded: Ledger) -> None:
    """Those that could not be published yet would take the place of others in the queue."""
    lane(funded, max_queued_jobs=2)
    ordered = [funded.reserve(1, order_key="k") for _ in range(3)]
    other = funded.reserve(1)
    assert funded.relay().published == 2
    assert funded.broker.published == [ordered[0].task_id, other.task_id]
    assert [funded.message(one).state for one in ordered[1:]] == ["held", "held"]
    funded.run(other)
    assert funded.relay().published == 1
    assert funded.broker.published[-1] == ordered[1].task_id


def test_what_ends_while_it_is_held_lets_follow_by_its_key(funded: Ledger) -> None:
    lane(funded, max_wait_us=60_000_000, max_queued_jobs=1)
    first = funded.reserve(1, order_key="k", due_us=funded.now() + 3_600_000_000)
    second = funded.reserve(1, order_key="k")
    # Behind one that is not due yet, and no place taken by it.
    other = funded.reserve(1)
    assert funded.relay().published == 1
    assert funded.broker.published == [other.task_id]
    assert funded.message(second).behind
    funded.run(other)
    funded.put("outbox", {"due_us": funded.now() - 61_000_000}, reservation_id=first.reservation_id)
    assert funded.relay().released == 1
    assert funded.row(first).reason == "wait_expired"
    assert funded.relay().published + len(funded.broker.published) >= 2
    assert funded.broker.published[-1] == second.task_id


def test_an_earlier_one_by_its_key_in_another_lane_comes_first(funded: Ledger) -> None:
    lane(funded, max_queued_jobs=1)
    lane(funded, "slow", queues=("slow",), paused=True)
    first = funded.reserve(1, order_key="k", queue="slow")
    second = funded.reserve(1, order_key="k")
    other = funded.reserve(1)
    funded.relay()
    assert funded.broker.published == [other.task_id]
    funded.run(other)
    funded.store.run(lanes.pause, funded.root, "slow", False)
    while funded.relay().again:
        pass
    assert funded.broker.published == [other.task_id, first.task_id, second.task_id]


def test_every_tenant_is_looked_at_however_many_wait(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "MOST_TENANTS", 2)
    monkeypatch.setattr(dispatching, "LOOKED_AT", 4)
    lane(funded, max_queued_jobs=1)
    tenants = ["a", "b", "c", "d", "e"]
    requests = [funded.reserve(1, tenant=one) for one in tenants for _ in range(3)]
    by_task = {one.task_id: one for one in requests}
    released: list[str] = []
    for number in range(len(requests)):
        assert funded.relay().published == 1, number
        task_id = funded.broker.published[-1]
        released.append(str(by_task[task_id].tenant))
        assert funded.run(by_task[task_id]).end(RETURNED)
    assert sorted(released) == sorted(tenants * 3)
    # Not only those by whom a look begins.
    assert len(set(released[:5])) > 2


def test_a_burst_is_released_once_in_a_tick(funded: Ledger) -> None:
    lane(funded, burst_units=5)
    for _ in range(3):
        funded.reserve(3)
    heavy = funded.reserve(50)
    assert dispatch(funded) == 1
    assert dispatch(funded) == 0
    released = 1
    while released < 4:
        funded.put("lanes", {"ticked_us": 1})
        released += dispatch(funded)
    assert funded.message(heavy).state == "due"


def test_a_sleeping_lane_releases_nothing_until_its_workers_answer(funded: Ledger) -> None:
    lane(funded, preflight=True)
    funded.reserve(1)
    # Nobody has asked yet.
    assert funded.relay().published == 0
    note(funded, False, "no consumer on queue 'celery'")
    assert funded.relay().published == 0
    [found] = funded.store.read(lanes.standings, funded.root, "llm")
    assert (found.answer.awake, found.answer.reason) == (False, "no consumer on queue 'celery'")
    note(funded, True, None)
    assert funded.relay().published == 1
    # An answer does not count for ever.
    funded.reserve(1)
    funded.put("lanes", {"checked_us": funded.now() - 11_000_000})
    assert funded.relay().published == 0


def note(ledger: Ledger, awake: bool, reason: str | None) -> None:
    ledger.store.run(preflight.note_answer, ledger.root, "llm", awake, reason)


def test_two_dispatchers_never_release_more_than_one_may(funded: Ledger) -> None:
    """Each round both begin at once, on connections of their own."""
    lane(funded, max_running_jobs=3)
    requests = [funded.reserve(1) for _ in range(12)]
    by_task = {one.task_id: one for one in requests}
    seen: set[str] = set()
    for _ in range(4):
        barrier = threading.Barrier(2)

        def race(barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            Dispatcher(funded.store, funded.settings).run_once()

        threads = [threading.Thread(target=race) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _, queued, running = standing(funded)
        assert queued.jobs + running.jobs == 3
        funded.relay()
        assert standing(funded)[1].jobs == 3
        for task_id in funded.broker.published:
            if task_id not in seen:
                seen.add(task_id)
                assert funded.run(by_task[task_id]).end(RETURNED)
    assert len(seen) == 12


def test_a_dispatcher_that_dies_leaves_nothing_behind(funded: Ledger) -> None:
    """Between its statements and its commit: nothing is released, and no place is lost."""
    lane(funded, max_running_jobs=1, burst_units=5)
    funded.reserve(1)

    def dies(connection: Any) -> None:
        assert dispatching.dispatch(connection, funded.root, "llm") == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        funded.store.run(dies)
    assert standing(funded) == (Load(1, 1), Load(), Load())
    assert funded.relay().published == 1


def test_a_relay_that_dies_after_its_dispatch_leaves_it_to_the_next(funded: Ledger) -> None:
    lane(funded, max_running_jobs=1)
    first = funded.reserve(1)
    funded.reserve(1)
    assert Dispatcher(funded.store, funded.settings).run_once().released == 1
    # It counts as queued, whoever publishes it.
    assert standing(funded) == (Load(1, 1), Load(1, 1), Load())
    assert Dispatcher(funded.store, funded.settings).run_once().released == 0
    assert funded.relay().published == 1
    assert funded.message(first).state == "published"


def test_a_lane_that_another_relay_dispatches_is_left_alone(funded: Ledger) -> None:
    if funded.store.dialect == "sqlite":
        pytest.skip("one writer at a time")
    lane(funded)
    funded.reserve(1)
    with funded.store.transaction() as connection:
        assert dispatching.dispatch(connection, funded.root, "llm") == 1
        # In hand still: the other one waits for nothing.
        assert dispatch(funded) == 0
    assert funded.relay().published == 1


def test_what_a_worker_had_without_a_reservation_counts_and_is_not_refused(funded: Ledger) -> None:
    lane(funded, max_waiting_jobs=0, max_running_jobs=1)
    request = funded.request(1, unreserved=True)
    assert funded.admit(request, delivered=True) == Reserved(request.reservation_id)
    assert standing(funded) == (Load(), Load(1, 1), Load())
    funded.run(request)
    assert standing(funded) == (Load(), Load(), Load(1, 1))


def test_without_lanes_a_pass_looks_once(funded: Ledger) -> None:
    assert relay.run_once(
        funded.store, funded.settings, funded.broker, funded.results.ended
    ) == replace(relay.Relayed())


def test_a_lane_that_cannot_be_dispatched_is_told_and_tried_again(
    funded: Ledger, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane(funded)
    funded.reserve(1)

    def locked(*_: object) -> None:
        raise ConnectionError("locked")

    with monkeypatch.context() as patched:
        patched.setattr(dispatching, "dispatch", locked)
        assert funded.relay().published == 0
    assert told("lane.failed") == [{"lane": "llm"}]
    assert funded.relay().published == 1


def test_what_cannot_be_ended_is_told_and_ended_by_the_next_pass(
    funded: Ledger, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane(funded, max_wait_us=60_000_000, paused=True)
    request = funded.reserve(1)
    funded.put("outbox", {"due_us": funded.now() - 61_000_000})

    def locked(*_: object) -> None:
        raise ConnectionError("locked")

    with monkeypatch.context() as patched:
        patched.setattr(dispatching, "end", locked)
        funded.relay()
    assert told("lane.end_failed") == [{"task_id": request.task_id}]
    assert funded.relay().released == 1
