"""What an enlisted block says to the database: how many statements, whatever it publishes.

The numbers are those of today: whoever changes one changes it here, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import group
from sqlalchemy import event
from sqlalchemy.engine import Engine

from celery_budget import budgeted
from celery_budget.store import schema
from tests.integration.enlist.support import Caller

#: On PostgreSQL: a look at the connection; a savepoint, our lock time-out, what is admitted, the
#: caller's time-out, the savepoint's release. On SQLite: a look at the file; a transaction begun,
#: a savepoint, what is admitted, its release.
BLOCK = {"postgresql": 1 + 4, "sqlite": 1 + 3}
#: With a look for what was parked before, where several are asked for, or by SQLite.
ONE = {"postgresql": 1, "sqlite": 9}
SEVERAL = {"postgresql": 10, "sqlite": 9}
PLAIN = {"postgresql": 2, "sqlite": 1}


@contextmanager
def heard() -> Iterator[list[str]]:
    """Note each statement, by whatever engine."""
    said: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def cost(caller: Caller, block: Callable[[Any], Any], **options: Any) -> int:
    """How many statements a block says in a transaction of its own, with nothing to be prepared."""
    caller.shop.sql(schema.backlog.update().values(counted_us=2**62))
    with heard() as said:
        caller.client.enlisted(block, **options)
    caller.client.rollback()
    return len(said)


@pytest.fixture
def known(either: Caller) -> tuple[Caller, str]:
    """A shop whose ledger and connection are known, and its dialect."""
    either.shop.budget.set("tenant:a", limit=None)
    either.client.enlisted(lambda batch: either.draft.delay("a"))
    either.client.rollback()
    with either.shop.budget.batch():
        either.draft.delay("a")
    return either, either.shop.budget.store.dialect


def test_nothing_costs_a_look(known: tuple[Caller, str]) -> None:
    caller, _ = known
    assert cost(caller, lambda batch: None) == 1


def test_one(known: tuple[Caller, str]) -> None:
    caller, dialect = known
    assert cost(caller, lambda batch: caller.draft.delay("a")) == BLOCK[dialect] + ONE[dialect]


@pytest.mark.parametrize("count", [2, 200])
def test_several(known: tuple[Caller, str], count: int) -> None:
    caller, dialect = known

    def block(batch: Any) -> None:
        for _ in range(count):
            caller.draft.delay("a")

    assert cost(caller, block) == BLOCK[dialect] + SEVERAL[dialect]
    both = BLOCK[dialect] + SEVERAL[dialect] + PLAIN[dialect]
    assert cost(caller, lambda batch: [block(batch), caller.plain.delay()]) == both
    members = group(caller.draft.s("a") for _ in range(count))
    assert cost(caller, lambda batch: members.delay()) == BLOCK[dialect] + SEVERAL[dialect]


def test_each_at_once(known: tuple[Caller, str]) -> None:
    caller, dialect = known

    def block(batch: Any) -> None:
        for _ in range(3):
            caller.draft.delay("a")

    # The look, and on SQLite what begins the transaction, come once.
    once = 1 + (dialect == "sqlite")
    each = BLOCK[dialect] - once + ONE[dialect]
    assert cost(caller, block, immediate=True) == once + 3 * each


@pytest.mark.parametrize("count", [2, 200])
def test_a_batch_in_our_own_transaction(known: tuple[Caller, str], count: int) -> None:
    caller, dialect = known
    caller.shop.sql(schema.backlog.update().values(counted_us=2**62))
    with heard() as said, caller.shop.budget.batch():
        for _ in range(count):
            caller.draft.delay("a")
    # The lock time-out on PostgreSQL; on SQLite what begins the transaction.
    assert len(said) == 1 + SEVERAL[dialect]


#: As a block, with the reservation, the claim and the proof; then another savepoint for the value.
EFFECT = {"postgresql": 1 + 4 + 3 + 5, "sqlite": 1 + 3 + 3 + 3}
#: As a block, with what was stored beside these.
REPEATED = {"postgresql": 1 + 4 + 4, "sqlite": 1 + 3 + 4}


def test_an_effect(known: tuple[Caller, str]) -> None:
    caller, dialect = known
    client = caller.client
    counted: list[int] = []

    @budgeted(budget="tenant:b", estimate=1)
    @caller.shop.app.task(name="shop.effects", shared=False)
    def effects() -> None:
        with heard() as said:
            client.effect("mail", lambda first: first.store(1))
        counted.append(len(said))
        client.commit()
        with heard() as said:
            client.effect("mail", lambda first: None)
        counted.append(len(said))
        client.commit()

    effects.apply().get(disable_sync_subtasks=False)
    assert counted == [EFFECT[dialect], REPEATED[dialect]]
