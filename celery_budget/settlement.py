"""Settlement: what a worker tells the ledger about one attempt, from its claim to its close.

A fault of the store never becomes a task's failure: claim, usage and settlement wait it out.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from celery_budget import tracing, watching
from celery_budget.closings import Closings
from celery_budget.core.amounts import check_amount
from celery_budget.core.budgets import check_text, check_unit
from celery_budget.core.deadlines import moment
from celery_budget.core.reservations import (
    AlreadyExtended,
    AlreadyRecorded,
    Begun,
    Cancelling,
    Claimed,
    Closed,
    Ended,
    Extended,
    Happened,
    Missing,
    Outcome,
    Recorded,
    Refused,
    Released,
    Replay,
    Reserved,
    ReserveRequest,
    Running,
    StoredOutcome,
)
from celery_budget.core.retries import Retries
from celery_budget.core.usage import Used
from celery_budget.errors import (
    BudgetError,
    DeadlinePassed,
    EnlistError,
    InvalidAmount,
    InvalidKey,
    PolicyError,
    ReservationExhausted,
    StoreError,
)
from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.spool import Ended as EndedEntry
from celery_budget.spool import Entry, Held, Patience, Spool
from celery_budget.spool import Usage as UsageEntry
from celery_budget.store import (
    Connection,
    Stop,
    Store,
    at_once,
    attempts,
    claims,
    continuations,
    effects,
    enlisted,
    in_place,
    lapses,
    silent,
    turning,
    usage,
)
from celery_budget.store import unclaimed as unclaimed_store
from celery_budget.store.attempts import Delivery
from celery_budget.store.enlisted import Enlisted
from celery_budget.store.in_place import NotStarted, Standing
from celery_budget.store.lapses import REPLAY_LEASES
from celery_budget.tracing import NOTHING, Span

__all__ = [
    "MAX_KEY_LENGTH",
    "Attempt",
    "Delivery",
    "Standing",
    "Within",
    "cancel",
    "claim",
    "fits_as_key",
    "go_on",
    "is_altered",
    "leaves_chord",
    "owners_of",
    "received",
    "renew",
    "replay",
    "revoke",
    "standing",
    "start",
    "unclaimed",
    "worker_lost",
]


P = ParamSpec("P")
R = TypeVar("R")

logger = Logger(__name__)

MAX_KEY_LENGTH = 255

#: Of how many received messages the ledger is told at a time.
RECEIVED = 1000


def claim(
    store: Store,
    settings: Settings,
    delivery: Delivery,
    claim_id: uuid.UUID,
    stop: Stop | None = None,
    retries: Retries | None = None,
    spool: Spool | None = None,
    closings: Closings | None = None,
) -> Attempt | Running | Closed | Missing:
    """Claim the attempt that ``delivery`` stands for, or tell why it may not run.

    Where ``retries``, or its deadline, lets no further attempt start it is one to be replayed, as
    ``refused``: the request has ended, and with ``retries`` is in quarantine.

    :param claim_id: the fence to claim under; a repeat with the same one finds its own claim.
    :param stop: ends waiting for the ledger, here and in all that the attempt does.
    :param spool: keeps what the attempt cannot tell the ledger.
    :param closings: of attempts before it, which are closed with it; gets this one when it is to be
        closed.
    :raises StoreError: where waiting was ended; it is not known to be claimed.
    """
    claimed = _claim(store, settings, delivery, claim_id, Patience(stop), retries, closings)
    if isinstance(claimed, Replay):
        _alarm(claimed.kept, delivery.reservation_id, settings)
    if isinstance(claimed, (Claimed, Replay)):
        watching.claim(settings, delivery.reservation_id, delivery.task_id, claimed)
        elapsed_us = claimed.elapsed_us if isinstance(claimed, Claimed) else 0
        return Attempt(
            store,
            settings,
            delivery.root,
            delivery.reservation_id,
            claimed.attempt,
            claimed.claim_id,
            claimed.stored if isinstance(claimed, Replay) else None,
            stop,
            spool,
            delivery,
            closings,
            begun=time.monotonic() - elapsed_us / 1_000_000,
            deadline_us=claimed.deadline_us,
            until=_until(claimed),
        )
    return claimed


def _claim(
    store: Store,
    settings: Settings,
    delivery: Delivery,
    claim_id: uuid.UUID,
    patience: Patience,
    retries: Retries | None,
    closings: Closings | None,
) -> Claimed | Replay | Running | Closed | Missing:
    """Claim in one statement where the store can, and what that leaves in a transaction."""
    key = (delivery, claim_id, settings.lease_us, retries or None)
    if store.dialect == "postgresql":
        closing = closings.take() if closings is not None else []
        if closings is not None and any(one[0] == delivery.reservation_id for one in closing):
            # A duplicate: it is to find what is over closed, not to give it once more.
            closings.add(*closing)
            closings.flush()
            closing = []
        try:
            claimed, unclosed = store.wait_out_statement(
                patience, at_once.claim, *key, closing, lock_ms=store.lock_ms
            )
        except BaseException:
            if closings is not None:
                closings.add(*closing)
            raise
        if unclosed and closings is not None:
            closings.leave(one for one in closing if one[0] in unclosed)
        if claimed is not None:
            return claimed
    return store.wait_out(patience, attempts.claim, *key, settings.max_quarantine)


def is_altered(store: Store, delivery: Delivery, stop: Stop | None = None) -> bool:
    """Tell of a delivery that is missing whether the ledger has another message for its request.

    A fault of the store is waited out.

    :raises StoreError: where waiting was ended.
    """
    return store.wait_out_reading(Patience(stop), attempts.is_known, delivery)


def owners_of(store: Store, root: str, task_id: str, stop: Stop | None = None) -> set[str]:
    """Return whose requests have this task id; a fault of the store is waited out.

    :raises StoreError: where waiting was ended.
    """
    return store.wait_out_reading(Patience(stop), attempts.owners_of, root, task_id)


def _until(claimed: Claimed | Replay) -> float | None:
    """Return when the deadline of what was claimed just now is, by this process's clock."""
    left_us = claimed.left_us if isinstance(claimed, Claimed) else None
    return None if left_us is None else time.monotonic() + left_us / 1_000_000


