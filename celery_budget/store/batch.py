"""Several requests admitted together: one transaction, a fixed number of statements.

One request on SQLite is a batch of one. The same decisions as those of the PostgreSQL function
``budget_reserve``; one contract suite holds both to that.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.draws import (
    Draw,
    Level,
    decide,
    limits_in_force,
    queued,
    short,
    unlimited,
)
from celery_budget.core.lanes import HEAVY, Load
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    START,
    AlreadyReserved,
    Backlogged,
    Conflict,
    Crowded,
    Full,
    Refused,
    Reserved,
    ReserveRequest,
    Skipped,
    Tried,
    Unknown,
)
from celery_budget.errors import StoreError
from celery_budget.store import (
    backlog,
    budgets,
    deadlines,
    declaring,
    levels,
    outbox,
    pace,
    parked,
    stripes,
    waiting,
)
from celery_budget.store.balances import Key, Move, lock_balances, move
from celery_budget.store.drivers import is_lent
from celery_budget.store.insert import insert_many
from celery_budget.store.refusals import note_refusals, note_waived
from celery_budget.store.schema import lines, now_us, reservations
from celery_budget.store.standbys import wait_for_standbys
from celery_budget.store.unready import Unready

#: How many keys are looked for by one statement: PostgreSQL's parser has its depth.
MOST_KEYS = 2000

#: How budgets stand, the names of those that a template could make, and which stripes are locked
#: where some have several.
_Standing = tuple[dict[str, Level], set[str], stripes.Held | None]
#: Of new requests what is parked, by key, and the budgets that something else goes ahead at.
_Before = tuple[dict[tuple[str, str, int], Any], set[str]]
#: Outcomes for which a batch that is all or none is none.
TURNED_AWAY = (Refused, Crowded, Unknown, Conflict, Backlogged, Full)

#: Outcomes that are no mistake of the caller's: they are waived for what is not enforced.
WAIVED = (Refused, Backlogged, Full)

__all__ = [
    "MOST_KEYS",
    "TURNED_AWAY",
    "Parks",
    "columns_of",
    "first_unknown",
    "insert_lines",
    "moved",
    "repeated",
    "reserve_many",
]

#: A request and its message; none for a step that is planned, or that starts in its own process.
Asked = tuple[ReserveRequest, WireMessage | None]
#: What makes a request one and the same: root, owner, request id, nesting.
RequestKey = tuple[str, str, int]


@dataclass(frozen=True)
class Parks:
    """Which requests of a batch are parked where they do not fit.

    :ivar numbers: those, counted from 0.
    :ivar room: how many of them may be.
    :ivar bound: how much may be parked in all.
    """

    numbers: frozenset[int] = frozenset()
    room: int = 0
    bound: int = 0


def reserve_many(
    connection: Connection,
    root: str,
    asked: Sequence[Asked],
    *,
    units: Sequence[int] | None = None,
    delivered_us: int | None = None,
    note: bool = True,
    bound: int | None = None,
    queues: bool = False,
    parks: Parks | None = None,
) -> list[Tried]:
    """Admit requests of ``root`` in one transaction; what came of each, in their order.

    All of them or, where one does not fit, none (the others are ``Skipped``). One that was admitted
    before fits. A request that comes twice in one batch is one, be it admitted or not.

    Locks the messages' order keys, the new reservations' keys in order, then all balances in order:
    of two batches that meet the second waits for the first. Everything is decided behind the locks.

    :param units: which requests belong together, a number for each: all or none of a unit, one unit
        after another in the order of their first requests. All are one unit unless given.
    :param delivered_us: as for :func:`celery_budget.store.requests.reserve`.
    :param note: count refusals in the reports.
    :param bound: as for :func:`celery_budget.store.requests.reserve`; beyond it what is new is
        ``Backlogged``.
    :param queues: as for :func:`celery_budget.store.requests.try_reserve`.
    :param parks: which of them wait where they do not fit: they turn away nothing else, and are
        ``Refused`` where the caller is to park them, or ``Crowded``.
    :raises Unready: as for :func:`celery_budget.store.requests.reserve`.
    """
    outbox.lock_orders(connection, root, [message for _, message in asked if message])
    requests = deadlines.fixed(connection, [request for request, _ in asked])
    asked = [(request, message) for request, (_, message) in zip(requests, asked, strict=True)]
    found, inserted = _insert(connection, root, asked, delivered_us)
    many = backlog.waiting(connection, root, bound) if inserted and bound is not None else 0
    full = None if bound is None or many < bound else Backlogged(many, bound)
    # Nothing more is asked where no lane was ever made.
    bounded = bound is not None and not delivered_us and any(row.has_lanes for row in inserted)
    fed = {message.queue for _, message in asked if message} if bounded else set()
    locked = not full or any(not request.enforced for request, _ in asked)
    standing = _standing(connection, root, asked, locked) if inserted else ({}, set(), None)
    before = _before(connection, root, asked) if inserted and queues else ({}, set())
    trial = _Trial(
        standing, found, {row.reservation_id for row in inserted}, full, before, parks or Parks()
    )
    trial.fed = waiting.fed(connection, root, fed, note=not is_lent(connection))
    if len(found) > len(inserted) or before[0]:
        wait_for_standbys(connection)
    for unit in _by_unit(asked, units):
        trial.decide(unit)
    trial.check_windows(root)
    admitted = [request for (request, _), _ in trial.admitted]
    kept = {request.reservation_id for request in admitted}
    _delete(connection, root, {row.reservation_id for row in inserted} - kept)
    drawn = _drawn(connection, root, trial.admitted, standing[2], asked)
    _write(connection, root, trial.admitted, delivered_us, drawn)
    note_waived(
        connection,
        root,
        [
            (one.reservation_id, one.stage, one.task_name, trial.waived[one.reservation_id])
            for one in admitted
            if one.reservation_id in trial.waived
        ],
    )
    outcomes = [trial.outcomes[number] for number in range(len(asked))]
    if note:
        outcomes = _with_paces(connection, root, outcomes)
        refused = []
        for number, ((request, _), outcome) in enumerate(zip(asked, outcomes, strict=True)):
            if isinstance(outcome, Crowded):
                refused.append((request, outcome.refused))
            elif isinstance(outcome, Refused) and number not in trial.parks.numbers:
                refused.append((request, outcome))
        note_refusals(connection, root, refused)
    return outcomes


def _with_paces(connection: Connection, root: str, outcomes: Sequence[Tried]) -> list[Tried]:
    """Return outcomes, refusals with how soon their budgets may have room."""
    short_of = {outcome.budget for outcome in outcomes if isinstance(outcome, Refused)}
    if not short_of:
        return list(outcomes)
    found = pace.paces(connection, root, short_of)

    def told(outcome: Tried) -> Tried:
        if isinstance(outcome, Refused):
            return replace(outcome, pace=found.get(outcome.budget))
        if isinstance(outcome, Skipped) and isinstance(outcome.because, Refused):
            return Skipped(told(outcome.because))
        return outcome

    return [told(outcome) for outcome in outcomes]


def _by_unit(asked: Sequence[Asked], units: Sequence[int] | None) -> list[list[tuple[int, Asked]]]:
    """Return the requests of each unit with their numbers, units in the order they begin."""
    of: dict[int, list[tuple[int, Asked]]] = {}
    for number, one in enumerate(asked):
        of.setdefault(0 if units is None else units[number], []).append((number, one))
    return list(of.values())


class _Trial:
    """Decides units of requests, each with what those before it have left.

    :ivar outcomes: by the number of the request.
    :ivar admitted: those to be written, and what they draw.
    :ivar fed: the lanes that turn new work away, by the queues they feed.
    :ivar waived: what requests that are not enforced would have been refused with, by their ids.
    """

    def __init__(
        self,
        standing: _Standing,
        found: dict[RequestKey, Any],
        new: set[uuid.UUID],
        full: Backlogged | None,
        before: _Before,
        parks: Parks,
    ) -> None:
        self.outcomes: dict[int, Tried] = {}
        self.admitted: list[tuple[Asked, tuple[Draw, ...]]] = []
        self.fed: dict[str, waiting.Fed] = {}
        self.waived: dict[uuid.UUID, Refused | Backlogged | Full] = {}
        self._known, self._possible, _ = standing
        self._found = found
        self._new = new
        self._full = full
        self._parked, self._ahead = before
        self.parks = parks
        self._may_park = parks.room
        self._turned: dict[RequestKey, Tried] = {}
        self._heads: dict[uuid.UUID, Tried] = {}

    def decide(self, unit: list[tuple[int, Asked]]) -> None:
        """Decide one unit: all of it, or none and nothing taken."""
        taken: list[tuple[Asked, tuple[Draw, ...]]] = []
        for number, one in unit:
            outcome = self._decide_one(one, taken)
            if isinstance(outcome, Refused) and number in self.parks.numbers:
                outcome = self._full_lane(*one, HEAVY) or self._crowded(outcome)
            self.outcomes[number] = outcome
        # Left out here is what an earlier unit asked for as well, and was turned away with.
        if not any(self._is_away(number) for number, _ in unit):
            self.admitted.extend(taken)
            return
        for (request, message), draws in taken:
            _take(self._known, draws, -1)
            self._hold(request, message, -1)
        self._tell_whole(unit, taken)
        first = next(self.outcomes[number] for number, _ in unit if self._is_away(number))
        skipped = Skipped(first.because if isinstance(first, Skipped) else first)
        dropped = {request.reservation_id for (request, _), _ in taken}
        self._turned.update((key_of(request), skipped) for (request, _), _ in taken)
        for number, _ in unit:
            outcome = self.outcomes[number]
            here = isinstance(outcome, (Reserved, AlreadyReserved))
            waits = isinstance(outcome, Refused) and number in self.parks.numbers
            if waits or (here and outcome.reservation_id in dropped):  # type: ignore[union-attr]
                self.outcomes[number] = skipped

    def _is_away(self, number: int) -> bool:
        """Tell whether an outcome turns away all of its unit; not what is to be parked."""
        outcome = self.outcomes[number]
        if isinstance(outcome, Refused):
            return number not in self.parks.numbers
        return isinstance(outcome, (*TURNED_AWAY, Skipped))

    def _crowded(self, refused: Refused) -> Refused | Crowded:
        """Return what becomes of one that is to be parked: it is, while there is room."""
        if self._may_park <= 0:
            return Crowded(refused, self.parks.bound)
        self._may_park -= 1
        return refused

    def _tell_whole(
        self, unit: list[tuple[int, Asked]], taken: list[tuple[Asked, tuple[Draw, ...]]]
    ) -> None:
        """Have refusals tell what the whole unit asked of the budget that was short.

        What would wait for the others of its own unit would wait for ever.
        """
        asked: Counter[str] = Counter()
        for _, draws in taken:
            asked.update({draw.budget: draw.amount for draw in draws})
        refused = {
            key_of(request): outcome
            for number, (request, _) in unit
            if isinstance(outcome := self.outcomes[number], Refused) and self._is_away(number)
        }
        for outcome in refused.values():
            asked[outcome.budget] += outcome.requested
        for number, (request, _) in unit:
            before = self.outcomes[number]
            if not isinstance(before, Refused) or asked[before.budget] == before.requested:
                continue
            limit, blocked = limits_in_force(self._known, before.budget)[before.budget]
            level, amount = self._known[before.budget], asked[before.budget]
            whole = short(level, limit, blocked, amount, request.finishing)
            self.outcomes[number] = whole or before

    def _decide_one(self, one: Asked, taken: list[tuple[Asked, tuple[Draw, ...]]]) -> Tried:
        request, key = one[0], key_of(one[0])
        head = self._heads.get(request.plan) if request.plan and request.step else None
        if isinstance(head, AlreadyReserved):
            # The chain was admitted before, and what follows in it with it, whatever became of it.
            return head
        outcome = self._decide_by_key(one, key, taken)
        if request.step == 0:
            self._heads[request.reservation_id] = outcome
        return outcome

    def _decide_by_key(
        self, one: Asked, key: RequestKey, taken: list[tuple[Asked, tuple[Draw, ...]]]
    ) -> Tried:
        request, existing = one[0], self._found[key]
        outcome = repeated(request, existing)
        if key in self._turned:
            return outcome if isinstance(outcome, Conflict) else self._turned[key]
        if existing.reservation_id not in self._new:
            return outcome
        # The first of its key; what follows it in this batch finds it.
        self._new.remove(existing.reservation_id)
        decided = self._decide_new(one)
        if not isinstance(decided, tuple):
            self._turned[key] = decided
            return decided
        taken.append((one, decided))
        _take(self._known, decided, 1)
        self._hold(request, one[1], 1)
        if isinstance(outcome, Reserved) and request.reservation_id in self.waived:
            return replace(outcome, waived=self.waived[request.reservation_id])
        return outcome

    def _decide_new(self, one: Asked) -> tuple[Draw, ...] | Tried:
        request, message = one
        known = self._parked.get(key_of(request))
        if known is not None:
            fingerprint = json.loads(known.request)["fingerprint"]
            return parked.same(request, known.parked_id, fingerprint)
        decided = self._enforce(request, message)
        if request.enforced or not isinstance(decided, WAIVED):
            return decided
        admitted: tuple[Draw, ...] | Tried = decide(
            request.lines, unlimited(self._known), request.finishing
        )
        if isinstance(admitted, tuple):
            # What is too heavy for its lane would be held by that for ever.
            admitted = self._full_lane(request, message, HEAVY) or admitted
        if isinstance(admitted, tuple):
            self.waived[request.reservation_id] = decided
        return admitted

    def _enforce(
        self, request: ReserveRequest, message: WireMessage | None
    ) -> tuple[Draw, ...] | Tried:
        decided: tuple[Draw, ...] | Tried = _decide(request, self._known, self._possible)
        if isinstance(decided, tuple) and not request.finishing:
            decided = queued(self._known, decided, self._ahead) or decided
        if isinstance(decided, tuple):
            decided = self._full or self._full_lane(request, message) or decided
        return decided

    def _full_lane(
        self, request: ReserveRequest, message: WireMessage | None, *reasons: str
    ) -> Full | None:
        fed = None if message is None else self.fed.get(message.queue)
        return None if fed is None else waiting.full(fed, request.weight, *reasons)

    def _hold(self, request: ReserveRequest, message: WireMessage | None, sign: int) -> None:
        """Count what a lane is to hold, for the decisions that follow; or take that back."""
        fed = None if message is None else self.fed.get(message.queue)
        if fed is not None:
            fed.waiting += Load(sign, sign * request.weight)

    def check_windows(self, root: str) -> None:
        """Check that what is drawn on has its windows.

        :raises Unready: where one has to be opened before.
        """
        unopened = [
            draw.budget
            for _, draws in self.admitted
            for draw in draws
            if self._known[draw.budget].window_us is None
        ]
        if unopened:
            raise declaring.not_ready(root, unopened)


def _before(connection: Connection, root: str, asked: Sequence[Asked]) -> _Before:
    return parked.before(connection, root, [request for request, _ in asked])


def key_of(request: ReserveRequest) -> RequestKey:
    """Return what a request is known by within its root."""
    return request.owner, request.request_id, request.nesting


def _insert(
    connection: Connection, root: str, asked: Sequence[Asked], delivered_us: int | None
) -> tuple[dict[RequestKey, Any], list[Any]]:
    """Insert the reservations that are not there; return all that are then, and the new ones.

    In the order of their keys, so that of two batches with the same ones the second waits.
    """
    first: dict[RequestKey, ReserveRequest] = {}
    states: dict[RequestKey, str] = {}
    queues: dict[RequestKey, str] = {}
    due: dict[RequestKey, int] = {}
    for request, message in asked:
        first.setdefault(key_of(request), request)
        written = "planned" if message is None else "reserved"
        states.setdefault(key_of(request), written if delivered_us is None else "published")
        if message is not None:
            queues.setdefault(key_of(request), message.queue)
            due.setdefault(key_of(request), message.due_us)
    fixed = {
        "attempts": 0,
        "deliveries": 0,
        "unmetered": False,
        "over": False,
    }
    rows = [
        {
            **columns_of(first[key]),
            "state": states[key],
            "fed_queue": queues.get(key),
            # None for at once, as where a worker has it already.
            "due_us": (due.get(key) or None) if delivered_us is None else None,
            **fixed,
        }
        for key in sorted(first)
    ]
    seen = (
        reservations.c.reservation_id,
        reservations.c.task_id,
        reservations.c.fingerprint,
        reservations.c.owner,
        reservations.c.request_id,
        reservations.c.nesting,
    )
    inserted: list[Any] = list(
        insert_many(
            connection,
            reservations,
            rows,
            (*seen, waiting.has_lanes(root)),
            more={"fed_queue": sa.String()},
            made=lambda value: {
                "created_us": now_us(),
                "lane": waiting.feeding(root, value("fed_queue")),
            },
            new=True,
        )
    )
    found = {(row.owner, row.request_id, row.nesting): row for row in inserted}
    missing = [request for key, request in sorted(first.items()) if key not in found]
    for page in range(0, len(missing), MOST_KEYS):
        some = missing[page : page + MOST_KEYS]
        same_key = sa.tuple_(
            reservations.c.owner, reservations.c.request_id, reservations.c.nesting
        ).in_([key_of(request) for request in some])
        # A repeat of this very call, after a lost connection, may find even what has been
        # released since.
        same_call = reservations.c.reservation_id.in_([one.reservation_id for one in some])
        existing = connection.execute(
            sa.select(*seen)
            .where(
                reservations.c.root == root,
                sa.or_(same_call, sa.and_(same_key, reservations.c.state != "released")),
            )
            .order_by(reservations.c.state == "released")
        )
        for row in existing:
            found.setdefault((row.owner, row.request_id, row.nesting), row)
    for owner, request_id, nesting in first:
        if (owner, request_id, nesting) not in found:
            said = (
                f"request {request_id!r} of {owner!r} was released while it was repeated; try again"
            )
            raise StoreError(said, True)
    return found, inserted


def _standing(connection: Connection, root: str, asked: Sequence[Asked], locked: bool) -> _Standing:
    """Return how all budgets stand that are drawn on, their balances being ``locked``.

    They are not where nothing is admitted anyway, and it is only told which budgets are short.
    Read twice on PostgreSQL: to know what to lock, and again behind the locks.
    """
    names = {line.budget for request, _ in asked for line in request.lines}
    requests = [request for request, _ in asked]
    known = levels.levels_of(connection, root, names)
    if connection.dialect.name == "sqlite" or not locked:
        return _with_templates(connection, root, requests, known, None)
    keys, held = _windows(known), None
    if any(level.spread for level in known.values()):
        most = stripes.demand(known, (request.lines for request in requests))
        held = stripes.hold(connection, root, keys, most, _pick(asked))
    else:
        lock_balances(connection, root, [Key(*key) for key in keys.items()])
    again = levels.levels_of(connection, root, names, keys)
    is_spread = any(level.spread for level in again.values())
    if _windows(again) != keys or (is_spread and held is None):
        raise moved(min(names))
    return _with_templates(connection, root, requests, again, held)


def _pick(asked: Sequence[Asked]) -> int:
    return stripes.pick_of(asked[0][0].reservation_id.bytes)


def _drawn(
    connection: Connection,
    root: str,
    admitted: Sequence[tuple[Asked, tuple[Draw, ...]]],
    held: stripes.Held | None,
    asked: Sequence[Asked],
) -> dict[str, int]:
    """Return the stripe that is drawn on of each budget; of what is not told it is the first.

    :raises Unready: where a stripe that was locked alone has not the room it was seen with.
    """
    if held is None or not admitted:
        return {}
    amounts: Counter[str] = Counter()
    of: dict[str, int] = {}
    for _, draws in admitted:
        amounts.update({draw.budget: draw.amount for draw in draws})
        of.update({draw.budget: draw.window_us for draw in draws})
    found = stripes.gather(connection, root, held, of, amounts, _pick(asked))
    if found is None:
        raise moved(min(of))
    return found


def _windows(known: dict[str, Level]) -> dict[str, int]:
    return {name: level.window_us for name, level in known.items() if level.window_us is not None}


def _with_templates(
    connection: Connection,
    root: str,
    requests: Sequence[ReserveRequest],
    known: dict[str, Level],
    held: stripes.Held | None,
) -> _Standing:
    """Return ``known``, and the names that a template could make, where nothing has to be made now.

    Nothing is made for a request that names another budget that does not exist.

    :raises Unready: where something has to be made first.
    """
    asked = [[line.budget for line in request.lines] for request in requests]
    unseen = {name for names in asked for name in names if name not in known}
    if not unseen:
        return known, set(), held
    possible = set(declaring.templates_for(connection, root, unseen))
    wanted = (names for names in asked if not unseen.intersection(names) - possible)
    missing = sorted(unseen.intersection(chain.from_iterable(wanted)))
    if missing:
        raise declaring.not_ready(root, missing)
    return known, possible, held


def first_unknown(connection: Connection, root: str, names: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is no budget and that no template stands for."""
    known = budgets.declared(connection, root, names)
    unseen = [name for name in names if name not in known]
    made = declaring.templates_for(connection, root, unseen) if unseen else {}
    return next((name for name in unseen if name not in made), None)


