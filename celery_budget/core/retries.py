"""How long a request is tried: a number of attempts, a time for them, errors that end it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery_budget.errors import PolicyError

__all__ = [
    "DEADLINE",
    "ENDED",
    "FAILED",
    "MAX_ATTEMPTS",
    "RETRY_WITHIN",
    "TERMINAL_ERROR",
    "TRACEBACK",
    "Keep",
    "Retries",
]

#: Why a request failed for good: its attempts, or the time for them, are used up; the error was one
#: that it is not tried again for; or any other error that Celery did not retry.
MAX_ATTEMPTS = "max_attempts"
RETRY_WITHIN = "retry_within"
TERMINAL_ERROR = "terminal"
FAILED = "failed"
#: Why a request ends whose deadline has passed, be it before its first attempt or between two.
DEADLINE = "deadline"

ENDED = (MAX_ATTEMPTS, RETRY_WITHIN, TERMINAL_ERROR, FAILED, DEADLINE)

#: Where in the error of a request that failed its traceback begins, if that is known.
TRACEBACK = "\nTraceback (most recent call last):\n"


@dataclass(frozen=True)
class Retries:
    """What a task declares about running again; nothing, unless given.

    :ivar max_attempts: how often one request runs in all, whatever it runs again for.
    :ivar retry_within: for how many seconds from the start of its first attempt another one starts.
    :ivar terminal: the errors after which it does not run again.
    :raises PolicyError: for what means nothing.
    """

    max_attempts: int | None = None
    retry_within: float | None = None
    terminal: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        most = self.max_attempts
        if most is not None and (type(most) is not int or most < 1):
            raise PolicyError(
                f"max_attempts= is {most!r}; give a number of runs from 1 on, or leave it out"
            )
        within = self.retry_within
        is_number = isinstance(within, (int, float)) and not isinstance(within, bool)
        if within is not None and not (is_number and 0 < within < math.inf):
            raise PolicyError(f"retry_within= is {within!r}; give seconds above 0, or leave it out")
        object.__setattr__(self, "terminal", _classes(self.terminal))

    def __bool__(self) -> bool:
        """Tell whether anything was declared: only then a request that fails is kept."""
        return self != Retries()

    def spent(self, attempts: int, elapsed_us: int) -> str | None:
        """Return why no attempt follows ``attempts``; none where one may.

        :param elapsed_us: how long after the start of the first one it would start.
        """
        if self.max_attempts is not None and attempts >= self.max_attempts:
            return MAX_ATTEMPTS
        if self.retry_within is not None and elapsed_us > self.retry_within * 1_000_000:
            return RETRY_WITHIN
        return None

    def is_terminal(self, *errors: object) -> bool:
        """Tell whether one of ``errors`` is one that it does not run again for."""
        return any(isinstance(error, self.terminal) for error in errors)


def _classes(given: Any) -> tuple[type[Exception], ...]:
    classes = given if isinstance(given, Iterable) else (given,)
    found = tuple(classes) if not isinstance(given, str) else (given,)
    for one in found:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise PolicyError(f"terminal= has {one!r}; give classes of exceptions")
    return found


@dataclass(frozen=True)
class Keep:
    """That a request goes into quarantine where its attempt ends it.

    :ivar reason: one of :data:`ENDED`.
    :ivar error: its last error, for whoever looks.
    :ivar bound: how much is kept in quarantine; beyond that it is not.
    """

    reason: str
    error: str
    bound: int