def _alarm(kept: bool | None, reservation_id: uuid.UUID, settings: Settings) -> None:
    """Say that a request which failed for good is not kept in quarantine, if so."""
    if kept is False:
        logger.event(
            "quarantine.full", bound=settings.max_quarantine, reservation_id=reservation_id
        )


def start(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    delivery: Delivery,
    claim_id: uuid.UUID,
    *,
    last: bool = True,
) -> Attempt | NotStarted:
    """Admit ``request`` and claim its first attempt, for a run in this process; or why not.

    :param delivery: stands for the message that there is none of.
    :param last: false where another lane is tried next: a refusal is not counted.
    :raises StoreError: nothing is known to have been changed; what was is lost with its lease.
    """
    began = time.perf_counter()
    started = _start(store, settings, request, delivery, claim_id, note=last)
    if not isinstance(started, Claimed):
        if not isinstance(started, Closed):
            watching.admission(settings, request, started, began, last=last)
        return started
    reserved = Reserved(request.reservation_id, started.waived)
    watching.admission(settings, request, reserved, began)
    return _in_place(store, settings, delivery, started)


def _start(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    delivery: Delivery,
    claim_id: uuid.UUID,
    *,
    note: bool,
) -> Claimed | NotStarted:
    """Start in one statement where the store can, and what that leaves in a transaction."""
    key = (request, delivery, claim_id, settings.lease_us)
    if store.dialect == "postgresql" and request.enforced:
        started = store.run_statement(
            in_place.start_at_once, *key, note=note, lock_ms=store.lock_ms
        )
        if started is not None:
            return started
    return store.run(in_place.start, *key, note=note)


