"""``budget.batch()``: what is published in a block is admitted together, in our own transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import group

from celery_budget.errors import BudgetExceeded, OutboxFull, PolicyError, UnknownBudget
from celery_budget.store import schema
from tests.contract.racers import at_once
from tests.integration.enlist.conftest import Make, parameter
from tests.integration.enlist.support import Caller
from tests.integration.support import received


def in_batch(caller: Caller, *calls: Callable[[], Any]) -> None:
    with caller.shop.budget.batch():
        for call in calls:
            call()


def fail() -> None:
    raise LookupError


def test_all_are_admitted_at_the_end(either: Caller) -> None:
    shop = either.shop
    with shop.budget.batch() as batch:
        results = [either.draft.delay("a", 3), either.draft.delay("b", 4), either.plain.delay()]
        assert either.committed() == ([], 0, 0)
        assert shop.relay().published == 0
    assert batch.refused == []
    assert either.committed() == ([], 3, 3)
    assert shop.amounts("tenant:b")[0] == 4
    shop.relay()
    messages = received(shop.app, shop.app.conf.task_default_queue)
    assert {message.headers["id"] for message in messages} == {one.id for one in results}


@pytest.mark.parametrize(
    ("tenant", "amount", "error"), [("a", 11, BudgetExceeded), ("nobody", 1, UnknownBudget)]
)
def test_one_that_is_refused_refuses_all(
    either: Caller, tenant: str, amount: int, error: type[Exception]
) -> None:
    one, wrong = either.draft.s("a", 1).delay, either.draft.s(tenant, amount).delay
    with pytest.raises(error):
        in_batch(either, one, either.plain.delay, wrong, either.draft.s("b", 1).delay)
    assert either.committed() == ([], 0, 0)
    assert either.shop.amounts("tenant:b")[0] == 0


def test_what_fits_is_admitted_if_that_is_wanted(either: Caller) -> None:
    with either.shop.budget.batch(partial=True) as batch:
        first = either.draft.delay("a", 8)
        either.draft.delay("a", 3)
        either.draft.delay("nobody")
        group(either.draft.s("a", 1) for _ in range(3)).delay()
        last = either.draft.delay("a", 2)
        either.plain.delay()
    assert either.committed() == ([], 10, 3)
    assert {row.task_id for row in either.outbox()} >= {first.id, last.id}
    kinds = [type(one.error) for one in batch.refused]
    assert kinds == [BudgetExceeded, UnknownBudget, *[BudgetExceeded] * 3]
    assert {one.task_name for one in batch.refused} == {"shop.draft"}


def test_nothing_is_published_where_the_block_raises(either: Caller) -> None:
    with pytest.raises(LookupError):
        in_batch(either, either.draft.s("a", 1).delay, either.plain.delay, fail)
    assert either.committed() == ([], 0, 0)
    either.draft.delay("a", 2)
    assert either.committed() == ([], 2, 1)


def test_batches_in_one_another(either: Caller) -> None:
    def inner() -> None:
        in_batch(either, either.draft.s("a", 2).delay)
        assert either.committed() == ([], 2, 1)
        with pytest.raises(BudgetExceeded):
            in_batch(either, either.draft.s("a", 9).delay)

    with pytest.raises(BudgetExceeded):
        in_batch(either, either.draft.s("a", 1).delay, inner, either.draft.s("a", 11).delay)
    assert either.committed() == ([], 2, 1)


def test_a_batch_belongs_to_its_context(either: Caller) -> None:
    beside = threading.Thread(target=lambda: either.draft.delay("a", 1))
    with either.shop.budget.batch():
        either.draft.delay("a", 2)
        beside.start()
        beside.join()
        assert either.committed() == ([], 1, 1)
    assert either.committed() == ([], 3, 2)


def test_batches_in_threads(either: Caller) -> None:
    def run(number: int) -> None:
        with either.shop.budget.batch():
            for tenant in ("ab", "ba")[number % 2]:
                either.draft.delay(tenant)

    at_once([lambda number=number: run(number) for number in range(8)])
    assert either.committed()[1:] == (8, 16)
    assert either.shop.amounts("tenant:b")[0] == 8
    assert either.shop.budget.reconcile().ok


def test_a_block_is_opened_once(either: Caller) -> None:
    batch = either.shop.budget.batch()
    with batch:
        either.draft.delay("a", 1)
    with pytest.raises(PolicyError, match="a batch is one block"), batch:
        pass
    with batch.budget.batch():
        pass
    assert either.committed() == ([], 1, 1)
    with pytest.raises(PolicyError, match="partial= is 1"):
        either.shop.budget.batch(partial=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", [parameter("sqlite"), parameter("postgresql")])
def test_the_bound_of_the_outbox_holds_for_batches(dialect: tuple[str], make_caller: Make) -> None:
    caller = make_caller(dialect[0], budget_max_outbox=1)
    one = caller.draft.s("a", 1).delay
    in_batch(caller, one, one)
    # The time of its last count is over.
    caller.shop.sql(schema.backlog.update().values(counted_us=1))
    with pytest.raises(OutboxFull):
        in_batch(caller, one, one)
    assert caller.committed() == ([], 2, 2)


def test_in_the_body_of_a_running_task(either: Caller) -> None:
    app, budget = either.shop.app, either.shop.budget

    @app.task(name="shop.body", shared=False)
    def body(amount: int) -> None:
        with budget.batch():
            either.draft.delay("a", 1)
            either.draft.delay("a", amount)

    body.apply(args=(2,), throw=True)
    assert either.committed() == ([], 3, 2)
    with pytest.raises(BudgetExceeded):
        body.apply(args=(11,), throw=True)
    assert either.committed() == ([], 3, 2)
