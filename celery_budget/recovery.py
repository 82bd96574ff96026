"""Recovery: what nobody else would bring to an end.

Attempts whose lease lapsed, attempts that ended without being closed, published messages that are
lost before anybody has started them, and results that have still to be stored. All of it is found
without locks and looked at again behind a lock before it is changed, so that several may run. What
is kept no longer is deleted.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import (
    Store,
    attempts,
    effects,
    lapses,
    outbox,
    reservations,
    reuse,
    silent,
    untold,
)
from celery_budget.store.lapses import REPLAY_LEASES
from celery_budget.suspicion import Suspicion
from celery_budget.telling import tell

__all__ = ["Kept", "Recovered", "Results", "run_once"]


class _Piece(Protocol):
    @property
    def task_id(self) -> str:
        """The task that it is about."""


T = TypeVar("T", bound=_Piece)

logger = Logger(__name__)

LIMIT = 100
#: How often one pass notes leases that are over, which it brings on later.
SUSPECTS = 10
#: After how many failures in a row the rest of its kind waits for the next pass.
IN_A_ROW = 3
#: How long a piece that failed is left alone.
AGAIN_US = 10_000_000
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
    asked: int = 0
    finished: int = 0
    replayed: int = 0
    republished: int = 0
    undelivered: int = 0
    told: int = 0


@dataclass
class Kept:
    """How far a sweep has looked through what is kept against replays: a pass looks at a part.

    :ivar after: the message that was looked at last; none before the first, and after the last.
    """

    after: uuid.UUID | None = None


def run_once(
    store: Store,
    settings: Settings,
    results: Results,
    suspicion: Suspicion,
    kept: Kept | None = None,
) -> Recovered:
    """Look for stuck work once and bring each piece one step on.

    :param kept: where the last pass has ended, and this one does; none for one that begins anew.
    """
    root = settings.root
    steps: Counter[str] = Counter()
    for _ in range(SUSPECTS):
        if not store.run(lapses.suspect, root, settings.lease_us):
            break
    for seen, step in _bring_on(
        store.read(lapses.lapsed, root, LIMIT, settings.renew_us),
        lambda seen: _recover_attempt(store, settings, results, seen),
        lambda seen: store.run(lapses.postpone, root, seen, AGAIN_US),
    ):
        steps[step] += 1
        logger.event(
            "attempt.lapsed",
            attempt=seen.attempt,
            task=seen.task_name,
            task_id=seen.task_id,
            reservation_id=seen.reservation_id,
            step=step,
        )
    for silence, step in _bring_on(
        suspicion.look(),
        lambda lost: _recover_silent(store, settings, results, lost),
        lambda lost: store.run(silent.postpone, root, lost, AGAIN_US),
    ):
        steps[step] += 1
        logger.event(
            "message.silent",
            task_id=silence.task_id,
            broker=silence.broker,
            queue=silence.queue,
            count=silence.publishes,
            step=step,
        )
    # Last, so that what has just ended is told as well.
    for _, step in _bring_on(
        store.read(untold.due, root, LIMIT),
        lambda one: "told" if tell(store, root, results.ended, one) else None,
        lambda one: None,  # Taking it has postponed it.
    ):
        steps[step] += 1
    kept = kept or Kept()
    for _ in range(PRUNES):
        pruned = store.run(outbox.prune, root, LIMIT, kept.after)
        kept.after = pruned.after
        if kept.after is None or not pruned:
            break
    for _ in range(PRUNES):
        if store.run(effects.prune, settings.root, settings.effect_retention_us, LIMIT) < LIMIT:
            break
    for _ in range(PRUNES):
        if store.run(reuse.prune, root, LIMIT) < LIMIT:
            break
    return Recovered(**steps)


def _bring_on(
    pieces: Iterable[T], recover: Callable[[T], str | None], postpone: Callable[[T], None]
) -> Iterator[tuple[T, str]]:
    """Recover pieces one after another; yield each that was brought on, and how.

    One that fails is postponed, so that the next pass sees the others. Where several fail in a row
    the result backend is down: the rest is left to the next pass, not to a time-out for each.
    """
    failed = 0
    for piece in pieces:
        try:
            step = recover(piece)
        except Exception:
            logger.exception("recovery.failed", piece=type(piece).__name__, task_id=piece.task_id)
            try:
                postpone(piece)
            except Exception:
                logger.exception(
                    "recovery.postpone_failed", piece=type(piece).__name__, task_id=piece.task_id
                )
            failed += 1
            if failed == IN_A_ROW:
                return
            continue
        failed = 0
        if step is not None:
            yield piece, step


def _recover_attempt(
    store: Store, settings: Settings, results: Results, seen: lapses.OpenAttempt
) -> str | None:
    recover = _recover_running if seen.ended_us is None else _recover_unclosed
    return recover(store, settings, results, seen)


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
    again = lapses.runs_again(seen.rerun, seen.deliveries, settings.max_deliveries)
    state = store.run(
        lapses.abandon,
        settings.root,
        seen.reservation_id,
        seen.attempt,
        seen.claim_id,
        again=again,
        park_us=settings.park_us,
        ready=ready,
    )
    return None if state is None else _STEPS[state]


#: What a pass did, by the state that a request has reached.
_STEPS = {"waiting": "rerun", "lost": "lost", "settled": "finished", "asked": "asked"}


def _recover_unclosed(
    store: Store, settings: Settings, results: Results, seen: lapses.OpenAttempt
) -> str | None:
    """Have an ended attempt's message published again, so that a worker gives its outcome again.

    Also where the result is stored already: Celery stores it before it counts a chord's member or
    calls errbacks. Closed is one that was replayed too often, that leaves nothing to replay, or
    whose stored result would count twice.
    """
    replay = lapses.is_replayed(seen.replayable, seen.replays, settings.max_deliveries)
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
    store: Store, settings: Settings, results: Results, seen: silent.Silent
) -> str | None:
    """Publish a message again that is lost, or give up on it.

    Where Celery has stored a result all the same (a time limit struck while the worker waited for
    the ledger), the request ends with it and does not run.
    """
    if results.ready(seen.task_id) is not None:
        store.run(reservations.release, settings.root, seen.reservation_id, "result stored")
        return "finished"
    if silent.is_given_up(seen.publishes, settings.max_publishes):
        ended = store.run(lapses.undelivered, settings.root, seen)
        return "undelivered" if ended else None
    again = store.run(silent.republish, settings.root, seen)
    return "republished" if again else None
