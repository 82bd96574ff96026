"""The store's edges: what is tried again, what is told, and who waits for whom."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import reconcile
from celery_budget.errors import ConfigurationError, InvalidAmount, SchemaError, StoreError
from celery_budget.store import Store, budgets, declaring, engine, migrate, schema
from celery_budget.store.unready import Unready
from tests.contract.support import Ledger
from tests.messages import Told


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once."""
    monkeypatch.setattr(engine, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(engine, "LONGEST_WAIT_SECONDS", 0.001)


def failing(times: int, retryable: bool = True) -> Any:
    """A function that fails ``times`` times; it counts its calls."""

    def function(connection: sa.Connection) -> int:
        function.calls += 1  # type: ignore[attr-defined]
        if function.calls <= times:  # type: ignore[attr-defined]
            raise StoreError("down", retryable)
        return 42

    function.calls = 0  # type: ignore[attr-defined]
    return function


def test_its_place_is_the_database_whoever_connects(tmp_path: Path) -> None:
    place = Store("postgresql://me:secret@host:5433/ledger?prepare_threshold=none").place
    assert place == Store("postgresql+psycopg://you@host:5433/ledger").place
    assert place != Store("postgresql://me@host:5433/other").place
    assert place != Store("postgresql://me@other:5433/ledger").place
    assert "secret" not in place
    socket = "postgresql:///ledger?host=/run/one"
    assert Store(socket).place != Store(socket.replace("one", "other")).place
    # Of several servers each process may name first the one that is near.
    one, two = Store("postgresql://h:1,g:2/ledger"), Store("postgresql:///ledger?host=g:2&host=h:1")
    assert one.place == two.place
    assert one.place != Store("postgresql://h:1,g:3/ledger").place
    assert Store(f"sqlite:///{tmp_path}/a").place != Store(f"sqlite:///{tmp_path}/b").place


@pytest.mark.usefixtures("quick")
def test_of_several_servers_each_is_tried_and_told_of() -> None:
    url = "postgresql://me:se%2Ccret@127.0.0.1:1,127.0.0.1:2/ledger?target_session_attrs=read-write"
    with pytest.raises(StoreError) as caught:
        Store(url).run(lambda connection: None)
    assert caught.value.retryable
    said = str(caught.value)
    assert "port: '1'" in said
    assert "port: '2'" in said
    assert "secret" not in said
    assert "target_session_attrs=read-write" in said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["run", "run_statement"])
def test_what_may_pass_is_tried_a_few_times(store: Store, how: str) -> None:
    assert getattr(store, how)(failing(engine.TRIES - 1)) == 42
    function = failing(99)
    with pytest.raises(StoreError):
        getattr(store, how)(function)
    assert function.calls == engine.TRIES


@pytest.mark.usefixtures("quick")
def test_a_worker_waits_for_as_long_as_it_takes(store: Store, told: Told) -> None:
    assert store.wait_out(None, failing(20)) == 42
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoreError):
        store.wait_out(stop, failing(1))
    assert len(told("store.waits")) >= 20


def unready(times: int) -> Any:
    """A function that has something made first ``times`` times."""

    def function(connection: sa.Connection) -> int:
        function.calls += 1  # type: ignore[attr-defined]
        if function.calls <= times:  # type: ignore[attr-defined]
            raise Unready("a budget", lambda other: made.append(other is not connection))
        return len(made)

    made: list[bool] = []
    function.calls = 0  # type: ignore[attr-defined]
    return function


@pytest.mark.usefixtures("quick")
def test_what_has_to_be_made_first_is_made_in_a_transaction_of_its_own(store: Store) -> None:
    assert store.run(unready(3)) == 3
    assert store.run_statement(unready(3)) == 3
    with pytest.raises(StoreError, match="changes all the time") as caught:
        store.run(unready(999))
    assert caught.value.retryable
    # A worker goes on for as long as it takes.
    stop = threading.Event()
    assert store.wait_out(stop, unready(99)) > 80
    stop.set()
    with pytest.raises(StoreError):
        store.wait_out(stop, unready(999))


def test_what_cannot_pass_is_not_tried_again(store: Store) -> None:
    for call in (store.run, store.run_statement, lambda f: store.wait_out(None, f)):
        function = failing(1, retryable=False)
        with pytest.raises(StoreError):
            call(function)
        assert function.calls == 1


def test_what_is_no_text_is_told_as_ours(funded: Ledger) -> None:
    # As an argument of a command that is no UTF-8 comes to Python.
    with pytest.raises(StoreError, match="surrogates not allowed") as caught:
        reconcile.explain(funded.store, funded.settings, "order-\udcff")
    assert not caught.value.retryable


def test_an_error_undoes_its_transaction(funded: Ledger) -> None:
    def change_and_fail(connection: sa.Connection) -> None:
        declaring.set_budget(connection, funded.root, "b", {"limit": 1})
        raise InvalidAmount("no")

    before = funded.dump()
    with pytest.raises(InvalidAmount):
        funded.store.run(change_and_fail)
    assert funded.dump() == before


@pytest.mark.parametrize(
    ("statement", "error", "retryable"),
    [
        ("SELECT * FROM budget_nothing", SchemaError, None),
        ("SELECT absent FROM budget_budgets", SchemaError, None),
        ("INSERT INTO budget_budgets (absent) VALUES (1)", SchemaError, None),
        ("INSERT INTO budget_budgets (root, name) VALUES ('r', 'n')", StoreError, False),
    ],
)
def test_errors_of_the_database_are_told_as_ours(
    store: Store, statement: str, error: type[Exception], retryable: bool | None
) -> None:
    with pytest.raises(error) as caught, store.transaction() as connection:
        connection.exec_driver_sql(statement)
    assert getattr(caught.value, "retryable", None) == retryable
    assert isinstance(caught.value.__cause__, sa.exc.DBAPIError)
    if error is SchemaError:
        assert "budget init" in str(caught.value)


