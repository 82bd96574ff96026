"""What Celery's sender makes of a message, and what of that need not be asked again.

Where messages go, and how they are written down, is the same for all that are sent with the same
options: Celery's sender is asked for the first of them, and what it said is kept. For each one
headers, properties and body are made anew. Whatever else there may be to see to (receivers of
Celery's signals, events, another connection, options not named here) is for Celery's sender.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.app import amqp
from celery.signals import after_task_publish, before_task_publish, task_sent
from kombu import Queue
from kombu.serialization import dumps as serialized

from celery_budget.core.messages import WireMessage
from celery_budget.integration.capture import (
    Record,
    RecordingProducer,
    declaration,
    own_part,
    times,
    unwritable,
    written,
)
from celery_budget.integration.task import budgeted_task

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["Sender", "Unopened", "queue_name"]

#: Where results are waited for, without a word to the broker before the message goes there.
_SILENT = ("celery.backends.base", "celery.backends.redis")

#: The signals that Celery's sender sends.
_SIGNALS = (before_task_publish, after_task_publish, task_sent)
#: The options that say where a message goes and how it is written, and nothing of the message.
_SAY_WHERE = frozenset(
    (
        "queue",
        "exchange",
        "routing_key",
        "serializer",
        "priority",
        "delivery_mode",
        "immediate",
        "mandatory",
    )
)
#: What options may be, beside a queue, for others to be the same.
_PLAIN = (str, int, bool, type(None))
#: Of how many ways it is kept what Celery's sender said.
_MOST_KEPT = 256


class Unopened:
    """The producer that a budgeted task is sent by, from which Celery's sender takes its defaults.

    Over a connection that nobody opens: one of the pool would be taken, looked at and given back
    for nothing, as nothing is sent by it.
    """

    def __init__(self, budget: CeleryBudget) -> None:
        self._budget = budget

    @cached_property
    def producer(self) -> Any:
        """One for all threads, since nobody uses it."""
        return self._budget.app.amqp.Producer(self._budget.app.connection_for_write())

    def serves(self, name: str, options: Mapping[str, Any]) -> bool:
        """Tell whether a task is sent by it: one with a budget, unless the call says by what."""
        app = self._budget.app
        if any(options.get(given) is not None for given in ("producer", "publisher", "connection")):
            return False
        if budgeted_task(app, name) is None:
            return False
        return type(app.backend).on_task_call.__module__ in _SILENT


class _Kept(NamedTuple):
    """What Celery's sender has made of the options of a message.

    :ivar queue: the one it goes to; its address is part of the key.
    :ivar declared: what is declared before, each as it was written.
    :ivar example: a message that was sent so.
    :ivar head: what the envelope begins with.
    :ivar rest: what it ends with, after headers and properties.
    :ivar delivery_mode: the property that the options say.
    """

    queue: Queue
    declared: list[tuple[Any, str]]
    example: WireMessage
    serializer: str | None
    head: str
    rest: str
    delivery_mode: Any


class Sender:
    """Makes messages as Celery's sender does, and sends none.

    Safe to use from several threads.

    :param send: Celery's own, or what an application has put in its place.
    """

    def __init__(self, budget: CeleryBudget, send: Callable[..., Any], unopened: Unopened) -> None:
        self._budget = budget
        self._unopened = unopened
        self.send = send
        self._is_celerys = getattr(send, "__module__", None) == amqp.__name__
        self._kept: dict[tuple[Any, ...], _Kept] = {}

    def make(
        self,
        producer: Any,
        name: str,
        message: Any,
        options: dict[str, Any],
        take: Callable[[WireMessage], None],
        order_key: str | None = None,
    ) -> Any:
        """Make a message, and have it taken; what the sender returns.

        After it the event that tells of it, where Celery sends one.

        :param take: called with each; what it raises ends the sending.
        :raises UnsupportedPublication: where it cannot be written.
        """
        key = self._key(producer, message, options)
        kept = None if key is None else self._kept.get(key)
        if kept is not None and all(declaration(one) == said for one, said in kept.declared):
            take(self._as_before(kept, message, options, order_key))
            return None
        first = True

        def sink(record: Record) -> None:
            nonlocal first
            was_first, first = first, False
            made = written(
                self._budget, record, queue_name(options), order_key if was_first else None
            )
            if was_first and key is not None:
                self._keep(key, message, options, record, made)
            take(made)

        return self.send(RecordingProducer(producer, sink), name, message, **options)

    def _key(
        self, producer: Any, message: Any, options: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return by what it is kept what the sender says; none where it has to be asked."""
        if (
            not self._is_celerys
            or producer is not self._unopened.producer
            or message.sent_event
            or any(signal.receivers for signal in _SIGNALS)
            or type(options.get("queue")) is not Queue
        ):
            return None
        key: list[Any] = []
        for option, value in options.items():
            if option == "queue":
                key.append(id(value))
            elif option in _SAY_WHERE and type(value) in _PLAIN:
                # One and true are not the same, where they are written.
                key += (option, type(value), value)
            elif option != "headers" and not (option == "compression" and value is None):
                return None
        return tuple(key)

    def _keep(
        self,
        key: tuple[Any, ...],
        message: Any,
        options: Mapping[str, Any],
        record: Record,
        made: WireMessage,
    ) -> None:
        """Keep what the sender said, where it added nothing to this very message."""
        said = record.envelope
        # Celery's sender has put the options among those that the message came with.
        properties = {
            name: value for name, value in message.properties.items() if name not in _SAY_WHERE
        }
        properties["delivery_mode"] = said.properties.get("delivery_mode")
        if said.properties != properties or "compression" in said.headers:
            return
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        head, found, rest = made.envelope.partition(own_part(said.headers, said.properties))
        if found:
            self._kept[key] = _Kept(
                options["queue"],
                [(entity, declaration(entity)) for entity in said.declare],
                made,
                record.serializer,
                head,
                rest,
                properties["delivery_mode"],
            )

    def _as_before(
        self, kept: _Kept, message: Any, options: Mapping[str, Any], order_key: str | None
    ) -> WireMessage:
        headers = message.headers
        headers.update(options.get("headers") or {})
        properties = {**message.properties, "delivery_mode": kept.delivery_mode}
        _, _, body = serialized(message.body, kept.serializer)
        task_id, task_name = str(headers["id"]), str(headers["task"])
        try:
            own = own_part(headers, properties)
        except (TypeError, ValueError) as error:
            raise unwritable(task_id, task_name, error) from error
        due_us, expires_us = times(self._budget.app, headers)
        example = kept.example
        return WireMessage(
            task_id,
            task_name,
            body.encode() if isinstance(body, str) else bytes(body),
            f"{kept.head}{own}{kept.rest}",
            example.queue,
            due_us,
            expires_us,
            example.rank,
            order_key,
            example.broker,
        )


def queue_name(options: Mapping[str, Any]) -> str:
    """Return where a message goes by its options, for people to read."""
    queue = options.get("queue")
    return str(getattr(queue, "name", queue) or options.get("routing_key") or "")
