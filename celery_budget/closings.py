"""Attempts of this process that are to be closed: what follows from them is done, or stored.

That costs no round trip of its own: the next claim takes them along. Where none comes soon, a
thread closes them. What is lost with the process is closed, or given again, by recovery.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable

from celery_budget.errors import BudgetError
from celery_budget.events import Logger
from celery_budget.store import Store, at_once, attempts
from celery_budget.store.at_once import Closing

__all__ = ["Closings", "flush_all"]

logger = Logger(__name__)

#: After how many seconds those are closed that no claim has taken along.
IDLE_SECONDS = 0.2
#: How many one statement closes.
MOST = 100


_all: weakref.WeakSet[Closings] = weakref.WeakSet()


def flush_all() -> None:
    """Close now what this process is to close: it ends."""
    for closings in list(_all):
        closings.flush()


class Closings:
    """The attempts that one process is to close.

    Safe to use from several threads. A child that was forked begins with none.

    :param idle_seconds: how long they wait for a claim at least.
    """

    def __init__(self, store: Store, root: str, idle_seconds: float = IDLE_SECONDS) -> None:
        self._store = store
        self._root = root
        self._idle_seconds = idle_seconds
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: list[Closing] = []
        # Of these each takes more than a claim does beside its own work.
        self._left: list[Closing] = []
        self._runs = False

    def add(self, *closing: Closing) -> None:
        """Have attempts closed, soon."""
        self._put(self._mine()._waiting, closing)

    def leave(self, closing: Iterable[Closing]) -> None:
        """Have attempts closed that a claim could not take along."""
        self._put(self._mine()._left, closing)

    def take(self) -> list[Closing]:
        """Return those that a claim takes along; the others keep waiting."""
        if not self._mine()._waiting:
            return []
        with self._lock:
            taken = self._waiting[:MOST]
            del self._waiting[:MOST]
        return taken

    def flush(self) -> None:
        """Close all of them now; what fails is told, and left to recovery."""
        while True:
            with self._mine()._lock:
                some, self._waiting[:MOST] = self._waiting[:MOST], []
                left, self._left[:] = list(self._left), []
            if not some and not left:
                return
            try:
                if some:
                    unclosed = set(self._store.run_statement(at_once.close, self._root, some))
                    left += [one for one in some if one[0] in unclosed]
                for one in left:
                    self._store.run(attempts.close, self._root, *one)
            except BudgetError as error:
                logger.event(
                    "store.unreachable", error=error, consequence="recovery closes attempts"
                )
            except Exception:
                logger.exception("step.failed", step="the closing of attempts")

    def _mine(self) -> Closings:
        if self._pid != os.getpid():
            self._forget()
        return self

    def _put(self, place: list[Closing], closing: Iterable[Closing]) -> None:
        with self._lock:
            place.extend(closing)
            if self._runs or not place:
                return
            self._runs = True
        threading.Thread(target=self._run, name="budget-closings", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._idle_seconds)
            with self._lock:
                if not self._waiting and not self._left:
                    self._runs = False
                    return
            self.flush()