def moved(name: str) -> Unready:
    """Return what is raised where budgets got other parents, or windows, behind our back.

    What else is to be locked may come before what is locked already: everything is given back, and
    begins anew.
    """
    return Unready(f"what is above budget {name!r}", lambda connection: None)


def repeated(request: ReserveRequest, existing: Any) -> Tried:
    """Return what a request is, by the reservation that its key has."""
    if existing.reservation_id == request.reservation_id:
        return Reserved(request.reservation_id)
    if existing.fingerprint != request.fingerprint:
        return Conflict(request.request_id, request.owner, existing.task_id)
    return AlreadyReserved(existing.reservation_id, existing.task_id)


def _decide(
    request: ReserveRequest, known: dict[str, Level], possible: set[str]
) -> tuple[Draw, ...] | Refused | Unknown:
    """Decide one request."""
    for line in request.lines:
        if line.budget not in known and line.budget not in possible:
            return Unknown(line.budget)
    return decide(request.lines, known, request.finishing)


def _take(known: dict[str, Level], draws: tuple[Draw, ...], sign: int) -> None:
    """Count what was decided, for the decisions that follow; or take that back."""
    for draw in draws:
        level = known[draw.budget]
        known[draw.budget] = replace(level, reserved=level.reserved + sign * draw.amount)


