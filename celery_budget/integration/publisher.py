"""The relay's way to the broker: one connection, confirms where the broker has them."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from celery_budget.core.messages import WireMessage
from celery_budget.integration.capture import DELAY_BITS, DELAYED_EXCHANGE, Envelope, read
from celery_budget.relay import BrokerDown, Unpublishable

__all__ = ["KombuPublisher"]

CONFIRM_SECONDS = 10.0


class KombuPublisher:
    """Publishes stored messages as they are; see :class:`celery_budget.relay.Publisher`.

    On AMQP each publish waits for the broker's confirmation, and what no queue would take comes
    back as an error. Elsewhere the transport's own answer is the confirmation.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._connection: Connection | None = None
        self._producer: Producer | None = None

    def publish(self, message: WireMessage) -> None:
        try:
            envelope = read(message)
        except Exception as exc:
            raise Unpublishable(f"its stored form cannot be read: {exc!r}") from exc
        connection, producer = self._connect()
        try:
            self._publish(connection, producer, message, envelope)
        except (OperationalError, OSError, *connection.connection_errors) as exc:
            raise BrokerDown(repr(exc)) from exc
        except Exception as exc:
            if type(exc).__module__.startswith("redis."):
                # Out of memory, read-only, not authorised: it refuses all messages alike.
                raise BrokerDown(repr(exc)) from exc
            # A channel that refused one message is closed; the next one needs another.
            self.reset()
            raise Unpublishable(repr(exc)) from exc

    def _publish(
        self,
        connection: Connection,
        producer: Producer,
        message: WireMessage,
        envelope: Envelope,
    ) -> None:
        properties = dict(envelope.properties)
        producer.publish(
            message.body,
            content_type=envelope.content_type,
            content_encoding=envelope.content_encoding,
            headers=envelope.headers,
            priority=envelope.priority,
            exchange=envelope.exchange,
            routing_key=_without_delay(envelope),
            declare=envelope.declare,
            mandatory=envelope.mandatory or _has_confirms(connection),
            immediate=envelope.immediate,
            expiration=self._expiration(envelope, properties.pop("expiration", None)),
            confirm_timeout=CONFIRM_SECONDS,
            **properties,
        )

    def _expiration(self, envelope: Envelope, stored: str | None) -> float | None:
        """Return how many seconds the message has left now, not when it was captured."""
        expires = envelope.headers.get("expires")
        if expires:
            moment: datetime = maybe_make_aware(maybe_iso8601(expires), self._app.timezone)
            return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
        return None if stored is None else int(stored) / 1000

    def _connect(self) -> tuple[Connection, Producer]:
        if self._connection is not None and self._producer is not None:
            return self._connection, self._producer
        connection: Any = None
        try:
            connection = self._app.connection_for_write()
            if _has_confirms(connection):
                connection.transport_options = {
                    **connection.transport_options,
                    "confirm_publish": True,
                }
            connection.ensure_connection(max_retries=1)
            producer = self._app.amqp.Producer(connection, auto_declare=False)
        except Exception as exc:
            if connection is not None:
                _drop(connection)
            raise BrokerDown(repr(exc)) from exc
        self._connection, self._producer = connection, producer
        return connection, producer

    def reset(self) -> None:
        """Drop the connection; the next publish opens a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            _drop(connection)


def _drop(connection: Connection) -> None:
    # What is wrong with it is why it is dropped.
    with suppress(Exception):
        connection.release()


def _has_confirms(connection: Connection) -> bool:
    return bool(connection.transport.driver_type == "amqp")


def _without_delay(envelope: Envelope) -> str:
    """Return the routing key; RabbitMQ's native delay was waited out in the outbox.

    Celery writes the delay as 28 binary digits before the key; all zeros pass at once.
    """
    if envelope.exchange != DELAYED_EXCHANGE:
        return envelope.routing_key
    rest = envelope.routing_key.split(".", DELAY_BITS)[DELAY_BITS:]
    return ".".join(["0"] * DELAY_BITS + rest)
