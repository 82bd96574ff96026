"""Callers' connections of every kind, with the same short verbs.

A :class:`Client` writes business rows, opens enlisted blocks and savepoints, commits and rolls
back, each in the words of its library.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import MappingProxyType
from typing import Any

import django
import psycopg
import sqlalchemy as sa
from django.conf import settings as django_settings
from django.db import connections, transaction
from psycopg.rows import dict_row
from sqlalchemy import event, orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from celery_budget import asettle, budgeted, effect, settle
from celery_budget.integration.install import CeleryBudget
from celery_budget.store import schema
from tests.integration.support import Shop

BUSINESS = sa.table("business", sa.column("word"))
INSERT = "INSERT INTO business (word) VALUES ('{}')"

Body = Callable[[Any], Any]


class Undone(Exception):
    """Ends a savepoint so that it is rolled back."""


class Client:
    """A caller with a connection.

    :ivar given: what is enlisted.
    """

    given: Any

    def __init__(self, budget: CeleryBudget) -> None:
        self.budget = budget
        self._stack = ExitStack()
        self.connect(budget.settings.database_url)

    def connect(self, url: str) -> None:
        raise NotImplementedError

    def execute(self, statement: str) -> None:
        raise NotImplementedError

    def commit(self) -> None:
        self.given.commit()

    def rollback(self) -> None:
        self.given.rollback()

    def savepoint(self) -> Any:
        raise NotImplementedError

    def write(self, word: str) -> None:
        """Write a business row."""
        self.execute(INSERT.format(word))

    def enlisted(self, body: Body, **options: Any) -> Any:
        """Call ``body(batch)`` in an enlisted block; what it returned."""
        with self.budget.enlist(self.given, **options) as batch:
            return body(batch)

    def enlisted_in_savepoint(self, body: Body, undo: bool) -> None:
        """The same in a savepoint, which is then released or rolled back."""
        with suppress(Undone), self.savepoint():
            self.enlisted(body)
            if undo:
                raise Undone

    def effect(self, key: str, body: Body) -> Any:
        """Call ``body(first)`` in a block that has an effect; what it returned."""
        with effect(self.given, key) as first:
            return body(first)

    def effect_in_savepoint(self, key: str, body: Body, undo: bool) -> None:
        """The same in a savepoint, which is then released or rolled back."""
        with suppress(Undone), self.savepoint():
            self.effect(key, body)
            if undo:
                raise Undone

    def settle(self, value: Any) -> None:
        """Settle the task that runs."""
        settle(self.given, value)

    def close(self) -> None:
        self._stack.close()


class Sqlalchemy(Client):
    """A SQLAlchemy ``Connection``."""

    def connect(self, url: str) -> None:
        self.engine = sa.create_engine(self.adapted(url))
        self._stack.callback(self.engine.dispose)
        self.prepare()
        self.given = self.made()
        self._stack.callback(self.given.close)

    def adapted(self, url: str) -> sa.URL:
        made = sa.make_url(url)
        return made.set(drivername="postgresql+psycopg") if "postgresql" in url else made

    def prepare(self) -> None: ...

    def made(self) -> Any:
        return self.engine.connect()

    def execute(self, statement: str) -> None:
        self.given.execute(sa.text(statement))

    def savepoint(self) -> Any:
        return self.given.begin_nested()


class Session(Sqlalchemy):
    def made(self) -> Any:
        return orm.Session(self.engine)


class ScopedSession(Sqlalchemy):
    def made(self) -> Any:
        return orm.scoped_session(orm.sessionmaker(self.engine))


class BegunByHand(Sqlalchemy):
    """SQLAlchemy on SQLite with transactions that are begun by SQLAlchemy, not by the driver."""

    def prepare(self) -> None:
        @event.listens_for(self.engine, "connect")
        def connect(connection: Any, record: Any) -> None:
            connection.isolation_level = None

        @event.listens_for(self.engine, "begin")
        def begin(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")


class Translated(Sqlalchemy):
    """A connection for which tables without a schema are those of another one."""

    def made(self) -> Any:
        options = {"schema_translate_map": {None: "elsewhere"}}
        return self.engine.connect().execution_options(**options)


class Async(Sqlalchemy):
    """A SQLAlchemy ``AsyncConnection``, and the event loop it lives in."""

    def connect(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._stack.callback(self.loop.close)
        self.engine = create_async_engine(self.adapted(url))
        self._stack.callback(lambda: self.wait(self.engine.dispose()))
        self.given = self.wait(self.amade())
        self._stack.callback(lambda: self.wait(self.given.close()))

    def adapted(self, url: str) -> sa.URL:
        made = super().adapted(url)
        return made.set(drivername="sqlite+aiosqlite") if "sqlite" in url else made

    async def amade(self) -> Any:
        return await self.engine.connect()

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def execute(self, statement: str) -> None:
        self.wait(self.given.execute(sa.text(statement)))

    def commit(self) -> None:
        self.wait(self.given.commit())

    def rollback(self) -> None:
        self.wait(self.given.rollback())

    def enlisted(self, body: Body, **options: Any) -> Any:
        async def block() -> Any:
            async with self.budget.enlist(self.given, **options) as batch:
                return body(batch)

        return self.wait(block())

    def enlisted_in_savepoint(self, body: Body, undo: bool) -> None:
        async def block() -> None:
            async with self.savepoint():
                async with self.budget.enlist(self.given) as batch:
                    body(batch)
                if undo:
                    raise Undone

        with suppress(Undone):
            self.wait(block())

    async def aeffect(self, key: str, body: Body) -> Any:
        async with effect(self.given, key) as first:
            return body(first)

    def effect(self, key: str, body: Body) -> Any:
        return self.wait(self.aeffect(key, body))

    def effect_in_savepoint(self, key: str, body: Body, undo: bool) -> None:
        async def block() -> None:
            async with self.savepoint():
                await self.aeffect(key, body)
                if undo:
                    raise Undone

        with suppress(Undone):
            self.wait(block())

    def settle(self, value: Any) -> None:
        self.wait(asettle(self.given, value))


class AsyncSessions(Async):
    async def amade(self) -> Any:
        return AsyncSession(self.engine)


class Psycopg(Client):
    """A psycopg ``Connection``."""

    options: Mapping[str, Any] = MappingProxyType({})

    def connect(self, url: str) -> None:
        self.given = psycopg.connect(conninfo(url), **self.options)
        self._stack.callback(self.given.close)

    def execute(self, statement: str) -> None:
        self.given.execute(statement)

    def savepoint(self) -> Any:
        return self.given.transaction()


class OddPsycopg(Psycopg):
    """One whose cursors, rows and adapters are the caller's own."""

    options = MappingProxyType({"row_factory": dict_row, "cursor_factory": psycopg.ClientCursor})

    def connect(self, url: str) -> None:
        super().connect(url)
        adapters = self.given.adapters
        adapters.register_loader("uuid", psycopg.types.string.TextLoader)
        adapters.register_loader("int8", psycopg.types.string.TextLoader)
        adapters.register_loader("text", psycopg.types.string.TextBinaryLoader)


