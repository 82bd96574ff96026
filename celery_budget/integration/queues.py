"""The brokers' queues: whether anything waits there, how much, and who consumes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.utils.json import loads as read

from celery_budget.events import Logger
from celery_budget.integration.capture import DELAYED_EXCHANGE, undelayed
from celery_budget.integration.context import installed_on
from celery_budget.reconcile.brokers import Load

__all__ = ["KombuQueues"]

logger = Logger(__name__)

#: How long a broker may take for an answer.
ANSWER_SECONDS = 2.0
#: How long one that gave none is asked no more.
REST_SECONDS = 10.0


@dataclass
class _Link:
    """A connection of ours to one broker, and the channel by which it is asked."""

    connection: Connection
    channel: Any


class KombuQueues:
    """Asks the brokers for their queues, as :class:`celery_budget.suspicion.Queues` and
    :class:`celery_budget.reconcile.brokers.Queues`.

    By connections of its own, which stay open. For one thread.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._links: dict[str, _Link] = {}
        self._rests_until: dict[str, float] = {}

    def is_empty(self, broker: str, envelope: str) -> bool | None:
        """Tell whether nothing waits in any of the queues that a message went to.

        What is with workers, unacknowledged, does not count: they look after it.
        """
        loads = self.loads(broker, envelope)
        return None if loads is None else all(load.messages == 0 for load in loads)

    def loads(self, broker: str, envelope: str) -> tuple[Load, ...] | None:
        """Return what waits in the queues that a message went to; none where nobody can tell.

        A queue that does not exist has nothing waiting, and no consumers.
        """
        try:
            names = self._names(read(envelope))
        except Exception:
            logger.exception("message.unreadable", broker=broker)
            return None
        if not names or time.monotonic() < self._rests_until.get(broker, 0.0):
            return None
        try:
            with suppress(Exception):
                # The one that is open may have been ended since it was used last.
                if broker in self._links:
                    return self._ask(broker, names)
            return self._ask(broker, names)
        except Exception as error:
            logger.exception("broker.unasked", broker=broker, error=repr(error))
            self._rests_until[broker] = time.monotonic() + REST_SECONDS
            return None

    def _ask(self, broker: str, names: set[str]) -> tuple[Load, ...]:
        try:
            link = self._links.get(broker) or self._open(broker)
            return tuple(self._load(link, name) for name in sorted(names))
        except BaseException:
            self._close(broker)
            raise

    def consumers(self, broker: str, name: str) -> int | None:
        """Return how many consumers a queue has; none where its broker does not say.

        A queue that does not exist has none.

        :raises Exception: where the broker cannot be asked.
        """
        with suppress(Exception):
            if broker in self._links:
                return self._consumers(broker, name)
        return self._consumers(broker, name)

    def _consumers(self, broker: str, name: str) -> int | None:
        try:
            link = self._links.get(broker) or self._open(broker)
            if not _counts_consumers(link):
                return None
            return self._load(link, name).consumers
        except BaseException:
            self._close(broker)
            raise

    @contextmanager
    def opened(self, broker: str) -> Iterator[Connection]:
        """Lend a new connection to a broker, which answers within seconds or not at all.

        :raises Exception: where it cannot be opened.
        """
        link = self._link(broker)
        try:
            yield link.connection
        finally:
            _drop(link.connection)

    def _names(self, envelope: dict[str, Any]) -> set[str]:
        """Return the names of the queues that get a message, as far as they are known here.

        Celery declares the default queue also with messages that go elsewhere: what is declared is
        looked at like what the application has.
        """
        exchange, key = envelope["exchange"], envelope["routing_key"]
        if not exchange:
            return {key}
        if exchange == DELAYED_EXCHANGE:
            key = undelayed(key)
        declared = [
            (values["name"], values["exchange"]["name"], values["routing_key"])
            for kind, values in envelope["declare"]
            if kind == "queue" and values.get("exchange") is not None
        ]
        known = [
            (queue.name, queue.exchange.name, queue.routing_key)
            for queue in self._app.amqp.queues.values()
            if queue.exchange is not None
        ]
        return {
            name
            for name, from_exchange, by_key in declared + known
            if by_key == key and exchange in (from_exchange, DELAYED_EXCHANGE)
        }

    def _load(self, link: _Link, name: str) -> Load:
        """Return what waits in a queue; nothing where there is no such queue.

        :raises Exception: where that cannot be told, as where its node is down.
        """
        found = self._declared(link, name)
        messages, consumers = (
            (0, 0) if found is None else (int(found.message_count), int(found.consumer_count))
        )
        return Load(name, messages, consumers if _counts_consumers(link) else None)

    def _declared(self, link: _Link, name: str) -> Any:
        """Return what a broker says of a queue; none where there is no such queue.

        :raises Exception: where that cannot be told, as where its node is down.
        """
        try:
            return link.channel.queue_declare(name, passive=True)
        except link.connection.channel_errors as exc:
            # RabbitMQ closes a channel with its error.
            with suppress(Exception):
                link.channel.close()
            link.channel = link.connection.channel()
            missing = str(getattr(exc, "reply_code", "")) == "404" and "no queue" in str(exc)
            if not missing:
                raise
            return None

    def _open(self, broker: str) -> _Link:
        link = self._links[broker] = self._link(broker)
        return link

    def _link(self, broker: str) -> _Link:
        connection = installed_on(self._app).brokers.connection(broker)
        kind = connection.transport.driver_type
        options = dict(connection.transport_options or {})
        if kind == "redis":
            options.update(socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
        connection.transport_options = options
        connection.connect_timeout = ANSWER_SECONDS
        try:
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            if kind == "amqp" and connection.transport.driver_name == "py-amqp":
                connection.connection.transport.sock.settimeout(ANSWER_SECONDS)
            return _Link(connection, connection.channel())
        except BaseException:
            _drop(connection)
            raise

    def _close(self, broker: str) -> None:
        link = self._links.pop(broker, None)
        if link is not None:
            _drop(link.connection)

    def close(self) -> None:
        """Drop all connections."""
        for broker in list(self._links):
            self._close(broker)


def _counts_consumers(link: _Link) -> bool:
    """Tell whether a broker counts consumers: of virtual transports none does, but AMQP's."""
    return bool(link.connection.transport.driver_type == "amqp")


def _drop(connection: Connection) -> None:
    # What is wrong with it is why it is dropped.
    with suppress(Exception):
        connection.collect(ANSWER_SECONDS)
