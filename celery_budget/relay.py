"""The relay: takes due messages from the outbox, publishes them, marks what was confirmed.

Several may run. One that dies between publishing and marking leaves messages that another
publishes again; a worker claims one of the two.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from celery_budget.core.backoff import backoff_seconds
from celery_budget.core.messages import WireMessage
from celery_budget.settings import Settings
from celery_budget.store import Store, outbox, reservations
from celery_budget.store.outbox import Due

__all__ = ["BrokerDown", "Ended", "Publisher", "Relayed", "Unpublishable", "run", "run_once"]

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 60.0


class BrokerDown(Exception):
    """The broker cannot be reached; every message must wait."""


class Unpublishable(Exception):
    """The broker refuses this message; others may pass."""


class Publisher(Protocol):
    """The way to the broker."""

    def publish(self, message: WireMessage) -> None:
        """Publish and wait for the confirmation.

        :raises BrokerDown: nothing is known about this message.
        :raises Unpublishable: this message was refused.
        """

    def reset(self) -> None:
        """Drop the connection, so that the next publish opens a new one."""


class Ended(Protocol):
    """Called for each request that ends before it ran, before the ledger says so."""

    def __call__(self, task_id: str, reason: str) -> None: ...


@dataclass(frozen=True)
class Relayed:
    """What one pass did, in numbers of messages."""

    published: int = 0
    failed: int = 0
    released: int = 0
    taken: int = 0
    broker_down: bool = False


def run_once(store: Store, settings: Settings, publisher: Publisher, ended: Ended) -> Relayed:
    """Take up to a batch of due messages and bring each one step on.

    A message past its ``expires`` is not published, its hold is given back. One that the broker
    refuses is tried again with back-off, and its hold given back when the tries are used up.
    Neither happens to one whose task was started: its result is not ours to store.
    """
    taken = store.run(outbox.claim_due, settings.root, settings.batch_size, settings.publish_us)
    published: list[Due] = []
    released = failed = 0
    down: str | None = None
    for number, due in enumerate(taken):
        if due.expired and not due.started:
            released += _release(store, settings, due, "expired", ended)
            continue
        try:
            publisher.publish(due.message)
        except BrokerDown as exc:
            down = str(exc)
            _reschedule(store, settings, taken[number:], down, 0)
            break
        except Unpublishable as exc:
            failed += 1
            logger.warning(
                "task %s[%s] was refused by the broker: %s",
                due.message.task_name,
                due.message.task_id,
                exc,
            )
            if due.failures + 1 >= settings.max_publishes and not due.started:
                released += _release(store, settings, due, "unpublishable", ended)
            else:
                _reschedule(store, settings, [due], str(exc), due.failures + 1)
        else:
            published.append(due)
    if published:
        store.run(outbox.mark_published, settings.root, published, settings.republish_us)
    if down is not None:
        logger.warning("the broker cannot be reached: %s", down)
        publisher.reset()
    return Relayed(len(published), failed, released, len(taken), down is not None)


def _reschedule(
    store: Store, settings: Settings, due: Sequence[Due], error: str, failures: int
) -> None:
    """Give messages back: with ``failures`` of their own, or at once where the broker was down."""
    wait = backoff_seconds(failures, 0.5, LONGEST_WAIT_SECONDS) if failures else 0.0
    store.run(
        outbox.reschedule,
        settings.root,
        [one.outbox_id for one in due],
        int(wait * 1_000_000),
        error,
        failed=failures > 0,
    )


def _release(store: Store, settings: Settings, due: Due, reason: str, ended: Ended) -> bool:
    """End a message that will not be published.

    The result is stored first: a crash in between comes back here. So does a result backend that
    is down, which must not hold up the other messages.
    """
    try:
        ended(due.message.task_id, reason)
    except Exception:
        logger.exception("the result of task %s could not be stored", due.message.task_id)
        _reschedule(store, settings, [due], reason, due.failures + 1)
        return False
    if due.reservation_id is None:
        store.run(outbox.forget, settings.root, due.outbox_id)
    else:
        store.run(reservations.release, settings.root, due.reservation_id, reason)
    return True


def run(
    store: Store,
    settings: Settings,
    publisher: Publisher,
    ended: Ended,
    stop: threading.Event,
) -> None:
    """Relay until ``stop`` is set; outages of store and broker are waited out."""
    failures = 0
    while not stop.is_set():
        wait = settings.poll_seconds
        try:
            relayed = run_once(store, settings, publisher, ended)
        except Exception:
            failures += 1
            logger.exception("the relay could not work through the outbox")
            publisher.reset()
        else:
            failures = failures + 1 if relayed.broker_down else 0
            if relayed.taken == settings.batch_size and not failures:
                wait = 0
        if failures:
            wait = backoff_seconds(failures, settings.poll_seconds, 5.0)
        stop.wait(wait)
