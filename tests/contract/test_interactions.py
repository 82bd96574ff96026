"""What lanes, parking, deadlines, jobs and looks are to each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import admission
from celery_budget.core.identity import task_id_of
from celery_budget.core.jobs import job_state
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    Backlogged,
    Closed,
    Line,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
)
from celery_budget.dispatcher import Dispatcher
from celery_budget.errors import BudgetExceeded, OutboxFull, QueueFull
from celery_budget.relay import Unpublishable
from celery_budget.store import (
    continuations,
    dispatching,
    jobs,
    lanes,
    quarantine,
    queues,
    reuse,
    unclaimed,
)
from tests.contract.support import RETRIED, RETURNED, Ledger, admit_many, message_of

Q = "celery"
SECOND = 1_000_000


class Dies(Exception):
    """A process that ends between two statements."""


def lane(ledger: Ledger, name: str = "llm", **terms: Any) -> None:
    given = {"queues": (Q,), "preflight": False, **terms}
    ledger.store.run(lanes.declare, ledger.root, name, given)


def known(ledger: Ledger, request: ReserveRequest, owner: str = "b") -> jobs.Known:
    found = ledger.store.read(jobs.find, ledger.root, request.task_id, owner)
    assert found is not None
    return found


def state(ledger: Ledger, request: ReserveRequest) -> str | None:
    found = known(ledger, request)
    flags = {"parked": found.parked, "quarantined": found.quarantined}
    return job_state(found.state, found.reason, found.outcome, **flags)


def position(ledger: Ledger, request: ReserveRequest) -> int | None:
    return known(ledger, request).position


def held(ledger: Ledger, request: ReserveRequest) -> bool:
    return bool(ledger.message(request).state == "held")


def look(ledger: Ledger, amount: int, queue: str | None = Q, budget: str = "b") -> Any:
    asked = [Line(budget, amount)]
    return admission.outlook(ledger.store, ledger.settings, asked, queue=queue)


@pytest.fixture
def funded(ledger: Ledger) -> Ledger:
    ledger.set("b", 10_000)
    return ledger


@pytest.mark.parametrize("bound", ["deadline", "expires", "both"])
def test_what_is_held_past_its_deadline_says_which(funded: Ledger, bound: str) -> None:
    lane(funded, paused=True)
    soon, later = funded.now() + 3600 * SECOND, funded.now() + 7200 * SECOND
    deadline_us = {"deadline": soon, "expires": later, "both": soon}[bound]
    expires_us = None if bound == "deadline" else soon
    request = funded.reserve(7, deadline_us=deadline_us, expires_us=expires_us)
    funded.put("outbox", {"expires_us": 2}, reservation_id=request.reservation_id)
    over = 3 if bound == "expires" else 2
    funded.put("reservations", {"deadline_us": over}, reservation_id=request.reservation_id)
    [ended] = Dispatcher(funded.store, funded.settings).run_once().ended
    assert ended == request.task_id
    reason = "expired" if bound == "expires" else "deadline"
    assert (funded.row(request).state, funded.row(request).reason) == ("released", reason)
    assert [row.reason for row in funded.rows("untold")] == [reason]
    assert state(funded, request) == "expired"
    assert funded.balance() == (0, 0)


@pytest.mark.parametrize("ran", [False, True])
def test_a_job_that_its_lane_held_for_too_long_is_expired(funded: Ledger, ran: bool) -> None:
    request = funded.reserve(5)
    if ran:
        attempt = funded.run(request)
        attempt.record(2)
        lane(funded, max_wait_us=SECOND)
        request, _ = funded.retry(request, attempt)
        assert attempt.end(RETRIED)
    else:
        lane(funded, max_wait_us=SECOND)
        request = funded.reserve(5)
    assert state(funded, request) == "queued"
    funded.make_due(request)
    assert len(Dispatcher(funded.store, funded.settings).run_once().ended) == 1
    assert funded.row(request).reason == "wait_expired"
    assert state(funded, request) == "expired"
    assert known(funded, request).position is None


@pytest.mark.parametrize("many", [0, 1, 2])
def test_what_its_lane_could_never_release_is_not_parked(funded: Ledger, many: int) -> None:
    lane(funded, max_running_units=50)
    funded.set("c", 10)
    request = funded.request(51, budget="c", parks=True)
    other = funded.request(50, budget="c", parks=True)
    if not many:
        with pytest.raises(QueueFull) as caught:
            funded.admit(request)
        assert (caught.value.reason, caught.value.retry_after) == ("heavy", None)
        assert isinstance(funded.admit(other), Parked)
    else:
        asked = [(one, message_of(one)) for one in (request, other)[:many]]
        tried = admit_many(funded.store, funded.settings, asked, best_effort=True)
        assert type(tried[0]).__name__ == "Full"
        assert many == 1 or isinstance(tried[1], Parked)
    assert [row.amount for row in funded.rows("parked")] == ([50] if many != 1 else [])
    assert not funded.rows("reservations")


def test_what_waits_for_budget_is_parked_however_full_its_lane_is(funded: Ledger) -> None:
    """It waits for its budget, and is no part of what the lane holds."""
    lane(funded, max_waiting_jobs=1)
    first = funded.reserve(9_995)
    parked = funded.request(6, parks=True)
    assert isinstance(funded.admit(parked), Parked)
    assert state(funded, parked) == "parked"
    with pytest.raises(QueueFull):
        funded.admit(funded.request(5, parks=True))
    assert funded.relay().published == 1
    attempt = funded.run(first)
    attempt.record(1)
    assert attempt.end(RETURNED)
    assert funded.reserve(5)
    assert funded.sweep().admitted == 1
    assert (state(funded, parked), position(funded, parked)) == ("queued", 1)


def test_a_retry_that_was_parked_is_held_when_it_fits(funded: Ledger) -> None:
    lane(funded, max_running_jobs=1)
    request = funded.reserve(6_000, tenant="team")
    assert funded.relay().published == 1
    attempt = funded.run(request)
    attempt.record(6_000)
    following, written = funded.retry(request, attempt)
    assert isinstance(written, Parked)
    assert attempt.end(RETRIED)
    assert state(funded, following) == "parked"
    funded.set("b", 20_000)
    funded.store.run(lanes.pause, funded.root, "llm", True)
    assert funded.sweep().admitted == 1
    message = funded.message(following)
    assert (message.state, message.lane, message.tenant) == ("held", "llm", "team")
    assert (state(funded, following), position(funded, following)) == ("queued", 0)
    assert funded.store.run(lanes.pause, funded.root, "llm", False)
    assert funded.relay().published == 1
    assert funded.run(following).end(RETURNED)


def test_the_position_in_a_lane_is_that_among_its_tenants(funded: Ledger) -> None:
    lane(funded, max_queued_jobs=1, ageing=100)
    assert position(funded, funded.reserve(1, queue="elsewhere")) is None
    assert funded.relay().published == 1
    weights = (500, 40, 9_000, 40)
    requests = [funded.reserve(weight) for weight in weights]
    funded.set("c", 100)
    other = funded.reserve(1, budget="c")
    now = funded.now()
    for seconds, request in zip((0, 0, 1000, 1), requests, strict=True):
        due = {"due_us": now - seconds * SECOND}
        funded.put("outbox", due, reservation_id=request.reservation_id)
    # 9,000 is 100,000 lighter by its wait; of two alike the older one goes first.
    assert [position(funded, one) for one in requests] == [3, 2, 0, 1]
    assert known(funded, other, "c").position == 0
    # The other tenant has its turns among them.
    order = []
    for _ in (*requests, other):
        assert funded.relay().published == 1
        [released] = [
            one for one in (*requests, other) if one not in order and not held(funded, one)
        ]
        order.append(released)
        assert funded.run(released).end(RETURNED)
    order.remove(other)
    assert [requests.index(one) for one in order] == [2, 3, 1, 0]


@pytest.mark.parametrize("ageing", [0, 1, 2**63 - 1])
def test_positions_of_the_heaviest(ledger: Ledger, ageing: int) -> None:
    ledger.set("b", None)
    lane(ledger, ageing=ageing)
    largest = 2**63 - 1
    ledger.set("c", None)
    heavy = ledger.reserve(2**62)
    light = ledger.reserve(0)
    due = {"due_us": ledger.now()}
    ledger.put("outbox", due)
    assert (position(ledger, light), position(ledger, heavy)) == (0, 1)
    most = ledger.reserve(largest, budget="c", tenant="b", owner="c")
    ledger.put("outbox", due)
    assert known(ledger, most, "c").position == 2
    assert position(ledger, light) == 0


def test_a_position_is_a_few_reads_however_much_is_held(funded: Ledger) -> None:
    lane(funded)
    asked = [(one, message_of(one)) for one in (funded.request(1) for _ in range(30))]
    admit_many(funded.store, funded.settings, asked)
    last = funded.reserve(2)
    statements: list[str] = []

    def counted(connection: sa.Connection, *args: Any) -> Any:
        sa.event.listen(
            connection, "before_cursor_execute", lambda *told: statements.append(told[2])
        )
        return jobs.find(connection, *args)

    found = funded.store.read(counted, funded.root, last.task_id, "b")
    assert found is not None
    assert found.position == 30
    assert len([one for one in statements if one.startswith("SELECT")]) == 6


def test_a_look_sees_what_goes_ahead(funded: Ledger) -> None:
    funded.reserve(9_995)
    first = funded.request(10, parks=True)
    assert isinstance(funded.admit(first), Parked)
    assert look(funded, 5)
    [row] = funded.rows("parked")
    funded.store.run(queues.go_ahead, funded.root, row.parked_id, 3600 * SECOND)
    before = funded.dump()
    seen = look(funded, 5)
    assert isinstance(seen.error, BudgetExceeded)
    assert seen.error.reason == "queued"
    assert funded.dump() == before
    asked = [Line("b", 5)]
    assert admission.outlook(funded.store, funded.settings, asked, finishing=True)
    outcome = funded.admit(funded.request(5))
    assert isinstance(outcome, Refused)
    told = outcome.error()
    assert (told.limit, told.reserved, told.spent) == (
        seen.error.limit,
        seen.error.reserved,
        seen.error.spent,
    )


def test_a_look_sees_the_lane_of_its_queue(funded: Ledger) -> None:
    lane(funded, max_waiting_jobs=2, max_waiting_units=20, max_running_units=15)
    assert look(funded, 15)
    heavy = look(funded, 16)
    assert (heavy.error.reason, heavy.retry_after) == ("heavy", None)
    assert look(funded, 16, "elsewhere")
    assert look(funded, 16, None)
    funded.reserve(10)
    units = look(funded, 11)
    assert (units.error.reason, units.error.waiting) == ("units", 10)
    assert units.retry_after is not None
    funded.reserve(1)
    before = funded.dump()
    jobs_full = look(funded, 1)
    assert funded.dump() == before
    with pytest.raises(QueueFull) as caught:
        funded.admit(funded.request(1))
    shown, told = vars(jobs_full.error), vars(caught.value)
    for one in (shown, told):
        one["retry_after"] = one["retry_after"] is not None
    assert shown == told


def test_a_look_at_a_large_backlog_notes_no_count(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_budget.store.waiting.MOST_COUNTED", 2)
    lane(funded, max_waiting_jobs=3)
    asked = [(one, message_of(one)) for one in (funded.request(1) for _ in range(3))]
    assert all(
        isinstance(one, Reserved) for one in admit_many(funded.store, funded.settings, asked)
    )
    before = funded.dump()
    seen = look(funded, 1)
    assert (seen.error.reason, seen.error.waiting) == ("jobs", 3)
    assert funded.dump() == before


def test_a_held_message_keeps_its_tenant_through_quarantine(funded: Ledger) -> None:
    lane(funded)
    request = funded.reserve(5, tenant="team")

    def refuse(message: WireMessage) -> None:
        raise Unpublishable("unroutable", "no queue")

    funded.broker.on_publish = refuse
    assert funded.relay().quarantined == 1
    again = (quarantine.requeue, funded.root, request.task_id, lambda wire, _: wire)
    assert isinstance(funded.store.run(*again, lock_ms=5000, bound=1000), Reserved)
    [message] = funded.rows("outbox")
    assert (message.state, message.lane, message.tenant, message.weight) == (
        "held",
        "llm",
        "team",
        5,
    )


def test_another_owners_parked_request_with_the_same_task_id_is_not_told(funded: Ledger) -> None:
    funded.set("c", 10)
    request = funded.reserve(5)
    assert funded.run(request).end(RETURNED)
    other = replace(funded.request(11, budget="c", parks=True), task_id=request.task_id)
    assert isinstance(funded.admit(other), Parked)
    assert state(funded, request) == "succeeded"


def test_a_queue_that_goes_to_another_lane(funded: Ledger) -> None:
    """What is held stays in its lane, and goes by that; what comes goes to the other."""
    lane(funded, max_running_jobs=1)
    first, second = funded.reserve(1), funded.reserve(2)
    assert funded.relay().published == 1
    lane(funded, queues=("none",))
    lane(funded, "other", paused=True)
    third = funded.reserve(3)
    lanes_of = [funded.message(one).lane for one in (first, second, third)]
    assert lanes_of == ["llm", "llm", "other"]
    attempt = funded.run(first)
    attempt.record(1)
    following, _ = funded.retry(first, attempt)
    assert attempt.end(RETRIED)
    assert funded.message(following).lane == "other"
    assert funded.relay().published == 1
    assert funded.message(second).state == "published"


def test_odd_names(ledger: Ledger) -> None:
    name, queue = 'l\'ane "%s" ü:{x}\\', "q'ueue %(x)s :y"
    ledger.set("b'ud:get%", 100)
    lane(ledger, name, queues=(queue,), max_running_jobs=1)
    request = ledger.reserve(5, budget="b'ud:get%", queue=queue, tenant="t%' :x\U0001f600")
    ledger.reserve(5, budget="b'ud:get%", queue=queue, tenant="t%' :x\U0001f600")
    assert look(ledger, 5, queue, "b'ud:get%")
    assert known(ledger, request, "b'ud:get%").position == 0
    assert ledger.relay().published == 1
    assert ledger.run(request).end(RETURNED)
    assert ledger.relay().published == 1


def test_weights_whose_sum_is_no_amount(ledger: Ledger) -> None:
    largest = 2**63 - 1
    for budget in "abc":
        ledger.set(budget, None)
    lane(ledger, max_running_jobs=2, max_waiting_units=largest)
    assert isinstance(ledger.admit(ledger.request(largest, budget="a")), Reserved)
    with pytest.raises(QueueFull) as caught:
        ledger.admit(ledger.request(1, budget="b"))
    assert caught.value.reason == "units"
    assert not look(ledger, 1, budget="b")
    lane(ledger, max_waiting_units=None)
    for budget in "bc":
        ledger.reserve(largest, budget=budget)
    [standing] = ledger.store.read(lanes.standings, ledger.root, "llm")
    assert standing.waiting.units == 3 * largest
    assert ledger.relay().published == 2
    [standing] = ledger.store.read(lanes.standings, ledger.root, "llm")
    assert standing.queued.units == 2 * largest


@pytest.mark.parametrize("many", [False, True])
def test_a_budget_that_is_short_is_told_before_an_outbox_that_is_full(
    funded: Ledger, many: bool
) -> None:
    """So that what is to wait for its budget does, on either store."""
    funded.reserve(9_990)
    bound = funded.settings.max_outbox
    funded.put("backlog", {"messages": bound, "counted_us": 2**62})

    def admitted(request: ReserveRequest) -> Any:
        asked = [(request, message_of(request))]
        asked += [(one, message_of(one)) for one in [funded.request(1)] if many]
        return admit_many(funded.store, funded.settings, asked, best_effort=True)

    assert isinstance(admitted(funded.request(11))[0], Refused)
    assert isinstance(admitted(funded.request(11, parks=True))[0], Parked)
    assert all(isinstance(one, Backlogged) for one in admitted(funded.request(10)))
    assert isinstance(funded.admit(funded.request(11)), Refused)
    with pytest.raises(OutboxFull):
        funded.admit(funded.request(10))
    assert isinstance(look(funded, 11).error, BudgetExceeded)
    assert isinstance(look(funded, 10).error, OutboxFull)
    assert funded.balance() == (9_990, 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_does_not_run_past_a_lane_that_is_younger_than_its_request(
    funded: Ledger, when: str
) -> None:
    """A lost attempt's message waits in a lane; the broker delivers its own copy once more."""
    if when == "before":
        lane(funded, paused=True)
    request = funded.reserve(5)
    if when == "after":
        funded.relay()
    funded.run(request)
    if when == "after":
        lane(funded, paused=True)
    funded.lapse(request)
    funded.recover()
    assert funded.message(request).state == "held"
    before = funded.dump()
    assert funded.deliver(request) == Closed("waiting")
    copy = (funded.root, request.reservation_id, request.task_id, request.retries)
    assert not funded.store.run(unclaimed.end, *copy, "undecodable")
    again = (funded.root, request.task_id, request.retries, False, 1)
    assert not funded.store.run(unclaimed.lost, *again)
    assert funded.dump() == before
    funded.store.run(lanes.pause, funded.root, "llm", False)
    assert funded.relay().published == 1
    assert funded.run(request).end(RETURNED)