def go_on(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    attempt: Attempt,
    delivery: Delivery,
    claim_id: uuid.UUID,
) -> Attempt | Refused | Released | Closed:
    """End ``attempt``, which runs in place, as retried, and claim the next one.

    Where that does not fit, the request is settled at what it used and the refusal returned;
    ``Released`` where it was cancelled, ``Closed`` where the attempt's fence is gone, or, with that
    as its state, the deadline has passed.

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
    if not isinstance(claimed, Claimed):
        return claimed
    following = _in_place(store, settings, delivery, claimed)
    following.begun = attempt.begun
    return following


def _in_place(store: Store, settings: Settings, delivery: Delivery, claimed: Claimed) -> Attempt:
    watching.claim(settings, delivery.reservation_id, delivery.task_id, claimed)
    return Attempt(
        store,
        settings,
        delivery.root,
        delivery.reservation_id,
        claimed.attempt,
        claimed.claim_id,
        in_place=True,
        deadline_us=claimed.deadline_us,
        until=_until(claimed),
    )


def standing(store: Store, settings: Settings, task_id: str) -> Standing | None:
    """Return how the last request of a task stands; none where there is none."""
    return store.read(in_place.standing, settings.root, task_id)


#: What PostgreSQL's text, or UTF-8, cannot hold.
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")


def fits_as_key(key: object) -> bool:
    """Tell whether a usage record can have this key: short text that a database can hold."""
    return isinstance(key, str) and 1 <= len(key) <= MAX_KEY_LENGTH and not _NO_TEXT.search(key)


class _Stopped(Exception):
    """The worker stops, and what the ledger was to be told is on disk."""


#: What identifies a usage record, and what was used.
_Record = tuple[str, uuid.UUID, int, str, Used]


@dataclass(frozen=True)
class Within:
    """Where an attempt was settled by its task: the caller's transaction, and what it returns."""

    transaction: Enlisted
    value: object


