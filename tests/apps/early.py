"""Tasks that come to an end before their call, for workers that get them by ``imports``.

What they note goes to the file named by ``shop_journal``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import current_app, shared_task
from celery.exceptions import Ignore, Reject, Retry

from celery_budget import BudgetedTask, PolicyError, usage
from celery_budget.core.retries import Retries
from tests.apps.shop import wait_for

TENANT = "tenant:{tenant}"


def note(what: str) -> None:
    with open(current_app.conf["shop_journal"], "a") as file:
        file.write(what + "\n")


def beside(name: str) -> Path:
    """A file beside the journal, by which a test and a task tell each other something."""
    return Path(current_app.conf["shop_journal"]).parent / name


class Early(BudgetedTask):
    """A task that does before its call what its first argument says."""

    abstract = True
    max_retries = 1

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        how, retries = args[0], self.request.retries
        note(f"before {how} {retries}")
        if how == "raise" or (how == "raise in a retry" and retries):
            raise ValueError(how)
        if how == "ignore":
            raise Ignore
        if how == "reject":
            raise Reject("early", requeue=False)
        if how == "retry for good" or (how == "retry" and not retries):
            raise self.retry(exc=ValueError(how), countdown=0)
        if how == "retry without a message":
            raise Retry
        if how == "wait":
            wait_for(beside("never"))
        if how == "raise in a copy" and beside("started").exists():
            raise ValueError(how)

    def budget_retries(self, args: Any, kwargs: Any) -> Retries:
        if args[0] == "policy":
            raise PolicyError("it cannot be told")
        return Retries()


@shared_task(name="early.work", base=Early, budget=TENANT, estimate=6, bind=True, acks_late=True)
def work(self: Any, how: str, tenant: str) -> str:
    """Use 2 units; once more where it is to be retried first."""
    note(f"run {how} {self.request.retries}")
    usage.record(2)
    if how == "raise in a retry":
        raise self.retry(countdown=0)
    if how == "raise in a copy":
        beside("started").touch()
        wait_for(beside("go on"))
    return how


if "SHOP_CONF" in os.environ:

    @shared_task(name="early.past")
    def past(value: Any, tenant: str) -> Any:
        """It has a budget where it is published from, and none in the worker."""
        note("run past")
        return value
