"""One of the two applications that a test publishes with, and what becomes of its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa
from celery import Celery
from celery.utils.imports import symbol_by_name

from celery_budget.closings import flush_all
from celery_budget.integration.context import installed_on
from celery_budget.store import schema
from tests.integration.publication.tasks import Tasks, conf
from tests.integration.support import Shop, current, make_app
from tests.integration.wire import UUID, renamed, stop_clock, view

#: Runs when nothing else is left: how often it looks for members is a matter of time.
UNLOCK = "celery.chord_unlock"


class Side:
    """An application with the tasks of :class:`Tasks`, with a budget or plain.

    :ivar shop: its ledger; none of a plain application.
    """

    def __init__(self, tasks: Tasks, shop: Shop | None = None) -> None:
        self.app: Celery = tasks.app
        self.tasks = tasks
        self._shop = shop

    @property
    def shop(self) -> Shop:
        assert self._shop is not None
        return self._shop

    def begin(self, tenant: str) -> None:
        """Start a test: nothing has run, and its budget is full."""
        self.tasks.ran.clear()
        self.tasks.tenant = tenant
        if self._shop:
            self._shop.budget.set(f"tenant:{tenant}", limit=1_000, unit="tokens")

    def take(self) -> list[Any]:
        """Take what is at the broker, after all that is in the outbox was published."""
        if self._shop:
            self._shop.make_due()
            while self._shop.relay().taken:
                pass
        return sorted(self.received(), key=_order)

    def received(self) -> list[Any]:
        """Take what is at the broker, as a worker would get it."""
        accept = self.app.conf.accept_content
        found = []
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            for queue in self.app.conf.task_queues:
                bound = queue(channel)
                bound.declare()
                while message := bound.get(no_ack=True, accept=accept):
                    found.append(message)
        return found

    def execute(self, message: Any) -> None:
        """Run a message's task here, as a worker would, until its attempt is closed."""
        task = self.app.tasks[message.headers["task"]]
        request = symbol_by_name(task.Request)
        with current(self.app):
            request(message, app=self.app, hostname="w@test", task=task).execute()
        # Not by their thread, in the midst of what a test compares.
        flush_all()

    def lose(self) -> None:
        """Have recovery take up what was not started or not closed, as if its worker were gone."""
        requests = schema.reservations.c
        own = sa.select(requests.reservation_id).where(
            requests.owner == f"tenant:{self.tasks.tenant}"
        )
        for table, lapsed, seen in (
            (schema.outbox, "due_us", ()),
            (schema.attempts, "lease_until_us", ("suspected_us",)),
        ):
            mine = table.c.reservation_id.in_(own) & table.c[lapsed].is_not(None)
            self.shop.sql(table.update().where(mine).values(dict.fromkeys((lapsed, *seen), 1)))
        self.shop.sweep()

    def publish(self, publish: Callable[[Tasks], Any]) -> Any:
        """Publish and return what that gives."""
        with current(self.app):
            return publish(self.tasks)

    def run_all(self) -> list[list[Any]]:
        """Run what arrives, what follows from it and so on; return all messages as they arrived.

        They come in rounds: each is what the tasks of the one before have published.
        """
        rounds = []
        while messages := self.take():
            rounds.append(messages)
            for message in messages:
                self.execute(message)
        return rounds


def compared(rounds: list[list[Any]]) -> list[list[dict[str, Any]]]:
    """Return messages so that they are equal where two sides have published the same."""
    names: dict[str, str] = {}
    return [[renamed(view(message), names) for message in messages] for messages in rounds]


def _order(message: Any) -> tuple[bool, str, str]:
    """By what is the same on both sides: not by ids, nor by who published first."""
    name, arguments = message.headers["task"], message.headers["argsrepr"]
    return name == UNLOCK, name, UUID.sub("", arguments)


class Sides(NamedTuple):
    """Both applications."""

    plain: Side
    budget: Side

    def begin(self) -> None:
        """Start a test."""
        tenant = uuid4().hex[:8]
        for side in self:
            side.begin(tenant)


class Servers(NamedTuple):
    """Where messages and results go: two brokers' URLs, so that no side sees the other's."""

    brokers: tuple[str, str]
    results: str


@contextmanager
def make_sides(
    servers: Servers, database_url: str, prefixes: tuple[str, str], **more: Any
) -> Iterator[Sides]:
    """Make both applications and the ledger of the second.

    :param prefixes: of their queues; the same ones where messages are to be compared.
    """
    made = []
    for budgets, broker, prefix in zip((False, True), servers.brokers, prefixes, strict=True):
        settings = {
            "broker_url": broker,
            # A message that RabbitMQ has not confirmed may not be there yet.
            "broker_transport_options": {"confirm_publish": True} if "amqp" in broker else {},
            "result_backend": servers.results,
            "budget_database_url": database_url,
            **conf(prefix),
            **more,
        }
        app = make_app(budget=budgets, **settings)
        shop = Shop(app, installed_on(app)) if budgets else None
        if shop:
            shop.budget.init()
        made.append(Side(Tasks(app, budgets=budgets), shop))
        app.finalize()
    sides = Sides(*made)
    try:
        yield sides
    finally:
        for side in sides:
            # A result that a test still holds would ask for its server when it is freed.
            consumer = getattr(side.app.backend, "result_consumer", None)
            getattr(consumer, "subscribed_to", set()).clear()
        sides.budget.shop.close()
        sides.plain.app.close()


def stop_clocks(sides: Sides, now: datetime) -> None:
    for side in sides:
        stop_clock(side.app, now)
