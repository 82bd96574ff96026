"""The relay: takes due messages from the outbox, publishes them, marks what was confirmed.

They go out a window at a time, as many as the way to their broker takes together; each has its own
answer. Several relays may run: each message is published once, in the order its key asks for, if it
has one. A relay that dies between publishing and marking leaves one batch that another publishes
again, with the same ids; a worker claims one of the two. ``docs/relay.md`` says what each answer of
a broker leads to.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from celery_budget.core.backoff import backoff_seconds
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.dispatcher import Dispatcher
from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Store, claims, quarantine
from celery_budget.store.claims import Due
from celery_budget.store.wakeup import Sleeper
from celery_budget.telling import Ended, tell_task

__all__ = [
    "Answer",
    "BrokerDown",
    "Publisher",
    "Rejected",
    "Relay",
    "Relayed",
    "Unpublishable",
    "run",
    "run_once",
]

logger = Logger(__name__)

#: Between two tries to publish a message that was refused.
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 60.0
#: Between two passes while the broker or the store is down.
LONGEST_OUTAGE_SECONDS = 5.0
#: For which part of its hold a batch is published from; the rest is for the window in hand.
PUBLISHING = 0.5
#: From how many messages on what was confirmed is marked while the next batch is taken and
#: published. Fewer are marked at once: they take less time than that is worth.
BESIDE = 100
#: How long a pass may take one batch after another: then lanes, and other brokers, have their turn.
PASS_SECONDS = 1.0
#: Of how many messages without an answer the count is kept.
MOST_UNANSWERED = 10_000


class BrokerDown(Exception):
    """A broker cannot be reached or does not answer: its messages must wait.

    :param error: what was said.
    :param sent: whether the message was on its way, so that nothing is known about it. It may be
        what the connection broke at: others come before it then.
    """

    def __init__(self, error: str, sent: bool = False) -> None:
        super().__init__(error, sent)
        self.error = error
        self.sent = sent


class Unpublishable(Exception):
    """No broker would take this message as it is; others may pass.

    :param reason: ``unroutable``, ``oversize`` or ``undecodable``.
    :param error: what was said.
    """

    def __init__(self, reason: str, error: str) -> None:
        super().__init__(reason, error)
        self.reason = reason
        self.error = error


class Rejected(Exception):
    """The broker does not take this message now, as where its queue is full; others may pass."""


#: What became of a message that was published: none where it was confirmed.
Answer = BrokerDown | Unpublishable | Rejected | None


class Publisher(Protocol):
    """The way to the brokers."""

    def window(self, broker: str) -> int:
        """Return how many messages of a broker to publish at a time now: at least one.

        More than one only where they are sent before their confirmations are waited for.
        """

    def publish_all(self, messages: Sequence[WireMessage]) -> Sequence[Answer]:
        """Publish messages of one broker, in their order, and wait for all confirmations.

        No two of them have one order key.

        :return: what became of each: :class:`BrokerDown` where it was not sent, or nothing is known
            about it, :class:`Unpublishable` where it was refused for good, :class:`Rejected` where
            it was refused for now.
        """

    def reset(self) -> None:
        """Drop all connections, so that the next publish opens a new one."""


@dataclass(frozen=True)
class Relayed:
    """What one pass did, in numbers of messages.

    :ivar taken: how many it had in hand.
    :ivar published: how many of them were confirmed.
    :ivar failed: how many were refused.
    :ivar released: how many ended since their time was over.
    :ivar quarantined: how many went into quarantine.
    :ivar broker_down: whether no broker can be reached, so that there is nothing to do for a while.
    :ivar again: whether another pass should follow at once.
    """

    published: int = 0
    failed: int = 0
    released: int = 0
    taken: int = 0
    broker_down: bool = False
    again: bool = False
    quarantined: int = 0


class Relay:
    """One relay: takes batches of due messages, publishes them, marks what was confirmed.

    A batch is held for ``publish_seconds``, under a fence of its own. What was not published in the
    first half of that is given back, so that no other relay takes what this one is publishing; what
    another has taken all the same, since this one stood still, is neither marked nor given back.
    """

    def __init__(
        self, store: Store, settings: Settings, publisher: Publisher, ended: Ended
    ) -> None:
        self._store = store
        self._settings = settings
        self._publisher = publisher
        self._ended = ended
        self._rests = {name: _Rest() for name in ("", *settings.brokers)}
        self._dispatcher = Dispatcher(store, settings)
        # How often each message had no answer, as far as this relay knows, and for a while.
        self._unanswered: Counter[uuid.UUID] = Counter()
        # The result backend, which is waited for on this thread, gets a rest as well.
        self._results_rest = _Rest()
        # Guards what is in hand: waiting to be published, not to be published now, and confirmed.
        self._lock = threading.Lock()
        self._fence: uuid.UUID | None = None
        self._waiting: deque[Due] = deque()
        self._aside: list[Due] = []
        self._published: list[Due] = []
        self._trouble: str | None = None
        # What was confirmed of the batch before, and is being marked.
        self._marking: _Marking | None = None

    def run_once(self, stop: threading.Event, told: bool = False) -> Relayed:
        """Take up to a batch of due messages for each broker and bring each one step on.

        First lanes let go what they may, so that it is among them. A message past its ``expires``
        is not published, its hold is given back. One that cannot be published goes into
        quarantine, and its hold is given back, at once or, where the broker may take it later, when
        its tries are used up. None of this happens to one whose task was started: its result is not
        ours to store.

        A broker that cannot be reached is left alone for a while, longer each time.

        :param stop: looked at between two windows; what is in hand then is given back.
        :param told: whether somebody has told of a message: lanes come after what is due then.
        """
        # What is in hand still, after a fault of the store.
        self.hand_back()
        if len(self._unanswered) > MOST_UNANSWERED:
            self._unanswered.clear()
        steps: Counter[str] = Counter()
        if told:
            reached, again = self._pass_all(stop, steps, told)
        let_go = self._dispatch(steps)
        if let_go or not told:
            reached, again = self._pass_all(stop, steps, told)
        down = not reached and not stop.is_set()
        return Relayed(**steps, broker_down=down, again=again or let_go)

    def _dispatch(self, steps: Counter[str]) -> bool:
        """Have lanes let go what they may; return whether they did, and count what has ended."""
        dispatched = self._dispatcher.run_once()
        for task_id in dispatched.ended:
            self._tell(task_id)
        steps["released"] += len(dispatched.ended)
        return dispatched.released > 0

    def _pass_all(
        self, stop: threading.Event, steps: Counter[str], told: bool
    ) -> tuple[bool, bool]:
        """Make a pass for each broker; return whether any was reached, and has more to do."""
        reached = again = False
        for broker, rest in self._rests.items():
            if stop.is_set() or rest.lasts:
                continue
            more = self._pass(broker, stop, steps, told)
            if more is not None:
                reached, again = True, again or more
        return reached, again

    def hand_back(self) -> None:
        """Mark what was published and give the rest back.

        Also for another thread, at shutdown. The window that is being published then is marked by
        the thread that publishes it, or taken by another relay when its time is over.
        """
        with self._lock:
            self._end_marking()
            if self._fence is None:
                return
            if self._published:
                self._mark(self._fence, self._published)
                self._published = []
            rest = [*self._aside, *self._waiting]
            if rest:
                self._store.run(
                    claims.give_back, self._settings.root, self._fence, rest, self._trouble
                )
                self._aside = []
                self._waiting.clear()
            self._trouble = None

    def _mark(self, fence: uuid.UUID, published: list[Due]) -> None:
        self._store.run(
            claims.mark_published,
            self._settings.root,
            fence,
            published,
            self._settings.republish_us,
        )

    def _begin_marking(self) -> bool:
        """Have a batch marked while the next one is taken; false where it is to be done before.

        So it is where something is in hand that was not published, or few were, and where the store
        has one writer.
        """
        with self._lock:
            if (
                self._fence is None
                or len(self._published) < BESIDE
                or self._aside
                or self._waiting
                or self._store.dialect == "sqlite"
            ):
                return False
            self._end_marking()
            fence, published = self._fence, self._published
            self._marking = _Marking(lambda: self._mark(fence, published))
            self._published = []
            return True

    def _end_marking(self) -> None:
        """Wait until what is being marked is, with the lock held; do it where that has failed."""
        if self._marking is not None:
            self._marking.end()
            self._marking = None

    def _claim(self, broker: str, told: bool) -> claims.Batch:
        """Take a batch; one that was told of, by one round trip where that does."""
        settings = self._settings
        what = (settings.root, broker, settings.batch_size, settings.publish_us, new_id())
        if told and self._store.dialect == "postgresql":
            batch = self._store.run_statement(claims.claim_due, *what, alone=True)
            if not batch.undecided:
                return batch
        return self._store.run(claims.claim_due, *what)

    def _pass(
        self, broker: str, stop: threading.Event, steps: Counter[str], told: bool
    ) -> bool | None:
        """Work through a batch, or several large ones; return whether to go on at once.

        None where the broker could not be reached.
        """
        failures = self._rests[broker].failures
        over = time.monotonic() + PASS_SECONDS
        while True:
            batch = self._work_through(broker, stop, steps, told)
            # What follows by its key is let go by the marking.
            ordered = any(due.message.order_key is not None for due in batch.messages)
            goes_on = batch.full and not ordered and time.monotonic() < over
            if not goes_on or stop.is_set() or not self._begin_marking():
                break
        self.hand_back()
        if self._rests[broker].failures > failures:
            return None
        return batch.full or ordered or batch.behind > 0

    def _work_through(
        self, broker: str, stop: threading.Event, steps: Counter[str], told: bool
    ) -> claims.Batch:
        """Take a batch, and publish it as far as that goes; what was published is in hand then."""
        until = time.monotonic() + self._settings.publish_seconds * PUBLISHING
        batch = self._claim(broker, told)
        with self._lock:
            self._fence = batch.fence
            self._waiting.extend(batch.messages)
        steps["taken"] += len(batch.messages)
        while not stop.is_set() and time.monotonic() < until:
            window = self._next(self._publisher.window(broker))
            if not window:
                break
            self._bring_on(batch.fence, broker, window, steps)
        return batch

    def _next(self, most: int) -> list[Due]:
        """Take what is published together: in order, and one message of an order key at most.

        What follows it by its key goes once it is confirmed.
        """
        window: list[Due] = []
        later: list[Due] = []
        keys: set[str] = set()
        with self._lock:
            while self._waiting and len(window) < most:
                due = self._waiting.popleft()
                key = due.message.order_key
                if key is None:
                    window.append(due)
                elif key in keys:
                    later.append(due)
                else:
                    keys.add(key)
                    window.append(due)
            self._waiting.extendleft(reversed(later))
        return window

    def _bring_on(
        self, fence: uuid.UUID, broker: str, window: list[Due], steps: Counter[str]
    ) -> None:
        """Publish messages, or bring them to their end; count what was done."""
        going: list[Due] = []
        while window:
            due = window.pop(0)
            if not due.expired or due.started:
                going.append(due)
                continue
            try:
                steps["released"] += self._expire(fence, due)
            except BaseException:
                with self._lock:
                    self._waiting.extendleft(reversed([*going, *window]))
                raise
        if not going:
            return
        # What has run is for a worker to give its outcome again, however late.
        messages = [
            replace(due.message, expires_us=None, left_us=None) if due.started else due.message
            for due in going
        ]
        answers = self._publisher.publish_all(messages)
        answered = list(zip(going, answers, strict=True))
        self._confirmed([due for due, answer in answered if answer is None], steps)
        down = [(due, one) for due, one in answered if isinstance(one, BrokerDown)]
        refused = [(due, one) for due, one in answered if isinstance(one, Rejected | Unpublishable)]
        if down:
            self._rests[broker].begin(self._settings.poll_seconds)
            self._wait_for_broker(fence, broker, down)
        elif self._rests[broker].end():
            logger.event("broker.up", broker=broker)
        if refused:
            steps["failed"] += len(refused)
            self._refused(fence, refused, steps)

    def _confirmed(self, published: list[Due], steps: Counter[str]) -> None:
        with self._lock:
            self._published.extend(published)
        steps["published"] += len(published)
        for due in published:
            logger.event(
                "message.published",
                task=due.message.task_name,
                task_id=due.message.task_id,
                broker=due.message.broker,
                queue=due.message.queue,
            )
            self._unanswered.pop(due.outbox_id, None)

    def _wait_for_broker(
        self, fence: uuid.UUID, broker: str, down: list[tuple[Due, BrokerDown]]
    ) -> None:
        """Leave the rest of the batch alone; see :class:`BrokerDown`."""
        error = down[0][1].error
        logger.event("broker.down", broker=broker, error=error)
        sent = [due for due, one in down if one.sent]
        with self._lock:
            self._trouble = error
            self._aside.extend(due for due, one in down if not one.sent)
            self._aside.extend(self._waiting)
            self._waiting.clear()
        if sent:
            # Longer each time: its queue may be what does not answer. No failure of its own.
            tries: dict[uuid.UUID, int] = {}
            for due in sent:
                self._unanswered[due.outbox_id] += 1
                tries[due.outbox_id] = self._unanswered[due.outbox_id]
            self._reschedule(fence, error, tries, failed=False)

    def _refused(
        self,
        fence: uuid.UUID,
        refused: list[tuple[Due, Rejected | Unpublishable]],
        steps: Counter[str],
    ) -> None:
        """Have what was refused tried again, or put it into quarantine."""
        later: dict[str, list[Due]] = defaultdict(list)
        for due, one in refused:
            last = due.failures + 1 >= self._settings.max_publishes
            if isinstance(one, Unpublishable):
                reason, error = one.reason, one.error
            else:
                reason, error = "rejected", str(one)
            # What was started may still be published for a replay, or go with its reservation.
            if due.started or (isinstance(one, Rejected) and not last):
                later[error].append(due)
            else:
                steps["quarantined"] += self._isolate(fence, due, reason, error)
        for error, messages in later.items():
            self._postpone(fence, messages, error)

    def _postpone(self, fence: uuid.UUID, messages: list[Due], error: str) -> None:
        """Have messages that failed tried again later; what follows by its key waits for it."""
        for due in messages:
            logger.event(
                "message.postponed",
                task=due.message.task_name,
                task_id=due.message.task_id,
                broker=due.message.broker,
                queue=due.message.queue,
                failures=due.failures,
                error=error,
            )
        keys = {due.message.order_key for due in messages} - {None}
        if keys:
            with self._lock:
                self._aside.extend(one for one in self._waiting if one.message.order_key in keys)
                self._waiting = deque(
                    one for one in self._waiting if one.message.order_key not in keys
                )
        tries = {due.outbox_id: due.failures + 1 for due in messages}
        self._reschedule(fence, error, tries, failed=True)

    def _reschedule(
        self, fence: uuid.UUID, error: str, tries: dict[uuid.UUID, int], *, failed: bool
    ) -> None:
        """Give messages back to be tried again later, each by how often it was tried."""
        waits = {
            outbox_id: int(
                backoff_seconds(count, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS) * 1_000_000
            )
            for outbox_id, count in tries.items()
        }
        self._store.run(claims.reschedule, self._settings.root, fence, waits, error, failed=failed)

    def _isolate(self, fence: uuid.UUID, due: Due, reason: str, error: str) -> bool:
        """Put a message that cannot be published into quarantine; return whether it is there."""
        isolated = self._store.run(
            quarantine.isolate, self._settings.root, fence, due, reason, error
        )
        if isolated:
            logger.event(
                "message.quarantined",
                task=due.message.task_name,
                task_id=due.message.task_id,
                broker=due.message.broker,
                queue=due.message.queue,
                reason=reason,
                error=error,
            )
            self._tell(due.message.task_id)
        return isolated

    def _expire(self, fence: uuid.UUID, due: Due) -> bool:
        """End a message whose time is over; return whether it has ended now."""
        expired = self._store.run(claims.expire, self._settings.root, fence, due)
        if expired:
            logger.event(
                "request.released",
                task_id=due.message.task_id,
                state="released",
                reason="expired",
            )
            self._tell(due.message.task_id)
        return expired

    def _tell(self, task_id: str) -> None:
        """Store the result of a task that has just ended, unless the backend is to be left alone.

        A result backend that is down must not hold up the other messages: it is not asked again for
        a while, longer each time. What is not told here, recovery tells.
        """
        if self._results_rest.lasts:
            return
        if tell_task(self._store, self._settings.root, self._ended, task_id):
            self._results_rest.end()
        else:
            self._results_rest.begin(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)


class _Marking:
    """What is done by a thread of its own meanwhile, and again where that has failed."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self._mark = mark
        self._done = False
        self._thread = threading.Thread(target=self._try, name="budget-mark", daemon=True)
        self._thread.start()

    def _try(self) -> None:
        try:
            self._mark()
        except Exception:
            logger.exception("step.failed", step="marking what was published")
        else:
            self._done = True

    def end(self) -> None:
        """Wait for it.

        :raises StoreError: where it has failed, and does so again.
        """
        self._thread.join()
        if not self._done:
            self._mark()
            self._done = True


