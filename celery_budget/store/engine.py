"""Connections, transactions, and the one place where database errors and retries are handled.

Everything else in this package takes a connection and neither opens, commits nor retries.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import Connection, Dialect, Engine
from sqlalchemy.pool import PoolProxiedConnection

from celery_budget.core.backoff import backoff_seconds
from celery_budget.errors import (
    ConfigurationError,
    EnlistError,
    InvalidAmount,
    SchemaError,
    StoreError,
)
from celery_budget.events import Logger
from celery_budget.settings import shown
from celery_budget.store import clock
from celery_budget.store.prepared import Direct, is_direct
from celery_budget.store.unready import Unready

__all__ = ["PREPARATIONS", "Stop", "Store", "Writer", "enlisted", "state_of"]

logger = Logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: How often a call is tried where its caller waits for an answer.
TRIES = 4
#: What databases say, and what to do.
_REMEDIES = (
    (("refused", "timeout", "timed out", "resolve", "closed", "terminat", "shutting"),
     "see that its server runs and can be reached, then try again"),
    (("authentication", "password", "no pg_hba"), "correct the user or password of its URL"),
    (("permission denied", "readonly", "read-only", "insufficient"),
     "give its user the rights to read and write it"),
    (("unable to open",), "see that the file's folder is there and may be written to"),
    (("locked", "deadlock", "could not serialize", "lock not available"), "try again in a moment"),
    (("full", "no space"), "make room on its disk"),
    (("not a database", "malformed"), "see that its URL leads to the ledger, or restore a backup"),
    (("does not exist",), "create it, or correct its URL"),
)  # fmt: skip

#: How often in a row one call may find that something has to be made first; then it has failed.
PREPARATIONS = 50
FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 5.0
#: How long a thread waits for the others of its process that use the same SQLite file.
GATE_SECONDS = 30.0

#: A transaction that does nothing for so many times as long as others wait for its locks is broken
#: off: its process was stopped, or its machine cut off, and would hold them for as long.
IDLE = 2
#: And plans do not depend on luck: one that was made while a table was nearly empty is kept in its
#: session, and must not read all of it once a million rows are there. Every table has a key that
#: begins with the root, by which it is read instead. Where none would do, that counts as very dear,
#: for which no code is compiled.
_LIMITS = sa.text(
    "SELECT set_config('lock_timeout', :lock, true),"
    " set_config('idle_in_transaction_session_timeout', :idle, true),"
    " set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)"
)

#: What PostgreSQL calls a lock that was not had in time.
LOCK_NOT_AVAILABLE = "55P03"
#: Marks a connection whose transaction only reads.
_READ = "budget_read"

_stores: weakref.WeakSet[Store] = weakref.WeakSet()


class Stop(Protocol):
    """What ends waiting; a :class:`threading.Event`, for one."""

    def wait(self, timeout: float, /) -> bool:
        """Wait for so many seconds, or until waiting is to end; tell whether it is."""


class Writer(Protocol):
    """A caller's transaction that our functions run in."""

    @property
    def key(self) -> object:
        """The connection it is of."""

    def is_over(self) -> bool:
        """Tell whether nobody waits for it any more."""

    def holds(self, store: Store) -> bool:
        """Tell whether ``store`` would wait for it in order to write."""

    def is_open_beside(self, store: Store) -> bool:
        """Tell whether it is open in the database of ``store``, and may hold locks there."""


#: Callers' transactions that this context is in.
enlisted: ContextVar[tuple[Writer, ...]] = ContextVar("budget_enlisted", default=())


