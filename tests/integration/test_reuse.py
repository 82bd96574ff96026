"""``reuse=``: which calls of an application are one request, by every way of calling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, group

from celery_budget import BudgetedTask, BudgetExceeded, PolicyError
from celery_budget.store import schema
from tests.integration.support import Shop


def task(shop: Shop, name: str = "draft", **declared: Any) -> Any:
    def body(prompt: Any, tenant: str = "a") -> None:
        pass

    given = {"budget": "tenant:{tenant}", "estimate": 1, "reuse": "1h", **declared}
    return shop.app.task(body, base=BudgetedTask, name=name, lazy=False, **given)


def requests(shop: Shop) -> list[str]:
    return [row.task_id for row in shop.rows(schema.reservations)]


def test_every_way_of_calling_joins(on_both: Shop) -> None:
    draft = task(on_both)
    ids = {
        draft.delay("p").id,
        draft.delay(prompt="p", tenant="a").id,
        draft.apply_async(("p",), countdown=60, priority=3).id,
        draft.s("p").apply_async().id,
        on_both.app.send_task("draft", ("p",)).id,
    }
    assert [*ids] == requests(on_both)
    assert on_both.amounts("tenant:a") == (1, 0, 9)
    assert draft.delay("other").id not in ids


def test_owners_do_not_join(on_both: Shop) -> None:
    on_both.budget.set("tenant:b", limit=10, unit="tokens")
    draft = task(on_both, budget="tenant:{tenant}")
    assert draft.delay("p", "a").id != draft.delay("p", "b").id
    assert len(requests(on_both)) == 2


def test_nor_do_versions_and_names(shop: Shop) -> None:
    ids = {
        task(shop).delay("p").id,
        task(shop, "second", version="1").delay("p").id,
    }
    # Another release, with another version of the same task.
    shop.app.tasks.pop("draft")
    ids.add(task(shop, version="2").delay("p").id)
    assert len(ids) == 3


def test_an_id_of_its_own_counts_before_it(shop: Shop) -> None:
    draft = task(shop)
    joined = draft.delay("p").id
    assert draft.apply_async(("p",), task_id="mine").id == "mine"
    named = draft.apply_async(("p",), request_id="r-1").id
    assert named not in (joined, "mine")
    assert draft.apply_async(("p",), request_id="r-1").id == named
    assert len(requests(shop)) == 3


def test_members_of_a_canvas_have_ids_of_their_own(shop: Shop) -> None:
    draft = task(shop)
    group(draft.s("p"), draft.s("p")).apply_async()
    chain(draft.si("p"), draft.si("p")).apply_async()
    assert len(requests(shop)) == 3


def test_what_cannot_be_compared_is_an_error(shop: Shop) -> None:
    before = shop.ledger()
    with pytest.raises(PolicyError, match="can be compared"):
        task(shop).delay(object())
    assert shop.ledger() == before


def test_a_refused_call_leaves_nothing_to_join(shop: Shop) -> None:
    draft = task(shop, estimate=11)
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            draft.delay("p")
    shop.budget.set("tenant:a", limit=11)
    assert [draft.delay("p").id] == requests(shop)


@pytest.mark.parametrize("block", ["batch", "enlist"])
def test_in_a_block_it_joins_as_well(on_both: Shop, block: str) -> None:
    draft = task(on_both)

    def published() -> set[str]:
        return {draft.delay("p").id, draft.delay("p").id}

    if block == "batch":
        with on_both.budget.batch():
            ids = published()
    else:
        with on_both.budget.store.transaction() as connection, on_both.budget.enlist(connection):
            ids = published()
    assert [*ids] == requests(on_both) == [draft.delay("p").id]


@pytest.fixture
def forgets(shop: Shop) -> Callable[..., bool]:
    return shop.budget.forget


def test_forgetting(shop: Shop, forgets: Callable[..., bool]) -> None:
    draft, plain = task(shop), task(shop, "plain", reuse=None)
    first = draft.delay("p").id
    assert not forgets(first, owner="tenant:b")
    assert not forgets(draft, ("p",), owner="tenant:b")
    assert not forgets(draft, ("q",), owner="tenant:a")
    assert forgets(first, owner="tenant:a")
    assert not forgets(first, owner="tenant:a")
    second = draft.delay("p").id
    assert second != first
    assert forgets(draft, kwargs={"prompt": "p"}, owner="tenant:a")
    assert draft.delay("p").id not in (first, second)
    with pytest.raises(PolicyError, match="has no reuse="):
        forgets(plain, ("p",), owner="tenant:a")
    with pytest.raises(PolicyError, match="is for a task id"):
        forgets(7, owner="tenant:a")
