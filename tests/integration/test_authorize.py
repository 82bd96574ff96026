"""``authorize=``: whether a caller may draw on the budgets that its arguments name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group

from celery_budget import (
    BudgetedTask,
    ConfigurationError,
    Draw,
    NotAuthorized,
    PolicyError,
    budgeted,
    calling,
    usage,
)
from celery_budget.http import refusal_of
from celery_budget.store import schema
from tests.integration.delivering import delivered
from tests.integration.support import Shop
from tests.messages import Told

asked: list[Draw] = []


def own_tenant(draw: Draw) -> bool:
    """Callers may draw on their own tenant's budget."""
    asked.append(draw)
    return all(name == f"tenant:{draw.caller}" for name in draw.budgets)


@pytest.fixture(autouse=True)
def _asked() -> None:
    asked.clear()


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    shop = make_shop(budget_authorize=f"{__name__}:own_tenant")
    shop.budget.set("tenant:b", limit=10, unit="tokens")
    return shop


def declare(shop: Shop, name: str = "asked.draft", body: Any = None, **options: Any) -> Any:
    def draft(tenant: str, text: str = "") -> str:
        return text

    given = {"budget": "tenant:{tenant}", "estimate": 2, **options}
    return budgeted(**given)(shop.app.task(name=name, shared=False)(body or draft))


def untouched(shop: Shop) -> None:
    assert shop.amounts("tenant:a")[0] == shop.amounts("tenant:b")[0] == 0
    assert shop.rows(schema.reservations) == shop.rows(schema.outbox) == []
    assert shop.rows(schema.parked) == shop.rows(schema.refusals) == []
    assert shop.received() == []


WAYS: dict[str, Callable[[Any], Any]] = {
    "delay": lambda task: task.delay("b"),
    "apply_async": lambda task: task.apply_async(("b",), request_id="r"),
    "by name": lambda task: task.app.send_task(task.name, ("b",)),
    "parked": lambda task: task.apply_async(("b",), on_refused="park"),
    "group": lambda task: group(task.s("a"), task.s("b")).apply_async(),
    "partial group": lambda task: group(task.s("a"), task.s("b")).apply_async(partial=True),
    "chord": lambda task: chord([task.s("a"), task.s("b")], task.si("a")).apply_async(),
    "chain": lambda task: chain(task.si("b"), task.si("a")).apply_async(),
    "chain reserved whole": lambda task: chain(task.si("a"), task.si("b")).apply_async(
        reserve="chain"
    ),
    "map": lambda task: task.map(["a", "b"]).apply_async(),
    "in place": lambda task: task.apply(("b",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_allowed_changes_nothing(shop: Shop, way: str) -> None:
    draft = declare(shop)
    with calling("a"), pytest.raises(NotAuthorized, match="'tenant:b'") as caught:
        WAYS[way](draft)
    assert "tenant:b" in caught.value.budgets
    untouched(shop)
    refusal = refusal_of(caught.value)
    assert refusal is not None
    assert (refusal.status, refusal.body) == (403, b'{"error": "not_authorized"}')


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("delay", "by name")])
def test_eagerly_too(make_shop: Callable[..., Shop], way: str) -> None:
    shop = make_shop(budget_authorize=own_tenant, task_always_eager=True)
    shop.budget.set("tenant:b", limit=10, unit="tokens")
    ran: list[str] = []

    def body(tenant: str) -> None:
        ran.append(tenant)

    draft = declare(shop, body=body, authorize=lambda draw: "tenant:b" not in draw.budgets)
    if "chain" in way or "group" in way or way == "chord":
        # Members run one after another there: what was allowed before has run.
        with calling("a"), pytest.raises(NotAuthorized):
            WAYS[way](draft)
    else:
        with calling("a"), pytest.raises(NotAuthorized):
            WAYS[way](draft)
        assert ran == []
    assert "b" not in ran
    assert shop.amounts("tenant:b") == (0, 0, 10)


def test_a_batch_is_asked_before_any_of_it_is_admitted(shop: Shop) -> None:
    draft = declare(shop)
    batch = shop.budget.batch()

    def publish() -> None:
        with batch:
            draft.delay("a")
            draft.delay("b")

    with calling("a"), pytest.raises(NotAuthorized):
        publish()
    untouched(shop)


def test_a_rule_knows_what_is_asked_and_its_text_has_no_arguments(shop: Shop) -> None:
    draft = declare(shop)
    with calling("a"):
        draft.delay("a", text="s3cret")
    assert asked == [
        Draw("asked.draft", {"tenant:a": 2}, "a", "new", (), {"tenant": "a", "text": "s3cret"})
    ]
    assert "s3cret" not in repr(asked)
    assert shop.amounts("tenant:a") == (2, 0, 8)


def test_who_is_calling_is_known_in_threads_with_the_context(shop: Shop) -> None:
    draft = declare(shop)

    async def publish() -> None:
        with calling("a"):
            await asyncio.to_thread(draft.delay, "a")

    asyncio.run(publish())
    assert [draw.caller for draw in asked] == ["a"]
    with pytest.raises(NotAuthorized):
        draft.delay("a")


def test_both_rules_have_to_allow_it(shop: Shop) -> None:
    draft = declare(shop, authorize=lambda draw: draw.arguments["text"] != "no")
    with calling("a"):
        draft.delay("a")
        with pytest.raises(NotAuthorized):
            draft.delay("a", text="no")
    with calling("b"), pytest.raises(NotAuthorized):
        draft.delay("a")


def test_the_base_class_takes_a_rule(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop()

    @shop.app.task(
        base=BudgetedTask, budget="tenant:a", estimate=1, authorize=own_tenant, shared=False
    )
    def draft() -> None: ...

    with pytest.raises(NotAuthorized):
        draft.delay()
    with calling("a"):
        draft.delay()


class Exit(BaseException):
    pass


def fail(error: BaseException) -> Callable[[Draw], Any]:
    def rule(draw: Draw) -> Any:
        raise error

    return rule


async def later(draw: Draw) -> bool:
    return True


def yields(draw: Draw) -> Any:
    yield False


async def yields_later(draw: Draw) -> Any:
    yield False


def answers_later(draw: Draw) -> Any:
    return later(draw)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda draw: None, "refused"),
        (lambda draw: 0, "refused"),
        (fail(LookupError("s3cret")), "it raised LookupError"),
        (fail(SystemExit(3)), "it raised SystemExit"),
        (fail(Exit("s3cret")), "it raised Exit"),
        (answers_later, "it has answered with something to be awaited"),
        (yields, "it has answered with a generator"),
        (yields_later, "it has answered with a generator"),
    ],
)
def test_what_is_no_yes_is_a_no(
    make_shop: Callable[..., Shop], rule: Callable[[Draw], Any], reason: str
) -> None:
    shop = make_shop()
    shop.budget.set("tenant:b", limit=10, unit="tokens")
    draft = declare(shop, authorize=rule)
    with pytest.raises(NotAuthorized) as caught:
        draft.delay("a")
    assert caught.value.reason == reason
    assert "s3cret" not in str(caught.value)
    untouched(shop)


