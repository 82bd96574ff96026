"""Notifications: sent only to a relay that sleeps, and never relied upon."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from celery_budget import relay, settlement
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.errors import StoreError
from celery_budget.settings import Settings
from celery_budget.store import Store, lanes, migrate, preflight, relays, wakeup
from tests.cluster import eventually
from tests.contract.sleepers import NEVER, age, announced, relaying, sleeping, tell
from tests.contract.support import RETRIED, RETURNED, Ledger
from tests.messages import Told
from tests.services.postgres import PostgresServer, plain_url

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session"),
]

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def listener(ledger: Ledger) -> Iterator[Callable[[], list[str]]]:
    """Listen beside the relays; what was notified so far, without the proofs of relays."""
    url = plain_url(ledger.settings.database_url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'LISTEN "{relays.channel(ledger.root)}"')

        def heard() -> list[str]:
            # The answer comes after all that was committed before it was asked.
            connection.execute("SELECT 1")
            return [one.payload for one in connection.notifies(timeout=0) if not one.payload]

        yield heard


def test_an_admission_notifies_only_a_relay_that_sleeps(funded: Ledger) -> None:
    funded.set("b", 1000)
    relay_id = announced(funded)
    with listener(funded) as heard:
        for _ in range(200):
            funded.reserve(1)
        assert heard() == []
        tell(funded, relay_id, True)
        for _ in range(5):
            funded.reserve(1)
        assert heard() == [""]
        tell(funded, relay_id, False)
        funded.reserve(1)
        assert heard() == []


def test_what_is_due_later_or_of_another_root_wakes_nobody(funded: Ledger, store: Store) -> None:
    tell(funded, announced(funded), True)
    with listener(funded) as heard:
        funded.reserve(1, due_us=funded.now() + 60_000_000)
        other = Ledger(store, replace(funded.settings, root=funded.root + "-other"))
        other.set("b", 10)
        other.reserve(1)
        assert heard() == []
        funded.reserve(1)
        assert heard() == [""]


def test_the_word_of_a_relay_that_died_asleep_is_not_believed_for_long(funded: Ledger) -> None:
    relay_id = announced(funded)
    with listener(funded) as heard:
        for seconds, notified in ((9, [""]), (11, [])):
            tell(funded, relay_id, True)
            age(funded, seconds * 1_000_000)
            funded.reserve(1)
            assert heard() == notified


def test_a_queue_of_notifications_that_fills_up_is_left_alone(funded: Ledger) -> None:
    """With the server's function hidden behind one that says how full the queue is."""
    tell(funded, announced(funded), True)
    schema = f"full_{new_id().hex}"
    with funded.store.transaction() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {schema}"))
        connection.execute(
            sa.text(
                f"CREATE FUNCTION {schema}.pg_notification_queue_usage() RETURNS float8"
                " LANGUAGE sql AS 'SELECT 0.6::float8'"
            )
        )
    path = f"-csearch_path={schema},pg_catalog,public"
    url = sa.make_url(funded.settings.database_url).update_query_dict({"options": path})
    full = Ledger(Store(url.render_as_string(hide_password=False)), funded.settings)
    with listener(funded) as heard:
        full.reserve(1)
        assert heard() == []
        funded.reserve(1)
        assert heard() == [""]
    full.store.dispose()


ADMIT = """
import sys
from celery_budget.settings import Settings
from celery_budget.store import Store
from tests.contract.support import Ledger

url, root = sys.argv[1:]
ledger = Ledger(Store(url), Settings(database_url=url, root=root))
print(ledger.reserve(1).task_id)
"""