class Store:
    """The ledger's database.

    :param url: SQLAlchemy URL, PostgreSQL through psycopg or SQLite in a file.
    :param lock_seconds: how long a statement waits for a lock; then it fails as retryable.
    :param answer_seconds: how long one may be without an answer before PostgreSQL's server is
        asked, by another connection, whether it still answers.
    :param setting: which setting has the URL, for messages.
    :param pool: options of SQLAlchemy's for the pool of its connections.
    :raises ConfigurationError: for a URL of another database, or without its driver.

    Safe to use from several threads, and in children after a fork: a child drops the connections
    it inherited without closing them and opens its own.
    """

    def __init__(
        self,
        url: str,
        lock_seconds: float = 5.0,
        answer_seconds: float = 10.0,
        *,
        setting: str = "budget_database_url",
        **pool: Any,
    ) -> None:
        self._gate = threading.RLock()
        self._lock_ms = max(1, int(lock_seconds * 1000))
        self._answer_seconds = answer_seconds
        self._url = url
        self._engine = _create_engine(url, self._lock_ms, answer_seconds, setting, **pool)
        self._autocommit = (
            self._engine.execution_options(isolation_level="AUTOCOMMIT")
            if self.dialect == "postgresql"
            else self._engine
        )
        self._default_isolation: str | None = None
        # The connection of `changed`, and what it said last.
        self._watching: PoolProxiedConnection | None = None
        self._version: int | None = None
        _stores.add(self)

    @property
    def dialect(self) -> str:
        """``postgresql`` or ``sqlite``."""
        return str(self._engine.dialect.name)

    @property
    def url(self) -> str:
        """The URL without its password, for messages."""
        return _shown(self._engine)

    def beside(self) -> Store:
        """Return a store on the same database with one connection, which it shares with nobody.

        For a thread whose work must not wait for what others do by the store's connections.
        """
        return Store(
            self._url, self._lock_ms / 1000, self._answer_seconds, pool_size=1, max_overflow=0
        )

    @property
    def place(self) -> str:
        """Which database it is, whoever connects to it, and however."""
        url = self._engine.url
        host, port = (
            ",".join(sorted(said)) if isinstance(said, tuple) else said
            for said in (
                url.host or url.query.get("host", ""),
                url.port or url.query.get("port", ""),
            )
        )
        return f"{url.get_backend_name()}://{host}:{port}/{url.database}"

    @property
    def engine(self) -> Engine:
        """The engine of its own connections, for who lends others to its functions."""
        return self._engine

    @property
    def lock_ms(self) -> int:
        """How long a statement waits for a lock, in milliseconds."""
        return self._lock_ms

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open one transaction that may write; commit at the end, roll back on an error.

        :raises StoreError: for whatever the database or the way to it refuses.
        :raises SchemaError: where tables are missing.
        :raises EnlistError: on SQLite, in a caller's transaction that has the one write lock.
        """
        self._check_alone()
        with self.translated(), self._gated(), self._engine.begin() as connection:
            if self.dialect == "postgresql":
                connection.execute(
                    _LIMITS, {"lock": str(self._lock_ms), "idle": str(IDLE * self._lock_ms)}
                )
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Open one read-only transaction that sees one moment; it locks nothing."""
        options: dict[str, Any] = {_READ: True}
        if self.dialect == "postgresql":
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self.translated(), self._gated(), self._engine.connect() as connection:
            yield connection.execution_options(**options)
            # A rollback would have psycopg drop all that is prepared in the session.
            connection.commit()

    def statement(self) -> AbstractContextManager[Connection]:
        """Open a connection on which each statement is its own transaction.

        On SQLite, where nothing is saved by that, it is one transaction; so it is on a server
        whose isolation level, unless told otherwise, is not read committed. What is prepared
        (:class:`~celery_budget.store.prepared.Statement`) is sent past SQLAlchemy.
        """
        if self.dialect == "sqlite" or not self._reads_committed():
            return self.transaction()
        if is_direct(self._engine):
            return _Statement(self, self._autocommit)
        return self._in_autocommit()

    @contextmanager
    def _in_autocommit(self) -> Iterator[Connection]:
        with self.translated(), self._autocommit.connect() as connection:
            yield connection

    @contextmanager
    def apart(self, url: str = "") -> Iterator[Connection]:
        """Open a connection that is nobody else's, in autocommit, for what lives in a session.

        For the thread that calls it; a child that is forked meanwhile leaves it alone.

        :param url: where, if not at the ledger's own URL: past a proxy.
        :raises ConfigurationError: for a URL that cannot be used.
        :raises StoreError: for whatever the database or the way to it refuses.
        """
        engine = _create_engine(
            url or self._url,
            self._lock_ms,
            self._answer_seconds,
            "budget_listen_url" if url else "budget_database_url",
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
        )
        with self.translated(engine), engine.connect() as connection:
            yield connection

    def changed(self) -> bool:
        """Tell whether anybody has committed since this was last asked (SQLite only).

        True where nobody can tell. It takes no lock in the database. For one thread: what it was
        told, another is not.

        :raises StoreError: as for :meth:`run`.
        """
        with self.translated(), self._gated():
            try:
                if self._watching is None:
                    self._watching = self._engine.raw_connection()
                    self._version = None
                before, cursor = self._version, self._watching.cursor()
                # It counts the commits of others, and only beside what this connection said before.
                self._version = cursor.execute("PRAGMA data_version").fetchone()[0]
            except self._engine.dialect.loaded_dbapi.Error as error:
                self._stop_watching()
                raise StoreError(
                    f"{self.url} cannot be watched: {error}; try again", True
                ) from error
        return self._version != before

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.close()
            self._watching = None

    def _reads_committed(self) -> bool:
        """Return whether a statement by itself sees, behind a lock, what was committed meanwhile.

        It runs at the server's own isolation level; transactions are told theirs.
        """
        if self._default_isolation is None:
            with self.translated(), self._autocommit.connect() as connection:
                self._default_isolation = connection.execute(
                    sa.text("SHOW default_transaction_isolation")
                ).scalar_one()
        return self._default_isolation == "read committed"

    def run(
        self, function: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call ``function(connection, …)`` in one transaction, again where that may help.

        :raises StoreError: when the tries are used up, or at once where none can help.
        """
        return self._retry(self.transaction, TRIES, None, function, *args, **kwargs)

    def run_statement(
        self, function: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As :meth:`run`, for a function that executes one statement: saves two round trips."""
        return self._retry(self.statement, TRIES, None, function, *args, **kwargs)

    def read(
        self, function: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As :meth:`run`, for a function that only reads: all it reads is of one moment."""
        return self._retry(self.snapshot, TRIES, None, function, *args, **kwargs)

    def wait_out(
        self,
        stop: Stop | None,
        function: Callable[Concatenate[Connection, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """As :meth:`run`, but wait for as long as the store's fault may pass.

        For workers: a fault of the store must not become a task's failure.

        :param stop: ends the waiting with the error.
        """
        return self._retry(
            self.transaction, None, stop or threading.Event(), function, *args, **kwargs
        )

    def wait_out_statement(
        self,
        stop: Stop | None,
        function: Callable[Concatenate[Connection, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """As :meth:`wait_out`, for a function that executes one statement, as run_statement."""
        return self._retry(
            self.statement, None, stop or threading.Event(), function, *args, **kwargs
        )

    def wait_out_reading(
        self,
        stop: Stop | None,
        function: Callable[Concatenate[Connection, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """As :meth:`wait_out`, for a function that only reads, as :meth:`read`."""
        return self._retry(
            self.snapshot, None, stop or threading.Event(), function, *args, **kwargs
        )

    def _retry(
        self,
        connect: Callable[[], Any],
        tries: int | None,
        stop: Stop | None,
        function: Callable[Concatenate[Connection, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        failures = prepared = 0
        while True:
            try:
                try:
                    with connect() as connection:
                        return function(connection, *args, **kwargs)
                except Unready as unready:
                    prepared += 1
                    if prepared % PREPARATIONS == 0:
                        changes = f"{unready} changes all the time; try again"
                        raise StoreError(changes, retryable=True) from None
                    missing = unready
            except (StoreError, SchemaError) as error:
                failures += 1
                if self._waits_for_itself(error):
                    raise StoreError(
                        f"{error}; the transaction that is enlisted in this context is open still "
                        "and may hold it: publish in its block, or after it has ended",
                        retryable=True,
                    ) from error
                if tries is None:
                    # A missing table is waited out as well: no task fails for it.
                    hopeless = isinstance(error, StoreError) and not error.retryable
                else:
                    hopeless = isinstance(error, SchemaError) or not error.retryable
                if hopeless or (tries is not None and failures >= tries):
                    raise
                wait = backoff_seconds(failures, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
                if tries is None:
                    logger.event("store.waits", error=error, seconds=wait)
                if stop is None:
                    time.sleep(wait)
                elif stop.wait(wait):
                    raise
                continue
            self._retry(self.transaction, tries, stop, missing.prepare)

    def _waits_for_itself(self, error: Exception) -> bool:
        """Tell whether a lock was not had in time that this very context may hold elsewhere."""
        cause = error.__cause__
        return (
            isinstance(cause, exc.DBAPIError)
            and state_of(cause) == LOCK_NOT_AVAILABLE
            and any(writer.is_open_beside(self) for writer in enlisted.get())
        )

    @contextmanager
    def _gated(self) -> Iterator[None]:
        """On SQLite, keep a fork from happening in the middle, and threads from spinning.

        A child inherits SQLite's own note of the locks its parent holds, and nobody would ever
        release those of a transaction that another thread had open.
        """
        if self.dialect != "sqlite":
            yield
            return
        gate = self._gate
        if not gate.acquire(timeout=GATE_SECONDS):
            raise StoreError(
                f"other threads kept {self.url} busy for {GATE_SECONDS} s; try again", True
            )
        try:
            yield
        finally:
            gate.release()

    def _check_alone(self) -> None:
        """Refuse at once what would wait for the very transaction that waits for it."""
        if any(writer.holds(self) for writer in enlisted.get()):
            raise EnlistError(
                f"this would write to {self.url} beside the transaction that is enlisted here, and "
                "SQLite has one writer: each would wait for the other; do it before or after that "
                "transaction"
            )

    def is_locked(self) -> bool:
        """Tell whether somebody has the write lock just now (SQLite only); it waits for nothing.

        False as well where other threads of this process keep it from being known.
        """
        if not self._gate.acquire(blocking=False):
            return False
        try:
            with self.translated(), closing(self._engine.raw_connection()) as connection:
                cursor = connection.cursor()
                cursor.execute("PRAGMA busy_timeout = 0")
                try:
                    cursor.execute("BEGIN IMMEDIATE")
                    cursor.execute("ROLLBACK")
                except self._engine.dialect.loaded_dbapi.OperationalError:
                    return True
                finally:
                    cursor.execute(f"PRAGMA busy_timeout = {self._lock_ms}")
        finally:
            self._gate.release()
        return False

    def before_fork(self) -> None:
        """Wait for open transactions and close idle connections (SQLite only)."""
        if self.dialect == "sqlite":
            self._gate.acquire()
            self._stop_watching()
            self._engine.dispose()

    def after_fork_in_parent(self) -> None:
        """Let transactions go on."""
        if self.dialect == "sqlite":
            self._gate.release()

    def dispose(self) -> None:
        """Close all connections; the store may be used again."""
        self._stop_watching()
        self._engine.dispose()

    def after_fork_in_child(self) -> None:
        """Drop inherited connections without touching their sockets."""
        self._gate = threading.RLock()
        self._engine.dispose(close=False)

    @contextmanager
    def translated(self, engine: Engine | None = None) -> Iterator[None]:
        """Have errors of the driver and of the pool raised as ours."""
        try:
            yield
        except exc.DBAPIError as error:
            if state_of(error) == "CB001":
                # Raised by the function budget_move.
                raise InvalidAmount(str(error.orig).splitlines()[0]) from None
            raise _translate(_shown(engine or self._engine), error) from error
        except exc.TimeoutError as error:
            url = _shown(engine or self._engine)
            # Its text ends with an address of SQLAlchemy's manual.
            raise StoreError(
                f"no connection to {url} was free: {error.args[0]}; try again, with fewer threads "
                "at a time",
                True,
            ) from error
        except UnicodeEncodeError as error:
            # By the driver, of what no database takes for text: half a character.
            url = _shown(engine or self._engine)
            raise StoreError(f"the ledger's database {url} failed: {error}") from error


class _Statement:
    """A connection past SQLAlchemy, whose errors are raised as ours; quicker than a generator."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    def __enter__(self) -> Connection:
        try:
            self._connection = Direct(self._engine)
        except Exception:
            with self._store.translated():
                raise
        return self._connection

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._connection.close()
            return
        with self._store.translated(), self._connection:
            raise error


def _shown(engine: Engine) -> str:
    return shown(engine.url.render_as_string(hide_password=True))


def _create_engine(
    url: str,
    lock_ms: int,
    answer_seconds: float,
    setting: str = "budget_database_url",
    **options: Any,
) -> Engine:
    try:
        parsed = sa.make_url(_with_hosts(url))
        if parsed.get_backend_name() not in ("postgresql", "sqlite"):
            raise ConfigurationError(
                f"{setting} is for {parsed.get_backend_name()}; "
                "the ledger lives in PostgreSQL or SQLite"
                "; give the URL of one of these"
            )
        if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
            raise ConfigurationError(
                f"{setting} is an in-memory SQLite database, which workers cannot share; "
                "give a file: 'sqlite:////absolute/path.db'"
            )
        if parsed.get_backend_name() == "sqlite" and not _absolute(str(parsed.database)):
            raise ConfigurationError(
                f"{setting} names the SQLite file {parsed.database!r}, which is another "
                "one in each working directory; give an absolute path: "
                "'sqlite:////absolute/path.db'"
            )
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        arguments = _psycopg_arguments(parsed, setting)
        if parsed.get_backend_name() == "postgresql":
            # What is decided behind a lock is decided by what was committed before it was had.
            options.setdefault("isolation_level", "READ COMMITTED")
        engine = sa.create_engine(
            parsed.difference_update_query(["prepare_threshold"]),
            connect_args=arguments,
            # They are messages and results, and an error's text is logged.
            hide_parameters=True,
            **options,
        )
    except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
        raise ConfigurationError(f"{setting} cannot be used: {error}; correct it") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{setting} cannot be used: its port is no number, or a special character of its "
            "password is not written as in URLs; write '%40' for '@'"
        ) from error
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine, lock_ms)
        return engine
    clock.watch(engine)
    _leave_what_cannot_be_written(engine.dialect)
    if engine.dialect.driver == "psycopg":
        # It is an extra.
        from celery_budget.store import hanging

        hanging.watch(engine, answer_seconds)
    return engine


