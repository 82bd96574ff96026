"""Publications in the caller's own transaction, by every kind of connection."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chord, group

from celery_budget.core.identity import task_id_of
from celery_budget.errors import BudgetExceeded, RequestConflict, UnknownBudget
from tests.integration.enlist.support import Caller
from tests.integration.support import received, reservation_of


def test_all_is_committed_together_and_published_then(any_caller: Caller) -> None:
    client, shop = any_caller.client, any_caller.shop
    client.write("order")
    results = client.enlisted(
        lambda batch: [
            any_caller.draft.delay("a", 3),
            any_caller.draft.delay("a", 4),
            any_caller.plain.delay(),
        ]
    )
    assert any_caller.committed() == ([], 0, 0)
    if shop.budget.store.dialect == "postgresql":
        # On SQLite a relay has to wait.
        assert shop.relay().published == 0
    client.commit()
    assert any_caller.committed() == (["order"], 7, 3)
    shop.relay()
    messages = received(shop.app, shop.app.conf.task_default_queue)
    assert [message.headers["id"] for message in messages] == [one.id for one in results]
    assert [reservation_of(message) is not None for message in messages] == [True, True, False]
    assert shop.budget.reconcile().ok


def test_one_is_committed_by_itself(any_caller: Caller) -> None:
    any_caller.client.enlisted(lambda batch: any_caller.draft.delay("a", 3))
    any_caller.client.commit()
    assert any_caller.committed() == ([], 3, 1)


def test_all_is_rolled_back_together(caller: Caller) -> None:
    before = caller.shop.ledger("budget_backlog")
    caller.client.write("order")
    caller.client.enlisted(lambda batch: [caller.draft.delay("a", 3) for _ in range(2)])
    caller.client.rollback()
    assert caller.committed() == ([], 0, 0)
    assert caller.shop.relay().published == 0
    assert caller.shop.ledger("budget_backlog") == before
    # Nothing of it keeps anybody waiting.
    caller.draft.delay("a", 10)
    assert caller.committed() == ([], 10, 1)


def test_a_chord_with_a_request_id_is_told_once(any_caller: Caller) -> None:
    """It is admitted for a look first, in a savepoint."""
    client, draft, plain = any_caller.client, any_caller.draft, any_caller.plain

    def publish(batch: Any) -> Any:
        return chord([draft.s("a", 3), plain.si()], plain.si()).apply_async(request_id="r")

    client.write("undone")
    client.enlisted(publish)
    client.rollback()
    assert any_caller.committed() == ([], 0, 0)
    for order in ("first", "second"):
        client.write(order)
        client.enlisted(publish)
        client.commit()
    assert any_caller.committed() == (["first", "second"], 3, 2)
    assert any_caller.shop.budget.reconcile().ok


def test_one_transaction_has_several_blocks(caller: Caller) -> None:
    client = caller.client
    for amount in (1, 2):
        client.write(f"order {amount}")
        client.enlisted(lambda batch, amount=amount: caller.draft.delay("a", amount))
    client.enlisted(lambda batch: None)
    client.commit()
    assert caller.committed() == (["order 1", "order 2"], 3, 2)
    client.enlisted(lambda batch: caller.draft.delay("a", 4))
    client.commit()
    assert caller.committed() == (["order 1", "order 2"], 7, 3)


@pytest.mark.parametrize("undo", [True, False], ids=["rolled back", "released"])
def test_a_block_is_part_of_the_savepoint_around_it(caller: Caller, undo: bool) -> None:
    client = caller.client
    client.write("order")
    client.enlisted(lambda batch: caller.draft.delay("a", 1))
    client.enlisted_in_savepoint(lambda batch: caller.draft.delay("a", 2), undo)
    client.commit()
    assert caller.committed() == (["order"], 1 if undo else 3, 1 if undo else 2)
    assert caller.shop.budget.reconcile().ok


@pytest.mark.parametrize("within", [False, True], ids=["", "in another"])
def test_what_is_published_in_an_inner_savepoint_goes_with_it(seen: Caller, within: bool) -> None:
    client = seen.client

    def block(batch: Any) -> None:
        seen.draft.delay("a", 1)
        for amount, undo in ((2, True), (4, False)):
            try:
                with client.savepoint():
                    seen.draft.delay("a", amount)
                    client.write(str(amount))
                    if undo:
                        raise LookupError
            except LookupError:
                pass

    if within:
        client.enlisted_in_savepoint(block, undo=False)
    else:
        client.enlisted(block)
    client.commit()
    assert seen.committed() == (["4"], 5, 2)


def test_a_refusal_is_raised_at_the_end_and_the_transaction_goes_on(caller: Caller) -> None:
    client = caller.client
    client.write("order")
    reached = []

    def block(batch: Any) -> None:
        caller.draft.delay("a", 1)
        caller.draft.delay("a", 11)
        caller.plain.delay()
        reached.append(True)

    with pytest.raises(BudgetExceeded) as refused:
        client.enlisted(block)
    assert reached == [True]
    assert (refused.value.budget, refused.value.requested) == ("tenant:a", 12)
    client.write("after")
    client.enlisted(lambda batch: caller.draft.delay("a", 9))
    client.commit()
    assert caller.committed() == (["after", "order"], 9, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_wrong_is_raised_at_the_end(caller: Caller, count: int) -> None:
    client = caller.client
    first = caller.draft.s("a", 1).apply_async(request_id="same")
    assert first.id == task_id_of("tenant:a", "same")
    with pytest.raises(UnknownBudget):
        client.enlisted(lambda batch: [caller.draft.delay("nobody") for _ in range(count)])
    with pytest.raises(RequestConflict):
        client.enlisted(
            lambda batch: [
                caller.draft.s("a", 2).apply_async(request_id="same") for _ in range(count)
            ]
        )
    client.write("after")
    client.commit()
    assert caller.committed() == (["after"], 1, 1)


def test_what_fits_is_admitted_if_that_is_wanted(any_caller: Caller) -> None:
    batches = []

    def block(batch: Any) -> list[Any]:
        batches.append(batch)
        return [any_caller.draft.delay("a", amount) for amount in (6, 6, 4)]

    results = any_caller.client.enlisted(block, partial=True)
    any_caller.client.commit()
    assert any_caller.committed() == ([], 10, 2)
    [refused] = batches[0].refused
    assert refused.task_id == results[1].id


def test_nothing_is_published_where_the_block_raises(caller: Caller) -> None:
    def block(batch: Any) -> None:
        caller.draft.delay("a", 1)
        raise LookupError

    with pytest.raises(LookupError):
        caller.client.enlisted(block)
    caller.client.write("order")
    caller.client.commit()
    assert caller.committed() == (["order"], 0, 0)


def test_a_budget_is_made_of_its_template_meanwhile(any_caller: Caller) -> None:
    any_caller.shop.budget.set("tenant:*", limit=5, unit="tokens")
    for count in (1, 2):
        any_caller.client.write("order")
        any_caller.client.enlisted(
            lambda batch, count=count: [
                any_caller.draft.delay(f"{count}{number}") for number in range(count)
            ]
        )
    any_caller.client.commit()
    assert len(any_caller.outbox()) == 3
    assert any_caller.shop.amounts("tenant:21") == (1, 0, 4)


def test_a_canvas_is_part_of_it(caller: Caller) -> None:
    caller.client.enlisted(lambda batch: group(caller.draft.s("a", 1) for _ in range(3)).delay())
    assert caller.committed() == ([], 0, 0)
    caller.client.commit()
    assert caller.committed() == ([], 3, 3)


def test_each_is_admitted_at_once_if_that_is_wanted(synchronous: Caller) -> None:
    caller, client = synchronous, synchronous.client

    def block(batch: Any) -> None:
        caller.draft.delay("a", 6)
        with pytest.raises(BudgetExceeded):
            caller.draft.delay("a", 6)
        caller.plain.delay()
        with pytest.raises(BudgetExceeded):
            group(caller.draft.s("a", 2) for _ in range(3)).delay()
        group(caller.draft.s("a", 2) for _ in range(2)).delay()

    client.enlisted(block, immediate=True)
    assert caller.committed() == ([], 0, 0)
    client.commit()
    assert caller.committed() == ([], 10, 4)
