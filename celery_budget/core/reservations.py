"""Reservations: what is asked for, what comes of it, and the states it passes through.

::

    planned -> reserved -> published -> running <-> waiting
        \\          \\           \\           \\          \\
         +--------> +-> released +-> released +-> settled +-> settled
                                              +-> lost

``planned``: a later step of a chain that was reserved whole; its message is not written yet.
``settled``: it ran to an end, or ran and will not run again. ``released``: it never ran.
``lost``: it ran and its outcome is unknown. A terminal state is reached once.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from celery_budget.core.backpressure import Pace, spread, wait_seconds
from celery_budget.core.budgets import check_own_name
from celery_budget.core.retries import Keep
from celery_budget.errors import BudgetExceeded, ParkingFull, PolicyError

__all__ = [
    "CHARGES",
    "CLAIMABLE",
    "START",
    "TERMINAL",
    "USED",
    "Admitted",
    "Again",
    "AlreadyExtended",
    "AlreadyRecorded",
    "AlreadyReserved",
    "Backlogged",
    "Begun",
    "Charge",
    "Claimed",
    "Closed",
    "Conflict",
    "Crowded",
    "Ended",
    "Exceeded",
    "Extended",
    "Full",
    "GivenUp",
    "Happened",
    "Line",
    "Missing",
    "Outcome",
    "Parked",
    "Recorded",
    "Refused",
    "Released",
    "Replay",
    "ReserveRequest",
    "Reserved",
    "Running",
    "Settlement",
    "Skipped",
    "StoredOutcome",
    "Tried",
    "Unknown",
]

#: States from which an attempt may be claimed.
CLAIMABLE = ("reserved", "published", "waiting")

#: States that are never left.
TERMINAL = ("settled", "released", "lost")

#: The charge rule of a line that pays for what was used.
USED = "used"

#: The charge rule of a line that pays its whole amount when an attempt starts, and gets none back.
START = "start"

CHARGES = (USED, START)


@dataclass(frozen=True)
class Line:
    """What one request asks of one budget, in the budget's unit, and by which rule it is charged.

    What it asks of that budget it asks of all above it.
    """

    budget: str
    amount: int
    charge: str = USED

    def __post_init__(self) -> None:
        check_own_name(self.budget)
        if self.charge not in CHARGES:
            raise PolicyError(
                f"the charge rule for budget {self.budget!r} is {self.charge!r}; give "
                "'used' or 'start'"
            )


@dataclass(frozen=True)
class ReserveRequest:
    """One request for admission.

    :ivar reservation_id: its id if it is admitted, made by the caller so that a repeat of the
        statement after a lost connection finds itself.
    :ivar owner: the first budget named; request ids are unique for each owner.
    :ivar request_id: the caller's id of the request; the task id where none was given.
    :ivar nesting: how often the task replaced itself; with the task id the key of the request.
    :ivar fingerprint: see :func:`celery_budget.core.identity.fingerprint`.
    :ivar opaque: whether values are missing from the fingerprint.
    :ivar parent: the reservation whose attempt publishes this one after its call.
    :ivar retries: Celery's count of retries in the message.
    :ivar unreserved: whether a worker admits a message that came without a reservation.
    :ivar finishing: whether it continues what was started, and may use what is above a soft stop.
    :ivar plan: of a chain that is reserved whole: the reservation of its first step.
    :ivar step: which step of it this is, the first being 0.
    :ivar prices: by which prices its estimates in money were made.
    :ivar deadline_us: microseconds since the epoch at which all of it is to be over; none for no
        such time.
    :ivar within_us: so long after its admission all of it is to be over, by the database's clock;
        of the two the earlier counts.
    :ivar shadows: what other versions of its estimator would have promised, by their versions, as
        JSON; none for none.
    :ivar tenant: whose share of a lane it counts to; the owner's unless given.
    :ivar parks: whether it waits where it does not fit, if it is new; what goes on always does.
    :ivar park_us: for how many microseconds it waits at most; none for the setting's.
    :ivar enforced: whether it is refused, or parked, where it does not fit; what is not enforced is
        admitted over the limit, and its refusal waived.
    :raises PolicyError: where two lines draw on one budget: a balance is decided on once.
    """

    reservation_id: uuid.UUID
    root: str
    owner: str
    request_id: str
    task_id: str
    task_name: str
    stage: str
    fingerprint: str
    estimator: str
    estimator_version: str
    lines: tuple[Line, ...]
    opaque: bool = False
    nesting: int = 0
    parent: uuid.UUID | None = None
    retries: int = 0
    unreserved: bool = False
    finishing: bool = False
    plan: uuid.UUID | None = None
    step: int | None = None
    prices: str | None = None
    deadline_us: int | None = None
    within_us: int | None = None
    shadows: str | None = None
    tenant: str | None = None
    parks: bool = False
    park_us: int | None = None
    enforced: bool = True

    def estimates(self) -> dict[str, int]:
        """What it asks of each budget it names."""
        return {line.budget: line.amount for line in self.lines}

    @property
    def weight(self) -> int:
        """What it weighs in a lane: its estimate for the budget named first."""
        return self.lines[0].amount if self.lines else 0

    def __post_init__(self) -> None:
        names = [line.budget for line in self.lines]
        for name in names:
            if names.count(name) > 1:
                raise PolicyError(
                    f"a request of {self.task_name} draws on budget {name!r} twice; name it once"
                )


@dataclass(frozen=True)
class Reserved:
    """The request was admitted: its lines are held and its message is in the outbox.

    :ivar waived: what it would have been refused with, were it enforced; none where it fitted.
    """

    reservation_id: uuid.UUID
    waived: Refused | Backlogged | Full | None = field(default=None, compare=False)


@dataclass(frozen=True)
class AlreadyReserved:
    """The same request was admitted before; nothing was changed."""

    reservation_id: uuid.UUID
    task_id: str


@dataclass(frozen=True)
class Refused:
    """A budget was short; nothing was changed. Amounts as seen when it was refused.

    :ivar reason: ``exhausted``, ``held``, ``queued``, ``blocked``, ``draining`` or ``closed``; see
        :class:`~celery_budget.BudgetExceeded`.
    :ivar most: up to what the request might have filled the budget.
    :ivar pace: how soon it may have room; none where that was not looked at.
    """

    budget: str
    unit: str
    requested: int
    limit: int
    reserved: int
    spent: int
    reason: str
    most: int
    pace: Pace | None = field(default=None, compare=False)

    def error(self) -> BudgetExceeded:
        """Return what the caller is told, with a time to come back that is its own."""
        needed = self.requested - (self.most - self.reserved - self.spent)
        wait = wait_seconds(self.reason, needed, self.requested > self.most, self.pace)
        return BudgetExceeded(
            self.budget,
            self.unit,
            self.requested,
            self.limit - self.reserved - self.spent,
            self.limit,
            self.reserved,
            self.spent,
            self.reason,
            self.most,
            spread(wait),
        )


@dataclass(frozen=True)
class Parked:
    """The request waits for budget and holds nothing new, now or as it was parked before."""

    parked_id: uuid.UUID


@dataclass(frozen=True)
class Crowded:
    """The request did not fit, and as much is parked already as may be; nothing was changed.

    :ivar refused: what it was refused with.
    :ivar bound: how much may be parked.
    """

    refused: Refused
    bound: int

    def error(self) -> ParkingFull:
        """Return what the caller is told."""
        return ParkingFull(self.bound, *self.refused.error().args)


@dataclass(frozen=True)
class GivenUp:
    """Parked work whose time was over before its budget came back.

    :ivar budget: the budget that was short.
    :ivar amount: how much more it needed of that.
    :ivar since_us: when it was parked, in microseconds since the epoch.
    """

    task_id: str
    task_name: str
    owner: str
    request_id: str
    budget: str
    amount: int
    since_us: int


Admitted = Reserved | AlreadyReserved | Refused | Parked


@dataclass(frozen=True)
class Backlogged:
    """Too many messages wait to be published already; nothing was changed."""

    messages: int
    bound: int


@dataclass(frozen=True)
class Full:
    """The lane that feeds the request's queue takes it not; nothing was changed.

    See :class:`~celery_budget.QueueFull`.
    """

    lane: str
    reason: str
    weight: int
    waiting: int
    bound: int


@dataclass(frozen=True)
class Unknown:
    """The request names a budget that does not exist, and no template stands for it."""

    budget: str


@dataclass(frozen=True)
class Conflict:
    """The request's id is in use for another request."""

    request_id: str
    owner: str
    task_id: str


