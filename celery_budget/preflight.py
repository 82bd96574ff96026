"""Preflight: whether a lane's workers answer, asked while it holds work, and kept in its row.

Asked in a thread of its own: a broker that hangs holds up no relay. An answer counts for ten
seconds; a lane whose workers did not answer, or were not asked for longer, is asleep.
"""

from __future__ import annotations

from typing import Protocol

from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Store, preflight
from celery_budget.store.preflight import ToAsk

__all__ = ["Preflight", "Workers"]

logger = Logger(__name__)

#: How often a lane is asked about.
EVERY_US = 1_000_000


class Workers(Protocol):
    """What can be found out about who consumes a queue."""

    def missing(self, broker: str, queues: tuple[str, ...], works: bool) -> str | None:
        """Return why work for these queues would wait, in words; none where all have workers.

        Answers within seconds, also where the broker does not.

        :param broker: the broker's name.
        :param works: whether some worker of theirs is known to live: it may be too busy to answer.
        """


class Preflight:
    """Asks about the lanes of one root that hold work. Several processes share what they find."""

    def __init__(self, store: Store, settings: Settings, workers: Workers) -> None:
        self._store = store
        self._root = settings.root
        self._workers = workers
        self._logged: dict[str, str] = {}

    def run_once(self) -> int:
        """Ask about each lane that is due to be asked about; return how many that were."""
        names = self._store.read(preflight.asked, self._root, EVERY_US)
        for name in names:
            lane = self._store.read(preflight.take_to_ask, self._root, name)
            if lane is not None:
                self._ask(lane)
        return len(names)

    def _ask(self, asked: ToAsk) -> None:
        name = asked.lane.name
        reason: str | None = None
        for broker in asked.brokers or ("",):
            reason = reason or self._workers.missing(broker, asked.lane.queues, asked.works)
        self._store.run(preflight.note_answer, self._root, name, reason is None, reason)
        self._log(name, reason)

    def _log(self, name: str, reason: str | None) -> None:
        """Log why a lane sleeps, once, and that it is awake again."""
        if reason == self._logged.get(name):
            return
        if reason is None:
            del self._logged[name]
            logger.event("lane.awake", lane=name)
        else:
            self._logged[name] = reason
            logger.event("lane.asleep", lane=name, reason=reason)
