"""The relay's way to the brokers: a connection for each, confirms where the broker has them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from amqp import exceptions as amqp_errors
from celery import Celery
from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from celery_budget import tracing
from celery_budget.core.deadlines import moment
from celery_budget.core.messages import WireMessage
from celery_budget.errors import ConfigurationError
from celery_budget.events import Logger
from celery_budget.integration.capture import (
    DELAY_BITS,
    DELAYED_EXCHANGE,
    Envelope,
    moment_us,
    read,
    undelayed,
)
from celery_budget.integration.context import HEADER, installed_on, parse_header
from celery_budget.integration.filesystem import write_whole_files
from celery_budget.relay import PUBLISHING, BrokerDown, Rejected, Unpublishable
from celery_budget.tracing import Span

__all__ = ["KombuPublisher"]

logger = Logger(__name__)

#: How long a broker may take for an answer, unless messages are held for a shorter time.
ANSWER_SECONDS = 10.0
#: How long one that has to say that it takes no messages may take to say so.
PROBE_SECONDS = 1.0
#: AMQP's codes: nobody to take it, no such exchange.
UNROUTABLE = (312, 404)
#: Its number of queue.declare: there 404 says that the node which has the queue is down, for now.
QUEUE_DECLARE = (50, 10)
#: The broker ends a connection for what it was sent: no frame, or more than it was told to expect.
BROKEN_FRAMES = (501, 502, 505)


class KombuPublisher:
    """Publishes stored messages as they are; see :class:`celery_budget.relay.Publisher`.

    On AMQP each publish waits for the broker's confirmation, and what no queue would take comes
    back as an error. Elsewhere the transport's own answer is the confirmation.

    For one thread; :meth:`check` and :meth:`reset` are for the same one.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._links: dict[str, _Link] = {}

    def check(self) -> None:
        """Check that the configuration lets the relay do its work. Opens no connection.

        :raises ConfigurationError: where a transport is unknown, or its options forbid confirms.
        """
        brokers = installed_on(self._app).brokers
        for name in brokers.names:
            where = f"budget_brokers[{name!r}]" if name else "the broker"
            try:
                connection = brokers.connection(name)
                transport = connection.transport
            except Exception as exc:
                raise ConfigurationError(f"{where} cannot be used: {exc}") from exc
            if transport.driver_type != "amqp":
                continue
            if transport.driver_name != "py-amqp":
                raise ConfigurationError(
                    f"{where} is reached by {transport.driver_name}, which has no publisher "
                    "confirms; use 'pyamqp://'"
                )
            if not (connection.transport_options or {}).get("confirm_publish", True):
                raise ConfigurationError(
                    "broker_transport_options switches confirm_publish off, and without confirms "
                    f"nobody knows whether {where} has a message; take it out or set it to True"
                )

    def publish(self, message: WireMessage) -> None:
        try:
            envelope = read(message)
        except Exception as exc:
            said = f"its stored form cannot be read: {exc!r}"
            raise Unpublishable("undecodable", said) from exc
        traced = tracing.of(installed_on(self._app).settings)
        with traced.span(
            "budget.publish", "client", parent=envelope.headers, only_within=True
        ) as span:
            _describe(span, message, envelope)
            self._link(message.broker).publish(message, envelope)

    def _link(self, name: str) -> _Link:
        link = self._links.get(name)
        if link is None:
            budget = installed_on(self._app)
            hold = budget.settings.publish_seconds * (1 - PUBLISHING)
            link = self._links[name] = _Link(
                self._app, lambda: budget.brokers.connection(name), min(ANSWER_SECONDS, hold)
            )
        return link

    def reset(self) -> None:
        """Drop all connections; the next publish opens a new one."""
        for link in self._links.values():
            link.close()


