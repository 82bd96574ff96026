"""Recovery: what nobody else would bring to an end.

Attempts whose lease lapsed, attempts that ended without being closed, and published messages that
were never started. All of it is found without locks and looked at again behind the lock of its
reservation before it is changed, so that several may run. What is kept no longer is deleted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from celery_budget.core.reservations import Released
from celery_budget.settings import Settings
from celery_budget.store import Store, attempts, effects, lapses, outbox, reservations
from celery_budget.store.lapses import REPLAY_LEASES

__all__ = ["Recovered", "Results", "run_once"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

LIMIT = 100
#: How often in one pass that many messages, and effects, are deleted that are kept no longer.
PRUNES = 100


class Results(Protocol):
    """What recovery needs of the result backend."""

    @property
    def counts_chord_members(self) -> bool:
        """Whether storing a result twice would count a chord's member twice."""

    def ready(self, task_id: str) -> str | None:
        """Return ``returned`` or ``raised`` where a final result is stored, else none."""

    def ended(self, task_id: str, reason: str) -> None:
        """Store that the task will not run (again), for whoever waits for it."""


@dataclass(frozen=True)
class Recovered:
    """What one pass did, in numbers of requests."""

    rerun: int = 0
    lost: int = 0
    finished: int = 0
    replayed: int = 0
    republished: int = 0
    undelivered: int = 0


def run_once(store: Store, settings: Settings, results: Results) -> Recovered:
    """Look for stuck work once and bring each piece one step on."""
    steps: Counter[str] = Counter()
    for seen in store.read(lapses.lapsed, settings.root, LIMIT):
        recover = _recover_running if seen.ended_us is None else _recover_unclosed
        step = _guarded(recover, store, settings, results, seen)
        if step is not None:
            steps[step] += 1
            logger.warning(
                "attempt %s of task %s[%s] lapsed: %s",
                seen.attempt,
                seen.task_name,
                seen.task_id,
                step,
            )
    for silent in store.read(outbox.silent, settings.root, LIMIT):
        step = _guarded(_recover_silent, store, settings, results, silent)
        if step is not None:
            steps[step] += 1
    for _ in range(PRUNES):
        if store.run(outbox.prune, settings.root, LIMIT) < LIMIT:
            break
    for _ in range(PRUNES):
        if store.run(effects.prune, settings.root, settings.effect_retention_us, LIMIT) < LIMIT:
            break
    return Recovered(**steps)


def _guarded(
    recover: Callable[[Store, Settings, Results, T], str | None],
    store: Store,
    settings: Settings,
    results: Results,
    seen: T,
) -> str | None:
    """Recover one piece; one that fails (a result backend that is down) must not stop the rest."""
    try:
        return recover(store, settings, results, seen)
    except Exception:
        logger.exception("could not recover %s; it is tried again", seen)
        return None


def _recover_running(
    store: Store, settings: Settings, results: Results, seen: lapses.OpenAttempt
) -> str | None:
    """End an attempt whose worker is gone: with Celery's result, run again, or as lost.

    A result that is stored already stands: the ledger ends with it and the task does not run
    again. An early-acknowledged message is gone from the broker, the task may have had its
    effects, and its caller did not ask for a second run: it is lost. The same goes for one that
    took all its deliveries.
    """
    ready = results.ready(seen.task_id)
    again = seen.late_ack and seen.deliveries < settings.max_deliveries
    claim_id = seen.claim_id
    if ready is None and not again:
        # The claim first, so that its worker cannot come back in between; then the result, then
        # the ledger: a crash leaves a lapsed attempt, and all of it is done once more.
        fenced = store.run(lapses.fence, settings.root, seen, settings.lease_us)
        if fenced is None:
            return None
        claim_id = fenced
        results.ended(seen.task_id, "lost")
    state = store.run(
        lapses.abandon,
        settings.root,
        seen.reservation_id,
        seen.attempt,
        claim_id,
        again=again,
        park_us=settings.park_us,
        ready=ready,
        only_lapsed=claim_id == seen.claim_id,
    )
    return {"waiting": "rerun", "lost": "lost", "settled": "finished", None: None}[state]


def _recover_unclosed(
    store: Store, settings: Settings, results: Results, seen: lapses.OpenAttempt
) -> str | None:
    """Have an ended attempt's message published again, so that a worker gives its outcome again.

    Also where the result is stored already: Celery stores it before it counts a chord's member or
    calls errbacks. Closed is one that was replayed too often, that leaves nothing to replay, or
    whose stored result would count twice.
    """
    replay = seen.replayable and seen.replays < settings.max_deliveries
    if replay and results.counts_chord_members:
        replay = results.ready(seen.task_id) is None
    if not replay:
        closed = store.run(
            attempts.close, settings.root, seen.reservation_id, seen.attempt, seen.claim_id
        )
        return "finished" if closed else None
    replaying = store.run(
        lapses.republish_ended, settings.root, seen, REPLAY_LEASES * settings.lease_us
    )
    return "replayed" if replaying else None


def _recover_silent(
    store: Store, settings: Settings, results: Results, seen: outbox.Silent
) -> str | None:
    """Publish a message again that no worker has started, or give up on it.

    Where Celery has stored a result all the same (a time limit struck while the worker waited for
    the ledger), the request ends with it and does not run.
    """
    if results.ready(seen.task_id) is not None:
        store.run(reservations.release, settings.root, seen.reservation_id, "result stored")
        return "finished"
    if seen.publishes >= settings.max_publishes:
        results.ended(seen.task_id, "undelivered")
        released = store.run(
            reservations.release, settings.root, seen.reservation_id, "undelivered"
        )
        return "undelivered" if isinstance(released, Released) else None
    again = store.run(outbox.republish, settings.root, seen)
    return "republished" if again else None