def test_order_keys_of_held_work_and_a_parked_member(funded: Ledger) -> None:
    """What is parked has no place among the messages; cancelled or admitted, the others go on."""
    lane(funded, max_running_jobs=1)
    first = funded.reserve(1, order_key="k")
    big = funded.request(10_001, parks=True)
    assert isinstance(funded.admit(big, order_key="k"), Parked)
    second = funded.reserve(2, order_key="k")
    third = funded.reserve(3, order_key="k")
    assert funded.relay().published == 1
    assert funded.message(first).state == "published"
    funded.set("b", 20_000)
    assert funded.sweep().admitted == 1
    assert funded.store.run(continuations.cancel, funded.root, second.task_id)
    order = []
    for _ in range(2):
        running = first if not order else order[-1]
        assert funded.run(running).end(RETURNED)
        assert funded.relay().published == 1
        order += [one for one in (third, big) if one not in order and not held(funded, one)]
    assert order == [third, big]


def test_a_group_goes_into_a_lane_whole_or_not_at_all(funded: Ledger) -> None:
    lane(funded, max_waiting_jobs=2)
    requests = [funded.request(1) for _ in range(3)]
    asked = [(one, message_of(one)) for one in requests]
    tried = admit_many(funded.store, funded.settings, asked)
    assert [type(one).__name__ for one in tried] == ["Skipped", "Skipped", "Full"]
    assert not funded.rows("outbox")
    assert funded.balance() == (0, 0)
    tried = admit_many(funded.store, funded.settings, asked, best_effort=True)
    assert [type(one).__name__ for one in tried] == ["Reserved", "Reserved", "Full"]
    # What continues running work is held all the same.
    body = funded.request(1, finishing=True)
    assert isinstance(funded.admit(body, continuation=True), Reserved)
    assert held(funded, body)