class _Link:
    """The way to one broker: one connection, one channel, opened when they are needed.

    :param make: makes a connection that is not open yet.
    :param answer_seconds: how long the broker may take for an answer.
    """

    def __init__(self, app: Celery, make: Callable[[], Connection], answer_seconds: float) -> None:
        self._app = app
        self._make = make
        self._answer_seconds = answer_seconds
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._blocked = False

    def publish(self, message: WireMessage, envelope: Envelope) -> None:
        """Publish and wait for the confirmation.

        What cannot be routed has its queue declared anew, once: somebody may have deleted it since
        this connection declared it. After an error the channel is another one, since what the
        broker still has to say of this message would be taken for its word on the next.

        :raises BrokerDown, Unpublishable, Rejected: as :class:`celery_budget.relay.Publisher`.
        """
        connection, producer = self._ready()
        try:
            self._send(connection, producer, message, envelope)
        except Exception as exc:
            if not (envelope.declare and _unroutable(exc)):
                raise self._refused(connection, exc) from exc
            if isinstance(exc, _Unbound):
                # Kombu keeps the bindings that it has made for as long as a connection.
                self.close()
            else:
                self._leave_channel(connection)
                connection.declared_entities.difference_update(_declared(envelope))
            connection, producer = self._ready()
            try:
                self._send(connection, producer, message, envelope)
            except Exception as again:
                raise self._refused(connection, again) from again

    def _send(
        self,
        connection: Connection,
        producer: Producer,
        message: WireMessage,
        envelope: Envelope,
    ) -> None:
        properties = dict(envelope.properties)
        # Nobody has to listen to an event.
        wanted = message.task_name != ""
        if wanted and isinstance(producer.channel, virtual.Channel):
            _check_bound(producer, envelope)
        producer.publish(
            message.body,
            content_type=envelope.content_type,
            content_encoding=envelope.content_encoding,
            headers=_headers(self._app, message, envelope),
            priority=envelope.priority,
            exchange=envelope.exchange,
            routing_key=_without_delay(envelope),
            declare=envelope.declare,
            mandatory=envelope.mandatory or (wanted and _is_amqp(connection)),
            immediate=envelope.immediate,
            expiration=_expiration(message, envelope, properties.pop("expiration", None)),
            timeout=self._answer_seconds,
            confirm_timeout=self._answer_seconds,
            **properties,
        )

    def _ready(self) -> tuple[Connection, Producer]:
        """Return the open connection and a producer with a channel on which nothing is outstanding.

        :raises BrokerDown: where the broker cannot be reached, or has said that it takes nothing.
        """
        if self._connection is not None and _is_amqp(self._connection):
            try:
                self._listen(self._connection)
            except Exception:
                # It went away since, with nothing of ours on its way.
                logger.exception("broker.disconnected")
                self.close(gently=False)
        try:
            connection = self._connection or self._connect()
            if not self._blocked and self._producer is None:
                self._producer = self._produce(connection.channel())
        except Exception as exc:
            self.close(gently=False)
            raise BrokerDown(repr(exc)) from exc
        if self._blocked or self._producer is None:
            raise BrokerDown("it takes no messages now, for want of memory or disk")
        return connection, self._producer

    def _produce(self, channel: Any) -> Producer:
        return self._app.amqp.Producer(channel, auto_declare=False)

    def _connect(self) -> Connection:
        connection = self._connection = self._make()
        options = dict(connection.transport_options or {})
        if _is_amqp(connection):
            options.update(
                confirm_publish=True, on_blocked=self._on_blocked, on_unblocked=self._on_unblocked
            )
        elif connection.transport.driver_type == "redis":
            options.setdefault("socket_timeout", self._answer_seconds)
            options.setdefault("socket_connect_timeout", self._answer_seconds)
        connection.transport_options = options
        write_whole_files(connection)
        connection.ensure_connection(max_retries=1, interval_start=0)
        if _is_amqp(connection):
            # For all that is waited for, and all that is sent: a broker that has stalled says no
            # more, and reads no more.
            connection.connection.transport.sock.settimeout(self._answer_seconds)
            self._probe(connection)
        return connection

    def _probe(self, connection: Connection) -> None:
        """Find out whether the broker takes messages now, by two that nobody gets.

        RabbitMQ without memory or disk takes one message more of each connection, and says no
        earlier that it is the last; what comes after that it takes when it has some again, however
        long ago its sender gave it up.
        """
        channel = connection.channel()
        try:
            for _ in range(2):
                channel.basic_publish(
                    channel.prepare_message(b""),
                    exchange="",
                    routing_key=f"budget-{uuid4()}",
                    confirm_timeout=min(PROBE_SECONDS, self._answer_seconds),
                )
        except TimeoutError:
            # Told that it is blocked, we stay, and are told of the end as well. What is outstanding
            # will come on that channel, which is used no more.
            if not self._blocked:
                raise
        except connection.channel_errors:
            logger.exception("broker.no_default_exchange")
        else:
            self._producer = self._produce(channel)

    def _listen(self, connection: Connection) -> None:
        """Hear what the broker has said meanwhile, without waiting for more."""
        with suppress(TimeoutError):
            while True:
                connection.drain_events(timeout=0)

    def _on_blocked(self, reason: str) -> None:
        logger.event("broker.blocked", reason=reason)
        self._blocked = True

    def _on_unblocked(self) -> None:
        logger.event("broker.unblocked")
        self._blocked = False

    def _refused(
        self, connection: Connection, exc: Exception
    ) -> BrokerDown | Unpublishable | Rejected:
        """Leave the connection, or only the channel; return what the relay understands."""
        errors = (OperationalError, OSError, *connection.connection_errors)
        if isinstance(exc, errors):
            self.close(gently=False)
        else:
            self._leave_channel(connection)
        return _refusal(exc, errors)

    def _leave_channel(self, connection: Connection) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # One that the broker has closed is none any more.
            with suppress(Exception):
                producer.channel.close()
        if not connection.connected:
            self.close(gently=False)

    def close(self, *, gently: bool = True) -> None:
        """Drop the connection; the next publish opens a new one.

        :param gently: tell the broker, and wait for its answer.
        """
        connection, self._connection, self._producer = self._connection, None, None
        gently = gently and not self._blocked
        self._blocked = False
        if connection is None:
            return
        # What is wrong with it is why it is dropped.
        with suppress(Exception):
            if gently:
                connection.release()
            else:
                connection.collect(PROBE_SECONDS)


