"""Upkeep: what the sweep does for budgets: windows ahead, empty ones away, drained ones closed.

And what was told of windows that have ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Store, alerts, budgets, contention, windows

__all__ = ["Upkeep", "Upkept"]

logger = Logger(__name__)

#: How long before a window ends the next one is made.
HORIZON_US = 600_000_000
#: How long an empty window stays after its end: longer than any admission may still wait for it.
EMPTY_US = 3_600_000_000
LIMIT = 500
#: A budget is spread whose admissions have waited so often for one another since the last pass.
WAITS_A_SECOND = 50


@dataclass(frozen=True)
class Upkept:
    """What one pass did.

    :ivar made: windows made ahead.
    :ivar pruned: windows deleted that nobody drew on.
    :ivar closed: names of budgets that were draining and are closed now.
    :ivar spread: names of budgets whose counters are over more rows now.
    """

    made: int = 0
    pruned: int = 0
    closed: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()


class Upkeep:
    """The sweep's steps for budgets; several may run.

    It remembers how far it has looked: for empty windows, so that a pass costs what has ended
    since, not what ever was; for drained budgets, so that all of them get their turn; how often
    admissions had waited for one another, so that it sees how often they do.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._root = settings.root
        self._pruned_to: windows.Gone = (0, "", 0)
        self._drained_to = ""
        self._most = settings.auto_stripes
        self._waits: dict[str, int] = {}
        self._waits_at = time.monotonic()

    def run_once(self) -> Upkept:
        """Do each step once, each in transactions of its own."""
        made = self._store.run(windows.ahead, self._root, HORIZON_US, LIMIT)
        pruned, last = self._store.run(windows.prune, self._root, self._pruned_to, EMPTY_US, LIMIT)
        self._pruned_to = last or self._pruned_to
        self._store.run(alerts.prune, self._root, LIMIT)
        draining = self._store.read(budgets.draining, self._root, self._drained_to, LIMIT)
        # Before they are closed: one that cannot be now does not come first again.
        self._drained_to = draining[-1] if len(draining) == LIMIT else ""
        closed = tuple(
            name
            for name in draining
            if self._store.run(budgets.close, self._root, name, True, True) == "closed"
        )
        return Upkept(made, pruned, closed, self._spread())

    def _spread(self) -> tuple[str, ...]:
        """Spread those budgets further whose admissions wait for one another all the time."""
        if self._most <= 1:
            return ()
        waits = self._store.read(contention.noted, self._root, self._most)
        now = time.monotonic()
        bound = WAITS_A_SECOND * max(now - self._waits_at, 1.0)
        often = [name for name in sorted(waits) if waits[name] - self._waits.get(name, 0) >= bound]
        self._waits, self._waits_at = waits, now
        found = []
        for name in often:
            stripes = self._store.run(contention.spread_further, self._root, name, self._most)
            # It is counted from none again.
            self._waits.pop(name)
            if stripes is not None:
                logger.event("budget.spread", name=name, stripes=stripes)
                found.append(name)
        return tuple(found)
