"""Deadlines of what follows: a continuation has what is left of its predecessor's.

The ledger knows it where that is a budgeted task, by its attempt. What follows a task without a
budget is told by an option of its signature, by the clock of whoever has published the first one.
"""

from __future__ import annotations

import time
from typing import Any

from celery_budget.core.deadlines import Deadline, earliest
from celery_budget.settlement import Attempt

__all__ = ["UNTIL", "deadline_of", "passed_on", "until_us", "with_until"]

#: The option of a signature that tells until when the whole is to be over, in microseconds.
UNTIL = "budget_until"


def deadline_of(own: Deadline | None, follows: Attempt | None, until: int | None) -> Deadline:
    """Return the deadline of a publication: its own, but not beyond what it is part of.

    What is called since a task has failed (its errbacks) is bound by no deadline of that.

    :param own: what its call, or its task's policy, says.
    :param follows: the attempt that it continues.
    :param until: what its signature was told, which counts where it continues none.
    """
    rest = until
    if follows is not None:
        rest = None if follows.error is not None else follows.deadline_us
    mine = own or Deadline()
    return Deadline(mine.within_us, earliest(mine.at_us, rest))


def until_us(deadline: Deadline) -> int | None:
    """Return when a deadline passes, by this process's clock; none where there is none."""
    within = deadline.within_us
    now = None if within is None else time.time_ns() // 1000 + within
    return earliest(deadline.at_us, now)


def passed_on(embed: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
    """Return a message's embedded signatures, told of its deadline; but for its errbacks."""
    until = until_us(deadline)
    if until is None:
        return embed
    told = dict(embed)
    for kind in ("callbacks", "chain"):
        if told.get(kind):
            told[kind] = [with_until(signature, until) for signature in told[kind]]
    if told.get("chord"):
        told["chord"] = with_until(told["chord"], until)
    return told


def with_until(signature: Any, until: int) -> Any:
    """Return a signature that is told until when the whole is to be over; the earlier counts."""
    kind: Any = type(signature)
    copy = kind.__new__(kind)
    if hasattr(signature, "__dict__"):
        # What it knows beside its items: its application and its task.
        vars(copy).update(vars(signature))
    options = signature.get("options") or {}
    told = {**options, UNTIL: earliest(options.get(UNTIL), until)}
    dict.update(copy, signature, options=told)
    return copy
