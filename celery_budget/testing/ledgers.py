"""Ledgers for tests: empty, of one application, gone when the test is over."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_budget import inquiry
from celery_budget.core.identity import new_id
from celery_budget.dispatcher import Dispatcher
from celery_budget.errors import ConfigurationError
from celery_budget.integration.inquiries import TaskInquiries
from celery_budget.integration.moving import moved, the_budget_of
from celery_budget.integration.service import sweep_alone
from celery_budget.settings import PREFIX, Settings
from celery_budget.store import Store, claims, migrate
from celery_budget.store.clock import standing_in
from celery_budget.testing.clock import Clock

if TYPE_CHECKING:
    from celery_budget import CeleryBudget

__all__ = ["in_memory", "in_use", "sweep"]

#: Where files are in memory on Linux: nothing waits for a disk.
_MEMORY = "/dev/shm"  # noqa: S108 - below it each ledger has a folder with a random name

#: How many messages a sweep looks at; a test has fewer.
_MESSAGES = 10_000

#: The ledgers that are open, the innermost last.
_open: list[CeleryBudget] = []


@contextmanager
def in_memory(
    app: Any = None,
    *,
    eager: bool | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> Iterator[CeleryBudget]:
    """Give an application an empty ledger of its own for a block.

    Its tables exist and it has no budgets; results are kept beside it. Other settings of the
    application stay, and so does the ledger that it had. For one block at a time in a process, and
    while no worker or relay runs.

    :param app: the application, its ``CeleryBudget``, or where either is found,
        ``"shop.tasks:app"``; by default the one application that has a budget.
    :param eager: whether tasks run in place (``task_always_eager``), and raise what they raise;
        by default as the application has it.
    :param clock: by which the ledger goes.
    :param settings: of the ledger, without their prefix: ``lease_seconds=30``. With a
        ``database_url`` it is that one, as it is, with its tables brought up to date: for who
        publishes in transactions of a database of their own.
    :raises ConfigurationError: for a setting that there is none of, or that cannot work, and for a
        clock where ``database_url`` is no SQLite.
    """
    budget = the_budget_of(app)
    unknown = {*settings} - {*Settings.__dataclass_fields__}
    if unknown:
        raise ConfigurationError(f"there is no setting {PREFIX}{min(unknown)}; correct its name")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(**_PLACE)))
        # A backend such as Redis would be asked for a result as soon as its task is called.
        results = folder / "results"
        results.mkdir()
        url = f"sqlite:///{folder / 'ledger.db'}"
        made_for = {"database_url": url, "listen_url": "", "report_url": ""}
        made_for |= {"spool": str(folder / "spool"), **settings}
        configuration: dict[str, Any] = {PREFIX + name: one for name, one in made_for.items()}
        configuration["result_backend"] = f"file://{results}"
        if eager is not None:
            configuration |= {"task_always_eager": eager, "task_eager_propagates": eager}
        if clock is not None:
            stack.enter_context(standing_in(str(made_for["database_url"]), clock.now_us))
        stack.enter_context(moved(budget, configuration))
        stack.callback(_open.remove, budget)
        _open.append(budget)
        if "database_url" in settings:
            budget.init()
        else:
            shutil.copyfile(_empty(), folder / "ledger.db")
        budget.check()
        yield budget


def sweep(ledger: CeleryBudget | None = None) -> None:
    """Do once what a relay does, but for publishing.

    Lanes let go what they may; messages whose time is over end, and so do requests past their
    deadlines; windows are made ahead; parked work is admitted where there is room, or given up;
    lapsed leases and lost messages are seen to; tasks are asked about lost attempts.
    """
    budget = in_use(ledger)
    Dispatcher(budget.store, budget.settings).run_once()
    _end_what_is_over(budget)
    # It has the results stored of all that has ended.
    sweep_alone(budget)
    inquiry.run_once(budget.store, budget.settings, TaskInquiries(budget))


def _end_what_is_over(budget: CeleryBudget) -> None:
    """End messages whose time is over, of any broker; the others stay as they are."""
    store, settings = budget.store, budget.settings
    for broker in budget.brokers.names:
        batch = store.run(
            claims.claim_due, settings.root, broker, _MESSAGES, settings.publish_us, new_id()
        )
        going = [
            due
            for due in batch.messages
            if due.started
            or not due.expired
            or not store.run(claims.expire, settings.root, batch.fence, due)
        ]
        if going:
            store.run(claims.give_back, settings.root, batch.fence, going)


def in_use(ledger: Any = None) -> CeleryBudget:
    """Return the ledger that is meant: the one given, the innermost open one, or the only one."""
    if ledger is None and _open:
        return _open[-1]
    return the_budget_of(ledger)


#: What each folder is made with.
_PLACE: dict[str, Any] = {
    "prefix": "celery-budget-",
    "dir": _MEMORY if os.access(_MEMORY, os.W_OK) else None,
}


@lru_cache(maxsize=1)
def _empty() -> Path:
    """Return a ledger without budgets, made once in a process; the others are copies of it."""
    folder = tempfile.TemporaryDirectory(**_PLACE)
    atexit.register(folder.cleanup)
    file = Path(folder.name) / "ledger.db"
    store = Store(f"sqlite:///{file}")
    store.run(migrate.upgrade)
    # The last connection that is closed writes what it has into the one file.
    store.dispose()
    return file
