"""What was accepted and lacks a step: named with what will happen to it, and when."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import reconcile, settlement
from celery_budget.core.messages import WireMessage
from celery_budget.reconcile.brokers import Load
from celery_budget.reconcile.kinds import STEPS, at
from celery_budget.relay import Rejected, Unpublishable
from celery_budget.store import dispatching, lanes, pending, tallies
from tests.contract.sleepers import announced
from tests.contract.support import RETRIED, RETURNED, Ledger
from tests.contract.test_inquiries import lost
from tests.contract.test_plans import planned

HOUR_US = 3_600_000_000


@dataclass
class Brokers:
    """Brokers that say what they are told to."""

    said: tuple[Load, ...] | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)

    def loads(self, broker: str, envelope: str) -> tuple[Load, ...] | None:
        self.asked.append((broker, envelope))
        return self.said


def look(ledger: Ledger, limit: int = 20, **of: Any) -> reconcile.Reconciliation:
    return reconcile.reconcile(ledger.store, ledger.settings, limit=limit, **of)


def told(ledger: Ledger, kind: str, **of: Any) -> reconcile.Step:
    """The one step of a kind that is lacking."""
    [found] = [one for one in look(ledger, **of).pending if one.kind == kind]
    [step] = found.steps
    assert found.count == 1
    return step


def lane(ledger: Ledger, **terms: Any) -> None:
    given = {"queues": ("celery",), "preflight": False, "max_wait_us": None, **terms}
    ledger.store.run(lanes.declare, ledger.root, "llm", given)


# Each kind, as it comes about.


def _parked(ledger: Ledger) -> str:
    request = ledger.request(160)
    ledger.admit(request, continuation=True)
    return request.task_id


def _planned(ledger: Ledger) -> str:
    return planned(ledger, 3, 4)[1].task_id


def _held(ledger: Ledger) -> str:
    lane(ledger, max_wait_us=HOUR_US)
    return ledger.reserve().task_id


def _behind(ledger: Ledger) -> str:
    ledger.reserve(order_key="k", due_us=ledger.now() + HOUR_US)
    request = ledger.reserve(order_key="k")
    ledger.relay()
    return request.task_id


def _later(ledger: Ledger) -> str:
    return ledger.reserve(due_us=ledger.now() + HOUR_US).task_id


def _due(ledger: Ledger) -> str:
    request = ledger.reserve()
    ledger.put("outbox", {"due_us": ledger.now() - 12_500_000})
    return request.task_id


def _taken(ledger: Ledger) -> str:
    request = ledger.reserve()
    taken: list[str] = []

    def publish(message: WireMessage) -> None:
        taken.append(told(ledger, "taken").told)
        raise SystemExit

    ledger.broker.on_publish = publish
    with pytest.raises(SystemExit):
        ledger.relay()
    assert len(taken) == 1
    return request.task_id


def _failing(ledger: Ledger) -> str:
    def refuse(message: WireMessage) -> None:
        raise Rejected("queue full")

    request = ledger.reserve()
    ledger.broker.on_publish = refuse
    ledger.relay()
    ledger.put("outbox", {"due_us": ledger.now() + HOUR_US})
    return request.task_id


def _published(ledger: Ledger) -> str:
    request = ledger.reserve()
    ledger.relay()
    return request.task_id


def _running(ledger: Ledger) -> str:
    return ledger.start()[0].task_id


def _lapsed(ledger: Ledger) -> str:
    request, _ = ledger.start()
    ledger.put("attempts", {"lease_until_us": 1_000_000})
    return request.task_id


def _asked(ledger: Ledger) -> str:
    request, _ = lost(ledger)
    return str(request.task_id)


def _retry(ledger: Ledger) -> str:
    request, attempt = ledger.start()
    following = replace(request, retries=1)
    ledger.retry(following, attempt)
    attempt.end(RETRIED)
    attempt.close()
    ledger.put("outbox", {"due_us": ledger.now() + HOUR_US}, state="due")
    return request.task_id


def _unclosed(ledger: Ledger) -> str:
    request, attempt = ledger.start()
    attempt.end(RETURNED)
    return request.task_id


def _untold(ledger: Ledger) -> str:
    def fail(task_id: str, reason: str) -> None:
        raise OSError("down")

    request = ledger.reserve(expires_us=1)
    ledger.results.ended = fail  # type: ignore[method-assign]
    ledger.relay()
    return request.task_id


def _quarantined(ledger: Ledger) -> str:
    def refuse(message: WireMessage) -> None:
        raise Unpublishable("unroutable", "no queue")

    request = ledger.reserve()
    ledger.broker.on_publish = refuse
    ledger.relay()
    return request.task_id


NONE_SEEN = r" \(none is seen: start 'celery -A PROJ budget relay'\)"
AT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"

#: How each comes about, and what is told of it, in parts that are joined.
KINDS: dict[str, tuple[Callable[[Ledger], str], tuple[str, ...]]] = {
    "parked": (
        _parked,
        (r"parked for \d s: needs 160 of budget 'b'; ", rf".* given up at {AT}"),
    ),
    "planned": (_planned, (r"planned as step 1: follows step 0 of task [\w-]{36}",)),
    "held": (
        _held,
        (
            rf"held by lane 'llm': let go by a relay when its turn comes{NONE_SEEN}; ",
            rf"ended at {AT} where it is held still",
        ),
    ),
    "behind": (_behind, ("published after the message before it with order key 'k'",)),
    "later": (_later, (rf"to be published at {AT} by a relay{NONE_SEEN}",)),
    "due": (_due, (rf"message due for 1[2-9] s: published by a relay at once{NONE_SEEN}",)),
    "taken": (_taken, (rf"a relay is publishing it; another takes it at {AT}",)),
    "failing": (
        _failing,
        (r"publishing it failed \(queue full\); ", rf"tried again at {AT} by a relay{NONE_SEEN}"),
    ),
    "published": (
        _published,
        (
            rf"published \d s ago, not started; looked at again at {AT}, ",
            "and where it is lost published again",
        ),
    ),
    "running": (
        _running,
        (
            rf"attempt 1 runs at worker@host since {AT}, lease until {AT}; ",
            "where nobody renews that it runs again",
        ),
    ),
    "lapsed": (
        _lapsed,
        (
            "the lease of attempt 1 at worker@host is over since 1970-01-01T00:00:01Z; ",
            "unless it is renewed, or the result is stored, ",
            f"it runs again at the second look of a sweep{NONE_SEEN}",
        ),
    ),
    "asked": (
        _asked,
        (
            rf"attempt 1 was lost; its task is asked about it at {AT}, ",
            rf"until {AT}{NONE_SEEN}",
        ),
    ),
    "retry": (_retry, (rf"waits for its retry, to be published at {AT} by a relay{NONE_SEEN}",)),
    "unclosed": (
        _unclosed,
        (
            "attempt 1 has returned at worker@host and is not closed: ",
            rf"its outcome is given again when its lease is over, at {AT}{NONE_SEEN}",
        ),
    ),
    "untold": (
        _untold,
        (
            r"ended \(expired\), and its result is still to be stored \(1 tries so far\): ",
            rf"next try at {AT}{NONE_SEEN}",
        ),
    ),
    "quarantined": (
        _quarantined,
        (
            rf"in quarantine since {AT} \(unroutable\): holds nothing, ",
            "and goes on only where somebody says so",
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_step_that_is_lacking_is_told(funded: Ledger, kind: str) -> None:
    make, said = KINDS[kind]
    task_id = make(funded)
    step = told(funded, kind)
    assert step.task_id == task_id
    assert re.fullmatch("".join(said), step.told), step.told
    assert look(funded).ok, "work that is open is not wrong"
    json.dumps(look(funded).as_dict())


def test_there_is_a_test_of_each_kind_and_each_is_explained() -> None:
    assert set(STEPS) == set(pending.KINDS) == set(KINDS)


# When it is due, and what is overdue.


def test_what_is_overdue_is_counted_and_told_first(funded: Ledger) -> None:
    for _ in range(3):
        funded.reserve()
    late, later, _ = funded.rows("outbox")
    funded.put("outbox", {"due_us": funded.now() - HOUR_US}, outbox_id=late.outbox_id)
    funded.put("outbox", {"due_us": funded.now() - HOUR_US // 2}, outbox_id=later.outbox_id)
    found = look(funded, limit=1)
    [due] = found.pending
    assert (due.count, due.overdue) == (3, 2)
    assert 3600 <= due.overdue_seconds < 3660
    [step] = due.steps
    assert step.task_id == late.task_id
    assert 3600 <= step.overdue_seconds < 3660
    assert [one.kind for one in found.stuck(3600)] == ["due"]
    assert found.stuck(7200) == ()


def test_what_hangs_on_others_is_never_overdue(funded: Ledger) -> None:
    lane(funded, paused=True)
    funded.reserve()
    funded.put("outbox", {"due_us": 1, "created_us": 1})
    [held] = look(funded).pending
    assert (held.kind, held.overdue, held.steps[0].next_us) == ("held", 0, None)


def test_without_details_the_counts_are_exact(funded: Ledger) -> None:
    for _ in range(3):
        funded.reserve()
    [due] = look(funded, limit=0).pending
    assert (due.count, due.steps) == (3, ())


def test_a_relay_that_runs_is_not_asked_for(funded: Ledger) -> None:
    _later(funded)
    announced(funded)
    found = look(funded)
    assert found.relays == 1
    assert "none is seen" not in found.pending[0].steps[0].told


# Why a lane holds something.


def test_a_paused_lane_is_named_with_the_command_that_resumes_it(funded: Ledger) -> None:
    lane(funded, paused=True)
    funded.reserve()
    step = told(funded, "held")
    assert step.told == "held by lane 'llm', which is paused"
    assert step.commands == ("celery -A PROJ budget lane resume llm",)


def test_a_lane_whose_workers_are_silent_is_named_with_what_they_said(funded: Ledger) -> None:
    lane(funded, preflight=True)
    funded.put("lanes", {"awake": False, "checked_us": funded.now(), "asleep_reason": "no worker"})
    funded.reserve()
    said = "held by lane 'llm', whose workers do not answer: no worker"
    assert told(funded, "held").told == said


def test_a_lane_that_is_full_is_named(funded: Ledger) -> None:
    lane(funded, max_queued_jobs=1)
    funded.reserve()
    funded.store.run(dispatching.dispatch, funded.root, "llm")
    funded.reserve()
    said = "held by lane 'llm', whose limit on what is queued is reached"
    assert told(funded, "held").told == said


def test_a_lane_that_holds_what_is_not_due_says_when_it_is(funded: Ledger) -> None:
    lane(funded)
    due_us = funded.now() + HOUR_US
    funded.reserve(due_us=due_us)
    assert told(funded, "held").told == f"held by lane 'llm', not due before {at(due_us)}"


# What becomes of attempts, by the rules of recovery.


def test_what_was_delivered_too_often_is_told_to_end_as_lost(funded: Ledger) -> None:
    _running(funded)
    funded.put("reservations", {"deliveries": funded.settings.max_deliveries})
    assert told(funded, "running").told.endswith("where nobody renews that it ends as lost")


def test_early_acknowledged_work_is_told_to_end_as_lost(funded: Ledger) -> None:
    funded.start(late_ack=False)
    assert told(funded, "running").told.endswith("it ends as lost")


def test_the_second_look_at_a_lease_is_told(funded: Ledger) -> None:
    _lapsed(funded)
    funded.recover()
    [row] = funded.rows("attempts")
    look_us = row.suspected_us + funded.settings.renew_us
    assert f"it runs again by a sweep at {at(look_us)}" in told(funded, "lapsed").told


def test_what_was_replayed_too_often_is_told_to_be_closed(funded: Ledger) -> None:
    _unclosed(funded)
    funded.put("attempts", {"replays": funded.settings.max_deliveries})
    assert "it is closed as it is" in told(funded, "unclosed").told


def test_what_was_published_too_often_is_told_to_be_released(funded: Ledger) -> None:
    _published(funded)
    funded.put("outbox", {"publishes": funded.settings.max_publishes})
    assert told(funded, "published").told.endswith("where it is lost released as undelivered")


# What brokers say.


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((Load("celery", 17, 1),), "queue 'celery' holds 17 messages, 1 consumer; looked at again"),
        ((Load("celery", 1, None),), "queue 'celery' holds 1 message; looked at again at"),
        (
            (Load("a", 1, 2), Load("b", 2, 3)),
            "queue 'celery' holds 3 messages, 5 consumers; looked at again",
        ),
        (
            (Load("celery", 0, 1),),
            "queue 'celery' is empty: a worker has it, or it is lost and published again at",
        ),
        (None, "not started; looked at again at"),
    ],
    ids=["a queue", "not counted", "two queues", "empty", "no answer"],
)
def test_what_a_broker_says_is_told(
    funded: Ledger, said: tuple[Load, ...] | None, words: str
) -> None:
    _published(funded)
    brokers = Brokers(said)
    assert words in told(funded, "published", queues=brokers).told
    assert brokers.asked == [("", "{}")]


def test_each_queue_is_asked_once_and_told_beside_the_ledger(funded: Ledger) -> None:
    for queue in ("a", "a", "b"):
        funded.reserve(queue=queue)
    funded.relay()
    brokers = Brokers((Load("a", 1, 0),))
    first, second = look(funded, queues=brokers).queues
    assert (first.queue, first.published, first.messages, first.consumers) == ("a", 2, 1, 0)
    assert (second.queue, second.published) == ("b", 1)
    assert len(brokers.asked) == 2
    assert look(funded).queues[0].messages is None, "nobody was asked"


# What is derived, and put right.


def test_a_message_that_is_passed_by_for_good_is_told_and_let_go(funded: Ledger) -> None:
    request = funded.reserve(order_key="k")
    funded.put("outbox", {"behind": True})
    said = f"the message of task {request.task_id} is passed by, and none comes before it"
    found = look(funded)
    assert found.mismatches == (f"{said} by its order key",)
    assert found.remedies == (
        (
            "messages that are passed by for good are let go by 'celery -A PROJ budget reconcile "
            "--repair'"
        ),
    )
    assert funded.relay().published == 0
    assert reconcile.repair(funded.store, funded.settings) == (
        f"the message of task {request.task_id} is passed by no more",
    )
    assert look(funded).ok
    assert reconcile.repair(funded.store, funded.settings) == ()
    assert funded.relay().published == 1


def test_a_message_that_is_passed_by_with_reason_stays_so(funded: Ledger) -> None:
    _behind(funded)
    assert reconcile.repair(funded.store, funded.settings) == ()
    assert [row.behind for row in funded.rows("outbox")] == [False, True]


def test_a_count_from_a_time_to_come_is_told_and_made_anew(funded: Ledger) -> None:
    lane(funded)
    funded.reserve()
    to_come = funded.now() + HOUR_US
    funded.put("backlog", {"messages": 10**6, "counted_us": to_come})
    funded.put("lane_tallies", {"jobs": 10**6, "counted_us": to_come})
    names = ("the outbox", "lane 'llm'")
    found = look(funded)
    assert found.ok, "no money hangs on it"
    assert [note.partition(", and believed")[0] for note in found.notes] == [
        f"the count of what waits of {whose} is from {at(to_come)}" for whose in names
    ]
    assert reconcile.repair(funded.store, funded.settings) == tuple(
        f"the count of what waits of {whose} is made anew by the next admission" for whose in names
    )
    assert look(funded).notes == ()
    funded.reserve()
    assert funded.rows("backlog")[0].messages < 10**6


def test_tallies_that_are_wrong_are_told_and_made_anew(funded: Ledger) -> None:
    ended(funded)
    assert funded.store.run(tallies.roll, funded.root, 10, 0) == 1
    right = funded.rows("tallies")
    funded.put("tallies", {"requests": 7}, tally_id=right[0].tally_id)
    found = look(funded)
    [said] = found.mismatches
    assert said.startswith("1 tally of 20")
    assert said.endswith("is not what its requests add up to")
    [repaired] = reconcile.repair(funded.store, funded.settings)
    assert repaired.startswith("1 tally of 20")
    assert repaired.endswith("made anew from its requests")
    assert look(funded).ok
    assert funded.rows("tallies") == right


@pytest.mark.parametrize(
    "spoilt",
    [
        {"figures": "{"},
        {"figures": "[]"},
        {"figures": '{"settled":"1"}'},
        {"figures": '{"settled":1.5}'},
        {"day": 2**31 - 1},
        {"day": -(2**31)},
    ],
)
def test_tallies_that_nobody_can_read_are_made_anew(funded: Ledger, spoilt: dict[str, Any]) -> None:
    ended(funded)
    assert funded.store.run(tallies.roll, funded.root, 10, 0) == 1
    right = funded.rows("tallies")
    funded.put("tallies", spoilt)
    assert not look(funded).ok
    reconcile.report(funded.store, funded.settings, by="day")
    assert reconcile.repair(funded.store, funded.settings)
    assert look(funded).ok
    assert funded.rows("tallies") == right


def test_a_request_whose_only_message_waits_for_an_attempt_that_has_ended_is_told(
    funded: Ledger,
) -> None:
    request = funded.reserve()
    funded.put("outbox", {"state": "blocked", "after_attempt": 1})
    funded.conserved = False
    assert look(funded).mismatches == (
        f"task {request.task_id} of 'b' is reserved and nothing will bring it to an end",
    )


def test_of_many_mismatches_some_are_told_and_how_many_more_there_are(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_budget.reconcile.proof.MOST_TOLD", 2)
    for _ in range(5):
        funded.reserve(1)
    funded.put("lines", {"used": 2})
    funded.conserved = False
    found = look(funded)
    for part, said in enumerate(("holds 1, used 2 and charged 0", "2 of 'b' by its line and 0")):
        told = found.mismatches[3 * part : 3 * part + 3]
        assert said in told[0]
        assert said in told[1]
        assert told[2] == "and 3 more of the kind of the one before"
    assert len(found.mismatches) == 6


def test_each_part_of_the_proof_is_told(funded: Ledger) -> None:
    parts: list[tuple[int, int]] = []
    look(funded, told=lambda done, total: parts.append((done, total)))
    assert [done for done, _ in parts] == list(range(1, len(parts) + 1))
    assert {total for _, total in parts} == {len(parts)}


# Results.


@dataclass
class Stored:
    """A result backend that has what it is told to have."""

    has: set[str] = field(default_factory=set)
    kept_seconds: float | None = None
    unknown: set[str] = field(default_factory=set)

    def is_stored(self, task_id: str, task_name: str) -> bool | None:
        return None if task_id in self.unknown else task_id in self.has


def ended(ledger: Ledger) -> str:
    request, attempt = ledger.start(1)
    attempt.end(RETURNED)
    attempt.close()
    return request.task_id


def test_results_that_are_not_stored_are_told(funded: Ledger) -> None:
    there, missing, ignored = ended(funded), ended(funded), ended(funded)
    _running(funded)
    _unclosed(funded)
    found = look(funded, stored=Stored({there}, unknown={ignored}), results=10)
    assert found.results == 2
    assert found.unstored == (
        f"task {missing} (shop.draft) has returned, and the result backend has no result of it",
    )
    assert not found.ok
    assert found.mismatches == ()


def test_only_the_last_results_are_looked_up_and_none_that_has_expired(funded: Ledger) -> None:
    ended(funded)
    last = ended(funded)
    assert look(funded, stored=Stored({last}), results=1).unstored == ()
    funded.put("reservations", {"ended_us": 1})
    assert look(funded, stored=Stored(kept_seconds=3600.0), results=10).results == 0
    assert look(funded, stored=Stored(), results=10).results == 2
    assert look(funded, stored=Stored()).results is None


def test_results_of_what_never_ran_or_ran_in_place_are_not_looked_for(funded: Ledger) -> None:
    ended(funded)
    funded.put("attempts", {"worker": "host/17"})
    gone = funded.reserve()
    settlement.revoke(funded.store, funded.root, gone.reservation_id, "cancelled")
    assert look(funded, stored=Stored(), results=10).results == 0


def test_the_number_of_statements_does_not_depend_on_how_much_is_open(funded: Ledger) -> None:
    def statements() -> int:
        counted = []
        engine = funded.store._engine

        def note(*args: Any) -> None:
            counted.append(args[2])

        sa.event.listen(engine, "before_cursor_execute", note)
        look(funded, limit=5)
        sa.event.remove(engine, "before_cursor_execute", note)
        return len(counted)

    funded.reserve(1)
    before = statements()
    for _ in range(20):
        funded.reserve(1)
    assert statements() == before
