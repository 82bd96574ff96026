"""Least-privilege roles on a real PostgreSQL: each does its own, and is refused the others'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa

from celery_budget import BudgetError, ConfigurationError, StoreError
from celery_budget.store import roles, schema
from tests.integration import role_paths
from tests.integration.commands import runner
from tests.integration.support import Shop

pytestmark = pytest.mark.postgres

As = Callable[[str], Shop]


class Server:
    """A ledger, its roles, and users that are members of them."""

    def __init__(self, url: str, make_shop: Callable[..., Shop], ledger: str | None) -> None:
        self.url, self.prefix, self.queue = url, f"r{uuid4().hex[:8]}_", f"q{uuid4().hex}"
        self._make_shop = make_shop
        self._path = "" if ledger is None else f"?options=-csearch_path%3D{ledger}"
        self._admin = psycopg.connect(re.sub(r"\+psycopg", "", url), autocommit=True)
        self.shops: dict[str, Shop] = {}
        if ledger is not None:
            self.sql(f"CREATE SCHEMA {ledger}")
        self.owner = self.shop(None)
        self.owner.budget.init()

    def sql(self, statement: str) -> Any:
        return self._admin.execute(statement)  # type: ignore[call-overload]

    def give(self, **options: Any) -> None:
        """Do what the statements say, in the order in which they are printed."""
        for statement in self.owner.budget.role_statements(self.prefix, **options):
            self.owner.sql(sa.text(re.sub(r":(?=\w)", r"\\:", statement)))

    def shop(self, role: str | None) -> Shop:
        """An application whose user is a member of a role, and of no other."""
        if role is None:
            url = self.url
        else:
            user = f"{self.prefix}{role}_user"
            if role not in self.shops:
                self.sql(f"CREATE ROLE {user} LOGIN PASSWORD 'x'")
                if role != "nobody":
                    self.sql(f"GRANT {self.prefix}{role} TO {user}")
            url = re.sub(r"//[^@]*@", f"//{user}:x@", self.url)
        if str(role) not in self.shops:
            shop = self._make_shop(
                init=False, budget_database_url=url + self._path, task_default_queue=self.queue,
                budget_lock_seconds=2, task_create_missing_queues=True,
            )  # fmt: skip
            role_paths.declare(shop)
            shop.app.finalize()
            self.shops[str(role)] = shop
        return self.shops[str(role)]

    def close(self) -> None:
        for shop in self.shops.values():
            shop.budget.store.dispose()
        mine = f"SELECT rolname FROM pg_roles WHERE rolname LIKE '{self.prefix}%'"  # noqa: S608
        names = [row[0] for row in self.sql(mine).fetchall()]
        for name in names:
            self.sql(f"DROP OWNED BY {name}")
        for name in names:
            self.sql(f"DROP ROLE {name}")
        self._admin.close()


@pytest.fixture(params=["public", "ledger"])
def server(
    request: pytest.FixtureRequest, postgres_url: str, make_shop: Callable[..., Shop]
) -> Iterator[Server]:
    """One whose ledger is in the usual schema, or in one of its own."""
    server = Server(postgres_url, make_shop, None if request.param == "public" else "ledger")
    try:
        yield server
    finally:
        server.close()


def test_each_role_runs_its_own_path(server: Server) -> None:
    server.give()
    role_paths.administer(server.shop("admin"))
    role_paths.call(server.shop("caller"))
    relay = server.shop("relay")
    role_paths.relay(relay)
    for _ in range(2):
        messages = relay.received() + relay.received("paid-q")
        assert messages
        role_paths.work(server.shop("worker"), messages)
        role_paths.relay(relay)
        server.owner.make_due()
        role_paths.relay(relay)
    role_paths.report(server.shop("reporter"))
    role_paths.administer(server.shop("admin"))
    # And once more after an upgrade, which changes nothing for what is there.
    server.owner.budget.init()
    server.give()
    role_paths.call(server.shop("caller"))
    assert server.owner.budget.reconcile().mismatches == ()


def denied(act: Callable[[], object]) -> None:
    with pytest.raises(BudgetError, match="permission denied"):
        act()


def statement(shop: Shop, text: str) -> Callable[[], object]:
    def run() -> None:
        with shop.budget.store.transaction() as connection:
            connection.execute(sa.text(text))

    return run


@pytest.mark.parametrize("server", ["public"], indirect=True)
def test_each_role_is_refused_what_is_not_its_own(server: Server) -> None:
    server.give()
    role_paths.administer(server.shop("admin"))
    server.shop("caller").task("role.draft").delay()
    everybody = [server.shop(name) for name in ("caller", "worker", "relay", "reporter")]
    for shop in everybody:
        budget = shop.budget
        denied(lambda budget=budget: budget.set("new", limit=1, unit="tokens"))
        denied(lambda budget=budget: budget.set("tenant:a", limit=10_000))
        denied(lambda budget=budget: budget.grant("tenant:a", 5))
        denied(lambda budget=budget: budget.adjust("tenant:a", -5, reason="x"))
        denied(lambda budget=budget: budget.lanes.set("mine", queues=["x"]))
        for text in (
            "UPDATE budget_budgets SET limit_amount = NULL",
            "DELETE FROM budget_budgets",
            "INSERT INTO budget_grants (root, key, budget, amount) VALUES ('default', 'k', 'b', 1)",
            "DELETE FROM budget_journal",
            "UPDATE budget_journal SET reserved = 0",
            "DROP TABLE budget_budgets",
            "UPDATE budget_alembic_version SET version_num = 'x'",
        ):
            with pytest.raises(StoreError, match=r"permission denied|must be owner"):
                statement(shop, text)()
    caller, worker, _, reporter = everybody
    for text in (
        "INSERT INTO budget_attempts (root) VALUES ('x')",
        "UPDATE budget_usage SET amount = 0",
        "INSERT INTO budget_effects (root) VALUES ('x')",
        "DELETE FROM budget_alerts",
    ):
        denied(statement(caller, text))
    denied(statement(worker, "DELETE FROM budget_balances"))
    denied(statement(worker, "UPDATE budget_lanes SET paused = true"))
    denied(lambda: reporter.task("role.draft").delay())
    for table in schema.metadata.sorted_tables:
        denied(statement(reporter, f"DELETE FROM {table.name}"))  # noqa: S608
        denied(statement(reporter, f"UPDATE {table.name} SET root = 'x'"))  # noqa: S608
    for name, hidden in roles.PAYLOADS.items():
        for column in hidden if name != "budget_attempts" else ():
            denied(statement(reporter, f"SELECT {column} FROM {name}"))  # noqa: S608
    denied(statement(server.shop("nobody"), "SELECT 1 FROM budget_budgets"))
    denied(statement(server.shop("nobody"), "SELECT budget_lock('default', 1, ARRAY['x'])"))
    admin = server.shop("admin")
    with pytest.raises(StoreError, match=r"permission denied|must be owner"):
        statement(admin, "ALTER TABLE budget_budgets ADD COLUMN x integer")()


@pytest.mark.parametrize("server", ["public"], indirect=True)
def test_what_was_given_besides_is_taken_back(server: Server) -> None:
    server.give()
    server.sql(f"GRANT ALL ON budget_budgets TO {server.prefix}caller")
    server.sql(f"GRANT UPDATE (limit_amount) ON budget_budgets TO {server.prefix}caller")
    server.give()
    text = "UPDATE budget_budgets SET limit_amount = 1"
    denied(statement(server.shop("caller"), text))


@pytest.mark.parametrize("server", ["public"], indirect=True)
def test_templates_are_for_callers_that_may(server: Server) -> None:
    server.owner.budget.set("tenant:*", limit=9, unit="tokens")
    server.owner.budget.set("paid", limit=9, unit="tokens")
    server.give()
    draft = server.shop("caller").task("role.draft")
    denied(lambda: draft.delay(tenant="new"))
    server.give(templates=True)
    draft.delay(tenant="new")
    assert server.owner.amounts("tenant:new") == (2, 0, 7)
    denied(lambda: server.shop("caller").budget.set("tenant:new", limit=10_000))


@pytest.mark.parametrize("server", ["ledger"], indirect=True)
def test_the_command_prints_them(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = runner(capsys, monkeypatch)(server.owner.app, "roles", "--prefix", server.prefix)
    assert done.code == 0
    assert [f"{one};" for one in server.owner.budget.role_statements(server.prefix)] == (
        done.out.splitlines()
    )
    # As a script of psql's: each ends by itself.
    server.sql(done.out)
    role_paths.administer(server.shop("admin"))
    server.shop("caller").task("role.draft").delay()


def test_a_file_has_no_roles(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="roles are for a ledger in PostgreSQL"):
        shop.budget.role_statements()
