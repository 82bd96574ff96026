"""Admission: a request is reserved together with its message, refused, or parked.

One transaction in each case, and one round trip on PostgreSQL where it is reserved or refused.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from celery_budget import watching
from celery_budget.core.backpressure import Outlook
from celery_budget.core.identity import new_id
from celery_budget.core.lanes import Lane
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    Admitted,
    AlreadyReserved,
    Backlogged,
    Conflict,
    Crowded,
    Full,
    Line,
    Missing,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
    Skipped,
    Tried,
    Unknown,
)
from celery_budget.settings import Settings
from celery_budget.store import (
    Connection,
    Stop,
    Store,
    attempts,
    batch,
    canvases,
    continuations,
    outbox,
    parked,
    plans,
    refusals,
    requests,
    unclaimed,
    waiting,
)
from celery_budget.store import outlook as looks
from celery_budget.store.batch import TURNED_AWAY
from celery_budget.store.requests import error_of
from celery_budget.tracing import NOTHING, Span

__all__ = [
    "Publication",
    "Transactions",
    "activate",
    "admit",
    "admit_many",
    "count_refusal",
    "enqueue",
    "outlook",
    "outlook_through",
    "retry",
    "retry_unclaimed",
]

P = ParamSpec("P")
R = TypeVar("R")


class Transactions(Protocol):
    """Where store functions run: in a store's own transactions, or in a caller's."""

    def run(
        self, function: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call ``function(connection, …)`` in one transaction."""


def admit(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    message: WireMessage,
    *,
    continuation: bool = False,
    delivered: bool = False,
    last: bool = True,
    stop: Stop | None = None,
    span: Span = NOTHING,
) -> Admitted:
    """Reserve ``request`` with ``message`` in the outbox, or refuse it, or park it.

    :param continuation: it continues work that runs: what does not fit is parked instead of
        refused, and a fault of the store is waited out instead of raised.
        What is new waits by its own wish (``request.parks``), once however often it is asked for.
    :param delivered: a worker has the message already; it is kept, not published.
    :param last: false where another lane is tried next: what does not fit here is refused,
        uncounted, and not parked.
    :param span: gets the outcome.
    :raises ParkingFull, UnknownBudget, RequestConflict, OutboxFull, QueueFull, StoreError: nothing
        was changed.
    """
    began = time.perf_counter()
    tried = _admit(
        store,
        settings,
        request,
        message,
        continuation=continuation,
        delivered=delivered,
        last=last,
        stop=stop,
    )
    watching.admission(settings, request, tried, began, last=last, span=span)
    if isinstance(tried, (Crowded, Backlogged, Full, Unknown, Conflict, Skipped)):
        raise error_of(tried)
    return tried


def _admit(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    message: WireMessage,
    *,
    continuation: bool,
    delivered: bool,
    last: bool,
    stop: Stop | None,
) -> Tried | Parked:
    delivered_us = settings.republish_us if delivered else None
    parks = request.parks and last
    if continuation and not last:
        return store.wait_out(
            stop,
            continuations.try_continued,
            request,
            message,
            delivered_us=delivered_us,
            lock_ms=settings.lock_ms,
        )
    if continuation:
        return store.wait_out(
            stop,
            continuations.reserve_or_park,
            request,
            message,
            delivered_us=delivered_us,
            lock_ms=settings.lock_ms,
            park_us=settings.park_us,
        )
    # What is not enforced takes several statements.
    run = store.run_statement if request.enforced else store.run
    tried = run(
        requests.try_reserve,
        request,
        message,
        delivered_us=delivered_us,
        note=last and not parks,
        lock_ms=settings.lock_ms,
        bound=None if delivered else settings.max_outbox,
        queues=True,
    )
    if isinstance(tried, Refused) and parks:
        tried = store.run(
            continuations.park_new,
            request,
            message,
            lock_ms=settings.lock_ms,
            park_us=settings.park_us,
            bound=settings.max_outbox,
            most=settings.max_parked,
        )
    return tried


@dataclass(frozen=True)
class Publication:
    """One message that is to go out with others, and the request to be admitted for it.

    :ivar request: none for a message that draws on no budget.
    :ivar message: none for a later step of a chain that is reserved whole.
    :ivar unit: of several with one number all are admitted, or none.
    :ivar continuation: it continues work that runs: what does not fit is parked, by itself.
    :ivar parent: the reservation whose attempt publishes a message without a request.
    :ivar needs: the reservation without which such a message must not go out: it tells of it.
    :ivar canvas: the canvas with a request id that it is part of. What of that has no budget goes
        out with the first of it that is admitted, and never again.
    :ivar prepare: of what is no message: what is to be done before those of its unit go out, and
        goes with those without a budget. Called with no budget locked, but where it fits only
        after a look; again it does nothing.
    :ivar trace: headers with the context of the span that it was made in.
    :ivar message_id: of a message without a request: by it the same call finds it written.
    """

    request: ReserveRequest | None
    message: WireMessage | None
    unit: int = 0
    continuation: bool = False
    parent: uuid.UUID | None = None
    needs: uuid.UUID | None = None
    canvas: str | None = None
    prepare: Callable[[], object] | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    message_id: uuid.UUID = field(default_factory=new_id)


