"""The relay: in order, at least once, and what cannot be published gives its hold back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from celery_budget import admission, relay, settlement
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import ReserveRequest
from celery_budget.errors import StoreError
from celery_budget.relay import BrokerDown, Rejected, Relay, Relayed, Unpublishable
from celery_budget.store import Store, claims, outbox
from celery_budget.store.claims import Batch
from tests.contract.racers import at_once
from tests.contract.support import RETRIED, RETURNED, Ledger, message_of
from tests.messages import Told

LATER = 2**62
HOLD_US = 60_000_000
NEVER = threading.Event()


def a_relay(ledger: Ledger) -> Relay:
    """A relay that goes on from one pass to the next."""
    return Relay(ledger.store, ledger.settings, ledger.broker, ledger.results.ended)


def claim(ledger: Ledger, limit: int = 100, broker: str = "") -> Batch:
    """What a relay takes, by a fence of its own."""
    return ledger.store.run(claims.claim_due, ledger.root, broker, limit, HOLD_US, uuid4())


def taken(batch: Batch) -> list[str]:
    return [due.message.task_id for due in batch.messages]


def refusing(error: Exception, *of: ReserveRequest) -> Callable[[WireMessage], None]:
    """What the broker does that refuses the messages of these requests."""
    ids = {request.task_id for request in of}

    def refuse(message: WireMessage) -> None:
        if message.task_id in ids:
            raise error

    return refuse


def test_messages_are_published_in_order_of_their_time(funded: Ledger) -> None:
    requests = [funded.reserve(1, due_us=due) for due in (0, 30, 10, 0, 20)]
    funded.reserve(1, due_us=LATER)
    assert funded.relay() == Relayed(published=5, taken=5)
    # What had to wait and is overdue goes before what came just now.
    wanted = [requests[number].task_id for number in (2, 4, 1, 0, 3)]
    assert funded.broker.published == wanted
    assert [funded.state(request) for request in requests] == ["published"] * 5
    assert funded.relay() == Relayed()


def test_what_is_more_urgent_goes_first(funded: Ledger) -> None:
    ranks = [5, 9, 0, 5, 3]
    requests = [funded.reserve(1, rank=rank, due_us=1) for rank in ranks]
    funded.reserve(1, rank=0, due_us=LATER)
    funded.settings = replace(funded.settings, batch_size=2)
    relayed = [funded.relay() for _ in range(3)]
    assert [one.taken for one in relayed] == [2, 2, 1]
    assert [one.again for one in relayed] == [True, True, False]
    assert funded.broker.published == [requests[number].task_id for number in (2, 4, 0, 3, 1)]


def test_a_batch_is_as_large_as_it_says(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, batch_size=2)
    for _ in range(3):
        funded.reserve(1)
    assert [funded.relay().taken for _ in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("part", ["body", "envelope"])
def test_a_batch_has_as_many_bytes_as_a_relay_can_keep(funded: Ledger, part: str) -> None:
    """The rest keep their places, and what is larger than all that goes by itself."""
    mega = claims.MOST_BYTES // 16
    sizes = [7, 8, 2, 20, 1, 14, 0]
    requests = [funded.request(1) for _ in sizes]
    for number, (request, size) in enumerate(zip(requests, sizes, strict=True)):
        # Most of it is compressed where it is stored, which saves a relay nothing.
        large = b"x" * (size * mega)
        filling: dict[str, Any] = {part: large if part == "body" else large.decode()}
        funded.admit(request, **filling, rank=number, due_us=9 - number)
    before = [funded.message(request) for request in requests]
    first = claim(funded)
    assert (taken(first), first.full) == ([one.task_id for one in requests[:2]], True)
    assert [funded.message(request) for request in requests[2:]] == before[2:]
    funded.store.run(claims.give_back, funded.root, first.fence, first.messages)
    one = a_relay(funded)
    relayed = [one.run_once(NEVER) for _ in range(4)]
    assert [each.taken for each in relayed] == [2, 1, 1, 3]
    assert [each.again for each in relayed] == [True, True, True, False]
    assert funded.broker.published == [request.task_id for request in requests]


def test_what_has_an_order_keeps_it_where_a_batch_has_its_bytes(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MOST_BYTES", 100)
    a, b, c, d, e = requests = [funded.request(1) for _ in range(5)]
    for request, key, rank in zip(requests, "kklkl", (9, 0, 5, 5, 0), strict=True):
        # With an envelope of two.
        funded.admit(request, body=b"x" * 38, order_key=key, rank=rank, due_us=1)

    def mark(batch: Batch) -> None:
        funded.store.run(claims.mark_published, funded.root, batch.fence, batch.messages, 1)

    first = claim(funded)
    assert (taken(first), first.full) == ([a.task_id, c.task_id], True)
    # Another relay finds the rest only, which follows what is taken.
    assert claim(funded).behind == 3
    mark(first)
    second = claim(funded)
    assert (taken(second), second.full, second.behind) == ([b.task_id, e.task_id], True, 0)
    mark(second)
    last = claim(funded)
    assert (taken(last), last.full) == ([d.task_id], False)


def test_the_message_arrives_as_it_was_captured(funded: Ledger) -> None:
    body, envelope = bytes(range(256)), '{"headers": {"ü": "\\u0000"}}'
    seen: list[WireMessage] = []
    funded.broker.on_publish = seen.append
    request = funded.request(1)
    message = WireMessage(request.task_id, "shop.draft", body, envelope, "q", 5, LATER, 3, "k")
    funded.admit(request, **message.__dict__)
    funded.relay()
    assert seen == [replace(message, due_us=0)]


# Outages


def test_an_outage_gives_the_rest_back_and_loses_nothing(funded: Ledger) -> None:
    requests = [funded.reserve(1) for _ in range(4)]
    funded.broker.on_publish = refusing(BrokerDown("no route to host"), requests[2])
    assert funded.relay() == Relayed(published=2, taken=4, broker_down=True)
    states = [funded.state(request) for request in requests]
    assert states == ["published", "published", "reserved", "reserved"]
    waiting = [funded.message(request) for request in requests[2:]]
    assert [(row.failures, row.last_error) for row in waiting] == [(0, "no route to host")] * 2
    # They keep their places: what was written since comes after them.
    requests.append(funded.reserve(1))
    funded.broker.on_publish = lambda message: None
    assert funded.relay() == Relayed(published=3, taken=3)
    assert funded.broker.published == [request.task_id for request in requests]
    assert funded.message(requests[2]).last_error is None


def test_what_a_connection_breaks_at_lets_others_pass(funded: Ledger) -> None:
    bad, good = funded.reserve(1), funded.reserve(1)
    funded.broker.on_publish = refusing(BrokerDown("closed", sent=True), bad)
    assert funded.relay().broker_down
    assert funded.relay() == Relayed(published=1, taken=1)
    assert funded.state(good) == "published"
    row = funded.message(bad)
    assert (row.state, row.failures, row.last_error) == ("due", 0, "closed")


def test_a_broker_that_is_down_is_left_alone_longer_and_longer(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(relay.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(relay, "backoff_seconds", lambda failures, first, longest: failures)
    funded.reserve(1)
    tries: list[float] = []

    def down(message: WireMessage) -> None:
        tries.append(now[0] - 1000)
        raise BrokerDown("down")

    funded.broker.on_publish = down
    one = a_relay(funded)
    for _ in range(12):
        assert one.run_once(NEVER).broker_down
        now[0] += 0.5
    assert tries == [0, 1, 3]
    now[0] += 1
    funded.broker.on_publish = lambda message: None
    assert one.run_once(NEVER) == Relayed(published=1, taken=1)
    funded.reserve(1)
    funded.broker.on_publish = down
    assert one.run_once(NEVER).broker_down
    now[0] += 1
    funded.broker.on_publish = lambda message: None
    assert one.run_once(NEVER).published == 1, "it began anew"


def test_a_broker_that_is_down_holds_up_only_its_own_messages(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.time, "monotonic", lambda: 1000.0)
    funded.settings = replace(funded.settings, brokers={"eu": "amqp://eu//"}, batch_size=2)
    down = [funded.reserve(1, broker="eu") for _ in range(5)]
    fine = [funded.reserve(1) for _ in range(3)]
    unknown = funded.reserve(1, broker="us")
    funded.broker.on_publish = refusing(BrokerDown("down"), *down)
    one = a_relay(funded)
    first = one.run_once(NEVER)
    assert first == Relayed(published=2, taken=4, again=True)
    assert one.run_once(NEVER) == Relayed(published=1, taken=1)
    assert funded.broker.published == [request.task_id for request in fine]
    funded.broker.on_publish = lambda message: None
    other = a_relay(funded)
    while other.run_once(NEVER).again:
        pass
    assert funded.broker.published[3:] == [request.task_id for request in down]
    # One that knows it may come.
    assert funded.state(unknown) == "reserved"


# What cannot be published


@pytest.mark.parametrize("reason", ["unroutable", "oversize", "undecodable"])
def test_what_can_never_be_published_goes_into_quarantine(funded: Ledger, reason: str) -> None:
    bad, good = funded.reserve(10), funded.reserve(10)
    funded.broker.on_publish = refusing(Unpublishable(reason, "no way"), bad)
    assert funded.relay() == Relayed(published=1, failed=1, quarantined=1, taken=2)
    assert funded.results.told == [(bad.task_id, "unpublishable")]
    row = funded.row(bad)
    assert (row.state, row.reason) == ("released", "unpublishable")
    assert funded.message(bad) is None
    [isolated] = funded.rows("quarantine")
    assert (isolated.task_id, isolated.reason, isolated.error, isolated.failures) == (
        bad.task_id,
        reason,
        "no way",
        1,
    )
    assert funded.balance() == (10, 0)
    assert funded.state(good) == "published"


def test_a_refused_message_waits_longer_and_longer_then_goes_into_quarantine(
    funded: Ledger,
    told: Told,
) -> None:
    funded.settings = replace(funded.settings, max_publishes=3)
    bad, good = funded.reserve(10), funded.reserve(10)
    funded.broker.on_publish = refusing(Rejected("full"), bad)
    assert funded.relay() == Relayed(published=1, failed=1, taken=2)
    row = funded.message(bad)
    assert (row.failures, row.last_error, row.state, row.taken_by) == (1, "full", "due", None)
    assert funded.relay() == Relayed(), "it waits"
    funded.make_due(bad)
    assert funded.relay() == Relayed(failed=1, taken=1)
    assert funded.results.told == []
    funded.make_due(bad)
    assert funded.relay() == Relayed(failed=1, quarantined=1, taken=1)
    assert funded.results.told == [(bad.task_id, "unpublishable")]
    [isolated] = funded.rows("quarantine")
    assert (isolated.reason, isolated.failures) == ("rejected", 3)
    assert funded.balance() == (10, 0)
    assert funded.state(good) == "published"
    assert [one["task_id"] for one in told("message.postponed")] == [bad.task_id] * 2


def test_a_message_past_its_time_is_not_published(funded: Ledger) -> None:
    over, fresh = funded.reserve(10, expires_us=5), funded.reserve(10, expires_us=LATER)
    assert funded.relay() == Relayed(published=1, released=1, taken=2)
    assert funded.broker.published == [fresh.task_id]
    assert funded.results.told == [(over.task_id, "expired")]
    assert (funded.state(over), funded.row(over).reason) == ("released", "expired")
    assert funded.balance() == (10, 0)


@pytest.mark.parametrize("why", ["expired", "refused", "unroutable"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_message_whose_task_was_started_is_not_released(
    funded: Ledger, why: str, ended: bool
) -> None:
    funded.settings = replace(funded.settings, max_publishes=1)
    request = funded.reserve(10, expires_us=5 if why == "expired" else LATER)
    # A relay published it and died before it could say so.
    attempt = funded.run(request)
    attempt.record(4)
    if ended:
        attempt.end(RETURNED)
    if why != "expired":
        error = Rejected("full") if why == "refused" else Unpublishable("unroutable", "no queue")
        funded.broker.on_publish = refusing(error, request)
    relayed = funded.relay()
    assert (relayed.released, relayed.quarantined) == (0, 0)
    assert funded.results.told == []
    assert funded.rows("quarantine") == []
    if not ended:
        assert attempt.end(RETURNED)
    assert attempt.close()
    assert funded.balance() == (0, 4)
    assert funded.message(request) is None


def test_a_result_backend_that_is_down_holds_up_nobody(funded: Ledger, told: Told) -> None:
    bad, over = funded.reserve(10), funded.reserve(10, expires_us=5)
    good = funded.reserve(10)

    def down(task_id: str, reason: str) -> None:
        raise OSError("no backend")

    funded.broker.on_publish = refusing(Unpublishable("oversize", "no way"), bad)
    one = Relay(funded.store, funded.settings, funded.broker, down)
    ended = Relayed(published=1, failed=1, quarantined=1, released=1, taken=3)
    assert one.run_once(NEVER) == ended
    assert funded.state(good) == "published"
    assert [funded.state(row) for row in (bad, over)] == ["released", "released"]
    funded.tell_all()
    assert sorted(funded.results.told) == sorted(
        [(bad.task_id, "unpublishable"), (over.task_id, "expired")]
    )
    assert told("result.untold")


def test_messages_without_a_budget_come_and_go(ledger: Ledger) -> None:
    for task_id, expires_us in (("a", None), ("b", 5)):
        message = WireMessage(task_id, "shop.notify", b"", "{}", "celery", 0, expires_us)
        ledger.store.run(outbox.enqueue, ledger.root, message)
    assert ledger.relay() == Relayed(published=1, released=1, taken=2)
    assert (ledger.broker.published, ledger.results.told) == (["a"], [("b", "expired")])
    assert ledger.rows("outbox") == []


@pytest.mark.parametrize("task", ["shop.notify", ""])
def test_a_message_without_a_budget_that_is_refused_goes_into_quarantine(
    ledger: Ledger, task: str
) -> None:
    def refuse(message: WireMessage) -> None:
        raise Unpublishable("unroutable", "no queue")

    ledger.broker.on_publish = refuse
    message = WireMessage("a", task, b"", "{}", "celery")
    ledger.store.run(outbox.enqueue, ledger.root, message)
    assert ledger.relay() == Relayed(failed=1, quarantined=1, taken=1)
    assert ledger.rows("outbox") == []
    [isolated] = ledger.rows("quarantine")
    assert (isolated.task_id, isolated.request, isolated.reason) == ("a", None, "unroutable")
    # An event starts no task that somebody could wait for.
    assert ledger.results.told == ([("a", "unpublishable")] if task else [])


def test_ten_thousand_messages_pass_one_that_is_poisonous(ledger: Ledger) -> None:
    poison = ledger.request(0)
    messages = [message_of(ledger.request(0)) for _ in range(10_000)]
    with ledger.store.transaction() as connection:
        outbox.enqueue(connection, ledger.root, message_of(poison))
        for message in messages:
            outbox.enqueue(connection, ledger.root, message)
    ledger.broker.on_publish = refusing(Rejected("poison"), poison)
    ledger.settings = replace(ledger.settings, batch_size=1000)
    one, passes = a_relay(ledger), 0
    while one.run_once(NEVER).again:
        passes += 1
    # One is of several batches where that saves time.
    assert passes <= 10
    assert len(ledger.broker.published) == 10_000
    [left] = ledger.rows("outbox")
    assert left.task_id == poison.task_id
    assert left.failures >= 1


# Several at a time


def test_what_is_given_to_the_broker_together_is_answered_one_by_one(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, max_publishes=2)
    requests = [funded.reserve(1) for _ in range(6)]
    full, lost = requests[1], requests[3]

    def answer(message: WireMessage) -> None:
        refusing(Rejected("full"), full)(message)
        refusing(Unpublishable("unroutable", "no queue"), lost)(message)

    funded.broker.on_publish, funded.broker.at_once = answer, 4
    relayed = funded.relay()
    assert relayed == Relayed(published=4, failed=2, quarantined=1, taken=6)
    assert [len(window) for window in funded.broker.windows] == [4, 2]
    fine = [requests[number] for number in (0, 2, 4, 5)]
    assert funded.broker.published == [request.task_id for request in fine]
    assert {funded.state(request) for request in fine} == {"published"}
    assert (funded.message(full).failures, funded.state(lost)) == (1, "released")


def test_of_one_order_key_one_message_goes_at_a_time(funded: Ledger) -> None:
    keys = ["a", "a", None, "b", "a", "b", None]
    requests = [funded.reserve(1, order_key=key) for key in keys]
    funded.broker.at_once = 10
    assert funded.relay().published == 7
    sent = [[ids.index(task_id) for task_id in window] for ids, window in both(funded, requests)]
    assert sent == [[0, 2, 3, 6], [1, 5], [4]]


def both(ledger: Ledger, requests: list[ReserveRequest]) -> list[tuple[list[str], list[str]]]:
    """The requests' tasks, beside each window that the broker was given."""
    ids = [request.task_id for request in requests]
    return [(ids, window) for window in ledger.broker.windows]


