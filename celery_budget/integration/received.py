"""Messages that this worker has received and not started: they are not lost.

They wait for a free process of its pool, or for a rate limit, and are in no queue any more. As long
as the worker lives nobody has to look for them.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any
from weakref import WeakSet

from celery import bootsteps, signals

from celery_budget import settlement
from celery_budget.errors import StoreError
from celery_budget.events import Logger
from celery_budget.integration.context import HEADER, find_installed, parse_header
from celery_budget.integration.install import CeleryBudget

__all__ = ["ReceivedStep"]

logger = Logger(__name__)

#: How often they are told of, in the time after which a message would be looked for.
TURNS = 4

#: Every request that was received, for as long as Celery has it.
_received: WeakSet[Any] = WeakSet()


@signals.task_received.connect
def _on_received(request: Any, **_: Any) -> None:
    if request.request_dict.get(HEADER) is not None:
        _received.add(request)


class ReceivedStep(bootsteps.StartStopStep):
    """Tells the ledger, from a thread of the worker's main process, what waits here."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._stop = threading.Event()

    def start(self, parent: Any) -> None:
        """Start telling."""
        budget = find_installed(parent.app)
        if budget is None:
            return
        self._stop.clear()
        threading.Thread(
            target=_tell_until, args=(budget, self._stop), name="budget-received", daemon=True
        ).start()

    def stop(self, parent: Any) -> None:
        """Stop telling: what waits is not started any more, and goes back to its broker."""
        self._stop.set()

    terminate = stop


def _tell_until(budget: CeleryBudget, stop: threading.Event) -> None:
    while not stop.wait(budget.settings.republish_seconds / TURNS):
        try:
            waiting = _waiting(budget.settings.root)
            if waiting:
                settlement.received(budget.store, budget.settings, waiting)
        except StoreError as error:
            logger.event(
                "store.unreachable", error=error, consequence="it is not told what waits here"
            )
        except Exception:
            logger.exception("step.failed", step="telling what waits here")


def _waiting(root: str) -> list[uuid.UUID]:
    """Return the reservations of what was received here and has not been started.

    The set may change while it is copied: another thread receives.
    """
    while True:
        try:
            received = list(_received)
            break
        except RuntimeError:
            continue
    headers = (
        parse_header(request.request_dict.get(HEADER))
        for request in received
        if request.time_start is None and not request.acknowledged
    )
    return [found[1] for found in headers if found is not None and found[0] == root]
