"""The relay: in order, at least once, and what cannot be published gives its hold back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget import settlement
from celery_budget.core.messages import WireMessage
from celery_budget.relay import BrokerDown, Relayed, Unpublishable
from celery_budget.store import outbox
from tests.contract.support import RETURNED, Ledger

LATER = 2**62


def test_messages_are_published_in_order_of_their_time(funded: Ledger) -> None:
    requests = [funded.reserve(1, due_us=due) for due in (0, 30, 10, 0, 20)]
    funded.reserve(1, due_us=LATER)
    assert funded.relay() == Relayed(published=5, taken=5)
    # What had to wait and is overdue goes before what came just now.
    wanted = [requests[number].task_id for number in (2, 4, 1, 0, 3)]
    assert funded.broker.published == wanted
    assert [funded.state(request) for request in requests] == ["published"] * 5
    assert funded.relay() == Relayed()


def test_a_batch_is_as_large_as_it_says(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, batch_size=2)
    for _ in range(3):
        funded.reserve(1)
    assert [funded.relay().taken for _ in range(3)] == [2, 1, 0]


def test_the_message_arrives_as_it_was_captured(funded: Ledger) -> None:
    body, envelope = bytes(range(256)), '{"headers": {"ü": "\\u0000"}}'
    seen: list[WireMessage] = []
    funded.broker.on_publish = seen.append
    request = funded.request(1)
    message = WireMessage(request.task_id, "shop.draft", body, envelope, "q", 5, LATER)
    funded.admit(request, **message.__dict__)
    funded.relay()
    assert seen == [replace(message, due_us=0)]


def test_an_outage_gives_the_rest_back_and_loses_nothing(funded: Ledger) -> None:
    requests = [funded.reserve(1) for _ in range(4)]

    def down_at_the_third(message: WireMessage) -> None:
        if message.task_id == requests[2].task_id:
            raise BrokerDown("no route to host")

    funded.broker.on_publish = down_at_the_third
    assert funded.relay() == Relayed(published=2, taken=4, broker_down=True)
    assert funded.broker.resets == 1
    states = [funded.state(request) for request in requests]
    assert states == ["published", "published", "reserved", "reserved"]
    waiting = [funded.message(request) for request in requests[2:]]
    assert [(row.failures, row.last_error) for row in waiting] == [(0, "no route to host")] * 2
    funded.broker.on_publish = lambda message: None
    assert funded.relay() == Relayed(published=2, taken=2)
    assert funded.broker.published == [request.task_id for request in requests]
    assert funded.message(requests[2]).last_error is None


def test_a_refused_message_waits_longer_and_longer_and_is_released(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, max_publishes=3)
    bad, good = funded.reserve(10), funded.reserve(10)

    def refuse(message: WireMessage) -> None:
        if message.task_id == bad.task_id:
            raise Unpublishable("no queue")

    funded.broker.on_publish = refuse
    assert funded.relay() == Relayed(published=1, failed=1, taken=2)
    row = funded.message(bad)
    assert (row.failures, row.last_error, row.state) == (1, "no queue", "due")
    assert funded.relay() == Relayed(), "it waits"
    funded.make_due(bad)
    assert funded.relay() == Relayed(failed=1, taken=1)
    assert funded.results.told == []
    funded.make_due(bad)
    assert funded.relay() == Relayed(failed=1, released=1, taken=1)
    assert funded.results.told == [(bad.task_id, "unpublishable")]
    row = funded.row(bad)
    assert (row.state, row.reason) == ("released", "unpublishable")
    assert funded.message(bad) is None
    assert funded.balance() == (10, 0)
    assert funded.state(good) == "published"


def test_a_message_past_its_time_is_not_published(funded: Ledger) -> None:
    over, fresh = funded.reserve(10, expires_us=5), funded.reserve(10, expires_us=LATER)
    assert funded.relay() == Relayed(published=1, released=1, taken=2)
    assert funded.broker.published == [fresh.task_id]
    assert funded.results.told == [(over.task_id, "expired")]
    assert (funded.state(over), funded.row(over).reason) == ("released", "expired")
    assert funded.balance() == (10, 0)


@pytest.mark.parametrize("why", ["expired", "refused"])
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

    def refuse(message: WireMessage) -> None:
        raise Unpublishable("no queue")

    if why == "refused":
        funded.broker.on_publish = refuse
    assert funded.relay().released == 0
    assert funded.results.told == []
    if not ended:
        assert attempt.end(RETURNED)
    assert attempt.close()
    assert funded.balance() == (0, 4)
    assert funded.message(request) is None


def test_messages_without_a_budget_come_and_go(ledger: Ledger) -> None:
    for task_id, expires_us in (("a", None), ("b", 5)):
        message = WireMessage(task_id, "shop.notify", b"", "{}", "celery", 0, expires_us)
        ledger.store.run(outbox.enqueue, ledger.root, message)
    assert ledger.relay() == Relayed(published=1, released=1, taken=2)
    assert (ledger.broker.published, ledger.results.told) == (["a"], [("b", "expired")])
    assert ledger.rows("outbox") == []


def test_a_message_without_a_budget_that_is_refused_goes(ledger: Ledger) -> None:
    ledger.settings = replace(ledger.settings, max_publishes=1)

    def refuse(message: WireMessage) -> None:
        raise Unpublishable("no queue")

    ledger.broker.on_publish = refuse
    message = WireMessage("a", "shop.notify", b"", "{}", "celery")
    ledger.store.run(outbox.enqueue, ledger.root, message)
    assert ledger.relay().released == 1
    assert ledger.rows("outbox") == []


def test_two_relays_take_different_messages(funded: Ledger) -> None:
    for _ in range(5):
        funded.reserve(1)
    take = (outbox.claim_due, funded.root, 3, 60_000_000)
    if funded.store.dialect == "postgresql":
        with funded.store.transaction() as one, funded.store.transaction() as two:
            first = outbox.claim_due(one, *take[1:])
            second = outbox.claim_due(two, *take[1:])
    else:
        first, second = funded.store.run(*take), funded.store.run(*take)
    assert (len(first), len(second)) == (3, 2)
    assert not {due.outbox_id for due in first} & {due.outbox_id for due in second}
    assert funded.store.run(*take) == []


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
