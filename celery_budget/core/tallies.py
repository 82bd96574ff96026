"""Tallies: what requests that have ended add to the figures of a report.

A request belongs to the day (UTC) on which it was admitted, and all that becomes of it is counted
there. What it adds is a pure function of its rows, so that it can be taken out again when late
usage changes them, counted anew for a proof, and counted for a report before anybody has tallied
it.

Every request adds to one key for all, one for its owner, and one for each budget it draws on.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from celery_budget.core.retries import DEADLINE, MAX_ATTEMPTS, RETRY_WITHIN

__all__ = [
    "AMOUNTS",
    "DAY_US",
    "FAILED",
    "RUN",
    "WAIT",
    "Figures",
    "Key",
    "Tallies",
    "add",
    "bin_of",
    "contribution",
    "day_of",
    "failure_of",
    "quantile",
    "shadow_figures",
    "shadows_in",
    "top_of",
]

DAY_US = 86_400_000_000

#: Names and whole numbers; what is not there is 0.
Figures = dict[str, int]

#: Of a key with a budget: how many requests ran, what was estimated of it for them, what they were
#: charged, how much of that was over the estimate, and for how many.
AMOUNTS = ("requests", "estimated", "charged", "excess", "exceeded")

#: What the names of figures begin with: ends by failure, waits and runs by bins.
FAILED, WAIT, RUN = "failed.", "wait.", "run."
#: And those of shadow estimators: requests, estimated and actual.
_SHADOW = ("shadow.requests.", "shadow.estimated.", "shadow.actual.")

TRANSIENT, PERMANENT, EXHAUSTED = "transient", "permanent", "exhausted"
UNCERTAIN, EXPIRED = "uncertain", "expired"

#: Why a request ended that has not failed, whatever its attempts came to.
_NO_FAILURE = frozenset(
    ("cancelled", "revoked", "ignored", "not_claimed", "predecessor", "result stored")
)
_CANCELLED = frozenset(("cancelled", "revoked"))
_OVER = frozenset(("expired", DEADLINE, "park_expired", "wait_expired"))
_SPENT = frozenset((MAX_ATTEMPTS, RETRY_WITHIN))
_BY_OUTCOME = {
    "raised": PERMANENT,
    "rejected": PERMANENT,
    "retried": PERMANENT,
    "uncertain": UNCERTAIN,
}

#: An attempt that was turned away before it began.
REFUSED = "refused"


class Key(NamedTuple):
    """What figures are kept by.

    :ivar budget: of what draws on it; empty for all requests, once each.
    :ivar owner: empty for all requests, whoever owns them.
    :ivar day: days since the epoch, in UTC.
    :ivar lane: empty for none.
    """

    budget: str
    unit: str
    owner: str
    day: int
    stage: str
    task_name: str
    estimator: str
    estimator_version: str
    lane: str

    def digest(self) -> uuid.UUID:
        """Return what stands for the key in the ledger, however long its parts are."""
        told = json.dumps(self, ensure_ascii=False).encode()
        return uuid.UUID(bytes=hashlib.sha256(told).digest()[:16])


#: Figures by their keys.
Tallies = dict[Key, Figures]


def day_of(at_us: int) -> int:
    """Return the day (UTC) of an instant, in days since the epoch."""
    return at_us // DAY_US


def add(to: Figures, more: Mapping[str, int], sign: int = 1) -> None:
    """Add figures to others, or take them away; what comes to 0 goes."""
    for name, number in more.items():
        total = to.get(name, 0) + sign * number
        if total:
            to[name] = total
        else:
            to.pop(name, None)


def failure_of(state: str, reason: str | None, outcome: str | None) -> str | None:
    """Return how a request that has ended has failed; none where it has not.

    :param reason: why it ended; what became of it in quarantine may be added to that.
    :param outcome: of its last attempt that ran.
    """
    if state == "lost":
        return UNCERTAIN
    why = (reason or "").split(",")[0]
    if why in _NO_FAILURE:
        return None
    if why in _OVER:
        return EXPIRED if state == "released" else EXHAUSTED
    if why in _SPENT:
        return EXHAUSTED
    return PERMANENT if state == "released" else _BY_OUTCOME.get(outcome or "")


def contribution(request: Any, lines: Sequence[Any], attempts: Sequence[Any]) -> Tallies:
    """Return what one request that has ended adds.

    :param request: its reservation, by the names of its columns; so are its ``lines``, the first
        one first, and its ``attempts``, in order.
    """
    ran = [one for one in attempts if one.outcome != REFUSED]
    figures = _ends(request, ran)
    if ran:
        due_us = max(request.created_us, request.due_us or 0)
        figures[f"{WAIT}{bin_of(ran[0].started_us - due_us)}"] = 1
    for one in ran:
        # When one ended of which nothing is known is not known either.
        if one.ended_us is not None and one.outcome != UNCERTAIN:
            add(figures, {f"{RUN}{bin_of(one.ended_us - one.started_us)}": 1})
    if lines:
        _compare(figures, request, lines[0], attempts)
    key = Key(
        "",
        "",
        "",
        day_of(request.created_us),
        request.stage,
        request.task_name,
        request.estimator,
        request.estimator_version,
        request.lane or "",
    )
    found = {key: figures, key._replace(owner=request.owner): dict(figures)}
    charged = request.state != "released"
    for (budget, unit), amounts in _amounts(lines).items():
        drawn = key._replace(budget=budget, unit=unit, owner=request.owner)
        found[drawn] = {**figures, **amounts} if charged else dict(figures)
    return found


def _ends(request: Any, ran: Sequence[Any]) -> Figures:
    """Return how a request ended, and how it failed."""
    why = (request.reason or "").split(",")[0]
    failure = failure_of(request.state, request.reason, ran[-1].outcome if ran else None)
    cancelled = why in _CANCELLED
    seen = {
        "given_up": not request.admitted and not cancelled,
        request.state: request.admitted,
        "cancelled": cancelled,
        "expired": request.admitted and failure == EXPIRED,
        "over": request.over,
        "unmetered": request.unmetered,
        "unreserved": request.unreserved,
        f"{FAILED}{failure}": failure is not None,
        f"{FAILED}{TRANSIENT}": max(0, len(ran) - 1),
    }
    return {name: int(number) for name, number in seen.items() if number}


def _compare(figures: Figures, request: Any, line: Any, attempts: Sequence[Any]) -> None:
    """Add what was estimated and used, where it was measured: of a success that told its usage."""
    last = attempts[-1] if attempts else None
    if (
        request.state != "settled"
        or request.unmetered
        or last is None
        or last.attempt != request.attempts
        or last.outcome != "returned"
    ):
        return
    add(figures, {"measured": 1, "promised": line.estimate, "used": line.settled})
    if request.shadows is not None and request.attempts == 1:
        for shadow, promised in json.loads(request.shadows).items():
            add(figures, shadow_figures(shadow, 1, int(promised), line.settled))


def shadow_figures(shadow: str, requests: int, estimated: int, actual: int) -> Figures:
    """Return the figures of a shadow estimator, ``name:version``."""
    numbers = (requests, estimated, actual)
    return {f"{name}{shadow}": number for name, number in zip(_SHADOW, numbers, strict=True)}


def shadows_in(figures: Mapping[str, int]) -> dict[str, tuple[int, int, int]]:
    """Return requests, estimated and actual of each shadow estimator."""
    begins, *_ = _SHADOW
    found = {}
    for name in figures:
        if name.startswith(begins):
            shadow = name.removeprefix(begins)
            requests, estimated, actual = (figures.get(f"{one}{shadow}", 0) for one in _SHADOW)
            found[shadow] = requests, estimated, actual
    return found


def _amounts(lines: Iterable[Any]) -> dict[tuple[str, str], Figures]:
    """Return what was estimated and charged of each budget, by all lines on it together."""

    def budget_of(line: Any) -> tuple[str, str]:
        return line.budget, line.unit

    found = {}
    for key, group in groupby(sorted(lines, key=budget_of), budget_of):
        of = list(group)
        estimated = sum(line.estimate + line.extended for line in of)
        charged = sum(line.settled for line in of)
        excess = max(0, charged - estimated)
        numbers = (1, estimated, charged, excess, int(excess > 0))
        found[key] = {name: number for name, number in zip(AMOUNTS, numbers, strict=True) if number}
    return found


#: Bins of one octave: each is at most a 32nd of its times wide.
_OCTAVE = 32


def bin_of(us: int) -> int:
    """Return the bin of a time in microseconds; what is negative, by a clock set back, is 0."""
    us = max(0, us)
    above = max(0, us.bit_length() - _OCTAVE.bit_length())
    return above * _OCTAVE + (us >> above)


def top_of(number: int) -> int:
    """Return the longest time of a bin, in microseconds."""
    if number < 2 * _OCTAVE:
        return number
    above, rest = divmod(number, _OCTAVE)
    return ((rest + _OCTAVE + 1) << (above - 1)) - 1


def quantile(bins: Mapping[int, int], hundredths: int) -> int | None:
    """Return what so many hundredths of the times took at most; none where there are none.

    By nearest rank: the longest time of the bin in which that one lies, in microseconds.
    """
    total = sum(bins.values())
    rank = -(-total * hundredths // 100)
    passed = 0
    for number in sorted(bins):
        passed += bins[number]
        if passed >= rank > 0:
            return top_of(number)
    return None
