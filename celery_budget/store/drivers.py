"""Connections as their drivers have them, and how they are lent to our functions.

Nothing here opens a connection, configures one, or ends its transaction. Drivers are looked for
among the modules that are loaded: of what nobody has imported nobody has a connection.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.util import await_only

from celery_budget.errors import EnlistError
from celery_budget.store import clock
from celery_budget.store.prepared import Direct

__all__ = [
    "AUTOCOMMIT",
    "CLOSED",
    "FAILED",
    "Driver",
    "driver_beneath",
    "driver_of",
    "is_lent",
    "lent",
    "loaded",
]

CLOSED = "the connection is closed; enlist one that is open, in a transaction"
FAILED = (
    "the transaction has failed, or has ended, and takes no more statements; roll it back and "
    "begin anew"
)
AUTOCOMMIT = (
    "the connection is in autocommit and no transaction is open, so that each statement would be "
    "committed by itself; begin a transaction first"
)


class Driver(ABC):
    """A connection as its driver has it.

    :ivar key: what stands for the connection: the same one is the same again.
    :ivar is_async: whether what it does has to be awaited.
    """

    is_async = False

    def __init__(self, key: Any) -> None:
        self.key = key

    @property
    @abstractmethod
    def dialect_name(self) -> str:
        """``postgresql``, ``sqlite``, or what the ledger does not live in."""

    @property
    def engine(self) -> Engine | None:
        """The caller's engine, whose dialect goes with it; none where the ledger's own does."""
        return None

    @abstractmethod
    def lend(self) -> Any:
        """Return a DBAPI connection that leaves the transaction to the caller."""

    def check(self) -> None:
        """Check, as far as can be known without a statement, that statements can be executed.

        :raises EnlistError: where it is closed, or its transaction has failed.
        """
        if self.is_closed():
            raise EnlistError(CLOSED)
        if self.has_failed():
            raise EnlistError(FAILED)

    def is_closed(self) -> bool:
        """Tell whether the connection is known to be closed."""
        return False

    def has_failed(self) -> bool:
        """Tell whether the transaction is known to take no more statements."""
        return False

    def is_begun(self) -> bool | None:
        """Tell whether a transaction is open; none where only the server knows."""
        return None

    def begins_itself(self) -> bool:
        """Tell whether a statement begins a transaction where none is open."""
        return True

    def depth(self) -> int:
        """Return how many of the driver's own transaction blocks are open, one in the other."""
        return 0

    @contextmanager
    def as_ours(self) -> Iterator[None]:
        """Have values come as our statements expect them."""
        yield


class _Lent:
    """A DBAPI connection that is the caller's: its transaction is not ours to end.

    All else is what the connection has, the attributes included that dialects know of.
    """

    def __init__(self, connection: Any, cursor: Callable[[], Any]) -> None:
        self.__connection = connection
        self.__cursor = cursor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__connection, name)

    def cursor(self, *args: Any, **options: Any) -> Any:
        return self.__cursor()

    def commit(self) -> None:
        """Leave it to the caller."""

    def rollback(self) -> None:
        """Leave it to the caller."""

    def close(self) -> None:
        """Leave it to the caller."""

    def terminate(self) -> None:
        """Leave it to the caller, even where what it was doing was cancelled."""


class _Psycopg(Driver):
    """A psycopg ``Connection``.

    Its own cursors may be of any class, with any row factory; its adapters may be the caller's.
    Ours are plain ones.
    """

    dialect_name = "postgresql"

    def lend(self) -> Any:
        return _Lent(self.key, lambda: _plain_cursor(self.key))

    def is_closed(self) -> bool:
        return bool(self.key.closed)

    def has_failed(self) -> bool:
        return bool(self.key.info.transaction_status.name == "INERROR")

    def is_begun(self) -> bool:
        return str(self.key.info.transaction_status.name) != "IDLE"

    def begins_itself(self) -> bool:
        return not self.key.autocommit

    def depth(self) -> int:
        # psycopg has no public way to ask; it counts them so from its first release on.
        return int(self.key._num_transactions)


class _AsyncPsycopg(_Psycopg):
    """A psycopg ``AsyncConnection``, used in a greenlet."""

    is_async = True

    def lend(self) -> Any:
        return _Lent(self.key, lambda: _Awaited(_plain_cursor(self.key)))


def _plain_cursor(connection: Any) -> Any:
    plain, awaited = _psycopg_cursors()
    kind = awaited if isinstance(connection, sys.modules["psycopg"].AsyncConnection) else plain
    return kind(connection)


@cache
def _psycopg_cursors() -> tuple[Any, Any]:
    psycopg = sys.modules["psycopg"]

    def plain(base: Any) -> Any:
        def init(self: Any, connection: Any) -> None:
            base.__init__(self, connection, row_factory=psycopg.rows.tuple_row)

        adapters = property(lambda self: psycopg.adapters)
        return type(f"Budget{base.__name__}", (base,), {"__init__": init, "adapters": adapters})

    return plain(psycopg.Cursor), plain(psycopg.AsyncCursor)


