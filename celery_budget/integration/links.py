"""The way to one broker: its connection, and how many messages it is trusted with at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_budget.events import Logger
from celery_budget.integration.answers import Unbound, is_unroutable, refusal
from celery_budget.integration.filesystem import write_whole_files
from celery_budget.integration.parcels import Parcel
from celery_budget.integration.ways import (
    UNANSWERED,
    UNSENT,
    Confirmed,
    OneByOne,
    Pipelined,
    Sent,
    Way,
    listen,
)
from celery_budget.relay import Answer, BrokerDown

__all__ = ["Link"]

logger = Logger(__name__)

#: How long a broker that has to say that it takes no messages may take to say so.
PROBE_SECONDS = 1.0
#: More go out at a time where the answers came sooner, and fewer where they came later.
QUICK_SECONDS = 0.25
SLOW_SECONDS = 0.5
#: What is larger goes by itself: it may be what a connection breaks at.
LARGE_BYTES = 64 * 1024
#: AMQP's code of what comes back: the exchange is there, a queue is not.
NO_ROUTE = 312
#: How many bytes are on their way at a time.
WINDOW_BYTES = 1024 * 1024


class _Window:
    """Messages that are given to a link together, and what became of each.

    :ivar todo: those still to be published, by their numbers.
    :ivar singly: those of them that go by themselves, so that what is answered is theirs.
    :ivar again: those that were tried a second time.
    """

    def __init__(self, parcels: Sequence[Parcel]) -> None:
        self.parcels = parcels
        self.answers: list[Answer] = [None] * len(parcels)
        self.todo = deque(range(len(parcels)))
        self.singly: set[int] = set()
        self.again: set[int] = set()

    def next_run(self, at_once: int, may_follow: Callable[[Parcel], bool]) -> list[int]:
        """Take the next ones that may be on their way together."""
        run = [self.todo.popleft()]
        first = self.parcels[run[0]]
        if run[0] in self.singly or first.size > LARGE_BYTES or not may_follow(first):
            return run
        names, size = {first.name}, first.size
        while self.todo and len(run) < at_once:
            parcel = self.parcels[self.todo[0]]
            size += parcel.size
            if (
                parcel.size > LARGE_BYTES
                or size > WINDOW_BYTES
                or parcel.name in names
                or self.todo[0] in self.singly
                or not may_follow(parcel)
            ):
                break
            names.add(parcel.name)
            run.append(self.todo.popleft())
        return run

    def give_back(self, numbers: Sequence[int]) -> None:
        """Have messages published next, in their order."""
        self.todo.extendleft(reversed(numbers))


class Link:
    """The way to one broker: one connection, one channel, opened when they are needed.

    How many messages are on their way at a time begins with one on each connection, and is doubled
    while the broker answers quickly: so few are in doubt where it does not.

    :ivar window: how many messages may be given to it at a time, now.
    :param make: makes a connection that is not open yet.
    :param answer_seconds: how long the broker may take for its answers.
    """

    def __init__(self, app: Celery, make: Callable[[], Connection], answer_seconds: float) -> None:
        self.window = 1
        self._app = app
        self._make = make
        self._answer_seconds = answer_seconds
        self._connection: Connection | None = None
        self._way: Way | None = None
        self._blocked = False
        # What this connection has declared and need not declare again: the very lists that
        # envelopes share.
        self._declared: dict[int, list[Any]] = {}
        # Exchanges that it has found to be there.
        self._exchanges = {""}

    def publish(self, parcels: Sequence[Parcel]) -> list[Answer]:
        """Publish messages in their order; return the broker's answer to each.

        What cannot be routed has its queue declared anew, once: somebody may have deleted it since
        this connection declared it. Where the broker closes the channel for one of several, those
        that it had not answered go out again, one by one: so each has its own answer. Where the
        connection ends, they stay unanswered, and nothing more is sent.
        """
        begun = time.monotonic()
        window = _Window(parcels)
        try:
            while window.todo:
                self._publish_some(window)
        except BrokerDown as down:
            for number in window.todo:
                window.answers[number] = BrokerDown(down.error)
            self.window = 1
        else:
            self._pace(time.monotonic() - begun, len(parcels))
        return window.answers

    def _publish_some(self, window: _Window) -> None:
        """Publish the next ones that may be on their way together.

        :raises BrokerDown: what is still to be published then was not sent.
        """
        connection, way = self._ready()
        errors = (OperationalError, OSError, *connection.connection_errors)
        run = window.next_run(way.at_once, self._may_follow)
        sent = self._send(way, [window.parcels[number] for number in run])
        found = list(zip(run, sent, strict=True))
        own = [(number, what) for number, what in found if isinstance(what, Exception)]
        unanswered = [number for number, what in found if what is UNANSWERED]
        window.give_back([number for number, what in found if what is UNSENT])
        down: BrokerDown | None = None
        if way.broken is not None:
            is_down = isinstance(way.broken, errors)
            if is_down:
                self.close(gently=False)
            else:
                # What it still has to say of these would be taken for its word on the next.
                self._leave_channel(connection)
            if len(unanswered) == 1:
                own.append((unanswered[0], way.broken))
            elif is_down:
                down = BrokerDown(repr(way.broken), sent=True)
                for number in unanswered:
                    window.answers[number] = down
            else:
                window.singly.update(unanswered)
                window.give_back(unanswered)
        again = [
            number for number, exc in own if self._tries_again(connection, window, number, exc)
        ]
        window.give_back(again)
        for number, exc in own:
            if number in again:
                continue
            answer = window.answers[number] = refusal(exc, errors)
            if isinstance(answer, BrokerDown):
                down = answer
        if down is not None:
            raise down

    def _send(self, way: Way, parcels: Sequence[Parcel]) -> list[Sent]:
        first = parcels[0]
        declare = first.envelope.declare
        if not self._is_declared(first):
            try:
                way.declare(first)
            except Exception as exc:  # noqa: BLE001 - it is the answer
                way.broken = exc
                return [UNANSWERED, *[UNSENT] * (len(parcels) - 1)]
            if all(entity.can_cache_declaration for entity in declare):
                self._declared[id(declare)] = declare
        sent = way.send(parcels)
        if sent[0] is None or getattr(sent[0], "reply_code", None) == NO_ROUTE:
            self._exchanges.add(first.exchange)
        return sent

    def _may_follow(self, parcel: Parcel) -> bool:
        """Tell whether nothing has to be done or found out before a message is sent."""
        return parcel.exchange in self._exchanges and self._is_declared(parcel)

    def _is_declared(self, parcel: Parcel) -> bool:
        declare = parcel.envelope.declare
        return not declare or self._declared.get(id(declare)) is declare

    def _tries_again(
        self, connection: Connection, window: _Window, number: int, exc: Exception
    ) -> bool:
        """Have what no queue takes published once more, with what it needs declared anew.

        True where it is to be.
        """
        envelope = window.parcels[number].envelope
        if not envelope.declare or number in window.again or not is_unroutable(exc):
            return False
        window.again.add(number)
        window.singly.add(number)
        if isinstance(exc, Unbound):
            # Kombu keeps the bindings that it has made for as long as a connection.
            self.close()
        else:
            self._declared.pop(id(envelope.declare), None)
            exchanges = {getattr(entity, "exchange", None) for entity in envelope.declare}
            entities = {*envelope.declare, *exchanges} - {None}
            connection.declared_entities.difference_update(map(hash, entities))
        return True

    def _pace(self, seconds: float, messages: int) -> None:
        most = 1 if self._way is None else self._way.at_once
        if seconds > SLOW_SECONDS:
            self.window = max(1, self.window // 2)
        elif seconds < QUICK_SECONDS and messages >= self.window:
            self.window = min(most, self.window * 2)

    def _ready(self) -> tuple[Connection, Way]:
        """Return the open connection and a channel on which nothing is outstanding.

        :raises BrokerDown: where the broker cannot be reached, or has said that it takes nothing.
        """
        if self._connection is not None and _is_amqp(self._connection):
            try:
                listen(self._connection)
            except Exception:
                # It went away since, with nothing of ours on its way.
                logger.exception("broker.disconnected")
                self.close(gently=False)
        try:
            connection = self._connection or self._connect()
            if not self._blocked and self._way is None:
                self._way = self._open(connection)
        except Exception as exc:
            self.close(gently=False)
            raise BrokerDown(repr(exc)) from exc
        if self._blocked or self._way is None:
            raise BrokerDown("it takes no messages now, for want of memory or disk")
        return connection, self._way

    def _open(self, connection: Connection) -> Way:
        if _is_amqp(connection):
            return self._confirmed(connection)
        producer = self._app.amqp.Producer(connection.channel(), auto_declare=False)
        # Where Redis is told to try again by itself, a window might come twice.
        if getattr(producer.channel, "supports_batch_publish", False):
            return Pipelined(producer, self._answer_seconds)
        return OneByOne(producer, self._answer_seconds)

    def _confirmed(self, connection: Connection) -> Confirmed:
        producer = self._app.amqp.Producer(connection.channel(), auto_declare=False)
        return Confirmed(producer, connection, self._answer_seconds, lambda: self._blocked)

    def _connect(self) -> Connection:
        connection = self._connection = self._make()
        options = dict(connection.transport_options or {})
        if _is_amqp(connection):
            # Confirms are asked for on the channel: what waits for each of them is not.
            options.update(
                confirm_publish=False, on_blocked=self._on_blocked, on_unblocked=self._on_unblocked
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
        way = self._confirmed(connection)
        try:
            for _ in range(2):
                way.probe(min(PROBE_SECONDS, self._answer_seconds))
        except TimeoutError:
            # Told that it is blocked, we stay, and are told of the end as well. What is outstanding
            # will come on that channel, which is used no more.
            if not self._blocked:
                raise
        except connection.channel_errors:
            logger.exception("broker.no_default_exchange")
        else:
            self._way = way

    def _on_blocked(self, reason: str) -> None:
        logger.event("broker.blocked", reason=reason)
        self._blocked = True

    def _on_unblocked(self) -> None:
        logger.event("broker.unblocked")
        self._blocked = False

    def _leave_channel(self, connection: Connection) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.close()
        if not connection.connected:
            self.close(gently=False)

    def close(self, *, gently: bool = True) -> None:
        """Drop the connection; the next publish opens a new one.

        :param gently: tell the broker, and wait for its answer.
        """
        connection, self._connection, self._way = self._connection, None, None
        gently = gently and not self._blocked
        self._blocked = False
        self._declared = {}
        self._exchanges = {""}
        self.window = 1
        if connection is None:
            return
        # What is wrong with it is why it is dropped.
        with suppress(Exception):
            if gently:
                connection.release()
            else:
                connection.collect(PROBE_SECONDS)


def _is_amqp(connection: Connection) -> bool:
    return bool(connection.transport.driver_type == "amqp")
