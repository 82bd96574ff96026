"""Settlement: what a worker tells the ledger about one attempt, from its claim to its close.

A fault of the store never becomes a task's failure: claim, usage and settlement wait it out.
"""

from __future__ import annotations

import re
import threading
import uuid
from dataclasses import dataclass, field

from celery_budget.core.amounts import check_amount
from celery_budget.core.budgets import check_unit
from celery_budget.core.reservations import (
    AlreadyExtended,
    Claimed,
    Closed,
    Ended,
    Extended,
    Missing,
    Outcome,
    Recorded,
    Refused,
    Released,
    Replay,
    ReserveRequest,
    Running,
    StoredOutcome,
)
from celery_budget.settings import Settings
from celery_budget.store import (
    Store,
    attempts,
    continuations,
    in_place,
    lapses,
    reservations,
    usage,
)
from celery_budget.store.attempts import Delivery
from celery_budget.store.in_place import NotStarted, Standing
from celery_budget.store.lapses import REPLAY_LEASES

__all__ = [
    "Attempt",
    "Delivery",
    "Standing",
    "cancel",
    "claim",
    "go_on",
    "renew",
    "revoke",
    "standing",
    "start",
    "worker_lost",
]


MAX_KEY_LENGTH = 255


def claim(
    store: Store,
    settings: Settings,
    delivery: Delivery,
    claim_id: uuid.UUID,
    stop: threading.Event | None = None,
) -> Attempt | Running | Closed | Missing:
    """Claim the attempt that ``delivery`` stands for, or tell why it may not run.

    :param claim_id: the fence to claim under; a repeat with the same one finds its own claim.
    """
    claimed = store.wait_out(stop, attempts.claim, delivery, claim_id, settings.lease_us)
    if isinstance(claimed, (Claimed, Replay)):
        return Attempt(
            store,
            delivery.root,
            delivery.reservation_id,
            claimed.attempt,
            claimed.claim_id,
            claimed.stored if isinstance(claimed, Replay) else None,
            stop,
        )
    return claimed


def start(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    delivery: Delivery,
    claim_id: uuid.UUID,
) -> Attempt | NotStarted:
    """Admit ``request`` and claim its first attempt, for a run in this process; or why not.

    :param delivery: stands for the message that there is none of.
    :raises StoreError: nothing is known to have been changed; what was is lost with its lease.
    """
    started = store.run(in_place.start, request, delivery, claim_id, settings.lease_us)
    if not isinstance(started, Claimed):
        return started
    return _in_place(store, delivery, started)


def go_on(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    attempt: Attempt,
    delivery: Delivery,
    claim_id: uuid.UUID,
) -> Attempt | Refused | Closed:
    """End ``attempt``, which runs in place, as retried, and claim the next one.

    Where that does not fit, the request is settled at what it used and the refusal returned;
    ``Closed`` where the attempt's fence is gone.

    :raises StoreError: as :func:`start`.
    """
    claimed = store.run(
        in_place.go_on,
        request,
        attempt.number,
        attempt.claim_id,
        delivery,
        claim_id,
        settings.lease_us,
    )
    return _in_place(store, delivery, claimed) if isinstance(claimed, Claimed) else claimed


def _in_place(store: Store, delivery: Delivery, claimed: Claimed) -> Attempt:
    return Attempt(
        store,
        delivery.root,
        delivery.reservation_id,
        claimed.attempt,
        claimed.claim_id,
        in_place=True,
    )


def standing(store: Store, settings: Settings, task_id: str) -> Standing | None:
    """Return how the last request of a task stands; none where there is none."""
    return store.read(in_place.standing, settings.root, task_id)


#: What PostgreSQL's text, or UTF-8, cannot hold.
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")


