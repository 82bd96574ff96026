"""What the library logs: a list of events with names and fields that stay, and how one is told.

Each event has one text for people, made of its fields, and those fields once more on the log record
for machines: ``budget_event`` is the event's name, ``budget_task_id`` its field ``task_id``, and so
on. Any formatter that writes a record's extra attributes gets them (:mod:`logging` calls them
``extra``). Normal traffic is told at DEBUG, refusals and changes of state at INFO, what somebody
should look at above that.

No field holds an argument, a result, a payload or a credential. Ids are text, amounts exact
integers. ``error`` is what the ledger, a broker or a result backend has said; of an exception from
the application's code there is only its class, ``error_type``, and a traceback.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["EVENTS", "FIELDS", "PREFIX", "Event", "Logger"]

#: What the names of a record's attributes begin with.
PREFIX = "budget_"

#: What the fields mean, with their units. Text unless something else is said.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "address": "where something is served, as a URL",
        "alert_id": "the id of an alert, the same each time it is told",
        "amount": "an amount, in the smallest part of the budget's unit (integer)",
        "attempt": "which run of its request, from 1 (integer)",
        "available": "what was left of the budget, in its unit; below 0 where it is over (integer)",
        "bound": "the limit that was met (integer)",
        "broker": "a broker's name in budget_brokers; empty for the application's own",
        "bytes": "a size in bytes (integer)",
        "call": "which function was called",
        "charged": "what each budget was charged, by name (object of integers)",
        "consequence": "what follows from it",
        "count": "how many (integer)",
        "entry": "what an entry of the spool is; neither a value nor an error's text",
        "error": "what the ledger, a broker or a result backend has said",
        "error_type": "the class of an exception",
        "estimated": "what the request asks of each budget it names, by name (object of integers)",
        "failures": "how often it was refused before (integer)",
        "group_id": "the id of a Celery group",
        "kind": "what an alert is about",
        "lane": "a lane's name",
        "limit": "the budget's limit, in its unit (integer)",
        "matter": "what was to be told",
        "name": "a budget's name",
        "outcome": "returned, raised, retried, replaced, ignored or rejected",
        "parked_id": "the id of what is parked",
        "path": "a file or folder, or a page of the dashboard",
        "piece": "what kind of work is recovered",
        "queue": "a queue's name",
        "reason": "why, in a word, or a few",
        "requested": "what was asked for, in the budget's unit (integer)",
        "reservation_id": "the id of the request in the ledger",
        "said": "what an alert says, on one line",
        "seconds": "a time in seconds (number)",
        "shadow": "a shadow estimator's name and version",
        "stage": "the stage that the task belongs to",
        "state": "what state it has come to, in a word, or a few",
        "step": "which periodic step, or how something was brought on",
        "store": "the ledger's URL, without its password",
        "stripes": "over how many rows the counters of a budget are (integer)",
        "task": "a task's name",
        "task_id": "a task's id",
        "unit": "a budget's unit",
        "used": "what each budget's unit was used, by the budget's name (object of integers)",
    }
)

_NAMED = re.compile(r"%\((\w+)\)")


@dataclass(frozen=True)
class Event:
    """One thing that is logged.

    :ivar name: stays as it is from release to release.
    :ivar level: of :mod:`logging`.
    :ivar text: what people read, a template over its fields; may be said better at any time.
    :ivar more: its fields beside those in the text.
    """

    name: str
    level: int
    text: str
    more: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of all its fields, sorted."""
        return tuple(sorted({*_NAMED.findall(self.text), *self.more}))


def _events(*events: Event) -> Mapping[str, Event]:
    return MappingProxyType({event.name: event for event in events})


_TASK = "task %(task)s[%(task_id)s]"
_EXPLAINED = "see 'celery -A PROJ budget explain %(task_id)s'"
_RUN = "attempt %(attempt)s of reservation %(reservation_id)s"
_LOST_RUN = "attempt %(attempt)s of task %(task)s[%(task_id)s]"
_D, _I, _W, _E = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