def test_an_admission_of_another_process_wakes_the_relay_for_one_pass(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    looks: list[relays.Look] = []
    run_once, look = relay.Relay.run_once, relays.look

    def counted(one: relay.Relay, stop: threading.Event, told: bool = False) -> relay.Relayed:
        done = run_once(one, stop, told)
        passes.append(done.published)
        return done

    def seen(*args: Any) -> relays.Look:
        looks.append(look(*args))
        return looks[-1]

    monkeypatch.setattr(relay.Relay, "run_once", counted)
    monkeypatch.setattr(relays, "look", seen)
    with relaying(funded, poll_seconds=NEVER) as published:
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        # Having said so it has looked once more, and waits.
        eventually(lambda: list(looks))
        before = len(passes)
        done = subprocess.run(
            [sys.executable, "-c", ADMIT, funded.settings.database_url, funded.root],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert eventually(lambda: list(published)) == [done.stdout.strip()]
        assert eventually(lambda: passes[before:])[0] == 1
        eventually(lambda: sleeping(funded), lambda found: found == [True])


def test_who_wakes_a_relay_takes_its_word_back(funded: Ledger) -> None:
    held, free = threading.Event(), threading.Event()

    def hold(message: WireMessage) -> None:
        held.set()
        assert free.wait(60)

    funded.broker.on_publish = hold
    with relaying(funded, poll_seconds=NEVER) as published, listener(funded) as heard:
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        funded.reserve(1)
        assert held.wait(60)
        assert sleeping(funded) == [False]
        for _ in range(5):
            funded.reserve(1)
        assert heard() == [""]
        free.set()
        eventually(lambda: len(published), lambda count: count == 6)


def test_an_idle_relay_writes_its_row_now_and_then_only(funded: Ledger) -> None:
    """While nothing comes its word stands: no two writes with each look."""
    with relaying(funded, poll_seconds=0.001):
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        [before] = funded.store.read(relays.seen, funded.root)
        looked = passes_of(funded)
        eventually(lambda: passes_of(funded), lambda passes: passes > looked + 20)
        [after] = funded.store.read(relays.seen, funded.root)
    assert after.seen_us == before.seen_us or after.seen_us - before.seen_us > 2_500_000


def passes_of(ledger: Ledger) -> int:
    """How often the ledger's relays have looked: transactions, in this process."""
    with ledger.store.statement() as connection:
        return int(
            connection.execute(
                sa.text(
                    "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
                )
            ).scalar_one()
        )


def test_where_no_notification_arrives_the_relay_looks_and_never_says_that_it_sleeps(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: Told
) -> None:
    caplog.set_level("INFO", wakeup.__name__)
    monkeypatch.setattr(wakeup, "ARRIVE_SECONDS", 0.05)
    monkeypatch.setattr(wakeup, "LONGEST_RETRY_SECONDS", 0.01)
    tries: list[str] = []
    notify = relays.notify

    def to_nobody(connection: Any, root: str, payload: str) -> None:
        tries.append(payload)
        notify(connection, root + "-elsewhere", payload)

    with monkeypatch.context() as patched:
        patched.setattr(relays, "notify", to_nobody)
        with relaying(funded, poll_seconds=0.01) as published:
            eventually(lambda: len(tries), lambda count: count > 3)
            with listener(funded) as heard:
                funded.reserve(1)
                eventually(lambda: len(published), lambda count: count == 1)
                assert heard() == []
            assert sleeping(funded) == [False]
            assert len(caplog.messages) == 1
            assert "no notification arrives" in caplog.messages[0]
            assert "budget_listen_url" in caplog.messages[0]
            # They arrive from here on.
            patched.setattr(relays, "notify", notify)
            eventually(lambda: sleeping(funded), lambda found: found == [True])
    assert caplog.messages[1:] == ["the relay is woken by notifications"]
    assert [one["seconds"] for one in told("relay.unwoken")] == [0.01]


@pytest.mark.fault
def test_a_connection_that_dies_is_opened_again_while_the_relay_goes_on(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", wakeup.__name__)
    monkeypatch.setattr(wakeup, "FIRST_RETRY_SECONDS", 0.01)
    name = f"listens-{new_id().hex[:12]}"
    url = sa.make_url(funded.settings.database_url).update_query_dict({"application_name": name})
    listen_url = url.render_as_string(hide_password=False)
    opened, apart = threading.Event(), funded.store.apart

    def closed(url: str) -> Any:
        assert opened.wait(60)
        return apart(url)

    with relaying(funded, poll_seconds=0.05, listen_url=listen_url) as published:
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        monkeypatch.setattr(funded.store, "apart", closed)
        with funded.store.statement() as connection:
            ended = connection.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = :name"
                ),
                {"name": name},
            )
            assert ended.scalars().all() == [True]
        eventually(lambda: sleeping(funded), lambda found: found == [False])
        funded.reserve(1)
        eventually(lambda: len(published), lambda count: count == 1)
        opened.set()
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        funded.reserve(1)
        eventually(lambda: len(published), lambda count: count == 2)
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the relay is woken by notifications",
        "the connection that listens was lost",
        "the relay is woken by notifications",
    ]


def test_the_servers_queue_being_full_is_found_out(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise StoreError("too many notifications in the NOTIFY queue", retryable=False)

    monkeypatch.setattr(relays, "notify", full)
    with relaying(funded, poll_seconds=0.01) as published:
        eventually(lambda: list(caplog.messages))
        funded.reserve(1)
        eventually(lambda: len(published), lambda count: count == 1)
        assert sleeping(funded) == [False]
    assert "too many notifications" in caplog.messages[0]


@pytest.mark.fault
@pytest.mark.usefixtures("store_url")
def test_a_server_that_restarts_is_waited_out(own_postgres: PostgresServer) -> None:
    url = own_postgres.url
    ledger = Ledger(Store(url), Settings(database_url=url))
    ledger.store.run(migrate.upgrade)
    ledger.set("b", 100)
    with relaying(ledger, poll_seconds=0.05) as published:
        eventually(lambda: sleeping(ledger), lambda found: found == [True])
        own_postgres.kill()
        own_postgres.restart()
        request = ledger.reserve(1)
        assert eventually(lambda: list(published)) == [request.task_id]
        eventually(lambda: sleeping(ledger), lambda found: found == [True])
    ledger.store.dispose()


def test_a_lane_that_has_room_again_wakes_a_relay(funded: Ledger) -> None:
    """Where a request of it starts, waits for its retry and ends, and where its workers answer."""
    funded.set("b", 1000)
    relay_id = announced(funded)
    terms = {"queues": ("celery",), "preflight": False}
    funded.store.run(lanes.declare, funded.root, "llm", terms)
    first = funded.reserve(1)
    assert funded.relay().published == 1
    tell(funded, relay_id, True)
    with listener(funded) as heard:

        def told() -> list[str]:
            # It sleeps again, as what has woken it has taken its word back.
            found = heard()
            assert sleeping(funded) == [not found]
            tell(funded, relay_id, True)
            return found

        attempt = funded.run(first)
        assert told() == [""]
        funded.retry(first, attempt)
        assert told() == []
        assert attempt.end(RETRIED)
        assert told() == [""]
        elsewhere = funded.reserve(1, queue="elsewhere")
        assert told() == [""]
        assert funded.run(elsewhere).end(RETURNED)
        assert told() == []
        # One that is held wakes it as one that is due does.
        last = funded.reserve(1)
        assert told() == [""]
        settlement.revoke(funded.store, funded.root, last.reservation_id, "revoked")
        assert told() == [""]
        funded.store.run(preflight.note_answer, funded.root, "llm", False, "gone")
        assert told() == []
        funded.store.run(preflight.note_answer, funded.root, "llm", True, None)
        assert told() == [""]
