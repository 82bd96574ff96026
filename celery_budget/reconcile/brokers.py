"""What brokers say of the queues that published work went to."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from celery_budget.store.pending import Published

__all__ = ["Load", "QueueStanding", "Queues", "ask"]

#: For how long brokers are asked in all; queues that are left are told without an answer.
ASK_SECONDS = 10.0


@dataclass(frozen=True)
class Load:
    """What waits in a queue.

    :ivar messages: not those that are with workers, unacknowledged.
    :ivar consumers: none where its broker does not count them.
    """

    name: str
    messages: int
    consumers: int | None


class Queues(Protocol):
    """What can be seen of the brokers' queues."""

    def loads(self, broker: str, envelope: str) -> tuple[Load, ...] | None:
        """Return what waits in the queues that a message went to; none where nobody can tell.

        A queue that does not exist has nothing waiting. Answers within seconds, also where the
        broker does not.
        """


@dataclass(frozen=True)
class QueueStanding:
    """A queue by the ledger and by its broker.

    :ivar broker: the broker's name; empty for the application's own.
    :ivar queue: as the outbox calls it.
    :ivar published: how many messages the ledger has published there that nobody has started.
    :ivar oldest_seconds: for how long the oldest of them.
    :ivar next_us: when the first of them is looked at again.
    :ivar messages: how many wait there, of whatever kind; none where the broker does not say.
    :ivar consumers: how many consume it; none where the broker does not say.
    """

    broker: str
    queue: str
    published: int
    oldest_seconds: int
    next_us: int
    messages: int | None = None
    consumers: int | None = None

    @property
    def holds(self) -> str:
        """What the broker says, in words."""
        messages = f"holds {self.messages} message{'' if self.messages == 1 else 's'}"
        if self.consumers is None:
            return messages
        return f"{messages}, {self.consumers} consumer{'' if self.consumers == 1 else 's'}"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def ask(published: Iterable[Published], queues: Queues | None) -> tuple[QueueStanding, ...]:
    """Ask the brokers for the queues that work was published to; with no transaction open.

    :param queues: none where brokers are not to be asked.
    """
    until = time.monotonic() + ASK_SECONDS
    found = []
    for one in published:
        loads = None
        if queues is not None and time.monotonic() < until:
            loads = queues.loads(one.broker, one.envelope)
        messages = consumers = None
        if loads is not None:
            messages = sum(load.messages for load in loads)
            told = [load.consumers for load in loads if load.consumers is not None]
            consumers = sum(told) if len(told) == len(loads) else None
        found.append(
            QueueStanding(
                one.broker,
                one.queue,
                one.count,
                one.oldest_us // 1_000_000,
                one.next_us,
                messages,
                consumers,
            )
        )
    return tuple(found)