@pytest.mark.parametrize("why", ["rejected", "unanswered", "unroutable"])
def test_what_follows_by_its_key_is_not_sent_with_what_fails(funded: Ledger, why: str) -> None:
    errors: dict[str, Exception] = {
        "rejected": Rejected("full"),
        "unanswered": BrokerDown("closed", sent=True),
        "unroutable": Unpublishable("unroutable", "no queue"),
    }
    first, second = (funded.reserve(1, order_key="k") for _ in range(2))
    other = funded.reserve(1)
    funded.broker.on_publish, funded.broker.at_once = refusing(errors[why], first), 10
    relayed = funded.relay()
    assert funded.broker.windows[0] == [first.task_id, other.task_id]
    # What can never be published holds up nobody.
    assert (second.task_id in funded.broker.published) is (why == "unroutable")
    assert relayed.broker_down is (why == "unanswered")
    funded.broker.on_publish = lambda message: None
    if why != "unroutable":
        funded.make_due(first)
    while funded.relay().again:
        pass
    mine = [one for one in funded.broker.published if one != other.task_id]
    gone = [] if why == "unroutable" else [first.task_id]
    assert mine == [*gone, second.task_id]


def test_of_a_window_that_breaks_each_message_is_where_it_belongs(funded: Ledger) -> None:
    """Confirmed, in doubt, not sent, not even tried: none is lost, and none counts as failed."""
    requests = [funded.reserve(1) for _ in range(6)]
    funded.broker.on_publish = refusing(BrokerDown("closed", sent=True), requests[2])
    funded.broker.at_once = 4
    assert funded.relay() == Relayed(published=2, taken=6, broker_down=True)
    states = ["published"] * 2 + ["reserved"] * 4
    assert [funded.state(request) for request in requests] == states
    rows = [funded.message(request) for request in requests[2:]]
    assert [(row.failures, row.last_error, row.taken_by) for row in rows] == [
        (0, "closed", None)
    ] * 4
    # In doubt is only the third: the others keep their places.
    assert rows[0].due_us > max(row.due_us for row in rows[1:])
    funded.broker.on_publish = lambda message: None
    funded.make_due(requests[2])
    assert funded.relay().published == 4
    assert sorted(funded.broker.published) == sorted(request.task_id for request in requests)


