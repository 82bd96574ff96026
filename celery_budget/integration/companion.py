"""``celery -A proj worker --budget-relay``: the relay in threads of a worker's main process."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from celery_budget.integration.context import installed_on
from celery_budget.integration.service import RelayService

__all__ = ["RelayStep"]


class RelayStep(bootsteps.StartStopStep):
    """Runs the relay while the worker runs, where it was asked to.

    Started when the pool's processes have been forked, and stopped before them: what they publish
    while they end is relayed by another relay, or by this one when it is back.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, budget_relay: bool = False, **options: Any) -> None:
        super().__init__(parent, **options)
        self.enabled = budget_relay
        self._service: RelayService | None = None

    def start(self, parent: Any) -> None:
        """Start the relay.

        :raises SchemaError, ConfigurationError: the worker must not start on them.
        """
        self._service = RelayService(installed_on(parent.app))
        self._service.start()

    def stop(self, parent: Any) -> None:
        """Stop the relay, within two seconds."""
        if self._service is not None:
            self._service.stop()

    terminate = stop
