"""What releases of Celery from 5.5 on lack, of what is used here; nobody else asks for a release.

Kombu's publish batches on Redis (5.7) are asked for by kombu's own flag, where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from celery.worker import state
from celery.worker.request import Request

__all__ = ["announce_cancelled", "retries_on_worker_lost"]


def retries_on_worker_lost(task: Any) -> bool:
    """Return whether Celery is told to retry a task whose worker was lost (5.7 and later)."""
    return bool(getattr(task, "retry_on_worker_lost", False))


def announce_cancelled(request: Request, announce: Callable[..., None], emit_retry: bool) -> None:
    """Announce that a worker has cancelled a task, as Celery does.

    :param announce: Celery's own ``_announce_cancelled`` of the request. Before 5.6 it always
        stores RETRY and tells of it.
    :param emit_retry: whether it is to.
    """
    if "emit_retry" in signature(announce).parameters:
        announce(emit_retry=emit_retry)
    elif emit_retry:
        announce()
    else:
        state.task_ready(request)
        request.send_event("task-cancelled")
        request._already_cancelled = True
