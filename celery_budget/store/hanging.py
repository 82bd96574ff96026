"""A server that has stopped answering: a statement on it ends as on a lost connection.

A machine that is gone, or cut off, is found by TCP, whose times are set where connections are
made. One whose kernel answers while its server does not, since that was stopped or its disk hangs,
is found by nobody but who waits for it. How long a statement takes says nothing: a report or a
migration may take long. So whoever has waited for a while asks by another connection, and goes on
waiting where that is answered; but not where the server says that the statement has done its work
and waits for a synchronous standby, which it would for as long as there is none.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from sqlalchemy import event
from sqlalchemy.engine import Engine

__all__ = ["watch"]

R = TypeVar("R")

#: What a session waits for: ``SyncRep`` is a synchronous standby's word.
_WAITS = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
SYNCHRONOUS = "SyncRep"
#: How long the server has to answer that, in seconds, where the URL lets it take any time.
CONNECT = 10


class _Impatient(psycopg.Connection[Any]):
    """A connection on which a statement without an answer fails after some time."""

    budget_seconds: float | None = None

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """As psycopg's own, which goes on with ``gen`` also where nothing came for a moment."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
        heard = time.monotonic()
        try:
            state = next(gen)
            while True:
                ready = yield state
                if ready:
                    heard = time.monotonic()
                elif self.budget_seconds and time.monotonic() - heard >= self.budget_seconds:
                    trouble = self._trouble()
                    if trouble:
                        # Whatever it would still say belongs to a statement that has failed.
                        self.close()
                        raise _Silent(trouble)
                    heard = time.monotonic()
                state = gen.send(ready)
        except StopIteration as end:
            result: R = end.value
            return result

    def _trouble(self) -> str:
        """Return why it is waited for no longer; empty to go on."""
        return f"the server has not answered for {self.budget_seconds:g} s"


class _Watched(_Impatient):
    """One that is waited for while its server answers others.

    :ivar budget_arguments: what it was made of.
    """

    budget_arguments: dict[str, Any]

    def _trouble(self) -> str:
        silent = super()._trouble() + ", nor does it answer another connection"
        try:
            waits = self._ask_what_it_waits_for()
        except (_Silent, psycopg.errors.ConnectionTimeout):
            return silent
        except psycopg.Error:
            # It has answered: it takes no more connections, for one.
            return ""
        if waits == SYNCHRONOUS:
            return (
                "the server waits for a synchronous standby and may have committed; see whether "
                "those of synchronous_standby_names are up"
            )
        return ""

    def _ask_what_it_waits_for(self) -> str | None:
        """Ask the same server by a connection of its own; none where it is at work, or unknown."""
        here = {
            "host": self.info.host,
            "hostaddr": self.info.hostaddr,
            "port": self.info.port,
            "target_session_attrs": "any",
            "prepare_threshold": None,
            "autocommit": True,
        }
        with _Impatient.connect(**{**self.budget_arguments, **here}) as other:
            other.budget_seconds = float(self.budget_arguments.get("connect_timeout") or CONNECT)
            row = other.execute(_WAITS, (self.info.backend_pid,)).fetchone()
        return None if row is None else row[0]


class _Silent(psycopg.OperationalError):
    """Nothing came for too long."""


def watch(engine: Engine, seconds: float) -> None:
    """Have statements on the connections of an engine, psycopg's, fail where their server hangs.

    :param seconds: how long one may be without an answer before the server is asked.
    """

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: Any, positional: Any, named: dict[str, Any]) -> Any:
        connection = _Watched.connect(*positional, **named)
        connection.budget_arguments = dict(named)
        connection.budget_seconds = seconds
        return connection