#: All of them, by name.
EVENTS = _events(
    # Requests
    Event(
        "request.admitted",
        _D,
        f"{_TASK} is admitted",
        ("reservation_id", "stage", "estimated", "seconds"),
    ),
    Event("request.repeated", _I, f"{_TASK} was admitted before", ("reservation_id",)),
    Event(
        "request.refused",
        _I,
        f"{_TASK} is refused: %(reason)s (%(requested)s %(unit)s of budget %(name)r)",
        ("stage", "available", "limit"),
    ),
    Event(
        "request.waived",
        _I,
        f"{_TASK} is admitted, and would be refused were it enforced: %(reason)s",
        ("stage", "name", "unit", "requested", "available", "limit"),
    ),
    Event("request.turned_away", _I, f"{_TASK} is turned away: %(reason)s", ("stage",)),
    Event("request.parked", _I, f"{_TASK} waits for budget", ("parked_id", "stage", "estimated")),
    Event(
        "request.unparked",
        _D,
        "what was parked as %(parked_id)s for budget %(name)r is admitted",
    ),
    Event(
        "request.given_up",
        _W,
        f"{_TASK} waited too long for %(amount)s of budget %(name)r and is given up",
    ),
    Event(
        "request.settled",
        _D,
        "reservation %(reservation_id)s is settled",
        ("attempt", "outcome", "used", "charged"),
    ),
    Event("request.released", _I, "task %(task_id)s will not run: %(reason)s", ("state",)),
    Event(
        "request.spent",
        _E,
        f"{_TASK} is not run again after attempt %(attempt)s: %(reason)s; {_EXPLAINED}",
    ),
    Event(
        "request.unstarted",
        _E,
        f"{_TASK} ended before it was started: %(reason)s; {_EXPLAINED}",
    ),
    Event(
        "continuation.failed",
        _E,
        f"task %(task_id)s cannot follow: %(error)s; {_EXPLAINED}",
        ("error_type",),
    ),
    # Messages and brokers
    Event(
        "message.published",
        _D,
        f"the message of {_TASK} is published",
        ("broker", "queue"),
    ),
    Event(
        "message.postponed",
        _W,
        f"the message of {_TASK} is tried again later: %(error)s",
        ("broker", "queue", "failures"),
    ),
    Event(
        "message.quarantined",
        _E,
        f"the message of {_TASK} is in quarantine, %(reason)s: %(error)s"
        "; see 'celery -A PROJ budget quarantine show %(task_id)s'",
        ("broker", "queue"),
    ),
    Event(
        "message.silent",
        _I,
        "the message of task %(task_id)s was never started: %(step)s",
        ("broker", "queue", "count"),
    ),
    Event(
        "message.unreadable",
        _E,
        "where a message for broker %(broker)r went cannot be read; its queue is not asked",
    ),
    Event("message.event_lost", _W, f"the task-sent event of {_TASK} could not be stored"),
    Event("broker.down", _W, "broker %(broker)r cannot be reached: %(error)s"),
    Event("broker.up", _I, "broker %(broker)r answers again"),
    Event("broker.blocked", _W, "the broker takes no messages: %(reason)s"),
    Event("broker.unblocked", _I, "the broker takes messages again"),
    Event("broker.disconnected", _I, "the broker has ended the connection"),
    Event("broker.no_default_exchange", _D, "the default exchange is not for this user"),
    Event("broker.unasked", _W, "broker %(broker)r cannot be asked: %(error)s"),
    Event("broker.slow", _W, "%(count)s queues are asked later: their brokers are slow"),
    # Attempts
    Event(
        "attempt.claimed",
        _D,
        f"{_RUN} is claimed",
        ("task_id",),
    ),
    Event("attempt.ended", _D, f"{_RUN} has ended: %(outcome)s", ("state", "seconds")),
    Event("attempt.replayed", _I, f"{_RUN} has ended before; its outcome is given again"),
    Event("attempt.claim_lost", _W, f"{_RUN} lost its claim while it ran; its outcome is refused"),
    Event(
        "attempt.left",
        _W,
        f"{_RUN} waited for the ledger, and the worker stops; recovery will bring it on",
    ),
    Event(
        "attempt.spooled",
        _W,
        f"{_RUN} has ended as %(outcome)s, and the worker stops; that is in the spool, for the "
        "next one",
    ),
    Event("attempt.settled_itself", _W, f"{_RUN} has settled itself, and raised afterwards"),
    Event("attempt.lapsed", _W, f"{_LOST_RUN} lapsed: %(step)s", ("reservation_id",)),
    Event("attempt.lost", _W, f"{_LOST_RUN} was lost: %(reason)s", ("reservation_id",)),
    Event(
        "attempt.lookup_failed",
        _E,
        f"what became of {_LOST_RUN} is not known; it is asked again",
        ("reservation_id",),
    ),
    Event(
        "attempt.compensate_failed",
        _E,
        f"nothing has undone {_LOST_RUN}; it is tried again",
        ("reservation_id",),
    ),
    Event("delivery.idle", _I, f"{_TASK} %(reason)s; this delivery does nothing"),
    Event(
        "delivery.foreign",
        _E,
        f"{_TASK} is not this delivery's to end: %(reason)s; {_EXPLAINED}",
    ),
    Event("delivery.altered", _E, f"{_TASK} is not the message that was admitted; it is dropped"),
    Event("delivery.unreserved", _W, f"{_TASK} came without a reservation and waits for budget"),
    Event("delivery.given_back", _W, "task %(task_id)s is given back, as the worker stops"),
    # Usage
    Event(
        "usage.late",
        _W,
        "usage of reservation %(reservation_id)s came after its end; it is charged",
        ("attempt",),
    ),
    Event(
        "usage.over",
        _I,
        "reservation %(reservation_id)s has used %(amount)s %(unit)s of budget %(name)r, and "
        "%(limit)s are held for it",
        ("attempt",),
    ),
    Event(
        "usage.outside",
        _W,
        "%(call)s was called outside a budgeted task; it counts nowhere",
    ),
    Event("usage.unrecorded", _W, "usage that was not recorded: %(error)s", ("reservation_id",)),
    Event(
        "reply.unreadable",
        _E,
        "a chunk of a reply of reservation %(reservation_id)s cannot be read for its usage; the "
        "others are",
    ),
    Event("reply.unfinished", _W, "of a reply that was not read to its end: %(error)s"),
    Event(
        "reply.unrecorded",
        _E,
        "a reply of reservation %(reservation_id)s that was not read to its end could not be "
        "recorded; see 'celery -A PROJ budget explain %(reservation_id)s'",
    ),
    Event(
        "shadow.failed",
        _W,
        "shadow estimator %(shadow)s of %(task)s failed and is left out, now and wherever it does "
        "so again: %(error_type)s: %(error)s",
    ),
    Event(
        "shadow.slow",
        _W,
        "shadow estimator %(shadow)s took more than %(seconds)g s %(count)d times in a row; this "
        "process does not ask it any more",
    ),
    # What is looked at
    Event("metrics.served", _I, "metrics are served on %(address)s"),
    Event(
        "metrics.unserved", _W, "metrics cannot be served on %(address)s: %(error)s; tried again"
    ),
    Event("metrics.unanswered", _D, "a scrape was not answered"),
    Event("page.failed", _E, "%(path)s could not be shown; its traceback follows"),
    # Results
    Event(
        "outcome.oversize",
        _W,
        f"the outcome of {_TASK} has %(bytes)d bytes, above budget_outcome_bytes (%(bound)d); it "
        "cannot be given again should this worker go away before the result is stored",
    ),
    Event("outcome.unkept", _W, f"the error of {_TASK} cannot be kept for a replay"),
    Event("outcome.unstored", _W, "the outcome of task %(task_id)s could not be stored"),
    Event("result.start_unstored", _W, "it could not be stored that task %(task_id)s started"),
    Event("result.cancel_unknown", _W, "it is not known whether task %(task_id)s was cancelled"),
    Event(
        "result.untold",
        _E,
        "the result of task %(task_id)s could not be stored; it is tried again",
    ),
    Event("result.unreadable", _W, "the result backend cannot tell of task %(task_id)s"),
    Event("result.unstorable", _W, "task %(task_id)s ended: %(reason)s; rpc:// cannot store that"),
    Event(
        "result.unforgotten",
        _W,
        "the result backend cannot forget the result of task %(task_id)s",
    ),
    Event("chord.claimed", _I, "the body of chord %(group_id)s is claimed; waiting for its end"),
    # The relay, its periodic steps, lanes
    Event("relay.started", _I, "budget relay started on %(store)s"),
    Event("relay.stopped", _I, "budget relay stopped on %(store)s"),
    Event(
        "relay.handed_back",
        _W,
        "the relay on %(store)s has not stopped within %(seconds)g s, as a broker does not answer; "
        "what was not published is given back",
    ),
    Event("relay.woken", _I, "the relay is woken by notifications"),
    Event(
        "relay.unwoken",
        _W,
        "%(error)s; until notifications arrive the relay looks every %(seconds)g s (behind a proxy "
        "that pools transactions, give the database's own URL as budget_listen_url)",
    ),
    Event("step.failed", _E, "%(step)s failed; it is tried again"),
    Event(
        "recovery.failed",
        _E,
        "could not recover %(piece)s of task %(task_id)s; it is tried again later",
    ),
    Event(
        "recovery.postpone_failed",
        _E,
        "nor could %(piece)s of task %(task_id)s be postponed; the next sweep meets it again",
    ),
    Event("alert.raised", _W, "alert: %(said)s", ("alert_id", "kind", "name")),
    Event(
        "alert.put_off",
        _W,
        "the alert %(alert_id)s is told again in %(seconds).1f s: %(reason)s",
        ("kind",),
    ),
    Event(
        "alert.hangs",
        _E,
        "budget_on_alert has not returned after %(seconds)g s (budget_alert_call_seconds), over "
        "the alert %(alert_id)s: %(said)s; no other alert is told here until it does",
        ("kind",),
    ),
    Event("alert.call_failed", _W, "budget_on_alert has raised %(error_type)s", ("alert_id",)),
    Event(
        "alert.given_up",
        _E,
        "the alert %(alert_id)s could not be told in %(count)d tries (%(reason)s) and is told no "
        "more: %(said)s"
        "; see 'celery -A PROJ budget alerts'",
        ("kind",),
    ),
    Event("parked.put_off", _I, "what is parked as %(parked_id)s stays so: %(error)s"),
    Event(
        "parked.failed",
        _E,
        "what is parked as %(parked_id)s stays so: %(error_type)s; it is tried again later",
    ),
    Event("parked.give_up_failed", _E, "task %(task_id)s cannot be given up; it is tried again"),
    Event(
        "parked.listener_failed",
        _E,
        "what is to hear that task %(task_id)s was given up failed; it is not told again",
    ),
    Event("window.unmade", _W, "no window could be made ahead for budget %(name)r: %(error)s"),
    Event("budget.spread", _I, "the counters of budget %(name)r are over %(stripes)d rows now"),
    Event("lane.asleep", _I, "lane %(lane)r releases nothing: %(reason)s"),
    Event("lane.awake", _I, "lane %(lane)r is awake: its workers answer"),
    Event("lane.failed", _E, "lane %(lane)r could not be dispatched; the next pass tries it again"),
    Event("lane.overdue", _W, "task %(task_id)s was held by lane %(lane)s for too long"),
    Event("lane.end_failed", _E, "task %(task_id)s could not be ended; the next pass does so"),
    Event(
        "quarantine.full",
        _E,
        "quarantine is full (budget_max_quarantine is %(bound)d): reservation %(reservation_id)s "
        "has failed for good and is not kept; see 'celery -A PROJ budget quarantine list', and "
        "requeue or discard",
    ),
    # The ledger, and what cannot be told it
    Event("store.unreachable", _W, "%(error)s; %(consequence)s"),
    Event("store.waits", _W, "%(error)s; trying again in %(seconds).1f s"),
    Event("store.untold", _E, "the ledger could not be told %(matter)s; recovery will find it"),
    Event("spool.opened", _D, "what the ledger cannot be told is kept in %(path)s"),
    Event("spool.replayed", _I, "replayed %(entry)s of the spool"),
    Event(
        "spool.refused", _E, "the ledger does not take %(entry)s of the spool; it is moved aside"
    ),
    Event(
        "spool.invalid", _E, "%(path)s is no entry of this spool: %(error_type)s; it is moved aside"
    ),
    Event(
        "spool.unreadable", _E, "%(path)s cannot be read: %(error)s; see that this user may read it"
    ),
    Event(
        "spool.unwritable",
        _E,
        "%(path)s cannot be written: %(error)s; what the ledger cannot be told is kept in memory",
    ),
    # Telemetry
    Event(
        "tracing.failed",
        _W,
        "telemetry failed at %(step)s: %(error_type)s; the work goes on, and this is told once",
    ),
)


