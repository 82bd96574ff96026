"""docs/howto/backup-and-restore.md on PostgreSQL: its commands, and a ledger of yesterday."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery
from psycopg import sql

from celery_budget import CeleryBudget, UnknownRequest, budgeted
from tests.docs.commands import lines_of
from tests.docs.pages import ROOT, blocks_of
from tests.services.postgres import PostgresServer, plain_url

PAGE = ROOT / "docs" / "howto" / "backup-and-restore.md"


def commands(name: str) -> list[str]:
    """The page's commands of one block."""
    texts = [block.text for block in blocks_of(PAGE) if block.language == "console"]
    [text] = [text for text in texts if name in text]
    return list(lines_of(text))


def do(command: str, folder: Path, programs: Path, url: str) -> None:
    at = urlsplit(plain_url(url))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PG")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PGHOST": str(at.hostname),
        "PGPORT": str(at.port),
        "PGUSER": str(at.username),
        "PGPASSWORD": at.password or "",
        "LEDGER": plain_url(url),
    }
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def programs_of(server: Any) -> Path:
    if isinstance(server, PostgresServer):
        return server._programs
    found = shutil.which("pg_dump")
    if found is None:
        pytest.skip("pg_dump is not on the PATH")
    return Path(found).parent


def shop(url: str) -> tuple[CeleryBudget, Any]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(budget_database_url=url, result_backend="cache+memory://")
    budget = CeleryBudget(app)

    @budgeted(budget="tenant:{tenant}", estimate=100)
    @app.task(name="shop.draft")
    def draft(prompt: str, tenant: str) -> str:
        return prompt

    return budget, draft


def test_what_was_restored_adds_up_and_says_what_is_open(
    postgres_server: Any, postgres_url: str, tmp_path: Path
) -> None:
    programs = programs_of(postgres_server)
    budget, draft = shop(postgres_url)
    budget.init()
    budget.set("tenant:acme", limit=1000, unit="tokens")
    before = draft.apply_async(("Write a haiku.", "acme"), request_id="order-1")
    [dump] = commands("pg_dump")
    do(dump, tmp_path, programs, postgres_url)
    # What the backup does not have.
    since = draft.apply_async(("Write a sonnet.", "acme"), request_id="order-2")
    assert budget.balance("tenant:acme").reserved == 200

    for command in commands("createdb"):
        do(command, tmp_path, programs, postgres_url)
    restored_url = postgres_url.rpartition("/")[0] + "/shop"
    try:
        restored, again = shop(restored_url)
        restored.init()
        found = restored.reconcile()
        assert found.ok
        assert restored.balance("tenant:acme").reserved == 100
        # What was open at the backup is open again.
        assert restored.job(before.id, owner="tenant:acme").state == "queued"
        # What came since is not known; asked for again it is admitted anew, under its old id.
        with pytest.raises(UnknownRequest):
            restored.job(since.id, owner="tenant:acme")
        repeated = again.apply_async(("Write a sonnet.", "acme"), request_id="order-2")
        assert repeated.id == since.id
        # And what is known is not admitted twice.
        again.apply_async(("Write a haiku.", "acme"), request_id="order-1")
        assert restored.balance("tenant:acme").reserved == 200
        assert restored.reconcile().ok
        restored.store.dispose()
    finally:
        budget.store.dispose()
        postgres_server.execute(sql.SQL("DROP DATABASE IF EXISTS shop WITH (FORCE)"))
