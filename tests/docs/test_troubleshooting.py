"""The texts that the troubleshooting page goes by are those that the code says."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_budget import CeleryBudget, budgeted, errors, usage
from celery_budget.core.declarations import tomllib
from celery_budget.testing import Clock, in_memory
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
#: What others say: SQLite, and PostgreSQL behind a proxy.
OF_OTHERS = {"database is locked", "prepared statement", "does not exist", "already exists"}
SOURCES = [
    *sorted((ROOT / "celery_budget").rglob("*.py")),
    *sorted((ROOT / "celery_budget").rglob("*.sql")),
]
#: Two literals that Python joins, and what a placeholder stands for.
JOINT = re.compile(r'"\s*\n\s*f?"')


def texts() -> list[str]:
    terms = re.findall(r"^(`.+)\n: ", PAGE.read_text("utf-8"), re.MULTILINE)
    return sorted({text for term in terms for text in re.findall(r"`([^`]+)`", term)} - OF_OTHERS)


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(JOINT.sub("", source.read_text("utf-8")) for source in SOURCES)


@pytest.mark.parametrize("text", texts())
def test_the_text_is_one_that_is_said(text: str, said: str) -> None:
    # The key of a setting is put together.
    known = said.replace("{PREFIX.upper()}", "BUDGET_")
    assert text in known


def test_there_are_texts() -> None:
    assert len(texts()) > 20


#: Texts of what takes servers, and outages of theirs: where a test has them said.
ELSEWHERE = {
    "lost its claim": ("tests/fault/test_leases.py", "lost its claim"),
    "lost its claim while it ran": ("tests/fault/test_leases.py", "lost its claim"),
    "no notification arrives over": (
        "tests/acceptance/test_pooling_proxy.py", "no notification arrives over",
    ),
    "the server waits for a synchronous standby and may have committed": (
        "tests/fault/test_failover.py", "synchronous standby",
    ),
}  # fmt: skip


@dataclass
class Shop:
    """What a call that goes wrong is made on."""

    app: Celery
    budget: CeleryBudget
    draft: Any
    folder: Path
    clock: Clock

    def set(self, limit: int | None, **terms: Any) -> None:
        self.budget.set("tenant:acme", limit=limit, unit="tokens", **terms)

    def call(self, prompt: str = "a", **options: Any) -> Any:
        return self.draft.apply_async((prompt, "acme"), **options)


def _spent(shop: Shop) -> None:
    shop.set(150)
    shop.budget.adjust("tenant:acme", 100, reason="tests")
    shop.call()


def _held(shop: Shop) -> None:
    shop.set(150)
    shop.call()
    shop.call()


def _closing(shop: Shop, **how: Any) -> None:
    shop.set(1000)
    if how:
        shop.call()
    shop.budget.close("tenant:acme", **how)
    shop.call()


def _conflict(shop: Shop) -> None:
    shop.set(1000)
    shop.call("a", request_id="order-1")
    shop.call("b", request_id="order-1")


def _lane(shop: Shop, **terms: int) -> None:
    shop.set(1000)
    shop.budget.lanes.set("llm", queues=["celery"], **terms)
    for _ in range(3):
        shop.call()


def _uninstalled(shop: Shop) -> None:
    app = Celery("other", set_as_current=False)

    @budgeted(budget="tenant:acme", estimate=1)
    @app.task(name="other.draft", shared=False)
    def draft() -> None: ...

    draft.delay()


def _settings(shop: Shop) -> None:
    CeleryBudget(Celery("unset", set_as_current=False)).settings  # noqa: B018 - it is read then


def _enlist(shop: Shop) -> None:
    shop.set(1000)
    with (
        sqlite3.connect(shop.budget.settings.database_url[10:], isolation_level=None) as rows,
        shop.budget.enlist(rows),
    ):
        shop.call()


def _nothing(shop: Shop) -> None:
    with shop.budget.enlist(object()):
        pass


def _ledger(shop: Shop, name: str) -> None:
    app = Celery("away", set_as_current=False)
    app.conf.budget_database_url = f"sqlite:///{shop.folder / name}"
    CeleryBudget(app).check()


def _broker(shop: Shop) -> None:
    shop.set(1000)
    with shop.app.connection_for_write("amqp://elsewhere//") as connection:
        shop.call(connection=connection)


def _outbox(shop: Shop) -> None:
    shop.set(None)
    for _ in range(5):
        shop.call()
        shop.clock.advance(60)  # they are counted now and then


PRODUCED: dict[str, Callable[[Shop], object]] = {
    "are missing or of another version": lambda shop: _ledger(shop, "empty.db"),
    "can never hold that much": lambda shop: (shop.set(50), shop.call()),
    "cannot be enlisted": _nothing,
    "has budgeted tasks and no CeleryBudget": _uninstalled,
    "is blocked by its limit": lambda shop: (shop.set(0), shop.call()),
    "is closed": _closing,
    "is draining and takes nothing new": lambda shop: _closing(shop, drain=True),
    "is exhausted": _spent,
    "is for a task with a budget while it runs, and none runs in this thread": (
        lambda shop: usage.idempotency_key("charge")
    ),
    "is full:": lambda shop: _lane(shop, max_waiting_jobs=1),
    "is held by requests that have not ended": _held,
    "is in autocommit": _enlist,
    "is kept for a request that has waited for longer": lambda shop: _raise(
        errors.BudgetExceeded("tenant:acme", "tokens", 12, 7, 100, 60, 33, "queued", 90, 1.0)
    ),
    "is more than lane": lambda shop: _lane(shop, max_running_units=50),
    "is not set (CELERY_BUDGET_": _settings,
    "is sent to": _broker,
    "is taken by another request": _conflict,
    "messages wait to be published, and budget_max_outbox is": _outbox,
    "the ledger's database": lambda shop: _ledger(shop, "no/such/folder.db"),
    "there is no budget named": lambda shop: shop.call(),
    "was not run:": lambda shop: _raise(errors.RequestNotRun("t-1", "undelivered")),
    "was started, its worker went away, and it may not be run again": (
        lambda shop: _raise(errors.AttemptLost("t-1"))
    ),
    "which is not the application's": _broker,
}


def _raise(error: Exception) -> None:
    """What is stored as a result is raised where that is asked for."""
    raise error


@pytest.fixture
def shop_of_page(tmp_path: Path) -> Iterator[Shop]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.budget_database_url = "sqlite:///unused.db"
    budget = CeleryBudget(app)

    @budgeted(budget="tenant:{tenant}", estimate=100)
    @app.task(name="troubles.draft", shared=False)
    def draft(prompt: str, tenant: str) -> str:
        return prompt

    clock = Clock()
    with in_memory(app, clock=clock, max_outbox=3):
        yield Shop(app, budget, draft, tmp_path, clock)


@pytest.mark.parametrize("text", sorted(PRODUCED))
def test_the_text_is_what_comes(text: str, shop_of_page: Shop) -> None:
    with pytest.raises(errors.BudgetError, match=re.escape(text)):
        PRODUCED[text](shop_of_page)


def test_every_text_comes_from_a_call() -> None:
    # What the catalogue has is raised by the test of that.
    catalogue = ROOT / "tests" / "integration" / "catalogue.toml"
    raised = [one["text"] for one in tomllib.loads(catalogue.read_text("utf-8"))["error"]]
    left = {*texts()} - {*PRODUCED} - {*ELSEWHERE}
    assert {text for text in left if not any(text in one for one in raised)} == set()


@pytest.mark.parametrize("text", sorted(ELSEWHERE))
def test_what_takes_servers_is_said_in_the_test_that_is_named(text: str) -> None:
    name, said = ELSEWHERE[text]
    assert said in text
    assert f'"{said}"' in (ROOT / name).read_text("utf-8")
