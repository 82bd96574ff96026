"""A relay is killed at each point between a claim and its mark; another one goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from celery_budget.core.messages import WireMessage
from celery_budget.relay import Relay
from celery_budget.settings import Settings
from celery_budget.store import Store, claims
from tests.contract.support import Ledger

JOBS = 5


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Broker:
    """A broker that is a file: what stands in it was confirmed."""

    def __init__(self, path: str, kill_at: str, at_once: int) -> None:
        self._at_once = at_once
        self._path = path
        self._kill_at = kill_at
        self._count = 0

    def window(self, broker: str) -> int:
        return self._at_once

    def publish_all(self, messages: Sequence[WireMessage]) -> list[None]:
        for message in messages:
            self._count += 1
            if self._kill_at == f"before {self._count}":
                die()
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(message.task_id + "\n")
            if self._kill_at == f"after {self._count}":
                die()
        return [None] * len(messages)

    def reset(self) -> None:
        """There is no connection."""


def relay_until_killed(settings: Settings, path: str, kill_at: str, at_once: int) -> None:
    """One pass in a process that kills itself at that point."""
    for name in ("claim_due", "mark_published"):
        setattr(claims, name, dying(getattr(claims, name), kill_at))
    store = Store(settings.database_url)
    if kill_at.endswith("committed"):
        run = store.run
        which = kill_at.removesuffix(" committed")

        def committed(function: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(function, *args, **kwargs)
            if function.__name__ == which:
                die()
            return result

        store.run = committed  # type: ignore[method-assign]
    relay = Relay(store, settings, Broker(path, kill_at, at_once), lambda task_id, reason: None)
    relay.run_once(threading.Event())


def dying(function: Callable[..., Any], kill_at: str) -> Callable[..., Any]:
    """The function, in whose transaction the process dies before the commit."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if kill_at == f"{function.__name__} uncommitted":
            die()
        return result

    call.__name__ = function.__name__
    return call


POINTS = [
    "claim_due uncommitted",
    "claim_due committed",
    *(f"{when} {number}" for number in (1, 3, JOBS) for when in ("before", "after")),
    "mark_published uncommitted",
    "mark_published committed",
]


#: One by one, and several at a time: a kill in the middle of a window, and after it.
CELLS = [*((point, 1) for point in POINTS), *((point, 3) for point in POINTS[2:])]


@pytest.mark.parametrize(("kill_at", "at_once"), CELLS)
def test_each_message_once_and_one_batch_twice_at_most(
    funded: Ledger, tmp_path: Path, kill_at: str, at_once: int
) -> None:
    requests = [funded.reserve(1) for _ in range(JOBS)]
    path = tmp_path / "broker"
    path.touch()
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=relay_until_killed, args=(funded.settings, str(path), kill_at, at_once), daemon=True
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    first = path.read_text(encoding="utf-8").split()
    # What it had in hand is nobody's until its time is over.
    second = Relay(
        funded.store, funded.settings, Broker(str(path), "", at_once), lambda task_id, reason: None
    )
    second.run_once(threading.Event())
    if funded.rows("outbox", state="due"):
        funded.put("outbox", {"due_us": 1}, state="due")
    second.run_once(threading.Event())
    told = Counter(path.read_text(encoding="utf-8").split())
    assert set(told) == {request.task_id for request in requests}
    assert max(told.values()) <= 2
    assert {task_id for task_id, times in told.items() if times == 2} <= set(first)
    if kill_at in ("claim_due uncommitted", "claim_due committed", "mark_published committed"):
        assert set(told.values()) == {1}
    assert {funded.state(request) for request in requests} == {"published"}
