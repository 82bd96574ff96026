"""What an attempt publishes after its call: a replay never has it run twice, or after its end."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_budget import admission, settlement
from celery_budget.admission import Publication
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    AlreadyReserved,
    Missing,
    Refused,
    Released,
    Reserved,
    ReserveRequest,
)
from celery_budget.recovery import Recovered
from celery_budget.relay import Relayed, Unpublishable
from celery_budget.settlement import Attempt
from celery_budget.store import backlog, claims, continuations, outbox, quarantine, reports
from tests.contract.racers import at_once
from tests.contract.support import RETRIED, RETURNED, Ledger, message_of
from tests.contract.test_plans import planned

CHILD = WireMessage("child", "shop.notify", b"body", "{}", "celery")

Publish = Callable[[Ledger, ReserveRequest, WireMessage], object]


def alone(ledger: Ledger, parent: ReserveRequest, message: WireMessage) -> object:
    return admission.enqueue(ledger.store, ledger.settings, message, parent.reservation_id)


def in_a_batch(ledger: Ledger, parent: ReserveRequest, message: WireMessage) -> object:
    publication = Publication(None, message, parent=parent.reservation_id)
    return admission.admit_many(ledger.store, ledger.settings, [publication])


@pytest.fixture(params=[alone, in_a_batch])
def publish(request: pytest.FixtureRequest) -> Publish:
    """How an attempt publishes what draws on no budget; its replay does so again."""
    way: Publish = request.param
    return way


def ended(ledger: Ledger) -> tuple[ReserveRequest, Attempt]:
    """A request whose attempt has ended and is not closed: it may be replayed."""
    parent, attempt = ledger.start(10)
    ledger.relay()
    ledger.broker.published.clear()
    assert attempt.end(RETURNED)
    return parent, attempt


def isolate(ledger: Ledger) -> None:
    """No broker takes what is due."""

    def refuse(message: WireMessage) -> None:
        raise Unpublishable("unroutable", "no queue")

    ledger.broker.on_publish = refuse
    assert ledger.relay().quarantined == 1
    ledger.broker.on_publish = lambda message: None


def requeue(ledger: Ledger, task_id: str = CHILD.task_id) -> Reserved | Refused | Missing:
    def readdress(message: WireMessage, reservation_id: uuid.UUID) -> WireMessage:
        return message

    return ledger.store.run(
        quarantine.requeue, ledger.root, task_id, readdress, lock_ms=5000, bound=None
    )


def publishes(ledger: Ledger) -> list[str]:
    """What relays publish until nothing is left to do."""
    ledger.broker.published.clear()
    while ledger.relay().again:
        pass
    return ledger.broker.published


# Without a budget


def test_what_is_in_quarantine_is_published_when_somebody_says_so_and_once(
    funded: Ledger, publish: Publish
) -> None:
    parent, attempt = ended(funded)
    publish(funded, parent, CHILD)
    isolate(funded)
    publish(funded, parent, CHILD)
    assert publishes(funded) == []
    assert isinstance(requeue(funded), Reserved)
    publish(funded, parent, CHILD)
    assert publishes(funded) == [CHILD.task_id]
    publish(funded, parent, CHILD)
    assert publishes(funded) == []
    assert requeue(funded) == Missing()
    assert attempt.close()
    funded.recover()
    assert funded.rows("outbox") == []


def test_what_is_put_back_is_the_message_that_was_written(funded: Ledger) -> None:
    parent, _ = ended(funded)
    message = replace(CHILD, body=b"its own", due_us=7, rank=3, expires_us=2**62, order_key="k")
    alone(funded, parent, message)
    isolate(funded)
    requeue(funded)
    [row] = funded.rows("outbox", parent_id=parent.reservation_id)
    assert outbox.message_of(row, row.due_us) == message
    assert (row.state, row.failures, row.publishes) == ("due", 0, 0)


def test_what_is_refused_once_more_goes_there_once_more(funded: Ledger, publish: Publish) -> None:
    parent, _ = ended(funded)
    publish(funded, parent, CHILD)
    for _ in range(2):
        isolate(funded)
        publish(funded, parent, CHILD)
        assert len(funded.rows("quarantine")) == 1
        assert isinstance(requeue(funded), Reserved)
    assert publishes(funded) == [CHILD.task_id]


def test_what_is_put_back_after_its_parent_was_closed_is_published(
    funded: Ledger, publish: Publish
) -> None:
    parent, attempt = ended(funded)
    publish(funded, parent, CHILD)
    isolate(funded)
    funded.recover()
    assert len(funded.rows("outbox", parent_id=parent.reservation_id)) == 1
    assert attempt.close()
    funded.recover()
    assert funded.rows("outbox") == []
    assert isinstance(requeue(funded), Reserved)
    assert publishes(funded) == [CHILD.task_id]
    funded.recover()
    assert funded.rows("outbox") == []


def test_what_is_discarded_stays_away(funded: Ledger, publish: Publish) -> None:
    parent, attempt = ended(funded)
    publish(funded, parent, CHILD)
    isolate(funded)
    assert funded.store.run(quarantine.discard, funded.root, CHILD.task_id)
    publish(funded, parent, CHILD)
    assert publishes(funded) == []
    assert attempt.close()
    funded.recover()
    assert funded.rows("outbox") == []


def test_what_has_expired_is_not_published_by_a_replay(funded: Ledger, publish: Publish) -> None:
    parent, attempt = ended(funded)
    publish(funded, parent, replace(CHILD, expires_us=5))
    assert funded.relay() == Relayed(released=1, taken=1)
    assert funded.results.told == [(CHILD.task_id, "expired")]
    # The replay would have it expire so many seconds later.
    publish(funded, parent, replace(CHILD, expires_us=2**62))
    assert publishes(funded) == []
    assert attempt.close()
    funded.recover()
    assert funded.rows("outbox") == []


@pytest.mark.parametrize("why", ["isolated", "expired"])
def test_what_is_kept_for_a_replay_is_no_work(funded: Ledger, why: str) -> None:
    parent, _ = ended(funded)
    alone(funded, parent, replace(CHILD, expires_us=5 if why == "expired" else None))
    if why == "isolated":
        isolate(funded)
    assert funded.relay().quarantined == 0
    funded.put("outbox", {"due_us": 1}, parent_id=parent.reservation_id)
    assert funded.relay() == Relayed()
    assert funded.recover() == Recovered()
    assert funded.store.run(reports.open_work, funded.root)["due"] == 0
    assert funded.store.run(reports.overdue_us, funded.root) == 0
    funded.put("backlog", {"counted_us": 0})
    assert funded.store.run(backlog.waiting, funded.root, 10) == 0
    [row] = funded.rows("outbox", parent_id=parent.reservation_id)
    assert (row.state, row.taken_by, row.published_us) == ("published", None, None)


@pytest.mark.parametrize("why", ["isolated", "expired"])
def test_what_is_kept_for_a_replay_holds_up_nobody(funded: Ledger, why: str) -> None:
    parent, _ = ended(funded)
    waits = replace(CHILD, order_key="k", due_us=2**62)
    alone(funded, parent, replace(waits, expires_us=5 if why == "expired" else None))
    behind = funded.reserve(1, order_key="k")
    assert publishes(funded) == []
    funded.put("outbox", {"due_us": 1}, parent_id=parent.reservation_id)
    if why == "isolated":
        isolate(funded)
    assert publishes(funded) == [behind.task_id]
    if why == "isolated":
        # Written anew, it comes after what was written since.
        last = funded.reserve(1, order_key="k", due_us=3)
        funded.put("quarantine", {"due_us": 2})
        requeue(funded)
        assert publishes(funded) == [last.task_id, CHILD.task_id]


@pytest.mark.parametrize("closed", [False, True])
def test_a_replay_beside_who_puts_it_back(racing: Ledger, publish: Publish, closed: bool) -> None:
    parent, attempt = ended(racing)
    for number in range(5):
        child = replace(CHILD, task_id=f"child {number}", order_key="k")
        publish(racing, parent, child)
        isolate(racing)
        if closed:
            attempt.close()
        beside = racing.recover if closed else lambda child=child: publish(racing, parent, child)
        at_once([lambda child=child: requeue(racing, child.task_id), beside])
        assert publishes(racing) == [child.task_id]


def test_a_relay_that_lost_its_fence_keeps_nothing(funded: Ledger) -> None:
    parent, _ = ended(funded)
    alone(funded, parent, CHILD)
    fences = [uuid.uuid4(), uuid.uuid4()]
    for fence in fences:
        batch = funded.store.run(claims.claim_due, funded.root, "", 1, 0, fence)
        assert len(batch.messages) == 1
    [due] = batch.messages
    funded.store.run(claims.forget, funded.root, fences[0], due.outbox_id)
    assert funded.rows("outbox", parent_id=parent.reservation_id)[0].state == "due"
    funded.store.run(claims.forget, funded.root, fences[1], due.outbox_id)
    # One that comes late neither publishes nor gives back what is kept.
    mark = (funded.root, fences[1], [due], 1)
    assert funded.store.run(claims.mark_published, *mark) == 0
    funded.store.run(claims.give_back, *mark[:3])
    assert publishes(funded) == []


# With a budget


def admitted(ledger: Ledger, child: ReserveRequest, many: bool, **message: object) -> object:
    """What comes of a child that its parent publishes, or publishes again."""
    child = replace(child, reservation_id=new_id())
    if not many:
        return ledger.admit(child, continuation=True, **message)
    publication = Publication(child, message_of(child, **message), continuation=True)
    return admission.admit_many(ledger.store, ledger.settings, [publication])[0]


def a_child(ledger: Ledger, parent: ReserveRequest, amount: int = 5) -> ReserveRequest:
    return ledger.request(amount, parent=parent.reservation_id)


def live(ledger: Ledger, child: ReserveRequest) -> list[str]:
    """The states of a child's reservations but those that never ran."""
    rows = ledger.rows("reservations", task_id=child.task_id)
    return [row.state for row in rows if row.state != "released"]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("replayed", ["before", "after", "before and after", "when it has run"])
