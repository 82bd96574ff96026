"""The scheduler: which client goes on next, and which one breaks down.

Every client is a thread with a :class:`Store` of its own. It stops before each statement, before
each COMMIT and before it hears the answer, until the scheduler lets it go on; so between two stops
only one client does anything, apart from those that a commit has freed from waiting for a lock.
Which one goes on, and what breaks, comes from the seed alone.

A client that waits for a lock in PostgreSQL is known by ``pg_blocking_pids``. Two that wait for one
transaction would race when it ends: all but one of them are cancelled, as by a lock time-out, and
try again when that one has what it waited for. On SQLite the one write lock is the scheduler's to
give.
"""

from __future__ import annotations

import random
import re
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy import event, exc

from celery_budget.errors import StoreError
from celery_budget.store import Store
from tests.services.postgres import plain_url

__all__ = ["Client", "Died", "NoMonitor", "PostgresMonitor", "Scheduler", "SteppedStore", "Stuck"]

#: How a client breaks down: its process dies, or its connection is lost and it tries again.
DIE, LOSE = "dies", "loses its connection"

#: The stop after a transaction: it is committed, and its client does not know yet.
ANSWER = "answer"
COMMIT = "COMMIT"
BEGIN = "BEGIN IMMEDIATE"

STUCK_SECONDS = 60
#: Nobody waits that long for a lock: it is the scheduler that lets clients wait.
LOCK_SECONDS = 600


class Died(BaseException):
    """The client's process is gone, whatever it was doing."""


class Stuck(Exception):
    """No client can go on."""


class NoMonitor:
    """On SQLite nobody waits inside the database."""

    def waiting(self, pids: Iterable[int]) -> dict[int, tuple[str, frozenset[int]]]:
        return {}

    def cancel(self, pid: int) -> None:
        raise AssertionError("nobody waits here")

    def see_gone(self, pid: int | None) -> None:
        """There is no server to notice anything."""