def test_reuse_joins_what_is_parked_and_begins_anew_once_it_was_given_up(funded: Ledger) -> None:
    of = (funded.root, "b", "key", 3600 * SECOND)
    request_id = funded.store.run(reuse.renewed, *of)
    task_id = task_id_of("b", request_id)
    request = funded.request(10_001, parks=True, task_id=task_id, request_id=request_id)
    assert isinstance(funded.admit(request), Parked)
    assert funded.store.read(reuse.joined, *of) == request_id
    assert funded.store.run(reuse.renewed, *of) == request_id
    funded.put("reuse", {"until_us": 1})
    assert funded.store.run(reuse.prune, funded.root, 10) == 0
    funded.put("parked", {"deadline_us": 1})
    assert funded.sweep().over == (task_id,)
    assert state(funded, request) == "expired"
    assert funded.store.read(reuse.joined, *of) is None
    again = funded.store.run(reuse.renewed, *of)
    assert again != request_id
    assert funded.store.run(reuse.forget, funded.root, task_id_of("b", again), "b")


def test_reuse_of_what_its_lane_held_for_too_long_begins_anew(funded: Ledger) -> None:
    lane(funded, max_wait_us=SECOND)
    of = (funded.root, "b", "key", 3600 * SECOND)
    request_id = funded.store.run(reuse.renewed, *of)
    request = funded.reserve(5, task_id=task_id_of("b", request_id), request_id=request_id)
    assert funded.store.read(reuse.joined, *of) == request_id
    funded.make_due(request)
    assert len(Dispatcher(funded.store, funded.settings).run_once().ended) == 1
    assert funded.store.read(reuse.joined, *of) is None


