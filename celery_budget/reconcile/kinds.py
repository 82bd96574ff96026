"""The kinds of steps that can be lacking, and what is told of each one: what happens, and when."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_budget.reconcile.brokers import QueueStanding
from celery_budget.reconcile.lanes import LaneStanding
from celery_budget.settings import Settings
from celery_budget.store import lapses, silent

__all__ = ["STEPS", "Known", "ago", "at", "commands", "told"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

RELAY = "celery -A PROJ budget relay"

#: By kind: what is lacking, what will happen, and when. ``docs/reconcile.md`` has the same table.
STEPS: dict[str, tuple[str, str, str]] = {
    "parked": (
        "budget",
        "admitted in fair order, or given up",
        "when its budget has room; by its deadline",
    ),
    "planned": (
        "its turn in a chain",
        "reserved with its message, or released",
        "when the step before it has ended",
    ),
    "held": (
        "a place in its lane",
        "let go by a relay, or ended",
        "when the lane's limits let it; by `max_wait` or its `expires`",
    ),
    "behind": (
        "the message before it",
        "published after that",
        "when what comes before it by its order key is published",
    ),
    "later": (
        "its time",
        "published by a relay",
        "when it is due: its countdown or `eta`, or after a result that is being stored",
    ),
    "due": (
        "a publication",
        "published by a relay",
        "now",
    ),
    "taken": (
        "a confirmation",
        "a relay has it; another takes it",
        "now; after `budget_publish_seconds`",
    ),
    "failing": (
        "a publication that succeeds",
        "published once more by a relay",
        "after a wait that grows with each failure",
    ),
    "published": (
        "a start",
        "started by a worker; where it is lost published again, and at last released",
        (
            "when its queue gets to it; looked at again after `budget_republish_seconds`, doubled "
            "each time"
        ),
    ),
    "running": (
        "an end",
        "ended by its worker",
        "when it is done; its lease is renewed meanwhile",
    ),
    "lapsed": (
        "a worker",
        "with a stored result ended; else run again, asked about or lost",
        "at the second look of the sweep, unless the worker renews its lease",
    ),
    "asked": (
        "an answer",
        "its task is asked what became of it, or undoes it",
        "again and again, for `budget_lookup_seconds`",
    ),
    "retry": (
        "its retry",
        "published by a relay",
        "when it is due",
    ),
    "unclosed": (
        "its result, for certain",
        "closed by its worker; else its outcome is given again",
        "when its lease is over",
    ),
    "untold": (
        "a stored result",
        "stored by relay or sweep",
        "when it is due, later with each try",
    ),
    "quarantined": (
        "a decision",
        "nothing by itself",
        "when somebody requeues or discards it",
    ),
}


@dataclass(frozen=True)
class Known:
    """What is known of lanes, queues and relays, where one request is told."""

    settings: Settings
    lanes: Mapping[str, LaneStanding]
    queues: Mapping[tuple[str, str], QueueStanding]
    relays: int


def told(row: Any, known: Known) -> str:
    """Return what one row lacks and what will happen, in words."""
    return _TOLD[row.kind](row, known)


def commands(row: Any, known: Known) -> tuple[str, ...]:
    """Return what can be run to act on it."""
    called = "celery -A PROJ budget"
    if row.kind == "parked":
        return (f"{called} show {shlex.quote(row.budget)}",)
    if row.kind == "held" and _why(row, known) == "paused":
        return (f"{called} lane resume {shlex.quote(row.lane)}",)
    if row.kind == "quarantined":
        return tuple(f"{called} quarantine {verb} {row.id}" for verb in ("requeue", "discard"))
    return ()


def at(microseconds: int) -> str:
    """Return an instant as UTC, to the second; as it is beyond the calendar."""
    try:
        when = _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return str(microseconds)
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def ago(microseconds: int) -> str:
    """Return a time that has passed, in the largest unit of which there are two."""
    seconds = max(0, microseconds) // 1_000_000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _since(row: Any) -> str:
    return ago(row.now_us - row.since_us)


def _relay(known: Known) -> str:
    return "" if known.relays else f" (none is seen: start '{RELAY}')"


def _parked(row: Any, known: Known) -> str:
    needs = f"its next attempt needs {row.amount} more" if row.retries else f"needs {row.amount}"
    return (
        f"parked for {_since(row)}: {needs} of budget {row.budget!r}; "
        f"admitted in fair order when there is room, given up at {at(row.next_us)}"
    )


def _planned(row: Any, known: Known) -> str:
    before = f" of task {row.follows}" if row.follows else ""
    return f"planned as step {row.step}: follows step {row.step - 1}{before}"


def _held(row: Any, known: Known) -> str:
    by = f"held by lane {row.lane!r}"
    ends = "" if row.next_us is None else f"; ended at {at(row.next_us)} where it is held still"
    if row.due_us > row.now_us:
        return f"{by}, not due before {at(row.due_us)}{ends}"
    why, lane = _why(row, known), known.lanes.get(row.lane)
    if why == "paused":
        return f"{by}, which is paused{ends}"
    if why == "asleep":
        said = f": {lane.asleep}" if lane is not None and lane.asleep else ""
        return f"{by}, whose workers do not answer{said}{ends}"
    if why is not None:
        return f"{by}, whose limit on what is {why} is reached{ends}"
    return f"{by}: let go by a relay when its turn comes{_relay(known)}{ends}"


def _why(row: Any, known: Known) -> str | None:
    """What keeps a lane from letting go anything."""
    lane = known.lanes.get(row.lane)
    return None if lane is None else lane.why


def _behind(row: Any, known: Known) -> str:
    return f"published after the message before it with order key {row.order_key!r}"


def _later(row: Any, known: Known) -> str:
    return f"to be published at {at(row.due_us)} by a relay{_relay(known)}"


def _due(row: Any, known: Known) -> str:
    again = f", published {row.publishes} times before" if row.publishes else ""
    late = ago(row.now_us - row.due_us)
    return f"message due for {late}{again}: published by a relay at once{_relay(known)}"


def _taken(row: Any, known: Known) -> str:
    return f"a relay is publishing it; another takes it at {at(row.due_us)}"


def _failing(row: Any, known: Known) -> str:
    again = f"tried again at {at(row.due_us)} by a relay{_relay(known)}"
    return f"publishing it failed ({row.last_error}); {again}"


def _published(row: Any, known: Known) -> str:
    begins = f"published {_since(row)} ago, not started"
    look = f"looked at again at {at(row.next_us)}"
    lost = "published again"
    if silent.is_given_up(row.publishes, known.settings.max_publishes):
        lost = "released as undelivered"
    found = known.queues.get((row.broker, row.queue))
    if found is None or found.messages is None:
        return f"{begins}; {look}, and where it is lost {lost}"
    if found.messages:
        return f"{begins}; queue {row.queue!r} {found.holds}; {look}"
    lost = f"a worker has it, or it is lost and {lost} at {at(row.next_us)}"
    return f"{begins}; queue {row.queue!r} is empty: {lost}"


def _follows(row: Any, known: Known) -> str:
    """What becomes of an attempt whose worker is gone."""
    if row.inquires:
        return "its task is asked what became of it"
    most = known.settings.max_deliveries
    if row.cancelled_us is None and lapses.runs_again(row.rerun, row.deliveries, most):
        return "it runs again"
    return "it ends as lost"


def _running(row: Any, known: Known) -> str:
    return (
        f"attempt {row.attempt} runs at {row.worker} since {at(row.started_us)}, lease until "
        f"{at(row.next_us)}; where nobody renews that {_follows(row, known)}"
    )


def _lapsed(row: Any, known: Known) -> str:
    look = "at the second look of a sweep"
    if row.suspected_us is not None:
        look = f"by a sweep at {at(row.suspected_us + known.settings.renew_us)}"
    return (
        f"the lease of attempt {row.attempt} at {row.worker} is over since {at(row.next_us)}; "
        f"unless it is renewed, or the result is stored, {_follows(row, known)} {look}"
        f"{_relay(known)}"
    )


def _asked(row: Any, known: Known) -> str:
    until = at(row.ended_us + known.settings.lookup_us)
    asked = f"its task is asked about it at {at(row.next_us)}, until {until}"
    return f"attempt {row.attempt} was lost; {asked}{_relay(known)}"


def _retry(row: Any, known: Known) -> str:
    return f"waits for its retry, to be published at {at(row.due_us)} by a relay{_relay(known)}"


def _unclosed(row: Any, known: Known) -> str:
    follows = "its outcome is given again"
    if not lapses.is_replayed(row.replayable, row.replays, known.settings.max_deliveries):
        follows = "it is closed as it is"
    when = f"when its lease is over, at {at(row.next_us)}"
    ended = f"attempt {row.attempt} has {row.outcome} at {row.worker} and is not closed"
    return f"{ended}: {follows} {when}{_relay(known)}"


def _untold(row: Any, known: Known) -> str:
    tries = f" ({abs(row.tries)} tries so far)" if row.tries else ""
    again = f"next try at {at(row.next_us)}{_relay(known)}"
    return f"ended ({row.reason}), and its result is still to be stored{tries}: {again}"


def _quarantined(row: Any, known: Known) -> str:
    since = f"in quarantine since {at(row.since_us)} ({row.reason})"
    return f"{since}: holds nothing, and goes on only where somebody says so"


_TOLD: dict[str, Callable[[Any, Known], str]] = {
    "parked": _parked,
    "planned": _planned,
    "held": _held,
    "behind": _behind,
    "later": _later,
    "due": _due,
    "taken": _taken,
    "failing": _failing,
    "published": _published,
    "running": _running,
    "lapsed": _lapsed,
    "asked": _asked,
    "retry": _retry,
    "unclosed": _unclosed,
    "untold": _untold,
    "quarantined": _quarantined,
}
