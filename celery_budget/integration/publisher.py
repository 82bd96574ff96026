"""The relay's way to the brokers: a link to each, and what a message's stored form becomes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from celery import Celery

from celery_budget import tracing
from celery_budget.core.messages import WireMessage
from celery_budget.errors import ConfigurationError
from celery_budget.integration.capture import Envelope, read
from celery_budget.integration.context import HEADER, installed_on, parse_header
from celery_budget.integration.links import Link
from celery_budget.integration.parcels import Parcel
from celery_budget.relay import PUBLISHING, Answer, BrokerDown, Rejected, Unpublishable
from celery_budget.tracing import Span

__all__ = ["KombuPublisher"]

#: How long a broker may take for its answers, unless messages are held for a shorter time.
ANSWER_SECONDS = 10.0


class KombuPublisher:
    """Publishes stored messages as they are; see :class:`celery_budget.relay.Publisher`.

    On AMQP the broker's confirmation of each is waited for, and what no queue would take is an
    error. Elsewhere the transport's own answer is the confirmation.

    For one thread; :meth:`check` and :meth:`reset` are for the same one.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._links: dict[str, Link] = {}

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
                raise ConfigurationError(
                    f"{where} cannot be used: {exc}; correct that URL"
                ) from exc
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

    def window(self, broker: str) -> int:
        return self._link(broker).window

    def publish_all(self, messages: Sequence[WireMessage]) -> list[Answer]:
        begun = time.time_ns()
        answers: list[Answer] = [None] * len(messages)
        parcels: dict[int, Parcel] = {}
        for number, message in enumerate(messages):
            try:
                parcels[number] = Parcel(self._app, message, read(message))
            except Exception as exc:  # noqa: BLE001 - it is the answer
                said = f"its stored form cannot be read: {exc!r}"
                answers[number] = Unpublishable("undecodable", said)
        if parcels:
            link = self._link(messages[0].broker)
            sent = list(parcels.values())
            for number, answer in zip(parcels, link.publish(sent), strict=True):
                answers[number] = answer
            self._trace(begun, sent, [answers[number] for number in parcels])
        return answers

    def _trace(self, begun_ns: int, parcels: Sequence[Parcel], answers: Sequence[Answer]) -> None:
        """Make a span of each message; all have the time that they took together."""
        traced = tracing.of(installed_on(self._app).settings)
        if not traced.is_on():
            return
        for parcel, answer in zip(parcels, answers, strict=True):
            headers = parcel.envelope.headers
            with (
                suppress(BrokerDown, Unpublishable, Rejected),
                traced.span(
                    "budget.publish", "client", parent=headers, only_within=True, start_ns=begun_ns
                ) as span,
            ):
                _describe(span, parcel.message, parcel.envelope)
                if answer is not None:
                    raise answer

    def _link(self, name: str) -> Link:
        link = self._links.get(name)
        if link is None:
            budget = installed_on(self._app)
            hold = budget.settings.publish_seconds * (1 - PUBLISHING)
            link = self._links[name] = Link(
                self._app, lambda: budget.brokers.connection(name), min(ANSWER_SECONDS, hold)
            )
        return link

    def reset(self) -> None:
        """Drop all connections; the next publish opens a new one."""
        for link in self._links.values():
            link.close()


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
