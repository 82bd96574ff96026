"""The result backend, as relay and recovery need it."""

from __future__ import annotations

import logging

from celery import Celery, states
from celery.backends.base import DisabledBackend

from celery_budget.errors import AttemptLost, BudgetError, RequestNotRun

__all__ = ["BackendResults"]

logger = logging.getLogger(__name__)


class BackendResults:
    """Reads and writes final results; see :class:`celery_budget.recovery.Results`."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def ready(self, task_id: str) -> str | None:
        """Return ``returned`` or ``raised`` where Celery has stored that of a run of the task.

        What we stored ourselves of an earlier request with this id, and a revocation, tell of no
        run.
        """
        backend = self._app.backend
        if isinstance(backend, DisabledBackend) or self._app.conf.result_backend == "rpc://":
            return None
        meta = backend.get_task_meta(task_id)
        if meta["status"] == states.SUCCESS:
            return "returned"
        if meta["status"] == states.FAILURE and not isinstance(meta["result"], RequestNotRun):
            return "raised"
        return None

    def ended(self, task_id: str, reason: str) -> None:
        """Store why the task will not run (again), for whoever waits for its result."""
        if reason in ("expired", "revoked"):
            self._app.backend.mark_as_revoked(task_id, reason=reason)
        elif reason == "lost":
            self.failed(task_id, AttemptLost(task_id))
        else:
            self.failed(task_id, RequestNotRun(task_id, reason))

    def failed(self, task_id: str, error: BudgetError) -> None:
        """Store ``error`` as the task's failure."""
        logger.error("%s", error)
        self._app.backend.mark_as_failure(task_id, error)