#: ``//user@one:1,two:2/name``, as libpq has it.
_HOSTS = re.compile(
    r"(?P<scheme>postgresql[^:]*://(?:[^/?@]*@)?)(?P<hosts>[^/?@]*,[^/?@]*)(?P<rest>.*)"
)


def _with_hosts(url: str) -> str:
    """Return a URL that names several hosts as libpq does in the form that SQLAlchemy has."""
    found = _HOSTS.fullmatch(url)
    if found is None:
        return url
    name, _, query = found["rest"].partition("?")
    hosts = [f"host={quote(host)}" for host in found["hosts"].split(",")]
    return f"{found['scheme']}{name or '/'}?{'&'.join([*hosts, *([query] if query else [])])}"


#: What a server says that is no primary, or not any more, or that goes down or is not up yet. A
#: connection that has been used to read asks for a transaction that writes, which a standby does
#: not have: 0A000, as for a plan that a migration has made void. And 26000: a session that was
#: reset beneath us has forgotten what psycopg takes for prepared there, and would fail each time.
_LEFT = ("0A000", "26000", "25006", "57P01", "57P02", "57P03")


def _leave_what_cannot_be_written(dialect: Dialect) -> None:
    """Have the connections of a server that cannot be written to left for new ones.

    Which server those reach is for the URL to say, or a proxy.
    """
    is_lost = dialect.is_disconnect

    def is_disconnect(error: Any, connection: Any, cursor: Any) -> bool:
        state = _state(error) or ""
        return is_lost(error, connection, cursor) or state in _LEFT or state.startswith("08")

    # Asked wherever an error of the driver is met.
    vars(dialect)["is_disconnect"] = is_disconnect


