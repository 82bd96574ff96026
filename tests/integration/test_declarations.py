"""A declared task is budgeted, and otherwise what it was, wherever the decorator stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, chain, group

from celery_budget import BudgetedTask, CeleryBudget, budgeted
from celery_budget.errors import NotInstalled, PolicyError
from celery_budget.integration.context import installed_on
from tests.integration.placements import (
    BUDGET,
    NAME,
    PLACEMENTS,
    above_shared,
    above_task,
    alone,
    beneath_shared,
    beneath_task,
    budgeted_instance,
    class_based,
    fresh,
    with_base,
    with_shared_base,
)
from tests.integration.support import Shop, current, make_app, received, reservation_of

by_placement = pytest.mark.parametrize("declare", PLACEMENTS, ids=lambda one: one.__name__)


@by_placement
@pytest.mark.parametrize(
    "order", ["tasks first", "budget first", "after finalize", "amqp was read"]
)
def test_a_declared_task_is_reserved_wherever_it_is_published_from(
    declare: Callable[[Celery], Any], order: str, sqlite_url: str
) -> None:
    app = make_app(budget=order == "budget first", budget_database_url=sqlite_url)
    with current(app):
        task = declare(app) if order != "budget first" else None
        if order == "after finalize":
            app.finalize()
        if order == "amqp was read":
            assert app.amqp.send_task_message
        if order != "budget first":
            CeleryBudget(app)
        else:
            task = declare(app)
        shop = Shop(app, installed_on(app))
        shop.budget.init()
        shop.budget.set("tenant:a", limit=10, unit="tokens")
        assert task is not None
        task.delay(1, "a")
        task.delay(size=1, tenant="a")
        task.s("a").apply_async((1,))
        task.si(1, "a").delay()
        task.apply_async((1, "a"), {"extra": 2}, countdown=0)
        app.send_task(NAME, (1, "a"))
        group(task.s(1, "a"), task.s(1, "a")).apply_async()
        chain(task.s(1, "a"), task.s("a")).apply_async()
        assert shop.amounts("tenant:a") == (9, 0, 1)
        shop.relay()
        messages = shop.received()
        reservations = {reservation_of(message) for message in messages}
        assert len(messages) == len(reservations - {None}) == 9
        assert {message.headers["task"] for message in messages} == {NAME}
    shop.close()


@by_placement
def test_what_a_declared_task_is_otherwise_stays(
    declare: Callable[[Celery], Any], shop: Shop
) -> None:
    with current(shop.app):
        task = declare(shop.app)
        assert (task.name, task.acks_late) == (NAME, True)
        assert isinstance(shop.task(NAME), BudgetedTask)
        # Called directly it is the function, under no budget.
        assert task(3, "a", extra=4) == 7
        assert task.run(3, "a", extra=4) == 7
        assert task.s(3, "a").task == NAME
        if declare is not class_based and declare is not budgeted_instance:
            assert task.__name__ == "draft"
        assert shop.counts()["admitted"] == 0


@by_placement
def test_wrong_arguments_are_celerys_type_error(
    declare: Callable[[Celery], Any], shop: Shop
) -> None:
    with current(shop.app):
        task = declare(shop.app)
        before = shop.ledger()
        # Celery checks no arguments of class-based tasks; there it is we who find out.
        errors: tuple[type[Exception], ...] = (TypeError,)
        if declare in (class_based, budgeted_instance):
            errors = (PolicyError,)
        for args, kwargs in [((), {}), ((1,), {}), ((1, "a", 2, 3), {}), ((1, "a"), {"no": 1})]:
            with pytest.raises(errors) as found:
                task.apply_async(args, kwargs)
            if errors == (TypeError,):
                assert type(found.value) is TypeError
                assert str(found.value).startswith("draft() ")
        assert shop.ledger() == before
        assert shop.received() == []


def test_alone_is_a_shared_task_of_each_application(tmp_path: Path) -> None:
    @budgeted(name=NAME, **BUDGET)
    def draft(size: int, tenant: str) -> int:
        return size

    shops = []
    for number in range(2):
        app = make_app(f"app{number}", budget_database_url=f"sqlite:///{tmp_path}/{number}.db")
        shop = Shop(app, installed_on(app))
        shop.budget.init()
        shop.budget.set("tenant:a", limit=10, unit="tokens")
        shops.append(shop)
    for number, shop in enumerate(shops):
        with current(shop.app):
            draft.delay(3 + number, "a")
            assert draft.app is shop.app
    assert [shop.amounts("tenant:a")[0] for shop in shops] == [3, 4]
    for shop in shops:
        shop.relay()
        assert len(shop.received()) == 1
        shop.close()


@pytest.mark.parametrize("declare", [above_shared, beneath_shared, with_shared_base, alone])
def test_a_shared_task_is_budgeted_in_applications_made_before_and_after(
    declare: Callable[[Celery], Any], tmp_path: Path
) -> None:
    def make(name: str) -> Shop:
        app = make_app(name, budget_database_url=f"sqlite:///{tmp_path}/{name}.db")
        shop = Shop(app, installed_on(app))
        shop.budget.init()
        shop.budget.set("tenant:a", limit=10, unit="tokens")
        return shop

    finalized = make("finalized")
    finalized.app.finalize()
    open_ = make("open")
    with current(open_.app):
        task = declare(open_.app)
    later = make("later")
    for shop in (finalized, open_, later):
        # By the proxy, by the registry and by name.
        with current(shop.app):
            task.delay(1, "a")
        shop.task(NAME).delay(1, "a")
        shop.app.send_task(NAME, (1, "a"))
        assert shop.amounts("tenant:a") == (3, 0, 7)
        shop.close()


@pytest.mark.parametrize("declare", [above_task, beneath_task, with_base])
def test_an_apps_task_that_celery_shares_with_others_is_budgeted_there_too(
    declare: Callable[[Celery], Any], make_shop: Callable[..., Shop]
) -> None:
    # @app.task(shared=True), the default, makes the task in applications that are finalized later.
    first = make_app("first")
    declare(first)
    first.finalize()
    other = make_shop()
    other.task(NAME).delay(3, "a")
    assert other.amounts("tenant:a") == (3, 0, 7)


@by_placement
def test_without_a_celery_budget_nothing_is_published(declare: Callable[[Celery], Any]) -> None:
    app = make_app(budget=False)
    with current(app):
        task = declare(app)
        plain = app.task(name="declared.plain")(fresh())
        # Beneath @app.task the mark is seen when the application is finalized, not before.
        app.finalize()
        publications: list[Callable[[], Any]] = [
            lambda: task.delay(1, "a"),
            lambda: task.apply_async((1, "a")),
            lambda: task.s(1, "a").delay(),
            lambda: group(task.s(1, "a"), task.s(2, "a")).apply_async(),
            lambda: chain(task.s(1, "a"), plain.s("a")).apply_async(),
        ]
        for publish in publications:
            with pytest.raises(NotInstalled, match="CeleryBudget"):
                publish()
    assert received(app, app.conf.task_default_queue) == []
    app.close()


def test_a_base_class_without_a_budget_is_an_error(shop: Shop) -> None:
    """Forgetting the budget must not lift it."""
    task = shop.app.task(name="declared.free", base=BudgetedTask)(fresh())
    before = shop.ledger()
    for publish in (task.delay, lambda *args: shop.app.send_task("declared.free", args)):
        with pytest.raises(PolicyError, match=r"declared\.free .* neither budget= nor estimate="):
            publish(1, "a")
    assert shop.received() == []
    assert shop.ledger() == before


def test_task_options_above_a_decorator_are_an_error(shop: Shop) -> None:
    with pytest.raises(PolicyError, match="does not take acks_late above a task decorator"):
        budgeted(**BUDGET, acks_late=True)(shop.app.task(name=NAME)(fresh()))


def test_a_call_of_its_own_stays_beneath_the_claim(shop: Shop) -> None:
    """A class's ``__call__`` that does not call the next one must not run work unclaimed."""

    class Loud(shop.app.Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs) + 100

    task = budgeted(**BUDGET)(shop.app.task(name=NAME, base=Loud)(fresh()))
    order = [cls.__name__ for cls in type(shop.task(NAME)).__mro__]
    assert order.index("BudgetedTask") < order.index("Loud")
    assert task(1, "a") == 101


