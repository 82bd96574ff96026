"""How several messages are sent before a broker's answers are awaited, by kind of broker.

On AMQP over one channel with publisher confirms: the messages go out, then the answers to all of
them come in. On Redis as one pipeline. Elsewhere one by one, by kombu's contract.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from uuid import uuid4

from amqp import exceptions as amqp_errors
from amqp import spec
from kombu import Connection, Producer
from kombu.transport import virtual

from celery_budget.integration import frames
from celery_budget.integration.answers import Unbound
from celery_budget.integration.parcels import Parcel

__all__ = [
    "UNANSWERED",
    "UNSENT",
    "Confirmed",
    "OneByOne",
    "Pipelined",
    "Sent",
    "Way",
    "listen",
]

#: How many messages go out by one call, between two looks at what the broker has said meanwhile. It
#: stops reading where nobody reads what it has to say.
TOGETHER = 32


class _Mark:
    """What became of a message of which nothing else is known."""


#: It was not sent.
UNSENT = _Mark()
#: It was on its way, and nothing is known of it.
UNANSWERED = _Mark()

#: What became of a message: none where it was confirmed, or its own error.
Sent = Exception | _Mark | None


class Way(Protocol):
    """A channel, and how messages go out on it.

    :ivar at_once: how many messages may go out before their answers are awaited, at most.
    :ivar broken: what has ended the channel or its connection.
    """

    at_once: int
    broken: Exception | None

    def declare(self, parcel: Parcel) -> None:
        """Declare what a message needs, if this connection has not."""

    def send(self, parcels: Sequence[Parcel]) -> list[Sent]:
        """Send messages, no two of one name, and wait for the answer to each."""

    def close(self) -> None:
        """Close the channel."""


class _Channel:
    """What all ways have in common."""

    at_once = 1

    def __init__(self, producer: Producer, answer_seconds: float) -> None:
        self.broken: Exception | None = None
        self._producer = producer
        self._channel = producer.channel
        self._seconds = answer_seconds

    def declare(self, parcel: Parcel) -> None:
        for entity in parcel.envelope.declare:
            self._producer.maybe_declare(entity)

    def close(self) -> None:
        # One that the broker has closed is none any more.
        with suppress(Exception):
            self._channel.close()


class OneByOne(_Channel):
    """One by one; the transport's own answer is the confirmation."""

    def send(self, parcels: Sequence[Parcel]) -> list[Sent]:
        """As :meth:`Way.send`; what comes after one that fails is not sent."""
        answers: list[Sent] = [UNSENT] * len(parcels)
        for number, parcel in enumerate(parcels):
            try:
                check_bound(self._channel, parcel)
                self._publish(parcel)
            except Unbound as exc:
                answers[number] = exc
            except Exception as exc:  # noqa: BLE001 - it is the answer
                answers[number], self.broken = UNANSWERED, exc
                break
            else:
                answers[number] = None
        return answers

    def _publish(self, parcel: Parcel) -> None:
        self._channel.basic_publish(
            parcel.prepared(self._channel),
            exchange=parcel.exchange,
            routing_key=parcel.routing_key,
            mandatory=parcel.envelope.mandatory,
            immediate=parcel.envelope.immediate,
            timeout=self._seconds,
            confirm_timeout=self._seconds,
        )


class Pipelined(_Channel):
    """As one pipeline of Redis's, in one round trip.

    Kombu routes each message, and says what is to be written where; bindings are looked up once.
    """

    at_once = 256

    def send(self, parcels: Sequence[Parcel]) -> list[Sent]:
        """As :meth:`Way.send`. What a message's commands are answered is its answer."""
        answers: list[Sent] = [UNSENT] * len(parcels)
        parts: list[tuple[int, int, int]] = []
        written = _Commands()
        with _bindings_kept(self._channel):
            for number, parcel in enumerate(parcels):
                begin = len(written.commands)
                try:
                    check_bound(self._channel, parcel)
                    self._channel.basic_publish(
                        parcel.prepared(self._channel),
                        exchange=parcel.exchange,
                        routing_key=parcel.routing_key,
                        _publish_batch=written,
                    )
                except Unbound as exc:
                    answers[number] = exc
                except Exception as exc:  # noqa: BLE001 - it is the answer
                    # As its serialiser has it; of a lookup that fails the pipeline will say more.
                    answers[number] = exc
                    del written.commands[begin:]
                else:
                    parts.append((number, begin, len(written.commands)))
        try:
            replies = self._execute(written)
        except Exception as exc:  # noqa: BLE001 - it is the answer
            self.broken = exc
            for number, *_ in parts:
                answers[number] = UNANSWERED
            return answers
        for number, begin, end in parts:
            errors = [one for one in replies[begin:end] if isinstance(one, Exception)]
            answers[number] = errors[0] if errors else None
        return answers

    def _execute(self, written: _Commands) -> Sequence[Any]:
        if not written.commands:
            return ()
        with (
            self._channel.conn_or_acquire() as client,
            client.pipeline(transaction=False) as pipeline,
        ):
            for name, args in written.commands:
                getattr(pipeline, name)(*args)
            found: Sequence[Any] = pipeline.execute(raise_on_error=False)
        return found


