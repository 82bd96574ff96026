"""A stored message as it is handed to kombu: what is made of it at the time it is published."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu.entity import maybe_delivery_mode

from celery_budget.core.deadlines import moment
from celery_budget.core.messages import WireMessage
from celery_budget.integration.capture import (
    DELAY_BITS,
    DELAYED_EXCHANGE,
    Envelope,
    moment_us,
    undelayed,
)

__all__ = ["Parcel"]


class Parcel:
    """One message on its way.

    :ivar name: by what a broker that sends it back names it.
    :ivar size: its bytes, about.
    :ivar wanted: whether some queue has to get it; nobody has to listen to an event.
    """

    def __init__(self, app: Celery, message: WireMessage, envelope: Envelope) -> None:
        self.message = message
        self.envelope = envelope
        self.wanted = message.task_name != ""
        self.size = len(message.body) + len(message.envelope)
        self.exchange = envelope.exchange
        self.routing_key = _without_delay(envelope)
        self.headers = _headers(app, message, envelope)
        self.name = (
            self.exchange,
            self.routing_key,
            envelope.properties.get("correlation_id"),
            envelope.headers.get("id"),
        )

    def properties(self) -> dict[str, Any]:
        """Return its properties, with the time that it has left now."""
        properties = dict(self.envelope.properties)
        stored = properties.pop("expiration", None)
        expiration = _expiration(self.message, self.envelope, stored)
        if expiration is not None:
            properties["expiration"] = str(int(expiration * 1000))
        if "delivery_mode" in properties:
            properties["delivery_mode"] = maybe_delivery_mode(properties["delivery_mode"])
        return properties

    def fields(self) -> dict[str, Any]:
        """Return its properties as AMQP names them: what kombu's channel for AMQP prepares."""
        return {
            "priority": self.envelope.priority,
            "content_type": self.envelope.content_type,
            "content_encoding": self.envelope.content_encoding,
            "application_headers": self.headers,
            **self.properties(),
        }

    def prepared(self, channel: Any) -> Any:
        """Return it as a channel takes it."""
        envelope = self.envelope
        return channel.prepare_message(
            self.message.body,
            envelope.priority,
            envelope.content_type,
            envelope.content_encoding,
            self.headers,
            self.properties(),
        )


def _headers(app: Celery, message: WireMessage, envelope: Envelope) -> dict[str, Any]:
    """Return the headers, with the ``expires`` that counts now.

    None where none does any more, and the request's deadline where that is earlier: a worker drops
    what it finds expired before it has claimed.
    """
    expires = envelope.headers.get("expires")
    stored_us = None if expires is None else moment_us(app, expires)
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


def _without_delay(envelope: Envelope) -> str:
    """Return the routing key; RabbitMQ's native delay was waited out in the outbox.

    Celery writes the delay as 28 binary digits before the key; all zeros pass at once.
    """
    if envelope.exchange != DELAYED_EXCHANGE:
        return envelope.routing_key
    return ".".join([*"0" * DELAY_BITS, undelayed(envelope.routing_key)])