class PsycopgBlock(Psycopg):
    """One in autocommit, in a transaction block."""

    options = MappingProxyType({"autocommit": True})

    def connect(self, url: str) -> None:
        super().connect(url)
        self.begin()

    def begin(self) -> None:
        self._block = self.given.transaction()
        self._block.__enter__()

    def commit(self) -> None:
        self._block.__exit__(None, None, None)
        self.begin()

    def rollback(self) -> None:
        self._block.__exit__(Undone, Undone(), None)
        self.begin()


class AsyncPsycopg(Async):
    """A psycopg ``AsyncConnection``."""

    def connect(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._stack.callback(self.loop.close)
        self.given = self.wait(psycopg.AsyncConnection.connect(conninfo(url), row_factory=dict_row))
        self._stack.callback(lambda: self.wait(self.given.close()))

    def execute(self, statement: str) -> None:
        self.wait(self.given.execute(statement))

    def savepoint(self) -> Any:
        return self.given.transaction()


class Sqlite(Client):
    """A ``sqlite3.Connection``, whose driver begins transactions."""

    options: Mapping[str, Any] = MappingProxyType({})

    def connect(self, url: str) -> None:
        self.given = sqlite3.connect(path(url), check_same_thread=False, **self.options)
        self._stack.callback(self.given.close)

    def execute(self, statement: str) -> None:
        self.given.execute(statement)

    @contextmanager
    def savepoint(self) -> Any:
        self.given.execute("SAVEPOINT mine")
        try:
            yield
        except BaseException:
            self.given.execute("ROLLBACK TO mine")
            raise
        finally:
            self.given.execute("RELEASE mine")


class OddSqlite(Sqlite):
    """One whose rows, text and types are the caller's own."""

    options = MappingProxyType({"detect_types": sqlite3.PARSE_DECLTYPES | sqlite3.PARSE_COLNAMES})

    def connect(self, url: str) -> None:
        super().connect(url)
        self.given.row_factory = lambda cursor, row: {"row": row}
        self.given.text_factory = bytes


class SqliteByHand(Sqlite):
    """One in autocommit, with transactions begun by hand."""

    options = MappingProxyType({"isolation_level": None})

    def connect(self, url: str) -> None:
        super().connect(url)
        self.given.execute("BEGIN")

    def commit(self) -> None:
        super().commit()
        self.given.execute("BEGIN")

    def rollback(self) -> None:
        super().rollback()
        self.given.execute("BEGIN")


class Django(Client):
    """Django's connection, inside ``transaction.atomic``."""

    alias = "enlist"

    def connect(self, url: str) -> None:
        if not django_settings.configured:
            django_settings.configure(USE_TZ=True)
            django.setup()
        made = sa.make_url(url)
        if made.get_backend_name() == "sqlite":
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": made.database}
        else:
            database = {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": made.database,
                "USER": made.username or "",
                "PASSWORD": made.password or "",
                "HOST": made.query.get("host") or made.host or "",
                "PORT": str(made.port or made.query.get("port") or ""),
            }
        filled = connections.configure_settings({"default": {}, self.alias: database})
        connections.settings[self.alias] = filled[self.alias]
        self.given = connections[self.alias]
        self._stack.callback(self.forget)
        self.begin()

    def forget(self) -> None:
        self.end()
        self.given.close()
        del connections[self.alias]
        del connections.settings[self.alias]

    def end(self) -> None:
        self.atomic.__exit__(Undone, Undone(), None)

    def begin(self) -> None:
        self.atomic = transaction.atomic(self.alias)
        self.atomic.__enter__()

    def execute(self, statement: str) -> None:
        with self.given.cursor() as cursor:
            cursor.execute(statement)

    def commit(self) -> None:
        self.atomic.__exit__(None, None, None)
        self.begin()

    def rollback(self) -> None:
        self.atomic.__exit__(Undone, Undone(), None)
        self.begin()

    def savepoint(self) -> Any:
        return transaction.atomic(self.alias)


def conninfo(url: str) -> str:
    """A SQLAlchemy URL as libpq has it."""
    return sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def path(url: str) -> str:
    """The file of a SQLite URL."""
    return str(sa.make_url(url).database)


#: Kinds of connections, by the dialect of the ledger.
KINDS: dict[str, list[type[Client]]] = {
    "postgresql": [
        Sqlalchemy,
        Session,
        Async,
        AsyncSessions,
        Psycopg,
        PsycopgBlock,
        AsyncPsycopg,
        Django,
    ],
    "sqlite": [Sqlalchemy, Session, Async, AsyncSessions, Sqlite, SqliteByHand, Django],
}
#: Variants of them.
VARIANTS: dict[str, list[type[Client]]] = {
    "postgresql": [ScopedSession, Translated, OddPsycopg],
    "sqlite": [ScopedSession, BegunByHand, OddSqlite],
}


class Caller:
    """An application with a task, and a caller's connection to its ledger."""

    def __init__(self, shop: Shop, kind: type[Client]) -> None:
        self.shop = shop
        self.client = kind(shop.budget)
        self._others: list[Client] = []

        @budgeted(budget=lambda tenant: f"tenant:{tenant}", estimate=lambda amount: amount)
        @shop.app.task(name="shop.draft", shared=False)
        def draft(tenant: str, amount: int = 1) -> None: ...

        @shop.app.task(name="shop.plain", shared=False)
        def plain() -> None: ...

        self.draft, self.plain = draft, plain

    def another(self, kind: type[Client] | None = None) -> Client:
        """One more client, of the same kind unless told otherwise."""
        self._others.append((kind or type(self.client))(self.shop.budget))
        return self._others[-1]

    def enlisted_by(self, client: Client) -> None:
        """Have a connection of another ledger enlisted in this one."""
        theirs, client.budget = client.budget, self.shop.budget
        try:
            client.enlisted(lambda batch: self.draft.delay("a"))
        finally:
            client.budget = theirs

    def close(self) -> None:
        for client in (*self._others, self.client):
            client.close()

    def business(self) -> list[str]:
        """The business rows that were committed."""
        with self.shop.budget.store.snapshot() as connection:
            return sorted(connection.execute(sa.select(BUSINESS.c.word)).scalars())

    def committed(self) -> tuple[list[str], int, int]:
        """Business rows, what is reserved, and how many messages are due, for everybody to see."""
        return self.business(), self.shop.amounts("tenant:a")[0], len(self.outbox())

    def outbox(self) -> list[Any]:
        with self.shop.budget.store.snapshot() as connection:
            return list(connection.execute(sa.select(schema.outbox)))
