"""What is told of one request's life: from each of its ids, in each state."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest

from celery_budget import reconcile
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Outcome, Parked
from celery_budget.core.retries import Retries
from celery_budget.reconcile import Story
from celery_budget.relay import Unpublishable
from celery_budget.store import continuations, dispatching, journal, lanes, outbox
from celery_budget.store import stories as stories_of
from tests.contract.support import RETRIED, RETURNED, Ledger, message_of

BROKEN = Outcome("raised", payload='"boom"', error="shop.Broken")
DAY_US = 86_400_000_000


def stories(ledger: Ledger, some_id: object) -> list[Story]:
    found = reconcile.explain(ledger.store, ledger.settings, str(some_id))
    json.dumps([story.as_dict() for story in found])
    return found


def story(ledger: Ledger, some_id: object) -> Story:
    [found] = stories(ledger, some_id)
    return found


def changes(told: Story) -> list[tuple[Any, ...]]:
    """What was done to which budget, and what was reserved and spent before and after."""
    return [
        (
            one["what"],
            one["budget"],
            one["reserved_after"] - one["reserved"],
            one["reserved_after"],
            one["spent_after"] - one["spent"],
            one["spent_after"],
        )
        for one in told.changes
    ]


def nexts(told: Story) -> list[str]:
    return [one.what for one in told.next]


def lane(ledger: Ledger, **terms: Any) -> None:
    given = {"queues": ("celery",), "preflight": False, **terms}
    ledger.store.run(lanes.declare, ledger.root, "llm", given)


def test_every_change_of_a_balance_is_told_with_before_and_after(ledger: Ledger) -> None:
    ledger.set("all", 1000)
    ledger.set("b", 100, parent="all")
    ledger.reserve(7)
    request, attempt = ledger.start(10)
    ledger.reserve(5)
    attempt.record(4)
    attempt.end(RETURNED)
    told = story(ledger, request.task_id)
    assert sorted(changes(told)) == [
        ("reserve", "all", 7, 17, 0, 0),
        ("reserve", "b", 7, 17, 0, 0),
        ("settle", "all", 22, 12, 0, 4),
        ("settle", "b", 22, 12, 0, 4),
    ]
    assert told.folded == ()


def test_changes_that_were_folded_are_said_to_be_gone(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.end(RETURNED)
    [window_us] = {row.window_us for row in funded.rows("journal")}
    funded.store.run(journal.fold, funded.root, "b", window_us, 0, -DAY_US)
    told = story(funded, request.task_id)
    assert (changes(told), told.folded) == ([], ("b",))
    later = funded.reserve(3)
    # Behind the checkpoint; the clock of SQLite may be the same.
    funded.put("journal", {"at_us": 1}, what="checkpoint")
    assert story(funded, later.task_id).folded == ()
    assert changes(story(funded, later.task_id)) == [("reserve", "b", 0, 3, 10, 10)]


def test_only_a_request_s_own_changes_are_read(funded: Ledger) -> None:
    request = funded.reserve(10)
    others = [funded.reserve(1) for _ in range(3)]
    assert len(story(funded, request.task_id).changes) == 1
    assert {len(story(funded, one.task_id).changes) for one in others} == {1}


def test_an_attempt_keeps_the_name_of_its_error_once_it_is_closed(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    ended = Outcome("retried", error="ValueError")
    following, _ = funded.retry(request, attempt)
    assert attempt.end(ended)
    again = funded.run(following)
    assert again.end(BROKEN)
    assert again.close()
    told = story(funded, request.task_id)
    assert [(one["outcome"], one["error"]) for one in told.attempts] == [
        ("retried", "ValueError"),
        ("raised", "shop.Broken"),
    ]
    assert {row.payload for row in funded.rows("attempts")} == {None}


def test_where_its_message_went_is_known_once_that_is_gone(funded: Ledger) -> None:
    request = funded.reserve(10)
    funded.relay()
    [sent] = funded.rows("outbox")
    attempt = funded.run(request, pid=4711)
    assert attempt.end(RETURNED)
    assert attempt.close()
    told = story(funded, request.task_id)
    assert told.messages == ()
    [ran] = told.attempts
    assert (ran["queue"], ran["publishes"], ran["pid"]) == ("celery", 1, 4711)
    assert ran["published_us"] == sent.published_us


def test_how_long_it_waited_for_budget_is_told_once_it_is_admitted(funded: Ledger) -> None:
    first = funded.reserve(95)
    request = funded.request(10)
    funded.admit(request, continuation=True)
    [waits] = funded.rows("parked")
    funded.put("parked", {"created_us": waits.created_us - 5_000_000})
    funded.store.run(continuations.cancel, funded.root, first.task_id)
    assert funded.sweep().admitted == 1
    told = story(funded, request.task_id).reservation
    assert (told["parked_budget"], told["parked_reason"]) == ("b", "held")
    assert told["parked_us"] == waits.created_us - 5_000_000
    assert told["unparked_us"] - told["parked_us"] >= 5_000_000
    assert told["parked"] == []
    assert told["admitted"] is True


def test_how_long_the_next_attempt_waited_is_told_too(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    attempt.record(60)
    _, written = funded.retry(request, attempt, 60)
    assert isinstance(written, Parked)
    attempt.end(RETRIED)
    waiting = story(funded, request.task_id)
    assert nexts(waiting) == [
        "admitted when 60 of budget b is free",
        "given up, where it waits still",
    ]
    assert [one["what"] for one in waiting.changes] == ["reserve"]
    funded.set("b", 200)
    assert funded.sweep().admitted == 1
    told = story(funded, request.task_id)
    assert told.reservation["parked_budget"] == "b"
    assert [one["what"] for one in told.changes] == ["reserve", "raise"]


@pytest.mark.parametrize("ends", ["given up", "cancelled"])
def test_what_was_never_admitted_tells_how_long_it_waited(funded: Ledger, ends: str) -> None:
    request = funded.request(999)
    funded.admit(request, continuation=True)
    if ends == "cancelled":
        funded.store.run(continuations.cancel, funded.root, request.task_id)
    else:
        funded.put("parked", {"deadline_us": 1})
        funded.sweep()
    told = story(funded, request.task_id)
    assert told.reservation["state"] == "released"
    assert told.reservation["parked_budget"] == "b"
    assert told.reservation["admitted"] is False
    assert told.changes == ()


# By which id.


def test_it_is_found_by_the_id_of_its_message_and_of_its_wait(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    [message] = funded.rows("outbox")
    assert story(funded, message.outbox_id).reservation["task_id"] == request.task_id
    attempt.record(60)
    funded.retry(request, attempt, 60)
    [waits] = funded.rows("parked")
    assert story(funded, waits.parked_id).reservation["task_id"] == request.task_id
    new = funded.request(999)
    funded.admit(new, continuation=True)
    [waits] = funded.rows("parked", task_id=new.task_id)
    told = story(funded, waits.parked_id)
    assert (told.reservation["state"], told.reservation["stage"]) == ("parked", "draft")
    assert [(one["budget"], one["estimate"]) for one in told.lines] == [("b", 999)]
    assert told.reservation["estimator"] == "constant"


def test_it_is_found_by_its_id_in_quarantine(funded: Ledger) -> None:
    refuse(funded)
    isolated = funded.reserve(5)
    funded.relay()
    [row] = funded.rows("quarantine")
    told = story(funded, row.quarantine_id)
    assert told.reservation["task_id"] == isolated.task_id
    assert told.reservation["quarantine"][0]["reason"] == "oversize"


def refuse(ledger: Ledger) -> None:
    def no(message: WireMessage) -> None:
        raise Unpublishable("oversize", "no way")

    ledger.broker.on_publish = no


def test_a_message_without_a_budget_has_a_story_too(funded: Ledger) -> None:
    parent = funded.reserve(1)
    message = message_of(funded.request(1, task_id="free-1"))
    funded.store.run(outbox.enqueue, funded.root, message, parent_id=parent.reservation_id)
    [row] = funded.rows("outbox", task_id="free-1")
    for some_id in ("free-1", row.outbox_id):
        told = story(funded, some_id)
        assert told.reservation["state"] == "due"
        assert told.parent is not None
        assert told.parent["task_id"] == parent.task_id
        assert nexts(told) == ["published by a relay"]
    assert [one["task_id"] for one in story(funded, parent.task_id).followers] == ["free-1"]
    refuse(funded)
    funded.relay()
    isolated = funded.rows("quarantine", task_id="free-1")
    assert len(isolated) == 1
    told = story(funded, isolated[0].quarantine_id)
    assert told.reservation["state"] == "quarantined"


def test_a_refused_try_is_known_by_its_reservation_as_long_as_the_sample_has_it(
    funded: Ledger,
) -> None:
    request = funded.request(999)
    funded.admit(request)
    told = story(funded, request.reservation_id).reservation
    assert (told["state"], told["budget"], told["reason"]) == ("refused", "b", "exhausted")
    assert (told["requested"], told["limit_amount"]) == (999, 100)
    assert stories(funded, new_id()) == stories(funded, "no such") == []


def test_a_request_id_is_found_whoever_owns_it(funded: Ledger) -> None:
    funded.set("c", 10)
    mine = funded.reserve(1, request_id="order-1")
    other = funded.reserve(1, request_id="order-1", budget="c")
    found = [one.reservation["task_id"] for one in stories(funded, "order-1")]
    assert sorted(found) == sorted([mine.task_id, other.task_id])


# What belongs to it.


def test_parent_and_children_are_told_and_counted(funded: Ledger) -> None:
    parent = funded.reserve(1)
    made = [funded.reserve(1, parent=parent.reservation_id) for _ in range(22)]
    told = story(funded, parent.task_id)
    assert told.followed == 22
    assert [one["task_id"] for one in told.children] == [one.task_id for one in made[:20]]
    child = story(funded, made[0].task_id)
    assert child.parent is not None
    assert child.parent["task_id"] == parent.task_id


def test_refusals_of_the_same_task_are_told_and_no_others(funded: Ledger) -> None:
    funded.set("c", 10)
    # In slots of their own: of several in one the last is kept.
    first, second = (uuid.UUID(int=new_id().int // 16 * 16 + n) for n in range(2))
    funded.admit(funded.request(101, reservation_id=first))
    funded.admit(funded.request(102, task_name="shop.other", reservation_id=second))
    funded.admit(funded.request(103, budget="c"))
    request = funded.reserve(10)
    funded.admit(funded.request(104, budget="c"))
    refused = story(funded, request.task_id).refusals
    assert [(one["budget"], one["reason"], one["requested"]) for one in refused] == [
        ("b", "exhausted", 101)
    ]


def test_extensions_and_what_is_untold_are_told(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.extend(5, key="more")
    told = story(funded, request.task_id)
    assert [(one["key"], one["amount"]) for one in told.extensions] == [("key:more", 5)]
    waiting = funded.reserve(1)
    funded.store.run(continuations.cancel, funded.root, waiting.task_id)
    told = story(funded, waiting.task_id)
    assert [one["reason"] for one in told.untold] == ["cancelled"]
    assert nexts(told) == ["the result is stored (cancelled)"]
    funded.tell_all()
    assert nexts(story(funded, waiting.task_id)) == []


# What comes next.


def test_what_comes_next_for_a_message(funded: Ledger) -> None:
    request = funded.reserve(10, due_us=funded.now() + DAY_US, expires_us=funded.now() + 2 * DAY_US)
    due, expires = story(funded, request.task_id).next
    assert (due.what, due.at_us) == ("published by a relay", funded.rows("outbox")[0].due_us)
    assert expires.what == "given up, where it is not published"
    assert expires.at_us == funded.rows("outbox")[0].expires_us
    sent = funded.reserve(10)
    funded.relay()
    [one] = story(funded, sent.task_id).next
    assert one.what == "a worker starts it; where none has by then, published again"
    funded.put("outbox", {"publishes": 99}, task_id=sent.task_id)
    assert nexts(story(funded, sent.task_id)) == [
        "a worker starts it; where none has by then, given up as undelivered"
    ]


def test_a_message_says_after_which_it_comes(funded: Ledger) -> None:
    first = funded.reserve(1, order_key="k")
    second = funded.reserve(1, order_key="k")
    before = funded.message(first).outbox_id
    assert nexts(story(funded, second.task_id)) == [
        f"published after message {before}, which has its order key"
    ]


@pytest.mark.parametrize(
    ("how", "then"),
    [
        ({}, "another attempt follows"),
        ({"late_ack": False}, "it is lost, and charged"),
        ({"inquires": True}, "its task is asked what became of it"),
    ],
)
def test_what_follows_where_a_worker_goes_away(
    funded: Ledger, how: dict[str, bool], then: str
) -> None:
    request = funded.reserve(10)
    funded.run(request, **how)
    [one] = story(funded, request.task_id).next
    assert one.what == f"attempt 1 ends; where its worker does not renew its lease, {then}"
    assert one.at_us == funded.rows("attempts")[0].lease_until_us
    for ends in ({"cancelled_us": 1}, {"deliveries": 99, "cancelled_us": None}):
        funded.put("reservations", ends)
        [one] = story(funded, request.task_id).next
        assert one.what.endswith(then if how.get("inquires") else "it is lost, and charged")


def test_what_is_left_of_an_attempt_that_has_ended(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    following, _ = funded.retry(request, attempt)
    assert nexts(story(funded, request.task_id))[1] == "published when attempt 1 has ended"
    attempt.end(RETRIED)
    again = funded.run(following)
    again.end(RETURNED)
    closes = "the worker of attempt 2 closes it; where it has not by then, "
    assert nexts(story(funded, request.task_id)) == [f"{closes}its outcome is given again"]
    most = funded.settings.max_deliveries
    funded.put("attempts", {"replays": most}, reservation_id=request.reservation_id, attempt=2)
    assert nexts(story(funded, request.task_id)) == [f"{closes}it is closed as it is"]
    again.close()
    assert nexts(story(funded, request.task_id)) == []


def test_the_deadline_comes_next_until_it_has_ended(funded: Ledger) -> None:
    deadline_us = funded.now() + DAY_US
    request = funded.reserve(10, deadline_us=deadline_us)
    told = story(funded, request.task_id)
    assert told.next[-1].what == "its deadline: no attempt starts after it"
    assert told.next[-1].at_us == deadline_us
    funded.store.run(continuations.cancel, funded.root, request.task_id)
    assert "deadline" not in str(nexts(story(funded, request.task_id)))


HELD: list[tuple[dict[str, Any], str]] = [
    ({"paused": True}, "let go when lane llm is resumed ('celery -A PROJ budget lane resume llm')"),
    ({"preflight": True}, "let go when workers of lane llm answer: they were not asked lately"),
    (
        {"max_running_units": 15},
        "let go when lane llm has room for 10 units: 1 jobs (10 units) are queued or running",
    ),
    (
        {"max_queued_jobs": 1},
        "let go when lane llm has room for 10 units: 1 jobs (10 units) are queued",
    ),
    ({}, "let go when its turn comes in lane llm: 1 jobs (10 units) wait"),
]


@pytest.mark.parametrize(("terms", "said"), HELD, ids=[str(sorted(one)) for one, _ in HELD])
def test_why_a_lane_holds_a_message_is_told(
    funded: Ledger, terms: dict[str, Any], said: str
) -> None:
    lane(funded)
    first = funded.reserve(10)
    funded.store.run(dispatching.dispatch, funded.root, "llm")
    assert funded.message(first).state == "due"
    request = funded.reserve(10)
    terms = dict(terms)
    pause = terms.pop("paused", False)
    lane(funded, **terms)
    if pause:
        funded.store.run(lanes.pause, funded.root, "llm", True)
    told = story(funded, request.task_id)
    assert (nexts(told)[0], told.next[1].what) == (said, "given up, where it is not published")
    assert told.next[1].at_us == told.messages[0]["due_us"] + DAY_US


def test_work_that_is_too_heavy_for_its_lane_is_said_to_be(funded: Ledger) -> None:
    lane(funded)
    request = funded.reserve(10)
    lane(funded, max_queued_units=5)
    assert nexts(story(funded, request.task_id))[0] == (
        "weighs 10 units, more than lane llm lets go at a time; raise its limits"
    )


def test_what_has_failed_for_good_names_its_error_in_quarantine(funded: Ledger) -> None:
    request = funded.reserve(10)
    attempt = funded.deliver(request, Retries(max_attempts=1))
    following, _ = funded.retry(request, attempt)
    attempt.end(replace(RETRIED, payload='["boom", null]', error="ValueError"))
    refused = funded.deliver(following, Retries(max_attempts=1))
    assert refused.replay is not None
    refused.close()
    told = story(funded, request.task_id)
    assert told.reservation["reason"] == "max_attempts"
    assert [one["error"] for one in told.reservation["quarantine"]] == ["boom"]
    assert told.next == ()


def test_a_planned_step_says_what_it_waits_for(funded: Ledger) -> None:
    first = funded.reserve(10)
    funded.put(
        "reservations",
        {"plan_id": first.reservation_id, "step": 0},
        reservation_id=first.reservation_id,
    )
    step = funded.reserve(10)
    planned = {"plan_id": first.reservation_id, "step": 1, "state": "planned"}
    funded.put("reservations", planned, reservation_id=step.reservation_id)
    funded.store.run(outbox.drop, funded.root, step.reservation_id)
    assert nexts(story(funded, step.task_id)) == [
        "step 2 begins when the one before it has returned, and is released where it does not"
    ]
    told = story(funded, first.task_id)
    assert [(one["task_id"], one["step"]) for one in told.steps] == [(step.task_id, 1)]


def test_of_a_long_life_the_last_is_listed_and_the_rest_is_counted(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stories_of, "LISTED", 3)
    ledger.set("b", 100)
    request, attempt = ledger.start(10)
    for number in range(5):
        attempt.record(1, key=f"k{number}")
    told = story(ledger, request.task_id)
    assert [one["key"] for one in told.usage] == ["key:k2", "key:k3", "key:k4"]
    assert told.left_out == {"usage": 2}
    assert attempt.end(RETURNED)
    assert story(ledger, ledger.reserve(1).task_id).left_out == {}
