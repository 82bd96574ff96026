"""``celery -A proj budget …``: every command, plain and as JSON, its errors and exit statuses."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from celery_budget import budgeted
from celery_budget.cli import budget, group
from tests.contract.support import RETURNED, Ledger
from tests.integration.commands import Done, Run, runner
from tests.integration.support import Shop, make_app

BIG = 2**63 - 1
SECONDS = 30

PROJ = """
from celery import Celery
from celery_budget import CeleryBudget

app = Celery("proj")
app.conf.update({conf!r})
budget = CeleryBudget(app)
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def ledger_of(shop: Shop) -> Ledger:
    return Ledger(shop.budget.store, shop.budget.settings)


def settle(ledger: Ledger, amount: int = 10, used: int = 4) -> str:
    """A request that ran; its task id."""
    request, attempt = ledger.start(amount, budget="tenant:a", request_id="order-1")
    attempt.record(used)
    attempt.end(RETURNED)
    attempt.close()
    return request.task_id


# The commands, each plain and as JSON.


def test_init_can_be_repeated(make_shop: Callable[..., Shop], run: Run, sqlite_url: str) -> None:
    shop = make_shop(init=False)
    first = run(shop.app, "init")
    assert (first.code, first.err) == (0, "")
    assert f"the ledger in {sqlite_url} is at version " in first.out
    again = run(shop.app, "init", "--json")
    assert again.json == {"database": sqlite_url, "version": first.out.split()[-1]}


def test_set_creates_and_changes_and_prints_the_balance(shop: Shop, run: Run) -> None:
    done = run(shop.app, "set", "b", "--limit", "1_000_000", "--unit", "micro-usd")
    assert (done.code, done.err) == (0, "")
    row = done.out.splitlines()[-1]
    assert row.split() == ["b", "micro-usd", "1,000,000", "0", "0", "1,000,000"]
    done = run(shop.app, "set", "b", "--limit", "7", "--json")
    balance = {
        "available": 7, "budget": "b", "limit": 7, "reserved": 0, "spent": 0, "unit": "micro-usd",
        "parent": None, "period": "total", "start_us": 0, "end_us": None, "state": "open",
    }  # fmt: skip
    declared = {
        "name": "b", "unit": "micro-usd", "limit": 7, "parent": None, "period": "total",
        "timezone": "UTC", "anchor_day": 1, "soft_stop": 1.0, "hard_stop": 1.0, "stripes": None,
        "weight": 1, "alert_at": None,
    }  # fmt: skip
    assert done.json == {
        **balance,
        "declared": declared,
        "template": None,
        "grants": [],
        "above": [],
        "room": 7,
        "room_of": "b",
    }


@pytest.mark.parametrize("written", ["none", "NONE"])
def test_set_none_is_unlimited(shop: Shop, run: Run, written: str) -> None:
    assert "unlimited" in run(shop.app, "set", "tenant:a", "--limit", written).out
    shown = run(shop.app, "show", "tenant:a", "--json").json
    assert (shown["limit"], shown["available"]) == (None, None)


@pytest.mark.parametrize(
    "limit",
    ["1.5", "-1", "+1", "9223372036854775808", "1e3", "", "nan", "0x10", "1__0", "_1", "٣",
     "unlimited", "9" * 5000],
)  # fmt: skip
def test_set_refuses_what_is_no_limit_and_changes_nothing(shop: Shop, run: Run, limit: str) -> None:
    before = shop.ledger()
    done = run(shop.app, "set", "tenant:a", "--limit", limit, "--json")
    assert (done.code, done.out) == (2, "")
    assert "give an integer from 0 to 2^63-1" in done.err
    assert run(shop.app, "set", "new", "--limit", limit, "--unit", "x").code == 2
    assert shop.ledger() == before


@pytest.mark.parametrize(
    ("args", "said", "code"),
    [
        (["new", "--limit", "1"], "'new' is new; say what it counts", 1),
        (["", "--limit", "1", "--unit", "x"], "has 1 to 255 characters", 2),
        (["a\tb", "--limit", "1", "--unit", "x"], "no control characters", 2),
        (["new", "--limit", "1", "--unit", ""], "unit has 1 to 255 characters", 2),
    ],
)
def test_set_refuses_what_is_no_budget(
    shop: Shop, run: Run, args: list[str], said: str, code: int
) -> None:
    before = shop.ledger()
    done = run(shop.app, "set", *args)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert shop.ledger() == before


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_set_of_nothing_is_wrong_use(shop: Shop, run: Run, options: list[str]) -> None:
    assert run(shop.app, "set", "tenant:a", *options).failed(2, "nothing is to be changed; give")


