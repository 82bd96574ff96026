"""``budget check`` on applications, databases and workers that are there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
import sqlalchemy as sa
from celery import _state
from celery.app import builtins

from celery_budget import BudgetedTask, ConfigurationError, budgeted
from celery_budget.core.checkup import Facts, Finding, WorkerSeen
from celery_budget.core.rules import judge
from celery_budget.integration import checkup
from celery_budget.integration.checkup import collect
from celery_budget.integration.context import installed_on
from celery_budget.integration.info import COMMAND
from tests.cluster import Cluster
from tests.integration.commands import Run, runner
from tests.integration.support import Shop, make_app

NOBODY = "redis://127.0.0.1:1/0"
QUICK = 0.05
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def _no_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applications of this process do not get what modules of other tests share with every one."""
    own = {one for one in _state._on_app_finalizers if one.__module__ == builtins.__name__}
    assert own
    monkeypatch.setattr(_state, "_on_app_finalizers", own)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def found(shop: Shop, rule: str) -> list[Finding]:
    return [one for one in shop.budget.checkup(QUICK).findings if one.id == rule]


def facts(shop: Shop) -> Facts:
    return collect(shop.budget, QUICK)


def test_findings_are_printed_with_the_remedy_and_errors_fail(shop: Shop, run: Run) -> None:
    @shop.app.task(name="wrong", budget="tenant:a", estimate=3)
    def wrong() -> None: ...

    done = run(shop.app, "check", "--timeout", "0.05")
    assert (done.code, done.err) == (1, "")
    said = " ".join(done.out.split())
    assert "error other-base: wrong: budget= with a base class that does not know it" in said
    assert "remedy use @budgeted(...), or base=BudgetedTask on the task" in said
    assert "warning relay: no relay was seen in the last 15 s" in said
    assert "workers-ledger no worker with the extension answered" in said
    assert "1 error, 3 warnings" in said
    assert "publications pass the gate" not in said
    assert "publications pass the gate" in run(shop.app, "check", "--all", "--timeout", "0.05").out


def test_warnings_fail_where_they_are_to(shop: Shop, run: Run) -> None:
    done = run(shop.app, "check", "--json", "--timeout", "0.05")
    assert done.code == 0
    assert done.json["ok"] is True
    assert done.json["counts"]["error"] == 0
    warnings = {one["id"] for one in done.json["findings"] if one["level"] == "warning"}
    assert warnings == {"memory-broker", "relay", "workers"}
    assert run(shop.app, "check", "--strict", "--json", "--timeout", "0.05").code == 1


@pytest.mark.parametrize("timeout", ["nan", "inf", "0", "-1", "1e300", "soon"])
def test_a_timeout_that_is_none(shop: Shop, run: Run, timeout: str) -> None:
    done = run(shop.app, "check", "--timeout", timeout)
    assert done.failed(2, f"'{timeout}' is not a number of seconds")


def test_nothing_is_changed(on_both: Shop) -> None:
    before = on_both.ledger()
    assert found(on_both, "read-only")[0].level == "ok"
    assert on_both.ledger() == before