def test_an_interrupt_passes(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop()
    draft = declare(shop, authorize=fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        draft.delay("a")
    assert shop.rows(schema.reservations) == []


@pytest.mark.parametrize("rule", [7, later])
def test_a_rule_that_cannot_be_asked_is_told_at_once(shop: Shop, rule: Any) -> None:
    with pytest.raises(PolicyError, match="authorize="):
        declare(shop, authorize=rule)


def test_nothing_is_admitted_by_a_rule_that_is_not_there(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(budget_authorize="nowhere.at_all:rule")
    with pytest.raises(ConfigurationError, match=r"budget_authorize is 'nowhere\.at_all:rule'"):
        declare(shop).delay("a")
    assert shop.rows(schema.reservations) == []


def test_the_budgets_of_lanes_are_asked_about(shop: Shop) -> None:
    shop.budget.set("free", limit=0, unit="tokens")
    shop.budget.set("tenant:paid", limit=10, unit="tokens")
    shop.budget.lanes.set("free", queues=["free-q"], budgets=["free"], preflight=False)
    shop.budget.lanes.set("paid", queues=["paid-q"], budgets=["tenant:paid"], preflight=False)
    shop.app.conf.task_create_missing_queues = True

    def rule(draw: Draw) -> bool:
        asked.append(draw)
        return "tenant:paid" not in draw.budgets

    shop.budget.__dict__["authorize"] = rule
    draft = declare(shop, fallback=["free", "paid"])
    with pytest.raises(NotAuthorized):
        draft.delay("a")
    assert [list(draw.budgets) for draw in asked] == [
        ["tenant:a", "free"],
        ["tenant:a", "tenant:paid"],
    ]
    assert shop.rows(schema.reservations) == []
    with pytest.raises(NotAuthorized), shop.budget.batch():
        draft.delay("a")
    with pytest.raises(NotAuthorized):
        draft.apply(("a",))
    assert shop.amounts("tenant:paid") == (0, 0, 10)


# In a worker


def test_a_task_acts_for_what_was_admitted(shop: Shop) -> None:
    """Retry, next step and what it publishes draw on its own budget unasked, on others not."""
    errors: list[Any] = []

    def body(self: Any, tenant: str) -> str:
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        self.apply_async(("a",), task_id="of-its-own")
        for other in (lambda: self.delay("b"), lambda: self.retry(args=("b",), throw=False)):
            try:
                other()
            except NotAuthorized as error:
                errors.append(error)
        return tenant

    work = budgeted(budget="tenant:{tenant}", estimate=2)(
        shop.app.task(name="asked.work", bind=True, shared=False)(body)
    )
    after = declare(shop, name="asked.after")
    with calling("a"):
        chain(work.s("a"), after.si("a")).apply_async()
    assert len(asked) == 1
    for _ in range(2):
        shop.relay()
        for message in shop.received():
            delivered(shop, message)
    # Nobody calls in a worker, and it knows what runs.
    assert [(draw.kind, draw.caller, draw.running) for draw in asked[1:]] == [
        ("new", None, ("tenant:a",)),
        ("retry", None, ("tenant:a",)),
    ]
    assert len(errors) == 2
    names = {row.task_id: row.task_name for row in shop.rows(schema.reservations)}
    assert names.pop("of-its-own") == "asked.work"
    assert sorted(names.values()) == ["asked.after", "asked.work"]
    assert shop.amounts("tenant:b") == (0, 0, 10)


def test_a_step_of_another_budget_fails_and_not_the_task_before(shop: Shop, told: Told) -> None:
    first, second = declare(shop), declare(shop, name="asked.second")
    with calling("a"):
        last = chain(first.si("a"), second.si("b")).apply_async()
    shop.relay()
    [message] = shop.received()
    delivered(shop, message)
    assert last.parent.state == "SUCCESS"
    assert isinstance(last.result, NotAuthorized)
    assert shop.amounts("tenant:b") == (0, 0, 10)
    assert told("continuation.failed")


def test_turning_to_a_lane_is_asked(shop: Shop) -> None:
    shop.budget.set("tenant:paid", limit=10, unit="tokens")
    shop.budget.lanes.set("paid", queues=["paid-q"], budgets=["tenant:paid"], preflight=False)
    errors: list[Any] = []

    def body(tenant: str) -> None:
        with pytest.raises(NotAuthorized) as caught:
            usage.turn_to("paid")
        errors.append(caught.value)
        with calling("paid"):
            assert usage.turn_to("paid", 3)

    draft = declare(shop, body=body)
    with calling("a"):
        draft.delay("a")
    shop.relay()
    [message] = shop.received()
    delivered(shop, message)
    assert [error.budgets for error in errors] == [["tenant:paid"]]
    first, second = asked[1:]
    assert (first.kind, first.running, dict(first.budgets)) == (
        "turn",
        ("tenant:a",),
        {"tenant:paid": 2},
    )
    assert (dict(second.budgets), second.arguments) == ({"tenant:paid": 3}, {"tenant": "a"})


def test_a_message_without_a_reservation_is_asked_about(shop: Shop) -> None:
    draft = declare(shop)
    with calling("a"):
        result = draft.delay("a")
    shop.relay()
    [message] = shop.received()
    del message.headers["budget_reservation"]
    message.headers["id"] = "forged"
    delivered(shop, message)
    assert [draw.kind for draw in asked] == ["new", "delivered"]
    assert isinstance(shop.app.AsyncResult("forged").result, NotAuthorized)
    assert [row.task_id for row in shop.rows(schema.reservations)] == [result.id]


def test_what_was_parked_is_released_unasked(shop: Shop) -> None:
    draft = declare(shop)
    shop.budget.set("tenant:a", limit=1)
    with calling("a"):
        draft.apply_async(("a",), on_refused="park")
    assert len(asked) == 1
    shop.budget.set("tenant:a", limit=10)
    shop.sweep()
    assert shop.amounts("tenant:a") == (2, 0, 8)
    assert len(asked) == 1


def test_a_budget_above_is_not_one_that_runs(shop: Shop) -> None:
    """A task that draws on its tenant's budget may not draw on the one above, unasked."""
    shop.budget.set("org", limit=100, unit="tokens")
    shop.budget.set("tenant:a", parent="org")
    refused: list[Any] = []

    def body(tenant: str) -> None:
        with pytest.raises(NotAuthorized) as caught:
            over.delay()
        refused.append(caught.value)

    def whole() -> None: ...

    over = declare(shop, name="asked.over", body=whole, budget="org")
    draft = declare(shop, body=body)
    with calling("a"):
        draft.apply(("a",))
        draft.delay("a")
    shop.relay()
    [message] = shop.received()
    delivered(shop, message)
    assert len(refused) == 2
    assert asked[-1].running == ("tenant:a",)