def admit_many(
    transactions: Transactions,
    settings: Settings,
    publications: Sequence[Publication],
    *,
    partial: bool = False,
) -> list[Tried | Parked | None]:
    """Admit several publications in one transaction and a fixed number of statements.

    All or none; with ``partial`` all or none of each unit. A unit of one request that is to wait
    where it does not fit is parked then, and turns away nothing else. Messages without a budget go
    with the others of theirs; those of a canvas with a request id once, also where that is admitted
    by two at a time. What continues running work is parked where it does not fit, by itself.

    :return: what came of each, in their order; none for those without a request. An error of one is
        an outcome here: none raises but where the whole batch fails.
    :raises StoreError: nothing was changed.
    """
    if not publications:
        return []
    began = time.perf_counter()
    outcomes = transactions.run(_admit_many, settings, publications, partial)
    for one, outcome in zip(publications, outcomes, strict=True):
        if one.request is not None and not isinstance(outcome, Skipped):
            watching.admission(settings, one.request, outcome, began)
    return outcomes


def _admit_many(
    connection: Connection,
    settings: Settings,
    publications: Sequence[Publication],
    partial: bool,
) -> list[Tried | Parked | None]:
    outbox.lock_orders(
        connection, settings.root, [one.message for one in publications if one.message]
    )
    again = _gone_before(connection, settings.root, publications)
    prepared: set[uuid.UUID] = set()
    if any(one.prepare is not None and one.message_id not in again for one in publications):
        with canvases.undone(connection):
            looked = _admit_requests(connection, settings, publications, partial)
        prepared = _prepare(_written(publications, looked, again, partial), prepared)
    outcomes = _admit_requests(connection, settings, publications, partial)
    written = _written(publications, outcomes, again, partial)
    # What did not fit when it was looked at may fit by now; then its budgets are locked meanwhile.
    _prepare(written, prepared)
    outbox.enqueue_plain(
        connection,
        settings.root,
        [(one.message_id, one.message, one.parent) for one in written if one.message is not None],
    )
    return outcomes


def _prepare(written: Sequence[Publication], prepared: set[uuid.UUID]) -> set[uuid.UUID]:
    """Do what is to be done before publications go out, but what is ``prepared``; what it was.

    Called first for what a look says, that was undone: what is refused leaves nothing behind unless
    its budget went in between, and no budget is locked for as long as a result backend takes.
    """
    done = set()
    for one in written:
        if one.prepare is not None and one.message_id not in prepared:
            one.prepare()
            done.add(one.message_id)
    return done


def _admit_requests(
    connection: Connection,
    settings: Settings,
    publications: Sequence[Publication],
    partial: bool,
) -> list[Tried | Parked | None]:
    outcomes: list[Tried | Parked | None] = [None] * len(publications)
    for continuation in (True, False):
        numbers = [
            number
            for number, one in enumerate(publications)
            if one.request is not None and one.continuation is continuation
        ]
        some = [publications[number] for number in numbers]
        if continuation:
            tried: Sequence[Tried | Parked] = _admit_or_park(connection, settings, some)
        else:
            tried = _admit_units(connection, settings, some, partial)
        for number, outcome in zip(numbers, tried, strict=True):
            outcomes[number] = outcome
    return outcomes


def _gone_before(
    connection: Connection, root: str, publications: Sequence[Publication]
) -> set[uuid.UUID]:
    """Return the ids of what has no budget and went out with an earlier admission of its canvas.

    That is where anything of its unit was admitted or parked before, even if it was released since;
    of a unit without a budget, anything of the canvas. Locks the canvases.
    """
    named = [(one, canvas) for one, canvas in _with_canvases(publications) if canvas is not None]
    if not named:
        return set()
    canvases.lock(connection, root, {canvas for _, canvas in named})
    task_ids = [one.request.task_id for one, _ in named if one.request is not None]
    known = canvases.known(connection, root, task_ids)
    # The same canvas may come twice in one batch.
    first: dict[str, int] = {}
    begun: dict[tuple[int | None, str], bool] = {}
    for one, canvas in named:
        if one.request is not None:
            task_id = one.request.task_id
            before = task_id in known or first.setdefault(task_id, one.unit) != one.unit
            for whole in ((one.unit, canvas), (None, canvas)):
                begun[whole] = begun.get(whole, False) or before
    return {
        one.message_id
        for one, canvas in named
        if one.request is None
        and one.needs is None
        and begun.get((one.unit, canvas), begun.get((None, canvas), False))
    }


