"""The application of the crash matrix: tasks that take every step of the path."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from celery import Celery

from celery_budget import CeleryBudget, budgeted, effect, settle, usage
from celery_budget.errors import StoreError
from tests.crash.faults import Trap

__all__ = ["ESTIMATE", "LEDGER", "WORK", "make_app", "note"]

T = TypeVar("T")

TENANT = "tenant:{tenant}"
ESTIMATE = 6
#: What each effect leaves, and nothing keeps from being there twice.
WORK = sa.table("work", sa.column("word"))
LEDGER = "budget_database_url"
#: Seconds for which a task's own transaction is tried.
PATIENCE = 120


def note(path: str, line: str) -> None:
    """Write a line that stays, whatever is killed."""
    with open(path, "a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def until_done(function: Callable[[], T]) -> T:
    """Run a transaction of the task's own again where the database went away under it."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return function()
        except (sa.exc.DBAPIError, StoreError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def make_app(conf: dict[str, Any], trap: Trap | None = None) -> Celery:
    """Return the application; with ``trap`` that of a process to which something may happen."""
    app = Celery("crash", set_as_current=False)
    app.conf.update(conf)
    CeleryBudget(app)
    at = (trap or Trap("", Path(), ())).passing

    def connect() -> sa.Engine:
        return sa.create_engine(conf[LEDGER], poolclass=sa.NullPool)

    def call(word: str) -> None:
        """Call somebody outside, who knows a repeat by its key."""
        at("call", "before")
        note(conf["crash_journal"], f"{word} {usage.idempotency_key('call')}")
        at("call", "after")

    def have(word: str, follow: Callable[[], object] = lambda: None) -> str:
        def transaction() -> str:
            at("effect", "before")
            with connect().begin() as connection, effect(connection, "work") as first:
                if first:
                    connection.execute(WORK.insert().values(word=word))
                    follow()
                    first.store(word)
                at("effect", "inside")
            at("effect", "after")
            return str(first.value)

        return until_done(transaction)

    def estimate_body(**_: Any) -> int:
        """Asked by the process that publishes it, which has said before that it will."""
        at("body", "before")
        return ESTIMATE

    def task(name: str, estimate: Any = ESTIMATE, **options: Any) -> Callable[..., Any]:
        def make(function: Callable[..., Any]) -> Any:
            made = app.task(name=f"crash.{name}", shared=False, **{"acks_late": True, **options})
            return budgeted(budget=TENANT, estimate=estimate)(made(function))

        return make

    @task("child")
    def child(tenant: str, word: str) -> str:
        usage.record(1, key="reply")
        return have(word)

    @task("order", bind=True)
    def order(self: Any, tenant: str) -> str:
        """Take all steps that a body can take."""
        call("order")
        usage.record(3, key="reply")
        mine = f"{self.request.id}:child"
        until_done(lambda: child.apply_async((tenant, "in the body"), request_id=mine))
        return have("order", lambda: child.delay(tenant, "in the effect"))

    @task("settling")
    def settling(tenant: str) -> str:
        """Settle with the effect."""
        usage.record(2, key="reply")

        def transaction() -> str:
            at("settle", "before")
            with connect().begin() as connection:
                with effect(connection, "work") as first:
                    if first:
                        connection.execute(WORK.insert().values(word="settling"))
                        first.store("settled")
                settle(connection, first.value)
                at("settle", "inside")
            at("settle", "after")
            return str(first.value)

        return until_done(transaction)

    @task("part")
    def part(number: int, tenant: str) -> int:
        call(f"part {number}")
        usage.record(2, key="reply")
        have(f"part {number}")
        return number

    @task("total", estimate=estimate_body)
    def total(values: list[int], tenant: str) -> int:
        usage.record(1, key="reply")
        return sum(values)

    @task("follow")
    def follow(value: str, tenant: str) -> str:
        """A later step of a chain, or a callback."""
        usage.record(1, key="reply")
        return f"{value}, followed"

    @task("retried", bind=True)
    def retried(self: Any, tenant: str) -> str:
        usage.record(1, key=f"try {self.request.retries}")
        if not self.request.retries:
            raise self.retry(countdown=0)
        return "retried"

    @task("early", acks_late=False)
    def early(tenant: str) -> str:
        """Acknowledged before it runs, for long enough that its lease is renewed."""
        at("early", "before")
        usage.record(2, key="reply")
        at("early", "after")
        time.sleep(1)
        return "early"

    @app.task(name="crash.plain", shared=False)
    def plain(*args: Any) -> None:
        """No budget: nobody answers for what becomes of it."""

    del order, settling, part, total, follow, retried, early, plain
    return app