def test_set_of_a_new_budget_needs_a_limit(shop: Shop, run: Run) -> None:
    done = run(shop.app, "set", "new", "--unit", "tokens")
    assert done.failed(1, "'new' is new; say how much it allows with limit= (--limit N, or none")
    assert [balance.budget for balance in shop.budget.balances()] == ["tenant:a"]


def test_set_below_what_is_used_shows_the_overcommitment(shop: Shop, run: Run) -> None:
    ledger_of(shop).reserve(10, budget="tenant:a")
    row = run(shop.app, "set", "tenant:a", "--limit", "3").out.splitlines()[-1]
    assert row.split()[-2:] == ["-7", "overcommitted"]
    assert run(shop.app, "show", "tenant:a", "--json").json["available"] == -7


def test_list_shows_every_budget_by_name(shop: Shop, run: Run) -> None:
    long_name = "tenant:" + "x" * 200
    shop.budget.set(long_name, limit=BIG, unit="tokens")
    done = run(shop.app, "list")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()[2:]] == ["tenant:a", long_name]
    found = run(shop.app, "list", "--json")
    assert [one["budget"] for one in found.json["budgets"]] == ["tenant:a", long_name]
    assert f'"limit": {BIG}' in found.out


def test_list_without_budgets_says_how_to_create_one(
    make_shop: Callable[..., Shop], run: Run
) -> None:
    shop = make_shop(init=False)
    shop.budget.init()
    assert "budget set NAME" in run(shop.app, "list").out
    assert run(shop.app, "list", "--json").json == {"budgets": [], "templates": [], "parked": []}