def test_the_rest_is_looked_at_while_the_broker_is_away(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(broker_url=NOBODY)
    [broker] = found(shop, "broker")
    assert (broker.level, "cannot be reached" in broker.seen) == ("error", True)
    assert found(shop, "workers")[0].level == "skipped"
    assert found(shop, "read-only")[0].level == "ok"
    [seen] = facts(shop).brokers
    assert (seen.transport, seen.visibility_seconds) == ("redis", 3600.0)


def test_the_rest_is_looked_at_where_no_broker_is_named(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(broker_url="nosuch://there")
    for rule in ("broker", "gate"):
        [one] = found(shop, rule)
        assert one.level == "error"
        assert "nosuch" in one.seen


def test_the_rest_is_looked_at_while_the_ledger_is_away(make_shop: Callable[..., Shop]) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    shop = make_shop(init=False, budget_database_url=url)
    [ledger] = found(shop, "ledger")
    assert ledger.level == "error"
    assert found(shop, "relay")[0].level == "skipped"
    assert found(shop, "gate")[0].level == "ok"


def test_tables_that_are_missing(make_shop: Callable[..., Shop]) -> None:
    [one] = found(make_shop(init=False), "migrations")
    assert (one.level, "budget init" in one.seen) == ("error", True)


def test_confirms_of_any_broker(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(
        budget_brokers={"eu": "amqp://nobody@127.0.0.1:1//"},
        broker_transport_options={"confirm_publish": False},
    )
    [one] = found(shop, "confirms")
    assert one.seen == "confirm_publish is off for broker 'eu'"


def test_tasks_are_seen_as_celery_has_them(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(task_acks_late=True, task_time_limit=50)

    @budgeted(budget="tenant:a", estimate=1, reuse="2h")
    @shop.app.task(name="joined", time_limit=7, ignore_result=True)
    def joined() -> None: ...

    @shop.app.task(
        name="based", base=BudgetedTask, budget="tenant:a", estimate=1, reject_on_worker_lost=True,
        acks_on_failure_or_timeout=False,
    )  # fmt: skip
    def based() -> None: ...

    @shop.app.task(name="plain")
    def plain() -> None: ...

    seen = {task.name: task for task in facts(shop).tasks}
    mine = [seen[name] for name in ("based", "joined", "plain")]
    assert [task.budgeted for task in mine] == [True, True, False]
    assert all(task.acks_late for task in mine)
    joined_, based_ = seen["joined"], seen["based"]
    assert (joined_.time_limit, joined_.reuse_seconds, joined_.ignore_result) == (7, 7200.0, True)
    assert (based_.reject_on_worker_lost, based_.acks_on_failure) == (True, False)
    assert not seen["plain"].says_budget
    assert facts(shop).task_time_limit == 50


def test_results_and_settings_are_seen(make_shop: Callable[..., Shop], tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no folder")
    shop = make_shop(
        result_backend=None,
        result_expires=60,
        worker_prefetch_multiplier=0,
        budget_on_alert="no_such_module:notify",
        budget_spool=str(in_the_way / "spool"),
    )
    seen = facts(shop)
    assert (seen.backend, seen.result_expires, seen.prefetch) == ("disabled", 60.0, 0)
    assert "cannot be imported" in seen.alert_error
    assert seen.spool_error == f"{in_the_way} is no folder"
    shop = make_shop(result_expires=None)
    assert facts(shop).backend == "CacheBackend"


def test_publications_that_pass_by_the_gate(shop: Shop) -> None:
    shop.app.amqp.send_task_message = lambda *args, **kwargs: None
    [one] = found(shop, "gate")
    assert one.level == "error"


def test_prices_that_differ_from_the_packages(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(
        budget_prices={
            "gpt-4o-mini": {"input_mtok": Decimal(9), "output_mtok": Decimal(9)},
            "ours": {"input_mtok": Decimal(1), "output_mtok": Decimal(1)},
        }
    )
    [one] = found(shop, "prices")
    assert "budget_prices has 'gpt-4o-mini' at 18,000,000 micro-dollars" in one.seen


def test_a_setting_that_cannot_work_is_an_error_of_its_own(sqlite_url: str, run: Run) -> None:
    app = make_app(budget_database_url=sqlite_url, budget_lease_seconds=0)
    with pytest.raises(ConfigurationError, match="lease_seconds"):
        installed_on(app).checkup()
    assert run(app, "check").failed(1, "budget_lease_seconds")


def test_where_sqlites_file_is(shop: Shop, sqlite_url: str) -> None:
    seen = facts(shop).store
    assert seen.dialect == "sqlite"
    assert seen.file_system
    assert seen.free_bytes
    assert abs(seen.clock_seconds or 9) < 1


@pytest.mark.postgres
def test_how_postgresql_is_set(make_shop: Callable[..., Shop], postgres_url: str) -> None:
    make_shop(budget_database_url=postgres_url)
    url = sa.make_url(postgres_url).update_query_dict(
        {"options": "-c default_transaction_read_only=on -c statement_timeout=3000"
                    " -c synchronous_commit=off"}
    )  # fmt: skip
    set_so = make_shop(init=False, budget_database_url=url.render_as_string(hide_password=False))
    problems = {one.id: one for one in set_so.budget.checkup(QUICK).findings}
    assert problems["read-only"].level == "error"
    assert "read-only transaction" in problems["read-only"].seen
    assert problems["statement-timeout"].seen.startswith("statement_timeout is 3000 ms")
    assert problems["durability"].level == "error"
    assert problems["server-version"].level == "ok"
    assert problems["clock"].level == "ok"
    store = facts(set_so).store
    assert (store.max_connections or 0) > 0
    assert (store.version or 0) >= 140_000


def test_time_zones_that_this_host_does_not_know(on_both: Shop) -> None:
    on_both.budget.set("far", limit=1, unit="tokens", period="day")
    on_both.sql(sa.text("UPDATE budget_budgets SET timezone = 'Mars/Olympus' WHERE name = 'far'"))
    [one] = found(on_both, "time-zones")
    assert (one.level, "Mars/Olympus" in one.seen) == ("error", True)
    on_both.sql(sa.text("UPDATE budget_budgets SET timezone = 'UTC' WHERE name = 'far'"))


def test_a_worker_says_what_it_is(cluster: Cluster) -> None:
    seen = collect(cluster.budget, 5.0)
    by_rule = {one.id: one for one in judge(seen).findings}
    for rule in (
        "broker", "workers", "workers-extension", "workers-ledger", "workers-version",
        "workers-lease", "workers-clock", "pool-size", "max-connections", "relay", "spool",
    ):  # fmt: skip
        assert by_rule[rule].level == "ok", by_rule[rule]
    [worker] = seen.workers or ()
    assert (worker.pool, worker.concurrency, worker.prefetch) == ("prefork", 3, 3)
    assert (worker.root, worker.lease_seconds) == ("default", 10.0)
    assert worker.ledger == seen.ledger
    assert worker.schema == seen.schema


def test_one_that_does_not_know_the_command_lacks_the_extension() -> None:
    answer = {"error": f"KeyError('{COMMAND}')"}
    assert checkup._worker("w@host", answer, 0.0, 1.0) == WorkerSeen("w@host", knows=False)


@pytest.mark.parametrize(
    ("path", "variable"),
    [
        ("readme/shop.py", "SHOP_FOLDER"),
        ("demo/indexer.py", "BUDGET_DEMO_FOLDER"),
        ("fallback/assistant.py", "EXAMPLE_FOLDER"),
        ("fastapi/front.py", "EXAMPLE_FOLDER"),
        ("pipeline/papers.py", "EXAMPLE_FOLDER"),
        ("provider/ask.py", "EXAMPLE_FOLDER"),
    ],
    ids=["readme", "demo", "fallback", "fastapi", "pipeline", "provider"],
)
def test_the_examples_have_no_errors(
    path: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are run without a server, once 'budget init' has been run."""
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example", module)
    spec.loader.exec_module(module)
    module.budget.init()
    found = module.budget.checkup(QUICK)
    module.budget.store.dispose()
    assert found.of("error") == ()
    assert {one.id for one in found.of("warning")} == {"relay", "workers"}
