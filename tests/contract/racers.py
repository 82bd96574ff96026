"""What runs at once in the race tests: threads, and processes that are started afresh."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import sqlalchemy as sa

from celery_budget import settlement
from celery_budget.core.reservations import Outcome, Refused, Reserved
from celery_budget.settings import Settings
from celery_budget.store import Store
from tests.contract.support import RETURNED, Ledger

WAIT_SECONDS = 60
#: What the sessions of a race are called.
RACER = "racer"


def racing_url(url: str) -> str:
    """The same database, for sessions that are called :data:`RACER`."""
    made = sa.make_url(url)
    if made.get_backend_name() == "postgresql":
        made = made.update_query_dict({"application_name": RACER})
    return made.render_as_string(hide_password=False)


def wait_for_waiting(store: Store, count: int = 1, behind: int | None = None) -> None:
    """Return when that many sessions of the database wait for a lock.

    :param behind: the session that has what they wait for; any unless given.
    """
    waiting = sa.text(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND (CAST(:behind AS integer) IS NULL OR :behind = ANY (pg_blocking_pids(pid)))"
    ).bindparams(behind=behind)
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        with store.statement() as connection:
            if connection.execute(waiting).scalar_one() >= count:
                return
    raise AssertionError(f"{count} should wait for a lock and do not")


class Beside:
    """One call in a thread of its own, beside what the test does meanwhile."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except BaseException as error:  # noqa: BLE001 - raised by result
            self._result = error

    def result(self) -> Any:
        """Wait for its end; what it returned."""
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class OneTry(Store):
    """A store that tries once, so that a deadlock is seen and not tried again.

    What has to be made first is made.
    """

    def _retry(self, connect: Any, tries: Any, stop: Any, function: Any, *a: Any, **k: Any) -> Any:
        return super()._retry(connect, 1, None, function, *a, **k)

    def deadlocks(self) -> int:
        """How many deadlocks the server has counted in this database, ours being told."""
        if self.dialect == "sqlite":
            return 0
        self.dispose()
        told = sa.text(
            "SELECT deadlocks, (SELECT count(*) FROM pg_stat_activity a WHERE a.datname = d.datname"
            " AND a.application_name = :name AND a.pid <> pg_backend_pid()) AS others"
            " FROM pg_stat_database d WHERE d.datname = current_database()"
        )
        while True:
            # A session tells at its end at the latest.
            with self.statement() as connection:
                row = connection.execute(told, {"name": RACER}).one()
            if row.others == 0:
                return int(row.deadlocks)


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


def use_first_in_rounds(
    number: int, barrier: Barrier, settings: Settings, rounds: int
) -> list[bool]:
    """Draw 4 from each round's tenant, unseen so far, at the same moment as everybody else."""
    ledger = Ledger(OneTry(settings.database_url), settings)
    admitted = []
    for one in range(rounds):
        barrier.wait(WAIT_SECONDS)
        outcome = ledger.admit(ledger.request(4, budget=f"tenant:{one}"))
        admitted.append(isinstance(outcome, Reserved))
    return admitted
