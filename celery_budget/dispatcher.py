"""The dispatcher: lets go what lanes hold, as far as their limits let it.

Called by the relay at the start of each pass, so that what it lets go is published in that same
pass. Where no lane holds anything that is one look. How a lane chooses is in ``core.dispatch``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Store, dispatching
from celery_budget.store.dispatching import Overdue

__all__ = ["Dispatched", "Dispatcher"]

logger = Logger(__name__)

#: How many messages a pass ends that were held for too long, of each lane.
ENDED = 100
#: How often it looks for those.
END_SECONDS = 1.0


@dataclass(frozen=True)
class Dispatched:
    """What one pass did.

    :ivar released: how many messages it let go.
    :ivar ended: the tasks whose requests it ended, with their results still to be told.
    """

    released: int = 0
    ended: tuple[str, ...] = ()


class Dispatcher:
    """Dispatches the lanes of one root. For one thread; several processes share the work."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._root = settings.root
        self._ends_at = 0.0

    def run_once(self) -> Dispatched:
        """Have each lane that holds something release what it may now, once.

        One that fails, as where a lock cannot be had, holds up neither the others nor the relay.

        :raises StoreError: where the ledger cannot be reached.
        """
        # One statement; on SQLite one that keeps no writer waiting.
        look = self._store.read if self._store.dialect == "sqlite" else self._store.run_statement
        names = look(dispatching.holding, self._root)
        if not names:
            return Dispatched()
        ended = self._end() if time.monotonic() >= self._ends_at else ()
        return Dispatched(sum(map(self._dispatch, names)), ended)

    def _dispatch(self, name: str) -> int:
        try:
            return self._store.run(dispatching.dispatch, self._root, name)
        except Exception:
            logger.exception("lane.failed", lane=name)
            return 0

    def _end(self) -> tuple[str, ...]:
        """End what was held for too long; return its tasks."""
        seen = self._store.read(dispatching.overdue, self._root, ENDED)
        ended = [one for one in seen if self._end_one(one)]
        for one in ended:
            logger.event("lane.overdue", task_id=one.task_id, lane=one.lane)
        if len(seen) < ENDED:
            self._ends_at = time.monotonic() + END_SECONDS
        return tuple(one.task_id for one in ended)

    def _end_one(self, one: Overdue) -> bool:
        try:
            return self._store.run(dispatching.end, self._root, one)
        except Exception:
            logger.exception("lane.end_failed", task_id=one.task_id)
            return False
