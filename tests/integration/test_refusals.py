"""What cannot be admitted: a typed error in the caller, no message, and a ledger as it was."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chain, group

from celery_budget import (
    BudgetError,
    BudgetExceeded,
    InvalidAmount,
    RequestConflict,
    StoreError,
    UnknownBudget,
    budgeted,
)
from celery_budget.errors import (
    AttemptLost,
    EstimateError,
    InvalidName,
    PolicyError,
    RequestNotRun,
    SchemaError,
    UnsupportedPublication,
)
from tests.cluster import eventually
from tests.integration.support import Shop
from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import RabbitServer
from tests.services.redis import RedisServer


def declare(shop: Shop, budget: Any = "tenant:{tenant}", estimate: Any = None) -> Any:
    """A task whose estimate is its argument ``size``, unless told otherwise."""

    def draft(size: Any, tenant: str) -> Any:
        return size

    return budgeted(budget=budget, estimate=estimate or (lambda size: size))(
        shop.app.task(name="refused.draft", shared=False)(draft)
    )


def unbudgeted(value: Any) -> Any:
    return value


def raising(size: Any) -> int:
    raise KeyError(size)


def raising_ours(size: Any) -> int:
    raise InvalidAmount("no price for this model")


@pytest.mark.parametrize(
    ("estimate", "error"),
    [
        (lambda size: None, InvalidAmount),
        (lambda size: float("nan"), InvalidAmount),
        (lambda size: float("inf"), InvalidAmount),
        (lambda size: 1.5, InvalidAmount),
        (lambda size: 6.0, InvalidAmount),
        (lambda size: -1, InvalidAmount),
        (lambda size: True, InvalidAmount),
        (lambda size: "6", InvalidAmount),
        (lambda size: b"6", InvalidAmount),
        (lambda size: 2**63, InvalidAmount),
        (lambda size: 10**40, InvalidAmount),
        (raising, EstimateError),
        (raising_ours, InvalidAmount),
    ],
    ids=[
        *("None", "NaN", "inf", "1.5", "6.0", "-1", "True", "text", "bytes", "2**63", "10**40"),
        *("raises", "raises ours"),
    ],
)
def test_a_bad_estimate(on_both: Shop, estimate: Any, error: type[BudgetError]) -> None:
    task = declare(on_both, estimate=estimate)
    before = on_both.ledger()
    publications: list[Callable[[], Any]] = [
        lambda: task.delay(6, "a"),
        lambda: task.apply_async((6, "a"), request_id="r"),
        lambda: on_both.app.send_task(task.name, (6, "a")),
        lambda: task.s(6, "a").delay(),
        lambda: group([task.s(6, "a")]).apply_async(),
        lambda: chain(task.s(6, "a"), task.s("a")).apply_async(),
    ]
    for publish in publications:
        with pytest.raises(error) as caught:
            publish()
        assert isinstance(caught.value, BudgetError)
    assert on_both.ledger() == before
    on_both.relay()
    assert on_both.received() == []


def test_the_largest_amount_is_an_amount(on_both: Shop) -> None:
    task = declare(on_both)
    with pytest.raises(BudgetExceeded) as caught:
        task.delay(2**63 - 1, "a")
    assert caught.value.requested == 2**63 - 1
    on_both.budget.set("tenant:a", limit=2**63 - 1)
    task.delay(2**63 - 1, "a")
    assert on_both.amounts("tenant:a") == (2**63 - 1, 0, 0)


def test_an_unknown_budget_is_named(on_both: Shop) -> None:
    task = declare(on_both)
    before = on_both.ledger()
    with pytest.raises(UnknownBudget, match="tenant:nobody") as caught:
        task.delay(6, "nobody")
    assert caught.value.budget == "tenant:nobody"
    assert on_both.ledger() == before
    on_both.relay()
    assert on_both.received() == []


@pytest.mark.parametrize(
    ("budget", "error"),
    [
        (lambda tenant: None, InvalidName),
        (lambda tenant: "", InvalidName),
        (lambda tenant: "x" * 256, InvalidName),
        (lambda tenant: "a\nb", InvalidName),
        (lambda tenant: 7, InvalidName),
        ("{tenant.name}", PolicyError),
        (lambda tenant: tenant["name"], PolicyError),
    ],
    ids=["None", "empty", "long", "control", "number", "template fails", "callable fails"],
)
def test_a_budgets_name_that_is_none(shop: Shop, budget: Any, error: type[BudgetError]) -> None:
    task = declare(shop, budget=budget)
    before = shop.ledger()
    with pytest.raises(error):
        task.delay(6, "a")
    assert shop.ledger() == before
    assert shop.received() == []


def test_a_request_that_does_not_fit(on_both: Shop) -> None:
    task = declare(on_both)
    task.delay(4, "a")
    on_both.relay()
    assert len(on_both.received()) == 1
    before = on_both.ledger("budget_refusals")
    with pytest.raises(BudgetExceeded) as caught:
        task.delay(7, "a")
    refusal = caught.value
    assert (refusal.budget, refusal.unit) == ("tenant:a", "tokens")
    assert (refusal.requested, refusal.available, refusal.limit) == (7, 6, 10)
    assert (refusal.reserved, refusal.spent) == (4, 0)
    assert on_both.ledger("budget_refusals") == before
    assert on_both.counts()["refused"] == 1
    on_both.relay()
    assert on_both.received() == []
    # It is not remembered: what fits is admitted, by the same id as well.
    task.apply_async((6, "a"), request_id="r")


def test_a_budget_below_what_is_used_already(on_both: Shop) -> None:
    task = declare(on_both)
    task.delay(8, "a")
    on_both.budget.set("tenant:a", limit=5)
    with pytest.raises(BudgetExceeded) as caught:
        task.delay(1, "a")
    assert caught.value.available == -3


def test_other_arguments_under_the_same_request_id(on_both: Shop) -> None:
    task = declare(on_both)
    task.apply_async((3, "a"), request_id="r")
    before = on_both.ledger()
    with pytest.raises(RequestConflict) as caught:
        task.apply_async((4, "a"), request_id="r")
    assert (caught.value.request_id, caught.value.owner) == ("r", "tenant:a")
    assert on_both.ledger() == before
    on_both.relay()
    assert len(on_both.received()) == 1


ERRORS = [
    BudgetExceeded("tenant:a", "tokens", 7, 6, 10, 4, 0, "held", 10),
    BudgetExceeded("tenant:ä", "µ-usd", 2**63 - 1, -3, 2**63 - 1, 8, 2**62, "exhausted", 5),
    UnknownBudget("tenant:nobody"),
    RequestConflict("r", "tenant:a", "task"),
    RequestNotRun("task", "expired"),
    AttemptLost("task"),
    StoreError("the ledger's database failed", True),
    InvalidAmount("-1 is no amount"),
    PolicyError("wrong"),
    SchemaError("old"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickle(error: BudgetError) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_same(pickle.loads(pickle.dumps(error, protocol)), error)  # noqa: S301 - ours


def assert_same(found: BaseException, error: BudgetError) -> None:
    assert type(found) is type(error)
    assert found.args == error.args
    assert vars(found) == vars(error)
    assert str(found) == str(error)


@pytest.mark.parametrize("backend", ["redis", "file"])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.redis
def test_errors_survive_result_backends(
    make_shop: Callable[..., Shop],
    redis_url: str,
    tmp_path: Path,
    backend: str,
    serializer: str,
) -> None:
    (tmp_path / "results").mkdir()
    shop = make_shop(
        init=False,
        result_backend=redis_url if backend == "redis" else f"file://{tmp_path}/results",
        result_serializer=serializer,
        accept_content=["json", "pickle"],
    )
    for number, error in enumerate(ERRORS):
        try:
            raise error
        except BudgetError:
            shop.app.backend.mark_as_failure(str(number), error)
        result = shop.app.AsyncResult(str(number))
        with pytest.raises(type(error)) as caught:
            result.get(timeout=10)
        assert_same(caught.value, error)


# A store or a broker that is down.


@pytest.mark.postgres
def test_a_store_that_goes_down_is_an_error_and_no_message(
    make_shop: Callable[..., Shop], own_postgres: PostgresServer
) -> None:
    shop = make_shop(budget_database_url=own_postgres.create_database())
    task = declare(shop)
    task.delay(1, "a")
    own_postgres.kill()
    for publish in (
        lambda: task.delay(1, "a"),
        lambda: task.apply_async((1, "a"), request_id="r"),
        lambda: chain(task.s(1, "a"), task.s("a")).apply_async(),
    ):
        start = time.monotonic()
        with pytest.raises(StoreError) as caught:
            publish()
        assert caught.value.retryable
        assert time.monotonic() - start < 5
    assert shop.received() == []
    own_postgres.restart()
    assert shop.amounts("tenant:a") == (1, 0, 9)
    task.delay(1, "a")
    shop.relay()
    assert len(shop.received()) == 2


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("postgresql+psycopg://nobody@127.0.0.1:1/none", StoreError),
        ("sqlite:////nowhere/at/all/budget.db", StoreError),
    ],
    ids=["postgresql", "sqlite"],
)
def test_a_store_that_cannot_be_reached(
    make_shop: Callable[..., Shop], url: str, error: type[BudgetError]
) -> None:
    shop = make_shop(init=False, budget_database_url=url)
    start = time.monotonic()
    with pytest.raises(error):
        declare(shop).delay(1, "a")
    assert time.monotonic() - start < 5
    assert shop.received() == []


def test_a_ledger_without_tables_says_what_to_do(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(init=False)
    with pytest.raises(SchemaError, match="budget init"):
        declare(shop).delay(1, "a")
    assert shop.received() == []


def assert_accepted_and_published_later(shop: Shop, up: Callable[[], object]) -> None:
    task = declare(shop)
    start = time.monotonic()
    result = task.delay(4, "a")
    task.apply_async((2, "a"), countdown=0, priority=3)
    assert time.monotonic() - start < 3
    assert shop.amounts("tenant:a") == (6, 0, 4)
    relayed = shop.relay()
    assert (relayed.published, relayed.broker_down) == (0, True)
    up()
    eventually(shop.relay, lambda relayed: relayed.published == 2, 30, "both messages")
    ids = {message.headers["id"] for message in shop.received()}
    assert len(ids) == 2
    assert result.id in ids
    shop.publisher.reset()


@pytest.mark.redis
def test_with_redis_down_a_request_is_accepted_and_published_later(
    make_shop: Callable[..., Shop], own_redis: RedisServer
) -> None:
    shop = make_shop(broker_url=own_redis.url)
    own_redis.kill()
    assert_accepted_and_published_later(shop, own_redis.restart)


@pytest.mark.rabbitmq
@pytest.mark.slow
def test_with_rabbitmq_down_a_request_is_accepted_and_published_later(
    make_shop: Callable[..., Shop], own_rabbitmq: RabbitServer
) -> None:
    shop = make_shop(broker_url=own_rabbitmq.create_vhost())
    own_rabbitmq.kill()
    assert_accepted_and_published_later(shop, own_rabbitmq.restart)


# Publications that cannot be budgeted.


def test_what_runs_unbudgeted_bodies_inside_another_message_passes(shop: Shop) -> None:
    plain = shop.app.task(name="refused.plain", shared=False)(unbudgeted)
    plain.map([1, 2]).delay()
    plain.chunks([(1,), (2,)], 1).apply_async()
    assert len(shop.received()) == 3
    assert shop.counts()["admitted"] == 0


def test_task_protocol_1_is_refused(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(task_protocol=1)
    task = declare(shop)
    plain = shop.app.task(name="refused.plain", shared=False)(unbudgeted)
    before = shop.ledger()
    with pytest.raises(UnsupportedPublication, match="task_protocol"):
        task.delay(1, "a")
    assert shop.ledger() == before
    assert shop.received() == []
    plain.delay(1)
    assert len(shop.received()) == 1


def test_a_header_that_cannot_be_stored_is_refused(shop: Shop) -> None:
    task = declare(shop)
    before = shop.ledger()
    with pytest.raises(UnsupportedPublication, match="cannot be stored"):
        task.apply_async((1, "a"), headers={"odd": object()})
    assert shop.ledger() == before


def test_arguments_that_cannot_be_serialized_are_refused(shop: Shop) -> None:
    from kombu.exceptions import EncodeError

    task = declare(shop, estimate=1)
    before = shop.ledger()
    with pytest.raises(EncodeError):
        task.delay(object(), "a")
    assert shop.ledger() == before
