"""Asking the ledger where a worker's consumer waits for the answer.

A ledger that does not even refuse keeps each question for as long as connections and locks may
take, four times over. The consumer would do nothing else, not even say to its broker that it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from celery_budget.errors import StoreError

__all__ = ["Asking", "asking"]

P = ParamSpec("P")
R = TypeVar("R")

#: A failure that took longer than this is one of a ledger that hangs.
SLOW_SECONDS = 2.0
#: It is asked no more for so many times as long as that took.
REST = 2


class Asking:
    """Asks the ledger, and leaves it alone for a while where it hung."""

    def __init__(self) -> None:
        self._rests_until = 0.0

    def ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function``, which asks the ledger.

        :raises StoreError: as that does; at once where the ledger hung a moment ago.
        """
        begun = time.monotonic()
        if begun < self._rests_until:
            raise StoreError(
                "the ledger hung a moment ago, and is left alone; try again", retryable=True
            )
        try:
            return function(*args, **kwargs)
        except StoreError:
            now = time.monotonic()
            if now - begun > SLOW_SECONDS:
                self._rests_until = now + REST * (now - begun)
            raise


asking = Asking()
