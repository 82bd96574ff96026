"""Of all that commit while a relay sleeps one wakes it, and what any of them admits is published.

However their transactions overlap: those here are open until the test commits them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

from celery_budget.core.messages import WireMessage
from celery_budget.store import Store, outbox, relays, wakeup
from tests.cluster import eventually
from tests.contract.sleepers import NEVER, announced, relaying, sleeping, tell
from tests.contract.support import Ledger, message_of
from tests.contract.test_effects import transaction as caller_transaction
from tests.contract.test_notifications import listener

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session"),
]

MANY = 8


class Open:
    """A transaction that has written a message, and is open until it is committed."""

    def __init__(self, ledger: Ledger, connection: Connection) -> None:
        message = message_of(ledger.request())
        outbox.enqueue(connection, ledger.root, message)
        self.task_id = message.task_id
        self.commit = connection.commit
        self.roll_back = connection.rollback


@contextmanager
def transactions(ledger: Ledger, count: int = MANY) -> Iterator[list[Open]]:
    """Transactions that have all written before any of them commits."""
    store = Store(ledger.settings.database_url, pool_size=count)
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(store.engine.connect()) for _ in range(count)]
            yield [Open(ledger, connection) for connection in connections]
    finally:
        store.dispose()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[relays.Look]:
    """What relays have seen before they slept."""
    seen: list[relays.Look] = []
    look = relays.look

    def noted(*args: Any) -> relays.Look:
        seen.append(look(*args))
        return seen[-1]

    monkeypatch.setattr(relays, "look", noted)
    return seen


def test_of_many_that_commit_while_a_relay_sleeps_one_notifies(funded: Ledger) -> None:
    for _ in range(2):
        tell(funded, announced(funded), True)
    with listener(funded) as heard, transactions(funded) as several:
        # They wait for none of the others, in whatever order they commit.
        for one in reversed(several):
            one.commit()
        assert heard() == [""]
    assert sleeping(funded) == [False, False]


def test_one_that_falls_asleep_meanwhile_is_told_by_another(funded: Ledger) -> None:
    first, second = announced(funded), announced(funded)
    tell(funded, first, True)
    with listener(funded) as heard, transactions(funded, 1) as [one]:
        tell(funded, second, True)
        with transactions(funded, 2) as others:
            for other in others:
                other.commit()
            assert heard() == [""]
        one.commit()
        assert heard() == [""]
    assert sleeping(funded) == [False, False]


def test_a_callers_transaction_keeps_nobody_from_telling(funded: Ledger) -> None:
    """It may be open for long, or come to nothing."""
    tell(funded, announced(funded), True)
    with listener(funded) as heard:
        with caller_transaction(funded) as enlisted:
            message = message_of(funded.request())
            enlisted.run(outbox.enqueue, funded.root, message)
            funded.reserve(1)
            assert heard() == [""]
        assert heard() == [""]


def test_who_wrote_before_the_relay_slept_and_commits_when_it_sleeps_is_seen(
    funded: Ledger, looks: list[relays.Look]
) -> None:
    held, free = threading.Event(), threading.Event()

    def hold(message: WireMessage) -> None:
        held.set()
        assert free.wait(60)

    funded.broker.on_publish = hold
    with relaying(funded, poll_seconds=NEVER) as published, listener(funded) as heard:
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        woken = funded.reserve(1)
        assert held.wait(60)
        assert heard() == [""]
        looks.clear()
        with transactions(funded, 1) as [late]:
            free.set()
            eventually(lambda: len(looks), lambda count: count >= 3)
            assert sleeping(funded) == [True]
            assert not any(look.due for look in looks)
            late.commit()
            eventually(lambda: list(published), lambda found: late.task_id in found)
        assert heard() == []
        assert published == [woken.task_id, late.task_id]


def test_who_passes_the_row_by_is_seen_whether_it_commits_first_or_last(funded: Ledger) -> None:
    with relaying(funded, poll_seconds=NEVER) as published:
        for order in ((0, 1), (1, 0)):
            eventually(lambda: sleeping(funded), lambda found: found == [True])
            with transactions(funded, 2) as both:
                for number in order:
                    both[number].commit()
                for one in both:
                    eventually(lambda: list(published), lambda found, one=one: one.task_id in found)
    assert len(published) == 4


def test_where_the_one_that_tells_comes_to_nothing_the_relay_looks(funded: Ledger) -> None:
    with relaying(funded, poll_seconds=0.05) as published, listener(funded) as heard:
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        with transactions(funded, 2) as [telling, other]:
            other.commit()
            telling.roll_back()
            eventually(lambda: list(published), lambda found: found == [other.task_id])
        assert heard() == []


def test_once_all_that_were_open_have_ended_it_looks_no_oftener_than_it_is_told_to(
    funded: Ledger, looks: list[relays.Look], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is open, longer and longer; a transaction that stays open costs next to nothing."""
    pauses: list[float] = []

    class Rung(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return False

    settings = funded.settings
    presence = wakeup.Presence(funded.store, funded.root)
    with transactions(funded, 1) as [one]:
        with monkeypatch.context() as patched:
            patched.setattr(wakeup.Listener, "start", lambda self: None)
            listens = wakeup.Listener(funded.store, settings, presence)
            listens._hears, listens.rung = True, Rung()
            sleeper = wakeup.Listening(funded.store, settings, presence, listens)
        stop = threading.Event()
        monkeypatch.setattr(wakeup, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))
        thread = threading.Thread(target=sleeper.sleep, args=(stop,))
        thread.start()
        eventually(lambda: len(looks), lambda count: count >= 12)
        one.roll_back()
        eventually(lambda: looks[-1].oldest, lambda oldest: oldest >= looks[0].following)
        stop.set()
        thread.join(60)
        assert not thread.is_alive()
    first = [round(pause, 3) for pause in pauses[:8]]
    assert first == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, settings.poll_seconds]


