"""Finished wire messages: recorded from Celery's own sender, written down, and read again.

Celery's sender resolves routing, signals, headers and times; a producer that records instead of
publishing gets the message it would have sent, serialised and compressed by kombu itself.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Exchange, Producer, Queue
from kombu.utils.json import dumps, loads, object_hook

from celery_budget.core.messages import WireMessage
from celery_budget.errors import UnsupportedPublication

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = [
    "DELAYED_EXCHANGE",
    "DELAY_BITS",
    "Envelope",
    "Record",
    "RecordingProducer",
    "moment_us",
    "read",
    "undelayed",
    "with_header",
    "written",
]

#: The exchange of RabbitMQ's native delayed delivery, and the digits it has before a routing key.
DELAYED_EXCHANGE = "celery_delayed_27"
DELAY_BITS = 28
#: Of how many declarations what was made is kept: making it takes longer than publishing.
MOST_KNOWN = 1000
#: As kombu's ``loads``, which makes a decoder each time; and for what has only JSON's own types.
_decode = json.JSONDecoder(object_hook=object_hook).decode
_decode_plain = json.JSONDecoder().decode
#: What is before the declarations of a message as it is written.
_DECLARED = ', "declare": '
_known_entities: dict[str, list[Any]] = {}


@dataclass(frozen=True)
class Envelope:
    """Everything of a wire message but its body, as kombu hands it to the transport."""

    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    priority: int | None
    exchange: str
    routing_key: str
    mandatory: bool
    immediate: bool
    declare: list[Any]


@dataclass(frozen=True)
class Record:
    """What kombu was about to hand to the transport.

    :ivar connection: the connection it was to go by; none where that is the application's own.
    :ivar serializer: by what kombu has written the body; none for kombu's default.
    """

    body: bytes
    envelope: Envelope
    connection: Any = None
    serializer: str | None = None


class RecordingProducer(Producer):
    """A producer that hands what it would publish to ``sink``.

    Takes its defaults, and the connection Celery's sender may ask for, from the real one.
    """

    def __init__(self, producer: Producer, sink: Callable[[Record], None]) -> None:
        super().__init__(
            None,
            exchange=producer.exchange,
            routing_key=producer.routing_key,
            serializer=producer.serializer,
            auto_declare=producer.auto_declare,
            compression=producer.compression,
        )
        self._real = producer
        self._sink = sink

    @property
    def connection(self) -> Any:
        return self._real.connection

    def revive(self, channel: Any) -> None:
        """Do nothing: there is no channel to revive."""

    def publish(self, body: Any, **options: Any) -> None:
        # Nothing that is recorded can fail for the broker's sake.
        options.update(retry=False)
        self._serializer = options.get("serializer") or self.serializer
        super().publish(body, **options)

    def _publish(
        self,
        body: bytes | str,
        priority: int | None,
        content_type: str,
        content_encoding: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
        routing_key: str,
        mandatory: bool,
        immediate: bool,
        exchange: str,
        declare: list[Any] | None,
        *_timeouts_and_retries: Any,
    ) -> None:
        raw = body.encode("utf-8") if isinstance(body, str) else bytes(body)
        envelope = Envelope(
            content_type,
            content_encoding,
            headers,
            properties,
            priority,
            exchange,
            routing_key,
            bool(mandatory),
            bool(immediate),
            list(declare or ()),
        )
        self._sink(Record(raw, envelope, self.connection, self._serializer))


def written(
    budget: CeleryBudget, record: Record, queue: str, order_key: str | None = None
) -> WireMessage:
    """Return ``record`` as the outbox keeps it.

    :param queue: where it goes, for people to read, unless its routing key says so.
    :param order_key: see :class:`~celery_budget.core.messages.WireMessage`.
    :raises UnsupportedPublication: where a header or property cannot be written as JSON, or where
        it goes to a broker that has no name in ``budget_brokers``.
    """
    broker = budget.brokers.find(record.connection)
    headers = record.envelope.headers
    task_id = str(headers.get("id") or uuid.uuid4())
    task_name = str(headers.get("task") or "")
    try:
        declare = ", ".join([declaration(entity) for entity in record.envelope.declare])
        # Written last, and made beforehand: the same entities come with every message.
        rest = dumps({**vars(record.envelope), "declare": None})
        envelope = rest.removesuffix("null}") + f"[{declare}]}}"
    except (TypeError, ValueError) as exc:
        raise unwritable(task_id, task_name, exc) from exc
    key = record.envelope.routing_key
    if record.envelope.exchange == DELAYED_EXCHANGE:
        key = undelayed(key)
    queue = key or queue
    due_us, expires_us = times(budget.app, headers)
    return WireMessage(
        task_id,
        task_name,
        record.body,
        envelope,
        queue,
        due_us=due_us,
        expires_us=expires_us,
        rank=broker.rank(record.envelope.priority),
        order_key=order_key,
        broker=broker.name,
    )


def own_part(headers: dict[str, Any], properties: dict[str, Any]) -> str:
    """Return what of an envelope is a message's own, as it stands between the rest.

    :raises TypeError, ValueError: where it cannot be written as JSON.
    """
    return str(dumps({"headers": headers, "properties": properties})[1:-1])


def unwritable(task_id: str, task_name: str, error: Exception) -> UnsupportedPublication:
    """Return what is raised for a message that the outbox cannot keep."""
    return UnsupportedPublication(
        f"the message of task {task_name}[{task_id}] has a header or property that cannot be "
        f"stored: {error}; leave it out, or give it as text"
    )


def times(app: Celery, headers: dict[str, Any]) -> tuple[int, int | None]:
    """Return from when on a message may be published, 0 for at once, and after when no more."""
    eta, expires = headers.get("eta"), headers.get("expires")
    return moment_us(app, eta) or 0, moment_us(app, expires)


def arguments_of(envelope: str) -> tuple[str | None, str | None]:
    """Return how Celery has written a message's arguments, positional ones and those by name.

    None where that cannot be read, or is not there.
    """
    try:
        headers = loads(envelope)["headers"]
        found = headers.get("argsrepr"), headers.get("kwargsrepr")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, None
    args, kwargs = (one if isinstance(one, str) else None for one in found)
    return args, kwargs


def last_of_chord(message: WireMessage) -> WireMessage | None:
    """Return the message by which a worker tells the chord of a task that was cancelled.

    The same one, due at once; none for a task that is in no group, or cannot be read.
    """
    try:
        if loads(message.envelope)["headers"].get("group") is None:
            return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return with_header(with_header(message, "eta", None), "expires", None)


def with_header(message: WireMessage, name: str, value: str | int | None) -> WireMessage:
    """Return a stored message with another value of one header.

    :raises UnsupportedPublication: where it cannot be read.
    """
    try:
        envelope = loads(message.envelope)
    except ValueError as exc:
        raise UnsupportedPublication(
            f"the message of task {message.task_name}[{message.task_id}] cannot be read: {exc}"
            "; see which serializer wrote it"
        ) from exc
    envelope["headers"][name] = value
    return replace(message, envelope=dumps(envelope))


def read(message: WireMessage) -> Envelope:
    """Return the envelope of a stored message, declarations as kombu's entities again."""
    # Its declarations are written last, and most messages have the same.
    rest, said, declared = message.envelope.rpartition(_DECLARED)
    if said:
        # What is found there may be something else's, deeper in it.
        with suppress(ValueError, TypeError):
            declare = _entities(declared.removesuffix("}"))
            return Envelope(**_decoded(rest + "}"), declare=declare)
    values = _decoded(message.envelope)
    values["declare"] = _made(values["declare"])
    return Envelope(**values)


