"""What happened in the life of one request, and when, in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from celery_budget.reconcile import Story
from celery_budget.render.text import moment, number, printable

__all__ = ["Event", "events_of", "shortened"]

Row = dict[str, Any]

#: Why a request ends that waited too long for its budget.
_GIVEN_UP = "park_expired"

#: What comes first of events at the same moment: a store's clock may be coarse.
_ADMITTED, _SENT, _STARTED, _USED, _RETURNED, _ENDED, _LATE = range(7)


T = TypeVar("T")

#: How much of a long life is shown.
FIRST, LAST = 50, 150


class Event(NamedTuple):
    """One thing that happened.

    :ivar rank: what comes first of several at one moment.
    """

    at_us: int
    rank: int
    what: str


def events_of(story: Story) -> list[Event]:
    """Return what happened, in the order of time; of a long life what comes first and last."""

    def more(left_out: Sequence[Event]) -> Event:
        return left_out[0]._replace(what=f"and {number(len(left_out))} more, which --json tells")

    return shortened(sorted(_events(story), key=lambda event: event[:2]), more)


def shortened(rows: Sequence[T], more: Callable[[Sequence[T]], T]) -> list[T]:
    """Return rows; of many the first and the last, and what stands for those between."""
    if len(rows) <= FIRST + LAST:
        return list(rows)
    return [*rows[:FIRST], more(rows[FIRST:-LAST]), *rows[-LAST:]]


def _events(story: Story) -> Iterator[Event]:
    yield from _request_events(story)
    shown = {message["retries"] for message in story.messages if "retries" in message}
    for message in story.messages:
        yield _message_event(message)
    for attempt in story.attempts:
        if attempt.get("queue") is not None and attempt["retries"] not in shown:
            yield _published_event(attempt)
        yield from _attempt_events(attempt)
    for record in story.usage:
        yield _usage_event(record)
    for extension in story.extensions:
        what = (
            f"attempt {extension['attempt']} extended its hold by {number(extension['amount'])} "
            f"{extension['unit']} ({extension['key']})"
        )
        yield Event(extension["extended_us"], _USED, what)
    for effect in story.effects:
        what = f"attempt {effect['attempt']} had effect {effect['key']}"
        yield Event(effect["created_us"], _USED, what)
    for isolated in story.reservation.get("quarantine") or []:
        what = f"put into quarantine: {isolated['reason']}"
        yield Event(isolated["quarantined_us"], _ENDED, what)


def _request_events(story: Story) -> Iterator[Event]:
    told = story.reservation
    if told.get("parked_us") is not None:
        what = f"parked: waits for budget {told['parked_budget']} ({told['parked_reason']})"
        yield Event(told["parked_us"], _ADMITTED, what)
        yield Event(told["unparked_us"], _SENT, "parked no longer")
    if told["state"] == "refused":
        yield Event(told["refused_us"], _ENDED, f"refused by budget {told['budget']}")
    elif _was_never_admitted(story):
        given_up = told.get("reason") == _GIVEN_UP
        what = "it waited too long for budget" if given_up else str(told.get("reason"))
        yield Event(told["ended_us"], _ENDED, f"given up: {what}")
    elif "estimator" in told and told["state"] != "parked":
        yield from _admission_events(story)
    for parked in told.get("parked") or ([told] if told["state"] == "parked" else []):
        what = f"parked: waits for budget {parked['budget']}"
        yield Event(parked["created_us"], _RETURNED, what)


def _admission_events(story: Story) -> Iterator[Event]:
    told = story.reservation
    lane = f", to lane {told['lane']}" if told.get("lane") else ""
    yield Event(told["created_us"], _ADMITTED, f"admitted{lane}")
    if told["cancelled_us"] is not None:
        yield Event(told["cancelled_us"], _USED, "cancelled while it ran")
    if told["ended_us"] is not None:
        # One transaction ends the request and its attempt, and the clock moves in it.
        ends = [attempt["ended_us"] or 0 for attempt in story.attempts]
        yield Event(max(told["ended_us"], *ends, 0), _ENDED, told["state"])


def _was_never_admitted(story: Story) -> bool:
    """Whether a request was parked until it was given up: it is written where it ends."""
    return story.reservation.get("admitted") is False


def _message_event(message: Row) -> Event:
    at_us = message["created_us"]
    if message["published_us"] is not None:
        at_us = message["published_us"]
        what = f"published to {message['queue'] or 'its exchange'}{_broker(message)}"
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
    return Event(at_us, _SENT, what)


def _broker(message: Row) -> str:
    return f" of broker {message['broker']}" if message.get("broker") else ""


def _published_event(attempt: Row) -> Event:
    """Return when a message was published that is gone, as its attempt has seen it."""
    what, at_us = f"published to {attempt['queue'] or 'its exchange'}", attempt["published_us"]
    if at_us is None or at_us > attempt["started_us"]:
        at_us = attempt["started_us"]
    if attempt["publishes"] > 1:
        what += f", {number(attempt['publishes'])} times"
    return Event(at_us, _SENT, what)


def _attempt_events(attempt: Row) -> Iterator[Event]:
    name, lease_us = f"attempt {attempt['attempt']}", attempt["lease_until_us"]
    started = f"{name} started on {attempt['worker']}"
    if attempt.get("pid") is not None:
        started += f", process {attempt['pid']}"
    if attempt["ended_us"] is None:
        held = "" if lease_us is None else f", lease until {moment(lease_us)}"
        if attempt.get("suspected_us") is not None:
            held += ", which its worker did not renew so far"
        yield Event(attempt["started_us"], _STARTED, started + held)
    else:
        yield Event(attempt["started_us"], _STARTED, started)
        left = "" if lease_us is None else ", not closed yet"
        if attempt["outcome"] == "uncertain" and attempt["inquires"]:
            left = f", its task was asked {number(attempt['replays'])} times what became of it"
            left += "" if lease_us is None else f", and is again at {moment(lease_us)}"
        yield Event(attempt["ended_us"], _RETURNED, f"{name} {_outcome(attempt)}{left}")


def _outcome(attempt: Row) -> str:
    error = attempt.get("error")
    if error is None:
        return str(attempt["outcome"])
    return f"{attempt['outcome']} {'by ' if attempt['outcome'] == 'retried' else ''}{error}"


def _usage_event(record: Row) -> Event:
    unit = f" {record['unit']}" if record.get("unit") else ""
    what = f"attempt {record['attempt']} used {number(record['amount'])}{unit} ({record['key']})"
    model = _model(record.get("details"))
    if model is not None:
        what += f", model {model}"
    if record.get("assumed"):
        what += f", of which {number(record['assumed'])} are assumed"
    if record.get("repeated_by") is not None:
        what += f", told again by attempt {record['repeated_by']}"
    if record["late"]:
        return Event(record["recorded_us"], _LATE, f"{what}, after the request had ended")
    return Event(record["recorded_us"], _USED, what)


def _model(details: str | None) -> str | None:
    """Return the model that a provider's reply has named; none where none is known."""
    try:
        told = json.loads(details) if details else None
    except ValueError:
        return None
    model = told.get("model") if isinstance(told, dict) else None
    return str(model) if model else None
