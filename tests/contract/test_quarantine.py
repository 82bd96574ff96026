"""Quarantine: what cannot be published holds nothing, and can be admitted again."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from celery_budget import admission, reconcile, settlement
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Missing, Refused, Reserved, ReserveRequest
from celery_budget.errors import OutboxFull, RequestConflict
from celery_budget.relay import Unpublishable
from celery_budget.settlement import Attempt
from celery_budget.store import Connection, claims, outbox, quarantine
from tests.contract.racers import at_once
from tests.contract.support import RETRIED, RETURNED, Ledger, message_of

LATER = 2**62


def refuse(message: WireMessage) -> None:
    raise Unpublishable("unroutable", f"no queue {message.queue}")


def isolated(ledger: Ledger, amount: int = 10, **changes: object) -> ReserveRequest:
    """A request whose message is in quarantine."""
    request = ledger.reserve(amount, **changes)
    isolate(ledger)
    return request


def isolate(ledger: Ledger) -> None:
    ledger.broker.on_publish = refuse
    assert ledger.relay().quarantined == 1
    ledger.broker.on_publish = lambda message: None


def readdress(message: WireMessage, reservation_id: uuid.UUID) -> WireMessage:
    return replace(message, envelope=str(reservation_id))


def requeue(
    ledger: Ledger, some_id: object, bound: int | None = None
) -> Reserved | Refused | Missing:
    return ledger.store.run(
        quarantine.requeue, ledger.root, str(some_id), readdress, lock_ms=5000, bound=bound
    )


def test_what_is_in_quarantine_is_told(funded: Ledger) -> None:
    first, second = isolated(funded), isolated(funded, broker="")
    told = reconcile.quarantined(funded.store, funded.settings, 10)
    assert [one.task_id for one in told] == [second.task_id, first.task_id]
    assert told[0].as_dict() == {
        "quarantine_id": told[0].quarantine_id,
        "task_id": second.task_id,
        "task_name": "shop.draft",
        "queue": "celery",
        "broker": "",
        "reason": "unroutable",
        "error": "no queue celery",
        "failures": 1,
        "quarantined_us": told[0].quarantined_us,
        "budgeted": True,
        "attempts": None,
        "used": None,
        "traceback": None,
        "args": None,
        "kwargs": None,
    }
    assert len(reconcile.quarantined(funded.store, funded.settings, 1)) == 1
    report = reconcile.report(funded.store, funded.settings)
    assert report.quarantine == {"unroutable": 2}
    assert reconcile.reconcile(funded.store, funded.settings).ok
    [story] = reconcile.explain(funded.store, funded.settings, first.task_id)
    assert story.reservation["state"] == "released"
    [known] = story.reservation["quarantine"]
    assert known == told[1].as_dict()


@pytest.mark.parametrize("by", ["task", "id"])
def test_a_request_is_published_again_as_a_new_admission(funded: Ledger, by: str) -> None:
    request = isolated(funded, rank=3, due_us=7, expires_us=LATER, order_key="k")
    [row] = funded.rows("quarantine")
    assert funded.balance() == (0, 0)
    outcome = requeue(funded, request.task_id if by == "task" else row.quarantine_id)
    assert isinstance(outcome, Reserved)
    assert outcome.reservation_id != request.reservation_id
    assert funded.rows("quarantine") == []
    assert funded.balance() == (10, 0)
    again = replace(request, reservation_id=outcome.reservation_id)
    message = funded.message(again)
    assert (message.rank, message.due_us, message.expires_us, message.order_key) == (
        3,
        7,
        LATER,
        "k",
    )
    assert message.envelope == str(outcome.reservation_id)
    kept = funded.row(again)
    assert (kept.request_id, kept.task_id, kept.fingerprint, kept.owner) == (
        request.request_id,
        request.task_id,
        request.fingerprint,
        request.owner,
    )
    assert funded.relay().published == 1
    attempt = funded.run(again)
    attempt.record(4)
    assert attempt.end(RETURNED)
    assert attempt.close()
    assert funded.balance() == (0, 4)


def test_what_does_not_fit_stays_in_quarantine(funded: Ledger) -> None:
    request = isolated(funded, 60)
    funded.reserve(50)
    outcome = requeue(funded, request.task_id)
    assert isinstance(outcome, Refused)
    assert len(funded.rows("quarantine")) == 1
    assert funded.balance() == (50, 0)
    funded.set("b", 1000)
    funded.put("backlog", {"messages": 5, "counted_us": LATER})
    with pytest.raises(OutboxFull):
        requeue(funded, request.task_id, bound=5)
    assert len(funded.rows("quarantine")) == 1
    assert isinstance(requeue(funded, request.task_id), Reserved)


def test_what_was_admitted_again_meanwhile_stays_in_quarantine(funded: Ledger) -> None:
    request = isolated(funded)
    funded.reserve(task_id=request.task_id)
    with pytest.raises(RequestConflict):
        requeue(funded, request.task_id)
    assert len(funded.rows("quarantine")) == 1


def test_what_is_not_there_is_missing(funded: Ledger) -> None:
    assert requeue(funded, "nothing") == Missing()
    assert requeue(funded, uuid.uuid4()) == Missing()
    assert not funded.store.run(quarantine.discard, funded.root, "nothing")


def test_what_is_discarded_is_gone(funded: Ledger) -> None:
    request = isolated(funded)
    assert funded.store.run(quarantine.discard, funded.root, request.task_id)
    assert not funded.store.run(quarantine.discard, funded.root, request.task_id)
    assert requeue(funded, request.task_id) == Missing()
    assert funded.state(request) == "released"
    # Its id may be used anew.
    funded.reserve(task_id=request.task_id)


def test_a_retry_is_settled_and_published_again_as_a_request_of_its_own(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    funded.relay()
    attempt.record(4)
    following = replace(request, retries=1)
    admission.retry(
        funded.store,
        funded.settings,
        following,
        message_of(following),
        attempt.number,
        attempt.claim_id,
    )
    assert attempt.end(RETRIED)
    isolate(funded)
    row = funded.row(request)
    assert (row.state, row.reason) == ("settled", "unpublishable")
    assert funded.balance() == (0, 4)
    outcome = requeue(funded, request.task_id)
    assert isinstance(outcome, Reserved)
    assert funded.balance() == (10, 4)
    again = replace(
        following, reservation_id=outcome.reservation_id, request_id=str(outcome.reservation_id)
    )
    assert funded.relay().published == 1
    attempt = funded.run(again)
    attempt.record(5)
    assert attempt.end(RETURNED)
    assert attempt.close()
    assert funded.balance() == (0, 9)


def test_a_message_without_a_budget_just_goes_to_the_outbox(funded: Ledger) -> None:
    message = WireMessage("a", "shop.notify", b"body", "{}", "celery", order_key="k")
    funded.store.run(outbox.enqueue, funded.root, message)
    isolate(funded)
    assert reconcile.quarantined(funded.store, funded.settings, 1)[0].budgeted is False
    assert isinstance(requeue(funded, "a"), Reserved)
    [row] = funded.rows("outbox")
    assert outbox.message_of(row) == message
    assert funded.rows("quarantine") == []
    assert funded.relay().published == 1


@pytest.mark.parametrize("meanwhile", ["claimed", "ended", "released"])
def test_what_somebody_else_has_decided_stands(funded: Ledger, meanwhile: str) -> None:
    request = funded.reserve(10)

    def publish(message: WireMessage) -> None:
        if meanwhile == "released":
            settlement.revoke(funded.store, funded.root, request.reservation_id, "cancelled")
        else:
            attempt = funded.run(request)
            if meanwhile == "ended":
                attempt.end(RETURNED)
        refuse(message)

    funded.broker.on_publish = publish
    assert funded.relay().quarantined == 0
    assert funded.rows("quarantine") == []
    states = {"claimed": "running", "ended": "settled", "released": "released"}
    assert funded.state(request) == states[meanwhile]
    assert funded.row(request).reason != quarantine.UNPUBLISHABLE


def test_of_a_claim_and_an_isolation_at_once_one_wins(racing: Ledger) -> None:
    for _ in range(10):
        request = racing.reserve(1)
        fence = uuid.uuid4()
        claim = (claims.claim_due, racing.root, "", 1, 60_000_000, fence)
        [due] = racing.store.run(*claim).messages
        key = (quarantine.isolate, racing.root, fence, due, "oversize", "no")
        claimed, gone = at_once(
            [
                lambda request=request: racing.deliver(request),
                lambda key=key: racing.store.run(*key),
            ]
        )
        there = [row for row in racing.rows("quarantine") if row.task_id == request.task_id]
        assert len(there) == int(gone)
        assert racing.state(request) == ("released" if gone else "running")
        assert isinstance(claimed, Attempt) is not gone


def test_of_two_calls_at_once_one_publishes(racing: Ledger) -> None:
    for _ in range(5):
        request = isolated(racing, 1)
        outcomes = at_once([lambda request=request: requeue(racing, request.task_id)] * 4)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == [
            *["Missing"] * 3,
            "Reserved",
        ]
        assert racing.relay().published == 1


def test_nothing_of_it_is_kept_where_it_is_rolled_back(funded: Ledger) -> None:
    request = funded.reserve(10)
    fence = uuid.uuid4()
    [due] = funded.store.run(claims.claim_due, funded.root, "", 1, 60_000_000, fence).messages
    before = funded.dump()

    def isolate_and_fail(connection: Connection) -> None:
        assert quarantine.isolate(connection, funded.root, fence, due, "oversize", "no")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        funded.store.run(isolate_and_fail)
    assert funded.dump() == before
    assert funded.state(request) == "reserved"
