"""A copy of the ledger's database that is only read: a PostgreSQL that follows the ledger's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from celery_budget.errors import ReplicaError, SchemaError, StoreError
from celery_budget.store.engine import Store

__all__ = ["ReadFrom", "Replica", "behind", "read_from"]

#: Whether it follows another server, and by how much what it shows is older than its clock. Where
#: all that came is replayed and a receiver takes what comes nothing is missing, however long ago
#: the last transaction was.
_BEHIND = sa.text(
    "SELECT pg_is_in_recovery() AS follows, CASE"
    " WHEN NOT pg_is_in_recovery() THEN 0"
    " WHEN pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn()"
    " AND EXISTS (SELECT 1 FROM pg_stat_wal_receiver) THEN 0"
    " ELSE greatest(0, extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()))"
    " END AS seconds"
)


@dataclass(frozen=True)
class ReadFrom:
    """Where something was read.

    :ivar server: the URL of the database, without its password.
    :ivar replica: whether it is that of ``budget_report_url``.
    :ivar follows: whether it follows another server just now: false once it was promoted.
    :ivar behind_seconds: by how much what it shows may be older than its clock; none where nobody
        can tell, as before the first transaction that it replays.
    """

    server: str
    replica: bool
    follows: bool
    behind_seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


class Replica(Store):
    """The database of ``budget_report_url``.

    What is read is one moment of the ledger, a little ago. Nothing is written: not a row, not a
    lock, and no other function of :class:`Store` than :meth:`~Store.read` is of any use.

    :raises ConfigurationError: as for :class:`Store`.
    """

    def __init__(self, url: str, lock_seconds: float = 5.0, answer_seconds: float = 10.0) -> None:
        super().__init__(url, lock_seconds, answer_seconds, setting="budget_report_url")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Refuse: raises ReplicaError."""
        raise ReplicaError(self.url, "this would write, and is for the ledger's own database")
        yield  # type: ignore[unreachable]  # makes it a context manager all the same

    statement = transaction

    @contextmanager
    def translated(self, engine: Engine | None = None) -> Iterator[None]:
        """Have errors say whose they are, and what to do about them."""
        try:
            with super().translated(engine):
                yield
        except ReplicaError:
            raise
        except StoreError as error:
            said = error.message.removeprefix(f"the ledger's database {self.url} ")
            raise ReplicaError(self.url, said, error.retryable) from error.__cause__
        except SchemaError as error:
            said = "has no such tables as this release needs, or has not received them yet"
            raise ReplicaError(self.url, said) from error


def behind(connection: Connection) -> tuple[bool, float | None]:
    """Return whether a server follows another, and by how many seconds it is behind.

    Of SQLite, and of a server that follows nobody, it is nothing.
    """
    if connection.dialect.name != "postgresql":
        return False, 0.0
    row = connection.execute(_BEHIND).one()
    return bool(row.follows), None if row.seconds is None else round(float(row.seconds), 3)


def read_from(store: Store) -> ReadFrom:
    """Return where what is read from ``store`` comes from, and how old it is.

    :raises StoreError: where it cannot be asked.
    """
    if not isinstance(store, Replica):
        return ReadFrom(store.url, False, False, 0.0)
    follows, seconds = store.read(behind)
    return ReadFrom(store.url, True, follows, seconds)
