"""Request ids: a repeat of a request is the same task, however and wherever it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import chain, group

from celery_budget import BudgetError, RequestConflict, budgeted, settlement
from celery_budget.core.identity import task_id_of
from celery_budget.errors import PolicyError
from celery_budget.store import schema
from tests.integration.support import Shop, make_app, reservation_of


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def shop(request: pytest.FixtureRequest, make_shop: Callable[..., Shop]) -> Shop:
    """A shop on either store."""
    if request.param == "sqlite":
        return make_shop()
    return make_shop(budget_database_url=request.getfixturevalue("postgres_url"))


@pytest.fixture
def draft(shop: Shop) -> Any:
    shop.budget.set("tenant:b", limit=10, unit="tokens")

    def body(size: Any, tenant: str, style: str = "plain") -> Any:
        return size

    return budgeted(budget="tenant:{tenant}", estimate=2)(
        shop.app.task(name="identified.draft", shared=False)(body)
    )


Publish = Callable[..., Any]

#: Each way to publish the same call under a request id.
WAYS: dict[str, Callable[[Any, str], Any]] = {
    "apply_async": lambda task, rid: task.apply_async((1, "a"), request_id=rid),
    "by keyword": lambda task, rid: task.apply_async(
        (), {"size": 1, "tenant": "a"}, request_id=rid
    ),
    "with the default": lambda task, rid: task.apply_async(
        (1,), {"tenant": "a", "style": "plain"}, request_id=rid
    ),
    "signature": lambda task, rid: task.s(1, "a").apply_async(request_id=rid),
    "partial signature": lambda task, rid: task.s("a").apply_async((1,), request_id=rid),
    "set": lambda task, rid: task.s(1, "a").set(request_id=rid).delay(),
    "by name": lambda task, rid: task.app.send_task(task.name, (1, "a"), request_id=rid),
    "signature by name": lambda task, rid: task.app.signature(task.name, (1, "a")).apply_async(
        request_id=rid
    ),
    "elsewhere": lambda task, rid: task.apply_async(
        (1, "a"), request_id=rid, countdown=60, queue="other", headers={"x": "y"}, priority=1
    ),
}


@pytest.mark.parametrize("first", WAYS)
def test_a_repeat_is_the_same_task_and_nothing_more(shop: Shop, draft: Any, first: str) -> None:
    result = WAYS[first](draft, "r")
    assert result.id == task_id_of("tenant:a", "r")
    before = shop.ledger()
    for way in WAYS.values():
        assert way(draft, "r").id == result.id
    assert shop.ledger() == before
    assert shop.amounts("tenant:a") == (2, 0, 8)
    shop.make_due()
    shop.relay()
    messages = shop.received() + shop.received("other")
    assert [message.headers["id"] for message in messages] == [result.id]
    # Published, it still is the same request.
    assert draft.apply_async((1, "a"), request_id="r").id == result.id
    shop.relay()
    assert shop.received() == []


def test_a_second_application_gets_the_same_task_id(shop: Shop, draft: Any) -> None:
    first = draft.apply_async((1, "a"), request_id="r")
    other = make_app(budget_database_url=shop.app.conf.budget_database_url)

    def body(size: Any, tenant: str, style: str = "plain") -> Any:
        return size

    again = budgeted(budget="tenant:{tenant}", estimate=2)(
        other.task(name="identified.draft", shared=False)(body)
    ).apply_async((1, "a"), request_id="r")
    assert again.id == first.id
    assert shop.amounts("tenant:a") == (2, 0, 8)
    other._celery_budget.store.dispose()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((2, "a"), {}), ((1, "a"), {"style": "long"}), (("1", "a"), {}), ((True, "a"), {})],
    ids=["value", "option", "text", "bool"],
)
def test_another_request_under_the_same_id_is_a_conflict(
    shop: Shop, draft: Any, args: Any, kwargs: Any
) -> None:
    task_id = draft.apply_async((1, "a"), request_id="r").id
    before = shop.ledger()
    with pytest.raises(RequestConflict) as caught:
        draft.apply_async(args, kwargs, request_id="r")
    assert caught.value.args == ("r", "tenant:a", task_id)
    assert shop.ledger() == before


def test_another_task_under_the_same_id_is_a_conflict(shop: Shop, draft: Any) -> None:
    def body(size: Any, tenant: str, style: str = "plain") -> Any:
        return size

    other = budgeted(budget="tenant:{tenant}", estimate=2)(
        shop.app.task(name="identified.other", shared=False)(body)
    )
    draft.apply_async((1, "a"), request_id="r")
    with pytest.raises(RequestConflict):
        other.apply_async((1, "a"), request_id="r")


def test_owners_do_not_share_request_ids(shop: Shop, draft: Any) -> None:
    ids = {draft.apply_async((1, tenant), request_id="r").id for tenant in ("a", "b")}
    assert len(ids) == 2
    assert shop.counts()["admitted"] == 2


@pytest.mark.parametrize("same", [True, False])
def test_a_request_id_with_a_task_id(shop: Shop, draft: Any, same: bool) -> None:
    task_id = task_id_of("tenant:a", "r") if same else str(uuid4())
    if same:
        assert draft.apply_async((1, "a"), request_id="r", task_id=task_id).id == task_id
        return
    before = shop.ledger()
    with pytest.raises(PolicyError, match="give one of the two"):
        draft.apply_async((1, "a"), request_id="r", task_id=task_id)
    assert shop.ledger() == before


def test_an_explicit_task_id_is_the_request_id(shop: Shop, draft: Any) -> None:
    draft.apply_async((1, "a"), task_id="mine")
    before = shop.ledger()
    assert draft.apply_async((1, "a"), task_id="mine").id == "mine"
    assert shop.ledger() == before
    with pytest.raises(RequestConflict, match="mine"):
        draft.apply_async((2, "a"), task_id="mine")
    shop.relay()
    (message,) = shop.received()
    assert message.headers["id"] == "mine"


@pytest.mark.parametrize(
    "request_id", [7, "", "x" * 256, b"r", 1.5, False, UUID(int=7), "a\0b", "\ud800"], ids=repr
)
def test_what_is_no_request_id(shop: Shop, draft: Any, request_id: Any) -> None:
    before = shop.ledger()
    for publish in (
        lambda: draft.apply_async((1, "a"), request_id=request_id),
        lambda: shop.app.send_task(draft.name, (1, "a"), request_id=request_id),
    ):
        with pytest.raises(PolicyError, match="request_id"):
            publish()
    assert shop.ledger() == before


def test_no_request_id_is_none(shop: Shop, draft: Any) -> None:
    ids = {draft.apply_async((1, "a"), request_id=None).id for _ in range(2)}
    assert len(ids) == 2
    shop.relay()
    for message in shop.received():
        assert "request_id" not in message.properties


@pytest.mark.parametrize("request_id", ["x" * 255, "ä/ö ", "'; --", "0"], ids=repr)
def test_any_text_is_a_request_id(shop: Shop, draft: Any, request_id: str) -> None:
    first = draft.apply_async((1, "a"), request_id=request_id)
    assert draft.apply_async((1, "a"), request_id=request_id).id == first.id
    assert shop.counts()["admitted"] == 1


def test_the_id_of_a_request_that_never_ran_may_be_used_anew(shop: Shop, draft: Any) -> None:
    first = draft.apply_async((1, "a"), request_id="r")
    (row,) = shop.rows(schema.reservations)
    assert settlement.revoke(shop.budget.store, row.root, row.reservation_id, "cancelled")
    # The same again, or something else: the id is free.
    again = draft.apply_async((2, "a"), request_id="r")
    assert again.id == first.id
    assert shop.amounts("tenant:a") == (2, 0, 8)
    shop.relay()
    (message,) = shop.received()
    assert reservation_of(message) not in (None, row.reservation_id)


def test_a_refused_request_is_not_remembered(shop: Shop, draft: Any) -> None:
    shop.budget.set("tenant:a", limit=1)
    with pytest.raises(BudgetError):
        draft.apply_async((1, "a"), request_id="r")
    shop.budget.set("tenant:a", limit=10)
    assert draft.apply_async((2, "a"), request_id="r").id == task_id_of("tenant:a", "r")


@pytest.mark.parametrize("kind", ["step", "member"])
def test_a_request_id_on_a_part_of_a_canvas_is_an_error_and_publishes_nothing(
    shop: Shop, draft: Any, kind: str
) -> None:
    """Celery gives the members their ids itself; a request id is for the whole."""
    marked = draft.s(1, "a").set(request_id="r")
    publish: Callable[[], Any] = {
        "step": lambda: chain(marked, draft.s("a")).apply_async(),
        "member": lambda: group(marked, draft.s(2, "a")).apply_async(),
    }[kind]
    before = shop.ledger()
    with pytest.raises(PolicyError, match="canvas"):
        publish()
    assert shop.ledger() == before