#: How long psycopg waits for a server that does not answer, in seconds and milliseconds: without
#: these a network that swallows packets holds up a renewal for longer than any lease.
_TIMES = {
    "connect_timeout": 10,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}


def _psycopg_arguments(url: sa.URL, setting: str) -> dict[str, Any]:
    """Return what psycopg is given beside the URL, and what the URL says that is no text to it.

    Behind a proxy that pools transactions, statements must not be prepared in a session.
    """
    if url.get_driver_name() != "psycopg":
        return {}
    times = {name: value for name, value in _TIMES.items() if name not in url.query}
    written = url.query.get("prepare_threshold")
    if written is None:
        return times
    if written == "none":
        return {**times, "prepare_threshold": None}
    if not isinstance(written, str) or not written.isascii() or not written.isdigit():
        raise ConfigurationError(
            f"{setting} has prepare_threshold={written!r}; give a number of executions "
            "after which a statement is prepared, or 'none' behind a proxy that pools transactions"
        )
    return {**times, "prepare_threshold": int(written)}


def _absolute(database: str) -> bool:
    return os.path.isabs(database) or database.startswith("file:")


def _prepare_sqlite(engine: Engine, lock_ms: int) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        # Transactions are begun by us, not by the driver before the first write.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {lock_ms}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.create_aggregate("budget_sum", 1, _Sum)
        clock.lend(connection, str(engine.url.database))

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # Take the write lock first: a transaction that reads and then writes could not wait.
        read_only = connection.get_execution_options().get(_READ)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