class PostgresMonitor:
    """What the server knows about the clients' connections."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(plain_url(url), autocommit=True)

    def waiting(self, pids: Iterable[int]) -> dict[int, tuple[str, frozenset[int]]]:
        """What each connection that waits for a lock waits for, and whom."""
        rows = self._connection.execute(
            "SELECT pid, wait_event, pg_blocking_pids(pid) FROM pg_stat_activity"
            " WHERE pid = ANY(%s) AND wait_event_type = 'Lock'",
            [list(pids)],
        )
        return {pid: (what, frozenset(by)) for pid, what, by in rows if by}

    def cancel(self, pid: int) -> None:
        self._connection.execute("SELECT pg_cancel_backend(%s)", [pid])

    def see_gone(self, pid: int | None) -> None:
        """Wait until the server has noticed that a connection is closed, and let its locks go."""
        end = time.monotonic() + STUCK_SECONDS
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
        while not self._connection.execute(gone, [pid]).fetchone()[0]:  # type: ignore[index]
            if time.monotonic() > end:
                raise Stuck(f"the server keeps the closed connection {pid}")

    def close(self) -> None:
        self._connection.close()


@dataclass(eq=False)
class Client:
    """One thread, and where it stands.

    :ivar state: ``moving``, ``ready`` (it has stopped), ``blocked`` (by a lock) or ``over``.
    :ivar idle_until: up to which step it is passed by.
    :ivar behind: who waits for what it waited for when it was cancelled; that one comes first.
    """

    name: str
    number: int
    scheduler: Scheduler
    play: Callable[[Client], None]
    state: str = "moving"
    kind: str = "start"
    fault: str | None = None
    breakable: bool = False
    pid: int | None = None
    cancelled: bool = False
    idle_until: int = 0
    behind: Client | None = None
    granted: int = 0
    ids: int = 0
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.scheduler.seed}-{self.number}")
        self.thread = threading.Thread(target=self._live, name=self.name, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        try:
            self.stop("start")
            self.play(self)
        except Died:
            pass
        except BaseException:  # noqa: BLE001 - whatever it is, the run has failed
            self.scheduler.problems.append(f"{self.name} raised: {traceback.format_exc(limit=-4)}")
        finally:
            self.scheduler.arrive(self, "over", self.kind)

    def stop(self, kind: str, breakable: bool = False, pid: int | None = None) -> str | None:
        """Wait for one's turn; what is to break, if anything.

        :param pid: the server process of the connection that is in use.
        """
        self.breakable, self.pid = breakable, pid
        self.scheduler.arrive(self, "ready", kind)
        self.go.acquire()
        return self.fault

    def at_statement(self, connection: sa.Connection, kind: str) -> None:
        """Stop before a statement; it is not executed where the client breaks down."""
        dbapi = connection.connection.dbapi_connection
        info = getattr(dbapi, "info", None)
        pid = None if info is None else info.backend_pid
        fault = self.stop(kind, True, pid)
        if fault is not None:
            connection.invalidate()
            self.scheduler.monitor.see_gone(pid)
            if fault == DIE:
                raise Died
            raise exc.OperationalError(kind, None, Exception("cut"), connection_invalidated=True)

    def at_answer(self) -> None:
        """Stop before what was committed is known."""
        fault = self.stop(ANSWER, breakable=True)
        if fault == DIE:
            raise Died
        if fault is not None:
            raise StoreError("the answer was lost", retryable=True)


class SteppedStore(Store):
    """A store whose client stops at each statement; connections come from a common pool."""

    def __init__(self, shared: Store, client: Client) -> None:
        super().__init__(shared._engine.url.render_as_string(False), LOCK_SECONDS)
        self._engine = shared._engine.execution_options()
        if self.dialect == "postgresql":
            self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        else:
            self._autocommit = self._engine
        self._client = client
        event.listen(self._engine, "before_cursor_execute", self._before_statement)
        event.listen(self._engine, "commit", self._before_commit)
        event.listen(self._engine, "handle_error", self._failed)

    def _before_statement(self, connection: sa.Connection, cursor: Any, sql: str, *_: Any) -> None:
        if "set_config('lock_timeout'" not in sql and sql != "BEGIN":
            self._client.at_statement(connection, kind_of(sql))

    def _before_commit(self, connection: sa.Connection) -> None:
        self._client.at_statement(connection, COMMIT)

    def _failed(self, context: Any) -> None:
        state = getattr(context.original_exception, "sqlstate", None)
        if state in ("40P01", "55P03"):
            self._client.scheduler.problems.append(
                f"{self._client.name} met a deadlock or a lock time-out: {state}"
            )

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        try:
            with super().transaction() as connection:
                yield connection
        finally:
            self._client.scheduler.ended(self._client)
        self._client.at_answer()

    @contextmanager
    def statement(self) -> Iterator[sa.Connection]:
        with super().statement() as connection:
            yield connection
        if self.dialect != "sqlite":
            self._client.at_answer()


def kind_of(sql: str) -> str:
    """The kind of a statement: what it does, to which table or with which function."""
    if sql == BEGIN:
        return BEGIN
    found = re.search(r"budget_(\w+)", sql)
    locks = re.search(r" FOR (?:UPDATE|SHARE)", sql)
    return f"{sql.split(None, 1)[0]} {found[1] if found else '?'}{locks[0] if locks else ''}"


class Scheduler:
    """Lets clients go on, one at a time, in an order that the seed gives.

    :ivar trace: who went on, with what, and how it broke down.
    :ivar problems: what was found to be wrong.
    """

    def __init__(
        self,
        seed: int,
        monitor: PostgresMonitor | NoMonitor,
        committed: Callable[[], None],
        faults: int,
    ) -> None:
        self.seed = seed
        self.monitor = monitor
        self.problems: list[str] = []
        self.trace: list[tuple[str, str, str | None]] = []
        self._committed = committed
        self._faults = faults
        self._chance = random.Random(seed)
        self._clients: list[Client] = []
        self._arrived = threading.Condition()
        self._writer: Client | None = None

    def start(self, name: str, play: Callable[[Client], None]) -> None:
        """Add a client; where it dies another may take its place."""
        self._clients.append(Client(name, len(self._clients), self, play))

    def client_of(self, thread: threading.Thread) -> Client | None:
        """The client that a thread is; none for another one."""
        return next((one for one in self._clients if one.thread is thread), None)

    def arrive(self, client: Client, state: str, kind: str) -> None:
        with self._arrived:
            client.state, client.kind, client.cancelled = state, kind, False
            self._arrived.notify_all()

    def ended(self, client: Client) -> None:
        """On SQLite: note that a client's transaction is over."""
        if self._writer is client:
            self._writer = None

    def run(self) -> None:
        """Go on until every client is over.

        :raises Stuck: where none can go on.
        """
        while True:
            self._settle()
            able = [one for one in self._clients if self._may_go(one)]
            ready = [one for one in able if one.idle_until <= len(self.trace)] or able
            if not ready:
                if all(one.state == "over" for one in self._clients):
                    return
                raise Stuck(f"all wait: {[(one.name, one.kind) for one in self._clients]}")
            self._let(self._chance.choice(ready))

    def _may_go(self, client: Client) -> bool:
        if client.behind is not None and client.behind.state != "blocked":
            client.behind = None
        return (
            client.state == "ready"
            and client.behind is None
            and (client.kind != BEGIN or self._writer is None)
        )

    def _let(self, client: Client) -> None:
        fault = self._choose_fault(client)
        kind = client.kind
        self.trace.append((client.name, kind, fault))
        if self._chance.random() < 0.03:
            # Its machine is busy with something else.
            client.idle_until = len(self.trace) + self._chance.randrange(200)
        client.granted, client.ids, client.fault = len(self.trace), 0, fault
        if kind == BEGIN and fault is None:
            self._writer = client
        waited = self._in("blocked")
        with self._arrived:
            client.state = "moving"
        client.go.release()
        self._settle()
        if fault == DIE and self._chance.random() < 0.7:
            self.start(f"{client.name}'", client.play)
        freed = any(one.state != "blocked" for one in waited)
        if fault is None and (kind == COMMIT or kind == "SELECT reserve" or freed):
            self._committed()

    def _choose_fault(self, client: Client) -> str | None:
        if self._faults == 0 or not client.breakable or self._chance.random() > 0.025:
            return None
        self._faults -= 1
        return self._chance.choice((DIE, LOSE))

    def _settle(self) -> None:
        """Wait until every client has stopped, is over, or waits for one that has stopped."""
        end = time.monotonic() + STUCK_SECONDS
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: not self._in("moving"), timeout=0.002)
                moved = bool(self._in("moving"))
                pids = {one.pid for one in self._in("moving", "blocked") if one.pid is not None}
            # Who waits for the server's own housekeeping will go on by itself.
            ours = {one.pid for one in self._clients}
            waiting = {
                pid: (what, by)
                for pid, (what, by) in (self.monitor.waiting(pids) if pids else {}).items()
                if by <= ours
            }
            changed = False
            with self._arrived:
                for one in self._in("moving", "blocked"):
                    state = "blocked" if one.pid in waiting and not one.cancelled else "moving"
                    changed |= state != one.state
                    one.state = state
                # What was seen while somebody moved may be out of date.
                calm = not moved and not changed
            if calm and not self._cancel_racers(waiting):
                self._check_circles(waiting)
                return
            if time.monotonic() > end:
                raise Stuck(f"neither waits nor stops: {[one.name for one in self._in('moving')]}")

    def _in(self, *states: str) -> list[Client]:
        return [one for one in self._clients if one.state in states]

    def _cancel_racers(self, waiting: dict[int, tuple[str, frozenset[int]]]) -> bool:
        """Cancel what would race when one transaction ends; whether there was any."""
        rivals: dict[frozenset[int], list[Client]] = defaultdict(list)
        for one in self._in("blocked"):
            what, by = waiting[one.pid]  # type: ignore[index]
            # Who waits in a row's queue goes for its new version together with the first of them.
            while what == "tuple":
                what, by = waiting.get(min(by), ("", by))
            if len(by) == 1:
                rivals[by].append(one)
        racing = False
        for some in rivals.values():
            if len(some) > 1:
                kept = self._chance.choice(some)
                for one in some:
                    if one is not kept:
                        racing = one.cancelled = True
                        one.behind = kept
                        self.trace.append((one.name, one.kind, "is cancelled"))
                        self.monitor.cancel(one.pid)  # type: ignore[arg-type]
        return racing

    def _check_circles(self, waiting: dict[int, tuple[str, frozenset[int]]]) -> None:
        for pid in waiting:
            seen: set[int] = set()
            ahead = {pid}
            while ahead:
                ahead = {by for one in ahead if one in waiting for by in waiting[one][1]} - seen
                seen |= ahead
            if pid in seen:
                names = [one.name for one in self._clients if one.pid in seen | {pid}]
                self.problems.append(f"a deadlock of {names}")
                raise Stuck(self.problems[-1])
