"""What callers give to be enlisted, and the transactions and savepoints that they are in.

The only place where callers' connections are taken: SQLAlchemy's, Django's, and drivers' own.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.engine import Connection

from celery_budget.errors import EnlistError
from celery_budget.store.drivers import (
    AUTOCOMMIT,
    CLOSED,
    FAILED,
    Driver,
    driver_beneath,
    driver_of,
    loaded,
)

__all__ = ["Caller", "caller_of"]

KINDS = (
    "a SQLAlchemy Session, Connection, AsyncSession or AsyncConnection, a psycopg 3 Connection or "
    "AsyncConnection, Django's connection, or a sqlite3 Connection"
)


class Caller(ABC):
    """What a caller gave to be enlisted, and the transaction it is in.

    :ivar driver: its connection; there after :meth:`begin`.
    :ivar is_async: whether ``async with`` is for it.
    :ivar session: the SQLAlchemy session that the connection is of, if any.
    """

    driver: Driver
    is_async = False
    session: orm.Session | None = None

    @abstractmethod
    def begin(self) -> None:
        """See that a transaction is open, or will be with the first statement.

        :raises EnlistError: where none can be.
        """

    def flush(self) -> None:
        """Execute what a session has not executed yet, where a query of it would do so."""
        if self.session is not None and self.session.autoflush:
            self.session.flush()

    def join(self) -> None:
        """See that the innermost savepoint is open in the database: a session begins it late."""
        if self.session is not None:
            self.session.connection()

    @abstractmethod
    def mark(self) -> Any:
        """Return what stands for the innermost transaction or savepoint that is open."""

    @abstractmethod
    def outermost(self) -> Any:
        """Return what stands for the whole transaction."""

    @abstractmethod
    def is_open(self, mark: Any) -> bool:
        """Tell whether what was marked has not ended."""

    @abstractmethod
    def is_deeper(self, mark: Any) -> bool:
        """Tell whether a savepoint is open in what was marked, as far as can be known."""


class _Bare(Caller):
    """A driver's connection by itself."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.is_async = driver.is_async

    def begin(self) -> None:
        self.driver.check()
        if not self.driver.is_begun() and not self.driver.begins_itself():
            raise EnlistError(AUTOCOMMIT)

    def mark(self) -> tuple[int, bool]:
        return self.driver.depth(), bool(self.driver.is_begun())

    def outermost(self) -> tuple[int, bool]:
        return 0, True

    def is_open(self, mark: Any) -> bool:
        depth, begun = mark
        return self.driver.depth() >= depth and (not begun or bool(self.driver.is_begun()))

    def is_deeper(self, mark: Any) -> bool:
        return self.driver.depth() > int(mark[0])


class _Sqlalchemy(Caller):
    """A SQLAlchemy ``Connection``, or the one that a ``Session`` uses."""

    _connection: Connection

    def __init__(self, given: orm.Session | Connection | None, is_async: bool = False) -> None:
        if isinstance(given, orm.Session):
            self.session = given
        elif given is not None:
            self._connection = given
        else:
            # An AsyncConnection that was not started, or is closed.
            raise EnlistError(CLOSED)
        self.is_async = is_async

    def begin(self) -> None:
        try:
            if self.session is not None:
                self._connection = self.session.connection()
            elif self._connection.closed:
                raise EnlistError(CLOSED)
            elif not self._connection.in_transaction():
                # Otherwise SQLAlchemy would not know that there is anything to commit.
                self._connection.begin()
        except sa.exc.InvalidRequestError as error:
            raise EnlistError(f"this cannot be enlisted: {error}") from error
        self.driver = driver_beneath(self._connection)
        self.driver.check()
        if self.driver.is_begun() is False and not self.driver.begins_itself():
            raise EnlistError(AUTOCOMMIT)
        if not self.is_open(self.mark()):
            raise EnlistError(FAILED)

    def mark(self) -> Any:
        begun = self.session or self._connection
        return begun.get_nested_transaction() or begun.get_transaction()

    def outermost(self) -> Any:
        return (self.session or self._connection).get_transaction()

    def is_open(self, mark: Any) -> bool:
        return mark is not None and bool(mark.is_active)

    def is_deeper(self, mark: Any) -> bool:
        return self.is_open(mark) and self.mark() is not mark


class _Django(Caller):
    """The connection of one of Django's databases, inside ``transaction.atomic``."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def begin(self) -> None:
        wrapper = self._wrapper
        if not wrapper.in_atomic_block:
            raise EnlistError(
                f"Django's connection {wrapper.alias!r} is in autocommit, where each statement is "
                "committed by itself; open the block inside transaction.atomic()"
            )
        if wrapper.needs_rollback:
            raise EnlistError(FAILED)
        driver = driver_of(wrapper.connection)
        if driver is None:
            raise EnlistError(
                f"Django's connection {wrapper.alias!r} is to {wrapper.vendor} by "
                f"{type(wrapper.connection).__module__}; the ledger takes part in transactions of "
                "psycopg 3 and sqlite3"
                "; use a connection of one of these"
            )
        self.driver = driver
        driver.check()

    def mark(self) -> tuple[Any, ...]:
        return tuple(self._wrapper.savepoint_ids)

    def outermost(self) -> tuple[Any, ...]:
        return ()

    def is_open(self, mark: Any) -> bool:
        return bool(self._wrapper.in_atomic_block) and self.mark()[: len(mark)] == mark

    def is_deeper(self, mark: Any) -> bool:
        # A block with savepoint=False is none that could be rolled back by itself.
        return any(one is not None for one in self.mark()[len(mark) :])


def caller_of(given: Any) -> Caller:
    """Return what was given as a :class:`Caller`.

    :raises EnlistError: for what is no connection we know.
    """
    asyncio = "sqlalchemy.ext.asyncio"
    if isinstance(given, (orm.scoped_session, loaded(asyncio, "async_scoped_session"))):
        given = given()
    if isinstance(given, (orm.Session, Connection)):
        return _Sqlalchemy(given)
    if isinstance(given, loaded(asyncio, "AsyncSession")):
        return _Sqlalchemy(given.sync_session, is_async=True)
    if isinstance(given, loaded(asyncio, "AsyncConnection")):
        return _Sqlalchemy(given.sync_connection, is_async=True)
    if isinstance(given, loaded("django.utils.connection", "ConnectionProxy")):
        given = sys.modules["django.db"].connections[given.alias]
    if isinstance(given, loaded("django.db.backends.base.base", "BaseDatabaseWrapper")):
        return _Django(given)
    driver = driver_of(given)
    if driver is not None:
        return _Bare(driver)
    raise EnlistError(f"{given!r} cannot be enlisted; give {KINDS}")