def test_show_shows_one_budget(shop: Shop, run: Run) -> None:
    done = run(shop.app, "show", "tenant:a")
    assert done.code == 0
    assert done.out.splitlines()[-1].split() == ["tenant:a", "tokens", "10", "0", "0", "10"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_show_of_an_unknown_budget_fails(shop: Shop, run: Run, options: list[str]) -> None:
    done = run(shop.app, "show", "nobody", *options)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: there is no budget named 'nobody'")
    assert "Traceback" not in done.err


def test_report_shows_all(shop: Shop, run: Run) -> None:
    settle(ledger_of(shop))
    done = run(shop.app, "report")
    assert (done.code, done.err) == (0, "")
    drift = ["draft", "constant:1", "1", "10", "4", "0.40", "estimated", "too", "high"]
    assert drift in [line.split() for line in done.out.splitlines()]
    assert done.out.splitlines()[-1] == "1 request, nothing open"
    found = run(shop.app, "report", "--json").json
    assert found["counts"]["settled"] == 1
    assert found["drift"][0]["ratio"] == 0.4
    assert found["budgets"][0]["spent"] == 4
    assert not any(found["open"].values())


def test_amounts_are_exact_in_json(shop: Shop, run: Run) -> None:
    shop.budget.set("tenant:a", limit=BIG)
    settle(ledger_of(shop), BIG, BIG)
    found = run(shop.app, "report", "--json").json
    assert found["budgets"][0]["spent"] == BIG
    assert found["drift"][0]["actual"] == BIG
    [request] = run(shop.app, "explain", "order-1", "--json").json["requests"]
    assert request["usage"][0]["amount"] == BIG


# What goes wrong.


@pytest.mark.parametrize("args", [["list"], ["report"], ["reconcile", "--json"]])
def test_without_tables_init_is_named(
    make_shop: Callable[..., Shop], run: Run, args: list[str]
) -> None:
    done = run(make_shop(init=False).app, *args)
    assert (done.code, done.out) == (1, "")
    assert "run 'celery -A PROJ budget init'" in done.err


def test_without_a_database_both_forms_are_named(make_shop: Callable[..., Shop], run: Run) -> None:
    done = run(make_app(), "list")
    assert (done.code, done.out) == (1, "")
    assert "budget_database_url is not set" in done.err
    assert "postgresql+psycopg://user@host/name" in done.err
    assert "sqlite:////absolute/path.db" in done.err


def test_a_database_that_is_not_there_is_an_error(run: Run, tmp_path: Path) -> None:
    app = make_app(budget_database_url=f"sqlite:///{tmp_path / 'gone' / 'budget.db'}")
    done = run(app, "list")
    assert (done.code, done.out) == (1, "")
    assert "failed: unable to open database file" in done.err


def test_an_application_without_budgets_is_told_what_to_add(run: Run) -> None:
    done = run(make_app("plain", budget=False), "list", "--json")
    assert (done.code, done.out) == (1, "")
    assert "'plain' has no CeleryBudget" in done.err
    assert "budget = CeleryBudget(app)" in done.err


def test_a_budget_made_in_a_module_of_tasks_is_found(
    run: Run, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(budget=False, budget_database_url=sqlite_url, imports=["budget_cli_tasks"])
    (tmp_path / "budget_cli_tasks.py").write_text(
        "import celery, celery_budget\ncelery_budget.CeleryBudget(celery.current_app)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app.set_current()
    assert run(app, "init").code == 0
    monkeypatch.delitem(sys.modules, "budget_cli_tasks")


@pytest.mark.parametrize("command", sorted(budget.commands))
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    done = run(make_app(), command, "--help")
    assert done.code == 0
    assert f"  celery -A proj budget {command}" in done.out
    # Ids are as long as they are.
    assert [
        line for line in done.out.splitlines() if len(line) > 80 and "4a1f6f2b8f11" not in line
    ] == []
    _, _, options = done.out.partition("\nOptions:\n")
    assert options.lstrip().startswith(("-", "commands")), options


def test_what_each_command_does_is_told_whole(run: Run) -> None:
    done = run(make_app(), "--help")
    assert done.code == 0
    assert "..." not in done.out.partition("Commands:")[2]


# As users run it.


@dataclass(frozen=True)
class Project:
    """A directory with ``proj.py``, as a user has it."""

    folder: Path

    def write(self, **conf: Any) -> None:
        (self.folder / "proj.py").write_text(PROJ.format(conf=conf))

    def start(self, *args: str) -> subprocess.Popen[str]:
        known = ("CELERY_", "BROKER_URL", "RESULT_BACKEND", "NO_COLOR")
        env = {name: value for name, value in os.environ.items() if not name.startswith(known)}
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "proj", "budget", *args],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *args: str) -> Done:
        process = self.start(*args)
        out, err = process.communicate(timeout=SECONDS)
        return Done(process.returncode, out, err)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    folder.mkdir()
    return Project(folder)


def test_a_first_session(project: Project, sqlite_url: str) -> None:
    project.write(budget_database_url=sqlite_url, broker_url="memory://")
    for command in ("list", "relay"):
        early = project.run(command)
        assert (early.code, early.out) == (1, "")
        assert "run 'celery -A proj budget init'" in early.err
        assert "Traceback" not in early.err
    assert project.run("init").code == 0
    done = project.run("set", "acme", "--limit", str(BIG), "--unit", "tokens")
    assert (done.code, done.err) == (0, "")
    assert "9,223,372,036,854,775,807" in done.out
    assert "\x1b" not in done.out
    assert project.run("show", "acme", "--json").json["available"] == BIG
    assert project.run("reconcile").out == "the ledger adds up: 0 requests, nothing open\n"


def test_a_missing_database_url_is_a_clean_error(project: Project) -> None:
    project.write(broker_url="memory://")
    done = project.run("init", "--json")
    assert (done.code, done.out) == (1, "")
    assert "budget_database_url is not set" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_relay_publishes_and_stops_on_a_signal(
    project: Project, make_shop: Callable[..., Shop], sqlite_url: str, number: signal.Signals
) -> None:
    folder = project.folder / "broker"
    folder.mkdir()
    conf = {
        "budget_database_url": sqlite_url,
        "broker_url": "filesystem://",
        "broker_transport_options": {
            "data_folder_in": str(folder),
            "data_folder_out": str(folder),
            "control_folder": str(project.folder / "control"),
        },
    }
    project.write(**conf)
    shop = make_shop(**conf)

    @budgeted(budget="tenant:a", estimate=10)
    @shop.app.task(name="shop.draft")
    def draft() -> None: ...

    shop.task("shop.draft").delay()
    process = project.start("relay")
    try:
        assert process.stderr is not None
        assert any("budget relay started on sqlite" in line for line in process.stderr)
        until(lambda: shop.counts()["published"] == 1)
        assert len(list(folder.iterdir())) == 1
        process.send_signal(number)
        sent = time.monotonic()
        out, err = process.communicate(timeout=SECONDS)
        assert time.monotonic() - sent < 5
        assert (process.returncode, out) == (0, "")
        _, stopping, stopped = err.rpartition(f"{number.name}: stopping the relay\n")
        assert stopping
        assert "budget relay stopped on sqlite" in stopped
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a state that another process brings about."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    "command",
    [
        "journal tenant:a",
        "explain --budget tenant:a",
        "parked list",
        "quarantine list",
        "reconcile",
    ],
)
def test_more_than_any_database_counts_is_wrong_use(shop: Shop, run: Run, command: str) -> None:
    shop.budget.set("tenant:a", limit=10, unit="tokens")
    done = run(shop.app, *command.split(), "--limit", "9" * 23)
    assert done.failed(2, "'--limit'")


def test_a_full_disk_is_said_where_the_output_goes_to_it(
    shop: Shop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(group.click, "echo", full)
    for json in ([], ["--json"]):
        done = run(shop.app, "list", *json)
        assert done.failed(1, "what was to be printed is not, or not whole: No space left")
