"""The finished wire message, as the outbox keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MIDDLE_RANK", "RANKS", "WireMessage"]

#: How many ranks there are, from 0 on, which goes first.
RANKS = 10
#: The rank of a message without a priority.
MIDDLE_RANK = 5


@dataclass(frozen=True)
class WireMessage:
    """One message as the broker will get it.

    :ivar task_id: the id of the task it starts; for messages that start none, an id of their own.
    :ivar task_name: the task it starts.
    :ivar body: the serialised and compressed body.
    :ivar envelope: everything else the publisher needs (content type and encoding, headers,
        properties, exchange, routing key, declarations), written by the integration and read by
        nobody else.
    :ivar queue: where it goes, for people to read.
    :ivar due_us: microseconds since the epoch before which it must not be published; 0 for at once.
    :ivar expires_us: after which it must not be published any more; none for never.
    :ivar left_us: how long it had until then when a relay took it, by the database's clock.
    :ivar rank: which of several that are due goes first: the smaller one, from 0 on.
    :ivar order_key: messages with one key are published one after another, in the order they were
        written; none for no such order.
    :ivar broker: the name of the broker it goes to; empty for the application's own.
    """

    task_id: str
    task_name: str
    body: bytes
    envelope: str
    queue: str
    due_us: int = 0
    expires_us: int | None = None
    rank: int = MIDDLE_RANK
    order_key: str | None = None
    broker: str = ""
    left_us: int | None = field(default=None, compare=False)