def test_a_budgeted_one_runs_once(funded: Ledger, many: bool, replayed: str) -> None:
    parent, attempt = ended(funded)
    child = a_child(funded, parent)
    assert isinstance(admitted(funded, child, many), Reserved)
    isolate(funded)
    if "before" in replayed:
        assert isinstance(admitted(funded, child, many), AlreadyReserved)
        assert publishes(funded) == []
    again = requeue(funded, child.task_id)
    assert isinstance(again, Reserved)
    if "after" in replayed:
        assert isinstance(admitted(funded, child, many), AlreadyReserved)
    assert publishes(funded) == [child.task_id]
    run = funded.run(replace(child, reservation_id=again.reservation_id))
    assert run.end(RETURNED)
    assert run.close()
    if replayed == "when it has run":
        assert isinstance(admitted(funded, child, many), AlreadyReserved)
    assert publishes(funded) == []
    assert requeue(funded, child.task_id) == Missing()
    assert live(funded, child) == ["settled"]
    assert attempt.close()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("why", ["expired", "cancelled", "discarded", "park_expired"])
def test_what_a_budgeted_one_was_told_stands(funded: Ledger, many: bool, why: str) -> None:
    parent, _ = ended(funded)
    child = a_child(funded, parent, 200 if why == "park_expired" else 5)
    admitted(funded, child, many, **({"expires_us": 5} if why == "expired" else {}))
    if why == "expired":
        assert funded.relay().released == 1
    elif why == "cancelled":
        cancelled = funded.store.run(continuations.cancel, funded.root, child.task_id)
        assert isinstance(cancelled, Released)
    elif why == "discarded":
        isolate(funded)
        funded.store.run(quarantine.discard, funded.root, child.task_id)
    else:
        funded.put("parked", {"deadline_us": 1})
        assert funded.sweep().over == (child.task_id,)
    assert isinstance(admitted(funded, child, many), AlreadyReserved)
    assert (publishes(funded), live(funded, child), funded.rows("parked")) == ([], [], [])
    assert funded.balance() == (0, 10)


