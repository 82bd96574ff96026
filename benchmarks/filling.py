"""An outbox that is filled quickly: by copies of a message that was admitted and captured."""

from __future__ import annotations

import sqlalchemy as sa
from celery import Celery

from benchmarks.application import SIZE, TENANT
from celery_budget.core.messages import WireMessage
from celery_budget.integration.context import installed_on
from celery_budget.store.outbox import message_of
from celery_budget.store.schema import outbox, reservations

__all__ = ["Filler"]

#: Each with ids of its own, in its headers as well; the rest is as it was captured.
_RESERVATIONS = """
INSERT INTO budget_reservations
SELECT copied.* FROM budget_reservations r, generate_series(1, :rows) AS number,
  LATERAL jsonb_populate_record(r, jsonb_build_object(
    'reservation_id', md5(:salt || number)::uuid,
    'task_id', md5(:salt || number)::uuid, 'request_id', md5(:salt || number)::uuid)) AS copied
 WHERE r.root = :root AND r.reservation_id = :reservation_id
"""
_MESSAGES = """
INSERT INTO budget_outbox
SELECT copied.* FROM budget_outbox o, generate_series(1, :rows) AS number,
  LATERAL jsonb_populate_record(o, jsonb_build_object(
    'outbox_id', md5(:salt || 'o' || number)::uuid,
    'reservation_id', md5(:salt || number)::uuid,
    'task_id', md5(:salt || number)::uuid, 'due_us', o.created_us + number, 'state', 'due',
    'envelope', replace(replace(o.envelope, CAST(o.reservation_id AS text),
        CAST(md5(:salt || number)::uuid AS text)), o.task_id,
        CAST(md5(:salt || number)::uuid AS text)))) AS copied
 WHERE o.root = :root AND o.reservation_id = :reservation_id
"""


class Filler:
    """Fills the outbox of an application's root, again and again."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._store = installed_on(app).store
        self._root = installed_on(app).settings.root
        self._fills = 0
        app.tasks["bench.budgeted"].delay(SIZE, tenant=TENANT)
        with self._store.transaction() as connection:
            row = connection.execute(outbox.select().where(outbox.c.root == self._root)).one()
            # It is a pattern only: nobody publishes it.
            connection.execute(
                outbox.update().where(outbox.c.root == self._root).values(state="blocked")
            )
        self._reservation_id, self._outbox_id = row.reservation_id, row.outbox_id

    def fill(self, rows: int) -> None:
        """Have so many messages due and no others; what was published before is forgotten."""
        self._fills += 1
        values = {
            "root": self._root,
            "reservation_id": self._reservation_id,
            "rows": rows,
            "salt": f"{self._root} {self._fills} ",
        }
        with self._store.transaction() as connection:
            connection.execute(
                outbox.delete().where(
                    outbox.c.root == self._root, outbox.c.outbox_id != self._outbox_id
                )
            )
            connection.execute(
                reservations.delete().where(
                    reservations.c.root == self._root,
                    reservations.c.reservation_id != self._reservation_id,
                )
            )
            connection.execute(sa.text(_RESERVATIONS), values)
            connection.execute(sa.text(_MESSAGES), values)
        with self._store.statement() as connection:
            for table in ("budget_outbox", "budget_reservations"):
                connection.execute(sa.text(f"VACUUM ANALYZE {table}"))

    def messages(self) -> list[WireMessage]:
        """Return what is due, as a relay reads it."""
        due = outbox.select().where(outbox.c.root == self._root, outbox.c.state == "due")
        with self._store.snapshot() as connection:
            return [message_of(row) for row in connection.execute(due)]