class _Commands:
    """Collects what kombu's Redis channel would write; it hands over a batch's commands."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, name: str, *args: Any) -> None:
        """Take one command."""
        self.commands.append((name, args))


class Confirmed(_Channel):
    """By AMQP's publisher confirms: each delivery's tag is its number on the channel.

    A message that no queue takes comes back first, then its confirmation follows; which one it was
    is told by its name. For one thread.

    :param is_blocked: tells whether the broker has said that it takes nothing.
    """

    at_once = 256

    def __init__(
        self,
        producer: Producer,
        connection: Connection,
        answer_seconds: float,
        is_blocked: Callable[[], bool],
    ) -> None:
        super().__init__(producer, answer_seconds)
        self._connection = connection
        self._is_blocked = is_blocked
        self._tag = 0
        self._waiting: dict[int, int] = {}
        self._names: dict[Any, int] = {}
        self._answers: list[Sent] = []
        self._channel.confirm_select()
        for name, hear in (
            ("basic_ack", self._acked),
            ("basic_nack", self._nacked),
            ("basic_return", self._returned),
        ):
            self._channel.events[name].add(hear)

    def send(self, parcels: Sequence[Parcel]) -> list[Sent]:
        """As :meth:`Way.send`.

        What was not sent when the broker became too slow, or took nothing more, stays unsent.
        """
        until = time.monotonic() + self._seconds
        answers = self._answers = [UNSENT] * len(parcels)
        self._names = {parcel.name: number for number, parcel in enumerate(parcels)}
        self._waiting = {}
        try:
            for begin in range(0, len(parcels), TOGETHER):
                if begin:
                    listen(self._connection)
                    if self._is_blocked() or time.monotonic() > until:
                        break
                self._write(begin, parcels[begin : begin + TOGETHER])
            while self._waiting:
                # Where nothing was said in time it raises TimeoutError.
                self._connection.drain_events(timeout=max(0.001, until - time.monotonic()))
        except Exception as exc:  # noqa: BLE001 - it is the answer
            self.broken = exc
        return answers

    def _write(self, begin: int, parcels: Sequence[Parcel]) -> None:
        """Send messages by one call, those that can be written; the first one is number ``begin``.

        Past the channel, which would send each by itself, and look what was said after it.
        """
        connection = self._channel.connection
        if connection is None:
            raise amqp_errors.RecoverableConnectionError("connection already closed")
        channel, most = self._channel.channel_id, connection.frame_max
        written: list[bytes] = []
        for number, parcel in enumerate(parcels, begin):
            envelope = parcel.envelope
            try:
                publish = frames.method(
                    parcel.exchange,
                    parcel.routing_key,
                    envelope.mandatory or parcel.wanted,
                    envelope.immediate,
                )
                body = parcel.message.body
                written += frames.framed(channel, most, publish, parcel.fields(), body)
            except Exception as exc:  # noqa: BLE001 - it is the answer
                self._answers[number] = exc
            else:
                self._tag += 1
                self._waiting[self._tag] = number
                self._answers[number] = UNANSWERED
        if written:
            connection.transport.write(b"".join(written))

    def probe(self, seconds: float) -> None:
        """Send a message that nobody gets, and wait for the answer.

        :raises TimeoutError: where there was none in time.
        """
        until = time.monotonic() + seconds
        self._tag += 1
        self._answers, self._waiting = [UNANSWERED], {self._tag: 0}
        nobody = (0, "", f"budget-{uuid4()}", False, False)
        message = self._channel.prepare_message(b"")
        self._channel.send_method(spec.Basic.Publish, "Bssbb", nobody, message)
        while self._waiting:
            self._connection.drain_events(timeout=max(0.001, until - time.monotonic()))

    def _acked(self, tag: int, multiple: bool) -> None:
        for number in self._told(tag, multiple):
            if self._answers[number] is UNANSWERED:
                self._answers[number] = None

    def _nacked(self, tag: int, multiple: bool) -> None:
        for number in self._told(tag, multiple):
            if self._answers[number] is UNANSWERED:
                self._answers[number] = amqp_errors.MessageNacked()

    def _told(self, tag: int, multiple: bool) -> list[int]:
        if not multiple:
            number = self._waiting.pop(tag, None)
            return [] if number is None else [number]
        # Zero is all of them.
        tags = [one for one in self._waiting if one <= tag or tag == 0]
        return [self._waiting.pop(one) for one in tags]

    def _returned(self, exc: Exception, exchange: str, routing_key: str, message: Any) -> None:
        properties = message.properties
        headers = properties.get("application_headers") or {}
        name = (exchange, routing_key, properties.get("correlation_id"), headers.get("id"))
        number = self._names.get(name)
        if len(self._names) == 1:
            [number] = self._names.values()
        if number is None:
            # Which one it was is not known: none of them counts as confirmed then.
            raise exc
        self._answers[number] = exc


def listen(connection: Connection) -> None:
    """Hear what the broker has said meanwhile, without waiting for more."""
    with suppress(TimeoutError):
        while True:
            connection.drain_events(timeout=0)


def check_bound(channel: Any, parcel: Parcel) -> None:
    """Check that some queue gets the message: kombu drops it without a word where none does.

    A Redis that was emptied, or another one that took its place, has lost all bindings.

    :raises Unbound: where none does.
    """
    exchange, key = parcel.exchange, parcel.routing_key
    if not exchange or not parcel.wanted or not isinstance(channel, virtual.Channel):
        return
    if not channel._lookup(exchange, key):
        raise Unbound(f"no queue is bound to exchange {exchange!r} by {key!r}")


@contextmanager
def _bindings_kept(channel: Any) -> Iterator[None]:
    """Have a channel ask for each exchange's bindings once in the block."""
    tables: dict[str, Any] = {}
    ask = channel.get_table

    def get_table(exchange: str) -> Any:
        if exchange not in tables:
            tables[exchange] = ask(exchange)
        return tables[exchange]

    channel.get_table = get_table
    try:
        yield
    finally:
        del channel.get_table
