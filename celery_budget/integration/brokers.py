"""The brokers that messages go to: the application's own, and those that ``budget_brokers`` names.

A task sent by ``connection=`` or ``producer=`` may go to another broker than the application's. The
ledger keeps that broker's name; where it is, and the credentials, are in the configuration only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from kombu import Connection

from celery_budget.core.messages import RANKS
from celery_budget.errors import UnsupportedPublication

__all__ = ["OWN", "Broker", "Brokers"]

#: The name of the application's own broker.
OWN = ""
#: Transports on which the larger priority goes first; on the others the smaller one.
LARGER_FIRST = frozenset({"amqp", "mongodb", "zookeeper"})

#: Where a broker is, and as whom it is used: transport, host, port, virtual host, user.
Place = tuple[object, str, int, str, str]


@dataclass(frozen=True)
class Broker:
    """A broker by its name, as an admission needs it.

    :ivar larger_first: whether a larger priority is the more urgent one there.
    """

    name: str
    larger_first: bool

    def rank(self, priority: int | None) -> int:
        """Return which of several messages that are due goes first, 0 before 9.

        The order of the broker itself: on RabbitMQ the larger priority, on Redis and most others
        the smaller one. Both take no priority for 0, and so does this: on RabbitMQ what says
        nothing goes last, on Redis first.
        """
        step = min(max(priority or 0, 0), RANKS - 1)
        return RANKS - 1 - step if self.larger_first else step


class Brokers:
    """All brokers that an application's messages may go to.

    Safe to use from several threads.

    :param urls: names and URLs of the others.
    """

    def __init__(self, app: Celery, urls: Mapping[str, str]) -> None:
        self._app = app
        self._urls = urls
        self._lock = threading.Lock()
        self._places: dict[Place, str] | None = None
        self._found: WeakKeyDictionary[Any, Broker] = WeakKeyDictionary()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the application's own first."""
        return (OWN, *self._urls)

    def connection(self, name: str) -> Connection:
        """Return a connection to the broker with this name, which is not open yet."""
        return self._app.connection_for_write(None if name == OWN else self._urls[name])

    def find(self, connection: Any) -> Broker:
        """Return the broker that a producer's connection leads to; none given, the own one.

        By transport, host, port, virtual host and user. Nothing is opened.

        :raises UnsupportedPublication: where it is none of those.
        """
        known = connection is not None
        found = self._found.get(connection) if known else None
        if found is None:
            found = self._look(connection if known else self.connection(OWN))
            if known:
                self._found[connection] = found
        return found

    def _look(self, connection: Any) -> Broker:
        with self._lock:
            if self._places is None:
                # The first name counts: a second one for the application's own broker is its own.
                self._places = {
                    place: name
                    for name in reversed(self.names)
                    for place in _places_of(self.connection(name))
                }
        for place in _places_of(connection):
            name = self._places.get(place)
            if name is not None:
                return Broker(name, connection.transport.driver_type in LARGER_FIRST)
        raise UnsupportedPublication(
            f"a budgeted task is sent to {connection.as_uri()}, which is not the application's "
            "broker; give it a name in budget_brokers, so that the relay can publish there"
        )


def _places_of(connection: Any) -> Iterator[Place]:
    """Return where a connection leads: to where it is now, and to each it may fail over to."""
    yield _place(connection)
    for url in connection.alt:
        other = connection.clone()
        other.switch(url)
        yield _place(other)


def _place(connection: Any) -> Place:
    default = connection.transport.default_connection_params
    host = connection.hostname or default.get("hostname") or ""
    # Both mean the default of their transport, and some transports write it out.
    virtual_host = (connection.virtual_host or default.get("virtual_host") or "").strip("/")
    if connection.transport.driver_type == "redis":
        virtual_host = virtual_host or "0"
    return (
        connection.get_transport_cls(),
        "127.0.0.1" if host == "localhost" else host,
        int(connection.port or default.get("port") or 0),
        virtual_host,
        connection.userid or default.get("userid") or "",
    )
