"""Shared tasks that end in each way a task can, for ``tests/outcomes``.

A worker of ``tests.apps.shop`` gets them by the setting ``imports``. What they do is named by their
first argument. What follows them draws on no budget, and has a queue and a worker of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import current_app, shared_task
from celery.exceptions import Ignore, Reject

from celery_budget import budgeted, usage
from tests.apps.shop import wait_for

ESTIMATE = 6
#: What each run records, where it records anything.
USED = 2
RETRIES = 2
#: The queue of all that draws on no budget.
FOLLOWERS = "followers"


class AgainError(Exception):
    """Celery retries tasks for it by itself."""


def note(what: str) -> None:
    with open(current_app.conf["shop_journal"], "a") as file:
        file.write(what + "\n")


def retry_once(self: Any) -> None:
    if self.request.retries < 1:
        raise self.retry(countdown=0.1)


def autoretry_once(self: Any) -> None:
    if self.request.retries < 1:
        raise AgainError


def retry_on_and_on(self: Any) -> None:
    raise self.retry(countdown=0, exc=ValueError("no more"))


def ignore(self: Any) -> None:
    raise Ignore


def reject(self: Any) -> None:
    raise Reject("no", requeue=False)


def reject_once(self: Any) -> None:
    if is_first(self):
        raise Reject("not yet", requeue=True)


def fail(self: Any) -> None:
    raise ValueError("no")


def work_on(self: Any) -> None:
    """Work for longer than any limit."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.05)


def die(self: Any) -> None:
    if is_first(self):
        os.kill(os.getpid(), signal.SIGKILL)


def leave(self: Any) -> None:
    if is_first(self):
        sys.exit(1)


def hold(self: Any) -> None:
    """Run until the test lets all go that run in this worker."""
    wait_for(folder() / f"go {self.request.delivery_info['routing_key']}")


def succeed(self: Any) -> None:
    pass


WAYS: dict[str, Callable[[Any], None]] = {
    way.__name__: way
    for way in (
        retry_once,
        autoretry_once,
        retry_on_and_on,
        ignore,
        reject,
        reject_once,
        fail,
        work_on,
        die,
        leave,
        hold,
        succeed,
    )
}


def folder() -> Path:
    return Path(current_app.conf["shop_journal"]).parent


def is_first(self: Any) -> bool:
    """Tell whether this is the first run of a request, whichever process it is in."""
    try:
        (folder() / f"ran {self.request.id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def make(name: str, **options: Any) -> None:
    @budgeted(budget="tenant:{tenant}", estimate=ESTIMATE)
    @shared_task(
        name=name,
        bind=True,
        autoretry_for=(AgainError,),
        retry_backoff=False,
        default_retry_delay=0,
        max_retries=RETRIES,
        **options,
    )
    def end(self: Any, way: str, tenant: str, records: bool) -> str:
        if records:
            usage.record(USED)
        note(f"run {self.request.id}")
        WAYS[way](self)
        return way


for _ack in ("late", "early"):
    _late = _ack == "late"
    make(f"ends.{_ack}", acks_late=_late)
    make(f"ends.{_ack}.requeued", acks_late=_late, reject_on_worker_lost=True)
    make(f"ends.{_ack}.retried", acks_late=_late, retry_on_worker_lost=True)
    make(f"ends.{_ack}.unacked", acks_late=_late, acks_on_failure_or_timeout=False)


@shared_task(name="ends.member")
def member() -> int:
    """The other member of each chord."""
    return 1


@shared_task(name="ends.after")
def after(value: Any, of: str) -> Any:
    """The next step of a chain, or a chord's body."""
    note(f"after {of}")
    return value


@shared_task(name="ends.told")
def told(failed_id: str) -> None:
    """An errback."""
    note(f"told {failed_id}")
