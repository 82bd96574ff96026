"""Suspicion: which published messages, of those that nobody has started, are lost.

Most of them wait in their queue, and a second copy would only make it longer. One is suspected to
be lost once its queue was seen empty after it was published, or once a worker has in hand what was
published to the same queue after it: queues give what they have in the order they got it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Protocol

from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Store, silent
from celery_budget.store.silent import Lane, Silent

__all__ = ["Queues", "Suspicion"]

logger = Logger(__name__)

#: How many messages a pass looks at.
LOOKED_AT = 1000
#: How often it looks on in a pass where all of those run, or have ended.
LOOKS = 10
#: How many it suspects at most: as many copies are published in a pass.
SUSPECTED = 100
#: For how long it asks brokers; queues that are left are asked by the next pass.
ASK_SECONDS = 5.0
#: Of how many lanes it remembers what was seen of them.
MOST_LANES = 10_000


#: A broker's name, and what the outbox calls the queue there.
Queue = tuple[str, str]


class Queues(Protocol):
    """What can be seen of the brokers' queues."""

    def is_empty(self, broker: str, envelope: str) -> bool | None:
        """Tell whether nothing waits where a message went; none where that cannot be told.

        A queue that does not exist has nothing waiting. Answers within seconds, also where the
        broker does not.

        :param broker: the broker's name.
        :param envelope: the message's, as the outbox keeps it.
        """


class Suspicion:
    """Finds messages that are lost, and has the others looked at again later.

    What it has once seen of a queue tells of all that was published to it before: it is remembered,
    so that the copies which a lost queue gets do not hide what else was lost with it. A process
    that begins anew has to see it again.
    """

    def __init__(self, store: Store, settings: Settings, queues: Queues) -> None:
        self._store = store
        self._settings = settings
        self._queues = queues
        # What was published up to this time, and not started, is in its queue no more: by queues
        # that were empty then, and by lanes of which a worker has what was published then.
        self._emptied: dict[Queue, int] = {}
        self._overtaken: dict[Lane, int] = {}
        self._looked_us = 0

    def look(self) -> list[Silent]:
        """Return messages that are to be published again, due longest first, at most a hundred.

        The others that it suspects stay due, for the next pass. What waits in its queue, or where
        that cannot be told, is postponed in one statement. A number of statements that does not
        depend on how many messages there are; brokers are asked once for each queue.
        """
        found = self._find()
        if not found:
            return []
        # Where the ledger's clock was set back, what was seen tells of times that are to come.
        is_back = found[0].seen_us < self._looked_us
        self._looked_us = found[0].seen_us
        for seen in (self._emptied, self._overtaken):
            if is_back or len(seen) > MOST_LANES:
                seen.clear()
        if any(not self._is_gone(one) for one in found):
            self._see_started()
        unasked = self._see_queues([one for one in found if not self._is_gone(one)])
        waiting = [one for one in found if not self._is_gone(one) and _queue(one) not in unasked]
        if waiting:
            self._postpone([one.outbox_id for one in waiting])
        return [one for one in found if self._is_gone(one)][:SUSPECTED]

    def _find(self) -> list[Silent]:
        """Return what has not started; what has is not looked at again soon."""
        for _ in range(LOOKS):
            looked = self._store.read(silent.look, self._settings.root, LOOKED_AT)
            if looked.others:
                self._postpone(looked.others)
            if looked.unstarted or not looked.full:
                break
        return looked.unstarted

    def _postpone(self, outbox_ids: Sequence[uuid.UUID]) -> None:
        self._store.run(
            silent.postpone_all, self._settings.root, outbox_ids, self._settings.republish_us
        )

    def _is_gone(self, one: Silent) -> bool:
        emptied = self._emptied.get(_queue(one), 0)
        return one.published_us <= max(emptied, self._overtaken.get(one.lane, 0))

    def _see_started(self) -> None:
        """Note what workers have in hand.

        A relay marks what it has published within its hold: only what was marked that much earlier
        was certainly published earlier.
        """
        started = self._store.read(silent.started, self._settings.root)
        for lane, published_us in started.items():
            before_us = published_us - self._settings.publish_us
            self._overtaken[lane] = max(before_us, self._overtaken.get(lane, 0))

    def _see_queues(self, doubtful: list[Silent]) -> set[Queue]:
        """Ask which queues of these messages are empty; return those there was no time to ask."""
        first: dict[Queue, Silent] = {}
        for one in doubtful:
            first.setdefault(_queue(one), one)
        if not first:
            return set()
        ids = [one.outbox_id for one in first.values()]
        envelopes = self._store.read(silent.envelopes, self._settings.root, ids)
        until = time.monotonic() + ASK_SECONDS
        unasked = set(first)
        for queue, one in first.items():
            if time.monotonic() > until:
                logger.event("broker.slow", count=len(unasked))
                break
            unasked.discard(queue)
            envelope = envelopes.get(one.outbox_id)
            if envelope is not None and self._queues.is_empty(one.broker, envelope):
                # It was after they were read.
                self._emptied[queue] = one.seen_us
        return unasked


def _queue(one: Silent) -> Queue:
    return one.broker, one.queue
