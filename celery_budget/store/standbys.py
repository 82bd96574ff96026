"""Synchronous standbys: what a transaction has seen committed is to be there before it is told.

A server waits for its standbys at the end of a transaction that has written. One that is broken
off while it waits, by a crash or an administrator, has committed on this server all the same, and
whoever only finds its work there waits for nothing: the standby may still take over without it.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

__all__ = ["REPLICATED", "wait_for_standbys"]

#: True, of a transaction that waits from then on for the standbys, if there are to be any, until
#: they have all that was committed before it: a record that nobody reads makes it one that writes.
REPLICATED = (
    "CASE WHEN current_setting('synchronous_standby_names') = '' THEN true"
    " ELSE pg_logical_emit_message(true, 'celery_budget', '') IS NOT NULL END"
)

_WAIT = sa.text(f"SELECT {REPLICATED}")


def wait_for_standbys(connection: Connection) -> None:
    """Have the end of this transaction wait for what it has found, though it writes nothing.

    Locks nothing. Of a caller's transaction the caller's own commit waits.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_WAIT)