@dataclass(frozen=True)
class Skipped:
    """The request would have fitted; it was left out since another of its batch did not.

    :ivar because: what that one was turned away with.
    """

    because: Tried | None = field(default=None, compare=False)


#: What comes of one of several requests that are admitted together.
Tried = (
    Reserved
    | AlreadyReserved
    | Parked
    | Refused
    | Crowded
    | Unknown
    | Conflict
    | Backlogged
    | Full
    | Skipped
)


@dataclass(frozen=True)
class Released:
    """The request will not run (again): its hold was given back, now or before for this reason.

    :ivar state: ``released``, or ``settled`` at what it used where it had run before.
    """

    task_id: str
    state: str


@dataclass(frozen=True)
class Cancelling:
    """The request runs, and has been asked to run no further: its task is told, and no retry.

    :ivar worker: who runs it: a worker's node name, or a host, then a slash and a process id.
    """

    worker: str = field(default="", compare=False)


@dataclass(frozen=True)
class Charge:
    """What one line of a reservation came to; amounts in its budget's unit."""

    budget: str
    unit: str
    estimated: int
    used: int
    charged: int


@dataclass(frozen=True)
class Settlement:
    """What a reservation was settled at.

    :ivar over: whether more was used than was held, or estimated.
    :ivar unmetered: whether anything was charged without being told.
    """

    charges: tuple[Charge, ...]
    over: bool
    unmetered: bool


