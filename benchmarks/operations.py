"""What callers, relay, workers and sweep ask of the ledger, each measured by itself.

Each is called as the project's own code calls it, without Celery and without a broker. Whatever is
begun for it is brought to its end again, outside of what is measured, so that nothing but ended
requests is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import sqlalchemy as sa

from benchmarks.histories import tenant
from celery_budget import alerting, parking, reconcile, tallying
from celery_budget.core.reservations import Reserved, ReserveRequest
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import Store, budgets, migrate, wakeup
from tests.contract.support import RETURNED, Ledger, admit_many, message_of

__all__ = ["OPERATIONS", "READING", "Block", "Operations", "make_ledger", "open_ledger"]

#: Returns how long each call took, in microseconds.
Block = Callable[[], Sequence[float]]

#: How often each is done in a block, and how many clients are at the hot budget.
CALLS, GROUP, CLIENTS = 40, 1000, 8
#: The budget that everybody draws on.
HOT = "hot"


def make_ledger(url: str, tenants: int) -> None:
    """Make a ledger with that many budgets, and one that is hot."""
    with open_ledger(url) as ledger:
        ledger.store.run(migrate.upgrade)
        for name in (HOT, tenant(0)):
            ledger.set(name, limit=10**15)
        given = {"root": ledger.root, "first": tenant(0), "tenants": tenants}
        with ledger.store.transaction() as connection:
            for table, name in (("budgets", "name"), ("balances", "budget")):
                connection.execute(sa.text(_COPIES.format(table, name)), given)


#: Budgets as the first one is, without a call for each.
_COPIES = """
    INSERT INTO budget_{0} SELECT (jsonb_populate_record(b, jsonb_build_object(
        '{1}', 'tenant:' || n))).*
      FROM budget_{0} b, generate_series(1, :tenants - 1) AS n
     WHERE b.root = :root AND b.{1} = :first
