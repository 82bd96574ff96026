"""What is only shown is read from a replica: which is read-only, late, and down at times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from starlette.testclient import TestClient

from celery_budget.dashboard import create_app
from celery_budget.errors import ReplicaError
from celery_budget.metrics import exposition
from celery_budget.store import Replica
from tests.integration.commands import Run, runner
from tests.integration.support import Shop
from tests.integration.test_dashboard import fill
from tests.services.postgres import PostgresReplica

pytestmark = pytest.mark.postgres

#: Every command that only shows something; TASK stands for the id of a task.
READING = [
    ("list",),
    ("show", "tenant:acme"),
    ("show", "user:*"),
    ("journal", "tenant:acme"),
    ("suggest",),
    ("report",),
    ("report", "--by", "tenant", "--since", "7d", "--json"),
    ("report", "--format", "html"),
    ("report", "--format", "csv"),
    ("explain", "TASK"),
    ("explain", "--budget", "tenant:acme"),
    ("reconcile", "--results", "10"),
    ("lane", "list"),
    ("lane", "show", "paid"),
    ("parked", "list"),
    ("quarantine", "list"),
    ("alerts",),
]


class Watched:
    """What the ledger's own database is asked meanwhile."""

    def __init__(self, shop: Shop) -> None:
        self.statements: list[str] = []
        event.listen(shop.budget.store.engine, "before_cursor_execute", self._note)

    def _note(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        self.statements.append(statement)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def shop(replicated: PostgresReplica, make_shop: Callable[..., Shop]) -> Iterator[Shop]:
    """A shop whose reports are read from the replica, which has all that is in the ledger."""
    url = replicated.primary.create_database()
    made = make_shop(budget_database_url=url, budget_report_url=replicated.url_of(url))
    replicated.catch_up()
    yield made
    made.budget.store.dispose()
    if made.budget.replica is not None:
        made.budget.replica.dispose()
    replicated.primary.drop_database(url)


def test_every_command_that_shows_something_asks_the_replica_alone(
    shop: Shop, replicated: PostgresReplica, run: Run
) -> None:
    task_id = fill(shop)
    replicated.catch_up()
    watched = Watched(shop)
    for command in READING:
        done = run(shop.app, *(task_id if one == "TASK" else one for one in command))
        assert done.code == 0, (command, done)
        assert done.out, command
        assert f":{replicated.port}/" in done.err, command
        assert "s behind" in done.err, command
    assert watched.statements == []
    shown = ("show", "tenant:acme", "--json")
    assert run(shop.app, *shown).out == run(shop.app, "--primary", *shown).out
    assert watched.statements


def test_the_dashboard_and_metrics_ask_the_replica_alone(
    shop: Shop, replicated: PostgresReplica
) -> None:
    task_id = fill(shop)
    replicated.catch_up()
    watched = Watched(shop)
    with TestClient(create_app(shop.budget, authenticate=lambda request: True)) as client:
        for page in ("/", "/plots", "/budget?name=tenant:acme", f"/request?id={task_id}"):
            assert client.get(page).status_code == 200, page
        assert f":{replicated.port}/" in client.get("/").text
        assert client.get("/api/overview").json()["read_from"]["replica"] is True
    body, _ = exposition(shop.budget)
    assert b"celery_budget_up 1.0" in body
    assert watched.statements == []


def test_what_is_changed_is_seen_at_once_where_it_was_changed(
    shop: Shop, replicated: PostgresReplica, run: Run
) -> None:
    replicated.pause()
    try:
        changed = run(shop.app, "set", "tenant:a", "--limit", "77", "--json")
        assert (changed.json["limit"], changed.err) == (77, "")
        granted = run(shop.app, "grant", "tenant:a", "5", "--key", "k", "--reason", "r", "--json")
        assert granted.json["balance"]["limit"] == 82
        assert run(shop.app, "reconcile", "--repair", "--json", "--no-broker").json["ok"]
        assert shop.budget.balance("tenant:a").limit == 10
        with shop.budget.primary():
            assert shop.budget.balance("tenant:a").limit == 82
            assert shop.budget.read_from().replica is False
        assert run(shop.app, "--primary", "show", "tenant:a", "--json").json["limit"] == 82
    finally:
        replicated.resume()
    replicated.catch_up()
    assert shop.budget.balance("tenant:a").limit == 82


def test_it_is_told_how_far_the_replica_is_behind(
    shop: Shop, replicated: PostgresReplica, run: Run
) -> None:
    source = shop.budget.report().read_from
    assert source is not None
    assert (source.replica, source.follows, source.behind_seconds) == (True, True, 0.0)
    replicated.pause()
    try:
        shop.budget.set("tenant:a", limit=11)
        # What came and is not replayed is what it is behind by.
        replicated.received()
        first = shop.budget.report().read_from
        second = run(shop.app, "report", "--json").json["read_from"]
        assert first is not None
        assert first.behind_seconds is not None
        assert 0 < first.behind_seconds < second["behind_seconds"]
        assert second["server"].endswith(f":{replicated.port}/{shop_database(shop)}")
    finally:
        replicated.resume()
    replicated.catch_up()
    source = shop.budget.report().read_from
    assert source is not None
    assert source.behind_seconds == 0.0


def shop_database(shop: Shop) -> str:
    return str(shop.budget.store.engine.url.database)


def test_nothing_is_written_to_a_replica(shop: Shop) -> None:
    replica = shop.budget.replica
    assert isinstance(replica, Replica)
    with pytest.raises(ReplicaError, match="this would write"):
        replica.run(lambda connection: None)
    with pytest.raises(ReplicaError, match="this would write"):
        replica.run_statement(lambda connection: None)
    with pytest.raises(ReplicaError, match="read-only transaction"):
        replica.read(lambda connection: connection.execute(sa.text("CREATE TABLE t ()")))


def test_while_the_replica_is_down_work_goes_on_and_reports_say_what_to_do(
    shop: Shop, replicated: PostgresReplica, run: Run
) -> None:
    fill(shop)
    replicated.kill()
    try:
        done = run(shop.app, "report")
        assert done.failed(1, "of budget_report_url")
        assert "budget --primary" in done.err
        with pytest.raises(ReplicaError) as raised:
            shop.budget.balances()
        assert raised.value.retryable
        body, _ = exposition(shop.budget)
        assert b"celery_budget_up 0.0" in body
        assert run(shop.app, "--primary", "report").code == 0
        with TestClient(
            create_app(shop.budget, authenticate=lambda request: True),
            raise_server_exceptions=False,
        ) as client:
            assert client.get("/").status_code == 503
        admitted = shop.task("shop.broken").delay()
        assert shop.relay().published == 1
        assert shop.budget.job(admitted.id, owner="tenant:free").state == "queued"
        [found] = [one for one in shop.budget.checkup(0.05).findings if one.id == "replica"]
        assert (found.level, str(replicated.port) in found.seen) == ("error", True)
    finally:
        replicated.restart()
    replicated.catch_up()
    assert shop.budget.report().read_from is not None


def test_the_check_knows_another_ledger_and_a_server_that_was_promoted(
    shop: Shop, replicated: PostgresReplica, make_shop: Callable[..., Shop]
) -> None:
    def levels(one: Shop) -> dict[str, str]:
        return {
            found.id: found.level
            for found in one.budget.checkup(0.05).findings
            if found.id.startswith("replica")
        }

    names = ("replica", "replica-ledger", "replica-read-only", "replica-lag")
    assert levels(shop) == dict.fromkeys(names, "ok")
    url = shop.budget.settings.database_url
    other = replicated.primary.create_database()
    itself = make_shop(init=False, budget_database_url=url, budget_report_url=url)
    strange = make_shop(budget_database_url=other, budget_report_url=replicated.url_of(url))
    assert levels(itself) == {**dict.fromkeys(names, "ok"), "replica-read-only": "warning"}
    assert levels(strange)["replica-ledger"] == "error"
    empty = replicated.primary.create_database()
    found = levels(make_shop(init=False, budget_database_url=url, budget_report_url=empty))
    assert (found["replica"], found["replica-ledger"]) == ("error", "skipped")
