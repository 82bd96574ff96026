"""A caller's own transaction, for our functions to run in: it is checked, lent and left as it was.

What we do in it is one savepoint: all of it is done, or none and the transaction goes on. It is
never committed, rolled back or tried again here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection
from sqlalchemy.util import await_only, greenlet_spawn

from celery_budget.errors import EnlistError, SchemaError, StoreError
from celery_budget.store.callers import caller_of
from celery_budget.store.distributed import check_one_root
from celery_budget.store.drivers import AUTOCOMMIT, FAILED, lent
from celery_budget.store.engine import PREPARATIONS, Store, enlisted, state_of
from celery_budget.store.unready import Unready

__all__ = ["Enlisted", "transactions"]

P = ParamSpec("P")
R = TypeVar("R")

SAVEPOINT = "budget_enlisted"

_READ_ONLY = "the transaction is read-only; enlist one that may write"


class Enlisted:
    """The transaction that a caller's connection is in.

    :param given: a SQLAlchemy session or connection, a psycopg, sqlite3 or Django connection.
    :param root: whose rows are changed in it.
    :param any_isolation: whether it may be above READ COMMITTED.
    :raises EnlistError: for anything else.
    """

    def __init__(self, store: Store, given: Any, root: str, any_isolation: bool) -> None:
        self._store = store
        self._root = root
        self._caller = caller_of(given)
        if self.is_async and find_spec("greenlet") is None:
            raise EnlistError(
                "an asynchronous connection is enlisted with the help of greenlet, which is not "
                "installed; install 'SQLAlchemy[asyncio]'"
            )
        self._any_isolation = any_isolation
        self._isolation = "read committed"
        # The innermost transaction or savepoint when the block was opened, and the outermost.
        self._mark: Any = None
        self._whole: Any = None
        self._in_block = False
        self._used = False

    @property
    def is_async(self) -> bool:
        """Whether what is done here has to be done in :meth:`awaited`."""
        return self._caller.is_async

    async def awaited(self, work: Callable[[], R]) -> R:
        """Call ``work()`` where the statements of an asynchronous connection can be awaited."""
        return await greenlet_spawn(work)

    def open(self) -> None:
        """Check that the connection can be enlisted; on PostgreSQL by one statement.

        :raises EnlistError: saying why not.
        :raises StoreError: where the database failed.
        """
        with self._told():
            self._caller.begin()
            driver = self._caller.driver
            if driver.dialect_name != self._store.dialect:
                raise EnlistError(
                    f"the connection is to {driver.dialect_name} and the ledger is in "
                    f"{self._store.dialect} ({self._store.url}); enlist a connection to that one"
                )
            for other in enlisted.get():
                if other.holds(self._store) and other.key is not driver.key:
                    raise EnlistError(
                        "another connection to the same SQLite file is enlisted here, and each "
                        "would wait for the other; use one connection for both"
                    )
            own = self._aside(_known, self._store)
            with self._lent() as connection:
                if self._store.dialect == "sqlite":
                    _check_file(connection, own)
                else:
                    self._check_server(connection, own)
            # Keys that the database makes are known in the block.
            self._caller.flush()
        self._mark = self._caller.mark()
        self._whole = self._caller.outermost()

    def _check_server(self, connection: Connection, own: Any) -> None:
        driver = self._caller.driver
        known = _recall(driver.key)
        look = connection.execute(_LOOK if known else sa.text(f"{_LOOK.text}, {_IDENTITY}")).one()
        found = known or _Server(*look[2:])
        if found != own:
            # The tables may have been made anew since either was looked at.
            _servers.pop(self._store, None)
            own = self._aside(_known, self._store)
            found = _server(connection)
        if found != own:
            raise _elsewhere(self._store, found, own)
        _remember(driver.key, found)
        self._isolation = look.isolation
        if look.read_only == "on":
            raise EnlistError(_READ_ONLY)
        if not self._reads_committed and not self._any_isolation:
            raise EnlistError(
                f"the transaction is {look.isolation.upper()}, so that it would be refused at any "
                "race for a budget; use READ COMMITTED or, to handle StoreErrors that are "
                "retryable by running the whole transaction again, give any_isolation=True"
            )
        if driver.is_begun() is None:
            # Refused in autocommit.
            connection.exec_driver_sql(f"SAVEPOINT {SAVEPOINT}")
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {SAVEPOINT}")

    @property
    def _reads_committed(self) -> bool:
        return self._isolation in ("read committed", "read uncommitted")

    def enter(self) -> None:
        """Note that the code which follows in this context is in the transaction."""
        self._in_block = True
        enlisted.set((*enlisted.get(), self))

    def leave(self) -> None:
        """Note that the block has ended; until the transaction does, its locks are still held."""
        self._in_block = False
        enlisted.set(tuple(one for one in enlisted.get() if not one.is_over()))

    @property
    def key(self) -> Any:
        """What stands for the connection."""
        return self._caller.driver.key

    def is_over(self) -> bool:
        """Tell whether nobody waits for it any more."""
        return not self._in_block and not (
            self._used and self._caller.driver.is_begun() and self._caller.is_open(self._whole)
        )

    def holds(self, store: Store) -> bool:
        """Tell whether others who write to ``store`` would wait for it, that is for ever.

        After the block a look at the lock tells: the connection may be in another transaction.
        """
        if self._store.dialect != "sqlite" or not self.is_open_beside(store):
            return False
        return self._in_block or store.is_locked()

    def is_open_beside(self, store: Store) -> bool:
        """Tell whether it is open still, in the database of ``store``, and may hold locks there."""
        return self._store is store and not self.is_over()

    def flush(self) -> None:
        """Execute what a session has not executed yet, as a query of it would."""
        self._caller.flush()

    def is_deeper(self) -> bool:
        """Tell whether a savepoint is open that was opened in the block."""
        return self._caller.is_deeper(self._mark)

    def run(
        self, function: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call ``function(connection, …)`` in a savepoint of the caller's transaction.

        What has to be committed before is made in a transaction of the store's own, the savepoint
        being rolled back; on SQLite in the caller's. The locks that the caller holds it may wait
        for: as long as for any lock, once.

        :raises EnlistError: where the transaction, or in the block the savepoint it was opened in,
            has ended.
        :raises DistributionError: where the ledger is distributed, and the transaction has changed
            another root.
        :raises StoreError: for whatever the database refuses. As with any other error nothing was
            changed, and the transaction goes on.
        """
        for _ in range(PREPARATIONS if self._reads_committed else 2):
            try:
                with self._told(), self._savepoint() as connection:
                    return function(connection, *args, **kwargs)
            except Unready as unready:
                missing = unready
            self._prepare(missing)
        if self._reads_committed:
            raise StoreError(f"{missing} changes all the time; try again", retryable=True)
        raise StoreError(
            f"{missing} was made since this {self._isolation.upper()} transaction began, which "
            "does not see it; roll back and run it again",
            retryable=True,
        )

    def _prepare(self, missing: Unready) -> None:
        if self._store.dialect == "sqlite":
            with self._told(), self._savepoint() as connection:
                missing.prepare(connection)
            return
        try:
            self._aside(_prepare, self._store, missing)
        except StoreError as error:
            raise StoreError(
                f"{missing} has to be made first, in a transaction of its own, which failed: "
                f"{error}. Where it waited for a lock, the enlisted transaction may hold that "
                "itself: publish before it locks budgets, or end it first",
                retryable=error.retryable,
            ) from error

    def _aside(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call what uses the store's own connection; beside the event loop, if there is one."""
        if not self._caller.driver.is_async:
            return work(*args, **kwargs)
        made: R = await_only(asyncio.to_thread(work, *args, **kwargs))
        return made

    @contextmanager
    def _lent(self) -> Iterator[Connection]:
        with lent(self._caller.driver, self._store.engine) as connection:
            yield connection

    @contextmanager
    def _savepoint(self) -> Iterator[Connection]:
        """Lend the connection within a savepoint and, on PostgreSQL, with our lock time-out.

        Rolling back to the savepoint gives back all locks that were taken since. Its time-out is
        the caller's again at the end.
        """
        self._caller.driver.check()
        if not self._caller.is_open(self._mark if self._in_block else self._whole):
            raise EnlistError(
                "the transaction or savepoint in which the block was opened has ended inside of "
                "it; nothing is published: let the block end first"
            )
        self._caller.join()
        with self._lent() as connection:
            if self._caller.driver.is_begun() is False and self._store.dialect == "sqlite":
                # Not DEFERRED, the driver's: what has read before it writes could not wait.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql(f"SAVEPOINT {SAVEPOINT}")
            self._used = True
            try:
                lock_ms = self._hold_time_out(connection)
                yield connection
                if lock_ms is not None:
                    connection.execute(_SET_TIME_OUT, {"ms": lock_ms})
                connection.exec_driver_sql(f"RELEASE SAVEPOINT {SAVEPOINT}")
            except BaseException:
                self._roll_back()
                raise

    def _hold_time_out(self, connection: Connection) -> str | None:
        if self._store.dialect == "sqlite":
            return None
        given = {"ms": str(self._store.lock_ms), "root": self._root}
        row = connection.execute(_SWAP_TIME_OUT, given).one()
        check_one_root(connection, {self._root, row.root or self._root})
        return str(row.before)

    def _roll_back(self) -> None:
        """Roll back to the savepoint, past SQLAlchemy: it gives up what was cancelled."""
        # Where the connection or all of the transaction is gone, what is raised already says why.
        with suppress(Exception), closing(self._caller.driver.lend().cursor()) as cursor:
            cursor.execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
            cursor.execute(f"RELEASE SAVEPOINT {SAVEPOINT}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say what the database refused, and where that is the caller's to change, what."""
        with self._store.translated():
            try:
                yield
            except exc.DBAPIError as error:
                state, said = state_of(error), str(error.orig)
                if state == "25006" or "readonly database" in said:
                    raise EnlistError(_READ_ONLY) from error
                if state == "25P02":
                    raise EnlistError(FAILED) from error
                if state == "25P01":
                    raise EnlistError(AUTOCOMMIT) from error
                raise


def transactions() -> list[Enlisted]:
    """Return the callers' transactions that the code which runs now is in, the outermost first."""
    return [one for one in enlisted.get() if isinstance(one, Enlisted)]


class _Server(NamedTuple):
    """Which tables of which database of which server."""

    system: int
    database: int
    table: int | None


_LOOK = sa.text(
    "SELECT current_setting('transaction_isolation') AS isolation,"
    " current_setting('transaction_read_only') AS read_only"
)
_IDENTITY = (
    "(SELECT system_identifier FROM pg_control_system()) AS system,"
    " (SELECT CAST(oid AS bigint) FROM pg_database WHERE datname = current_database()) AS database,"
    " CAST(CAST(to_regclass('budget_reservations') AS oid) AS bigint) AS table_oid"
)
#: The root stays with what is done there: it is forgotten with the savepoint, or the transaction.
_SWAP_TIME_OUT = sa.text(
    "SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', :ms, true),"
    " current_setting('budget.root', true) AS root, set_config('budget.root', :root, true)"
)
_SET_TIME_OUT = sa.text("SELECT set_config('lock_timeout', :ms, true)")

#: What stores and callers' connections are connected to.
_servers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _known(store: Store) -> Any:
    """Return which database the store is: a server's, or a file. Connects it once."""
    found = _servers.get(store)
    if found is None:
        found = _servers[store] = store.read(_identity)
    return found


def _identity(connection: Connection) -> Any:
    if connection.dialect.name == "sqlite":
        return _file(connection)
    found = _server(connection)
    if found.table is None:
        raise SchemaError("the ledger's tables are missing; run 'celery -A PROJ budget init'")
    return found


def _server(connection: Connection) -> _Server:
    return _Server(*connection.execute(sa.text(f"SELECT {_IDENTITY}")).one())


def _recall(key: Any) -> Any:
    try:
        return _servers.get(key)
    except TypeError:
        # Of some drivers no weak reference can be had.
        return None


def _remember(key: Any, found: _Server) -> None:
    try:
        _servers[key] = found
    except TypeError:
        return


def _file(connection: Connection) -> str:
    rows = connection.exec_driver_sql("PRAGMA database_list").all()
    return next(str(row[2]) for row in rows if row[1] == "main")


def _check_file(connection: Connection, own: str) -> None:
    found = _file(connection)
    if not found or not os.path.samefile(found, own):
        raise EnlistError(
            f"the connection is to the SQLite file {found or ':memory:'} and the ledger is in "
            f"{own}; enlist a connection to that one"
        )


def _elsewhere(store: Store, found: _Server, own: _Server) -> EnlistError:
    if found[:2] != own[:2]:
        what = "another server" if found.system != own.system else "another database of the server"
        return EnlistError(
            f"the connection is to {what} than the ledger's ({store.url}); enlist a connection to "
            "that one"
        )
    return EnlistError(
        f"by the connection's search_path budget_reservations is not the ledger's ({store.url}); "
        "set the search_path that the ledger's own connections have"
    )


def _prepare(store: Store, missing: Unready) -> None:
    with store.transaction() as connection:
        missing.prepare(connection)