"""


@contextmanager
def open_ledger(url: str) -> Iterator[Ledger]:
    """Open a ledger for as many clients as there are; its outbox takes whatever comes.

    A machine that is busy with something else breaks off no transaction.
    """
    store = Store(url, lock_seconds=60.0, pool_size=CLIENTS + 4)
    try:
        yield Ledger(store, Settings(url, root="bench", max_outbox=10**8))
    finally:
        store.dispose()


class Operations:
    """Blocks of each operation on one ledger.

    :param tenants: how many budgets are drawn on, in turns.
    :param calls: how often each is done in a block.
    """

    def __init__(self, ledger: Ledger, tenants: int, calls: int = CALLS) -> None:
        self._ledger = ledger
        self._tenants = tenants
        self._calls = calls
        self._turn = 0

    def admit(self) -> list[float]:
        """Admit a request of one budget."""
        taken = self._requests()
        found = [_timed(lambda one=one: _admitted(self._ledger, one)) for one in taken]
        self._end(taken)
        return found

    def group(self) -> list[float]:
        """Admit a thousand at once; the time of each thousand."""
        taken = self._requests(GROUP)
        asked = [(one, message_of(one)) for one in taken]
        ledger = self._ledger
        found = _timed(lambda: admit_many(ledger.store, ledger.settings, asked))
        self._forget(taken)
        return [found]

    def hot(self) -> list[float]:
        """Admit requests of one budget from several clients at once; the time between two."""
        taken = [self._ledger.request(1000, budget=HOT) for _ in range(self._calls * 2)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda _: self._ledger.now(), range(CLIENTS)))
            begin = time.perf_counter()
            list(pool.map(lambda one: _admitted(self._ledger, one), taken))
            each = (time.perf_counter() - begin) * 1e6 / len(taken)
        self._forget(taken)
        return [each]

    def relay(self) -> list[float]:
        """Take what is due, publish it nowhere, and mark it; the time of each message."""
        taken = self._admit()
        begin = time.perf_counter()
        published = self._relay(len(taken))
        found = (time.perf_counter() - begin) * 1e6 / published
        self._run(taken)
        return [found]

    def claim(self) -> list[float]:
        """Claim an attempt."""
        taken = self._admit()
        self._relay(len(taken))
        attempts: list[Attempt] = []
        found = [_timed(lambda one=one: attempts.append(self._ledger.run(one))) for one in taken]
        for attempt in attempts:
            _finish(attempt)
        return found

    def end(self) -> list[float]:
        """Settle an attempt that has returned, and close it."""
        taken = self._admit()
        self._relay(len(taken))
        attempts = [self._ledger.run(one) for one in taken]
        for attempt in attempts:
            attempt.record(700)
        return [_timed(lambda one=one: _finish(one)) for one in attempts]

    def sweep(self) -> list[float]:
        """Make a whole pass of the sweep, and look for alerts."""
        ledger = self._ledger
        alerts = alerting.Alerting(ledger.store, ledger.settings, lambda alert, tries: None)

        def sweep() -> None:
            ledger.upkeep()
            parking.run_once(ledger.store, ledger.settings)
            ledger.recover()
            tallying.run_once(ledger.store, ledger.settings)
            alerts.run_once()

        tallying.run_once(ledger.store, ledger.settings, 0)
        return [_timed(sweep) for _ in range(3)]

    def wake(self) -> list[float]:
        """Admit a request while a relay sleeps, until it is woken and has published it."""
        ledger, stop, published = self._ledger, threading.Event(), threading.Event()
        sleeper = wakeup.sleeper(ledger.store, ledger.settings)

        def relay() -> None:
            while not stop.is_set():
                sleeper.sleep(stop)
                if ledger.relay().published:
                    published.set()

        thread = threading.Thread(target=relay)
        thread.start()
        taken = self._requests(self._calls // 2)
        found = []
        try:
            for one in taken:
                _await_sleep(ledger, stop)
                published.clear()
                begin = time.perf_counter()
                _admitted(ledger, one)
                if not published.wait(30):
                    raise AssertionError("the relay was not woken")
                found.append((time.perf_counter() - begin) * 1e6)
        finally:
            stop.set()
            thread.join()
            sleeper.close()
        self._run(taken)
        return found

    def report(self) -> list[float]:
        """Gather the default report."""
        ledger = self._ledger
        return [_timed(lambda: reconcile.report(ledger.store, ledger.settings))]

    def balances(self) -> list[float]:
        """Read the balances of all budgets."""
        ledger = self._ledger
        return [_timed(lambda: ledger.store.read(budgets.balances_of, ledger.root))]

    def _requests(self, number: int = 0) -> list[ReserveRequest]:
        begin, self._turn = self._turn, self._turn + (number or self._calls)
        return [
            self._ledger.request(1000, budget=tenant(turn * 7 % self._tenants))
            for turn in range(begin, self._turn)
        ]

    def _admit(self) -> list[ReserveRequest]:
        taken = self._requests()
        for one in taken:
            _admitted(self._ledger, one)
        return taken

    def _relay(self, number: int) -> int:
        done = 0
        while done < number:
            relayed = self._ledger.relay()
            if not relayed.taken:
                raise AssertionError(f"{done} of {number} messages were published")
            done += relayed.published
        return done

    def _end(self, taken: list[ReserveRequest]) -> None:
        self._relay(len(taken))
        self._run(taken)

    def _run(self, taken: list[ReserveRequest]) -> None:
        for one in taken:
            _finish(self._ledger.run(one))

    def _forget(self, taken: list[ReserveRequest]) -> None:
        """End many that were admitted, in a few statements, as if they had been run."""
        ids = [one.reservation_id for one in taken]
        with self._ledger.store.transaction() as connection:
            for statement in _FORGET:
                connection.execute(
                    sa.text(statement).bindparams(sa.bindparam("ids", expanding=True)),
                    {"root": self._ledger.root, "ids": ids},
                )


#: The order of locks: reservations, balances, then what belongs to a reservation.
_FORGET = (
    """
    UPDATE budget_reservations SET state = 'settled', ended_us = created_us
     WHERE root = :root AND reservation_id IN :ids
    """,
    """
    UPDATE budget_balances b SET reserved = b.reserved - l.held, spent = b.spent + l.held
      FROM (SELECT budget, window_us, stripe, sum(reserved) AS held FROM budget_lines
             WHERE root = :root AND reservation_id IN :ids GROUP BY 1, 2, 3) AS l
     WHERE b.root = :root AND b.budget = l.budget AND b.window_us = l.window_us
       AND b.stripe = l.stripe
    """,
    """
    UPDATE budget_lines SET settled = reserved, reserved = 0
     WHERE root = :root AND reservation_id IN :ids
    """,
    "DELETE FROM budget_outbox WHERE root = :root AND reservation_id IN :ids",
)

#: What is measured, by the name of a block.
OPERATIONS = {
    "admit": "admit one",
    "group": f"admit {GROUP:,} at once",
    "hot": f"admit to a hot budget, {CLIENTS} clients",
    "relay": "relay a message",
    "claim": "claim",
    "end": "settle and close",
    "sweep": "sweep once",
    "wake": "call to relayed, asleep",
}
#: What reads all there is.
READING = {"report": "the default report", "balances": "all balances"}


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _admitted(ledger: Ledger, request: ReserveRequest) -> None:
    admitted = ledger.admit(request)
    if not isinstance(admitted, Reserved):
        raise AssertionError(f"{request.task_id} was not admitted: {admitted}")


def _finish(attempt: Attempt) -> None:
    if not (attempt.end(RETURNED) and attempt.close()):
        raise AssertionError(f"{attempt} was not ended")


def _await_sleep(ledger: Ledger, stop: threading.Event) -> None:
    """Wait until the relay has written that it sleeps."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if any(row.sleeping for row in ledger.rows("relays")):
            return
        stop.wait(0.001)
    raise AssertionError("the relay does not sleep")
