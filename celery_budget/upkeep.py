"""Upkeep: what the sweep does for budgets: windows ahead, empty ones away, drained ones closed.

And what was told of windows that have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from celery_budget.settings import Settings
from celery_budget.store import Store, alerts, budgets, windows

__all__ = ["Upkeep", "Upkept"]

#: How long before a window ends the next one is made.
HORIZON_US = 600_000_000
#: How long an empty window stays after its end: longer than any admission may still wait for it.
EMPTY_US = 3_600_000_000
LIMIT = 500


@dataclass(frozen=True)
class Upkept:
    """What one pass did.

    :ivar made: windows made ahead.
    :ivar pruned: windows deleted that nobody drew on.
    :ivar closed: names of budgets that were draining and are closed now.
    """

    made: int = 0
    pruned: int = 0
    closed: tuple[str, ...] = ()


class Upkeep:
    """The sweep's steps for budgets; several may run.

    It remembers how far it has looked: for empty windows, so that a pass costs what has ended
    since, not what ever was; for drained budgets, so that all of them get their turn.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._root = settings.root
        self._pruned_to: windows.Gone = (0, "", 0)
        self._drained_to = ""

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
        return Upkept(made, pruned, closed)
