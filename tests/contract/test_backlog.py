"""What a relay costs does not depend on how many messages wait."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine

from celery_budget.relay import Relay
from celery_budget.settings import Settings
from celery_budget.store import Store, claims, migrate, outbox
from tests.contract.support import RETURNED, Ledger

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

MANY = 100_000
LATER = 2**62
NEVER = threading.Event()

_FILL = sa.text(
    "INSERT INTO budget_outbox (root, outbox_id, task_id, task_name, retries, state, due_us,"
    " publishes, failures, created_us, queue, body, envelope, rank, order_key, broker)"
    " SELECT :root, gen_random_uuid(), 'backlog-' || n, 'shop.notify', 0, 'due', :due + n,"
    " 0, 0, n, 'q',"
    " 'body', '{}', :rank, :key, :broker FROM generate_series(1, :many) AS n"
)


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[Ledger]:
    """A ledger in a database of its own, whose budget ``b`` has 1,000,000 tokens."""
    store = Store(postgres_url)
    store.run(migrate.upgrade)
    ledger = Ledger(store, Settings(postgres_url, root=f"root-{uuid4().hex[:12]}"))
    ledger.set("b", 1_000_000)
    yield ledger
    store.dispose()


def fill(
    ledger: Ledger, *, due: int = 1, rank: int = 5, key: str | None = None, broker: str = ""
) -> None:
    values = {"root": ledger.root, "due": due, "rank": rank, "key": key, "broker": broker}
    with ledger.store.transaction() as connection:
        connection.execute(_FILL, {**values, "many": MANY})


def analyze(ledger: Ledger) -> None:
    with ledger.store.statement() as connection:
        connection.exec_driver_sql("VACUUM (ANALYZE) budget_outbox")


def plan(ledger: Ledger, limit: int) -> list[dict[str, Any]]:
    """The nodes of the plan by which the next messages are looked for, as they were run."""
    with ledger.store.transaction() as connection:
        given = {"of_root": ledger.root, "of_broker": "", "most": limit}
        written = claims._next("postgresql").compile(connection).construct_expanded_state(given)
        explained = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {written.statement}", written.parameters
        ).scalar_one()
    found = explained if isinstance(explained, list) else json.loads(explained)
    return list(_nodes(found[0]["Plan"]))


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def read(nodes: list[dict[str, Any]]) -> int:
    """How many rows of the outbox were looked at."""
    scans = [node for node in nodes if node.get("Relation Name") == "budget_outbox"]
    assert scans
    dropped = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
    return round(
        sum(
            (node["Actual Rows"] + sum(node.get(name, 0) for name in dropped))
            * node["Actual Loops"]
            for node in scans
        )
    )


@contextmanager
def counted() -> Iterator[list[str]]:
    """The statements that are executed meanwhile."""
    said: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(statement.split(None, 1)[0])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_a_claim_reads_what_it_takes_and_no_more(ledger: Ledger) -> None:
    """Not what is due later, of other ranks, for other brokers, or behind others of its key."""
    wanted = [ledger.reserve(1).task_id for _ in range(10)]
    fill(ledger, due=LATER, rank=0)
    fill(ledger, due=1, rank=9)
    fill(ledger, due=1, rank=0, broker="eu")
    fill(ledger, due=1, rank=0, key="k")
    [first] = ledger.rows("outbox", order_key="k", created_us=1)
    ledger.put("outbox", {"behind": True}, order_key="k")
    ledger.put("outbox", {"behind": False, "due_us": LATER}, outbox_id=first.outbox_id)
    analyze(ledger)
    nodes = plan(ledger, 10)
    assert not {node["Node Type"] for node in nodes} & {"Sort", "Incremental Sort", "Seq Scan"}
    assert read(nodes) == 10
    assert nodes[0]["Shared Hit Blocks"] + nodes[0]["Shared Read Blocks"] < 200
    key = (ledger.root, "", 10, 1_000_000, uuid4())
    batch = ledger.store.run(claims.claim_due, *key)
    assert [due.message.task_id for due in batch.messages] == wanted


def test_a_long_queue_of_one_key_is_taken_from_its_front(ledger: Ledger) -> None:
    fill(ledger, key="k")
    analyze(ledger)
    # A look at each of them, and one at what comes directly before it.
    assert read(plan(ledger, 100)) < 200 + 100
    key = (ledger.root, "", 100, 60_000_000)
    first = ledger.store.run(claims.claim_due, *key, uuid4())
    assert [due.message.task_id for due in first.messages] == [
        f"backlog-{number}" for number in range(1, 101)
    ]
    # Another relay passes by what it may not have, each of them once.
    second = ledger.store.run(claims.claim_due, *key, uuid4())
    assert (second.messages, second.behind) == ((), 100)
    third = ledger.store.run(claims.claim_due, *key, uuid4())
    assert (third.messages, third.behind) == ((), 100)
    assert read(plan(ledger, 100)) < 200 + 100
    mark = (claims.mark_published, ledger.root, first.fence, first.messages, 1)
    with counted() as said:
        assert ledger.store.run(*mark) == 100
    # The next ones are let go: what was passed by, and no more than that.
    assert said.count("UPDATE") == 1
    fourth = ledger.store.run(claims.claim_due, *key, uuid4())
    assert [due.message.task_id for due in fourth.messages] == [
        f"backlog-{number}" for number in range(101, 201)
    ]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_pass_costs_the_same_whatever_waits(ledger: Ledger, key: str | None) -> None:
    ledger.settings = replace(ledger.settings, batch_size=50)
    relay = Relay(ledger.store, ledger.settings, ledger.broker, ledger.results.ended)

    def cost() -> tuple[list[str], int]:
        """The statements of one pass over a full batch, and the memory it needs."""
        tracemalloc.start()
        try:
            with counted() as said:
                relayed = relay.run_once(NEVER)
            return said, tracemalloc.get_traced_memory()[1]
        finally:
            assert (relayed.published, relayed.again) == (50, True)
            tracemalloc.stop()

    for _ in range(150):
        ledger.reserve(1, order_key=key)
    # What is compiled and prepared once is no pass's own.
    cost()
    few, little = cost()
    fill(ledger, rank=9)
    fill(ledger, due=LATER)
    analyze(ledger)
    many, much = cost()
    assert many == few
    assert much < little * 1.5 + 100_000


def test_what_is_published_goes_in_pieces_that_wait_for_nobody(ledger: Ledger) -> None:
    """What is kept only against a replay of its parent, which is closed."""
    parent, attempt = ledger.start(1)
    fill(ledger)
    ledger.put(
        "outbox",
        {"state": "published", "parent_id": parent.reservation_id},
        task_name="shop.notify",
    )
    prune = (outbox.prune, ledger.root, 100)
    assert ledger.store.run(*prune).count == 0
    attempt.end(RETURNED)
    attempt.close()
    with ledger.store.transaction() as connection:
        # Somebody holds some of them, and the budget's balance.
        held = connection.exec_driver_sql(
            "SELECT outbox_id FROM budget_outbox WHERE state = 'published'"
            " ORDER BY outbox_id LIMIT 50 FOR UPDATE"
        ).all()
        connection.exec_driver_sql("SELECT 1 FROM budget_balances FOR UPDATE")
        first = ledger.store.run(*prune)
        assert first.count == 50
    assert len(held) == 50
    assert ledger.store.run(*prune, first.after).count == 100
