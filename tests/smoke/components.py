"""Components of pytest-celery's for what it has none of: a ledger, a relay, a budgeted worker."""

from __future__ import annotations

import json
from typing import Any

import celery
import psycopg
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from psycopg import sql
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestContainer,
    CeleryTestNode,
    CeleryTestSetup,
    CeleryWorkerContainer,
    RedisTestBackend,
)

from celery_budget.cli import budget
from celery_budget.integration.context import installed_on
from celery_budget.integration.install import CeleryBudget
from tests.smoke.app import CONF, QUEUE, make_app

APP = "tests.smoke.app"


class LedgerContainer(CeleryTestContainer):
    """PostgreSQL; ``celeryconfig`` names the database of one ledger in it."""

    database = "smoke"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {"url": self.url, "host_url": self.host_url, "database": self.database}

    @property
    def url(self) -> str:
        return f"{self.prefix()}{self.attrs['Config']['Hostname']}/{self.database}"

    @property
    def host_url(self) -> str:
        return f"{self.prefix()}127.0.0.1:{self._wait_port('5432/tcp')}/{self.database}"

    @property
    def client(self) -> psycopg.Connection[Any]:
        """A connection to the ledger's database."""
        return psycopg.connect(self.host_url.replace("+psycopg", ""), autocommit=True)

    @classmethod
    def version(cls) -> str:
        return cls.image().split(":")[-1]

    @classmethod
    def image(cls) -> str:
        return "postgres:17"

    @classmethod
    def initial_env(cls) -> dict[str, str]:
        return {"POSTGRES_HOST_AUTH_METHOD": "trust", "POSTGRES_DB": cls.database}

    @classmethod
    def ports(cls) -> dict[str, None]:
        return {"5432/tcp": None}

    @classmethod
    def prefix(cls) -> str:
        return "postgresql+psycopg://postgres@"

    @property
    def ready_prompt(self) -> str | None:
        # The image starts a server to make the database, which nobody outside can reach.
        return "PostgreSQL init process complete"

    def ready(self) -> bool:
        if not super().ready():
            return False
        try:
            self.client.close()
        except psycopg.OperationalError:
            return False
        return True


class ProgramContainer(CeleryTestContainer):
    """A program of the application's: what it runs, and the settings that it gets."""

    @classmethod
    def initial_env(
        cls, celery_worker_cluster_config: dict[str, Any], initial: dict[str, str] | None = None
    ) -> dict[str, str]:
        return {
            **(initial or {}),
            "PYTHONUNBUFFERED": "1",
            CONF: json.dumps(settings(celery_worker_cluster_config, "urls")),
        }


class BudgetWorkerContainer(ProgramContainer, CeleryWorkerContainer):
    """A worker of the application's, with two children."""

    @classmethod
    def command(cls, *args: str, **kwargs: Any) -> list[str]:
        return [
            *("celery", "-A", APP, "worker", f"--loglevel={cls.log_level()}"),
            *("-n", f"{cls.worker_name()}@%h", "-Q", cls.worker_queue(), "-c", "2"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            *args,
        ]

    @property
    def ready_prompt(self) -> str:
        return " ready."

    @classmethod
    def version(cls) -> str:
        return str(celery.__version__)

    @classmethod
    def worker_queue(cls) -> str:
        return QUEUE


class RelayContainer(ProgramContainer):
    """The relay, which also sweeps."""

    @classmethod
    def command(cls, *args: str, **kwargs: Any) -> list[str]:
        return ["celery", "-A", APP, "budget", "relay", *args]

    @property
    def ready_prompt(self) -> str:
        return "budget relay started"


class BudgetTestLedger(CeleryTestNode):
    """The ledger's database server."""

    container: LedgerContainer

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return what a query in the ledger's database gives."""
        with self.container.client as connection:
            return connection.execute(sql.SQL(statement), parameters).fetchall()


class BudgetTestRelay(CeleryTestNode):
    """The relay, and the commands that an operator would give beside it."""

    def command(self, *arguments: str) -> tuple[int, str]:
        """Run ``budget …`` there; its exit code and what it said."""
        code, output = self.container.exec_run(["celery", "-A", APP, "budget", *arguments])
        return code, output.decode()


class BudgetTestBackend(RedisTestBackend):
    """Redis for results."""

    def teardown(self) -> None:
        # Its own way takes the backend from every result that the process has, by a look at each
        # object there is, which wakes the lazy ones of other libraries. The setup closes its own.
        CeleryTestBackend.teardown(self)


class BudgetTestSetup(CeleryTestSetup):
    """A setup with a ledger and a relay."""

    def __init__(self, *, ledger: BudgetTestLedger, relay: BudgetTestRelay, **others: Any) -> None:
        super().__init__(**others)
        self.ledger = ledger
        self.relay = relay

    @property
    def budget(self) -> CeleryBudget:
        """What a caller of the application has of it."""
        return installed_on(self.app)

    @classmethod
    def name(cls) -> str:
        return "smoke"

    @classmethod
    def config(cls, celery_worker_cluster_config: dict[str, Any]) -> dict[str, Any]:
        return settings(celery_worker_cluster_config, "host_urls")

    @classmethod
    def create_setup_app(
        cls, celery_setup_config: dict[str, Any], celery_setup_app_name: str
    ) -> Celery:
        return make_app(celery_setup_config)

    def command(self, *arguments: str) -> tuple[int, str]:
        """Run ``budget …`` on the test's own application; its exit code and what it said."""
        context = CLIContext(self.app, no_color=True, workdir=None)
        done = CliRunner().invoke(budget, arguments, obj=context, prog_name="budget")
        return done.exit_code, done.output

    def teardown(self) -> None:
        # A result that a test still holds would ask for its server when it is freed.
        self.app.backend.result_consumer.subscribed_to.clear()
        self.app.close()
        self.budget.store.dispose()


def settings(celery_worker_cluster_config: dict[str, Any], urls: str) -> dict[str, Any]:
    """Return where all is, as seen by programs (``urls``) or by the tests (``host_urls``)."""
    of = celery_worker_cluster_config
    return {
        "broker_url": ";".join(of["celery_broker_cluster_config"][urls]),
        "result_backend": ";".join(of["celery_backend_cluster_config"][urls]),
        "budget_database_url": ";".join(of["budget_ledger_cluster_config"][urls]),
    }
