"""Asyncio: blocks with ``async with``, and publishing beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import chord, group
from sqlalchemy.orm import Session as SyncSession

from celery_budget.core.identity import task_id_of
from celery_budget.errors import BudgetExceeded, EnlistError, PolicyError
from tests.contract.racers import Beside
from tests.integration.enlist.conftest import Make, parameter
from tests.integration.enlist.support import (
    Async,
    AsyncPsycopg,
    AsyncSessions,
    Caller,
    Client,
    Undone,
)


@pytest.fixture(
    params=[
        parameter(dialect, kind, name=f"{dialect}-{kind.__name__}")
        for dialect, kinds in (
            ("sqlite", (Async, AsyncSessions)),
            ("postgresql", (Async, AsyncSessions, AsyncPsycopg)),
        )
        for kind in kinds
    ]
)
def caller(request: pytest.FixtureRequest, make_caller: Make) -> Caller:
    """A shop, and an asynchronous client."""
    return make_caller(*request.param)


def wait(caller: Caller, work: Awaitable[Any]) -> Any:
    assert isinstance(caller.client, Async)

    async def waited() -> Any:
        return await work

    return caller.client.wait(waited())


def test_a_whole_transaction(caller: Caller) -> None:
    client, budget = caller.client, caller.shop.budget

    async def order() -> None:
        async with budget.enlist(client.given):
            await budget.publish(caller.draft.s("a", 1))
            caller.draft.delay("a", 2)
            await asyncio.to_thread(caller.draft.delay, "a", 4)
        await client.given.commit()

    wait(caller, order())
    assert caller.committed() == ([], 7, 3)


def test_what_cannot_be_awaited_says_so(caller: Caller) -> None:
    client, budget = caller.client, caller.shop.budget

    async def inner() -> None:
        async with budget.enlist(client.given):
            caller.draft.delay("a", 1)
            async with client.savepoint():
                if not isinstance(client, AsyncPsycopg):
                    await client.given.execute(sa.text("SELECT 1"))
                for publish in (caller.draft.s("a", 2).delay, group(caller.draft.s("a", 2)).delay):
                    with pytest.raises(EnlistError, match="open the block inside of the savepoint"):
                        publish()
                with pytest.raises(EnlistError, match="open the block inside of the savepoint"):
                    await budget.publish(caller.draft.s("a", 2))
            caller.draft.delay("a", 4)
        await client.given.commit()

    wait(caller, inner())
    assert caller.committed() == ([], 5, 2)
    with pytest.raises(EnlistError, match="immediate=True cannot be for an asynchronous"):
        client.enlisted(lambda batch: None, immediate=True)


def test_a_block_inside_of_the_savepoint(caller: Caller) -> None:
    client, budget = caller.client, caller.shop.budget

    async def order() -> None:
        async with budget.enlist(client.given):
            caller.draft.delay("a", 1)
            for amount, undo in ((2, True), (4, False)):
                try:
                    async with client.savepoint():
                        async with budget.enlist(client.given):
                            caller.draft.delay("a", amount)
                        if undo:
                            raise Undone
                except Undone:
                    pass
        await client.given.commit()

    wait(caller, order())
    assert caller.committed() == ([], 5, 2)


@pytest.mark.parametrize("dialect", [parameter("sqlite"), parameter("postgresql")])
@pytest.mark.parametrize("kind", [Async, AsyncSessions], ids=lambda kind: kind.__name__)
def test_a_block_in_run_sync(dialect: tuple[str], kind: type[Client], make_caller: Make) -> None:
    caller = make_caller(dialect[0], kind)
    client, budget = caller.client, caller.shop.budget

    def order(given: SyncSession) -> None:
        with budget.enlist(given, immediate=True):
            caller.draft.delay("a", 1)
        with budget.enlist(given):
            caller.draft.delay("a", 2)
            with given.begin_nested():
                caller.draft.delay("a", 4)
            with given.begin_nested() as savepoint:
                caller.draft.delay("a", 3)
                savepoint.rollback()

    async def run() -> None:
        await client.given.run_sync(order)
        await client.given.commit()

    caller.shop.budget.set("tenant:*", limit=5, unit="tokens")
    wait(caller, run())
    assert caller.committed() == ([], 7, 3)


def test_contexts_are_each_tasks_own(caller: Caller) -> None:
    client, budget = caller.client, caller.shop.budget

    async def two() -> None:
        opened, published = asyncio.Event(), asyncio.Event()

        async def enlisted() -> None:
            async with budget.enlist(client.given):
                opened.set()
                await published.wait()

        async def beside() -> None:
            await opened.wait()
            await budget.publish(caller.draft.s("a", 1))
            published.set()

        await asyncio.gather(enlisted(), beside())
        await client.given.rollback()

    wait(caller, two())
    assert caller.committed() == ([], 1, 1)


def test_a_block_whose_end_is_cancelled_leaves_a_usable_transaction(caller: Caller) -> None:
    client, budget = caller.client, caller.shop.budget

    async def block() -> None:
        async with budget.enlist(client.given):
            caller.draft.delay("a", 1)
            this = asyncio.current_task()
            assert this is not None
            this.cancel()

    async def run() -> None:
        task = asyncio.ensure_future(block())
        with pytest.raises(asyncio.CancelledError):
            await task
        # Even now there is nothing of it that could be committed.
        await client.given.commit()
        async with budget.enlist(client.given):
            caller.draft.delay("a", 2)
        await client.given.commit()

    wait(caller, run())
    assert caller.committed() == ([], 2, 1)


def test_a_batch(either: Caller) -> None:
    budget = either.shop.budget

    async def run() -> list[Any]:
        async with budget.batch(partial=True) as batch:
            for amount in (6, 6, 4):
                await budget.publish(either.draft.s("a", amount))
        with pytest.raises(BudgetExceeded):
            async with budget.batch():
                either.draft.delay("a", 11)
        with pytest.raises(Undone):
            await undone()
        return batch.refused

    async def undone() -> None:
        async with budget.batch():
            either.draft.delay("b", 1)
            raise Undone

    [refused] = asyncio.run(run())
    assert isinstance(refused.error, BudgetExceeded)
    assert either.committed() == ([], 10, 2)
    assert either.shop.amounts("tenant:b") == (0, 0, 10)


def test_publishing_returns_the_result(either: Caller) -> None:
    budget, draft = either.shop.budget, either.draft

    async def run() -> None:
        result = await budget.publish(draft.s("a"), request_id="mine", countdown=5)
        assert result.id == task_id_of("tenant:a", "mine")
        again = await budget.publish(draft.s("a"), request_id="mine")
        assert again.id == result.id
        members = await budget.publish(group(draft.s("a"), draft.s("a")))
        assert len(members) == 2
        body = await budget.publish(chord([draft.s("a")], draft.si("a")))
        assert body.parent is not None
        with pytest.raises(BudgetExceeded):
            await budget.publish(draft.s("a", 11))
        for wrong in (draft, draft.name, None):
            with pytest.raises(PolicyError, match="is for a signature"):
                await budget.publish(wrong)

    asyncio.run(run())
    assert either.shop.amounts("tenant:a")[0] == 4


@pytest.mark.parametrize("dialect", [parameter("sqlite"), parameter("postgresql")])
def test_the_event_loop_goes_on_while_the_store_is_locked(
    dialect: tuple[str], make_caller: Make
) -> None:
    caller = make_caller(dialect[0], budget_lock_seconds=60)
    budget = caller.shop.budget

    async def one() -> None:
        await budget.publish(caller.draft.s("a", 1))

    async def batch() -> None:
        async with budget.batch():
            caller.draft.delay("a", 1)
            caller.draft.delay("a", 1)

    for publish in (one, batch):
        # Somebody else has the budget, and keeps it until the event loop has gone on.
        Beside(lambda: caller.client.enlisted(lambda inner: caller.draft.delay("a", 1))).result()
        asyncio.run(beat_while(publish, caller.client.commit))
    assert caller.committed() == ([], 5, 5)


async def beat_while(publish: Callable[[], Awaitable[None]], free: Callable[[], None]) -> None:
    """Let a heart beat while ``publish()`` waits for a lock; only then ``free()`` it."""
    beats = asyncio.Queue[int]()

    async def beat() -> None:
        count = 0
        while True:
            count += 1
            beats.put_nowait(count)
            await asyncio.sleep(0)

    heart = asyncio.ensure_future(beat())
    published = asyncio.ensure_future(publish())
    while await beats.get() < 100:
        assert not published.done()
    free()
    await published
    heart.cancel()
