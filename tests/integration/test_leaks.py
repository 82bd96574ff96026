"""Arguments, results, errors' texts and passwords are in no log, report, page or metric."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from celery_budget import (
    BudgetError,
    ConfigurationError,
    NotAuthorized,
    budgeted,
    effect,
    usage,
)
from celery_budget.dashboard import create_app
from celery_budget.metrics.collector import BudgetCollector
from celery_budget.settings import Settings, shown
from celery_budget.store import Store, migrate, roles, schema
from tests.integration.commands import Run, runner
from tests.integration.delivering import delivered
from tests.integration.support import Shop

#: What is in arguments, in what a task returns, in what it raises, in a provider's reply, in a
#: rule's error; and a password.
ARGUMENT, RESULT, ERROR, REPLY, RULE = "MARK-ARG", "MARK-RES", "MARK-ERR", "MARK-REP", "MARK-RULE"
PASSWORD = "MARK-PASSWORD"
MARKS = (ARGUMENT, RESULT, ERROR, REPLY, RULE, PASSWORD)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def found_in(text: str) -> list[str]:
    return [mark for mark in MARKS if mark in text]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What celery_budget logs; Celery's own logs tell what tasks return and raise."""
    with caplog.at_level(logging.DEBUG, logger="celery_budget"):
        yield lambda: "\n".join(
            logging.Formatter().format(record) + repr(vars(record))
            for record in caplog.records
            if record.name.startswith("celery_budget")
        )


