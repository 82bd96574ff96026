"""The life of one request for people: facts, amounts, and what happened when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.reconcile import Story
from celery_budget.render.grids import MEANING
from celery_budget.render.text import facts, literal, moment, number, printable, table_of

__all__ = ["stories_view"]

Row = dict[str, Any]

#: Why a request ends that waited too long for its budget; and within what its row is written.
_GIVEN_UP = "park_expired"
_SECOND_US = 1_000_000

_FLAGS = ("over", "unmetered", "unreserved")

#: What comes first of events at the same moment: a store's clock may be coarse.
_ADMITTED, _SENT, _STARTED, _USED, _RETURNED, _ENDED, _LATE = range(7)


class _Event(NamedTuple):
    at_us: int
    rank: int
    what: str


def stories_view(stories: Sequence[Story]) -> RenderableType:
    """The life of each request, an empty line between two."""
    parts: list[RenderableType] = []
    for story in stories:
        parts += [*([Text()] if parts else []), _view(story)]
    return Group(*parts)


def _view(story: Story) -> RenderableType:
    parts: list[RenderableType] = [_facts(story.reservation)]
    if story.lines:
        parts += [Text(), _amounts(story.lines)]
    events = sorted(_events(story), key=lambda event: event[:2])
    if events:
        rows = [(moment(event.at_us), literal(event.what)) for event in events]
        parts += [Text(), table_of(["when", "what"], rows, numbers=["when"])]
    return Group(*parts)


def _facts(told: Row) -> RenderableType:
    """What does not change, the state, and what the request waits for."""
    task, task_id, reason = told["task_name"], told.get("task_id"), told.get("reason")
    known: dict[str, str | None] = {
        "task": f"{task}[{task_id}]" if task_id else task,
        "state": f"{told['state']}: {reason}" if reason else told["state"],
        "owner": told["owner"],
        "request": told.get("request_id"),
        "reservation": told.get("reservation_id"),
        "parent": told.get("parent_id"),
        "stage": told.get("stage"),
        "lane": told.get("lane"),
    }
    if "estimator" in told:
        known["estimator"] = f"{told['estimator']} version {told['estimator_version']}"
    if told.get("shadows"):
        answers = json.loads(told["shadows"])
        known["shadows"] = ", ".join(f"{name}: {number(answers[name])}" for name in sorted(answers))
    known["prices"] = told.get("prices")
    if "reservation_id" in told and told.get("deadline_us") is not None:
        known["deadline"] = moment(told["deadline_us"])
    known["flags"] = "; ".join(f"{flag}: {MEANING[flag]}" for flag in _FLAGS if told.get(flag))
    for parked in told.get("parked") or ([told] if told["state"] == "parked" else []):
        known["waits"] = (
            f"for {number(parked['amount'])} of budget {parked['budget']} since "
            f"{moment(parked['created_us'])}, "
            f"given up at {moment(parked['deadline_us'])}"
        )
    for isolated in told.get("quarantine") or []:
        known["quarantine"] = (
            f"{isolated['reason']} since {moment(isolated['quarantined_us'])} "
            f"({isolated['quarantine_id']}): {isolated['error']}"
        )
    return facts(known)


def _amounts(lines: Iterable[Row]) -> RenderableType:
    columns = ("estimate", "reserved", "used", "settled")
    rows: list[list[Text | str]] = [
        [literal(line["budget"]), *(number(line[column]) for column in columns)] for line in lines
    ]
    return table_of(["budget", *columns], rows, numbers=columns)


def _events(story: Story) -> Iterator[_Event]:
    told = story.reservation
    if _was_never_admitted(story):
        yield _Event(told["ended_us"], _ENDED, "given up: it waited too long for budget")
    elif "reservation_id" in told:
        yield _Event(told["created_us"], _ADMITTED, "admitted")
        if told["cancelled_us"] is not None:
            yield _Event(told["cancelled_us"], _USED, "cancelled while it ran")
        if told["ended_us"] is not None:
            # One transaction ends the request and its attempt, and the clock moves in it.
            ends = [attempt["ended_us"] or 0 for attempt in story.attempts]
            yield _Event(max(told["ended_us"], *ends, 0), _ENDED, told["state"])
    for message in story.messages:
        yield _message_event(message)
    for attempt in story.attempts:
        yield from _attempt_events(attempt)
    for record in story.usage:
        what = f"attempt {record['attempt']} used {number(record['amount'])} ({record['key']})"
        if record["late"]:
            yield _Event(record["recorded_us"], _LATE, f"{what}, after the request had ended")
        else:
            yield _Event(record["recorded_us"], _USED, what)
    for effect in story.effects:
        what = f"attempt {effect['attempt']} had effect {effect['key']}"
        yield _Event(effect["created_us"], _USED, what)


def _was_never_admitted(story: Story) -> bool:
    """Whether a request was parked until it was given up: it is written where it ends."""
    told = story.reservation
    if story.attempts or (told["state"], told.get("reason")) != ("released", _GIVEN_UP):
        return False
    return bool(told["ended_us"] - told["created_us"] < _SECOND_US)


def _message_event(message: Row) -> _Event:
    at_us = message["created_us"]
    if message["published_us"] is not None:
        at_us = message["published_us"]
        what = f"published to {message['queue'] or 'its exchange'}"
        if message["publishes"] > 1:
            what += f", {number(message['publishes'])} times so far"
    elif message["state"] == "held":
        lane = printable(str(message["lane"]))
        what = f"message held by lane {lane}, due at {moment(message['due_us'])}"
    elif message["state"] == "blocked":
        what = f"message held back until attempt {message['after_attempt']} ends"
    else:
        what = f"message due at {moment(message['due_us'])}"
    if message["last_error"]:
        what += f"; publishing failed, last with: {message['last_error']}"
    return _Event(at_us, _SENT, what)


def _attempt_events(attempt: Row) -> Iterator[_Event]:
    name, lease_us = f"attempt {attempt['attempt']}", attempt["lease_until_us"]
    started = f"{name} started on {attempt['worker']}"
    if attempt["ended_us"] is None:
        held = "" if lease_us is None else f", lease until {moment(lease_us)}"
        yield _Event(attempt["started_us"], _STARTED, started + held)
    else:
        yield _Event(attempt["started_us"], _STARTED, started)
        left = "" if lease_us is None else ", not closed yet"
        if attempt["outcome"] == "uncertain" and attempt["inquires"]:
            left = f", its task was asked {number(attempt['replays'])} times what became of it"
            left += "" if lease_us is None else f", and is again at {moment(lease_us)}"
        yield _Event(attempt["ended_us"], _RETURNED, f"{name} {attempt['outcome']}{left}")