def _with_canvases(
    publications: Sequence[Publication],
) -> list[tuple[Publication, str | None]]:
    """Return publications, each with the canvas it belongs to.

    What Celery adds to a canvas (``celery.chord_unlock``) is part of its unit.
    """
    of_unit = {one.unit: one.canvas for one in publications if one.canvas is not None}
    return [(one, one.canvas or of_unit.get(one.unit)) for one in publications]


def _written(
    publications: Sequence[Publication],
    outcomes: Sequence[Tried | Parked | None],
    again: set[uuid.UUID],
    partial: bool,
) -> list[Publication]:
    """Return what has no budget and goes out, by what came of the requests.

    :param again: what went out before.
    """
    both = list(zip(publications, outcomes, strict=True))
    turned = {
        one.unit
        for one, outcome in both
        if isinstance(outcome, TURNED_AWAY) and not one.continuation
    }
    if turned and not partial:
        return []
    admitted = [(one, outcome) for one, outcome in both if isinstance(outcome, (Reserved, Parked))]
    reserved = {outcome.reservation_id for _, outcome in both if isinstance(outcome, Reserved)}
    begun = {one.canvas for one, _ in admitted}
    return [
        one
        for one, canvas in _with_canvases(publications)
        if one.request is None
        and one.message_id not in again
        and one.unit not in turned
        and (one.needs is None or one.needs in reserved)
        and canvas in (None, *begun)
    ]


def _admit_units(
    connection: Connection,
    settings: Settings,
    publications: Sequence[Publication],
    partial: bool,
) -> list[Tried]:
    asked = _asked(publications)
    if not asked:
        return []
    parks = _parks(connection, settings, publications)
    request, message = asked[0]
    if len(asked) == 1 and message is not None:
        # By the function, where there is one: one statement.
        tried = [
            requests.try_reserve(
                connection,
                request,
                message,
                note=not parks.numbers,
                lock_ms=settings.lock_ms,
                bound=settings.max_outbox,
                queues=True,
            )
        ]
        if parks.numbers and isinstance(tried[0], Refused):
            heavy = waiting.never(connection, settings.root, message.queue, request.weight)
            tried = [heavy or tried[0]]
        if parks.numbers and parks.room <= 0 and isinstance(tried[0], Refused):
            refusals.note_refusals(connection, settings.root, [(request, tried[0])])
            tried = [Crowded(tried[0], parks.bound)]
    else:
        tried = batch.reserve_many(
            connection,
            settings.root,
            asked,
            units=[one.unit for one in publications] if partial else None,
            bound=settings.max_outbox,
            queues=True,
            parks=parks,
        )
    return [
        Parked(parked.park(connection, request, message, settings.park_us, outcome))
        if number in parks.numbers and isinstance(outcome, Refused) and message is not None
        else outcome
        for number, ((request, message), outcome) in enumerate(zip(asked, tried, strict=True))
    ]


def _parks(
    connection: Connection, settings: Settings, publications: Sequence[Publication]
) -> batch.Parks:
    """Return which of some new requests wait where they do not fit.

    Those that are published by themselves: what is part of a canvas is admitted with all of it.
    """
    of_unit = Counter(one.unit for one in publications if one.request is not None)
    numbers = frozenset(
        number
        for number, one in enumerate(publications)
        if one.request is not None and one.request.parks and of_unit[one.unit] == 1
    )
    if not numbers:
        return batch.Parks()
    most = settings.max_parked
    room = most - parked.count(connection, settings.root, most)
    return batch.Parks(numbers, room, most)


def _admit_or_park(
    connection: Connection, settings: Settings, publications: Sequence[Publication]
) -> list[Tried | Parked]:
    if not publications:
        return []
    asked = _asked(publications)
    ended = continuations.ended_unrun(connection, settings.root, [request for request, _ in asked])
    new = [one for one in asked if one[0].reservation_id not in ended]
    tried = (
        batch.reserve_many(connection, settings.root, new, units=range(len(new)), note=False)
        if new
        else ()
    )
    outcomes: dict[uuid.UUID, Tried | Parked] = dict(ended)
    for (request, message), outcome in zip(new, tried, strict=True):
        outcomes[request.reservation_id] = (
            Parked(parked.park(connection, request, message, settings.park_us, outcome))
            if isinstance(outcome, Refused) and message is not None
            else outcome
        )
    return [outcomes[request.reservation_id] for request, _ in asked]