@pytest.mark.parametrize("column", ["reserved", "spent"])
def test_the_database_itself_refuses_a_balance_below_zero(funded: Ledger, column: str) -> None:
    with pytest.raises(StoreError, match=r"(?i)check"):
        funded.put("balances", {column: -1})


def test_a_lock_that_is_not_had_in_time_is_retryable(funded: Ledger) -> None:
    impatient = Store(funded.settings.database_url, lock_seconds=0.05)

    def change() -> None:
        with impatient.transaction() as connection:
            connection.execute(schema.balances.update().values(spent=0))

    with funded.store.transaction() as connection:
        connection.execute(sa.select(schema.balances).with_for_update())
        with pytest.raises(StoreError) as caught:
            change()
    assert caught.value.retryable
    impatient.dispose()


def test_an_admission_waits_no_longer_for_a_lock_than_it_may(funded: Ledger) -> None:
    impatient = Store(funded.settings.database_url, lock_seconds=0.05)
    settings = funded.settings.__class__(
        funded.settings.database_url, root=funded.root, lock_seconds=0.05
    )
    ledger = Ledger(impatient, settings)
    with funded.store.transaction() as connection:
        connection.execute(sa.select(schema.balances).with_for_update())
        with pytest.raises(StoreError) as caught:
            ledger.admit(ledger.request(1))
        assert caught.value.retryable
    impatient.dispose()
    assert funded.rows("reservations") == []


def test_a_database_that_is_not_there_is_retryable(store: Store, tmp_path: Any) -> None:
    if store.dialect == "postgresql":
        url = "postgresql://budget@127.0.0.1:1/nothing?connect_timeout=2"
    else:
        url = f"sqlite:///{tmp_path / 'missing' / 'budget.db'}"
    with pytest.raises(StoreError) as caught, Store(url).transaction():
        pass
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("mysql://user@host/name", "PostgreSQL or SQLite"),
        ("postgresql+nothing://user@host/name", "cannot be used"),
        ("nonsense", "cannot be used"),
        ("postgresql://user@host/name?prepare_threshold=never", "prepare_threshold"),
    ],
)
def test_a_url_that_cannot_work_is_told(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Store(url)


def test_a_password_is_not_shown() -> None:
    assert "secret" not in Store("postgresql://user:secret@host/name").url


def _admit(ledger: Ledger, pipe: Any) -> None:
    pipe.send(ledger.admit(ledger.request(1)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_opens_connections_of_its_own(funded: Ledger) -> None:
    funded.reserve(1)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_admit, args=(funded, theirs))
    child.start()
    theirs.close()
    ours.recv()
    child.join()
    assert child.exitcode == 0
    funded.reserve(1)
    assert funded.balance() == (3, 0)


def test_a_child_forked_amid_another_threads_transaction_is_not_locked_out(
    sqlite_url: str,
) -> None:
    """SQLite notes its own locks in the process; a child would inherit them for good."""
    store = Store(sqlite_url, lock_seconds=0.2)
    store.run(migrate.upgrade)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.transaction():
            inside.set()
            leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(30)
    threading.Timer(0.2, leave.set).start()
    pid = os.fork()
    if pid == 0:
        try:
            store.run(declaring.set_budget, "default", "b", {"limit": 1, "unit": "tokens"})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    holder.join()
    assert store.run(budgets.balance, "default", "b").limit == 1
    store.dispose()


@pytest.mark.parametrize(("written", "prepared"), [("none", False), ("1", True)])
def test_statements_are_prepared_as_the_url_says(
    funded: Ledger, store_url: str, written: str, prepared: bool
) -> None:
    if funded.store.dialect == "sqlite":
        pytest.skip("SQLite keeps no sessions")
    store = Store(f"{store_url}?prepare_threshold={written}")
    ledger = Ledger(store, funded.settings)
    for _ in range(3):
        ledger.reserve(1)
    count = sa.text("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%reserve%'")
    with store.statement() as connection:
        assert bool(connection.execute(count).scalar_one()) is prepared
    store.dispose()


@pytest.mark.parametrize(
    ("query", "connect", "user"), [("", "10", "10000"), ("?connect_timeout=3", "3", "10000")]
)
def test_no_server_is_waited_for_without_an_end(
    funded: Ledger, store_url: str, query: str, connect: str, user: str
) -> None:
    if funded.store.dialect == "sqlite":
        pytest.skip("SQLite has no server")
    store = Store(f"{store_url}{query}")
    with store.statement() as connection:
        given = connection.connection.driver_connection.info.get_parameters()
    assert (given["connect_timeout"], given["tcp_user_timeout"]) == (connect, user)
    assert given["keepalives_idle"] == "10"
    store.dispose()


def test_who_stands_still_in_a_transaction_loses_its_locks(funded: Ledger, store_url: str) -> None:
    """A process that was stopped would hold them for as long as it is."""
    if funded.store.dialect == "sqlite":
        pytest.skip("SQLite's lock is the process's")
    request = funded.reserve(1)
    query = (
        sa.select(schema.reservations.c.state)
        .where(schema.reservations.c.reservation_id == request.reservation_id)
        .with_for_update()
    )
    slow = Store(store_url, lock_seconds=0.1)

    def stand_still(connection: sa.Connection) -> None:
        connection.execute(query)
        assert funded.store.run(lambda other: other.execute(query).scalar()) == "reserved"
        connection.execute(query)

    with pytest.raises(StoreError) as caught, slow.transaction() as connection:
        stand_still(connection)
    assert caught.value.retryable
    slow.dispose()