class _Awaited:
    """A psycopg ``AsyncCursor`` as the DBAPI has cursors, for use in a greenlet."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self._rows: deque[Any] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, query: str, parameters: Any = None) -> None:
        await_only(self._cursor.execute(query, parameters))
        fetched = await_only(self._cursor.fetchall()) if self._cursor.description else ()
        self._rows = deque(fetched)

    def executemany(self, query: str, parameters: Any) -> None:
        await_only(self._cursor.executemany(query, parameters))

    def fetchone(self) -> Any:
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        some = self._cursor.arraysize if size is None else size
        return [self._rows.popleft() for _ in range(min(some, len(self._rows)))]

    def fetchall(self) -> list[Any]:
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def close(self) -> None:
        # The rows are here already; the server keeps nothing for it.
        self._rows.clear()


class _Sqlite(Driver):
    """A ``sqlite3.Connection``."""

    dialect_name = "sqlite"

    def lend(self) -> Any:
        return _Lent(self.key, self._cursor)

    def _cursor(self) -> Any:
        cursor = sys.modules["sqlite3"].Cursor(self.key)
        cursor.row_factory = None
        return cursor

    def is_closed(self) -> bool:
        try:
            return self.key.total_changes is None
        except sys.modules["sqlite3"].ProgrammingError:
            return True

    def is_begun(self) -> bool:
        return _sqlite_begun(self.key)

    def begins_itself(self) -> bool:
        return _sqlite_begins(self.key)

    @contextmanager
    def as_ours(self) -> Iterator[None]:
        text, self.key.text_factory = self.key.text_factory, str
        try:
            yield
        finally:
            self.key.text_factory = text


def _sqlite_begun(connection: Any) -> bool:
    try:
        return bool(connection.in_transaction)
    except (ValueError, sys.modules["sqlite3"].ProgrammingError):
        # It is closed: what aiosqlite says, and what sqlite3 does.
        return False


def _sqlite_begins(connection: Any) -> bool:
    # Since Python 3.12 there is `autocommit`; -1 says that isolation_level decides, as before.
    autocommit = getattr(connection, "autocommit", -1)
    return connection.isolation_level is not None if autocommit == -1 else not autocommit


class _Other(Driver):
    """What SQLAlchemy has a driver for and we do not: by its dialect, as SQLAlchemy set it up."""

    def __init__(self, connection: Connection) -> None:
        fairy = connection.connection
        super().__init__(fairy.driver_connection)
        self._connection: Any = fairy.dbapi_connection
        self._engine = connection.engine
        self.is_async = connection.dialect.is_async

    @property
    def dialect_name(self) -> str:
        return str(self._engine.dialect.name)

    @property
    def engine(self) -> Engine:
        return self._engine

    def lend(self) -> Any:
        return _Lent(self._connection, self._connection.cursor)

    def is_begun(self) -> bool | None:
        return _sqlite_begun(self.key) if self.dialect_name == "sqlite" else None

    def begins_itself(self) -> bool:
        return _sqlite_begins(self.key) if self.dialect_name == "sqlite" else True


#: Drivers' connections, by the module and the class they are of.
_DRIVERS: tuple[tuple[str, str, Callable[[Any], Driver]], ...] = (
    ("psycopg", "Connection", _Psycopg),
    ("psycopg", "AsyncConnection", _AsyncPsycopg),
    ("sqlite3", "Connection", _Sqlite),
)


def driver_of(connection: Any) -> Driver | None:
    """Return a connection of the ledger's own drivers as a :class:`Driver`; none for any other."""
    for module, name, kind in _DRIVERS:
        if isinstance(connection, loaded(module, name)):
            return kind(connection)
    return None


def driver_beneath(connection: Connection) -> Driver:
    """Return the driver's connection of one of SQLAlchemy's."""
    return driver_of(connection.connection.driver_connection) or _Other(connection)


def loaded(module: str, name: str) -> Any:
    """Return a class if its module is loaded; else what nothing is an instance of."""
    return getattr(sys.modules.get(module), name, ())


_lending: ContextVar[Any] = ContextVar("budget_lending")
_engines: WeakKeyDictionary[Engine, Engine] = WeakKeyDictionary()
#: Marks connections that are a caller's.
_LENT = "budget_lent"


@contextmanager
def lent(driver: Driver, own: Engine) -> Iterator[Connection]:
    """Have the caller's connection as our functions take one.

    Nothing asks the server what it is: the dialect is one that knows, the ledger's or the caller's.

    :param own: the ledger's engine, which has been connected before.
    """
    token = _lending.set(driver.lend())
    try:
        engine = _lent_engine(driver.engine or own)
        clock.follow(engine, own)
        with driver.as_ours(), engine.connect() as connection:
            yield connection
    finally:
        _lending.reset(token)


def is_lent(connection: Connection) -> bool:
    """Tell whether the transaction is a caller's, which may go on for long when we are through."""
    if isinstance(connection, Direct):
        # Ours; it has no options to ask for.
        return False
    return bool(connection.get_execution_options().get(_LENT))


def _lending_now() -> Any:
    return _lending.get()


def _lent_engine(base: Engine) -> Engine:
    """Return an engine for connections that are lent; it remembers the statements it compiled."""
    engine = _engines.get(base)
    if engine is None:
        pool = sa.NullPool(_lending_now, dialect=base.dialect, reset_on_return=None)
        engine = Engine(
            pool,
            base.dialect,
            base.url,
            hide_parameters=base.hide_parameters,
            execution_options={_LENT: True},
        )
        _engines[base] = engine
    return engine