def _asked(publications: Sequence[Publication]) -> list[batch.Asked]:
    return [(one.request, one.message) for one in publications if one.request is not None]


def retry(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    message: WireMessage,
    attempt: int,
    claim_id: uuid.UUID,
    stop: Stop | None = None,
    span: Span = NOTHING,
) -> Reserved | Parked | None:
    """Write the message of a running attempt's retry, blocked until that attempt ends.

    Raises the hold to what was used plus the estimate; what does not fit is parked. None, and
    nothing changed, where the attempt has lost its fence. Waits out faults of the store.

    :param request: carries the reservation's own id and the retry's number.
    :param span: gets the outcome.
    """
    began = time.perf_counter()
    written = store.wait_out(
        stop, attempts.write_retry, request, message, attempt, claim_id, settings.park_us
    )
    if written is not None:
        watching.admission(settings, request, written, began, span=span)
    return written


def retry_unclaimed(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    message: WireMessage,
    retries: int,
    stop: Stop | None = None,
    span: Span = NOTHING,
) -> Reserved | Parked | None:
    """Write the message of a retry by a delivery that has not claimed, in place of its own.

    As :func:`retry`; what it holds stays held. None, and nothing changed, where the delivery's turn
    is over, as where another one runs.

    :param retries: the delivery's.
    :param stop: ends waiting for the ledger.
    :param span: gets the outcome.
    :raises StoreError: where it was ended; nothing is known to have been written.
    """
    began = time.perf_counter()
    written = store.wait_out(stop, unclaimed.retry, request, message, retries, settings.park_us)
    if written is not None:
        watching.admission(settings, request, written, began, span=span)
    return written


def activate(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    message: WireMessage,
    stop: Stop | None = None,
    span: Span = NOTHING,
) -> Reserved | AlreadyReserved | Missing:
    """Write the message of a planned step whose turn has come; waits out faults of the store.

    :param span: gets the outcome.
    """
    began = time.perf_counter()
    reached = store.wait_out(stop, plans.activate, request, message)
    if not isinstance(reached, Missing):
        watching.admission(settings, request, reached, began, span=span)
    return reached


def enqueue(
    store: Store,
    settings: Settings,
    message: WireMessage,
    parent: uuid.UUID | None = None,
    stop: Stop | None = None,
) -> bool:
    """Write a message that draws on no budget; false where its parent has written it before.

    :param parent: the reservation whose attempt publishes it after its call: then faults of the
        store are waited out.
    :raises StoreError: where it has none; nothing is known to have been written.
    """
    root, outbox_id = settings.root, new_id()
    if parent is None:
        return store.run(outbox.enqueue, root, message, outbox_id=outbox_id)
    return store.wait_out(
        stop, outbox.enqueue, root, message, outbox_id=outbox_id, parent_id=parent
    )


def count_refusal(
    store: Store,
    settings: Settings,
    budget: str,
    stage: str,
    task_name: str,
    requested: int,
    stop: Stop | None = None,
) -> None:
    """Count a request that was turned away for another reason than its budget's balance."""
    store.wait_out(
        stop,
        refusals.note_turned_away,
        settings.root,
        new_id(),
        budget,
        stage,
        task_name,
        requested,
    )


def outlook(
    store: Store,
    settings: Settings,
    lines: Sequence[Line],
    finishing: bool = False,
    queue: str | None = None,
    *,
    enforced: bool = True,
) -> Outlook:
    """Return whether a request with ``lines`` would be admitted now; changes and locks nothing.

    :param queue: where its message would go; none where its lane is not looked at.
    :param enforced: whether it is refused where it does not fit.
    :raises StoreError: where the ledger cannot be read.
    """
    found = store.read(
        looks.look,
        settings.root,
        lines,
        finishing,
        settings.max_outbox,
        queue,
        enforced=enforced,
    )
    return Outlook(True) if found is None else Outlook(False, error_of(found))


def outlook_through(
    store: Store,
    settings: Settings,
    ways: Sequence[tuple[Lane, Sequence[Line]]],
    weight: int,
    finishing: bool = False,
    *,
    enforced: bool = True,
    waits: bool = False,
    stop: Stop | None = None,
) -> tuple[int, Outlook]:
    """Return which of several lanes would take a request first, and whether it does; as above.

    :param ways: lanes in the order in which they are tried, with what is drawn on there.
    :param waits: wait a fault of the store out.
    :raises StoreError: where the ledger cannot be read.
    """
    of = (settings.root, ways, weight, finishing, settings.max_outbox)
    if waits:
        number, found = store.wait_out_reading(stop, looks.look_through, *of, enforced=enforced)
    else:
        number, found = store.read(looks.look_through, *of, enforced=enforced)
    return number, Outlook(True) if found is None else Outlook(False, error_of(found))
