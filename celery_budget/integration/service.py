"""What runs beside beat or as ``budget relay``: the relay and the periodic sweep, a thread each.

They are apart so that a result backend that hangs under the sweep never holds up a message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_budget import admission, recovery, relay
from celery_budget.errors import StoreError
from celery_budget.integration.publisher import KombuPublisher
from celery_budget.integration.results import BackendResults
from celery_budget.upkeep import Upkeep

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["RelayService", "sweep"]

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0


class RelayService:
    """The relay and the sweep of one application. Starting and stopping twice does no harm."""

    def __init__(self, budget: CeleryBudget) -> None:
        self._budget = budget
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start both threads.

        :raises SchemaError: where ``budget init`` has not been run.
        """
        if self._threads:
            return
        try:
            self._budget.check()
        except StoreError as error:
            logger.warning("%s; the relay starts and waits for it", error)
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._relay, name="budget-relay", daemon=True),
            threading.Thread(target=self._sweep, name="budget-sweep", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        logger.info("budget relay started on %s", self._budget.store.url)

    def stop(self) -> None:
        """Stop both and wait for what they have in hand."""
        self._stop.set()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether both threads run."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    def _relay(self) -> None:
        budget = self._budget
        publisher = KombuPublisher(budget.app)
        results = BackendResults(budget.app)
        try:
            relay.run(budget.store, budget.settings, publisher, results.ended, self._stop)
        finally:
            publisher.reset()

    def _sweep(self) -> None:
        upkeep = Upkeep(self._budget.store, self._budget.settings)
        while not self._stop.is_set():
            try:
                sweep(self._budget, upkeep)
            except Exception:
                logger.exception("the sweep failed; it is tried again")
            self._stop.wait(self._budget.settings.sweep_seconds)


def sweep(budget: CeleryBudget, upkeep: Upkeep) -> None:
    """Run every periodic step once: windows, parked work, then recovery.

    One that fails does not keep the others from their work; the first error is raised afterwards.
    """
    results = BackendResults(budget.app)
    steps: tuple[Callable[[], object], ...] = (
        upkeep.run_once,
        lambda: admission.admit_parked(budget.store, budget.settings, results.ended),
        lambda: recovery.run_once(budget.store, budget.settings, results),
    )
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            if first is not None:
                logger.exception("another step of the sweep failed; it is tried again")
            first = first or error
    if first is not None:
        raise first