def test_many_that_are_in_doubt_cost_one_statement_and_wait_longer_each_time(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [funded.reserve(1) for _ in range(3)]

    class Silent(type(funded.broker)):  # type: ignore[misc]
        def publish_all(self, messages: Any) -> list[Any]:
            return [BrokerDown("no answer", sent=True)] * len(messages)

    waits: list[int] = []

    def backoff(tries: int, first: float, longest: float) -> float:
        waits.append(tries)
        return 0.0

    monkeypatch.setattr(relay, "backoff_seconds", backoff)
    funded.broker = Silent(at_once=3)
    one = a_relay(funded)
    for _ in range(2):
        assert one.run_once(NEVER).taken == 3
    # The broker's own rest, then that of each message.
    assert waits == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [funded.message(request).failures for request in requests] == [0] * 3


# Several relays, and those that die


def test_two_relays_take_different_messages(funded: Ledger) -> None:
    for _ in range(5):
        funded.reserve(1)
    take = (funded.root, "", 3, HOLD_US)
    if funded.store.dialect == "postgresql":
        with funded.store.transaction() as one, funded.store.transaction() as two:
            first = claims.claim_due(one, *take, uuid4())
            second = claims.claim_due(two, *take, uuid4())
    else:
        first, second = claim(funded, 3), claim(funded, 3)
    assert (len(first.messages), len(second.messages)) == (3, 2)
    assert not set(taken(first)) & set(taken(second))
    assert claim(funded).messages == ()


def test_what_a_dead_relay_took_is_published_again(funded: Ledger) -> None:
    request = funded.reserve(10)

    def die(message: WireMessage) -> None:
        funded.broker.published.append(message.task_id)
        raise SystemExit

    funded.broker.on_publish = die
    with pytest.raises(SystemExit):
        funded.relay()
    funded.broker.on_publish = lambda message: None
    assert funded.relay() == Relayed(), "it is taken for a while"
    funded.make_due(request)
    assert funded.relay() == Relayed(published=1, taken=1)
    assert funded.broker.published == [request.task_id] * 2
    funded.run(request)


@pytest.mark.parametrize("how_far", ["claimed", "ended", "closed", "released"])
def test_a_worker_or_a_release_may_be_faster_than_the_mark(funded: Ledger, how_far: str) -> None:
    request = funded.reserve(10)

    def meanwhile(message: WireMessage) -> None:
        if how_far == "released":
            settlement.revoke(funded.store, funded.root, request.reservation_id, "cancelled")
            return
        attempt = funded.run(request)
        if how_far != "claimed":
            attempt.end(RETURNED)
        if how_far == "closed":
            attempt.close()

    funded.broker.on_publish = meanwhile
    assert funded.relay() == Relayed(published=1, taken=1)
    states = {"claimed": "running", "released": "released"}
    assert funded.state(request) == states.get(how_far, "settled")
    left = funded.message(request)
    assert (left.state if left else None) == (
        "published" if how_far in ("claimed", "ended") else None
    )


def test_a_relay_that_lost_its_fence_changes_nothing(funded: Ledger) -> None:
    requests = [funded.reserve(1, order_key="k") for _ in range(2)]
    slow = claim(funded)
    for request in requests:
        funded.make_due(request)
    fast = claim(funded)
    assert taken(fast) == taken(slow) == [request.task_id for request in requests]
    before = funded.dump()
    run, key = funded.store.run, (funded.root, slow.fence)
    assert run(claims.mark_published, *key, slow.messages, 1) == 0
    run(claims.give_back, *key, slow.messages, "slow")
    for due in slow.messages:
        run(claims.reschedule, *key, {due.outbox_id: 1}, "slow", failed=True)
        run(claims.forget, *key, due.outbox_id)
        assert run(claims.lock_taken, *key, due.outbox_id) is None
    assert funded.dump() == before
    assert run(claims.mark_published, funded.root, fast.fence, fast.messages, 1) == 2
    assert [funded.state(request) for request in requests] == ["published"] * 2


def test_a_mark_that_comes_late_does_not_undo_what_came_since(funded: Ledger) -> None:
    """The message is to be published again: for a lost worker, or a retry."""
    request = funded.reserve(1)
    batch = claim(funded)
    assert funded.store.run(outbox.make_due, funded.root, request.reservation_id, 0)
    marked = (claims.mark_published, funded.root, batch.fence, batch.messages, 1)
    assert funded.store.run(*marked) == 0
    assert funded.message(request).state == "due"


def test_a_batch_is_published_for_half_of_its_hold(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time counts from before the claim: the database's may have passed already."""
    requests = [funded.reserve(1) for _ in range(4)]
    now = [1000.0]
    monkeypatch.setattr(relay.time, "monotonic", lambda: now[0])

    def slowly(message: WireMessage) -> None:
        now[0] += funded.settings.publish_seconds / 4

    funded.broker.on_publish = slowly
    assert funded.relay() == Relayed(published=2, taken=4)
    rest = [funded.message(request) for request in requests[2:]]
    assert [(row.state, row.taken_by, row.last_error) for row in rest] == [("due", None, None)] * 2
    assert taken(claim(funded)) == [request.task_id for request in requests[2:]]


def test_a_relay_that_is_to_stop_gives_back_what_it_has_in_hand(funded: Ledger) -> None:
    requests = [funded.reserve(1) for _ in range(4)]
    stop = threading.Event()

    def stopping(message: WireMessage) -> None:
        if message.task_id == requests[1].task_id:
            stop.set()

    funded.broker.on_publish = stopping
    assert a_relay(funded).run_once(stop) == Relayed(published=2, taken=4)
    assert a_relay(funded).run_once(stop) == Relayed()
    assert [funded.state(request) for request in requests] == ["published"] * 2 + ["reserved"] * 2
    assert taken(claim(funded)) == [request.task_id for request in requests[2:]]


def test_another_thread_gives_back_what_a_broker_keeps_waiting(funded: Ledger) -> None:
    requests = [funded.reserve(1) for _ in range(4)]
    hangs, answers = threading.Event(), threading.Event()

    def stall(message: WireMessage) -> None:
        if message.task_id == requests[1].task_id:
            hangs.set()
            assert answers.wait(60)

    funded.broker.on_publish = stall
    one = a_relay(funded)
    relayed: list[Relayed] = []
    thread = threading.Thread(target=lambda: relayed.append(one.run_once(NEVER)))
    thread.start()
    assert hangs.wait(60)
    one.hand_back()
    one.hand_back()
    # What was confirmed is marked, what was not tried is free; of the one nobody knows.
    assert funded.state(requests[0]) == "published"
    assert taken(claim(funded)) == [request.task_id for request in requests[2:]]
    answers.set()
    thread.join()
    assert relayed == [Relayed(published=2, taken=4)]
    assert funded.state(requests[1]) == "published"
    assert [funded.state(request) for request in requests[2:]] == ["reserved"] * 2


def test_what_was_published_is_marked_once_the_store_is_back(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [funded.reserve(1) for _ in range(2)]
    mark = claims.mark_published

    def down(*_: object) -> None:
        raise StoreError("down", retryable=False)

    one = a_relay(funded)
    monkeypatch.setattr(relay.claims, "mark_published", down)
    for _ in range(2):
        with pytest.raises(StoreError, match="down"):
            one.run_once(NEVER)
    monkeypatch.setattr(relay.claims, "mark_published", mark)
    later = funded.reserve(1)
    assert one.run_once(NEVER) == Relayed(published=1, taken=1)
    assert funded.broker.published == [request.task_id for request in (*requests, later)]
    assert [funded.state(request) for request in (*requests, later)] == ["published"] * 3


@pytest.fixture
def beside(funded: Ledger, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Two messages are a batch, and enough to mark while the next one is taken."""
    if funded.store.dialect == "sqlite":
        pytest.skip("SQLite has one writer, which marks before it takes")
    funded.settings = replace(funded.settings, batch_size=2)
    monkeypatch.setattr(relay, "BESIDE", 2)
    return funded


def test_a_batch_is_marked_while_the_next_one_is_published(
    beside: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [beside.reserve(1) for _ in range(5)]
    mark, goes_on = claims.mark_published, threading.Event()

    def publish(message: WireMessage) -> None:
        if message.task_id == requests[2].task_id:
            goes_on.set()

    def marked(*args: Any) -> int:
        assert goes_on.wait(60)
        return mark(*args)

    beside.broker.on_publish = publish
    monkeypatch.setattr(relay.claims, "mark_published", marked)
    relayed = a_relay(beside).run_once(NEVER)
    assert (relayed.published, relayed.again) == (5, False)
    assert beside.broker.published == [request.task_id for request in requests]
    assert {beside.state(request) for request in requests} == {"published"}


@pytest.mark.parametrize("failures", [1, 2])
def test_what_could_not_be_marked_meanwhile_is_marked_after(
    beside: Ledger, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more when it is waited for, or with the next pass; nothing is taken before that."""
    requests = [beside.reserve(1) for _ in range(5)]
    mark, tried = claims.mark_published, []

    def down(*args: Any) -> int:
        tried.append(args)
        if len(tried) <= failures:
            raise StoreError("down", retryable=False)
        return mark(*args)

    monkeypatch.setattr(relay.claims, "mark_published", down)
    one = a_relay(beside)
    if failures > 1:
        with pytest.raises(StoreError, match="down"):
            one.run_once(NEVER)
    while one.run_once(NEVER).again:
        pass
    assert beside.broker.published == [request.task_id for request in requests]
    assert {beside.state(request) for request in requests} == {"published"}


def test_a_relay_that_stops_waits_for_what_is_being_marked(
    beside: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [beside.reserve(1) for _ in range(4)]
    hangs, answers = threading.Event(), threading.Event()
    mark, marked = claims.mark_published, []

    def slow(*args: Any) -> int:
        assert hangs.wait(60)
        marked.append(args)
        return mark(*args)

    def stall(message: WireMessage) -> None:
        if message.task_id == requests[2].task_id:
            hangs.set()
            assert answers.wait(60)

    monkeypatch.setattr(relay.claims, "mark_published", slow)
    beside.broker.on_publish = stall
    one = a_relay(beside)
    thread = threading.Thread(target=lambda: one.run_once(NEVER))
    thread.start()
    assert hangs.wait(60)
    one.hand_back()
    assert len(marked) == 1
    assert [beside.state(request) for request in requests[:2]] == ["published"] * 2
    answers.set()
    thread.join()
    assert beside.state(requests[2]) == "published"


@pytest.mark.parametrize("keys", [None, 3])
def test_several_relays_publish_each_message_once(
    racing: Ledger, keys: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those with one key in the order they were written, whoever publishes and fails."""
    racing.settings = replace(racing.settings, batch_size=7, max_publishes=1000)
    monkeypatch.setattr(outbox, "FOLLOWERS", 3)
    monkeypatch.setattr(relay, "backoff_seconds", lambda failures, first, longest: 0.001)
    chance = random.Random(7)

    def publish(message: WireMessage) -> None:
        if chance.random() < 0.2:
            raise chance.choice([Rejected("full"), BrokerDown("down"), BrokerDown("down", True)])

    racing.broker.on_publish = publish
    requests = [
        racing.reserve(0, order_key=None if keys is None else str(number % keys))
        for number in range(120)
    ]
    done = threading.Event()

    def relay_all() -> None:
        one = a_relay(racing)
        while not done.is_set():
            one.run_once(NEVER)
            if len(racing.broker.published) >= len(requests):
                done.set()

    at_once([relay_all] * 3)
    order = {request.task_id: number for number, request in enumerate(requests)}
    numbers = [order[task_id] for task_id in racing.broker.published]
    assert sorted(numbers) == list(range(120))
    for key in range(keys or 0):
        mine = [number for number in numbers if number % (keys or 1) == key]
        assert mine == sorted(mine)
    assert {racing.state(request) for request in requests} == {"published"}


class Killed(BaseException):
    """Ends a relay as SIGKILL would: nothing of it runs any more."""


#: What a relay has the store do, in this order, and what it does between.
STEPS = [
    "claim_due",
    "publish",
    "mark_published",
    "give_back",
    "isolate",
    "expire",
    "take",
    "forget",
]


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_relay_killed_at_any_step_publishes_at_most_one_batch_twice(
    funded: Ledger, step: str, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the step, and after it was committed."""
    funded.settings = replace(funded.settings, batch_size=4)
    fine = [funded.reserve(1) for _ in range(8)]
    bad, over = funded.reserve(1, due_us=1), funded.reserve(1, due_us=2, expires_us=5)
    refuse = refusing(Unpublishable("oversize", "no way"), bad)
    stop = threading.Event()
    whole = Store.run

    def die(self: Store, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if function.__name__ != step:
            return whole(self, function, *args, **options)
        if committed:
            whole(self, function, *args, **options)
        raise Killed

    def publish(message: WireMessage) -> None:
        refuse(message)
        if step == "publish":
            if committed:
                funded.broker.published.append(message.task_id)
            raise Killed
        if step == "give_back":
            stop.set()

    funded.broker.on_publish = publish
    with monkeypatch.context() as patched:
        patched.setattr(Store, "run", die)
        with pytest.raises(Killed):
            a_relay(funded).run_once(stop)
    first = list(funded.broker.published)
    # Its time is over.
    for row in funded.rows("outbox"):
        if row.state == "due":
            funded.put("outbox", {"due_us": 1}, outbox_id=row.outbox_id)
    funded.broker.on_publish = refuse
    one = a_relay(funded)
    while one.run_once(NEVER).again:
        pass
    second = funded.broker.published[len(first) :]
    assert sorted({*first, *second}) == sorted(request.task_id for request in fine)
    assert len(set(second)) == len(second)
    assert len(set(first) & set(second)) <= 4
    assert [funded.state(request) for request in fine] == ["published"] * 8
    assert [funded.state(request) for request in (bad, over)] == ["released"] * 2
    assert len(funded.rows("quarantine")) == 1
    funded.tell_all()
    # A result that was stored twice says the same.
    assert set(funded.results.told) == {(bad.task_id, "unpublishable"), (over.task_id, "expired")}


# Order


def test_messages_with_one_key_are_published_in_the_order_they_were_written(
    funded: Ledger,
) -> None:
    dues, ranks = (LATER, 0, 30, 10), (5, 0, 9, 1)
    first, *rest = [
        funded.reserve(1, order_key="k", due_us=due, rank=rank)
        for due, rank in zip(dues, ranks, strict=True)
    ]
    others = [funded.reserve(1, rank=9), funded.reserve(1, order_key="other", rank=9)]
    assert funded.relay() == Relayed(published=2, taken=2, again=True)
    assert funded.broker.published == [request.task_id for request in others]
    assert funded.relay() == Relayed(), "they are passed by"
    funded.make_due(first)
    relayed = [funded.relay() for _ in range(3)]
    assert [one.published for one in relayed] == [1, 3, 0]
    assert [one.again for one in relayed] == [True, True, False]
    assert funded.broker.published[2:] == [request.task_id for request in (first, *rest)]


def test_a_message_of_a_key_that_waits_for_an_attempt_holds_up_those_behind_it(
    funded: Ledger,
) -> None:
    request, attempt = funded.start(1)
    funded.relay()
    following = replace(request, retries=1)
    admission.retry(
        funded.store,
        funded.settings,
        following,
        message_of(following, order_key="k"),
        attempt.number,
        attempt.claim_id,
    )
    behind = funded.reserve(1, order_key="k")
    assert funded.relay() == Relayed(again=True)
    assert attempt.end(RETRIED)
    while funded.relay().again:
        pass
    assert funded.broker.published == [request.task_id, request.task_id, behind.task_id]


@pytest.mark.parametrize("why", ["rejected", "down"])
def test_what_fails_holds_up_those_behind_it(funded: Ledger, why: str) -> None:
    first, *rest = [funded.reserve(1, order_key="k") for _ in range(3)]
    other = funded.reserve(1)
    error = Rejected("full") if why == "rejected" else BrokerDown("closed", sent=True)
    funded.broker.on_publish = refusing(error, first)
    a_relay(funded).run_once(NEVER)
    assert funded.broker.published == ([] if why == "down" else [other.task_id])
    assert funded.relay().published == (1 if why == "down" else 0)
    funded.broker.on_publish = lambda message: None
    funded.make_due(first)
    while funded.relay().again:
        pass
    assert funded.broker.published == [one.task_id for one in (other, first, *rest)]


def isolate(ledger: Ledger, request: ReserveRequest) -> None:
    ledger.broker.on_publish = refusing(Unpublishable("oversize", "no"), request)
    ledger.make_due(request)
    ledger.relay()


def cancel(ledger: Ledger, request: ReserveRequest) -> None:
    settlement.revoke(ledger.store, ledger.root, request.reservation_id, "cancelled")


def expire(ledger: Ledger, request: ReserveRequest) -> None:
    ledger.put("outbox", {"expires_us": 5, "due_us": 5}, reservation_id=request.reservation_id)
    ledger.relay()


def finish(ledger: Ledger, request: ReserveRequest) -> None:
    """A relay that died had published it; a worker has run it."""
    attempt = ledger.run(request)
    attempt.end(RETURNED)
    attempt.close()


@pytest.mark.parametrize("gone", [isolate, cancel, expire, finish])
def test_what_is_gone_holds_up_nobody(
    funded: Ledger, gone: Callable[[Ledger, ReserveRequest], None]
) -> None:
    first, *rest = [funded.reserve(1, order_key="k", due_us=due) for due in (LATER, 0, 0)]
    assert funded.relay() == Relayed(again=True)
    assert [funded.message(request).behind for request in rest] == [True, True]
    gone(funded, first)
    while funded.relay().again:
        pass
    assert funded.broker.published == [request.task_id for request in rest]


def test_a_key_in_the_hands_of_one_relay_is_left_alone_by_the_others(funded: Ledger) -> None:
    requests = [funded.reserve(1, order_key="k") for _ in range(3)]
    first = claim(funded, 1)
    assert taken(first) == [requests[0].task_id]
    assert taken(claim(funded)) == []
    mark = (funded.root, first.fence, first.messages, 1)
    assert funded.store.run(claims.mark_published, *mark) == 1
    second = claim(funded)
    assert taken(second) == [request.task_id for request in requests[1:]]
    # What is published again, for a lost worker, is the first again.
    assert funded.store.run(outbox.make_due, funded.root, requests[0].reservation_id, 0)
    assert taken(claim(funded)) == [requests[0].task_id]


def test_a_long_queue_of_one_key_costs_the_others_nothing(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, batch_size=10)
    queue = [funded.reserve(0, order_key="k", due_us=1) for _ in range(250)]
    funded.make_due(queue[0])
    blocker = claim(funded, 1)
    other = funded.reserve(1)
    one, passes = a_relay(funded), 0
    while one.run_once(NEVER).again:
        passes += 1
    # Each of those behind is looked at once.
    assert passes == 25
    assert funded.broker.published == [other.task_id]
    mark = (funded.root, blocker.fence, blocker.messages, 1)
    funded.store.run(claims.mark_published, *mark)
    while one.run_once(NEVER).again:
        pass
    assert funded.broker.published[1:] == [request.task_id for request in queue[1:]]


def test_what_was_passed_by_and_marked_all_the_same_can_be_taken_again(funded: Ledger) -> None:
    """A slow relay marks what it has published after another one has passed it by."""
    first = funded.reserve(1, order_key="k", rank=9)
    second = funded.reserve(1, order_key="k", rank=0)
    batch = claim(funded)
    # Its time is over, and another relay finds the second one only, behind the first.
    funded.put("outbox", {"due_us": 1})
    assert claim(funded, 1).behind == 1
    key = (funded.root, batch.fence, batch.messages, 1)
    assert funded.store.run(claims.mark_published, *key) == 2
    assert funded.message(second).behind is False
    for request in (first, second):
        funded.store.run(outbox.make_due, funded.root, request.reservation_id, 0)
    assert len(claim(funded).messages) == 2


def test_what_has_run_is_published_again_without_its_end(funded: Ledger) -> None:
    """A worker is to give its outcome again, and would drop what has expired."""
    request, attempt = funded.start(1, expires_us=funded.now() + 60_000_000)
    attempt.end(RETURNED)
    seen: list[WireMessage] = []
    funded.broker.on_publish = seen.append
    funded.put("outbox", {"expires_us": 5, "due_us": 5, "state": "due"})
    assert funded.relay().published == 1
    assert [(one.expires_us, one.left_us) for one in seen] == [(None, None)]
    attempt.close()
    assert funded.state(request) == "settled"


def test_a_result_backend_that_is_down_is_asked_once_in_a_while(funded: Ledger) -> None:
    over = [funded.reserve(1, expires_us=1) for _ in range(3)]
    good = funded.reserve(1)
    asked: list[str] = []

    def down(task_id: str, reason: str) -> None:
        asked.append(task_id)
        raise ConnectionError("down")

    one = Relay(funded.store, funded.settings, funded.broker, down)
    assert one.run_once(NEVER).published == 1
    assert len(asked) == 1
    assert funded.broker.published == [good.task_id]
    assert {funded.state(request) for request in over} == {"released"}
    assert sorted(row.tries for row in funded.rows("untold")) == [-1, 0, 0]


def test_what_is_not_answered_is_tried_less_and_less(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue may be what does not confirm; none of it counts as its own failure."""
    waits: list[int] = []

    def backoff(tries: int, first: float, longest: float) -> float:
        waits.append(tries)
        return 0.0

    monkeypatch.setattr(relay, "backoff_seconds", backoff)
    request = funded.reserve(1)
    funded.broker.on_publish = refusing(BrokerDown("no answer", sent=True), request)
    one = a_relay(funded)
    for _ in range(3):
        one.run_once(NEVER)
    # Each time the broker's own rest, then the message's.
    assert waits[1::2] == [1, 2, 3]
    assert funded.message(request).failures == 0