def test_nothing_but_the_claim_is_between_a_wakeup_and_the_broker(funded: Ledger) -> None:
    """No look at lanes, no row of the relay's: they come when the message is published."""
    said: list[str] = []
    before: list[list[str]] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if threading.current_thread().name == "relays":
            said.append(" ".join(statement.split()))

    funded.broker.on_publish = lambda message: before.append(list(said))
    event.listen(Engine, "before_cursor_execute", note)
    try:
        with relaying(funded, poll_seconds=NEVER) as published:
            eventually(lambda: sleeping(funded), lambda found: found == [True])
            eventually(lambda: said[-1], lambda last: "pg_snapshot_xmin" in last)
            said.clear()
            funded.reserve(1)
            eventually(lambda: list(published))
            eventually(lambda: said[-1], lambda last: "pg_snapshot_xmin" in last)
            after = said[len(before[0]) :]
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    # By itself: no transaction is begun, nor a lock time-out set.
    [claim] = before[0]
    assert "budget_outbox" in claim
    looked, told, slept = after[-3:]
    assert "FROM budget_lanes" in looked
    assert told.startswith("UPDATE budget_relays")
    assert "pg_snapshot_xmin" in slept


def test_what_one_statement_cannot_take_is_taken_by_more(funded: Ledger) -> None:
    """Of messages with one order key each waits for the one before it."""
    with relaying(funded, poll_seconds=NEVER) as published:
        eventually(lambda: sleeping(funded), lambda found: found == [True])
        with transactions(funded, 1) as [plain]:
            first = funded.reserve(1, order_key="k")
            second = funded.reserve(1, order_key="k")
            plain.commit()
        eventually(lambda: list(published), lambda found: len(found) == 3)
    in_order = [one for one in published if one != plain.task_id]
    assert in_order == [first.task_id, second.task_id]


def test_a_look_reads_the_first_of_what_is_due_however_much_waits(funded: Ledger) -> None:
    """What is due later costs it no more than nothing would."""
    funded.reserve(1, due_us=funded.now() + 3_600_000_000)
    many = 20_000
    with funded.store.transaction() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO budget_outbox SELECT (jsonb_populate_record(o, jsonb_build_object("
                " 'outbox_id', gen_random_uuid(), 'reservation_id', NULL, 'task_id', 'n' || n))).*"
                " FROM budget_outbox o, generate_series(1, :many) AS n WHERE o.root = :root"
            ),
            {"root": funded.root, "many": many},
        )
    said: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        said.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        found = funded.store.run_statement(relays.look, funded.root)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert not found.due
    [(statement, parameters)] = said
    with funded.store.statement() as connection:
        [plan] = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
        ).scalar_one()
    nodes = list(_nodes(plan["Plan"]))
    read = sum(node["Actual Rows"] for node in nodes if "Scan" in node["Node Type"])
    assert read <= 4, nodes


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for below in node.get("Plans", ()):
        yield from _nodes(below)