class Logger:
    """A module's logger, by which it tells events of the list; nothing else is logged.

    :param name: the module's; handlers and levels are those of :func:`logging.getLogger`.
    """

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def event(self, name: str, /, *, exc_info: Any = None, **fields: Any) -> None:
        """Log an event with its fields; nothing is made of them where its level is off.

        :param fields: their values; a function is called for it where its level is on.
        :param exc_info: as :meth:`logging.Logger.log` has it.
        :raises KeyError: where the list has no such event.
        """
        event = EVENTS[name]
        if self._logger.isEnabledFor(event.level):
            self._log(event, exc_info, fields)

    def exception(self, name: str, /, **fields: Any) -> None:
        """As :meth:`event`, with the traceback of the exception that is being handled."""
        event = EVENTS[name]
        if self._logger.isEnabledFor(event.level):
            self._log(event, True, fields)

    def _log(self, event: Event, exc_info: Any, fields: Mapping[str, Any]) -> None:
        told = {key: _told(value) for key, value in fields.items()}
        extra = {PREFIX + key: value for key, value in told.items()}
        extra[PREFIX + "event"] = event.name
        # An empty mapping would be an argument of its own to the template.
        args = (told,) if told else ()
        self._logger.log(
            event.level, event.text, *args, exc_info=exc_info, extra=extra, stacklevel=3
        )


def _told(value: Any) -> Any:
    """Return a value as it stands in a record: what is no number, text or mapping is its text."""
    if callable(value):
        value = value()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _told(one) for key, one in value.items()}
    return str(value) if isinstance(value, (uuid.UUID, BaseException)) else repr(value)