@dataclass
class Attempt:
    """One claimed attempt, in the hands of whoever claimed it.

    :ivar replay: the outcome of an attempt that ended without being closed; it is to be given
        again, not run again.
    :ivar stopping: tells that the worker stops; what waits for the ledger then goes on without.
    :ivar spool: keeps what the ledger could not be told; none in place, where its caller hears it.
    :ivar delivery: by which it was claimed; none in place.
    :ivar closings: takes it when it is to be closed, to do so with others; none for at once.
    :ivar called: whether the task's call is over; what is published now follows from it.
    :ivar replaced: whether the task has put another in its place.
    :ivar error: what the task's call raised; none where it returned.
    :ivar settled: whether the reservation is settled and the attempt waits to be closed.
    :ivar closed: whether the reservation is settled and the attempt closed.
    :ivar cancelled: whether another attempt was to follow this one, and the request is cancelled.
    :ivar in_place: whether it runs in its caller's process: its end closes it.
    :ivar stop_at_hold: whether it stops where it has used more than is held for it.
    :ivar exhausted: in which units it has, with what it stops by.
    :ivar unfinished: what records the streams of replies that it still reads.
    :ivar within: where its own task has settled it; that may be rolled back.
    :ivar begun: when its request's first attempt started, by this process's clock.
    :ivar deadline_us: when all of its request is to be over; none for no such time.
    :ivar until: the same by this process's clock.
    :ivar spent: why no attempt follows it, where a retry was turned away.
    :ivar cut_short: whether its task was told an error since the worker stops.
    :ivar spooled: whether its end waits in the spool, and nothing may follow from it here.
    :ivar since: when it was claimed, by this process's clock.
    :ivar span: of its run.
    :ivar trace: headers with the context of that, for what follows after it has ended.
    """

    store: Store
    settings: Settings
    root: str
    reservation_id: uuid.UUID
    number: int
    claim_id: uuid.UUID
    replay: StoredOutcome | None = None
    stopping: Stop | None = None
    spool: Spool | None = None
    delivery: Delivery | None = None
    closings: Closings | None = None
    called: bool = False
    settled: bool = False
    closed: bool = False
    cancelled: bool = False
    replaced: bool = False
    error: BaseException | None = None
    in_place: bool = False
    stop_at_hold: bool = False
    exhausted: dict[str, ReservationExhausted] = field(default_factory=dict)
    unfinished: list[Callable[[], None]] = field(default_factory=list)
    within: Within | None = None
    begun: float = field(default_factory=time.monotonic)
    deadline_us: int | None = None
    until: float | None = None
    spent: str | None = None
    cut_short: bool = False
    spooled: bool = False
    since: float = field(default_factory=time.monotonic)
    span: Span = NOTHING
    trace: Mapping[str, str] = field(default_factory=dict)
    _unsure: list[_Record] = field(default_factory=list)
    _held: list[tuple[Entry, Held]] = field(default_factory=list)
    _sequence: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def stop(self) -> Stop:
        """What ends one wait for the ledger, of which the task hears by an error."""

        def cut() -> None:
            self.cut_short = True

        return Patience(self.stopping, on_over=cut)

    def record(self, amount: object, key: object = None, unit: object = None) -> bool:
        """Record an amount; see :func:`celery_budget.usage.record`."""
        checked = check_amount(amount, "recorded usage")
        return self.write(Used({None if unit is None else check_unit(unit): checked}), key)[0]

    def write(self, used: Used, key: object = None) -> tuple[bool, tuple[str, ...]]:
        """Record what was used; whether any of it is new, and in which units it counts.

        :raises ReservationExhausted: where the attempt is to stop at its hold and has gone over;
            what was used is recorded.
        """
        record = (self.root, self.reservation_id, self.number, self._written(key), used)
        outcome = self._recorded(record)
        if isinstance(outcome, Recorded):
            watching.recorded(self.reservation_id, self.number, outcome)
        if isinstance(outcome, Recorded) and outcome.exceeded is not None:
            over = outcome.exceeded
            self.exhausted[over.unit] = ReservationExhausted(
                over.budget, over.unit, over.used, over.reserved
            )
            # It may have been admitted elsewhere, or before, where nothing was enforced.
            self.stop_at_hold = self.stop_at_hold and self._is_enforced()
        self.check_hold()
        return isinstance(outcome, Recorded), outcome.units

    @property
    def seconds_left(self) -> float | None:
        """How long it has until its deadline, 0 after it; none without one."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    def check(self) -> None:
        """Stop an attempt whose deadline has passed, or that is to stop at its hold.

        :raises DeadlinePassed: where it has.
        :raises ReservationExhausted: where it has gone over.
        """
        if self.deadline_us is not None and self.seconds_left == 0:
            raise DeadlinePassed(str(self.reservation_id), moment(self.deadline_us).isoformat())
        self.check_hold()

    def check_hold(self) -> None:
        """Stop an attempt that is to stop at its hold.

        :raises ReservationExhausted: where it has gone over.
        """
        if self.stop_at_hold:
            for error in self.exhausted.values():
                raise ReservationExhausted(*error.args)

    def remaining(self, unit: object = None) -> int:
        """Return what is left of the hold; see :func:`celery_budget.usage.remaining`."""
        of = (self.root, self.reservation_id, None if unit is None else check_unit(unit))
        caller = self._caller()
        if caller is not None:
            return caller.run(usage.remaining, *of)
        return self.store.wait_out_reading(self.stop, usage.remaining, *of)

    def _is_enforced(self) -> bool:
        of = (self.root, self.reservation_id)
        caller = self._caller()
        if caller is not None:
            return caller.run(usage.is_enforced, *of)
        return self.store.wait_out_reading(self.stop, usage.is_enforced, *of)

    def is_cancelled(self) -> bool:
        """Tell whether the request was cancelled; see :func:`celery_budget.usage.cancelled`."""
        of = (self.root, self.reservation_id)
        caller = self._caller()
        if caller is not None:
            return caller.run(continuations.is_cancelled, *of)
        return self.store.wait_out_reading(self.stop, continuations.is_cancelled, *of)

    def cancelled_since(self, task_id: str) -> bool:
        """Tell whether the request was cancelled and has ended; then its result is to be told anew.

        For a worker that has stored another one, which it had before.
        """
        of = (self.root, self.reservation_id)
        ended = self.store.wait_out_reading(self.stop, continuations.has_ended_cancelled, *of)
        if ended:
            self.store.wait_out(self.stop, continuations.cancel, self.root, task_id)
        return ended

    def finish_streams(self) -> None:
        """Record what arrived in streams of replies that were not read to their end."""
        while self.unfinished:
            # It takes itself off the list.
            self.unfinished[-1]()

    def extend(
        self, amount: object, key: object = None, unit: object = None
    ) -> Extended | AlreadyExtended | Refused | Closed:
        """Hold more, all or nothing; see :func:`celery_budget.usage.extend`."""
        checked = check_amount(amount, "the extension")
        written = self._written(key)
        outcome = self._run(
            attempts.extend,
            *self._key,
            written,
            checked,
            None if unit is None else check_unit(unit),
        )
        if isinstance(outcome, Extended):
            # More is held now: what comes next is measured by that.
            for extended in list(self.exhausted) if unit is None else [str(unit)]:
                self.exhausted.pop(extended, None)
        return outcome

    def turn_to(
        self, lane: object, estimate: object = None
    ) -> Extended | AlreadyExtended | Refused | Closed:
        """Draw on a lane's budgets as well; see :func:`celery_budget.usage.turn_to`."""
        name = check_text(lane, "a lane's name")
        amount = None if estimate is None else check_amount(estimate, "the estimate")
        outcome = self._run(turning.turn_to, *self._key, name, amount)
        if isinstance(outcome, Extended):
            # What comes next is measured by what is held now.
            self.exhausted.clear()
        return outcome

    def _recorded(self, record: _Record) -> Recorded | AlreadyRecorded:
        """Record by a connection of the ledger's own, committed at once; else in the caller's.

        There it may be rolled back: the end of the attempt records it once more. So it does where
        a soft time limit, or whatever else is no answer of the ledger, has interrupted this: what
        was used was used. So it does with what the spool has; that counts as recorded.
        """
        try:
            return self._recorded_now(record)
        except (BudgetError, LookupError):
            raise
        except BaseException:
            self._unsure.append(record)
            raise

    def _recorded_now(self, record: _Record) -> Recorded | AlreadyRecorded:
        caller = self._caller()
        if caller is None:
            entry = UsageEntry(*record)
            try:
                at_once_too = None if record[-1].incomplete else at_once.record
                return self._tell([entry], at_once_too, usage.record, *record)
            except _Stopped:
                self._unsure.append(record)
                return Recorded(late=False, over=False)
            except StoreError:
                # A balance that the caller has locked: it would be waited for for ever.
                caller = next((one for one in self._open() if not one.is_async), None)
                if caller is None:
                    raise
            except BaseException:
                # A soft time limit, for one: the end of the attempt tells what is on disk.
                if self._holds(entry):
                    self._unsure.append(record)
                raise
        try:
            outcome = caller.run(usage.record, *record)
        except (EnlistError, StoreError):
            self._unsure.append(record)
            raise
        self._unsure.append(record)
        return outcome

    def _tell(
        self,
        entries: Sequence[Entry],
        swift: Callable[..., R | None] | None,
        function: Callable[..., R],
        *args: Any,
        **how: Any,
    ) -> R:
        """Have the ledger told what the first of ``entries`` says; all are on disk meanwhile.

        They stay there where this is interrupted. Where the ledger refuses, its caller hears it.

        :param swift: says it in one statement, or leaves it to ``function``; none where it would.
        :param how: more of its parameters.
        :raises _Stopped: where the worker stops; what was to be told is on disk.
        """
        keep = None if self.spool is None else lambda: self._keep(entries)
        patience = Patience(self.stopping if self.spool else None, keep)
        try:
            result = None
            if swift is not None and self.store.dialect == "postgresql":
                how["lock_ms"] = self.store.lock_ms
                result = self.store.wait_out_statement(patience, swift, *args, **how)
            if result is None:
                result = self.store.wait_out(patience, function, *args)
        except (BudgetError, LookupError) as error:
            if patience.over:
                raise _Stopped from error
            self._drop(entries[:1])
            raise
        self._drop(entries[:1])
        return result

    def _keep(self, entries: Sequence[Entry]) -> bool:
        """Put on disk what is not there yet; false where that fails."""
        for entry in entries:
            if not self._holds(entry):
                put = None if self.spool is None else self.spool.put(entry)
                if put is None:
                    return False
                with self._lock:
                    self._held.append((entry, put))
        return True

    def _holds(self, entry: Entry) -> bool:
        with self._lock:
            return any(one == entry for one, _ in self._held)

    def _drop(self, entries: Sequence[Entry]) -> None:
        """Take entries off the disk again."""
        with self._lock:
            dropped = [held for one, held in self._held if one in entries]
            self._held = [(one, held) for one, held in self._held if one not in entries]
        for held in dropped:
            held.drop()

    def leave(self) -> None:
        """Let be an attempt that does not end here: what it used is on disk, and to be replayed."""
        if self.spool is not None:
            self._keep([UsageEntry(*record) for record in self._unsure])
        with self._lock:
            left, self._held = self._held, []
        for _, held in left:
            held.release()

    def _run(
        self, function: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Wait for ``function(connection, …)``, in a caller's transaction where that has to be."""
        caller = self._caller()
        if caller is None:
            return self.store.wait_out(self.stop, function, *args, **kwargs)
        return caller.run(function, *args, **kwargs)

    def _caller(self) -> Enlisted | None:
        """Return the caller's transaction that another connection would wait for, for ever.

        On SQLite, which has one writer; and where it has settled this attempt. None without one.
        """
        settled = self.within.transaction if self.within else None
        for one in self._open():
            if not one.is_async and (one is settled or one.holds(self.store)):
                return one
        return None

    def _open(self) -> list[Enlisted]:
        """Return the callers' transactions that are open in the ledger, and in this context."""
        return [one for one in enlisted.transactions() if one.is_open_beside(self.store)]

    def _written(self, key: object) -> str:
        """Return a key as the ledger keeps it; one of its own for each call without one."""
        if key is None:
            with self._lock:
                self._sequence += 1
                return f"attempt:{self.number}:{self._sequence}"
        if not fits_as_key(key):
            raise InvalidKey(repr(key), MAX_KEY_LENGTH)
        return f"key:{key}"

    def end(self, outcome: Outcome, closes: bool = False) -> bool:
        """End the attempt with ``outcome``; false where its fence is gone.

        Sets :attr:`settled` where nothing follows but what Celery does with the outcome, or
        :attr:`closed`, :attr:`cancelled` where that is not to be stored, and :attr:`spooled` where
        the ledger does not know it.

        :param closes: whether nothing is ever to be given again, so that it may be closed at once.
        """
        with tracing.of(self.settings).span(
            "budget.settle", "internal", parent=self.trace, inner=True, only_within=True
        ) as span:
            return self._end(outcome, closes, span)

    def _end(self, outcome: Outcome, closes: bool, span: Span) -> bool:
        entries: list[Entry] = [UsageEntry(*record) for record in self._unsure]
        if self.delivery is not None:
            of = (self.delivery.task_id, self.delivery.boot_id)
            entries.append(EndedEntry(*self._key, outcome, *of))
        end = in_place.end if self.in_place else attempts.end
        plain = outcome.kind != "retried" and outcome.again is None and outcome.keep is None
        swift = at_once.end if plain else None
        try:
            while self._unsure:
                try:
                    self._tell(entries, None, usage.record, *self._unsure[0])
                except (PolicyError, InvalidAmount) as error:
                    # What it would have been told at once, had it not been interrupted.
                    logger.event(
                        "usage.unrecorded", error=error, reservation_id=self.reservation_id
                    )
                del self._unsure[0], entries[0]
            closes = closes or self.in_place
            ended = self._tell(entries, swift, end, *self._key, outcome, closes=closes)
        except _Stopped:
            self.spooled = True
            self.leave()
            return True
        settled = isinstance(ended, Ended) and ended.state == "settled" and not self.in_place
        self.closed = isinstance(ended, Ended) and ended.closed
        self.settled = settled and not self.closed
        self.cancelled = isinstance(ended, Ended) and ended.cancelled
        if isinstance(ended, Ended):
            _alarm(ended.kept, self.reservation_id, self.settings)
            seconds = time.monotonic() - self.since
            key = (self.reservation_id, self.number, outcome, ended, seconds, span)
            watching.end(self.settings, *key)
        return isinstance(ended, Ended)

    def end_within(self, transaction: Enlisted, outcome: Outcome, value: object) -> bool:
        """End the attempt in a caller's transaction, as returned; false where its fence is gone.

        False as well where it has been settled before. It has ended when the transaction is
        committed, and goes on where that is rolled back.

        :param value: what the task returns.
        """
        if self.within is not None and self.has_returned(transaction):
            return False
        self.finish_streams()
        end = in_place.end if self.in_place else attempts.end
        ended = transaction.run(end, *self._key, outcome)
        if isinstance(ended, Ended):
            seconds = time.monotonic() - self.since
            key = (self.reservation_id, self.number, outcome, ended, seconds)
            watching.end(self.settings, *key, self.span)
            self.within = Within(transaction, value)
        return isinstance(ended, Ended)

    def stands(self) -> bool:
        """Tell whether it was settled in a caller's transaction that has been committed."""
        return self.within is not None and self.store.wait_out(
            self.stop, attempts.has_returned, *self._key
        )

    def has_returned(self, transaction: Enlisted) -> bool:
        """Tell whether it has ended as returned, as a caller's transaction sees it."""
        return transaction.run(attempts.has_returned, *self._key)

    def begin_effect(self, transaction: Enlisted, key: str) -> Begun | Happened | Closed:
        """Write the proof of an effect in a caller's transaction; see :func:`effects.begin`."""
        return transaction.run(effects.begin, *self._key, key)

    def keep_effect(self, transaction: Enlisted, key: str, value: str | None) -> bool:
        """Write what an effect led to; false where its proof is gone."""
        return transaction.run(effects.keep, self.root, self.reservation_id, key, value)

    def withdraw_effect(self, transaction: Enlisted, key: str) -> None:
        """Take back the proof of an effect that was not had."""
        transaction.run(effects.withdraw, self.root, self.reservation_id, key)

    def close(self) -> bool:
        """Close the attempt; false where its fence is gone. A few tries: recovery does the rest.

        With :attr:`closings` that is left to them.
        """
        if self.closings is not None:
            self.closings.add(self._key[1:])
            return True
        return self.store.run(attempts.close, *self._key)

    @property
    def _key(self) -> tuple[str, uuid.UUID, int, uuid.UUID]:
        return self.root, self.reservation_id, self.number, self.claim_id


def renew(
    store: Store, settings: Settings, task_ids: list[str], boot_id: uuid.UUID, pids: list[int]
) -> int:
    """Extend the leases of the attempts that this worker has open; return how many.

    :param pids: the worker's processes that live.
    """
    return store.run(attempts.renew, settings.root, task_ids, boot_id, pids, settings.lease_us)


def received(store: Store, settings: Settings, reservation_ids: list[uuid.UUID]) -> None:
    """Tell the ledger that a worker has these requests' messages and has not started them yet."""
    for first in range(0, len(reservation_ids), RECEIVED):
        some = reservation_ids[first : first + RECEIVED]
        store.run(silent.hold, settings.root, some, settings.republish_us)


def unclaimed(
    store: Store,
    root: str,
    reservation_id: uuid.UUID,
    task_id: str,
    retries: int,
    reason: str,
    *,
    tell: bool = False,
    wait: Stop | None = None,
) -> bool:
    """End a request whose delivery ended before it claimed; see :func:`unclaimed.end`.

    :param wait: wait out a fault of the store, until this ends it.
    :raises StoreError: where the ledger could not be told.
    """
    key = (root, reservation_id, task_id, retries, reason)
    if wait is not None:
        return store.wait_out(Patience(wait), unclaimed_store.end, *key, tell=tell)
    return store.run(unclaimed_store.end, *key, tell=tell)


def worker_lost(
    store: Store,
    settings: Settings,
    task_id: str,
    boot_id: uuid.UUID,
    may_rerun: bool,
    tell: bool = False,
    *,
    retries: int | None = None,
    worker: str | None = None,
    reservation_id: uuid.UUID | None = None,
) -> bool:
    """Bring on a task whose process is known to be gone; tell whether it is not over yet.

    An attempt that ran runs again, or is lost: charged the greater of recorded and estimated. One
    that had ended, whose result may not have been stored, gives its outcome again. Where none was
    claimed yet the message comes again, ``budget_max_publishes`` times in all. False where Celery's
    own ending of the task stands.

    :param may_rerun: whether the message may come again: not after a hard time limit or a
        termination, which are meant.
    :param tell: whether the result of a lost one is to be told, since Celery stores none.
    :param retries: those of the delivery that the process had, where they are known.
    :param worker: the process, where that is known: another one may have a copy of the message, or
        the task by now.
    :param reservation_id: the request, where the message says so.
    """
    seen = store.run(lapses.open_of, settings.root, task_id, boot_id, worker, reservation_id)
    if seen is None:
        return store.run(
            unclaimed_store.lost,
            settings.root,
            task_id,
            retries,
            may_rerun,
            settings.max_publishes,
            reservation_id,
            tell=tell,
        )
    if seen.ended_us is None:
        again = may_rerun and seen.rerun and seen.deliveries < settings.max_deliveries
        state = store.run(
            lapses.abandon,
            settings.root,
            seen.reservation_id,
            seen.attempt,
            seen.claim_id,
            again=again,
            park_us=settings.park_us,
            only_lapsed=False,
            tell=tell,
        )
        if state is None:
            # Recovery has taken it meanwhile, or it has ended: what follows is no failure.
            return may_rerun
        return state == "waiting" or (state == "asked" and again)
    if may_rerun and seen.replayable and seen.replays < settings.max_deliveries:
        store.run(
            lapses.republish_ended,
            settings.root,
            seen,
            REPLAY_LEASES * settings.lease_us,
            only_lapsed=False,
        )
        # Where nothing was, recovery has done so meanwhile, or it is closed and its result stored.
        return True
    store.run(attempts.close, settings.root, seen.reservation_id, seen.attempt, seen.claim_id)
    return False


def leaves_chord(
    store: Store, root: str, reservation_id: uuid.UUID, stop: Stop | None = None
) -> bool:
    """Tell whether a request was cancelled, so that its chord is still to be told.

    :param stop: ends waiting for the ledger.
    :raises StoreError: where it was ended.
    """
    return store.wait_out_reading(Patience(stop), continuations.leaves_chord, root, reservation_id)


def replay(store: Store, settings: Settings, entry: Entry) -> None:
    """Tell the ledger what a worker could not; again it changes nothing.

    What was used counts in any case. An outcome counts while its attempt's fence is there. Its
    worker does nothing with it any more: the message is published again at once, to give it.

    :raises BudgetError, LookupError: where the ledger does not take it, or could not be told.
    """
    if isinstance(entry, UsageEntry):
        record = (entry.root, entry.reservation_id, entry.attempt, entry.key, entry.used)
        store.run(usage.record, *record)
    elif isinstance(entry, EndedEntry):
        key = (entry.root, entry.reservation_id, entry.attempt, entry.claim_id)
        ended = store.run(attempts.end, *key, entry.outcome)
        if isinstance(ended, Closed):
            logger.event(
                "attempt.claim_lost", attempt=entry.attempt, reservation_id=entry.reservation_id
            )
            return
        _alarm(ended.kept, entry.reservation_id, settings)
        if ended.settlement is not None:
            of = (entry.reservation_id, entry.attempt, entry.outcome, ended.settlement)
            watching.settled(settings, *of)
        if ended.state == "settled" and not ended.cancelled:
            worker_lost(
                store,
                settings,
                entry.task_id,
                entry.boot_id,
                may_rerun=True,
                reservation_id=entry.reservation_id,
            )
    else:
        # What may run again has no result: Celery was told to store none.
        worker_lost(
            store,
            settings,
            entry.task_id,
            entry.boot_id,
            entry.may_rerun,
            tell=entry.may_rerun,
            retries=entry.retries,
            worker=entry.worker,
            reservation_id=entry.reservation_id,
        )


def cancel(
    store: Store,
    settings: Settings,
    task_id: str,
    last: continuations.Last = lambda message: None,
) -> Released | Cancelling | Closed | Missing:
    """End the request of a task, or mark one that runs: :func:`continuations.cancel`, committed."""
    outcome = store.run(continuations.cancel, settings.root, task_id, last)
    if isinstance(outcome, Released):
        logger.event("request.released", task_id=task_id, state=outcome.state, reason="cancelled")
    return outcome


def revoke(store: Store, root: str, reservation_id: uuid.UUID, reason: str) -> bool:
    """Give back the hold of a request that will not run; false where it runs or has ended.

    True also where the ledger does not know it.
    """
    outcome = store.run(claims.revoke, root, reservation_id, reason)
    if isinstance(outcome, Released):
        logger.event(
            "request.released", task_id=outcome.task_id, state=outcome.state, reason=reason
        )
    return isinstance(outcome, (Released, Missing))
