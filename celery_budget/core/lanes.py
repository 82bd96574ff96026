"""Lanes: dispatch channels, with limits on what may wait, be queued and run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from celery_budget.core.amounts import check_amount, check_limit
from celery_budget.core.budgets import check_own_name, check_text
from celery_budget.core.reservations import START, USED, Line
from celery_budget.errors import InvalidLane

__all__ = [
    "AGEING",
    "HEAVY",
    "LIMITS",
    "MAX_WAIT_US",
    "MOST_BUDGETS",
    "MOST_QUEUES",
    "TICK_US",
    "Lane",
    "LaneBudget",
    "Load",
]

#: How many queues one lane may feed.
MOST_QUEUES = 100
#: How many budgets one lane may have.
MOST_BUDGETS = 20
#: For how long work may be held back unless its lane says otherwise: a day.
MAX_WAIT_US = 86_400_000_000
#: By how many units what waits counts lighter for each second it has waited, unless its lane says.
AGEING = 100

#: Why new work is turned away that is too heavy for its lane, however empty that is.
HEAVY = "heavy"

#: How long a tick is: in each a lane releases one burst.
TICK_US = 1_000_000

#: The limits of a lane, in jobs or units; none for no limit.
LIMITS = (
    "max_queued_jobs",
    "max_queued_units",
    "max_running_jobs",
    "max_running_units",
    "burst_units",
    "max_waiting_jobs",
    "max_waiting_units",
)


@dataclass(frozen=True)
class Load:
    """How much work there is: messages, and the units of the budget each of them named first."""

    jobs: int = 0
    units: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.jobs + other.jobs, self.units + other.units)


@dataclass(frozen=True)
class LaneBudget:
    """A budget that is drawn on by what comes through a lane by a fallback, or turns to it.

    Written ``NAME`` or ``NAME=AMOUNT``.

    :ivar amount: what is charged when an attempt starts, in the budget's unit; none for the
        request's estimate for the budget it names first, of which what is used is charged.
    :raises InvalidLane: for a name with ``=``, which could not be written.
    :raises InvalidName, InvalidAmount: for a name or an amount that is none.
    """

    budget: str
    amount: int | None = None

    def __post_init__(self) -> None:
        check_own_name(self.budget)
        if "=" in self.budget:
            raise InvalidLane(
                f"budget {self.budget!r} cannot be a lane's: what follows '=' is an amount; give "
                "the budget another name"
            )
        if self.amount is not None:
            check_amount(self.amount, f"the amount for budget {self.budget!r}")

    @classmethod
    def parse(cls, text: str) -> LaneBudget:
        """Return the budget that is written so.

        :raises InvalidLane: where its amount is no number, and as by the class.
        """
        name, is_given, amount = text.partition("=")
        if not is_given:
            return cls(name)
        try:
            number = int(amount)
        except ValueError:
            raise InvalidLane(
                f"{text!r} names budget {name!r} with the amount {amount!r}; give NAME=AMOUNT with "
                "an integer, or NAME alone for the request's estimate"
            ) from None
        return cls(name, number)

    def line(self, estimate: int) -> Line:
        """Return what a request with this estimate for the budget it names first draws on it."""
        if self.amount is None:
            return Line(self.budget, estimate, USED)
        return Line(self.budget, self.amount, START)

    def __str__(self) -> str:
        return self.budget if self.amount is None else f"{self.budget}={self.amount}"


@dataclass(frozen=True)
class Lane:
    """A dispatch channel. Limits are integers from 0; none is no limit, 0 lets nothing through.

    :ivar queues: the queues it feeds: what is published to one of them goes through the lane. A
        queue is fed by one lane of a root.
    :ivar budgets: what is drawn on, beside a request's own budgets, by what comes through the lane
        by a fallback or turns to it; not by what is sent to its queues plainly.
    :ivar max_queued_jobs: how much may be released and not started.
    :ivar max_running_jobs: how much may run. What is released may start at any time, so queued and
        running together stay within it.
    :ivar burst_units: how many units one tick of a second releases; what is heavier goes alone,
        in a tick of its own.
    :ivar max_waiting_jobs: how much may be held back before new work is refused.
    :ivar max_wait_us: how long work may be held back once it is due, in microseconds; none for
        ever.
    :ivar paused: whether nothing is released until it is resumed.
    :ivar preflight: whether nothing is released while its workers do not answer.
    :ivar ageing: by how many units what waits counts lighter for each second it has waited.
    :raises InvalidLane: for what is no lane.
    :raises InvalidName, InvalidAmount: for a name or a number that is none.
    """

    name: str
    queues: tuple[str, ...]
    max_queued_jobs: int | None = None
    max_queued_units: int | None = None
    max_running_jobs: int | None = None
    max_running_units: int | None = None
    burst_units: int | None = None
    max_waiting_jobs: int | None = None
    max_waiting_units: int | None = None
    max_wait_us: int | None = MAX_WAIT_US
    paused: bool = False
    preflight: bool = True
    ageing: int = AGEING
    budgets: tuple[LaneBudget, ...] = ()

    def __post_init__(self) -> None:
        check_text(self.name, "a lane's name")
        _check_queues(self.name, self.queues)
        object.__setattr__(self, "queues", tuple(sorted(self.queues)))
        object.__setattr__(self, "budgets", _checked_budgets(self.name, self.budgets))
        for key in LIMITS:
            check_limit(getattr(self, key), f"{key} of lane {self.name!r}")
        check_limit(self.max_wait_us, f"max_wait of lane {self.name!r}, in microseconds")
        check_amount(self.ageing, f"ageing of lane {self.name!r}")
        for key in ("paused", "preflight"):
            if type(getattr(self, key)) is not bool:
                raise InvalidLane(
                    f"{key} of lane {self.name!r} is {getattr(self, key)!r}; give True or False"
                )

    @property
    def terms(self) -> dict[str, Any]:
        """What it was declared with, but for its name and whether it is paused."""
        left_out = ("name", "paused")
        return {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out
        }

    def lines(self, estimate: int) -> tuple[Line, ...]:
        """Return what a request with this estimate draws on by coming through the lane."""
        return tuple(one.line(estimate) for one in self.budgets)

    def too_heavy(self, weight: int) -> int | None:
        """Return the limit that work of this weight could never keep to; none where it may run."""
        return _exceeded(weight, self.max_queued_units, self.max_running_units)

    def refusal(self, weight: int, waiting: Load) -> tuple[str, int, int] | None:
        """Return why new work of this weight is turned away; none where it may wait here.

        The reason (``heavy``, ``jobs`` or ``units``), what waits, and the limit.

        :param waiting: what the lane holds back already.
        """
        most = _exceeded(
            weight, self.max_queued_units, self.max_running_units, self.max_waiting_units
        )
        if most is not None:
            return HEAVY, 0, most
        if self.max_waiting_jobs is not None and waiting.jobs >= self.max_waiting_jobs:
            return "jobs", waiting.jobs, self.max_waiting_jobs
        most = self.max_waiting_units
        if most is not None and waiting.units + weight > most:
            return "units", waiting.units, most
        return None

    @property
    def is_limited(self) -> bool:
        """Whether what was released and has not ended can keep it from releasing more."""
        limits = (
            self.max_running_jobs,
            self.max_running_units,
            self.max_queued_jobs,
            self.max_queued_units,
        )
        return any(limit is not None for limit in limits)

    def full(self, queued: Load, running: Load) -> str | None:
        """Return what keeps it from releasing anything: ``running``, ``queued``; none for nothing.

        :param queued: what was released and has not started.
        """
        both = queued + running
        for used, jobs, units, name in (
            (both, self.max_running_jobs, self.max_running_units, "running"),
            (queued, self.max_queued_jobs, self.max_queued_units, "queued"),
        ):
            if (jobs is not None and used.jobs >= jobs) or (
                units is not None and used.units >= max(units, 1)
            ):
                return name
        return None


def _exceeded(weight: int, *limits: int | None) -> int | None:
    most = min((one for one in limits if one is not None), default=weight)
    return most if weight > most else None


def _check_queues(name: str, queues: Any) -> None:
    if not isinstance(queues, tuple) or not all(isinstance(one, str) for one in queues):
        raise InvalidLane(f"queues of lane {name!r} are {queues!r}; give a list of their names")
    if not queues:
        raise InvalidLane(f"lane {name!r} feeds no queue; name at least one (--queue)")
    if len(queues) > MOST_QUEUES:
        raise InvalidLane(
            f"lane {name!r} feeds {len(queues)} queues; {MOST_QUEUES} are the most"
            "; make two lanes of it"
        )
    if len(set(queues)) < len(queues):
        raise InvalidLane(
            f"lane {name!r} names a queue twice: {', '.join(sorted(queues))}; name it once"
        )
    for queue in queues:
        check_text(queue, f"a queue of lane {name!r}")


def _checked_budgets(name: str, given: Any) -> tuple[LaneBudget, ...]:
    if not isinstance(given, (tuple, list)):
        raise InvalidLane(f"budgets of lane {name!r} are {given!r}; give a list of their names")
    if len(given) > MOST_BUDGETS:
        raise InvalidLane(
            f"lane {name!r} has {len(given)} budgets; {MOST_BUDGETS} are the most; name fewer"
        )
    budgets = []
    for one in given:
        if not isinstance(one, (str, LaneBudget)):
            raise InvalidLane(
                f"lane {name!r} has the budget {one!r}; give its name, or NAME=AMOUNT for what is "
                "charged at each start"
            )
        budgets.append(LaneBudget.parse(one) if isinstance(one, str) else one)
    names = [one.budget for one in budgets]
    if len(set(names)) < len(names):
        raise InvalidLane(
            f"lane {name!r} names a budget twice: {', '.join(sorted(names))}; name it once"
        )
    return tuple(budgets)
