"""What a request draws on, and whether it fits: each budget it names and all above those.

Pure: the store reads how the budgets stand, behind their locks, and changes what is decided here.
The PostgreSQL function ``budget_decide`` is the same in SQL; one contract suite holds both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.budgets import MILLION, most
from celery_budget.core.reservations import Line, Refused
from celery_budget.errors import PolicyError

__all__ = [
    "OPEN",
    "Draw",
    "Level",
    "chain",
    "decide",
    "drawn_by",
    "limits_in_force",
    "queued",
    "short",
    "unlimited",
]

#: The state of a budget that takes new requests.
OPEN = "open"


@dataclass(frozen=True)
class Level:
    """One budget, and its balance in the window that is open now.

    :ivar limit_share: parts per million of the parent's limit; none where ``limit_amount`` counts.
    :ivar granted: the sum of its grants in force.
    :ivar window_us: when its window began; none where that window has no row yet.
    :ivar spread: over how many rows new work is spread; 0 where its window has one.
    """

    budget: str
    unit: str
    parent: str | None
    limit_amount: int | None
    limit_share: int | None
    granted: int
    soft_stop: int
    hard_stop: int
    state: str
    window_us: int | None
    reserved: int
    spent: int
    spread: int = 0


@dataclass(frozen=True)
class Draw:
    """What one request takes from one budget's window; becomes a line of the reservation."""

    budget: str
    unit: str
    window_us: int
    amount: int
    charge: str


def chain(levels: Mapping[str, Level], name: str) -> Iterator[Level]:
    """Yield the budget ``name`` and all above it, from the bottom.

    :raises KeyError: for a budget that is not among ``levels``.
    """
    above: str | None = name
    while above is not None:
        level = levels[above]
        yield level
        above = level.parent


def limits_in_force(levels: Mapping[str, Level], name: str) -> dict[str, tuple[int | None, bool]]:
    """Return the limit of ``name`` and of each above it, and whether that blocks everything.

    A share is of the parent's limit in force. Grants add to a limit; one of 0 blocks in spite of
    them.
    """
    found: dict[str, tuple[int | None, bool]] = {}
    above: int | None = None
    for level in reversed(list(chain(levels, name))):
        own = level.limit_amount
        if level.limit_share is not None:
            own = None if above is None else above * level.limit_share // MILLION
        blocked = own == 0
        above = None if own is None else min(own + level.granted, MAX_AMOUNT)
        found[level.budget] = above, blocked
    return found


def short(
    level: Level, limit: int | None, blocked: bool, amount: int, finishing: bool
) -> Refused | None:
    """Return why ``amount`` does not fit one budget; none where it does."""
    bound = most(limit, level.hard_stop if finishing else level.soft_stop)
    if level.state != OPEN:
        reason = level.state
    elif blocked:
        reason = "blocked"
    elif level.reserved + level.spent <= bound - amount:
        return None
    else:
        reason = "exhausted" if level.spent > bound - amount else "held"
    return Refused(
        level.budget,
        level.unit,
        amount,
        MAX_AMOUNT if limit is None else limit,
        level.reserved,
        level.spent,
        reason,
        bound,
    )


def decide(
    lines: Sequence[Line], levels: Mapping[str, Level], finishing: bool
) -> tuple[Draw, ...] | Refused:
    """Return what a request with ``lines`` draws on, or the budget that is short.

    Each budget is drawn on once, by the greatest of the amounts that reach it: a request uses what
    it uses, however many of the budgets it names have that one above them. Of several that are
    short the one told is on the first line's way up, and on it the lowest.

    :param levels: every budget on the way, by name.
    :param finishing: whether it continues what was started: the hard stop counts, not the soft.
    :raises PolicyError: where one budget is to be charged by two rules.
    """
    draws = drawn_by(lines, levels)
    for line in lines:
        limits = limits_in_force(levels, line.budget)
        for level in chain(levels, line.budget):
            refused = short(level, *limits[level.budget], line.amount, finishing)
            if refused is not None:
                return refused
    return tuple(draws.values())


def drawn_by(lines: Sequence[Line], levels: Mapping[str, Level]) -> dict[str, Draw]:
    """Return what lines draw on, by budget, whether it fits or not; see :func:`decide`.

    :raises PolicyError: where one budget is to be charged by two rules.
    """
    draws: dict[str, Draw] = {}
    for line in lines:
        for level in chain(levels, line.budget):
            before = draws.get(level.budget)
            if before is not None and before.charge != line.charge:
                raise mixed(level.budget)
            amount = max(line.amount, before.amount if before else 0)
            draws[level.budget] = Draw(
                level.budget, level.unit, level.window_us or 0, amount, line.charge
            )
    return draws


def unlimited(levels: Mapping[str, Level]) -> dict[str, Level]:
    """Return the same budgets without their limits and stops: what is not enforced is decided so.

    What is no question of how much stays: a budget that was closed takes nothing new, and none
    counts beyond 64 bits.
    """
    return {
        name: replace(
            level, limit_amount=None, limit_share=None, soft_stop=MILLION, hard_stop=MILLION
        )
        for name, level in levels.items()
    }


def queued(
    levels: Mapping[str, Level], draws: Sequence[Draw], ahead: Collection[str]
) -> Refused | None:
    """Return why a new request waits though it fits; none where it does not.

    :param ahead: the budgets that are kept for what was parked before.
    """
    draw = next((one for one in draws if one.budget in ahead), None)
    if draw is None:
        return None
    level = levels[draw.budget]
    limit, _ = limits_in_force(levels, draw.budget)[draw.budget]
    return Refused(
        draw.budget,
        draw.unit,
        draw.amount,
        MAX_AMOUNT if limit is None else limit,
        level.reserved,
        level.spent,
        "queued",
        most(limit, level.soft_stop),
    )


def mixed(budget: str) -> PolicyError:
    """Return the error for a budget that one request would charge by two rules."""
    return PolicyError(
        f"a request draws on budget {budget!r} twice, once charged as used and once at the start; "
        "a budget is charged by one rule"
        "; name it once"
    )