def run(shop: Shop) -> list[str]:
    """Have every kind of end; the ids of the tasks."""

    def draft(self: Any, prompt: str, how: str = "") -> str:
        usage.record(
            {
                "id": "resp_1", "model": "gpt-4o-mini", "object": "chat.completion",
                "choices": [{"message": {"content": REPLY}}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            },
            key=self.request.id,
        )  # fmt: skip
        if how == "effect":
            with shop.budget.store.engine.begin() as connection, effect(connection, "e") as first:
                first.store(RESULT)
        if how == "fail":
            raise ValueError(f"{ERROR} {prompt}")
        if how == "retry" and self.request.retries == 0:
            raise self.retry(exc=ValueError(ERROR), countdown=0)
        return RESULT

    def rule(draw: Any) -> bool:
        if "forbidden" in draw.arguments["how"]:
            raise LookupError(f"{RULE} {draw.arguments}")
        return True

    task = budgeted(budget="tenant:a", estimate=4, authorize=rule)(
        shop.app.task(name="leak.draft", bind=True, shared=False)(draft)
    )
    shop.budget.set("tenant:a", limit=100)
    ids = [task.delay(ARGUMENT, how).id for how in ("", "fail", "retry", "effect")]
    with pytest.raises(NotAuthorized):
        task.delay(ARGUMENT, "forbidden")
    shop.budget.set("tenant:a", limit=19)
    with pytest.raises(BudgetError):
        task.delay(ARGUMENT)
    ids.append(task.apply_async((ARGUMENT,), on_refused="park").id)
    for _ in range(2):
        shop.relay()
        for message in shop.received():
            delivered(shop, message)
    # One that is not what was admitted, and one that nobody can read.
    shop.budget.set("tenant:a", limit=1000)
    shop.sweep()
    ids.append(task.delay(ARGUMENT).id)
    shop.relay()
    for message in shop.received():
        message.headers["task"] = "leak.draft"
        message.body = message.body + (b" " if isinstance(message.body, bytes) else " ")
        message._decoded_cache = None
        delivered(shop, message)
    return ids


def test_a_whole_run_shows_nothing_of_what_it_was_about(
    on_both: Shop,
    logged: Callable[[], str],
    command: Run,
) -> None:
    shop = on_both
    ids = run(shop)
    ended = {row.state for row in shop.rows(schema.reservations)}
    assert ended >= {"settled", "published"}
    assert "is admitted" in logged()
    assert found_in(logged()) == []

    # What reporters can read, and all that is only counted: payloads are in their columns alone.
    with shop.budget.store.transaction() as connection:
        for table in schema.metadata.sorted_tables:
            columns = [c for c in table.c if c.name not in roles.PAYLOADS.get(table.name, ())]
            rows = connection.execute(sa.select(*columns)).all()
            assert found_in(repr(rows)) == [], table.name

    shown_by = [
        ("report",), ("report", "--json"), ("list",), ("show", "tenant:a"),
        ("journal", "tenant:a", "--json"), ("reconcile", "--json"), ("parked", "list", "--json"),
        ("quarantine", "list", "--json"), ("explain", "--budget", "tenant:a", "--json"),
        *(("explain", task_id, "--json") for task_id in ids), ("explain", ids[1]),
        ("export",), ("suggest", "--json"), ("lane", "list", "--json"),
    ]  # fmt: skip
    for words in shown_by:
        done = command(shop.app, *words)
        assert done.code in (0, 1), (words, done.err)
        assert found_in(done.out + done.err) == [], words

    client = TestClient(create_app(shop.budget, authenticate=lambda request: True))
    for path in ("/", "/api/overview", "/budgets/tenant:a", "/api/budgets/tenant:a",
                 *(f"/requests/{one}" for one in ids)):  # fmt: skip
        assert found_in(client.get(path).text) == [], path
    client.close()


@pytest.mark.parametrize(
    ("url", "is_shown"),
    [
        ("postgresql://u:MARK-PASSWORD@h/n", "postgresql://u@h/n"),
        ("postgresql://u:MARK-PASSWORD@@h/n", "postgresql://u@h/n"),
        ("postgresql+psycopg://h/n?user=u&password=MARK-PASSWORD",
         "postgresql+psycopg://h/n?user=u&password=***"),
        ("postgresql://h/n?sslpassword=MARK-PASSWORD&x=1", "postgresql://h/n?sslpassword=***&x=1"),
        ("u:MARK-PASSWORD@h/n", "u@h/n"),
        ("sqlite:////x.db", "sqlite:////x.db"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_password(url: str, is_shown: str) -> None:
    assert shown(url) == is_shown


WRONG = {
    "no scheme": {"database_url": f"u:{PASSWORD}@h/n"},
    "not text": {"database_url": [f"postgresql://u:{PASSWORD}@h/n"]},
    "another kind": {"database_url": f"mysql://u:{PASSWORD}@h/n"},
    "no such driver": {"database_url": f"postgresql+none://u:{PASSWORD}@h/n"},
    "a port": {"database_url": f"postgresql+psycopg://u:{PASSWORD}@h:port/n"},
    "nobody there": {"database_url": f"postgresql+psycopg://u:{PASSWORD}@127.0.0.1:1/n"},
    "in the query": {
        "database_url": f"postgresql+psycopg://127.0.0.1:1/n?user=u&password={PASSWORD}"
    },
    "listen": {"listen_url": f"mysql://u:{PASSWORD}@h/n"},
    "report": {"report_url": f"mysql://u:{PASSWORD}@h/n"},
    "token": {"dashboard_token": [PASSWORD]},
    "brokers": {"brokers": {"other": [f"amqp://u:{PASSWORD}@h//"]}},
}


@pytest.mark.parametrize("what", WRONG)
def test_no_error_shows_a_password(what: str, sqlite_url: str, logged: Callable[[], str]) -> None:
    given = {"budget_database_url": sqlite_url}
    given |= {f"budget_{name}": value for name, value in WRONG[what].items()}

    def use() -> None:
        store = Store(Settings.read(given.get).database_url)
        try:
            store.run(migrate.check)
        finally:
            store.dispose()

    with pytest.raises(BudgetError) as caught:
        use()
    # As it would be logged, with what it was raised from.
    said = "".join(traceback.format_exception(caught.value))
    assert found_in(f"{said}{caught.value!r}{logged()}") == []


def run_nothing(what: str) -> None: ...


def test_a_fault_of_the_database_does_not_tell_what_was_written(on_both: Shop) -> None:
    task = budgeted(budget="tenant:a", estimate=1)(
        on_both.app.task(name="leak.faulty", shared=False)(run_nothing)
    )
    on_both.sql(sa.text("ALTER TABLE budget_outbox RENAME COLUMN queue TO kueue"))
    with pytest.raises(BudgetError) as caught:
        task.delay(ARGUMENT)
    assert found_in("".join(traceback.format_exception(caught.value))) == []


def test_settings_and_their_owners_are_written_without_passwords(sqlite_url: str) -> None:
    settings = Settings.read(
        {
            "budget_database_url": f"postgresql://u:{PASSWORD}@h/n",
            "budget_listen_url": f"postgresql://u:{PASSWORD}@h/n",
            "budget_report_url": f"postgresql://u:{PASSWORD}@h/n",
            "budget_dashboard_token": PASSWORD,
            "budget_brokers": {"other": f"amqp://u:{PASSWORD}@h//"},
        }.get
    )
    assert found_in(repr(settings)) == []
    with pytest.raises(ConfigurationError) as caught:
        Settings.read({"budget_database_url": sqlite_url, "budget_listen_url": PASSWORD}.get)
    assert "budget_listen_url" in str(caught.value)


def test_check_shows_no_password(
    make_shop: Callable[..., Shop],
    command: Run,
) -> None:
    shop = make_shop(
        init=False,
        budget_database_url=f"postgresql+psycopg://u:{PASSWORD}@127.0.0.1:1/n?connect_timeout=2",
        budget_brokers={"other": f"amqp://u:{PASSWORD}@127.0.0.1:1//"},
    )
    for words in (
        ("check", "--json", "--timeout", "0.1"),
        ("check", "--timeout", "0.1"),
        ("list",),
    ):
        done = command(shop.app, *words)
        assert done.code == 1
        assert found_in(done.out + done.err) == []
    assert found_in(json.dumps([repr(shop.budget), repr(shop.budget.settings)])) == []


def test_metrics_show_nothing_of_it(shop: Shop) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.registry import CollectorRegistry

    run(shop)
    registry = CollectorRegistry()
    registry.register(BudgetCollector(shop.budget))
    assert found_in(generate_latest(registry).decode()) == []