def _delete(connection: Connection, root: str, ids: set[uuid.UUID]) -> None:
    if ids:
        connection.execute(
            reservations.delete().where(
                reservations.c.root == root, reservations.c.reservation_id.in_(sorted(ids))
            )
        )


def _write(
    connection: Connection,
    root: str,
    admitted: Sequence[tuple[Asked, tuple[Draw, ...]]],
    delivered_us: int | None,
    drawn: dict[str, int],
) -> None:
    if not admitted:
        return
    move(
        connection,
        root,
        [
            Move(
                Key(draw.budget, draw.window_us, drawn.get(draw.budget, 0)),
                draw.amount,
                0,
                request.reservation_id,
            )
            for (request, _), draws in admitted
            for draw in draws
        ],
        "reserve",
    )
    insert_lines(
        connection,
        [line for (request, _), draws in admitted for line in _lines(request, draws, drawn)],
    )
    outbox.enqueue_many(
        connection,
        root,
        [
            (request, deadlines.bounded(message, request.deadline_us))
            for (request, message), _ in admitted
            if message is not None
        ],
        delivered_us,
    )


def _lines(
    request: ReserveRequest, draws: tuple[Draw, ...], drawn: dict[str, int]
) -> Iterator[dict[str, Any]]:
    for number, draw in enumerate(draws):
        yield {
            "root": request.root,
            "reservation_id": request.reservation_id,
            "line": number,
            "budget": draw.budget,
            "window_us": draw.window_us,
            "stripe": drawn.get(draw.budget, 0),
            "charge": draw.charge,
            "unit": draw.unit,
            "estimate": draw.amount,
            "reserved": draw.amount,
        }


def insert_lines(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Insert lines that nothing was used of."""
    fixed = {"used": 0, "settled": 0, "extended": 0}
    rows = [{"stripe": 0, **row, **fixed} for row in rows]
    insert_many(connection, lines, rows, (lines.c.line,))


def columns_of(request: ReserveRequest) -> dict[str, Any]:
    """Return a request's columns of its reservation."""
    return {
        "root": request.root,
        "reservation_id": request.reservation_id,
        "owner": request.owner,
        "request_id": request.request_id,
        "nesting": request.nesting,
        "task_id": request.task_id,
        "task_name": request.task_name,
        "stage": request.stage,
        "fingerprint": request.fingerprint,
        "opaque": request.opaque,
        "estimator": request.estimator,
        "estimator_version": request.estimator_version,
        "parent_id": request.parent,
        "retries": request.retries,
        "unreserved": request.unreserved,
        "charges_start": any(line.charge == START for line in request.lines),
        "plan_id": request.plan,
        "step": request.step,
        "prices": request.prices,
        "deadline_us": request.deadline_us,
        "shadows": request.shadows,
        "enforced": request.enforced,
    }