@pytest.mark.parametrize("many", [False, True])
def test_an_id_that_never_ran_is_free_for_others(funded: Ledger, many: bool) -> None:
    """For another parent, another request, or who has none: only a replay changes nothing."""
    parent, _ = ended(funded)
    child = a_child(funded, parent)
    for other in (
        replace(child, parent=new_id()),
        replace(child, fingerprint="1:other"),
        replace(child, nesting=1),
        replace(child, parent=None),
    ):
        first = admitted(funded, child, many)
        if isinstance(first, Reserved):
            settlement.revoke(funded.store, funded.root, first.reservation_id, "cancelled")
        anew = admitted(funded, other, many)
        assert isinstance(anew, Reserved)
        settlement.revoke(funded.store, funded.root, anew.reservation_id, "cancelled")


def test_some_of_several_have_ended(funded: Ledger) -> None:
    parent, _ = ended(funded)
    gone, stays, parks = (a_child(funded, parent, amount) for amount in (5, 6, 200))
    admitted(funded, gone, True)
    assert isinstance(funded.store.run(continuations.cancel, funded.root, gone.task_id), Released)
    publications = [
        Publication(one, message_of(one), continuation=True)
        for one in (stays, replace(gone, reservation_id=new_id()), parks)
    ]
    outcomes = admission.admit_many(funded.store, funded.settings, publications)
    assert [type(one).__name__ for one in outcomes] == ["Reserved", "AlreadyReserved", "Parked"]
    assert publishes(funded) == [stays.task_id]


@pytest.mark.parametrize("many", [False, True])
def test_one_that_waited_for_its_retry_runs_once_more(funded: Ledger, many: bool) -> None:
    parent, _ = ended(funded)
    child = a_child(funded, parent)
    first = admitted(funded, child, many)
    assert isinstance(first, Reserved)
    child = replace(child, reservation_id=first.reservation_id)
    assert publishes(funded) == [child.task_id]
    run = funded.run(child)
    funded.retry(child, run)
    assert run.end(RETRIED)
    isolate(funded)
    assert isinstance(admitted(funded, child, many), AlreadyReserved)
    assert isinstance(requeue(funded, child.task_id), Reserved)
    assert isinstance(admitted(funded, child, many), AlreadyReserved)
    assert publishes(funded) == [child.task_id]
    assert live(funded, child) == ["settled", "published"]


def test_a_planned_step_runs_once(funded: Ledger) -> None:
    head, step = planned(funded, 10, 20)
    funded.relay()
    assert funded.run(head).end(RETURNED)
    turn = replace(step, fingerprint="1:told", step=None, parent=head.reservation_id)
    activate = (funded.store, funded.settings, turn, message_of(turn))
    assert isinstance(admission.activate(*activate), Reserved)
    isolate(funded)
    assert isinstance(admission.activate(*activate), AlreadyReserved)
    assert isinstance(requeue(funded, step.task_id), Reserved)
    assert isinstance(admission.activate(*activate), AlreadyReserved)
    assert publishes(funded) == [step.task_id]
    assert live(funded, step) == ["published"]