@pytest.mark.parametrize("where", ["dispatch", "sweep"])
def test_a_process_that_dies_after_any_statement_leaves_all_or_nothing(
    funded: Ledger, where: str
) -> None:
    lane(funded, max_running_jobs=2, burst_units=100)
    first = funded.reserve(9_000)
    assert funded.relay().published == 1
    attempt = funded.run(first)
    attempt.record(1)
    if where == "sweep":
        waits = funded.request(2_000, parks=True)
        assert isinstance(funded.admit(waits), Parked)
        assert attempt.end(RETURNED)
        [row] = funded.rows("parked")
        function: Any = continuations.try_parked
        args: tuple[Any, ...] = (funded.root, row.parked_id, "b", 5000)
    else:
        for weight in (1, 2, 3):
            funded.reserve(weight)
        assert attempt.end(RETURNED)
        funded.put("lanes", {"ticked_us": 0})
        function, args = dispatching.dispatch, (funded.root, "llm")
    before = funded.dump()

    def dying(connection: sa.Connection, after: int) -> Any:
        count = 0

        def executed(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == after:
                raise Dies

        sa.event.listen(connection, "after_cursor_execute", executed)
        return function(connection, *args)

    for after in range(1, 40):
        try:
            assert funded.store.run(dying, after)
            break
        except Dies:
            assert funded.dump() == before
    else:
        pytest.fail("it never came to its end")
    assert after > 3
    if where == "sweep":
        assert (state(funded, waits), position(funded, waits)) == ("queued", 0)
    else:
        assert sorted(row.state for row in funded.rows("outbox"))[:3] == ["due", "due", "held"]