@dataclass(frozen=True)
class Ended:
    """The attempt ended with this outcome, now or before.

    :ivar state: the reservation's: ``settled``, or ``waiting`` for another attempt.
    :ivar cancelled: whether another attempt was to follow, and none does: it was cancelled.
    :ivar kept: whether its request is in quarantine now; none where that was not asked for.
    :ivar closed: whether nothing is to be given again, and it was closed just now.
    :ivar settlement: what it was settled at just now; none where it was not, or before.
    """

    state: str
    cancelled: bool = False
    kept: bool | None = field(default=None, compare=False)
    closed: bool = field(default=False, compare=False)
    settlement: Settlement | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Exceeded:
    """One budget of a running attempt of which more was used than was held."""

    budget: str
    unit: str
    used: int
    reserved: int


@dataclass(frozen=True)
class Recorded:
    """The usage was recorded.

    :ivar late: the request had ended before; it was charged at once.
    :ivar over: it is more than was held, or estimated.
    :ivar units: in which units it counts.
    :ivar exceeded: of what was held, where the attempt runs: the first that was not enough.
    """

    late: bool
    over: bool
    units: tuple[str, ...] = field(default=(), compare=False)
    exceeded: Exceeded | None = field(default=None, compare=False)


@dataclass(frozen=True)
class AlreadyRecorded:
    """The key was recorded before; nothing was added."""

    units: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Extended:
    """The running attempt holds ``amount`` more than before."""

    amount: int


@dataclass(frozen=True)
class AlreadyExtended:
    """The same extension was made before; nothing was changed."""


@dataclass(frozen=True)
class Begun:
    """An effect is to be had now; its proof is written in the transaction that is open."""


@dataclass(frozen=True)
class Happened:
    """An effect was had before.

    :ivar value: what was stored with it, as JSON; none for nothing.
    """

    value: str | None


@dataclass(frozen=True)
class StoredOutcome:
    """A return value or an exception, encoded by the integration.

    :ivar kind: ``returned`` or ``raised``; ``refused`` where the attempt was not run.
    :ivar payload: the encoded value; none where it was not kept (too large, or not encodable). Of
        what was refused: why, after how many attempts, and the last one's error, if known.
    """

    kind: str
    payload: str | None


@dataclass(frozen=True)
class Again:
    """How often and how soon a rejected message may be delivered again.

    :ivar deliveries: attempts that one message gets.
    :ivar wait_us: the wait before the second, doubled each time.
    :ivar park_us: how long it may wait for budget.
    """

    deliveries: int
    wait_us: int
    park_us: int


@dataclass(frozen=True)
class Outcome:
    """How an attempt's call ended.

    :ivar kind: ``returned, raised, retried, replaced, ignored`` or ``rejected``.
    :ivar payload: the encoded value for a replay, for ``returned`` and ``raised``; the error that
        was retried, for where no attempt follows after all.
    :ivar again: for ``rejected``: how its message may come again; none for not at all.
    :ivar keep: for ``raised``: that the request goes into quarantine if it ends with this.
    :ivar error: the name of what was raised, or retried by, for whoever asks later.
    """

    kind: str
    payload: str | None = None
    again: Again | None = None
    keep: Keep | None = None
    error: str | None = None


@dataclass(frozen=True)
class Claimed:
    """This delivery may run: it is ``attempt`` of the reservation, under ``claim_id``.

    :ivar elapsed_us: how long ago the first attempt started; 0 where nobody asked.
    :ivar deadline_us: when all of the request is to be over; none for no such time.
    :ivar left_us: how long it has until then.
    :ivar waived: of what was admitted just now, as of :class:`Reserved`.
    """

    attempt: int
    claim_id: uuid.UUID
    elapsed_us: int = field(default=0, compare=False)
    deadline_us: int | None = field(default=None, compare=False)
    left_us: int | None = field(default=None, compare=False)
    waived: Refused | Backlogged | Full | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Replay:
    """The attempt ended before but was not closed: its outcome is to be given again.

    :ivar kept: of what was refused just now: whether its request is in quarantine.
    :ivar deadline_us: as for :class:`Claimed`.
    """

    attempt: int
    claim_id: uuid.UUID
    stored: StoredOutcome
    kept: bool | None = field(default=None, compare=False)
    deadline_us: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Running:
    """Another delivery runs, or finishes, this attempt."""


@dataclass(frozen=True)
class Closed:
    """The attempt this delivery stands for has ended; there is nothing to do."""

    state: str


@dataclass(frozen=True)
class Missing:
    """The ledger has no such reservation for this task."""
