"""An application in this process with short verbs: publish, relay, look at queue and ledger."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_budget import CeleryBudget, relay
from celery_budget.core.identity import new_id
from celery_budget.integration.context import HEADER, parse_header
from celery_budget.integration.publisher import KombuPublisher
from celery_budget.integration.queues import KombuQueues
from celery_budget.integration.results import BackendResults
from celery_budget.integration.service import sweep
from celery_budget.relay import Relayed
from celery_budget.store import schema
from celery_budget.suspicion import Suspicion
from celery_budget.upkeep import Upkeep

Rows = dict[str, list[tuple[Any, ...]]]


def make_app(main: str = "shop", *, budget: bool = True, **conf: Any) -> Celery:
    """An application whose queue is its own, even on the in-memory transport that all share."""
    app = Celery(main, set_as_current=False)
    app.conf.update(
        {
            "broker_url": "memory://",
            "result_backend": "cache+memory://",
            "task_default_queue": f"{main}-{new_id().hex}",
            "broker_connection_retry": False,
            **conf,
        }
    )
    if budget:
        CeleryBudget(app)
    return app


@dataclass
class Shop:
    """An application with its budget, and what a test does with it.

    :ivar publisher: the relay's way to the broker, kept from one pass to the next.
    """

    app: Celery
    budget: CeleryBudget
    publisher: KombuPublisher

    def __init__(self, app: Celery, budget: CeleryBudget) -> None:
        self.app = app
        self.budget = budget
        self.publisher = KombuPublisher(app)

    def task(self, name: str) -> Any:
        return self.app.tasks[name]

    def relay(self) -> Relayed:
        """One pass of the relay."""
        return relay.run_once(
            self.budget.store,
            self.budget.settings,
            self.publisher,
            BackendResults(self.app).ended,
        )

    def sweep(self) -> None:
        """Every periodic step once."""
        budget = self.budget
        suspicion = Suspicion(budget.store, budget.settings, KombuQueues(self.app))
        sweep(budget, Upkeep(budget.store, budget.settings), suspicion)

    def received(self, queue: str | None = None) -> list[Any]:
        """Take all messages out of a queue, by default the application's own."""
        return received(self.app, queue or self.app.conf.task_default_queue)

    def ledger(self, *but: str) -> Rows:
        """Everything in the ledger, by table, without those named and the count of the outbox."""
        with self.budget.store.transaction() as connection:
            return {
                table.name: sorted(map(tuple, connection.execute(sa.select(table))), key=repr)
                for table in schema.metadata.sorted_tables
                if table.name not in (*but, "budget_backlog")
            }

    def sql(self, statement: sa.Executable) -> Any:
        """Change the ledger behind its back: time passes, a row is lost."""
        with self.budget.store.transaction() as connection:
            return connection.execute(statement)

    def rows(self, table: sa.Table) -> list[sa.Row[Any]]:
        with self.budget.store.transaction() as connection:
            return list(connection.execute(sa.select(table)))

    def make_due(self) -> None:
        """Let the time come for which messages wait in the outbox."""
        self.sql(
            schema.outbox.update()
            .where(schema.outbox.c.state == "due")
            .values(due_us=0, expires_us=schema.outbox.c.expires_us)
        )

    def counts(self) -> dict[str, int]:
        return self.budget.report().counts

    def amounts(self, name: str) -> tuple[int, int, int]:
        """Reserved, spent and available of a budget."""
        balance = self.budget.balance(name)
        return balance.reserved, balance.spent, balance.available

    def close(self) -> None:
        self.publisher.reset()
        self.budget.store.dispose()
        self.app.close()


def received(app: Celery, queue: str) -> list[Any]:
    """Take all messages out of a queue; none where there is no such queue."""
    messages = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        while True:
            try:
                message = channel.basic_get(queue, no_ack=True)
            except connection.channel_errors:
                break
            if message is None:
                break
            messages.append(channel.message_to_python(message))
    return messages


def reservation_of(message: Any) -> uuid.UUID | None:
    """Return the reservation's id from a message's header; none where it has no such header."""
    found = parse_header(message.headers.get(HEADER))
    return None if found is None else found[1]


@contextmanager
def current(app: Celery) -> Iterator[None]:
    """Make ``app`` the current application, as an import of its module would."""
    from celery import _state

    before_tls, before_default = _state._tls.current_app, _state.default_app
    app.set_current()
    try:
        yield
    finally:
        _state._tls.current_app = before_tls
        _state.default_app = before_default