def _decoded(text: str) -> Any:
    # What kombu's decoder looks for in each object.
    return _decode(text) if "__type__" in text else _decode_plain(text)


def _entities(written: str) -> list[Any]:
    """Return what is to be declared: one list for all messages that need the same."""
    found = _known_entities.get(written)
    if found is None:
        found = _made(_decoded(written))
        # All but what the server gives a name to, when it is declared.
        if all(entity.name for entity in found if isinstance(entity, Queue)):
            if len(_known_entities) >= MOST_KNOWN:
                _known_entities.clear()
            _known_entities[written] = found
    return found


def _made(declarations: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return [_entity(kind, entity) for kind, entity in declarations]


def undelayed(routing_key: str) -> str:
    """Return a routing key of native delayed delivery without the digits of the delay."""
    return ".".join(routing_key.split(".", DELAY_BITS)[DELAY_BITS:])


class _Written(NamedTuple):
    """An entity that is declared, and what its own and its exchange's attributes were."""

    entity: Any
    own: dict[str, Any]
    exchange: dict[str, Any]
    text: str


#: By the entity's address: most messages go to one of a few queues.
_known: dict[int, _Written] = {}
_MOST_KNOWN = 256
#: What cannot change unseen.
_PLAIN = (str, int, float, type(None))


def declaration(entity: Any) -> str:
    """Return an entity as JSON: its kind and all that it is declared by."""
    own = vars(entity)
    exchange = vars(entity.exchange) if getattr(entity, "exchange", None) else {}
    found = _known.get(id(entity))
    if (
        found is not None
        and found.entity is entity
        and found.own == own
        and found.exchange == exchange
        and not own.get("bindings")
    ):
        return found.text
    kind = "queue" if isinstance(entity, Queue) else "exchange"
    text: str = dumps((kind, entity.as_dict(recurse=True)))
    values = [value for name, value in own.items() if name not in ("exchange", "bindings")]
    if not own.get("bindings") and all(
        isinstance(value, _PLAIN) for value in (*values, *exchange.values())
    ):
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[id(entity)] = _Written(entity, {**own}, {**exchange}, text)
    return text


def _entity(kind: str, values: dict[str, Any]) -> Any:
    if kind == "exchange":
        return Exchange(**values)
    exchange = values.pop("exchange", None)
    bindings = values.pop("bindings", None)
    return Queue(
        **values,
        exchange=None if exchange is None else Exchange(**exchange),
        bindings=[] if not bindings else [_binding(binding) for binding in bindings],
    )


def _binding(values: dict[str, Any]) -> Any:
    from kombu.entity import binding

    exchange = values.pop("exchange", None)
    return binding(exchange=None if exchange is None else Exchange(**exchange), **values)


def moment_us(app: Celery, value: str | datetime | None) -> int | None:
    """Return a header's time in microseconds since the epoch; one without zone is the app's."""
    if not value:
        return None
    moment = maybe_make_aware(maybe_iso8601(value), app.timezone)
    return int(moment.timestamp() * 1_000_000)
