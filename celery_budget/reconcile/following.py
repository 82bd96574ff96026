"""What happens next with a request that is not done with, and when."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.core.dispatch import short_of
from celery_budget.reconcile.lanes import why_held
from celery_budget.settings import Settings
from celery_budget.store import lapses, silent
from celery_budget.store.lanes import LaneStanding

__all__ = ["Next", "next_steps"]

Row = Mapping[str, Any]

#: Why parked work waits that no amount helps.
_SHUT = {
    "blocked": "has a limit that is not 0",
    "draining": "is open again",
    "closed": "is open again",
}


@dataclass(frozen=True)
class Next:
    """What happens next.

    :ivar what: in words.
    :ivar at_us: when, in microseconds since the epoch; none where that is not a matter of time. One
        that has passed is done as soon as a relay, or a worker, comes to it.
    """

    what: str
    at_us: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def next_steps(
    settings: Settings,
    request: Row | None,
    messages: Sequence[Row] = (),
    attempts: Sequence[Row] = (),
    parked: Sequence[Row] = (),
    untold: Sequence[Row] = (),
    lanes: Mapping[str, LaneStanding] | None = None,
) -> tuple[Next, ...]:
    """Return what happens next with a request, the next thing first; nothing of what is done with.

    :param request: its reservation; none where it has none.
    :param messages: its rows of the outbox, and so on.
    :param lanes: how the lanes stand that hold its messages.
    """
    found: list[Next] = []
    is_open = request is None or request["ended_us"] is None
    running = [one for one in attempts if one["lease_until_us"] is not None]
    found += (_of_attempt(one, request, settings.max_deliveries) for one in running)
    for row in parked:
        found += _of_parked(row)
    begun = {one["retries"] for one in running}
    for message in messages:
        if message["retries"] in begun:
            # What is in the outbox of it is only dropped once its attempt is closed.
            continue
        if message["state"] != "published":
            found += _of_message(message, lanes or {})
        elif is_open and not running and message["published_us"] is not None:
            found.append(_of_published(message, settings.max_publishes))
    if request is not None and request["state"] == "planned":
        found.append(
            Next(
                f"step {request['step'] + 1} begins when the one before it has returned, and is "
                "released where it does not"
            )
        )
    for row in untold:
        tries = abs(row["tries"])
        after = f", after {tries} tries" if tries else ""
        found.append(Next(f"the result is stored ({row['reason']}){after}", row["due_us"]))
    if request is not None and is_open and request["deadline_us"] is not None:
        found.append(Next("its deadline: no attempt starts after it", request["deadline_us"]))
    return tuple(found)


def _of_attempt(attempt: Row, request: Row | None, most: int) -> Next:
    """Return what happens next with an open attempt.

    :param most: how often the message of one may be delivered, and its outcome be given again.
    """
    name, until_us = f"attempt {attempt['attempt']}", attempt["lease_until_us"]
    if attempt["ended_us"] is None:
        again = (
            request is not None
            and request["cancelled_us"] is None
            and lapses.runs_again(attempt["rerun"], request["deliveries"], most)
        )
        if attempt["inquires"]:
            then = "its task is asked what became of it"
        elif again:
            then = "another attempt follows"
        else:
            then = "it is lost, and charged"
        return Next(f"{name} ends; where its worker does not renew its lease, {then}", until_us)
    if attempt["outcome"] == "uncertain":
        return Next(f"the task is asked what became of {name}", until_us)
    last = "its outcome is given again"
    if not lapses.is_replayed(attempt["replayable"], attempt["replays"], most):
        last = "it is closed as it is"
    return Next(f"the worker of {name} closes it; where it has not by then, {last}", until_us)


def _of_parked(row: Row) -> Iterator[Next]:
    shut = _SHUT.get(row["reason"])
    if shut is not None:
        yield Next(f"admitted when budget {row['budget']} {shut}")
    elif row["reason"] == "queued":
        yield Next(f"admitted after what waits for budget {row['budget']} before it")
    else:
        yield Next(f"admitted when {row['amount']:,} of budget {row['budget']} is free")
    yield Next("given up, where it waits still", row["deadline_us"])


def _of_message(message: Row, lanes: Mapping[str, LaneStanding]) -> Iterator[Next]:
    due_us, expires_us = message["due_us"], message["expires_us"]
    follows = message.get("follows")
    if message["state"] == "blocked":
        yield Next(f"published when attempt {message['after_attempt']} has ended")
    elif follows is not None:
        yield Next(f"published after message {follows}, which has its order key", due_us)
    elif message["state"] == "held":
        lane = lanes.get(message["lane"])
        yield Next(_held(message, lane), due_us)
        most_us = None if lane is None else lane.lane.max_wait_us
        if most_us is not None and (expires_us is None or due_us + most_us < expires_us):
            expires_us = due_us + most_us
    elif message["failures"]:
        yield Next(f"published again by a relay; that failed {message['failures']:,} times", due_us)
    else:
        yield Next("published by a relay", due_us)
    if expires_us is not None:
        yield Next("given up, where it is not published", expires_us)


def _held(message: Row, lane: LaneStanding | None) -> str:
    """Return what a message that is held back waits for."""
    name = message["lane"]
    if lane is None:
        return f"let go by lane {name}"
    weight = message["weight"]
    why = why_held(lane) or short_of(lane.lane, lane.queued, lane.running, weight)
    if why == "paused":
        resume = f"'celery -A PROJ budget lane resume {shlex.quote(name)}'"
        return f"let go when lane {name} is resumed ({resume})"
    if why == "asleep":
        told = lane.answer.reason or "they were not asked lately"
        return f"let go when workers of lane {name} answer: {told}"
    if why == "heavy":
        return f"weighs {weight:,} units, more than lane {name} lets go at a time; raise its limits"
    if why in ("running", "queued"):
        load = lane.queued if why == "queued" else lane.queued + lane.running
        return (
            f"let go when lane {name} has room for {weight:,} units: {load.jobs:,} jobs "
            f"({load.units:,} units) are {'queued' if why == 'queued' else 'queued or running'}"
        )
    return (
        f"let go when its turn comes in lane {name}: {lane.waiting.jobs:,} jobs "
        f"({lane.waiting.units:,} units) wait"
    )


def _of_published(message: Row, most: int) -> Next:
    if silent.is_given_up(message["publishes"], most):
        then = "given up as undelivered"
    else:
        then = "published again"
    return Next(f"a worker starts it; where none has by then, {then}", message["due_us"])
