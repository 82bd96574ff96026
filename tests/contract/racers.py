"""What runs at once in the race tests: threads, and processes that are started afresh."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

from celery_budget import settlement
from celery_budget.core.reservations import Outcome, Refused, Reserved
from celery_budget.settings import Settings
from celery_budget.store import Store
from tests.contract.support import RETURNED, Ledger

WAIT_SECONDS = 60


class OneTry(Store):
    """A store that tries once, so that a deadlock is seen and not tried again."""

    def _retry(self, connect: Any, tries: Any, stop: Any, function: Any, *a: Any, **k: Any) -> Any:
        with connect() as connection:
            return function(connection, *a, **k)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all of them, each in a thread, from one moment on; what they return, in order."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            barrier.wait(WAIT_SECONDS)
            results[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001 - raised below
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Processes:
    """Processes that run one function each, which gets its number and a common barrier."""

    def __init__(self, count: int, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept here: the processes find it by name.
        self._barrier = barrier = context.Barrier(count)
        self._started = []
        for number in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(theirs, function, number, barrier, *args), daemon=True
            )
            process.start()
            theirs.close()
            self._started.append((process, ours))

    @property
    def running(self) -> bool:
        return any(not pipe.poll() for _, pipe in self._started)

    def results(self) -> list[Any]:
        """Wait for all of them; what they returned, in order."""
        results = [pipe.recv() for _, pipe in self._started]
        for process, _ in self._started:
            process.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def _run(
    pipe: Connection, function: Callable[..., Any], number: int, barrier: Barrier, *args: Any
) -> None:
    try:
        result = function(number, barrier, *args)
    except BaseException as error:  # noqa: BLE001 - sent to the test, which raises it
        barrier.abort()
        result = error
    pipe.send(result)


def reserve_in_rounds(
    number: int, barrier: Barrier, settings: Settings, rounds: int, request_id: str | None
) -> list[Any]:
    """Ask for 6 of each round's budget at the same moment as everybody else."""
    ledger = Ledger(OneTry(settings.database_url), settings)
    outcomes = []
    for one in range(rounds):
        named = {} if request_id is None else {"request_id": f"{request_id}-{one}", "task_id": "t"}
        request = ledger.request(6, budget=f"b{one}", **named)
        barrier.wait(WAIT_SECONDS)
        outcomes.append(ledger.admit(request))
    return outcomes


def live_in_threads(
    number: int, barrier: Barrier, settings: Settings, threads: int, requests: int
) -> int:
    """Reserve, use, settle and release random amounts; how many requests were admitted."""
    # Of 64 that wait for SQLite's one lock some are passed by for longer than one try.
    ledger = Ledger(Store(settings.database_url), settings)
    barrier.wait(WAIT_SECONDS)
    return sum(
        at_once(
            [
                lambda seed=(number * 1000 + thread): _live(ledger, random.Random(seed), requests)
                for thread in range(threads)
            ]
        )
    )


def _live(ledger: Ledger, chance: random.Random, requests: int) -> int:
    admitted = 0
    for _ in range(requests):
        amount = chance.randint(0, 60)
        request = ledger.request(amount)
        if not isinstance(ledger.admit(request), Reserved):
            continue
        admitted += 1
        what = chance.choice(("hold", "release", "settle", "raise"))
        if what == "release":
            settlement.revoke(ledger.store, ledger.root, request.reservation_id, "cancelled")
        elif what != "hold":
            attempt = ledger.run(request)
            attempt.record(chance.randint(0, amount))
            assert attempt.end(RETURNED if what == "settle" else Outcome("raised"))
            assert attempt.close()
    return admitted


def refuse_often(number: int, barrier: Barrier, settings: Settings, times: int) -> int:
    """Ask for more than there is; how often that was refused."""
    ledger = Ledger(Store(settings.database_url), settings)
    barrier.wait(WAIT_SECONDS)
    return sum(isinstance(ledger.admit(ledger.request(101)), Refused) for _ in range(times))