@dataclass
class _Rest:
    """For how long what could not be reached is left alone."""

    failures: int = 0
    until: float = 0.0

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.until

    def begin(self, first: float, longest: float = LONGEST_OUTAGE_SECONDS) -> None:
        """Begin, or go on for longer."""
        self.failures += 1
        wait = backoff_seconds(self.failures, first, longest)
        self.until = time.monotonic() + wait

    def end(self) -> bool:
        """It answers; return whether it did not before."""
        ended = self.failures > 0
        self.failures, self.until = 0, 0.0
        return ended


def run_once(store: Store, settings: Settings, publisher: Publisher, ended: Ended) -> Relayed:
    """Make one pass, as a relay of its own: for whoever has a timer already."""
    return Relay(store, settings, publisher, ended).run_once(threading.Event())


def run(relay: Relay, settings: Settings, sleeper: Sleeper, stop: threading.Event) -> None:
    """Relay until ``stop`` is set: pass after pass while there is work, then asleep until told.

    An outage of the store is waited out, longer each time, spread so that relays that failed
    together do not come back together. The relay itself does so for each broker; while all rest
    nobody needs to wake it.
    """
    failures = 0
    awake = True
    while not stop.is_set():
        try:
            if awake:
                sleeper.stay_awake()
            # What it was woken for is published before anything else is looked at.
            relayed = relay.run_once(stop, told=not awake)
            awake = relayed.again or relayed.broker_down
            if not awake:
                sleeper.sleep(stop)
            elif relayed.broker_down:
                stop.wait(settings.poll_seconds)
            failures = 0
        except Exception:
            failures += 1
            logger.exception("step.failed", step="a pass through the outbox")
            stop.wait(backoff_seconds(failures, settings.poll_seconds, LONGEST_OUTAGE_SECONDS))