def _describe(span: Span, message: WireMessage, envelope: Envelope) -> None:
    if not span.recording:
        return
    span.set_named(
        {
            "messaging.system": "celery",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": message.queue or None,
            "messaging.message.id": message.task_id,
            "messaging.message.body.size": len(message.body),
            "celery.task_name": message.task_name,
        }
    )
    found = parse_header(envelope.headers.get(HEADER))
    span.set(reservation_id=None if found is None else str(found[1]), broker=message.broker or None)


def _headers(app: Celery, message: WireMessage, envelope: Envelope) -> dict[str, Any]:
    """Return the headers, with the ``expires`` that counts now.

    None where none does any more, and the request's deadline where that is earlier: a worker drops
    what it finds expired before it has claimed.
    """
    stored_us = moment_us(app, envelope.headers.get("expires"))
    if message.expires_us is None:
        return envelope.headers if stored_us is None else {**envelope.headers, "expires": None}
    if stored_us is not None and stored_us <= message.expires_us:
        return envelope.headers
    return {**envelope.headers, "expires": moment(message.expires_us).isoformat()}


def _expiration(message: WireMessage, envelope: Envelope, stored: str | None) -> float | None:
    """Return how many seconds a message has left now, not when it was captured.

    By the database's clock, which decides on everything else: that of this machine may differ.
    """
    if message.left_us is not None:
        return max(0, message.left_us) / 1_000_000
    expires = envelope.headers.get("expires")
    return None if stored is None or expires else int(stored) / 1000


def _is_amqp(connection: Connection) -> bool:
    return bool(connection.transport.driver_type == "amqp")


def _refusal(
    exc: Exception, connection_errors: tuple[type[Exception], ...]
) -> BrokerDown | Unpublishable | Rejected:
    """Return what an error says of a message, or of the broker."""
    said = str(exc) or repr(exc)
    if _unroutable(exc):
        return Unpublishable("unroutable", said)
    if _oversize(exc):
        return Unpublishable("oversize", said)
    if isinstance(exc, amqp_errors.MessageNacked):
        return Rejected("the broker did not take it; is its queue full?")
    # Redis: out of memory, read-only, not authorised: it refuses all messages alike.
    if isinstance(exc, connection_errors) or type(exc).__module__.startswith("redis."):
        return BrokerDown(repr(exc), sent=True)
    return Rejected(repr(exc))


class _Unbound(Exception):
    """No queue is bound to a message's exchange by its routing key."""


def _check_bound(producer: Producer, envelope: Envelope) -> None:
    """Check that some queue gets the message: kombu drops it without a word where none does.

    A Redis that was emptied, or another one that took its place, has lost all bindings.

    :raises _Unbound: where none does.
    """
    for entity in envelope.declare:
        producer.maybe_declare(entity)
    key = _without_delay(envelope)
    if envelope.exchange and not producer.channel._lookup(envelope.exchange, key):
        raise _Unbound(f"no queue is bound to exchange {envelope.exchange!r} by {key!r}")


def _unroutable(exc: Exception) -> bool:
    """Whether no queue takes the message, or its exchange is missing."""
    if getattr(exc, "method_sig", None) == QUEUE_DECLARE:
        return False
    return getattr(exc, "reply_code", None) in UNROUTABLE or isinstance(exc, _Unbound)


def _oversize(exc: Exception) -> bool:
    """Whether the message, or a part of it, is larger than AMQP or this broker can have it."""
    if isinstance(exc, amqp_errors.PreconditionFailed):
        return "message size" in str(exc)
    oversize = (amqp_errors.ContentTooLarge, amqp_errors.FrameSyntaxError, struct.error)
    return isinstance(exc, oversize) or getattr(exc, "reply_code", None) in BROKEN_FRAMES


def _declared(envelope: Envelope) -> set[int]:
    """Return how kombu remembers that it has declared what a message needs."""
    exchanges = {getattr(entity, "exchange", None) for entity in envelope.declare}
    return {hash(entity) for entity in {*envelope.declare, *exchanges} if entity is not None}


def _without_delay(envelope: Envelope) -> str:
    """Return the routing key; RabbitMQ's native delay was waited out in the outbox.

    Celery writes the delay as 28 binary digits before the key; all zeros pass at once.
    """
    if envelope.exchange != DELAYED_EXCHANGE:
        return envelope.routing_key
    return ".".join([*"0" * DELAY_BITS, undelayed(envelope.routing_key)])