class _Sum:
    """SQLite's sum, which fails beyond 64 bits, for integers of any size: text where it is more."""

    def __init__(self) -> None:
        self._total: int | None = None

    def step(self, value: int | str | None) -> None:
        """Add one; it may be such a sum itself."""
        if value is not None:
            self._total = (self._total or 0) + int(value)

    def finalize(self) -> int | str | None:
        """Return the sum; none of nothing."""
        total = self._total
        return str(total) if total is not None and total.bit_length() > 63 else total


def _translate(url: str, error: exc.DBAPIError) -> StoreError | SchemaError:
    """Return the error a caller sees for what the driver raised."""
    said = str(error.orig).strip().splitlines()
    message = said[0] if said else type(error.orig).__name__
    # Of several hosts psycopg says first what was wrong with the last.
    hosts = [line.removeprefix("- ") for line in said if line.startswith("- host: ")]
    message = "; ".join(hosts) or message
    state = state_of(error)
    # 42P01 undefined_table, 42883 undefined_function, 42703 undefined_column
    absent = ("no such table", "no such column", "has no column named")
    if state in ("42P01", "42883", "42703") or any(words in message for words in absent):
        return SchemaError(
            f"the ledger's tables in {url} are missing or of another version ({message}); "
            "run 'celery -A PROJ budget init'"
        )
    return StoreError(
        f"the ledger's database {url} failed: {message}; {_remedy(message)}",
        retryable=error.connection_invalidated or not _is_the_statements(error, state),
    )


