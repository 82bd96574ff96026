"""What the calls of ``texts.toml`` are written in: a few short names, and the package's own."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable
from contextlib import closing
from threading import Lock
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from celery import Celery, chain, group
from celery.bin.base import CLIContext
from sqlalchemy.ext.asyncio import AsyncSession

import celery_budget
from celery_budget import (
    BudgetedTask,
    LostAttempt,
    cli,
    core,
    dashboard,
    estimators,
    integration,
    metering,
    store,
)
from celery_budget.cli import budget, completion  # noqa: F401 - an attribute of cli
from celery_budget.integration.context import installed_on
from celery_budget.testing import in_memory
from tests.integration.causes import Scene
from tests.integration.support import Shop, make_app

__all__ = ["names"]

LOST = LostAttempt("t-1", "draft", (), {}, 1, {}, UUID(int=1))


def takes_one(text: Any = None) -> Any:
    return text


def takes_two(text: Any, tenant: Any) -> Any:
    return text, tenant


def ends_the_thread(lost: Any) -> None:
    raise SystemExit(1)


async def later(lost: Any = None) -> None:
    pass


def locked(*args: Any, **options: Any) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def none_free(*args: Any, **options: Any) -> None:
    raise sa.exc.TimeoutError("QueuePool limit of size 5 overflow 10 reached", code="3o7r")


def held() -> Any:
    """A lock that another thread does not give back."""
    lock = Lock()
    lock.acquire()
    return lock


def within(block: Any, call: Callable[[], Any]) -> None:
    with block:
        call()


def settings(**conf: Any) -> Any:
    """Read the settings of an application."""
    url = "sqlite:////unused.db"
    with closing(make_app(**{"budget_database_url": url, **conf})) as app:
        return installed_on(app).settings


def names(scene: Scene) -> dict[str, Any]:
    """Return what a call may name."""
    made: list[Shop] = []

    def shop(**conf: Any) -> Shop:
        """The call's own shop; there is nothing in its ledger, not even tables."""
        if not made:
            made.append(scene.make(init=False, **conf))
        return made[0]

    def ready(**conf: Any) -> Any:
        """The shop's ledger, with ``tenant:a`` and its 10 tokens."""
        ledger = shop(**conf).budget
        ledger.init()
        ledger.set("tenant:a", limit=10, unit="tokens")
        return ledger

    def task(body: Any = takes_one, **terms: Any) -> Any:
        asks = {"name": "draft", "budget": "tenant:a", "estimate": 6, **terms}
        return shop().app.task(base=BudgetedTask, lazy=False, **asks)(body)

    def run(body: Callable[[], Any], **terms: Any) -> Any:
        """Run a body in a task with a budget."""

        def work() -> Any:
            return body()

        ready()
        return task(work, **terms).apply(throw=True)

    def command(*args: str, app: Celery | None = None) -> None:
        """Run ``budget ARGS``."""
        given = CLIContext(app or shop().app, no_color=True, workdir=None)
        budget.main(list(args), prog_name="budget", standalone_mode=False, obj=given)

    return {
        "AsyncSession": AsyncSession,
        "SimpleNamespace": SimpleNamespace,
        **{name: getattr(celery_budget, name) for name in celery_budget.__all__},
        "asyncio": asyncio,
        "Celery": Celery,
        "chain": chain,
        "cli": cli,
        "command": command,
        "core": core,
        "dashboard": dashboard,
        "ends_the_thread": ends_the_thread,
        "environment": scene.patch.setenv,
        "estimators": estimators,
        "folder": scene.folder,
        "group": group,
        "held": held,
        "in_memory": in_memory,
        "inspect": inspect,
        "integration": integration,
        "later": later,
        "ledger": lambda: shop().budget,
        "locked": locked,
        "LOST": LOST,
        "metering": metering,
        "none_free": none_free,
        "patch": scene.patch.setattr,
        "postgres": scene.postgres,
        "ready": ready,
        "run": run,
        "settings": settings,
        "shop": shop,
        "store": store,
        "takes_one": takes_one,
        "takes_two": takes_two,
        "task": task,
        "within": within,
    }