def test_a_request_class_of_its_own_is_kept(shop: Shop) -> None:
    class Own(shop.app.Task):
        Request = "celery_budget.integration.worker:BudgetRequest"

    budgeted(**BUDGET)(shop.app.task(name=NAME, base=Own)(fresh()))
    assert shop.task(NAME).Request == Own.Request


@pytest.mark.parametrize("own", [Task, BudgetedTask], ids=["a task", "a budgeted task"])
def test_alone_takes_a_base_class(own: type[Any], shop: Shop) -> None:
    class Base(own):
        abstract = True
        mine = True

    with current(shop.app):
        task = budgeted(name=NAME, base=Base, **BUDGET)(fresh())
        task.delay(2, "a")
        assert task.mine
        assert isinstance(shop.task(NAME), BudgetedTask)
    assert shop.amounts("tenant:a") == (2, 0, 8)


def test_another_task_of_the_same_function_stays_without_a_budget(shop: Shop) -> None:
    function = fresh()
    budgeted(**BUDGET)(shop.app.task(name=NAME)(function))
    free = shop.app.task(name="declared.free")(function)
    assert isinstance(shop.task(NAME), BudgetedTask)
    free.delay(2, "a")
    assert not isinstance(shop.task("declared.free"), BudgetedTask)
    assert shop.amounts("tenant:a") == (0, 0, 10)
