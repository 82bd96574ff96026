"""The result backend, as relay and recovery need it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import Celery, states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend

from celery_budget.core.retries import DEADLINE
from celery_budget.errors import AttemptLost, BudgetError, RequestNotRun
from celery_budget.events import Logger

__all__ = ["BackendResults", "is_redis"]

logger = Logger(__name__)


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
        if isinstance(backend, (DisabledBackend, RPCBackend)):
            return None
        meta = backend.get_task_meta(task_id)
        if meta["status"] == states.SUCCESS:
            return "returned"
        ours = isinstance(meta["result"], (AttemptLost, RequestNotRun))
        if meta["status"] == states.FAILURE and not ours:
            return "raised"
        return None

    @property
    def kept_seconds(self) -> float | None:
        """For how long results are kept (``result_expires``); none for as long as they last."""
        expires = self._app.conf.result_expires
        if isinstance(expires, timedelta):
            expires = expires.total_seconds()
        return float(expires) if expires else None

    def is_stored(self, task_id: str, task_name: str) -> bool | None:
        """Tell whether a final result of a task is stored.

        None where none is to be, as of a task that ignores results; and where nobody can tell, as
        of ``rpc://``, or of a task that this application does not have.

        :raises Exception: as the backend does.
        """
        backend, task = self._app.backend, self._app.tasks.get(task_name)
        if isinstance(backend, (DisabledBackend, RPCBackend)) or task is None or task.ignore_result:
            return None
        return backend.get_task_meta(task_id)["status"] in states.READY_STATES

    @property
    def counts_chord_members(self) -> bool:
        """Whether the backend counts a chord's members by plain counters.

        Giving a stored result again would count its member twice (memcached, DynamoDB, GCS). Redis
        knows members by their index, the others look at the results themselves.
        """
        backend = self._app.backend
        return bool(getattr(backend, "implements_incr", False)) and not is_redis(backend)

    def ended(self, task_id: str, reason: str) -> None:
        """Store why the task will not run (again), for whoever waits for its result.

        Not for ``rpc://``, where a result is a message to whoever sent the task.
        """
        if isinstance(self._app.backend, RPCBackend):
            logger.event("result.unstorable", task_id=task_id, reason=reason)
            return
        if reason in ("cancelled", "expired", "revoked", DEADLINE):
            self._app.backend.mark_as_revoked(task_id, reason=reason)
        elif reason == "lost":
            self.failed(task_id, AttemptLost(task_id))
        else:
            self.failed(task_id, RequestNotRun(task_id, reason))

    def forget(self, task_id: str) -> None:
        """Take back a task's stored result: it is going to run again.

        :raises Exception: as the backend does. Where it cannot delete results, one stays.
        """
        if isinstance(self._app.backend, (DisabledBackend, RPCBackend)):
            return
        try:
            self._app.backend.forget(task_id)
        except NotImplementedError:
            logger.event("result.unforgotten", task_id=task_id)

    def failed(self, task_id: str, error: BudgetError) -> None:
        """Store ``error`` as the task's failure."""
        logger.event(
            "continuation.failed", task_id=task_id, error=error, error_type=type(error).__name__
        )
        self._app.backend.mark_as_failure(task_id, error)


def is_redis(backend: Any) -> bool:
    """Tell whether results are in Redis; not where its client is missing."""
    try:
        from celery.backends.redis import RedisBackend
    except ImportError:
        return False
    return isinstance(backend, RedisBackend)