def _remedy(message: str) -> str:
    """Return what to do where the database says ``message``."""
    said = message.lower()
    for words, remedy in _REMEDIES:
        if any(one in said for one in words):
            return remedy
    return "see its log"


def state_of(error: exc.DBAPIError) -> str | None:
    """Return PostgreSQL's code of an error, from any of its drivers; none of SQLite's."""
    return _state(error.orig)


def _state(error: object) -> str | None:
    said = next(iter(getattr(error, "args", ())), None)
    # psycopg and asyncpg, psycopg2, pg8000.
    states = (
        getattr(error, "sqlstate", None),
        getattr(error, "pgcode", None),
        said.get("C") if isinstance(said, dict) else None,
    )
    return next((str(state) for state in states if state), None)


def _is_the_statements(error: exc.DBAPIError, state: str | None) -> bool:
    """Tell whether the statement or its values are wrong, so that repeating it cannot help.

    Everything else is the database's state, which may pass: a lost connection, a lock not had in
    time, a failover to a server that is still read-only, a full disk.
    """
    if state is not None:
        # data exception, integrity violation, syntax error or access rule, program limit
        return state[:2] in ("22", "23", "54") or (state[:2] == "42" and state != "42501")
    return isinstance(error, (exc.DataError, exc.IntegrityError, exc.ProgrammingError))


_forking: list[Store] = []


def _before_fork() -> None:
    _forking[:] = _stores
    for store in _forking:
        store.before_fork()


def _after_fork_in_parent() -> None:
    for store in _forking:
        store.after_fork_in_parent()
    _forking.clear()


def _after_fork_in_child() -> None:
    for store in _forking:
        store.after_fork_in_child()
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
