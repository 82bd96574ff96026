"""What releases of Celery from 5.5 on lack, of what is used here; nobody else asks for a release.

Kombu's publish batches on Redis (5.7) are asked for by kombu's own flag, where they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from types import FrameType
from typing import Any

import celery.app.amqp
from celery.app import trace
from celery.worker import state
from celery.worker.request import Request

__all__ = ["announce_cancelled", "publishes_what_follows", "retries_on_worker_lost"]


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


def publishes_what_follows() -> bool:
    """Return whether Celery publishes what follows a task that has finished, budgeted or not.

    Celery says so itself from 5.7 on. Before, it is told by how far the running task's trace has
    come: nothing else tells the next step of a chain from a call of the task's own.
    """
    told = getattr(celery.app.amqp, "_callback_publish_retry", None)
    return bool(told.get()) if told is not None else _has_ended(sys._getframe())


def _has_ended(frame: FrameType | None) -> bool:
    """Return whether this is called where Celery traces a task whose call is over."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_task_errbacks":
            return True
        if code.co_name == "trace_task" and code.co_filename == trace.__file__:
            return frame.f_locals.get("state") is not None
        frame = frame.f_back
    return False
