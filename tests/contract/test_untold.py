"""Results of what ended without running: the ledger first, then told, once, by whoever can."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import sqlalchemy as sa

from celery_budget import parking, recovery, settlement, telling
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Parked, Reserved, ReserveRequest
from celery_budget.errors import RequestEnding
from celery_budget.recovery import Recovered
from celery_budget.relay import Unpublishable
from celery_budget.store import lapses, outbox, parked, quarantine, untold
from celery_budget.store import silent as silent_messages
from tests.contract.racers import Beside, at_once
from tests.contract.support import BOOT, RETURNED, Ledger, message_of
from tests.messages import Told

PAST = 5
SECOND_US = 1_000_000


class Crash(BaseException):
    """Ends a process before it has told anybody."""


def refuse(message: WireMessage) -> None:
    raise Unpublishable("oversize", "no way")


# Ways to end a request that does not run (again); each returns it, and why it ended.


def expire(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request = ledger.reserve(1, expires_us=PAST)
    ledger.relay()
    return request, "expired"


def isolate(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request = ledger.reserve(1)
    ledger.broker.on_publish = refuse
    ledger.relay()
    ledger.broker.on_publish = lambda message: None
    return request, "unpublishable"


def never_start(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request = silent(ledger, publishes=ledger.settings.max_publishes)
    assert ledger.recover().undelivered == 1
    return request, "undelivered"


def lose(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request, _ = ledger.start(1, late_ack=False)
    ledger.lapse(request)
    assert ledger.recover().lost == 1
    return request, "lost"


def lose_its_message(ledger: Ledger) -> tuple[ReserveRequest, str]:
    """It would run again, but there is nothing to publish."""
    request, _ = ledger.start(1)
    ledger.store.run(outbox.drop, ledger.root, request.reservation_id)
    ledger.lapse(request)
    assert ledger.recover().lost == 1
    return request, "lost"


def give_up(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request = ledger.request(1000)
    assert isinstance(ledger.admit(request, continuation=True), Parked)
    ledger.put("parked", {"deadline_us": PAST})
    parking.run_once(ledger.store, ledger.settings)
    return request, "park_expired"


def give_up_a_retry(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request, attempt = ledger.start(60)
    attempt.record(50)
    ledger.retry(request, attempt)
    attempt.end(replace(RETURNED, kind="retried", payload=None))
    ledger.put("parked", {"deadline_us": PAST})
    parking.run_once(ledger.store, ledger.settings)
    return request, "park_expired"


def cancel(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request = ledger.reserve(1)
    settlement.cancel(ledger.store, ledger.settings, request.task_id)
    return request, "cancelled"


def cancel_what_waits(ledger: Ledger) -> tuple[ReserveRequest, str]:
    request = ledger.request(1000)
    assert isinstance(ledger.admit(request, continuation=True), Parked)
    settlement.cancel(ledger.store, ledger.settings, request.task_id)
    return request, "cancelled"


WAYS = [
    expire,
    isolate,
    never_start,
    lose,
    lose_its_message,
    give_up,
    give_up_a_retry,
    cancel,
    cancel_what_waits,
]
End = Callable[[Ledger], tuple[ReserveRequest, str]]


def silent(ledger: Ledger, publishes: int = 1) -> ReserveRequest:
    """A request whose message was published, and that nobody has started in its time."""
    request = ledger.reserve(1)
    ledger.relay()
    ledger.put("outbox", {"publishes": publishes}, reservation_id=request.reservation_id)
    ledger.make_due(request)
    return request


def lapsed(ledger: Ledger, late_ack: bool = False) -> ReserveRequest:
    request, _ = ledger.start(1, late_ack=late_ack)
    ledger.lapse(request)
    return request


def unreachable(ledger: Ledger, *of: ReserveRequest) -> list[str]:
    """Have a backend that is down for these tasks, or for all; who was asked for."""
    asked: list[str] = []
    ids = {request.task_id for request in of}
    stored = ledger.results

    def ask(task_id: str) -> None:
        asked.append(task_id)
        if not of or task_id in ids:
            raise ConnectionError("no backend")

    def ready(task_id: str) -> str | None:
        ask(task_id)
        return None

    def ended(task_id: str, reason: str) -> None:
        ask(task_id)
        stored.told.append((task_id, reason))

    ledger.results = replace(stored)
    ledger.results.ready = ready  # type: ignore[method-assign]
    ledger.results.ended = ended  # type: ignore[method-assign]
    return asked


# The ledger first


@pytest.mark.parametrize("by", ["worker", "relay"])
@pytest.mark.parametrize("budgeted", [True, False])
def test_what_is_claimed_after_a_relay_has_taken_it_gets_no_result(
    funded: Ledger, budgeted: bool, by: str
) -> None:
    """By a worker that has an earlier copy, or by another relay."""
    good = funded.reserve(1, rank=0)
    over = funded.request(1)
    message = message_of(over, rank=9, expires_us=PAST)
    if budgeted:
        funded.admit(over, rank=9, expires_us=PAST)
    else:
        funded.store.run(outbox.enqueue, funded.root, message)

    def meanwhile(message: WireMessage) -> None:
        assert message.task_id == good.task_id
        if budgeted and by == "worker":
            funded.run(over)
        else:
            funded.put("outbox", {"taken_by": good.reservation_id}, task_id=over.task_id)

    funded.broker.on_publish = meanwhile
    relayed = funded.relay()
    assert (relayed.taken, relayed.released) == (2, 0)
    assert (funded.results.told, funded.rows("untold")) == ([], [])
    assert len(funded.rows("outbox", task_id=over.task_id)) == 1
    if budgeted:
        assert funded.state(over) == ("running" if by == "worker" else "reserved")


def test_what_is_claimed_while_it_is_refused_gets_no_result(funded: Ledger) -> None:
    request = funded.reserve(1)

    def meanwhile(message: WireMessage) -> None:
        funded.run(request)
        refuse(message)

    funded.broker.on_publish = meanwhile
    assert funded.relay().quarantined == 0
    assert funded.state(request) == "running"
    assert (funded.results.told, funded.rows("untold")) == ([], [])


def test_what_is_claimed_while_it_is_given_up_gets_no_result(funded: Ledger) -> None:
    request = silent(funded, publishes=funded.settings.max_publishes)
    funded.results.ready = lambda task_id: (  # type: ignore[method-assign, func-returns-value]
        funded.run(request) and None
    )
    assert funded.recover() == Recovered()
    assert funded.state(request) == "running"
    assert funded.results.told == []


def test_what_is_renewed_while_it_is_given_up_gets_no_result(funded: Ledger) -> None:
    request, attempt = funded.start(1, late_ack=False)
    funded.lapse(request)

    def renew(task_id: str) -> None:
        assert settlement.renew(funded.store, funded.settings, [task_id], BOOT, []) == 1

    funded.results.ready = renew  # type: ignore[method-assign, assignment]
    assert funded.recover() == Recovered()
    assert funded.results.told == []
    assert attempt.end(RETURNED)


def test_what_is_admitted_while_it_is_given_up_gets_no_result(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    funded.set("b", 0)
    request = funded.request(1)
    assert isinstance(funded.admit(request, continuation=True), Parked)
    funded.put("parked", {"deadline_us": PAST})
    seen = funded.store.read(parked.over, funded.root, 1)
    funded.put("parked", {"deadline_us": 2**62})
    funded.set("b", 100)
    assert funded.sweep().admitted == 1
    monkeypatch.setattr(parked, "over", lambda *_: seen)
    assert funded.sweep() == funded.sweep()
    assert funded.state(request) == "reserved"
    assert funded.rows("untold") == []


@pytest.mark.parametrize("end", [expire, cancel, lose])
def test_it_is_told_when_nothing_is_locked(funded: Ledger, end: End) -> None:
    def ended(task_id: str, reason: str) -> None:
        Beside(lambda: funded.reserve(1)).result()
        if funded.store.dialect == "postgresql":
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
            mine = f"{idle} AND datname = current_database()"
            with funded.store.statement() as connection:
                assert connection.execute(sa.text(mine)).scalar_one() == 0
        stored.append(task_id)

    stored: list[str] = []
    funded.results.ended = ended  # type: ignore[method-assign]
    request, _ = end(funded)
    telling.tell_task(funded.store, funded.root, funded.results.ended, request.task_id)
    assert stored == [request.task_id]


@pytest.mark.parametrize("task", ["shop.notify", ""])
def test_an_event_has_no_result(ledger: Ledger, task: str) -> None:
    for name, expires_us in (("over", PAST), ("refused", None)):
        message = WireMessage(name, task, b"", "{}", "celery", 0, expires_us)
        ledger.store.run(outbox.enqueue, ledger.root, message)
    ledger.broker.on_publish = refuse
    relayed = ledger.relay()
    assert (relayed.released, relayed.quarantined) == (1, 1)
    told = {("over", "expired"), ("refused", "unpublishable")} if task else set()
    assert set(ledger.results.told) == told
    assert ledger.rows("untold") == []


def test_what_celery_tells_is_not_told_again(funded: Ledger) -> None:
    """A worker that knows that a process is gone; one that has got a revoked message."""
    lost, _ = funded.start(1, late_ack=False)
    assert not settlement.worker_lost(funded.store, funded.settings, lost.task_id, BOOT, True)
    revoked, unclaimed = funded.reserve(1), funded.reserve(1)
    settlement.revoke(funded.store, funded.root, revoked.reservation_id, "revoked")
    settlement.worker_lost(funded.store, funded.settings, unclaimed.task_id, BOOT, False)
    assert [funded.state(one) for one in (lost, revoked, unclaimed)] == [
        "lost",
        "released",
        "released",
    ]
    assert funded.rows("untold") == []


# Crashes, and a backend that is down


@pytest.mark.parametrize("end", WAYS)
def test_what_a_process_could_not_tell_any_more_is_told_once(funded: Ledger, end: End) -> None:
    def crash(task_id: str, reason: str) -> None:
        raise Crash

    whole, funded.results = funded.results, replace(funded.results)
    funded.results.ended = crash  # type: ignore[method-assign]
    with suppress(Crash):
        end(funded)
    [row] = funded.rows("untold")
    assert funded.rows("reservations", task_id=row.task_id)[0].ended_us is not None
    funded.results = whole
    assert funded.tell_all() == Recovered(told=1)
    assert funded.results.told == [(row.task_id, row.reason)]
    assert funded.rows("untold") == []
    assert funded.recover() == Recovered()


@pytest.mark.parametrize("end", WAYS)
def test_a_backend_that_is_down_keeps_nothing_from_ending(funded: Ledger, end: End) -> None:
    whole = funded.results
    asked = unreachable(funded)
    # What looks for a result that is there needs an answer.
    funded.results.ready = whole.ready  # type: ignore[method-assign]
    request, reason = end(funded)
    assert funded.state(request) in ("released", "settled", "lost")
    assert funded.message(request) is None
    assert len(asked) <= 1
    funded.results = whole
    assert funded.tell_all().told == 1
    assert whole.told == [(request.task_id, reason)]


def test_a_backend_that_is_down_is_asked_three_times_in_a_pass(funded: Ledger) -> None:
    requests = [cancel(funded)[0] for _ in range(5)]
    whole = funded.results
    asked = unreachable(funded)
    for wanted in (3, 5, 5):
        assert funded.recover() == Recovered()
        assert asked == [request.task_id for request in requests][:wanted]
    assert [row.tries for row in funded.rows("untold")] == [-1] * 5
    funded.results = whole
    assert funded.tell_all().told == 5
    assert [task_id for task_id, _ in whole.told] == [request.task_id for request in requests]


def test_one_that_cannot_be_told_waits_longer_each_time_and_holds_up_nobody(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untold, "backoff_seconds", lambda tries, first, longest: 100 * tries)
    bad, good = cancel(funded)[0], cancel(funded)[0]
    asked = unreachable(funded, bad)
    assert funded.recover() == Recovered(told=1)
    assert funded.results.told == [(good.task_id, "cancelled")]
    assert asked == [bad.task_id, good.task_id]
    for tries in (2, 3):
        assert funded.tell_all() == Recovered()
        [row] = funded.rows("untold")
        assert row.tries == -tries
        assert 0 <= row.due_us - funded.now() - (100 * tries - 60) * SECOND_US < 61 * SECOND_US
    assert funded.recover() == Recovered(), "its time has not come"
    assert len(asked) == 4


def test_of_many_that_look_one_tells(racing: Ledger) -> None:
    request, _ = cancel(racing)
    told: list[str] = []
    tell = partial(
        telling.tell, racing.store, racing.root, lambda task_id, reason: told.append(task_id)
    )
    [seen] = racing.store.read(untold.due, racing.root, 10)
    assert sorted(at_once([lambda: tell(seen)] * 6)) == [False] * 5 + [True]
    assert told == [request.task_id]


def test_what_is_being_told_is_told_by_nobody_else(funded: Ledger) -> None:
    cancel(funded)
    [seen] = funded.store.read(untold.due, funded.root, 10)
    others: list[bool] = []

    def ended(task_id: str, reason: str) -> None:
        others.append(telling.tell(funded.store, funded.root, ended, seen))
        assert funded.recover() == Recovered()

    assert telling.tell(funded.store, funded.root, ended, seen)
    assert others == [False]


# Ids that are in use again


@pytest.mark.parametrize("end", [expire, isolate, never_start, give_up, cancel])
@pytest.mark.parametrize("ends", [False, True])
def test_what_was_admitted_anew_is_not_told_of_the_first(
    funded: Ledger, end: End, ends: bool
) -> None:
    whole = funded.results
    unreachable(funded)
    funded.results.ready = whole.ready  # type: ignore[method-assign]
    request, _ = end(funded)
    funded.results = whole
    assert len(funded.rows("untold")) == 1
    again = funded.reserve(1, task_id=request.task_id)
    if ends:
        attempt = funded.run(again)
        assert attempt.end(RETURNED)
        assert attempt.close()
    assert funded.tell_all() == Recovered()
    assert (whole.told, funded.rows("untold")) == ([], [])


@pytest.mark.parametrize("budgeted", [True, False])
def test_what_was_published_again_from_quarantine_is_not_told(
    funded: Ledger, budgeted: bool
) -> None:
    whole = funded.results
    unreachable(funded)
    request = funded.request(1)
    if budgeted:
        funded.admit(request)
    else:
        funded.store.run(outbox.enqueue, funded.root, message_of(request))
    other, _ = cancel(funded)
    funded.broker.on_publish = refuse
    assert funded.relay().quarantined == 1
    funded.results = whole
    assert len(funded.rows("untold")) == 2
    again = (quarantine.requeue, funded.root, request.task_id, lambda wire, _: wire)
    assert isinstance(funded.store.run(*again, lock_ms=5000, bound=None), Reserved)
    assert funded.tell_all() == Recovered(told=1)
    assert whole.told == [(other.task_id, "cancelled")]


@pytest.mark.parametrize("end", [expire, isolate, never_start, give_up, cancel])
@pytest.mark.parametrize("dies", [False, True])
def test_what_is_admitted_while_the_first_is_told_is_published_after_it(
    funded: Ledger, end: End, dies: bool
) -> None:
    whole = funded.results
    unreachable(funded)
    funded.results.ready = whole.ready  # type: ignore[method-assign]
    request, reason = end(funded)
    funded.put("untold", {"due_us": 1, "tries": 0})
    [seen] = funded.store.read(untold.due, funded.root, 10)
    again: list[ReserveRequest] = []

    def ended(task_id: str, reason: str) -> None:
        again.append(funded.reserve(1, task_id=task_id))
        other = funded.reserve(1)
        before = len(funded.broker.published)
        assert funded.relay().published == 1
        assert funded.broker.published[before:] == [other.task_id]
        assert funded.relay().taken == 0
        whole.told.append((task_id, reason))
        if dies:
            raise Crash

    with suppress(Crash):
        assert telling.tell(funded.store, funded.root, ended, seen)
    assert whole.told == [(request.task_id, reason)]
    funded.results = whole
    if dies:
        assert funded.tell_all() == Recovered(), "it is another's by now"
    assert funded.rows("untold") == []
    funded.make_due(again[0])
    assert funded.relay().published == 1
    assert funded.broker.published[-1] == request.task_id
    assert len(whole.told) == 1


def test_what_follows_a_message_that_waits_for_a_result_waits_as_well(funded: Ledger) -> None:
    funded.set("other")
    first, _ = cancel(funded)
    [seen] = funded.store.read(untold.due, funded.root, 10)
    published = funded.broker.published

    def ended(task_id: str, reason: str) -> None:
        funded.reserve(1, task_id=task_id, order_key="o")
        funded.reserve(1, order_key="o")
        for _ in range(2):
            assert funded.relay().published == 0

    assert telling.tell(funded.store, funded.root, ended, seen)
    funded.put("outbox", {"due_us": 1})
    for _ in range(2):
        funded.relay()
    assert (len(published), published[0]) == (2, first.task_id)


@pytest.mark.parametrize("dies", [False, True])
def test_what_drew_on_no_budget_is_not_requeued_while_it_is_told(
    funded: Ledger, dies: bool
) -> None:
    request = funded.request(1)
    funded.store.run(outbox.enqueue, funded.root, message_of(request))
    whole = funded.results
    unreachable(funded)
    funded.broker.on_publish = refuse
    assert funded.relay().quarantined == 1
    funded.put("untold", {"due_us": 1, "tries": 0})
    [seen] = funded.store.read(untold.due, funded.root, 10)
    again = (quarantine.requeue, funded.root, request.task_id, lambda wire, _: wire)

    def ended(task_id: str, reason: str) -> None:
        with pytest.raises(RequestEnding):
            funded.store.run(*again, lock_ms=5000, bound=None)
        if dies:
            raise Crash

    with suppress(Crash):
        assert telling.tell(funded.store, funded.root, ended, seen)
    if dies:
        funded.put("untold", {"due_us": 1})
    assert isinstance(funded.store.run(*again, lock_ms=5000, bound=None), Reserved)
    funded.results = whole
    assert (funded.tell_all(), whole.told) == (Recovered(), [])


@pytest.mark.parametrize("ended", ["replaced", "replacement"])
def test_of_a_task_that_replaced_itself_the_last_request_counts(funded: Ledger, ended: str) -> None:
    first, _ = funded.start(1, late_ack=False)
    second = funded.request(1, task_id=first.task_id, nesting=1)
    funded.admit(second, continuation=True)
    if ended == "replaced":
        funded.lapse(first)
        assert funded.recover().lost == 1
    else:
        settlement.cancel(funded.store, funded.settings, first.task_id)
    funded.recover()
    told = [] if ended == "replaced" else [(first.task_id, "cancelled")]
    assert funded.results.told == told
    assert funded.rows("untold") == []


# Head of line


@pytest.mark.parametrize("kind", ["lapsed", "silent"])
def test_pieces_that_always_fail_hold_up_nobody(
    funded: Ledger, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "LIMIT", 4)
    make = lapsed if kind == "lapsed" else silent
    bad = [make(funded) for _ in range(7)]
    good = make(funded)
    for number, request in enumerate([*bad, good], start=1):
        where = {"reservation_id": request.reservation_id}
        if kind == "lapsed":
            funded.put("attempts", {"lease_until_us": number}, **where)
        else:
            funded.put("outbox", {"due_us": number}, **where)
    asked = unreachable(funded, *bad)
    # Three in a row are enough for a pass, and come behind all others then.
    assert [funded.recover() for _ in range(2)] == [Recovered()] * 2
    assert asked == [request.task_id for request in bad[:6]]
    third = funded.recover()
    assert (third.lost, third.republished) == ((1, 0) if kind == "lapsed" else (0, 1))
    assert asked[6:8] == [bad[6].task_id, good.task_id]
    assert funded.recover() == Recovered()
    assert len(set(asked)) == 8
    waits = [
        row.lease_until_us if kind == "lapsed" else row.due_us
        for request in bad
        for row in funded.rows(
            "attempts" if kind == "lapsed" else "outbox", reservation_id=request.reservation_id
        )
    ]
    assert all(0 < wait - funded.now() <= recovery.AGAIN_US for wait in waits)


def test_a_failure_between_others_ends_no_pass(funded: Ledger) -> None:
    requests = [lapsed(funded, late_ack=True) for _ in range(9)]
    for number, request in enumerate(requests, start=1):
        funded.put("attempts", {"lease_until_us": number}, reservation_id=request.reservation_id)
    unreachable(funded, *requests[:2], *requests[3:5], requests[8])
    assert funded.recover() == Recovered(rerun=4)


def test_what_could_not_be_recovered_is_its_workers_still(funded: Ledger) -> None:
    request, attempt = funded.start(1)
    funded.lapse(request)
    unreachable(funded)
    assert funded.recover() == Recovered()
    assert settlement.renew(funded.store, funded.settings, [request.task_id], BOOT, []) == 1
    assert attempt.end(RETURNED)


def test_what_has_gone_on_is_not_postponed(funded: Ledger) -> None:
    renewed, attempt = funded.start(1)
    funded.lapse(renewed)
    started = silent(funded)
    [seen] = funded.store.read(lapses.lapsed, funded.root, 9, 0)
    [message] = funded.store.read(silent_messages.look, funded.root, 9).unstarted
    settlement.renew(funded.store, funded.settings, [renewed.task_id], BOOT, [])
    funded.run(started)
    before = funded.dump()
    funded.store.run(lapses.postpone, funded.root, seen, SECOND_US)
    funded.store.run(silent_messages.postpone, funded.root, message, SECOND_US)
    assert funded.dump() == before
    assert attempt.end(RETURNED)


def test_what_cannot_even_be_postponed_holds_up_nobody(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    bad, good = lapsed(funded), lapsed(funded)
    funded.put("attempts", {"lease_until_us": 2}, reservation_id=good.reservation_id)

    def locked(*_: object) -> None:
        raise ConnectionError("locked")

    monkeypatch.setattr(lapses, "postpone", locked)
    unreachable(funded, bad)
    assert funded.recover() == Recovered(lost=1, told=1)
    for event in ("recovery.failed", "recovery.postpone_failed"):
        assert [one["task_id"] for one in told(event)] == [bad.task_id]
