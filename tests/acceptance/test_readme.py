"""The README's application, run as the README says, on the embedded default."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.cluster import WAIT, end_all, eventually

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "readme"
#: What the README's estimator makes of this prompt.
PROMPT, ESTIMATE = "Write a haiku.", 804


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_example_is_the_program_of_the_readme() -> None:
    program = [ast.dump(one) for one in ast.parse(blocks("python")[0]).body]
    example = [ast.dump(one) for one in ast.parse((EXAMPLE / "shop.py").read_text()).body]
    assert len(program) == 6
    assert [one for one in example if one in program] == program


def test_the_embedded_settings_of_the_readme_are_those_that_are_run_here(tmp_path: Path) -> None:
    [block] = [one for one in blocks("python") if "filesystem://" in one]
    app = Celery("shop")
    exec(block.replace("/var/lib/shop", str(tmp_path)), {"app": app})  # noqa: S102 - the page's own
    printed = {
        name: app.conf[name]
        for name in (
            "budget_database_url",
            "broker_url",
            "broker_transport_options",
            "result_backend",
            "worker_enable_remote_control",
        )
    }
    show = f"print(json.dumps({{name: shop.app.conf[name] for name in {list(printed)!r}}}))"
    shop = Shop(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", f"import json, shop\n{show}"],
        cwd=EXAMPLE,
        env=shop.environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
    )
    assert json.loads(done.stdout) == printed


def test_the_readme_prints_the_commands_that_are_run_here() -> None:
    printed = "\n".join(blocks("sh")).splitlines()
    for command in (
        "celery -A shop budget init",
        "celery -A shop budget set tenant:acme --limit 1000000 --unit tokens",
        "celery -A shop worker",
        "celery -A shop beat -S budget",
    ):
        assert command in printed


class Shop:
    """The example's commands in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if "CELERY" not in name},
            "SHOP_FOLDER": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def celery(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``celery -A shop …`` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "celery", "-A", "shop", *arguments],
            cwd=EXAMPLE,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT,
        )

    def start(self, *arguments: str) -> Path:
        """Start ``celery -A shop …``; return its log."""
        log = self.folder / f"{arguments[0]}.log"
        with log.open("wb") as file:
            self.started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "celery", "-A", "shop", *arguments],
                    cwd=EXAMPLE,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return log

    def stop(self) -> None:
        end_all(self.started)

    def result(self, task_id: str) -> dict[str, Any]:
        path = self.folder / "results" / f"celery-task-meta-{task_id}"
        written = path.read_text() if path.exists() else ""
        return json.loads(written) if written else {}

    def report(self) -> dict[str, Any]:
        said = self.celery("budget", "report", "--json")
        assert said.returncode == 0, said.stderr
        return dict(json.loads(said.stdout))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.stop()


def run(shop: Shop, *arguments: str) -> str:
    done = shop.celery(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reported(shop: Shop) -> Callable[[], dict[str, int]]:
    """Return what is open in the ledger."""
    return lambda: dict(shop.report()["open"])


def test_the_readme_from_the_schema_to_the_report(shop: Shop) -> None:
    run(shop, "budget", "init")
    run(shop, "budget", "set", "tenant:acme", "--limit", "1000", "--unit", "tokens")
    call = ("call", "shop.draft", "--args", json.dumps([PROMPT, "acme"]))
    task_id = run(shop, *call).strip()
    refused = shop.celery(*call)
    assert refused.returncode != 0
    assert (
        f"BudgetExceeded: budget 'tenant:acme' is held by requests that have not ended: "
        f"{1000 - ESTIMATE} of 1000 tokens available "
        f"({ESTIMATE} reserved, 0 spent) and {ESTIMATE} were requested"
    ) in refused.stderr

    logs = [shop.start("worker", "-c", "1"), shop.start("beat", "-S", "budget")]
    stored = eventually(
        lambda: shop.result(task_id),
        what="the result; " + "; ".join(str(log) for log in logs),
    )
    assert (stored["status"], stored["result"]) == ("SUCCESS", PROMPT.upper())
    eventually(reported(shop), lambda left: not any(left.values()), what="a closed ledger")

    used = 2 * len(PROMPT.split())
    report = shop.report()
    assert report["budgets"] == [
        {
            "budget": "tenant:acme",
            "unit": "tokens",
            "limit": 1000,
            "reserved": 0,
            "spent": used,
            "available": 1000 - used,
            "parent": None,
            "period": "total",
            "start_us": 0,
            "end_us": None,
            "state": "open",
        }
    ]
    counts = report["counts"]
    assert (counts["admitted"], counts["refused"], counts["settled"]) == (1, 1, 1)
    (drift,) = report["drift"]
    assert (drift["stage"], drift["estimated"], drift["actual"]) == ("draft", ESTIMATE, used)
    assert run(shop, "budget", "reconcile")
    assert "settled" in run(shop, "budget", "explain", task_id)