@dataclass
class Attempt:
    """One claimed attempt, in the hands of whoever claimed it.

    :ivar replay: the outcome of an attempt that ended without being closed; it is to be given
        again, not run again.
    :ivar called: whether the task's call is over; what is published now follows from it.
    :ivar replaced: whether the task has put another in its place.
    :ivar error: what the task's call raised; none where it returned.
    :ivar settled: whether the reservation is settled and the attempt waits to be closed.
    :ivar in_place: whether it runs in its caller's process: its end closes it.
    """

    store: Store
    root: str
    reservation_id: uuid.UUID
    number: int
    claim_id: uuid.UUID
    replay: StoredOutcome | None = None
    stop: threading.Event | None = None
    called: bool = False
    settled: bool = False
    replaced: bool = False
    error: BaseException | None = None
    in_place: bool = False
    _sequence: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, amount: object, key: object = None, unit: object = None) -> bool:
        """Record usage; see :func:`celery_budget.usage.record`."""
        outcome = self.store.wait_out(
            self.stop,
            usage.record,
            self.root,
            self.reservation_id,
            self.number,
            self._written(key),
            check_amount(amount, "recorded usage"),
            None if unit is None else check_unit(unit),
        )
        return isinstance(outcome, Recorded)

    def extend(
        self, amount: object, key: object = None, unit: object = None
    ) -> Extended | AlreadyExtended | Refused | Closed:
        """Hold more, all or nothing; see :func:`celery_budget.usage.extend`."""
        checked = check_amount(amount, "the extension")
        written = self._written(key)
        return self.store.wait_out(
            self.stop,
            attempts.extend,
            *self._key,
            written,
            checked,
            None if unit is None else check_unit(unit),
        )

    def _written(self, key: object) -> str:
        """Return a key as the ledger keeps it; one of its own for each call without one."""
        if key is None:
            with self._lock:
                self._sequence += 1
                return f"attempt:{self.number}:{self._sequence}"
        if isinstance(key, str) and 1 <= len(key) <= MAX_KEY_LENGTH and not _NO_TEXT.search(key):
            return f"key:{key}"
        raise ValueError(
            f"usage key {key!r} is not text of 1 to {MAX_KEY_LENGTH} characters that a database "
            "can hold"
        )

    def end(self, outcome: Outcome) -> bool:
        """End the attempt with ``outcome``; false where its fence is gone.

        Sets :attr:`settled` where nothing follows but what Celery does with the outcome.
        """
        end = in_place.end if self.in_place else attempts.end
        ended = self.store.wait_out(self.stop, end, *self._key, outcome)
        self.settled = isinstance(ended, Ended) and ended.state == "settled" and not self.in_place
        return isinstance(ended, Ended)

    def close(self) -> bool:
        """Close the attempt; false where its fence is gone. A few tries: recovery does the rest."""
        return self.store.run(attempts.close, *self._key)

    @property
    def _key(self) -> tuple[str, uuid.UUID, int, uuid.UUID]:
        return self.root, self.reservation_id, self.number, self.claim_id


def renew(store: Store, settings: Settings, task_ids: list[str], boot_id: uuid.UUID) -> int:
    """Extend the leases of the attempts that this worker has open; return how many."""
    return store.run(attempts.renew, settings.root, task_ids, boot_id, settings.lease_us)


def worker_lost(
    store: Store, settings: Settings, task_id: str, boot_id: uuid.UUID, may_rerun: bool
) -> bool:
    """Bring on a task whose process is known to be gone; tell whether it is not over yet.

    An attempt that ran runs again, or is lost: charged the greater of recorded and estimated. One
    that had ended, whose result may not have been stored, gives its outcome again. Where none was
    claimed yet the message comes again. False where Celery's own ending of the task stands.

    :param may_rerun: whether the message may come again: not after a hard time limit or a
        termination, which are meant.
    """
    seen = store.run(lapses.open_of, settings.root, task_id, boot_id)
    if seen is None:
        store.run(lapses.unclaimed_lost, settings.root, task_id, may_rerun)
        return may_rerun
    if seen.ended_us is None:
        again = may_rerun and seen.late_ack and seen.deliveries < settings.max_deliveries
        state = store.run(
            lapses.abandon,
            settings.root,
            seen.reservation_id,
            seen.attempt,
            seen.claim_id,
            again=again,
            park_us=settings.park_us,
            only_lapsed=False,
        )
        return state == "waiting"
    if may_rerun and seen.replayable and seen.replays < settings.max_deliveries:
        return store.run(
            lapses.republish_ended,
            settings.root,
            seen,
            REPLAY_LEASES * settings.lease_us,
            only_lapsed=False,
        )
    store.run(attempts.close, settings.root, seen.reservation_id, seen.attempt, seen.claim_id)
    return False


def cancel(store: Store, settings: Settings, task_id: str) -> Released | Running | Closed | Missing:
    """End the request of a task that does not run: as :func:`continuations.cancel`, committed."""
    return store.run(continuations.cancel, settings.root, task_id)


def revoke(store: Store, root: str, reservation_id: uuid.UUID, reason: str) -> bool:
    """Give back the hold of a request that will not run; false where it runs or has ended.

    True also where the ledger does not know it.
    """
    outcome = store.run(reservations.release, root, reservation_id, reason)
    return isinstance(outcome, (Released, Missing))
