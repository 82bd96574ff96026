"""Whether a request would be admitted: looked at, with nothing locked and nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy.engine import Connection

from celery_budget.core.budgets import Budget, Share
from celery_budget.core.draws import OPEN, Draw, Level, decide, queued, unlimited
from celery_budget.core.lanes import HEAVY, Lane
from celery_budget.core.reservations import Backlogged, Full, Line, Refused, Unknown
from celery_budget.store import backlog, pace, parked, waiting
from celery_budget.store.declaring import templates_for
from celery_budget.store.levels import MAX_DEPTH, levels_of

__all__ = ["look", "look_through"]


def look(
    connection: Connection,
    root: str,
    lines: Sequence[Line],
    finishing: bool,
    bound: int,
    queue: str | None = None,
    weight: int | None = None,
    *,
    enforced: bool = True,
) -> Refused | Unknown | Backlogged | Full | None:
    """Return what would turn a request with ``lines`` away now; none where nothing would.

    Decided as an admission is. Budgets that a template would make, and windows that it would open,
    count as empty, and are not made.

    :param finishing: as of :class:`~celery_budget.core.reservations.ReserveRequest`.
    :param bound: how many messages may wait to be published.
    :param queue: where its message would go; none where its lane is not looked at.
    :param weight: what it weighs in a lane, if that is not its first amount.
    :param enforced: as of :class:`~celery_budget.core.reservations.ReserveRequest`.
    :raises PolicyError: where one budget is drawn on by two rules.
    """
    found = _with_possible(connection, root, [line.budget for line in lines])
    if isinstance(found, Unknown):
        return found
    decided: Refused | tuple[Draw, ...] = decide(
        lines, found if enforced else unlimited(found), finishing
    )
    if isinstance(decided, tuple) and not finishing and enforced:
        decided = queued(found, decided, parked.ahead(connection, root)) or decided
    if isinstance(decided, Refused):
        return replace(
            decided, pace=pace.paces(connection, root, {decided.budget}).get(decided.budget)
        )
    messages = backlog.seen(connection, root, bound) if enforced else 0
    if enforced and messages >= bound:
        return Backlogged(messages, bound)
    fed = {} if queue is None else waiting.fed(connection, root, {queue}, note=False)
    own = lines[0].amount if weight is None else weight
    reasons = () if enforced else (HEAVY,)
    return next((waiting.full(one, own, *reasons) for one in fed.values()), None)


def look_through(
    connection: Connection,
    root: str,
    ways: Sequence[tuple[Lane, Sequence[Line]]],
    weight: int,
    finishing: bool,
    bound: int,
    *,
    enforced: bool = True,
) -> tuple[int, Refused | Unknown | Backlogged | Full | None]:
    """Return the first of several lanes that would take a request now, and what is in its way.

    Nothing is, but for the last lane where none takes it, and for what another lane cannot mend.

    :param ways: lanes, with what the request draws on there.
    :param weight: what it weighs in a lane.
    """
    found: Refused | Unknown | Backlogged | Full | None = None
    for number, (lane, lines) in enumerate(ways):
        queue = None if finishing else lane.queues[0]
        found = look(connection, root, lines, finishing, bound, queue, weight, enforced=enforced)
        if not isinstance(found, (Refused, Full)):
            return number, found
    return len(ways) - 1, found


def _with_possible(
    connection: Connection, root: str, names: Sequence[str]
) -> dict[str, Level] | Unknown:
    """Return the named budgets and all above them, with those that templates would make."""
    known = levels_of(connection, root, names)
    missing = [name for name in dict.fromkeys(names) if name not in known]
    for _ in range(MAX_DEPTH + 1):
        if not missing:
            return known
        made = templates_for(connection, root, missing)
        for name in missing:
            if name not in made:
                return Unknown(name)
            known[name] = _empty(made[name][1])
        above = {known[name].parent for name in missing}
        parents = [name for name in above if name is not None and name not in known]
        known |= levels_of(connection, root, parents)
        missing = sorted(name for name in parents if name not in known)
    return Unknown(missing[0])


def _empty(budget: Budget) -> Level:
    """Return how a budget stands that a template has just made."""
    share = budget.limit.parts if isinstance(budget.limit, Share) else None
    return Level(
        budget.name,
        budget.unit,
        budget.parent,
        None if isinstance(budget.limit, Share) else budget.limit,
        share,
        0,
        budget.soft_stop,
        budget.hard_stop,
        OPEN,
        None,
        0,
        0,
    )
